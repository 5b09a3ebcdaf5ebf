"""What is told of the casts of a run's layers, and the comparison of two runs."""

import json
import math
from pathlib import Path

import pytest
import torch

from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.float8 import RECIPES
from dtron.float8.compare import compare, draw, main
from dtron.float8.recipes import E4M3, Cast
from dtron.float8.statistics import measure
from tests.harness import run_ranks
from tests.training.test_trainer import fit, rows, tiny

KEYS = {"sqnr", "underflow", "overflow"}


def test_sums_of_a_cast_of_known_numbers() -> None:
    x = torch.tensor([[448.0, 17.0, 1e-4, 0.0], [900.0, -1.0, 2.0, 3.0]])
    sums = measure(x, Cast(E4M3, (0, 0)), scale=torch.ones(1, 1)).tolist()
    signal, noise, vanished, nonzero, saturated, count = sums
    assert signal == pytest.approx(x.double().square().sum().item())
    assert noise == pytest.approx(1.0 + 452.0**2, rel=1e-6)  # 17 -> 16, 900 -> 448
    assert (vanished, nonzero, saturated, count) == (1, 7, 1, 8)


@pytest.mark.parametrize("name", RECIPES)
def test_nothing_saturates_by_its_own_scale(name: str) -> None:
    torch.manual_seed(0)
    sums = measure(torch.randn(130, 70).bfloat16(), RECIPES[name].output.left)
    assert sums[4] == 0
    assert 10 * (sums[0] / sums[1]).log10() > 26


COMPILED = {"compile__enable": True, "compile__backend": "aot_eager", "parallel__tp": 2}


def fit_both(*configs: RunConfig) -> None:
    """In the same ranks, in which DTensor knows its shardings by then."""
    for config in configs:
        fit(config)


@pytest.mark.parametrize("settings", [{"parallel__pp": 2}, COMPILED])
def test_steps_that_report_name_every_layer(tmp_path: Path, settings: dict) -> None:
    """And change nothing: the other steps' losses are those of a run without reports."""
    common = {"float8__recipe": "tensorwise", "train__steps": 4, "model__override__ffn_dim": 64}
    common |= {"model__override__head_dim": 16, **settings}
    without = tiny(tmp_path / "without", **common)
    run_ranks(2, fit_both, without, tiny(tmp_path / "with", **common, float8__report_interval=2))
    messages, plain = rows(tmp_path / "with"), rows(tmp_path / "without")
    assert [row["loss"] for row in messages] == [row["loss"] for row in plain]
    layers = json.loads((tmp_path / "with" / "run.json").read_text())["float8"]["layers"]
    assert len(layers) == 2 * 7
    expected = {
        f"float8/{layer}/{operand}_{key}"
        for layer in layers
        for operand in ("input", "weight", "grad")
        for key in KEYS
    }
    for row in messages:
        found = {key for key in row if key.startswith("float8/")}
        assert found == (expected if row["step"] % 2 == 0 else set())
        for key in found:
            low, high = (15.0, 60.0) if key.endswith("sqnr") else (0.0, 0.5)
            assert low <= row[key] <= high, key


def run_of(directory: Path, losses: list[float]) -> Path:
    directory.mkdir()
    lines = [json.dumps({"step": i + 1, "loss": loss}) for i, loss in enumerate(losses)]
    (directory / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return directory


def test_two_runs_are_compared_over_their_last_common_steps(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    one = run_of(tmp_path / "bf16", [4.0, 3.0, 2.0, 2.0])
    two = run_of(tmp_path / "float8<&", [4.0, 3.5, 2.2, 2.0, 9.0])
    found = compare(one, two, last=2)
    assert found.steps == (1, 2, 3, 4)
    assert math.isclose(found.gap, 0.05)
    picture = draw(found)
    assert picture.count("<polyline") == 2
    assert "float8&lt;&amp;" in picture
    out = tmp_path / "both.svg"
    assert main([str(one), str(two), "--last", "2", "--out", str(out)]) == 0
    assert "gap +5.00%" in capsys.readouterr().out
    assert out.read_text() == picture


def test_runs_that_cannot_be_compared(tmp_path: Path) -> None:
    one = run_of(tmp_path / "bf16", [4.0])
    with pytest.raises(ConfigError, match=r"metrics\.jsonl cannot be read"):
        compare(one, tmp_path / "none")
    assert main([str(one), str(tmp_path / "none")]) == 2
