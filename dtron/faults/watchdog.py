"""A step that does not end: the rank reports where it is and exits, so that the run restarts.

A thread looks at the time since the rank last finished a step, or since its start. Nothing is
recorded while training goes on; when the limit is reached the stacks of all threads are read
instead. The innermost frame of torch.distributed names the collective, its group and tensor; the
innermost module that a frame belongs to names the layer; torch's flight recorder names collectives
that were enqueued and are not done. All of it is written to RUN/hangs/step-S/rank-R.txt
(hangs/rendezvous, then hangs/start, before the first step), and one rank reports which ranks wait
in a collective and which do not: these the others wait for.
"""

import contextlib
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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
"""The start, and the first step, which compiles, may take this many times as long as others."""
_GATHER_SECONDS = 3.0
"""Wait for the reports of the other ranks."""
_START_GATHER_SECONDS = 10.0
"""The same at the start, into which ranks come at different times."""
_START = "start"
"""Phase, and folder in RUN/hangs, from the rendezvous to the first step. Reports are those of ranks
of this run: before, another run may have the directory."""
_TIMED_OUT = re.compile("timed? ?out", re.IGNORECASE)
"""Text in torch's errors of stores and collectives."""
_EARLIER = 60.0
"""Seconds by which clocks of hosts may differ."""
_COLLECTIVES = re.compile(
    "_?(init_process_group|new_group|all_gather|all_reduce|all_to_all|barrier|batch_isend_irecv|broadcast|foreach_all_gather|"
    "foreach_reduce|gather|irecv|isend|recv|reduce_scatter|scatter|send|wait_for_unshard|"
    "wait_tensor|_wait)[a-z_]*"
)

_RENDEZVOUS = "dtron/run/rendezvous.py"
"""Whose functions wait for other ranks."""


@dataclass(frozen=True)
class Where:
    """Where a rank is: the first line of its report."""

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
        record: is given why this rank ends.
    """

    def __init__(
        self,
        seconds: float,
        folder: Path,
        rank: int,
        world_size: int,
        record: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._record = record
        self.seconds, self.folder, self.rank, self.world_size = seconds, folder, rank, world_size
        self.modules: dict[int, str] = {}
        self.groups: Mapping[str, str] = {}
        self._phase, self._before = _START, self._start_reported()
        self._beat: tuple[int, float, float] = (0, 0.0, math.inf)
        """Steps done, when that was, and how often `seconds` may pass until the next."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._main = threading.get_ident()

    def begin(self, phase: str = _START) -> None:
        """Start the thread, in a phase before the first step: "rendezvous" or "start"."""
        self._phase = phase
        self._beat = (0, time.monotonic(), _FIRST_STEP)
        self._thread.start()

    def begin_steps(self, step: int) -> None:
        """Begin to watch steps; `step` of them are done."""
        self._phase = ""
        self._beat = (step, time.monotonic(), _FIRST_STEP)

    def names(self, modules: Mapping[nn.Module, str], groups: Mapping[str, str]) -> None:
        """Names for reports.

        Args:
            modules: FQN of every module of this rank.
            groups: mesh axis by a process group's name, as Mesh.group_names gives it.
        """
        self.modules = {id(module): fqn for module, fqn in modules.items()}
        self.groups = groups

    def timed_out(self, error: BaseException) -> None:
        """Report and end the process, if an error is torch's of a store or a collective in which
        other ranks have not arrived in time."""
        if isinstance(error, RuntimeError) and _TIMED_OUT.search(str(error)):
            self.end()
            step, since, _ = self._beat
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
            self._report_and_exit(step + 1, time.monotonic() - since, frames)

    def beat(self, step: int) -> None:
        """Record progress: `step` steps are done."""
        self._beat = (step, time.monotonic(), 1)

    def pause(self, step: int) -> None:
        """Stop watching until the next beat; work after `step` has its own time-outs."""
        self._beat = (step, time.monotonic(), math.inf)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Not watched inside; the limit of what follows begins anew."""
        step, _, times = self._beat
        self.pause(step)
        yield
        self._beat = (step, time.monotonic(), times)

    def end(self) -> None:
        """Stop watching."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        interval = min(1.0, self.seconds / 5)
        while not self._ended.wait(interval):
            step, since, times = self._beat
            late = time.monotonic() - since
            if late > times * self.seconds or self._reported():
                self._report_and_exit(step + 1, late)

    def _reported(self) -> bool:
        """Whether another rank has found a hang of this start: ranks start at different times, and
        one that reports as well is not the one that is missing."""
        return self._phase == _START and self._start_reported() != self._before

    def _start_reported(self) -> float:
        """When a start was last reported, by the clock of the file system; 0: never."""
        try:
            return (self.folder / _START).stat().st_mtime
        except OSError:
            return 0.0

    def _report_and_exit(
        self, step: int, late: float, failed: Sequence[FrameType] | None = None
    ) -> None:
        """Args:
        failed: frames of an error of the main thread, the innermost first; None: it still runs.
        """
        try:
            self._report(step, late, failed)
        except Exception:  # the rank ends, whatever can be reported of it
            traceback.print_exc()
        finally:
            os._exit(EXIT_HUNG)

    def _report(self, step: int, late: float, failed: Sequence[FrameType] | None) -> None:
        """Write what is known of this rank; the first one to know of all sums up what they have
        written."""
        where = self.where(step, late, failed)
        phase = self._phase
        name, of = (phase, f"the {phase}") if phase else (f"step-{step}", f"step {step}")
        message = f"hang: {of} has not ended for {late:.0f} seconds: {where}"
        self._record(message)
        folder = self.folder / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"rank-{self.rank}.txt"
            with path.open("w", encoding="utf-8") as file:
                file.write(json.dumps(where.__dict__) + "\n" + message + "\n")
                enqueued = flight_recorder(self.groups)
                file.writelines(f"enqueued and not done: {line}\n" for line in enqueued)
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            message += f"; stacks: {path}"
        except OSError as error:
            message += f"; its stacks could not be written: {error}"
        print(message, file=sys.stderr, flush=True)
        time.sleep(_START_GATHER_SECONDS if phase else _GATHER_SECONDS)
        since = time.time() - late - _EARLIER
        if _claims(folder / "summary", since):
            for line in summary(folder, self.world_size, since):
                print(line, file=sys.stderr, flush=True)

    def where(self, step: int, late: float, failed: Sequence[FrameType] | None = None) -> Where:
        """Where the main thread is, or the autograd thread that it waits for."""
        stacks = [failed] if failed else [list(_outwards(frame)) for frame in self._stacks()]
        found = [self._of_stack(frames) for frames in stacks]
        found.sort(key=lambda each: (bool(each[0]), bool(each[1])), reverse=True)
        collective, module = found[0]
        enqueued = flight_recorder(self.groups)
        if "wait" in collective and enqueued:  # the frame does not know for what
            collective = enqueued[0]
        frame = failed[0] if failed else sys._current_frames()[self._main]
        innermost = f"{frame.f_code.co_qualname} ({_place(frame)})"
        return Where(self.rank, step, round(late, 1), collective, module, innermost)

    def _stacks(self) -> list[FrameType]:
        """Innermost frames of the main thread and of those without a Python thread's name, which
        autograd has made."""
        frames = sys._current_frames()
        known = {thread.ident for thread in threading.enumerate()}
        return [f for ident, f in frames.items() if ident == self._main or ident not in known]

    def _of_stack(self, frames: Sequence[FrameType]) -> tuple[str, str]:
        """Collective and module of a stack, the innermost frame first."""
        collective = module = ""
        for frame in frames:
            name, local = frame.f_code.co_name, frame.f_locals
            if frame.f_code.co_filename.endswith(_RENDEZVOUS):
                collective = "the rendezvous"
            if "torch/distributed" in frame.f_code.co_filename and _COLLECTIVES.fullmatch(name):
                collective = self._described(name, local)  # the outermost of one call's frames
            module = module or self._module_of(local.get("self"))
        return collective, module

    def _module_of(self, owner: Any) -> str:
        if isinstance(owner, nn.Module):
            return self.modules.get(id(owner), "")
        held = getattr(owner, "modules", None)  # FSDP's parameter groups have a tuple
        found = (self.modules.get(id(module)) for module in held) if type(held) is tuple else ()
        return next(filter(None, found), "")

    def _described(self, name: str, local: Mapping[str, Any]) -> str:
        parts = [name]
        if "group" in local:
            group = local["group"] or (dist.group.WORLD if dist.is_initialized() else None)
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


def _claims(path: Path, since: float) -> bool:
    """Whether this rank is the first to make a file, of which an older one may be left."""
    try:
        if path.exists() and path.stat().st_mtime < since:
            path.unlink()
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    except OSError:
        return True
    return True


def summary(folder: Path, world_size: int, since: float) -> list[str]:
    """Summarize the reports of a hang: which ranks wait, and for which.

    Args:
        since: seconds of the epoch; older reports are of an earlier hang at the same step.
    """
    new = [path for path in folder.glob("rank-*.txt") if path.stat().st_mtime >= since]
    reports = [Where(**json.loads(path.read_text(encoding="utf-8").split("\n")[0])) for path in new]
    reports.sort(key=lambda where: where.rank)
    silent = sorted(set(range(world_size)) - {where.rank for where in reports})
    waiting = [str(where.rank) for where in reports if where.collective]
    lines = [f"hang: ranks {', '.join(waiting) or 'none'} wait in a collective"]
    lines += [f"hang: {where} and is waited for" for where in reports if not where.collective]
    if silent:
        names = ", ".join(map(str, silent))
        lines.append(
            f"hang: no report of ranks {names}: dead, or without a Python thread that runs"
        )
    return lines
