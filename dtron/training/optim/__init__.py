"""Optimizers, and the update with gradient clipping and skipping of non-finite gradients.

Clipping and skipping are decided on the device: `update` takes one scale for all gradients and
changes nothing if the scale is not finite. Updates act on local shards, since they are elementwise;
only Muon's matrices are exchanged. On DTensors, torch would propagate placements for each tensor.
"""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor

from dtron.config import Optim
from dtron.setup.optim_groups import group_of
from dtron.training.optim.adamw import AdamW
from dtron.training.optim.average import Average
from dtron.training.optim.custom import (
    OptimizerFactory,
    build_custom,
    custom_optimizer,
    step_if_finite,
)
from dtron.training.optim.elementwise import SGD, Lion
from dtron.training.optim.muon import Muon
from dtron.training.optim.offloaded import OffloadedAdamW

__all__ = [
    "OPTIMIZERS",
    "SGD",
    "AdamW",
    "Lion",
    "Muon",
    "OptimizerFactory",
    "build_optimizer",
    "update",
]

AnyOptimizer = AdamW | Lion | Muon | SGD


def _moments(options: Optim) -> torch.dtype | None:
    return torch.bfloat16 if options.moments == "bfloat16" else None


def _adamw(groups: list[dict], options: Optim) -> AdamW:
    betas = (options.beta1, options.beta2)
    settings = {"lr": options.lr, "betas": betas, "eps": options.eps}
    if options.offload:
        return OffloadedAdamW(groups, _moments(options), options.offload, **settings)
    return AdamW(groups, _moments(options), **settings)


def _adamw8bit(groups: list[dict], options: Optim) -> AdamW:
    from dtron.training.optim.adamw8bit import AdamW8bit  # torchao takes seconds to import

    betas = (options.beta1, options.beta2)
    return AdamW8bit(groups, lr=options.lr, betas=betas, eps=options.eps)


def _lion(groups: list[dict], options: Optim) -> Lion:
    return Lion(groups, _moments(options), options.lr, (options.beta1, options.beta2))


def _muon(groups: list[dict], options: Optim) -> Muon:
    betas, eps = (options.beta1, options.beta2), options.eps
    muon = (options.momentum, options.adjust_lr_fn)
    return Muon(groups, _moments(options), *muon, lr=options.lr, betas=betas, eps=eps)


def _sgd(groups: list[dict], options: Optim) -> SGD:
    return SGD([{**group, "weight_decay": 0.0} for group in groups], lr=options.lr)


OPTIMIZERS: dict[str, Callable[[list[dict], Optim], AnyOptimizer]] = {
    "adamw": _adamw,
    "adamw8bit": _adamw8bit,
    "muon": _muon,
    "lion": _lion,
    "sgd": _sgd,
}


def build_optimizer(
    named: Iterable[tuple[str, Tensor]],
    options: Optim,
    hidden: Callable[[str, int], bool] | None = None,
    factory: OptimizerFactory | None = None,
) -> torch.optim.Optimizer:
    """Build the optimizer; vectors (norms and biases, also of experts) get no weight decay.

    The first of `options.groups` that matches a parameter replaces its learning rate, weight decay,
    or both.

    Args:
        named: (FQN, parameter) pairs; parameters without `requires_grad` are left out.
        hidden: (FQN, number of dims) -> whether Muon updates the parameter; None: it updates all
            matrices.
        factory: makes the optimizer in place of `optim.name`; None: `optim.name` may name one.
    """
    if factory := factory or custom_optimizer(options.name):
        return _averaged(build_custom(factory, list(named), options), options)
    groups: dict[tuple[float, float, bool], list[Tensor]] = {}
    named = list(named)
    if options.name == "adamw8bit":
        from dtron.training.optim.adamw8bit import check_blocks

        check_blocks(named)
    for name, parameter in named:
        if parameter.requires_grad:
            matrix = is_matrix(name, parameter.dim())
            own = group_of(name, options.groups)
            decay = options.weight_decay if matrix else 0.0
            factor = 1.0
            if own is not None:
                decay = decay if own.weight_decay is None else own.weight_decay
                factor = factor if own.lr is None else own.lr / options.lr
            orthogonalize = options.name == "muon" and (hidden or is_matrix)(name, parameter.dim())
            groups.setdefault((decay, factor, orthogonalize), []).append(parameter)
    made = [
        {
            "params": members,
            "weight_decay": decay,
            "lr_factor": factor,
            "orthogonalize": orthogonalize,
        }
        for (decay, factor, orthogonalize), members in groups.items()
    ]
    return _averaged(OPTIMIZERS[options.name](made, options), options)


def _averaged(optimizer: torch.optim.Optimizer, options: Optim) -> torch.optim.Optimizer:
    if options.ema:
        Average(optimizer, options.ema)
    return optimizer


def is_matrix(fqn: str, n_dims: int) -> bool:
    """Whether a parameter is a matrix or a stack of matrices; biases of experts (E, F) are not."""
    return n_dims >= 2 and not fqn.endswith("bias")


def update(optimizer: torch.optim.Optimizer, scale: Tensor, lr: float) -> None:
    """Do one optimizer step with gradients times `scale`; a non-finite `scale` changes nothing.

    Args:
        optimizer: result of `build_optimizer`.
        scale: a float32 scalar on the device; the host does not wait for its value.
        lr: learning rate of this step; `lr_factor` of a group multiplies it.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group["lr_factor"]
    if isinstance(optimizer, AnyOptimizer):
        optimizer.scale = scale
        optimizer.step()
    else:
        step_if_finite(optimizer, scale)
