"""Shared memory of the ranks of a host, and collectives that copy from it.

    rank 0   [ local part | ........ ]   <-- copies --   rank 1, 2, 3
    rank 1   [ local part | ........ ]   <-- copies --   rank 0, 2, 3

GPUs of one host read each other's memory over NVLink. Copies run on the copy engines, whereas
NCCL's kernels take multiprocessors from the matmuls that they overlap with. Ranks on CPUs share
files in memory, so that this also runs, and is tested, without a GPU.

Sources: CUDA's peer access; torch's symmetric memory (its allocator and its barriers).
"""

import os
import socket
import tempfile
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.errors import ConfigError
from dtron.parallelisms.functional_collectives import symmetric_memory

_PAGE = 2**21
"""Sizes of shared memory are rounded up to a multiple of this number of bytes."""


class PeerMemory:
    """Shared memory of the ranks of one host, `nbytes` per rank; creation is a collective."""

    def __init__(self, nbytes: int, group: dist.ProcessGroup, device: torch.device) -> None:
        self.nbytes = nbytes
        self._group = group
        self._handle = None
        if device.type == "cuda":
            own = symmetric_memory.empty(nbytes, dtype=torch.uint8, device=device)
            self._handle = symmetric_memory.rendezvous(own, group.group_name)
            self._parts = [own]  # keeps this rank's memory alive; the handle maps all ranks' memory
        else:
            self._parts = _shared_files(nbytes, group)
        starts = [self.view(r, nbytes, torch.uint8).data_ptr() for r in range(group.size())]
        self.pointers = torch.tensor(starts, device=device)
        """int64 (ranks,): address of each rank's memory, for kernels of this rank."""

    def view(self, rank: int, numel: int, dtype: torch.dtype, offset: int = 0) -> Tensor:
        """Return (numel,) elements of a rank's memory, starting at element `offset`."""
        if self._handle is not None:
            return self._handle.get_buffer(rank, (numel,), dtype, offset)
        return self._parts[rank].view(dtype).narrow(0, offset, numel)

    def barrier(self) -> None:
        """Wait until all ranks have reached this point and their writes are visible.

        On GPUs the current stream waits, not the host.
        """
        if self._handle is not None:
            self._handle.barrier()
        else:
            dist.barrier(self._group)


def check_host(group: dist.ProcessGroup, key: str, shared: str, fix: str) -> None:
    """Raise ConfigError if ranks of a group cannot read each other's memory; a collective.

    Args:
        key: the setting that requires shared memory, for the error.
        shared: what the ranks share, for the error.
        fix: how to fix the error.
    Raises:
        ConfigError: the ranks are on several hosts.
    """
    hosts: list[str | None] = [None] * group.size()
    dist.all_gather_object(hosts, socket.gethostname(), group)
    if len(set(hosts)) > 1:
        raise ConfigError(
            f"{key}: ranks {dist.get_process_group_ranks(group)} share {shared} "
            f"on several hosts ({', '.join(sorted({str(host) for host in hosts}))}) and cannot "
            f"read each other's memory; {fix}"
        )


class GrowingMemory:
    """Shared memory that grows to the largest requested size, usually in the first step.

    Growing waits for the device and all ranks, and loses the content.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._memory: PeerMemory | None = None

    def at_least(self, nbytes: int, device: torch.device) -> PeerMemory:
        """Return memory of at least `nbytes`; all ranks must request the same size."""
        if self._memory is None or self._memory.nbytes < nbytes:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
                torch.cuda.empty_cache()  # symmetric memory cannot use memory cached by torch
            dist.barrier(self._group)  # no peer reads the old memory any more
            self._memory = None
            self._memory = PeerMemory(-(-nbytes // _PAGE) * _PAGE, self._group, device)
        return self._memory


def _shared_files(nbytes: int, group: dist.ProcessGroup) -> list[Tensor]:
    """Create a file in memory for each rank; all ranks map all files."""
    directory = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    handle, own = tempfile.mkstemp(dir=directory)
    try:
        # If the disk is full, this raises an error; otherwise there would be a bus error later.
        os.posix_fallocate(handle, 0, nbytes)
        names: list[str | None] = [None] * group.size()
        dist.all_gather_object(names, own, group)
        parts = [
            torch.from_file(str(name), shared=True, size=nbytes, dtype=torch.uint8)
            for name in names
        ]
        dist.barrier(group)  # all ranks have mapped the file
    finally:
        os.close(handle)
        os.unlink(own)
    return parts


class CopyEngine:
    """All-gathers and all-to-alls of a group, as copies from shared memory.

    A collective writes this rank's data to shared memory, waits for all ranks, copies the other
    ranks' data, and waits until all ranks are done; then the memory is free. Collectives of one
    object run one after another, whatever streams they are on.

    The memory grows to the largest collective; growing waits for the device and happens in the
    first step.

    Raises:
        ConfigError: the group's ranks are on several hosts.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        fix = "use a parallel.dp_shard inside a host, and parallel.dp_replicate between hosts"
        check_host(group, "parallel.copy_engines", "parameters", fix)
        self.group = group
        self._device = device
        self._growing = GrowingMemory(group)
        self._memory: PeerMemory | None = None
        self._free: torch.cuda.Event | None = None
        self._recorded = False
        """Whether `_free` is of a CUDA graph, in which no other event can be waited for."""

    def staging(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Return (numel,) elements of this rank's shared memory, which other ranks will read.

        The current stream waits until the memory is free. All ranks must request the same size.
        """
        self._memory = None  # so that the old memory is freed before a larger one is created
        self._memory = memory = self._growing.at_least(numel * dtype.itemsize, self._device)
        if self._free is not None and self._recorded == torch.cuda.is_current_stream_capturing():
            self._free.wait()  # else the work before a graph, or a whole graph, was waited for
        return memory.view(self.group.rank(), numel, dtype)

    def all_gather(self, output: Tensor, part: Tensor) -> None:
        """Gather (n,) of each rank into (ranks * n,); `part` may be a view of `output`."""
        self.staging(part.numel(), part.dtype).copy_(part)
        parts = output.chunk(self.group.size())
        own = parts[self.group.rank()]
        if own.data_ptr() != part.data_ptr():
            own.copy_(part)
        self._pull(parts, 0)

    def all_to_all(self, received: Tensor, sent: Tensor) -> None:
        """Exchange chunks of n elements between all ranks: (ranks * n,) -> (ranks * n,).

        Args:
            sent: chunk r is sent to rank r. A result of `staging` is sent without a copy; any other
                tensor is copied to shared memory first.
        """
        staged = self.staging(sent.numel(), sent.dtype)
        if staged.data_ptr() != sent.data_ptr():
            staged.copy_(sent)
        parts, rank = received.chunk(self.group.size()), self.group.rank()
        parts[rank].copy_(staged.chunk(len(parts))[rank])
        self._pull(parts, rank * parts[rank].numel())

    def _pull(self, parts: Sequence[Tensor], offset: int) -> None:
        """Copy other ranks' parts from shared memory; begin with the next rank to spread the load.

        Args:
            offset: index of the part's first element in the other rank's memory.
        """
        assert self._memory is not None, "`staging` has been called"
        self._memory.barrier()
        for i in range(1, len(parts)):
            rank = (self.group.rank() + i) % len(parts)
            part = parts[rank]
            part.copy_(self._memory.view(rank, part.numel(), part.dtype, offset))
        self._memory.barrier()
        if self._device.type == "cuda":
            self._free = torch.cuda.Event()
            self._free.record()
            self._recorded = torch.cuda.is_current_stream_capturing()
