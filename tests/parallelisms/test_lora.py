"""LoRA: layouts equal one process, which trains the adapters alone."""

import pytest

from dtron.config import Compile, Float8, Lora, Parallel, Recompute
from tests.parallelisms.parity import EAGER, Batches, Case, float8, selected

LORA = Lora(rank=4, alpha=8.0)
CASES = [
    Case("qwen3", lora=LORA, optimizer="adamw"),
    Case("llama", 2, Parallel(tp=2), lora=LORA),
]


@pytest.fixture(scope="module")
def batches(request: pytest.FixtureRequest) -> Batches:
    return Batches(selected(request))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layouts_equal_one_process(case: Case, batches: Batches) -> None:
    assert not batches.outcome(case).wrong(case)
