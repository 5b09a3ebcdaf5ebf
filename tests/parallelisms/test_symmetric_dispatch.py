"""Rows of experts by peers' memory: the ways, any loads, late ranks, bounds that are exceeded."""

import functools
import os
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtron.config import Parallel
from dtron.errors import ConfigError, TrainingError
from dtron.kernels.peers import LOST, NONE
from dtron.models import moe
from dtron.parallelisms import symmetric_dispatch
from dtron.parallelisms.expert import AllToAll, Dispatcher
from dtron.parallelisms.symmetric_dispatch import (
    Mailbox,
    SymmetricMemory,
    rows_at_most,
    ways_of,
)
from tests.harness import run_on_gpus, run_ranks
from tests.models.build import small_config
from tests.parallelisms.parity import Case, outcome_of, parallel_run
from tests.parallelisms.test_parity import EAGER, FULL

EXPERTS, ROWS, DIM = 8, 24, 5
SYMMETRIC: dict[str, Any] = {"dispatcher": "symmetric_memory"}
SHALLOW = {"n_layers": 3, "first_dense_layers": 1}
LOADS = ("random", "one expert", "all but one expert", "none", "some nowhere")


def drawn(
    loads: str, rank: int, round: int = 0, n_rows: int = ROWS, width: int = DIM
) -> tuple[Tensor, Tensor]:
    """Rows of a rank and where those of each expert end."""
    generator = torch.Generator().manual_seed(100 * rank + round)
    chosen = torch.randint(EXPERTS, (n_rows,), generator=generator)
    if loads == "one expert":
        chosen = torch.full((n_rows,), 5)
    if loads == "all but one expert":
        chosen[chosen == 5] = 2
    counts = chosen.bincount(minlength=EXPERTS)
    if loads == "none":
        counts.zero_()
    if loads == "some nowhere":
        counts[EXPERTS - 1] = counts[EXPERTS - 1] // 2
    rows = torch.randn(n_rows, width, generator=generator, dtype=torch.float64)
    return rows, counts.cumsum(0).int()


@pytest.mark.parametrize("loads", LOADS)
@pytest.mark.parametrize(("ep", "etp", "most"), [(4, 1, 96), (2, 2, 96), (4, 1, 17), (2, 2, 30)])
def test_ways_are_those_of_a_sort(loads: str, ep: int, etp: int, most: int) -> None:
    """Every rank's rows as (expert, sender, row) tuples, sorted; the first `most` fit."""
    ends = torch.stack([drawn(loads, rank)[1] for rank in range(ep * etp)])
    experts = [
        torch.searchsorted(of_rank, torch.arange(ROWS), right=True).tolist() for of_rank in ends
    ]
    each = EXPERTS // ep
    for rank in range(ep * etp):
        ways, mine = ways_of(ends, rank, etp, ROWS, most), rank // etp
        sorted_rows = {
            owner: sorted(
                (expert, sender, row)
                for sender, found in enumerate(experts)
                for row, expert in enumerate(found)
                if expert // each == owner
            )
            for owner in range(ep)
        }
        own = sorted_rows[mine][:most]
        there = [sender * ROWS + row for _, sender, row in own]
        assert ways.there.tolist() == there + [NONE] * (most - len(there))
        assert int(ways.n_rows) == len(sorted_rows[mine])
        wanted = [sum(e <= mine * each + i for e, _, _ in own) for i in range(each)]
        assert ways.offsets.tolist() == wanted
        for row, (expert, slot) in enumerate(zip(experts[rank], ways.back.tolist(), strict=True)):
            if expert == EXPERTS:
                assert slot == NONE
                continue
            owner = expert // each
            place = sorted_rows[owner].index((expert, rank, row))
            assert slot == (owner * etp * most + place if place < most else LOST)


class _Poisoned(torch.autograd.Function):
    """NaN in rows that are not inside, and in their gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, inside: Tensor) -> Tensor:
        ctx.save_for_backward(inside)
        return torch.where(inside, x, torch.nan)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (inside,) = ctx.saved_tensors
        return torch.where(inside, gradients[0], torch.nan), None


def compute_of(weight: Tensor, part: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Experts that are a vector each, of which a rank gives a part. What they give for rows after
    the last one's is NaN, and so are these rows' gradients."""

    def compute(rows: Tensor, offsets: Tensor) -> Tensor:
        place = torch.arange(len(rows), dtype=torch.int32)
        inside = (place < offsets[-1]).unsqueeze(1)
        expert = torch.searchsorted(offsets, place, right=True).clamp(max=len(offsets) - 1)
        chosen = torch.where(inside, weight[expert], 0)
        return _Poisoned.apply(part * (_Poisoned.apply(rows, inside) * chosen).sin(), inside)  # type: ignore[operator,return-value]

    return compute


def moved(kind: Callable[..., Dispatcher], loads: str, etp: int, rounds: int) -> list[Tensor]:
    """On one rank: results, gradients of rows and of experts, of some layers in a row."""
    group, rank, n_ranks = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    ep = n_ranks // etp
    dispatcher = kind(group, ep, etp, 2.0)
    weights = torch.arange(1, EXPERTS * DIM + 1, dtype=torch.float64).view(EXPERTS, DIM) / 7
    own = weights.chunk(ep)[rank // etp].clone().requires_grad_()
    compute = compute_of(own, 1 / (1 + rank % etp))
    total, found = torch.zeros((), dtype=torch.float64), []
    for i in range(rounds):
        rows, offsets = drawn(loads, rank, i)
        rows.requires_grad_()
        out = dispatcher.finish(dispatcher.begin(rows, offsets, f"layer {i}"), compute)
        total = total + (out * (rank + i + 1)).square().sum()
        found += [out, rows]
    gradients = torch.autograd.grad(total, [*found[1::2], own])
    dispatcher.check(torch.device("cpu"))
    return [*(out.detach() for out in found[::2]), *gradients]


def both_ways(etp: int) -> None:
    for loads in LOADS:
        found, wanted = (moved(kind, loads, etp, 2) for kind in (SymmetricMemory, AllToAll))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13, msg=loads)
        assert loads == "none" or all(tensor.any() for tensor in wanted[:4])


@pytest.mark.parametrize(("world", "etp"), [(2, 1), (4, 1), (4, 2)])
def test_equals_all_to_all(world: int, etp: int) -> None:
    run_ranks(world, both_ways, etp)


def with_late_rank(late: int) -> None:
    wanted = moved(SymmetricMemory, "random", 1, 3)
    put, pulled = Mailbox.put, Mailbox._pulled

    def put_late(self: Mailbox, *args: Any) -> None:
        be_late(late)
        put(self, *args)

    def pulled_late(self: Mailbox, *args: Any) -> Tensor:
        be_late(late)
        return pulled(self, *args)

    for name, method in (("put", put_late), ("_pulled", pulled_late)):
        setattr(Mailbox, name, method)
        for one, other in zip(moved(SymmetricMemory, "random", 1, 3), wanted, strict=True):
            assert torch.equal(one, other)
        Mailbox.put, Mailbox._pulled = put, pulled  # type: ignore[method-assign]


def be_late(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(0.02)


@pytest.mark.parametrize("late", range(2))
def test_ranks_wait_for_the_late(late: int) -> None:
    """One puts late, or reads late; the other neither reads too early nor writes too early."""
    run_ranks(2, with_late_rank, late)


def exceeded(capacity: float, least: int = 1) -> tuple[Tensor, str]:
    """On one rank, all of whose rows take an expert of rank 2: results, and what is said."""
    symmetric_dispatch.LEAST = least
    dispatcher = SymmetricMemory(dist.group.WORLD, 4, 1, capacity)  # type: ignore[arg-type]
    rows, offsets = drawn("one expert", dist.get_rank())
    out = dispatcher.finish(dispatcher.begin(rows, offsets, "some.layer"), lambda x, _: 2 * x)
    said = ""
    try:
        dispatcher.check(torch.device("cpu"))
    except TrainingError as error:
        said = str(error)
    return out, said


def test_lost_rows_are_nan_and_told() -> None:
    for rank, (out, said) in enumerate(run_ranks(4, exceeded, 1.5)):
        fits = rank * ROWS + torch.arange(ROWS) < 1.5 * ROWS
        assert torch.equal(out[fits], 2 * drawn("one expert", rank)[0][fits])
        assert out[~fits].isnan().all()
        assert "rank 2 was to take 96 rows for its experts of some.layer, more than the 36" in said
        assert (
            "parallel.ep_capacity = 4.0 or more, as loads may yet grow (4 is enough for any loads)"
            in said
        )
    for out, said in run_ranks(4, exceeded, 4.0):
        assert not out.isnan().any()
        assert not said


def test_room_that_is_always_there_is_no_capacity() -> None:
    """What is said to be enough is, though 1.5 x even loads had more room than that."""
    for _, said in run_ranks(4, exceeded, 1.5, 60):
        assert "more than the 60" in said
        assert "parallel.ep_capacity = 4.0 or more" in said


def test_bounds() -> None:
    assert rows_at_most(10**6, 8, 1, 2.0) == 2 * 10**6
    assert rows_at_most(10**6, 4, 2, 1.5) == 3 * 10**6  # etp ranks get each other's rows
    assert rows_at_most(10**6, 2, 2, 3.0) == 4 * 10**6  # all there are
    assert rows_at_most(8, 16, 1, 1.0) == 8 * 16
    assert rows_at_most(1000, 16, 1, 1.0) == symmetric_dispatch.LEAST


def fewer_results() -> None:
    dispatcher = SymmetricMemory(dist.group.WORLD, 2, 1, 2.0)  # type: ignore[arg-type]
    rows, offsets = drawn("random", dist.get_rank())
    pending = dispatcher.begin(rows, offsets, "")
    with pytest.raises(ConfigError, match="rows after the last offset need results"):
        dispatcher.finish(pending, lambda x, ends: x[: int(ends[-1])])


def test_experts_that_leave_rows_out_are_refused() -> None:
    run_ranks(2, fewer_results)


def on_hosts() -> None:
    import socket

    socket.gethostname = lambda: f"host{dist.get_rank() % 2}"
    with pytest.raises(ConfigError, match=r"dispatcher = .*several hosts \(host0, host1\).*ep"):
        SymmetricMemory(dist.group.WORLD, 2, 1, 2.0)  # type: ignore[arg-type]


def test_ranks_of_several_hosts_are_refused() -> None:
    run_ranks(2, on_hosts)


def bounded(case: Case) -> dict[str, Any]:
    """Its buffers hold what `ep_capacity` says, no more."""
    symmetric_dispatch.LEAST = 1
    return parallel_run(case)


def poisoned(case: Case) -> dict[str, Any]:
    """Products leave NaN in rows after the last expert's, and in the gradients of such rows."""
    product = moe.grouped_product

    def multiply(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        inside = (torch.arange(len(x)) < offsets[-1]).unsqueeze(1)
        return _Poisoned.apply(product(_Poisoned.apply(x, inside), weight, offsets), inside)  # type: ignore[return-value]

    moe.grouped_product = multiply
    return parallel_run(case)


def layout(ep: int, **more: Any) -> Parallel:
    return Parallel(ep=ep, **SYMMETRIC, **more)


@pytest.mark.parametrize(
    "case",
    [
        Case("mixtral", 2, layout(2, ep_capacity=1.5)),
        Case("deepseek_v3", 4, layout(2, etp=2, ep_capacity=1.5), FULL),
        Case("gpt_oss", 4, layout(4, ep_capacity=3.0)),
        Case("deepseek_v3", 4, layout(4, ep_capacity=3.0), compile=EAGER, override=SHALLOW),
    ],
    ids=str,
)
def test_bounded_buffers_equal_one_process(case: Case) -> None:
    assert not outcome_of(case, run_ranks(case.world, bounded, case, seconds=120)).wrong(case)


@pytest.mark.parametrize("model", ["mixtral", "gpt_oss"])
def test_what_products_leave_open_is_read_by_nobody(model: str) -> None:
    """Results, and gradients of rows, matrices and biases."""
    case = Case(model, 2, layout(2))
    assert not outcome_of(case, run_ranks(2, poisoned, case)).wrong(case)


def layers_on_a_gpu(
    kind: Callable[..., Dispatcher], loads: str, dtype: torch.dtype
) -> list[Tensor]:
    """Results and gradients of two layers; by symmetric memory the host waits for nothing."""
    rank, n_ranks, n_rows, width = dist.get_rank(), dist.get_world_size(), 4096, 256
    dispatcher = kind(dist.group.WORLD, n_ranks, 1, float(n_ranks))
    sizes = {"n_experts": EXPERTS // n_ranks, "experts_per_token": 2, "dim": width}
    experts = moe.Experts(small_config("mixtral", **sizes)).to("cuda", dtype)
    torch.manual_seed(rank)
    for parameter in experts.parameters():
        parameter.data.normal_(0, 0.1)
    compute, found = functools.partial(experts, tail=False), []
    for i in range(3):  # in the first one memory is made
        rows, offsets = drawn(loads, rank, i, n_rows, width)
        rows, offsets = rows.to("cuda", dtype).requires_grad_(), offsets.cuda()
        torch.cuda.synchronize()
        if i and kind is SymmetricMemory and dtype is torch.bfloat16:  # float32's products wait
            torch.cuda.set_sync_debug_mode("error")
        if rank == i % n_ranks:
            torch.cuda._sleep(10**7)  # this rank is late
        out = dispatcher.finish(dispatcher.begin(rows, offsets, "layer"), compute)
        gradients = torch.autograd.grad(out.square().sum(), (rows, *experts.parameters()))
        torch.cuda.set_sync_debug_mode("default")
        found += [out.detach(), *gradients]
    dispatcher.check(torch.device("cuda"))
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("n_gpus", [2, 4])
def test_equals_all_to_all_on_gpus(n_gpus: int) -> None:
    run_on_gpus(n_gpus, "tests.parallelisms.test_symmetric_dispatch")


def _on_gpus() -> None:
    """On one of the ranks that torchrun starts. Rows of an expert are in the same order either way,
    so that products are of the same numbers."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl")
    for loads in LOADS:
        for dtype, tolerance in ((torch.bfloat16, 1e-2), (torch.float32, 1e-3)):
            found, wanted = (
                layers_on_a_gpu(kind, loads, dtype) for kind in (SymmetricMemory, AllToAll)
            )
            for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
                apart = (one.float() - other.float()).norm() / other.float().norm().clamp(min=1e-9)
                assert apart <= tolerance, (loads, dtype, i, float(apart))
    dist.destroy_process_group()


if __name__ == "__main__":
    _on_gpus()
