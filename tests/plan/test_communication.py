"""Collectives that the planner lists are those that real runs make, calls and bytes."""

from collections import defaultdict
from typing import Any

import pytest

from dtron.config import Parallel, Recompute
from dtron.plan.communication import collectives
from dtron.plan.run_shape import Resolved
from tests.harness import run_ranks
from tests.parallelisms.parity import Case, float8
from tests.parallelisms.test_collectives import Counts, count_accumulation

ULYSSES = Parallel(cp=2, cp_method="ulysses")
SMALL: dict[str, Any] = {"dtype": "float32", "sequences": 2}
GATHERED: dict[str, Any] = {"all_gather": True}
GATHERING: dict[str, Any] = {**SMALL, "override": {"vocab_size": 64}}
HOSTS = Parallel(ep=4, dispatcher="hierarchical", ep_inner=2)
CASES = [
    (Case("llama", 2, Parallel(tp=2), sequences=2), "tp"),
    (Case("llama", 2, Parallel(tp=2), Recompute(mode="selective"), sequences=2), "tp"),
    (Case("llama", 2, Parallel(tp=2), Recompute(mode="full"), sequences=2), "tp"),
    (Case("llama", 2, Parallel(tp=2, sequence_parallel=False)), "tp"),
    (Case("llama", 4, Parallel(tp=4), Recompute(mode="attention"), sequences=2), "tp_inner"),
    (Case("qwen3", 2, Parallel(tp=2), override={"n_kv_heads": 1}, sequences=2), "tp"),
    *[
        (float8("tensorwise", 2, parallel, **SMALL, float8=settings), "tp")
        for parallel, settings in (
            (Parallel(tp=2), {"gather_inputs": True}),
            (Parallel(tp=2, async_tp=True), {"skip": ["blocks.1.attn.wo"]}),
        )
    ],
    (Case("llama", 2, ULYSSES, sequences=2), "cp"),
    (Case("llama", 2, ULYSSES, Recompute(mode="selective"), sequences=2), "cp"),
    (Case("gpt", 2, Parallel(dp_shard=2), sequences=4), "dp_shard"),
    (Case("llama", 2, Parallel(dp_shard=2, zero=1), sequences=4), "dp_shard"),
    *[
        (
            float8("tensorwise", 2, Parallel(dp_shard=2), **GATHERING, float8=GATHERED | m),
            "dp_shard",
        )
        for m in ({}, {"skip_first": 1}, {"output": True})
    ],
    (Case("mixtral", 4, Parallel(dp_shard=4, ep=2), sequences=4), "edp_shard"),
    (Case("mixtral", 4, HOSTS, sequences=4), "ep_outer"),
]


def messages(case: Case, axis: str) -> Counts:
    run = Resolved.of(case.config(), case.world)
    found: Counts = defaultdict(lambda: {"count": 0, "bytes": 0})
    for each in collectives(run, 0):
        if each.axis == axis:
            found[each.kind]["count"] += round(each.count)
            found[each.kind]["bytes"] += round(each.count * each.size)
    return found


@pytest.mark.parametrize(("case", "axis"), CASES, ids=str)
def test_collectives_of_a_step(case: Case, axis: str) -> None:
    real = run_ranks(case.world, count_accumulation, case, axis)[0]
    planned = messages(case, axis)
    if not case.parallel.sequence_parallel:
        # Beside these: one sum of norms' gradients a step.
        summed = [counts["all_reduce"]["bytes"] for counts in (real, planned)]
        assert abs(summed[0] - summed[1]) <= 0.05 * summed[0]
    for kind in (real.keys() | planned.keys()) - {"all_reduce"}:  # the loss's sums
        assert planned[kind] == real.get(kind), kind
