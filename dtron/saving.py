"""When a run saves and what it does where that fails; which of its checkpoints it resumes from."""

import logging
from collections.abc import Callable
from pathlib import Path

import torch.distributed as dist

from dtron.checkpoint import Checkpointer
from dtron.config import RunConfig
from dtron.errors import CheckpointError
from dtron.faults.signals import StopSignal
from dtron.models.config import DecoderConfig
from dtron.preflight import find_checkpoint
from dtron.published import (
    RESUME,
    Facts,
    check_agreement,
    check_content,
    newest_good,
    read_facts,
)
from dtron.storage import corrupt, read_index

log = logging.getLogger("dtron")


class Saving:
    """Saves of one run, by `checkpoint.on_error`.

    Args:
        on_error: `stop` or `continue`.
        facts: gives what the next checkpoint says of itself.
    """

    def __init__(
        self, checkpointer: Checkpointer, on_error: str, facts: Callable[[], Facts]
    ) -> None:
        self.checkpointer, self.on_error, self.facts = checkpointer, on_error, facts

    def begin(self) -> None:
        """Save, or begin to beside training. Raises CheckpointError."""
        self.checkpointer.save(self.facts())

    def try_begin(self) -> bool:
        """Save; whether it worked. Raises CheckpointError where the run does not go on without."""
        return self._worked(self.begin)

    def try_wait(self) -> bool:
        """Wait for a save beside training, likewise."""
        return self._worked(self.checkpointer.wait)

    def report_failed(self, stop: StopSignal) -> None:
        """A save beside training has failed on all ranks, which learn of it at different steps."""
        if self.checkpointer.failed and self.on_error == "stop":
            stop.request()
        elif self.checkpointer.failed:
            self.try_wait()

    def _worked(self, act: Callable[[], None]) -> bool:
        try:
            act()
        except CheckpointError as error:
            if self.on_error == "stop":
                raise
            log.error("%s; training goes on without it (checkpoint.on_error)", error)
            return False
        return True


def verified(
    config: RunConfig,
    model: DecoderConfig,
    checkpoint: Path,
    facts: Facts,
    group: dist.ProcessGroup,
) -> tuple[Path, Facts]:
    """The checkpoint, or of `latest` the newest one whose files are what was written."""
    if not config.checkpoint.verify:
        return checkpoint, facts
    if config.checkpoint.resume != "latest":
        check_content(checkpoint, group, RESUME)
        return checkpoint, facts
    while wrong := corrupt(checkpoint, read_index(checkpoint).files, group):
        log.warning("%s: %s; looking for an older checkpoint", checkpoint, ", ".join(wrong))
        older, said = find_checkpoint(config, model, below=facts.step)
        assert older is not None, "none is left, which raises"
        assert said is not None, "it was read"
        checkpoint, facts = older, said
        check_agreement(checkpoint, group)
    return checkpoint, facts


def before_step(checkpoints: Path, below: int, group: dist.ProcessGroup) -> tuple[Path, Facts]:
    """The newest checkpoint of a run, of an earlier step than `below`, whose files are what was
    written. All ranks call it together. Raises CheckpointError on all of them."""
    while True:
        path = newest_good(checkpoints, below)
        assert path is not None, "none is left, which raises"
        check_agreement(path, group)
        facts = read_facts(path)
        if not (wrong := corrupt(path, read_index(path).files, group)):
            return path, facts
        log.warning("%s: %s; looking for an older checkpoint", path, ", ".join(wrong))
        below = facts.step
