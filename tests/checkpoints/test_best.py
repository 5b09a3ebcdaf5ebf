"""The best checkpoint is kept, and a run that does not improve ends early."""

import json
import math
from pathlib import Path

import pytest
import torch.distributed as dist

from dtron import cli
from dtron.checkpoint import directory
from dtron.checkpoint.directory import complete
from dtron.checkpoint.find import find_weights
from dtron.checkpoint.metadata import read_metadata
from dtron.config import RunConfig
from dtron.errors import CheckpointError
from dtron.training.callbacks import Callback
from dtron.training.evaluation import Evaluation
from dtron.training.trainer import Trainer
from tests.harness import run_ranks
from tests.training.test_trainer import fit, rows, tiny

LOSSES = {1: 5.0, 2: 3.0, 3: 4.0, 4: 2.5, 5: math.nan, 6: 2.5, 7: 3.0, 8: 2.6}
"""Validation loss by step; step 6 is as good as step 4, and a bit better on the second rank."""
BEST = {"checkpoint__best": "validation_loss", "train__eval_interval": 1}
BEST |= {"checkpoint__interval": 1, "checkpoint__keep": 1, "train__steps": 12}


class StopAt(Callback):
    """Stops the run after a step."""

    def __init__(self, step: int) -> None:
        self.at = step

    def after_step(self, trainer: Trainer) -> None:
        if trainer.step == self.at:
            trainer.stop()


def fit_with_losses(config: RunConfig, stop: int = 0, forgets: bool = False) -> int:
    """On a rank: train with LOSSES; return the last step. `forgets`: plant a bug in retention."""
    if forgets:
        directory.best_of = lambda _folder: None
    trainer = Trainer(config, callbacks=[StopAt(stop)])

    def losses(self: Evaluation) -> dict[str, float]:
        return {"validation_loss": LOSSES[trainer.step] - 1e-9 * dist.get_rank()}

    Evaluation.losses = losses
    trainer.fit()
    return getattr(trainer, "step", 0)


def kept(run: Path) -> list[str]:
    return sorted(path.name for path in complete(run / "checkpoints"))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_best_checkpoint_is_kept_and_training_stops_early(tmp_path: Path, mode: str) -> None:
    run = tmp_path / "run"
    more = {"checkpoint__mode": mode, "train__stop_after": 4, "checkpoint__resume": "latest"}
    config = tiny(run, **BEST, **more)
    assert run_ranks(2, fit_with_losses, config, 5) in ([5, 5], [6, 6])
    assert find_weights(run / "best").name == "step-4"
    assert run_ranks(2, fit_with_losses, config) == [8, 8]  # the resumed run counts on
    assert kept(run) == ["step-4", "step-8"]
    assert find_weights(run / "best") == run / "checkpoints" / "step-4"
    found = read_metadata(run / "checkpoints" / "step-8").best
    assert found == {"metric": "validation_loss", "loss": 2.5, "step": 4, "since": 4}
    assert run_ranks(1, fit_with_losses, config) == [0]  # it is finished


def test_retention_that_forgets_the_best_is_noticed(tmp_path: Path) -> None:
    config = tiny(tmp_path, **BEST, train__stop_after=4)
    run_ranks(1, fit_with_losses, config, 0, True)
    assert kept(tmp_path) == ["step-8"]
    with pytest.raises(CheckpointError, match="neither a checkpoint"):
        find_weights(tmp_path / "best")


def test_commands_find_the_best_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {**BEST, "checkpoint__interval": 0, "train__steps": 4, "schedule__warmup": 0.0}
    run_ranks(1, fit, tiny(tmp_path, **changes, optim__lr=3.0))  # too high: losses rise
    logged = {row["step"]: row["validation_loss"] for row in rows(tmp_path)}
    best = min(logged, key=lambda step: logged[step])
    assert best < 4
    assert kept(tmp_path) == sorted({f"step-{best}", "step-4"})
    capsys.readouterr()
    assert cli.commands(["eval", "--json", str(tmp_path / "best")]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found == {"validation_loss": pytest.approx(logged[best], rel=1e-6)}
