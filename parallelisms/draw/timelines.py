"""Simulate and draw a pipeline schedule; compute its bubble and peak activation memory.

The time of an action depends only on its kind, all stages are equal, and communication takes no
time. A real run is slower, because of communication and unequal stages.

    python -m dtron.parallelisms.draw.timelines --schedule ZBVZeroBubble --pp 4 --out zbv.svg

The unit of time is the forward of one micro-batch through all stages of a rank, and the unit of
memory is the activations of this forward, so that schedules with different numbers of stages per
rank can be compared.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path

from dtron.errors import ConfigError
from dtron.io.svg import FRAME, element, heading, picture, rect, text
from dtron.parallelisms.pipeline.schedule_ops import COSTS, Kind, Order, Span, execute
from dtron.parallelisms.pipeline.schedules import (
    SCHEDULES,
    Placement,
    order_of,
    read_csv,
    schedule_of,
    stage_ranks,
)


@dataclass(frozen=True)
class Timeline:
    """Start and end of every action of every rank.

    Args:
        spans: actions of each rank; the unit of time is the forward of all stages of a rank.
        stages_per_rank: number of stages per rank, v.
        ranks_of_stage: the rank of each stage.
    """

    spans: tuple[tuple[Span, ...], ...]
    stages_per_rank: int
    ranks_of_stage: tuple[int, ...]

    @property
    def length(self) -> float:
        """Time at which the last action ends."""
        return max((span.end for row in self.spans for span in row), default=0.0)

    @property
    def ideal(self) -> float:
        """Mean compute time of a rank: the length without a bubble."""
        busy = [{(span.start, span.end) for span in row} for row in self.spans]  # a pair: once
        return sum(end - start for row in busy for start, end in row) / len(self.spans)

    @property
    def bubble_of_total(self) -> float:
        """Idle time over the length: (p - 1) / (m + p - 1) for GPipe and 1F1B."""
        return 1 - self.ideal / self.length

    @property
    def bubble_of_ideal(self) -> float:
        """Idle time over compute time: (p - 1) / m for GPipe and 1F1B."""
        return self.length / self.ideal - 1

    @property
    def peak_activations(self) -> tuple[float, ...]:
        """Peak activations of each rank; the unit is one micro-batch through all its stages.

        A stage's activations are live from the start of its F to the end of its B or W.
        """
        return tuple(_peak(row) / self.stages_per_rank for row in self.spans)


def simulate(
    order: Order, ranks_of_stage: Sequence[int], costs: Mapping[Kind, float] = COSTS
) -> Timeline:
    """Simulate an order; every action starts as early as its rank and its inputs allow.

    Args:
        order: actions of every rank; only compute actions take time.
        ranks_of_stage: the rank of each stage.
        costs: time of each compute kind, for all stages of a rank.

    Raises:
        ConfigError: the order deadlocks.
    """
    v = len(ranks_of_stage) // len(order)
    spans = execute(order, len(ranks_of_stage), costs)
    rows = tuple(
        tuple(
            Span(rank, span.action, span.start / v, span.end / v)
            for span in spans
            if span.rank == rank
        )
        for rank in range(len(order))
    )
    return Timeline(rows, v, tuple(ranks_of_stage))


def _peak(row: Sequence[Span]) -> int:
    """Return the largest number of (stage, micro-batch) pairs with live activations."""
    live = peak = 0
    for span in row:
        if span.action.kind is Kind.FORWARD:
            live += 1
            peak = max(peak, live)
        elif span.action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            live -= 1
    return peak


# Colours of a rank's first and last stage; colours of stages between them are interpolated.
COLOURS: dict[Kind, tuple[str, str]] = {
    Kind.FORWARD: ("#3d7fd0", "#a9cdf5"),
    Kind.BACKWARD: ("#c96f16", "#f7cf9b"),
    Kind.INPUT: ("#2f9c8d", "#a3dcd3"),
    Kind.WEIGHT: ("#7b5bb8", "#cfc0ec"),
}
NAMES = {
    Kind.FORWARD: "forward",
    Kind.BACKWARD: "backward",
    Kind.INPUT: "gradient of the input",
    Kind.WEIGHT: "gradient of the weights",
}
LEFT, TOP, ROW, BOTTOM = 58, 34, 26, 48
WIDTH = 1100


def draw(timeline: Timeline, title: str, caption: str = "") -> str:
    """Draw a timeline as a standalone SVG picture.

    The picture has one row per rank and one box per action. A box has the colour of its kind and
    stage, and shows its micro-batch number if there is room.

    Args:
        timeline: result of `simulate`.
        title: the first line, such as the schedule's name.
        caption: the last line; empty: bubble and peak activations.
    """
    scale = (WIDTH - LEFT - 12) / timeline.length
    height = TOP + ROW * len(timeline.spans) + BOTTOM
    kinds = [kind for kind in COLOURS if any(_has(row, kind) for row in timeline.spans)]
    parts = [heading(LEFT, title)]
    for rank, row in enumerate(timeline.spans):
        y, frame = TOP + ROW * rank, rect(0, 0, WIDTH - LEFT - 12, ROW - 2, FRAME)
        boxes = "\n".join([frame, *_boxes(row, timeline, scale)])
        style = {"text_anchor": "middle", "font_size": 10, "transform": f"translate({LEFT},{y})"}
        parts += [text(8, y + 17, f"rank {rank}"), element("g", boxes, **style)]
    parts.append(_legend(kinds, timeline.stages_per_rank, height - 32))
    parts.append(text(LEFT, height - 10, caption or _caption(timeline)))
    return picture(WIDTH, height, parts)


def _has(row: Sequence[Span], kind: Kind) -> bool:
    return any(span.action.kind is kind for span in row)


def _boxes(row: Sequence[Span], timeline: Timeline, scale: float) -> list[str]:
    """Draw the boxes of a rank, with one path and one text per colour to keep the file small."""
    stages = [s for s, rank in enumerate(timeline.ranks_of_stage) if rank == row[0].rank]
    parts = []
    for kind, (chunk, stage) in product(COLOURS, enumerate(stages)):
        spans = [s for s in row if s.action.kind is kind and s.action.stage == stage]
        if not spans:
            continue
        fill, ink = _tone(kind, chunk, len(stages))
        width = min(span.end - span.start for span in spans) * scale
        path = "".join(_box(span, _half(span, row), scale) for span in spans)
        stroke = min(1.0, width / 8)
        parts.append(element("path", fill=fill, stroke="#fff", stroke_width=stroke, d=path))
        for half, y in {None: 16, 0: 10, 1: 22}.items():
            same = [span for span in spans if _half(span, row) == half]
            parts += _micro_batch_numbers(same, ink, scale, y)
    return parts


def _half(span: Span, row: Sequence[Span]) -> int | None:
    """Return the half of the row for an action of an overlapped pair: 0 for the forward, above."""
    if sum(other.start == span.start for other in row) == 1:
        return None
    return int(span.action.kind is not Kind.FORWARD)


def _box(span: Span, half: int | None, scale: float) -> str:
    """Return the path of a box; None: as high as the row."""
    width, height = (span.end - span.start) * scale, ROW - 2 if half is None else ROW // 2 - 1
    return f"M{span.start * scale:.1f} {(half or 0) * height}h{width:.1f}v{height}h-{width:.1f}z"


def _micro_batch_numbers(spans: Sequence[Span], ink: str, scale: float, y: int) -> list[str]:
    """Draw the micro-batch number on each box that is wide enough."""
    parts = []
    for span in spans:
        number, width = str(span.action.micro_batch), (span.end - span.start) * scale
        if width >= 3 + 6 * len(number):
            parts.append(element("tspan", number, x=span.start * scale + width / 2))
    return [element("text", "".join(parts), y=y, fill=ink)] if parts else []


def _tone(kind: Kind, chunk: int, chunks: int) -> tuple[str, str]:
    """Return (colour of a box, colour of the number in the box).

    The first is interpolated between the two colours of the kind.
    """
    part = chunk / (chunks - 1) if chunks > 1 else 0.0
    dark, light = ([int(c[i : i + 2], 16) for i in (1, 3, 5)] for c in COLOURS[kind])
    mixed = [round(d + (n - d) * part) for d, n in zip(dark, light, strict=True)]
    return "#" + "".join(f"{value:02x}" for value in mixed), "#fff" if part < 0.5 else "#222"


def _legend(kinds: Sequence[Kind], chunks: int, y: int) -> str:
    """Draw the legend: a kind's colours, from a rank's first stage to its last, and its name."""
    parts, x = [], LEFT
    for kind in kinds:
        for chunk in range(chunks):
            colour = _tone(kind, chunk, chunks)[0]
            parts.append(rect(x, y - 10, 12, 12, colour))
            x += 13
        parts.append(text(x + 4, y, NAMES[kind]))
        x += 24 + 6 * len(NAMES[kind])
    if chunks > 1:
        parts.append(text(x, y, "(a rank's stages from first to last)"))
    return "".join(parts)


def _caption(timeline: Timeline) -> str:
    peaks = timeline.peak_activations
    where = f"rank {peaks.index(max(peaks))}" if min(peaks) < max(peaks) else "every rank"
    return (
        f"Simulated, without communication. Bubble {timeline.bubble_of_total:.2%} of the time "
        f"({timeline.bubble_of_ideal:.2%} of the computation). Peak activations: {max(peaks):g} "
        f"micro-batches ({where})"
    )


def summary(timeline: Timeline) -> str:
    """Return length, bubble and peak activations as text."""
    peaks = ", ".join(f"{peak:g}" for peak in timeline.peak_activations)
    return (
        f"length            {timeline.length:g} forwards of all stages of a rank (simulated, "
        "without communication)\n"
        f"bubble            {timeline.bubble_of_total:.2%} of the time, "
        f"{timeline.bubble_of_ideal:.2%} of the computation\n"
        f"peak activations  {peaks} micro-batches, by rank"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 after an error in the arguments."""
    args = _parser().parse_args(arguments)
    try:
        timeline = _simulated(args)
        title = f"{args.csv or args.schedule}, {args.pp} ranks, {args.micro_batches} micro-batches"
        if timeline.stages_per_rank > 1:
            title += f", {timeline.stages_per_rank} stages a rank"
        if args.out:
            args.out.write_text(draw(timeline, title), encoding="utf-8")
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(title, summary(timeline), sep="\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dtron.parallelisms.draw.timelines",
        description="Simulate a pipeline schedule, print its bubble and draw it.",
    )
    parser.add_argument("--schedule", default="1F1B", help=", ".join(SCHEDULES))
    parser.add_argument("--csv", type=Path, help="schedule file, one row per rank")
    parser.add_argument(
        "--placement", choices=("loop", "v"), help="placement of the stages of --csv"
    )
    parser.add_argument("--pp", type=int, default=4, help="pipeline ranks")
    parser.add_argument("--stages-per-rank", type=int, help="default: that of the schedule")
    parser.add_argument("--micro-batches", type=int, default=8, help="micro-batches per step")
    parser.add_argument(
        "--overlap", action="store_true", help="run the pairs of DualPipeV together"
    )
    parser.add_argument("--out", type=Path, help="SVG file for the picture")
    return parser


def _simulated(args: argparse.Namespace) -> Timeline:
    p, m = args.pp, args.micro_batches
    if args.csv is None:
        schedule = schedule_of(args.schedule)
        v = args.stages_per_rank or schedule.default_stages
        order = order_of(args.schedule, p, v, m, args.overlap)
        return simulate(order, stage_ranks(schedule.placement, p, v))
    v = args.stages_per_rank or 1
    placement: Placement = args.placement or "loop"
    return simulate(read_csv(args.csv, p, v, m, placement), stage_ranks(placement, p, v))


if __name__ == "__main__":
    sys.exit(main())
