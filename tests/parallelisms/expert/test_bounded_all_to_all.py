"""Chunks of a fixed size: order of rows, rows that do not fit, no rows.

test_symmetric_dispatch.py compares both bounded dispatchers with all-to-all.
"""

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtron.errors import ConfigError
from dtron.kernels.peer_gather import NONE
from dtron.parallelisms.expert import bounded_all_to_all
from dtron.parallelisms.expert.bounded_all_to_all import BoundedAllToAll, by_expert, chunk_size
from tests.harness import run_ranks
from tests.parallelisms.expert.test_symmetric_dispatch import DIM, ROWS, drawn, layer_of


def test_rows_are_ordered_by_expert() -> None:
    """Of random counts, some 0: each slot with a row has a place, by (expert, sender)."""
    generator, most = torch.Generator().manual_seed(0), 9
    for _ in range(20):
        counts = torch.randint(0, 4, (3, 3), generator=generator)
        order, inverse, offsets = by_expert(counts.cumsum(1), most)
        slots = [
            sender * most + int(counts[sender, :expert].sum()) + i
            for expert in range(3)
            for sender in range(3)
            for i in range(int(counts[sender, expert]))
        ]
        assert order[: len(slots)].tolist() == slots
        assert (order[len(slots) :] == NONE).all()
        assert offsets.tolist() == counts.sum(0).cumsum(0).tolist()
        assert [int(inverse[slot]) for slot in slots] == list(range(len(slots)))
        assert int((inverse != NONE).sum()) == len(slots)


def exceeded() -> tuple[Tensor, str]:
    """On one rank, all of whose rows take an expert of rank 2: results, and what is said."""
    bounded_all_to_all.LEAST, device = 1, torch.device("cpu")
    dispatcher = BoundedAllToAll(dist.group.WORLD, 4, 1, 1.5)  # type: ignore[arg-type]
    rows, offsets = drawn("one expert", dist.get_rank())
    rows.requires_grad_()
    layer = [layer_of(dispatcher, f"{name}.layer") for name in ("other", "some")][1]
    out = dispatcher.finish(dispatcher.begin(rows, offsets, layer), lambda x, _: 2 * x)
    (gradient,) = torch.autograd.grad(out.nansum(), rows)
    assert (gradient[~out.isnan()] == 2).all()
    assert dispatcher.dropped(device)
    address = dispatcher.record.largest(device).data_ptr()
    said = dispatcher.grow(device)
    assert not dispatcher.dropped(device)
    assert dispatcher.record.largest(device).data_ptr() == address  # a CUDA graph adds to it
    again = dispatcher.finish(dispatcher.begin(rows, offsets, layer), lambda x, _: 2 * x)
    torch.testing.assert_close(again, 2 * rows)
    assert not dispatcher.grow(device)
    return out.detach(), said


def test_rows_that_do_not_fit_are_nan_and_then_there_is_room() -> None:
    """A rank sends a rank at most 1.5 times a quarter of its rows."""
    for out, said in run_ranks(4, exceeded):
        fits = torch.arange(ROWS) < 1.5 * ROWS / 4
        assert out[~fits].isnan().all()
        assert not out[fits].isnan().any()
        assert "had 24 tokens for one rank's experts of some.layer, 4.00 times an even" in said
        assert said.endswith("continuing with parallel.ep_capacity = 4.0")


def test_bounds() -> None:
    assert chunk_size(10**6, 8, 2.0) == 250_000
    assert chunk_size(10**6, 2, 3.0) == 10**6  # all there are
    assert chunk_size(4096, 16, 1.0) == bounded_all_to_all.LEAST
    assert chunk_size(100, 16, 1.0) == 100


def raised() -> None:
    """Also where an even load is a few rows, so that rounding it would change it much."""
    for ep, n_rows, rows in ((256, 780, 700), (2, 4096, 2049), (7, 4096, 4000), (64, 600, 600)):
        dispatcher = BoundedAllToAll(dist.group.WORLD, ep, 1, 1.0)  # type: ignore[arg-type]
        if rows > chunk_size(n_rows, ep, 1.0):
            dispatcher._raise_capacity([[("layer", rows, n_rows)]])
        assert rows <= chunk_size(n_rows, ep, dispatcher.capacity)


def test_rows_fit_after_the_capacity_was_raised() -> None:
    run_ranks(1, raised)


def without_rows() -> None:
    dispatcher = BoundedAllToAll(dist.group.WORLD, 2, 1, 1.0)  # type: ignore[arg-type]
    rows, offsets = torch.zeros(0, DIM, requires_grad=True), torch.zeros(4, dtype=torch.int32)
    pending = dispatcher.begin(rows, offsets, layer_of(dispatcher, "layer"))
    out = dispatcher.finish(pending, lambda x, _: x)
    assert torch.autograd.grad(out.sum(), rows)[0].shape == out.shape == (0, DIM)
    assert not dispatcher.grow(torch.device("cpu"))


def test_ranks_may_have_no_rows() -> None:
    run_ranks(2, without_rows)


def in_float8() -> None:
    with pytest.raises(ConfigError, match=r"float8.dispatch with .*bounded_all_to_all"):
        BoundedAllToAll(dist.group.WORLD, 2, 1, 2.0, float8=True)  # type: ignore[arg-type]


def test_float8_is_refused() -> None:
    run_ranks(2, in_float8)
