"""`dtron serve-check`: an export computes what the checkpoint does, in transformers too."""

import contextlib
import io
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dtron import cli
from dtron.checkpoint.convert import from_hf_folder, to_hf_folder
from dtron.inference.serve_check import differences
from dtron.models import MODELS, to_hf
from tests.harness import run_ranks
from tests.models.build import initialized, small_config, varied


@pytest.fixture(autouse=True)
def _transformers() -> None:
    pytest.importorskip("transformers", minversion="5.0")


def stored(path: Path, name: str) -> Path:
    """A checkpoint of a random model of a family."""
    to_hf(varied(initialized(name, small_config(name, tied=False))), path / "hf", name=name)
    run_ranks(1, from_hf_folder, path / "hf", path / "checkpoint")
    return path / "checkpoint"


OTHERS = ("llava", "t5")
"""Families that read more than tokens."""


@pytest.mark.parametrize("name", [name for name in MODELS if name not in OTHERS])
def test_every_family_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert cli.commands(["serve-check", str(stored(tmp_path, name))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 * (1 + 8)
    assert lines[0].startswith("float32: largest difference")
    assert all(line.endswith("passed") for line in lines if line[0] != " ")


def test_a_wrong_export_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Rows of one matrix that are swapped, or another base of the rotary embedding."""
    checkpoint, export = stored(tmp_path, "llama"), tmp_path / "export"
    run_ranks(1, to_hf_folder, checkpoint, export, "bfloat16")
    command = ["serve-check", str(checkpoint), "--export", str(export), "--tokens", "5,4,3,2,9,9"]
    assert cli.commands(command) == 0
    tensors = load_file(export / "model.safetensors")
    key = "model.layers.1.self_attn.q_proj.weight"
    save_file({**tensors, key: tensors[key].roll(1, 0)}, export / "model.safetensors")
    assert cli.commands(command) == 1
    save_file(tensors, export / "model.safetensors")
    config = json.loads((export / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = config["rope_theta"] = 7.0
    (export / "config.json").write_text(json.dumps(config))
    capsys.readouterr()
    assert cli.commands(command) == 1
    rows = capsys.readouterr().out.splitlines()
    assert "FAILED" in rows[0]
    assert float(rows[1].split()[-1]) < 1e-5  # the first position has no other to attend to


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--tokens", "1,x"], "give at most"),
        (["--length", "0"], "--length 0 is not between 1 and"),
        (["--export", "nowhere"], "has no config.json"),
    ],
)
def test_what_is_refused(tmp_path: Path, words: list[str], message: str) -> None:
    command = ["serve-check", str(stored(tmp_path, "llama")), *words]
    (printed,) = run_ranks(1, refused, command)
    assert message in printed


def refused(command: list[str]) -> str:
    """On one rank: the error that a command prints."""
    with contextlib.redirect_stderr(io.StringIO()) as error:
        assert cli.commands(command) == 1
    return error.getvalue()


def test_not_a_number_is_a_difference() -> None:
    logits = torch.ones(1, 2, 3)
    assert differences(logits, logits).tolist() == [0.0, 0.0]
    assert differences(logits * torch.nan, logits).tolist() == [torch.inf, torch.inf]
