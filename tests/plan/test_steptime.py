"""What a step takes beside its products: copies by FSDP, counted, and steps that were measured."""

from pathlib import Path

import pytest

from dtron.config import RunConfig
from dtron.plan.hardware import hardware
from dtron.plan.parameters import held
from dtron.plan.resolved import Resolved
from dtron.plan.steptime import copied_bytes, predict

LLAMA = Path(__file__).parents[2] / "configs/llama3_8b.toml"
PP = "parallel.pp=2 parallel.zero=1 train.micro_batch=1 train.global_batch=16"
FOUR = "train.micro_batch=1 train.global_batch=8"


def run(overrides: str, world: int) -> Resolved:
    return Resolved.of(RunConfig.load(LLAMA, overrides.split()), world)


@pytest.mark.parametrize(
    ("overrides", "world", "each"),
    [
        # One rank: weights from float32 to bfloat16, gradients the other way.
        ("parallel.zero=2 train.global_batch=2", 1, (4 + 2) + (2 + 4)),
        # Out of a buffer, and into one, once; of four micro-batches each into one.
        ("parallel.zero=2 train.global_batch=4", 2, (2 + 2) + (2 + 4)),
        (f"parallel.zero=2 {FOUR}", 2, (2 + 2) + 4 * (2 + 4)),
        # Summed: cast, three times added, copied.
        (f"parallel.zero=1 {FOUR}", 2, (2 + 2) + (2 + 4) + 3 * (2 + 4 + 4) + (4 + 4)),
        ("parallel.zero=2 train.global_batch=4 parallel.reduce_by=all_to_all", 2, 4 + (2 + 2)),
    ],
)
def test_bytes_that_fsdp_copies(overrides: str, world: int, each: int) -> None:
    planned = run(overrides, world)
    assert copied_bytes(planned, 0) == each * sum(u.gathered for u in held(planned, 0))


def test_zero_3_copies_weights_of_all_but_the_last_unit_twice() -> None:
    planned = run("parallel.zero=3 train.global_batch=4", 2)
    *others, last = held(planned, 0)
    twice = sum(u.gathered for u in others)
    assert copied_bytes(planned, 0) == twice * (2 * 4 + 6) + last.gathered * (4 + 6)


@pytest.mark.parametrize(
    ("overrides", "world", "seconds"),
    [
        ("", 4, 1.515),
        ("parallel.zero=3", 4, 1.541),
        (PP, 4, 3.320),
        (f"{PP} parallel.schedule=Interleaved1F1B", 4, 3.216),
        (f"{PP} parallel.schedule=ZBVZeroBubble", 4, 3.071),
        ("model.override.n_layers=8 train.global_batch=2", 1, 0.453),
    ],
)
def test_steps_that_were_measured(overrides: str, world: int, seconds: float) -> None:
    """benchmarks/RESULTS.md."""
    assert predict(run(overrides, world), hardware("h200")).step == pytest.approx(seconds, rel=0.04)
