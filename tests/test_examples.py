"""Scripts of examples/ that docs/tutorial-data.md and docs/tutorial-model.md begin with, as a user
starts them, for a few steps."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_architecture import ROOT

FEW = ["train.steps=2", "train.eval_sequences=0", "train.sample_tokens=0", "checkpoint.interval=2"]
TORCHRUN = ["torchrun", "--standalone", "--nproc-per-node", "2", "train.py", "--config"]


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
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_own_text_and_tokenizer_then_fine_tuning(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    own, folder = tmp_path / "own", tmp_path / "folder"
    assert "step 2/2" in run(own, "bash", "examples/own_data.sh", *FEW)
    convert = [sys.executable, "-m", "dtron", "convert", "to-hf"]
    run(own, *convert, str(own / "run"), str(folder))
    script = ["bash", "examples/fine_tune.sh", str(folder), str(own / "my.jsonl")]
    printed = run(tmp_path / "fine", *script, *FEW)
    assert "step 2/2" in printed
    assert "\nIn the beginning" in printed


def test_own_model_by_config(tmp_path: Path) -> None:
    words = ["examples/own_model.toml", f"run.dir={tmp_path}", *FEW]
    assert "step 2/2" in run(tmp_path, *TORCHRUN, *words)


def test_two_nodes(tmp_path: Path) -> None:
    assert "step 2/2" in run(tmp_path, "bash", "examples/two_nodes.sh", *FEW)
