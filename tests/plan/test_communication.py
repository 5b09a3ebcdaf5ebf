"""Collectives that the planner lists are those that real runs make, calls and bytes."""

from collections import defaultdict

import pytest

from dtron.config import Parallel, Recompute
from dtron.plan.communication import collectives
from dtron.plan.resolved import Resolved
from tests.harness import run_ranks
from tests.parallelisms.parity import Case
from tests.parallelisms.test_collectives import Counts, count_accumulation

CASES = [
    (Case("llama", 2, Parallel(tp=2), sequences=2), "tp"),
    (Case("llama", 2, Parallel(tp=2, sequence_parallel=False)), "tp"),
    (Case("gpt", 2, Parallel(dp_shard=2), sequences=4), "dp_shard"),
    (Case("llama", 2, Parallel(dp_shard=2, zero=1), sequences=4), "dp_shard"),
    (Case("mixtral", 4, Parallel(dp_shard=4, ep=2), sequences=4), "edp_shard"),
]
GATHERS = ("all_gather", "reduce_scatter")


def told(case: Case, axis: str) -> Counts:
    run = Resolved.of(case.config(), case.world)
    found: Counts = defaultdict(lambda: {"count": 0, "bytes": 0})
    for each in collectives(run, 0):
        if each.axis == axis:
            found[each.kind]["count"] += round(each.count)
            found[each.kind]["bytes"] += round(each.count * each.size)
    return found


@pytest.mark.parametrize(("case", "axis"), CASES, ids=str)
def test_gathers_and_reductions_of_a_step(case: Case, axis: str) -> None:
    real = run_ranks(case.world, count_accumulation, case, axis)[0]
    planned = told(case, axis)
    kinds = ("all_reduce",) if not case.parallel.sequence_parallel else GATHERS
    for kind in kinds:
        # Beside these: the loss's sums, and one sum of norms' gradients a step.
        if kind == "all_reduce":
            assert abs(real[kind]["bytes"] - planned[kind]["bytes"]) <= 0.05 * real[kind]["bytes"]
        else:
            assert planned[kind] == real[kind], kind


def test_full_recomputation_repeats_what_the_forward_communicates() -> None:
    cases = [
        Case("llama", 2, Parallel(tp=2), recompute=Recompute(mode=mode))  # type: ignore[arg-type]
        for mode in ("none", "full")
    ]
    planned = [told(case, "tp")["all_gather"]["count"] for case in cases]
    micro_batches, layers = 8, 5
    assert planned[1] - planned[0] == 2 * layers * micro_batches
