"""Saves of a run, the handling of failed saves, and the validation loss of the best checkpoint."""

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from dtron.checkpoint.checkpointer import Checkpointer
from dtron.checkpoint.metadata import CheckpointMetadata
from dtron.faults.signals import StopSignal


class Saving:
    """Saves checkpoints of one run; handles failed saves according to `checkpoint.on_error`.

    Args:
        metadata: returns the metadata of the next checkpoint.
    """

    def __init__(
        self, checkpointer: Checkpointer, metadata: Callable[[], CheckpointMetadata]
    ) -> None:
        self.checkpointer, self.metadata = checkpointer, metadata

    def begin(self, durable: bool = False) -> None:
        """Save, or begin an asynchronous save; `durable`: also copy to the durable location.

        Raises:
            CheckpointError: the save failed; on all ranks.
        """
        self.checkpointer.save(self.metadata(), durable)

    def try_begin(self, durable: bool = False) -> bool:
        """Begin a save, as `begin`; return False if the save failed and the run continues.

        Raises:
            CheckpointError: the save failed, and `checkpoint.on_error` stops the run.
        """
        return self.checkpointer.attempt(functools.partial(self.begin, durable))

    def try_wait(self) -> bool:
        """Wait for an asynchronous save; return False if the save failed and the run continues.

        Raises:
            CheckpointError: the save failed, and `checkpoint.on_error` stops the run.
        """
        return self.checkpointer.attempt(self.checkpointer.wait)

    def report_failed(self, stop: StopSignal) -> None:
        """After a failed asynchronous save, request a stop or log the error (checkpoint.on_error).

        Ranks may notice the failure at different steps.
        """
        if self.checkpointer.stops:
            stop.request()
        else:
            self.try_wait()


class BestLoss:
    """The lowest validation loss of a run so far, the same on all ranks.

    Args:
        metric: `checkpoint.best`; empty: nothing is tracked.
        stop_after: `train.stop_after`.
        group: CPU process group of all ranks.
    """

    def __init__(self, metric: str, stop_after: int, group: dist.ProcessGroup) -> None:
        self.metric, self.stop_after, self.group = metric, stop_after, group
        self.loss, self.step, self.since = math.inf, 0, 0
        """Loss and step of the best validation; number of validations since."""

    def observe(self, losses: Mapping[str, float], step: int) -> None:
        """Compare the losses of a validation after `step`; all ranks call it together.

        A loss that is not a number is no improvement.
        """
        if not self.metric:
            return
        loss = torch.tensor(losses[self.metric], dtype=torch.float64)
        dist.broadcast(loss, src=0, group=self.group)  # ranks must agree to the bit
        improved = loss.item() < self.loss
        self.since = 0 if improved else self.since + 1
        if improved:
            self.loss, self.step = loss.item(), step

    @property
    def stops(self) -> bool:
        """Whether the run ends early."""
        return 0 < self.stop_after <= self.since

    def state_dict(self) -> dict[str, Any]:
        """Return the state for checkpoints; empty before the first validation with a loss."""
        if not self.step:
            return {}
        found = {"loss": self.loss, "step": self.step, "since": self.since}
        return {"metric": self.metric, **found}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of a checkpoint; a state of another metric is ignored."""
        same = bool(state) and state["metric"] == self.metric
        self.loss, self.step, self.since = (
            (state["loss"], state["step"], state["since"]) if same else (math.inf, 0, 0)
        )
