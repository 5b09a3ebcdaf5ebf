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
        optimizer: has an attribute `scale`: factor of all gradients; if it is not finite, a step
            changes nothing.
        decay: d, in (0, 1).
    """

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float) -> None:
        self.decay = decay
        optimizer.register_step_pre_hook(self._begin)
        optimizer.register_step_post_hook(self._follow)

    @torch.no_grad()
    def _begin(self, optimizer: Any, *_: Any) -> None:
        """Start the averages at the weights before the first update."""
        for p in _parameters(optimizer):
            if EMA not in optimizer.state[p]:
                optimizer.state[p][EMA] = p.detach().clone()

    @torch.no_grad()
    def _follow(self, optimizer: Any, *_: Any) -> None:
        for p in _parameters(optimizer):
            weight = torch.full((), 1 - self.decay, dtype=p.dtype, device=local_part(p).device)
            if optimizer.scale is not None:
                weight = torch.where(optimizer.scale.isfinite(), weight, 0.0).to(p.dtype)
            local_part(optimizer.state[p][EMA]).lerp_(local_part(p), weight)


def _parameters(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
