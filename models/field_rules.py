"""Rules across fields of a DecoderConfig: windows, latent attention, experts.

A broken rule yields a message with key, value, rule and fix. A setting without effect is an error.
"""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from dtron.models.config import DecoderConfig

_LATENT_KEYS = ("q_lora_rank", "nope_head_dim", "rope_head_dim", "v_head_dim")
_EXPERT_KEYS = (
    "experts_per_token expert_dim first_dense_layers n_shared_experts shared_gate router "
    "renormalize routed_scaling n_groups top_groups bias_speed balance balance_coefficient "
    "z_loss jitter capacity_factor capacity_pad mtp force_balance"
)
_RANKING = ("softmax", "sigmoid")
"""Routers that support an expert bias and groups."""


def broken_rules(config: "DecoderConfig") -> Iterator[str]:
    """Yield a message for each broken rule: key, value, rule and fix."""
    every = config.full_attention_every
    if every and not config.window:
        yield f"full_attention_every = {every} has no effect without a window; use 0 or set window"
    if every == 1:
        yield "full_attention_every = 1 leaves no layer with a window; use 2 or more, or window = 0"
    yield from _latent_rules(config)
    if not config.mtp:
        yield from _without_effect(config, ("mtp_coefficient",), "mtp")
    if config.n_experts:
        yield from _expert_rules(config)
        yield from _router_rules(config)
        return
    yield from _without_effect(config, _EXPERT_KEYS.split(), "n_experts")
    if not config.ffn_dim:
        yield f"ffn_dim = 0 needs experts; use a hidden width such as {4 * config.dim}"


def _without_effect(config: "DecoderConfig", keys: Sequence[str], needed: str) -> Iterator[str]:
    for key in keys:
        default = type(config).model_fields[key].default
        if (value := getattr(config, key)) != default:
            yield f"{key} = {value} has no effect with {needed} = 0; use {default} or set {needed}"


def _latent_rules(config: "DecoderConfig") -> Iterator[str]:
    if not config.kv_lora_rank:
        yield from _without_effect(config, _LATENT_KEYS, "kv_lora_rank")
        return
    for key in ("nope_head_dim", "rope_head_dim", "v_head_dim"):
        if not getattr(config, key):
            value = 64 if key == "rope_head_dim" else 128
            yield (
                f"{key} = 0 does not go with kv_lora_rank = {config.kv_lora_rank}; use a width, "
                f"such as {value}"
            )
    if config.v_head_dim > config.head_size:
        yield (
            f"v_head_dim = {config.v_head_dim} is wider than query heads, nope_head_dim + "
            f"rope_head_dim = {config.head_size}; use at most that"
        )
    refused = {
        "head_dim": (config.head_dim, 0),
        "n_kv_heads": (config.n_kv_heads, config.n_heads),
        "qk_norm": (config.qk_norm, False),
        "positions": (config.positions, "rope"),
    }
    for key, (value, legal) in refused.items():
        if value != legal:
            yield (
                f"{key} = {value} does not go with kv_lora_rank = {config.kv_lora_rank}; "
                f"use {legal}"
            )


def _expert_rules(config: "DecoderConfig") -> Iterator[str]:
    if not 1 <= config.experts_per_token <= config.n_experts:
        yield (
            f"experts_per_token = {config.experts_per_token} is not between 1 and n_experts = "
            f"{config.n_experts}; use 1 to {config.n_experts}"
        )
    if not config.expert_dim:
        yield f"expert_dim = 0 does not go with n_experts = {config.n_experts}; use a hidden width"
    if config.first_dense_layers >= config.n_layers:
        yield (
            f"first_dense_layers = {config.first_dense_layers} leaves none of n_layers = "
            f"{config.n_layers} with experts; use at most {config.n_layers - 1}, or n_experts = 0"
        )
    if config.first_dense_layers and not config.ffn_dim:
        yield (
            f"ffn_dim = 0 does not go with first_dense_layers = {config.first_dense_layers}; use "
            "their hidden width"
        )
    if config.ffn_dim and not config.first_dense_layers:
        yield f"ffn_dim = {config.ffn_dim} has no effect if all layers have experts; use 0"
    if config.shared_gate and not config.n_shared_experts:
        yield "shared_gate = True has no effect with n_shared_experts = 0; use False"
    if (config.balance == "none") != (config.balance_coefficient == 0):
        yield (
            f'balance_coefficient = {config.balance_coefficient} with balance = "{config.balance}" '
            'has no effect; set both, or neither: 0.0 and "none"'
        )
    if config.capacity_pad and not config.capacity_factor:
        yield "capacity_pad = True has no effect with capacity_factor = 0.0; use False"


def _router_rules(config: "DecoderConfig") -> Iterator[str]:
    if config.router not in _RANKING:
        for key in ("renormalize", "n_groups", "top_groups", "bias_speed"):
            default = type(config).model_fields[key].default
            if (value := getattr(config, key)) != default:
                router = f'router = "{config.router}"'
                yield f"{key} = {value} has no effect with {router}; use {default}"
    normalized = config.renormalize or config.router == "topk_softmax"
    if normalized and config.experts_per_token == 1:
        yield (
            "experts_per_token = 1 with weights that sum to 1 gives the router no gradient; use 2"
        )
    groups, top = config.n_groups, config.top_groups
    if config.n_experts % groups:
        legal = [n for n in range(1, config.n_experts + 1) if config.n_experts % n == 0]
        yield (
            f"n_groups = {groups} does not divide n_experts = {config.n_experts}; "
            f"use {either(legal)}"
        )
    if top > groups or top == groups > 1:
        yield (
            f"top_groups = {top} has no effect with n_groups = {groups}; use less, or 1 for both"
        )
    size = config.n_experts // groups
    if config.router == "sigmoid" and groups > 1 and size < 2:
        yield (
            f'n_groups = {groups} leaves 1 expert per group, but router = "sigmoid" ranks groups '
            f"by two; use {config.n_experts // 2} or less"
        )
    if top * size < config.experts_per_token:
        yield (
            f"top_groups = {top} groups of {size} have fewer experts than experts_per_token = "
            f"{config.experts_per_token}; use {-(-config.experts_per_token // size)} or more"
        )


def either(legal: list[int]) -> str:
    """Format legal values as `2, 4 or 8`."""
    *most, last = map(str, legal)
    return f"{', '.join(most)} or {last}" if most else last
