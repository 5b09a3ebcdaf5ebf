"""Training under random kills, restarts, layout changes and full disks, compared step by step with
a run that nothing happens to.

A supervisor starts ranks from a server that has torch imported, so that a restart takes a second,
and ends each attempt in one of these ways, drawn from the seed:

    time     SIGKILL of a random rank, a random time after training has begun again
    save     a random rank kills itself inside a save, after a random number of bytes
    disk     a random rank cannot write its part: no file above 4 KB (RLIMIT_FSIZE), or ENOSPC

The other ranks are then killed, as torchrun does, and the next attempt resumes by itself, some of
the time in another layout. Nothing happens in a run's last steps, so that `calm` of them at least
follow its last restart. Every row is compared, however long ago the restart was.
"""

import json
import random
import resource
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dtron.config import RunConfig
from dtron.io.writer_process import WriterProcess
from dtron.training.saves import Saving
from dtron.training.trainer import Trainer
from tests.checkpoints.faulty_writer import fail_at
from tests.checkpoints.test_saving import FAULTY
from tests.faults.processes import finish, output, start
from tests.faults.trajectory import NEAR, complete_rows, worst_difference
from tests.training.test_trainer import fit, rows, tiny

LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (4, {}),
    (4, {"parallel__tp": 2}),
    (2, {}),
    (4, {"parallel__pp": 2}),
    (4, {"parallel__cp": 2, "parallel__dp_replicate": 2}),
]
"""Ranks and degrees; the first one is the undisturbed run's."""
_KINDS = ("time", "time", "time", "save", "save", "disk")
_COMMON = {
    "train__micro_batch": 1,
    "train__eval_sequences": 0,
    "train__gc_interval": 10**6,
    "checkpoint__interval": 2,
    "checkpoint__resume": "latest",
    "metrics__batch_hash": True,
    "optim__lr": 3e-4,
}


@dataclass
class Counts:
    """What a soak has seen."""

    attempts: int = 0
    kills: int = 0
    inside_saves: int = 0
    full_disks: int = 0
    layout_changes: int = 0
    runs: int = 0
    steps: int = 0
    worst: float = 0.0
    """Largest relative difference of a loss after a change of layout."""
    behind: list[int] = field(default_factory=list)
    """Of each run, its steps behind its last restart, if there was one."""
    restarts: list[float] = field(default_factory=list)
    """Seconds from the start of an attempt until it trains."""

    def __str__(self) -> str:
        middle = sorted(self.restarts)[len(self.restarts) // 2] if self.restarts else 0.0
        return (
            f"{self.kills} SIGKILLs ({self.inside_saves} inside saves), {self.full_disks} full "
            f"disks, {self.layout_changes} layout changes, {self.attempts} attempts, {self.runs} "
            f"runs, {self.steps} rows compared; largest relative difference {self.worst:.1e}; "
            f"steps behind a run's last restart: {self.behind}; median start to training "
            f"{middle:.1f} s"
        )


def attempt(config: RunConfig, kind: str, rank: int, after: int) -> None:
    """One attempt of one rank; `rank` is the one that something happens to."""
    trainer = Trainer(config)
    if trainer.place.rank == rank and kind == "save":
        _fail_in_save(config, "orphan", rank, after * 200)
    if trainer.place.rank == rank and kind == "disk":
        _fail_in_save(config, "full", rank, after * 200) if rank == 0 else _limit_files()
    trainer.fit()


def _limit_files() -> None:
    begin = Saving.begin

    def limited(self: Saving, durable: bool = False) -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that writes fail with EFBIG
        resource.setrlimit(resource.RLIMIT_FSIZE, (4000, resource.RLIM_INFINITY))
        begin(self, durable)

    Saving.begin = limited  # type: ignore[method-assign]


def _fail_in_save(config: RunConfig, act: str, rank: int, beyond: int) -> None:
    """In what writes the rank's file: the rank itself, or a process of its own."""
    name = f"rank-{rank}."
    if config.checkpoint.mode == "sync":
        fail_at({"orphan": "die"}.get(act, act), name, beyond)
    WriterProcess.COMMAND = (sys.executable, str(FAULTY), act, name, str(beyond))


class Soak:
    """Disturbed runs, one after another, until the time is up.

    Args:
        folder: for runs.
        seed: of all that happens.
        steps: of each run.
        calm: how many of them at least follow its last restart.
        changes: whether restarts change the layout.
    """

    def __init__(self, folder: Path, seed: int, steps: int, calm: int, changes: bool) -> None:
        self.folder, self.steps, self.calm, self.changes = folder, steps, calm, changes
        self.random = random.Random(seed)
        self.counts = Counts()
        whole = start(4, folder / "whole", fit, self._config("undisturbed", LAYOUTS[0]))
        assert finish(whole, 600) == [0] * 4, output(folder / "whole")
        self.wanted = {row["step"]: row for row in rows(folder / "undisturbed")}
        assert len(self.wanted) == steps

    def _config(self, name: str, layout: tuple[int, dict[str, Any]], **more: Any) -> RunConfig:
        keys = {**_COMMON, "train__steps": self.steps, **layout[1], **more}
        return tiny(self.folder / name, **keys)

    def until(self, deadline: float, kills: int) -> Counts:
        """Disturb runs until `time.monotonic()` is at the deadline, or after so many kills."""
        while time.monotonic() < deadline and self.counts.kills < kills:
            self._run(deadline, kills)
        return self.counts

    def _run(self, deadline: float, kills: int) -> None:
        name = f"run-{self.counts.runs}"
        layout, same = LAYOUTS[0], True
        mode = self.random.choice(["sync", "async"])
        while True:
            if self.changes and self.random.random() < 0.4:
                changed = self.random.choice(LAYOUTS)
                self.counts.layout_changes += changed != layout
                layout, same = changed, same and changed == layout
            config = self._config(name, layout, checkpoint__mode=mode)
            last = time.monotonic() > deadline or self.counts.kills >= kills
            last |= not self._early(config)
            done = self._attempt(config, layout[0], "none" if last else self.random.choice(_KINDS))
            self._compare(self.folder / name, same)
            if done:
                break
        found = rows(self.folder / name)
        assert [row["step"] for row in found] == list(range(1, self.steps + 1))
        resumed = json.loads((self.folder / name / "run.json").read_text())["start_step"]
        assert self.steps - resumed >= self.calm
        self.counts.behind += [self.steps - resumed] if resumed else []
        self.counts.runs += 1

    def _attempt(self, config: RunConfig, n: int, kind: str) -> bool:
        """Whether the run has ended; what is left of its ranks otherwise is killed."""
        counts, begun = self.counts, time.monotonic()
        rank, after = self.random.randrange(n), self.random.randrange(0, 60)
        folder = self.folder / f"attempt-{counts.attempts}"
        wait = self.random.uniform(0.0, 3.0)
        counts.attempts += 1
        metrics = Path(config.run.dir) / "metrics.jsonl"
        before = metrics.stat().st_mtime_ns if metrics.exists() else 0
        processes = start(n, folder, attempt, config, kind, rank, after)
        first, killed = 0.0, False
        while all(process.is_alive() for process in processes):
            time.sleep(0.02)
            if not first and metrics.exists() and metrics.stat().st_mtime_ns != before:
                first = time.monotonic()
                counts.restarts.append(first - begun)
            due = kind == "time" and first and time.monotonic() - first > wait
            if due and self._early(config) and not killed:
                processes[rank].kill()
                killed = True
            assert time.monotonic() - begun < 300, output(folder)
        ended = [process.exitcode for process in processes if process.exitcode is not None]
        codes = finish(processes, 60 if all(code == 0 for code in ended) else 0)
        counts.kills += (
            kind in ("time", "save")
            and codes[rank] == -signal.SIGKILL
            and any(code == -signal.SIGKILL for code in ended)
        )
        counts.inside_saves += kind == "save" and -signal.SIGKILL in ended
        refused = "could not be written" in output(folder)
        counts.full_disks += refused and kind == "disk"
        good = all(code == 0 for code in codes)
        assert good or killed or kind == "save" or refused, output(folder)
        return good

    def _early(self, config: RunConfig) -> bool:
        """Whether something may still happen: a few steps may be done until it does."""
        found = complete_rows(Path(config.run.dir))
        return not found or found[-1]["step"] < self.steps - self.calm - 4

    def _compare(self, run_dir: Path, same: bool) -> None:
        """Each row there, also of steps that will be trained again, with the undisturbed run's."""
        found = complete_rows(run_dir)
        worst = worst_difference(found, self.wanted, 0.0 if same else NEAR)
        self.counts.worst = max(self.counts.worst, worst)
        self.counts.steps += len(found)
