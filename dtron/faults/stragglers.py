"""Find slow ranks, and the part of the step in which they are slow: log a table every N steps.

All ranks take the same time for a step, since fast ranks wait for slow ranks inside collectives. A
sampled step therefore measures waiting separately. On CPUs, Python's profile hook, set for that
step only, times the calls that wait for a collective. On GPUs, waiting is the sum of the times of
collectives in NCCL's flight recorder, which needs TORCH_NCCL_ENABLE_TIMING=1.

    data     time until the batch is loaded
    busy     time of the rest of the step, without waiting
    wait     time in collectives; smallest on the slow rank
"""

import logging
import os
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from dtron.faults.flight_recorder import recorded

log = logging.getLogger("dtron")
PARTS = ("data", "busy", "wait")
_N_LISTED = 4


class Stragglers:
    """Measures the times of every `interval`-th step of this rank, and reports the slowest ranks.

    Args:
        interval: steps between samples.
        group: process group of all ranks for CPU tensors.
    """

    def __init__(self, interval: int, device: torch.device, group: dist.ProcessGroup) -> None:
        self.interval, self.device, self.group = interval, device, group
        self._waits = _CpuWaits() if device.type == "cpu" else _NcclWaits()

    def samples(self, step: int) -> bool:
        """Whether this step (1-based) is sampled."""
        return step % self.interval == 0

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Measure a sampled step: set `seconds` by part. Call `data_loaded` in this context."""
        self._synchronize()
        begun = self._data = time.perf_counter()
        with self._waits:
            yield
            self._synchronize()
        whole, data = time.perf_counter() - begun, self._data - begun
        wait = self._waits.seconds
        self.seconds = {"data": data, "busy": max(0.0, whole - data - wait), "wait": wait}

    def data_loaded(self) -> None:
        """Record that the batch is loaded."""
        self._data = time.perf_counter()

    def report(self, step: int) -> list[dict[str, float]]:
        """Gather the samples of all ranks and log the slowest ranks; a collective."""
        own = torch.tensor([self.seconds[part] for part in PARTS], dtype=torch.float64)
        ranks = [torch.empty_like(own) for _ in range(dist.get_world_size(self.group))]
        dist.all_gather(ranks, own, group=self.group)
        rows: list[dict[str, float]] = [
            dict(zip(PARTS, rank.tolist(), strict=True)) for rank in ranks
        ]
        for line in table(rows, step):
            log.info(line)
        return rows

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def table(rows: list[dict[str, float]], step: int) -> list[str]:
    """Format the slowest ranks: time of each part, and data + busy relative to the ranks' median.

    Args:
        rows: seconds by part, for each rank.
    """
    own = [row["data"] + row["busy"] for row in rows]
    median = statistics.median(own)
    slowest = sorted(range(len(rows)), key=lambda rank: -own[rank])[:_N_LISTED]
    lines = [f"step {step}, slowest ranks:   data     busy     wait   data + busy over median"]
    for rank in slowest:
        parts = " ".join(f"{rows[rank][part] * 1e3:6.1f}ms" for part in PARTS)
        lines.append(f"    rank {rank:<14} {parts}   {own[rank] / median - 1:+.0%}")
    return lines


class _CpuWaits:
    """Measures the time of calls in this thread that wait for a collective.

    These calls are `Work.wait` and `wait_tensor`.
    """

    def __enter__(self) -> None:
        self.seconds, self._last = 0.0, time.perf_counter()
        sys.setprofile(self._on_event)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _on_event(self, _frame: FrameType, event: str, called: Any) -> None:
        # Time since the last event: Python 3.12 has no `c_call` event for pybind11's bound methods.
        if event == "c_return" and called.__name__ in ("wait", "wait_tensor"):
            self.seconds += time.perf_counter() - self._last
        self._last = time.perf_counter()


class _NcclWaits:
    """Sums the times of collectives in NCCL's flight recorder; 0 if the recorder has no times."""

    def __enter__(self) -> None:
        self.seconds, self._since = 0.0, time.time_ns()

    def __exit__(self, *_: object) -> None:
        if os.environ.get("TORCH_NCCL_ENABLE_TIMING") != "1":
            return
        recent = [each for each in recorded() if each["time_created_ns"] >= self._since]
        self.seconds = sum(each.get("duration_ms", 0.0) for each in recent) / 1e3
