"""Write metrics to metrics.jsonl, trackers and the console."""

import datetime
import json
import logging
import math
import os
import resource
import time
from collections.abc import Mapping
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from dtron.io.filesystem import check_mounted, mount_of, open_own
from dtron.models.flops import Convention, FlopsModel, flops_per_token, peak_flops
from dtron.run.trackers import Trackers

log = logging.getLogger("dtron")
Row = dict[str, float | int | None]
_MOUNT_SECONDS = 5
"""Seconds between checks that the run directory is still mounted."""
_MFU: dict[str, Convention] = {"mfu": "full", "mfu_causal": "causal"}


class Throughput:
    """Measures tokens per second and MFU between logging steps.

    Args:
        flops: FLOP model of the run's model.
        devices: number of ranks.
    """

    def __init__(self, flops: FlopsModel, devices: int) -> None:
        self.flops, self.devices = flops, devices
        name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
        self.peak = peak_flops(name)
        self.restart()

    def add(self, tokens: int, attended: float, images: float = 0.0) -> None:
        """Count one step.

        Args:
            tokens: tokens of the step on all ranks.
            attended: attended length, 2 * (mean number of keys per query) - 1: seq_len, or
                sum(L^2) / sum(L) for documents of length L.
            images: images per token.
        """
        self._steps += 1
        self._tokens += tokens
        self._attended += attended
        self._images += images

    def read(self) -> Row:
        """Return means since the previous call: tokens per second, MFU and seconds per step.

        MFU is None on GPUs of unknown peak.
        """
        steps, tokens, attended, images = self._steps, self._tokens, self._attended, self._images
        seconds = time.perf_counter() - self._since
        self.restart()
        each = tokens / seconds / self.devices
        row: Row = {
            "tokens_per_second": tokens / seconds,
            "tokens_per_second_per_device": each,
        }
        for key, convention in _MFU.items():
            flops = flops_per_token(self.flops, attended / steps, convention, images / steps)
            row[key] = each * flops / self.peak if self.peak else None
        return {**row, "seconds": seconds / steps}

    def restart(self) -> None:
        """Restart the measurement, for example after a validation."""
        self._since, self._steps, self._tokens = time.perf_counter(), 0, 0
        self._attended = self._images = 0.0


def peak_memory_gib() -> float:
    """Return this rank's peak memory in GiB: reserved by CUDA's allocator, or resident on CPU."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_reserved() / 2**30
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


class MetricsWriter:
    """Writes rows of metrics on rank 0; does nothing on other ranks.

    If a write fails, a warning is logged and training continues. Rows of metrics.jsonl are kept and
    written later.
    """

    def __init__(
        self,
        path: Path,
        trackers: Trackers,
        console: Console,
        steps: int,
        start_step: int,
        active: bool,
    ) -> None:
        self.trackers = trackers
        self._path = path if active else None
        self._steps, self._start_step = steps, start_step
        self._mount = mount_of(path)
        self._device: int | None = None
        self._checked = -math.inf
        self._pending: list[str] = []
        self._warned = False
        if active:
            self._write_pending(path)  # creates the file before the first row
        self._progress = _progress(console) if active and console.is_terminal else None
        if self._progress is not None:
            self._task = self._progress.add_task(
                "training", total=steps, completed=start_step, figures=""
            )
            self._progress.start()

    def step(self, step: int) -> None:
        """Update the progress bar."""
        if self._progress is not None:
            self._progress.update(self._task, completed=step)

    def row(self, row: Mapping[str, float | int | None]) -> None:
        """Write one row: `step`, and metrics by name."""
        if self._path is None:
            return
        finite = {k: v if v is None or math.isfinite(v) else None for k, v in row.items()}
        self._pending.append(json.dumps(finite, allow_nan=False) + "\n")  # JSON has no NaN
        self._write_pending(self._path)
        self.trackers.row(finite)
        text = _line(row)
        if self._progress is not None:
            self._progress.update(self._task, figures=text)
        else:
            text += _remaining(row, self._steps)
        log.info("step %*d/%d  %s", len(str(self._steps)), row["step"], self._steps, text)

    def close(self, failed: bool = False) -> None:
        """Flush and close everything; `failed`: the run ends by an error."""
        if self._progress is not None:
            self._progress.stop()
        self.trackers.close(failed)

    def _write_pending(self, path: Path) -> None:
        """Append all pending rows, or keep them all pending if they cannot be written."""
        try:
            self._check_mounted(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            with open_own(path, os.O_WRONLY | os.O_APPEND) as file:
                size, rest = file.seek(0, os.SEEK_END), "".join(self._pending).encode()
                try:
                    while rest:  # write may be partial if the disk is full
                        rest = rest[file.write(rest) :]
                except OSError:
                    file.truncate(size)
                    raise
        except OSError as error:
            if not self._warned:
                self._warned = True
                log.warning(
                    "%s cannot be written: %s; training continues and rows are written later",
                    path,
                    error.strerror or error,
                )
        else:
            self._warned = False
            self._pending.clear()

    def _check_mounted(self, path: Path) -> None:
        """Call the slow `check_mounted` every 5 s, and whenever the folder's device changes."""
        now = time.monotonic()
        if now - self._checked < _MOUNT_SECONDS and self._device == _device(path.parent):
            return
        check_mounted(path, self._mount)
        self._checked, self._device = now, _device(path.parent)


def _device(folder: Path) -> int | None:
    """Return the device number of a folder; None if the folder does not exist."""
    try:
        return folder.stat().st_dev
    except OSError:
        return None


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[figures]}"),
        console=console,
    )


_SHOWN = (
    ("loss", "loss {:.4f}"),
    ("validation_loss", "validation loss {:.4f}"),
    ("grad_norm", "grad norm {:.3f}"),
    ("lr", "lr {:.2e}"),
    ("skipped", "skipped {}"),
    ("tokens", "{:,} tokens"),
    ("tokens_per_second", "{:,.0f} tok/s"),
    ("padding", "padding {:.1%}"),
    ("mfu", "mfu {:.1%}"),
    ("memory_gib", "{:.1f} GiB"),
)


_SET = "validation_loss/"
"""What the metrics of validation sets with names begin with."""


def _line(row: Mapping[str, float | int | None]) -> str:
    shown = {key: form.format(v) for key, form in _SHOWN if (v := row.get(key)) is not None}
    sets = [
        f"{key.removeprefix(_SET)} {value:.4f}"
        for key, value in row.items()
        if key.startswith(_SET) and value is not None
    ]
    if sets and "validation_loss" in shown:
        shown["validation_loss"] += f" ({', '.join(sets)})"
    return "  ".join(shown.values())


def _remaining(row: Mapping[str, float | int | None], steps: int) -> str:
    """Return `  ETA 1:02:03`, computed from the row's seconds per step; "" at the end."""
    left = steps - (row["step"] or 0)
    seconds = row.get("seconds")
    if not left or seconds is None:
        return ""
    return f"  ETA {datetime.timedelta(seconds=round(left * seconds))}"
