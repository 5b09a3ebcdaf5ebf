"""Checkpoints of float8 runs hold plain weights: any run reads them."""

from pathlib import Path

import torch

from tests.harness import run_ranks
from tests.training.test_trainer import contents, fit, rows, tiny

FLOAT8 = {
    "float8__recipe": "tensorwise",
    "float8__all_gather": True,
    "model__override__ffn_dim": 64,
    "model__override__head_dim": 16,
    "checkpoint__interval": 2,
    "checkpoint__keep": 0,
    "train__steps": 4,
}


def test_resumed_runs_go_on_with_their_delayed_scales(tmp_path: Path) -> None:
    delayed = {**FLOAT8, "float8__scaling": "delayed", "float8__all_gather": False}
    run_ranks(2, fit, tiny(tmp_path / "whole", **delayed))
    middle = str(tmp_path / "whole" / "checkpoints" / "step-2")
    histories = {k: v for k, v in contents(Path(middle)).items() if k.startswith("float8.")}
    assert histories["float8.blocks.0.attn.wq"].shape == (16, 2)
    assert all((x[:2] > 0).all() and not x[2:].any() for x in histories.values())

    run_ranks(2, fit, tiny(tmp_path / "again", **delayed, checkpoint__resume=middle))
    losses = [row["loss"] for row in rows(tmp_path / "whole")]
    assert [row["loss"] for row in rows(tmp_path / "again")] == losses[2:]
    last = [contents(tmp_path / run / "checkpoints" / "step-4") for run in ("whole", "again")]
    assert all(torch.equal(last[0][name], last[1][name]) for name in histories)

    other = {**delayed, "float8__amax_history": 4}  # of which there is none
    run_ranks(2, fit, tiny(tmp_path / "other", **other, checkpoint__resume=middle))
    assert [row["loss"] for row in rows(tmp_path / "other")] != losses[2:]


def test_resumed_runs_go_on_to_the_bit_with_float8_and_without(tmp_path: Path) -> None:
    run_ranks(2, fit, tiny(tmp_path / "whole", **FLOAT8))
    middle = str(tmp_path / "whole" / "checkpoints" / "step-2")
    saved = {k: v for k, v in contents(Path(middle)).items() if k.startswith("model.")}
    assert saved
    assert {tensor.dtype for tensor in saved.values()} == {torch.float32}

    run_ranks(2, fit, tiny(tmp_path / "again", **FLOAT8, checkpoint__resume=middle))
    losses = [row["loss"] for row in rows(tmp_path / "whole")]
    assert [row["loss"] for row in rows(tmp_path / "again")] == losses[2:]

    plain = {key: value for key, value in FLOAT8.items() if not key.startswith("float8")}
    run_ranks(2, fit, tiny(tmp_path / "plain", **plain, checkpoint__resume=middle))
    others = [row["loss"] for row in rows(tmp_path / "plain")]
    assert others != losses[2:]
    assert all(abs(x - y) < 0.02 * y for x, y in zip(others, losses[2:], strict=True))
