"""Explain failed allocations (module, memory in use, free memory); check host memory."""

import re
import resource
from collections.abc import Callable, Mapping
from types import TracebackType

import torch
from torch import nn

from dtron.errors import ConfigError, OutOfMemoryError
from dtron.parallelisms.host_memory import host_memory

_TEXTS = re.compile("out of memory|can't allocate memory|not enough memory|ALLOC_FAILED", re.I)
"""Texts of RuntimeErrors of torch's allocators, of CUDA, and of its libraries."""
_REQUESTED = re.compile("(?:tried|Unable) to allocate ([0-9.]+) (bytes|[KMGTP]iB)", re.I)
_OUTSIDE = {
    "dtron.training.loss": "the loss",
    "dtron.training.optim": "the update of the parameters",
    "torch.optim": "the update of the parameters",
    "torch.autograd.graph": "the backward",
}
"""Python modules, or prefixes of their names, that run code outside of every nn.Module."""
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a failed allocation, on a GPU or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _TEXTS.search(str(error)) is not None


class MemoryInUse:
    """Measures the memory in use by this rank, and explains out-of-memory errors.

    On a GPU: allocated memory. On CPU: growth of resident memory since this object was created.

    Args:
        ranks: number of ranks on this host, which share its memory.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks, self._before = ranks, _resident()

    def explain(
        self, error: BaseException, when: str, modules: Mapping[nn.Module, str]
    ) -> OutOfMemoryError:
        """Return the error to print for a failed allocation.

        Args:
            when: rank and step, such as `rank 1, step 3`.
            modules: FQN of every module of this rank.
        """
        place, used, peak, free = self._usage()
        failed = _requested_bytes(str(error))
        code = code_of(error.__traceback__, modules)
        message = f"out of memory on {when}" + (f", in {code}" if code else "")
        requested = f" {size(failed)} were requested, with" if failed else ""
        message += f":{requested} {size(used)} in use (peak {size(peak)}) and {size(free)} free"
        room = min(used + free, used + failed - 1) if failed else used + free
        return OutOfMemoryError(f"{message} on {place}", max(peak, used + failed), room)

    def _usage(self) -> tuple[str, float, float, float]:
        """Return (name of the device, bytes in use, peak bytes, bytes free for this rank)."""
        if torch.cuda.is_available():
            free, _ = torch.cuda.mem_get_info()
            used, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
            # Reserved but unallocated memory is free for this rank.
            free += torch.cuda.memory_reserved() - used
            return torch.cuda.get_device_name(), used, peak, free
        _, available = host_memory()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        used, peak = (max(each - self._before, 0.0) for each in (_resident(), peak))
        return "this machine", used, max(used, peak), available / self._ranks


def code_of(traceback: TracebackType | None, modules: Mapping[nn.Module, str]) -> str:
    """Return where an error was raised: the FQN of the innermost module in whose forward it was, or
    `the loss`, `the backward` or `the update of the parameters`; empty: elsewhere."""
    found = ""
    while traceback is not None:
        frame = traceback.tb_frame
        owner, name = frame.f_locals.get("self"), frame.f_globals.get("__name__", "")
        outside = [text for prefix, text in _OUTSIDE.items() if name.startswith(prefix)]
        found = outside[0] if outside else found
        if isinstance(owner, nn.Module):
            found = modules.get(owner, found)
        traceback = traceback.tb_next
    return found


def _resident() -> float:
    try:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:  # not Linux
        return 0.0


def _requested_bytes(text: str) -> float:
    """Return the bytes of a failed allocation from its error text; 0: unknown."""
    found = _REQUESTED.search(text)
    return float(found[1]) * 1024 ** _UNITS.index(found[2]) if found else 0.0


def check_host_memory(needed: float, what: str, fix: Callable[[float], str]) -> float:
    """Check that a host without GPUs has enough memory; otherwise Linux would kill the process.

    Args:
        needed: bytes for all ranks of the host.
        what: start of the error message: what needs this memory.
        fix: function from available bytes to the end of the error message.
    Returns:
        Available bytes.
    Raises:
        ConfigError: fewer than `needed` bytes are available.
    """
    _, available = host_memory()
    if needed > available:
        raise ConfigError(
            f"{what}, but {size(available)} of this machine's memory are available; "
            f"{fix(available)}"
        )
    return available


def size(n_bytes: float) -> str:
    """Format bytes in GiB, or in MiB if less than 1 GiB."""
    if n_bytes < 2**30:
        return f"{n_bytes / 2**20:.0f} MiB"
    return f"{n_bytes / 2**30:.1f} GiB"
