"""Ranks of one attempt find each other among what earlier attempts have left behind."""

import datetime
import json
import threading
import time

import pytest
import torch.distributed as dist

from dtron import rendezvous
from dtron.errors import PeerError, RankError
from dtron.rendezvous import Address, Rendezvous, meet
from dtron.runtime import Place

SECOND = datetime.timedelta(seconds=1)


@pytest.fixture
def agents(monkeypatch: pytest.MonkeyPatch) -> dist.TCPStore:
    """The store that torchrun's agents lend."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, SECOND, False)
    names = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    for name, value in {**names, "TORCHELASTIC_USE_AGENT_STORE": "True"}.items():
        monkeypatch.setenv(name, value)
    return store


def of_ranks(n: int, late: float = 0.3) -> list[Rendezvous]:
    """Ranks as threads, the first of which comes last."""
    found: dict[int, Rendezvous] = {}

    def come(rank: int) -> None:
        time.sleep(0 if rank else late)
        found[rank] = meet(Place(rank, rank, n), 20)

    threads = [threading.Thread(target=come, args=(rank,)) for rank in range(n)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in range(n)]


def ended() -> tuple[Address, None]:
    """A store whose process has ended."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, SECOND, False)
    return Address("127.0.0.1", store.port), None


def silent() -> tuple[Address, dist.TCPStore]:
    """A rank 0 that lives on, of an attempt whose ranks have never all come."""
    store = dist.TCPStore("127.0.0.1", 0, None, True, SECOND, False)
    return Address("127.0.0.1", store.port), store


def answered() -> tuple[Address, dist.TCPStore]:
    """A rank 0 that lives on, and has answered the ranks of its own attempt."""
    announced, store = silent()
    store.set("welcome", json.dumps(["an earlier attempt", "another word"]))
    return announced, store


@pytest.mark.parametrize("before", [ended, silent, answered])
def test_addresses_of_earlier_attempts_are_not_trusted(agents: dist.TCPStore, before) -> None:
    announced, store = before()
    agents.set("dtron/rendezvous", json.dumps(announced))
    met = of_ranks(3)
    assert len({each.token for each in met}) == 1
    assert met[0].token != "an earlier attempt"
    met[0].of_rank_0("greeting", "hello")
    assert [each.of_rank_0("greeting") for each in met[1:]] == ["hello"] * 2
    del store


def test_each_attempt_has_its_own_token(agents: dist.TCPStore) -> None:
    first, second = of_ranks(2), of_ranks(2)
    assert first[0].token == first[1].token != second[0].token == second[1].token


def test_ranks_that_do_not_come_are_named(agents: dist.TCPStore) -> None:
    with pytest.raises(RankError, match=r"ranks 1, 2 have not started within 1 seconds"):
        meet(Place(0, 0, 3), 1)
    agents.delete_key("dtron/rendezvous")
    with pytest.raises(RankError, match=r"rank 2 has not found rank 0 within 1 seconds"):
        meet(Place(2, 2, 3), 1)


def test_a_first_rank_that_ends_is_noticed(agents: dist.TCPStore) -> None:
    first, second = of_ranks(2)
    timer = threading.Timer(0.3, setattr, (first, "store", None))
    timer.start()
    with pytest.raises(PeerError, match="rank 0 has ended"):
        second.of_rank_0("never")


def test_without_agents_ranks_meet_at_master_port(monkeypatch: pytest.MonkeyPatch) -> None:
    free = dist.TCPStore("127.0.0.1", 0, None, True, SECOND, False).port
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", str(free))
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    met = of_ranks(2, late=0)
    assert met[0].token == met[1].token != ""


def test_addresses_are_those_that_other_hosts_see(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_PORT", "29500")
    for master in ("127.0.0.1", "localhost"):
        monkeypatch.setenv("MASTER_ADDR", master)
        assert rendezvous._own_address() == master
