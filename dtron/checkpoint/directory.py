"""Folders of checkpoints: committing, naming the best, deleting.

    RUN/checkpoints/step-N/     files of `dcp_storage.py`; dtron.json: step, data position, model
    RUN/checkpoints/latest      name of the newest committed checkpoint, for people and scripts
    RUN/checkpoints/best        name of the best checkpoint (checkpoint.best), which is kept; it is
                                found as RUN/best too

A folder is a checkpoint if it has a dtron.json. This file is written atomically after all other
files have reached the disk or the object store, and it is deleted first. So a half-written or
half-deleted folder is never taken for a checkpoint, also in stores that cannot rename.
"""

import logging
import re
from collections.abc import Collection

from dtron.checkpoint.metadata import METADATA, CheckpointMetadata, step_of, write_metadata
from dtron.errors import CheckpointError
from dtron.io.filesystem import (
    PARTIAL_SUFFIX,
    Location,
    delete,
    is_file,
    is_link,
    make_folder,
    names_in,
    read,
    sync_directory,
    write_atomically,
)
from dtron.io.remote_path import Remote

log = logging.getLogger("dtron")
BEST = "best"
_ABANDONED = "abandoned.json"
"""METADATA is renamed to this when training continues from an earlier step."""
PROBE = "latest.partial"
"""File that a starting run writes to a store to check write access; the next save deletes it."""
_OWN_FILES = re.compile(
    rf"rank-\d+\.safetensors|(index|dtron|abandoned)\.json({PARTIAL_SUFFIX}|\.partial)?"
)
_PARTIAL = re.compile(rf"(latest|best)({PARTIAL_SUFFIX}|\.partial)")
"""Names of PROBE and of temporary files of `latest` that a killed run has left."""


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
