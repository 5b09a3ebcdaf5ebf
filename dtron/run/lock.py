"""Locks of a run directory, so that only one run writes to it.

    RUN/lock     locked by rank 0 (flock) until its process ends; contains its host and process id
    RUN/ranks    a record per rank with host and process id, locked until the rank's process ends

The locks work across hosts that share the file system. At a start, rank 0 locks RUN/lock and waits
until no record of RUN/ranks is locked, since ranks of an earlier start may outlive their rank 0.
Other ranks read the directory only after that.
"""

import contextlib
import datetime
import fcntl
import json
import logging
import os
import platform
import stat
import struct
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from dtron.config.schema import MAX_RANKS
from dtron.errors import ConfigError, PeerError, cause_of
from dtron.io.filesystem import open_own
from dtron.io.untrusted import MB, parse, read_text
from dtron.run.process import Place
from dtron.run.rendezvous import Rendezvous

log = logging.getLogger("dtron")
_POLL_SECONDS = 0.1
_RECORD = 512
_MAX_LISTED = 4
_FLOCK = struct.Struct("hhqqi4x")
"""`struct flock` of 64-bit Linux: l_type, l_whence, l_start, l_len, l_pid."""
_HAS_RECORD_LOCKS = hasattr(fcntl, "F_OFD_SETLK") and sys.platform == "linux"


class RunLock:
    """Lock of a run directory; waits until no rank of another start uses the directory.

    Args:
        wait_seconds: maximum time to wait for ranks of another start to end.
    Raises:
        ConfigError: on rank 0, if ranks of another start still run; names hosts and processes.
        PeerError: on the other ranks, in the same case.
    """

    def __init__(self, directory: Path, rendezvous: Rendezvous, wait_seconds: float) -> None:
        self._path, self._ranks = directory / "lock", RankLocks(directory / "ranks")
        self._file: IO[bytes] | None = None
        self._created = not directory.exists()
        place, acquired = rendezvous.place, "no"
        try:
            if place.rank == 0:
                self._acquire(place, wait_seconds)
                acquired = "yes"
        except OSError as error:  # not writable (`preflight` reports it), or locking fails
            acquired = "yes"
            if self._file is not None:
                log.warning(
                    "%s cannot be locked (%s); do not start another run in it", directory, error
                )
        finally:
            acquired = rendezvous.broadcast_from_rank_0("lock", acquired, wait_seconds)
        if acquired != "yes":
            raise PeerError("rank 0 cannot lock the run directory")
        self._ranks.acquire(place)

    def release(self, started: bool = True) -> None:
        """Release the lock; every rank calls it.

        Args:
            started: whether the run has started; if not, a directory that was created for the run
                is removed.
        """
        self._ranks.release()
        if self._file is None:
            return
        if self._created and not started:
            self._path.unlink(missing_ok=True)
            self._ranks.path.unlink(missing_ok=True)
            if not any(self._path.parent.iterdir()):
                self._path.parent.rmdir()
        else:
            with contextlib.suppress(OSError):  # not a regular file
                self._file.truncate(0)
        self._file.close()
        self._file = None

    def _acquire(self, place: Place, wait_seconds: float) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        deadline, waited = time.monotonic() + wait_seconds, False
        while owner := self._lock() or self._ranks.owners():
            if time.monotonic() >= deadline:
                self._close()
                raise ConfigError(
                    f"run.dir = {str(self._path.parent)!r} is in use by {owner}; stop that run or "
                    "set another run.dir"
                )
            if not waited:
                log.info("%s is in use by %s; waiting", self._path.parent, owner)
                waited = True
            time.sleep(_POLL_SECONDS)
        assert self._file is not None, "it is locked"
        if last := _owner(_read(self._path)):
            log.info("%s: %s has ended; its lock is taken over", self._path.parent, last)
        self._file.truncate(0)
        self._file.write((json.dumps(_process(place)) + "\n").encode())
        self._ranks.clear()

    def _lock(self) -> str:
        """Try to lock the file; return the process that holds the lock, or "" on success."""
        if self._file is not None:
            return ""
        file = _open(self._path)
        try:
            self._file = file  # if flock fails, `__init__` sees that the file could be opened
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_same_file(file, self._path):
                return ""
        except BlockingIOError:
            pass
        self._close()
        return _owner(_read(self._path)) or "another run"

    def _close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


class RankLocks:
    """File with a record per rank: its host and process id, locked while the rank is alive.

    Record R, of `_RECORD` bytes, belongs to rank R. The locks are Linux's open file description
    locks (F_OFD_SETLK). A lock ends with its process, and can be tested without being acquired. On
    other systems nothing is locked.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None

    def acquire(self, place: Place) -> None:
        """Lock and write this rank's record; log a warning if the record cannot be locked."""
        if not _HAS_RECORD_LOCKS:
            return
        try:
            self._file = _open(self.path, os.O_RDWR)
            at, record = place.rank * _RECORD, json.dumps(_process(place))
            fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, _flock(at, _RECORD))
            os.pwrite(
                self._file.fileno(), record[: _RECORD - 1].ljust(_RECORD - 1).encode() + b"\n", at
            )
        except (OSError, ConfigError) as error:  # for a special file, rank 0 raises an error
            log.warning(
                "%s: rank %d cannot lock its record (%s); another start of the run will "
                "not wait until this rank has exited",
                self.path,
                place.rank,
                cause_of(error, self.path),
            )

    def owners(self) -> str:
        """Describe the ranks that hold a lock, with host and process; "" if no rank does."""
        if not _HAS_RECORD_LOCKS:
            return ""
        with _open(self.path, os.O_RDWR) as file:
            found = [_owner(_record(file, rank), f"rank {rank}, ") for rank in _locked(file)]
        more = f" and {len(found) - _MAX_LISTED} more" if len(found) > _MAX_LISTED else ""
        return "; ".join(found[:_MAX_LISTED]) + more

    def clear(self) -> None:
        """Delete the records of earlier ranks, whose locks have ended."""
        if _HAS_RECORD_LOCKS:
            with _open(self.path, os.O_RDWR) as file:
                file.truncate(0)

    def release(self) -> None:
        """Release this rank's lock."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _locked(file: IO[bytes], first: int = 0, n: int = MAX_RANKS) -> Iterator[int]:
    """Yield, in order, the ranks in [first, first + n) whose records other processes have locked.

    Halve the range recursively, since F_OFD_GETLK returns one arbitrary lock of a range. Also
    search beyond the end of the file, since a rank locks its record before it writes the record.
    """
    found = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _flock(first * _RECORD, n * _RECORD))
    if _FLOCK.unpack(found)[0] == fcntl.F_UNLCK:
        return
    if n == 1:
        yield first
        return
    yield from _locked(file, first, n // 2)
    yield from _locked(file, first + n // 2, n - n // 2)


def _flock(start: int, length: int) -> bytes:
    """Pack a `struct flock` of an exclusive lock."""
    return _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, start, length, 0)


def _record(file: IO[bytes], rank: int) -> dict[str, Any]:
    return _parsed(os.pread(file.fileno(), _RECORD, rank * _RECORD).decode(errors="replace"))


def _process(place: Place) -> dict[str, Any]:
    return {
        "host": platform.node(),
        "pid": os.getpid(),
        "job": os.environ.get("SLURM_JOB_ID", place.job),
        "since": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def _open(path: Path, flags: int = os.O_RDWR | os.O_APPEND) -> IO[bytes]:
    """Open or create a file. Raises ConfigError: the path is a link or a special file."""
    try:
        return open_own(path, flags)
    except OSError:
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            raise ConfigError(f"{path} is not a regular file; remove it") from None
        raise


def _owner(found: dict[str, Any], rank: str = "") -> str:
    """Describe the process of a record, after the prefix `rank`; an empty record: only the rank."""
    if not found:
        return rank.removesuffix(", ")
    job = f", job {found['job']}" if found.get("job") else ""
    process = f"process {found.get('pid')} on host {found.get('host')}{job}"
    return f"{rank}{process}, since {found.get('since')}"


def _read(path: Path) -> dict[str, Any]:
    try:
        return _parsed(read_text(path, MB))
    except (OSError, ValueError):
        return {}


def _parsed(text: str) -> dict[str, Any]:
    try:
        found = parse(text)
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _is_same_file(file: IO[bytes], path: Path) -> bool:
    """Whether the path still leads to the open file."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False
