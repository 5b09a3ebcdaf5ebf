"""Blocks of a model share one compiled graph, however many there are."""

from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from dtron.config import Compile, Parallel, Recompute
from tests.harness import run_ranks
from tests.parallelisms.parity import Case, float8, parallel_run

COMPILED = Compile(enable=True, backend="aot_eager")
LAYOUTS = [
    Case("llama", 1),
    Case("gpt", 1, override={"dropout": 0.2}),
    Case("llama", 2, documents=True),
    Case("llama", 2, Parallel(tp=2)),
    Case("llama", 2, Parallel(pp=2, schedule="ZBVZeroBubble")),
    *[
        Case("llama", 2, Parallel(cp=2, cp_method=name))
        for name in ("ring", "all_gather", "ulysses")
    ],
    Case("llama", 4, Parallel(cp=4, cp_method="hierarchical")),
    Case("llama", 2, Parallel(cp=2), documents=True),
    Case("mixtral", 2),
    Case("mixtral", 2, Parallel(ep=2)),
    Case("deepseek_v3", 2, Parallel(tp=2)),
    Case("deepseek_v3", 2, recompute=Recompute(mode="selective")),
    float8("tensorwise", 2, Parallel()),
    float8("tensorwise", 2, Parallel(), float8={"all_gather": True}),
    float8("rowwise", 2, Parallel(tp=2), dtype="float32"),
    float8("tensorwise", 2, Parallel(cp=2)),
    float8("tensorwise", 2, Parallel(cp=2), float8={"scaling": "delayed"}),
]
MEMORY = [
    Recompute(mode="full"),
    Recompute(mode="attention"),
    Recompute(mode="selective"),
    Recompute(offload=True),
    Recompute(mode="full", offload=True),
    Recompute(mode="selective", offload=True),
]
CASES = [
    *LAYOUTS,
    *[Case("llama", 2, recompute=options) for options in MEMORY],
    *[Case("llama", 2, Parallel(cp=2), recompute=options) for options in MEMORY[::2]],
]


def graphs(case: Case) -> int:
    """How many graphs a rank compiles in two steps."""
    torch._dynamo.reset()
    counters.clear()
    parallel_run(case)
    return counters["stats"]["unique_graphs"]


def expected(case: Case, rank: int) -> int:
    """One of each kind of block, of which one that waits for experts elsewhere is two, and one of
    the loss, which under pp the first rank has, as the last stage of a V is there."""
    kinds = 2 if case.model == "deepseek_v3" else 1
    return kinds + (case.parallel.ep > 1) + (case.parallel.pp == 1 or rank == 0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_depth_adds_no_graph(case: Case) -> None:
    """A graph a block would be more than are expected."""
    depth = {**case.override, "n_layers": 6}
    case = replace(case, compile=COMPILED, sequences=4, override=depth)
    found = run_ranks(case.world, graphs, case)
    assert found == [expected(case, rank) for rank in range(case.world)]


def test_experts_on_other_ranks_break_their_blocks_once() -> None:
    """Into what comes before the experts and what comes after: with the loss three graphs, for all
    layers, and for all loads of both steps."""
    override = {"n_layers": 2}
    case = Case("mixtral", 2, Parallel(ep=2), compile=COMPILED, sequences=4)
    found = run_ranks(2, graphs, replace(case, override=override), seconds=120)
    assert found == [3, 3]
