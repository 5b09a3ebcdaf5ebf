"""Exponential moving average of the weights (EMA), in the optimizer's state.

With decay d, after each update of the weights p:

    ema = d ema + (1 - d) p,   at first ema = p before the first update

A tensor `ema` in the state of each parameter is sharded as the parameter, and saved and resharded
as moments are. A skipped step changes nothing; the host does not wait for the device.
"""

from typing import Any

import torch
from torch import Tensor

from dtron.parallelisms.gradients import local_part
from dtron.training.optim.moments import EMA


class Average:
    """Keeps the average of an optimizer's parameters, by hooks around its steps.

    Args:
        optimizer: may have an attribute `scale`: factor of all gradients; if it is not finite, a
            step changes nothing.
        decay: d, in (0, 1).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float) -> None:
        self.decay = decay
        self._first: dict[Tensor, Tensor] = {}
        """Weights before the first update, during that step."""
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._follow)

    @torch.no_grad()
    def _begin(self, optimizer: Any, *_: Any) -> None:
        for p in _updated(optimizer):
            if EMA not in optimizer.state[p]:
                self._first[p] = p.detach().clone()

    @torch.no_grad()
    def _follow(self, optimizer: Any, *_: Any) -> None:
        for p in _updated(optimizer):
            weight = torch.full((), 1 - self.decay, dtype=p.dtype, device=local_part(p).device)
            if (scale := getattr(optimizer, "scale", None)) is not None:
                weight = torch.where(scale.isfinite(), weight, 0.0).to(p.dtype)
            state = optimizer.state[p]
            if EMA not in state:  # now, since optimizers make their own state if it is empty
                state[EMA] = self._first.pop(p)
            local_part(state[EMA]).lerp_(local_part(p), weight)


def _updated(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
