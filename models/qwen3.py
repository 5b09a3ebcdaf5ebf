"""Qwen3: Llama's block with QK norm, and heads of 128 at any model width.

Source: Qwen3 Technical Report, arXiv:2505.09388, table 1, and the released configurations.
"""

from collections.abc import Mapping
from typing import Any

from dtron.errors import CheckpointError
from dtron.models.config import DecoderConfig
from dtron.models.hf import (
    LLAMA_BASE,
    LLAMA_DEFAULTS,
    LLAMA_FIELDS,
    LLAMA_IGNORED_TENSORS,
    LLAMA_NAMES,
    HuggingFace,
    KeyConverter,
    llama_converters,
)
from dtron.models.spec import ModelSpec


def _qwen3(
    dim: int, n_layers: int, n_heads: int, ffn_dim: int, tied: bool = False
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=151936,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=8,
        head_dim=128,
        ffn_dim=ffn_dim,
        norm_eps=1e-6,
        qk_norm=True,
        rope_theta=1000000.0,
        tied=tied,
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
        norm_eps=1e-6,
        qk_norm=True,
        rope_theta=1000000.0,
        tied=True,
    ),
    "0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "8b": _qwen3(4096, 36, 32, 12288),
    "14b": _qwen3(5120, 40, 40, 17408),
    "32b": _qwen3(5120, 64, 64, 25600),
}

_WINDOWS = frozenset({"use_sliding_window", "sliding_window", "max_window_layers", "layer_types"})


def _read_window(given: Mapping[str, Any]) -> dict[str, Any]:
    """Read the window from layer_types, or from max_window_layers (transformers 4)."""
    if not given.get("use_sliding_window", False) or given.get("sliding_window") is None:
        return {"window": 0}
    n_layers = given["num_hidden_layers"]
    full = given.get("max_window_layers", 28)
    kinds = given.get("layer_types") or [
        "sliding_attention" if layer >= full else "full_attention" for layer in range(n_layers)
    ]
    if len(set(kinds)) > 1:
        raise CheckpointError(
            f"sliding_window = {given['sliding_window']} in only some layers is not supported by "
            "dtron's qwen3"
        )
    return {"window": given["sliding_window"] if kinds[0] == "sliding_attention" else 0}


def _write_window(config: DecoderConfig) -> dict[str, Any]:
    kind = "sliding_attention" if config.window else "full_attention"
    return {
        "use_sliding_window": bool(config.window),
        "sliding_window": config.window or None,
        "max_window_layers": 0 if config.window else config.n_layers,
        "layer_types": [kind] * config.n_layers,
    }


HF = HuggingFace(
    model_type="qwen3",
    architecture="Qwen3ForCausalLM",
    names=LLAMA_NAMES,
    fields=LLAMA_FIELDS,
    base={**LLAMA_BASE, "qk_norm": True},
    fixed={"hidden_act": ("silu", "swish"), "attention_bias": (False,)},
    defaults=LLAMA_DEFAULTS,
    converters=(*llama_converters(), KeyConverter(_WINDOWS, _read_window, _write_window)),
    ignored_tensors=LLAMA_IGNORED_TENSORS,
)

QWEN3 = ModelSpec("qwen3", SIZES, hf=HF)
