"""A step that does not end: the rank says where it is and ends, so that the run can be restarted.

A thread looks at the time since the rank last finished a step. Nothing is recorded while training
goes on; when the limit is reached the stacks of all threads are read instead. The innermost frame
of torch.distributed names the collective, its group and tensor; the innermost module that a frame
belongs to names the layer; torch's flight recorder names collectives that were enqueued and are not
done. All of it is written to RUN/hangs/step-S/rank-R.txt, and the first rank says which ranks
wait in a collective and which do not: these the others wait for.
"""

import faulthandler
import json
import logging
import math
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dtron.faults.flight_recorder import recorded

log = logging.getLogger("dtron")

EXIT_HUNG = 75
"""A rank that ends itself because it hangs; sysexits.h's EX_TEMPFAIL: torchrun restarts it."""
_FIRST_STEP = 4
"""The first step, which compiles, may take this many times as long as others."""
_GATHER_SECONDS = 3.0
"""How long the first rank waits for the others' reports."""
_EARLIER = 60.0
"""Seconds by which clocks of hosts may differ."""
_COLLECTIVES = re.compile(
    "_?(all_gather|all_reduce|all_to_all|barrier|batch_isend_irecv|broadcast|foreach_all_gather|"
    "foreach_reduce|gather|irecv|isend|recv|reduce_scatter|scatter|send|wait_for_unshard|"
    "wait_tensor|_wait)[a-z_]*"
)


@dataclass(frozen=True)
class Where:
    """Where a rank is, as its report's first line says it."""

    rank: int
    step: int
    seconds: float
    collective: str
    """Its name, with group and tensor where they are known; empty outside of one."""
    module: str
    """FQN, or empty."""
    frame: str
    """The innermost frame of Python."""

    def __str__(self) -> str:
        doing = f"waits in {self.collective}" if self.collective else f"is in {self.frame}"
        module = f", module {self.module}" if self.module else ""
        return f"rank {self.rank} {doing}{module}"


class Watchdog:
    """Watches one rank from `begin` until `end`.

    Args:
        seconds: without a finished step, after which the process is ended.
        folder: RUN/hangs.
        modules: FQN of every module of this rank.
        groups: mesh axis by a process group's name, as Mesh.group_names gives it.
    """

    def __init__(
        self,
        seconds: float,
        folder: Path,
        modules: Mapping[nn.Module, str],
        groups: Mapping[str, str],
    ) -> None:
        self.seconds, self.folder, self.groups = seconds, folder, groups
        self.modules = {id(module): fqn for module, fqn in modules.items()}
        self.rank = dist.get_rank()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._main = threading.get_ident()

    def begin(self, step: int) -> None:
        """Start; `step` steps are done."""
        self._beat = (step, time.monotonic() + (_FIRST_STEP - 1) * self.seconds)
        self._thread.start()

    def beat(self, step: int) -> None:
        """`step` steps are done, or other work has gone on."""
        self._beat = (step, time.monotonic())

    def pause(self, step: int) -> None:
        """Until the next beat: what comes after `step` has limits of its own."""
        self._beat = (step, math.inf)

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        interval = min(1.0, self.seconds / 5)
        while not self._ended.wait(interval):
            step, at = self._beat
            late = time.monotonic() - at
            if late > self.seconds:
                try:
                    self._report(step + 1, late)
                except Exception:  # the rank ends, whatever can be told of it
                    traceback.print_exc()
                finally:
                    os._exit(EXIT_HUNG)

    def _report(self, step: int, late: float) -> None:
        """Write what is known of this rank; the first rank sums up what all have written."""
        where = self.where(step, late)
        told = f"hang: step {step} has not ended for {late:.0f} seconds: {where}"
        folder = self.folder / f"step-{step}"
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"rank-{self.rank}.txt"
            with path.open("w") as file:
                file.write(json.dumps(where.__dict__) + "\n" + told + "\n")
                enqueued = flight_recorder(self.groups)
                file.writelines(f"enqueued and not done: {line}\n" for line in enqueued)
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            told += f"; stacks: {path}"
        except OSError as error:
            told += f"; its stacks could not be written: {error}"
        print(told, file=sys.stderr, flush=True)
        time.sleep(_GATHER_SECONDS)  # ranks find it within a second of each other
        if self.rank == 0:
            for line in summary(folder, dist.get_world_size(), time.time() - late - _EARLIER):
                print(line, file=sys.stderr, flush=True)

    def where(self, step: int, late: float) -> Where:
        """Where the main thread is, or the autograd thread that it waits for."""
        found = [self._of_stack(frame) for frame in self._stacks()]
        found.sort(key=lambda each: (bool(each[0]), bool(each[1])), reverse=True)
        collective, module, _ = found[0]
        enqueued = flight_recorder(self.groups)
        if "wait" in collective and enqueued:  # the frame does not know for what
            collective = enqueued[0]
        return Where(self.rank, step, round(late, 1), collective, module, self._innermost())

    def _innermost(self) -> str:
        frame = sys._current_frames()[self._main]
        return f"{frame.f_code.co_qualname} ({_place(frame)})"

    def _stacks(self) -> list[FrameType]:
        """Innermost frames of the main thread and of those without a Python thread's name, which
        autograd has made."""
        frames = sys._current_frames()
        known = {thread.ident for thread in threading.enumerate()}
        return [f for ident, f in frames.items() if ident == self._main or ident not in known]

    def _of_stack(self, innermost: FrameType) -> tuple[str, str, str]:
        collective = module = ""
        for frame in _outwards(innermost):
            name, local = frame.f_code.co_name, frame.f_locals
            if "torch/distributed" in frame.f_code.co_filename and _COLLECTIVES.fullmatch(name):
                collective = self._described(name, local)  # the outermost of one call's frames
            module = module or self._module_of(local.get("self"))
        return collective, module, innermost.f_code.co_name

    def _module_of(self, owner: Any) -> str:
        if isinstance(owner, nn.Module):
            return self.modules.get(id(owner), "")
        held = getattr(owner, "modules", None)  # FSDP's parameter groups have a tuple
        found = (self.modules.get(id(module)) for module in held) if type(held) is tuple else ()
        return next(filter(None, found), "")

    def _described(self, name: str, local: Mapping[str, Any]) -> str:
        parts = [name]
        if "group" in local:
            group = local["group"] or dist.group.WORLD
            axis = self.groups.get(str(getattr(group, "group_name", group)))
            parts += [f"over {axis}"] if axis else []
        tensors = [v for v in local.values() if isinstance(v, torch.Tensor)]
        if tensors:
            parts.append(f"of {str(tensors[0].dtype).split('.')[-1]} {tuple(tensors[0].shape)}")
        return " ".join(parts)


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _place(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def flight_recorder(groups: Mapping[str, str]) -> list[str]:
    """Each collective that torch's flight recorder knows to be enqueued and not done, the oldest
    first: `all_gather over tp of Float [[2, 16, 32]]`."""
    return [_entry(entry, groups) for entry in recorded(active=True)]


def _entry(entry: dict[str, Any], groups: Mapping[str, str]) -> str:
    group = str((entry.get("process_group") or [""])[0])
    name = str(entry.get("profiling_name")).partition(":")[2]
    dtypes = ", ".join(entry.get("input_dtypes", []))
    return f"{name} over {groups.get(group, group)} of {dtypes} {entry.get('input_sizes')}"


def summary(folder: Path, world_size: int, since: float) -> list[str]:
    """What the reports of a hang say together: which ranks wait, and for which.

    Args:
        since: seconds of the epoch; older reports are of an earlier hang at the same step.
    """
    new = [path for path in folder.glob("rank-*.txt") if path.stat().st_mtime >= since]
    said = [Where(**json.loads(path.read_text().split("\n")[0])) for path in new]
    said.sort(key=lambda where: where.rank)
    silent = sorted(set(range(world_size)) - {where.rank for where in said})
    waiting = [str(where.rank) for where in said if where.collective]
    lines = [f"hang: ranks {', '.join(waiting) or 'none'} wait in a collective"]
    lines += [f"hang: {where} and is waited for" for where in said if not where.collective]
    if silent:
        names = ", ".join(map(str, silent))
        lines.append(
            f"hang: no report of ranks {names}: dead, or without a Python thread that runs"
        )
    return lines
