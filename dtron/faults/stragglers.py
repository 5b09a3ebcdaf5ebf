"""Which rank is slow, and in which part of its step: a table every N steps.

Ranks that work together end each step together, so the time of a step shows nothing: the others
wait for the slow one inside collectives. A sampled step therefore measures waiting
separately. On CPUs the interpreter's profile hook, on for that step only, times calls that wait for
a collective; on GPUs it is the sum of the times of collectives in NCCL's flight recorder, which
needs TORCH_NCCL_ENABLE_TIMING=1. The rest is the rank's own work.

    data     until the batch is on its way to the device
    busy     the rest of the step, less waiting
    wait     in collectives: least on the rank for which the others wait
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
_SHOWN = 4


class Stragglers:
    """Samples of one rank's steps.

    Args:
        interval: steps between samples.
        group: over all ranks, on the host.
    """

    def __init__(self, interval: int, device: torch.device, group: dist.ProcessGroup) -> None:
        self.interval, self.device, self.group = interval, device, group
        self._waits = _CpuWaits() if device.type == "cpu" else _NcclWaits()

    def samples(self, step: int) -> bool:
        """Whether this step (1-based) is sampled."""
        return step % self.interval == 0

    @contextmanager
    def sampling(self) -> Iterator[None]:
        """Around a whole step, with `data_is_there` inside; the sample is then in `seconds`."""
        self._synchronize()
        begun = self._data = time.perf_counter()
        with self._waits:
            yield
            self._synchronize()
        whole, data = time.perf_counter() - begun, self._data - begun
        wait = self._waits.seconds
        self.seconds = {"data": data, "busy": max(0.0, whole - data - wait), "wait": wait}

    def data_is_there(self) -> None:
        """The batch has been read and is on its way."""
        self._data = time.perf_counter()

    def report(self, step: int) -> list[dict[str, float]]:
        """Gather all ranks' samples (all of them call it) and log the slowest ones."""
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
    """The slowest ranks: seconds of each part, and the time that is not waiting over its median.

    Args:
        rows: of each rank, seconds by part.
    """
    own = [row["data"] + row["busy"] for row in rows]
    median = statistics.median(own)
    slowest = sorted(range(len(rows)), key=lambda rank: -own[rank])[:_SHOWN]
    lines = [f"step {step}, slowest ranks:   data     busy     wait   data + busy over median"]
    for rank in slowest:
        parts = " ".join(f"{rows[rank][part] * 1e3:6.1f}ms" for part in PARTS)
        lines.append(f"    rank {rank:<14} {parts}   {own[rank] / median - 1:+.0%}")
    return lines


class _CpuWaits:
    """Times this thread's calls that wait for a collective (`Work.wait`, `wait_tensor`)."""

    def __enter__(self) -> None:
        self.seconds, self._last = 0.0, time.perf_counter()
        sys.setprofile(self._on_event)

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _on_event(self, _frame: FrameType, event: str, called: Any) -> None:
        # From the event before: Python 3.12 has no `c_call` for bound methods of pybind11.
        if event == "c_return" and called.__name__ in ("wait", "wait_tensor"):
            self.seconds += time.perf_counter() - self._last
        self._last = time.perf_counter()


class _NcclWaits:
    """Sums what collectives took, by NCCL's flight recorder; 0 where it does not time them."""

    def __enter__(self) -> None:
        self.seconds, self._since = 0.0, time.time_ns()

    def __exit__(self, *_: object) -> None:
        if os.environ.get("TORCH_NCCL_ENABLE_TIMING") != "1":
            return
        recent = [each for each in recorded() if each["time_created_ns"] >= self._since]
        self.seconds = sum(each.get("duration_ms", 0.0) for each in recent) / 1e3
