"""Saves of a run, and the handling of failed saves."""

from collections.abc import Callable

from dtron.checkpoint.checkpointer import Checkpointer
from dtron.checkpoint.directory import CheckpointMetadata
from dtron.faults.signals import StopSignal


class Saving:
    """Saves checkpoints of one run; failures are handled as `checkpoint.on_error` says.

    Args:
        metadata: returns the metadata of the next checkpoint.
    """

    def __init__(
        self, checkpointer: Checkpointer, metadata: Callable[[], CheckpointMetadata]
    ) -> None:
        self.checkpointer, self.metadata = checkpointer, metadata

    def begin(self, durable: bool = False) -> None:
        """Save, or begin an asynchronous save; `durable` as for `Checkpointer.save`.

        Raises:
            CheckpointError: on all ranks.
        """
        self.checkpointer.save(self.metadata(), durable)

    def try_begin(self) -> bool:
        """Begin a save; return whether that worked.

        Raises:
            CheckpointError: `checkpoint.on_error` does not let the run continue.
        """
        return self.checkpointer.attempt(self.begin)

    def try_wait(self) -> bool:
        """Wait for an asynchronous save; return and raise as `try_begin`."""
        return self.checkpointer.attempt(self.checkpointer.wait)

    def report_failed(self, stop: StopSignal) -> None:
        """Handle an asynchronous save that has failed; ranks notice it at different steps."""
        if self.checkpointer.stops:
            stop.request()
        else:
            self.try_wait()
