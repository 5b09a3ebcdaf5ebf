"""Rows of experts by peers' memory: routes, any loads, late ranks, bounds that are exceeded."""

import functools
import gc
import re
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._inductor.utils import run_and_get_code

from dtron.config import Compile, Parallel, Recompute
from dtron.errors import ConfigError, TrainingError
from dtron.kernels.peer_gather import LOST, NONE
from dtron.models import BACKENDS, MODELS, build_model, moe
from dtron.parallelisms import Mesh
from dtron.parallelisms.apply import Passes, apply_passes
from dtron.parallelisms.compile import compile_blocks
from dtron.parallelisms.expert import bounded_all_to_all, symmetric_dispatch
from dtron.parallelisms.expert.all_to_all import AllToAll
from dtron.parallelisms.expert.bounded_all_to_all import BoundedAllToAll
from dtron.parallelisms.expert.dispatcher import Dispatcher
from dtron.parallelisms.expert.expert_parallel import ExpertLayers
from dtron.parallelisms.expert.peer_memory import PeerMemory
from dtron.parallelisms.expert.symmetric_dispatch import SymmetricMemory, routes_of, rows_at_most
from dtron.parallelisms.expert.symmetric_exchange import Mailbox
from dtron.parallelisms.recompute import recompute
from tests.gpu_ranks import run_on_gpus
from tests.harness import run_ranks
from tests.models.build import small_config
from tests.parallelisms.parity import (
    EAGER,
    FULL,
    SELECTIVE,
    Case,
    outcome_of,
    parallel_run,
    whole,
)

EXPERTS, ROWS, DIM = 8, 24, 5
SYMMETRIC: dict[str, Any] = {"dispatcher": "symmetric_memory"}
INDUCTOR = Compile(enable=True, backend="inductor")
SHALLOW = {"n_layers": 3, "first_dense_layers": 1}
MOVED_AGAIN = [("none", 0), ("selective", 0), ("attention", 2), ("full", 3)]
"""Modes of recomputation, and how many of a layer's three calls it may repeat."""
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
        routes, mine = routes_of(ends, torch.tensor([rank]), etp, ROWS, most), rank // etp
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
        assert routes.dispatch.tolist() == there + [NONE] * (most - len(there))
        assert int(routes.n_rows) == len(sorted_rows[mine])
        wanted = [sum(e <= mine * each + i for e, _, _ in own) for i in range(each)]
        assert routes.offsets.tolist() == wanted
        for row, (expert, slot) in enumerate(
            zip(experts[rank], routes.combine.tolist(), strict=True)
        ):
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


def layer_of(dispatcher: Dispatcher, fqn: str, device: str = "cpu") -> Any:
    return dispatcher.layer(fqn, torch.device(device))


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
        layer = layer_of(dispatcher, f"layer {i}")
        out = dispatcher.finish(dispatcher.begin(rows, offsets, layer), compute)
        total = total + (out * (rank + i + 1)).square().sum()
        found += [out, rows]
    gradients = torch.autograd.grad(total, [*found[1::2], own])
    assert not dispatcher.grow(torch.device("cpu"))
    return [*(out.detach() for out in found[::2]), *gradients]


def both_ways(kind: Callable[..., Dispatcher], etp: int) -> None:
    for loads in LOADS:
        found, wanted = (moved(each, loads, etp, 2) for each in (kind, AllToAll))
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-13, atol=1e-13, msg=loads)
        assert loads == "none" or all(tensor.any() for tensor in wanted[:4])


@pytest.mark.parametrize("kind", [SymmetricMemory, BoundedAllToAll])
@pytest.mark.parametrize(("world", "etp"), [(2, 1), (4, 1), (4, 2)])
def test_equals_all_to_all(kind: Callable[..., Dispatcher], world: int, etp: int) -> None:
    run_ranks(world, both_ways, kind, etp)


def with_late_rank(late: int) -> None:
    wanted = moved(SymmetricMemory, "random", 1, 3)
    put, meet = Mailbox.start_pull, PeerMemory.barrier

    def put_late(self: Mailbox, *args: Any) -> Any:
        be_late(late)
        return put(self, *args)

    def pull_late(self: PeerMemory) -> None:
        meet(self)
        be_late(late)

    for of, name, method in ((Mailbox, "moved", put_late), (PeerMemory, "barrier", pull_late)):
        setattr(of, name, method)
        for one, other in zip(moved(SymmetricMemory, "random", 1, 3), wanted, strict=True):
            assert torch.equal(one, other)
        Mailbox.start_pull, PeerMemory.barrier = put, meet  # type: ignore[method-assign]


def be_late(rank: int) -> None:
    if dist.get_rank() == rank:
        time.sleep(0.02)


@pytest.mark.parametrize("late", range(2))
def test_ranks_wait_for_the_late(late: int) -> None:
    """One puts late, or reads late; the other neither reads too early nor writes too early."""
    run_ranks(2, with_late_rank, late)


class Layer(nn.Module):
    """Experts that are a vector each."""

    def __init__(self, dispatcher: Dispatcher, fqn: str, weight: Tensor) -> None:
        super().__init__()
        self.dispatcher, self.layer = dispatcher, layer_of(dispatcher, fqn)
        self.weight = nn.Parameter(weight)

    def forward(self, rows: Tensor, offsets: Tensor) -> Tensor:
        return self.dispatcher.finish(
            self.dispatcher.begin(rows, offsets, self.layer), self._compute
        )

    def _compute(self, rows: Tensor, offsets: Tensor) -> Tensor:
        place = torch.arange(len(rows), dtype=torch.int32)
        expert = torch.searchsorted(offsets, place, right=True).clamp(max=len(offsets) - 1)
        return (rows * self.weight[expert]).sin()


def in_flight(
    kind: Callable[..., Dispatcher], mode: str, compiled: bool
) -> tuple[list[Tensor], list[tuple[int, ...]]]:
    """On one rank, gradients of two layers and of rows, of three micro-batches whose forwards and
    backwards take turns; and the shapes of what was put, in order."""
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    dispatcher = kind(dist.group.WORLD, n_ranks, 1, float(n_ranks))
    weights = torch.arange(1, EXPERTS * DIM + 1, dtype=torch.float64).view(EXPERTS, DIM) / 7
    own = weights.chunk(n_ranks)[rank]
    layers = [Layer(dispatcher, f"layer {i}", own * (i + 1)) for i in range(2)]
    named = {f"layer {i}": layer for i, layer in enumerate(layers)}
    options = Compile(enable=compiled, backend="inductor")
    if mode == "full":
        compile_blocks(named, options, forward_only=True)
    recompute(enumerate(layers), Recompute(mode=mode))  # type: ignore[arg-type]
    if mode != "full":
        compile_blocks(named, options)
    put: list[tuple[int, ...]] = []
    moved = Mailbox.start_pull

    def seen(self: Mailbox, rows: Tensor, *args: Any) -> Any:
        put.append((*rows.shape, *args[0].shape))
        return moved(self, rows, *args)

    Mailbox.start_pull = seen  # type: ignore[method-assign]
    inputs = [drawn("random", rank, i) for i in range(3)]
    losses: dict[int, Tensor] = {}
    for way, i in zip("ffbfbb", (0, 1, 0, 2, 1, 2), strict=True):
        if way == "b":
            losses.pop(i).backward()
            continue
        rows, offsets = inputs[i]
        hidden = rows.requires_grad_()
        for layer in layers:
            hidden = layer(hidden, offsets)
        losses[i] = (hidden * (rank + i + 1)).square().sum()
    Mailbox.start_pull = moved  # type: ignore[method-assign]
    gradients = [layer.weight.grad for layer in layers] + [rows.grad for rows, _ in inputs]
    return [gradient for gradient in gradients if gradient is not None], put


def taking_turns(
    mode: str, compiled: bool, halves: int
) -> tuple[bool, list[tuple[int, ...]], int, int]:
    """On one of two ranks, of which the first reads late: whether gradients are those by
    all-to-all, what was put in order, and how many graphs and breaks there are."""
    wanted, _ = in_flight(AllToAll, "none", False)
    counters.clear()
    meet = PeerMemory.barrier

    def late(self: PeerMemory) -> None:
        meet(self)
        be_late(0)

    PeerMemory.barrier = late  # type: ignore[method-assign]
    if halves == 1:
        Mailbox._second = property(lambda _: False, lambda *_: None)  # type: ignore[assignment]
    found, put = in_flight(SymmetricMemory, mode, compiled)
    assert len(found) == len(wanted) == 5
    equal = all(
        torch.allclose(one, other, rtol=1e-12, atol=1e-12)
        for one, other in zip(found, wanted, strict=True)
    )
    return equal, put, counters["stats"]["unique_graphs"], len(counters["graph_break"])


WITHOUT = 2 * 3 * 5
"""Calls of two layers and three micro-batches: three forward, two backward."""


@pytest.mark.parametrize(
    ("mode", "most", "compiled"),
    [
        *[pytest.param(*row, False, id=f"{row[0]}-eager") for row in MOVED_AGAIN],
        *[pytest.param(*row, True, id=f"{row[0]}-compiled") for row in MOVED_AGAIN[1::2]],
    ],
)
def test_calls_of_forwards_backwards_and_recomputation_take_turns(
    mode: str, most: int, compiled: bool
) -> None:
    """In one order on all ranks, and nobody reads what another call has put; compiled, both layers
    are one graph without a break."""
    found = run_ranks(2, taking_turns, mode, compiled, 2, seconds=240)
    assert found[0] == found[1]
    equal, put, graphs, breaks = found[0]
    assert equal
    assert (graphs, breaks) == (int(compiled), 0)
    assert WITHOUT <= len(put) <= WITHOUT + 2 * 3 * most
    assert (len(put) > WITHOUT) == (most > 0)


def test_a_mailbox_needs_two_halves() -> None:
    """What a rank reads late has another call's rows by then."""
    assert not all(equal for equal, *_ in run_ranks(2, taking_turns, "full", False, 1))


def doubled(rows: Tensor, offsets: Tensor) -> Tensor:
    """By a dispatcher that nobody holds afterwards."""
    dispatcher = SymmetricMemory(dist.group.WORLD, 2, 1, 2.0)  # type: ignore[arg-type]
    layer = layer_of(dispatcher, "layer")
    return dispatcher.finish(dispatcher.begin(rows, offsets, layer), lambda x, _: 2 * x)


def backward_after_all_is_gone() -> None:
    rows, offsets = drawn("random", dist.get_rank())
    rows.requires_grad_()
    out = doubled(rows, offsets)
    gc.collect()
    out.sum().backward()
    assert rows.grad is not None
    assert torch.equal(rows.grad[: offsets[-1]], torch.full_like(rows, 2.0)[: offsets[-1]])


def inference_first() -> None:
    dispatcher = SymmetricMemory(dist.group.WORLD, 2, 1, 2.0)  # type: ignore[arg-type]
    layer = layer_of(dispatcher, "layer")
    rows, offsets = drawn("random", dist.get_rank())
    found = []
    for mode in (torch.inference_mode, torch.enable_grad):
        with mode():
            pending = dispatcher.begin(rows, offsets, layer)
            found.append(dispatcher.finish(pending, lambda x, _: 2 * x).clone())
    assert torch.equal(*found)


def second_model_while_one_rank_still_holds_the_first() -> None:
    """As the garbage collector does it: when a model in a cycle is freed differs by rank."""
    rows, offsets = drawn("random", dist.get_rank())
    held = SymmetricMemory(dist.group.WORLD, 2, 1, 2.0)  # type: ignore[arg-type]
    held.finish(held.begin(rows, offsets, layer_of(held, "layer")), lambda x, _: 2 * x)
    if dist.get_rank() == 0:
        del held
        gc.collect()
    for _ in range(2):
        found = doubled(rows, offsets)
        assert torch.equal(found[: offsets[-1]], 2 * rows[: offsets[-1]])


def two_models_in_turn() -> None:
    """Of one group: neither sees rows, layers or notes of the other."""
    rows, offsets = drawn("random", dist.get_rank())
    both = [SymmetricMemory(dist.group.WORLD, 2, 1, 2.0) for _ in range(2)]  # type: ignore[arg-type]
    layers = [layer_of(dispatcher, "layer") for dispatcher in both]
    assert [layer.number.item() for layer in layers] == [0, 0]
    for _ in range(2):
        pending = [d.begin(rows * i, offsets, layers[i]) for i, d in enumerate(both)]
        for i, dispatcher in enumerate(both):
            found = dispatcher.finish(pending[i], lambda x, _: 2 * x)
            assert torch.equal(found[: offsets[-1]], 2 * i * rows[: offsets[-1]])


OWN_MODELS = [
    backward_after_all_is_gone,
    inference_first,
    second_model_while_one_rank_still_holds_the_first,
    two_models_in_turn,
]


@pytest.mark.parametrize("act", OWN_MODELS)
def test_what_models_of_ones_own_do(act: Callable[[], None]) -> None:
    run_ranks(2, act)


def exceeded(capacity: float, least: int = 1) -> tuple[Tensor, str]:
    """On one rank, all of whose rows take an expert of rank 2: results, and what is said."""
    symmetric_dispatch.LEAST = least
    dispatcher = SymmetricMemory(dist.group.WORLD, 4, 1, capacity)  # type: ignore[arg-type]
    rows, offsets = drawn("one expert", dist.get_rank())
    layers = [layer_of(dispatcher, f"{name}.layer") for name in ("other", "some", "third")]
    out = dispatcher.finish(dispatcher.begin(rows, offsets, layers[1]), lambda x, _: 2 * x)
    device = torch.device("cpu")
    assert bool(dispatcher.dropped(device)) == (dist.get_rank() == 2 and capacity < 4)
    said = dispatcher.grow(device)
    assert not dispatcher.dropped(device)
    again = dispatcher.finish(dispatcher.begin(rows, offsets, layers[1]), lambda x, _: 2 * x)
    torch.testing.assert_close(again, 2 * rows)
    assert not dispatcher.grow(device)
    return out, said


def test_lost_rows_are_nan_and_reported() -> None:
    for rank, (out, said) in enumerate(run_ranks(4, exceeded, 1.5)):
        fits = rank * ROWS + torch.arange(ROWS) < 1.5 * ROWS
        assert torch.equal(out[fits], 2 * drawn("one expert", rank)[0][fits])
        assert out[~fits].isnan().all()
        assert "rank 2 was to receive 96 tokens for its experts of some.layer, 4.00 times" in said
        assert said.startswith("parallel.ep_capacity = 1.5: ")
        assert said.endswith("continuing with parallel.ep_capacity = 4.0")
    for out, said in run_ranks(4, exceeded, 4.0):
        assert not out.isnan().any()
        assert not said


def told_of(act: Callable[[SymmetricMemory], None]) -> str:
    """On one rank: what a dispatcher says after it has been used."""
    symmetric_dispatch.LEAST = 1
    dispatcher = SymmetricMemory(dist.group.WORLD, 2, 1, 1.5)  # type: ignore[arg-type]
    act(dispatcher)
    try:
        return dispatcher.grow(torch.device("cpu"))
    except TrainingError as error:
        return str(error)


def lose(dispatcher: SymmetricMemory, fqn: str, n_rows: int) -> Tensor:
    """So many rows, all for the first rank's experts."""
    ends = torch.full((EXPERTS,), n_rows, dtype=torch.int32)
    layer = layer_of(dispatcher, fqn)
    pending = dispatcher.begin(torch.ones(n_rows, DIM), ends, layer)
    return dispatcher.finish(pending, lambda x, _: x)


def lose_in_two_layers(dispatcher: SymmetricMemory) -> None:
    lose(dispatcher, "blocks.9.experts", 10)
    lose(dispatcher, "blocks.10.experts", 20)


def have_uneven_rows(dispatcher: SymmetricMemory) -> None:
    lose(dispatcher, "blocks.0.experts", 20)  # memory for either number of rows
    slots: list[Tensor] = []
    moved = Mailbox.start_pull

    def seen(self: Mailbox, rows: Tensor, *args: Any) -> Any:
        slots.append(args[0])
        return moved(self, rows, *args)

    Mailbox.start_pull = seen  # type: ignore[method-assign]
    out = lose(dispatcher, "blocks.0.experts", 20 - 12 * dist.get_rank())
    Mailbox.start_pull = moved  # type: ignore[method-assign]
    assert out.isnan().all()
    assert len(slots) == 3
    assert all(int(table.max()) < 2 * 8 for table in slots)  # the smaller one's, too


def test_the_first_layer_that_lacks_rows_is_named() -> None:
    """Those behind it get NaN, and what their routers make of it."""
    (said, _) = run_ranks(2, told_of, lose_in_two_layers)
    assert "rank 0 was to receive 20 tokens for its experts of blocks.9.experts, 2.00 times" in said


def test_different_numbers_of_rows_are_reported() -> None:
    (said, other) = run_ranks(2, told_of, have_uneven_rows)
    assert said == other
    assert "different numbers of tokens for the experts of blocks.0.experts" in said


def test_room_that_is_always_there_is_no_capacity() -> None:
    """What is said to be enough is, though 1.5 x even loads had more room than that."""
    for _, said in run_ranks(4, exceeded, 1.5, 60):
        assert "rank 2 was to receive 96 tokens" in said
        assert "continuing with parallel.ep_capacity = 4.0" in said


def test_bounds() -> None:
    assert rows_at_most(10**6, 8, 1, 2.0) == 2 * 10**6
    assert rows_at_most(10**6, 4, 2, 1.5) == 3 * 10**6  # etp ranks get each other's rows
    assert rows_at_most(10**6, 2, 2, 3.0) == 4 * 10**6  # all there are
    assert rows_at_most(8, 16, 1, 1.0) == 8 * 16
    assert rows_at_most(1000, 16, 1, 1.0) == symmetric_dispatch.LEAST


def fewer_results(kind: Callable[..., Dispatcher]) -> None:
    dispatcher = kind(dist.group.WORLD, 2, 1, 2.0)
    rows, offsets = drawn("random", dist.get_rank())
    pending = dispatcher.begin(rows, offsets, layer_of(dispatcher, "layer"))
    with pytest.raises(ConfigError, match="return one row per input row, padding included"):
        dispatcher.finish(pending, lambda x, ends: x[: int(ends[-1])])


@pytest.mark.parametrize("kind", [SymmetricMemory, BoundedAllToAll])
def test_experts_that_leave_rows_out_are_refused(kind: Callable[..., Dispatcher]) -> None:
    run_ranks(2, fewer_results, kind)


def on_hosts() -> None:
    import socket

    socket.gethostname = lambda: f"host{dist.get_rank() % 2}"
    with pytest.raises(ConfigError, match=r"dispatcher = .*several hosts \(host0, host1\).*ep"):
        SymmetricMemory(dist.group.WORLD, 2, 1, 2.0)  # type: ignore[arg-type]


def test_ranks_of_several_hosts_are_refused() -> None:
    run_ranks(2, on_hosts)


def bounded(case: Case) -> dict[str, Any]:
    """Its buffers hold what `ep_capacity` says, no more."""
    symmetric_dispatch.LEAST = bounded_all_to_all.LEAST = 1
    return parallel_run(case)


def poisoned(case: Case) -> dict[str, Any]:
    """Products leave NaN in rows after the last expert's, and in the gradients of such rows."""
    product = moe.grouped_matmul

    def multiply(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        inside = (torch.arange(len(x)) < offsets[-1]).unsqueeze(1)
        return _Poisoned.apply(product(_Poisoned.apply(x, inside), weight, offsets), inside)  # type: ignore[return-value]

    moe.grouped_matmul = multiply
    return parallel_run(case)


def layout(ep: int, **more: Any) -> Parallel:
    return Parallel(ep=ep, **SYMMETRIC, **more)


@pytest.mark.parametrize(
    "case",
    [
        Case("mixtral", 2, layout(2, ep_capacity=1.5)),
        Case("deepseek_v3", 4, layout(2, etp=2, ep_capacity=1.5), FULL),
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


BOUNDED = layout(2, ep_capacity=1.5)
FIXED = Parallel(ep=2, dispatcher="bounded_all_to_all", ep_capacity=1.5)
WHOLE = [
    Case("mixtral", 2, BOUNDED, SELECTIVE, INDUCTOR, {"n_layers": 3}),
    Case("mixtral", 2, BOUNDED, FULL, EAGER, {"n_layers": 3}),
    Case("deepseek_v3", 2, BOUNDED, SELECTIVE, EAGER, SHALLOW),
    Case("gpt_oss", 2, layout(2), SELECTIVE, EAGER),
    Case("mixtral", 2, FIXED, SELECTIVE, INDUCTOR, {"n_layers": 3}),
    Case("mixtral", 2, FIXED, FULL, EAGER, {"n_layers": 3}),
    Case("deepseek_v3", 2, FIXED, SELECTIVE, EAGER, SHALLOW),
]


def compiled_whole(case: Case) -> tuple[dict[str, Any], int, int]:
    """On one rank: what a case gives, how many graphs there are and how many breaks."""
    counters.clear()
    run = bounded(case)
    return run, counters["stats"]["unique_graphs"], len(counters["graph_break"])


@pytest.mark.parametrize("case", WHOLE, ids=str)
def test_compiled_blocks_equal_one_process(case: Case) -> None:
    """Losses, gradients and parameters; no graph breaks, and layers of a kind share theirs; one
    more is the loss."""
    ranks = run_ranks(case.world, compiled_whole, case, seconds=240)
    assert not outcome_of(case, [run for run, *_ in ranks]).wrong(case)
    assert [breaks for *_, breaks in ranks] == [0] * case.world
    kinds = 1 if case.model == "mixtral" else 2  # gpt_oss attends to windows in every other one
    assert [graphs for _, graphs, _ in ranks] == [kinds + 1] * case.world


def calls_in_graphs() -> list[list[str]]:
    """On one rank: of each graph of a block with experts, its products and calls, in order."""
    sizes = {"n_experts": EXPERTS, "force_balance": True}
    sizes |= {"n_layers": 1, "first_dense_layers": 0, "ffn_dim": 0}
    config, spec = small_config("deepseek_v3", **sizes), MODELS["deepseek_v3"]
    with torch.device("meta"):
        model = build_model("deepseek_v3", config, BACKENDS["math"])
    passes = Passes(
        units=spec.units(config),
        blocks="blocks.*",
        parallel=layout(2),
        compile=INDUCTOR,
        init=(7, functools.partial(spec.init_parameter, config)),
        experts=ExpertLayers(spec.experts, "symmetric_memory"),
    )
    applied = apply_passes(model, Mesh(dp_shard=2, ep=2), passes)
    tokens = torch.randint(config.vocab_size, (2, 64))
    model = applied.parts[0]

    def run() -> None:
        model(tokens).square().mean().backward()
        with torch.no_grad():
            model(tokens)

    _, codes = run_and_get_code(run)
    call = re.compile(r"= torch\.ops\.dtron\.(peers_move|peers_arrived)|kernels\.(mm)\(")
    calls = [["".join(found) for found in call.findall(code)] for code in codes]
    return [found for found in calls if "peers_move" in found]


@pytest.mark.matrix  # as in tests/parallelisms/expert/test_expert_parallel.py, eager
def test_compiled_blocks_compute_shared_experts_while_rows_travel() -> None:
    """And their gradients while those of rows do: three products, and at least twice as many; the
    last graph is that without gradients."""
    graphs, _ = run_ranks(2, calls_in_graphs, seconds=240)
    between = [
        [len(part.split()) for part, _ in re.findall(r"move(( mm)*) peers_arr", " ".join(calls))]
        for calls in graphs
    ]
    forward, backward, evaluation = between
    assert forward == evaluation == [3, 0]
    assert backward[0] == 0
    assert backward[1] >= 6  # torch 2.15 has products of other gradients there too


def layers_on_a_gpu(
    kind: Callable[..., Dispatcher], loads: str, dtype: torch.dtype
) -> list[Tensor]:
    """Results and gradients of two layers; with bounded buffers the host waits for nothing."""
    rank, n_ranks, n_rows, width = dist.get_rank(), dist.get_world_size(), 4096, 256
    dispatcher = kind(dist.group.WORLD, n_ranks, 1, float(n_ranks))
    sizes = {"n_experts": EXPERTS // n_ranks, "experts_per_token": 2, "dim": width}
    experts = moe.Experts(small_config("mixtral", **sizes)).to("cuda", dtype)
    torch.manual_seed(rank)
    for parameter in experts.parameters():
        parameter.data.normal_(0, 0.1)
    compute, found = functools.partial(experts, tail=False), []
    layer = layer_of(dispatcher, "layer", "cuda")
    for i in range(3):  # in the first one memory is made
        rows, offsets = drawn(loads, rank, i, n_rows, width)
        rows, offsets = rows.to("cuda", dtype).requires_grad_(), offsets.cuda()
        torch.cuda.synchronize()
        if i and kind is not AllToAll and dtype is torch.bfloat16:  # float32's products wait
            torch.cuda.set_sync_debug_mode("error")
        if rank == i % n_ranks:
            torch.cuda._sleep(10**7)  # this rank is late
        try:
            out = dispatcher.finish(dispatcher.begin(rows, offsets, layer), compute)
            gradients = torch.autograd.grad(out.square().sum(), (rows, *experts.parameters()))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        found += [out.detach(), *gradients]
    assert not dispatcher.grow(torch.device("cuda"))
    return found


def model_gradients(parallel: Parallel, mode: str, compiled: bool) -> tuple[dict[str, Tensor], int]:
    """In bfloat16, on one rank: gradients of a model, and how many graphs its blocks are. Tokens
    take experts in turn: of scores that rounding decides between others would be chosen."""
    sizes = {"n_experts": EXPERTS, "dim": 128, "n_layers": 3, "force_balance": True}
    config, spec = small_config("mixtral", **sizes), MODELS["mixtral"]
    with torch.device("meta"):
        model = build_model("mixtral", config, BACKENDS["math"])
    n_ranks = dist.get_world_size()
    mesh = Mesh(dp_shard=n_ranks, ep=n_ranks)
    passes = Passes(
        units=spec.units(config),
        blocks="blocks.*",
        parallel=parallel,
        recompute=Recompute(mode=mode),  # type: ignore[arg-type]
        compile=EAGER if compiled and mesh.device_type == "cpu" else Compile(enable=compiled),
        init=(7, functools.partial(spec.init_parameter, config)),
        experts=ExpertLayers(spec.experts, parallel.dispatcher, capacity=float(n_ranks)),
    )
    torch._dynamo.reset()
    counters.clear()
    applied = apply_passes(model, mesh, passes)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(2):  # the second reuses what the first one made
        tokens = torch.randint(config.vocab_size, (2, 64), generator=generator)
        applied.parts[0](tokens.to(mesh.device_type)).float().square().mean().backward()
    assert not counters["graph_break"] or not compiled
    gradients = whole(applied, [p.grad for _, p in applied.named_parameters()])  # type: ignore[misc]
    return gradients, counters["stats"]["unique_graphs"]


def compiled_equals_eager(dispatcher: str = "symmetric_memory") -> None:
    """On one rank: compiled blocks that keep some results, with bounded buffers, and eager ones
    that keep all, by all-to-all."""
    n_ranks = dist.get_world_size()
    bounded = Parallel(ep=n_ranks, dispatcher=dispatcher)  # type: ignore[arg-type]
    wanted, _ = model_gradients(Parallel(ep=n_ranks), "none", False)
    found, graphs = model_gradients(bounded, "selective", True)
    assert graphs == 1
    for name, other in wanted.items():
        apart = (found[name] - other).norm() / other.norm()
        assert apart <= 2e-2, (name, float(apart))


@pytest.mark.parametrize("dispatcher", ["symmetric_memory", "bounded_all_to_all"])
def test_compiled_blocks_in_bfloat16_equal_eager_ones(dispatcher: str) -> None:
    """Whose products are grouped ones, also in the graph."""
    run_ranks(2, compiled_equals_eager, dispatcher, seconds=240)


@pytest.mark.gpu
@pytest.mark.parametrize("n_gpus", [2, 4])
def test_equals_all_to_all_on_gpus(n_gpus: int) -> None:
    """Layers, and the blocks of a model: compiled whole, with selective recomputation."""
    run_on_gpus(n_gpus, on_gpus)


def on_gpus() -> None:
    """On one of the ranks. Rows of an expert are in the same order either way, so that products are
    of the same numbers."""
    for loads in LOADS:
        for dtype, tolerance in ((torch.bfloat16, 1e-2), (torch.float32, 1e-3)):
            wanted = layers_on_a_gpu(AllToAll, loads, dtype)
            for kind in (SymmetricMemory, BoundedAllToAll):
                found = layers_on_a_gpu(kind, loads, dtype)
                for i, (one, other) in enumerate(zip(found, wanted, strict=True)):
                    difference = (one.float() - other.float()).norm()
                    apart = difference / other.float().norm().clamp(min=1e-9)
                    assert apart <= tolerance, (kind, loads, dtype, i, float(apart))
    compiled_equals_eager()
    compiled_equals_eager("bounded_all_to_all")
