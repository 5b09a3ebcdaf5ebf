"""AdamW over shards, with clipping and skipping inside its fused kernel.

Source: AdamW, arXiv:1711.05101.
"""

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from dtron.kernels.adamw import Counts, Rates, adamw_
from dtron.parallelisms.gradients import local_part
from dtron.training.optim.moments import keep_dtype


class AdamW(torch.optim.AdamW):
    """AdamW on local shards, with fused kernels; settings and state are those of torch's AdamW.

    The update is elementwise, so that placements do not matter. On DTensors, torch would propagate
    placements for each list of tensors. On meshes of three or four axes, this takes up to a minute
    of the first step.

    Args:
        groups: parameters, or groups of parameters with settings of their own.
        moments: dtype of the moments; None: the dtype of the parameters.
        settings: settings of torch.optim.AdamW: lr, betas, eps, weight_decay.

    Attributes:
        scale: factor of all gradients; if it is not finite, a step changes nothing.
    """

    def __init__(
        self, groups: Iterable[Any], moments: torch.dtype | None = None, **settings: Any
    ) -> None:
        super().__init__(groups, fused=True, **settings)
        self.scale: Tensor | None = None
        self.moments = moments
        self._counts = [Counts() for _ in self.param_groups]
        keep_dtype(self, moments)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update all parameters that have a gradient."""
        self._update_all()

    def _update_all(self) -> None:
        for group, counts in zip(self.param_groups, self._counts, strict=True):
            if members := [p for p in group["params"] if p.grad is not None]:
                self._update_group(members, group, counts)

    def _update_group(self, members: list[Tensor], group: dict, counts: Counts) -> None:
        self._update_members(members, group, counts, self._needs_adamw_(members))

    def _update_members(
        self, members: list[Tensor], group: dict, counts: Counts, by_adamw_: bool
    ) -> None:
        states = [self._state(p) for p in members]
        self._update(
            [local_part(p) for p in members],
            [local_part(p.grad) for p in members],  # type: ignore[arg-type]
            [local_part(state["exp_avg"]) for state in states],
            [local_part(state["exp_avg_sq"]) for state in states],
            [state["step"] for state in states],
            self._factor(members[0]),
            rates_of(group),
            counts,
            by_adamw_,
        )

    def _needs_adamw_(self, members: list[Tensor]) -> bool:
        """Whether dtron's `adamw_` updates these parameters, instead of torch's fused kernel.

        torch's kernel is faster on CPUs, supports float64, and updates many small tensors in one
        launch. The Triton kernel supports other dtypes of moments.
        """
        shards = [local_part(p) for p in members]
        by_triton = all(p.is_cuda and p.dtype == torch.float32 for p in shards)
        large = sum(p.numel() for p in shards) >= _LARGE * len(shards)
        return self.moments is not None or (by_triton and large)

    def _factor(self, parameter: Tensor) -> Tensor:
        return torch.ones((), device=parameter.device) if self.scale is None else self.scale

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
        by_adamw_: bool,
    ) -> None:
        if by_adamw_:
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
            for name in MOMENTS:
                state[name] = self._zeros(parameter)
        return state

    def _zeros(self, parameter: Tensor) -> Tensor:
        return torch.zeros_like(parameter, dtype=self.moments)


def rates_of(group: dict) -> Rates:
    """Return the scalars of an update from a parameter group's settings."""
    beta1, beta2 = group["betas"]
    return Rates(group["lr"], beta1, beta2, group["eps"], group["weight_decay"])


MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of the moments in a parameter's state."""
_LARGE = 2**20
"""Mean number of elements per tensor above which updating a tensor takes longer than launching a
kernel for it (7 us on an H200)."""
