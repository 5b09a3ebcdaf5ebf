"""Saving beside training: copies on the host, and the thread that writes them.

Training waits for the copies alone, which are taken into the same memory each time: on CUDA pinned,
filled by the GPU behind the step, so that not even the host waits. A thread is enough, since
hashing, writing and the collectives of the plan run without Python's lock.
"""

import threading
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


class Staging:
    """Host memory for a copy of the local parts of some tensors."""

    def __init__(self) -> None:
        self._buffers: dict[str, Tensor] = {}
        self._copied: torch.cuda.Event | None = None

    @torch.no_grad()
    def copy(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Start to copy; the copies are there when `wait` returns, and last until the next call.

        Args:
            tensors: by name, plain or DTensors, on any device.
        """
        copies = {}
        for name, tensor in tensors.items():
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            copies[name] = self._buffer(name, local).copy_(local, non_blocking=True)
        if torch.cuda.is_available():
            self._copied = torch.cuda.Event()
            self._copied.record()
        return copies

    def wait(self) -> None:
        """Wait until the copies are there."""
        if self._copied is not None:
            self._copied.synchronize()

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
