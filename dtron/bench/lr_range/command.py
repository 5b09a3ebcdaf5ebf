"""A learning-rate range test: one run in which the rate grows exponentially with the step.

The table and the picture show the loss, smoothed over steps, against the rate. The suggestion is a
tenth of the rate at which the smoothed loss is lowest: there the loss falls fast, far from where it
diverges.

Sources: arXiv:1506.01186, section 3.3; the smoothing and the tenth, fast.ai's learning-rate finder.
"""

import argparse
import json
import math
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from dtron.bench.run import Options, run_point
from dtron.errors import ArgumentParser, ConfigError
from dtron.io.filesystem import write_atomically
from dtron.io.svg import element, heading, picture, text

_WINDOW = 0.05
"""Steps over which losses are averaged, as a fraction of the test's steps."""
_DIVERGED = 2.0
"""The test ends where the smoothed loss is this multiple of its lowest value."""
_FRACTION = 0.1
"""The suggestion, as a fraction of the rate with the lowest smoothed loss."""
_ROWS = 20


@dataclass(frozen=True)
class Point:
    """One step of the test."""

    rate: float
    loss: float
    smoothed: float


def main(arguments: Sequence[str], new_folder: Callable[[], Path]) -> int:
    """Run `dtron bench lr`; return 0 if it suggests a rate.

    Args:
        new_folder: makes the folder of log, picture and points, if --out does not name one.
    """
    given = lr_parser().parse_intermixed_args(arguments)
    if not 0 < given.low < given.high < math.inf:
        raise ConfigError(
            f"--low {given.low:g} and --high {given.high:g}: the rate grows from LOW to HIGH; use "
            "0 < LOW < HIGH, such as --low 1e-6 --high 1"
        )
    out = Path(given.out) if given.out else new_folder()
    ranks = given.nproc_per_node or max(1, torch.cuda.device_count())
    options = Options(ranks, warmup=0, steps=given.steps, log_interval=1)
    ramp = {
        "optim.lr": given.high,
        "schedule.name": "exponential",
        "schedule.min_ratio": given.low / given.high,
        "schedule.warmup": 0.0,
        "train.max_skipped": given.steps,  # ends after the losses, not at the first of them
    }
    words = [*given.overrides, *(f"{key}={json.dumps(value)}" for key, value in ramp.items())]
    outcome = run_point(given.config, words, {}, options, out, "learning-rate range test")
    log = out / "run" / "metrics.jsonl"
    found = read_points(log, given.steps) if log.exists() else []
    if outcome.status != "ok" and not found:
        print(f"{outcome.status}: {outcome.reason}")
        return 1
    best = suggestion(found)
    command = shlex.join(["dtron", "bench", "lr", *arguments])
    rows = [each.__dict__ for each in found]
    result = {"command": command, "suggestion": best, "points": rows}
    write_atomically(out / "lr.json", json.dumps(result, indent=1) + "\n")
    write_atomically(out / "lr.svg", draw(found, best))
    print(table(found))
    if best is None:
        print("no suggestion: the loss does not fall; start from a lower --low")
    else:
        print(f"suggestion: optim.lr={best:.1e}, a tenth of the rate with the lowest loss")
        if found[-1].smoothed < _DIVERGED * min(each.smoothed for each in found):
            print("the loss has not diverged; a higher --high may show larger rates")
    print(f"written: {out / 'lr.svg'}, {out / 'lr.json'}")
    return 0 if best is not None else 1


def lr_parser() -> argparse.ArgumentParser:
    parser = ArgumentParser(prog="dtron bench lr", description=__doc__)
    parser.add_argument("config", type=Path, metavar="CONFIG", help="a run's TOML file")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    add = parser.add_argument
    add("--low", type=float, default=1e-6, metavar="LR", help="first rate (default: 1e-6)")
    add("--high", type=float, default=1.0, metavar="LR", help="last rate (default: 1)")
    add("--steps", type=int, default=200, metavar="N", help="steps (default: 200)")
    add("--nproc-per-node", type=int, metavar="N", help="ranks (default: all GPUs, or 1)")
    add("--out", metavar="DIR", help="folder of log, lr.svg and lr.json")
    return parser


def read_points(log: Path, steps: int) -> list[Point]:
    """Read the steps of a test from metrics.jsonl, until the loss diverges or is not finite.

    Args:
        steps: planned number of steps; a test of at most 20 has losses that are not smoothed.
    """
    decay = 1 - 1 / max(1.0, _WINDOW * steps)
    rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    found: list[Point] = []
    mean, lowest = 0.0, math.inf
    for number, row in enumerate((row for row in rows if "loss" in row), 1):
        loss = row["loss"]
        if loss is None or not math.isfinite(loss):
            break
        mean = decay * mean + (1 - decay) * loss
        smoothed = mean / (1 - decay**number)
        found.append(Point(row["lr"], loss, smoothed))
        lowest = min(lowest, smoothed)
        if smoothed > _DIVERGED * lowest:
            break
    return found


def suggestion(found: Sequence[Point]) -> float | None:
    """Return a tenth of the rate with the lowest smoothed loss; None: that is the first rate."""
    if not found:
        return None
    best = min(found, key=lambda each: each.smoothed)
    return None if best is found[0] else _FRACTION * best.rate


def table(found: Sequence[Point]) -> str:
    """Return 20 to 40 of the steps, or all if they are fewer, with the last one."""
    every = max(1, len(found) // _ROWS)
    shown = [each for i, each in enumerate(found, 1) if i % every == 0 or i == len(found)]
    rows = [f"{each.rate:11.3e}  {each.loss:9.4f}  {each.smoothed:9.4f}" for each in shown]
    return "\n".join([f"{'rate':>11}  {'loss':>9}  {'smoothed':>9}", *rows])


def draw(found: Sequence[Point], best: float | None) -> str:
    """Return the picture: smoothed and single losses against the logarithm of the rate."""
    left, top, width, height = 60.0, 40.0, 560.0, 260.0
    logs = [math.log10(each.rate) for each in found] or [0.0]
    losses = [each.smoothed for each in found] or [0.0]
    first, last = logs[0], max(logs[-1], logs[0] + 1e-9)
    low, high = min(losses), max(max(losses), min(losses) + 1e-9)

    def x(log_rate: float) -> float:
        return left + width * (log_rate - first) / (last - first)

    def y(loss: float) -> float:
        return top + height * (1 - (min(max(loss, low), high) - low) / (high - low))

    parts = [heading(left, "Loss against learning rate")]
    frame = {"fill": "none", "stroke": "#999"}
    parts.append(element("rect", x=left, y=top, width=width, height=height, **frame))
    for power in range(math.ceil(first), math.floor(last) + 1):
        parts.append(text(x(power), top + height + 18, f"1e{power}", text_anchor="middle"))
    for loss in (low, (low + high) / 2, high):
        parts.append(text(left - 8, y(loss) + 4, f"{loss:.2f}", text_anchor="end"))
    for values, colour in (([p.loss for p in found], "#c9d7ea"), (losses, "#2b5f9e")):
        dots = " ".join(f"{x(a):.1f},{y(b):.1f}" for a, b in zip(logs, values, strict=False))
        parts.append(element("polyline", points=dots, fill="none", stroke=colour, stroke_width=2))
    if best is not None:
        at, line = x(max(first, math.log10(best))), {"stroke": "#b5482a", "stroke_dasharray": "4"}
        parts.append(element("line", x1=at, x2=at, y1=top, y2=top + height, **line))
        parts.append(text(at + 6, top + 14, f"suggestion {best:.1e}", fill="#b5482a"))
    return picture(640, 340, parts)
