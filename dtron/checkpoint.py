"""The state of a run as it is saved and loaded: weights, optimizer state, random numbers, by FQN.

Tensors and optimizer state carry their global shapes; the step, the data position and the model's
config are JSON (`published.py`). The optimizer's settings (decay, betas) are not saved: they are
the config's.
"""

import functools
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from dtron.config import Checkpoint
from dtron.errors import CheckpointError
from dtron.parallelisms.apply import Applied
from dtron.published import Facts, clear_partial, publish, retire, unreadable, write_facts
from dtron.saveplan import KeptPlan
from dtron.staging import Background, Staging
from dtron.storage import ShardReader, ShardWriter

log = logging.getLogger("dtron")
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)


class Checkpointer:
    """Saves and loads the state of one run.

    Tensors are stored under their names in the whole model and without padding, so that any layout
    of ranks and stages reads what any other wrote.

    Args:
        directory: RUN/checkpoints.
        applied: the parallelised model.
        group: a host-side group over all ranks; with `mode = "async"` one that nothing else uses.
        options: the config's section.
    """

    def __init__(
        self,
        directory: Path,
        applied: Applied,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup,
        options: Checkpoint,
    ) -> None:
        self.directory, self.optimizer = directory, optimizer
        self.group, self.options = group, options
        self.model = nn.ModuleDict({str(stage): part for stage, part in applied.parts.items()})
        self.names = {
            f"{stage}.{fqn}": applied.names[fqn]
            for stage, part in applied.parts.items()
            for fqn, _ in part.named_parameters(remove_duplicate=False)
        }
        self.names |= {  # of routers, whose biases are saved
            f"{stage}.{fqn}": fqn
            for stage, part in applied.parts.items()
            for fqn, _ in part.named_buffers()
        }
        self.rows = applied.padded_rows
        self.plan, self.staging = KeptPlan(), Staging()
        self._running: Background | None = None
        optimizer.register_step_pre_hook(lambda *_: self.staging.before_change())

    def save(self, facts: Facts) -> None:
        """Write a checkpoint and publish it; all ranks call it together.

        With `mode = "async"` it returns at once, and the optimizer's next step waits until the
        state is copied; what is left of an earlier save is waited for first.

        Raises:
            CheckpointError: this save, or the last one that ran beside training, could not be
                written; what it left is deleted, and older checkpoints are as they were.
        """
        if self._running is not None and self._running.running:
            log.warning("the last checkpoint is still being written: waiting for it")
        try:
            self.wait()
        except CheckpointError as error:
            if self.options.on_error == "stop":
                raise
            # Ranks learn of it at different steps, and all of them have to begin the next one.
            log.error("%s; training goes on without it (checkpoint.on_error)", error)
        state = {**self._stored(self._held()), "rng": _get_rng()}
        flat = {f"{kind}.{name}": value for kind, v in state.items() for name, value in v.items()}
        if self.options.mode == "sync":
            self._write(flat, facts)
            return
        self.plan.staged = self.staging.start(flat)
        self._running = Background(functools.partial(self._write, flat, facts))

    @property
    def failed(self) -> bool:
        """Whether a save beside training has failed, which `wait` will raise."""
        return self._running is not None and self._running.failed

    def wait(self) -> None:
        """Wait for a save that runs beside training. Raises CheckpointError: it failed."""
        running, self._running = self._running, None
        if running is not None:
            running.wait()

    def _write(self, flat: dict[str, Any], facts: Facts) -> None:
        final = self.directory / f"step-{facts.step}"
        partial = final.with_name(final.name + ".partial")
        try:
            self.staging.finish()
            self._first(lambda: self._begin(partial))
            self._check_shared(partial)
            dcp.save(
                flat,
                storage_writer=ShardWriter(partial),
                planner=self.plan,
                process_group=self.group,
            )
            self._first(lambda: self._publish(partial, final, facts))
        except (dcp.CheckpointException, CheckpointError, RuntimeError) as error:
            self.plan = KeptPlan()  # ranks may have got to know different parts of the plan
            if dist.get_rank() == 0:
                shutil.rmtree(partial, ignore_errors=True)
            cause = why(error) if isinstance(error, dcp.CheckpointException) else error
            raise CheckpointError(f"{final} could not be written: {cause}") from error
        log.info("checkpoint: %s", final)

    def _begin(self, partial: Path) -> None:
        clear_partial(self.directory)
        partial.mkdir(parents=True)

    def _publish(self, partial: Path, final: Path, facts: Facts) -> None:
        write_facts(partial, facts)
        publish(partial, final)
        try:
            retire(self.directory, final, self.options.keep, self.options.keep_every)
        except OSError as error:  # it is written all the same
            log.warning("%s: an older checkpoint could not be deleted: %s", final, error)

    def _first(self, act: Callable[[], None]) -> None:
        """Act on the first rank while the others wait; a failure there is raised on all."""
        failure: list[str | None] = [None]
        if dist.get_rank() == 0:
            try:
                act()
            except Exception as error:  # the others wait for word of it
                failure = [str(error) or type(error).__name__]
        dist.broadcast_object_list(failure, src=0, group=self.group)
        if failure[0] is not None:
            raise CheckpointError(failure[0])

    def load(self, path: Path) -> None:
        """Load weights, optimizer state and RNG state in place; all ranks call it together.

        Raises:
            CheckpointError: a shard is missing or cannot be read, or a tensor has another shape.
        """
        held = self._held()
        state = {**self._stored(held), "rng": _get_rng()}  # the held tensors: read in place
        try:
            reader = ShardReader(path)
            if not all(f"rng.{name}" in reader.index.tensors for name in state["rng"]):
                log.warning("%s holds no RNG state for this rank; dtron itself needs none", path)
                del state["rng"]
            dcp.load(state, storage_reader=reader, process_group=self.group)
        except dcp.CheckpointException as error:
            raise unreadable(path, str(why(error))) from error
        self._fill_copies(held)
        set_model_state_dict(self.model, held["model"])
        set_optimizer_state_dict(self.model, self.optimizer, held["optimizer"], options=_FLAT)
        if "rng" in state:
            _set_rng(state["rng"])

    def load_weights(self, reader: dcp.StorageReader, where: Path) -> None:
        """Load weights alone in place; all ranks call it together.

        Args:
            reader: knows them by their names in the whole model.
            where: it reads, for errors.
        Raises:
            CheckpointError: a tensor is missing, cannot be read, or has another shape.
        """
        # Not of `_held`: asking an optimizer for state that it does not have yet makes it step.
        held: dict[str, dict[str, Any]] = {"model": get_model_state_dict(self.model)}
        state = {"model": self._stored({**held, "optimizer": {}})["model"]}
        try:
            dcp.load(state, storage_reader=reader, process_group=self.group)
        except dcp.CheckpointException as error:
            raise CheckpointError(f"{where} cannot be loaded: {why(error)}") from error
        self._fill_copies(held)
        set_model_state_dict(self.model, held["model"])

    def _held(self) -> dict[str, dict[str, Any]]:
        """Tensors as this rank holds them, by FQN in `self.model`."""
        return {
            "model": get_model_state_dict(self.model),
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer, options=_FLAT),
        }

    def _stored(self, held: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
        """The same tensors as they are stored: views, by name; of a tied weight the first."""
        model: dict[str, Any] = {}
        for fqn, value in held["model"].items():
            name = self.names[fqn]
            model.setdefault(name, self._unpadded(name, value))
        optimizer: dict[str, Any] = {}
        for key, value in held["optimizer"].items():
            kind, fqn, slot = _parts_of(key)
            if kind == "state":
                name = self.names[fqn]
                optimizer.setdefault(f"state.{name}.{slot}", self._unpadded(name, value))
        return {"model": model, "optimizer": optimizer}

    def _unpadded(self, name: str, value: Any) -> Any:
        """A view without the padded rows that the last ranks of tp hold."""
        if name not in self.rows or not isinstance(value, DTensor) or value.dim() == 0:
            return value
        local, rows = value.to_local(), self.rows[name]
        axes = zip(value.device_mesh.get_coordinate() or (), value.placements, strict=True)
        first = sum(rank * len(local) for rank, placement in axes if placement.is_shard(0))
        size = torch.Size((rows, *value.shape[1:]))
        return DTensor.from_local(
            local[: max(0, rows - first)],
            value.device_mesh,
            value.placements,
            run_check=False,
            shape=size,
            stride=(value.shape[1], 1),
        )

    @torch.no_grad()
    def _fill_copies(self, held: dict[str, dict[str, Any]]) -> None:
        """Where both stages of a tied weight are here, give the second what the first has read."""
        for values in held.values():
            first: dict[tuple[str, str, str], Any] = {}
            for key, value in values.items():
                kind, fqn, slot = _parts_of(key) if key not in self.names else ("", key, "")
                read = first.setdefault((kind, self.names[fqn], slot), value)
                if isinstance(value, torch.Tensor) and read is not value:
                    value.copy_(read)

    def _check_shared(self, partial: Path) -> None:
        """Every rank must see the directory that rank 0 made. Raises CheckpointError on all."""
        try:
            seen = partial.exists()
        except OSError:
            seen = False
        unseen = torch.tensor([int(not seen)])
        dist.all_reduce(unseen, group=self.group)
        if unseen.item():
            raise CheckpointError(
                f"{int(unseen.item())} ranks do not see {partial}; run.dir must be on a file "
                "system that all hosts share"
            )


def why(error: dcp.CheckpointException) -> CheckpointError:
    """What went wrong on the first rank where something did, as a user is told."""
    rank, (cause, _) = next(iter(sorted(error.failures.items())))
    if isinstance(cause, CheckpointError):
        return cause
    return CheckpointError(f"rank {rank}: {str(cause) or type(cause).__name__}")


def _parts_of(key: str) -> tuple[str, str, str]:
    """`state.0.embed.weight.exp_avg` -> its kind, FQN and slot."""
    kind, rest = key.split(".", 1)
    return kind, *rest.rsplit(".", 1)  # type: ignore[return-value]


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
