"""Who holds the memory of a rank: bytes by class of tensor and by module.

    parameters, gradients, buffers  the rank's shards
    optimizer                       the rank's states, without those in host memory
    activations                     tensors that autograd keeps for the backward, by the module that
                                    saved them; without gathered weights, what
                                    `recompute.offload` moves and what `selective` and `attention`
                                    recomputation keep in caches of their own
    not attributed                  allocated by torch and none of these: gathered weights, buffers
                                    of communication, temporaries, those caches
    reserved, not allocated         held by the allocator: free blocks, of fragmentation or not

On a GPU the totals are those of torch's caching allocator; a CPU has none.
"""

import contextlib
import inspect
import json
import logging
import re
import weakref
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from dtron.errors import ConfigError, cause_of, first_failure
from dtron.faults.guards import modules_of
from dtron.faults.memory import size
from dtron.io.untrusted import MB, parse, read_text
from dtron.parallelisms.apply import Applied
from dtron.parallelisms.gradients import local_part
from dtron.parallelisms.offload import addresses

log = logging.getLogger("dtron")
ByModule = dict[str, int]
"""Bytes by FQN."""
CLASSES = ("parameters", "gradients", "optimizer", "buffers", "activations")
_LINES = 12
"""Modules in a printed table."""


@dataclass(frozen=True)
class MemoryTable:
    """Memory of a rank at one moment, bytes."""

    when: str
    """Such as `step 3`."""
    rank: int
    pp_rank: int
    world_size: int
    classes: dict[str, ByModule]
    """By key of CLASSES."""
    peak: int | None = None
    """Maximum of allocated bytes so far; None on a CPU, as the following."""
    allocated: int | None = None
    reserved: int | None = None

    @property
    def others(self) -> int | None:
        """Bytes at the peak that are not attributed; None: unknown."""
        return None if self.peak is None else max(0, self.peak - sum(self.totals.values()))

    @property
    def totals(self) -> dict[str, int]:
        """Bytes by class."""
        return {name: sum(of.values()) for name, of in self.classes.items()}

    def lines(self, plan: Mapping[str, float] | None = None) -> Iterator[str]:
        """Yield the table as lines of text.

        Args:
            plan: the planner's bytes, by class and of `not attributed` and `peak`.
        """
        yield f"memory of rank {self.rank}, {self.when}" + ("; then as planned" if plan else "")
        free = None if self.reserved is None else self.reserved - (self.allocated or 0)
        rows = [*self.totals.items(), ("not attributed", self.others), ("peak", self.peak)]
        for name, n_bytes in (*rows, ("reserved, not allocated", free)):
            planned = f"{size(plan[name]):>12}" if plan and name in plan else ""
            if n_bytes is not None or planned:
                yield f"  {name:24}{'' if n_bytes is None else size(n_bytes):>12}{planned}"
        ordered = self.by_module()
        for pattern, of_module in ordered[:_LINES]:
            parts = ", ".join(
                f"{name} {size(n)}" for name, n in of_module.most_common() if n >= 2**19
            )
            yield f"  {pattern:24}{size(of_module.total()):>12}  {parts}"
        if len(ordered) > _LINES:
            rest = sum(each.total() for _, each in ordered[_LINES:])
            yield f"  {f'{len(ordered) - _LINES} others':24}{size(rest):>12}"

    def by_module(self) -> list[tuple[str, Counter[str]]]:
        """Return (pattern of FQNs, bytes by class), the most bytes first."""
        modules: dict[str, Counter[str]] = {}
        for name, of in self.classes.items():
            for fqn, n_bytes in of.items():
                modules.setdefault(_pattern(fqn), Counter())[name] += n_bytes
        return sorted(modules.items(), key=lambda item: -item[1].total())

    def write(self, folder: Path) -> None:
        """Write the table to `folder`/rank-N.json."""
        folder.mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), indent=1)
        (folder / f"rank-{self.rank}.json").write_text(text, encoding="utf-8")


def read_table(path: Path) -> MemoryTable:
    """Read a table that `MemoryTable.write` wrote. Raises ConfigError: the file is no table."""
    try:
        return TypeAdapter(MemoryTable).validate_python(parse(read_text(path, MB)))
    except ValidationError as error:
        why = first_failure(error)
    except (OSError, ValueError) as error:
        why = cause_of(error, path)
    raise ConfigError(f"{path}: {why}; remove it, and record the step again")


def _pattern(fqn: str) -> str:
    """Return the first three components of an FQN, or two without a number, with * for numbers."""
    parts = re.sub(r"\b\d+\b", "*", fqn).split(".")
    return ".".join(parts[: 3 if "*" in parts[:2] else 1])


_CALL = nn.Module.__call__.__code__.co_name  # type: ignore[attr-defined]


class _Held:
    """A tensor that autograd keeps."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class SavedTensors:
    """Counts the bytes that autograd keeps, by module, while `recording`.

    A storage counts once, for the module that saved it first.

    Args:
        modules: FQN of every module of this rank.

    Attributes:
        now: bytes by FQN that are kept now.
        at_peak: `now` when its sum was largest.
    """

    def __init__(self, modules: Mapping[nn.Module, str]) -> None:
        self._modules = modules
        self.now: Counter[str] = Counter()
        self.at_peak: ByModule = {}
        self._most = 0
        self._holders: Counter[int] = Counter()
        """Number of saved tensors by the address of their storage."""
        self._counted: dict[int, tuple[str, int]] = {}
        """FQN and bytes with which a storage is counted, by its address."""

    def recording(self) -> saved_tensors_hooks:
        """Return a context manager; saved tensors are counted until they are freed, also later."""
        return saved_tensors_hooks(self._pack, lambda held: held.tensor)

    def _pack(self, tensor: Tensor) -> _Held:
        held = _Held(tensor)
        local = local_part(tensor.detach())
        if type(local) is not Tensor or local.layout != torch.strided:
            return held
        module, fqn = self._innermost()
        storage = local.untyped_storage()
        address, n_bytes = storage.data_ptr(), storage.nbytes()
        if module is not None and address in addresses([*module.parameters(), *module.buffers()]):
            return held
        self._holders[address] += 1
        if self._holders[address] == 1:
            self._counted[address] = fqn, n_bytes
            self.now[fqn] += n_bytes
            if (total := self.now.total()) > self._most:
                self._most, self.at_peak = total, dict(self.now)
        weakref.finalize(held, self._release, address).atexit = False
        return held

    def _release(self, address: int) -> None:
        self._holders[address] -= 1
        if not self._holders[address]:
            del self._holders[address]
            fqn, n_bytes = self._counted.pop(address)
            self.now[fqn] -= n_bytes

    def _innermost(self) -> tuple[nn.Module | None, str]:
        """Return the innermost module of this rank that is being called, and its FQN.

        Reading `f_locals` keeps a frame's variables alive until it ends. So only frames of
        `Module.__call__` are read, whose variables live as long anyway.
        """
        frame = inspect.currentframe()
        while frame is not None:
            if frame.f_code.co_name == _CALL:
                owner = frame.f_locals["self"]
                if owner in self._modules:
                    return owner, self._modules[owner]
            frame = frame.f_back
        return None, "loss"


def write_snapshot(path: Path) -> None:
    """Write the segments and blocks of the GPU's allocator, as `torch.cuda.memory_snapshot` does.

    Blocks have stacks if torch records them, which slows allocations down.
    """
    path.write_text(json.dumps({"segments": torch.cuda.memory_snapshot()}), encoding="utf-8")


class MemoryRecorder:
    """Writes the table of one step, of a failed allocation, and the allocator's state.

    Args:
        step: step (1-based) to record; 0: none.
        folder: gets rank-N.json and, on GPUs, allocator-N.json.
        rank: (rank, pipeline rank, number of ranks).
    """

    def __init__(
        self,
        step: int,
        folder: Path,
        applied: Applied,
        optimizer: torch.optim.Optimizer,
        device: torch.device,
        rank: tuple[int, int, int],
    ) -> None:
        self.step, self.folder, self.device, self.rank = step, folder, device, rank
        self.applied, self.optimizer = applied, optimizer
        self.saved = SavedTensors(modules_of(applied))

    @contextlib.contextmanager
    def recording(self, step: int) -> Iterator[None]:
        """Record this step (1-based), if it is the one to record; write and log its table."""
        if step != self.step:
            yield
            return
        at_update: dict[str, ByModule] = {}
        hook = self.optimizer.register_step_pre_hook(lambda *_: at_update.update(self._state()))
        try:
            with self.saved.recording():
                yield
        finally:
            hook.remove()
        self._write(f"step {step}", {**at_update, "activations": self.saved.at_peak})

    def failed(self) -> None:
        """Write and log the table after a failed allocation."""
        held = {fqn: n for fqn, n in self.saved.now.items() if n}
        self._write("out of memory", {**self._state(), "activations": held})

    def _write(self, when: str, classes: dict[str, ByModule]) -> None:
        totals = ()
        if self.device.type == "cuda":
            totals = (
                torch.cuda.max_memory_allocated(),
                torch.cuda.memory_allocated(),
                torch.cuda.memory_reserved(),
            )
        table = MemoryTable(when, *self.rank, classes, *totals)
        level = logging.INFO if when.startswith("step") else logging.ERROR
        log.log(level, "%s", "\n".join(table.lines()))
        table.write(self.folder)
        if self.device.type == "cuda":
            write_snapshot(self.folder / f"allocator-{self.rank[0]}.json")

    def _state(self) -> dict[str, ByModule]:
        """Return bytes by class and FQN, without activations."""
        named = dict(self.applied.named_parameters())
        states = {fqn: self.optimizer.state.get(p, {}) for fqn, p in named.items()}
        buffers = (item for part in self.applied.parts.values() for item in part.named_buffers())
        return {
            "parameters": {fqn: local_part(p).nbytes for fqn, p in named.items()},
            "gradients": {
                fqn: local_part(p.grad).nbytes for fqn, p in named.items() if p.grad is not None
            },
            "optimizer": {
                fqn: sum(self._bytes_here(value) for value in state.values())
                for fqn, state in states.items()
            },
            "buffers": {fqn: buffer.nbytes for fqn, buffer in buffers},
        }

    def _bytes_here(self, value: Any) -> int:
        """Bytes of a tensor on this rank's device; 0 for one in host memory."""
        if not isinstance(value, Tensor):
            return 0
        local = local_part(value)
        return local.nbytes if local.device.type == self.device.type else 0
