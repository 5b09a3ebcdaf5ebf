"""Work and collectives beside each other: which calls count, and what GPUs measure."""

import os

import pytest
import torch
import torch.distributed as dist

from dtron.plan.beside import SENT, SIZES, WORK, _each, measure_beside
from dtron.plan.machine import Calibration
from tests.harness import run_on_gpus


def test_calls_inside_of_the_other_lane_count() -> None:
    work = [0.0, 1.0, 3.0, 4.0, 6.0, 7.0]
    assert _each(work) == [1, 2, 1, 2, 1]
    assert _each(work, [0.5, 2.0, 6.5]) == [2, 1, 2]
    assert _each(work, [1.0, 6.0]) == [2, 1, 2]
    assert _each(work, [1.5, 2.5]) == []  # it was over before a call was


@pytest.mark.gpu
def test_two_gpus_measure_what_runs_at_the_same_time() -> None:
    run_on_gpus(2, "tests.plan.test_beside")


def _on_gpus() -> None:
    """On one of the ranks that torchrun starts: both lanes are slower beside each other, not as
    slow as one after the other would be; copies take the time of their bytes."""
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    made = Calibration()
    (shape,) = (shape for kind, shape in WORK["cuda"] if kind == "attention")
    made.attention.append({"kernel": "cudnn", "shape": shape, "forward": 1.0, "backward": 1.0})
    measure_beside(made, dist.group.WORLD, device)
    assert len(made.beside) == len(WORK["cuda"]) * len(SENT) * len(SIZES["cuda"])
    for each in made.beside:
        own = each["alone"] / each["beside"]
        other = each["collective_alone"] / each["collective_beside"]
        assert max(own, other) < 1.1, each
        assert own + other > 0.9, each
        if each["work"] == "copy":
            assert 2e12 < 4 * each["shape"][0] / each["alone"] < 5e12, each
    dist.destroy_process_group()


if __name__ == "__main__":
    _on_gpus()
