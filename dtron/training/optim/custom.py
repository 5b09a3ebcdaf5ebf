"""Optimizers outside of dtron: MODULE:NAME, entry points of installed packages, and a callable.

A factory takes the trainable parameters of a rank, by FQN, and the section [optim]. Parameters are
DTensors where the layout shards them, as the operators of torch's own optimizers accept them. The
optimizer's state has tensors only, of the parameter's shape or scalars, which checkpoints hold.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from dtron.config import MOMENTS, Optim
from dtron.errors import ConfigError, shorten
from dtron.io.user_code import check_unique, import_custom

GROUP = "dtron.optimizers"
"""Group of entry points `SHORT_NAME = "MODULE:NAME"`."""
OptimizerFactory = Callable[[Sequence[tuple[str, Tensor]], Optim], torch.optim.Optimizer]
"""([(FQN, parameter), ...], section [optim]) -> an optimizer of these parameters."""


def custom_optimizer(name: str) -> OptimizerFactory | None:
    """Import the factory of an `optim.name` outside of dtron; None: it is an optimizer of dtron.

    Raises:
        ConfigError: the import fails, the object is not callable, or several have the name.
    """
    check_unique("optim.name", name, GROUP, name in MOMENTS)
    if name in MOMENTS or (found := import_custom("optim.name", name, GROUP)) is None:
        return None
    setting, factory = found
    if not callable(factory):
        raise ConfigError(
            f"{setting} is a {type(factory).__name__}, not a function; name a function of named "
            "parameters and the section [optim]"
        )
    return cast(OptimizerFactory, factory)


def factory_name(factory: OptimizerFactory) -> str:
    """Return `MODULE:NAME` of a factory; of a callable object, those of its class."""
    named: Any = factory if hasattr(factory, "__qualname__") else type(factory)
    return f"{named.__module__}:{named.__qualname__}"


def build_custom(
    factory: OptimizerFactory, named: Sequence[tuple[str, Tensor]], options: Optim
) -> torch.optim.Optimizer:
    """Build a custom optimizer; its groups' learning rates become factors of `optim.lr`.

    Raises:
        ConfigError: the result is not an optimizer of all trainable parameters.
    """
    trained = [(fqn, p) for fqn, p in named if p.requires_grad]
    made: Any = factory(trained, options)
    name = shorten(getattr(factory, "__name__", repr(factory)))
    if not isinstance(made, torch.optim.Optimizer):
        raise ConfigError(
            f"the optimizer factory {name} returned a {type(made).__name__}; return a "
            "torch.optim.Optimizer"
        )
    held = {p for group in made.param_groups for p in group["params"]}
    if missing := [fqn for fqn, p in trained if p not in held]:
        raise ConfigError(
            f"the optimizer factory {name} left out {shorten(', '.join(missing))}; its groups need "
            "all parameters that it is given"
        )
    for group in made.param_groups:
        group["lr_factor"] = float(group["lr"]) / options.lr
    return made


def step_if_finite(optimizer: torch.optim.Optimizer, scale: Tensor) -> None:
    """Multiply gradients by `scale` and step; if it is not finite, do nothing.

    Waits for the device: a custom optimizer cannot skip on the device.
    """
    if not bool(scale.isfinite()):
        return
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.mul_(scale.to(p.grad.dtype))
    optimizer.step()
