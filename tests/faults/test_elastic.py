"""The same run on fewer and more ranks: batches and losses go on as if nothing had happened."""

from pathlib import Path

import pytest

from dtron.config import RunConfig
from dtron.training.trainer import Trainer
from tests.harness import run_ranks
from tests.training.test_trainer import fit, rows, tiny


class Until(Trainer):
    """Stops after a step, as if it had been signalled there."""

    def stop_after(self, step: int) -> "Until":
        self.last = step
        return self

    def _one_step(self) -> None:
        super()._one_step()
        if self.step == self.last:
            self.saving.begin()
            raise KeyboardInterrupt


def fit_until(config: RunConfig, step: int) -> None:
    with pytest.raises(KeyboardInterrupt):
        Until(config).stop_after(step).fit()


@pytest.mark.parametrize("tp", [1, 2])
def test_ranks_leave_and_come_back(tmp_path: Path, tp: int) -> None:
    """dp_shard = -1 takes what there is: 4 ranks, then 2, then 4 again."""
    keys = {"metrics__batch_hash": True, "train__steps": 9, "train__eval_sequences": 0}
    keys |= {"checkpoint__resume": "latest", "parallel__tp": tp}
    whole, run_dir = tmp_path / "whole", tmp_path / "run"
    run_ranks(4, fit, tiny(whole, **keys))
    run_ranks(4, fit_until, tiny(run_dir, **keys), 3)
    assert len(rows(run_dir)) == 3
    assert _figures(run_dir) == _figures(whole)[:3]  # equal layouts: equal bits
    run_ranks(2, fit_until, tiny(run_dir, **keys), 6)
    run_ranks(4, fit, tiny(run_dir, **keys))
    found, wanted = rows(run_dir), rows(whole)
    assert [row["batch"] for row in found] == [row["batch"] for row in wanted]
    for row, reference in zip(found, wanted, strict=True):
        assert row["loss"] == pytest.approx(reference["loss"], rel=1e-5), row["step"]


def _figures(run_dir: Path) -> list[tuple]:
    return [(row["step"], row["loss"], row["batch"]) for row in rows(run_dir)]
