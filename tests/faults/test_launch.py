"""Scripts of launch/: signals reach the ranks through torchrun; two hosts lose each other."""

import contextlib
import importlib
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.run import parse_args

from dtron.run.process import Place, warn_of_shared_store
from tests.faults.hosts import no_namespaces, until
from tests.harness import run_ranks
from tests.test_architecture import ROOT
from tests.training.test_trainer import fit, losses, rows, tiny

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
    for _ in range(2):
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


def test_ranks_whose_torchrun_was_killed_do_not_end_the_run_elsewhere(tmp_path: Path) -> None:
    """Two agents on one machine: the other agent's ranks save too, and fail, so that it starts them
    again; here it may not, and exits."""
    keys = {"checkpoint__resume": "latest", "checkpoint__interval": 10**6}
    words = write(tmp_path / "c.toml", tmp_path / "run", train__steps=10**6, **keys)
    command = [str(ROOT / "launch/torchrun.sh"), "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:29872"]
    command += ["--max-restarts", "0", "--rdzv-conf"]
    agents = [
        subprocess.Popen(
            [*command, f"is_host={int(node == 0)}", *words],
            cwd=ROOT,
            env=ENV,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in (0, 1)
    ]
    try:
        wait_for_rows(tmp_path / "run/metrics.jsonl", 3)
        (torchrun,) = children(agents[1].pid)
        os.kill(torchrun, signal.SIGKILL)
        errors = agents[0].communicate(timeout=60)[1]
        assert agents[0].returncode == 1
        assert "error: torchrun has ended on a host" in errors
        last = len(rows(tmp_path / "run"))
        assert (tmp_path / "run/checkpoints/latest").read_text() == f"step-{last}\n"
    finally:
        for agent in agents:
            agent.terminate()
            agent.wait(60)


STANDINS = {
    "python3": """#!/bin/sh
[ "$1" = launch/progress.py ] && { cat step; exit; }
trap 'echo $((BEGAN + 1)) > step; exit 143' USR1
touch begun
[ -n "$FAILS" ] && { echo "$FAILS" > step; exit 1; }
while true; do sleep 0.05; done
""",
    "squeue": """#!/bin/sh
[ "$5" = %e ] && date -d '+30 seconds' +%FT%T || echo "$STATE"
""",
    "scontrol": """#!/bin/sh
[ "$1" = show ] && echo host-0 || echo "$@" >> queued
""",
    "srun": """#!/bin/sh
echo $$ > task
while [ "$1" != bash ]; do shift; done
exec "$@"
""",
    "scancel": """#!/bin/sh
kill -USR1 "$(cat task)"
""",
}


@pytest.mark.parametrize(
    ("fails_at", "state", "queued"),
    [
        ("", "RUNNING", True),
        ("", "COMPLETING", False),
        ("8", "RUNNING", True),
        ("7", "RUNNING", False),
        ("8", "COMPLETING", False),
    ],
    ids=["time limit", "cancelled", "failure", "failure without progress", "node failure"],
)
def test_a_job_is_queued_again(tmp_path: Path, fails_at: str, state: str, queued: bool) -> None:
    """launch/slurm.sh with stand-ins for the run, which is at step 7, and for Slurm's commands;
    test_slurm.py has the real ones."""
    for name, text in STANDINS.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    (tmp_path / "step").write_text("7")
    slurm = {"SLURM_JOB_ID": "42", "SLURM_JOB_NODELIST": "host-0", "SLURM_JOB_NUM_NODES": "1"}
    slurm |= {"SLURM_GPUS_ON_NODE": "8", "SLURM_NODEID": "0", "STATE": state}
    path = {"PATH": f"{tmp_path}:{ENV['PATH']}", "FAILS": fails_at, "BEGAN": "7"}
    command = ["bash", str(ROOT / "launch/slurm.sh"), "--config", "my.toml"]
    process = subprocess.Popen(command, cwd=tmp_path, env={**ENV, **slurm, **path})
    try:
        until((tmp_path / "begun").exists, 60, "no run")
        if not fails_at:
            process.send_signal(signal.SIGUSR1)
        assert process.wait(60) == (1 if fails_at else 143)
    finally:
        process.kill()
    found = (tmp_path / "queued").read_text() if (tmp_path / "queued").exists() else ""
    assert found == ("requeue 42\n" if queued else "")


def host_module() -> ModuleType:
    """launch/host.py, which is a script."""
    spec = importlib.util.spec_from_file_location("host", ROOT / "launch/host.py")
    assert spec is not None
    assert spec.loader is not None
    sys.path.insert(0, str(ROOT / "launch"))
    try:
        spec.loader.exec_module(module := importlib.util.module_from_spec(spec))
    finally:
        sys.path.pop(0)
    return module


LOST = 69
AGENTS: dict[str, tuple[list[tuple[int, int]], int]] = {
    "ends": ([(0, 9)], 0),
    "its ranks were stopped elsewhere": ([(0, 3), (0, 9)], 0),
    "is killed": ([(137, 2), (0, 9)], 0),
    "loses the head": ([(LOST, 2)] * 5 + [(0, 9)], 0),
    "fails after progress": ([(1, 1), (1, 2), (1, 3), (1, 4), (0, 9)], 0),
    "fails without": ([(1, 2), (1, 2), (1, 2), (1, 2)], 1),
}
"""By what happens: exit codes of agents, each with the step that the run is at then, of 9; and the
exit code of host.py."""


@pytest.mark.parametrize(("agents", "wanted"), AGENTS.values(), ids=AGENTS)
def test_an_agent_is_started_again(
    monkeypatch: pytest.MonkeyPatch, agents: list[tuple[int, int]], wanted: int
) -> None:
    module, left, step = host_module(), list(agents), 0

    def run_agent() -> int:
        nonlocal step
        code, step = left.pop(0)
        return code

    monkeypatch.setattr(module, "PAUSE_SECONDS", 0)
    monkeypatch.setattr(module, "newest_step", lambda _: step)
    monkeypatch.setattr(module, "finished", lambda _: step == 9)
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)  # pytest's stay
    options = module.parser().parse_args(
        ["--nnodes", "1", "--node-rank", "0", "--head", "h", "--nproc-per-node", "1"]
    )
    host = module.Host(options, [])
    monkeypatch.setattr(host, "_run_agent", run_agent)
    assert host.run() == wanted
    assert len(left) == (1 if wanted else 0)


def test_hosts_that_stay_away_end_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    module = host_module()
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)
    words = "--nnodes 1 --node-rank 0 --head h --nproc-per-node 1 --wait-seconds 0 train.py"
    host = module.Host(module.parser().parse_args(words.split()), ["train.py"])
    monkeypatch.setattr(host, "_run_agent", lambda: LOST)
    assert host.run() == 1


def test_host_py_passes_the_binding_to_numa_nodes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    module, started = host_module(), []
    monkeypatch.setattr(module.signal, "signal", lambda *_: None)

    class Agent:
        def __init__(self, command: list[str], **_: object) -> None:
            started.append(command)

        def wait(self) -> int:
            return 0

    monkeypatch.setattr(module.subprocess, "Popen", Agent)
    words = "--nnodes 1 --node-rank 0 --head h --nproc-per-node 1"
    for more, count in ((["--numa-binding", "node"], 1), ([], 0)):
        options = module.parser().parse_args([*words.split(), *more, "train.py"])
        assert module.Host(options, options.words)._run_agent() == 0
        assert started[-1].count("--numa-binding") == count
    assert parse_args(started[0][1:]).numa_binding == "node"


def test_host_py_stops_with_a_checkpoint(tmp_path: Path) -> None:
    """And exits with 143, as there are steps left: a scheduler is to start it again."""
    words = write(tmp_path / "c.toml", tmp_path / "run", train__steps=10**6)
    command = [sys.executable, "launch/host.py", "--nnodes", "1", "--node-rank", "0"]
    command += ["--head", "127.0.0.1", "--port", "29871", "--nproc-per-node", "2", *words]
    env = {**ENV, "PATH": os.environ["PATH"]}  # torchrun is found by the interpreter
    process = subprocess.Popen(command, cwd=ROOT, env=env)
    wait_for_rows(tmp_path / "run/metrics.jsonl", 3)
    process.terminate()
    assert process.wait(120) == 143
    last = rows(tmp_path / "run")[-1]["step"]
    assert (tmp_path / "run/checkpoints/latest").read_text() == f"step-{last}\n"


def test_progress_is_read_from_the_run_directory(tmp_path: Path) -> None:
    words = write(tmp_path / "c.toml", tmp_path / "run", train__steps=9)
    command = [sys.executable, "launch/progress.py", *words]
    (tmp_path / "run").mkdir()
    for text, step in (("", "0"), ('{"checkpoint": "s3://bucket/mine/step-42"}\n', "42")):
        (tmp_path / "run/committed.json").write_text(text)
        done = subprocess.run(command, cwd=ROOT, env=ENV, capture_output=True, text=True)
        assert done.stdout == f"{step}\n"
    sys.path.insert(0, str(ROOT / "launch"))
    try:
        progress = importlib.import_module("progress")
    finally:
        sys.path.pop(0)
    for row, ended in (('{"step": 8}', False), ('{"step": 8}\n{"step": 9}', True)):
        (tmp_path / "run/metrics.jsonl").write_text(row)
        assert progress.finished(words) is ended


@pytest.mark.matrix  # as tests/faults/test_hosts.py, by -m soak
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
