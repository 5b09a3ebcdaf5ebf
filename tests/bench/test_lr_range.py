"""`dtron bench lr`: the rates of a range test, its table, picture and suggestion."""

import json
import math
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dtron import cli
from dtron.bench.lr_range import command
from dtron.bench.lr_range.command import read_points, suggestion, table
from dtron.bench.run import Outcome
from dtron.config import RunConfig
from tests.harness import run_ranks
from tests.training.test_trainer import fit, rows, tiny


def written(path: Path, losses: Sequence[float | None]) -> Path:
    """A log of a test from 1e-5 on, a decade every 10 steps."""
    lines = [{"step": i + 1, "loss": x, "lr": 10 ** (i / 10 - 5)} for i, x in enumerate(losses)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_the_suggestion_is_a_tenth_of_the_rate_of_the_lowest_loss(tmp_path: Path) -> None:
    falls = [5 - 0.1 * i for i in range(31)]
    rises = [2.0 * 1.5**i for i in range(1, 20)]
    found = read_points(written(tmp_path / "log", [*falls, *rises]), 200)
    assert len(found) < 50  # it has diverged before the end
    lowest = min(found, key=lambda each: each.smoothed)
    assert 30 <= found.index(lowest) <= 33
    assert suggestion(found) == pytest.approx(lowest.rate / 10)
    assert found[0].smoothed == found[0].loss
    assert suggestion(read_points(written(tmp_path / "log", [3.0, 4.0, 9.0]), 200)) is None
    assert len(read_points(written(tmp_path / "log", [3.0, 2.0, None, 1.0]), 200)) == 2
    assert suggestion([]) is None
    short = read_points(written(tmp_path / "log", [3.0, 2.5, 2.0, 3.5] * 6), 24)
    assert short[3].smoothed > 3  # few steps are averaged over few
    assert len(table(short).splitlines()) == 1 + 24


def test_a_test_runs_from_low_to_high(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config, out = tmp_path / "config.toml", tmp_path / "out"
    config.write_text(tiny(tmp_path / "unused").to_toml(), encoding="utf-8")

    def run(file: Path, words: Sequence[str], *_: Any) -> Outcome:
        steps = ["train.steps=16", f"run.dir={out / 'run'}", "train.eval_sequences=0"]
        run_ranks(1, fit, RunConfig.load(file, [*words, *steps]))
        return Outcome("", "ok")

    monkeypatch.setattr(command, "run_point", run)
    words = ["bench", "lr", str(config), "--low", "1e-4", "--high", "0.1", "--steps", "16"]
    assert cli.commands([*words, "--out", str(out)]) == 0
    rates = [row["lr"] for row in rows(out / "run")]
    assert rates == pytest.approx([1e-4 * 10 ** (3 * i / 15) for i in range(16)])
    printed = capsys.readouterr().out
    result = json.loads((out / "lr.json").read_text(encoding="utf-8"))
    assert f"suggestion: optim.lr={result['suggestion']:.1e}" in printed
    assert len(result["points"]) == 16
    lines = ET.parse(out / "lr.svg").getroot().iter("{http://www.w3.org/2000/svg}polyline")
    points = [
        x for line in lines for pair in line.get("points", "").split() for x in pair.split(",")
    ]
    assert len(points) == 2 * 2 * 16
    assert all(math.isfinite(float(x)) for x in points)
    assert cli.commands([*words, "--low", "1"]) == 1
    assert "use 0 < LOW < HIGH" in capsys.readouterr().err
