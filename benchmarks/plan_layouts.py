"""Predictions for layouts that were drawn before any was measured, and their measurement.

    python -m benchmarks.plan_layouts draw       writes plan_layouts.json: layouts and predictions
    python -m benchmarks.plan_layouts measure    on 4 H200: runs them, prints the comparison

Layouts of Llama-3-8B, Qwen3-8B and DeepSeek-V2-Lite (16B, experts) on 1, 2 and 4 GPUs, drawn by
SEED from those that are legal and that the planner says fit.
"""

import json
import random
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.plan.hardware import hardware
from dtron.plan.memory import memory, worst
from dtron.plan.resolved import Resolved
from dtron.plan.steptime import predict

SEED = 9
EACH = 5  # layouts a model
HERE = Path(__file__).parent
FILE = HERE / "plan_layouts.json"
CONFIG = "configs/llama3_8b.toml"
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


def draw() -> list[dict[str, Any]]:
    """Layouts with their predictions; different ones, in the order in which they were drawn."""
    rng, row, found = random.Random(SEED), hardware("h200"), []
    for name, (base, worlds) in MODELS.items():
        seen: set[str] = set()
        while len(seen) < EACH:
            world = rng.choice(worlds)
            chosen = {key: rng.choice(values) for key, values in CHOICES.items()}
            if chosen["parallel.pp"] == 1:
                chosen["parallel.schedule"] = "1F1B"
            words = [*base.split(), *(f"{key}={value}" for key, value in chosen.items())]
            try:
                run = Resolved.of(RunConfig.load(HERE.parent / CONFIG, words), world)
            except ConfigError:
                continue
            held = worst(memory(run)).reserved
            label = f"{name} on {world}: {shlex.join(words[len(base.split()) :])}"
            if held > row.memory - row.outside or label in seen:
                continue
            seen.add(label)
            time = predict(run, row)
            found.append(
                {
                    "label": label,
                    "world": world,
                    "overrides": words,
                    "gib": round(held / 2**30, 1),
                    "step_seconds": round(time.step, 4),
                    "tokens_per_second_per_gpu": round(time.tokens_per_second_per_gpu),
                }
            )
    return found


def measure(layout: dict[str, Any], out: Path) -> dict[str, float]:
    """Run a layout by `dtron bench`; its step and memory."""
    options = ["--nproc-per-node", str(layout["world"]), "--out", str(out)]
    subprocess.run(["dtron", "bench", CONFIG, *options, *layout["overrides"]], check=True)
    figures = json.loads((out / "bench.json").read_text())["points"][0]["figures"]
    return {"gib": figures["memory_gib"], "step_seconds": figures["step_seconds"]}


def spearman(x: list[float], y: list[float]) -> float:
    """Correlation of ranks."""
    ranks = [[sorted(values).index(value) for value in values] for values in (x, y)]
    return statistics.correlation(*[list(map(float, each)) for each in ranks])


def compare(layouts: list[dict[str, Any]], found: list[dict[str, float]]) -> None:
    """Print predicted beside measured, and how well speeds are ranked."""
    print("| layout | GiB | measured | error | step s | measured | error |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for layout, real in zip(layouts, found, strict=True):
        cells = [layout["label"]]
        for key in ("gib", "step_seconds"):
            error = layout[key] / real[key] - 1
            cells += [f"{layout[key]:.4g}", f"{real[key]:.4g}", f"{error:+.1%}"]
        print(f"| {' | '.join(cells)} |")
    speeds = [layout["tokens_per_second_per_gpu"] for layout in layouts]
    ratio = [
        layout["step_seconds"] / real["step_seconds"]
        for layout, real in zip(layouts, found, strict=True)
    ]
    real_speeds = [speed * share for speed, share in zip(speeds, ratio, strict=True)]
    print(f"\nSpearman's rank correlation of tok/s/GPU: {spearman(speeds, real_speeds):.3f}")


def main() -> None:
    """Draw, or measure what was drawn."""
    if sys.argv[1:] == ["draw"]:
        FILE.write_text(json.dumps({"seed": SEED, "layouts": draw()}, indent=1) + "\n")
    elif sys.argv[1:] == ["measure"]:
        layouts = json.loads(FILE.read_text())["layouts"]
        runs = [measure(each, Path("runs/plan") / str(i)) for i, each in enumerate(layouts)]
        compare(layouts, runs)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main()
