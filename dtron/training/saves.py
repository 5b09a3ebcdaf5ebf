"""Saves of a run, and the handling of failed saves."""

from collections.abc import Callable

from dtron.checkpoint.checkpointer import Checkpointer
from dtron.checkpoint.directory import CheckpointMetadata
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

    def try_begin(self) -> bool:
        """Begin a save; return False if the save failed and the run continues.

        Raises:
            CheckpointError: the save failed, and `checkpoint.on_error` stops the run.
        """
        return self.checkpointer.attempt(self.begin)

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
