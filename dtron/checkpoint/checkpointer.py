"""Save and load the state of a run: weights, optimizer state and RNG state, by FQN.

Tensors are stored with their global shapes; the step, the data position and the model's config are
stored as JSON (`metadata.py`). Settings of the optimizer (weight decay, betas) are not saved: they
come from the config.
"""

import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from dtron.checkpoint.async_staging import Background, Staging
from dtron.checkpoint.dcp_storage import ShardReader, WriteFile
from dtron.checkpoint.find import unreadable
from dtron.checkpoint.locations import CheckpointLocation, location_of
from dtron.checkpoint.metadata import CheckpointMetadata, step_of
from dtron.checkpoint.save import OnCommit, Saver, first_cause
from dtron.checkpoint.save_plan import CachedSavePlanner
from dtron.checkpoint.stored_model import Held, StoredModel
from dtron.config import Checkpoint
from dtron.errors import CheckpointError
from dtron.io.filesystem import Location
from dtron.io.safetensors_file import WrittenFile, write_tensors
from dtron.io.writer_process import WriterProcess
from dtron.parallelisms.apply import Applied

log = logging.getLogger("dtron")
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Checkpointer:
    """Saves and loads the state of one run. Construct it on all ranks together.

    Args:
        locations: where checkpoints are written, the durable location last.
        applied: the parallelised model.
        options: the section [checkpoint].
        scales: amax histories of delayed float8 scaling, by FQN; all ranks that have a layer hold
            the same history.
        on_commit: called on rank 0 after each commit in the durable location, with the path of
            the checkpoint.
    """

    def __init__(
        self,
        locations: Sequence[CheckpointLocation],
        applied: Applied,
        optimizer: torch.optim.Optimizer,
        options: Checkpoint,
        scales: Mapping[str, torch.Tensor] | None = None,
        on_commit: OnCommit | None = None,
    ) -> None:
        self.locations, self.optimizer, self.options = locations, optimizer, options
        self.scales = dict(scales or {})
        copies = len(locations) > 1
        seconds = options.timeout_seconds
        self.saver = Saver(seconds, locations[0].folder, None if copies else on_commit)
        self.copier = Saver(seconds, locations[-1].folder, on_commit) if copies else None
        self.stored = StoredModel(applied)
        self.plan, self.staging = CachedSavePlanner(), Staging()
        self._running: Background | None = None
        self._written: int | None = None
        """Step of the newest checkpoint in the first location, complete or being written."""
        self._copying: Background | None = None
        self._copy_source: Location | None = None
        """Checkpoint that is being copied."""
        self._copy_process: WriterProcess | None = None
        optimizer.register_step_pre_hook(lambda *_: self.staging.before_change())

    @property
    def group(self) -> dist.ProcessGroup:
        """Process group for collectives that may wait `checkpoint.timeout_seconds` for a disk."""
        return self.saver.group

    def due(self, step: int) -> bool:
        """Whether a checkpoint is due after this step."""
        return any(each.interval and step % each.interval == 0 for each in self.locations)

    def is_durable_step(self, step: int) -> bool:
        """Whether a checkpoint is due in the durable location after this step."""
        interval = self.locations[-1].interval
        return bool(interval) and step % interval == 0

    def save(self, metadata: CheckpointMetadata, durable: bool = False) -> None:
        """Write a checkpoint and commit it; all ranks call it together.

        With `mode = "async"`, wait for the previous save, start this save, and return. The next
        optimizer step waits until the state is copied to host memory. The copy to the durable
        location runs in the background; only the next copy waits for it.

        Args:
            durable: copy the checkpoint to the durable location, even at a step at which
                `is_durable_step` is false.
        Raises:
            CheckpointError: this save, or the previous asynchronous save, has failed; the failed
                save's files are deleted, and older checkpoints are unchanged.
        """
        durable = durable or self.is_durable_step(metadata.step)
        if self._running is not None and self._running.running:
            log.warning("the previous checkpoint is still being written: waiting for it")
        if durable and self._copying is not None and self._copying.running:
            log.warning("the previous copy to checkpoint.dir is still running: waiting for it")
        # If the previous save failed and training continues, ranks notice at different steps. All
        # ranks must begin this save.
        self.attempt(functools.partial(self._wait_before, durable))
        if self._written != metadata.step:
            self._written = metadata.step
            self._begin(metadata)
        if durable and len(self.locations) > 1:
            self._begin_copy(metadata, self._running)

    @property
    def stops(self) -> bool:
        """Whether a failed save ends the run."""
        return self.options.on_error == "stop"

    def attempt(self, act: Callable[[], None]) -> bool:
        """Call `act`, which saves or waits for a save; return whether it succeeded.

        Raises CheckpointError if `stops`; otherwise log the error.
        """
        try:
            act()
        except CheckpointError as error:
            if self.stops:
                raise
            log.error("%s; training continues without this save (checkpoint.on_error)", error)
            return False
        return True

    def _wait_before(self, durable: bool) -> None:
        """Wait for the running save; if `durable`, also for the running copy."""
        self._wait_for_write()
        if durable:  # all ranks must notice a failed copy in the same save
            self._wait_for_copy()

    def _begin(self, metadata: CheckpointMetadata) -> None:
        """Write a checkpoint to the first location, with `mode = "async"` in the background."""
        flat = self._tensors_to_save()
        if self.options.mode == "sync":
            self._write(flat, metadata, write_tensors)
            return
        write = self.staging.write
        try:
            self.plan.staged = self.staging.start(flat)
        except OSError as error:
            write = functools.partial(_raise, error)  # raised by the save, on all ranks
        self._running = Background(functools.partial(self._write, flat, metadata, write))

    def reserve(self) -> None:
        """Start to allocate host memory for asynchronous saves, if the run makes them.

        Call it after the first step, which creates the optimizer state.
        """
        if self.options.mode == "async" and any(each.interval for each in self.locations):
            self.staging.reserve(self._tensors_to_save())

    def _tensors_to_save(self) -> dict[str, Any]:
        """Return all tensors of a checkpoint by the names under which they are stored."""
        state = self._stored_state(self._local_state())
        return {f"{kind}.{name}": value for kind, v in state.items() for name, value in v.items()}

    def _begin_copy(self, metadata: CheckpointMetadata, written: Background | None) -> None:
        """Copy a checkpoint in the background from the first location to the last location.

        Args:
            written: the running save to wait for; None: the checkpoint is complete.
        """
        assert self.copier is not None, "there are several locations"
        if self._copy_process is None or not self._copy_process.alive:
            self._copy_process = WriterProcess()
        self._copy_source = self.locations[0].folder / f"step-{metadata.step}"
        copy = functools.partial(
            self.copier.copy, self._copy_source, metadata, self.locations[-1], self._copy_process
        )

        def act() -> None:
            try:
                if written is None or written.succeeded():
                    copy()
            except CheckpointError:
                self._copy_process = None  # `Saver.copy` has killed it
                raise
            finally:
                self._copy_source = None

        self._copying = Background(act)

    @property
    def failed(self) -> bool:
        """Whether an asynchronous save has failed; `wait` then raises its error."""
        return any(each is not None and each.failed for each in (self._running, self._copying))

    def wait(self) -> None:
        """Wait for asynchronous saves. Raises CheckpointError: one has failed."""
        self._wait_for_write()
        self._wait_for_copy()

    def _wait_for_write(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.wait()

    def _wait_for_copy(self) -> None:
        copying, self._copying = self._copying, None
        if copying is not None:
            copying.wait()

    def _write(self, flat: dict[str, Any], metadata: CheckpointMetadata, write: WriteFile) -> None:
        kept = [] if self._copy_source is None else [self._copy_source]
        try:
            self.staging.finish()
            self.saver.write(flat, metadata, self.locations[0], self.plan, write, kept)
        except CheckpointError:
            self.plan = CachedSavePlanner()  # ranks may have cached different plans
            self.staging.end()  # the writer process may hang in a disk access
            self._written = None
            raise

    def load(self, path: Location) -> None:
        """Load weights, optimizer state and RNG state in place; all ranks call it together.

        Raises:
            CheckpointError: a file is missing or unreadable, or a tensor has the wrong shape.
        """
        held = self._local_state()
        state = self._stored_state(held)  # views, so that reads are in place
        try:
            reader = ShardReader(path)
            if not all(f"rng.{name}" in reader.index.tensors for name in state["rng"]):
                log.warning("%s has no RNG state of this rank; only user code needs it", path)
                del state["rng"]
            if not all(_has_tensor(reader, f"float8.{fqn}", x) for fqn, x in self.scales.items()):
                log.warning(
                    "%s has no matching float8 amax histories; all histories start empty", path
                )
                del state["float8"]
                for history in self.scales.values():
                    history.zero_()
            dcp.load(state, storage_reader=reader, process_group=self.group)
        except dcp.CheckpointException as error:
            raise unreadable(path, str(first_cause(error))) from error
        self.stored.fill_copies(held)
        set_model_state_dict(self.stored.module, held["model"])
        set_optimizer_state_dict(
            self.stored.module, self.optimizer, held["optimizer"], options=_FLAT
        )
        if "rng" in state:
            _set_rng(state["rng"])
        self._written = step_of(path) if location_of(self.locations[:-1], path) else None

    def _local_state(self) -> Held:
        """Return weights and optimizer state of this rank's stages, by FQN in `stored.module`."""
        return {
            "model": get_model_state_dict(self.stored.module),
            "optimizer": get_optimizer_state_dict(
                self.stored.module, self.optimizer, options=_FLAT
            ),
        }

    def _stored_state(self, held: Held) -> Held:
        """Return all tensors of a checkpoint by kind and stored name.

        These are weights and optimizer state, RNG state, and float8 amax histories.
        """
        return {**self.stored.views(held), "rng": _get_rng(), "float8": self.scales}


def _has_tensor(reader: ShardReader, name: str, like: torch.Tensor) -> bool:
    """Whether a checkpoint has a tensor of this name and shape."""
    found = reader.index.tensors.get(name)
    return found is not None and found.size == like.shape


def _raise(error: OSError, *_: Any) -> WrittenFile:
    raise error


def _get_rng() -> dict[str, torch.Tensor]:
    rank = dist.get_rank()
    states = {f"{rank}.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        states[f"{rank}.cuda"] = torch.cuda.get_rng_state()
    return states


def _set_rng(states: dict[str, torch.Tensor]) -> None:
    for name, state in states.items():
        setter = torch.cuda.set_rng_state if name.endswith("cuda") else torch.set_rng_state
        setter(state)
