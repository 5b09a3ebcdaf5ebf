"""Record why an attempt (a start or restart) of a run failed and how long the recovery takes.

    RUN/attempt.json       the current attempt, or the previous attempt if that failed
    RUN/ends/rank-R.json   why rank R of that attempt ended: an error or a signal

Rank 0 writes attempt.json once it has locked the run directory. A killed rank writes no record. An
attempt that completes a checkpoint makes progress; a run ends after too many attempts in a row
without progress. (torchrun's `--max-restarts` counts all restarts.)
"""

import contextlib
import itertools
import json
import logging
import os
import platform
import shutil
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from dtron.errors import NoProgressError, cause_of, first_failure
from dtron.io.filesystem import write_atomically
from dtron.io.untrusted import MB, parse, read_text
from dtron.kernels.torch_internals import compile_cache
from dtron.run.process import Place

log = logging.getLogger("dtron")
LOST_PEER, PEER_FAILED = "lost another rank", "another rank has failed"
STOPPED = "stopped by a signal"
_NOT_THE_CAUSE = (LOST_PEER, PEER_FAILED, STOPPED)
"""Causes in the records of ranks that ended because of another rank or a signal."""
_PHASES = (
    ("noticed", "stop", "until all ranks ended"),
    ("ended", "restart", "until the restart"),
    ("launched", "import", "imports"),
    ("entered", "rendezvous", "rendezvous"),
    ("met", "data", "data"),
    ("prepared", "model", "model"),
    ("built", "checkpoint", "checkpoint"),
    ("loaded", "first_step", "first step"),
    ("stepped", "", ""),
)
"""(event, metric, log) in order of time: `metric` and `log` name the phase from this event to the
next event. The seconds of phase `import` are the metric `recovery_import_seconds`."""


@dataclass(frozen=True)
class _Attempt:
    """Content of attempt.json."""

    token: str
    job: str = ""
    step: int = -1
    without_progress: Annotated[int, Field(ge=0, lt=2**31)] = 0
    hosts: Sequence[str] = ()


@dataclass(frozen=True)
class _End:
    """Content of ends/rank-R.json."""

    token: str
    cause: str
    time: float
    host: str = ""


_Record = TypeVar("_Record", _Attempt, _End)


class Attempts:
    """Writes the records of this attempt, and reads those of the previous attempt.

    Args:
        folder: the run directory.
    """

    def __init__(self, folder: Path, place: Place) -> None:
        self._path, self._ends = folder / "attempt.json", folder / "ends"
        self._place, self._token = place, ""
        self._times: dict[str, float] = {"launched": _process_start(), "entered": time.time()}
        self._cause, self._recorded_cause = "", ""
        self._recording = threading.Lock()
        self._attempt: dict[str, Any] = {}

    def mark(self, event: str) -> None:
        """Record the time of an event of `_PHASES`; later calls for the same event do nothing."""
        self._times.setdefault(event, time.time())

    def met(self, token: str) -> None:
        """Record that the rendezvous is complete; its token identifies this attempt."""
        self._token = token
        self.mark("met")

    def begin(self, step: int, most: int) -> None:
        """On rank 0: log why the previous attempt ended, and count attempts without progress.

        Called once rank 0 has locked the run directory.

        Args:
            step: step at which this attempt starts.
            most: maximum number of attempts in a row without progress; 0: no limit.
        Raises:
            NoProgressError: the maximum is reached.
        """
        if self._place.rank:
            return
        last, ends = _read(self._path, _Attempt), self._read_ends()
        ends = {r: end for r, end in ends.items() if last and end["token"] == last.token}
        job, idle = _job(self._place), 0
        if last:
            self._cause = why_ended(ends, last.hosts, self._place.world_size)
            times = [end["time"] for end in ends.values()]
            self._times |= {"noticed": min(times), "ended": max(times)} if times else {}
            same = bool(job) and last.job == job and step <= last.step
            same = same and (self._place.attempt > 0 or "SLURM_JOB_ID" in os.environ)
            idle = last.without_progress + 1 if same else 0
            log.info("%s: %s", self._restart(), self._cause)
        self._attempt = {
            **{"token": self._token, "job": job, "step": step, "without_progress": idle},
            "hosts": [],
        }
        if most and idle >= most:
            raise NoProgressError(
                f"{idle} attempts in a row have ended without a new checkpoint (faults."
                f"max_attempts = {most}); last cause: {self._cause}; fix the cause, save more "
                "often (checkpoint.interval), or set faults.max_attempts = 0 (no limit)"
            )
        shutil.rmtree(self._ends, ignore_errors=True)
        self._write(self._path, self._attempt)

    def note_hosts(self, hosts: Sequence[str]) -> None:
        """On rank 0: record the host of each rank of this attempt."""
        self._write(self._path, {**self._attempt, "hosts": list(hosts)})

    def record_end(self, cause: str) -> None:
        """Record why this rank ends. If the record cannot be written, log a warning.

        A cause in `_NOT_THE_CAUSE` (another rank failed, or a signal) does not replace a recorded
        error of this rank or signal.
        """
        end = {"token": self._token, "host": platform.node(), "cause": cause, "time": time.time()}
        with self._recording:  # the threads of `StopSignal` and the watchdog call this too
            if cause in _NOT_THE_CAUSE and self._recorded_cause not in ("", LOST_PEER, PEER_FAILED):
                return
            self._recorded_cause = cause
            self._write(self._ends / f"rank-{self._place.rank}.json", end)

    def finish(self) -> None:
        """On rank 0: record that this attempt ended without an error."""
        if self._place.rank == 0:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def stepped(self) -> dict[str, float]:
        """After the first step, log the time of each phase of the start; return metrics.

        The metrics are those of a recovery: an empty dict after later steps, on ranks other than 0,
        and if the previous attempt ended without an error.
        """
        if "stepped" in self._times:
            return {}
        self.mark("stepped")
        phases = seconds_of(self._times)
        labels = {name: label for _, name, label in _PHASES}
        listed = ", ".join(f"{seconds:.1f} s {labels[name]}" for name, seconds in phases.items())
        what, cached = "recovered" if self._cause else "first step", compile_cache()
        if sum(cached.values()):
            listed += f" ({cached['misses']} graphs compiled, {cached['hits']} from the cache)"
        log.info("%s in %.1f s: %s", what, sum(phases.values()), listed)
        if not self._cause:
            return {}
        each = {f"recovery_{name}_seconds": seconds for name, seconds in phases.items()}
        return {"recovery_seconds": sum(phases.values()), **each}

    def _restart(self) -> str:
        most = os.environ.get("TORCHELASTIC_MAX_RESTARTS")
        if not self._place.attempt:
            return "the last attempt did not end normally"
        return f"restart {self._place.attempt}" + (f" of {most}" if most else "")

    def _read_ends(self) -> dict[int, dict[str, Any]]:
        found = {}
        for path in self._ends.glob("rank-*.json"):
            rank, end = path.stem.removeprefix("rank-"), _read(path, _End)
            if end and rank.isdecimal() and len(rank) < 8:
                found[int(rank)] = asdict(end)
        return found

    def _write(self, path: Path, value: Mapping[str, Any]) -> None:
        try:
            path.parent.mkdir(exist_ok=True)
            write_atomically(path, json.dumps(value) + "\n", synced=False)
        except OSError as error:
            log.warning("%s cannot be written: %s", path, error.strerror or error)


def why_ended(ends: Mapping[int, Mapping[str, Any]], hosts: Sequence[str], world_size: int) -> str:
    """Return why an attempt ended, derived from the records of its ranks.

    The cause is the earliest error that is not a consequence of another rank's error. If no rank
    has recorded such an error, the ranks without a record were killed.

    Args:
        ends: record of each rank that has one.
        hosts: host of each rank; empty: the attempt ended before the rendezvous was complete.
    """
    own = {rank: end for rank, end in ends.items() if end.get("cause") not in _NOT_THE_CAUSE}
    if own:
        rank, end = min(own.items(), key=lambda item: item[1]["time"])
        return f"rank {rank} on host {end.get('host')}: {end.get('cause')}"
    n = len(hosts) or world_size
    silent = [rank for rank in range(n) if rank not in ends]
    lost = sorted(rank for rank, end in ends.items() if end.get("cause") == LOST_PEER)
    if lost and not silent:
        who = "all ranks" if len(lost) == n else _rank_list(lost)
        return f"the network failed: {who} lost connections, and no rank was killed"
    if len(silent) in (0, n):
        return "all ranks were stopped"
    where = defaultdict[str, list[int]](list)
    for rank in silent:
        where[hosts[rank] if hosts else ""].append(rank)
    listed = [
        _rank_list(ranks) + (f" on host {host}" if host else "") for host, ranks in where.items()
    ]
    return f"{' and '.join(listed)} {'was' if len(silent) == 1 else 'were'} killed"


def seconds_of(times: Mapping[str, float]) -> dict[str, float]:
    """Compute the seconds of each phase from the times of events; some events may be missing.

    Negative seconds, which occur if the clocks of hosts differ, become 0.
    """
    known = [(times[event], phase) for event, phase, _ in _PHASES if event in times]
    pairs = itertools.pairwise(known)
    return {phase: max(0.0, later - at) for (at, phase), (later, _) in pairs}


def _rank_list(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _job(place: Place) -> str:
    """Return the Slurm or torchrun job of this attempt; attempts are counted per job."""
    slurm = os.environ.get("SLURM_JOB_ID")
    return f"slurm {slurm}" if slurm else place.job


def _process_start() -> float:
    """Return the start time of this process, in seconds since the epoch."""
    if sys.platform != "linux":
        return time.time()
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    since_boot = ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot


def _read(path: Path, kind: type[_Record]) -> _Record | None:
    """Read a record of an earlier attempt; None: the record is missing or damaged."""
    try:
        return TypeAdapter(kind).validate_python(parse(read_text(path, MB)))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        why = first_failure(error)
    except (OSError, ValueError) as error:
        why = cause_of(error, path)
    log.warning("%s is damaged and ignored: %s", path, why)
    return None
