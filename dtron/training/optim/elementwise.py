"""SGD and Lion over shards."""

import torch
from torch import Tensor
from torch.optim.sgd import sgd

from dtron.kernels.lion import Rates, lion_
from dtron.parallelisms.gradients import local_gradients, local_part, scale_or_zero_
from dtron.training.optim.moments import keep_dtype


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
    """Lion, applied to local shards; see `dtron/kernels/lion.py` for its formula.

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
            members = [p for p in group["params"] if p.grad is not None]
            if not members:
                continue
            one = torch.ones((), device=members[0].device)
            beta1, beta2 = group["betas"]
            lion_(
                [local_part(p) for p in members],
                local_gradients(members),
                [local_part(self._moment(p)) for p in members],
                one if self.scale is None else self.scale,
                Rates(group["lr"], beta1, beta2, group["weight_decay"]),
            )

    def _moment(self, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        if not state:
            state["exp_avg"] = torch.zeros_like(parameter, dtype=self.moments)
        return state["exp_avg"]
