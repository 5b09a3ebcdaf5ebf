"""Weights that stay gathered are cast to float8 once per step, with the bits of a cast per call.

The planted mistake, a cast that is not repeated after an update, is in
tests/parallelisms/test_planted_bugs.py.
"""

from dataclasses import replace
from typing import Any

import torch

from dtron.config import Float8, Parallel
from dtron.float8.all_gather import _WeightShard
from tests.harness import run_ranks
from tests.parallelisms.parity import Case, float8, parallel_run

ONCE = float8("tensorwise", 1, Parallel(), float8={"all_gather": True})
EACH = replace(ONCE, float8=Float8(recipe="tensorwise"))
MICRO_BATCHES = 4


def compare(once: Case, each: Case) -> tuple[float, bool]:
    """(Casts of a weight per micro-batch and forward, whether all results are equal)."""
    casts, cast = [], _WeightShard.before

    def counted(self: _WeightShard, *args: Any) -> Any:
        casts.append(self)
        return cast(self, *args)

    _WeightShard.before = counted  # type: ignore[method-assign]
    try:
        found = parallel_run(once)
    finally:
        _WeightShard.before = cast  # type: ignore[method-assign]
    wanted = parallel_run(each)
    equal = all(found[key] == wanted[key] for key in ("losses", "norms", "validation"))
    for kind in ("gradients", "parameters"):
        assert found[kind].keys() == wanted[kind].keys()
        pairs = (
            (torch.as_tensor(found[kind][n]), torch.as_tensor(wanted[kind][n])) for n in found[kind]
        )
        equal = equal and all(torch.equal(a, b) for a, b in pairs)
    return len(casts) / len(set(casts)), equal


def test_one_rank_casts_weights_once_per_step() -> None:
    """In two steps and a validation."""
    assert ONCE.sequences == MICRO_BATCHES
    assert run_ranks(1, compare, ONCE, EACH) == [(3, True)]
