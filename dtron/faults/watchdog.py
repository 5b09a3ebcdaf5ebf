"""Watchdog: if a rank's step hangs, the rank writes a report and exits; torchrun restarts the run.

A thread checks the time since the rank completed a step or started. Nothing is recorded during
training. At the time limit the thread reads the stacks of all threads: frames of torch.distributed
show the collective with its group and tensor; the innermost frame of a module shows the layer.
torch's flight recorder lists the collectives that are enqueued and not done. The report is written
to RUN/hangs/step-S/rank-R.txt (before the first step to hangs/rendezvous or hangs/start). Then one
rank prints which ranks wait in a collective, and which other ranks they wait for.
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
"""Exit code of a rank that hangs; sysexits.h's EX_TEMPFAIL. torchrun restarts the run."""
_FIRST_STEP_FACTOR = 4
"""The start, and the first step with its compilation, may take this many times the limit."""
_GATHER_SECONDS = 3.0
"""Time to wait for the reports of the other ranks."""
_START_GATHER_SECONDS = 10.0
"""Time to wait for the reports before the first step, since ranks start at different times."""
_START = "start"
"""Name of the phase from the rendezvous to the first step, and of its folder in RUN/hangs."""
_TIMED_OUT = re.compile("timed? ?out", re.IGNORECASE)
"""Text of time-out errors of torch's stores and collectives."""
_CLOCK_SKEW = 60.0
"""Maximum difference between the clocks of hosts, in seconds."""
_COLLECTIVES = re.compile(
    "_?(init_process_group|new_group|all_gather|all_reduce|all_to_all|barrier|batch_isend_irecv|broadcast|foreach_all_gather|"
    "foreach_reduce|gather|irecv|isend|recv|reduce_scatter|scatter|send|wait_for_unshard|"
    "wait_tensor|_wait)[a-z_]*"
)

_RENDEZVOUS = "dtron/run/rendezvous.py"
"""File with the functions that wait for other ranks at the rendezvous."""


@dataclass(frozen=True)
class RankPosition:
    """Position of a rank in the code; as JSON, it is the first line of the rank's report."""

    rank: int
    step: int
    seconds: float
    collective: str
    """Collective in which the rank waits, with group and tensor if known; "": the rank does not
    wait."""
    module: str
    """FQN of the innermost module; "" outside of modules."""
    frame: str
    """The innermost Python frame."""

    def __str__(self) -> str:
        doing = f"waits in {self.collective}" if self.collective else f"is in {self.frame}"
        module = f", module {self.module}" if self.module else ""
        return f"rank {self.rank} {doing}{module}"


class Watchdog:
    """Watches one rank from `begin` until `end`.

    Args:
        seconds: maximum time of a step; then the process exits. 0: nothing is watched.
        folder: RUN/hangs.
        record: function that is called with the reason before the process exits.
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
        """(steps done, time of the latest progress, factor of `seconds` for the next step)."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._main = threading.get_ident()

    def begin(self, phase: str = _START) -> None:
        """Start the thread in a phase before the first step: "rendezvous" or "start"."""
        self._phase = phase
        self._beat = (0, time.monotonic(), _FIRST_STEP_FACTOR)
        if self.seconds:
            self._thread.start()

    def begin_steps(self, step: int) -> None:
        """Start to watch steps; `step` steps are done."""
        self._phase = ""
        self._beat = (step, time.monotonic(), _FIRST_STEP_FACTOR)

    def set_names(self, modules: Mapping[nn.Module, str], groups: Mapping[str, str]) -> None:
        """Set the names for reports.

        Args:
            modules: FQN of every module of this rank.
            groups: mesh axis by process-group name, from `Mesh.group_names`.
        """
        self.modules = {id(module): fqn for module, fqn in modules.items()}
        self.groups = groups

    def timed_out(self, error: BaseException) -> None:
        """If an error is a time-out of torch's store or of a collective, report and exit."""
        if self.seconds and isinstance(error, RuntimeError) and _TIMED_OUT.search(str(error)):
            self.end()
            step, since, _ = self._beat
            frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)][::-1]
            self._report_and_exit(step + 1, time.monotonic() - since, frames)

    def beat(self, step: int) -> None:
        """Record progress: `step` steps are done."""
        self._beat = (step, time.monotonic(), 1)

    def pause(self, step: int) -> None:
        """Stop watching until the next `beat`: work after step `step` has a time-out of its own."""
        self._beat = (step, time.monotonic(), math.inf)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Pause the watchdog in this context; at its end, the time limit starts from zero."""
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
        """Whether another rank has reported a hang between the rendezvous and the first step.

        Then this rank reports too: since ranks start at different times, it would otherwise be
        listed as missing. False before the rendezvous, when another run may use the run directory.
        """
        return self._phase == _START and self._start_reported() != self._before

    def _start_reported(self) -> float:
        """Return the file time of the newest report of a hang at the start; 0: no report."""
        try:
            return (self.folder / _START).stat().st_mtime
        except OSError:
            return 0.0

    def _report_and_exit(
        self, step: int, late: float, failed: Sequence[FrameType] | None = None
    ) -> None:
        """Report as much as possible, and exit the process.

        Args:
            failed: frames of an error in the main thread, innermost first; None: no error.
        """
        try:
            self._report(step, late, failed)
        except Exception:  # the rank must end even if the report fails
            traceback.print_exc()
        finally:
            os._exit(EXIT_HUNG)

    def _report(self, step: int, late: float, failed: Sequence[FrameType] | None) -> None:
        """Write this rank's report; the first rank to create `summary` then prints the summary."""
        position = self.position(step, late, failed)
        phase = self._phase
        name, of = (phase, f"the {phase}") if phase else (f"step-{step}", f"step {step}")
        message = f"hang: {of} has not ended for {late:.0f} seconds: {position}"
        self._record(message)
        folder = self.folder / name
        try:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"rank-{self.rank}.txt"
            with path.open("w", encoding="utf-8") as file:
                file.write(json.dumps(position.__dict__) + "\n" + message + "\n")
                enqueued = flight_recorder(self.groups)
                file.writelines(f"enqueued and not done: {line}\n" for line in enqueued)
                file.flush()
                faulthandler.dump_traceback(file, all_threads=True)
            message += f"; stacks: {path}"
        except OSError as error:
            message += f"; its stacks could not be written: {error}"
        print(message, file=sys.stderr, flush=True)
        time.sleep(_START_GATHER_SECONDS if phase else _GATHER_SECONDS)
        since = time.time() - late - _CLOCK_SKEW
        if _create_first(folder / "summary", since):
            for line in summary(folder, self.world_size, since):
                print(line, file=sys.stderr, flush=True)

    def position(
        self, step: int, late: float, failed: Sequence[FrameType] | None = None
    ) -> RankPosition:
        """Find the position of the main thread, or of the autograd thread that it waits for."""
        stacks = [failed] if failed else [list(_frames_outwards(frame)) for frame in self._stacks()]
        found = [self._read_stack(frames) for frames in stacks]
        found.sort(key=lambda each: (bool(each[0]), bool(each[1])), reverse=True)
        collective, module = found[0]
        enqueued = flight_recorder(self.groups)
        if "wait" in collective and enqueued:  # a frame of `wait` does not know the collective
            collective = enqueued[0]
        frame = failed[0] if failed else sys._current_frames()[self._main]
        innermost = f"{frame.f_code.co_qualname} ({_location(frame)})"
        return RankPosition(self.rank, step, round(late, 1), collective, module, innermost)

    def _stacks(self) -> list[FrameType]:
        """Return the innermost frames of the main thread and of autograd's threads.

        `threading.enumerate` does not list autograd's threads.
        """
        frames = sys._current_frames()
        known = {thread.ident for thread in threading.enumerate()}
        return [f for ident, f in frames.items() if ident == self._main or ident not in known]

    def _read_stack(self, frames: Sequence[FrameType]) -> tuple[str, str]:
        """Return collective and module of a stack; `frames` starts with the innermost frame."""
        collective = module = ""
        for frame in frames:
            name, local = frame.f_code.co_name, frame.f_locals
            if frame.f_code.co_filename.endswith(_RENDEZVOUS):
                collective = "the rendezvous"
            if "torch/distributed" in frame.f_code.co_filename and _COLLECTIVES.fullmatch(name):
                # The last match is the outermost matching frame, that of the public function.
                collective = self._describe_collective(name, local)
            module = module or self._module_of(local.get("self"))
        return collective, module

    def _module_of(self, owner: Any) -> str:
        if isinstance(owner, nn.Module):
            return self.modules.get(id(owner), "")
        modules = getattr(owner, "modules", None)  # a tuple in FSDP's parameter groups
        found = map(self.modules.get, map(id, modules)) if type(modules) is tuple else ()
        return next(filter(None, found), "")

    def _describe_collective(self, name: str, local: Mapping[str, Any]) -> str:
        parts = [name]
        if "group" in local:
            group = local["group"] or (dist.group.WORLD if dist.is_initialized() else None)
            axis = self.groups.get(str(getattr(group, "group_name", group)))
            parts += [f"over {axis}"] if axis else []
        tensors = [v for v in local.values() if isinstance(v, torch.Tensor)]
        if tensors:
            parts.append(f"of {str(tensors[0].dtype).split('.')[-1]} {tuple(tensors[0].shape)}")
        return " ".join(parts)


def _frames_outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _location(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def flight_recorder(groups: Mapping[str, str]) -> list[str]:
    """List the collectives that are enqueued and not done, from torch's flight recorder.

    The oldest comes first; each entry has the form `all_gather over tp of Float [[2, 16, 32]]`.
    """
    return [_describe_entry(entry, groups) for entry in recorded(active=True)]


def _describe_entry(entry: dict[str, Any], groups: Mapping[str, str]) -> str:
    group = str((entry.get("process_group") or [""])[0])
    name = str(entry.get("profiling_name")).partition(":")[2]
    dtypes = ", ".join(entry.get("input_dtypes", []))
    return f"{name} over {groups.get(group, group)} of {dtypes} {entry.get('input_sizes')}"


def _create_first(path: Path, since: float) -> bool:
    """Create a file; return False if another rank has created it.

    A file from before `since` (seconds since the epoch) is replaced.
    """
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
    """Summarize the reports of a hang: which ranks wait in a collective, and for which ranks.

    Args:
        since: seconds since the epoch; older reports belong to an earlier hang at the same step.
    """
    new = [path for path in folder.glob("rank-*.txt") if path.stat().st_mtime >= since]
    firsts = [path.read_text(encoding="utf-8").split("\n")[0] for path in new]
    reports = [RankPosition(**json.loads(first)) for first in firsts]
    reports.sort(key=lambda report: report.rank)
    silent = sorted(set(range(world_size)) - {report.rank for report in reports})
    waiting = [str(report.rank) for report in reports if report.collective]
    lines = [f"hang: ranks {', '.join(waiting) or 'none'} wait in a collective"]
    lines += [f"hang: {report}; ranks wait for it" for report in reports if not report.collective]
    if silent:
        names = ", ".join(map(str, silent))
        lines.append(
            f"hang: no report from ranks {names}: they are dead, or no Python thread can run"
        )
    return lines
