"""Find checkpoints: the one that a setting names, or the newest valid one that all ranks see."""

import logging
from collections.abc import Sequence

import torch.distributed as dist

from dtron.checkpoint.dcp_storage import corrupt, missing_or_short, read_index
from dtron.checkpoint.directory import BEST, best_of, complete
from dtron.checkpoint.metadata import METADATA, identity, read_metadata, step_of
from dtron.errors import CheckpointError, hint_of_weights
from dtron.io.filesystem import Location, is_file, listed, location
from dtron.io.remote_path import UnreachableError

log = logging.getLogger("dtron")
RESUME = "set checkpoint.resume ="
"""Start of the fix in an error about a checkpoint to resume from."""


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
