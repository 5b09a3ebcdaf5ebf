"""Which rank has failed first, in the store of the process group: that one prints its error.

The ranks that wait for it end by broken connections or by torchrun's SIGTERM; they look here and
end without a word. A run without a failure neither writes nor reads it.
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
"""Time-out of the store, whose rank may be the one that has failed."""

_BROKEN = r"(?:Connection (?:closed|reset) by peer|Broken pipe|Connection refused|Socket closed)\b"
_GLOO = re.compile(rf"\[\S+\.cc:\d+\] (?:[^\n]*: )?{_BROKEN}", re.IGNORECASE)
"""`[.../tcp/pair.cc:534] Connection closed by peer [10.0.0.1]:4711`, `[...] Read error ...: ...`"""
_NCCL = re.compile(
    r"^ncclRemoteError: "
    r"|\bNCCL error\b[^\n]*[:,] remote process exited or there was a network error",
    re.MULTILINE,
)
_STORE = re.compile(rf"^(?:{_BROKEN}|Failed to (?:recv, got|send, sent) 0 bytes\b)", re.IGNORECASE)
"""A socket of a TCPStore: the message begins with the system's error."""
_T = TypeVar("_T")


def is_of_lost_peer(error: BaseException) -> bool:
    """Whether a connection to another rank has broken: the rank has failed, or the network.

    gloo raises RuntimeError itself. Subclasses that are not of torch.distributed have other
    causes, such as a broken pipe to a process of the compiler.
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
    """The first failure of an attempt; without a store (MASTER_ADDR) there is none to find.

    Args:
        attempt: a word that no other attempt has.
    """

    def __init__(self, rank: int, world_size: int, attempt: str) -> None:
        self._rank, self._key = rank, f"{_KEY}/{attempt}"
        self._has_store = world_size > 1 and "MASTER_ADDR" in os.environ

    def claim(self) -> bool:
        """This rank has failed; whether it is the first one, which reports."""
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
        """Whether another rank has claimed a failure."""
        if not self._has_store:
            return False
        try:
            return within(_SECONDS, lambda: self._store().check([self._key]))
        except (RuntimeError, TimeoutError, ValueError):
            return False

    def _store(self) -> dist.TCPStore:
        """A new connection: the process group's is in use while another thread waits."""
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return connect_to_store(address, port, datetime.timedelta(seconds=_SECONDS))


def connect_to_store(host: str, port: int, timeout: datetime.timedelta) -> dist.TCPStore:
    """A client of a store; it never comes back where a process listens but does not answer.

    Args:
        timeout: of what the store is asked later.
    Raises:
        RuntimeError: nobody listens there, of which TCPStore would report at length.
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
    """Call in a thread, and return the result: torch's calls never return if the process of a
    store is stopped, and in the main thread they block signals.

    Raises:
        TimeoutError: it has not returned in time, and goes on in its thread.
    """
    future = Future[_T]()

    def run() -> None:
        try:
            future.set_result(call())
        except Exception as error:
            future.set_exception(error)

    threading.Thread(target=run, name="store", daemon=True).start()
    return future.result(seconds)
