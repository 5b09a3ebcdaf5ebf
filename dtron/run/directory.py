"""A run's directory: what lies where, and how a start treats what is there.

    config.toml      resolved; running it repeats the run (config-1.toml, ...: earlier starts)
    run.json         what really ran
    metrics.jsonl    one object a logged step
    steps.json       the time of every step, if metrics.step_times
    lock, ranks      which processes run here (`dtron/run/lock.py`)
    committed.json   the newest complete checkpoint, wherever checkpoints go
    attempt.json     the attempt that trains; ends/: why ranks ended (`dtron/run/attempts.py`)
    begun            the job whose ranks have begun to train and have not ended, by torchrun's id
    hangs/step-N/    where each rank was when a step did not end
    tensorboard/  checkpoints/  trace/

A run resumed from its own checkpoint continues these files. Any other start in a used directory
first renames what an earlier run left there by a number.
"""

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from dtron.errors import ConfigError, cause_of
from dtron.io.filesystem import PARTIAL_SUFFIX, Location, delete, write_atomically
from dtron.io.untrusted import MB, TOML_BYTES, open_regular, parse, read_text

log = logging.getLogger("dtron")
_KEPT = ("metrics.jsonl", "steps.json", "run.json", "tensorboard", "checkpoints", "trace", "hangs")

_METRICS_BYTES = 16_000 * MB
_PARTIAL = re.compile(rf".*{PARTIAL_SUFFIX}")


class RunDir:
    """Paths of a run, and the few writes that only rank 0 makes."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).expanduser()
        self.config = self.path / "config.toml"
        self.metrics = self.path / "metrics.jsonl"
        self.tensorboard = self.path / "tensorboard"
        self.checkpoints = self.path / "checkpoints"
        self.trace = self.path / "trace"
        self.run_json = self.path / "run.json"
        self.steps_json = self.path / "steps.json"
        self.begun = self.path / "begun"
        self.committed = self.path / "committed.json"
        self.hangs = self.path / "hangs"

    def open(self, config_toml: str, resumed_step: int | None) -> None:
        """Make the directory ready for a run that starts after `resumed_step`, or afresh (None).

        Raises ConfigError: something in it cannot be written or moved.
        """
        with self._refusing():
            self.path.mkdir(parents=True, exist_ok=True)
            delete(*(path for path in self.path.iterdir() if _PARTIAL.fullmatch(path.name)))
            if resumed_step is None:
                for name in _KEPT:
                    _set_aside(self.path / name)
                self.committed.unlink(missing_ok=True)
            else:
                self._drop_rows_after(resumed_step)
            if os.path.lexists(self.config) and _text_of(self.config) != config_toml:
                _set_aside(self.config)
            write_atomically(self.config, config_toml, synced=False)

    def note_begun(self, job: str) -> None:
        """Remember the job that trains, for its restarts. Raises ConfigError."""
        with self._refusing():
            write_atomically(self.begun, job, synced=False)

    def forget_begun(self) -> None:
        """No job trains. Raises ConfigError: what is there is no file."""
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
                f"{error.strerror or error}; make room, move it away, or set another run.dir"
            ) from None

    def write_run_json(self, info: dict[str, Any]) -> None:
        """Replace run.json; a warning where that fails."""
        _try_to_write(self.run_json, json.dumps(info, indent=1) + "\n")

    def write_steps_json(self, times: dict[str, Any]) -> None:
        """Replace steps.json; a warning where that fails."""
        _try_to_write(self.steps_json, json.dumps(times) + "\n")

    def note_checkpoint(self, folder: Location) -> None:
        """Remember the newest complete checkpoint, which may be on another file system."""
        _try_to_write(self.committed, json.dumps({"checkpoint": str(folder)}) + "\n")

    def noted_checkpoint(self) -> str:
        """The one that was noted last; empty: none."""
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
                f"{self.metrics} cannot be read: {cause_of(error, self.metrics)}; move it away"
            ) from None
        with file:
            write_atomically(self.metrics, _rows_until(step, file), synced=False)


def _rows_until(step: int, file: BinaryIO) -> Iterator[str]:
    """Rows of metrics up to a step; one at a time is in memory."""
    while row := file.readline(MB):
        if (at := _row_step(row)) is not None and at <= step:
            yield row.decode().rstrip("\n") + "\n"


def _row_step(row: bytes) -> int | None:
    """Step of a metrics row; None for one that a killed run left half-written."""
    try:
        step = parse(row.decode())["step"]
    except (ValueError, KeyError, TypeError):
        return None
    return step if isinstance(step, int) else None


def _text_of(path: Path) -> str | None:
    """A config that an earlier start has written; None: it is none."""
    try:
        return read_text(path, TOML_BYTES)
    except (OSError, ValueError):
        return None


def _set_aside(path: Path) -> None:
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
