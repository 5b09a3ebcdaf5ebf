"""Rendezvous of the ranks of one attempt: a store of their own, whatever earlier attempts left.

torchrun's agents lend the ranks of all attempts one store (TORCHELASTIC_USE_AGENT_STORE), so that a
restarted rank reads addresses of the attempt before (with NCCL its unique id, pytorch #135712).
Here that store only introduces ranks to each other. Rank 0 of each attempt opens a new store. Every
other rank writes a nonce to the agents' store; rank 0 answers it with the address of its store, and
again when a nonce changes, as those of earlier attempts do. An answer with a rank's own nonce comes
from a rank 0 that is at this rendezvous: the rank connects and acknowledges in the new store, and
all begin once all have. No address of an earlier attempt is ever used.

Without agents (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, srun, mpirun) rank 0 opens its store at
MASTER_PORT, which then introduces the ranks as well.
"""

import datetime
import ipaddress
import json
import logging
import os
import socket
import time
import uuid

import torch.distributed as dist

from dtron.errors import ConfigError, DtronError, PeerError, RankError
from dtron.faults.failure import connect_to_store, within
from dtron.run.process import Place, environment_integer

log = logging.getLogger("dtron")
_RANK_0, _NONCE, _ANSWER = "dtron/rank-0", "dtron/nonce", "dtron/answer"
"""Keys of the store that introduces ranks: the token of rank 0; by rank."""
_ACKNOWLEDGED, _COMPLETE = "acknowledged", "complete"
"""Keys of the store of an attempt: by rank; all ranks have acknowledged."""
_POLL_SECONDS = 0.1
_LATER_SECONDS = 30
"""Additional wait of the other ranks: rank 0 gives up first and names the missing ranks."""
_PORT_TRIES, _PORT_SECONDS = 4, 2.0
"""How often rank 0 tries to open MASTER_PORT, and the pause between. torchrun finds a port that is
free and closes it again; until rank 0 has started, a short-lived connection may take it."""


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

    def broadcast_from_rank_0(self, name: str, value: str = "", seconds: float = 0) -> str:
        """A value that rank 0 gives, on all ranks.

        Args:
            name: no other value of this attempt has it.
            seconds: that rank 0 may take, besides the time-out.
        Raises:
            PeerError: rank 0 has ended.
            RankError: rank 0 gives no value in time.
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
        store, seconds = self.store, self.timeout_seconds + seconds + _LATER_SECONDS
        try:
            return within(seconds, lambda: _await(store, [name], seconds))[0]
        except TimeoutError:
            raise RankError(
                f"rank {self.place.rank} has not got {name!r} from rank 0 within {seconds:.0f} "
                "seconds; look at the log of rank 0"
            ) from None
        except RuntimeError as error:
            raise PeerError(f"rank 0 has ended: {_line(error)}") from error

    def gather_at_rank_0(self, name: str, value: str) -> list[str]:
        """The values of all ranks, on rank 0; empty on the others.

        Args:
            name: no other value of this attempt has it.
        Raises:
            RankError: a rank gives no value in time.
        """
        place, store = self.place, self.store
        if place.world_size == 1:
            return [value]
        if store is None:
            values = [""] * place.world_size
            dist.all_gather_object(values, value)
            return values if place.rank == 0 else []
        if place.rank:
            store.set(f"{name}/{place.rank}", value)
            return []
        names = [f"{name}/{rank}" for rank in range(1, place.world_size)]
        seconds = self.timeout_seconds + _LATER_SECONDS
        try:
            return [value, *within(seconds, lambda: _await(store, names, seconds))]
        except (TimeoutError, RuntimeError):
            late = [str(rank) for rank, key in enumerate(names, 1) if not store.check([key])]
            raise RankError(
                f"ranks {', '.join(late)} have not sent {name!r} to rank 0 within {seconds:.0f} "
                "seconds; look at the logs of the hosts where they run"
            ) from None

    def close(self) -> None:
        """Let the store go: the process may meet others again."""
        self.store = None


def _await(store: dist.Store, names: list[str], seconds: float) -> list[str]:
    """The values of some names, for which others give up first."""
    store.wait(names, datetime.timedelta(seconds=seconds + _LATER_SECONDS))
    return [value.decode() for value in store.multi_get(names)]


def meet(place: Place, timeout_seconds: int) -> Rendezvous:
    """Find the ranks of this attempt; all of them call it.

    Raises:
        ConfigError: MASTER_ADDR or MASTER_PORT is not set.
        RankError: MASTER_PORT is in use, or ranks have not come in time.
    """
    if place.world_size == 1:
        return Rendezvous(place, dist.HashStore())
    if dist.is_initialized():
        found = Rendezvous(place, None)
        found.token = found.broadcast_from_rank_0("token", uuid.uuid4().hex)
        return found
    meeting = _Meeting(place, timeout_seconds)
    seconds = timeout_seconds + (_LATER_SECONDS if place.rank else 0)
    try:
        store, token = within(seconds, meeting.hold)
    except TimeoutError:
        raise RankError(
            f"{meeting.lacks} within {seconds} seconds (parallel.timeout_seconds); look at the "
            "logs of the hosts where they run"
        ) from None
    finally:
        meeting.over = True
    return Rendezvous(place, store, token, timeout_seconds)


class _Meeting:
    """One rank on its way to the others; its methods run in a thread that may be abandoned."""

    def __init__(self, place: Place, timeout_seconds: int) -> None:
        self.place, self.timeout = place, datetime.timedelta(seconds=timeout_seconds)
        self.agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.master = _master()
        self.over = False
        self.lacks = f"rank {place.rank} has not reached {self.master[0]}:{self.master[1]}"
        """The error, if the time is over."""

    def hold(self) -> tuple[dist.Store, str]:
        """Find the others, again where a store is not there yet, or its process ends.

        Returns:
            The store, and the token of this attempt.
        """
        _warn_unless_resolved(*self.master)
        while True:
            try:
                return self.join_store() if self.place.rank else self.host_store()
            except (RuntimeError, OSError) as error:
                if self.over or isinstance(error, DtronError):
                    raise
                self.lacks = f"rank {self.place.rank} has not met the others ({_line(error)})"
                time.sleep(_POLL_SECONDS)

    def host_store(self) -> tuple[dist.Store, str]:
        """On rank 0: open a store and wait until all others have acknowledged."""
        host, port = (_own_address(), 0) if self.agents else self.master
        opened, token = self._open(host, port), uuid.uuid4().hex
        agents = connect_to_store(*self.master, self.timeout) if self.agents else opened
        store = dist.PrefixStore(token, opened)  # another run of this process may be in it
        agents.set(_RANK_0, token)
        self._answer(agents, store, [token, host, opened.port])
        store.set(_COMPLETE, "")
        return store, token

    def _open(self, host: str, port: int) -> dist.TCPStore:
        mine = port != 0  # an earlier run of this process may hold MASTER_PORT
        for left in reversed(range(_PORT_TRIES)):
            try:
                return dist.TCPStore(host, port, None, True, self.timeout, False, multi_tenant=mine)
            except dist.DistNetworkError as error:
                if "EADDRINUSE" not in str(error):
                    raise
            if left and not self.over:
                time.sleep(_PORT_SECONDS)
        raise RankError(
            f"MASTER_PORT = {port} is in use on this host by another process; set another port, "
            "the same for all ranks"
        )

    def _answer(self, agents: dist.Store, store: dist.Store, answer: list) -> None:
        """Answer nonces until all ranks have acknowledged."""
        answered, late = dict[int, str](), list(range(1, self.place.world_size))
        while late:
            for rank in range(1, self.place.world_size):
                nonce = _read(agents, f"{_NONCE}/{rank}")
                if nonce != answered.get(rank, ""):
                    agents.set(f"{_ANSWER}/{rank}", json.dumps([nonce, *answer]))
                    answered[rank] = nonce
            if agents.get(_RANK_0).decode() != answer[0]:
                raise RankError("another rank 0 has started; this one ends")
            late = [rank for rank in late if not store.check([f"{_ACKNOWLEDGED}/{rank}"])]
            self.lacks = f"ranks {', '.join(map(str, late))} have not started"
            self._pause()

    def join_store(self) -> tuple[dist.Store, str]:
        """On the other ranks: ask for the store of this attempt's rank 0, and acknowledge it."""
        agents = connect_to_store(*self.master, self.timeout)
        rank, nonce = self.place.rank, uuid.uuid4().hex
        agents.set(f"{_NONCE}/{rank}", nonce)
        self.lacks = f"rank {rank} has not found rank 0"
        while not (answer := _read(agents, f"{_ANSWER}/{rank}")).startswith(f'["{nonce}"'):
            self._pause()
        _, token, host, port = json.loads(answer)
        self.lacks = f"rank {rank} has found rank 0 at {host}:{port}, which has not begun"
        store = dist.PrefixStore(token, connect_to_store(host, port, self.timeout))
        store.set(f"{_ACKNOWLEDGED}/{rank}", "")
        _await(store, [_COMPLETE], self.timeout.total_seconds())
        return store, token

    def _pause(self) -> None:
        if self.over:
            raise RuntimeError("the time is over")
        time.sleep(_POLL_SECONDS)


def _read(store: dist.Store, name: str) -> str:
    """A value that is there, else the empty string."""
    return store.get(name).decode() if store.check([name]) else ""


def _line(error: Exception) -> str:
    """Without frames of C++."""
    return str(error).partition("\n")[0]


def _master() -> tuple[str, int]:
    address = os.environ.get("MASTER_ADDR", "")
    if not address or not os.environ.get("MASTER_PORT"):
        raise ConfigError(
            "WORLD_SIZE > 1 needs MASTER_ADDR and MASTER_PORT, where rank 0 is reached; start "
            "ranks with torchrun, or set both"
        )
    fix = "set a free port of the host of rank 0, the same for all ranks"
    return address, environment_integer("MASTER_PORT", 0, 0, 65535, fix)


def _warn_unless_resolved(address: str, port: int) -> None:
    """Warn where MASTER_ADDR has no address here yet; the rendezvous tries again in its time."""
    try:
        socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        log.warning("MASTER_ADDR = %r cannot be resolved on this host: %s", address, error)


def _own_address() -> str:
    """Address of this host as seen by hosts that reach MASTER_ADDR."""
    master, port = _master()
    family, _, _, _, address = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        own = probe.getsockname()[0]
    # A host's own name is often 127.0.1.1 in its /etc/hosts, and a real address elsewhere.
    local = own == address[0] or ipaddress.ip_address(own).is_loopback
    return master if local else own
