"""Search for the checkpoint that a run resumes from, before the process group starts.

All ranks search the checkpoint locations of the run. If these are object stores, only rank 0
searches, and sends the result to the other ranks. Once the process group exists, ranks agree on one
checkpoint (`ResumeState.agree`) and compare its files with their hashes (`ResumeState.verify`).
"""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch.distributed as dist
from pydantic import TypeAdapter

from dtron.checkpoint.dcp_storage import corrupt, read_index
from dtron.checkpoint.directory import PROBE, complete
from dtron.checkpoint.find import (
    RESUME,
    agree,
    check_agreement,
    check_content,
    find,
    newest_good,
)
from dtron.checkpoint.initial_weights import InitialWeights
from dtron.checkpoint.locations import CheckpointLocation, checkpoint_locations, location_of
from dtron.checkpoint.metadata import CheckpointMetadata, share
from dtron.config import RunConfig, Train
from dtron.errors import CheckpointError, ConfigError, DtronError, cause_of
from dtron.io.filesystem import Location, dangling_link, listed, location
from dtron.io.remote_path import Remote
from dtron.io.untrusted import MB, read_text
from dtron.models.config import DecoderConfig
from dtron.run.directory import RunDir
from dtron.run.process import Place
from dtron.run.rendezvous import Rendezvous
from dtron.setup.resume_checks import read_compatible

log = logging.getLogger("dtron")


@dataclass(frozen=True)
class ResumeState:
    """The checkpoint that a run resumes from, or the weights that the run starts from."""

    mode: str
    """`checkpoint.resume`, or `latest` after torchrun has restarted the job."""
    locations: Sequence[CheckpointLocation]
    """The run's checkpoint locations."""
    folders: Sequence[Location]
    """Folders of `locations`, listed at the start; empty on ranks that did not search."""
    checkpoint: Location | None = None
    metadata: CheckpointMetadata | None = None
    """Metadata of the checkpoint; None without a checkpoint."""
    initial: InitialWeights | None = None
    """Initial weights; None: random initialization, or the run resumes from `checkpoint`."""
    found_by_rank_0: bool = False
    """Whether only rank 0 has searched, in object stores."""

    def is_finished(self, train: Train) -> bool:
        """Whether training has ended, and the checkpoint is in the durable location."""
        if self.metadata is None:
            return False
        only_one = self.locations[0] is self.locations[-1]
        durable = only_one or location_of(self.locations[:-1], self.checkpoint) is None
        ended = self.metadata.step >= train.steps or self._stopped_early(train)
        return ended and durable

    def end(self, train: Train) -> str:
        """Return why a finished run has ended, and what lets it go on."""
        assert self.metadata is not None, "the run is finished"
        if self.metadata.step >= train.steps:
            return (
                f"{self.checkpoint} is the checkpoint of the last step; train.steps = {train.steps}"
            )
        return (
            f"it stopped early at {self.checkpoint}, after {train.stop_after} validations without "
            "an improvement; a larger train.stop_after, or 0, continues it"
        )

    def _stopped_early(self, train: Train) -> bool:
        assert self.metadata is not None, "there is a checkpoint"
        return 0 < train.stop_after <= self.metadata.best.get("since", 0)

    def agree(
        self, config: RunConfig, model: DecoderConfig, group: dist.ProcessGroup
    ) -> "ResumeState":
        """Agree on one checkpoint, which each rank reads from a location that it sees.

        All ranks of `group`, a CPU process group, call this. Raises CheckpointError on all ranks:
        ranks see different checkpoints.
        """
        if self.found_by_rank_0 and self.checkpoint is not None:
            return replace(self, checkpoint=share(self.checkpoint, group))
        if self.mode != "latest" or len(self.locations) == 1:
            check_agreement(self.checkpoint, group)
            return self
        found = agree(self.checkpoint, [each.folder for each in self.locations], group)
        metadata = read_compatible(config, model, found) if found else None
        return replace(self, checkpoint=found, metadata=metadata)

    def verify(
        self, config: RunConfig, model: DecoderConfig, group: dist.ProcessGroup
    ) -> "ResumeState":
        """Compare the checkpoint's files with their hashes; all ranks of `group` call it.

        With `latest`, fall back to an older checkpoint. Raises CheckpointError on all ranks: a file
        is damaged and, with `latest`, no older checkpoint can be used.

        With `latest`, fall back to an older checkpoint. Raises CheckpointError: a file is damaged
        and no older checkpoint can be used; on all ranks.
        """
        assert self.checkpoint is not None, "the run resumes from a checkpoint"
        if not config.checkpoint.verify:
            return self
        if self.mode != "latest":
            check_content(self.checkpoint, group, RESUME)
            return self
        checkpoint = newest_intact(self.locations, self.checkpoint, group)
        metadata = read_compatible(config, model, checkpoint)
        return replace(self, checkpoint=checkpoint, metadata=metadata)


def find_resume_state(
    config: RunConfig,
    model: DecoderConfig,
    place: Place,
    rendezvous: Rendezvous | None,
    starts: bool,
) -> ResumeState:
    """Find the checkpoint to resume from, and check that checkpoints can be written.

    Args:
        rendezvous: rendezvous of all ranks, which call this together; None: one process only.
        starts: whether the run starts now; then also check that the object store can be written.
    Raises:
        CheckpointError: the checkpoint is missing, damaged, of another model or optimizer, or has
            weights only.
        ConfigError: a location cannot be written, or holds another run's checkpoints.
    """
    locations, restarted = checkpoint_locations(config), _is_restart(RunDir(config.run.dir), place)

    def look() -> ResumeState:
        return _look(config, model, place, locations, restarted, probe=starts)

    by_rank_0 = rendezvous is not None and place.world_size > 1 and _all_remote(config, locations)
    if rendezvous is None or not by_rank_0:
        return look()
    if place.rank > 0 and isinstance(locations[-1].folder, Remote):
        locations[-1].folder.connect()  # while rank 0 searches
    return _look_on_rank_0(look, locations, rendezvous, config.checkpoint.timeout_seconds)


def find_checkpoint(
    config: RunConfig, model: DecoderConfig, resume: str, folders: Sequence[Location]
) -> tuple[Location | None, CheckpointMetadata | None]:
    """Find the checkpoint to resume from and read its metadata; None, None: start from step 0.

    Args:
        resume: `latest`, a run, a folder of checkpoints, a checkpoint, or empty.
        folders: folders of this run's checkpoints.
    Raises:
        CheckpointError: the checkpoint is damaged, of another model or optimizer, or has weights
            only.
        ConfigError: `resume` is a path to a checkpoint that has already reached train.steps.
    """
    try:
        checkpoint = find(resume, folders)
    except OSError as error:
        raise _unlisted(resume, error) from error
    if checkpoint is None:
        return None, None
    metadata = read_compatible(config, model, checkpoint)
    if metadata.step >= config.train.steps and resume != "latest":
        raise ConfigError(
            f"train.steps = {config.train.steps} is already reached by the checkpoint of step "
            f"{metadata.step}; raise train.steps to continue"
        )
    return checkpoint, metadata


def newest_intact(
    locations: Sequence[CheckpointLocation], checkpoint: Location, group: dist.ProcessGroup
) -> Location:
    """Return the checkpoint, or the newest older checkpoint, whose files match their hashes.

    All ranks of `group` call this. Raises CheckpointError: all checkpoints are damaged, or ranks
    see different checkpoints.
    """
    while damaged := corrupt(checkpoint, read_index(checkpoint).files, group):
        log.warning("%s: %s; looking for an older checkpoint", checkpoint, ", ".join(damaged))
        older = newest_good([each.folder for each in locations], after=checkpoint)
        assert older is not None, "newest_good raises if no checkpoint is left"
        checkpoint = older
        check_agreement(checkpoint, group)
    return checkpoint


def _is_restart(rundir: RunDir, place: Place) -> bool:
    """Whether torchrun has restarted a job that had begun to train.

    Compare jobs by torchrun's run id, if set: when torchrun restarts a job with another number of
    ranks, it does not raise its restart count.
    """
    if not place.job and place.attempt == 0:
        if place.rank == 0 and os.path.lexists(rundir.begun):
            rundir.forget_begun()  # the record is of an earlier job
        return False
    with contextlib.suppress(OSError, ValueError):
        return read_text(rundir.begun, MB) == place.job
    return False


def _look(
    config: RunConfig,
    model: DecoderConfig,
    place: Place,
    locations: Sequence[CheckpointLocation],
    restarted: bool,
    probe: bool,
) -> ResumeState:
    """Search on this rank. With `probe`, rank 0 also checks that an object store can be written."""
    for key, folder in (("dir", config.checkpoint.dir), ("fast_dir", config.checkpoint.fast_dir)):
        if folder and isinstance(where := location(folder), Path):
            _check_folder(f"checkpoint.{key}", where)
    if probe and place.rank == 0 and isinstance(locations[-1].folder, Remote):
        _check_store(config.checkpoint.dir, locations[-1].folder)
    try:
        folders = [listed(each.folder) for each in locations]
    except OSError as error:
        raise _unlisted(config.checkpoint.resume, error) from error
    mode, checkpoint, metadata = _newest_or_named(config, model, restarted, folders)
    recorded = RunDir(config.run.dir).noted_checkpoint()
    if mode == "latest" and checkpoint is None and recorded:
        raise CheckpointError(
            f"checkpoint.resume = 'latest' finds no checkpoint in {locations[-1].folder}, but this "
            f"run wrote {recorded}; mount or restore its file system, or start from step 0 with "
            "checkpoint.resume= (empty)"
        )
    own = location_of(locations, checkpoint)
    if own is None and not restarted:
        _check_unused(config, folders)
    found = ResumeState(mode, locations, folders, checkpoint, metadata)
    if own and not found.is_finished(config.train):
        _check_own_folder(own.folder, checkpoint)
    return found


def _newest_or_named(
    config: RunConfig, model: DecoderConfig, restarted: bool, folders: Sequence[Location]
) -> tuple[str, Location | None, CheckpointMetadata | None]:
    """Return `ResumeState.mode`, the checkpoint, and its metadata.

    A restarted job continues from its newest checkpoint. The first start of a job, or a restart
    without a checkpoint, follows `checkpoint.resume`.
    """
    if restarted:
        found = find_checkpoint(config, model, "latest", folders)
        if found[0] is not None:
            return "latest", *found
    resume = config.checkpoint.resume
    return resume, *find_checkpoint(config, model, resume, folders)


def _all_remote(config: RunConfig, locations: Sequence[CheckpointLocation]) -> bool:
    """Whether all locations are object stores, where all ranks see the same checkpoints."""
    resume = config.checkpoint.resume
    folders = [each.folder for each in locations]
    folders += [location(resume)] if resume not in ("", "latest") else []
    return all(isinstance(folder, Remote) for folder in folders)


def _look_on_rank_0(
    look: Callable[[], ResumeState],
    locations: Sequence[CheckpointLocation],
    rendezvous: Rendezvous,
    seconds: float,
) -> ResumeState:
    """Search on rank 0, and send the result or the error to all ranks."""
    found, failure = None, None
    if rendezvous.place.rank == 0:
        try:
            found = look()
        except DtronError as error:
            failure = error
    answer = {"error": str(failure)} if failure else {}
    if found is not None:
        metadata = asdict(found.metadata) if found.metadata else None
        answer = {"mode": found.mode, "at": str(found.checkpoint or ""), "metadata": metadata}
    text = rendezvous.broadcast_from_rank_0("checkpoint", json.dumps(answer), seconds)
    if failure is not None:
        raise failure
    if found is not None:
        return replace(found, found_by_rank_0=True)
    answer = json.loads(text)
    if "error" in answer:
        raise CheckpointError(answer["error"])
    metadata = TypeAdapter(CheckpointMetadata | None).validate_python(answer["metadata"])
    checkpoint = location(answer["at"]) if answer["at"] else None
    return ResumeState(answer["mode"], locations, [], checkpoint, metadata, found_by_rank_0=True)


def _unlisted(resume: str, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"checkpoint.resume = {resume!r}: checkpoints cannot be listed: {error}; start again "
        "when the disk or store answers"
    )


def _check_store(url: str, folder: Remote) -> None:
    """Raise ConfigError if an object store cannot be written.

    The check writes a small object, which the next save deletes.
    """
    try:
        (folder / PROBE).write_bytes(b"\n")
    except OSError as error:
        raise ConfigError(
            f"checkpoint.dir = {url!r} cannot be written: {cause_of(error, folder)}; make the "
            "bucket, set credentials that may list, read, write and delete in it, or set another "
            "checkpoint.dir"
        ) from error


def _check_unused(config: RunConfig, folders: Sequence[Location]) -> None:
    """Raise ConfigError if a folder has checkpoints of another run, or cannot be read."""
    local = RunDir(config.run.dir).checkpoints  # a new run renames this folder
    for folder in folders:
        if folder != local and _is_used(folder):
            raise ConfigError(
                f"{folder} has checkpoints of an earlier start; set checkpoint.resume=latest to "
                "continue from them, delete them, or use another folder"
            )


def _check_own_folder(folder: Location, checkpoint: Location | None) -> None:
    """Raise ConfigError if the folder of the resumed checkpoint cannot be written."""
    if isinstance(folder, Path) and not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{folder}, which has this run's checkpoints, cannot be written; make it writable, or "
            f"continue in another folder: set another run.dir and checkpoint.resume={checkpoint}"
        )


def _check_folder(key: str, folder: Path) -> None:
    """Raise ConfigError if checkpoints cannot be written to a folder; do not create the folder."""
    fix = "set another folder"
    if link := dangling_link(folder):
        raise ConfigError(
            f"{key} = {str(folder)!r}: {link} is a link to {os.readlink(link)}, which does not "
            f"exist; make or mount it, or {fix}"
        )
    there = next(each for each in (folder, *folder.parents) if os.path.exists(each))
    if not there.is_dir():
        raise ConfigError(f"{key} = {str(folder)!r}: {there} is a file; {fix}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{key} = {str(folder)!r}: {there} cannot be written; {fix}")


def _is_used(folder: Location) -> bool:
    try:
        return bool(complete(folder))
    except OSError as error:
        cause = cause_of(error, folder)
        raise ConfigError(f"{folder} cannot be read: {cause}; set another folder") from error
