"""Scripts of launch/: signals reach the ranks through torchrun; two hosts lose each other."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import dynamic_rendezvous

from dtron.runtime import Place, warn_of_shared_store
from tests.faults.hosts import no_namespaces
from tests.harness import run_ranks
from tests.test_architecture import ROOT
from tests.test_trainer import fit, losses, rows, tiny

PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
ENV = {**os.environ, "PATH": PATH, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}


def write(config: Path, run_dir: Path, **changes: object) -> list[str]:
    """The arguments of train.py for a run in which each step is seen."""
    config.write_text(tiny(run_dir, **changes).to_toml())
    return ["train.py", "--config", str(config)]


def wait_for_rows(path: Path, n: int) -> None:
    deadline = time.monotonic() + 240
    while not path.exists() or len(path.read_text().splitlines()) < n:
        assert time.monotonic() < deadline, "no step was made"
        time.sleep(0.1)


def test_torchrun_exits_0_after_slurms_warning(tmp_path: Path) -> None:
    words = write(tmp_path / "c.toml", tmp_path / "run", train__steps=10**6)
    command = [str(ROOT / "launch/torchrun.sh"), "--standalone", "--nproc-per-node", "2", *words]
    process = subprocess.Popen(command, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, text=True)
    wait_for_rows(tmp_path / "run/metrics.jsonl", 3)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0
    assert "SIGUSR1: stopping after the next step, with a checkpoint" in output
    last = rows(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run/checkpoints/latest").read_text() == f"step-{last}\n"


def test_torchrun_gives_each_attempt_a_new_store(tmp_path: Path) -> None:
    """torch knows the variable, and the script sets it."""
    name = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"
    assert name in Path(dynamic_rendezvous.__file__).read_text()
    for program in ("torchrun", "python"):  # torchrun.sh runs the python beside torchrun
        (tmp_path / program).write_text(f'#!/bin/sh\necho "{name}=${name}"\n')
        (tmp_path / program).chmod(0o755)
    path = {"PATH": f"{tmp_path}:{ENV['PATH']}"}
    command = [str(ROOT / "launch/torchrun.sh")]
    done = subprocess.run(command, env={**ENV, **path}, capture_output=True, text=True)
    assert done.stdout == f"{name}=1\n"


def test_hosts_that_share_a_store_are_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "3")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    for hosts, warnings in (("1", 0), ("2", 1)):
        monkeypatch.setenv("GROUP_WORLD_SIZE", hosts)
        warn_of_shared_store(Place(rank=0, local_rank=0, world_size=2))
        assert caplog.text.count("TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1") == warnings


def holding(agent: int) -> list[int]:
    """Ranks that hold SIGUSR1 back, as they do while they start."""
    held = []
    for status in Path("/proc").glob("[0-9]*/status"):
        with contextlib.suppress(OSError):
            lines = dict(line.split(":\t", 1) for line in status.read_text().splitlines())
            blocked = int(lines.get("SigBlk", "0"), 16) >> (signal.SIGUSR1 - 1) & 1
            if blocked and _torchrun_of(lines) == agent:
                held.append(int(lines["Pid"]))
    return held


def _torchrun_of(lines: dict[str, str]) -> int:
    """The shell script whose torchrun is the parent of a process."""
    parent = Path(f"/proc/{lines['PPid'].strip()}/status").read_text()
    return int(re.search(r"PPid:\t(\d+)", parent)[1])  # type: ignore[index]


def test_torchrun_exits_0_when_it_is_warned_before_training(tmp_path: Path) -> None:
    """While ranks import torch; torchrun itself gets the signal too, as from scancel."""
    words = write(tmp_path / "c.toml", tmp_path / "run", train__steps=10**6)
    command = [str(ROOT / "launch/torchrun.sh"), "--standalone", "--nproc-per-node", "2", *words]
    process = subprocess.Popen(command, cwd=ROOT, env=ENV, stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 120
    while len(ranks := holding(process.pid)) < 2:
        assert time.monotonic() < deadline, "no ranks"
        time.sleep(0.02)
    (parent,) = {int(Path(f"/proc/{rank}/stat").read_text().split()[3]) for rank in ranks}
    os.kill(parent, signal.SIGUSR1)
    process.send_signal(signal.SIGUSR1)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "SIGUSR1: stopping before training begins" in output
    assert rows(tmp_path / "run") == []
    assert not (tmp_path / "run/checkpoints").exists()


def lives(process: int, parent: int = 0) -> bool:
    """Whether a process runs, and is a child of another one."""
    try:
        state, of = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return False
    return state != "Z" and (not parent or int(of) == parent)


def children(agent: int) -> list[int]:
    """Live processes that an agent has started."""
    found = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    return [process for process in found if lives(process, agent)]


def test_ranks_save_and_end_when_torchrun_is_killed(tmp_path: Path) -> None:
    """The same command, started at once, waits for them and goes on where they have ended."""
    keys = {"checkpoint__resume": "latest", "checkpoint__interval": 10**6}
    words = write(tmp_path / "c.toml", tmp_path / "run", train__steps=10**6, **keys)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", *words]
    metrics, before = tmp_path / "run/metrics.jsonl", list[int]()
    for _ in range(3):
        done = len(rows(tmp_path / "run")) if metrics.exists() else 0
        process = subprocess.Popen(command, cwd=ROOT, env=ENV, stdout=subprocess.DEVNULL)
        try:
            wait_for_rows(metrics, done + 5)
            assert not any(map(lives, before))
            before = children(process.pid)
            assert len(before) == 2
        finally:
            process.kill()
            process.wait()
    deadline = time.monotonic() + 60
    while any(map(lives, before)):
        assert time.monotonic() < deadline, "ranks outlive torchrun"
        time.sleep(0.1)
    last = len(rows(tmp_path / "run"))
    assert [row["step"] for row in rows(tmp_path / "run")] == list(range(1, last + 1))
    assert (tmp_path / "run/checkpoints/latest").read_text() == f"step-{last}\n"


STANDINS = {
    "python": f"""#!{sys.executable}
import subprocess, sys
rank = 'import signal, sys, time; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(0))\\n'
rank += 'open("begun", "w").close(); time.sleep(60); sys.exit(1)'
sys.exit(subprocess.call([sys.executable, "-c", rank]))
""",
    "torchrun": "",  # by whose folder its python is found
    "scontrol": """#!/bin/sh
[ "$1" = show ] && echo host-0 || echo "$@" >> queued
""",
    "srun": """#!/bin/sh
shift
echo $$ > step
exec "$@"
""",
    # all processes of the step, as with Linux's cgroups
    "scancel": """#!/bin/sh
for pid in $(cat step) $(pgrep -P "$(cat step)"); do kill -USR1 "$pid"; done
""",
}


@pytest.mark.parametrize("job", ["node", "nodes"])
def test_a_job_is_queued_again_after_slurms_warning(tmp_path: Path, job: str) -> None:
    """With stand-ins for torchrun.py and for Slurm's commands, whose names alone are right."""
    for name, text in STANDINS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "launch").symlink_to(ROOT / "launch")
    slurm = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "host-0", "SLURM_NNODES": "1"}
    path = {"PATH": f"{tmp_path}:{ENV['PATH']}"}
    command = ["bash", f"launch/{job}.sbatch", "--config", "my.toml"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env={**ENV, **slurm, **path}, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "begun").exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == 0
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # what would queue it again in any case
    assert (tmp_path / "queued").read_text() == "requeue 42\n"


def test_two_hosts_that_lose_each_other_go_on(tmp_path: Path) -> None:
    if why := no_namespaces():
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
    output = done.stdout + done.stderr
    assert done.returncode == 0, output[-5000:]
    assert "resumed from" in output
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert json.loads((tmp_path / "run/run.json").read_text())["start_step"] > 0
