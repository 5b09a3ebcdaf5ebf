"""Record which rank failed first, in torch's key-value store; only that rank prints its error.

Other ranks then fail with broken connections, or get SIGTERM from torchrun. They read the record
and end without a message. Without a failure, the store is not used.
"""

import datetime
import os
import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

import torch.distributed as dist

_KEY = "dtron/failed"
_SECONDS = 5
"""Time-out of requests to the store, since the process of the store may have failed."""

_BROKEN = r"(?:Connection (?:closed|reset) by peer|Broken pipe|Connection refused|Socket closed)\b"
_GLOO = re.compile(rf"\[\S+\.cc:\d+\] (?:[^\n]*: )?{_BROKEN}", re.IGNORECASE)
"""Matches `[.../tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4711` and similar errors."""
_NCCL = re.compile(
    r"^ncclRemoteError: "
    r"|\bNCCL error\b[^\n]*[:,] remote process exited or there was a network error",
    re.MULTILINE,
)
_STORE = re.compile(rf"^(?:{_BROKEN}|Failed to (?:recv, got|send, sent) 0 bytes\b)", re.IGNORECASE)
"""Errors of a TCPStore's socket; the message begins with the system's error."""
_T = TypeVar("_T")


def is_of_lost_peer(error: BaseException) -> bool:
    """Whether an error is a broken connection to another rank: the rank or the network failed.

    gloo raises plain RuntimeErrors. Subclasses outside of torch.distributed have other causes, such
    as a broken pipe to a compiler process.
    """
    if type(error) is not RuntimeError and not isinstance(error, dist.DistError):
        return False
    text = str(error)
    if isinstance(error, dist.DistNetworkError) and _STORE.search(text):
        return True
    if isinstance(error, dist.DistBackendError) and _NCCL.search(text):
        return True
    return _GLOO.search(text) is not None


class FirstFailure:
    """Record of the first failure of an attempt; does nothing without a store (MASTER_ADDR).

    Args:
        attempt: unique token of this start or restart of the run.
    """

    def __init__(self, rank: int, world_size: int, attempt: str) -> None:
        self._rank, self._key = rank, f"{_KEY}/{attempt}"
        self._has_store = world_size > 1 and "MASTER_ADDR" in os.environ

    def claim(self) -> bool:
        """Record that this rank failed; return whether it failed first and must print its error."""
        if not self._has_store:
            return True
        try:
            mine = str(self._rank)
            return (
                within(_SECONDS, lambda: self._store().compare_set(self._key, "", mine))
                == mine.encode()
            )
        except (RuntimeError, TimeoutError, ValueError):
            return True

    def reported_by_peer(self) -> bool:
        """Whether a rank has recorded a failure."""
        if not self._has_store:
            return False
        try:
            return within(_SECONDS, lambda: self._store().check([self._key]))
        except (RuntimeError, TimeoutError, ValueError):
            return False

    def _store(self) -> dist.TCPStore:
        """Open a new connection, since another thread may be waiting in an existing connection."""
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return connect_to_store(address, port, datetime.timedelta(seconds=_SECONDS))


def connect_to_store(host: str, port: int, timeout: datetime.timedelta) -> dist.TCPStore:
    """Connect to a TCPStore. The call never returns if a process listens but does not answer.

    Args:
        timeout: time-out of later requests.
    Raises:
        RuntimeError: no process listens at the address; the message is shorter than TCPStore's.
    """
    short = datetime.timedelta(seconds=_SECONDS)
    try:
        socket.create_connection((host, port), _SECONDS).close()
    except (OSError, UnicodeError) as error:
        raise RuntimeError(f"no store at {host}:{port}: {error}") from error
    store = dist.TCPStore(host, port, None, False, short, wait_for_workers=False)
    store.set_timeout(timeout)
    return store


def within(seconds: float, call: Callable[[], _T]) -> _T:
    """Call a function in a thread, with a time-out; return its result.

    A request to torch's store never returns if the store's process is stopped. In the main thread,
    the request would block Python's signal handlers.

    Raises:
        TimeoutError: the call has not returned after `seconds`; it continues in its thread.
    """
    future = Future[_T]()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="store", daemon=True).start()
    return future.result(seconds)
