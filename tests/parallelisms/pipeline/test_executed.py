"""What ranks execute is what the schedule says, and has its bubble and memory."""

import pytest
import torch
from torch import Tensor, nn

from dtron.errors import ConfigError
from dtron.parallelisms import Mesh, pipeline
from dtron.parallelisms.draw.timelines import simulate
from dtron.parallelisms.pipeline.executor import Pipeline, _header, _read_header
from dtron.parallelisms.pipeline.schedule_ops import COMPUTE, Action
from dtron.parallelisms.pipeline.schedules import SCHEDULES, order_of, stage_ranks
from tests.harness import run_ranks


def net(n_layers: int) -> nn.Module:
    return nn.Sequential(*(nn.Linear(2, 2) for _ in range(n_layers)))


def mean(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def executed(name: str, p: int, v: int, m: int) -> list[Action]:
    """Compute actions of this rank's step, as recorded while it runs."""
    stages = [[str(stage)] for stage in range(p * v)]
    model = pipeline(
        net(p * v), Mesh(pp=p), stages=stages, schedule=name, units="*", dtype="float32"
    )
    x = torch.ones(m, 2)
    model.step(x, x, mean, micro_batches=m)
    assert isinstance(model._execution, Pipeline)
    return [action for action in model._execution.executed if action.kind in COMPUTE]


@pytest.mark.parametrize("name", SCHEDULES)
def test_ranks_execute_the_order(name: str) -> None:
    p, m, row = 2, 4, SCHEDULES[name]
    found = run_ranks(p, executed, name, p, row.default_stages, m)
    assert tuple(map(tuple, found)) == order_of(name, p, None, m)


# Share of the step, and micro-batches of activations on the first rank; arXiv:2104.04473.
ORACLES = [
    ("GPipe", 1, 32, 0.1795, 32),
    ("1F1B", 1, 32, 0.1795, 8),
    ("Interleaved1F1B", 2, 32, 0.0986, 11.5),
    ("ZBVZeroBubble", 2, 32, 0.0352, 8),
]


@pytest.mark.parametrize(("name", "v", "m", "bubble", "memory"), ORACLES)
def test_bubble_of_what_eight_ranks_execute(
    name: str, v: int, m: int, bubble: float, memory: float
) -> None:
    rows = run_ranks(8, executed, name, 8, v, m)
    ranks = stage_ranks(SCHEDULES[name].placement, 8, v)
    timeline = simulate(tuple(map(tuple, rows)), ranks)
    assert timeline.bubble_of_total == pytest.approx(bubble, abs=5e-5)
    assert max(timeline.peak_activations) == memory


def test_what_a_header_cannot_hold_is_named() -> None:
    kept = torch.zeros(1, 2, 3, 4, 5, 6, dtype=torch.float16), torch.zeros(2, dtype=torch.int64)
    assert _read_header(_header(kept)) == [(x.shape, x.dtype) for x in kept]
    whole = torch.zeros(1)
    for refused, message in (
        ((torch.zeros(1, 1, 1, 1, 1, 1, 1),), "use at most 6 dimensions and one of"),
        ((whole, torch.zeros(1, dtype=torch.int8)), "use at most 6 dimensions and one of"),
        ((torch.zeros(1, dtype=torch.int64),), "returns 1 tensors, 0 of them with a float dtype"),
        ((whole,) * 9, "returns 9 tensors, 9 of them"),
    ):
        with pytest.raises(ConfigError, match=message):
            _header(refused)
