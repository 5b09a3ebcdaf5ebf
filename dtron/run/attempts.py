"""The attempts of one run: why the last one ended, what the recovery cost, and when to give up.

    RUN/attempt.json       the attempt that trains now, or the last one, if it did not end in order
    RUN/ends/rank-R.json   why rank R of that attempt ended, written when it ends by an error

Rank 0 writes the first as soon as the run directory is its own; a rank that was killed leaves no
record. An attempt makes progress by a checkpoint; torchrun's `--max-restarts` counts all attempts.
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
from dtron.run.process import Place

log = logging.getLogger("dtron")
LOST_PEER, PEER_FAILED = "lost another rank", "another rank has failed"
STOPPED = "stopped by a signal"
_NO_FAULT = (LOST_PEER, PEER_FAILED, STOPPED)
"""Why a rank ends that has no fault itself."""
_PARTS = (
    ("noticed", "stop", "until the others ended"),
    ("ended", "restart", "until they were started again"),
    ("launched", "import", "imports"),
    ("entered", "rendezvous", "rendezvous"),
    ("met", "model", "data and model"),
    ("built", "checkpoint", "checkpoint"),
    ("loaded", "first_step", "first step, with compilation"),
    ("stepped", "", ""),
)
"""Moments of a recovery, in their order; names of the part from each to the next, in metrics
(`recovery_import_seconds`) and in the log."""


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
    """This attempt and what the one before has left.

    Args:
        folder: the run's directory.
    """

    def __init__(self, folder: Path, place: Place) -> None:
        self._path, self._ends = folder / "attempt.json", folder / "ends"
        self._place, self._token = place, ""
        self._moments: dict[str, float] = {"launched": _started(), "entered": time.time()}
        self._cause, self._own_end = "", ""
        self._recording = threading.Lock()
        self._own: dict[str, Any] = {}

    def mark(self, moment: str) -> None:
        """Record the time of one of `_PARTS`."""
        self._moments.setdefault(moment, time.time())

    def met(self, token: str) -> None:
        """Record the rendezvous; no other attempt has its token."""
        self._token = token
        self.mark("met")

    def begin(self, step: int, most: int) -> None:
        """On rank 0, once it has the run directory: log why the last attempt ended, and count.

        Args:
            step: that this attempt goes on from.
            most: attempts in a row without progress; 0: any number.
        Raises:
            NoProgressError: there were so many.
        """
        if self._place.rank:
            return
        last, ends = _read(self._path, _Attempt), self._read_ends()
        ends = {r: end for r, end in ends.items() if last and end["token"] == last.token}
        job, idle = _job(self._place), 0
        if last:
            self._cause = why_ended(ends, last.hosts, self._place.world_size)
            times = [end["time"] for end in ends.values()]
            self._moments |= {"noticed": min(times), "ended": max(times)} if times else {}
            same = bool(job) and last.job == job and step <= last.step
            same = same and (self._place.attempt > 0 or "SLURM_JOB_ID" in os.environ)
            idle = last.without_progress + 1 if same else 0
            log.info("%s: %s", self._restart(), self._cause)
        self._own = {
            **{"token": self._token, "job": job, "step": step, "without_progress": idle},
            "hosts": [],
        }
        if most and idle >= most:
            raise NoProgressError(
                f"{idle} attempts in a row have ended without a new checkpoint (faults."
                f"max_attempts = {most}), the last one because {self._cause}; fix the cause, save "
                "more often (checkpoint.interval), or set faults.max_attempts = 0"
            )
        shutil.rmtree(self._ends, ignore_errors=True)
        self._write(self._path, self._own)

    def note_hosts(self, hosts: Sequence[str]) -> None:
        """On rank 0: record the host of each rank of this attempt."""
        self._write(self._path, {**self._own, "hosts": list(hosts)})

    def record_end(self, cause: str) -> None:
        """Record why this rank ends by an error; best effort. A fault of its own is never replaced
        by what followed from it, nor a signal by the loss of others, which were stopped too."""
        end = {"token": self._token, "host": platform.node(), "cause": cause, "time": time.time()}
        with self._recording:  # threads of signals and of the watchdog record too
            if cause in _NO_FAULT and self._own_end not in ("", LOST_PEER, PEER_FAILED):
                return
            self._own_end = cause
            self._write(self._ends / f"rank-{self._place.rank}.json", end)

    def finish(self) -> None:
        """On rank 0: record that this attempt has ended in order."""
        if self._place.rank == 0:
            with contextlib.suppress(OSError):
                self._path.unlink(missing_ok=True)

    def recovered(self) -> dict[str, float]:
        """After the first step: log the seconds of the recovery by part, and return them as fields
        of metrics; no fields if the last attempt ended in order."""
        self.mark("stepped")
        if not self._cause:
            return {}
        parts = seconds_of(self._moments)
        labels = {name: label for _, name, label in _PARTS}
        listed = ", ".join(f"{seconds:.1f} s {labels[name]}" for name, seconds in parts.items())
        log.info("recovered in %.1f s: %s", sum(parts.values()), listed)
        self._cause = ""
        each = {f"recovery_{name}_seconds": seconds for name, seconds in parts.items()}
        return {"recovery_seconds": sum(parts.values()), **each}

    def _restart(self) -> str:
        most = os.environ.get("TORCHELASTIC_MAX_RESTARTS")
        if not self._place.attempt:
            return "the last attempt did not end in order"
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
    """Why an attempt ended, by its ranks' records: a rank's own error, else those without one.

    Args:
        hosts: of each rank; empty: it ended before ranks had met.
    """
    own = {rank: end for rank, end in ends.items() if end.get("cause") not in _NO_FAULT}
    if own:
        rank, end = min(own.items(), key=lambda item: item[1]["time"])
        return f"rank {rank} on host {end.get('host')}: {end.get('cause')}"
    n = len(hosts) or world_size
    silent = [rank for rank in range(n) if rank not in ends]
    lost = sorted(rank for rank, end in ends.items() if end.get("cause") == LOST_PEER)
    if lost and not silent:
        who = "all ranks" if len(lost) == n else _listed(lost)
        return f"the network failed: {who} lost connections, and no rank was killed"
    if len(silent) in (0, n):
        return "all ranks were stopped"
    where = defaultdict[str, list[int]](list)
    for rank in silent:
        where[hosts[rank] if hosts else ""].append(rank)
    listed = [
        _listed(ranks) + (f" on host {host}" if host else "") for host, ranks in where.items()
    ]
    return f"{' and '.join(listed)} {'was' if len(silent) == 1 else 'were'} killed"


def seconds_of(moments: Mapping[str, float]) -> dict[str, float]:
    """Seconds by part, of the moments that are known; clocks of hosts may differ a little."""
    known = [(moments[moment], part) for moment, part, _ in _PARTS if moment in moments]
    pairs = itertools.pairwise(known)
    return {part: max(0.0, later - at) for (at, part), (later, _) in pairs}


def _listed(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
    return f"rank {shown}" if len(ranks) == 1 else f"ranks {shown}"


def _job(place: Place) -> str:
    """Name of the job that starts attempts, from Slurm or torchrun: restarts are counted in it."""
    slurm = os.environ.get("SLURM_JOB_ID")
    return f"slurm {slurm}" if slurm else place.job


def _started() -> float:
    """Start time of this process, in seconds since the epoch."""
    if sys.platform != "linux":
        return time.time()
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    since_boot = ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - time.clock_gettime(time.CLOCK_BOOTTIME) + since_boot


def _read(path: Path, kind: type[_Record]) -> _Record | None:
    """A record that an earlier attempt left; None: there is none, or it is damaged."""
    try:
        return TypeAdapter(kind).validate_python(parse(read_text(path, MB)))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        why = first_failure(error)
    except (OSError, ValueError) as error:
        why = cause_of(error, path)
    log.warning("%s is damaged and not used: %s", path, why)
    return None
