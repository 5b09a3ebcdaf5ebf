"""Qwen3.5 with experts (text): every layer has routed experts and a gated shared expert.

    size         experts       active parameters    released models
    35b-a3b      8 of 256      3 B                  Qwen3.5-35B-A3B, Qwen3.6-35B-A3B
    122b-a10b    8 of 256      10 B                 Qwen3.5-122B-A10B
    397b-a17b    10 of 512     17 B                 Qwen3.5-397B-A17B

The router's weights are the softmax over all experts, divided by their sum over the selected ones.
An auxiliary loss balances loads, here per micro-batch, with transformers' coefficient.

Sources: the configuration class of transformers (35b-a3b is its default), the released
configurations, and the layouts of their expert weights: one tensor per expert, as transformers
writes them, or one tensor of all experts, with gate and up fused.
"""

from collections.abc import Mapping
from typing import Any

from dtron.errors import CheckpointError
from dtron.models.config import DecoderConfig
from dtron.models.hf import (
    EXPERT_NAMES,
    MOE_FIELDS,
    MOE_IGNORED_KEYS,
    HuggingFace,
    KeyConverter,
    RowOrder,
    WeightName,
)
from dtron.models.qwen3_5 import (
    HYBRID,
    HYBRID_CONVERTERS,
    HYBRID_FIELDS,
    HYBRID_IGNORED_KEYS,
    HYBRID_KEYS,
    HYBRID_NAMES,
    language_model,
)
from dtron.models.spec import ModelSpec

_ALL: dict[str, Any] = {
    **HYBRID,
    "n_shared_experts": 1,
    "shared_gate": True,
    "renormalize": True,
    "balance": "micro_batch",
    "balance_coefficient": 0.001,
}


def _qwen3_5_moe(
    dim: int,
    n_layers: int,
    n_heads: int,
    value_heads: int,
    n_experts: int,
    experts_per_token: int,
    expert_dim: int,
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=248320,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=2,
        head_dim=256,
        delta_key_heads=16,
        delta_value_heads=value_heads,
        delta_key_dim=128,
        delta_value_dim=128,
        n_experts=n_experts,
        experts_per_token=experts_per_token,
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
        delta_key_heads=8,
        delta_value_heads=16,
        delta_key_dim=16,
        delta_value_dim=16,
        n_experts=16,
        experts_per_token=4,
        expert_dim=32,
        **_ALL,
    ),
    "35b-a3b": _qwen3_5_moe(2048, 40, 16, 32, 256, 8, 512),
    "122b-a10b": _qwen3_5_moe(3072, 48, 32, 64, 256, 8, 1024),
    "397b-a17b": _qwen3_5_moe(4096, 60, 32, 64, 512, 10, 1024),
}


def _read_shared(given: Mapping[str, Any]) -> dict[str, Any]:
    """Read the width of the shared expert, in units of a routed expert's width."""
    width, unit = given.get("shared_expert_intermediate_size", 512), given["moe_intermediate_size"]
    if not width or width % unit:
        raise CheckpointError(
            f"shared_expert_intermediate_size = {width} is not a multiple of "
            f"moe_intermediate_size = {unit}, as dtron's model needs"
        )
    return {"n_shared_experts": width // unit}


def _write_shared(config: DecoderConfig) -> dict[str, Any]:
    return {"shared_expert_intermediate_size": config.n_shared_experts * config.expert_dim}


def _half(i: int) -> RowOrder:
    """Return a RowOrder: the first (i = 0) or second half of the rows of a fused matrix."""
    return lambda config, n_rows: range(i * n_rows, (i + 1) * n_rows)


_MLP = "model.layers.*.mlp"

HF = HuggingFace(
    model_type="qwen3_5_moe_text",
    architecture="Qwen3_5MoeForCausalLM",
    names=(
        *HYBRID_NAMES,
        WeightName("blocks.*.ffn.router", f"{_MLP}.gate"),
        *EXPERT_NAMES,
        WeightName("blocks.*.ffn.experts.gate", f"{_MLP}.experts.gate_up_proj", False, _half(0), 1),
        WeightName("blocks.*.ffn.experts.up", f"{_MLP}.experts.gate_up_proj", False, _half(1), 1),
        WeightName("blocks.*.ffn.experts.down", f"{_MLP}.experts.down_proj"),
        *(
            WeightName(f"blocks.*.ffn.shared.{w}", f"{_MLP}.shared_expert.{w}_proj")
            for w in ("gate", "up", "down")
        ),
        WeightName("blocks.*.ffn.shared_gate", f"{_MLP}.shared_expert_gate"),
    ),
    fields={
        **MOE_FIELDS,
        **HYBRID_FIELDS,
        "num_experts": "n_experts",
        "moe_intermediate_size": "expert_dim",
    },
    converters=(
        *HYBRID_CONVERTERS,
        KeyConverter(frozenset({"shared_expert_intermediate_size"}), _read_shared, _write_shared),
    ),
    ignored_keys=HYBRID_IGNORED_KEYS | MOE_IGNORED_KEYS,
    inside=language_model("qwen3_5_moe"),
    **{
        **HYBRID_KEYS,
        "base": {**HYBRID_KEYS["base"], "renormalize": True, "shared_gate": True},
    },
)

QWEN3_5_MOE = ModelSpec("qwen3_5_moe", SIZES, hf=HF)
