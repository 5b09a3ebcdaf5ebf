"""Mixtral: Llama's block with 8 experts, 2 per token.

Expert weights are the softmax over all experts, renormalised over the 2 selected ones. An auxiliary
loss per micro-batch balances loads; its coefficient is that of the released configurations, 0.02
for 8x7b and 0.001 for 8x22b. The vocabulary of 8x22b is that of its first release.

Sources: Mixtral of Experts, arXiv:2401.04088, and the released configurations.
"""

from functools import partial
from typing import Any

from dtron.models.config import DecoderConfig
from dtron.models.hf import (
    LLAMA_ATTENTION,
    LLAMA_BASE,
    LLAMA_DEFAULTS,
    LLAMA_IGNORED_TENSORS,
    MOE_FIELDS,
    MOE_IGNORED_KEYS,
    HuggingFace,
    WeightName,
    llama_converters,
    optional_key,
    read_rope,
)
from dtron.models.spec import ModelSpec

_ALL: dict[str, Any] = {
    "norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "n_experts": 8,
    "experts_per_token": 2,
    "renormalize": True,
    "balance": "micro_batch",
}


def _mixtral(
    dim: int, n_layers: int, n_heads: int, expert_dim: int, balance: float
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=32000,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=8,
        expert_dim=expert_dim,
        balance_coefficient=balance,
        **_ALL,
    )


SIZES = {
    "debug": DecoderConfig(
        vocab_size=264,
        dim=128,
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        expert_dim=64,
        balance_coefficient=0.02,
        **_ALL,
    ),
    "8x7b": _mixtral(4096, 32, 32, 14336, balance=0.02),
    "8x22b": _mixtral(6144, 56, 48, 16384, balance=0.001),
}


_MOE = "model.layers.*.block_sparse_moe"

HF = HuggingFace(
    model_type="mixtral",
    architecture="MixtralForCausalLM",
    names=(
        *LLAMA_ATTENTION,
        WeightName("blocks.*.ffn.router", f"{_MOE}.gate"),
        *(
            WeightName(f"blocks.*.ffn.experts.{ours}", f"{_MOE}.experts.{{expert}}.{theirs}.weight")
            for ours, theirs in (("gate", "w1"), ("up", "w3"), ("down", "w2"))
        ),
    ),
    fields={
        **MOE_FIELDS,
        "intermediate_size": "expert_dim",
        "num_local_experts": "n_experts",
        "router_jitter_noise": "jitter",
    },
    base={**LLAMA_BASE, "renormalize": True},
    fixed={"hidden_act": ("silu", "swish")},
    defaults={**LLAMA_DEFAULTS, "rms_norm_eps": 1e-5, "router_jitter_noise": 0.0},
    converters=(
        *llama_converters(partial(read_rope, default_theta=1e6)),
        optional_key("sliding_window", "window"),
    ),
    ignored_keys=MOE_IGNORED_KEYS,
    ignored_tensors=LLAMA_IGNORED_TENSORS,
)

MIXTRAL = ModelSpec("mixtral", SIZES, hf=HF)
