"""Halo exchange: what ranks send is what the others' queries see, and nothing else."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.utils import _to_kwargs

from dtron.config import CpMethod
from dtron.data.loader import map_tables
from dtron.parallelisms.context import halo as halos
from dtron.parallelisms.context.attention import ContextAttention
from dtron.parallelisms.context.layout import layout_of, table_names
from dtron.parallelisms.context.load_balance import document_lengths
from dtron.parallelisms.context.ring import RingBlocks
from dtron.parallelisms.context.split import Split
from tests.harness import run_ranks
from tests.parallelisms.context.test_context_attention import groups, windowed

BATCH, TOKENS = 2, 48


def drawn(random: np.random.Generator) -> Tensor:
    """Documents of random lengths, some of one token."""
    rate = random.choice([0.02, 0.1, 0.5])
    return torch.from_numpy((random.random((BATCH, TOKENS)) < rate).cumsum(1))


def seen_by(split: Split, window: int, ranks: list[int]) -> tuple[set[int], set[int]]:
    """Tokens that ranks hold and that their queries see, one query after the other."""
    n = 2 * split.cp
    held, seen = set(), set()
    for row in range(BATCH):
        sizes = [TOKENS] if split.documents is None else document_lengths(split.documents[row])
        starts = (np.cumsum(sizes) - sizes).repeat(sizes)
        for place in range(TOKENS):
            number = split.chunk[row, place]
            if number in ranks or n - 1 - number in ranks:
                held.add(row * TOKENS + place)
                first = max(starts[place], place - window + 1)
                seen |= {row * TOKENS + key for key in range(first, place + 1)}
    return held, seen


@pytest.mark.parametrize("window", [1, 2, 3, 6, 7, 13, 30, 47])
@pytest.mark.parametrize(("method", "cp"), [("ring", 2), ("ring", 4), ("hierarchical", 4)])
def test_exactly_what_queries_see_is_sent(method: CpMethod, cp: int, window: int) -> None:
    random = np.random.default_rng(window)
    shape = windowed(layout_of(method, cp), window)
    name, on_host = table_names(method, window)
    split = Split(drawn(random), (BATCH, TOKENS), cp)
    tables = [split.tables({method: shape}, block * shape.inner) for block in range(shape.outer)]
    sent, received = [], []
    for block, found in enumerate(tables):
        assert found is not None
        members = list(range(block * shape.inner, (block + 1) * shape.inner))
        held, seen = seen_by(split, window, members)
        (counts,) = found[on_host]
        sent.append(counts[0, :-1].tolist())
        received.append(counts[1, :-1].tolist())
        assert sum(received[-1]) == len(seen - held)
        index = found[name][1]
        assert len(index) == sum(sent[-1]) + counts[:, -1].sum()
        for part in index.split([*sent[-1], *counts[:, -1].tolist()]):
            assert len(part.unique()) == len(part), "gradients of a token are added once"
    assert torch.equal(torch.tensor(sent), torch.tensor(received).t())


@pytest.mark.parametrize("window", range(1, 48, 3))
@pytest.mark.parametrize("size", [2, 3, 4])
def test_tokens_of_one_document_in_closed_form(size: int, window: int) -> None:
    split = Split(None, (BATCH, TOKENS), size)
    half = TOKENS // (2 * size)
    for rank in range(size):
        held, seen = seen_by(split, window, [rank])
        spans, (sent, received) = halos.whole_sequences(size, rank, half, window)
        wanted = len(seen - held) // BATCH
        assert sum(received[:-1]) == wanted
        assert sum(b - a for a, b in spans) == sum(sent) + received[-1]
        assert halos.received_tokens(size, rank, half, window) == wanted


def transfers(method: CpMethod, window: int) -> list[tuple[int, int]]:
    """(rows sent, rows received) of every transfer of one attention and its backward."""
    cp, rank = dist.get_world_size(), dist.get_rank()
    shape = replace(layout_of(method, cp), windows=(window,))
    inside, between = groups(shape.inner)
    found: list[tuple[int, int]] = []
    exchange = halos.all_to_all

    def counted(x: Tensor, received: Any, sent: Any, group: str) -> Tensor:
        assert x.shape[0] == sum(sent)
        found.append((sum(sent), sum(received)))
        return exchange(x, received, sent, group)

    def refused(*_: Any) -> Any:
        raise AssertionError("a block was passed on")

    halos.all_to_all, RingBlocks._send_receive = counted, refused  # type: ignore[method-assign]
    q, k, v = (torch.randn(1, TOKENS // cp, 4, 4, requires_grad=True) for _ in range(3))
    attention = ContextAttention(method, shape, between, inside, "math", window)
    attention(q, k, v).sum().backward()
    assert rank == dist.get_rank()
    return found


@pytest.mark.parametrize(("method", "cp", "window"), [("ring", 4, 4), ("hierarchical", 4, 20)])
def test_one_transfer_forward_and_two_back(method: CpMethod, cp: int, window: int) -> None:
    shape = layout_of(method, cp)
    half = TOKENS // (2 * shape.outer)
    due = [halos.received_tokens(shape.outer, block, half, window) for block in range(shape.outer)]
    assert sum(due) < shape.outer * (shape.outer - 1) * 2 * half, "a ring would receive as much"
    ranks = run_ranks(cp, transfers, method, window)
    for rank, found in enumerate(ranks):
        sent, received = found[0]
        assert received == due[rank // shape.inner]
        assert found == [(sent, received), (sent, received), (received, sent)]
    assert sum(found[0][0] for found in ranks) == sum(found[0][1] for found in ranks)


def test_a_window_as_long_as_the_sequence_needs_no_tables() -> None:
    shape = windowed(layout_of("ring", 2), TOKENS)
    tables = Split(drawn(np.random.default_rng(0)), (BATCH, TOKENS), 2).tables({"ring": shape}, 0)
    assert tables is not None
    assert list(tables) == ["ring"]


def test_counts_stay_on_the_host() -> None:
    """Reading them from a device would wait for it in every layer."""
    split = Split(drawn(np.random.default_rng(0)), (BATCH, TOKENS), 2)
    tables = split.tables({"ring": windowed(layout_of("ring", 2), 5)}, 0)
    assert tables is not None
    moved = map_tables(tables, lambda x: x.to("meta"))
    assert isinstance(moved, Mapping)
    _, (moved,) = _to_kwargs((), {"documents": moved}, torch.device("meta"), False)  # as FSDP does
    moved = moved["documents"]
    devices = {name: {x.device.type for x in row} for name, row in moved.items()}
    name, on_host = table_names("ring", 5)
    assert devices == {"ring": {"meta"}, name: {"meta"}, on_host: {"cpu"}}
