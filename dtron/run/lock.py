"""The lock of a run directory: one run at a time writes there.

Rank 0 holds an exclusive lock (flock) on RUN/lock until its process ends, on this host or another
one that shares the file system. The file names that process. Other ranks read the directory only
after rank 0 has the lock.
"""

import contextlib
import datetime
import fcntl
import json
import logging
import os
import platform
import stat
import time
from pathlib import Path
from typing import IO

from dtron.errors import ConfigError, PeerError
from dtron.io.untrusted import MB, parse, read_text
from dtron.run.process import Place
from dtron.run.rendezvous import Rendezvous

log = logging.getLogger("dtron")
_POLL_SECONDS = 0.1


class RunLock:
    """Wait until no other run uses a directory, and keep it.

    Args:
        wait_seconds: how long to wait for another run to end.
    Raises:
        ConfigError: on rank 0: the other run has not ended; names its host and process.
        PeerError: on the other ranks likewise.
    """

    def __init__(self, directory: Path, rendezvous: Rendezvous, wait_seconds: float) -> None:
        self._path = directory / "lock"
        self._file: IO[bytes] | None = None
        self._made = not directory.exists()
        place, held = rendezvous.place, "no"
        try:
            if place.rank == 0:
                self._acquire(place, wait_seconds)
                held = "yes"
        except OSError as error:  # not writable, which `preflight` reports; or without locks
            held = "yes"
            if self._file is not None:
                log.warning("%s cannot be locked (%s); run only one run here", directory, error)
        finally:
            held = rendezvous.broadcast_from_rank_0("lock", held, wait_seconds)
        if held != "yes":
            raise PeerError("rank 0 was refused the run directory")

    def release(self, started: bool = True) -> None:
        """Let another run in.

        Args:
            started: false: the run was refused, and a directory that was made for it is removed.
        """
        if self._file is None:
            return
        if self._made and not started:
            self._path.unlink(missing_ok=True)
            if not any(self._path.parent.iterdir()):
                self._path.parent.rmdir()
        else:
            with contextlib.suppress(OSError):  # no regular file
                self._file.truncate(0)
        self._file.close()
        self._file = None

    def _acquire(self, place: Place, wait_seconds: float) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        deadline, waited = time.monotonic() + wait_seconds, False
        while True:
            self._file = _open(self._path)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if _is(self._file, self._path):
                    break
            except BlockingIOError:
                if time.monotonic() >= deadline:
                    raise ConfigError(
                        f"run.dir = {str(self._path.parent)!r} is in use by {_owner(self._path)}; "
                        "stop that run or set another run.dir"
                    ) from None
            if not waited:
                log.info("%s is in use by %s; waiting", self._path.parent, _owner(self._path))
                waited = True
            self._file.close()
            time.sleep(_POLL_SECONDS)
        owner = {
            "host": platform.node(),
            "pid": os.getpid(),
            "job": os.environ.get("SLURM_JOB_ID", place.job),
            "since": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        }
        self._file.truncate(0)
        self._file.write((json.dumps(owner) + "\n").encode())


def _open(path: Path) -> IO[bytes]:
    """Open or make the file, without waiting for the reader of a FIFO."""
    flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NONBLOCK | os.O_CLOEXEC
    file = os.fdopen(os.open(path, flags, 0o666), "ab", buffering=0)
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise ConfigError(f"{path} is not a regular file; remove it")
    return file


def _owner(path: Path) -> str:
    found = _read(path)
    job = f", job {found['job']}" if found.get("job") else ""
    if not found:
        return "another run"
    return (
        f"process {found.get('pid')} on host {found.get('host')}{job}, since {found.get('since')}"
    )


def _read(path: Path) -> dict[str, object]:
    try:
        found = parse(read_text(path, MB))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _is(file: IO[bytes], path: Path) -> bool:
    """Whether the file that is locked is still the one at the path."""
    try:
        return os.path.samestat(os.fstat(file.fileno()), os.stat(path))
    except FileNotFoundError:
        return False
