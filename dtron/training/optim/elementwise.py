"""SGD and Lion over shards.

Lion, with the gradient g, momentum m, learning rate lr:

    p = p (1 - lr decay) - lr sign(b1 m + (1 - b1) g),   m = b2 m + (1 - b2) g

Source: Lion, arXiv:2302.06675, algorithm 2.
"""

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from dtron.parallelisms.gradients import (
    flatten,
    local_gradients,
    local_part,
    scale_or_zero_,
    unflatten_,
)
from dtron.training.optim.moments import keep_dtype

LARGEST = 2**26
"""Elements that Lion updates at once, as one tensor: few kernels, and bounded memory."""


class SGD(torch.optim.SGD):
    """torch's SGD without momentum, applied to local shards.

    Attributes:
        scale: factor of all gradients; if it is not finite, a step changes nothing.
    """

    scale: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            members = [p for p in group["params"] if p.grad is not None]
            if not members:
                continue
            if self.scale is not None:
                scale_or_zero_(members, self.scale)
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


class Lion(torch.optim.Optimizer):
    """Lion, applied to local shards.

    Args:
        moments: dtype of the momentum; None: the dtype of the parameters.

    Attributes:
        scale: factor of all gradients; if it is not finite, a step changes nothing.
    """

    def __init__(
        self,
        groups: list[dict],
        moments: torch.dtype | None = None,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "weight_decay": weight_decay})
        self.scale: Tensor | None = None
        self.moments = moments
        keep_dtype(self, moments)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for members in _batches([p for p in group["params"] if p.grad is not None]):
                self._update(members, group["lr"], beta1, beta2, group["weight_decay"])

    def _update(
        self, members: list[Tensor], lr: float, beta1: float, beta2: float, decay: float
    ) -> None:
        moments = [local_part(self._moment(p)) for p in members]
        parameters = [local_part(p) for p in members]
        p, g = flatten(parameters), flatten(local_gradients(members))
        scale = torch.ones((), device=p.device) if self.scale is None else self.scale
        finite = scale.isfinite()  # if not, lr and the weight of g in m are 0: nothing changes
        g = torch.where(finite, g * scale, 0.0)
        m = flatten(moments).to(p.dtype)
        rate, weight = finite.double() * lr, (finite.double() * (1 - beta2)).to(p.dtype)
        p.mul_(1 - rate * decay).sub_(m.lerp(g, 1 - beta1).sign_().mul_(rate))
        unflatten_(parameters, p)
        unflatten_(moments, m.lerp_(g, weight).to(moments[0].dtype))

    def _moment(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, dtype=self.moments)
        return state["exp_avg"]


def _batches(members: list[Tensor]) -> Iterator[list[Tensor]]:
    """Yield the parameters in batches of one dtype and about LARGEST local elements."""
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for p in members:
        by_dtype.setdefault(p.dtype, []).append(p)
    for alike in by_dtype.values():
        batch, size = [], 0
        for p in alike:
            batch.append(p)
            size += local_part(p).numel()
            if size >= LARGEST:
                yield batch
                batch, size = [], 0
        if batch:
            yield batch
