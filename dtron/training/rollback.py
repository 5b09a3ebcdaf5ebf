"""Rollback after a loss spike: load an older checkpoint and skip the batches since then."""

import logging
from collections.abc import Sequence

from dtron.checkpoint.checkpointer import Checkpointer
from dtron.checkpoint.find import check_agreement, newest_good
from dtron.checkpoint.locations import CheckpointLocation
from dtron.checkpoint.metadata import CheckpointMetadata, read_metadata
from dtron.config import Faults
from dtron.errors import CheckpointError, TrainingError
from dtron.faults.spikes import Spike
from dtron.io.filesystem import Location
from dtron.setup.resume import newest_intact

log = logging.getLogger("dtron")


class Rollback:
    """Loads a checkpoint from before a loss spike, at most `faults.max_rollbacks` times."""

    def __init__(
        self, faults: Faults, locations: Sequence[CheckpointLocation], checkpointer: Checkpointer
    ) -> None:
        self.faults, self.locations, self.checkpointer = faults, locations, checkpointer
        self.n_rollbacks = 0

    def load(self, spike: Spike, step: int) -> tuple[Location, CheckpointMetadata]:
        """Load model and optimizer from a checkpoint before the spike; all ranks call it together.

        The data position is unchanged, so that all batches since that checkpoint are skipped.

        Args:
            step: the run's current step.
        Raises:
            TrainingError: on all ranks, if no intact checkpoint is old enough, or after too many
                rollbacks.
        """
        if self.n_rollbacks >= self.faults.max_rollbacks:
            raise TrainingError(
                f"{spike}, after {self.n_rollbacks} rollbacks (faults.max_rollbacks); lower "
                "optim.lr"
            )
        try:
            checkpoint, metadata = self._newest_before(spike.step - self.faults.rollback_steps + 1)
        except CheckpointError as error:
            raise TrainingError(
                f"{spike}, and there is no checkpoint for a rollback: {error}"
            ) from error
        self.n_rollbacks += 1
        self.checkpointer.load(checkpoint)
        log.warning(
            "rolled back to %s; the batches of steps %d to %d are skipped",
            checkpoint,
            metadata.step + 1,
            step,
        )
        return checkpoint, metadata

    def _newest_before(self, step: int) -> tuple[Location, CheckpointMetadata]:
        """Return the newest intact checkpoint of a step before `step`, with its metadata."""
        path = newest_good([each.folder for each in self.locations], below=step)
        if path is None:
            raise CheckpointError(f"no checkpoint before step {step} to roll back to")
        check_agreement(path, self.checkpointer.group)
        path = newest_intact(self.locations, path, self.checkpointer.group)
        return path, read_metadata(path)
