"""Locations of a run's checkpoints: a durable folder or store, and optionally a faster folder.

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
    """Steps between checkpoints; 0: only the last one."""
    keep: int
    """Number of newest checkpoints that are kept; 0: all."""
    keep_every: int = 0
    """Also keep checkpoints of steps that are multiples of this; 0: none."""


def checkpoint_locations(config: RunConfig) -> list[CheckpointLocation]:
    """Return the locations of a run, the durable one last. Raises ConfigError: a URL is
    unusable, or the fast folder is another user's."""
    options, run = config.checkpoint, RunDir(config.run.dir)
    folder = location(options.dir) if options.dir else run.checkpoints
    locations = [CheckpointLocation(folder, options.interval, options.keep, options.keep_every)]
    if options.fast_dir:
        fast = Path(options.fast_dir).expanduser() / _name_of(run.path)
        _check_own(fast)
        locations.insert(0, CheckpointLocation(fast, options.fast_interval, options.fast_keep))
    return locations


def _check_own(fast: Path) -> None:
    """Check that a folder in a fast folder, where other users may write, is this user's. Raises
    ConfigError."""
    try:
        status = fast.lstat()
    except OSError:  # not there, or not accessible, which is reported where it is written
        return
    if status.st_uid != os.geteuid() or not stat.S_ISDIR(status.st_mode):
        raise ConfigError(
            f"checkpoint.fast_dir: {fast} has to be a folder of this user (id {os.geteuid()}), but "
            f"is a link or of user {status.st_uid}; remove it or set another folder"
        )


def location_of(
    locations: Sequence[CheckpointLocation], checkpoint: Location | None
) -> CheckpointLocation | None:
    """Return the location that holds a checkpoint; None: none of them."""
    if checkpoint is None:
        return None
    parent = _resolved(checkpoint.parent)
    return next((each for each in locations if _resolved(each.folder) == parent), None)


def _resolved(folder: Location) -> Location:
    return folder.resolve() if isinstance(folder, Path) else folder


def _name_of(run: Path) -> str:
    """Return a unique name for a run's folder in a fast folder that several runs use."""
    path = str(run.resolve())
    return f"{run.resolve().name}-{sha256(path.encode()).hexdigest()[:8]}"
