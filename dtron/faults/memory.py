"""An allocation that fails: what needed memory, how much was in use, and how much there is."""

import re
import resource
from collections.abc import Callable, Mapping
from types import TracebackType

import torch
from torch import nn

from dtron.errors import ConfigError, OutOfMemoryError
from dtron.parallelisms.offload import host_memory

_TEXTS = re.compile("out of memory|can't allocate memory|not enough memory|ALLOC_FAILED", re.I)
"""Texts in RuntimeErrors of torch's allocators, of CUDA and of its libraries."""
_ASKED = re.compile("(?:tried|Unable) to allocate ([0-9.]+) (bytes|[KMGTP]iB)", re.I)
_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is an allocation that failed, on a GPU or on the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and _TEXTS.search(str(error)) is not None


class MemoryInUse:
    """Memory of this rank's tensors: allocated on its GPU, or resident since this was made.

    Args:
        ranks: of this host, which share its memory.
    """

    def __init__(self, ranks: int) -> None:
        self._ranks, self._before = ranks, _resident()

    def explain(
        self, error: BaseException, when: str, modules: Mapping[nn.Module, str]
    ) -> OutOfMemoryError:
        """The error to print for an allocation that failed.

        Args:
            when: `rank 1, step 3`.
            modules: FQN of every module of this rank.
        """
        place, used, peak, free = self._figures()
        asked = _asked(str(error))
        module = module_of(error.__traceback__, modules)
        message = f"out of memory on {when}" + (f", in {module}" if module else "")
        requested = f" {size(asked)} were requested, with" if asked else ""
        message += f":{requested} {size(used)} in use (at most {size(peak)}) and {size(free)} free"
        room = min(used + free, used + asked - 1) if asked else used + free
        return OutOfMemoryError(f"{message} on {place}", max(peak, used + asked), room)

    def _figures(self) -> tuple[str, float, float, float]:
        """Where the tensors are, and bytes there: in use, the most so far, free for this rank."""
        if torch.cuda.is_available():
            free, _ = torch.cuda.mem_get_info()
            used, peak = torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()
            # What the allocator has reserved and not handed out is free for this rank.
            free += torch.cuda.memory_reserved() - used
            return torch.cuda.get_device_name(), used, peak, free
        _, available = host_memory()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        used, peak = (max(each - self._before, 0.0) for each in (_resident(), peak))
        return "this machine", used, max(used, peak), available / self._ranks


def module_of(traceback: TracebackType | None, modules: Mapping[nn.Module, str]) -> str:
    """FQN of the innermost module in whose forward an error was raised; empty: in none."""
    found = ""
    while traceback is not None:
        owner = traceback.tb_frame.f_locals.get("self")
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


def _asked(text: str) -> float:
    """Bytes of the allocation that failed; 0: it does not say."""
    found = _ASKED.search(text)
    return float(found[1]) * 1024 ** _UNITS.index(found[2]) if found else 0.0


def check_host_memory(needed: float, what: str, fix: Callable[[float], str]) -> float:
    """Refuse what needs more memory than a host without GPUs has available: Linux would kill it.

    Args:
        needed: bytes of all ranks of the host.
        what: the beginning of the error: what needs them.
        fix: its end, given the bytes that are available.
    Returns:
        The bytes that are available.
    Raises:
        ConfigError: there are fewer.
    """
    _, available = host_memory()
    if needed > available:
        raise ConfigError(
            f"{what}, but {size(available)} of this machine's memory are available; "
            f"{fix(available)}"
        )
    return available


def size(n_bytes: float) -> str:
    """Bytes in GiB, or in MiB what is below one."""
    if n_bytes < 2**30:
        return f"{n_bytes / 2**20:.0f} MiB"
    return f"{n_bytes / 2**30:.1f} GiB"
