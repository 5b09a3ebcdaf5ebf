"""When a run saves and what it does where that fails; which of its checkpoints it resumes from."""

import logging
from collections.abc import Callable, Sequence

import torch.distributed as dist

from dtron.checkpoint.checkpointer import Checkpointer
from dtron.checkpoint.dcp_storage import corrupt, read_index
from dtron.checkpoint.directory import (
    RESUME,
    Facts,
    check_agreement,
    check_content,
    newest_good,
    read_facts,
)
from dtron.checkpoint.locations import Tier
from dtron.config import RunConfig
from dtron.errors import CheckpointError
from dtron.faults.signals import StopSignal
from dtron.io.filesystem import Location
from dtron.setup.preflight import Checked, checked_facts

log = logging.getLogger("dtron")


class Saving:
    """Saves of one run, by `checkpoint.on_error`.

    Args:
        facts: gives what the next checkpoint says of itself.
    """

    def __init__(self, checkpointer: Checkpointer, facts: Callable[[], Facts]) -> None:
        self.checkpointer, self.facts = checkpointer, facts

    def begin(self, durable: bool = False) -> None:
        """Save, or begin to beside training; `durable` as for `Checkpointer.save`. Raises
        CheckpointError."""
        self.checkpointer.save(self.facts(), durable)

    def try_begin(self) -> bool:
        """Save; whether it worked. Raises CheckpointError where the run does not go on without."""
        return self.checkpointer.tried(self.begin)

    def try_wait(self) -> bool:
        """Wait for a save beside training, likewise."""
        return self.checkpointer.tried(self.checkpointer.wait)

    def report_failed(self, stop: StopSignal) -> None:
        """A save beside training has failed on all ranks, which learn of it at different steps."""
        if self.checkpointer.stops:
            stop.request()
        else:
            self.try_wait()


def verified(
    config: RunConfig, checked: Checked, group: dist.ProcessGroup
) -> tuple[Location, Facts]:
    """The checkpoint to resume, or of `latest` the newest one whose files are what was written. All
    ranks call it together. Raises CheckpointError on all of them."""
    checkpoint, facts = checked.checkpoint, checked.facts
    assert checkpoint is not None, "the run resumes one"
    assert facts is not None, "it was read"
    if not config.checkpoint.verify:
        return checkpoint, facts
    if checked.resume != "latest":
        check_content(checkpoint, group, RESUME)
        return checkpoint, facts
    checkpoint = _newest_whole(checked.tiers, checkpoint, group)
    return checkpoint, checked_facts(config, checked.model, checkpoint)


def before_step(
    tiers: Sequence[Tier], below: int, group: dist.ProcessGroup
) -> tuple[Location, Facts]:
    """The newest checkpoint of a run, of an earlier step than `below`, whose files are what was
    written. All ranks call it together. Raises CheckpointError on all of them."""
    path = newest_good([tier.folder for tier in tiers], below=below)
    if path is None:
        raise CheckpointError(f"no checkpoint is of an earlier step than {below}")
    check_agreement(path, group)
    path = _newest_whole(tiers, path, group)
    return path, read_facts(path)


def _newest_whole(
    tiers: Sequence[Tier], checkpoint: Location, group: dist.ProcessGroup
) -> Location:
    """The checkpoint, or the newest before it whose files are what was written."""
    while wrong := corrupt(checkpoint, read_index(checkpoint).files, group):
        log.warning("%s: %s; looking for an older checkpoint", checkpoint, ", ".join(wrong))
        older = newest_good([tier.folder for tier in tiers], after=checkpoint)
        assert older is not None, "none is left, which raises"
        checkpoint = older
        check_agreement(checkpoint, group)
    return checkpoint
