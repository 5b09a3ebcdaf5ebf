"""Sparse upcycling: convert a dense model's weights to an equivalent mixture of experts.

Every expert starts as a copy of the dense layer; the router is initialised as in a new model. If a
token's expert weights sum to 1 and there are no shared experts, the outputs equal those of the
dense model for any routing. Training then makes the experts differ.

Source: Sparse Upcycling, arXiv:2212.05055.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from dtron.errors import ConfigError
from dtron.models.config import DecoderConfig
from dtron.models.decoder import init_parameter

# Fields in which the two configs may differ.
_OWN = {
    "ffn_dim",
    "n_experts",
    "experts_per_token",
    "expert_dim",
    "first_dense_layers",
    "router",
    "renormalize",
    "balance",
    "balance_coefficient",
    "z_loss",
    "bias_speed",
    "jitter",
    "n_groups",
    "top_groups",
    "force_balance",
}


def upcycle(
    weights: Mapping[str, Tensor],
    dense: DecoderConfig,
    mixture: DecoderConfig,
    generator: torch.Generator,
) -> dict[str, Tensor]:
    """Convert the weights of a dense model to the weights of a mixture of experts.

    Args:
        weights: unsharded tensors by FQN, such as a `state_dict`; not modified. Unconverted
            tensors are shared with the result.
        dense: config of the dense model.
        mixture: config of the mixture; only fields of experts may differ.
        generator: for the routers' weights, on the weights' device.
    Returns:
        Tensors by FQN: all parameters of the mixture and the router biases.

    Raises:
        ConfigError: the configs differ in other fields, or the outputs would differ.
    """
    _check(dense, mixture)
    found: dict[str, Tensor] = {}
    kinds = enumerate(mixture.layer_kinds)
    layers = [f"blocks.{i}.ffn." for i, kind in kinds if kind.experts]
    for name, value in weights.items():
        prefix = next((layer for layer in layers if name.startswith(layer)), None)
        if prefix is None:
            found[name] = value
            continue
        matrix, kind = name.removeprefix(prefix).split(".")
        stacked = matrix if kind == "weight" else f"{matrix}_bias"
        copies = (mixture.n_experts, *value.shape)
        found[f"{prefix}experts.{stacked}"] = value.expand(copies).clone()
    like = next(iter(weights.values()))
    for prefix in layers:
        found |= _router(f"{prefix}router.", mixture, generator, like)
    return found


def _router(
    prefix: str, config: DecoderConfig, generator: torch.Generator, like: Tensor
) -> dict[str, Tensor]:
    found = {f"{prefix}weight": like.new_empty(config.n_experts, config.dim)}
    if config.bias:
        found[f"{prefix}bias"] = like.new_empty(config.n_experts)
    for name, value in found.items():
        init_parameter(config, name, value, generator)
    if config.bias_speed:
        found[f"{prefix}expert_bias"] = like.new_zeros(config.n_experts, dtype=torch.float32)
    return found


def _check(dense: DecoderConfig, mixture: DecoderConfig) -> None:
    if dense.n_experts or not mixture.n_experts:
        raise ConfigError("upcycling needs the config of a dense model and one with experts")
    for key, value in dense.model_dump(exclude=_OWN).items():
        if (other := getattr(mixture, key)) != value:
            raise ConfigError(
                f"upcycling: {key} = {other} of the mixture differs from the dense model's; "
                f"use {value}"
            )
    if mixture.expert_dim != dense.ffn_dim:
        raise ConfigError(
            f"upcycling: expert_dim = {mixture.expert_dim} differs from the dense model's ffn_dim, "
            f"which each expert copies; use {dense.ffn_dim}"
        )
    if mixture.n_dense_layers and mixture.ffn_dim != dense.ffn_dim:
        raise ConfigError(
            f"upcycling: ffn_dim = {mixture.ffn_dim} of the mixture's dense layers differs from "
            f"the dense model's; use {dense.ffn_dim}"
        )
    if not (mixture.renormalize or mixture.router == "topk_softmax"):
        raise ConfigError(
            "upcycling: expert weights that do not sum to 1 would change the model's outputs; use "
            'renormalize = True or router = "topk_softmax"'
        )
