"""Figures that are written, compared, and marked when they are slower."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.baseline import OUT, RESULTS, ROOT, baseline
from dtron.bench import command
from dtron.bench.baseline import Baseline, why_not_here
from dtron.bench.command import bench_parser, main
from dtron.bench.run import Options, Outcome, bench_config
from dtron.bench.sweep import points
from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.setup.rules import check_layout

QUICKSTART = str(ROOT / "configs/quickstart.toml")
WORDS = [QUICKSTART, "train.seq_len=256", "--nproc-per-node", "1", "--warmup", "1", "--steps", "2"]


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of a step of each run, in place of real runs; 0: the run fails."""
    steps: list[float] = []

    def run_point(config: Path, overrides: Any, *arguments: Any) -> Outcome:
        if not (step := steps.pop(0)):
            return Outcome(arguments[-1], "failed", "no memory")
        times = {
            "begun_at": 0.0,
            "attended": [256.0] * 3,
            "images": [0.0] * 3,
            "devices": ["cpu"],
            "seconds": [[step] * 3],
            "memory_gib": [[1.0] * 3],
            "compile_cache": [{"hits": 0, "misses": 0}],
        }
        resolved = RunConfig.load(config, overrides).model_dump(mode="json")
        return Outcome(arguments[-1], "ok", config=resolved, times=times)

    monkeypatch.setattr(command, "run_point", run_point)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return steps


def test_a_slower_row_turns_red(
    tmp_path: Path, seconds: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    file, out = tmp_path / "b.json", ["--out", str(tmp_path / "out")]
    seconds += [1.0, 1.0]  # a rerun replaces the row of the same name
    for _ in range(2):
        assert main([*WORDS, "--write-baseline", str(file), *out]) == 0
    (row,) = Baseline.read(file).rows
    assert row.tokens_per_second_per_device == pytest.approx(16 * 256, rel=1e-3)
    assert row.versions["torch"] == torch.__version__
    compare = ["--baseline", str(file), *out]
    for step, more, status, word in (
        (1.02, [], 0, "ok"),
        (1.05, [], 1, "slower"),
        (1.05, ["--tolerance", "0.1"], 0, "ok"),
        (0.0, [], 1, "failed"),
    ):
        seconds.append(step)
        assert main([*compare, *more]) == status
        text = capsys.readouterr().out
        assert re.search(rf"\b{word}\b", text.split("against the baseline")[1]), text
    # planted: a row of another machine and a row of another torch are not compared
    other = replace(row, name="gpu", device="NVIDIA H200")
    older = replace(row, name="old", versions={"torch": "2.0"})
    Baseline([other, older, row]).write(file)
    seconds.append(1.0)
    assert main(compare) == 0
    text = capsys.readouterr().out
    assert "not compared: gpu: measured on NVIDIA H200; this machine has cpu" in text
    assert "not compared: old: measured with torch 2.0" in text
    Baseline([other]).write(file)
    with pytest.raises(ConfigError, match="no row was measured on such a machine"):
        main(compare)


def test_arguments_that_cannot_be_used_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    with pytest.raises(ConfigError, match=r"needs CONFIG"):
        main([])
    with pytest.raises(ConfigError, match="leave out CONFIG"):
        main([QUICKSTART, "--baseline", str(file)])
    with pytest.raises(ConfigError, match="No such file"):
        main(["--baseline", str(file)])
    file.write_text('{"rows": [{"name": "x"}]}')
    with pytest.raises(ConfigError, match="command"):
        main(["--baseline", str(file)])


def test_rows_of_h200s_are_those_of_results(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every row has the figures of RESULTS.md and a command that `dtron bench` accepts."""
    found = Baseline.read(OUT)
    assert found == baseline(RESULTS.read_text(encoding="utf-8"))
    monkeypatch.setattr(torch, "__version__", "2.11.0+cu130")
    for name, value in {
        "is_available": True,
        "device_count": 4,
        "get_device_name": "NVIDIA H200",
    }.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    for row in found.rows:
        given = bench_parser().parse_intermixed_args(row.words)
        (point,) = points(given.axes)
        options = Options(ranks=given.nproc_per_node)
        config, _ = bench_config(ROOT / given.config, point.overrides, options, Path())
        check_layout(config, options.ranks)
        assert why_not_here(row, options.ranks) is None
        assert "this machine has 4" in str(why_not_here(row, 8))


def test_a_run_is_compared_with_its_baseline(tmp_path: Path) -> None:
    """Real runs: equal speed is ok, a doctored row is slower."""
    file = tmp_path / "b.json"
    words = [*WORDS, "--write-baseline", str(file), "--out", str(tmp_path / "out")]
    assert main(words) == 0
    (row,) = Baseline.read(file).rows
    speed = row.tokens_per_second_per_device
    compare = ["--baseline", str(file), "--tolerance", "0.9", "--out", str(tmp_path / "again")]
    assert main(compare) == 0
    Baseline([replace(row, tokens_per_second_per_device=100 * speed)]).write(file)
    assert main(compare) == 1
