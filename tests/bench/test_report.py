"""Figures of recorded runs."""

import ctypes
import io
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console
from rich.table import Table

from dtron.bench.frameworks import Comparison, comparison_table
from dtron.bench.kernels.command import Timing, timings_table
from dtron.bench.report import WIDTH, RunFigures, figures, loaded_nccl, percentile, tables
from dtron.bench.run import Options, Outcome
from dtron.config import RunConfig
from dtron.models import model_config
from dtron.models.flops import FlopsModel, flops_per_token

CONFIG = RunConfig.of(
    {"model": {"name": "llama", "size": "8b"}, "train": {"global_batch": 8, "seq_len": 8192}}
)
OPTIONS = Options(ranks=2, warmup=1, steps=4, profile_steps=1)


def outcome(by_rank: list[list[float]], **changes: Any) -> Outcome:
    times = {
        "begun_at": 130.0,
        "attended": [8192.0] * 6,
        "images": [0.0] * 6,
        "devices": ["NVIDIA H200"] * 2,
        "seconds": by_rank,
        "memory_gib": [[1.0, 2.0, 2.0, 2.0, 3.0, 9.0], [1.0, 2.0, 2.0, 4.0, 4.0, 9.0]],
        "compile_cache": [{"hits": 0, "misses": 3}] * 2,
    }
    fields: dict[str, Any] = {"label": "x", "status": "ok", "launched_at": 100.0, "times": times}
    return Outcome(**{**fields, "config": CONFIG.model_dump(mode="json"), **changes})


def test_figures_are_of_the_timed_steps_alone() -> None:
    # Means over ranks: 20 | 1, 2, 3, 4 | 50: the first step compiles, the last is profiled.
    by_rank = [[19.0, 0.5, 2.0, 3.0, 4.0, 50.0], [21.0, 1.5, 2.0, 3.0, 4.0, 50.0]]
    found = figures([outcome(by_rank)], OPTIONS)
    assert found is not None
    assert found.step_seconds == 2.5
    assert found.tokens_per_second_per_device == 8 * 8192 / 2.5 / 2
    assert (found.p10_seconds, found.p90_seconds) == pytest.approx((1.3, 3.7))
    assert found.memory_gib == 4.0
    assert found.first_step_seconds == 20.0
    assert found.cold_start_seconds == 50.0
    assert found.drift is None
    sizes = FlopsModel.of(model_config("llama", "8b", {}))
    each = 8 * 8192 / 5
    for name in ("full", "causal"):
        flops = flops_per_token(sizes, 8192, name) * each
        assert found.tflops[name] == pytest.approx(flops / 1e12)
        assert found.mfu[name] == pytest.approx(flops / 989e12)


def test_repeats_are_pooled_and_their_drift_shown() -> None:
    first = outcome([[9.0, 1.0, 1.0, 1.0, 1.0, 9.0]] * 2)
    second = outcome([[9.0, 1.5, 1.5, 1.5, 1.5, 9.0]] * 2)
    found = figures([first, second], OPTIONS)
    assert found is not None
    assert found.step_seconds == 1.25
    assert found.drift == pytest.approx(0.5)
    assert found.repeat_seconds == (1.0, 1.5)


def test_failed_runs_give_nothing() -> None:
    failed = outcome([], status="failed", reason="out of memory", times={})
    assert figures([failed], OPTIONS) is None
    good = outcome([[9.0, 1.0, 1.0, 1.0, 1.0, 9.0]] * 2)
    found = figures([failed, good], OPTIONS)
    assert found is not None
    assert found.repeat_seconds == (1.0,)


def test_percentiles_interpolate() -> None:
    assert percentile([1.0], 0.9) == 1.0
    assert percentile([0.0, 10.0], 0.1) == pytest.approx(1.0)
    assert percentile([0.0, 1.0, 2.0], 0.5) == 1.0


def test_the_nccl_that_is_loaded_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(version: Any) -> None:
        version._obj.value = 23_007

    monkeypatch.setattr(ctypes, "CDLL", lambda name: SimpleNamespace(ncclGetVersion=write))
    assert loaded_nccl() == "2.30.7"


def test_no_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> None:
        raise OSError(name)

    monkeypatch.setattr(ctypes, "CDLL", absent)
    assert loaded_nccl() == ""


LABEL = "parallel.dp_shard=128 parallel.tp=8 parallel.schedule=InterleavedZeroBubble"
WIDE = RunFigures(
    step_seconds=1234.5,
    p10_seconds=1234.4,
    p90_seconds=1234.6,
    tokens_per_second_per_device=123456.7,
    tflops={"full": 1234.5, "causal": 1234.5},
    mfu={"full": 0.4567, "causal": 0.4567},
    memory_gib=123.4,
    hidden=0.456,
    cold_start_seconds=1234.5,
    first_step_seconds=1234.56,
    cache_hits=0,
    drift=0.123,
    repeat_seconds=(),
)
TIMING = Timing(
    "flash, compiled",
    seconds=(1.2345, 1.2345),
    tflops=(1234.5, 1234.5),
    of_limit=(0.4567, 0.4567),
    error=(1.2e-5, 1.2e-5),
)


def compared() -> Outcome:
    facts = {"parameters": 671_026_404_352, "tokens_a_step": 16_777_216, "dtype": "bfloat16"}
    facts |= {"recompute": "selective, every 2"}
    found = Comparison("torchtitan", facts, facts, [], 123456.7, 123456.7, 1.234, 123.4)
    return outcome([[1.0]], label=LABEL, against={"comparison": asdict(found)})


@pytest.mark.parametrize(
    "shown",
    [
        *tables([(LABEL, WIDE, "")], "llama 8b, 8 ranks"),
        timings_table([TIMING], ["forward", "backward"], "attention"),
        comparison_table([compared()]),
    ],
    ids=lambda table: str(table.title),
)
def test_tables_fit_the_width(shown: Table) -> None:
    console = Console(width=WIDTH, record=True, file=io.StringIO())
    console.print(shown)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= WIDTH
    assert "…" not in text
