"""Rendezvous of the ranks of one attempt: a store of their own, whatever earlier attempts left.

torchrun's agents lend the ranks of all attempts one store (TORCHELASTIC_USE_AGENT_STORE), so that a
restarted rank reads addresses of the attempt before (with NCCL its unique id, pytorch #135712).
Here rank 0 of each attempt opens a store and announces its address in the agents' store. The other
ranks connect to each address they find and write a random word there; the store that answers with
that word is this attempt's, since only a rank 0 that is at its rendezvous answers. Addresses of
earlier attempts are refused, or stay silent until a new one is announced.

Without agents (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, srun, mpirun) rank 0 opens a store at
MASTER_PORT, which no earlier attempt can have used.
"""

import contextlib
import datetime
import json
import os
import socket
import time
import uuid
from typing import NamedTuple

import torch.distributed as dist

from dtron.errors import PeerError, RankError
from dtron.faults.failure import connect_to_store
from dtron.runtime import Place

_ANNOUNCED = "dtron/rendezvous"
_WELCOME = "welcome"
_POLL_SECONDS = 0.1


class Address(NamedTuple):
    """Where rank 0 of an attempt has opened a store."""

    host: str
    port: int


class Rendezvous:
    """The store that the ranks of one attempt share.

    Args:
        store: None: the default process group is there already, and is used.
        token: the same on all ranks of this attempt, and no other's.
        timeout_seconds: for a value of rank 0.
    """

    def __init__(
        self, place: Place, store: dist.Store | None, token: str = "", timeout_seconds: float = 0
    ) -> None:
        self.place, self.store, self.token = place, store, token
        self.timeout_seconds = timeout_seconds

    def of_rank_0(self, name: str, value: str = "", seconds: float = 0) -> str:
        """A value that rank 0 gives, on all ranks.

        Args:
            name: no other value of this attempt has it.
            seconds: that rank 0 may take, besides the time-out.
        Raises:
            PeerError: rank 0 has ended, or gives none in time.
        """
        if self.place.world_size == 1:
            return value
        if self.store is None:
            values = [value]
            dist.broadcast_object_list(values, device=self.place.device)
            return values[0]
        if self.place.rank == 0:
            self.store.set(name, value)
            return value
        try:
            if _wait(self.store, [name], self.timeout_seconds + seconds):
                return self.store.get(name).decode()
        except RuntimeError as error:
            raise PeerError(f"rank 0 has ended: {error}") from error
        raise PeerError(f"rank 0 has given no {name} in time")


def meet(place: Place, timeout_seconds: int) -> Rendezvous:
    """Find the ranks of this attempt; all of them call it.

    Raises:
        RankError: MASTER_PORT is in use, or ranks have not come in time.
    """
    if place.world_size == 1:
        return Rendezvous(place, dist.HashStore())
    timeout, lent = datetime.timedelta(seconds=timeout_seconds), "TORCHELASTIC_USE_AGENT_STORE"
    if dist.is_initialized() or os.environ.get(lent) != "True":
        store = None if dist.is_initialized() else _store_at_master_port(place, timeout)
        found = Rendezvous(place, store, "", timeout_seconds)
        found.token = found.of_rank_0("token", uuid.uuid4().hex)
        return found
    agents = connect_to_store(*_master(), timeout)
    store, token = (_open if place.rank == 0 else _find)(place, timeout, agents)
    return Rendezvous(place, store, token, timeout_seconds)


def _master() -> tuple[str, int]:
    return os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])


def _store_at_master_port(place: Place, timeout: datetime.timedelta) -> dist.Store:
    address, port = _master()
    try:
        return dist.TCPStore(
            address, port, place.world_size, place.rank == 0, timeout, False, multi_tenant=True
        )
    except dist.DistNetworkError as error:
        if "EADDRINUSE" not in str(error):
            raise
        raise RankError(
            f"MASTER_PORT = {port} is in use on this host by another process; set another port, "
            "the same for all ranks"
        ) from None


def _open(place: Place, timeout: datetime.timedelta, agents: dist.Store) -> tuple[dist.Store, str]:
    """Of rank 0: announce a store, and answer the others once all of them have come.

    Returns:
        The store, and the token of this attempt.
    """
    host = _own_address()
    store = dist.TCPStore(host, 0, place.world_size, True, timeout, wait_for_workers=False)
    agents.set(_ANNOUNCED, json.dumps([host, store.port]))
    names = [f"word/{rank}" for rank in range(1, place.world_size)]
    if not _wait(store, names, timeout.total_seconds()):
        late = ", ".join(name.removeprefix("word/") for name in names if not store.check([name]))
        raise RankError(
            f"ranks {late} have not started within {timeout.total_seconds():.0f} seconds "
            "(parallel.timeout_seconds)"
        )
    token, words = uuid.uuid4().hex, [word.decode() for word in store.multi_get(names)]
    store.set(_WELCOME, json.dumps([token, *words]))
    return store, token


def _wait(store: dist.Store, names: list[str], seconds: float) -> bool:
    """Whether names are in a store in time; unlike in its own `wait`, signals are answered."""
    deadline = time.monotonic() + seconds
    while not (found := store.check(names)) and time.monotonic() < deadline:
        time.sleep(_POLL_SECONDS)
    return found


def _find(place: Place, timeout: datetime.timedelta, agents: dist.Store) -> tuple[dist.Store, str]:
    """Of the other ranks: the store whose rank 0 answers this rank's word, and the token."""
    word, asked = uuid.uuid4().hex, dict[Address, dist.TCPStore]()
    deadline = time.monotonic() + timeout.total_seconds()
    while time.monotonic() < deadline:
        found = Address(*json.loads(agents.get(_ANNOUNCED))) if agents.check([_ANNOUNCED]) else None
        if found and found not in asked:
            with contextlib.suppress(RuntimeError):  # asked again until it answers
                store = connect_to_store(*found, timeout)
                store.set(f"word/{place.rank}", word)
                asked[found] = store
        for found, store in list(asked.items()):
            try:
                if not store.check([_WELCOME]):
                    continue
                token, *words = json.loads(store.get(_WELCOME))
            except RuntimeError:  # its rank 0 is gone
                del asked[found]
                continue
            if word in words:
                return store, token
        time.sleep(_POLL_SECONDS)
    seen = ", ".join(f"{each.host}:{each.port}" for each in asked) or "none"
    raise RankError(
        f"rank {place.rank} has not found rank 0 within {timeout.total_seconds():.0f} seconds "
        f"(parallel.timeout_seconds); stores that do not answer: {seen}"
    )


def _own_address() -> str:
    """Of this host, as the hosts see it that reach MASTER_ADDR."""
    master, port = _master()
    family, _, _, _, address = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        own = probe.getsockname()[0]
    return master if own == address[0] else own
