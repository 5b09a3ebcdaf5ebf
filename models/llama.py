"""Llama 3: grouped-query attention, SwiGLU, RMSNorm, rope with a context extended from 8192.

Sources: 3.1 8B, 70B, 405B: The Llama 3 Herd of Models, arXiv:2407.21783, table 3, and the released
configurations; 1B and 3B: the released configurations of Llama 3.2.
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


def _llama(
    dim: int, n_layers: int, n_heads: int, ffn_dim: int, scaling: float, tied: bool = False
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=128256,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=8,
        ffn_dim=ffn_dim,
        norm_eps=1e-5,
        rope_theta=500000.0,
        rope_scaling_factor=scaling,
        rope_low_freq_factor=1.0,
        rope_high_freq_factor=4.0,
        rope_original_context=8192,
        tied=tied,
    )


SIZES = {
    "debug": DecoderConfig(
        vocab_size=264,
        dim=128,
        n_layers=8,
        n_heads=8,
        n_kv_heads=4,
        ffn_dim=192,
        norm_eps=1e-5,
        rope_theta=500000.0,
    ),
    "1b": _llama(2048, 16, 32, 8192, scaling=32.0, tied=True),
    "3b": _llama(3072, 28, 24, 8192, scaling=32.0, tied=True),
    "8b": _llama(4096, 32, 32, 14336, scaling=8.0),
    "70b": _llama(8192, 80, 64, 28672, scaling=8.0),
    "405b": _llama(16384, 126, 128, 53248, scaling=8.0),
}


def _read_bias(given: Mapping[str, Any]) -> dict[str, Any]:
    attention, mlp = (bool(given.get(f"{kind}_bias", False)) for kind in ("attention", "mlp"))
    if attention != mlp:
        raise CheckpointError(
            f"attention_bias = {attention} with mlp_bias = {mlp} is not supported; dtron's llama "
            "has both or neither"
        )
    return {"bias": attention}


def _write_bias(config: DecoderConfig) -> dict[str, Any]:
    return {"attention_bias": config.bias, "mlp_bias": config.bias}


HF = HuggingFace(
    model_type="llama",
    architecture="LlamaForCausalLM",
    names=LLAMA_NAMES,
    fields=LLAMA_FIELDS,
    base=LLAMA_BASE,
    fixed={"hidden_act": ("silu", "swish")},
    defaults=LLAMA_DEFAULTS,
    converters=(
        *llama_converters(),
        KeyConverter(frozenset({"attention_bias", "mlp_bias"}), _read_bias, _write_bias),
    ),
    ignored_tensors=LLAMA_IGNORED_TENSORS,
)

LLAMA = ModelSpec("llama", SIZES, hf=HF)
