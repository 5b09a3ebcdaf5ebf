"""Rules across fields of a DecoderConfig, as rows of tables; bounds of single fields are in
`models/config.py`. A setting without effect is an error."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING

from dtron.config.rule import Rule, broken, changed, finds_none

if TYPE_CHECKING:
    from dtron.models.config import DecoderConfig


def broken_rules(config: "DecoderConfig") -> Iterator[str]:
    """Yield the messages of all broken rules: key, value, rule and fix."""
    yield from broken(FIELDS, config, config)
    if config.n_experts:
        yield from broken(EXPERTS, config, config)


def _unused(
    keys: str, needed: str, readers: tuple[str, ...] = (), fix: str = ""
) -> Rule["DecoderConfig"]:
    """Return a rule: `keys` must have their defaults if the field `needed` disables them.

    Args:
        keys: fields, separated by spaces.
        needed: a field without which `keys` have no effect.
        readers: values of `needed` with which `keys` have an effect; empty: any non-zero value.
        fix: text of the message after the default, such as " or set mtp".
    """

    def message(config: "DecoderConfig") -> str:
        why = f"has no effect with {needed} = {json.dumps(getattr(config, needed))}"
        fields = type(config).model_fields
        return "\n".join(
            f"{key} = {value} {why}; use {fields[key].default}{fix}"
            for key, value in changed(config, keys)
        )

    return Rule(
        keys, lambda c: getattr(c, needed) in readers if readers else getattr(c, needed), message
    )


def _divides(key: str, of: str) -> Rule["DecoderConfig"]:
    """Return a rule: the value of the field `key` must divide the value of the field `of`."""

    def message(config: "DecoderConfig") -> str:
        value, n = getattr(config, key), getattr(config, of)
        legal = _either([each for each in range(1, n + 1) if n % each == 0])
        return f"{key} = {value} does not divide {of} = {n}; use {legal}"

    return Rule(f"{key} {of}", lambda c: getattr(c, of) % getattr(c, key) == 0, message)


def _either(legal: list[int]) -> str:
    """Format legal values as `2, 4 or 8`."""
    *most, last = map(str, legal)
    return f"{', '.join(most)} or {last}" if most else last


def _indivisible_dim(config: "DecoderConfig") -> Iterator[str]:
    dim, n = config.dim, config.n_heads
    if dim % n and not config.head_dim and not config.kv_lora_rank:
        legal = _either([each for each in (dim // n * n, dim // n * n + n) if each])
        yield f"dim = {dim} is not a multiple of n_heads = {n}; use {legal}, or set head_dim"


_ROPE_RANGES = {
    "llama3": ("rope_low_freq_factor", "rope_high_freq_factor", "use 4.0 and 1.0, as Llama 3.1"),
    "yarn": ("rope_beta_slow", "rope_beta_fast", "use 32.0 and 1.0, as YaRN"),
}
"""{rope_scaling: (field of the lower bound, field of the upper bound, fix)}. Between the bounds,
frequencies are partly scaled. `linear` has no bounds."""


def _empty_rope_range(config: "DecoderConfig") -> Iterator[str]:
    if config.rope_scaling not in _ROPE_RANGES:
        return
    low, high, source = _ROPE_RANGES[config.rope_scaling]
    least, most = getattr(config, low), getattr(config, high)
    if config.rope_scaling_factor > 1 and most <= least:
        yield f"{high} = {most} is not above {low} = {least}; {source}"


def _wrong_latent(config: "DecoderConfig") -> Iterator[str]:
    if not config.kv_lora_rank:
        return
    why = f"conflicts with kv_lora_rank = {config.kv_lora_rank}; use"
    for key, width in {"nope_head_dim": 128, "rope_head_dim": 64, "v_head_dim": 128}.items():
        if not getattr(config, key):
            yield f"{key} = 0 {why} a width, such as {width}"
    if config.v_head_dim > config.head_size:
        yield (
            f"v_head_dim = {config.v_head_dim} is wider than query heads, nope_head_dim + "
            f"rope_head_dim = {config.head_size}; use {config.head_size} or less"
        )
    legal = {"head_dim": 0, "n_kv_heads": config.n_heads, "qk_norm": False, "positions": "rope"}
    for key, value in legal.items():
        if getattr(config, key) != value:
            yield f"{key} = {getattr(config, key)} {why} {value}"
    for key, value in changed(config, _NOT_LATENT):
        default = type(config).model_fields[key].default
        yield f"{key} = {json.dumps(value)} {why} {json.dumps(default)}"


_FULL_LAYERS = "global_head_dim global_kv_heads keys_as_values"
_NOT_LATENT = "value_norm keys_as_values global_head_dim global_kv_heads rope_global_fraction"


def _wrong_full_layers(config: "DecoderConfig") -> Iterator[str]:
    """Yield errors of the fields of layers without a window."""
    every, window = config.full_attention_every, config.window
    both = "has no effect without both window and full_attention_every; use"
    for key, usual in {"global_head_dim": "head_dim", "global_kv_heads": "n_kv_heads"}.items():
        if not (value := getattr(config, key)):
            continue
        if not (window and every):
            yield f"{key} = {value} {both} 0"
        elif value == (config.head_size if key == "global_head_dim" else config.n_kv_heads):
            yield f"{key} = {value} has no effect, since {usual} is equal; use 0"
    for key, value in changed(config, "keys_as_values rope_global_fraction"):
        if not config.has_full_layers:
            default = json.dumps(type(config).model_fields[key].default)
            yield (
                f"{key} = {json.dumps(value)} has no effect, since all layers have the window; use "
                f"{default} or set full_attention_every"
            )
    if (heads := config.global_kv_heads) and config.n_heads % heads:
        legal = _either(
            [each for each in range(1, config.n_heads + 1) if config.n_heads % each == 0]
        )
        yield f"global_kv_heads = {heads} does not divide n_heads = {config.n_heads}; use {legal}"
    rotated = int(config.global_head_dim * config.rope_fraction)
    if config.global_head_dim and config.positions == "rope" and (rotated % 2 or not rotated):
        yield (
            f"global_head_dim = {config.global_head_dim} rotates {rotated} elements of a head, but "
            f"rope rotates pairs; use another width, such as {2 * config.head_size}"
        )


def _wrong_global_fraction(config: "DecoderConfig") -> Iterator[str]:
    fraction = config.rope_global_fraction
    if fraction == 1:
        return
    if config.positions != "rope":
        yield f'rope_global_fraction = {fraction} has no effect without positions = "rope"; use 1.0'
    elif not int(fraction * config.full_rope.head_size // 2):
        least = 2 / config.full_rope.head_size
        yield f"rope_global_fraction = {fraction} rotates nothing; use {least:g} or more"
    why = f"rope_global_fraction = {fraction} conflicts with"
    if config.rope_fraction != 1:
        yield f"{why} rope_fraction = {config.rope_fraction}; use 1.0 for one of them"
    if config.rope_scaling_factor > 1 and config.rope_scaling != "linear":
        yield f'{why} rope_scaling = {json.dumps(config.rope_scaling)}; use "linear", or 1.0'


def _wrong_delta(config: "DecoderConfig") -> Iterator[str]:
    heads = config.delta_key_heads
    if not heads:
        return
    why = f"conflicts with delta_key_heads = {heads}; use"
    for key in ("delta_key_dim", "delta_value_dim"):
        if not getattr(config, key):
            yield f"{key} = 0 {why} a width, such as 128"
    if not (values := config.delta_value_heads) or values % heads:
        yield f"delta_value_heads = {values} {why} a multiple, such as {2 * heads}"
    if not 0 < config.full_attention_every <= config.n_layers:
        yield (
            f"full_attention_every = {config.full_attention_every} {why} 2 to n_layers = "
            f"{config.n_layers}, since a model needs a layer with full attention"
        )
    for key, value in {"window": 0, "kv_lora_rank": 0, "bias": False}.items():
        if getattr(config, key) != value:
            yield f"{key} = {getattr(config, key)} {why} {value}"


_MAMBA = {"mamba_heads": 64, "mamba_groups": 8, "mamba_head_dim": 64, "mamba_state_dim": 128}
"""{field of Mamba-2: usual value}."""
_NOT_WITH_PATTERN = {
    **{"window": 0, "delta_key_heads": 0, "first_dense_layers": 0, "kv_lora_rank": 0, "mtp": 0},
    **{"bias": False, "causal": True, "post_norm": False, "sandwich_norms": False},
    "layer_scalars": False,
}
"""{field: its only value with layer_pattern}."""


def _wrong_pattern(config: "DecoderConfig") -> Iterator[str]:
    if not (pattern := config.layer_pattern):
        return
    layers = "".join(pattern[i % len(pattern)] for i in range(config.n_layers))
    why = f"conflicts with layer_pattern = {json.dumps(pattern)}; use"
    if "*" not in layers:
        yield (
            f"layer_pattern = {json.dumps(pattern)} has no attention (*) in the first "
            f"{config.n_layers} layers; a model needs a layer with attention"
        )
    usual = {"-": {"ffn_dim": 4 * config.dim}, "E": {"n_experts": 8}, "M": _MAMBA}
    for character, fields in usual.items():
        for key, value in fields.items():
            if character in layers and not getattr(config, key):
                yield f"{key} = 0 {why} a size, such as {value}"
            if character not in layers and getattr(config, key):
                yield f"{key} = {getattr(config, key)} {why} 0, or layers {character}"
    for key, value in changed(config, "mamba_conv mamba_dt_min") if "M" not in layers else ():
        default = type(config).model_fields[key].default
        yield f"{key} = {value} {why} {default}, or layers M"
    if "M" in layers and config.mamba_groups and config.mamba_heads % config.mamba_groups:
        yield (
            f"mamba_groups = {config.mamba_groups} does not divide mamba_heads = "
            f"{config.mamba_heads}; use a divisor"
        )
    for key, value in _NOT_WITH_PATTERN.items():
        if getattr(config, key) != value:
            yield f"{key} = {getattr(config, key)} {why} {value}"


def _wrong_vision(config: "DecoderConfig") -> Iterator[str]:
    if not config.vision_layers:
        return
    why = f"conflicts with vision_layers = {config.vision_layers}; use"
    sizes = {"dim": 768, "heads": 12, "ffn_dim": 3072, "image_size": 224, "patch_size": 16}
    for key, usual in sizes.items():
        if not getattr(config, f"vision_{key}"):
            yield f"vision_{key} = 0 {why} a size, such as {usual}"
    dim, heads = config.vision_dim, config.vision_heads
    if heads and dim % heads:
        yield f"vision_dim = {dim} {why} a multiple of vision_heads = {heads}"
    if config.vision_patch_size > config.vision_image_size:
        yield (
            f"vision_patch_size = {config.vision_patch_size} {why} at most vision_image_size = "
            f"{config.vision_image_size}"
        )
    if config.mtp:
        yield (
            f"mtp = {config.mtp} {why} 0, since it embeds the tokens ahead, which are placeholders "
            "in images"
        )
    if config.image_token >= config.vocab_size:
        yield f"image_token = {config.image_token} {why} an id below vocab_size"


def _small_groups(config: "DecoderConfig") -> Iterator[str]:
    groups, top, chosen = config.n_groups, config.top_groups, config.experts_per_token
    size = config.n_experts // groups
    if top > groups or top == groups > 1:
        yield f"top_groups = {top} has no effect with n_groups = {groups}; use fewer, or 1 for both"
    if config.router == "sigmoid" and groups > 1 and size < 2:
        yield (
            f'n_groups = {groups} leaves 1 expert per group, but router = "sigmoid" ranks a group '
            f"by its 2 best experts; use {config.n_experts // 2} or less"
        )
    if size and top * size < chosen:
        yield (
            f"top_groups = {top} groups of {size} have fewer experts than experts_per_token = "
            f"{chosen}; use {-(-chosen // size)} or more"
        )


_ENCODER = {"window": 0, "delta_key_heads": 0, "mtp": 0}
_POST_NORM = {
    **{"n_experts": 0, "delta_key_heads": 0, "mtp": 0, "sandwich_norms": False},
    "layer_scalars": False,
}


def _wrong_encoder(config: "DecoderConfig") -> Iterator[str]:
    for setting, legal in (
        ("causal = false", {} if config.causal else _ENCODER),
        ("post_norm = true", _POST_NORM if config.post_norm else {}),
    ):
        for key, value in legal.items():
            if getattr(config, key) != value:
                yield f"{key} = {getattr(config, key)} conflicts with {setting}; use {value}"


_NOT_IN_ENCODER_DECODERS = {
    **{"causal": True, "post_norm": False, "sandwich_norms": False, "qk_norm": False},
    **{"window": 0, "full_attention_every": 0, "softcap": 0.0, "sinks": False, "mtp": 0},
    **{"output_gate": False, "delta_key_heads": 0, "kv_lora_rank": 0, "n_experts": 0},
    **{"token_types": 0, "scale_embeddings": False, "logit_softcap": 0.0, "vision_layers": 0},
    **{"layer_pattern": "", "layer_scalars": False, "value_norm": False, "keys_as_values": False},
}


def _wrong_encoder_decoder(config: "DecoderConfig") -> Iterator[str]:
    if not config.encoder_layers:
        return
    why = f"conflicts with encoder_layers = {config.encoder_layers}; use"
    for key, value in _NOT_IN_ENCODER_DECODERS.items():
        if getattr(config, key) != value:
            yield f"{key} = {json.dumps(getattr(config, key))} {why} {json.dumps(value)}"
    if config.encoder_layers >= config.n_layers:
        yield (
            f"encoder_layers = {config.encoder_layers} leaves no decoder in n_layers = "
            f"{config.n_layers}; use at most {config.n_layers - 1}"
        )
    exact = config.relative_buckets // 4  # an encoder has half of the buckets for each direction
    if config.relative_buckets % 4 or config.relative_distance <= 2 * exact:
        yield (
            f"relative_buckets = {config.relative_buckets} needs a multiple of 4, and "
            f"relative_distance = {config.relative_distance} more than half of it; use 32 and 128"
        )


FIELDS: "tuple[Rule[DecoderConfig], ...]" = (
    _divides("n_kv_heads", "n_heads"),
    Rule("dim n_heads head_dim", finds_none(_indivisible_dim)),
    Rule(
        "head_dim rope_head_dim positions",
        lambda c: c.positions != "rope" or c.rope_fraction != 1 or c.rope_size % 2 == 0,
        lambda c: (
            f"{'rope_head_dim' if c.kv_lora_rank else 'head_dim'} = {c.rope_size} is odd, but rope "
            f"rotates pairs; use {c.rope_size + 1}"
        ),
    ),
    Rule(
        "rope_fraction head_dim",
        lambda c: c.rope_fraction == 1 or (c.rope_size > 0 and c.rope_size % 2 == 0),
        "rope_fraction = {c.rope_fraction} rotates {c.rope_size} elements of a head, but rope "
        "rotates pairs; use a fraction that gives an even number",
    ),
    Rule(
        "rope_scaling positions",
        lambda c: c.rope_scaling == "llama3" or c.positions == "rope",
        'rope_scaling = "{c.rope_scaling}" has no effect without positions = "rope"; use "llama3"',
    ),
    Rule(
        "rope_scaling rope_scaling_factor",
        lambda c: c.rope_scaling == "llama3" or c.positions != "rope" or c.rope_scaling_factor > 1,
        'rope_scaling = "{c.rope_scaling}" has no effect without a rope_scaling_factor above 1; '
        'use "llama3"',
    ),
    Rule(
        "rope_local_theta positions window",
        lambda c: not c.rope_local_theta or (c.positions == "rope" and c.window),
        'rope_local_theta = {c.rope_local_theta} has no effect without positions = "rope" and a '
        "window; use 0.0",
    ),
    Rule(
        "rope_local_theta rope_theta rope_scaling_factor",
        lambda c: c.rope_local_theta != c.rope_theta or c.rope_scaling_factor > 1,
        "rope_local_theta = {c.rope_local_theta} has no effect, since rope_theta is equal; use 0.0",
    ),
    _unused("rope_low_freq_factor rope_high_freq_factor", "rope_scaling", ("llama3",)),
    _unused("rope_original_context", "rope_scaling", ("llama3", "yarn")),
    _unused(
        "rope_beta_fast rope_beta_slow rope_truncate rope_mscale rope_mscale_all_dim",
        "rope_scaling",
        ("yarn",),
    ),
    Rule(
        "rope_low_freq_factor rope_high_freq_factor rope_beta_slow rope_beta_fast",
        finds_none(_empty_rope_range),
    ),
    Rule(
        "rope_theta rope_scaling",
        lambda c: c.rope_scaling != "yarn" or c.rope_theta > 1,
        'rope_theta = {c.rope_theta} is not above 1, but rope_scaling = "yarn" divides by its '
        "logarithm; use more than 1, such as 10000.0",
    ),
    Rule(
        "full_attention_every window delta_key_heads",
        lambda c: c.window or c.delta_key_heads or not c.full_attention_every,
        "full_attention_every = {c.full_attention_every} has no effect without a window; use 0 or "
        "set window or delta_key_heads",
    ),
    Rule(
        "full_attention_every window delta_key_heads",
        lambda c: c.full_attention_every != 1,
        lambda c: (
            "full_attention_every = 1 leaves no layer with a "
            + ("gated delta net; use 2 or more" if c.delta_key_heads else "window; use 2 or more")
            + (", or delta_key_heads = 0" if c.delta_key_heads else ", or window = 0")
        ),
    ),
    Rule(
        "full_attention_every n_layers window",
        lambda c: not c.window or c.full_attention_every <= c.n_layers,
        "full_attention_every = {c.full_attention_every} has no effect with n_layers = "
        "{c.n_layers}; use at most n_layers, or 0 without settings of layers of full attention",
    ),
    Rule(
        f"{_FULL_LAYERS} rope_global_fraction window full_attention_every n_heads n_kv_heads "
        "head_dim positions",
        finds_none(_wrong_full_layers),
    ),
    Rule(
        "rope_global_fraction positions rope_fraction rope_scaling rope_scaling_factor "
        "global_head_dim",
        finds_none(_wrong_global_fraction),
    ),
    Rule(
        "value_norm norm",
        lambda c: not c.value_norm or c.norm == "rmsnorm",
        'value_norm = true conflicts with norm = "{c.norm}"; use "rmsnorm", or false',
    ),
    _unused(
        "delta_value_heads delta_key_dim delta_value_dim delta_conv delta_kernel",
        "delta_key_heads",
        fix=" or set delta_key_heads",
    ),
    Rule(
        "delta_key_heads delta_value_heads delta_key_dim delta_value_dim full_attention_every "
        "window kv_lora_rank bias",
        finds_none(_wrong_delta),
    ),
    _unused(
        " ".join((*_MAMBA, "mamba_conv mamba_dt_min")),
        "layer_pattern",
        fix=" or set layer_pattern",
    ),
    Rule(
        " ".join(
            (
                "layer_pattern n_layers ffn_dim n_experts mamba_conv mamba_dt_min",
                *(*_MAMBA, *_NOT_WITH_PATTERN),
            )
        ),
        finds_none(_wrong_pattern),
    ),
    Rule(
        "causal post_norm window delta_key_heads mtp n_experts sandwich_norms layer_scalars",
        finds_none(_wrong_encoder),
    ),
    Rule(
        "encoder_layers positions",
        lambda c: bool(c.encoder_layers) == (c.positions == "relative"),
        lambda c: (
            f"positions = {json.dumps(c.positions)} conflicts with encoder_layers = "
            f"{c.encoder_layers}; use "
            + ('"relative"' if c.encoder_layers else '"rope" or "learned"')
        ),
    ),
    Rule(
        f"encoder_layers n_layers relative_buckets relative_distance "
        f"{' '.join(_NOT_IN_ENCODER_DECODERS)}",
        finds_none(_wrong_encoder_decoder),
    ),
    _unused("relative_buckets relative_distance", "positions", ("relative",)),
    Rule(
        "output_gate kv_lora_rank",
        lambda c: not (c.output_gate and c.kv_lora_rank),
        "output_gate = true is not supported by latent attention, kv_lora_rank = {c.kv_lora_rank}; "
        "use false",
    ),
    Rule(
        "rope_fraction positions kv_lora_rank",
        lambda c: c.rope_fraction == 1 or (c.positions == "rope" and not c.kv_lora_rank),
        "rope_fraction = {c.rope_fraction} has no effect without rope, or with latent attention; "
        "use 1.0",
    ),
    _unused(
        "q_lora_rank nope_head_dim rope_head_dim v_head_dim",
        "kv_lora_rank",
        fix=" or set kv_lora_rank",
    ),
    Rule(
        "kv_lora_rank nope_head_dim rope_head_dim v_head_dim head_dim n_kv_heads qk_norm "
        f"positions {_NOT_LATENT}",
        finds_none(_wrong_latent),
    ),
    _unused("mtp_coefficient", "mtp", fix=" or set mtp"),
    _unused(
        "experts_per_token expert_dim first_dense_layers n_shared_experts shared_gate router "
        "renormalize routed_scaling n_groups top_groups bias_speed balance balance_coefficient "
        "z_loss jitter capacity_factor capacity_pad force_balance",
        "n_experts",
        fix=" or set n_experts",
    ),
    _unused(
        "vision_dim vision_heads vision_ffn_dim vision_image_size vision_patch_size image_token",
        "vision_layers",
        fix=" or set vision_layers",
    ),
    Rule(
        "vision_layers vision_dim vision_heads vision_ffn_dim vision_image_size vision_patch_size "
        "image_token vocab_size mtp",
        finds_none(_wrong_vision),
    ),
    Rule(
        "ffn_dim n_experts layer_pattern",
        lambda c: c.ffn_dim or c.n_experts or c.layer_pattern,
        lambda c: f"ffn_dim = 0 needs experts; use a hidden width such as {4 * c.dim}",
    ),
)
"""Rules of all models."""

EXPERTS: "tuple[Rule[DecoderConfig], ...]" = (
    Rule(
        "experts_per_token n_experts",
        lambda c: 1 <= c.experts_per_token <= c.n_experts,
        "experts_per_token = {c.experts_per_token} is not between 1 and n_experts = "
        "{c.n_experts}; use 1 to {c.n_experts}",
    ),
    Rule(
        "expert_dim n_experts",
        lambda c: c.expert_dim,
        "expert_dim = 0 conflicts with n_experts = {c.n_experts}; use a hidden width",
    ),
    Rule(
        "first_dense_layers n_layers n_experts",
        lambda c: c.first_dense_layers < c.n_layers,
        lambda c: (
            f"first_dense_layers = {c.first_dense_layers} leaves no experts in n_layers = "
            f"{c.n_layers}; use at most {c.n_layers - 1}, or n_experts = 0"
        ),
    ),
    Rule(
        "ffn_dim first_dense_layers",
        lambda c: c.ffn_dim or not c.first_dense_layers,
        "ffn_dim = 0 conflicts with first_dense_layers = {c.first_dense_layers}; use "
        "the hidden width of these layers",
    ),
    Rule(
        "ffn_dim first_dense_layers layer_pattern",
        lambda c: c.first_dense_layers or c.layer_pattern or not c.ffn_dim,
        "ffn_dim = {c.ffn_dim} has no effect if all layers have experts; use 0",
    ),
    _unused("shared_gate", "n_shared_experts"),
    Rule(
        "balance balance_coefficient",
        lambda c: (c.balance == "none") == (c.balance_coefficient == 0),
        'balance_coefficient = {c.balance_coefficient} with balance = "{c.balance}" has no effect; '
        'set both, or neither: 0.0 and "none"',
    ),
    _unused("capacity_pad", "capacity_factor"),
    _unused("renormalize n_groups top_groups bias_speed", "router", ("softmax", "sigmoid")),
    Rule(
        "experts_per_token renormalize router",
        lambda c: c.experts_per_token != 1 or not (c.renormalize or c.router == "topk_softmax"),
        "experts_per_token = 1 with weights that sum to 1 gives the router no gradient; use 2",
    ),
    _divides("n_groups", "n_experts"),
    Rule("n_groups top_groups n_experts experts_per_token router", finds_none(_small_groups)),
)
"""Rules of models with experts."""
