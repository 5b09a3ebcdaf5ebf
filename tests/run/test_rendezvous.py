"""Ranks of one attempt find each other among what earlier attempts have left behind."""

import datetime
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch.distributed as dist

from dtron.errors import ConfigError, PeerError, RankError
from dtron.run import rendezvous
from dtron.run.process import Place
from dtron.run.rendezvous import Rendezvous, meet
from dtron.training.trainer import Trainer
from tests.faults.test_launch import ENV
from tests.training.test_trainer import tiny

SECOND = datetime.timedelta(seconds=1)


def new_store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, None, True, SECOND, False)


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """The store that torchrun's agents lend."""
    store = new_store()
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    for name, value in {**names, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    return store


@pytest.fixture
def no_agents(monkeypatch: pytest.MonkeyPatch) -> int:
    """MASTER_PORT, where nobody listens."""
    free = new_store().port
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    return free


@pytest.fixture
def silent() -> Iterator[int]:
    """The port of a process that is stopped: connections are made, and nothing is answered."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks wait a second longer than rank 0."""
    monkeypatch.setattr(rendezvous, "_EXTRA_SECONDS", 1)


def started(call: Callable, *args: object) -> Future:
    """The future of a call in a thread."""
    future: Future = Future()

    def run() -> None:
        try:
            future.set_result(call(*args))
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


def come(n: int, late: float = 0.3) -> list[Rendezvous]:
    """Ranks as threads, the first of which comes last."""
    others = [started(meet, Place(rank, rank, n), 20) for rank in range(1, n)]
    time.sleep(late)
    first = started(meet, Place(0, 0, n), 20)
    return [each.result(30) for each in (first, *others)]


def check_met(met: list[Rendezvous]) -> None:
    """All have one token and one store."""
    assert len({each.token for each in met}) == 1
    met[0].broadcast_from_rank_0("greeting", met[0].token)
    assert {each.broadcast_from_rank_0("greeting") for each in met[1:]} == {met[0].token}


def left_by(agents: dist.TCPStore, port: int) -> None:
    """What an attempt of three ranks leaves, whose store was at a port."""
    agents.set("dtron/rank-0", "an earlier token")
    for rank in (1, 2):
        agents.set(f"dtron/nonce/{rank}", f"nonce {rank}")
        answer = [f"nonce {rank}", "an earlier token", "127.0.0.1", port]
        agents.set(f"dtron/answer/{rank}", json.dumps(answer))


def test_addresses_of_earlier_attempts_are_not_trusted(agents: dist.TCPStore, silent: int) -> None:
    ended, alive = new_store().port, new_store()
    for port in (ended, alive.port, silent):
        left_by(agents, port)
        met = come(3)
        assert met[0].token != "an earlier token"
        check_met(met)
    assert alive.num_keys() <= 1  # nobody was there; torch's own key


def test_each_attempt_has_its_own_token(agents: dist.TCPStore) -> None:
    first, second = come(2), come(2)
    assert first[0].token == first[1].token != second[0].token == second[1].token


def test_a_rank_that_starts_again_is_answered_again(agents: dist.TCPStore) -> None:
    """Rank 1 ends after it was answered, before it could acknowledge."""
    first = started(meet, Place(0, 0, 3), 20)
    agents.set("dtron/nonce/1", "of a process that ends")
    deadline = time.monotonic() + 10
    while not agents.check(["dtron/answer/1"]):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    others = [started(meet, Place(rank, rank, 3), 20) for rank in (1, 2)]
    check_met([each.result(30) for each in (first, *others)])


def test_rank_0_of_an_earlier_attempt_gives_way(agents: dist.TCPStore) -> None:
    """Its other ranks have not come, and its host was cut off meanwhile."""
    before = started(meet, Place(0, 0, 2), 20)
    while not agents.check(["dtron/rank-0"]):
        time.sleep(0.05)
    now = started(meet, Place(0, 0, 2), 20)
    with pytest.raises(RankError, match="another rank 0 has started"):
        before.result(10)
    check_met([started(meet, Place(1, 1, 2), 20).result(10), now.result(10)][::-1])


@pytest.mark.parametrize("store", ["agents", "no_agents"])
def test_ranks_that_do_not_come_are_named(
    request: pytest.FixtureRequest, soon: None, store: str
) -> None:
    """By rank 0, before a rank that has come gives up."""
    kept = request.getfixturevalue(store)
    first, second = (started(meet, Place(rank, rank, 3), 2) for rank in range(2))
    with pytest.raises(RankError, match=r"^ranks 2 have not started within 2 seconds"):
        first.result(10)
    assert not second.done()
    with pytest.raises(RankError, match=r"^rank 1 has .* within 3 seconds \(parallel.timeout"):
        second.result(10)
    del kept


@pytest.mark.parametrize("lent", ["True", "False"])
def test_a_store_that_is_not_there_is_one_line(
    no_agents: int, soon: None, lent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", lent)
    with pytest.raises(RankError, match=f"no store at 127.0.0.1:{no_agents}: .*within 2 seconds"):
        meet(Place(1, 1, 2), 1)


def test_agents_that_come_late_are_waited_for(
    no_agents: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    ranks = [started(meet, Place(rank, rank, 2), 20) for rank in range(2)]
    time.sleep(0.5)
    store = dist.TCPStore("127.0.0.1", no_agents, None, True, SECOND, False)
    check_met([each.result(20) for each in ranks])
    del store


@pytest.mark.parametrize("rank", [0, 1])
def test_agents_that_do_not_answer_end_a_start(
    agents: dist.TCPStore, silent: int, soon: None, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    """Signals are answered meanwhile."""
    monkeypatch.setenv("MASTER_PORT", str(silent))
    with pytest.raises(RankError, match=f"rank {rank} has not reached 127.0.0.1:{silent} within"):
        meet(Place(rank, rank, 2), 1)
    begun = time.monotonic()
    with pytest.raises(InterruptedError):
        interrupted(lambda: meet(Place(rank, rank, 2), 30))
    assert time.monotonic() - begun < 5


def interrupted(call: Callable[[], object]) -> None:
    """Call what waits for other ranks; a signal comes after half a second."""

    def stop(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 0.5)
    try:
        call()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_a_signal_ends_a_rank_that_waits_for_rank_0(no_agents: int) -> None:
    begun = time.monotonic()
    with pytest.raises(InterruptedError):
        interrupted(lambda: meet(Place(1, 1, 2), 30))
    assert time.monotonic() - begun < 5


def test_rank_0_that_stops_after_its_answer_ends_a_start(
    agents: dist.TCPStore, silent: int, soon: None
) -> None:
    second = started(meet, Place(1, 1, 2), 1)
    while not agents.check(["dtron/nonce/1"]):
        time.sleep(0.02)
    nonce = agents.get("dtron/nonce/1").decode()
    agents.set("dtron/answer/1", json.dumps([nonce, "token", "127.0.0.1", silent]))
    with pytest.raises(RankError, match=f"rank 1 has found rank 0 at 127.0.0.1:{silent}, which"):
        second.result(10)


def test_values_come_to_rank_0_or_their_ranks_are_named(
    agents: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, *others = come(3)
    for each in others:
        assert each.gather_at_rank_0("machine", f"of {each.place.rank}") == []
    assert first.gather_at_rank_0("machine", "mine") == ["mine", "of 1", "of 2"]
    others[0].gather_at_rank_0("more", "")
    first.timeout_seconds = 1
    monkeypatch.setattr(rendezvous, "_EXTRA_SECONDS", 0)
    with pytest.raises(RankError, match=r"^ranks 2 have not sent 'more' to rank 0 within 1 sec"):
        first.gather_at_rank_0("more", "")
    assert meet(Place(0, 0, 1), 1).gather_at_rank_0("machine", "mine") == ["mine"]


RANK_0 = """
import sys, time
from dtron.run.rendezvous import meet
from dtron.run.process import Place
first = meet(Place(0, 0, 2), 60)
first.broadcast_from_rank_0("greeting", "hello")
time.sleep(600)
"""


def test_values_of_a_rank_0_that_stops_or_ends(
    agents: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = subprocess.Popen([sys.executable, "-c", RANK_0], env={**ENV, **os.environ})
    try:
        second = started(meet, Place(1, 1, 2), 100).result(120)
        assert second.broadcast_from_rank_0("greeting") == "hello"
        second.timeout_seconds = 1
        monkeypatch.setattr(rendezvous, "_EXTRA_SECONDS", 0)
        with pytest.raises(RankError, match="rank 1 has not received 'lock' from rank 0 within 1"):
            second.broadcast_from_rank_0("lock")
        with monkeypatch.context() as patch:  # the store's own time-out comes first
            patch.setattr(rendezvous, "within", lambda seconds, call: call())
            with pytest.raises(RankError, match="rank 1 has not received 'lock' from rank 0"):
                second.broadcast_from_rank_0("lock")
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(RankError, match="rank 1 has not received 'more' from rank 0 within 1"):
            second.broadcast_from_rank_0("more")
        process.kill()
        with pytest.raises(PeerError, match="rank 0 has ended"):
            second.broadcast_from_rank_0("never", seconds=30)
    finally:
        process.kill()
        process.wait()


def test_without_agents_ranks_meet_at_master_port(no_agents: int) -> None:
    """Again and again in one process, whose earlier stores are still there."""
    first, second = come(3), come(3, late=0)
    for met in (first, second):
        check_met(met)
    assert first[0].token != second[0].token


def test_a_port_that_is_let_go_again_is_taken(no_agents: int) -> None:
    """torchrun found it free, and another connection had it for a moment."""
    busy = socket.create_server(("", no_agents))
    threading.Timer(1, busy.close).start()
    check_met(come(2))


def test_a_run_that_has_ended_holds_no_store(tmp_path: Path) -> None:
    trainer = Trainer(tiny(tmp_path / "run", train__steps=1))
    assert trainer.rendezvous.store is not None
    trainer.fit()
    assert trainer.rendezvous.store is None


def test_a_world_without_an_address_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(ConfigError, match="MASTER_ADDR and MASTER_PORT"):
        meet(Place(0, 0, 2), 1)


@pytest.mark.parametrize("port", ["99999999", "65536", "-1", "x", "1.5"])
def test_a_port_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch, port: str) -> None:
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", port)
    with pytest.raises(
        ConfigError, match=f"MASTER_PORT = '{port}' .* integer from 0 to 65535; set"
    ):
        meet(Place(0, 0, 2), 1)
    monkeypatch.setenv("MASTER_PORT", "")
    with pytest.raises(ConfigError, match="needs MASTER_ADDR and MASTER_PORT"):
        meet(Place(0, 0, 2), 1)


@pytest.mark.parametrize("address", ["no-such-host.invalid", "a" * 300])
def test_an_address_that_cannot_be_resolved_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, address: str
) -> None:
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setattr(rendezvous, "_EXTRA_SECONDS", 0)
    with pytest.raises(RankError, match="rank 1 has not "):
        meet(Place(1, 1, 2), 1)
    (message,) = caplog.messages
    assert message.startswith(f"MASTER_ADDR = '{address}' cannot be resolved on this host: ")


class Route:
    """A socket whose connections come from an address."""

    own = ""

    def __init__(self, *_: object) -> None: ...

    def __enter__(self) -> "Route":
        return self

    def __exit__(self, *_: object) -> None: ...

    def connect(self, _address: object) -> None: ...

    def getsockname(self) -> tuple[str, int]:
        return self.own, 1


@pytest.mark.parametrize(
    ("master", "resolved", "own", "announced"),
    [
        ("head", "127.0.1.1", "127.0.0.1", "head"),  # Debian's /etc/hosts, on the head
        ("localhost", "::1", "::1", "localhost"),
        ("head", "10.0.0.1", "10.0.0.1", "head"),
        ("head", "10.0.0.1", "10.0.0.2", "10.0.0.2"),  # rank 0 is on another host
    ],
)
def test_addresses_are_those_that_other_hosts_see(
    monkeypatch: pytest.MonkeyPatch, master: str, resolved: str, own: str, announced: str
) -> None:
    monkeypatch.setenv("MASTER_ADDR", master)
    monkeypatch.setenv("MASTER_PORT", "29500")
    family = socket.AF_INET6 if ":" in resolved else socket.AF_INET
    found = [(family, socket.SOCK_DGRAM, 17, "", (resolved, 29500))]
    monkeypatch.setattr(rendezvous.socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr(rendezvous.socket, "socket", Route)
    monkeypatch.setattr(Route, "own", own)
    assert rendezvous._own_address() == announced
