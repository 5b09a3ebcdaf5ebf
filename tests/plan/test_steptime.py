"""What a step takes beside its products: copies by FSDP, counted, and steps that were measured."""

from pathlib import Path

import pytest

from dtron.config import RunConfig
from dtron.plan.communication import collectives
from dtron.plan.hardware import hardware
from dtron.plan.parameters import held
from dtron.plan.resolved import Resolved
from dtron.plan.steptime import _added, _phases, copied_bytes, predict

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


def test_each_pass_has_its_own_gathers_and_reductions() -> None:
    """Under zero 3 every pass gathers, under zero 2 the first forward; backwards reduce, and from
    the second on add to the sums that are there. A backward casts and copies before it gathers."""
    h200, each = hardware("h200"), "train.micro_batch=1 train.global_batch=4"
    for zero in (2, 3):
        planned = run(f"parallel.zero={zero} {each}", 2)
        own = [c for c in collectives(planned, 0) if c.purpose == "fsdp"]
        gathers = sum(c.seconds(h200) for c in own if c.kind == "all_gather")
        sums = sum(c.seconds(h200) for c in own) - gathers
        shard = sum(u.shard for u in held(planned, 0))
        added, cast = 12 * shard / h200.copy, (6 + 4) * shard / h200.copy
        first, back, second, last = (found[0] for found in _phases(planned, 0, 1.0, h200))
        assert last - back == pytest.approx(added)
        assert (first == second) == (zero == 3)
        if zero == 2:
            assert (first, second, back) == (gathers, 0, pytest.approx(sums / 2))
        else:
            total = gathers + sums + added + 2 * cast
            assert first + back + second + last == pytest.approx(total)


def test_what_a_pass_is_too_short_for_is_not_covered_by_another() -> None:
    """Two passes of a second each: 0.5 s and 1.5 s of communication are not 2 s beside 2 s."""
    apart = _added(0.5, 0.0, 1.0) + _added(1.5, 0.0, 1.0)
    assert (apart, _added(2.0, 0.0, 2.0)) == (0.5, 0.0)


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
