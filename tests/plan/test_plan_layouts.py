"""The script of the blind test loses nothing that was measured, and runs what the GPUs can hold."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plan_layouts
from benchmarks.plan_layouts import (
    FILE,
    chosen,
    compare,
    measure,
    measure_all,
    measured,
    predicted,
    write,
)
from dtron.plan.hardware import hardware

LAYOUTS = json.loads(FILE.read_text())["layouts"]


def test_layouts_that_fit_the_gpus_are_chosen() -> None:
    every = chosen(LAYOUTS, [], [], 4)
    assert every == list(range(len(LAYOUTS)))
    assert {LAYOUTS[i]["world"] for i in chosen(LAYOUTS, [], [], 2)} == {1, 2}
    assert {LAYOUTS[i]["world"] for i in chosen(LAYOUTS, [2, 4], [], 2)} == {2}
    twos = chosen(LAYOUTS, [2], [], 4)
    assert chosen(LAYOUTS, [2], twos[:1] + chosen(LAYOUTS, [1], [], 4)[:1], 4) == twos[:1]
    assert chosen(LAYOUTS, [], [], 0) == []


def test_every_row_is_kept_and_only_those_that_failed_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, ran = tmp_path / "measured.json", []
    world = {LAYOUTS[i]["label"]: i for i in range(len(LAYOUTS))}

    def run(layout: dict[str, Any], out: Path, seconds: float) -> dict[str, Any]:
        place = world[layout["label"]]
        ran.append(place)
        if place == 1 and ran.count(1) == 1:
            return {"failed": f"took more than {seconds:.0f} s"}
        if place == 2 and ran.count(2) == 1:
            raise KeyboardInterrupt
        return {key: 2 * layout[key] for key in ("gib", "step_seconds")}

    monkeypatch.setattr(plan_layouts, "measure", run)
    with pytest.raises(KeyboardInterrupt):
        measure_all(LAYOUTS, [0, 1, 2, 3], file, 7)
    assert set(measured(file)) == {0, 1}
    assert measured(file)[1] == {"failed": "took more than 7 s"}
    measure_all(LAYOUTS, [0, 1, 2, 3], file, 7)
    assert ran == [0, 1, 2, 1, 2, 3]
    capsys.readouterr()
    compare(LAYOUTS, measured(file))
    shown = capsys.readouterr().out
    assert "-50.0%" in shown
    assert "correlation of tok/s/GPU: 1.000" in shown


def test_a_row_that_takes_too_long_says_so(tmp_path: Path) -> None:
    """Of a real `dtron bench`, which is given no time."""
    found = measure(LAYOUTS[0], tmp_path, 0.01)
    assert found == {"failed": "timed out after 0.01 s"}


def test_predictions_are_those_of_the_planner_as_it_is(tmp_path: Path) -> None:
    """After a change of the planner: python -m benchmarks.plan_layouts predict."""
    now = [predicted(layout, hardware("h200")) for layout in LAYOUTS]
    write(now, tmp_path / "layouts.json")
    assert (tmp_path / "layouts.json").read_text() == FILE.read_text()
