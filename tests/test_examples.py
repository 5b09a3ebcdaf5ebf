"""Scripts of examples/ that docs/tutorial-data.md and docs/tutorial-model.md begin with, as a user
starts them, for a few steps."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dtron.cli import commands
from dtron.config import RunConfig
from tests.harness import run_ranks
from tests.test_architecture import ROOT
from tests.training.test_trainer import fit, rows

FEW = ["train.steps=2", "train.eval_sequences=0", "train.sample_tokens=0", "checkpoint.interval=2"]
FEW += ["train.seq_len=128", "train.global_batch=2"]


def free_port() -> int:
    """For a rendezvous."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def run(out: Path, *command: str) -> str:
    """What it prints; it has to succeed."""
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    env = {**os.environ, "PATH": path, "OUT": str(out), "PORT": str(free_port())}
    env |= {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    env |= {"RANKS": "1"}  # of fine_tune.sh: most of its time is that in which ranks import
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_own_text_and_tokenizer_then_fine_tuning(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    own, folder = tmp_path / "own", tmp_path / "folder"
    assert "step 2/2" in run(own, "bash", "examples/own_data.sh", *FEW)
    commands(["convert", "to-hf", str(own / "run"), str(folder)])
    script = ["bash", "examples/fine_tune.sh", str(folder), str(own / "my.jsonl")]
    printed = run(tmp_path / "fine", *script, *FEW)
    assert "step 2/2" in printed
    assert "\nIn the beginning" in printed


def test_own_model_by_config(tmp_path: Path) -> None:
    words = [f"run.dir={tmp_path}", *FEW, "metrics.log_interval=1"]
    run_ranks(2, fit, RunConfig.load(ROOT / "examples/own_model.toml", words))
    assert [row["step"] for row in rows(tmp_path)] == [1, 2]


@pytest.mark.matrix  # as tests/faults/test_launch.py
def test_two_nodes(tmp_path: Path) -> None:
    assert "step 2/2" in run(tmp_path, "bash", "examples/two_nodes.sh", *FEW)
