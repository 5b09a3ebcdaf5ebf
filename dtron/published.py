"""Checkpoints on a disk: what one says of itself, the newest good one, publishing, retiring.

    RUN/checkpoints/step-N/     `storage.py`'s files, and dtron.json: step, data position, model
    RUN/checkpoints/latest      names the one that was published last, for people and scripts

A checkpoint is written beside its final name and renamed when all of it has reached the disk, so
that a half-written one is never taken for a checkpoint. dtron.json has a checksum of itself and of
the index, and the index has those of all files.
"""

import hashlib
import json
import logging
import os
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from pydantic import TypeAdapter, ValidationError

from dtron.errors import CheckpointError
from dtron.files import read_json, sync_directory, write_synced
from dtron.storage import INDEX, corrupt, missing_or_short, read_index

log = logging.getLogger("dtron")
FACTS = "dtron.json"
RESUME = "set checkpoint.resume ="
"""How an error says which checkpoint to resume from instead."""


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
    faults: dict[str, Any] = field(default_factory=dict)
    """Of the run's guards: means of the loss, rollbacks."""

    @classmethod
    def of_weights(cls, model: dict[str, Any], world_size: int) -> "Facts":
        """Of a checkpoint that holds weights and nothing else."""
        return cls(0, 0, 0, world_size, 0, {}, model, {})

    @property
    def weights_only(self) -> bool:
        """Whether there is nothing that training could go on from."""
        return not self.data


def write_facts(path: Path, facts: Facts) -> None:
    """Write dtron.json of a checkpoint whose index is there. Raises OSError."""
    content = asdict(facts)
    content["sha256"] = _checksum(path, content)
    write_synced(path / FACTS, json.dumps(content, indent=1) + "\n")


def read_facts(path: Path) -> Facts:
    """Read dtron.json of one checkpoint.

    Raises:
        CheckpointError: it or the index cannot be read, or their checksum differs.
    """
    content = read_json(path / FACTS)
    found = content.pop("sha256", None)
    try:
        if found != _checksum(path, content):
            raise CheckpointError(f"{path}: {FACTS} or {INDEX} is corrupt: their SHA-256 differs")
        return TypeAdapter(Facts).validate_python(content)
    except OSError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except ValidationError as error:
        raise CheckpointError(f"{path / FACTS} is of another kind: {error}") from None


def _checksum(path: Path, facts: dict[str, Any]) -> str:
    """Of what a checkpoint says of itself and of its index, which has those of all files."""
    text = json.dumps(facts, sort_keys=True).encode()
    return hashlib.sha256(text + (path / INDEX).read_bytes()).hexdigest()


def problem(path: Path) -> str | None:
    """What is wrong with a checkpoint, as far as names, sizes and what it says of itself tell."""
    try:
        read_facts(path)
        if wrong := missing_or_short(path, read_index(path).files):
            return f"{path}: {wrong}"
    except CheckpointError as error:
        return str(error)
    return None


def find(resume: str, checkpoints: Path, below: int | None = None) -> Path | None:
    """The checkpoint that `checkpoint.resume` names; None to start afresh.

    Args:
        resume: `latest`, a run, a checkpoint, or empty.
        checkpoints: of this run.
        below: with `latest`, only those of earlier steps than this.
    Raises:
        CheckpointError: a path that holds no checkpoint, or a damaged one; `latest`, and all that
            are there are damaged. Damaged ones are named.
    """
    if not resume:
        return None
    if resume == "latest":
        return newest_good(checkpoints, below)
    path = Path(resume).expanduser()
    found = path if (path / FACTS).exists() else newest_good(path / "checkpoints")
    if found is None:
        raise CheckpointError(
            f"checkpoint.resume = {resume!r} is neither a checkpoint (a folder step-N with "
            f"{FACTS}) nor a run directory that has one"
        )
    if wrong := problem(found):
        raise unreadable(found, wrong)
    return found


def find_weights(path: Path) -> Path:
    """The checkpoint in a folder that is one, or a run. Raises CheckpointError."""
    found = path if (path / FACTS).exists() else newest_good(path / "checkpoints")
    if found is None:
        raise CheckpointError(
            f"{path} is neither a Hugging Face folder (with config.json) nor a checkpoint (with "
            f"{FACTS}) nor a run directory that has one"
        )
    if wrong := problem(found):
        raise unreadable(found, wrong, "take")
    return found


def newest_good(checkpoints: Path, below: int | None = None) -> Path | None:
    """The newest checkpoint of a run without a `problem`; each newer one is warned of.

    Raises:
        CheckpointError: there are some, and all have one.
    """
    wrong = ""
    for path in sorted(complete(checkpoints), key=step_of, reverse=True):
        if below is not None and step_of(path) >= below:
            continue
        if not (found := problem(path)):
            return path
        wrong = wrong or found
        log.warning("%s; looking for an older checkpoint", found)
    if wrong or below is not None:
        raise CheckpointError(
            f"no good checkpoint is left in {checkpoints}{wrong and ': ' + wrong}"
        )
    return None


def check_model(path: Path, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse a checkpoint of another model, naming what differs. Raises CheckpointError."""
    keys = [key for key in {**saved, **wanted} if saved.get(key) != wanted.get(key)]
    if keys:
        shown = ", ".join(f"{k}: {saved.get(k)!r} there, {wanted.get(k)!r} here" for k in keys[:4])
        raise CheckpointError(f"{path} is of another model ({shown}); set the same model")


def check_agreement(path: Path | None, group: dist.ProcessGroup) -> None:
    """Refuse to start when ranks found different checkpoints, as with run directories that hosts
    do not share. All ranks call it together. Raises CheckpointError on all of them."""
    found: list[tuple[str, str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, _identity(path) if path else None, group=group)
    if len(set(found)) > 1:
        names = ", ".join(each[0] if each else "None" for each in found)
        raise CheckpointError(
            f"ranks see different checkpoints ({names}); they must be on a file system that all "
            "hosts share"
        )


def _identity(path: Path) -> tuple[str, str]:
    """Name and content, as far as a folder says what it holds."""
    said = path / FACTS
    return path.name, hashlib.sha256(said.read_bytes()).hexdigest() if said.exists() else ""


def check_content(path: Path, group: dist.ProcessGroup, fix: str = "take") -> None:
    """Refuse a checkpoint whose files are not what was written. All ranks call it together, and
    raise CheckpointError together; `fix` as for `unreadable`."""
    if wrong := corrupt(path, read_index(path).files, group):
        raise unreadable(path, wrong[0], fix)


def unreadable(path: Path, reason: str, fix: str = RESUME) -> CheckpointError:
    """That a checkpoint cannot be loaded, with the one to take instead, which follows `fix`."""
    others = sorted(set(complete(path.parent)) - {path}, key=step_of)
    instead = f"{fix} {str(others[-1])!r}" if others else "no other one is there"
    return CheckpointError(f"{path} cannot be loaded: {reason}; {instead}")


def publish(partial: Path, final: Path) -> None:
    """Give a complete checkpoint its name, once the disk has it. Raises OSError."""
    sync_directory(partial)
    replaced = final.with_name(f"{final.name}.old.partial")
    if final.exists():  # the same step again, after resuming from an earlier one
        os.replace(final, replaced)
    os.replace(partial, final)
    pointer = final.parent / "latest.partial"
    write_synced(pointer, final.name + "\n")
    os.replace(pointer, final.parent / "latest")
    sync_directory(final.parent)
    if replaced.exists():
        shutil.rmtree(replaced)


def retire(checkpoints: Path, newest: Path, keep: int, keep_every: int) -> None:
    """Delete what is older than the `keep` newest, but for steps that `keep_every` divides and the
    one just written. Raises OSError."""
    if not keep:
        return
    for old in sorted(complete(checkpoints), key=step_of)[:-keep]:
        if old != newest and not (keep_every and step_of(old) % keep_every == 0):
            gone = old.with_name(f"{old.name}.old.partial")
            os.replace(old, gone)  # so that it is no checkpoint if deletion is interrupted
            shutil.rmtree(gone)


def clear_partial(checkpoints: Path) -> None:
    """Delete what runs that were killed have left half-written or half-deleted."""
    for left in checkpoints.glob("step-*.partial"):
        shutil.rmtree(left, ignore_errors=True)


def complete(checkpoints: Path) -> list[Path]:
    """Folders that were published, in any order."""
    return [path.parent for path in checkpoints.glob(f"step-*/{FACTS}") if step_of(path.parent)]


def step_of(path: Path) -> int:
    """N of a folder step-N; 0 for any other name."""
    number = path.name.removeprefix("step-")
    return int(number) if number.isdigit() else 0
