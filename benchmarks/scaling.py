"""Draw tokens per second over the number of GPUs: predicted runs, simulated stragglers.

    weak     the same number of sequences per data-parallel rank
    strong   the same global batch, fewer micro-batches per rank

Every step waits for its slowest rank (`slowest_of`). Copies of the layout are added as
dp_replicate, so parameters are sharded over as many ranks as before.

    python -m benchmarks.scaling --config configs/llama3_70b.toml --base 64 --out scaling.svg
    python -m benchmarks.scaling --config configs/llama3_8b.toml --base 8 --out scaling.svg \\
        train.global_batch=2048
"""

import argparse
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist

from benchmarks.charts import text
from dtron.checkpoint.initial_weights import fill_from_initial
from dtron.config import RunConfig
from dtron.errors import ArgumentParser, ConfigError
from dtron.plan.hardware import HARDWARE, Hardware, hardware
from dtron.plan.run_shape import Resolved
from dtron.plan.steptime import predict

WIDTH, HEIGHT, LEFT, RIGHT = 760, 340, 70, 60
LINE, CHARACTER, GAP = 14, 7, 6
"""Pixels of a label: its height, the width of a character, its distance from the curve's end."""
Box = tuple[float, float, float, float]
"""Left, top, right and bottom of a label, in pixels."""
COLOURS = ("#3d7fd0", "#c96f16", "#2f9c8d", "#7b5bb8")


@dataclass(frozen=True)
class Disorder:
    """How ranks differ.

    Args:
        jitter: standard deviation of a rank's speed from step to step, as a share.
        stragglers: share of ranks that are slower all the time.
        straggle: how much slower they are, as a share.
    """

    jitter: float = 0.01
    stragglers: float = 0.0
    straggle: float = 0.0


def slowest_of(ranks: int, disorder: Disorder, seed: int = 0, draws: int = 40) -> float:
    """Mean factor by which the slowest of so many ranks is slower than the middle one."""
    rng = random.Random(seed)
    total = 0.0
    for _ in range(draws):
        # The largest of n uniform numbers is u^(1/n): no need to draw all of them.
        level = rng.random() ** (1 / ranks)
        late = 1 + disorder.jitter * _normal(level)
        straggling = rng.random() < 1 - (1 - disorder.stragglers) ** ranks
        total += late * (1 + disorder.straggle * straggling)
    return total / draws


def _normal(level: float) -> float:
    """Quantile of the standard normal distribution."""
    return NormalDist().inv_cdf(min(level, 1 - 1e-12))


@dataclass(frozen=True)
class CurvePoint:
    """A number of GPUs, and tokens per second of each GPU."""

    gpus: int
    speed: float


def scaling(
    config: RunConfig,
    base: int,
    copies: Sequence[int],
    hardware: Hardware,
    disorder: Disorder,
    strong: bool = False,
) -> list[CurvePoint]:
    """Speeds of `copies` replicas of a layout of `base` GPUs; illegal runs are left out."""
    found = []
    for n in copies:
        batch = config.train.global_batch * (1 if strong else n)
        train = config.train.model_copy(update={"global_batch": batch})
        shape = {"dp_replicate": config.parallel.dp_replicate * n}
        parallel = config.parallel.model_copy(update=shape)
        copied = config.model_copy(update={"train": train, "parallel": parallel})
        try:
            run = Resolved.of(copied, base * n)
        except ConfigError:
            continue
        speed = predict(run, hardware).tokens_per_second_per_gpu
        found.append(CurvePoint(base * n, speed / slowest_of(base * n, disorder)))
    return found


def draw(curves: dict[str, list[CurvePoint]], title: str) -> str:
    """Curves of speeds over GPUs, the latter in powers of 2, as an SVG picture."""
    points = [point for curve in curves.values() for point in curve]
    top = 1.1 * max(point.speed for point in points)
    first, last = (f(point.gpus for point in points).bit_length() for f in (min, max))
    step = (WIDTH - LEFT - RIGHT) / max(1, last - first)

    def at(point: CurvePoint) -> tuple[float, float]:
        x = LEFT + (point.gpus.bit_length() - first) * step
        return x, HEIGHT - 40 - point.speed / top * (HEIGHT - 90)

    head = (
        f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {HEIGHT}' font-size='12' "
        "font-family='Helvetica, Arial, sans-serif' fill='#222'>"
    )
    parts = [head, f"<rect width='{WIDTH}' height='{HEIGHT}' fill='#fff'/>"]
    parts.append(text(LEFT, 20, title, "font-size='15' font-weight='bold'"))
    for gpus in sorted({point.gpus for point in points}):
        x, _ = at(CurvePoint(gpus, 0))
        parts.append(text(x, HEIGHT - 22, f"{gpus:,}", "text-anchor='middle'"))
    lines = [[at(point) for point in curve] for curve in curves.values()]
    labels: dict[tuple[float, str], Box] = {}
    for i, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[i % len(COLOURS)]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in lines[i])
        parts.append(f"<polyline points='{line}' fill='none' stroke='{colour}' stroke-width='2'/>")
        parts.append(text(LEFT + i * 220, 40, name, f"fill='{colour}'"))
        for point, anchor in ((curve[0], "end"), (curve[-1], "start")):
            x, y = at(point)
            words = f"{point.speed:,.0f}"
            width = CHARACTER * len(words)
            left = x - GAP - width if anchor == "end" else x + GAP
            if (left, words) in labels:
                continue
            box = free(left, y - LINE / 2, width, [*labels.values()], lines)
            labels[left, words] = box
            x = box[2] if anchor == "end" else box[0]
            parts.append(text(x, box[3] - 3, words, f"text-anchor='{anchor}' fill='{colour}'"))
    parts.append(text(LEFT, HEIGHT - 5, "GPUs; tok/s of each, predicted"))
    return "\n".join([*parts, "</svg>\n"])


def free(
    left: float,
    top: float,
    width: float,
    labels: Sequence[Box],
    lines: Sequence[Sequence[tuple[float, float]]],
) -> Box:
    """The first place from a height downwards where a label overlaps no other and no curve."""
    while True:
        box = (left, top, left + width, top + LINE)
        crossed = any(crosses(box, *ends) for line in lines for ends in itertools.pairwise(line))
        if not crossed and not any(overlap(box, label) for label in labels):
            return box
        top += 1


def overlap(one: Box, other: Box) -> bool:
    """Whether two boxes share a point inside."""
    return all(one[i] < other[i + 2] and other[i] < one[i + 2] for i in (0, 1))


def crosses(box: Box, begin: tuple[float, float], end: tuple[float, float]) -> bool:
    """Whether a line from left to right passes through a box."""
    slope = (end[1] - begin[1]) / (end[0] - begin[0])
    left, right = max(box[0], begin[0]), min(box[2], end[0])
    heights = sorted(begin[1] + slope * (x - begin[0]) for x in (left, right))
    return left < right and heights[0] < box[3] and box[1] < heights[1]


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw weak and strong scaling of a config."""
    parser: argparse.ArgumentParser = ArgumentParser(prog="python -m benchmarks.scaling")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--base", type=int, required=True, help="GPUs of one copy of the layout")
    parser.add_argument("--most", type=int, default=16384, help="GPUs of the largest run")
    parser.add_argument("--hardware", default="h100", choices=list(HARDWARE))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    given = parser.parse_intermixed_args(arguments)
    config, row = (
        RunConfig.load(given.config, given.overrides, fill_from_initial),
        hardware(given.hardware),
    )
    Resolved.of(config, given.base)  # one copy is legal
    copies = [2**i for i in range((given.most // given.base).bit_length())]
    calm, rough = Disorder(0.005), Disorder(0.02, stragglers=1e-4, straggle=0.1)
    curves = {
        "weak": scaling(config, given.base, copies, row, calm),
        "weak, stragglers": scaling(config, given.base, copies, row, rough),
        "strong": scaling(config, given.base, copies, row, calm, strong=True),
    }
    given.out.write_text(draw(curves, f"{config.model.name} {config.model.size} on {row.name}"))
    for name, curve in curves.items():
        print(name, *(f"{point.gpus}: {point.speed:,.0f}" for point in curve), sep="  ")


if __name__ == "__main__":
    main()
