"""What the host issues is counted as a real step does it, and a step is no shorter than that."""

from dataclasses import replace
from pathlib import Path

import pytest

from dtron.config import RunConfig
from dtron.plan.hardware import HARDWARE
from dtron.plan.issuing import PRICES, calls, host_seconds
from dtron.plan.resolved import Resolved
from dtron.plan.steptime import predict

CONFIGS = Path(__file__).parents[2] / "configs"
CUT = (
    "model.override.n_layers=27 train.seq_len=64 train.micro_batch=1 train.global_batch=4 "
    "parallel.tp=2 parallel.ep=2 parallel.zero=3 train.dtype=bfloat16 recompute.mode=full "
    "compile.enable=true"
)


def run(overrides: str, world: int, name: str = "deepseek_v3_debug") -> Resolved:
    return Resolved.of(RunConfig.load(CONFIGS / f"{name}.toml", overrides.split()), world)


def test_calls_are_those_of_a_profiled_step() -> None:
    """This run on 4 gloo ranks, torch 2.11: 418 forwards and 210 backwards of graphs, 112 backwards
    of units, 3,116 functional operations, a collective or the wait for one."""
    found = calls(run(CUT, 4), 0)
    assert found["graph"] == pytest.approx((418 + 210) / 2, rel=0.01)
    assert found["unit"] == pytest.approx(112, rel=0.02)
    assert found["collective"] == pytest.approx(3116 / 2, rel=0.15)


def test_what_stays_on_a_rank_is_one_graph_without_tensors_apart() -> None:
    whole = CUT.replace("parallel.tp=2 parallel.ep=2 ", "")
    found = calls(run(whole, 2), 0)
    assert found["graph"] == 27 * 2
    assert found["parameter"] == found["collective"] == 0
    assert found["unit"] == (27 + 2) * 2


def test_a_step_is_as_long_as_the_host_needs() -> None:
    planned, h200 = run("", 4, "llama3_8b"), HARDWARE["h200"]
    fast = predict(planned, replace(h200, calls=()))
    slow = predict(planned, replace(h200, calls=(("unit", 1.0),)))
    assert fast.parts["host"] == 0
    assert slow.step == host_seconds(planned, 0, {"unit": 1.0}) == 34
    assert slow.step == pytest.approx(sum(slow.parts.values()))
    assert predict(planned, h200).step == fast.step  # the device takes longer


def test_every_call_has_a_price() -> None:
    assert set(calls(run(CUT, 4), 0)) == set(PRICES) == {name for name, _ in HARDWARE["h200"].calls}
