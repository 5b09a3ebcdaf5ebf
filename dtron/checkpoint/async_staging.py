"""Asynchronous saves: copy the state to host memory; a separate process writes it.

Only the optimizer step changes weights and moments. So they are copied during the next forward and
backward: CUDA tensors on a separate stream into pinned memory, CPU tensors in a background thread.
The next optimizer step waits for the copies. A separate process that shares the host memory hashes
and writes the copies (`dtron.io.writer_process`); the background thread waits for this process and
for other ranks.
"""

import itertools
import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dtron.io.filesystem import Location
from dtron.io.safetensors_file import TensorSpec, WrittenFile, file_header, write_order
from dtron.io.writer_process import WriterProcess
from dtron.parallelisms.gradients import local_part

_ALIGNED = 64  # bytes: one cache line of the CPU


class SharedMemory:
    """Host memory shared with another process; pinned if there is a GPU.

    Raises:
        OSError: the memory cannot be allocated or pinned.
    """

    def __init__(self, size: int) -> None:
        if hasattr(os, "memfd_create"):  # not limited by the size of /dev/shm
            self.descriptor = os.memfd_create("dtron-checkpoint")
        else:
            with tempfile.TemporaryFile() as file:
                self.descriptor = os.dup(file.fileno())
        os.ftruncate(self.descriptor, size)
        self.bytes = torch.frombuffer(mmap.mmap(self.descriptor, size), dtype=torch.uint8)
        self.bytes.zero_()  # allocates all pages, so that pinning blocks CUDA for a shorter time
        self._pinned = torch.cuda.is_available()
        if self._pinned:
            failed = _cuda().cudaHostRegister(self.bytes.data_ptr(), size, 0)
            if int(failed):
                raise OSError(f"{size} bytes of host memory cannot be pinned (CUDA error {failed})")

    def __len__(self) -> int:
        return len(self.bytes)

    def free(self) -> None:
        """Release the memory, which must not be used afterwards."""
        if self._pinned:
            _cuda().cudaHostUnregister(self.bytes.data_ptr())
        os.close(self.descriptor)
        del self.bytes


def _cuda() -> Any:
    """Return torch's bindings of the CUDA runtime."""
    return torch.cuda.cudart()


class Staging:
    """Owns the writer process and the host memory for copies of local tensors.

    Every save reuses the memory.
    """

    def __init__(self) -> None:
        self._memory: SharedMemory | None = None
        self._reserving: Background | None = None
        self._process: WriterProcess | None = None
        self._left: list[tuple[Tensor, Tensor]] = []
        self._host_done = threading.Event()
        self._host_done.set()
        self._device_done: torch.cuda.Event | None = None

    def reserve(self, tensors: Mapping[str, Tensor]) -> None:
        """Start to allocate, in the background, memory for copies of these tensors.

        Without this call, the first `start` allocates the memory and training waits: pinning takes
        seconds per 10 GB.
        """
        size = sum(_aligned_sizes({n: local_part(t) for n, t in tensors.items()}).values())
        gpu = torch.cuda.current_device() if torch.cuda.is_available() else None

        def act() -> None:
            if gpu is not None:  # a new thread's current device is device 0
                torch.cuda.set_device(gpu)
            self._memory = SharedMemory(size)

        # Not a daemon thread: the interpreter would abort if it ended during the allocation.
        self._reserving = Background(act, daemon=False)

    @torch.no_grad()
    def start(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Start to copy tensors to host memory.

        The copies are complete when `finish` returns and valid until the next `start`.

        Args:
            tensors: tensors or DTensors by name, on any device. They must not change before
                `before_change` returns.
        Returns:
            The buffers of the copies, by name.
        Raises:
            OSError: there is too little host memory.
        """
        here = {name: local_part(tensor) for name, tensor in tensors.items()}
        buffers = self._buffers(here)
        pairs = [(buffers[name], local) for name, local in here.items()]
        self._left = [pair for pair in pairs if not pair[1].is_cuda]
        self._host_done.clear()
        if on_device := [pair for pair in pairs if pair[1].is_cuda]:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for buffer, local in on_device:
                    buffer.copy_(local, non_blocking=True)
            self._device_done = torch.cuda.Event()
            self._device_done.record(stream)
        return buffers

    @torch.no_grad()
    def finish(self) -> None:
        """Copy CPU tensors and wait for the copies of CUDA tensors; called by the save's thread."""
        try:
            for buffer, local in self._left:
                buffer.copy_(local)
        finally:
            self._left = []
            self._host_done.set()
        if self._device_done is not None:
            self._device_done.synchronize()

    def before_change(self) -> None:
        """Wait for the copies before tensors change.

        The host waits for CPU copies, the current CUDA stream for GPU copies.
        """
        self._host_done.wait()
        if self._device_done is not None:
            torch.cuda.current_stream().wait_event(self._device_done)

    def write(
        self, target: Location, tensors: Mapping[str, TensorSpec], get: Callable[[str], Tensor]
    ) -> WrittenFile:
        """Write copies to a safetensors file in the writer process.

        Raises OSError: the file cannot be written.
        """
        assert self._memory is not None, "nothing was copied"
        assert self._process is not None, "nothing was copied"
        order, base = write_order(tensors), self._memory.bytes.data_ptr()
        copies = ((get(name), tensors[name]) for name in order)
        parts = [
            (copy.data_ptr() - base, source.nbytes) for copy, source in copies if source.nbytes
        ]
        return WrittenFile(*self._process.write(str(target), file_header(tensors), parts))

    def end(self) -> None:
        """Kill the writer process, e.g. if its disk hangs; the next `start` starts a new one."""
        if self._process is not None:
            self._process.kill()
        self._process = None

    def _buffers(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        sizes = _aligned_sizes(tensors)
        self._ensure_memory(sum(sizes.values()))
        assert self._memory is not None
        offsets = itertools.accumulate(sizes.values(), initial=0)
        held = self._memory.bytes
        cut = {n: held[o : o + tensors[n].nbytes] for n, o in zip(sizes, offsets, strict=False)}
        return {n: cut[n].view(t.dtype).reshape(t.shape) for n, t in tensors.items()}

    def _ensure_memory(self, size: int) -> None:
        """Allocate at least `size` bytes, and start the writer process that shares them.

        Linux kills the writer process when the thread that called this function ends
        (PR_SET_PDEATHSIG).
        """
        reserving, self._reserving = self._reserving, None
        if reserving is not None:
            reserving.wait()
        if self._memory is None or len(self._memory) < size:
            self.end()
            if self._memory is not None:
                self._memory.free()
            self._memory = SharedMemory(size)
        if self._process is None or not self._process.alive:
            self._process = WriterProcess(self._memory.descriptor, len(self._memory))


def _aligned_sizes(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Return the bytes of memory for each tensor, rounded up to a multiple of _ALIGNED."""
    return {n: -(-tensor.nbytes // _ALIGNED) * _ALIGNED for n, tensor in tensors.items()}


class Background:
    """A function call in a new thread.

    Args:
        daemon: whether the interpreter may exit during the call, e.g. while it hangs in a disk
            access; if False, the exit waits for the call.
    """

    def __init__(self, call: Callable[[], None], daemon: bool = True) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=daemon)
        self._thread.start()

    def _run(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            self._error = error

    @property
    def failed(self) -> bool:
        """Whether the function has raised an error; False while it runs."""
        return self._error is not None

    @property
    def running(self) -> bool:
        """Whether the function is still running."""
        return self._thread.is_alive()

    def succeeded(self) -> bool:
        """Wait for the function; return whether it returned without an error."""
        self._thread.join()
        return self._error is None

    def wait(self, seconds: float | None = None) -> None:
        """Wait for the function and raise its error.

        Raises TimeoutError: the function has not returned after `seconds`.
        """
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise TimeoutError
        if self._error is not None:
            raise self._error
