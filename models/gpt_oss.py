"""gpt-oss: experts with biases and clamped SwiGLU, attention sinks, a window in every other layer.

A token selects the 4 experts with the largest logits; their weights are the softmax of these
logits. YaRN is part of the model and does not round its bounds. The sources do not describe
training; the balance coefficient is that of the released configuration.

Sources: gpt-oss model card, arXiv:2508.10925, and the released configurations.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from dtron.errors import CheckpointError
from dtron.models.config import DecoderConfig
from dtron.models.hf import (
    LLAMA_ATTENTION,
    LLAMA_BASE,
    LLAMA_DEFAULTS,
    LLAMA_IGNORED_TENSORS,
    MOE_FIELDS,
    MOE_IGNORED_KEYS,
    HuggingFace,
    KeyConverter,
    RowOrder,
    WeightName,
    llama_converters,
    read_rope,
    read_windows,
    write_windows,
)
from dtron.models.spec import ModelSpec

_ALL: dict[str, Any] = {
    "activation": "clamped_swiglu",
    "norm_eps": 1e-5,
    "bias": True,
    "full_attention_every": 2,
    "sinks": True,
    "rope_theta": 150000.0,
    "rope_scaling": "yarn",
    "rope_scaling_factor": 32.0,
    "rope_original_context": 4096,
    "rope_truncate": False,
    "experts_per_token": 4,
    "router": "topk_softmax",
    "balance": "micro_batch",
    "balance_coefficient": 0.001,
}


def _gpt_oss(n_layers: int, n_experts: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=201088,
        dim=2880,
        n_layers=n_layers,
        n_heads=64,
        n_kv_heads=8,
        head_dim=64,
        window=128,
        n_experts=n_experts,
        expert_dim=2880,
        **_ALL,
    )


SIZES = {
    "debug": DecoderConfig(
        vocab_size=264,
        dim=128,
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        head_dim=16,
        window=16,
        n_experts=8,
        expert_dim=64,
        **_ALL,
    ),
    "20b": _gpt_oss(24, 32),
    "120b": _gpt_oss(36, 128),
}


def _read_rope(given: Mapping[str, Any]) -> dict[str, Any]:
    if "rope_scaling" not in given and "rope_parameters" not in given:
        raise CheckpointError(
            "neither rope_parameters (transformers 5) nor rope_scaling (transformers 4) is set"
        )
    return read_rope(given, default_theta=150000.0)


def _in_turn(i: int) -> RowOrder:
    """Return a RowOrder: the rows of gate (i = 0) or up (i = 1), which alternate in one matrix."""
    return lambda config, n_rows: range(i, 2 * n_rows, 2)


_EXPERTS = "model.layers.*.mlp.experts"

HF = HuggingFace(
    model_type="gpt_oss",
    architecture="GptOssForCausalLM",
    names=(
        *LLAMA_ATTENTION,
        WeightName("blocks.*.attn.sinks.weight", "model.layers.*.self_attn.sinks"),
        WeightName("blocks.*.ffn.router", "model.layers.*.mlp.router"),
        *(
            WeightName(
                f"blocks.*.ffn.experts.{w}", f"{_EXPERTS}.gate_up_proj", True, _in_turn(i), 1
            )
            for i, w in enumerate(("gate", "up"))
        ),
        *(
            WeightName(
                f"blocks.*.ffn.experts.{w}_bias",
                f"{_EXPERTS}.gate_up_proj_bias",
                rows=_in_turn(i),
                dim=1,
            )
            for i, w in enumerate(("gate", "up"))
        ),
        WeightName("blocks.*.ffn.experts.down", f"{_EXPERTS}.down_proj", transposed=True),
        WeightName("blocks.*.ffn.experts.down_bias", f"{_EXPERTS}.down_proj_bias"),
    ),
    fields={
        **MOE_FIELDS,
        "intermediate_size": "expert_dim",
        "num_local_experts": "n_experts",
    },
    base={
        **LLAMA_BASE,
        "activation": "clamped_swiglu",
        "bias": True,
        "sinks": True,
        "router": "topk_softmax",
    },
    fixed={
        "hidden_act": ("silu", "swish"),
        "attention_bias": (True,),
        "swiglu_alpha": (1.702,),
        "swiglu_limit": (7.0,),
    },
    defaults={**LLAMA_DEFAULTS, "rms_norm_eps": 1e-5},
    converters=(
        *llama_converters(_read_rope),
        KeyConverter(
            frozenset({"sliding_window", "layer_types"}),
            partial(read_windows, window=128, every=2),
            partial(write_windows, window=128),
        ),
    ),
    # released configurations repeat num_experts_per_tok and the original context as these keys
    ignored_keys=MOE_IGNORED_KEYS | {"experts_per_token", "initial_context_length"},
    ignored_tensors=LLAMA_IGNORED_TENSORS,
)

GPT_OSS = ModelSpec("gpt_oss", SIZES, hf=HF)
