"""Report the figures of runs, as tables and as JSON.

Figures are of the timed steps, if not noted otherwise. The time of a step is the mean over ranks of
the time between the ends of two updates on the device; ranks wait for each other, so their times
differ little. A dash means that a figure was not measured.

    step            median of the timed steps of all repeats
    p10, p90        percentiles of the same steps
    tok/s/GPU       global_batch x seq_len / step / ranks; padding counts
    TFLOP/s         tok/s/GPU x FLOPs per token (models/flops.py) in both conventions
    MFU             TFLOP/s over the device's data-sheet peak, if it is known
    memory          peak of the allocator's reserved memory until the end of the timed steps, on the
                    worst rank (on CPU: resident memory of the process)
    hidden          fraction of communication time overlapped with computation, in profiled steps
                    after the timed steps (breakdown.py)
    cold start      from the launch to the end of the first step: imports, data, weights,
                    compilation
    first step      the part of the cold start for the first step, with compilation
    drift           largest / smallest median step time of the repeats, minus 1; with --repeat
"""

import ctypes
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.cuda import nccl

import dtron
from dtron.bench.run import Options, Outcome
from dtron.bench.sweep import SweepPoint
from dtron.config import RunConfig
from dtron.io.filesystem import write_atomically
from dtron.lora.adapters import flops_model
from dtron.models import model_config
from dtron.models.flops import Convention, flops_per_token, peak_flops

CONVENTIONS: tuple[Convention, ...] = ("full", "causal")


@dataclass(frozen=True)
class RunFigures:
    """Figures of one point over its repeats; None: not measured."""

    step_seconds: float
    p10_seconds: float
    p90_seconds: float
    tokens_per_second_per_device: float
    tflops: dict[str, float]
    """TFLOP/s per device, by convention."""
    mfu: dict[str, float | None]
    memory_gib: float
    hidden: float | None
    cold_start_seconds: float
    first_step_seconds: float
    cache_hits: int
    """Number of compiled graphs found in a cache at the first repeat's cold start, on the first
    rank."""
    drift: float | None
    repeat_seconds: tuple[float, ...]
    """Median step time of each repeat."""


def step_seconds(outcome: Outcome) -> list[float]:
    """Return the seconds of each step as means over ranks, warm-up and profiled steps included."""
    return [statistics.fmean(ranks) for ranks in zip(*outcome.times["seconds"], strict=True)]


def figures(outcomes: Sequence[Outcome], options: Options) -> RunFigures | None:
    """Compute the figures of one point's runs; None: all of them failed."""
    good = [outcome for outcome in outcomes if outcome.status == "ok"]
    if not good:
        return None
    config = RunConfig.of(good[0].config)
    repeats = [step_seconds(outcome)[options.timed] for outcome in good]
    medians = tuple(statistics.median(seconds) for seconds in repeats)
    steps = sorted(second for seconds in repeats for second in seconds)
    step = statistics.median(steps)
    each = config.train.global_batch * config.train.seq_len / step / options.ranks
    flops = _flops(config, good, options)
    peak = peak_flops(good[0].times["devices"][0])
    first = good[0]
    return RunFigures(
        step_seconds=step,
        p10_seconds=percentile(steps, 0.1),
        p90_seconds=percentile(steps, 0.9),
        tokens_per_second_per_device=each,
        tflops={name: each * value / 1e12 for name, value in flops.items()},
        mfu={name: each * value / peak if peak else None for name, value in flops.items()},
        memory_gib=max(
            rank[options.timed.stop - 1] for run in good for rank in run.times["memory_gib"]
        ),
        hidden=_hidden(good),
        cold_start_seconds=first.times["begun_at"] - first.launched_at + step_seconds(first)[0],
        first_step_seconds=step_seconds(first)[0],
        cache_hits=first.times["compile_cache"][0]["hits"],
        drift=max(medians) / min(medians) - 1 if len(medians) > 1 else None,
        repeat_seconds=medians,
    )


def _hidden(runs: Sequence[Outcome]) -> float | None:
    """Return the fraction of communication time that is hidden on GPUs, mean over runs."""
    found = [run.breakdown["hidden"] for run in runs if run.breakdown.get("device") == "cuda"]
    shares = [share for share in found if share is not None]
    return statistics.fmean(shares) if shares else None


def _flops(config: RunConfig, runs: Sequence[Outcome], options: Options) -> dict[str, float]:
    """Return FLOPs per token by convention.

    They use the mean attended length of the timed steps, 2 * (mean number of keys per query) - 1,
    and their mean number of images per token.
    """
    model = model_config(config.model.name, config.model.size, config.model.override)
    attended, images = (
        statistics.fmean(x for run in runs for x in run.times[key][options.timed])
        for key in ("attended", "images")
    )
    sizes = flops_model(config.model.name, model, config.lora)
    return {name: flops_per_token(sizes, attended, name, images) for name in CONVENTIONS}


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return a percentile (share 0 to 1) of ascending values, with linear interpolation."""
    place = share * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (place - low) * (ordered[high] - ordered[low])


# Titles of tables, column headings, and the function that formats a column from a point's figures.
_TABLES: tuple[tuple[str, tuple[tuple[str, Callable[[RunFigures], str]], ...]], ...] = (
    (
        "speed",
        (
            ("step s", lambda f: f"{f.step_seconds:.4g}"),
            ("p10–p90", lambda f: f"{f.p10_seconds:.4g}–{f.p90_seconds:.4g}"),
            ("tok/s/GPU", lambda f: f"{f.tokens_per_second_per_device:,.0f}"),
            ("TFLOP/s full", lambda f: f"{f.tflops['full']:,.4g}"),
            ("causal", lambda f: f"{f.tflops['causal']:,.4g}"),
            ("MFU full", lambda f: share(f.mfu["full"])),
            ("causal", lambda f: share(f.mfu["causal"])),
        ),
    ),
    (
        "memory, start, spread",
        (
            ("GiB", lambda f: f"{f.memory_gib:.1f}"),
            ("communication hidden", lambda f: share(f.hidden)),
            ("cold start s", lambda f: f"{f.cold_start_seconds:.1f}"),
            ("first step s", lambda f: f"{f.first_step_seconds:.2f}"),
            ("drift", lambda f: share(f.drift)),
        ),
    ),
)
WIDTH = 120


def bench_console() -> Console:
    """Return a console of the terminal's width, or WIDTH columns for a file or pipe."""
    return Console(width=None if Console().is_terminal else WIDTH)


def share(value: float | None) -> str:
    """Format a ratio as a percentage; None as a dash."""
    return "–" if value is None else f"{value:.1%}"


def tables(rows: Sequence[tuple[str, RunFigures | None, str]], title: str) -> Iterator[Table]:
    """Yield tables with one row per point: (label, figures, reason if there are no figures)."""
    for name, columns in _TABLES:
        made = Table(title=f"{title}: {name}", title_justify="left")
        made.add_column("point", overflow="fold")
        for heading, _ in columns:
            made.add_column(heading, justify="right", no_wrap=True)
        for label, found, _ in rows:
            cells = ["–"] * len(columns) if found is None else [show(found) for _, show in columns]
            made.add_row(label, *cells)
        yield made


def print_report(
    console: Console, rows: Sequence[tuple[str, RunFigures | None, str]], title: str
) -> None:
    """Print the tables, then the reason of each point without figures."""
    for each in tables(rows, title):
        console.print(each)
    for label, found, why in rows:
        if why:
            console.print(f"{label}: {why}", markup=False, soft_wrap=True)
        elif found is not None and found.cache_hits:
            console.print(
                f"{label}: {found.cache_hits} compiled graphs came from a cache; --fresh-cache "
                "measures a start with an empty cache",
                markup=False,
                soft_wrap=True,
            )


def versions() -> dict[str, str]:
    """Return the versions of installed software that affects speed."""
    found = {
        "dtron": dtron.__version__,
        "commit": _commit(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda or "",
        "platform": platform.platform(),
        "cpus": str(os.cpu_count()),
    }
    if torch.cuda.is_available():
        found["cudnn"] = str(torch.backends.cudnn.version())
        found["nccl"] = loaded_nccl() or ".".join(map(str, nccl.version()))
    for package in ("triton", "torchao", "flash-attn-4", "torchtitan"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return {name: value for name, value in found.items() if value}


def loaded_nccl() -> str:
    """Return the version of the loaded NCCL library; empty: not found.

    `torch.cuda.nccl.version` returns that of torch's build, even if LD_PRELOAD has replaced the
    library.
    """
    version = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(version))
    except (OSError, AttributeError):
        return ""
    major, rest = divmod(version.value, 10_000)
    return f"{major}.{rest // 100}.{rest % 100}"


def _commit() -> str:
    """Return the git commit of dtron's checkout, with + if files have changed; empty: unknown."""
    root = str(Path(dtron.__file__).parent)
    try:
        run = ["git", "-C", root, "describe", "--always", "--dirty=+", "--abbrev=40", "--exclude=*"]
        return subprocess.run(run, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def point_json(
    point: SweepPoint, found: RunFigures | None, runs: Sequence[Outcome]
) -> dict[str, Any]:
    """Return a point's entry in bench.json."""
    return {
        "point": dict(point.settings),
        "figures": None if found is None else asdict(found),
        "runs": [asdict(run) for run in runs],
    }


def write_json(path: Path, command: str, options: Options, points: Sequence[dict]) -> None:
    """Write bench.json: command, options, versions, and an entry for each point.

    A point's entry has its figures and its runs, with resolved config, metadata, time of every step
    and command.
    """
    whole = {
        "command": command,
        "options": asdict(options),
        "versions": versions(),
        "points": list(points),
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, json.dumps(whole, indent=1) + "\n", synced=False)
