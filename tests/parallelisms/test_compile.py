"""Blocks of a model share one compiled graph, however many there are."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from dtron.config import Compile, Lora, Parallel, Recompute
from dtron.models.moe import Experts
from dtron.parallelisms.compile import compile_activations
from tests.harness import run_ranks
from tests.models.build import small_config
from tests.parallelisms.parity import Batches, Case, float8, parallel_run, selected

COMPILED = Compile(enable=True, backend="aot_eager")
PULLED = Parallel(ep=2, dispatcher="symmetric_memory")
KINDS = {"deepseek_v3": 2, "qwen3_5": 2, "nemotron_h": 4, "gemma3": 2, "gemma4": 2}
"""Kinds of blocks of models that have several."""
LAYOUTS = [
    Case("llama", 1),
    Case("gpt", 1, override={"dropout": 0.2}),
    Case("llama", 2, documents=True),
    Case("llama", 2, Parallel(tp=2)),
    Case("llama", 2, Parallel(pp=2, schedule="ZBVZeroBubble")),
    *[Case("llama", 2, Parallel(cp=2, cp_method=name)) for name in ("ring", "ulysses")],
    Case("llama", 4, Parallel(cp=4, cp_method="hierarchical")),
    Case("llama", 2, Parallel(cp=2, cp_method="all_gather"), documents=True),
    *[Case(name, 2, Parallel(cp=2)) for name in KINDS if name != "deepseek_v3"],
    Case("mixtral", 2, Parallel(ep=2)),
    Case("mixtral", 2, PULLED, Recompute(mode="full")),
    Case("deepseek_v3", 2, PULLED, Recompute(mode="selective")),
    Case("deepseek_v3", 2, Parallel(tp=2)),
    Case("llama", 2, Parallel(tp=2), Recompute(mode="selective"), lora=Lora(rank=4)),
    Case("mixtral", 2, PULLED, lora=Lora(rank=4)),
    float8("tensorwise", 2, Parallel(), float8={"all_gather": True}),
    float8("blockwise", 2, Parallel(), float8={"all_gather": True}),
    float8("rowwise", 2, Parallel(tp=2), dtype="float32"),
    float8("tensorwise", 2, Parallel(cp=2), float8={"scaling": "delayed"}),
]
MEMORY = [
    Recompute(mode="full"),
    Recompute(mode="attention"),
    Recompute(mode="selective"),
    Recompute(offload=True),
    Recompute(mode="selective", offload=True),
]
CASES = [
    *LAYOUTS,
    *[Case("llama", 2, recompute=options) for options in MEMORY],
    Case("llama", 2, Parallel(cp=2), Recompute(mode="selective")),
]


def graphs(cases: Sequence[Case]) -> list[int]:
    """How many graphs a rank compiles in two steps, by case."""
    found = []
    for case in cases:
        torch._dynamo.reset()
        counters.clear()
        parallel_run(case)
        found.append(counters["stats"]["unique_graphs"])
    return found


@pytest.fixture(scope="module")
def graphs_of(request: pytest.FixtureRequest) -> Callable[[Case], list[int]]:
    """How many graphs each rank compiles for a case. Cases of one world size share processes: the
    compiler's own start is longer than most of them."""
    batches, found = Batches(selected(request)).batches, dict[str, list[int]]()

    def run(case: Case) -> list[int]:
        if str(case) not in found:
            (batch,) = [batch for batch in batches if case in batch]
            ranks = run_ranks(case.world, graphs, [compiled(c) for c in batch], seconds=300)
            found.update(zip(map(str, batch), map(list, zip(*ranks, strict=True)), strict=True))
        return found[str(case)]

    return run


def compiled(case: Case) -> Case:
    """The same with more layers than it has graphs."""
    override = {**case.override, "n_layers": 5 if case.model == "nemotron_h" else 4}
    return replace(case, compile=COMPILED, sequences=4, override=override)


def expected(case: Case, rank: int) -> int:
    """One of each kind of block, of which one whose rows leave by all-to-all is two and their
    activation, and one of the loss, which under pp the first rank has, as the last stage of a V
    is there. Delayed scales are those of the values themselves in the first step: twice as many."""
    kinds = KINDS.get(case.model, 1)
    if case.float8.scaling == "delayed":
        kinds *= 2
    broken = case.parallel.ep > 1 and case.parallel.dispatcher == "all_to_all"
    return kinds + 2 * broken + (case.parallel.pp == 1 or rank == 0)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_depth_adds_no_graph(case: Case, graphs_of: Callable[[Case], list[int]]) -> None:
    """A graph a block would be more than are expected."""
    assert graphs_of(case) == [expected(case, rank) for rank in range(case.world)]


@pytest.mark.parametrize(("name", "wanted"), [("mixtral", 4), ("deepseek_v3", 6)])
def test_experts_on_other_ranks_break_their_blocks(name: str, wanted: int) -> None:
    """Into what comes before the experts, what is computed while rows travel, if anything, and what
    comes after; with activation, loss and dense blocks as many graphs, for all layers, and for all
    loads of both steps."""
    override = {"n_layers": 4}
    case = Case(name, 2, Parallel(ep=2), compile=COMPILED, sequences=4)
    found = run_ranks(2, graphs, [replace(case, override=override)], seconds=120)
    assert found == [[wanted], [wanted]]


@pytest.mark.parametrize("activation", ["swiglu", "relu2"])
def test_activations_of_experts_are_one_graph_for_any_rows(activation: str) -> None:
    """And for all layers; none for no row and one, which compilers take for constants."""
    torch._dynamo.reset()
    counters.clear()
    layers = [Experts(small_config("mixtral", activation=activation)) for _ in range(2)]
    plain = layers[0].activate
    compile_activations(layers, COMPILED)
    for n_rows, layer in itertools.product([0, 7, 1, 96, 2], layers):
        inputs = [
            torch.randn(n_rows, 8, requires_grad=True) for _ in range(1 + layer.activation.gated)
        ]
        results = []
        for function in (plain, layer.activate):
            out = function(*inputs)
            results.append([out, *torch.autograd.grad(out.sum(), inputs)])
        torch.testing.assert_close(*results, rtol=0, atol=0)
    assert counters["stats"]["unique_graphs"] == 1
