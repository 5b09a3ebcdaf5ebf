"""Measure the time of every step without waiting for the device during training.

On GPUs, a CUDA event is recorded on the compute stream after each step. All events are read at the
end of training. On CPUs, a clock is read after each step. The first step includes compilation.
"""

import itertools
import time
from typing import Any

import torch
import torch.distributed as dist

from dtron.kernels.torch_internals import compile_cache
from dtron.run.metrics import peak_memory_gib


class StepTimes:
    """Records step times: call `begin()`, `mark()` after each step, `gather()` at the end."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.begun_at = 0.0
        self._marks: list[float | torch.cuda.Event] = []
        self._memory: list[float] = []
        self._attended: list[float] = []
        self._images: list[float] = []

    def begin(self) -> None:
        """Record the start of training."""
        self.begun_at = time.time()
        self._marks.append(self._now())

    def mark(self, attended: float, images: float = 0.0) -> None:
        """Record that a step has been enqueued.

        Args:
            attended: attended length, 2 * (mean number of keys per query) - 1.
            images: images per token.
        """
        self._marks.append(self._now())
        self._memory.append(peak_memory_gib())
        self._attended.append(attended)
        self._images.append(images)

    def seconds(self) -> list[float]:
        """Return the seconds of each step, from the previous step's end; waits for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        return [_between(first, last) for first, last in itertools.pairwise(self._marks)]

    def gather(self, group: dist.ProcessGroup, start_step: int) -> dict[str, Any]:
        """Return the content of steps.json; a collective.

        Args:
            group: process group of all ranks for CPU tensors.
        Returns:
            start_step: number of steps before the first recorded step.
            begun_at: start of training in seconds since the epoch, maximum over ranks.
            attended, images: arguments of `mark` of each step, mean over ranks.
            seconds, memory_gib: per rank and step; memory is the peak so far.
            devices, compile_cache: per rank; hits and misses of torch.compile's caches.
        """
        own = {
            "begun_at": self.begun_at,
            "attended": self._attended,
            "images": self._images,
            "devices": device_name(self.device),
            "seconds": self.seconds(),
            "memory_gib": self._memory,
            "compile_cache": compile_cache(),
        }
        ranks: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(ranks, own, group=group)

        def mean(key: str) -> list[float]:
            steps = zip(*(rank[key] for rank in ranks), strict=True)
            return [sum(values) / len(ranks) for values in steps]

        return {
            "start_step": start_step,
            "begun_at": max(rank["begun_at"] for rank in ranks),
            "attended": mean("attended"),
            "images": mean("images"),
            **{
                key: [rank[key] for rank in ranks]
                for key in ("devices", "seconds", "memory_gib", "compile_cache")
            },
        }

    def _now(self) -> float | torch.cuda.Event:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(first: float | torch.cuda.Event, last: float | torch.cuda.Event) -> float:
    if isinstance(first, float) and isinstance(last, float):
        return last - first
    return first.elapsed_time(last) / 1e3  # type: ignore[union-attr, arg-type]


def device_name(device: torch.device) -> str:
    """Return the name of a GPU from torch, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
