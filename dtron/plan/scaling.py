"""Speed over the number of GPUs: every run predicted, ranks that differ simulated.

    weak     as many sequences a data-parallel rank, more ranks of dp_shard or dp_replicate
    strong   the same global batch, fewer micro-batches a rank

Every step waits for its slowest rank (`simulate.slowest_of`); copies of the layout are added as
dp_replicate, so that parameters are shared by as many ranks as before.

    python -m dtron.plan.scaling --config configs/llama3_70b.toml --base 64 --out scaling.svg
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dtron.checkpoint.initial_weights import completed
from dtron.config import RunConfig
from dtron.errors import ArgumentParser, ConfigError
from dtron.plan.hardware import HARDWARE, Hardware, hardware
from dtron.plan.run_shape import Resolved
from dtron.plan.simulate import Disorder, slowest_of
from dtron.plan.steptime import predict

WIDTH, HEIGHT, LEFT, RIGHT = 760, 340, 70, 60
LINE = 14
"""Pixels from one label to the next."""
COLOURS = ("#3d7fd0", "#c96f16", "#2f9c8d", "#7b5bb8")


@dataclass(frozen=True)
class Point:
    """A number of GPUs, and tokens a second of each of them."""

    gpus: int
    speed: float


def scaling(
    config: RunConfig,
    base: int,
    copies: Sequence[int],
    hardware: Hardware,
    disorder: Disorder,
    strong: bool = False,
) -> list[Point]:
    """Speeds of a layout of `base` GPUs in so many copies; those not legal are left out."""
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
        found.append(Point(base * n, speed / slowest_of(base * n, disorder)))
    return found


def draw(curves: dict[str, list[Point]], title: str) -> str:
    """Curves of speeds over GPUs, the latter in powers of 2, as an SVG picture."""
    points = [point for curve in curves.values() for point in curve]
    most = 1.1 * max(point.speed for point in points)
    first, last = (f(point.gpus for point in points).bit_length() for f in (min, max))
    step = (WIDTH - LEFT - RIGHT) / max(1, last - first)

    def at(point: Point) -> tuple[float, float]:
        x = LEFT + (point.gpus.bit_length() - first) * step
        return x, HEIGHT - 40 - point.speed / most * (HEIGHT - 90)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-size="12" '
        'font-family="Helvetica, Arial, sans-serif" fill="#222">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        f'<text x="{LEFT}" y="20" font-size="15" font-weight="bold">{title}</text>',
    ]
    for gpus in sorted({point.gpus for point in points}):
        x, _ = at(Point(gpus, 0))
        parts.append(f'<text x="{x:.0f}" y="{HEIGHT - 22}" text-anchor="middle">{gpus:,}</text>')
    labels: list[tuple[float, float, str]] = []
    for i, (name, curve) in enumerate(curves.items()):
        colour = COLOURS[i % len(COLOURS)]
        line = " ".join("{:.1f},{:.1f}".format(*at(point)) for point in curve)
        style = f'fill="none" stroke="{colour}" stroke-width="2"'
        parts.append(f'<polyline points="{line}" {style}/>')
        parts.append(f'<text x="{LEFT + i * 220}" y="40" fill="{colour}">{name}</text>')
        for point, anchor, shift in ((curve[0], "end", -6), (curve[-1], "start", 6)):
            x, y = at(point)
            text = f"{point.speed:,.0f}"
            if (x + shift, text) in {(label[0], label[2]) for label in labels}:
                continue
            y = free(x + shift, y + 4, labels)
            labels.append((x + shift, y, text))
            place = f'x="{x + shift:.0f}" y="{y:.0f}" text-anchor="{anchor}"'
            parts.append(f'<text {place} fill="{colour}">{text}</text>')
    parts.append(f'<text x="{LEFT}" y="{HEIGHT - 5}">GPUs; tok/s of each, predicted</text>')
    return "".join([*parts, "</svg>\n"])


def free(x: float, y: float, labels: Sequence[tuple[float, float, str]]) -> float:
    """The first height from y downwards at which a label at x overlaps no other."""
    taken = sorted(other for at, other, _ in labels if at == x)
    for other in taken:
        if abs(other - y) < LINE:
            y = other + LINE
    return y


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw weak and strong scaling of a config."""
    parser: argparse.ArgumentParser = ArgumentParser(prog="python -m dtron.plan.scaling")
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--base", type=int, required=True, help="GPUs of one copy of the layout")
    parser.add_argument("--most", type=int, default=16384, help="GPUs of the largest run")
    parser.add_argument("--hardware", default="h100", choices=list(HARDWARE))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    given = parser.parse_intermixed_args(arguments)
    config, row = RunConfig.load(given.config, given.overrides, completed), hardware(given.hardware)
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
