"""Weight gradients that their matmul adds to FSDP's sum over micro-batches.

tests/parallelisms/test_parity.py and test_bfloat16.py compare layouts with one process. Here: the
sums are those of separate operations bit by bit in float32, and nearer to float64 in bfloat16.
Planted mistakes: a sum that is not carried on, one left from the last step, a gradient added twice.
"""

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from dtron.config import Parallel
from dtron.kernels.accumulate import multiply_into
from dtron.kernels.grouped_accumulate import grouped_multiply_into
from dtron.parallelisms import Mesh
from dtron.parallelisms.apply import ParallelPlan, Passes, apply_passes
from dtron.parallelisms.fsdp.sharding import Policy
from dtron.parallelisms.fsdp.torch_internals import GradientSum
from dtron.parallelisms.pipeline.accumulate import Accumulation
from dtron.parallelisms.pipeline.weight_gradients import GroupedMatmul, LinearMatmul
from tests.harness import run_ranks
from tests.parallelisms.parity import Case, Outcome, deviations, parallel_run

MICRO_BATCHES, TOKENS = 6, 64
LAYOUTS = {
    "reduced once": Parallel(zero=1),
    "gathered again": Parallel(zero=3, reduce="step"),
}
"""On one rank nothing is reduced."""
ON = Parallel(dp_shard=2, zero=1, accumulate_in_matmul=True)


def seen(layer: nn.Linear) -> list[tuple[Tensor, Tensor]]:
    """(gradient of the output, input) of every backward from now on, in float64."""
    found, inputs = [], []
    layer.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))

    def keep(_: nn.Module, __: Any, grads: Any) -> None:
        found.append((grads[0].double(), inputs.pop(0).double()))

    layer.register_full_backward_hook(keep)
    return found


def sums(
    parallel: Parallel, dtype: str, rank: int, micro_batches: int = MICRO_BATCHES
) -> tuple[list[Tensor], list[Tensor]]:
    """The sums of two layers after the last micro-batch: (by the run, in float64)."""
    torch.manual_seed(rank)  # of inputs: ranks have other tokens
    mesh = Mesh(dp_shard=-1)
    model = nn.Sequential(nn.Linear(32, 24), nn.Linear(24, 16, bias=False))
    plan = ParallelPlan(units=("0", "1"), parallel=parallel, dtype=dtype)
    applied = apply_passes(model, mesh, Passes(**vars(plan)))
    execution = Accumulation(model, Policy.of(parallel, mesh), torch.device("cpu"))
    layers = [seen(layer) for layer in model]  # type: ignore[arg-type]
    rows = torch.randn(micro_batches, TOKENS, 32).to(getattr(torch, dtype))
    given = [(x.requires_grad_(), {}) for x in rows]
    execution.train(given, lambda out, _: out.float().square().sum())
    found = [p.grad.full_tensor() for _, p in applied.named_parameters() if p.dim() == 2]  # type: ignore[union-attr]
    exact = [torch.stack([g.t() @ x for g, x in each]).sum(0) for each in layers]
    for total in exact:
        torch.distributed.all_reduce(total)
    return found, exact


def compare() -> dict[tuple[str, str], list[tuple[float, float, bool]]]:
    """(layout, dtype) -> of each layer: errors off and on, and whether both are equal."""
    rank, results = torch.distributed.get_rank(), {}
    for name, parallel in LAYOUTS.items():
        for dtype in ("float32", "bfloat16"):
            on = parallel.model_copy(update={"accumulate_in_matmul": True})
            (plain, exact), (added, same) = (sums(each, dtype, rank) for each in (parallel, on))
            assert all(map(torch.equal, exact, same)), "the operands are those of the same forward"
            results[name, dtype] = [
                (
                    float((a - e).norm() / e.norm()),
                    float((b - e).norm() / e.norm()),
                    torch.equal(a, b),
                )
                for a, b, e in zip(plain, added, exact, strict=True)
            ]
    return results


@pytest.mark.parametrize("world", [1, 2])
def test_a_sum_is_at_least_as_exact_as_one_of_rounded_gradients(world: int) -> None:
    for ranks in run_ranks(world, compare):
        for (_, dtype), layers in ranks.items():
            for separate, in_matmul, equal in layers:
                if dtype == "float32":
                    assert equal  # every bit
                else:
                    assert in_matmul < 1e-6 < 1e-4 < separate


def compare_immediate_reduction() -> list[bool]:
    """Whether gradients that no earlier micro-batch sums are those of separate operations."""
    rank, equal = torch.distributed.get_rank(), []
    # plans of the plug-in; a run refuses them
    for plain, micro_batches in ((Parallel(zero=1), 1), (Parallel(zero=2), 2)):
        on = plain.model_copy(update={"accumulate_in_matmul": True})
        (a, _), (b, _) = (sums(each, "bfloat16", rank, micro_batches) for each in (plain, on))
        equal += map(torch.equal, a, b)
    return equal


def test_a_backward_that_reduces_starts_no_sum() -> None:
    """The bias has a bfloat16 gradient, and a reduction needs one dtype."""
    assert all(map(all, run_ranks(2, compare_immediate_reduction)))


def test_the_sum_of_torch_2_15_is_the_gradient() -> None:
    """FSDP of torch 2.15 has no sum of its own."""
    weight = nn.Parameter(torch.zeros(3, 2, dtype=torch.bfloat16))
    parameter = SimpleNamespace(unsharded_param=weight, unsharded_grad_dtype=torch.float32)
    group = SimpleNamespace(reduce_grads=False)
    total = GradientSum(parameter, group)
    assert (total.get(), total.dtype) == (None, torch.float32)
    first = torch.ones(3, 2)
    total.set(first)
    assert total.get() is weight.grad is first
    weight.sum().backward()  # of another use: autograd adds to the sum
    torch.testing.assert_close(total.get(), torch.full((3, 2), 2.0))
    assert total.is_open
    group.reduce_grads = True
    assert not total.is_open  # `.grad` is the sum, and is reduced


def not_carried() -> None:
    """Each micro-batch overwrites the sum of those before it."""
    LinearMatmul.add_to = lambda self, total: multiply_into(  # type: ignore[method-assign]
        total, self.grad.t(), self.x, add=False
    )


def of_the_last_step() -> None:
    """The first micro-batch of a step adds to the sum that the last step left."""
    assign, left = GradientSum.set, {}

    def stale(self: GradientSum, local: Tensor) -> None:
        if self in left:
            local += left[self]
        left[self] = local
        assign(self, local)

    GradientSum.set = stale  # type: ignore[method-assign]


def added_twice() -> None:
    """A sum holds each gradient but the first twice."""
    add_to = LinearMatmul.add_to

    def twice(self: LinearMatmul, total: Tensor) -> None:
        add_to(self, total)
        add_to(self, total)

    LinearMatmul.add_to = twice  # type: ignore[method-assign]


def experts_not_carried() -> None:
    """Each micro-batch overwrites the sums of experts."""
    GroupedMatmul.add_to = lambda self, total: grouped_multiply_into(  # type: ignore[method-assign]
        total, self.grad, self.x, self.offsets, add=False
    )


def run_with(plant: Callable[[], None], case: Case) -> dict[str, Any]:
    plant()
    return parallel_run(case)


LINEARS = r"gradient (blocks\.\d+\.(attn\.w[qkvo]|ffn\.(gate|up|down))|head)\.weight"
EXPERTS = r"gradient blocks\.\d+\.ffn\.experts\..*"
CASE = Case("llama", 2, ON, sequences=4, override={"n_layers": 2})
MIXTURE = Case("mixtral", 2, ON.model_copy(update={"ep": 2}), sequences=4)


@pytest.mark.parametrize(
    ("plant", "spoils", "case"),
    [
        (not_carried, LINEARS, CASE),
        (experts_not_carried, EXPERTS, MIXTURE),
        (added_twice, LINEARS, CASE),
        (of_the_last_step, r"parameter .*|norm 1", CASE),
    ],
)
def test_a_planted_bug_turns_parity_red(plant: Callable[[], None], spoils: str, case: Case) -> None:
    ranks = run_ranks(2, run_with, plant, case)
    lines = Outcome(deviations(case, ranks)).wrong(case)
    wrong = [line.rsplit(": ", 1)[0] for line in lines]
    gradients = [name for name in wrong if name.startswith("gradient ")]
    first = spoils.startswith("gradient ")
    shown = gradients if first else [name for name in wrong if re.match(spoils, name)]
    assert shown
    assert all(re.fullmatch(spoils, name) for name in shown), wrong
    if not first:
        assert not gradients  # those of the first step
