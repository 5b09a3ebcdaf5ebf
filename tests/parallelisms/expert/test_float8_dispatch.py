"""float8 dispatch: rows and gradients of results are cast on their way to experts, no others."""

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from dtron.config import Compile, Float8, Parallel, Recompute, RunConfig
from dtron.errors import ConfigError
from dtron.kernels.float8_rows import wire_bytes
from dtron.parallelisms.expert import symmetric_exchange as mailbox
from dtron.parallelisms.expert.all_to_all import AllToAll
from dtron.parallelisms.expert.deepep import DeepEP
from dtron.parallelisms.expert.dispatcher import Dispatcher
from dtron.parallelisms.expert.symmetric_dispatch import SymmetricMemory
from dtron.setup.rules import MachineCandidate, check_dispatcher
from tests.gpu_ranks import run_on_gpus
from tests.harness import run_ranks
from tests.parallelisms.expert.test_expert_parallel import (
    DIM,
    EVEN,
    FLOAT,
    LONG,
    TOKENS,
    TOP_K,
    layer,
)
from tests.parallelisms.expert.test_symmetric_dispatch import (
    EXPERTS,
    LOADS,
    Layer,
    compute_of,
    drawn,
    layer_of,
)
from tests.parallelisms.parity import SIZES, Case, casting, check, parallel_run

WIDTH = 200
"""Of a row: a whole tile and a part of one."""
DISPATCH = Float8(dispatch=True)
Kind = Callable[..., Dispatcher]


def moved(kind: Kind, float8: bool, own_casts: bool, etp: int, dtype: torch.dtype) -> list[Tensor]:
    """On one rank: results, gradients of rows and of experts, of a layer with each kind of load."""
    rank, ep = dist.get_rank(), dist.get_world_size() // etp
    dispatcher = kind(dist.group.WORLD, ep, etp, float(ep), float8)
    weights = torch.arange(1, EXPERTS * WIDTH + 1, dtype=torch.float64).view(EXPERTS, WIDTH) / 700
    own = weights.to(dtype).chunk(ep)[rank // etp].clone().requires_grad_()
    compute = compute_of(own, 1 / (1 + rank % etp))
    compute = casting(compute) if own_casts else compute
    found = []
    for i, loads in enumerate(LOADS):
        rows, offsets = drawn(loads, rank, i, width=WIDTH)
        rows = rows.to(dtype).requires_grad_()
        pending = dispatcher.begin(rows, offsets, layer_of(dispatcher, loads))
        out = dispatcher.finish(pending, compute)
        total = (out.double() * (rank + 1)).square().sum()
        found += [out.detach(), *torch.autograd.grad(total, [rows, own])]
    return found


def equals_experts_that_cast(kind: Kind, etp: int) -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        found = moved(kind, True, False, etp, dtype)
        wanted, without = (moved(kind, False, casts, etp, dtype) for casts in (True, False))
        assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))
        changed = [not torch.equal(*pair) for pair in zip(found, without, strict=True)]
        assert changed[:3] == [True] * 3  # results and both gradients


@pytest.mark.parametrize(("world", "etp"), [(2, 1), (2, 2), (4, 2)])
@pytest.mark.parametrize("kind", [AllToAll, SymmetricMemory])
def test_equals_experts_that_cast_what_they_get(kind: Kind, world: int, etp: int) -> None:
    """Every bit of results and gradients, in either dispatcher, for loads of any kind."""
    run_ranks(world, equals_experts_that_cast, kind, etp)


def compiled_equals_all_to_all() -> None:
    rank, n_ranks = dist.get_rank(), dist.get_world_size()
    found: list[list[Tensor]] = []
    for kind, compiled in ((AllToAll, False), (SymmetricMemory, False), (SymmetricMemory, True)):
        torch._dynamo.reset()
        dispatcher = kind(dist.group.WORLD, n_ranks, 1, float(n_ranks), True)  # type: ignore[arg-type]
        weights = torch.arange(1.0, EXPERTS * WIDTH + 1, dtype=torch.float64).view(EXPERTS, WIDTH)
        own = (weights / 700).chunk(n_ranks)[rank]
        layers = torch.nn.ModuleList([Layer(dispatcher, f"layer {i}", own) for i in range(2)])
        rows, offsets = drawn("random", rank, width=WIDTH)
        hidden = rows.requires_grad_()
        for each in layers:
            call = torch.compile(each, fullgraph=True, dynamic=False) if compiled else each
            hidden = call(hidden, offsets)
        hidden.square().sum().backward()
        found.append([hidden.detach(), *(x.grad for x in (rows, *layers.parameters()))])  # type: ignore[misc]
    for one, two, three in zip(*found, strict=True):
        torch.testing.assert_close(two, one, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(three, one, rtol=1e-12, atol=1e-12)


def test_compiled_layers_equal_eager_ones() -> None:
    """By symmetric memory, in one graph, forward and backward."""
    run_ranks(2, compiled_equals_all_to_all, seconds=240)


def not_finite(kind: Kind) -> None:
    """An infinite element of a row, or of a gradient, comes out, of its own row alone."""
    dispatcher = kind(dist.group.WORLD, 2, 1, 2.0, True)
    where = layer_of(dispatcher, "layer")
    for way in ("forward", "backward"):
        rows, offsets = drawn("random", dist.get_rank(), width=WIDTH)
        bad = torch.zeros_like(rows)
        bad[0, 7] = torch.inf if dist.get_rank() == 0 else 0.0
        rows = (rows + bad if way == "forward" else rows).requires_grad_()
        out = dispatcher.finish(dispatcher.begin(rows, offsets, where), lambda x, _: 2 * x)
        out.backward(torch.ones_like(out) + (bad if way == "backward" else 0))
        seen = out if way == "forward" else rows.grad
        assert seen is not None
        assert bool(seen[0].isfinite().all()) == (dist.get_rank() == 1)
        assert seen[1:].isfinite().all()


@pytest.mark.parametrize("kind", [AllToAll, SymmetricMemory])
def test_what_is_not_finite_stays_so(kind: Kind) -> None:
    run_ranks(2, not_finite, kind)


@pytest.mark.parametrize("etp", [1, 2])
def test_bytes_of_all_to_alls(etp: int) -> None:
    """24 numbers and a scale are 28 bytes, padded to 32, where 24 of float32 are 96: rows and
    results' gradients. As many messages and waits as without."""
    case = Case("mixtral", 4, Parallel(ep=4 // etp, etp=etp), override=EVEN, float8=DISPATCH)
    counts, rows = EXPERTS * etp * LONG, TOKENS * TOP_K * etp
    both = rows * (32 + DIM * FLOAT)
    for of_rank in layer(case):
        assert of_rank["forward"] == {"waits": 1, "count": 3, "bytes": counts + both}
        assert of_rank["backward"] == {"waits": 0, "count": 2, "bytes": both}


def rows_in_memory() -> list[tuple[int, ...]]:
    """On one rank: the shapes of what is pulled in float8, and how many rows come of it."""
    found: list[tuple[int, ...]] = []
    pull = mailbox.packed_rows_of_peers

    def seen(peers: list[Tensor], slots: Tensor, *args: Any) -> Tensor:
        assert all(rows.dtype == torch.uint8 for rows in peers)
        found.append((*peers[0].shape, len(slots)))
        return pull(peers, slots, *args)

    mailbox.packed_rows_of_peers = seen
    moved(SymmetricMemory, True, False, 1, torch.float32)
    mailbox.packed_rows_of_peers = pull
    return found


def test_bytes_in_shared_memory() -> None:
    """Of each layer rows and results' gradients."""
    for shapes in run_ranks(2, rows_in_memory):
        assert shapes == [(24, 208, 48)] * (2 * len(LOADS))
    assert wire_bytes(WIDTH) == 208


WIDE = {"dim": 144, "n_layers": 3, "first_dense_layers": 1}
EIGHT: dict[str, Any] = {"dtype": "float64", "float8": DISPATCH}
SYMMETRIC: dict[str, Any] = {"dispatcher": "symmetric_memory"}
CASES = [
    Case("deepseek_v3", 2, Parallel(ep=2), override=WIDE, **EIGHT),
    Case("deepseek_v3", 2, Parallel(ep=2, **SYMMETRIC), override=WIDE, **EIGHT),
    Case("mixtral", 4, Parallel(ep=2, etp=2), Recompute(mode="full"), **EIGHT),
    Case("mixtral", 4, Parallel(ep=2, pp=2, schedule="ZBVZeroBubble"), **EIGHT),
    Case(
        "deepseek_v3",
        2,
        Parallel(ep=2, tp=2, **SYMMETRIC),
        Recompute(mode="selective"),
        Compile(enable=True, backend="aot_eager"),
        WIDE,
        **EIGHT,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_models_equal_one_process_whose_experts_cast(case: Case) -> None:
    """Losses, gradients and parameters after two steps."""
    check(case)


def test_beside_a_recipe_and_experts_in_float8() -> None:
    sizes = {"dim": 32, "head_dim": 16, "expert_dim": 32, "n_layers": 2}
    settings = Float8(recipe="rowwise", experts=True, dispatch=True)
    case = Case("mixtral", 2, Parallel(ep=2), override=sizes, dtype="float64", float8=settings)
    check(replace(case, seq_len=32, sequences=4))


def test_losses_and_gradients_are_near_those_without() -> None:
    """A number in E4M3 is off by a part in 16 at most, half a step of 3 bits. So are gradients, of
    which each number is a sum of products with some; a loss is a sum over all n numbers that were
    cast, off one way or the other: by a part in 16 sqrt(n)."""
    case = replace(CASES[0], override={})
    kinds = {
        "without": replace(case, float8=Float8()),
        "all_to_all": case,
        "symmetric_memory": replace(case, parallel=Parallel(ep=2, **SYMMETRIC)),
    }
    ranks = {name: run_ranks(2, parallel_run, each)[0] for name, each in kinds.items()}
    without = ranks.pop("without")
    exact = torch.cat([g.flatten() for g in without["gradients"].values()])
    layers = SIZES[case.model]["n_layers"] - SIZES[case.model]["first_dense_layers"]
    n = case.sequences * case.seq_len * SIZES[case.model]["experts_per_token"] * DIM * layers
    for found in ranks.values():
        gradients = torch.cat([found["gradients"][name].flatten() for name in without["gradients"]])
        assert 2**-8 <= (gradients - exact).norm() / exact.norm() <= 2**-4
        for loss, other in zip(found["losses"], without["losses"], strict=True):
            assert 0 < abs(loss / other - 1) <= 2**-4 / n**0.5
    one, two = (found["losses"] for found in ranks.values())
    assert one == pytest.approx(two, rel=1e-10)


def refusal(parallel: Parallel, model: str = "mixtral", **more: Any) -> str:
    return Case(model, 4, parallel, float8=Float8(dispatch=True, **more)).refusal()


def test_what_cannot_act_or_is_not_followed_is_refused() -> None:
    alone = "float8.dispatch = True has no effect without parallel.ep > 1 or parallel.etp > 1"
    assert alone in refusal(Parallel())
    assert alone in refusal(Parallel(tp=2), "qwen3_moe", recipe="rowwise")
    assert alone in refusal(Parallel(), "llama")
    assert "parallel.ep = 2 has no effect without" in refusal(Parallel(ep=2), "llama")
    assert not refusal(Parallel(ep=2))
    assert not refusal(Parallel(etp=2, **SYMMETRIC))
    deepep = refusal(Parallel(ep=2, dispatcher="deepep"))
    assert 'float8.dispatch with parallel.dispatcher = "deepep"' in deepep
    assert '"all_to_all"' in deepep


def deepep_by_hand() -> None:
    with pytest.raises(ConfigError, match="DeepEP gets rows in bfloat16 only"):
        DeepEP(dist.group.WORLD, 2, 1, 2.0, True)  # type: ignore[arg-type]


def old_gpus() -> None:
    dispatcher = SymmetricMemory(dist.group.WORLD, 2, 1, 2.0, True)  # type: ignore[arg-type]
    torch.cuda.get_device_capability = lambda *_: (8, 0)
    with pytest.raises(ConfigError, match=r"compute capability 8\.9"):
        dispatcher.layer("layer", torch.device("cuda"))


@pytest.mark.parametrize(
    ("capability", "dispatcher", "refused"),
    [
        ((8, 0), "symmetric_memory", True),
        ((8, 9), "symmetric_memory", False),
        ((9, 0), "symmetric_memory", False),
        ((8, 0), "all_to_all", False),  # whose casts torch computes
    ],
)
def test_old_gpus_are_refused_before_the_start(
    capability: tuple[int, int], dispatcher: str, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    run = RunConfig.of(
        {
            "model": {"name": "mixtral", "size": "debug"},
            "parallel": {"ep": 2, "dispatcher": dispatcher},
            "float8": {"dispatch": True},
        }
    )
    messages = pytest.raises(ConfigError, match=r"compute capability 8\.9")
    with messages if refused else nullcontext():
        check_dispatcher(MachineCandidate(run, 2, torch.device("cuda")))
    check_dispatcher(MachineCandidate(run, 2, torch.device("cpu")))


@pytest.mark.parametrize("act", [deepep_by_hand, old_gpus])
def test_dispatchers_by_hand_refuse_too(act: Callable[[], None]) -> None:
    run_ranks(2, act)


def moved_on_a_gpu(kind: Kind, float8: bool, dtype: torch.dtype) -> list[Tensor]:
    """Results and gradients of rows; without float8 experts cast."""
    rank, n_ranks, device = dist.get_rank(), dist.get_world_size(), torch.device("cuda")
    rows, offsets = drawn("random", rank, 0, 4096, 2048)
    own = torch.linspace(0.5, 2, EXPERTS, device=device).to(dtype).chunk(n_ranks)[rank]

    def compute(x: Tensor, ends: Tensor) -> Tensor:
        place = torch.arange(len(x), dtype=torch.int32, device=device)
        expert = torch.searchsorted(ends, place, right=True).clamp(max=len(own) - 1)
        return x * own[expert].unsqueeze(1)

    dispatcher = kind(dist.group.WORLD, n_ranks, 1, float(n_ranks), float8)
    where, x = layer_of(dispatcher, "layer", "cuda"), rows.to(device, dtype).requires_grad_()
    pending = dispatcher.begin(x, offsets.to(device), where)
    out = dispatcher.finish(pending, compute if float8 else casting(compute))
    return [out.detach(), *torch.autograd.grad(out.float().square().sum(), x)]


def on_gpus() -> None:
    """On one of the ranks."""
    for dtype in (torch.bfloat16, torch.float32):
        wanted = moved_on_a_gpu(AllToAll, False, dtype)
        for kind in (AllToAll, SymmetricMemory):
            found = moved_on_a_gpu(kind, True, dtype)
            assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True)), kind


@pytest.mark.gpu
@pytest.mark.parametrize("n_gpus", [2, 4])
def test_equals_experts_that_cast_what_they_get_on_gpus(n_gpus: int) -> None:
    run_on_gpus(n_gpus, on_gpus)
