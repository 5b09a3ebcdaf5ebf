"""The run directory: its files, and what a start does with existing files.

    config.toml      resolved config, usable with --config (config-1.toml, ...: earlier starts)
    run.json         metadata of the run: versions, mesh, stages, chosen settings
    metrics.jsonl    one object per logged step
    steps.json       the time of every step, if metrics.step_times
    lock, ranks      the processes that use the directory (`dtron/run/lock.py`)
    committed.json   path of the newest complete checkpoint, which may be outside of RUN
    attempt.json     the current attempt (`dtron/run/attempts.py`)
    ends/            why the ranks of the attempt ended
    begun            torchrun's id of the job that is training; removed at the end
    hangs/step-N/    stacks of each rank, if a step did not end
    tensorboard/  wandb/  wandb-id  mlflow.db  mlflow-id    logs of trackers, and their runs
    checkpoints/  trace/  memory/

A run that resumes from a checkpoint in its directory continues these files. Any other start first
renames the files of the earlier run (metrics-1.jsonl, checkpoints-1, ...).
"""

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

from dtron.errors import ConfigError, cause_of
from dtron.io.filesystem import PARTIAL_SUFFIX, Location, delete, write_atomically
from dtron.io.untrusted import MB, TOML_BYTES, open_regular, parse, read_text

log = logging.getLogger("dtron")
_OUTPUTS = (
    "metrics.jsonl",
    "steps.json",
    "run.json",
    "tensorboard",
    "wandb",
    "wandb-id",
    "mlflow.db",
    "mlflow-id",
    "checkpoints",
    "trace",
    "memory",
    "hangs",
)

_WRITTEN = ("run.json", "metrics.jsonl", "committed.json")
"""A folder with one of these files is a run directory."""

_METRICS_BYTES = 16_000 * MB
_PARTIAL = re.compile(rf".*{PARTIAL_SUFFIX}")


class RunDir:
    """Paths in a run directory, and the methods by which rank 0 writes to it."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self.trace = self.path / "trace"
        self.memory = self.path / "memory"
        self.run_json = self.path / "run.json"
        self.steps_json = self.path / "steps.json"
        self.begun = self.path / "begun"
        self.committed = self.path / "committed.json"
        self.hangs = self.path / "hangs"

    def open(self, config_toml: str, resumed_step: int | None) -> None:
        """Prepare the directory for a run that resumes after `resumed_step`; None: a new run.

        Raises ConfigError: a file in it cannot be written or moved.
        """
        with self._refusing():
            self.path.mkdir(parents=True, exist_ok=True)
            delete(*(path for path in self.path.iterdir() if _PARTIAL.fullmatch(path.name)))
            if resumed_step is None:
                for name in _OUTPUTS:
                    _rename_old(self.path / name)
                self.committed.unlink(missing_ok=True)
            else:
                self._drop_rows_after(resumed_step)
            if os.path.lexists(self.config) and _read_config(self.config) != config_toml:
                _rename_old(self.config)
            write_atomically(self.config, config_toml, synced=False)

    def note_begun(self, job: str) -> None:
        """Record the job that is training, for its restarts. Raises ConfigError: a write fails."""
        with self._refusing():
            write_atomically(self.begun, job, synced=False)

    def forget_begun(self) -> None:
        """Remove the record of the job that is training. Raises ConfigError: the removal fails."""
        with self._refusing():
            self.begun.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            path = error.filename or self.path
            raise ConfigError(
                f"run.dir = {str(self.path)!r}: {path} cannot be written: "
                f"{error.strerror or error}; free space, move the file away, or set another run.dir"
            ) from None

    def write_run_json(self, info: dict[str, Any]) -> None:
        """Replace run.json; log a warning if that fails."""
        _try_to_write(self.run_json, json.dumps(info, indent=1) + "\n")

    def write_steps_json(self, times: dict[str, Any]) -> None:
        """Replace steps.json; log a warning if that fails."""
        _try_to_write(self.steps_json, json.dumps(times) + "\n")

    def note_checkpoint(self, folder: Location) -> None:
        """Record the newest complete checkpoint, which may be on another file system."""
        _try_to_write(self.committed, json.dumps({"checkpoint": str(folder)}) + "\n")

    def noted_checkpoint(self) -> str:
        """Return the path from the latest `note_checkpoint`; "" if no path was recorded."""
        try:
            return str(parse(read_text(self.committed, MB))["checkpoint"])
        except (OSError, ValueError, LookupError, TypeError):
            return ""

    def _drop_rows_after(self, step: int) -> None:
        if not os.path.lexists(self.metrics):
            return
        try:
            file = open_regular(self.metrics, _METRICS_BYTES)
        except OSError as error:
            raise ConfigError(
                f"{self.metrics} cannot be read: {cause_of(error, self.metrics)}; move the file "
                "away"
            ) from None
        with file:
            write_atomically(self.metrics, _rows_until(step, file), synced=False)


def _rows_until(step: int, file: BinaryIO) -> Iterator[str]:
    """Yield the rows of metrics.jsonl up to a step; only one row is in memory."""
    while row := file.readline(MB):
        if (at := _row_step(row)) is not None and at <= step:
            yield row.decode().rstrip("\n") + "\n"


def check_not_moved(file: str | Path, run_dir: str, overrides: Iterable[str]) -> None:
    """Check that a config.toml in a run directory has that directory as run.dir.

    Overrides may set another run.dir.

    Raises:
        ConfigError: the directory was moved or copied; a new run would start in the old folder.
    """
    folder, own = Path(file).expanduser().parent, Path(run_dir).expanduser()
    written = re.fullmatch(r"config(-\d+)?\.toml", Path(file).name)
    if not written or not any((folder / name).exists() for name in _WRITTEN):
        return
    named = any(override.partition("=")[0].strip() == "run.dir" for override in overrides)
    if not named and os.path.realpath(folder) != os.path.realpath(own):
        raise ConfigError(
            f"run.dir = {run_dir!r} is not {str(folder)!r}, the run directory of --config {file}: "
            f"the directory was moved, or run.dir is relative to another folder; add "
            f"run.dir={folder} to resume that run, or run.dir={own} to train in that folder"
        )


def _row_step(row: bytes) -> int | None:
    """Return the step of a metrics row; None for an incomplete row of a killed run."""
    try:
        step = parse(row.decode())["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def _read_config(path: Path) -> str | None:
    """Read the config of an earlier start; None: the config cannot be read."""
    try:
        return read_text(path, TOML_BYTES)
    except (OSError, ValueError):
        return None


def _rename_old(path: Path) -> None:
    if not os.path.lexists(path):
        return
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.stem}-{number}{path.suffix}")):
        number += 1
    path.rename(aside)
    log.info("%s of an earlier run is now %s", path, aside.name)


def _try_to_write(path: Path, text: str) -> None:
    try:
        write_atomically(path, text, synced=False)
    except OSError as error:
        log.warning("%s cannot be written: %s", path, error.strerror or error)
