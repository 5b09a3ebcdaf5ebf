"""Qwen3.5 (text): three gated delta nets, then one layer of full attention, and so on.

Attention has QK norm, a sigmoid gate on its output, and rotates the first quarter of each head.
Norm weights are stored as gamma - 1, here and in transformers, except that of the gated norm.
Released weights hold one MTP block, with attention: `mtp = 1`. Sizes leave it out.

Sources: the configuration class of transformers (9b is its default), the released configurations,
and Gated Delta Networks, arXiv:2412.06464.
"""

from collections.abc import Mapping
from typing import Any

from dtron.errors import CheckpointError
from dtron.models.config import DecoderConfig
from dtron.models.hf import (
    LLAMA_ATTENTION,
    LLAMA_BASE,
    LLAMA_DEFAULTS,
    LLAMA_FFN,
    LLAMA_FIELDS,
    LLAMA_IGNORED_TENSORS,
    HuggingFace,
    KeyConverter,
    Multimodal,
    RowOrder,
    WeightName,
    llama_converters,
    read_rope,
    write_rope,
)
from dtron.models.spec import ModelSpec

HYBRID: dict[str, Any] = {
    "norm_eps": 1e-6,
    "norm_zero_centered": True,
    "qk_norm": True,
    "output_gate": True,
    "rope_theta": 10000000.0,
    "rope_fraction": 0.25,
    "full_attention_every": 4,
}
"""Fields that all released sizes share, with experts or without."""


def _qwen3_5(
    dim: int,
    n_layers: int,
    n_heads: int,
    n_kv_heads: int,
    ffn_dim: int,
    value_heads: int,
    tied: bool = False,
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=248320,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=256,
        ffn_dim=ffn_dim,
        delta_key_heads=16,
        delta_value_heads=value_heads,
        delta_key_dim=128,
        delta_value_dim=128,
        tied=tied,
        **HYBRID,
    )


SIZES = {
    "debug": DecoderConfig(
        vocab_size=264,
        dim=128,
        n_layers=8,
        n_heads=8,
        n_kv_heads=4,
        head_dim=32,
        ffn_dim=192,
        delta_key_heads=8,
        delta_value_heads=16,
        delta_key_dim=16,
        delta_value_dim=16,
        tied=True,
        **HYBRID,
    ),
    "0.8b": _qwen3_5(1024, 24, 8, 2, 3584, 16, tied=True),
    "4b": _qwen3_5(2560, 32, 16, 4, 9216, 32, tied=True),
    "9b": _qwen3_5(4096, 32, 16, 4, 12288, 32),
    "27b": _qwen3_5(5120, 64, 24, 4, 17408, 48),
}

_DELTA, _FULL = "linear_attention", "full_attention"


def _read_layers(given: Mapping[str, Any]) -> dict[str, Any]:
    """Read n from layer_types or full_attention_interval: every n-th layer has full attention."""
    n_layers = given["num_hidden_layers"]
    every = given.get("full_attention_interval", 4)
    kinds = given.get("layer_types")
    if kinds:
        every = kinds.index(_FULL) + 1 if _FULL in kinds else 0
    wanted = [_FULL if every and (i + 1) % every == 0 else _DELTA for i in range(n_layers)]
    if (kinds and kinds != wanted) or not 1 < every <= n_layers:
        found = f"layer_types = {kinds}" if kinds else f"full_attention_interval = {every}"
        raise CheckpointError(
            f"{found} with num_hidden_layers = {n_layers} is not supported; in dtron's Qwen3.5 "
            "every n-th layer has full attention, and the others are linear_attention"
        )
    return {"full_attention_every": every}


def _write_layers(config: DecoderConfig) -> dict[str, Any]:
    kinds = [_DELTA if kind.recurrent else _FULL for kind in config.layer_kinds[: config.n_layers]]
    return {"layer_types": kinds, "full_attention_interval": config.full_attention_every}


def _read_rope(given: Mapping[str, Any]) -> dict[str, Any]:
    """Read the rotary embedding. Sections of the angles for images are equal for text."""
    rope = dict(given.get("rope_parameters") or {})
    for key in ("mrope_section", "mrope_interleaved"):
        rope.pop(key, None)
    fraction = rope.pop("partial_rotary_factor", given.get("partial_rotary_factor", 0.25))
    fields = read_rope({**given, "rope_parameters": rope})
    return {**fields, "rope_fraction": float(fraction)}


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    newer = write_rope(config)["rope_parameters"]
    return {"rope_parameters": {**newer, "partial_rotary_factor": config.rope_fraction}}


_ROPE = KeyConverter(
    frozenset({"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor"}),
    _read_rope,
    _write_rope,
)


def _by_head(i: int) -> RowOrder:
    """Return a RowOrder: queries (i = 0) or gates (i = 1), which alternate by head."""

    def rows(config: DecoderConfig, n_rows: int) -> list[int]:
        size = config.head_size
        return [row // size * 2 * size + i * size + row % size for row in range(n_rows)]

    return rows


def _by_key_head(config: DecoderConfig, n_rows: int) -> list[int]:
    """Return the rows of queries, keys and values by key head, in [all q, all k, all v]."""
    groups, key = config.delta_key_heads, config.delta_key_dim
    value = config.delta_value_heads // groups * config.delta_value_dim
    keys = groups * key
    rows = []
    for group in range(groups):
        rows += range(group * key, (group + 1) * key)
        rows += range(keys + group * key, keys + (group + 1) * key)
        rows += range(2 * keys + group * value, 2 * keys + (group + 1) * value)
    return rows


def _read_mtp(given: Mapping[str, Any]) -> dict[str, Any]:
    """Read the number of MTP layers: one, since dtron gives each its own merge."""
    if (mtp := given.get("mtp_num_hidden_layers", 0)) not in (0, 1):
        raise CheckpointError(f"mtp_num_hidden_layers = {mtp} is not supported; use 0 or 1")
    return {"mtp": mtp}


def _write_mtp(config: DecoderConfig) -> dict[str, Any]:
    return {"mtp_num_hidden_layers": config.mtp}


_LINEAR = "model.layers.*.linear_attn"

HYBRID_NAMES = (
    WeightName("blocks.*.attn.wq", "model.layers.*.self_attn.q_proj", rows=_by_head(0)),
    WeightName("blocks.*.attn.wg", "model.layers.*.self_attn.q_proj", rows=_by_head(1)),
    WeightName("blocks.*.delta.w_qkv", f"{_LINEAR}.in_proj_qkv", rows=_by_key_head),
    WeightName("blocks.*.delta.w_z", f"{_LINEAR}.in_proj_z"),
    WeightName("blocks.*.delta.w_a", f"{_LINEAR}.in_proj_a"),
    WeightName("blocks.*.delta.w_b", f"{_LINEAR}.in_proj_b"),
    WeightName("blocks.*.delta.core.conv", f"{_LINEAR}.conv1d.weight", rows=_by_key_head),
    WeightName("blocks.*.delta.core.a_log", f"{_LINEAR}.A_log"),
    WeightName("blocks.*.delta.core.dt_bias", f"{_LINEAR}.dt_bias"),
    WeightName("blocks.*.delta.gated_norm.gamma", f"{_LINEAR}.norm.weight"),
    WeightName("blocks.*.delta.wo", f"{_LINEAR}.out_proj"),
    WeightName("blocks.*.token_norm", "mtp.pre_fc_norm_embedding"),
    WeightName("blocks.*.hidden_norm", "mtp.pre_fc_norm_hidden"),
    WeightName("blocks.*.merge", "mtp.fc"),
    WeightName("blocks.*.norm", "mtp.norm"),
    *(name for name in LLAMA_ATTENTION if name.ours != "blocks.*.attn.wq"),
)
"""Names of all parameters outside of feed-forward layers."""
HYBRID_KEYS: dict[str, Any] = {
    "base": {**LLAMA_BASE, "qk_norm": True, "output_gate": True, "norm_zero_centered": True},
    "fixed": {
        "hidden_act": ("silu", "swish"),
        "attention_bias": (False,),
        "attn_output_gate": (True,),
        "mlp_only_layers": ([], None),
        "mtp_use_dedicated_embeddings": (False,),
    },
    "defaults": {**LLAMA_DEFAULTS, "linear_conv_kernel_dim": 4},
    "ignored_tensors": LLAMA_IGNORED_TENSORS,
    "zero_centered": True,
    "mtp_prefix": "mtp.",
}
"""Arguments of HuggingFace that models with experts and without share."""
HYBRID_FIELDS = {
    "linear_num_key_heads": "delta_key_heads",
    "linear_num_value_heads": "delta_value_heads",
    "linear_key_head_dim": "delta_key_dim",
    "linear_value_head_dim": "delta_value_dim",
    "linear_conv_kernel_dim": "delta_conv",
}
HYBRID_CONVERTERS = (
    _ROPE,
    *llama_converters()[1:],
    KeyConverter(
        frozenset({"layer_types", "full_attention_interval"}), _read_layers, _write_layers
    ),
    KeyConverter(frozenset({"mtp_num_hidden_layers"}), _read_mtp, _write_mtp),
)
HYBRID_IGNORED_KEYS = frozenset({"mamba_ssm_dtype"})  # transformers does not read it either


def language_model(outer: str) -> Multimodal:
    """Return the place of the language model in a folder of the multimodal `model_type` outer."""
    return Multimodal(outer, "model.language_model.", ("model.visual.",))


HF = HuggingFace(
    model_type="qwen3_5_text",
    architecture="Qwen3_5ForCausalLM",
    names=(*HYBRID_NAMES, *LLAMA_FFN),
    fields={**LLAMA_FIELDS, **HYBRID_FIELDS},
    converters=HYBRID_CONVERTERS,
    ignored_keys=HYBRID_IGNORED_KEYS,
    inside=language_model("qwen3_5"),
    **HYBRID_KEYS,
)

QWEN3_5 = ModelSpec("qwen3_5", SIZES, hf=HF)
