"""Folders of checkpoints: metadata, search for the newest valid checkpoint, committing, deleting.

    RUN/checkpoints/step-N/     files of `dcp_storage.py`; dtron.json: step, data position, model
    RUN/checkpoints/latest      name of the newest committed checkpoint, for people and scripts
    RUN/checkpoints/best        name of the best checkpoint (checkpoint.best), which is kept; it is
                                found as RUN/best too

A folder is a checkpoint if it has a dtron.json. This file is written atomically after all other
files have reached the disk or the object store, and it is deleted first. So a half-written or
half-deleted folder is never taken for a checkpoint, also in stores that cannot rename. dtron.json
has a checksum of itself and of the index; the index has checksums of all files.
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
from dtron.errors import CheckpointError, first_failure, hint_of_weights
from dtron.io.filesystem import (
    PARTIAL_SUFFIX,
    Location,
    delete,
    is_file,
    is_link,
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
BEST = "best"
_ABANDONED = "abandoned.json"
"""METADATA is renamed to this when training continues from an earlier step."""
PROBE = "latest.partial"
"""File that a starting run writes to a store to check write access; the next save deletes it."""
_STEP = re.compile(r"[0-9]{1,18}")
_OWN_FILES = re.compile(
    rf"rank-\d+\.safetensors|(index|dtron|abandoned)\.json({PARTIAL_SUFFIX}|\.partial)?"
)
_PARTIAL = re.compile(rf"(latest|best)({PARTIAL_SUFFIX}|\.partial)")
"""Names of PROBE and of temporary files of `latest` that a killed run has left."""
RESUME = "set checkpoint.resume ="
"""Start of the fix in an error about a checkpoint to resume from."""
_Count = Annotated[int, Field(ge=0, lt=2**63)]
_Key = Annotated[str, Field(pattern=r"^\w+\.\w+$")]
_ENTRIES: dict[str, dict[str, Any]] = {
    "data": {"sequence": _Count},
    "settings": {"train.seq_len": Annotated[int, Field(gt=0, le=2**31)]},
    "schedule": {"train.steps": _Count, "warmup_steps": _Count, "optim.lr": float},
    "best": {"metric": str, "loss": float, "step": _Count, "since": _Count},
    "faults": {"rollbacks": _Count, "spikes": dict[str, float]},
}
"""Types of entries in the dicts of dtron.json, by field and key; checked by `_entry_error`."""


@dataclass(frozen=True)
class CheckpointMetadata:
    """Metadata of a checkpoint, the content of dtron.json."""

    step: _Count
    """Number of completed steps."""
    tokens: _Count
    """Number of tokens trained on."""
    skipped: _Count
    """Number of steps skipped because of non-finite gradients."""
    world_size: _Count
    skipped_in_a_row: _Count
    """Number of consecutive skipped steps, up to this step."""
    settings: dict[str, Any]
    """Keys of the run's config that the saved state depends on, with their values."""
    model: dict[str, Any]
    """Name and resolved config of the model."""
    data: dict[str, int | str]
    """State of the data loader."""
    faults: dict[str, Any] = field(default_factory=dict)
    """State of the run's guards: means of the loss, number of rollbacks."""
    schedule: dict[str, Any] = field(default_factory=dict)
    """Keys of the run's config that learning rates depend on, and `warmup_steps`."""
    best: dict[str, Any] = field(default_factory=dict)
    """State of `BestLoss`: metric, loss and step of the best validation, and the number of
    validations since."""
    automatic: dict[_Key, Any] = field(default_factory=dict)
    """Keys of the run's config that were chosen automatically, with their values."""

    @classmethod
    def of_weights(cls, model: dict[str, Any], world_size: int) -> "CheckpointMetadata":
        """Make the metadata of a checkpoint of weights only."""
        return cls(0, 0, 0, world_size, 0, {}, model, {})

    @property
    def weights_only(self) -> bool:
        """Whether the checkpoint has weights only, so that training cannot resume from it."""
        return not self.data


def _entry_error(metadata: CheckpointMetadata) -> str | None:
    """Return an error for the first invalid entry of _ENTRIES; None: all are valid.

    Entries may be missing, except those of a non-empty `schedule` or `best`.
    """
    for name, kinds in _ENTRIES.items():
        found = getattr(metadata, name)
        for key, kind in kinds.items():
            if key not in found and not (found and name in ("schedule", "best")):
                continue
            try:
                TypeAdapter(kind).validate_python(found.get(key), strict=True)
            except ValidationError as error:
                return f"{name}: {key} = {found.get(key)!r}: {error.errors()[0]['msg']}"
    return None


def share(path: Location, group: dist.ProcessGroup) -> Location:
    """Broadcast rank 0's listing and small files of a checkpoint in an object store.

    All ranks call it together.

    Returns:
        The path with rank 0's answers, so that other ranks send no requests for them. A local path
        is returned unchanged.
    """
    if not isinstance(path, Remote):
        return path
    known = [path.snapshot()]
    dist.broadcast_object_list(known, src=0, group=group)
    return path.with_snapshot(known[0])


def write_metadata(path: Location, metadata: CheckpointMetadata) -> None:
    """Write dtron.json, which marks the folder as a complete checkpoint.

    Raises OSError: the file cannot be written.
    """
    content = asdict(metadata)
    content["sha256"] = _checksum(path, content)
    sync_directory(path)
    write_atomically(path / METADATA, json.dumps(content, indent=1) + "\n")


def read_metadata(path: Location) -> CheckpointMetadata:
    """Read dtron.json of a checkpoint.

    Raises:
        CheckpointError: dtron.json or the index cannot be read, their checksum is wrong, or the
            folder's name has a different step.
        UnreachableError: the object store does not answer.
    """
    content = read_json(path / METADATA)
    checksum = content.pop("sha256", None)
    try:
        if checksum != _checksum(path, content):
            raise CheckpointError(
                f"{path}: {METADATA} or {INDEX} is corrupt: their SHA-256 differs"
            )
        found = TypeAdapter(CheckpointMetadata).validate_python(content)
        if wrong := _entry_error(found):
            raise CheckpointError(f"{path / METADATA} is damaged: {wrong}")
    except UnreachableError:
        raise
    except OSError as error:
        raise CheckpointError(f"{path}: {error}") from None
    except ValidationError as error:
        raise CheckpointError(f"{path / METADATA} is damaged: {first_failure(error)}") from None
    if step_of(path) not in (0, found.step) and not found.weights_only:
        raise CheckpointError(
            f"{path}: {METADATA} is of step {found.step}; rename the folder to step-{found.step}"
        )
    return found


def _checksum(path: Location, metadata: dict[str, Any]) -> str:
    """Return the SHA-256 of a checkpoint's metadata and index.

    The index has the SHA-256 of each file.
    """
    text = json.dumps(metadata, sort_keys=True).encode()
    return hashlib.sha256(text + read(path / INDEX, INDEX_BYTES)).hexdigest()


def problem(path: Location) -> str | None:
    """Return the first problem in a checkpoint's file names, sizes and metadata; None: no problem.

    Raises UnreachableError: the object store does not answer or denies access.
    """
    try:
        read_metadata(path)
        if wrong := missing_or_short(path, read_index(path).files):
            return f"{path}: {wrong}"
    except UnreachableError:  # the checkpoint may be valid
        raise
    except CheckpointError as error:
        return str(error)
    return None


def find(resume: str, folders: Sequence[Location]) -> Location | None:
    """Find the checkpoint that `checkpoint.resume` names; None: start from step 0.

    Args:
        resume: `latest`, a run, a folder of checkpoints, a checkpoint, or empty.
        folders: folders of this run's checkpoints.
    Raises:
        CheckpointError: the path has no checkpoint or a damaged checkpoint; with `latest`, all
            checkpoints are damaged.
        OSError: a URL cannot be reached.
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
    """Find the checkpoint at a path, or the newest valid checkpoint of the run at this path.

    Args:
        besides: folders that the caller also accepts, in words that the error message inserts
            before "a checkpoint", such as "a Hugging Face folder nor ".
    Raises:
        CheckpointError: the path has no checkpoint, or the checkpoint is damaged.
    """
    found = _checkpoint_in(path)
    if found is None:
        raise CheckpointError(
            f"{path} is neither {besides}a checkpoint of dtron (with {METADATA}) nor a run "
            f"directory that has one{hint_of_weights(str(path))}"
        )
    if wrong := problem(found):
        raise unreadable(found, wrong, "use")
    return found


def _checkpoint_in(path: Location | str) -> Location | None:
    """Return the checkpoint at a path, the newest valid checkpoint of a run at this path, or the
    best checkpoint for the path RUN/best."""
    where = listed(location(path))
    if is_file(where / METADATA):
        return where
    if where.name == BEST:
        found = [best_of(each) for each in (where.parent / "checkpoints", where.parent)]
        return next((each for each in found if each is not None), None)
    return newest_good([where / "checkpoints", where])


def newest_good(
    folders: Sequence[Location], after: Location | None = None, below: int | None = None
) -> Location | None:
    """Find the newest checkpoint without a `problem`; warn of each damaged newer checkpoint.

    If several folders have a checkpoint of the same step, the first folder is tried first.

    Args:
        after: a damaged checkpoint; only checkpoints after it in `newest_first` are considered.
        below: only steps below this are considered.
    Returns:
        The checkpoint; None: the folders have no checkpoint.
    Raises:
        CheckpointError: all checkpoints have a problem.
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
            f"{wrong and ': ' + wrong}; copy a good checkpoint there, or start from step 0: leave "
            "out checkpoint.resume and set another run.dir"
        )
    return None


def newest_first(folders: Sequence[Location]) -> list[Location]:
    """List all checkpoints, newest first; checkpoints of one step in the order of `folders`."""
    found = [path for folder in folders for path in complete(listed(folder))]
    return sorted(found, key=lambda path: -step_of(path))


def check_model(path: Location, saved: dict[str, Any], wanted: dict[str, Any]) -> None:
    """Check that a checkpoint is of this model. Raises CheckpointError with the differences."""
    keys = [key for key in {**saved, **wanted} if saved.get(key) != wanted.get(key)]
    if keys:
        shown = ", ".join(f"{k}: {saved.get(k)!r}, not {wanted.get(k)!r}" for k in keys[:4])
        raise CheckpointError(f"{path} is of another model ({shown}); set the same model")


def check_agreement(path: Location | None, group: dist.ProcessGroup) -> None:
    """Raise CheckpointError on all ranks if ranks have found different checkpoints.

    Ranks find different checkpoints if, for example, hosts do not share the run directory. All
    ranks call this together.
    """
    found: list[tuple[str, str] | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(found, identity(path) if path else None, group=group)
    if len(set(found)) > 1:
        names = ", ".join(each[0] if each else "None" for each in found)
        raise CheckpointError(
            f"ranks see different checkpoints ({names}); checkpoints must be on a file system that "
            "all hosts share"
        )


def agree(
    found: Location | None, folders: Sequence[Location], group: dist.ProcessGroup
) -> Location | None:
    """Agree on the newest checkpoint without a `problem` that all ranks see in their folders.

    All ranks call it together.

    Args:
        found: the newest checkpoint that this rank sees.
    Returns:
        This rank's path of the checkpoint; None: no rank sees a checkpoint.
    Raises:
        CheckpointError: on all ranks; no checkpoint is seen by all ranks, but some ranks see one.
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
            log.warning("ranks see different newest checkpoints; all use %s", mine[each])
            return mine[each]
    if any(seen):
        names = ", ".join(others[0][0] if others else "None" for others in seen)
        raise CheckpointError(
            f"ranks see different checkpoints ({names}), and no checkpoint is seen by all of them; "
            "checkpoints must be on a file system that all hosts share"
        )
    return None


def identity(path: Location) -> tuple[str, str]:
    """Return the name of a checkpoint and the SHA-256 of its metadata."""
    file = path / METADATA
    return path.name, hashlib.sha256(read(file)).hexdigest() if file.exists() else ""


def check_content(path: Location, group: dist.ProcessGroup, fix: str = "use") -> None:
    """Compare all files of a checkpoint with the SHA-256 in its index; all ranks call it together.

    Args:
        fix: text of the error before the path of the suggested checkpoint.
    Raises:
        CheckpointError: on all ranks, if a file differs.
    """
    if wrong := corrupt(path, read_index(path).files, group):
        raise unreadable(path, wrong[0], fix)


def unreadable(path: Location, reason: str, fix: str = RESUME) -> CheckpointError:
    """Return the error for a checkpoint that cannot be loaded, with another one to use.

    Args:
        fix: text before the path of the suggested checkpoint.
    """
    others = [other for other in newest_first([path.parent]) if other != path]
    instead = f"{fix} {str(others[0])!r}" if others else "no other checkpoint exists"
    return CheckpointError(f"{path} cannot be loaded: {reason}; {instead}")


def prepare_folder(folder: Location, kept: Collection[Location] = ()) -> None:
    """Make an empty folder for a new checkpoint, and delete incomplete checkpoints in its parent.

    Args:
        kept: folders that are still read or written and must not be deleted.
    Raises:
        OSError: the disk or store fails.
        CheckpointError: the folder is a checkpoint, or has files that dtron did not write.
    """
    delete(*_leftovers(folder.parent, kept))
    if folder in kept or (folder / METADATA).exists():
        raise CheckpointError(f"{folder} exists already")
    if foreign := _foreign(folder):
        raise CheckpointError(f"{folder} has a file {foreign}, which is not dtron's; move it away")
    delete(folder)  # it may be an abandoned checkpoint of this step
    make_folder(folder)


def commit(folder: Location, metadata: CheckpointMetadata) -> None:
    """Commit a checkpoint: write its metadata after all other files.

    Then write the checkpoint's name to `latest`, for people and scripts; log a warning if that
    fails. Raises OSError: the metadata cannot be written.
    """
    write_metadata(folder, metadata)
    sync_directory(folder.parent)
    latest = folder.parent / "latest"
    try:
        write_atomically(latest, folder.name + "\n")
    except OSError as error:
        log.warning("%s cannot be written: %s; checkpoint %s is complete", latest, error, folder)


def name_best(checkpoints: Location, step: int) -> None:
    """Write the name of the best checkpoint to `best`; remove the file if it is not complete.

    Raises OSError: the file cannot be read or written.
    """
    best = checkpoints / f"step-{step}"
    if not (best / METADATA).exists():
        delete(checkpoints / BEST)
    elif best_of(checkpoints) != best:
        write_atomically(checkpoints / BEST, best.name + "\n")


def best_of(checkpoints: Location) -> Location | None:
    """Return the complete checkpoint that `best` names; None: there is none.

    Raises OSError: the file cannot be read.
    """
    if not is_file(checkpoints / BEST):
        return None
    found = checkpoints / read(checkpoints / BEST).decode(errors="replace").strip()
    return found if step_of(found) and (found / METADATA).exists() else None


def delete_old(
    checkpoints: Location,
    newest: Location,
    keep: int,
    keep_every: int,
    kept: Collection[Location] = (),
) -> None:
    """Delete abandoned checkpoints and all but the `keep` newest (0: keep all).

    Never delete `newest`, the best checkpoint, checkpoints in `kept`, or steps that are multiples
    of `keep_every`.
    Raises OSError: a checkpoint cannot be read or deleted.
    """
    old = sorted(complete(checkpoints), key=step_of)[:-keep] if keep else []
    spared = {path for path in old if keep_every and step_of(path) % keep_every == 0}
    old = [path for path in old if path not in {newest, best_of(checkpoints), *kept, *spared}]
    if not isinstance(checkpoints, Remote):  # in a store, one request deletes all files
        for path in old:
            _invalidate(path)
    left = _leftovers(checkpoints, {newest, *kept}, abandoned=True)
    partial = [checkpoints / n for n in names_in(checkpoints) if _PARTIAL.fullmatch(n)]
    delete(*old, *left, *partial)


def delete_checkpoint(folder: Location) -> None:
    """Delete a checkpoint, its metadata first, so that the checkpoint is invalid at once.

    Raises OSError: a file cannot be deleted.
    """
    _invalidate(folder)
    delete(folder)


def _invalidate(folder: Location) -> None:
    """Delete the metadata of a checkpoint; if the folder is a link, delete only the link."""
    delete(folder if is_link(folder) else folder / METADATA)


def _foreign(folder: Location) -> str:
    """Return the name of a file that dtron does not write to checkpoints; empty: no such file."""
    return next((name for name in names_in(folder) if not _OWN_FILES.fullmatch(name)), "")


def abandon_after(checkpoints: Location, step: int) -> None:
    """Invalidate checkpoints newer than `step`: their steps are trained again.

    Their files stay until the next commit; until then, renaming abandoned.json to dtron.json
    restores a checkpoint. If a checkpoint is a link, only the link is removed.
    Raises OSError: a checkpoint cannot be read or changed.
    """
    for path in complete(checkpoints):
        if step_of(path) <= step:
            continue
        if is_link(path):
            log.warning("removing link %s: it is newer than step %d", path, step)
        else:
            write_atomically(path / _ABANDONED, read(path / METADATA).decode())
        _invalidate(path)


def _leftovers(
    checkpoints: Location, kept: Collection[Location] = (), abandoned: bool = False
) -> list[Location]:
    """List incomplete checkpoints of killed runs, except `kept`.

    Args:
        abandoned: also list abandoned checkpoints.
    Raises:
        OSError: a folder cannot be read.
    """
    steps = (checkpoints / name for name in names_in(checkpoints))
    left = [path for path in steps if step_of(path) and path not in kept]
    left = [path for path in left if not (_foreign(path) or (path / METADATA).exists())]
    return [path for path in left if abandoned or not (path / _ABANDONED).exists()]


def complete(checkpoints: Location) -> list[Location]:
    """List the committed checkpoints of a folder, in any order."""
    found = (checkpoints / name for name in names_in(checkpoints))
    return [path for path in found if step_of(path) and (path / METADATA).exists()]


def step_of(path: Location) -> int:
    """Return N for a folder step-N; 0 for any other name."""
    number = path.name.removeprefix("step-")
    return int(number) if _STEP.fullmatch(number) and number != path.name else 0
