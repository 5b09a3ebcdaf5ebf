"""Pinned host memory, and asynchronous copies between it and a device.

Copies run on two streams, one per direction, and overlap computation. On a CPU, copies go to other
CPU memory, synchronously. Memory is reused only when its copies are done: on the device, `Copies`
references the memory until the compute stream has waited for the copies; on the host, a buffer's
next copy waits for its previous one, and torch's pinned-memory allocator waits for copies from and
to freed memory.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from dtron.errors import ConfigError

CHUNK, ALIGNED = 2**32, 2**12
"""CHUNK: maximum bytes of a pinned chunk, unless one buffer needs more. ALIGNED: bytes to which
buffers are aligned."""

Event = torch.cuda.Event | None
"""Event after copies; None on a CPU, where copies are synchronous."""


@dataclass
class Buffer:
    """Host memory, pinned if there is a GPU."""

    data: Tensor
    """uint8 (bytes,)"""
    last: Event = None
    """Event at the end of the latest issued copy from or to the buffer."""


class HostPool:
    """Pool of host buffers by size; freed buffers are reused, since pinning memory is slow.

    Buffers are slices of chunks. Chunk sizes are powers of two, to which torch would round up each
    pinned allocation. To bound unused memory, a new chunk has at most a quarter of the bytes of all
    earlier chunks and at most CHUNK bytes, unless one buffer needs more.

    Args:
        pinned: whether the memory is pinned.
        setting: the setting that needs the memory, such as `optim.offload = 1.0`, and what to
            change if the host has too little; both are for the error message.

    Attributes:
        allocated: bytes of all buffers, used and free.
        reserved: bytes of all chunks.
    """

    def __init__(self, pinned: bool, setting: tuple[str, str]) -> None:
        self.allocated = self.reserved = 0
        self._pinned, self._setting = pinned, setting
        self._free: dict[int, list[Buffer]] = defaultdict(list)
        self._unused: list[Tensor] = []
        """The unused end of each chunk."""

    def take(self, size: int) -> Buffer:
        """Return a buffer of `size` bytes; a previous copy from or to it may still be running.

        Raises:
            ConfigError: the host has too little memory.
        """
        if self._free[size]:
            return self._free[size].pop()
        data = self._cut(size)
        self.allocated += size
        return Buffer(data)

    def give(self, buffer: Buffer) -> None:
        """Return a buffer to the pool."""
        self._free[buffer.data.numel()].append(buffer)

    def _cut(self, size: int) -> Tensor:
        """Cut a buffer, uint8 (size,), from the first chunk with enough unused memory."""
        end = -(-size // ALIGNED) * ALIGNED
        i = next((i for i, unused in enumerate(self._unused) if len(unused) >= end), None)
        if i is None:
            i = len(self._unused)
            self._unused.append(self._reserve(end))
        unused = self._unused[i]
        self._unused[i] = unused[end:]
        return unused[:size]

    def _reserve(self, least: int) -> Tensor:
        """Allocate a chunk of at least `least` bytes."""
        size = max(_power_of_two(least), min(CHUNK, _power_of_two(self.reserved // 8)))
        _check_host_memory(size, self.reserved, *self._setting)
        chunk = torch.empty(size, dtype=torch.uint8, pin_memory=self._pinned)
        self.reserved += size
        return chunk


def _power_of_two(least: int) -> int:
    """Return the smallest power of two that is at least `least`."""
    return 1 << max(0, least - 1).bit_length()


def _check_host_memory(size: int, reserved: int, setting: str, fix: str) -> None:
    """Raise ConfigError if less than 5% of the host's memory would be left.

    Without this check, Linux would kill a process without an error message.
    """
    total, available = host_memory()
    if available - size < total / 20:
        have, more, left, whole = (n / 2**30 for n in (reserved, size, available, total))
        raise ConfigError(
            f"{setting}: a rank holds {have:.1f} GiB of host memory and needs "
            f"{more:.1f} GiB more, but only {left:.1f} of the host's {whole:.1f} GiB are available "
            f"to all its ranks; {fix}"
        )


def host_memory(root: Path = Path("/")) -> tuple[float, float]:
    """Return (total, available) bytes of the host, or of its container; (0, infinity): unknown."""
    try:
        lines = (root / "proc/meminfo").read_text().splitlines()
        kibibytes = {key: int(value.split()[0]) for key, value in (x.split(":") for x in lines)}
        total, available = kibibytes["MemTotal"] * 1024, kibibytes["MemAvailable"] * 1024
    except (OSError, KeyError):
        return 0.0, float("inf")
    try:
        most, used = (
            int((root / "sys/fs/cgroup" / name).read_text())
            for name in ("memory.max", "memory.current")
        )
    except (OSError, ValueError):  # no container, or "max"
        return total, available
    return min(total, most), min(available, most - used + _file_cache(root))


def _file_cache(root: Path) -> int:
    """Return the bytes of file cache, which is reclaimable, in a container's memory.current."""
    try:
        lines = (root / "sys/fs/cgroup/memory.stat").read_text().splitlines()
    except OSError:
        return 0
    stat = {key: int(value) for key, value in (line.split() for line in lines)}
    return stat.get("active_file", 0) + stat.get("inactive_file", 0)


class CopyStream:
    """Stream for copies in one direction, in the order of issue."""

    def __init__(self, device: torch.device, to_host: bool) -> None:
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.to_host = to_host

    def copy(self, pairs: Sequence[tuple[Buffer, Tensor]]) -> Event:
        """Issue copies between buffers and device memory, uint8 (bytes,).

        The copies run after all kernels issued so far on the current stream, and after the buffers'
        previous copies.
        """
        if self.stream is None:
            for buffer, memory in pairs:
                self._copy(buffer, memory)
            return None
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            for buffer, memory in pairs:
                if buffer.last is not None:
                    buffer.last.wait()
                self._copy(buffer, memory)
        done = torch.cuda.Event()
        done.record(self.stream)
        for buffer, _ in pairs:
            buffer.last = done
        return done

    def synchronize(self) -> None:
        """Make the host wait for all copies issued so far."""
        if self.stream is not None:
            self.stream.synchronize()

    def _copy(self, buffer: Buffer, memory: Tensor) -> None:
        to, source = (buffer.data, memory) if self.to_host else (memory, buffer.data)
        to.copy_(source, non_blocking=True)


class Copies:
    """Issued copies, and the device memory that they read or write.

    torch gives freed memory to the next tensor of the stream that allocated it, here the compute
    stream, even if other streams still use it. So this object references the memory until the
    compute stream waits for the copies, even if the graph is dropped or an error ends the step.
    (With record_stream, memory would be freed too late: only once the host, which runs ahead of the
    device, sees that the copies are done.)
    """

    def __init__(self, stream: CopyStream, pairs: Sequence[tuple[Buffer, Tensor]]) -> None:
        self._memory = [memory for _, memory in pairs]
        self._compute_stream = torch.cuda.current_stream() if self._memory[0].is_cuda else None
        self._done: Event = None
        self._done = stream.copy(pairs)

    def wait(self) -> None:
        """Make the compute stream, not the host, wait for the copies."""
        if self._done is not None:
            self._done.wait(self._compute_stream)
            self._done = None
        self._memory.clear()

    def __del__(self) -> None:
        self.wait()
