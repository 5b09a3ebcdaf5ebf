"""Predictions for layouts that were drawn before any was measured, and their measurement.

    python -m benchmarks.plan_layouts draw --seed N --layouts FILE
        writes a new file: layouts and predictions
    python -m benchmarks.plan_layouts predict    writes predictions of its layouts anew
    python -m benchmarks.plan_layouts measure [--world N ...] [--only I ...]
        on H200: runs those that the GPUs here can hold, or what is named; a line a row, 8 steps
        after 4. What is measured goes to plan_measured.json at once, and a row that is there is not
        run again. A measurement that is broken off ends its run.
    python -m benchmarks.plan_layouts compare [--hardware ROW]
        prints the table of PLANNING.md; with a row, such as a file of `dtron plan calibrate`,
        of predictions by that row in place of those in plan_layouts.json

--layouts FILE takes another drawing, whose measurements are in FILE with `measured` for `layouts`.
plan_layouts.json was drawn by seed 9 without a limit of time, plan_layouts_2.json by seed 14 from
layouts whose step was predicted to take at most LONGEST seconds. No constant of the planner was
fitted to a measurement of the second; what a backward computes again was counted anew after them.

Layouts of Llama-3-8B, Qwen3-8B and DeepSeek-V2-Lite (16B, experts) on 1, 2 and 4 GPUs, drawn by
a seed from those that are legal and that the planner said fit when they were drawn; a planner that
tells other sizes would draw others, so that they are not drawn again.
"""

import argparse
import json
import math
import random
import shlex
import signal
import statistics
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks import plan_rows
from dtron.bench.run import end
from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.plan.hardware import Hardware, hardware
from dtron.plan.memory import memory, worst
from dtron.plan.run_shape import Resolved

EACH = 5  # layouts a model
LONGEST = 2.5  # seconds of a step
WARM_UP, STEPS = 4, 8
HERE = Path(__file__).parent
FILE = HERE / "plan_layouts.json"
CONFIG = "llama3_8b"
MODELS = {
    "llama 8b": ("model.name=llama model.size=8b train.seq_len=8192", (1, 2, 4)),
    "qwen3 8b": ("model.name=qwen3 model.size=8b train.seq_len=4096", (1, 2, 4)),
    "deepseek_v3 16b": (
        "model.name=deepseek_v3 model.size=16b train.seq_len=4096 "
        "model.override.force_balance=true",
        (2, 4),
    ),
}
CHOICES: dict[str, tuple[Any, ...]] = {
    "parallel.tp": (1, 1, 2),
    "parallel.pp": (1, 1, 2),
    "parallel.cp": (1, 1, 2),
    "parallel.ep": (1, 2, 4),
    "parallel.zero": (1, 2, 3),
    "parallel.schedule": ("1F1B", "Interleaved1F1B", "ZBVZeroBubble"),
    "train.micro_batch": (1, 2, 4),
    "train.global_batch": (4, 8, 16),
    "recompute.mode": ("none", "selective", "attention", "full"),
    "optim.moments": ("float32", "bfloat16"),
}


def draw(seed: int) -> list[dict[str, Any]]:
    """Layouts with their predictions; different ones, in the order in which they were drawn."""
    rng, row, found = random.Random(seed), hardware("h200"), []
    for name, (base, worlds) in MODELS.items():
        seen: set[str] = set()
        while len(seen) < EACH:
            world = rng.choice(worlds)
            chosen = {key: rng.choice(values) for key, values in CHOICES.items()}
            if chosen["parallel.pp"] == 1:
                chosen["parallel.schedule"] = "1F1B"
            words = [*base.split(), *(f"{key}={value}" for key, value in chosen.items())]
            try:
                run = Resolved.of(
                    RunConfig.load(plan_rows.CONFIGS / f"{CONFIG}.toml", words), world
                )
            except ConfigError:
                continue
            held = worst(memory(run)).reserved
            label = f"{name} on {world}: {shlex.join(words[len(base.split()) :])}"
            if held > row.room or label in seen:
                continue
            layout = predicted({"label": label, "world": world, "overrides": words}, row)
            if layout["step_seconds"] <= LONGEST:
                seen.add(label)
                found.append(layout)
    return found


def predicted(layout: dict[str, Any], row: Hardware) -> dict[str, Any]:
    """A layout with what is predicted of it now."""
    gib, time = plan_rows.predicted(CONFIG, layout["overrides"], layout["world"], row)
    return {
        **layout,
        "gib": round(gib, 1),
        "step_seconds": round(time.step, 4),
        "tokens_per_second_per_gpu": round(time.tokens_per_second_per_gpu),
    }


def write(layouts: list[dict[str, Any]], seed: int, file: Path) -> None:
    """Layouts and predictions, with the seed that drew them."""
    file.write_text(json.dumps({"seed": seed, "layouts": layouts}, indent=1) + "\n")


def measure(layout: dict[str, Any], out: Path, seconds: float) -> dict[str, Any]:
    """Run a layout by `dtron bench`; its step and memory, or {"failed": why}."""
    options = ["--nproc-per-node", str(layout["world"]), "--timeout", f"{seconds:g}"]
    options += ["--warmup", str(WARM_UP), "--steps", str(STEPS)]
    command = [
        sys.executable,
        "-m",
        "dtron",
        "bench",
        *options,
        "--out",
        str(out),
        f"configs/{CONFIG}.toml",
    ]
    command += layout["overrides"]
    code, output = ended(command)
    try:
        (point,) = json.loads((HERE.parent / out / "bench.json").read_text())["points"]
    except (OSError, ValueError):  # it ended before it wrote anything
        return {"failed": f"exit status {code}: {output.strip()[-300:]}"}
    figures = point["figures"]
    if not figures:
        return {"failed": point["runs"][0]["reason"]}
    return {"gib": figures["memory_gib"], "step_seconds": figures["step_seconds"]}


def ended(command: list[str]) -> tuple[int, str]:
    """(exit status, what it wrote) of a command. Whatever ends this function ends all processes
    below the command too: ranks left alone would keep the memory of their GPUs."""
    process = subprocess.Popen(
        command, cwd=HERE.parent, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    # By default a process that is asked to end would leave what it has started.
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by a signal"))
    try:
        output, _ = process.communicate()
    finally:
        signal.signal(signal.SIGTERM, before)
        end(process)
    return process.returncode, output


def chosen(
    layouts: list[dict[str, Any]], worlds: Sequence[int], only: Sequence[int], gpus: int
) -> list[int]:
    """Which layouts to run: those of these numbers of ranks and places in the list, if any are
    named, that the GPUs suffice for."""
    return [
        i
        for i, layout in enumerate(layouts)
        if layout["world"] <= gpus
        and (not worlds or layout["world"] in worlds)
        and (not only or i in only)
    ]


def measure_all(layouts: list[dict[str, Any]], which: list[int], file: Path, limit: float) -> None:
    """Run what the file does not have, and write it after every row."""
    found = measured(file)
    for i in which:
        if "gib" not in found.get(i, {}):
            found[i] = measure(layouts[i], Path("runs/plan") / str(i), limit)
            rows = [{"layout": n, **found[n]} for n in sorted(found)]
            partial = file.with_suffix(".partial")  # a killed run leaves the old file or the new
            partial.write_text(json.dumps(rows, indent=1) + "\n")
            partial.replace(file)
        output = ", ".join(f"{key} {value}" for key, value in found[i].items())
        print(f"{i:3} {layouts[i]['label']}: {output}", flush=True)


def measured(file: Path) -> dict[int, dict[str, Any]]:
    """What was measured, by the layout's place in the list."""
    rows = json.loads(file.read_text()) if file.exists() else []
    return {row["layout"]: {k: v for k, v in row.items() if k != "layout"} for row in rows}


def spearman(x: list[float], y: list[float]) -> float:
    """Correlation of ranks."""
    ranks = [[sorted(values).index(value) for value in values] for values in (x, y)]
    return statistics.correlation(*[list(map(float, each)) for each in ranks])


def compare(layouts: list[dict[str, Any]], found: dict[int, dict[str, Any]]) -> None:
    """Print predicted beside measured, how well speeds are ranked, and what failed."""
    pairs = [(layouts[i], real) for i, real in sorted(found.items()) if "gib" in real]
    print("| layout | GiB | measured | error | step s | measured | error |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for layout, real in pairs:
        cells = [layout["label"]]
        for key in ("gib", "step_seconds"):
            error = layout[key] / real[key] - 1
            cells += [f"{layout[key]:.4g}", f"{real[key]:.4g}", f"{error:+.1%}"]
        print(f"| {' | '.join(cells)} |")
    for key in ("gib", "step_seconds"):
        errors = [abs(layout[key] / real[key] - 1) for layout, real in pairs] or [math.nan]
        print(f"\n{key}: mean error {statistics.mean(errors):.1%}, largest {max(errors):.1%}")
    if len(pairs) > 1:
        speeds = [layout["tokens_per_second_per_gpu"] for layout, _ in pairs]
        real_speeds = [
            layout["tokens_per_second_per_gpu"] * layout["step_seconds"] / real["step_seconds"]
            for layout, real in pairs
        ]
        print(f"\nSpearman's rank correlation of tok/s/GPU: {spearman(speeds, real_speeds):.3f}")
    for i, real in sorted(found.items()):
        if "failed" in real:
            print(f"\nnot measured: {layouts[i]['label']}: {real['failed']}")


def parser() -> argparse.ArgumentParser:
    """Of the command's arguments."""
    made = argparse.ArgumentParser(
        prog="python -m benchmarks.plan_layouts",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    made.add_argument("what", choices=["draw", "predict", "measure", "compare"])
    made.add_argument("--world", type=int, nargs="*", default=[], help="ranks of layouts to run")
    made.add_argument("--only", type=int, nargs="*", default=[], help="places in the list, from 0")
    made.add_argument("--limit", type=float, default=300, help="seconds a row; default 300")
    made.add_argument("--hardware", default="", help="compare: a row to predict by")
    made.add_argument("--layouts", type=Path, default=FILE, help="the drawing; default: the first")
    made.add_argument("--seed", type=int, help="draw: of the random choices")
    made.add_argument("--measured", type=Path, help="where figures are kept; default: by --layouts")
    return made


def main() -> None:
    """Draw, predict or measure what was drawn, or compare."""
    given = parser().parse_args()
    if given.what == "draw":
        if given.seed is None or given.layouts.exists():
            sys.exit("draw needs a --seed, and a new file by --layouts: a drawing stays as it is")
        write(draw(given.seed), given.seed, given.layouts)
        return
    kept = json.loads(given.layouts.read_text())
    layouts, figures = kept["layouts"], given.measured or figures_of(given.layouts)
    if given.what == "predict":
        now = [predicted(layout, hardware("h200")) for layout in layouts]
        write(now, kept["seed"], given.layouts)
        return
    if given.hardware:
        layouts = [predicted(layout, hardware(given.hardware)) for layout in layouts]
    if given.what == "measure":
        which = chosen(layouts, given.world, given.only, torch.cuda.device_count())
        if not which:
            sys.exit(f"no layout to run on the {torch.cuda.device_count()} GPUs of this machine")
        measure_all(layouts, which, figures, given.limit)
    compare(layouts, measured(figures))


def figures_of(layouts: Path) -> Path:
    """Where the measurements of a drawing are."""
    return layouts.with_name(layouts.name.replace("layouts", "measured"))


if __name__ == "__main__":
    main()
