"""Command line of `dtron bench`: run all points of a sweep, print tables, write bench.json."""

import argparse
import contextlib
import itertools
import json
import os
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from dtron.bench import report
from dtron.bench.baseline import (
    Baseline,
    Comparison,
    comparison_table,
    measured_row,
    why_not_here,
)
from dtron.bench.breakdown import Breakdown, breakdown_table, ceiling, notes, read_breakdown
from dtron.bench.frameworks import (
    LOG_STEPS,
    PEER,
    print_comparisons,
    refusal,
    require,
    run_peer,
)
from dtron.bench.kernels.command import main as kernels
from dtron.bench.lr_range import command as lr_range
from dtron.bench.run import (
    NEVER,
    Options,
    Outcome,
    bench_config,
    one_line,
    reason,
    refused,
    run_point,
    wait_for,
)
from dtron.bench.sweep import SweepPoint, points
from dtron.errors import ArgumentParser, ConfigError, DataError, counted

_Row = tuple[str, report.RunFigures | None, str]  # label, figures, reason if there are no figures
_PROFILED = 3  # steps; on GPUs the first step is not counted (trace.py)


def main(arguments: Sequence[str]) -> int:
    """Run `dtron bench`; return the exit status.

    It is 0 if any point has figures; with --baseline, if every row that can run here has figures
    and none is slower.

    Raises:
        ConfigError: an argument is invalid, or torchrun started this process.
    """
    _refuse_torchrun()
    if arguments and arguments[0] == "kernels":
        return kernels(arguments[1:])
    if arguments and arguments[0] == "lr":
        return lr_range.main(arguments[1:], lambda: new_folder(Path("runs/bench")))
    given = bench_parser().parse_intermixed_args(arguments)
    console = report.bench_console()
    options = _options(given)
    if given.baseline:
        return _compare(given, console)
    if given.config is None:
        raise ConfigError("dtron bench needs CONFIG, a run's TOML file, or --baseline FILE")
    sweep = points(given.axes)
    if not given.config.exists():
        raise ConfigError(f"{given.config}: no such file; dtron bench takes a config's TOML file")
    peer_args = _peer_args(given)
    out = Path(given.out) if given.out else new_folder(Path("runs/bench"))
    command = shlex.join(["dtron", "bench", *arguments])
    outcomes: list[Outcome] = []
    rows: list[_Row] = []
    for outcome in run_all(given.config, sweep, options, given.repeat, out, console, peer_args):
        outcomes.append(outcome)
        # Written after each run: an interrupted sweep keeps its finished runs.
        rows, written = _report(sweep, outcomes, options)
        report.write_json(out / "bench.json", command, options, written)
    if any(found for _, found, _ in rows):
        report.print_report(console, rows, _title(given, options, outcomes))
    else:  # reasons of points that cannot run were printed before the first run
        tried = (each for each in outcomes if each.order >= 0)
        for text in dict.fromkeys(f"{each.label}: {each.reason}" for each in tried):
            console.print(text, markup=False, soft_wrap=True)
    if given.breakdown:
        print_breakdowns(console, outcomes)
    if given.against:
        print_comparisons(console, outcomes)
    console.print(f"written: {out / 'bench.json'}", markup=False, soft_wrap=True)
    if given.write_baseline:
        _write_baseline(given, sweep, outcomes, options)
        console.print(f"written: {given.write_baseline}", markup=False, soft_wrap=True)
    return 0 if any(found for _, found, _ in rows) else 1


def _write_baseline(
    given: argparse.Namespace,
    sweep: Sequence[SweepPoint],
    outcomes: Sequence[Outcome],
    options: Options,
) -> None:
    """Add each point with figures to the baseline's file."""
    before = Baseline.read(given.write_baseline) if given.write_baseline.exists() else Baseline()
    measured = []
    for point in sweep:
        good = [each for each in outcomes if each.label == point.label and each.times]
        if (found := report.figures(good, options)) is not None:
            device, settings = good[0].times["devices"][0], dict(point.settings)
            measured.append(measured_row(given.config, settings, options, found, device))
    before.updated(measured).write(given.write_baseline)


def _compare(given: argparse.Namespace, console: Console) -> int:
    """Run the rows of a baseline that this machine can run; return the exit status.

    Raises:
        ConfigError: an argument is invalid, the file is no baseline, or no row can run here.
    """
    if given.config is not None or given.write_baseline or given.against or given.breakdown:
        raise ConfigError(
            f"--baseline {given.baseline} runs the commands of its rows; leave out CONFIG, axes, "
            "--write-baseline, --against and --breakdown"
        )
    out = Path(given.out) if given.out else new_folder(Path("runs/bench"))
    compared: list[Comparison] = []
    for number, row in enumerate(Baseline.read(given.baseline).rows):
        own = bench_parser().parse_intermixed_args(row.words)
        options, sweep = replace(_options(own), profile_steps=0), points(own.axes)
        if len(sweep) != 1:
            raise ConfigError(f"--baseline {given.baseline}: {row.command!r} has several points")
        if why := why_not_here(row, options.ranks):
            console.print(f"not compared: {row.name}: {why}", markup=False, soft_wrap=True)
            continue
        console.print(f"{row.name}:", markup=False, soft_wrap=True)
        folder = out / f"row-{number:02}"
        outcomes = list(run_all(own.config, sweep, options, given.repeat, folder, console))
        for text in dict.fromkeys(each.reason for each in outcomes if each.order >= 0):
            console.print(text, markup=False, soft_wrap=True)
        compared.append(Comparison(row, report.figures(outcomes, options)))
    if not compared:
        raise ConfigError(
            f"--baseline {given.baseline}: no row was measured on such a machine; record one with "
            f"dtron bench CONFIG --write-baseline {given.baseline}"
        )
    console.print(comparison_table(compared, given.tolerance))
    return 0 if all(each.verdict(given.tolerance) == "ok" for each in compared) else 1


def _refuse_torchrun() -> None:
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise ConfigError(
            "dtron bench was started by torchrun, but starts torchrun itself for each run; start "
            "it without torchrun, with --nproc-per-node N for N ranks"
        )


def new_folder(parent: Path) -> Path:
    """Make a folder named after the current time; a number is added if the name is taken."""
    name = time.strftime("%Y%m%d-%H%M%S")
    for number in itertools.count(1):
        folder = parent / (name if number == 1 else f"{name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(parents=True)
            return folder
    raise AssertionError("unreachable: the loop ends at a free name")


def _report(
    sweep: Sequence[SweepPoint], outcomes: Sequence[Outcome], options: Options
) -> tuple[list[_Row], list[dict[str, Any]]]:
    """Make a table row per point, and the content of bench.json."""
    rows, written = [], []
    for point in sweep:
        own = [outcome for outcome in outcomes if outcome.label == point.label]
        found = report.figures(own, options)
        why = "; ".join(dict.fromkeys(outcome.reason for outcome in own if outcome.reason))
        rows.append((point.label, found, why))
        written.append(report.point_json(point, found, own))
    return rows, written


def run_all(
    config: Path,
    sweep: Sequence[SweepPoint],
    options: Options,
    repeats: int,
    out: Path,
    console: Console,
    peer_args: Sequence[str] | None = None,
) -> Iterator[Outcome]:
    """Run all points once, then all again, `repeats` times in total.

    A drift of the machine then shows between repeats, not between points. Points that cannot run
    are printed before the first run. A point whose run is refused is not repeated.

    Args:
        peer_args: extra arguments of the peer framework, which runs after each run of dtron; None:
            no peer.
    """
    left: list[SweepPoint] = []
    for point in sweep:
        outcome = refused(config, point.overrides, options, point.label)
        if outcome is None and peer_args is not None:
            resolved, _ = bench_config(config, point.overrides, options, Path())
            if why := refusal(resolved, options):
                outcome = Outcome(point.label, "refused", f"against {PEER}: {why}")
        if outcome is None:
            left.append(point)
            continue
        text = f"{point.label}: refused: {outcome.reason}"
        console.print(text, markup=False, soft_wrap=True)
        yield outcome
    jobs = [(repeat, point) for repeat in range(repeats) for point in left]
    stopped: set[str] = set()
    for order, (repeat, point) in enumerate(jobs):
        if point.label in stopped:
            continue
        directory = out / f"{order:03}"
        outcome = run_point(
            config, point.overrides, point.environment, options, directory, point.label
        )
        outcome.order, outcome.repeat = order, repeat
        if outcome.status == "refused":
            stopped.add(point.label)
        if outcome.status == "ok" and options.profile_steps:
            add_breakdown(outcome, options, with_ceiling=options.shapes and repeat == 0)
        if outcome.status == "ok" and peer_args is not None:
            peer_out = out / f"{order:03}-{PEER}"
            outcome.against = run_peer(outcome, peer_args, options, peer_out)
        # The reason is printed once, under the table.
        summary = outcome.status if outcome.reason else _brief(outcome, options)
        console.print(
            f"[{order + 1}/{len(jobs)}] {point.label}: {summary}", markup=False, soft_wrap=True
        )
        yield outcome


def add_breakdown(outcome: Outcome, options: Options, with_ceiling: bool) -> None:
    """Add the breakdown of a run's traces to the run's outcome.

    `with_ceiling`: also measure the ceiling on the idle device.
    """
    run = Path(outcome.directory) / "run"
    try:
        outcome.breakdown = read_breakdown(run / "trace").as_json()
    except DataError as error:  # the step times are valid without a breakdown
        outcome.breakdown = {"unread": one_line(str(error))}
        return
    if not with_ceiling:
        return
    log = Path(outcome.directory) / "ceiling.txt"
    command = [sys.executable, "-m", "dtron.bench.roofline"]
    files = [str(run / "config.toml"), str(run / "run.json")]
    status = wait_for([*command, *files], log, outcome.environment, options.timeout_seconds)
    text = log.read_text(errors="replace")
    if status == 0:
        (line,) = (line for line in text.splitlines() if line.startswith("{"))
        outcome.breakdown["ceiling"] = json.loads(line)
    else:
        outcome.breakdown["no_ceiling"] = reason(text, status, options.timeout_seconds)


def print_breakdowns(console: Console, outcomes: Sequence[Outcome]) -> None:
    """Print the breakdown of each point's first run."""
    for outcome in outcomes:
        if outcome.repeat or not outcome.breakdown:
            continue
        if why := outcome.breakdown.get("unread"):
            console.print(f"{outcome.label}: no breakdown: {why}", markup=False, soft_wrap=True)
            continue
        found = Breakdown.of_json(outcome.breakdown)
        measured = outcome.breakdown.get("ceiling", {})
        floors = measured.get("floors", {})
        ranks = f"{counted(len(found.ranks), 'rank')}, {counted(found.steps, 'profiled step')}"
        console.print(breakdown_table(found, floors, f"{outcome.label}: one step of {ranks}"))
        for line in notes(found):
            console.print(line, markup=False, soft_wrap=True)
        if why := outcome.breakdown.get("no_ceiling"):
            console.print(f"no ceiling: {why}", markup=False, soft_wrap=True)
        elif floors:
            limit = sum(ceiling(found.mean, floors).values())
            console.print(
                f"ceiling: {limit:.4g} ms per step, measured without overlap on "
                f"{measured['device']}; the profiled steps are at {limit / found.mean.step:.1%} of "
                "that speed",
                markup=False,
                soft_wrap=True,
            )


def _brief(outcome: Outcome, options: Options) -> str:
    found = report.figures([outcome], options)
    assert found is not None, "a run without a reason has figures"
    line = f"{found.step_seconds:.4g} s a step, {outcome.wall_seconds:.0f} s in all"
    chosen = [f"{k}={row['value']}" for k, row in outcome.facts.get("automatic", {}).items()]
    return f"{line}; chosen automatically: {' '.join(chosen)}" if chosen else line


def _title(given: argparse.Namespace, options: Options, outcomes: Sequence[Outcome]) -> str:
    devices = [outcome.times["devices"][0] for outcome in outcomes if outcome.times]
    return (
        f"{given.config}: {options.ranks} x {devices[0] if devices else 'no run succeeded'}, "
        f"{options.steps} steps after {options.warmup}, {given.repeat} times"
    )


def _options(given: argparse.Namespace) -> Options:
    gpus = torch.cuda.device_count()
    if given.breakdown and given.no_profile:
        raise ConfigError("--breakdown reads a profile; leave out --no-profile")
    profiled = _PROFILED if given.breakdown or (gpus and not given.no_profile) else 0
    return Options(
        ranks=given.nproc_per_node or max(1, gpus),
        warmup=given.warmup,
        steps=given.steps,
        profile_steps=profiled,
        shapes=given.breakdown,
        timeout_seconds=given.timeout,
        fresh_cache=given.fresh_cache,
        log_interval=LOG_STEPS if given.against else NEVER,
    )


def _peer_args(given: argparse.Namespace) -> list[str] | None:
    if given.against is None:
        if given.peer_args:
            raise ConfigError(f"--peer-args has no effect without --against; add --against {PEER}")
        return None
    if given.steps < LOG_STEPS:
        raise ConfigError(
            f"--steps {given.steps}: --against needs {LOG_STEPS} timed steps or more; use "
            f"--steps {LOG_STEPS} or more"
        )
    require()
    return shlex.split(given.peer_args)


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def bench_parser() -> argparse.ArgumentParser:
    """Build the argument parser of `dtron bench`."""
    parser = ArgumentParser(
        prog="dtron bench",
        description="Measure a run's speed, for every combination of settings. "
        "`dtron bench kernels` measures single kernels; `dtron bench lr` is a learning-rate range "
        "test.",
    )
    parser.add_argument("config", nargs="?", type=Path, metavar="CONFIG", help="a run's TOML file")
    parser.add_argument(
        "axes",
        nargs="*",
        metavar="section.key=a,b,c",
        help="values to try; a TOML list is one value; env.NAME=a,b sets an environment variable",
    )
    add = parser.add_argument
    add("--nproc-per-node", type=_count, metavar="N", help="ranks (default: all GPUs, or 1)")
    add("--steps", type=_count, default=20, metavar="N", help="timed steps (default: 20)")
    add("--warmup", type=_count, default=5, metavar="N", help="untimed first steps (default: 5)")
    add("--repeat", type=_count, default=1, metavar="N", help="run all points N times (default: 1)")
    add("--timeout", type=float, default=1800.0, metavar="S", help="time limit of a run in seconds")
    add("--fresh-cache", action="store_true", help="start each run with an empty compile cache")
    add("--no-profile", action="store_true", help="on GPUs, do not measure communication")
    add("--breakdown", action="store_true", help="show the step time by class, and a lower bound")
    add("--against", choices=[PEER], help="after each run, run this framework on equal work")
    add("--peer-args", default="", metavar="ARGS", help="extra arguments for the peer, in quotes")
    add("--baseline", type=Path, metavar="FILE", help="run a baseline's rows, and mark slower ones")
    add("--tolerance", type=float, default=0.03, metavar="X", help="slower by X is ok (0.03)")
    add("--write-baseline", type=Path, metavar="FILE", help="add the points to a baseline")
    add("--out", metavar="DIR", help="folder of logs and bench.json (default: runs/bench/TIME)")
    return parser
