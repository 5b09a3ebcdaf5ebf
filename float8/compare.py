"""Compare the loss curves of two runs, such as bf16 and float8: draw them, print their final gap.

    python -m dtron.float8.compare runs/bf16 runs/float8 --out compare.svg

reads the metrics.jsonl of both runs. The gap is (second - first) / first of the mean losses over
the last steps that both runs have logged.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dtron.errors import ConfigError, cause_of
from dtron.io.svg import element, picture, text
from dtron.io.untrusted import TEXT_BYTES, parse, read_text

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 380, 56, 40, 16, 40
INKS = ("#1f77b4", "#d62728")


@dataclass(frozen=True)
class Curve:
    """Training losses by step, and the last validation loss, of one run."""

    name: str
    losses: dict[int, float]
    """Logged step -> loss."""
    validation: float | None
    """The last validation loss; None: no validation loss was logged."""


@dataclass(frozen=True)
class Comparison:
    """Two curves over the steps that both runs have logged."""

    first: Curve
    second: Curve
    steps: tuple[int, ...]
    last: int
    """Number of last steps to average."""

    @property
    def means(self) -> tuple[float, float]:
        """Mean loss of each run over the last steps."""
        steps = self.steps[-self.last :]
        one, two = (sum(c.losses[s] for s in steps) for c in (self.first, self.second))
        return one / len(steps), two / len(steps)

    @property
    def gap(self) -> float:
        """Relative difference of the mean losses, (second - first) / first."""
        one, two = self.means
        return (two - one) / one

    def summary(self) -> str:
        """Return the losses and the gap, one line each."""
        n = len(self.steps[-self.last :])
        lines = [
            f"{curve.name}  loss {mean:.4f} over the last {n} common steps"
            + ("" if curve.validation is None else f", held-out {curve.validation:.4f}")
            for curve, mean in zip((self.first, self.second), self.means, strict=True)
        ]
        return "\n".join([*lines, f"gap {self.gap:+.2%}"])


def read_curve(run: Path) -> Curve:
    """Read the losses of a run directory.

    Raises:
        ConfigError: the directory has no metrics.jsonl, or the file has no loss.
    """
    path = run / "metrics.jsonl"
    try:
        rows = [parse(line) for line in read_text(path, TEXT_BYTES).splitlines()]
    except (OSError, ValueError) as error:
        cause = cause_of(error, path)
        raise ConfigError(f"{path} cannot be read: {cause}; name a run directory") from None
    rows = [row for row in rows if isinstance(row, dict) and type(row.get("step")) is int]
    numbers = (int, float)
    losses = {row["step"]: row["loss"] for row in rows if type(row.get("loss")) in numbers}
    if not losses:
        raise ConfigError(f"{path} has no loss; wait until the run has logged a step")
    held_out = [
        row["validation_loss"] for row in rows if type(row.get("validation_loss")) in numbers
    ]
    return Curve(run.name, losses, held_out[-1] if held_out else None)


def compare(first: Path, second: Path, last: int = 50) -> Comparison:
    """Compare two run directories over the last steps that both have logged.

    Raises:
        ConfigError: `last` is less than 1, a run has no losses, or the runs share no step.
    """
    if last < 1:
        raise ConfigError(f"--last = {last} is less than 1; use 1 or more")
    one, two = read_curve(first), read_curve(second)
    steps = tuple(sorted(one.losses.keys() & two.losses.keys()))
    if not steps:
        raise ConfigError(f"{first} and {second} have no logged step in common; use longer runs")
    return Comparison(one, two, steps, last)


def draw(found: Comparison) -> str:
    """Draw both curves as a self-contained SVG with a white background."""
    curves = (found.first, found.second)
    values = [curve.losses[step] for curve in curves for step in found.steps]
    low, high = min(values), max(values)
    parts = _axes(found.steps, low, high)
    for number, (curve, ink) in enumerate(zip(curves, INKS, strict=True)):
        points = " ".join(
            "{:.1f},{:.1f}".format(*_place(found.steps, low, high, step, curve.losses[step]))
            for step in found.steps
        )
        parts.append(element("polyline", points=points, fill="none", stroke=ink, stroke_width=1.5))
        parts.append(text(LEFT + 180 * number, 18, curve.name, fill=ink))
    parts.append(text(WIDTH - RIGHT, 18, f"gap {found.gap:+.2%}", text_anchor="end"))
    return picture(WIDTH, HEIGHT, parts)


def _place(
    steps: Sequence[int], low: float, high: float, step: int, loss: float
) -> tuple[float, float]:
    """Return the coordinates (x, y) of a point in the SVG."""
    along = (step - steps[0]) / max(1, steps[-1] - steps[0])
    up = (loss - low) / (high - low or 1.0)
    return (
        LEFT + along * (WIDTH - LEFT - RIGHT),
        HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM),
    )


def _axes(steps: Sequence[int], low: float, high: float) -> list[str]:
    bottom = HEIGHT - BOTTOM
    corner = f"M{LEFT} {TOP}V{bottom}H{WIDTH - RIGHT}"
    lines = [element("path", d=corner, fill="none", stroke="#888")]
    for i in range(5):
        loss = low + (high - low) * i / 4
        y = _place(steps, low, high, steps[0], loss)[1]
        lines.append(text(LEFT - 6, y + 4, f"{loss:.2f}", text_anchor="end"))
    for step in sorted({steps[0], steps[-1]}):
        x = _place(steps, low, high, step, low)[0]
        lines.append(text(x, bottom + 18, step, text_anchor="middle"))
    middle = (LEFT + WIDTH - RIGHT) / 2
    return [*lines, text(middle, bottom + 18, "step", text_anchor="middle")]


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare runs from the command line; return 0, or 2 after an error."""
    parser = argparse.ArgumentParser(
        prog="python -m dtron.float8.compare", description="Compare two runs' loss curves."
    )
    parser.add_argument("first", type=Path, help="run directory, such as that of bf16")
    parser.add_argument("second", type=Path, help="run directory, such as that of float8")
    parser.add_argument("--last", type=int, default=50, help="number of last steps to average")
    parser.add_argument("--out", type=Path, help="path of the picture to write, an SVG file")
    args = parser.parse_args(arguments)
    try:
        found = compare(args.first, args.second, args.last)
        if args.out:
            args.out.write_text(draw(found), encoding="utf-8")
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(found.summary())
    return 0


if __name__ == "__main__":
    sys.exit(main())
