"""Saving beside training: copies on the host, and the thread that makes and writes them.

Weights and moments change in the optimizer's step alone. So copies are made while the next forward
and backward run, on CUDA by a stream of their own into pinned memory, else by the thread, and only
the next step waits for them, if they are not there by then. A thread is enough: copying, hashing
and writing run without Python's lock.
"""

import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Staging:
    """Host memory for a copy of the local parts of some tensors; the same memory each time."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._left: list[tuple[Tensor, Tensor]] = []
        self._host_done = threading.Event()
        self._host_done.set()
        self._device_done: torch.cuda.Event | None = None

    @torch.no_grad()
    def start(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Start to copy; the copies are there when `finish` returns, and last until the next call.

        Args:
            tensors: by name, plain or DTensors, on any device. They must not change before
                `before_change` returns.
        """
        pairs = {}
        for name, tensor in tensors.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            pairs[name] = (self._buffer(name, local), local)
        self._left = [pair for pair in pairs.values() if not pair[1].is_cuda]
        self._host_done.clear()
        if on_device := [pair for pair in pairs.values() if pair[1].is_cuda]:
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for buffer, local in on_device:
                    buffer.copy_(local, non_blocking=True)
            self._device_done = torch.cuda.Event()
            self._device_done.record(stream)
        return {name: buffer for name, (buffer, _) in pairs.items()}

    @torch.no_grad()
    def finish(self) -> None:
        """Make what copies are left, and wait for the device's; for the thread that writes them."""
        try:
            for buffer, local in self._left:
                buffer.copy_(local)
        finally:
            self._left = []
            self._host_done.set()
        if self._device_done is not None:
            self._device_done.synchronize()

    def before_change(self) -> None:
        """Wait until the tensors may change: the host for its copies, the device for its own."""
        self._host_done.wait()
        if self._device_done is not None:
            torch.cuda.current_stream().wait_event(self._device_done)

    def _buffer(self, name: str, like: Tensor) -> Tensor:
        found = self._buffers.get(name)
        if found is None or (found.shape, found.dtype) != (like.shape, like.dtype):
            found = torch.empty(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)
            self._buffers[name] = found
        return found


class Background:
    """One call in a thread of its own, which ends with the process."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, args=(call,), daemon=True)
        self._thread.start()

    def _run(self, call: Callable[[], None]) -> None:
        try:
            call()
        except BaseException as error:
            self._error = error

    @property
    def failed(self) -> bool:
        """Whether it is over and has raised."""
        return self._error is not None

    @property
    def running(self) -> bool:
        """Whether it is not over."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Wait for its end; raises what it has raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error
