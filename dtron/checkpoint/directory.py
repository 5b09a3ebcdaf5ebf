"""Checkpoints in a folder: their metadata, the newest valid one, committing, deleting.

    RUN/checkpoints/step-N/     files of `dcp_storage.py`; dtron.json: step, data position, model
    RUN/checkpoints/latest      names the one that was committed last, for people and scripts

A folder is a checkpoint if it has a dtron.json, which is written atomically after all other files
have reached the disk or the store, and deleted first. So a half-written or half-deleted folder is
never taken for a checkpoint, also on stores that cannot rename. dtron.json has a checksum of itself
and of the index, and the index has those of all files.
"""

import hashlib
import json
import logging
import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any

import torch.distributed as dist
from pydantic import Field, TypeAdapter, ValidationError

from dtron.checkpoint.dcp_storage import INDEX, corrupt, missing_or_short, read_index
from dtron.errors import CheckpointError
from dtron.io.filesystem import (
    Location,
    delete,
    is_file,
    listed,
    location,
    make_folder,
    names_in,
    read,
    read_json,
    sync_directory,
    write_atomically,
)
from dtron.io.remote_path import Remote, UnreachableError
from dtron.io.untrusted import INDEX_BYTES

log = logging.getLogger("dtron")
METADATA = "dtron.json"
_ABANDONED = "abandoned.json"
"""METADATA is renamed to it where training has continued from an earlier step."""
PROBE = "latest.partial"
"""A start writes it to a store, to see that it can; the next save deletes it."""
_STEP = re.compile(r"[0-9]{1,18}")
_OWN_FILES = re.compile(r"rank-\d+\.safetensors|(index|dtron|abandoned)\.json(\.partial)?")
RESUME = "set checkpoint.resume ="
"""The beginning of the fix in an error about a checkpoint to resume from."""
_Count = Annotated[int, Field(ge=0, lt=2**63)]


@dataclass(frozen=True)
class CheckpointMetadata:
    """The metadata of a checkpoint, which is read without opening its shards."""

    step: _Count
    """Optimizer steps done."""
    tokens: _Count
    """Tokens trained on."""
    skipped: _Count
    """Steps skipped for gradients that were not finite."""
    world_size: _Count
    skipped_in_a_row: _Count
    """How many of them were the last ones."""
    settings: dict[str, Any]
    """Keys of the run's config on which the meaning of the state depends, with their values."""
    model: dict[str, Any]
    """Name and resolved config of the model."""
    data: dict[str, int | str]
    """State of the data loader."""
    faults: dict[str, Any] = field(default_factory=dict)
    """Of the run's guards: means of the loss, rollbacks."""
    schedule: dict[str, Any] = field(default_factory=dict)
    """Keys of the run's config that learning rates depend on, and `warmup_steps`."""

    @classmethod
    def of_weights(cls, model: dict[str, Any], world_size: int) -> "CheckpointMetadata":
        """Of a checkpoint that holds weights and nothing else."""
        return cls(0, 0, 0, world_size, 0, {}, model, {})

    @property
    def weights_only(self) -> bool:
        """Whether there is nothing that training could go on from."""
        return not self.data


def share(path: Location, group: dist.ProcessGroup) -> Location:
    """Give all ranks what rank 0 has listed and read of a checkpoint in a store. All of them call
    it together."""
    if not isinstance(path, Remote):
        return path
    known = [path.snapshot()]
    dist.broadcast_object_list(known, src=0, group=group)
    return path.with_snapshot(known[0])


def write_metadata(path: Location, metadata: CheckpointMetadata) -> None:
    """Make a checkpoint of a folder that holds all else. Raises OSError."""
    content = asdict(metadata)
    content["sha256"] = _checksum(path, content)
    sync_directory(path)
    write_atomically(path / METADATA, json.dumps(content, indent=1) + "\n")


def read_metadata(path: Location) -> CheckpointMetadata:
    """Read dtron.json of one checkpoint.

    Raises:
        CheckpointError: it or the index cannot be read, or their checksum differs.
        UnreachableError: a store does not answer.
    """
    content = read_json(path / METADATA)
    found = content.pop("sha256", None)
    try:
        if found != _checksum(path, content):
            raise CheckpointError(
                f"{path}: {METADATA} or {INDEX} is corrupt: their SHA-256 differs"
            )
        return TypeAdapter(CheckpointMetadata).validate_python(content)
    except UnreachableError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except ValidationError as error:
        raise CheckpointError(f"{path / METADATA} is of another kind: {error}") from None


def _checksum(path: Location, metadata: dict[str, Any]) -> str:
    """SHA-256 of a checkpoint's metadata and index, which has the hashes of all files."""
    text = json.dumps(metadata, sort_keys=True).encode()
    return hashlib.sha256(text + read(path / INDEX, INDEX_BYTES)).hexdigest()


def problem(path: Location) -> str | None:
    """The problem of a checkpoint that its names, sizes and metadata show; None: there is none.
    Raises UnreachableError."""
    try:
        read_metadata(path)
        if wrong := missing_or_short(path, read_index(path).files):
            return f"{path}: {wrong}"
    except UnreachableError:  # it may be as good as any
        raise
    except CheckpointError as error:
        return str(error)
    return None


def find(resume: str, folders: Sequence[Location]) -> Location | None:
    """The checkpoint that `checkpoint.resume` names; None to start afresh.

    Args:
        resume: `latest`, a run, a folder of checkpoints, a checkpoint, or empty.
        folders: where this run's checkpoints are.
    Raises:
        CheckpointError: a path that holds no checkpoint, or a damaged one; `latest`, and all that
            are there are damaged. Damaged ones are named.
        OSError: a store cannot be reached.
    """
    if not resume:
        return None
    if resume == "latest":
        return newest_good(folders)
    found = _checkpoint_in(resume)
    if found is None:
        raise CheckpointError(
            f"checkpoint.resume = {resume!r} is neither a checkpoint (a folder step-N with "
            f"{METADATA}) nor a run directory that has one"
        )
    if wrong := problem(found):
        raise unreadable(found, wrong)
    return found


def find_weights(path: Location | str, besides: str = "") -> Location:
    """The checkpoint in a folder that is one, or a run. Raises CheckpointError.

    Args:
        besides: what else the folder might have been.
    """
    found = _checkpoint_in(path)
    if found is None:
        raise CheckpointError(
            f"{path} is neither {besides}a checkpoint of dtron (with {METADATA}) nor a run "
            "directory that has one"
        )
    if wrong := problem(found):
        raise unreadable(found, wrong, "take")
    return found


def _checkpoint_in(path: Location | str) -> Location | None:
    """The checkpoint that a path is, or the newest good one below it."""
    where = listed(location(path))
    if is_file(where / METADATA):
        return where
    return newest_good([where / "checkpoints", where])


def newest_good(
    folders: Sequence[Location], after: Location | None = None, below: int | None = None
) -> Location | None:
    """The newest checkpoint of a run without a `problem`; each newer one is warned of. Of two of
    one step, that of the first folder is taken.

    Args:
        after: one that was taken before and proved to be damaged: the next one is wanted.
        below: of an earlier step than this.
    Raises:
        CheckpointError: there are some, and all have one.
    """
    wrong, paths = "", newest_first(folders)
    if below is not None:
        paths = [path for path in paths if step_of(path) < below]
    for path in paths[paths.index(after) + 1 :] if after is not None else paths:
        if not (found := problem(path)):
            return path
        wrong = wrong or found
        log.warning("%s; looking for an older checkpoint", found)
    if wrong or after is not None:
        raise CheckpointError(
            f"no good checkpoint is left in {' and '.join(map(str, folders))}"
            f"{wrong and ': ' + wrong}; copy one there from elsewhere, or leave out "
            "checkpoint.resume, with another run.dir, to begin anew"
        )
    return None


def newest_first(folders: Sequence[Location]) -> list[Location]:
    """All checkpoints of a run; those of one step in the order of their folders."""
    found = [path for folder in folders for path in complete(listed(folder))]
    return sorted(found, key=lambda path: -step_of(path))


def check_model(path: Location, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Refuse a checkpoint of another model, naming what differs. Raises CheckpointError."""
    keys = [key for key in {**saved, **wanted} if saved.get(key) != wanted.get(key)]
    if keys:
        shown = ", ".join(f"{k}: {saved.get(k)!r} there, {wanted.get(k)!r} here" for k in keys[:4])
        raise CheckpointError(f"{path} is of another model ({shown}); set the same model")


def check_agreement(path: Location | None, group: dist.ProcessGroup) -> None:
    """Refuse to start when ranks found different checkpoints, as with run directories that hosts
    do not share. All ranks call it together. Raises CheckpointError on all of them."""
    found: list[tuple[str, str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, identity(path) if path else None, group=group)
    if len(set(found)) > 1:
        names = ", ".join(each[0] if each else "None" for each in found)
        raise CheckpointError(
            f"ranks see different checkpoints ({names}); they must be on a file system that all "
            "hosts share"
        )


def agree(
    found: Location | None, folders: Sequence[Location], group: dist.ProcessGroup
) -> Location | None:
    """The newest checkpoint without a `problem` that all ranks see, each in one of its folders;
    None: no rank sees any. All ranks call it together.

    Args:
        found: the newest one that this rank sees.
    Raises:
        CheckpointError: on all of them; some see good checkpoints, but no one is seen by all.
    """
    newest: list[tuple[str, str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(newest, identity(found) if found else None, group=group)
    if len(set(newest)) == 1:
        return found
    mine: dict[tuple[str, str], Location] = {}
    for path in newest_first(folders):
        if not problem(path):
            mine.setdefault(identity(path), path)
    seen: list[list[tuple[str, str]]] = [[]] * dist.get_world_size(group)
    dist.all_gather_object(seen, list(mine), group=group)
    for each in seen[0]:
        if all(each in others for others in seen):
            log.warning("%s is the newest checkpoint that all ranks see", mine[each])
            return mine[each]
    if any(seen):
        names = ", ".join(others[0][0] if others else "None" for others in seen)
        raise CheckpointError(
            f"ranks see different checkpoints ({names}) and none that all of them see; they must "
            "be on a file system that all hosts share"
        )
    return None


def identity(path: Location) -> tuple[str, str]:
    """Name and hash of the metadata of a checkpoint."""
    file = path / METADATA
    return path.name, hashlib.sha256(read(file)).hexdigest() if file.exists() else ""


def check_content(path: Location, group: dist.ProcessGroup, fix: str = "take") -> None:
    """Refuse a checkpoint whose files are not what was written. All ranks call it together, and
    raise CheckpointError together; `fix` as for `unreadable`."""
    if wrong := corrupt(path, read_index(path).files, group):
        raise unreadable(path, wrong[0], fix)


def unreadable(path: Location, reason: str, fix: str = RESUME) -> CheckpointError:
    """That a checkpoint cannot be loaded, with the one to take instead, which follows `fix`."""
    others = [other for other in newest_first([path.parent]) if other != path]
    instead = f"{fix} {str(others[0])!r}" if others else "no other one is there"
    return CheckpointError(f"{path} cannot be loaded: {reason}; {instead}")


def prepare_folder(folder: Location, kept: Collection[Location] = ()) -> None:
    """Make an empty folder to write a checkpoint to; incomplete ones next to it are deleted.

    Args:
        kept: folders that somebody still reads or writes.
    Raises:
        OSError
    """
    delete(*_leftovers(folder.parent, kept))
    if folder in kept or (folder / METADATA).exists():
        raise CheckpointError(f"{folder} is there already")
    if foreign := _foreign(folder):
        raise CheckpointError(f"{folder} holds {foreign}, which no checkpoint has; move it away")
    delete(folder)  # abandoned: its step is done again
    make_folder(folder)


def commit(folder: Location, metadata: CheckpointMetadata) -> None:
    """Make a checkpoint of a folder that holds all else, the newest one. Raises OSError."""
    write_metadata(folder, metadata)
    sync_directory(folder.parent)
    write_atomically(folder.parent / "latest", folder.name + "\n")


def delete_old(
    checkpoints: Location,
    newest: Location,
    keep: int,
    keep_every: int,
    kept: Collection[Location] = (),
) -> None:
    """Delete what is older than the `keep` newest, but for steps that `keep_every` divides, the
    one just written and `kept`; and what was abandoned. Raises OSError."""
    old = sorted(complete(checkpoints), key=step_of)[:-keep] if keep else []
    spared = {path for path in old if keep_every and step_of(path) % keep_every == 0}
    old = [path for path in old if path not in {newest, *kept, *spared}]
    if not isinstance(checkpoints, Remote):  # where one request deletes all
        for path in old:
            delete(path / METADATA)
    probe = checkpoints / PROBE
    left = _leftovers(checkpoints, {newest, *kept}, abandoned=True)
    delete(*old, *left, *([probe] if probe.exists() else []))


def delete_checkpoint(folder: Location) -> None:
    """Delete a checkpoint, which is none from the beginning of the deletion on. Raises OSError."""
    delete(folder / METADATA)
    delete(folder)


def _foreign(folder: Location) -> str:
    """A name in a folder that dtron does not write there."""
    return next((name for name in names_in(folder) if not _OWN_FILES.fullmatch(name)), "")


def abandon_after(checkpoints: Location, step: int) -> None:
    """Make checkpoints of a future that is about to be trained again no checkpoints. They are there
    until the next one is published: a renamed dtron.json brings them back. Raises OSError."""
    for path in complete(checkpoints):
        if step_of(path) > step:
            write_atomically(path / _ABANDONED, read(path / METADATA).decode())
            delete(path / METADATA)


def _leftovers(
    checkpoints: Location, kept: Collection[Location] = (), abandoned: bool = False
) -> list[Location]:
    """What runs that were killed have left half-written or half-deleted, and on demand what was
    abandoned, but `kept`. Raises OSError."""
    steps = (checkpoints / name for name in names_in(checkpoints))
    left = [path for path in steps if step_of(path) and path not in kept]
    left = [path for path in left if not (_foreign(path) or (path / METADATA).exists())]
    return [path for path in left if abandoned or not (path / _ABANDONED).exists()]


def complete(checkpoints: Location) -> list[Location]:
    """Folders that were published, in any order."""
    found = (checkpoints / name for name in names_in(checkpoints))
    return [path for path in found if step_of(path) and (path / METADATA).exists()]


def step_of(path: Location) -> int:
    """N of a folder step-N; 0 for any other name."""
    number = path.name.removeprefix("step-")
    return int(number) if _STEP.fullmatch(number) and number != path.name else 0
