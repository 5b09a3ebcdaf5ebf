"""Files of a run directory are written whole, and never through what somebody has put there."""

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from dtron.errors import ConfigError
from dtron.io.filesystem import write_atomically
from dtron.run import directory
from dtron.run.directory import RunDir
from dtron.run.metrics import MetricsWriter
from dtron.run.process import Place
from dtron.setup.resume import _is_restart
from tests.training.test_trainer import NO_TRACKERS

KINDS: dict[str, Callable[[Path, Path], object]] = {
    "link": lambda path, victim: path.symlink_to(victim),
    "fifo": lambda path, victim: os.mkfifo(path),
    "directory": lambda path, victim: path.mkdir(),
}
PARTIAL = ("config.toml", "run.json", "committed.json", "metrics.jsonl", "steps.json")


@pytest.mark.parametrize("kind", KINDS)
def test_what_lies_under_another_name_is_not_written(tmp_path: Path, kind: str) -> None:
    run, victim = RunDir(tmp_path / "run"), tmp_path / "victim"
    run.path.mkdir()
    victim.write_text("theirs")
    run.metrics.write_text('{"step": 1}\n')
    for name in PARTIAL:
        KINDS[kind](run.path / f"{name}.partial", victim)
    run.open("x = 1\n", 5)
    run.write_run_json({})
    run.write_steps_json({})
    run.note_checkpoint(run.checkpoints / "step-1")
    assert victim.read_text() == "theirs"
    assert json.loads(run.run_json.read_text()) == {}
    assert run.metrics.read_text() == '{"step": 1}\n'


def test_a_link_in_the_place_of_a_file_is_replaced(tmp_path: Path) -> None:
    run, victim = RunDir(tmp_path / "run"), tmp_path / "victim"
    run.path.mkdir()
    victim.write_text("theirs")
    for path in (run.begun, run.config, run.run_json, run.metrics):
        path.symlink_to(victim)
    run.open("x = 1\n", 5)
    run.note_begun("job")
    run.write_run_json({})
    assert victim.read_text() == "theirs"
    assert run.begun.read_text() == "job"
    run.metrics.unlink()
    run.metrics.symlink_to(victim)
    MetricsWriter(run.metrics, NO_TRACKERS, Console(), 1, start_step=0, active=True)
    assert victim.read_text() == "theirs"


@pytest.mark.parametrize("name", ["committed.json", "begun"])
def test_a_directory_in_the_place_of_a_file_is_one_line(tmp_path: Path, name: str) -> None:
    run = RunDir(tmp_path)
    (tmp_path / name).mkdir()
    acts: list[Callable[[], object]] = [lambda: run.open("x = 1\n", None)]
    if name == "begun":
        run.open("x = 1\n", 5)
        acts = [lambda: run.note_begun("job"), lambda: _is_restart(run, Place(0, 0, 1))]
    for act in acts:
        with pytest.raises(ConfigError, match=rf"run.dir = .*/{name} cannot be written: Is a dir"):
            act()


def test_what_a_killed_run_left_of_a_file_is_removed(tmp_path: Path) -> None:
    left, kept = tmp_path / f"run.json.{'0a' * 16}.partial", tmp_path / "notes.partial"
    left.write_text("{")
    kept.write_text("")
    RunDir(tmp_path).open("x = 1\n", 1)
    assert kept.exists()
    assert not left.exists()


def test_a_file_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "x").mkdir()
    with pytest.raises(OSError, match="Is a directory") as error:
        write_atomically(tmp_path / "x", "text")
    assert error.value.filename == str(tmp_path / "x")
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_metrics_of_an_earlier_start_are_read_row_by_row_and_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, at_once = RunDir(tmp_path), []
    run.metrics.write_text("".join(f'{{"step": {i}}}\n' for i in range(1000)))
    monkeypatch.setattr(
        directory,
        "write_atomically",
        lambda path, text, synced: at_once.append(type(text)) or write_atomically(path, text),
    )
    run.open("x = 1\n", 499)
    assert str not in at_once[:1]
    assert len(run.metrics.read_text().splitlines()) == 500
    os.truncate(run.metrics, 2**41)
    with pytest.raises(ConfigError, match=r"metrics.jsonl cannot be read: it has \d+ bytes"):
        run.open("x = 1\n", 499)
