"""Rendezvous of the ranks of one attempt (a start or restart of the run), with a new TCPStore.

torchrun shares its agents' TCPStore with the ranks of all attempts (TORCHELASTIC_USE_AGENT_STORE).
A restarted rank may therefore read addresses of the previous attempt, such as NCCL's unique id
(pytorch #135712). Here, the agents' store is used only for a handshake:

    1. Rank 0 opens a new store. Every other rank writes a nonce to the agents' store.
    2. Rank 0 answers each nonce with the address of the new store. If a nonce changes, rank 0
       answers again, since the first nonce may be of an earlier attempt.
    3. A rank that reads an answer with its nonce knows that rank 0 is alive. The rank connects to
       the new store and acknowledges in it. All ranks start once all have acknowledged.

If ranks do not use the agents' store (TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1, srun, mpirun), rank 0
opens the new store at MASTER_PORT, and the handshake also uses that store.
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
"""Keys of the handshake: token of rank 0; nonce and answer of each rank."""
_ACKNOWLEDGED, _COMPLETE = "acknowledged", "complete"
"""Keys of the attempt's store: acknowledgement of each rank; set once all have acknowledged."""
_POLL_SECONDS = 0.1
_EXTRA_SECONDS = 30
"""Added to the time-out of other ranks, so that rank 0 raises first and names missing ranks."""
_PORT_TRIES, _PORT_SECONDS = 4, 2.0
"""Number of tries of rank 0 to open MASTER_PORT, and seconds between tries. torchrun only checks
that the port is free; before rank 0 opens it, a short-lived connection may use the port."""


class Rendezvous:
    """The ranks of one attempt, and their key-value store.

    Args:
        store: the store; None: use the existing default process group instead.
        token: identifies this attempt, the same on all ranks.
        timeout_seconds: time-out for values from other ranks.
    """

    def __init__(
        self, place: Place, store: dist.Store | None, token: str = "", timeout_seconds: float = 0
    ) -> None:
        self.place, self.store, self.token = place, store, token
        self.timeout_seconds = timeout_seconds

    def broadcast_from_rank_0(self, name: str, value: str = "", seconds: float = 0) -> str:
        """Return rank 0's value on all ranks.

        Args:
            name: key of the value, unique in this attempt.
            seconds: added to the time-out, since rank 0 has to compute the value.
        Raises:
            PeerError: rank 0 has ended.
            RankError: rank 0 has not set the value in time.
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
        store, seconds = self.store, self.timeout_seconds + seconds + _EXTRA_SECONDS
        try:
            return within(seconds, lambda: _wait_for_keys(store, [name], seconds))[0]
        except (TimeoutError, dist.DistStoreError):
            raise RankError(
                f"rank {self.place.rank} has not received {name!r} from rank 0 within "
                f"{seconds:.0f} seconds; look at the log of rank 0"
            ) from None
        except RuntimeError as error:
            raise PeerError(f"rank 0 has ended: {_first_line(error)}") from error

    def gather_at_rank_0(self, name: str, value: str) -> list[str]:
        """Return the values of all ranks on rank 0; an empty list on other ranks.

        Args:
            name: key of the values, unique in this attempt.
        Raises:
            RankError: a rank has not set its value in time.
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
        seconds = self.timeout_seconds + _EXTRA_SECONDS
        try:
            return [value, *within(seconds, lambda: _wait_for_keys(store, names, seconds))]
        except (TimeoutError, RuntimeError):
            late = [str(rank) for rank, key in enumerate(names, 1) if not store.check([key])]
            raise RankError(
                f"ranks {', '.join(late)} have not sent {name!r} to rank 0 within {seconds:.0f} "
                "seconds; look at the logs of these ranks"
            ) from None

    def close(self) -> None:
        """Release the store, so that this process can do another rendezvous."""
        self.store = None


def _wait_for_keys(store: dist.Store, names: list[str], seconds: float) -> list[str]:
    """Wait for keys and return their values.

    The store's time-out is longer than `seconds`, so that the caller's time-out is reached first.
    """
    store.wait(names, datetime.timedelta(seconds=seconds + _EXTRA_SECONDS))
    return [value.decode() for value in store.multi_get(names)]


def meet(place: Place, timeout_seconds: int) -> Rendezvous:
    """Connect the ranks of this attempt; a collective.

    Raises:
        ConfigError: MASTER_ADDR or MASTER_PORT is not set.
        RankError: MASTER_PORT is in use, or ranks are missing after the time-out.
    """
    if place.world_size == 1:
        return Rendezvous(place, dist.HashStore())
    if dist.is_initialized():
        found = Rendezvous(place, None)
        found.token = found.broadcast_from_rank_0("token", uuid.uuid4().hex)
        return found
    handshake = _Handshake(place, timeout_seconds)
    seconds = timeout_seconds + (_EXTRA_SECONDS if place.rank else 0)
    try:
        store, token = within(seconds, handshake.run)
    except TimeoutError:
        raise RankError(
            f"{handshake.problem} within {seconds} seconds (parallel.timeout_seconds); look at the "
            "logs of all hosts"
        ) from None
    finally:
        handshake.ended = True
    return Rendezvous(place, store, token, timeout_seconds)


class _Handshake:
    """Handshake of one rank with the other ranks; runs in a thread, which may never end."""

    def __init__(self, place: Place, timeout_seconds: int) -> None:
        self.place, self.timeout = place, datetime.timedelta(seconds=timeout_seconds)
        self.agents = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        self.master = _master()
        self.ended = False
        self.problem = f"rank {place.rank} has not reached {self.master[0]}:{self.master[1]}"
        """Text of the error if the handshake times out."""

    def run(self) -> tuple[dist.Store, str]:
        """Run the handshake; retry if a store does not exist yet or the process of a store ends.

        Returns:
            The attempt's store and token.
        """
        _warn_unless_resolved(*self.master)
        while True:
            try:
                return self.join_store() if self.place.rank else self.host_store()
            except (RuntimeError, OSError) as error:
                if self.ended or isinstance(error, DtronError):
                    raise
                reason = _first_line(error)
                self.problem = f"rank {self.place.rank} has not reached the other ranks ({reason})"
                time.sleep(_POLL_SECONDS)

    def host_store(self) -> tuple[dist.Store, str]:
        """On rank 0: open a store and wait until all other ranks have acknowledged."""
        host, port = (_own_address(), 0) if self.agents else self.master
        opened, token = self._open(host, port), uuid.uuid4().hex
        agents = connect_to_store(*self.master, self.timeout) if self.agents else opened
        store = dist.PrefixStore(token, opened)  # an earlier run of this process may share `opened`
        agents.set(_RANK_0, token)
        self._answer_nonces(agents, store, [token, host, opened.port])
        store.set(_COMPLETE, "")
        return store, token

    def _open(self, host: str, port: int) -> dist.TCPStore:
        shared = port != 0  # an earlier run of this process may have opened MASTER_PORT
        for left in reversed(range(_PORT_TRIES)):
            try:
                return dist.TCPStore(
                    host, port, None, True, self.timeout, False, multi_tenant=shared
                )
            except dist.DistNetworkError as error:
                if "EADDRINUSE" not in str(error):
                    raise
            if left and not self.ended:
                time.sleep(_PORT_SECONDS)
        raise RankError(
            f"MASTER_PORT = {port} is in use on this host by another process; set another "
            "port, the same for all ranks"
        )

    def _answer_nonces(self, agents: dist.Store, store: dist.Store, answer: list) -> None:
        """Answer nonces of other ranks until all have acknowledged."""
        answered, late = dict[int, str](), list(range(1, self.place.world_size))
        while late:
            for rank in range(1, self.place.world_size):
                nonce = _read(agents, f"{_NONCE}/{rank}")
                if nonce != answered.get(rank, ""):
                    agents.set(f"{_ANSWER}/{rank}", json.dumps([nonce, *answer]))
                    answered[rank] = nonce
            if agents.get(_RANK_0).decode() != answer[0]:
                raise RankError("another rank 0 has started; this rank 0 ends")
            late = [rank for rank in late if not store.check([f"{_ACKNOWLEDGED}/{rank}"])]
            self.problem = f"ranks {', '.join(map(str, late))} have not started"
            self._pause()

    def join_store(self) -> tuple[dist.Store, str]:
        """On other ranks: get the address of rank 0's store, connect and acknowledge."""
        agents = connect_to_store(*self.master, self.timeout)
        rank, nonce = self.place.rank, uuid.uuid4().hex
        agents.set(f"{_NONCE}/{rank}", nonce)
        self.problem = f"rank {rank} has not found rank 0"
        while not (answer := _read(agents, f"{_ANSWER}/{rank}")).startswith(f'["{nonce}"'):
            self._pause()
        _, token, host, port = json.loads(answer)
        self.problem = f"rank {rank} has found rank 0 at {host}:{port}, which has not started"
        store = dist.PrefixStore(token, connect_to_store(host, port, self.timeout))
        store.set(f"{_ACKNOWLEDGED}/{rank}", "")
        _wait_for_keys(store, [_COMPLETE], self.timeout.total_seconds())
        return store, token

    def _pause(self) -> None:
        if self.ended:
            raise RuntimeError("the handshake has ended")
        time.sleep(_POLL_SECONDS)


def _read(store: dist.Store, name: str) -> str:
    """Return the value of a key; an empty string if the key is not set."""
    return store.get(name).decode() if store.check([name]) else ""


def _first_line(error: Exception) -> str:
    """Return an error's first line, without C++ frames."""
    return str(error).partition("\n")[0]


def _master() -> tuple[str, int]:
    address = os.environ.get("MASTER_ADDR", "")
    if not address or not os.environ.get("MASTER_PORT"):
        raise ConfigError(
            "WORLD_SIZE > 1 needs MASTER_ADDR and MASTER_PORT, the address of rank 0; start ranks "
            "with torchrun, or set both"
        )
    fix = "set a free port of the host of rank 0, the same for all ranks"
    return address, environment_integer("MASTER_PORT", 0, 0, 65535, fix)


def _warn_unless_resolved(address: str, port: int) -> None:
    """Warn if this host cannot resolve MASTER_ADDR yet; the rendezvous retries."""
    try:
        socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        log.warning("MASTER_ADDR = %r cannot be resolved on this host: %s", address, error)


def _own_address() -> str:
    """Return the address of this host in the network of MASTER_ADDR."""
    master, port = _master()
    family, _, _, _, address = socket.getaddrinfo(master, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address)  # sends nothing
        own = probe.getsockname()[0]
    # A host's name is often 127.0.1.1 in its own /etc/hosts, but a real address on other hosts.
    local = own == address[0] or ipaddress.ip_address(own).is_loopback
    return master if local else own
