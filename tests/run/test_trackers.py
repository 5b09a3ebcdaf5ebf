"""Trackers of metrics: TensorBoard, Weights & Biases, MLflow and one's own."""

import json
import logging
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.run import trackers
from dtron.run.trackers import Trackers, check_trackers, trackers_of
from dtron.training.trainer import Trainer
from tests.harness import run_ranks
from tests.training.test_trainer import fit, losses, rows, tiny


class Lines:
    """A tracker that writes a line per call to RUN/tracked."""

    def __init__(self, config: RunConfig, run: Path, first: int) -> None:
        self.path = run / "tracked"
        self.write(["open", config.train.steps, first])

    def write(self, line: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")

    def row(self, step: int, metrics: Any) -> None:
        self.write(["row", step, metrics["loss"]])

    def close(self, failed: bool) -> None:
        self.write(["close", failed])


def fails(*_: object) -> Any:
    raise OSError(28, "No space left on device")


class FailsLater(Lines):
    def row(self, step: int, metrics: Any) -> None:
        fails()


class Hangs(Lines):
    """A service that does not answer."""

    def row(self, step: int, metrics: Any) -> None:
        threading.Event().wait()


NOT_CALLABLE = 3
OWN = "tests.run.test_trackers:Lines"


def test_a_tracker_of_ones_own_gets_every_row(tmp_path: Path) -> None:
    """On rank 0 alone, and a run that resumes opens it at its step."""
    run = tmp_path / "run"
    keys: dict[str, Any] = {"metrics__trackers": [OWN], "metrics__log_interval": 1}
    run_ranks(2, fit, tiny(run, train__steps=2, **keys))
    run_ranks(2, fit, tiny(run, train__steps=3, checkpoint__resume="latest", **keys))
    lines = [json.loads(line) for line in (run / "tracked").read_text().splitlines()]
    first, second, third = ([*each] for each in enumerate(losses(run), 1))
    wanted = [["open", 2, 0], ["row", *first], ["row", *second], ["close", False]]
    assert lines == [*wanted, ["open", 3, 2], ["row", *third], ["close", False]]


@pytest.mark.parametrize("name", ["fails", "FailsLater"])
def test_a_tracker_that_fails_is_given_up(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    own = f"tests.run.test_trackers:{name}"
    run_dir, config = tmp_path, tiny(tmp_path)
    opened = Trackers([own, OWN], config, run_dir, 0)
    opened.row({"step": 1, "loss": 1.0, "mfu": None})
    opened.row({"step": 2, "loss": 1.0})
    opened.close()
    assert opened.names == [OWN]
    (record,) = [r for r in caplog.records if r.levelno == logging.WARNING]
    assert record.getMessage() == (
        f"{own}: logging stops: [Errno 28] No space left on device; training continues"
    )


def test_a_tracker_that_does_not_answer_delays_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trackers, "_SECONDS", 0.2)
    own = "tests.run.test_trackers:Hangs"
    opened = Trackers([own], tiny(tmp_path), tmp_path, 0)
    begin = time.monotonic()
    opened.row({"step": 1, "loss": 1.0})
    assert time.monotonic() - begin < 0.1
    opened.close()
    assert time.monotonic() - begin < 5
    monkeypatch.setattr(trackers, "_MOST_ROWS", 2)
    opened = Trackers([own], tiny(tmp_path), tmp_path, 0)
    for step in range(4):
        opened.row({"step": step, "loss": 1.0})
    assert not opened.names
    messages = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert messages == [
        f"{own}: logging stops: it has not ended after 0.2 s; training continues",
        f"{own}: logging stops: it is 2 rows behind; training continues",
    ]


def fit_to_an_error(config: RunConfig) -> None:
    trainer = Trainer(config)
    trainer._log = fails  # type: ignore[method-assign]
    with pytest.raises(OSError, match="No space"):
        trainer.fit()


def test_a_run_that_fails_is_told(tmp_path: Path) -> None:
    keys: dict[str, Any] = {"metrics__trackers": [OWN], "metrics__log_interval": 1}
    run_ranks(1, fit_to_an_error, tiny(tmp_path / "run", **keys))
    assert json.loads((tmp_path / "run/tracked").read_text().splitlines()[-1]) == ["close", True]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("wandbb", "'wandbb' is unknown; did you mean wandb?; use tensorboard, wandb, mlflow, or"),
        ("no_such_module:NAME", "there is no module no_such_module"),
        ("tests.run.test_trackers:Linse", "has no attribute 'Linse'"),
        ("tests.run.test_trackers:NOT_CALLABLE", "is not a function"),
        (":NAME", "metrics.trackers: ':NAME' is not MODULE:NAME"),
    ],
)
def test_names_are_checked_before_the_start(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        check_trackers(tiny(tmp_path, metrics__trackers=[name]))
    assert message in str(error.value)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"'wandb' needs wandb; pip install 'dtron\[track"):
        check_trackers(tiny(tmp_path, metrics__trackers=["wandb"]))


def test_each_tracker_is_opened_once(tmp_path: Path) -> None:
    keys = {"metrics__tensorboard": True, "metrics__trackers": ["tensorboard", "mlflow", "mlflow"]}
    assert trackers_of(tiny(tmp_path, **keys)) == ["tensorboard", "mlflow"]


def fit_offline(config: RunConfig) -> None:
    """Set environment variables in the rank's process."""
    os.environ.update(WANDB_MODE="offline", WANDB_SILENT="true")
    os.environ.pop("MLFLOW_TRACKING_URI", None)
    fit(config)


def run_twice(tmp_path: Path, name: str) -> Path:
    """A run of four steps that is resumed after two."""
    run = tmp_path / "run"
    keys: dict[str, Any] = {"metrics__trackers": [name], "metrics__log_interval": 1}
    run_ranks(1, fit_offline, tiny(run, train__steps=2, **keys))
    run_ranks(1, fit_offline, tiny(run, train__steps=4, checkpoint__resume="latest", **keys))
    return run


def test_weights_and_biases_offline(tmp_path: Path) -> None:
    """Both starts write files of one run."""
    pytest.importorskip("wandb")
    run = run_twice(tmp_path, "wandb")
    name = (run / "wandb-id").read_text().strip()
    files = sorted((run / "wandb").glob(f"offline-run-*/run-{name}.wandb"))
    assert len(files) == 2
    assert b"validation_loss" in files[1].read_bytes()


def test_mlflow_continues_its_run(tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    run = run_twice(tmp_path, "mlflow")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{run}/mlflow.db")
    name = (run / "mlflow-id").read_text().strip()
    found = client.get_metric_history(name, "loss")
    assert [(each.step, each.value) for each in found] == [*enumerate(losses(run), 1)]
    last = client.get_metric_history(name, "validation_loss")[-1]
    assert last.value == rows(run)[-1]["validation_loss"]
    kept = client.get_run(name)
    assert (kept.info.status, kept.data.params["train.steps"]) == ("FINISHED", "2")
