"""One point of a sweep: a fresh torchrun of `dtron train`, timed by its own step times.

The run trains as any other: warm-up steps, timed steps, then, if asked, a few profiled ones, which
are not timed. Nothing is saved, validated or sampled in between, nor logged, unless a peer that
logs is run beside it. A point that is refused or fails gives a reason in one line.
"""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from dtron.checkpoint.initial_weights import fill_from_initial
from dtron.config import RunConfig, fields
from dtron.errors import ConfigError, DtronError

Status = Literal["ok", "refused", "failed"]
NEVER = 10**9

# What a bench point always has: it trains, and does nothing else.
FORCED: dict[str, Any] = {
    "train.eval_sequences": 0,
    "train.eval_interval": 0,
    "train.sample_tokens": 0,
    "checkpoint.interval": 0,
    "checkpoint.last": False,
    "checkpoint.resume": "",
    "float8.report_interval": 0,
    "metrics.log_interval": NEVER,  # or as `Options` says
    "metrics.tensorboard": False,
    "metrics.step_times": True,
}
# Keys that an option of the command sets, and that one.
_OPTIONS = {
    "run.dir": "--out",
    "train.steps": "--steps and --warmup",
    "metrics.profile_start": "--breakdown or --no-profile",
    "metrics.profile_steps": "--breakdown or --no-profile",
    "metrics.profile_shapes": "--breakdown",
}
# Without effect beside what is forced, so that a file's value would be refused.
_IDLE = ("train.sample_prompt", *(key for key in _OPTIONS if key.startswith("metrics.")))

_ERROR = "error: "
# What a log says -> what the table says; the first that is found.
_FAILURES = (
    (r"^error(?: on rank \d+)?: (.*)$", _ERROR + "{}"),
    (r"OutOfMemoryError: (.*?)(?:\. GPU|\n|$)", "out of memory: {}"),
    (r"^.*?(DefaultCPUAllocator: can't allocate memory.*)$", "out of memory: {}"),
    (r"(Watchdog caught collective operation timeout)", "{}"),
    (r"^(?:\[rank\d+\]: ?)?((?!Traceback)\w[\w.]*(?:Error|Exception)\b.*)$", "{}"),
)
_LONGEST = 300


@dataclass(frozen=True)
class Options:
    """How points are run."""

    ranks: int
    """Ranks of the torchrun, all on this host."""
    warmup: int = 5
    """Steps before the timed ones."""
    steps: int = 20
    """Timed steps."""
    profile_steps: int = 0
    """Profiled steps behind the timed ones."""
    shapes: bool = False
    """Keep shapes in the trace."""
    timeout_seconds: float = 1800.0
    """Longest time of a point, from launch to end."""
    fresh_cache: bool = False
    """Give each run of a point an empty cache of compiled graphs."""
    log_interval: int = NEVER
    """Steps between log rows, for each of which the host waits for the device."""

    @property
    def timed(self) -> slice:
        """Which steps are timed."""
        return slice(self.warmup, self.warmup + self.steps)


@dataclass
class Outcome:
    """What a run of a point gave."""

    label: str
    status: Status
    reason: str = ""
    command: str = ""
    """Shell command that repeats it."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables that the point sets, for all that runs on its behalf."""
    directory: str = ""
    order: int = 0
    """Position among all runs of the sweep."""
    repeat: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    """The resolved config."""
    facts: dict[str, Any] = field(default_factory=dict)
    """run.json of the run."""
    times: dict[str, Any] = field(default_factory=dict)
    """steps.json of the run: every step of every rank."""
    breakdown: dict[str, Any] = field(default_factory=dict)
    """Budgets of the profiled steps; with `ceiling`, if it was measured."""
    against: dict[str, Any] = field(default_factory=dict)
    """A peer's run behind this one, and how they compare (frameworks.py)."""
    launched_at: float = 0.0
    """Seconds of the epoch."""
    wall_seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """All of it, for the report."""
        return asdict(self)


def bench_config(
    config: Path, overrides: Sequence[str], options: Options, run_dir: Path
) -> tuple[RunConfig, list[str]]:
    """The config of a point, and the overrides that make it of the file.

    Raises:
        ConfigError: the file or a key is wrong, or a key is one that the bench sets itself.
    """
    for override in overrides:
        key = override.partition("=")[0]
        if key in _OPTIONS:
            raise ConfigError(f"{key} is set by dtron bench; use {_OPTIONS[key]}")
        if key in FORCED or key in _IDLE:
            raise ConfigError(f"{key} is set by dtron bench, whose runs only train; leave it out")
    before = options.warmup + options.steps
    forced = {key: default for key, default, _ in fields(RunConfig) if key in _IDLE} | FORCED
    forced |= {"run.dir": str(run_dir), "train.steps": before + options.profile_steps}
    forced["metrics.log_interval"] = options.log_interval
    if options.profile_steps:
        forced["metrics.profile_start"] = before + 1
        forced["metrics.profile_steps"] = options.profile_steps
        forced["metrics.profile_shapes"] = options.shapes
    every = [*overrides, *(f"{key}={json.dumps(value)}" for key, value in forced.items())]
    return RunConfig.load(config, every, fill_from_initial), every


def run_point(
    config: Path,
    overrides: Sequence[str],
    environment: Mapping[str, str],
    options: Options,
    directory: Path,
    label: str,
) -> Outcome:
    """Run one point; never raises for what the point itself does wrong."""
    run_dir = directory / "run"
    outcome = Outcome(label, "ok", directory=str(directory), environment=dict(environment))
    try:
        resolved, every = bench_config(config, overrides, options, run_dir)
        from dtron.setup.rules import check_layout

        check_layout(resolved, options.ranks)
    except DtronError as error:
        outcome.status, outcome.reason = "refused", one_line(str(error))
        return outcome
    outcome.config = resolved.model_dump(mode="json")
    arguments = ["-m", "dtron", "train", "--config", str(config), *every]
    environment = {**environment, **_cache(options, directory)}
    outcome.command = shell_command(["torchrun", *torchrun(options.ranks), *arguments], environment)
    launch(outcome, torchrun(options.ranks) + arguments, environment, options, directory)
    if outcome.status == "failed" and not (run_dir / "run.json").exists():
        refused = outcome.reason.startswith(_ERROR)  # before training: by the checks before it
        outcome.status = "refused" if refused else "failed"
    outcome.reason = outcome.reason.removeprefix(_ERROR)
    if outcome.status == "ok":
        outcome.facts = json.loads((run_dir / "run.json").read_text())
        outcome.times = json.loads((run_dir / "steps.json").read_text())
    return outcome


def torchrun(ranks: int) -> list[str]:
    """Arguments of torchrun for all ranks of this host."""
    return ["--standalone", "--nproc-per-node", str(ranks)]


def launch(
    outcome: Outcome,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    options: Options,
    directory: Path,
) -> str:
    """Run torchrun to its end, its output in `directory`/log.txt, and set the outcome's status.

    Returns:
        The log.
    """
    directory.mkdir(parents=True, exist_ok=True)
    log = directory / "log.txt"
    outcome.launched_at = time.time()
    command = [sys.executable, "-m", "torch.distributed.run", *arguments]
    status = wait_for(command, log, environment, options.timeout_seconds)
    outcome.wall_seconds = time.time() - outcome.launched_at
    text = log.read_text(errors="replace")
    if status != 0:
        outcome.reason = reason(text, status, options.timeout_seconds)
        outcome.status = "failed"
    return text


def wait_for(
    command: Sequence[str], log: Path, environment: Mapping[str, str], timeout_seconds: float
) -> int | None:
    """Exit status of a command whose output goes to `log`; None if its time was over."""
    with log.open("w") as out:
        process = subprocess.Popen(
            command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, **environment}
        )
        try:
            return process.wait(timeout_seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end(process)


def end(process: subprocess.Popen) -> None:
    """End torchrun and all its ranks at once, if they still run.

    Not by SIGTERM: a trainer answers it with a checkpoint, and ranks are in sessions of their own.
    """
    if process.poll() is not None:
        return
    for pid in [*descendants(process.pid), process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> list[int]:
    """Processes below one, by /proc; children before their own children."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name, in parentheses, may contain anything; the parent is the second word after.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(stat.parent.name))
    found = parents.get(pid, [])
    return found + [below for child in found for below in descendants(child)]


def reason(log: str, status: int | None, timeout_seconds: float) -> str:
    """Why a run did not end well, in one line.

    Args:
        log: what it printed.
        status: its exit status; None if it was ended after `timeout_seconds`.
    """
    if status is None:
        return f"timed out after {timeout_seconds:g} s"
    for pattern, form in _FAILURES:
        if match := re.search(pattern, log, re.MULTILINE):
            return one_line(form.format(match[1]))
    return f"exit status {status}; see the log"


def one_line(text: str) -> str:
    """`text` without line breaks, cut where it is long."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."


def shell_command(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """What to paste into a shell."""
    set_first = [f"{key}={shlex.quote(value)}" for key, value in environment.items()]
    return " ".join([*set_first, *(shlex.quote(word) for word in words)])


def _cache(options: Options, directory: Path) -> dict[str, str]:
    if not options.fresh_cache:
        return {}
    return {"TORCHINDUCTOR_CACHE_DIR": str((directory / "compile-cache").absolute())}
