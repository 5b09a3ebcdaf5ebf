"""Where a run's checkpoints are: a durable folder or store, and optionally a faster tier.

With a fast tier (the node's disk, /dev/shm) a checkpoint is written there every few steps; some of
them are copied to the durable folder or store in the background.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from dtron.config import RunConfig
from dtron.io.filesystem import Location, location
from dtron.run.directory import RunDir


@dataclass(frozen=True)
class CheckpointLocation:
    """A folder of checkpoints."""

    folder: Location
    interval: int
    """Steps between checkpoints; 0: none but the last."""
    keep: int
    """How many of the newest are kept; 0: all."""
    keep_every: int = 0
    """Checkpoints of steps that this divides are kept too; 0: none."""


def checkpoint_locations(config: RunConfig) -> list[CheckpointLocation]:
    """The tiers of a run, the durable one last. Raises ConfigError: a URL cannot be used."""
    options, run = config.checkpoint, RunDir(config.run.dir)
    folder = location(options.dir) if options.dir else run.checkpoints
    locations = [CheckpointLocation(folder, options.interval, options.keep, options.keep_every)]
    if options.fast_dir:
        fast = Path(options.fast_dir).expanduser() / _name_of(run.path)
        locations.insert(0, CheckpointLocation(fast, options.fast_interval, options.fast_keep))
    return locations


def location_of(
    locations: Sequence[CheckpointLocation], checkpoint: Location | None
) -> CheckpointLocation | None:
    """The tier whose checkpoint it is."""
    if checkpoint is None:
        return None
    parent = _resolved(checkpoint.parent)
    return next((each for each in locations if _resolved(each.folder) == parent), None)


def _resolved(folder: Location) -> Location:
    return folder.resolve() if isinstance(folder, Path) else folder


def _name_of(run: Path) -> str:
    """Of a run's folder among those of other runs."""
    path = str(run.resolve())
    return f"{run.resolve().name}-{sha256(path.encode()).hexdigest()[:8]}"
