"""Qwen3 with experts: Qwen3's block with 128 experts, 8 per token.

An auxiliary loss balances loads, here per micro-batch. Qwen3 was trained with a loss over the
global batch, `model.override.balance = "global_batch"`.

Source: Qwen3 Technical Report, arXiv:2505.09388, table 2, and the released configurations.
"""

from collections.abc import Mapping
from typing import Any

from dtron.errors import CheckpointError
from dtron.models.config import DecoderConfig
from dtron.models.hf import (
    EXPERT_NAMES,
    LLAMA_ATTENTION,
    LLAMA_BASE,
    LLAMA_DEFAULTS,
    LLAMA_IGNORED_TENSORS,
    MOE_FIELDS,
    MOE_IGNORED_KEYS,
    HuggingFace,
    KeyConverter,
    WeightName,
    llama_converters,
)
from dtron.models.spec import ModelSpec

_ALL: dict[str, Any] = {
    "norm_eps": 1e-6,
    "qk_norm": True,
    "rope_theta": 1000000.0,
    "renormalize": True,
    "balance": "micro_batch",
    "balance_coefficient": 0.001,
}


def _qwen3_moe(
    dim: int, n_layers: int, n_heads: int, n_kv_heads: int, expert_dim: int
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=151936,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=128,
        n_experts=128,
        experts_per_token=8,
        expert_dim=expert_dim,
        **_ALL,
    )


SIZES = {
    "debug": DecoderConfig(
        vocab_size=264,
        dim=128,
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        head_dim=32,
        n_experts=16,
        experts_per_token=4,
        expert_dim=32,
        **_ALL,
    ),
    "30b-a3b": _qwen3_moe(2048, 48, 32, 4, 768),
    "235b-a22b": _qwen3_moe(4096, 94, 64, 4, 1536),
}


def _read_experts(given: Mapping[str, Any]) -> dict[str, Any]:
    """Read the number of experts: num_experts in transformers 4, num_local_experts in 5."""
    keys = ("num_experts", "num_local_experts")
    found = {given[key] for key in keys if given.get(key) is not None}
    if len(found) != 1:
        values = " and ".join(f"{key} = {given.get(key)}" for key in keys)
        raise CheckpointError(f"{values} do not give one number of experts")
    return {"n_experts": found.pop()}


def _write_experts(config: DecoderConfig) -> dict[str, Any]:
    return {"num_experts": config.n_experts, "num_local_experts": config.n_experts}


def _write_dense_width(config: DecoderConfig) -> dict[str, Any]:
    """Write intermediate_size, which released configs have although no layer uses it."""
    return {"intermediate_size": config.expert_dim * config.experts_per_token}


_WINDOWS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers"})


def _read_window(given: Mapping[str, Any]) -> dict[str, Any]:
    """Read the window, which all layers must use: transformers 5 ignores max_window_layers."""
    if not given.get("use_sliding_window", False):
        return {"window": 0}
    if first := given.get("max_window_layers", 0):
        raise CheckpointError(
            f"max_window_layers = {first}: a window in only some layers is not supported by "
            "dtron's qwen3_moe"
        )
    return {"window": given.get("sliding_window", 4096) or 0}


def _write_window(config: DecoderConfig) -> dict[str, Any]:
    return {
        "use_sliding_window": bool(config.window),
        "sliding_window": config.window or None,
        "max_window_layers": 0 if config.window else config.n_layers,
    }


HF = HuggingFace(
    model_type="qwen3_moe",
    architecture="Qwen3MoeForCausalLM",
    names=(
        *LLAMA_ATTENTION,
        WeightName("blocks.*.ffn.router", "model.layers.*.mlp.gate"),
        *EXPERT_NAMES,
    ),
    fields={
        **MOE_FIELDS,
        "moe_intermediate_size": "expert_dim",
        "norm_topk_prob": "renormalize",
    },
    base={**LLAMA_BASE, "qk_norm": True},
    fixed={
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "decoder_sparse_step": (1,),
        "mlp_only_layers": ([], None),
    },
    defaults={**LLAMA_DEFAULTS, "norm_topk_prob": False},
    converters=(
        *llama_converters(),
        KeyConverter(
            frozenset({"num_experts", "num_local_experts"}), _read_experts, _write_experts
        ),
        KeyConverter(frozenset({"intermediate_size"}), lambda given: {}, _write_dense_width),
        KeyConverter(_WINDOWS, _read_window, _write_window),
    ),
    ignored_keys=MOE_IGNORED_KEYS,
    ignored_tensors=LLAMA_IGNORED_TENSORS,
)

QWEN3_MOE = ModelSpec("qwen3_moe", SIZES, hf=HF)
