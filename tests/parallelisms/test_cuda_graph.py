"""A step by a CUDA graph gives the bits of a step without one.

On CPUs a recorded step is repeated by calling the recorded function again on the recorded tensors,
which shows what is copied into them and what is read from them. On GPUs:

    pytest -m gpu tests/parallelisms/test_cuda_graph.py
"""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import dtron.training.build
from dtron.config import Compile, Float8, Parallel
from dtron.faults.corruption import compute_twice
from dtron.float8.all_gather import WeightGather
from dtron.parallelisms import cuda_graph
from dtron.parallelisms.cuda_graph import GradientGraph
from dtron.training.evaluation import Evaluation
from dtron.training.step import StepResult
from dtron.training.trainer import Trainer
from tests.gpu_ranks import run_on_gpus
from tests.harness import run_ranks
from tests.parallelisms import parity
from tests.parallelisms.gpu_cases import WIDTHS
from tests.parallelisms.parity import FULL, Case, RecordingStep, mesh_of, parallel_run

DROPPED = {"dropout": 0.1, "attention_dropout": 0.1}
STEPS = cuda_graph.WARM_UP + 3


class Repeated(GradientGraph):
    """Repeats a step by calling its function again, with results and gradients in one place."""

    def __init__(self, parameters: list[Tensor], device: torch.device) -> None:
        super().__init__(parameters, device, self.again)
        self.replays = 0

    def again(self, function: Callable[[], tuple[Tensor, ...]]) -> Any:
        results = function()
        gradients = [p.grad for p in self.parameters]

        def replay() -> None:
            self.replays += 1
            for p in self.parameters:
                p.grad = None
            for held, new in zip(results, function(), strict=True):
                held.copy_(new)
            for held, p in zip(gradients, self.parameters, strict=True):
                if held is not None:
                    assert p.grad is not None
                    held.copy_(p.grad)

        return replay, results


class StaleBatch(Repeated):
    """Planted: labels of the recorded step stay."""

    def __call__(self, compute: Any, batches: Any, step: int) -> tuple[Tensor, ...]:
        if self._recorded is not None:
            held = self._recorded.inputs[1].clone()
            batches = [replace(batches[0], labels=held), *batches[1:]]
        return super().__call__(compute, batches, step)


class StaleStep(Repeated):
    """Planted: the number of the recorded step stays, and with it the dropout."""

    def __call__(self, compute: Any, batches: Any, step: int) -> tuple[Tensor, ...]:
        return super().__call__(compute, batches, min(step, cuda_graph.WARM_UP))


class LostMicroBatch(Repeated):
    """Planted: the last micro-batch is not recorded."""

    def _record(self, compute: Any, batches: Any) -> Any:
        return super()._record(lambda held, step: compute(held[:-1], step), batches)


def pair(case: Case, graph: type[GradientGraph] = GradientGraph) -> list[dict[str, Any]]:
    """Results of a case without and with a graph."""
    found = []
    mesh = mesh_of(case)
    for chosen in ("off", "step"):
        compile = case.compile.model_copy(update={"cuda_graphs": chosen})
        dtron.training.build.GradientGraph = graph
        found.append(parallel_run(replace(case, compile=compile, steps=STEPS), mesh))
    return found


def differences(plain: dict[str, Any], graphed: dict[str, Any]) -> list[str]:
    """Names of results whose bits differ."""
    found = [
        name
        for name in ("losses", "norms", "loads", "figures", "validation")
        if plain[name] != graphed[name]
    ]
    pairs = zip(plain["sources"], graphed["sources"], strict=True)
    if not all(torch.equal(a, b) for a, b in pairs):
        found.append("sources")
    weights = plain["parameters"], graphed["parameters"]
    return found + [name for name, x in weights[0].items() if not torch.equal(x, weights[1][name])]


def compare(case: Case, graph: type[GradientGraph] = GradientGraph) -> list[str]:
    torch.use_deterministic_algorithms(True, warn_only=True)
    return differences(*pair(case, graph))


CPU = Case("gpt", 2, Parallel(dp_shard=2, zero=2), override=DROPPED, sequences=4)


def test_a_repeated_step_has_the_bits_of_a_computed_one() -> None:
    assert run_ranks(2, compare, CPU, Repeated) == [[], []]


@pytest.mark.parametrize("planted", [StaleBatch, StaleStep, LostMicroBatch])
def test_planted_bugs_show(planted: type[Repeated]) -> None:
    assert "losses" in run_ranks(2, compare, CPU, planted)[0]


class Verified(RecordingStep):
    """Computes the gradients of each step twice and compares them, as `faults.verify_step` does."""

    def __call__(self, batches: Any, step: int, lr: float, compute: Any = None) -> StepResult:
        found, host = self.model.applied, dist.group.WORLD
        assert host is not None

        def twice(accumulate: Callable[[], Tensor]) -> Tensor:
            loss, wrong = compute_twice(found, accumulate, host)
            assert not wrong
            return loss

        return super().__call__(batches, step, lr, twice)


class Counted(Repeated):
    """Counts its calls, in the class."""

    calls = 0

    def __call__(self, compute: Any, batches: Any, step: int) -> tuple[Tensor, ...]:
        Counted.calls += 1
        return super().__call__(compute, batches, step)


def verified(graph: type[GradientGraph]) -> list[str]:
    usual, parity.RecordingStep = parity.RecordingStep, Verified  # type: ignore[misc]
    try:
        return compare(replace(CPU, world=1, parallel=Parallel()), graph)
    finally:
        parity.RecordingStep = usual  # type: ignore[misc]


def counted() -> tuple[list[str], int]:
    return verified(Counted), Counted.calls


def test_a_verified_step_is_computed_by_the_graph() -> None:
    """Twice in each step; and the bits are those without a graph."""
    assert run_ranks(1, counted) == [([], 2 * STEPS)]


def addresses_of_scales() -> set[tuple[int, ...]]:
    """Addresses of the scales of gathered weights after each update."""
    found: set[tuple[int, ...]] = set()
    refresh = WeightGather.refresh

    def noted(self: WeightGather) -> None:
        refresh(self)
        scales = [shard.scale for shard in self.shards]
        found.add(tuple(scale.data_ptr() for scale in scales if scale is not None))

    WeightGather.refresh = noted  # type: ignore[method-assign]
    float8 = Float8(recipe="tensorwise", all_gather=True)
    override = {"dim": 32, "head_dim": 16, "n_layers": 2}
    parallel = Parallel(dp_shard=2)
    parallel_run(Case("llama", 2, parallel, override=override, float8=float8, steps=3))
    return found


def test_scales_of_gathered_weights_stay_where_a_graph_reads_them() -> None:
    for found in run_ranks(2, addresses_of_scales):
        assert len(found) == 1


def test_an_evaluation_that_raises_the_capacity_discards_the_graph() -> None:
    discarded = []
    trainer: Any = object.__new__(Trainer)
    trainer.step = 1
    graph = SimpleNamespace(discard=lambda: discarded.append(True))
    trainer.run = SimpleNamespace(step=SimpleNamespace(graph=graph))
    trainer.guards = SimpleNamespace(compiling=lambda step: None)
    dispatcher = SimpleNamespace(grow=lambda device: "" if discarded else "raised")
    model: Any = SimpleNamespace(applied=SimpleNamespace(dispatcher=dispatcher))
    tokens: Any = SimpleNamespace(device=torch.device("cpu"))
    none: Any = None
    evaluation = Evaluation(none, model, tokens, none, {}, trainer._capacity_raised)
    evaluation.repeated(lambda: torch.zeros(()))
    assert discarded == [True]


class Numbers:
    """A micro-batch of one tensor."""

    def __init__(self, *values: float) -> None:
        self.values = torch.tensor(values)

    def map(self, change: Callable[[Tensor], Tensor]) -> "Numbers":
        made = Numbers()
        made.values = change(self.values)
        return made


def test_other_shapes_are_computed_without_the_graph(
    caplog: pytest.LogCaptureFixture,
) -> None:
    weight = torch.ones((), requires_grad=True)
    graph = Repeated([weight], torch.device("cpu"))

    def call(*batches: Numbers, step: int = 5) -> tuple[float, float]:
        def compute(batches: Any, step: Any) -> tuple[Tensor, ...]:
            loss = sum(weight * batch.values.sum() * step for batch in batches)
            assert isinstance(loss, Tensor)
            loss.backward()
            return (loss.detach(),)

        (loss,) = graph(compute, batches, step)
        assert weight.grad is not None
        gradient, weight.grad = weight.grad.item(), None
        return loss.item(), gradient

    for _ in range(cuda_graph.WARM_UP):
        assert call(Numbers(1.0, 2.0)) == (15, 15)
    assert call(Numbers(1.0, 2.0)) == (15, 15)
    assert call(Numbers(3.0, 4.0), step=2) == (14, 14)
    assert graph.replays == 2
    for others in ([Numbers(1.0)], [Numbers(1.0, 2.0)] * 2):
        assert call(*others)[0] == 5 * sum(float(each.values.sum()) for each in others)
    assert graph.replays == 2
    assert caplog.text.count("without the CUDA graph") == 1
    graph.discard()
    assert call(Numbers(1.0)) == (5, 5)
    assert graph.replays == 2


GPU: dict[str, Case] = {
    "one": Case("gpt", override=DROPPED),
    "packed, compiled": Case("llama", documents=True, compile=Compile(enable=True)),
    "full recomputation": Case("qwen3", recompute=FULL),
    "hybrid": Case("qwen3_5"),
    "soft caps and windows": Case("gemma3", override=WIDTHS["gemma3"], dtype="bfloat16"),
    "sinks": Case("gpt_oss", override=WIDTHS["gpt_oss"], dtype="bfloat16"),
    "chunked loss": Case("llama", loss_chunks=2, compile=Compile(enable=True)),
    "experts": Case("deepseek_v3", override=WIDTHS["deepseek_v3"], dtype="bfloat16"),
    "zero 3": Case("llama", 2, Parallel(dp_shard=2)),
    "zero 1": Case("llama", 2, Parallel(dp_shard=2, zero=1)),
    "copies": Case("llama", 2, Parallel(dp_shard=2, copy_engines=True, reduce_by="all_to_all")),
    "tp": Case("llama", 2, Parallel(tp=2)),
    "async tp": Case("llama", 2, Parallel(tp=2, async_tp=True)),
    "ring": Case("llama", 2, Parallel(cp=2, cp_method="ring")),
    "ulysses": Case("llama", 2, Parallel(cp=2, cp_method="ulysses")),
    "1F1B": Case("llama", 2, Parallel(pp=2)),
    "ZBV": Case("llama", 2, Parallel(pp=2, schedule="ZBVZeroBubble")),
    "symmetric": Case(
        "mixtral",
        2,
        Parallel(dp_shard=2, ep=2, dispatcher="symmetric_memory"),
        override=WIDTHS["mixtral"],
        dtype="bfloat16",
    ),
    "bounded": Case(
        "mixtral",
        2,
        Parallel(dp_shard=2, ep=2, dispatcher="bounded_all_to_all"),
        override=WIDTHS["mixtral"],
        dtype="bfloat16",
    ),
    "float8": Case(
        "llama",
        override=WIDTHS["llama"],
        dtype="bfloat16",
        float8=Float8(recipe="tensorwise"),
    ),
    "float8 all-gather": Case(
        "llama",
        2,
        Parallel(dp_shard=2),
        override=WIDTHS["llama"],
        dtype="bfloat16",
        float8=Float8(recipe="tensorwise", all_gather=True),
    ),
    "delayed scales": Case(
        "llama",
        override=WIDTHS["llama"],
        dtype="bfloat16",
        float8=Float8(recipe="tensorwise", scaling="delayed", amax_history=2),
    ),
}


@pytest.mark.gpu
def test_a_verified_step_is_computed_by_the_graph_on_a_gpu() -> None:
    assert run_on_gpus(1, verified, GradientGraph) == [[]]


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU)
def test_a_graph_has_the_bits_of_a_step_without_one(name: str) -> None:
    case = GPU[name]
    assert run_on_gpus(case.world, compare, case) == [[]] * case.world
