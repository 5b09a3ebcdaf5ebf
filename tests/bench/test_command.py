"""The command around the runs of a sweep."""

import json
from pathlib import Path
from typing import Any

import pytest

from dtron.bench import command
from dtron.bench.command import main
from dtron.bench.frameworks import LOG_STEPS
from dtron.bench.run import NEVER, Outcome
from dtron.errors import ConfigError

QUICKSTART = str(Path(__file__).parents[2] / "configs/quickstart.toml")


def test_a_sweep_that_breaks_off_leaves_the_runs_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Refused points are not tried again, and bench.json holds what ended."""
    labels: list[str] = []

    def run_point(*arguments: Any) -> Outcome:
        label = arguments[-1]
        labels.append(label)
        if len(labels) == 3:
            raise KeyboardInterrupt
        status = "refused" if label == "parallel.zero=1" else "failed"
        return Outcome(label, status, "because")

    monkeypatch.setattr(command, "run_point", run_point)
    with pytest.raises(KeyboardInterrupt):
        main([QUICKSTART, "parallel.zero=1,2", "--repeat", "2", "--out", str(tmp_path)])
    assert labels == ["parallel.zero=1", "parallel.zero=2", "parallel.zero=2"]
    points = json.loads((tmp_path / "bench.json").read_text())["points"]
    assert [[run["status"] for run in point["runs"]] for point in points] == [
        ["refused"],
        ["failed"],
    ]


def test_what_cannot_run_is_printed_before_the_first_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run takes minutes of GPUs, and the wrong value may be the last one."""
    before: list[str] = []

    def run_point(*arguments: Any) -> Outcome:
        before.append(capsys.readouterr().out)
        return Outcome(arguments[-1], "failed", "because")

    monkeypatch.setattr(command, "run_point", run_point)
    words = [QUICKSTART, "parallel.zero=1,9", "--repeat", "2", "--out", str(tmp_path)]
    assert main([*words, "--nproc-per-node", "1"]) == 1
    assert len(before) == 2
    assert "parallel.zero=9: refused: parallel.zero = 9: " in before[0]
    good, bad = json.loads((tmp_path / "bench.json").read_text())["points"]
    assert [len(good["runs"]), len(bad["runs"]), bad["runs"][0]["status"]] == [2, 1, "refused"]


def test_a_sweep_of_which_no_point_can_run_prints_reasons_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [QUICKSTART, "parallel.zero=8,9", "--out", str(tmp_path), "--nproc-per-node", "1"]
    assert main(words) == 1
    first, second, written = capsys.readouterr().out.splitlines()
    assert first.startswith("parallel.zero=8: refused: ")
    assert second.startswith("parallel.zero=9: refused: ")
    assert written == f"written: {tmp_path / 'bench.json'}"


def test_an_error_of_a_point_is_printed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_point(*arguments: Any) -> Outcome:
        return Outcome(arguments[-1], "refused", "train.steps is too few")

    monkeypatch.setattr(command, "run_point", run_point)
    assert main([QUICKSTART, "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("train.steps is too few") == 1


def test_an_error_of_each_repeat_is_printed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def run_point(*arguments: Any) -> Outcome:
        return Outcome(arguments[-1], "failed", "out of memory")

    monkeypatch.setattr(command, "run_point", run_point)
    assert main([QUICKSTART, "--repeat", "3", "--out", str(tmp_path)]) == 1
    assert capsys.readouterr().out.count("out of memory") == 1


@pytest.mark.parametrize(("more", "interval"), [([], NEVER), (["--against", "torchtitan"], 5)])
def test_dtron_logs_as_often_as_a_peer(more: list[str], interval: int) -> None:
    assert LOG_STEPS == 5
    given = command.bench_parser().parse_args([QUICKSTART, *more])
    assert command._options(given).log_interval == interval


@pytest.mark.parametrize("words", [[QUICKSTART], ["kernels"]])
def test_a_bench_under_torchrun_is_refused(
    words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with pytest.raises(ConfigError, match="start it without torchrun, with --nproc-per-node N"):
        main(words)


def test_benches_of_one_second_have_folders_of_their_own(tmp_path: Path) -> None:
    assert len({command.new_folder(tmp_path) for _ in range(5)}) == 5
