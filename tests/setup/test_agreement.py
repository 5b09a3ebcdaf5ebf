"""Ranks whose settings, data or code differ stop before the first step and say what differs."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.setup import agreement
from dtron.training.trainer import Trainer
from tests.harness import run_ranks
from tests.training.test_trainer import rows, tiny


def refused(changes: dict[str, dict[str, Any]], run_dir: Path) -> str:
    """What this rank raises when it is started with its own changes."""
    mine = changes.get(os.environ["RANK"], {})
    if "source" in mine:
        agreement._source = lambda: mine["source"]  # type: ignore[assignment]
    with pytest.raises(ConfigError) as error:
        Trainer(config_of(mine, run_dir)).fit()
    return str(error.value)


def config_of(mine: dict[str, Any], run_dir: Path) -> RunConfig:
    if "data__paths" in mine:
        os.environ["LOCAL_RANK"] = "0"  # each rank is a host
    keys = {"train__steps": 1, "data__cache_dir": str(run_dir.parent / "cache"), **mine}
    return tiny(run_dir, **{key: value for key, value in keys.items() if "__" in key})


def corpus(path: Path, text: str) -> str:
    path.write_text("".join(json.dumps({"text": f"{text} {i} " * 40}) + "\n" for i in range(20)))
    return str(path)


@pytest.mark.parametrize(
    ("world", "changes", "message"),
    [
        (2, {"1": {"train__global_batch": 16}}, "on train.global_batch: 8 on rank 0 ("),
        (2, {"1": {"optim__lr": 1.0}}, "optim.lr"),
        (
            3,
            {"1": {"model__override__rope_theta": 12345.0}},
            "model.override.rope_theta: 500000.0 on ranks 0, 2 (",
        ),
        (2, {"1": {"model__override__dim": 64}}, "model.override.dim"),
        (2, {"0": {"source": "other"}}, 'dtron\'s source code: "other" on rank 0'),
    ],
    ids=["batch", "rate", "rotation", "shape", "code"],
)
def test_ranks_that_differ_are_refused(
    tmp_path: Path, world: int, changes: dict[str, Any], message: str
) -> None:
    if world == 3:
        changes = {rank: {**mine, "train__global_batch": 12} for rank, mine in changes.items()}
        changes |= {rank: {"train__global_batch": 12} for rank in ("0", "2")}
    for said in run_ranks(world, refused, changes, tmp_path / "run"):
        assert said.startswith("ranks disagree on ")
        assert message in said
    assert not (tmp_path / "run" / "metrics.jsonl").exists() or not rows(tmp_path / "run")


def test_files_that_differ_under_names_of_their_own_are_found_by_their_content(
    tmp_path: Path,
) -> None:
    """As two hosts with a file each under one path would have them; equal files are no matter."""
    files = [corpus(tmp_path / f"{name}.jsonl", name) for name in ("a", "b")]
    changes = {
        str(rank): {"data__paths": [file], "data__cache_dir": str(tmp_path / f"cache-{rank}")}
        for rank, file in enumerate(files)
    }
    for said in run_ranks(2, refused, changes, tmp_path / "run"):
        assert said.startswith("ranks disagree on the training data: ")
    Path(files[1]).write_text(Path(files[0]).read_text())
    assert run_ranks(2, fitted, changes, tmp_path / "run") == [1, 1]


def fitted(changes: dict[str, dict[str, Any]], run_dir: Path) -> int:
    trainer = Trainer(config_of(changes[os.environ["RANK"]], run_dir))
    trainer.fit()
    return trainer.step
