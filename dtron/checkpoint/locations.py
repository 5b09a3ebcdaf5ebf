"""Locations of a run's checkpoints: a durable folder or object store, and optionally a fast folder.

With a fast folder (the node's disk, /dev/shm), checkpoints are written there, and some of them are
copied to the durable location in the background.
"""

import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.io.filesystem import Location, location
from dtron.run.directory import RunDir


@dataclass(frozen=True)
class CheckpointLocation:
    """A folder for checkpoints, with its interval and retention."""

    folder: Location
    interval: int
    """Steps between checkpoints; 0: only after the last step."""
    keep: int
    """Number of newest checkpoints that are kept; 0: all."""
    keep_every: int = 0
    """Also keep checkpoints of steps that are multiples of this number; 0: none."""


def checkpoint_locations(config: RunConfig) -> list[CheckpointLocation]:
    """Return the checkpoint locations of a run, the durable location last.

    Raises ConfigError: a URL is unusable, or the fast folder belongs to another user.
    """
    options, run = config.checkpoint, RunDir(config.run.dir)
    folder = location(options.dir) if options.dir else run.checkpoints
    locations = [CheckpointLocation(folder, options.interval, options.keep, options.keep_every)]
    if options.fast_dir:
        fast = Path(options.fast_dir).expanduser() / _name_of(run.path)
        _check_own(fast)
        locations.insert(0, CheckpointLocation(fast, options.fast_interval, options.fast_keep))
    return locations


def _check_own(fast: Path) -> None:
    """Raise ConfigError if this run's folder in `checkpoint.fast_dir` is another user's.

    Other users may write to `checkpoint.fast_dir`.
    """
    try:
        status = fast.lstat()
    except OSError:  # missing, or not accessible: the first write reports it
        return
    fix = "remove it or set another folder"
    if not stat.S_ISDIR(status.st_mode):
        raise ConfigError(f"checkpoint.fast_dir: {fast} is a link or a file, not a folder; {fix}")
    if status.st_uid != os.geteuid():
        raise ConfigError(
            f"checkpoint.fast_dir: {fast} is a folder of user {status.st_uid}, not of this user "
            f"({os.geteuid()}); {fix}"
        )


def location_of(
    locations: Sequence[CheckpointLocation], checkpoint: Location | None
) -> CheckpointLocation | None:
    """Return the location that has the folder of a checkpoint; None: no location has it."""
    if checkpoint is None:
        return None
    parent = _resolved(checkpoint.parent)
    return next((each for each in locations if _resolved(each.folder) == parent), None)


def _resolved(folder: Location) -> Location:
    return folder.resolve() if isinstance(folder, Path) else folder


def _name_of(run: Path) -> str:
    """Return a unique name for a run's folder in a fast folder, which several runs may use."""
    path = str(run.resolve())
    return f"{run.resolve().name}-{sha256(path.encode()).hexdigest()[:8]}"
