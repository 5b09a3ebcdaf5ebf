"""Detect loss spikes on the device, with the same result on all ranks.

Let x be the loss of a step, c = min(x, mean + k * deviation) the clipped loss, which limits the
effect of an outlier, and d = 1 - 1 / window the decay of the averages:

    spike        x > mean + k * deviation,  deviation = max(1.2533 * a, 0.005 * |mean|)
    a         <- d * a + (1 - d) * |c - mean|      (mean absolute deviation)
    mean      <- d * mean + (1 - d) * c

1.2533 = sqrt(pi / 2), for a normal distribution. In the first `window` steps no step is a spike,
c = x, and d = 1 - 1 / (steps + 1) gives plain means. A non-finite loss does not change the state;
its gradients are non-finite too, so that its step is skipped. The spike flag is read one step late,
so that the host does not wait for the device.
"""

import math
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

_NORMAL = math.sqrt(math.pi / 2)
_SMALLEST = 0.005
"""Minimum deviation, relative to the mean, for losses that hardly vary."""


@dataclass(frozen=True)
class Spike:
    """A step with a loss above the limit."""

    step: int
    """1-based."""
    loss: float
    limit: float

    def __str__(self) -> str:
        return f"loss spike at step {self.step}: {self.loss:.4f}, above {self.limit:.4f}"


class Spikes:
    """Spike detector of a run, with equal results on all ranks.

    Args:
        window: number of steps of the moving averages.
        deviations: k of the formula.
        skips: whether steps with a spike are skipped.
        copies: number of ranks with the same partial loss (tp).
    """

    def __init__(
        self, window: int, deviations: float, skips: bool, copies: int, device: torch.device | str
    ) -> None:
        self.window, self.deviations, self.skips, self.copies = window, deviations, skips, copies
        self.state = torch.zeros(3, dtype=torch.float64, device=device)  # mean, a, steps
        self._unread: list[tuple[int, Tensor, torch.cuda.Event | None]] = []

    @torch.no_grad()
    def observe(self, partial_loss: Tensor, step: int) -> Tensor:
        """Return whether this step's loss is a spike: a bool scalar on the device.

        Args:
            partial_loss: this rank's partial loss.
            step: 1-based.
        """
        loss = partial_loss.double() / self.copies
        dist.all_reduce(loss)  # over all ranks, for equal bits on all of them
        mean, absolute, steps = self.state.unbind()
        deviation = torch.maximum(_NORMAL * absolute, _SMALLEST * mean.abs())
        limit = mean + self.deviations * deviation
        ready = steps >= self.window
        spike = ready & (loss > limit)
        cut = torch.where(ready, torch.minimum(loss, limit), loss)
        weight = 1 / torch.clamp(steps + 1, max=self.window)
        # The first step has no mean yet.
        away = torch.where(steps > 0, (cut - mean).abs(), 0.0)
        moved = torch.stack(
            [mean + weight * (cut - mean), absolute + weight * (away - absolute), steps + 1]
        )
        self.state = torch.where(loss.isfinite(), moved, self.state)
        self._unread.append((step, *_to_host(torch.stack([spike.double(), loss, limit]))))
        return spike

    def read(self, before: int) -> list[Spike]:
        """Return the spikes of steps before `before` that were not returned yet."""
        found = []
        while self._unread and self._unread[0][0] < before:
            step, values, event = self._unread.pop(0)
            if event is not None:
                event.synchronize()
            spiked, loss, limit = values.tolist()
            found += [Spike(step, loss, limit)] if spiked else []
        return found

    def forget(self, step: int) -> None:
        """Forget the unread results of steps from `step` (1-based) on, which are repeated."""
        self._unread = [each for each in self._unread if each[0] < step]

    def state_dict(self) -> dict[str, float]:
        """Return the state for a checkpoint; waits for the device."""
        mean, absolute, steps = self.state.tolist()
        return {"mean": mean, "absolute": absolute, "steps": steps}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Load a `state_dict`; an empty dict resets the state."""
        names = ("mean", "absolute", "steps")
        self.state = self.state.new_tensor([state.get(name, 0.0) for name in names])
        self._unread = []


def _to_host(values: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    if values.device.type != "cuda":
        return values, None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    return host, event
