"""Gemma 3 (text): five layers with a window, then one layer of full attention, and so on.

Layers with a window rotate at their own base. Blocks have pre-norms and post-norms, whose weights
are stored as gamma - 1, and QK norm; token embeddings are multiplied by sqrt(dim) and tied to the
head. From 4b on, linear rope scaling extends the context of the layers without a window.

Sources: Gemma 3 Technical Report, arXiv:2503.19786; the configuration class of transformers and the
released configurations.
"""

from collections.abc import Mapping
from typing import Any

from dtron.errors import CheckpointError
from dtron.models.config import DecoderConfig
from dtron.models.hf import (
    CONTEXT,
    FULL,
    LLAMA_FIELDS,
    LLAMA_IGNORED_TENSORS,
    LLAMA_NAMES,
    SLIDING,
    HuggingFace,
    KeyConverter,
    Multimodal,
    WeightName,
    optional_key,
    read_rope,
    read_windows,
    write_rope,
    write_windows,
)
from dtron.models.spec import ModelSpec

_THETA, _LOCAL_THETA = 1000000.0, 10000.0

_ARCHITECTURE: dict[str, Any] = {
    "activation": "geglu",
    "norm": "rmsnorm",
    "norm_zero_centered": True,
    "sandwich_norms": True,
    "qk_norm": True,
    "positions": "rope",
    "scale_embeddings": True,
}
_ALL: dict[str, Any] = {
    **_ARCHITECTURE,
    "norm_eps": 1e-6,
    "rope_theta": _THETA,
    "rope_local_theta": _LOCAL_THETA,
    "tied": True,
}


def _gemma3(
    dim: int, n_layers: int, n_heads: int, n_kv_heads: int, ffn_dim: int, **others: Any
) -> DecoderConfig:
    settings = {"vocab_size": 262144, "head_dim": 256, "query_pre_attn_scalar": 256, "window": 512}
    return DecoderConfig(
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        ffn_dim=ffn_dim,
        full_attention_every=6,
        **{**settings, **_ALL, **others},
    )


_LONG: dict[str, Any] = {"vocab_size": 262208, "window": 1024}
_LONG |= {"rope_scaling": "linear", "rope_scaling_factor": 8.0}

SIZES = {
    "debug": DecoderConfig(
        vocab_size=264,
        dim=128,
        n_layers=6,
        n_heads=8,
        n_kv_heads=4,
        head_dim=32,
        ffn_dim=256,
        query_pre_attn_scalar=32,
        window=64,
        full_attention_every=3,
        **_ALL,
    ),
    "270m": _gemma3(640, 18, 4, 1, 2048),
    "1b": _gemma3(1152, 26, 4, 1, 6912),
    "4b": _gemma3(2560, 34, 8, 4, 10240, **_LONG),
    "12b": _gemma3(3840, 48, 16, 8, 15360, **_LONG),
    "27b": _gemma3(
        5376, 62, 32, 16, 21504, **{**_LONG, "head_dim": 128, "query_pre_attn_scalar": 168}
    ),
}


def _read_layers(given: Mapping[str, Any]) -> dict[str, Any]:
    """Read windows, and rotary embeddings by kind of layer, of transformers 4 or 5."""
    pattern = given.get("sliding_window_pattern", given.get("_sliding_window_pattern", 6))
    fields = read_windows(given, 4096, pattern)
    by_kind = given.get("rope_parameters") or {}
    if unknown := sorted(set(by_kind) - {FULL, SLIDING}):
        raise CheckpointError(
            f"rope_parameters has {', '.join(unknown)}, but those of dtron's gemma3 are by kind of "
            f"layer; use {FULL} and {SLIDING}"
        )
    fields |= read_rope({**given, "rope_parameters": by_kind.get(FULL)}, _THETA)
    if not fields["window"]:
        return fields
    theta = given.get("rope_local_base_freq")
    local = read_rope({"rope_parameters": by_kind.get(SLIDING), "rope_theta": theta}, _LOCAL_THETA)
    if "rope_scaling" in local:
        raise CheckpointError(
            f"rope_parameters of {SLIDING} scale frequencies, which is not supported; dtron's "
            "gemma3 scales those of full_attention only"
        )
    theta = local["rope_theta"]
    same = theta == fields["rope_theta"] and "rope_scaling" not in fields
    return {**fields, "rope_local_theta": 0.0 if same else theta}


def _write_layers(config: DecoderConfig) -> dict[str, Any]:
    older = write_rope(config)
    theta = config.rope_local_theta or (config.rope_theta if config.window else _LOCAL_THETA)
    local = {"rope_type": "default", "rope_theta": theta}
    older["rope_parameters"] = {FULL: older["rope_parameters"], SLIDING: local}
    return {**write_windows(config, 4096), **older, "rope_local_base_freq": theta}


_LAYER_KEYS = """
    sliding_window sliding_window_pattern _sliding_window_pattern layer_types rope_theta
    rope_local_base_freq rope_scaling rope_parameters
"""

GEMMA_NAMES = (
    WeightName("blocks.*.attn_post_norm", "model.layers.*.post_attention_layernorm"),
    WeightName("blocks.*.ffn_norm", "model.layers.*.pre_feedforward_layernorm"),
    WeightName("blocks.*.ffn_post_norm", "model.layers.*.post_feedforward_layernorm"),
    *(name for name in LLAMA_NAMES if name.ours != "blocks.*.ffn_norm"),
)

HF = HuggingFace(
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    names=GEMMA_NAMES,
    fields={
        **LLAMA_FIELDS,
        "head_dim": "head_dim",
        "num_key_value_heads": "n_kv_heads",
        "query_pre_attn_scalar": "query_pre_attn_scalar",
    },
    base=_ARCHITECTURE,
    fixed={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False,),
        "use_bidirectional_attention": (False, None),
        # transformers 5 reads this key, but does not apply the cap
        "attn_logit_softcapping": (None,),
    },
    # of the configuration class: released configs of 4b to 27b omit most keys
    defaults={
        "vocab_size": 262208,
        "num_attention_heads": 8,
        "head_dim": 256,
        "num_key_value_heads": 4,
        "query_pre_attn_scalar": 256,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
    },
    converters=(
        KeyConverter(frozenset(_LAYER_KEYS.split()), _read_layers, _write_layers),
        CONTEXT,
        optional_key("final_logit_softcapping", "logit_softcap"),
    ),
    ignored_keys=frozenset({"cache_implementation"}),
    ignored_tensors=LLAMA_IGNORED_TENSORS,
    zero_centered=True,
    inside=Multimodal(
        "gemma3", "language_model.model.", ("vision_tower.", "multi_modal_projector.")
    ),
)

GEMMA3 = ModelSpec("gemma3", SIZES, hf=HF)
