"""Work and collectives beside each other: which calls count, and what GPUs measure."""

import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from dtron.plan import overlap
from dtron.plan.measure_hardware import Calibration
from dtron.plan.overlap import SENT, SIZES, WORK, _inside_window, measure_overlap
from tests.gpu_ranks import run_on_gpus


def test_calls_inside_of_the_other_lane_count() -> None:
    work = [0.0, 1.0, 3.0, 4.0, 6.0, 7.0]
    assert _inside_window(work) == [1, 2, 1, 2, 1]
    assert _inside_window(work, [0.5, 2.0, 6.5]) == [2, 1, 2]
    assert _inside_window(work, [1.0, 6.0]) == [2, 1, 2]
    assert _inside_window(work, [1.5, 2.5]) == []  # it was over before a call was


@pytest.mark.gpu
def test_two_gpus_measure_what_runs_at_the_same_time() -> None:
    run_on_gpus(2, on_gpus)


FEW = {"matmul", "grouped_matmul", "attention", "copy"}


def on_gpus() -> None:
    """On one of two ranks: a row of each kind of work and collective, by the GPU's clock. How much
    they slow each other down is what `dtron plan calibrate` reports."""
    device, made = torch.device("cuda", torch.cuda.current_device()), Calibration()
    work = tuple({kind: (kind, shape) for kind, shape in WORK["cuda"] if kind in FEW}.values())
    (shape,) = (shape for kind, shape in work if kind == "attention")
    made.attention.append({"kernel": "cudnn", "shape": shape, "forward": 1.0, "backward": 1.0})
    with (
        mock.patch.object(overlap, "WORK", {"cuda": work}),
        mock.patch.object(overlap, "SIZES", {"cuda": SIZES["cuda"][:1]}),
    ):
        measure_overlap(made, dist.group.WORLD, device)
    assert {(each["work"], each["collective"]) for each in made.overlap} == {
        (kind, sent) for kind in FEW for sent, _ in SENT
    }
    times = ("alone", "overlapped", "collective_alone", "collective_overlapped")
    assert all(0 < each[time] < math.inf for each in made.overlap for time in times)
