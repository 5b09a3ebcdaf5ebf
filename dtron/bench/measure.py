"""Measure the time of a function and the rates of a device."""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

_WARM_UP = 3
_AT_LEAST, _AT_MOST = 5, 100
_BUDGET_SECONDS = 0.5


def seconds(call: Callable[[], Any], device: torch.device, runs: int = 0) -> float:
    """Return the median seconds per call, after 3 warm-up calls.

    On GPUs, time is measured between two events of the current stream: a call shorter than its
    launch shows the launch time. Caches stay warm between calls.

    Args:
        runs: number of timed calls; 0: 5 to 100 calls, in about half a second. For a collective,
            all ranks must pass the same number above 0.
    """
    for _ in range(_WARM_UP):
        call()
    if not runs:
        first = _once(call, device)
        runs = min(_AT_MOST, max(_AT_LEAST, int(_BUDGET_SECONDS / max(first, 1e-9))))
    if device.type != "cuda":
        return statistics.median(_once(call, device) for _ in range(runs))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(2 * runs)]
    for begin, end in zip(events[::2], events[1::2], strict=True):
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    pairs = zip(events[::2], events[1::2], strict=True)
    return statistics.median(begin.elapsed_time(end) / 1e3 for begin, end in pairs)


def _once(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin = time.perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - begin


def copy_rate(device: torch.device) -> float:
    """Return bytes per second, read plus written, of a 1 GiB copy on a GPU (64 MiB on a CPU)."""
    size = 2**30 if device.type == "cuda" else 2**26
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / seconds(lambda: target.copy_(source), device)


def gemm_rate(device: torch.device, dtype: torch.dtype, size: int = 0) -> float:
    """Return FLOP/s of a matmul of square matrices; `size` 0: 8192 x 8192 (512 x 512 on a CPU)."""
    size = size or (8192 if device.type == "cuda" else 512)
    a, b = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / seconds(lambda: a @ b, device)


def launch_seconds(device: torch.device) -> float:
    """Return the seconds from one small kernel of a stream to the next.

    They are measured while the host is ahead of the device. On a CPU: seconds per small operator.
    """
    x, count = torch.zeros(1, device=device), 200

    def small() -> None:
        for _ in range(count):
            x.add_(1)

    if device.type != "cuda":
        return seconds(small, device) / count
    source = torch.zeros(2**30, dtype=torch.uint8, device=device)
    target, times = torch.empty_like(source), []
    for _ in range(_WARM_UP + _AT_LEAST):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(10):  # takes milliseconds, in which the host queues the next calls
            target.copy_(source)
        begin.record()
        small()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / count)
    return statistics.median(times[_WARM_UP:])


def host_link_rate(device: torch.device) -> float:
    """Return bytes per second of a copy between a GPU and pinned host memory.

    The rate is that of the slower direction; on a CPU, of a copy within host memory.
    """
    size = 2**28 if device.type == "cuda" else 2**24
    near = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
    far = torch.empty(size, dtype=torch.uint8, device=device)
    ways = (lambda: far.copy_(near, non_blocking=True), lambda: near.copy_(far, non_blocking=True))
    return size / max(seconds(way, device) for way in ways)


def device_name(device: torch.device) -> str:
    """Return the device's name from torch; for a CPU its number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"cpu, {torch.get_num_threads()} threads"
