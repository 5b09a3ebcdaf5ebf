"""Training over one or two hosts (`hosts.py`) whose ranks are killed again and again, under
torchrun, compared step by step with one process that nothing happens to.

Each SIGKILL hits a random rank at a moment drawn from the seed:

    start    a random time after the ranks of an attempt exist: they import, meet, load
    save     while a checkpoint is there that is not complete
    time     a random time after training has gone on

torchrun starts the next attempt by itself. After a few kills everything on all hosts is killed and
the run goes on in another layout. Nothing happens in a run's last steps.
"""

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.faults.hosts import Hosts
from tests.faults.trajectory import complete_rows, worst_difference
from tests.test_architecture import ROOT

KEYS = {
    "model.override.n_layers": 4,
    "train.seq_len": 32,
    "train.global_batch": 4,
    "train.eval_sequences": 0,
    "train.sample_tokens": 0,
    "optim.lr": 3e-4,
    "checkpoint.interval": 4,
    "checkpoint.resume": "latest",
    "metrics.log_interval": 1,
    "metrics.batch_hash": "true",
    "metrics.tensorboard": "false",
}
"""On top of configs/quickstart.toml."""
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (4, {}),
    (4, {"parallel.tp": 2}),
    (2, {}),
    (4, {"parallel.pp": 2}),
    (4, {"parallel.cp": 2}),
    (4, {"parallel.zero": 3}),
    (2, {"parallel.tp": 2}),
]
"""Ranks of all hosts, and degrees."""
_MOMENTS = ("start", "save", "time", "time")
_SECONDS = 240
"""In which a restarted run has to go on, on a machine that does other things too."""


def words(run_dir: Path, **more: Any) -> list[str]:
    """Arguments of train.py; keys with "__" for the dot."""
    keys = {**KEYS, "run.dir": run_dir, **{k.replace("__", "."): v for k, v in more.items()}}
    keys["data.cache_dir"] = run_dir.parent / "cache"
    return ["--config", "configs/quickstart.toml", *(f"{k}={v}" for k, v in keys.items())]


def alone(run_dir: Path, steps: int) -> dict[int, dict[str, Any]]:
    """Rows by step of one process that nothing happens to."""
    env = {**os.environ, "PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "train.py", *words(run_dir, train__steps=steps)]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return {row["step"]: row for row in complete_rows(run_dir)}


@dataclass
class Counts:
    """What has happened."""

    kills: dict[str, int] = field(default_factory=lambda: dict.fromkeys(_MOMENTS, 0))
    attempts: int = 0
    """Sets of ranks that torchrun has started."""
    jobs: int = 0
    """How often torchrun was started."""
    layouts: int = 0
    """Changes of layout, for each of which everything was killed."""
    runs: int = 0
    rows: int = 0
    worst: float = 0.0
    seconds: list[float] = field(default_factory=list)
    """From a kill to the next step."""

    def __str__(self) -> str:
        middle = sorted(self.seconds)[len(self.seconds) // 2] if self.seconds else 0.0
        return (
            f"{sum(self.kills.values())} SIGKILLs ({self.kills['save']} inside saves, "
            f"{self.kills['start']} in start-ups), {self.attempts} attempts of {self.jobs} jobs, "
            f"{self.layouts} changes of layout, {self.runs} runs, {self.rows} rows compared, "
            f"largest relative difference {self.worst:.1e}; median kill to next step {middle:.1f} s"
        )


class Kills:
    """Runs, one after another, until the time is up or there were enough kills.

    Args:
        steps: of each run.
        calm: how many of them at least follow its last kill.
    """

    def __init__(self, hosts: Hosts, folder: Path, seed: int, steps: int, calm: int) -> None:
        self.hosts, self.folder, self.steps, self.calm = hosts, folder, steps, calm
        self.random, self.counts = random.Random(seed), Counts()
        self._n, self._killed, self._fresh = 0, 0.0, False
        self._seen: set[int] = set()
        self.wanted = alone(folder / "alone", steps)

    def until(self, deadline: float, kills: int) -> Counts:
        """Disturb runs until `time.monotonic()` is at the deadline, or after so many kills."""
        while not self._enough(deadline, kills):
            self._run(self.folder / f"run-{self.counts.runs}", deadline, kills)
        return self.counts

    def _enough(self, deadline: float, kills: int) -> bool:
        return time.monotonic() > deadline or sum(self.counts.kills.values()) >= kills

    def _run(self, run_dir: Path, deadline: float, kills: int) -> None:
        layout = self.random.choice(LAYOUTS)
        for job in range(10**6):
            ranks, keys = layout
            mode = self.random.choice(["sync", "async"])
            more = {**keys, "train.steps": self.steps, "checkpoint.mode": mode}
            self._n, self._seen, self._killed = ranks, set(), 0.0
            self.counts.jobs += 1
            each = ranks // len(self.hosts.names)
            self.hosts.start_agents(each, words(run_dir, **more), f"{run_dir.name}-{job}")
            for _ in range(self.random.randint(2, 6)):
                self._kill_one(run_dir)
                if self._late(run_dir) or self._enough(deadline, kills):
                    break
            if self._late(run_dir) or self._enough(deadline, kills):
                break
            for host in range(len(self.hosts.names)):
                self.hosts.kill(host)
            self._compare(complete_rows(run_dir))
            layout = self.random.choice([other for other in LAYOUTS if other != layout])
            self.counts.layouts += 1
        assert set(self.hosts.wait(600)) == {0}, self.hosts.logged()[-6000:]
        found = complete_rows(run_dir)
        assert len(found) == self.steps
        self._compare(found)
        self.counts.runs += 1
        self.counts.rows += len(found)

    def _compare(self, found: list[dict[str, Any]]) -> None:
        self.counts.worst = max(self.counts.worst, worst_difference(found, self.wanted))

    def _late(self, run_dir: Path) -> bool:
        path = run_dir / "metrics.jsonl"
        done = path.read_bytes().count(b"\n") if path.exists() else 0
        return done >= self.steps - self.calm

    def _kill_one(self, run_dir: Path) -> None:
        moment = self.random.choice(_MOMENTS)
        attempts = self.counts.attempts
        self._await(lambda: self.counts.attempts > attempts or self._fresh, "no ranks")
        self._fresh = False
        if moment == "start":
            time.sleep(self.random.uniform(0, 12))
        else:
            self._await_step(run_dir)
            if moment == "save":
                before = _incomplete(run_dir)
                self._await(lambda: _incomplete(run_dir) - before or self._late(run_dir), "no save")
            else:
                time.sleep(self.random.uniform(0, 3))
        living = self.hosts.ranks()
        if living and not self._late(run_dir):
            os.kill(self.random.choice(living), signal.SIGKILL)
            self._killed = time.monotonic()
            self.counts.kills[moment] += 1

    def _await_step(self, run_dir: Path) -> None:
        """Until a row was added, or the run is too late for more kills."""
        metrics, last = run_dir / "metrics.jsonl", 10**9

        def grown() -> bool:
            nonlocal last
            before, last = last, metrics.stat().st_size if metrics.exists() else 0
            return last > before  # a resume only takes rows away

        self._await(lambda: grown() or self._late(run_dir), "no step")
        if self._killed:
            self.counts.seconds.append(time.monotonic() - self._killed)
            self._killed = 0.0

    def _await(self, done: Callable[[], Any], what: str) -> None:
        deadline = time.monotonic() + _SECONDS
        while not done():
            living = set(self.hosts.ranks())
            if len(living) == self._n and not living & self._seen:
                self._seen |= living
                self._fresh = True
                self.counts.attempts += 1
            ended = [a.poll() for a in self.hosts.agents if a is not None]
            assert not any(ended), f"an agent has ended: {ended}\n{self.hosts.logged()[-6000:]}"
            assert time.monotonic() < deadline, f"{what}\n{self.hosts.logged()[-6000:]}"
            time.sleep(0.02)


def _incomplete(run_dir: Path) -> set[tuple[str, int]]:
    """Folders that are no complete checkpoint; one that is made again counts as another."""
    found = set()
    for folder in (run_dir / "checkpoints").glob("step-*"):
        with contextlib.suppress(OSError):
            if not (folder / "dtron.json").exists():
                found.add((folder.name, folder.stat().st_ino))
    return found
