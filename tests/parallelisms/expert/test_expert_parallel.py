"""What expert parallelism communicates, waits for, and does with loads of any kind."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard
from torch.profiler import profile

from dtron.config import Compile, Float8, Parallel, Recompute
from dtron.errors import ConfigError
from dtron.models.router import Router
from dtron.parallelisms.expert.all_to_all import AllToAll
from dtron.parallelisms.expert.dispatchers import dispatcher_class
from dtron.parallelisms.expert.expert_parallel import shared_dim
from dtron.run.collective_counter import CollectiveCounter
from dtron.training.step import as_micro_batch
from tests.harness import run_ranks
from tests.parallelisms import parity
from tests.parallelisms.parity import (
    Case,
    Outcome,
    build_parallel,
    deviations,
    make_batch,
    mesh_of,
    parallel_run,
)


def test_an_unknown_dispatcher_is_named() -> None:
    with pytest.raises(ConfigError, match=r"'deep_ep' is unknown; did you mean deepep.*use one"):
        dispatcher_class("deep_ep")
    assert dispatcher_class(AllToAll) is dispatcher_class("all_to_all") is AllToAll


WAITS = [
    "tolist",
    "item",
    "cpu",
    "numpy",
    "nonzero",
    "__bool__",
    "__int__",
    "__float__",
    "__index__",
]
"""Methods of a tensor by which the host would wait for a GPU."""
EVEN = {"force_balance": True, "balance": "none", "balance_coefficient": 0.0}
FLOAT, LONG = 4, 8
COMPILED = Compile(enable=True, backend="aot_eager")
TOKENS, DIM, EXPERTS, TOP_K = 16, 24, 8, 3


def count_waits() -> Counter[str]:
    """From now on, by method; in this process, which ends afterwards."""
    counts: Counter[str] = Counter()

    def counted(name: str) -> Callable:
        method = getattr(Tensor, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[name] += 1
            return method(*args, **kwargs)

        return call

    for name in WAITS:
        setattr(Tensor, name, counted(name))
    return counts


def count_pass(case: Case) -> dict[str, dict[str, int]]:
    """On one rank: all-to-alls, their bytes, and waits, forward and backward."""
    config, layout = case.resolved()
    mesh = mesh_of(case)
    applied = build_parallel(case, config, layout, mesh)
    tokens, others = as_micro_batch(make_batch(case, range(1), 0))
    found: dict[str, dict[str, int]] = {}
    total, waits = torch.zeros(()), count_waits()
    for way in ("forward", "backward"):
        before = waits.total()
        with CollectiveCounter(mesh.group_names()) as made:
            if way == "forward":
                total = applied.parts[0](tokens, **others).square().sum()
            else:
                total.backward()
        waited = waits.total() - before
        sent = [axis["all_to_all"] for axis in made.table().values() if "all_to_all" in axis]
        summed = {key: sum(each[key] for each in sent) for key in ("count", "bytes")}
        found[way] = {"waits": waited, **summed}
    return found


def layer(case: Case) -> list[dict[str, dict[str, int]]]:
    """By rank, what one more layer with experts costs."""
    cases = [replace(case, override={**case.override, "n_layers": n}) for n in (1, 2)]
    few, many = (run_ranks(case.world, count_pass, each) for each in cases)
    return [
        {way: {key: two[way][key] - one[way][key] for key in two[way]} for way in two}
        for one, two in zip(few, many, strict=True)
    ]


@pytest.mark.parametrize("etp", [1, 2])
def test_a_layer_waits_once_and_sends_rows_both_ways(etp: int) -> None:
    """Counts, rows, results; then two gradients. Loads are even: a rank sends as much as it gets,
    each row once to each etp rank."""
    case = Case("mixtral", 4, Parallel(ep=4 // etp, etp=etp), override=EVEN)
    counts = EXPERTS * etp * LONG
    rows = TOKENS * TOP_K * DIM * FLOAT * etp
    for of_rank in layer(case):
        assert of_rank["forward"] == {"waits": 1, "count": 3, "bytes": counts + 2 * rows}
        assert of_rank["backward"] == {"waits": 0, "count": 2, "bytes": 2 * rows}


FIXED: dict[str, Any] = {"dispatcher": "bounded_all_to_all"}
LETTERS = {
    "_c10d_functional::all_to_all_single": "i",
    "_c10d_functional::wait_tensor": "w",
    "aten::mm": "m",
    "aten::_grouped_mm": "g",
}
"""issue, wait, a product, one of experts"""
THERE, BACK = "iwi(m*)wg[gm]*iw", "iwg[gm]*i(m*)w"
"""Of a layer: counts, rows, results; gradients of results, gradients of rows. On a CPU products of
experts are made of others."""


def order_of_pass(case: Case) -> dict[str, str]:
    """On one rank: what its second forward and backward do in turn, in LETTERS."""
    config, layout = case.resolved()
    applied = build_parallel(case, config, layout, mesh_of(case))
    tokens, others = as_micro_batch(make_batch(case, range(1), 0))
    found = {}
    for _ in range(2):  # the first one compiles
        with profile() as forward:
            total = applied.parts[0](tokens, **others).square().sum()
        with profile() as backward:
            total.backward()
        found = {"forward": letters(forward), "backward": letters(backward)}
    return found


def letters(seen: profile) -> str:
    events = sorted(seen.events() or [], key=lambda event: event.time_range.start)
    return "".join(LETTERS.get(event.name, "") for event in events)


@pytest.mark.parametrize(
    ("case", "products"),
    [
        (Case("deepseek_v3", 2, Parallel(ep=2)), 3),
        (Case("deepseek_v3", 2, Parallel(ep=2), Recompute(mode="full"), COMPILED), 3),
        (Case("deepseek_v3", 2, Parallel(ep=2), float8=Float8(dispatch=True)), 3),
        (Case("mixtral", 2, Parallel(ep=2)), 0),
    ],
    ids=str,
)
def test_shared_experts_are_computed_while_rows_travel(case: Case, products: int) -> None:
    """In the forward their products, in the backward those of both gradients; in every layer."""
    again = 1 if case.recompute.mode == "full" else 0
    for found in run_ranks(2, order_of_pass, replace(case, override={"n_layers": 4}), seconds=120):
        forward, backward = found["forward"], found["backward"]
        there, layers = re.findall(THERE, forward), forward.count("iwi")
        assert layers > 1
        assert there == ["m" * products] * layers, forward
        assert re.findall(BACK, backward) == ["m" * 2 * products] * layers, backward
        assert re.findall(THERE, backward) == there * again, backward


@pytest.mark.parametrize("compiled", [False, True])
def test_shared_experts_are_computed_while_chunks_travel(compiled: bool) -> None:
    """In the forward, where counts travel too, also in one graph; eager in the backward too."""
    changes = {"recompute": Recompute(mode="full"), "compile": COMPILED} if compiled else {}
    case = Case("deepseek_v3", 2, Parallel(ep=2, **FIXED), override={"n_layers": 4}, **changes)
    for found in run_ranks(2, order_of_pass, case, seconds=120):
        layers = found["forward"].count("ii")
        assert layers > 1
        assert re.findall("ii(m*)ww", found["forward"]) == ["mmm"] * layers, found
        if not compiled:
            assert re.findall(BACK, found["backward"]) == ["m" * 6] * layers, found


def test_recomputation_waits_and_sends_again() -> None:
    case = Case("mixtral", 2, Parallel(ep=2), recompute=Recompute(mode="full"))
    for of_rank in layer(case):
        assert of_rank["forward"]["waits"] == of_rank["backward"]["waits"] == 1
        assert of_rank["forward"]["count"] == 3
        assert of_rank["backward"]["count"] == 3 + 2


@pytest.mark.parametrize("parallel", [Parallel(tp=2), Parallel(dp_shard=2)], ids=["tp", "dp_shard"])
def test_experts_that_stay_wait_for_nothing(parallel: Parallel) -> None:
    nothing = {"waits": 0, "count": 0, "bytes": 0}
    for of_rank in layer(Case("qwen3_moe", 2, parallel)):
        assert of_rank == {"forward": nothing, "backward": nothing}


@pytest.mark.parametrize("etp", [1, 2])
def test_symmetric_memory_waits_for_nothing(etp: int) -> None:
    parallel = Parallel(ep=4 // etp, etp=etp, dispatcher="symmetric_memory")
    for of_rank in layer(Case("mixtral", 4, parallel, Recompute(mode="full"))):
        for way in ("forward", "backward"):
            assert of_rank[way] == {"waits": 0, "count": 0, "bytes": 0}


@pytest.mark.parametrize("etp", [1, 2])
def test_all_to_alls_of_a_fixed_size_wait_for_nothing(etp: int) -> None:
    """What is sent is what fits, also with uneven loads: here all rows to any rank."""
    case = Case("mixtral", 4, Parallel(ep=4 // etp, etp=etp, **FIXED))
    ends, rows = EXPERTS * etp * LONG, TOKENS * TOP_K * DIM * FLOAT * 4
    for of_rank in layer(case):
        assert of_rank["forward"] == {"waits": 0, "count": 3, "bytes": ends + 2 * rows}
        assert of_rank["backward"] == {"waits": 0, "count": 2, "bytes": 2 * rows}


def first_experts(
    self: Router, logits: Tensor, scores: Tensor, real: Tensor | None = None
) -> Tensor:
    """All tokens take the experts 0, 1, 2."""
    del logits, real
    chosen = torch.arange(self.top_k, device=scores.device)
    return chosen.expand(*scores.shape[:-1], self.top_k)


def run_with_first_experts(case: Case) -> dict[str, Any]:
    Router._choose = first_experts  # type: ignore[method-assign]
    return parallel_run(case)


@pytest.mark.parametrize(
    "case",
    [
        Case("qwen3_moe", 4, Parallel(ep=4)),
        Case("gpt_oss", 4, Parallel(ep=2, etp=2)),
        Case("deepseek_v3", 4, Parallel(ep=2, tp=2), Recompute(mode="full")),
        Case("qwen3_moe", 4, Parallel(ep=4, dispatcher="symmetric_memory")),
        Case("qwen3_moe", 4, Parallel(ep=4, **FIXED)),
    ],
    ids=str,
)
def test_ranks_with_all_rows_and_with_none(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 8 experts three get every token and five nothing: whole ranks have no row."""
    monkeypatch.setattr(parity, "_REFERENCES", {})
    monkeypatch.setattr(Router, "_choose", first_experts)
    found = deviations(case, run_ranks(case.world, run_with_first_experts, case))
    assert not Outcome(found).wrong(case)
    loads = parity.reference(case)["loads"]
    assert all(
        load[3:] == [0] * 5 and min(load[:3]) > 0 for each in loads.values() for load in each
    )


def placements(case: Case) -> dict[str, tuple[tuple[str, ...], tuple]]:
    """On one rank: mesh axes and placements of the experts of the last layer."""
    config, layout = case.resolved()
    applied = build_parallel(case, config, layout, mesh_of(case))
    return {
        name.split(".")[-1]: (parameter.device_mesh.mesh_dim_names, parameter.placements)  # type: ignore[attr-defined]
        for name, parameter in applied.named_parameters()
        if name.startswith("blocks.4.ffn.experts.")
    }


def test_experts_are_split_by_their_own_axes() -> None:
    """E over ep, width over etp; what is left, over edp_shard, along the first dim that fits."""
    case = Case("gpt_oss", 8, Parallel(tp=2, cp=2, ep=2, etp=2), override={"n_experts": 6})
    found = run_ranks(8, placements, case)[0]
    axes = ("edp_shard", "ep", "etp")
    assert found["gate"] == (axes, (Shard(2), Shard(0), Shard(1)))
    assert found["down"] == (axes, (Shard(1), Shard(0), Shard(2)))
    assert found["down_bias"][1][1:] == (Shard(0), Shard(1))
    whole = run_ranks(2, placements, Case("mixtral", 2, Parallel(tp=2)))[0]
    assert whole["up"] == (("edp_shard",), (Shard(0),))
    alone = run_ranks(2, placements, Case("mixtral", 2, Parallel(ep=2)))[0]
    assert alone["up"][1][1:] == (Shard(0), Replicate())


def test_dim_that_ranks_share() -> None:
    assert shared_dim((5, 6, 8), set(), 4) == 0  # uneven, but nothing else splits it
    assert shared_dim((4, 6, 8), {0}, 4) == 0
    assert shared_dim((2, 6, 8), {0}, 4) == 2
    assert shared_dim((2, 8, 8), {0, 1}, 4) == 2
    assert shared_dim((2, 8), {0, 1}, 4) == 1
    with pytest.raises(ConfigError, match=r"leave 4 ranks .* divides no dim of"):
        shared_dim((2, 6, 10), {0}, 4)
