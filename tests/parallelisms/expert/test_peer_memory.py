"""Collectives as copies out of peers' memory, on ranks of which one is always late."""

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtron.errors import ConfigError
from dtron.parallelisms.expert import peer_memory
from dtron.parallelisms.expert.peer_memory import CopyEngine, PeerMemory
from tests.harness import run_ranks

RANKS, ROUNDS = 3, 4


def engine() -> CopyEngine:
    peer_memory._PAGE = 1  # so that it grows
    group = dist.group.WORLD
    assert group is not None
    return CopyEngine(group, torch.device("cpu"))


def of(rank: int, round: int, n: int) -> Tensor:
    return torch.arange(n, dtype=torch.bfloat16) + 100 * rank + 10 * round


def be_late(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(0.05)


def slow_views(late: int) -> None:
    """The late rank reads late."""
    view = PeerMemory.view

    def slow(self: PeerMemory, rank: int, *args: object) -> Tensor:
        be_late(late)
        return view(self, rank, *args)  # type: ignore[arg-type]

    PeerMemory.view = slow  # type: ignore[method-assign]


def count_memories() -> list[int]:
    """Bytes of each that is made from now on."""
    made, init = [], PeerMemory.__init__

    def counted(self: PeerMemory, nbytes: int, *args: Any) -> None:
        made.append(nbytes)
        init(self, nbytes, *args)

    PeerMemory.__init__ = counted  # type: ignore[method-assign]
    return made


def gathers(late: int) -> None:
    copies, made = engine(), count_memories()
    slow_views(late)
    for i in range(ROUNDS):
        n = 4 << i // 2  # the memory grows, and is used again
        out = torch.empty(RANKS * n, dtype=torch.bfloat16)
        copies.all_gather(out, of(dist.get_rank(), i, n))
        assert torch.equal(out, torch.cat([of(rank, i, n) for rank in range(RANKS)]))
    assert len(made) == ROUNDS // 2


def exchanges(late: int) -> None:
    copies, made = engine(), count_memories()
    slow_views(late)
    for i in range(ROUNDS):
        n = RANKS * (4 << i // 2)
        sent = of(dist.get_rank(), i, n)
        out = torch.empty_like(sent)
        copies.all_to_all(out, copies.staging(n, sent.dtype).copy_(sent) if i % 2 else sent)
        parts = [of(rank, i, n).chunk(RANKS)[dist.get_rank()] for rank in range(RANKS)]
        assert torch.equal(out, torch.cat(parts))
    assert len(made) == ROUNDS // 2


@pytest.mark.parametrize("late", range(RANKS))
def test_gathers_wait_for_the_late(late: int) -> None:
    run_ranks(RANKS, gathers, late)


@pytest.mark.parametrize("late", range(RANKS))
def test_exchanges_wait_for_the_late(late: int) -> None:
    run_ranks(RANKS, exchanges, late)


def on_hosts() -> None:
    import socket

    rank = dist.get_rank()
    socket.gethostname = lambda: f"host{rank % 2}"
    with pytest.raises(ConfigError, match=r"several hosts \(host0, host1\)"):
        engine()


def test_ranks_of_several_hosts_are_refused() -> None:
    run_ranks(2, on_hosts)
