"""Optimizers, and the update with gradient clipping and skipping of non-finite gradients.

Clipping and skipping are decided on the device: `update` takes one scale for all gradients and
changes nothing if the scale is not finite. AdamW does both in its fused kernel.

Source: AdamW, arXiv:1711.05101.
"""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from dtron.config import Optim
from dtron.kernels.adamw import Counts, Rates, adamw_
from dtron.parallelisms.gradients import local_gradients, local_part, scale_or_zero_


class AdamW(torch.optim.AdamW):
    """AdamW on local shards, with fused kernels; settings and state are those of torch's AdamW.

    The update is elementwise, so that placements do not matter. On DTensors, torch would propagate
    placements for each list of tensors. On meshes of three or four axes, this takes up to a minute
    of the first step.

    Args:
        moments: dtype of the moments; None: the dtype of the parameters.

    Attributes:
        scale: factor of all gradients; if it is not finite, a step changes nothing.
    """

    def __init__(
        self, groups: list[dict], moments: torch.dtype | None = None, **settings: Any
    ) -> None:
        super().__init__(groups, fused=True, **settings)
        self.scale: Tensor | None = None
        self.moments = moments
        self._counts = [Counts() for _ in self.param_groups]
        if moments is not None:  # torch converts loaded moments to the dtype of their parameter
            self.register_load_state_dict_post_hook(_convert_moments)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group, counts in zip(self.param_groups, self._counts, strict=True):
            members = [p for p in group["params"] if p.grad is not None]
            if not members:
                continue
            states = [self._state(p) for p in members]
            beta1, beta2 = group["betas"]
            self._update(
                [local_part(p) for p in members],
                [local_part(p.grad) for p in members],
                [local_part(state["exp_avg"]) for state in states],
                [local_part(state["exp_avg_sq"]) for state in states],
                [state["step"] for state in states],
                torch.ones((), device=members[0].device) if self.scale is None else self.scale,
                Rates(group["lr"], beta1, beta2, group["eps"], group["weight_decay"]),
                counts,
            )

    def _update(
        self,
        parameters: list[Tensor],
        gradients: list[Tensor],
        firsts: list[Tensor],
        seconds: list[Tensor],
        steps: list[Tensor],
        scale: Tensor,
        rates: Rates,
        counts: Counts,
    ) -> None:
        # torch's kernel is faster on CPUs, supports float64, and updates many small tensors in one
        # launch. The Triton kernel supports other dtypes of moments.
        by_triton = all(p.is_cuda and p.dtype == torch.float32 for p in parameters)
        large = sum(p.numel() for p in parameters) >= _LARGE * len(parameters)
        if self.moments is not None or (by_triton and large):
            together = counts.together(steps)
            adamw_(parameters, gradients, firsts, seconds, together, scale, rates)
            return
        # Arguments of torch.amp's GradScaler: the kernel divides gradients by grad_scale, and skips
        # the update if found_inf is 1.
        finite = scale.isfinite()
        adamw(
            *(parameters, gradients, firsts, seconds, [], steps),
            fused=True,
            grad_scale=torch.where(finite, 1.0 / scale, 1.0).float(),
            found_inf=(~finite).float(),
            amsgrad=False,
            maximize=False,
            **asdict(rates),
        )

    def _state(self, parameter: Tensor) -> dict[str, Tensor]:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=parameter.device)
            for name in _MOMENTS:
                state[name] = self._zeros(parameter)
        return state

    def _zeros(self, parameter: Tensor) -> Tensor:
        return torch.zeros_like(parameter, dtype=self.moments)


class SGD(torch.optim.SGD):
    """torch's SGD without momentum, applied to local shards."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            members = [p for p in group["params"] if p.grad is not None]
            if members:
                shards = [local_part(p) for p in members]
                sgd(
                    shards,
                    local_gradients(members),
                    [None] * len(shards),
                    lr=group["lr"],
                    weight_decay=0.0,
                    momentum=0.0,
                    dampening=0.0,
                    nesterov=False,
                    maximize=False,
                    foreach=True,
                )


_MOMENTS = ("exp_avg", "exp_avg_sq")
_LARGE = 2**20
"""Mean number of elements per tensor above which updating a tensor takes longer than launching a
kernel for it (7 us on an H200)."""


def _convert_moments(optimizer: torch.optim.Optimizer) -> None:
    assert isinstance(optimizer, AdamW)
    for state in optimizer.state.values():
        state.update({m: state[m].to(optimizer.moments) for m in _MOMENTS if m in state})


def _adamw(groups: list[dict], options: Optim) -> torch.optim.Optimizer:
    moments = torch.bfloat16 if options.moments == "bfloat16" else None
    betas = (options.beta1, options.beta2)
    return AdamW(groups, moments, lr=options.lr, betas=betas, eps=options.eps)


def _sgd(groups: list[dict], options: Optim) -> torch.optim.Optimizer:
    return SGD([{"params": group["params"]} for group in groups], lr=options.lr)


OPTIMIZERS: dict[str, Callable[[list[dict], Optim], torch.optim.Optimizer]] = {
    "adamw": _adamw,
    "sgd": _sgd,
}


def build_optimizer(named: Iterable[tuple[str, Tensor]], options: Optim) -> torch.optim.Optimizer:
    """Build the optimizer; vectors (norms and biases, also of experts) get no weight decay.

    Args:
        named: (FQN, parameter) pairs; parameters without `requires_grad` are left out.
    """
    groups: dict[bool, list[Tensor]] = {}
    for name, parameter in named:
        if parameter.requires_grad:  # biases of experts (E, F) have two dims
            matrix = parameter.dim() >= 2 and not name.endswith("bias")
            groups.setdefault(matrix, []).append(parameter)
    decays = [
        {"params": members, "weight_decay": options.weight_decay if matrix else 0.0}
        for matrix, members in groups.items()
    ]
    return OPTIMIZERS[options.name](decays, options)


def update(optimizer: torch.optim.Optimizer, scale: Tensor, lr: float) -> None:
    """Do one optimizer step with gradients times `scale`; a non-finite `scale` changes nothing.

    Args:
        scale: a float32 scalar on the device; the host does not wait for its value.
        lr: learning rate of this step.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr
    if isinstance(optimizer, AdamW):
        optimizer.scale = scale
    else:
        scale_or_zero_((p for group in optimizer.param_groups for p in group["params"]), scale)
    optimizer.step()
