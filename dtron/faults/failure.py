"""Which rank has failed first, in the store of the process group: that one prints its error.

The ranks that wait for it end by broken connections or by torchrun's SIGTERM; they look here and
end without a word. A run without a failure neither writes nor reads it.
"""

import datetime
import os
import re
import socket

import torch.distributed as dist

_KEY = "dtron/failed"
_SECONDS = 5
"""How long the store may take to answer: the rank that has it may be the one that is gone."""

_LOST = re.compile(
    "connection closed by peer|connection reset by peer|broken pipe|connection refused|"
    "remote process exited|ncclRemoteError|failed to recv|socket closed",
    re.IGNORECASE,
)
"""Of the errors of gloo, NCCL and torch's stores."""


def is_of_lost_peer(error: BaseException) -> bool:
    """Whether a connection to another rank has broken: that one has failed or is gone."""
    return isinstance(error, RuntimeError) and _LOST.search(str(error)) is not None


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
        try:
            store = self._store()
            first = int(store.compare_set(self._key, "", str(self._rank))) if store else self._rank
        except RuntimeError:
            return True
        return first == self._rank

    def reported_by_peer(self) -> bool:
        """Whether another rank has claimed a failure."""
        try:
            store = self._store()
            return store is not None and store.check([self._key])
        except RuntimeError:
            return False

    def _store(self) -> dist.TCPStore | None:
        """A new connection: the process group's is in use while another thread waits."""
        if not self._has_store:
            return None
        address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        return connect_to_store(address, port, datetime.timedelta(seconds=_SECONDS))


def connect_to_store(host: str, port: int, timeout: datetime.timedelta) -> dist.TCPStore:
    """A client of a store.

    Raises:
        RuntimeError: nobody listens there, of which TCPStore would report at length.
    """
    try:
        socket.create_connection((host, port), _SECONDS).close()
    except OSError as error:
        raise RuntimeError(f"no store at {host}:{port}: {error}") from error
    return dist.TCPStore(host, port, None, False, timeout, wait_for_workers=False)
