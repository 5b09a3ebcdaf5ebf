"""Scripts of launch/: signals reach the ranks through torchrun; two hosts lose each other."""

import json
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.harness import run_ranks
from tests.test_architecture import ROOT
from tests.test_trainer import fit, losses, rows, tiny

ENV = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def write(config: Path, run_dir: Path, **changes: object) -> list[str]:
    """The arguments of train.py for a run in which each step is seen."""
    config.write_text(tiny(run_dir, **changes).to_toml())
    return ["train.py", "--config", str(config)]


def wait_for_rows(path: Path, n: int) -> None:
    deadline = time.monotonic() + 240
    while not path.exists() or len(path.read_text().splitlines()) < n:
        assert time.monotonic() < deadline, "no step was made"
        time.sleep(0.1)


@pytest.mark.slow
def test_torchrun_exits_0_after_slurms_warning(tmp_path: Path) -> None:
    words = write(tmp_path / "c.toml", tmp_path / "run", train__steps=10**6)
    command = [str(ROOT / "launch/torchrun.sh"), "--standalone", "--nproc-per-node", "2", *words]
    process = subprocess.Popen(command, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, text=True)
    wait_for_rows(tmp_path / "run/metrics.jsonl", 3)
    process.send_signal(signal.SIGUSR1)
    told, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "SIGUSR1: stopping after the next step, with a checkpoint" in told
    last = rows(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run/checkpoints/latest").read_text() == f"step-{last}\n"


def namespaces() -> str:
    """Why this machine permits no network namespaces; empty if it does."""
    if not shutil.which("ip"):
        return "no ip command"
    made = subprocess.run(["ip", "netns", "add", "dtron-probe"], capture_output=True, text=True)
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "del", "dtron-probe"], check=True)
    return made.stderr.strip()


@pytest.mark.slow
def test_two_hosts_that_lose_each_other_go_on(tmp_path: Path) -> None:
    if why := namespaces():
        pytest.skip(f"no network namespaces: {why}")
    keys = {"train__steps": 250, "checkpoint__interval": 20, "optim__lr": 3e-4}
    whole = tiny(tmp_path / "whole", **keys)
    run_ranks(2, fit, whole, seconds=300)
    words = write(tmp_path / "c.toml", tmp_path / "run", **keys)
    done = subprocess.run(
        [str(ROOT / "launch/two-hosts.sh"), *words[1:], f"run.dir={tmp_path / 'run'}"],
        cwd=ROOT,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=500,
    )
    told = done.stdout + done.stderr
    assert done.returncode == 0, told[-5000:]
    assert "resumed from" in told
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert json.loads((tmp_path / "run/run.json").read_text())["start_step"] > 0
