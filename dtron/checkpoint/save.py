"""Write, commit and copy checkpoints, on all ranks together.

A hung disk fails the save, not the run. Each disk access runs in a thread, which is abandoned after
`checkpoint.timeout_seconds`; then all ranks raise the error. So a collective waits at most this
long for a disk. The process group of saves has a longer time-out than this, independent of
`parallel.timeout_seconds`, the time-out of the groups for training.
"""

import contextlib
import logging
import time
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from dtron.checkpoint.async_staging import Background
from dtron.checkpoint.dcp_storage import (
    INDEX,
    ShardWriter,
    WriteFile,
    missing_or_short,
    read_files,
)
from dtron.checkpoint.directory import (
    commit,
    delete_checkpoint,
    delete_old,
    name_best,
    prepare_folder,
)
from dtron.checkpoint.find import problem
from dtron.checkpoint.locations import CheckpointLocation
from dtron.checkpoint.metadata import METADATA, CheckpointMetadata
from dtron.checkpoint.save_plan import CachedSavePlanner
from dtron.errors import CheckpointError, counted
from dtron.io.filesystem import Location, check_mounted, listed, mount_of, read, write_atomically
from dtron.io.safetensors_file import WrittenFile
from dtron.io.untrusted import INDEX_BYTES
from dtron.io.writer_process import WriterProcess
from dtron.run.process import new_host_group

log = logging.getLogger("dtron")


_NOBODY = -1
OnCommit = Callable[[Location], object]


class Saver:
    """Writes checkpoints of one run. All ranks construct it and call each method together.

    A run has one Saver for saves and one for copies between locations. Each has its own process
    group, so that their collectives cannot mix.

    Args:
        seconds: time limit of each disk access of a rank.
        folder: folder of the checkpoints.
        on_commit: called on rank 0 with the path of each complete checkpoint.
    """

    def __init__(self, seconds: int, folder: Location, on_commit: OnCommit | None = None) -> None:
        self.group = new_host_group(2 * seconds + 60)
        self.seconds, self.on_commit = seconds, on_commit
        self._mount, self._committed = mount_of(folder), False
        self._listed: Location | None = None
        """Rank 0's listing of the folder of checkpoints for this save."""

    def write(
        self,
        tensors: dict[str, Any],
        metadata: CheckpointMetadata,
        location: CheckpointLocation,
        plan: CachedSavePlanner,
        write: WriteFile,
        kept: Collection[Location] = (),
    ) -> None:
        """Write and commit a checkpoint.

        Args:
            tensors: all tensors by the names under which they are stored.
            kept: checkpoints that are still read and must not be deleted.
        Raises:
            CheckpointError: on all ranks; the write has failed, and its files are deleted.
        """

        def act(folder: Location) -> None:
            writer = ShardWriter(folder, write, self._limited)
            dcp.save(tensors, storage_writer=writer, planner=plan, process_group=self.group)

        self._commit(act, metadata, location, kept)

    def copy(
        self,
        source: Location,
        metadata: CheckpointMetadata,
        location: CheckpointLocation,
        process: WriterProcess,
    ) -> None:
        """Copy a checkpoint to another location and commit the copy.

        Do nothing if the location has a complete copy. Each rank copies some of the files and
        compares their SHA-256 with the index.

        Raises:
            CheckpointError: on all ranks; the copy has failed, and its files are deleted.
        """

        if self._is_there(source, location.folder / source.name):
            return

        def act(folder: Location) -> None:
            self._run_on_all(lambda: _copy_files(source, folder, process))
            self.run_on_first(lambda: write_atomically(folder / INDEX, _index_text(source)))

        try:
            self._commit(act, metadata, location)
        except CheckpointError:
            process.kill()  # it may hang in a disk access
            raise

    def _commit(
        self,
        act: Callable[[Location], None],
        metadata: CheckpointMetadata,
        location: CheckpointLocation,
        kept: Collection[Location] = (),
    ) -> None:
        folder, begun = location.folder / f"step-{metadata.step}", False
        self._committed = False
        started = time.monotonic()
        try:
            self.run_on_first(lambda: self._begin(folder, kept))
            begun = True  # before this, the folder may belong to another save
            self._check_shared(folder)
            seen = self._listed / folder.name if self._listed is not None else folder
            act(seen)
            self._run_on(self._checking_rank(folder), lambda: self._check_files(folder))
            self.run_on_first(lambda: self._finish(seen, metadata))
        except (dcp.CheckpointException, CheckpointError, RuntimeError) as error:
            # A committed checkpoint is kept, also if a rank fails before all ranks know of it.
            if begun and dist.get_rank() == 0 and not self._committed:
                with contextlib.suppress(OSError):
                    self._limited(lambda: delete_checkpoint(location.folder / folder.name))
            self._listed = None
            cause = first_cause(error) if isinstance(error, dcp.CheckpointException) else error
            raise CheckpointError(f"{folder} could not be written: {cause}") from error
        log.info("checkpoint: %s in %.1f s", folder, time.monotonic() - started)
        try:
            self.run_on_first(
                lambda: delete_old(seen.parent, folder, location.keep, location.keep_every, kept)
            )
        except CheckpointError as error:  # the new checkpoint is complete
            log.warning("saved %s, but could not delete an older checkpoint: %s", folder, error)
        finally:
            self._listed = None

    def _begin(self, folder: Location, kept: Collection[Location]) -> None:
        check_mounted(folder, self._mount)
        if self._listed is None:
            self._listed = listed(folder.parent)
        prepare_folder(self._listed / folder.name, kept)

    def _checking_rank(self, folder: Location) -> int:
        """Return the rank that checks that the files of all ranks exist: rank 0 on a file system.

        In an object store, the last rank checks, since rank 0 makes more requests than other
        ranks. If there is one rank, no rank checks, since the store has confirmed its files.
        """
        last = dist.get_world_size() - 1
        return 0 if isinstance(folder, Path) else last or _NOBODY

    def _check_files(self, folder: Location) -> None:
        folder = listed(folder)
        there = (folder / INDEX).exists()
        wrong = missing_or_short(folder, read_files(folder)) if there else f"{INDEX} is missing"
        if wrong:
            raise CheckpointError(f"{wrong}; all ranks must write to the same {folder.parent}")

    def _finish(self, folder: Location, metadata: CheckpointMetadata) -> None:
        commit(folder, metadata)
        self._committed = True
        if self.on_commit is not None:  # the folder is in the durable location
            if metadata.best:
                name_best(folder.parent, metadata.best["step"])
            self.on_commit(folder)

    def _is_there(self, source: Location, folder: Location) -> bool:
        """Return, on all ranks, whether rank 0 finds a complete copy of the checkpoint."""
        found: list[bool] = [False]

        def look() -> None:
            self._listed = listed(folder.parent)
            there = self._listed / folder.name
            whole = (there / METADATA).exists() and problem(there) is None
            found[0] = whole and _index_text(there) == _index_text(source)

        if dist.get_rank() == 0:
            with contextlib.suppress(OSError):
                self._limited(look)
        dist.broadcast_object_list(found, src=0, group=self.group)
        return found[0]

    def run_on_first(self, act: Callable[[], None]) -> None:
        """Call `act` on rank 0 while other ranks wait.

        Raises CheckpointError on all ranks: `act` failed.
        """
        self._run_on(0, act)

    def _run_on(self, rank: int, act: Callable[[], None]) -> None:
        self._run_on_all(act if dist.get_rank() == rank else lambda: None)

    def _run_on_all(self, act: Callable[[], None]) -> None:
        """Call `act` on every rank. Raises CheckpointError on all ranks: one rank failed."""
        failure: str | None = None
        try:
            self._limited(act)
        except Exception as error:  # reported to the other ranks below
            failure = str(error) or type(error).__name__
        failures: list[str | None] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(failures, failure, group=self.group)
        for rank, message in enumerate(failures):
            if message is not None:
                raise CheckpointError(f"rank {rank}: {message}")

    def _limited(self, act: Callable[[], None]) -> None:
        """Call `act` in a thread; after `seconds`, abandon the thread and raise TimeoutError."""
        try:
            Background(act).wait(self.seconds)
        except TimeoutError:
            raise TimeoutError(
                "its disk or store did not answer within checkpoint.timeout_seconds = "
                f"{self.seconds}"
            ) from None

    def _check_shared(self, folder: Location) -> None:
        """Check that every rank sees the folder that rank 0 made. Raises CheckpointError on all."""
        if not isinstance(folder, Path):
            return  # stores have no empty folders; `_check_files` finds missing files at the end
        unseen = torch.tensor([1])

        def look() -> None:
            unseen[0] = int(not folder.exists())

        with contextlib.suppress(OSError):
            self._limited(look)
        dist.all_reduce(unseen, group=self.group)
        if unseen.item():
            raise CheckpointError(
                f"{folder} is not seen by {counted(int(unseen.item()), 'rank')}; it must be on a "
                "file system that all ranks share"
            )


def _index_text(folder: Location) -> str:
    """Return the text of index.json, which has the SHA-256 of each file."""
    return read(folder / INDEX, INDEX_BYTES).decode()


def _copy_files(source: Location, folder: Location, process: WriterProcess) -> None:
    written = read_files(source)
    for name in sorted(written)[dist.get_rank() :: dist.get_world_size()]:
        copied = WrittenFile(*process.copy(str(source / name), str(folder / name)))
        if copied != written[name]:
            raise CheckpointError(f"{source / name} is corrupt: its SHA-256 differs")


def first_cause(error: dcp.CheckpointException) -> CheckpointError:
    """Return the error of the lowest failed rank, as an error for the user."""
    rank, (cause, _) = next(iter(sorted(error.failures.items())))
    if isinstance(cause, CheckpointError):
        return cause
    return CheckpointError(f"rank {rank}: {str(cause) or type(cause).__name__}")
