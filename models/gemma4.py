"""Gemma 4 (text): five layers with a window, then one layer of full attention, and so on.

Layers of full attention have wider heads, fewer of keys and values, no wv (keys, before norm and
rotation, are also the values), and rotate a quarter of the frequencies. Otherwise as Gemma 3, with
an unscaled q k^T, norms of values without a weight, and blocks whose output a learned scalar
multiplies. Per-layer embeddings, layers that share keys and values, experts and wide MLPs of the
other released sizes are refused.

Source: configuration and modeling code of transformers 5.24, and the released configuration.
"""

from collections.abc import Mapping
from typing import Any

from dtron.errors import CheckpointError
from dtron.models.config import DecoderConfig
from dtron.models.gemma3 import GEMMA_NAMES
from dtron.models.hf import (
    CONTEXT,
    FULL,
    LLAMA_FIELDS,
    LLAMA_IGNORED_TENSORS,
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

_ARCHITECTURE: dict[str, Any] = {
    **{"activation": "geglu", "norm": "rmsnorm", "sandwich_norms": True, "positions": "rope"},
    **{"qk_norm": True, "value_norm": True, "query_pre_attn_scalar": 1},
    **{"scale_embeddings": True, "layer_scalars": True},
}
_ALL: dict[str, Any] = {
    **_ARCHITECTURE,
    **{"norm_eps": 1e-6, "rope_theta": 1000000.0, "rope_local_theta": 10000.0},
    **{"rope_global_fraction": 0.25, "keys_as_values": True, "logit_softcap": 30.0, "tied": True},
}

SIZES = {
    "debug": DecoderConfig(
        vocab_size=264,
        dim=128,
        n_layers=6,
        n_heads=8,
        n_kv_heads=4,
        head_dim=32,
        global_head_dim=64,
        global_kv_heads=2,
        ffn_dim=256,
        window=64,
        full_attention_every=3,
        **_ALL,
    ),
    "31b": DecoderConfig(
        vocab_size=262144,
        dim=5376,
        n_layers=60,
        n_heads=32,
        n_kv_heads=16,
        head_dim=256,
        global_head_dim=512,
        global_kv_heads=4,
        ffn_dim=21504,
        window=1024,
        full_attention_every=6,
        **_ALL,
    ),
}

_WINDOW, _HEAD, _FULL_HEAD, _KV_HEADS = 512, 256, 512, 4
_ROPE: dict[str, Any] = {
    SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
    FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0},
}


def _kinds(given: Mapping[str, Any]) -> list[str]:
    """Return the kind of each layer; transformers gives the last one full attention."""
    n = given["num_hidden_layers"]
    kinds = list(given.get("layer_types") or [FULL if i % 6 == 5 else SLIDING for i in range(n)])
    if len(kinds) != n:
        raise CheckpointError(f"layer_types has {len(kinds)} layers; num_hidden_layers = {n}")
    return [*kinds[:-1], FULL]


def _read_layers(given: Mapping[str, Any]) -> dict[str, Any]:
    """Read windows, and sizes of heads by kind of layer, of released or saved files."""
    kinds, keys_as_values = _kinds(given), bool(given.get("attention_k_eq_v", False))
    if SLIDING in kinds and not given.get("sliding_window", _WINDOW):
        raise CheckpointError(f"sliding_window = {given['sliding_window']!r} is not supported")
    fields = read_windows({**given, "layer_types": kinds}, _WINDOW, 6)
    usual = (given.get("head_dim", _HEAD), given.get("num_key_value_heads", _KV_HEADS))
    head, heads = _full_sizes(given, kinds, usual, keys_as_values)
    if not fields["window"]:
        return {**fields, "head_dim": head, "n_kv_heads": heads, "keys_as_values": keys_as_values}
    return {
        **fields,
        "global_head_dim": 0 if head == usual[0] else head,
        "global_kv_heads": 0 if heads == usual[1] else heads,
        "keys_as_values": keys_as_values,
    }


def _full_sizes(
    given: Mapping[str, Any], kinds: list[str], usual: tuple[int, int], keys_as_values: bool
) -> tuple[int, int]:
    """Return width and number of key/value heads in layers of full attention.

    transformers 5.24 saves them by layer, in per_layer_config, in place of released files' keys.
    """
    if "per_layer_config" not in given:
        heads = given.get("num_global_key_value_heads") if keys_as_values else None
        return given.get("global_head_dim", _FULL_HEAD), usual[1] if heads is None else heads
    by_layer = given["per_layer_config"] or {}
    layers = {str(layer) for layer in range(len(kinds))}
    if unknown := sorted({str(key) for key in by_layer} - layers):
        raise CheckpointError(
            f"per_layer_config has {unknown[0]!r}, which is no layer; its keys are layers, 0 to "
            f"{len(kinds) - 1}"
        )
    default = dict(zip(("head_dim", "num_key_value_heads"), usual, strict=True))
    sizes: dict[str, set[tuple[int, int]]] = {FULL: set(), SLIDING: {usual}}
    for layer, kind in enumerate(kinds):
        own = {**default, **(by_layer.get(str(layer), by_layer.get(layer)) or {})}
        if unknown := sorted(own.keys() - default.keys()):
            raise CheckpointError(f"{unknown[0]} of per_layer_config is not supported")
        sizes.setdefault(kind, set()).add((own["head_dim"], own["num_key_value_heads"]))
    if len(sizes[FULL]) > 1 or len(sizes[SLIDING]) > 1:
        raise CheckpointError(
            "per_layer_config differs between layers of one kind, which is not supported; dtron's "
            f"gemma4 has one size of heads for {FULL} and that of head_dim and "
            f"num_key_value_heads for {SLIDING}"
        )
    return sizes[FULL].pop()


def _write_layers(config: DecoderConfig) -> dict[str, Any]:
    every, full = config.full_attention_every, config.full_rope
    if every and config.n_layers % every:
        raise CheckpointError(
            f"model.override.full_attention_every = {every} does not divide n_layers = "
            f"{config.n_layers}, but Gemma4ForCausalLM's last layer has full attention; use a "
            "divisor"
        )
    written = {
        **write_windows(config, _WINDOW),
        "head_dim": config.head_size,
        "num_key_value_heads": config.n_kv_heads,
        "attention_k_eq_v": config.keys_as_values,
        "global_head_dim": full.head_size,
        "num_global_key_value_heads": full.n_kv_heads if config.keys_as_values else None,
    }
    if config.global_kv_heads and not config.keys_as_values:  # only this key can express them
        sizes = {"head_dim": full.head_size, "num_key_value_heads": full.n_kv_heads}
        layers = range(every - 1, config.n_layers, every)
        written["per_layer_config"] = {str(layer): sizes for layer in layers}
    return written


def _read_rope(given: Mapping[str, Any]) -> dict[str, Any]:
    """Read the rotary embeddings of both kinds of layers."""
    by_kind, kinds = given.get("rope_parameters") or _ROPE, set(_kinds(given))
    for kind in sorted(kinds & {FULL, SLIDING}):
        rope = by_kind.get(kind)
        if not isinstance(rope, Mapping) or "rope_theta" not in rope:
            raise CheckpointError(f"rope_theta of rope_parameters.{kind} is missing")
    if unknown := sorted(set(by_kind) - {FULL, SLIDING}):
        raise CheckpointError(f"rope_parameters.{unknown[0]} is not supported; use {FULL}")
    full, fields = dict(by_kind[FULL]), {}
    if full.get("rope_type") == "proportional":
        fields["rope_global_fraction"] = full.pop("partial_rotary_factor", 1.0)
        factor = full.pop("factor", 1.0)
        full |= {"rope_type": "default"} if factor == 1 else {"rope_type": "linear"}
        full |= {} if factor == 1 else {"factor": factor}
    if (kind := full.get("rope_type", "default")) not in ("default", "linear"):
        raise CheckpointError(
            f"rope_type = {kind!r} of rope_parameters.{FULL} is not supported; dtron's gemma4 has "
            "default, linear and proportional"
        )
    fields |= read_rope({"rope_parameters": full})
    if SLIDING not in kinds:
        return fields
    local = read_rope({"rope_parameters": by_kind[SLIDING]})
    if "rope_scaling" in local:
        raise CheckpointError(
            f"rope_parameters.{SLIDING} scales frequencies, which is not supported; dtron's gemma4 "
            f"scales those of {FULL} only"
        )
    same = local["rope_theta"] == fields["rope_theta"] and "rope_scaling" not in fields
    return {**fields, "rope_local_theta": 0.0 if same else local["rope_theta"]}


def _write_rope(config: DecoderConfig) -> dict[str, Any]:
    full = write_rope(config)["rope_parameters"]
    if config.rope_global_fraction < 1:
        full["rope_type"] = "proportional"
        full["partial_rotary_factor"] = config.rope_global_fraction
    theta = config.rope_local_theta or config.rope_theta
    local = {"rope_type": "default", "rope_theta": theta} if config.window else _ROPE[SLIDING]
    return {"rope_parameters": {FULL: full, SLIDING: local}}


def _read_embeddings(given: Mapping[str, Any]) -> dict[str, Any]:
    if width := given.get("hidden_size_per_layer_input", 256):
        raise CheckpointError(
            f"hidden_size_per_layer_input = {width} is not supported: dtron's gemma4 has no "
            "per-layer embeddings; it needs 0"
        )
    return {}


_LAYER_KEYS = """
    sliding_window layer_types head_dim global_head_dim num_key_value_heads
    num_global_key_value_heads attention_k_eq_v per_layer_config
"""

HF = HuggingFace(
    model_type="gemma4_text",
    architecture="Gemma4ForCausalLM",
    names=(WeightName("blocks.*.scale.gamma", "model.layers.*.layer_scalar"), *GEMMA_NAMES),
    fields={
        **LLAMA_FIELDS,
        "head_dim": "head_dim",
        "num_key_value_heads": "n_kv_heads",
    },
    base=_ARCHITECTURE,
    fixed={
        "hidden_activation": ("gelu_pytorch_tanh",),
        "attention_bias": (False,),
        "use_bidirectional_attention": (None, False, "vision"),  # of tokens of images, not of text
        "num_kv_shared_layers": (0, None),
        "enable_moe_block": (False, None),
        "use_double_wide_mlp": (False, None),
    },
    defaults={
        "vocab_size": 262144,
        "num_attention_heads": 8,
        "head_dim": _HEAD,
        "num_key_value_heads": _KV_HEADS,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": True,
        "attention_dropout": 0.0,
    },
    converters=(
        KeyConverter(
            frozenset({"hidden_size_per_layer_input"}),
            _read_embeddings,
            lambda config: {"hidden_size_per_layer_input": 0},
        ),
        KeyConverter(frozenset(_LAYER_KEYS.split()), _read_layers, _write_layers),
        KeyConverter(frozenset({"rope_parameters"}), _read_rope, _write_rope),
        CONTEXT,
        optional_key("final_logit_softcapping", "logit_softcap"),
    ),
    ignored_keys=frozenset(
        {"vocab_size_per_layer_input", "num_experts", "top_k_experts", "moe_intermediate_size"}
    ),
    ignored_tensors=LLAMA_IGNORED_TENSORS,
    inside=Multimodal(
        "gemma4",
        "model.language_model.",
        tuple(
            f"model.{name}."
            for name in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")
        ),
    ),
)

GEMMA4 = ModelSpec("gemma4", SIZES, hf=HF)
