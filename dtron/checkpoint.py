"""Saving and resuming with torch.distributed.checkpoint, keyed by FQN.

    RUN/checkpoints/step-N/     shards of every rank, and dtron.json
    RUN/checkpoints/latest      names the newest complete one

A checkpoint is written beside its final name and renamed when it is whole, so that a half-written
one is never taken for a checkpoint. Tensors and optimizer state carry their global shapes; the
step, the data position and the model's config are JSON. The optimizer's settings (decay, betas)
are not saved: they are the config's.
"""

import json
import logging
import os
import pickle
import shutil
from dataclasses import asdict, dataclass
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

from dtron.errors import CheckpointError
from dtron.parallelisms.apply import Applied

log = logging.getLogger("dtron")
_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_FACTS = "dtron.json"


@dataclass(frozen=True)
class Facts:
    """What a checkpoint says of itself, without opening its shards."""

    step: int
    """Optimizer steps done."""
    tokens: int
    """Tokens trained on."""
    skipped: int
    """Steps skipped for gradients that were not finite."""
    world_size: int
    skipped_in_a_row: int
    """How many of them were the last ones."""
    settings: dict[str, Any]
    """Keys of the run's config on which the meaning of the state depends, with their values."""
    model: dict[str, Any]
    """Name and resolved config of the model."""
    data: dict[str, int | str]
    """State of the data loader."""


def find(resume: str, checkpoints: Path) -> Path | None:
    """The checkpoint that `checkpoint.resume` names; None to start afresh.

    Raises:
        CheckpointError: a path that holds no checkpoint.
    """
    if not resume:
        return None
    if resume == "latest":
        return _latest(checkpoints)
    path = Path(resume).expanduser()
    found = path if (path / _FACTS).exists() else _latest(path / "checkpoints")
    if found is None:
        raise CheckpointError(
            f"checkpoint.resume = {resume!r} is neither a checkpoint (a folder step-N with "
            f"{_FACTS}) nor a run directory that has one"
        )
    return found


def read_facts(path: Path) -> Facts:
    """Read dtron.json of one checkpoint. Raises CheckpointError."""
    try:
        return Facts(**json.loads((path / _FACTS).read_text()))
    except (OSError, json.JSONDecodeError, TypeError) as error:
        raise CheckpointError(f"{path / _FACTS} cannot be read: {error}") from None


def check_model(path: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse a checkpoint of another model, naming what differs. Raises CheckpointError."""
    keys = [key for key in {**saved, **wanted} if saved.get(key) != wanted.get(key)]
    if keys:
        shown = ", ".join(f"{k}: {saved.get(k)!r} there, {wanted.get(k)!r} here" for k in keys[:4])
        raise CheckpointError(f"{path} is of another model ({shown}); set the same model")


def check_agreement(path: Path | None, group: dist.ProcessGroup) -> None:
    """Refuse to start when ranks found different checkpoints, as with run directories that hosts
    do not share. All ranks call it together. Raises CheckpointError on all of them."""
    found: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, path.name if path else None, group=group)
    if len(set(found)) > 1:
        raise CheckpointError(
            f"ranks see different checkpoints ({', '.join(map(str, found))}); run.dir must be on a "
            "file system that all hosts share"
        )


class Checkpointer:
    """Saves and loads the state of one run.

    Tensors are stored under their names in the whole model and without padding, so that any layout
    of ranks and stages reads what any other wrote.

    Args:
        directory: RUN/checkpoints.
        applied: the parallelised model.
        group: a host-side group over all ranks.
        keep: newest checkpoints to keep; 0 keeps all.
    """

    def __init__(
        self,
        directory: Path,
        applied: Applied,
        optimizer: torch.optim.Optimizer,
        group: dist.ProcessGroup,
        keep: int,
    ) -> None:
        self.directory, self.optimizer = directory, optimizer
        self.group, self.keep = group, keep
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

    def save(self, facts: Facts) -> Path:
        """Write a checkpoint and publish it; all ranks call it together."""
        final = self.directory / f"step-{facts.step}"
        partial = final.with_name(final.name + ".partial")
        first = dist.get_rank() == 0
        if first:
            for left in self.directory.glob("step-*.partial"):  # by runs that were killed
                shutil.rmtree(left, ignore_errors=True)
            partial.mkdir(parents=True)
        dist.barrier(self.group)
        self._check_shared(partial)
        state = {**self._stored(self._held()), "rng": _get_rng()}
        dcp.save(state, checkpoint_id=partial, process_group=self.group)
        if first:
            (partial / _FACTS).write_text(json.dumps(asdict(facts), indent=1) + "\n")
            _publish(partial, final)
            self._retire(final)
        dist.barrier(self.group)
        log.info("checkpoint: %s", final)
        return final

    def load(self, path: Path) -> None:
        """Load weights, optimizer state and RNG state in place; all ranks call it together.

        Raises:
            CheckpointError: a shard is missing or cannot be read, or a tensor has another shape.
        """
        held = self._held()
        state = {**self._stored(held), "rng": _get_rng()}  # the held tensors: read in place
        try:
            known = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
            if not all(f"rng.{name}" in known for name in state["rng"]):
                log.warning("%s holds no RNG state for this rank; dtron itself needs none", path)
                del state["rng"]
            dcp.load(state, checkpoint_id=path, process_group=self.group)
        except dcp.CheckpointException as error:
            cause = next(iter(error.failures.values()))[0]
            raise _unreadable(path, cause) from error
        except (OSError, EOFError, pickle.UnpicklingError) as error:
            raise _unreadable(path, error) from error
        self._fill_copies(held)
        set_model_state_dict(self.model, held["model"])
        set_optimizer_state_dict(self.model, self.optimizer, held["optimizer"], options=_FLAT)
        if "rng" in state:
            _set_rng(state["rng"])

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
        unseen = torch.tensor([int(not partial.exists())])
        dist.all_reduce(unseen, group=self.group)
        if unseen.item():
            raise CheckpointError(
                f"{int(unseen.item())} ranks do not see {partial}; run.dir must be on a file "
                "system that all hosts share"
            )

    def _retire(self, newest: Path) -> None:
        """Delete what is older than the `keep` newest, never the one just written."""
        if self.keep:
            found = sorted(_complete(self.directory), key=step_of)
            for old in found[: -self.keep]:
                if old != newest:
                    _remove(old)


def _parts_of(key: str) -> tuple[str, str, str]:
    """`state.0.embed.weight.exp_avg` -> its kind, FQN and slot."""
    kind, rest = key.split(".", 1)
    return kind, *rest.rsplit(".", 1)  # type: ignore[return-value]


def _unreadable(path: Path, cause: BaseException) -> CheckpointError:
    others = sorted(set(_complete(path.parent)) - {path}, key=step_of)
    fix = f"set checkpoint.resume = {str(others[-1])!r}" if others else "no other one is there"
    reason = str(cause) or type(cause).__name__
    return CheckpointError(f"{path} cannot be loaded: {reason}; {fix}")


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


def _publish(partial: Path, final: Path) -> None:
    if final.exists():  # the same step again, after resuming from an earlier one
        _remove(final)
    os.replace(partial, final)
    pointer = final.parent / "latest.partial"
    pointer.write_text(final.name + "\n")
    os.replace(pointer, final.parent / "latest")


def _remove(path: Path) -> None:
    """Delete a checkpoint; it is not taken for a whole one if that is interrupted."""
    gone = path.with_name(f"{path.name}.old.partial")
    os.replace(path, gone)
    shutil.rmtree(gone)


def _latest(checkpoints: Path) -> Path | None:
    try:
        named = checkpoints / (checkpoints / "latest").read_text().strip()
    except OSError:
        return None
    if (named / _FACTS).exists():
        return named
    newest = max(_complete(checkpoints), key=step_of, default=None)
    log.warning("%s is gone; the newest complete checkpoint is %s", named, newest)
    return newest


def _complete(checkpoints: Path) -> list[Path]:
    return [path.parent for path in checkpoints.glob(f"step-*/{_FACTS}") if step_of(path.parent)]


def step_of(path: Path) -> int:
    """N of a folder step-N; 0 for any other name."""
    number = path.name.removeprefix("step-")
    return int(number) if number.isdigit() else 0
