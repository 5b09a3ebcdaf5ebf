"""Run one point of a sweep: `dtron train` in a new torchrun, which writes the time of each step.

The run is normal training: warm-up steps, timed steps, then, if requested, a few profiled steps,
which are not timed. It does not save, validate or sample, and logs only for a comparison with
torchtitan. If a point is refused or fails, its outcome has the reason on one line.
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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from dtron.checkpoint.initial_weights import fill_from_initial
from dtron.config import RunConfig, fields
from dtron.errors import ConfigError, DtronError

Status = Literal["ok", "refused", "failed"]
NEVER = 10**9

# Settings of every point, so that its runs only train.
FORCED: dict[str, Any] = {
    "train.epochs": 0.0,
    "train.tokens": 0,
    "train.eval_sequences": 0,
    "train.eval_interval": 0,
    "train.stop_after": 0,
    "checkpoint.best": "",
    "train.sample_tokens": 0,
    "checkpoint.interval": 0,
    "checkpoint.last": False,
    "checkpoint.resume": "",
    "float8.report_interval": 0,
    "metrics.log_interval": NEVER,  # replaced by `Options.log_interval`
    "metrics.tensorboard": False,
    "metrics.step_times": True,
}
# Key -> the option of the command that sets it.
_OPTIONS = {
    "run.dir": "--out",
    "train.steps": "--steps and --warmup",
    "metrics.profile_start": "--breakdown or --no-profile",
    "metrics.profile_steps": "--breakdown or --no-profile",
    "metrics.profile_shapes": "--breakdown",
}
# Keys without effect under FORCED. They get their default, since other values would be refused.
_IDLE = ("train.sample_prompt", *(key for key in _OPTIONS if key.startswith("metrics.")))

_ERROR = "error: "
# Pattern in a log -> text in the table; the first match counts.
_FAILURES = (
    (r"^error(?: on rank \d+)?: (.*)$", _ERROR + "{}"),
    (r"OutOfMemoryError: (.*?)(?:\. GPU|\n|$)", "out of memory: {}"),
    (r"^.*?(DefaultCPUAllocator: can't allocate memory.*)$", "out of memory: {}"),
    (r"(Watchdog caught collective operation timeout)", "{}"),
    (
        r"^(?:\[rank\d+\]: ?)?((?!Traceback|[\w.]*ChildFailed)\w[\w.]*(?:Error|Exception)\b.*)$",
        "{}",
    ),
    (r"(Signal \d+ \(SIG\w+\)) received by PID", "a rank ended by {}"),
)
_LONGEST = 300


@dataclass(frozen=True)
class Options:
    """Options that all runs of a sweep share: ranks, numbers of steps, time limit, logging."""

    ranks: int
    """Number of ranks; all run on this host."""
    warmup: int = 5
    """Number of steps before the timed steps."""
    steps: int = 20
    """Timed steps."""
    profile_steps: int = 0
    """Number of profiled steps after the timed steps."""
    shapes: bool = False
    """Whether the trace records input shapes."""
    timeout_seconds: float = 1800.0
    """Time limit of a run, from launch to end."""
    fresh_cache: bool = False
    """Whether each run starts with an empty cache of compiled graphs."""
    log_interval: int = NEVER
    """Steps between log rows; the host waits for the device at each row."""

    @property
    def timed(self) -> slice:
        """The timed steps, as a slice of all steps."""
        return slice(self.warmup, self.warmup + self.steps)


@dataclass
class Outcome:
    """Status, command, config, metadata and step times of one run of a sweep point."""

    label: str
    status: Status
    reason: str = ""
    command: str = ""
    """Shell command that repeats the run."""
    environment: dict[str, str] = field(default_factory=dict)
    """Environment variables that the point sets."""
    directory: str = ""
    order: int = -1
    """Index among all runs of the sweep; -1: refused before the first run."""
    repeat: int = 0
    config: dict[str, Any] = field(default_factory=dict)
    """The resolved config."""
    facts: dict[str, Any] = field(default_factory=dict)
    """Content of the run's run.json."""
    times: dict[str, Any] = field(default_factory=dict)
    """Content of the run's steps.json: every step of every rank."""
    breakdown: dict[str, Any] = field(default_factory=dict)
    """Breakdown of the profiled steps (breakdown.py), and `ceiling` if it was measured."""
    against: dict[str, Any] = field(default_factory=dict)
    """The run of the peer after this run, and the comparison of both runs (frameworks.py)."""
    launched_at: float = 0.0
    """Unix time of the launch in seconds."""
    wall_seconds: float = 0.0


def bench_config(
    config: Path, overrides: Sequence[str], options: Options, run_dir: Path
) -> tuple[RunConfig, list[str]]:
    """Return a point's config, and the overrides that turn the file's config into it.

    Raises:
        ConfigError: the file or a key is invalid, or an override sets a key that the bench sets.
    """
    for override in overrides:
        key, _, value = override.partition("=")
        if key in _OPTIONS:
            raise ConfigError(f"{key} is set by dtron bench; use {_OPTIONS[key]}")
        if key in FORCED and _read(value) == FORCED[key]:
            continue
        if key in FORCED or key in _IDLE:
            raise ConfigError(f"{key} is set by dtron bench, whose runs only train; leave it out")
    before = options.warmup + options.steps
    forced = {key: default for key, default, _ in fields(RunConfig) if key in _IDLE} | FORCED
    forced |= {"run.dir": str(run_dir), "train.steps": before + options.profile_steps}
    forced["metrics.log_interval"] = options.log_interval
    if options.fresh_cache:
        forced["compile.cache_dir"] = ""  # `_cache` sets the folder in the environment
    if options.profile_steps:
        forced["metrics.profile_start"] = before + 1
        forced["metrics.profile_steps"] = options.profile_steps
        forced["metrics.profile_shapes"] = options.shapes
    every = [*overrides, *(f"{key}={json.dumps(value)}" for key, value in forced.items())]
    return RunConfig.load(config, every, fill_from_initial), every


def _read(value: str) -> Any:
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        return value


def refused(config: Path, overrides: Sequence[str], options: Options, label: str) -> Outcome | None:
    """Check a point without starting a process.

    Return a refused outcome if the config or layout is illegal, else None.
    """
    try:
        resolved, _ = bench_config(config, overrides, options, Path())
        _check_layout(resolved, options.ranks)
    except DtronError as error:
        return Outcome(label, "refused", one_line(str(error)))
    return None


def run_point(
    config: Path,
    overrides: Sequence[str],
    environment: Mapping[str, str],
    options: Options,
    directory: Path,
    label: str,
) -> Outcome:
    """Run one point; its errors are returned in the outcome, not raised."""
    # Checked again: files may have changed since the sweep began.
    if found := refused(config, overrides, options, label):
        return found
    run_dir = directory / "run"
    outcome = Outcome(label, "ok", directory=str(directory), environment=dict(environment))
    resolved, every = bench_config(config, overrides, options, run_dir)
    outcome.config = resolved.model_dump(mode="json")
    arguments = ["-m", "dtron", "train", "--config", str(config), *every]
    environment = {**environment, **_cache(options, directory)}
    outcome.command = shell_command(["torchrun", *torchrun(options.ranks), *arguments], environment)
    launch(outcome, torchrun(options.ranks) + arguments, environment, options, directory)
    if outcome.status == "failed" and not (run_dir / "run.json").exists():
        before = outcome.reason.startswith(_ERROR)  # refused by the checks before training
        outcome.status = "refused" if before else "failed"
    outcome.reason = outcome.reason.removeprefix(_ERROR)
    if outcome.status == "ok":
        outcome.config = RunConfig.load(run_dir / "config.toml").model_dump(mode="json")
        outcome.facts = json.loads((run_dir / "run.json").read_text())
        outcome.times = json.loads((run_dir / "steps.json").read_text())
    return outcome


def _check_layout(config: RunConfig, ranks: int) -> None:
    """Check the layout, except on GPUs, where automatic settings may make it legal."""
    import torch

    from dtron.setup.rules import check_layout

    if not torch.cuda.is_available():
        check_layout(config, ranks)


def torchrun(ranks: int) -> list[str]:
    """Return torchrun's arguments to run all ranks on this host."""
    return ["--standalone", "--nproc-per-node", str(ranks)]


def launch(
    outcome: Outcome,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    options: Options,
    directory: Path,
) -> str:
    """Run torchrun to its end, set the outcome's status, and return the log.

    The output is written to `directory`/log.txt.
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
    """Run a command with output to `log`; return its exit status. None: the command timed out."""
    with log.open("w", encoding="utf-8") as out:
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
    """Kill torchrun and all its ranks, if they still run.

    SIGTERM is not enough: the trainer would save a checkpoint. Ranks are in separate sessions.
    """
    if process.poll() is not None:
        return
    for pid in [*descendants(process.pid), process.pid]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(pid: int) -> list[int]:
    """List the descendants of a process from /proc; parents before children."""
    parents: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            # The name in parentheses may contain anything; the parent is the second word after it.
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            parents.setdefault(parent, []).append(int(stat.parent.name))
    found = parents.get(pid, [])
    return found + [below for child in found for below in descendants(child)]


def reason(log: str, status: int | None, timeout_seconds: float) -> str:
    """Return why a run failed, on one line.

    Args:
        log: the run's output.
        status: exit status of the run; None: the run was killed after `timeout_seconds`.
    """
    if status is None:
        return f"timed out after {timeout_seconds:g} s"
    for pattern, form in _FAILURES:
        if match := re.search(pattern, log, re.MULTILINE):
            return one_line(form.format(match[1]))
    return f"exit status {status}; see the log"


def one_line(text: str) -> str:
    """Return text without line breaks, truncated if long."""
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST else line[: _LONGEST - 3] + "..."


def shell_command(words: Sequence[str], environment: Mapping[str, str]) -> str:
    """Return a quoted command line for a shell, with the environment variables first."""
    set_first = [f"{key}={shlex.quote(value)}" for key, value in environment.items()]
    return " ".join([*set_first, *(shlex.quote(word) for word in words)])


def _cache(options: Options, directory: Path) -> dict[str, str]:
    if not options.fresh_cache:
        return {}
    return {"TORCHINDUCTOR_CACHE_DIR": str((directory / "compile-cache").absolute())}
