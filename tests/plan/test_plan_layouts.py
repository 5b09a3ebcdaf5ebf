"""The script of the blind test loses nothing that was measured, and runs what the GPUs can hold."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import plan_layouts
from benchmarks.plan_layouts import (
    FILE,
    chosen,
    compare,
    figures_of,
    measure,
    measure_all,
    measured,
    predicted,
    write,
)
from dtron.plan.hardware import hardware

LAYOUTS = json.loads(FILE.read_text())["layouts"]
SECOND = FILE.with_name("plan_layouts_2.json")


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


@pytest.mark.parametrize("file", [FILE, SECOND])
def test_predictions_are_those_of_the_planner_as_it_is(file: Path, tmp_path: Path) -> None:
    """After a change of the planner: python -m benchmarks.plan_layouts predict --layouts FILE."""
    kept = json.loads(file.read_text())
    now = [predicted(layout, hardware("h200")) for layout in kept["layouts"]]
    write(now, kept["seed"], tmp_path / "layouts.json")
    assert (tmp_path / "layouts.json").read_text() == file.read_text()


def test_the_second_drawing_has_other_layouts_with_short_steps() -> None:
    second = json.loads(SECOND.read_text())["layouts"]
    labels = {layout["label"] for layout in second}
    assert len(labels) == len(second) >= 10
    assert not labels & {layout["label"] for layout in LAYOUTS}
    assert {layout["world"] for layout in second} == {2, 4}
    assert figures_of(SECOND) != figures_of(FILE)


def test_a_measurement_that_is_broken_off_leaves_no_process(tmp_path: Path) -> None:
    """Its run is told by SIGTERM to end, and so are the processes that the run has started."""
    child = tmp_path / "child"
    sleeps = f"sleep 60 & echo $! > {child}; wait"
    code = f"from benchmarks.plan_layouts import ended; ended(['bash', '-c', {sleeps!r}])"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=FILE.parents[1])
    pid = _appears(child)
    process.terminate()
    assert process.wait(30) != 0
    for _ in range(100):
        if not _runs(pid):
            return
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    raise AssertionError("a process was left")


def _appears(file: Path) -> int:
    for _ in range(600):
        if file.exists() and (text := file.read_text().strip()):
            return int(text)
        time.sleep(0.1)
    raise AssertionError(f"{file} was not written")


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
