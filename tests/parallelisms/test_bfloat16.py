"""Layouts in bfloat16 against one process, over gloo.

All follow the rule for GPUs, `gpu_parity.judge`: compared with one process in float32, the errors
of gradients and parameters are at most twice those of one process in bfloat16. This does not see a
rounding or two more, such as those of a reduction in bfloat16. Ranks of data and pipeline
parallelism, however, compute the same numbers as one process for each micro-batch and only add
them: their results equal those of the bfloat16 process by the rule for float32.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from dtron.models import MODELS
from tests.parallelisms.gpu_cases import EP2, MIXTURES, SYMMETRIC, Keys, V, narrow
from tests.parallelisms.gpu_parity import Runs, alone, judge
from tests.parallelisms.parity import Case, Outcome, compare

ROWS: list[tuple[int, Keys, list[str]]] = [
    (2, {"dp_shard": 2}, ["llama", "deepseek_v3"]),
    (2, {"dp_shard": 2, "zero": 1}, ["qwen3", "mixtral"]),
    (2, {"dp_replicate": 2}, ["llama"]),
    (2, {"pp": 2, "schedule": "1F1B"}, ["gpt", "gpt_oss"]),
    (2, {"pp": 2, "schedule": V}, ["deepseek_v3"]),
    (2, {"tp": 2}, ["llama", "mixtral", "deepseek_v3", "gpt_oss", "llava", "gemma4"]),
    (2, {"tp": 2, "sequence_parallel": False}, ["gpt", "bert", "t5"]),
    (2, {"tp": 2, "accumulate_in_matmul": True}, ["gpt", "mixtral"]),
    (2, {"pp": 2, "schedule": V, "accumulate_in_matmul": True}, ["qwen3"]),
    (2, {"cp": 2, "cp_method": "ring"}, ["qwen3_moe", "qwen3_5"]),
    (2, {"cp": 2, "cp_method": "all_gather"}, ["qwen3", "gemma3"]),
    (2, EP2, ["mixtral", "gpt_oss", "qwen3_5_moe", "nemotron_h"]),
    (2, {**EP2, **SYMMETRIC}, ["deepseek_v3"]),
    (4, {"dp_shard": 2, "tp": 2, "ep": 2}, ["qwen3_moe"]),
]
"""Number of ranks, keys of [parallel], models."""


def cases() -> Iterator[Any]:
    for world, parallel, models in ROWS:
        row = narrow(world, parallel, models)
        for model in models:
            yield pytest.param(row.cases[model], id=f"{world}-{model}-{row.label}")


@pytest.fixture(scope="module")
def runs() -> Iterator[Runs]:
    runs = Runs("cpu")
    yield runs
    runs.close()


@pytest.mark.parametrize("case", cases())
def test_a_layout_is_as_exact_as_one_process(case: Case, runs: Runs) -> None:
    verdict = judge(case, runs)
    assert not verdict.wrong, "\n".join(verdict.wrong)
    if only_adds(case):
        assert not differs(case, runs)


def only_adds(case: Case) -> bool:
    """Whether ranks compute what one process does. Of tied weights the gradients of head and
    embedding are added in bfloat16, but in float32 under pipeline parallelism and, from torch 2.15
    on, where FSDP accumulates micro-batches (`grad_dtype`)."""
    parallel, (config, _) = case.parallel, case.resolved()
    accumulates_wide = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 15)
    tied = config.tied and (parallel.pp > 1 or accumulates_wide)
    split = max(parallel.tp, parallel.cp, parallel.ep, parallel.etp) > 1
    # A matmul that adds to the sum does not round a gradient.
    return not (split or tied or parallel.accumulate_in_matmul)


def differs(case: Case, runs: Runs) -> list[str]:
    """What deviates from one process in bfloat16 by more than sums in float32 do."""
    (one,) = runs.result(alone(case))
    exact = case.parallel.model_copy(update={"reduce_dtype": "float32"})
    judged = replace(case, dtype="float32", parallel=exact)
    return Outcome(compare(runs.result(case), one)).wrong(judged)


def test_a_reduction_in_bfloat16_differs(runs: Runs) -> None:
    """All gradients that the ranks add, within the rule of GPUs."""
    case = narrow(2, {"dp_shard": 2, "reduce_dtype": "bfloat16"}, ["llama"]).cases["llama"]
    assert not judge(case, runs).wrong
    wrong = {each.split(":")[0] for each in differs(case, runs)}
    assert wrong >= {f"gradient {name}" for name in runs.result(case)[0]["gradients"]}


def test_every_model_and_every_axis_has_a_case() -> None:
    assert {model for _, _, models in ROWS for model in models} == set(MODELS)
    assert {m for _, parallel, models in ROWS for m in models if "ep" in parallel} == {*MIXTURES}
    axes = {"dp_replicate", "dp_shard", "tp", "pp", "cp", "ep"}
    assert {key for _, parallel, _ in ROWS for key in parallel} >= axes
