"""A timeline of one step, drawn from a trace of torch.profiler.

    python -m benchmarks.timeline RUN/trace/rank-0.json step.svg

draws the last complete step of a trace that `metrics.profile_start` wrote: a row for each CUDA
stream, and one for the host's calls of the CUDA runtime. Colours are classes of kernels, by the
table of `dtron/bench/trace.py`. `--begin 40 --end 60` draws these milliseconds of the step only.
It prints how much of dispatch and combine overlaps with computation on any stream.

A trace of a CPU has a row for each thread, without a row for the host.
"""

import argparse
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

from dtron.bench.intervals import Interval, intersection, length, union
from dtron.bench.trace import (
    COLLECTIVES,
    COMMUNICATION,
    DISPATCH,
    EXPERTS,
    Span,
    Trace,
    read_trace,
)
from dtron.io.svg import FRAME, heading, key, picture, rect, text

COLOURS = {
    "attention": "#7b3294",
    EXPERTS: "#1a9641",
    "GEMM": "#a6d96a",
    DISPATCH: "#d7191c",
    COLLECTIVES: "#fdae61",
    "copies to or from the host": "#fee08b",
    "optimizer": "#2c7bb6",
    "loss": "#abd9e9",
    "elementwise": "#9a9a9a",
    "copies": "#c8c8c8",
}
"""{class, or part of a class: colour}. Nothing runs where the background is visible."""
LABELS = {EXPERTS: "experts' GEMMs", "GEMM": "other GEMMs", COLLECTIVES: "other collectives"}
HOST = {"calls of the CUDA runtime": "#c8c8c8", "waits for the device": "#d7191c"}
WIDTH, LEFT, TOP, HEIGHT, GAP, LEGEND = 1000, 150, 48, 22, 8, 4

Labelled = tuple[str, Interval]


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw a timeline, and print the overlap of dispatch and combine."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.timeline")
    parser.add_argument("trace", type=Path, help="RUN/trace/rank-N.json")
    parser.add_argument("out", type=Path, help="SVG file to write")
    parser.add_argument("--step", type=int, default=-1, help="index of a step (default: the last)")
    parser.add_argument("--begin", type=float, default=0.0, help="first millisecond of the step")
    parser.add_argument("--end", type=float, help="last millisecond (default: the step's end)")
    given = parser.parse_args(arguments)
    trace = read_trace(given.trace)
    if not -len(trace.windows) <= given.step < len(trace.windows):
        parser.error(f"--step {given.step}: the trace has {len(trace.windows)} complete steps")
    start, stop = trace.windows[given.step]
    end = stop if given.end is None else min(stop, start + 1e3 * given.end)
    window = (start + 1e3 * given.begin, end)
    if window[0] >= window[1]:
        parser.error(f"--begin {given.begin}: nothing is left of the step before --end")
    given.out.write_text(draw(trace, window, start), encoding="utf-8")
    print(overlap_line(trace, window))


def overlap(trace: Trace, window: Interval) -> tuple[float, float]:
    """Return microseconds of (dispatch and combine, those of them with computation)."""
    computed = (s for s in trace.spans if s.kind != COMMUNICATION)
    sent = (s for s in trace.spans if s.part == DISPATCH)
    compute, travel = (union((s.begin, s.end) for s in spans) for spans in (computed, sent))
    travel = intersection(travel, [window])
    return length(travel), length(intersection(travel, compute))


def overlap_line(trace: Trace, window: Interval) -> str:
    """Return the line to print."""
    whole, hidden = overlap(trace, window)
    if not whole:
        return "no dispatch or combine in this window"
    return (
        f"{hidden / whole:.1%} of {whole / 1e3:.2f} ms of dispatch and combine overlap with "
        "computation"
    )


def draw(trace: Trace, window: Interval, origin: float) -> str:
    """Return the timeline of a window as SVG.

    Args:
        origin: time in microseconds that the axis calls 0.
    """
    rows = [(name, [(s.part, (s.begin, s.end)) for s in spans]) for name, spans in tracks(trace)]
    if trace.host:
        calls, waits = HOST
        waited = set(trace.waits)
        rows.append(("host", [(waits if i in waited else calls, i) for i in trace.host]))
    parts = [heading(12, f"{(window[1] - window[0]) / 1e3:.2f} ms of a step, {trace.device}")]
    for number, (name, labelled) in enumerate(rows):
        y = TOP + number * (HEIGHT + GAP)
        parts += [text(12, y + 15, name), rect(LEFT, y, WIDTH, HEIGHT, FRAME)]
        parts += bars(columns(labelled, window), y)
    bottom = TOP + len(rows) * (HEIGHT + GAP)
    parts += axis(window, origin, bottom + 12)
    shown = {LABELS.get(name, name): colour for name, colour in COLOURS.items()}
    shown |= {f"host: {name}": colour for name, colour in HOST.items() if trace.host}
    for number, (name, colour) in enumerate(shown.items()):
        x, line = LEFT + number % LEGEND * (WIDTH // LEGEND), number // LEGEND
        parts.append(key(x, bottom + 44 + 18 * line, colour, name))
    height = bottom + 44 + 18 * -(-len(shown) // LEGEND)
    return picture(LEFT + WIDTH + 20, height, parts)


def tracks(trace: Trace) -> list[tuple[str, list[Span]]]:
    """Return streams or threads with their spans; those that mostly compute come first."""
    by_track: dict[str, list[Span]] = {}
    for span in trace.spans:
        by_track.setdefault(span.track, []).append(span)

    def computed(spans: Iterable[Span]) -> float:
        return sum((s.end - s.begin) * (1 if s.kind != COMMUNICATION else -1) for s in spans)

    return sorted(by_track.items(), key=lambda item: -computed(item[1]))


def columns(labelled: Iterable[Labelled], window: Interval) -> list[str]:
    """Return for each pixel of a row the label that takes most of its time; "": nothing runs."""
    begin, width = window[0], (window[1] - window[0]) / WIDTH
    times: list[dict[str, float]] = [{} for _ in range(WIDTH)]
    for label, interval in labelled:
        for start, end in intersection([interval], [window]):
            last = min(int((end - begin) / width), WIDTH - 1)
            for i in range(int((start - begin) / width), last + 1):
                inside = min(end, begin + (i + 1) * width) - max(start, begin + i * width)
                times[i][label] = times[i].get(label, 0.0) + max(inside, 0.0)
    for each in times:
        each[""] = width - sum(each.values())
    return [max(each, key=lambda label: each[label]) for each in times]


def bars(labels: Sequence[str], y: float) -> list[str]:
    """Return a box for each run of equal labels."""
    found, x = [], LEFT
    for label, run in itertools.groupby(labels):
        width = len(list(run))
        if label:
            found.append(rect(x, y, width, HEIGHT, {**COLOURS, **HOST}[label]))
        x += width
    return found


def axis(window: Interval, origin: float, y: float) -> list[str]:
    """Return five times in milliseconds below the rows."""
    times = [window[0] + i * (window[1] - window[0]) / 4 for i in range(5)]
    return [
        text(LEFT + i * WIDTH / 4, y, f"{(at - origin) / 1e3:.2f} ms", text_anchor="middle")
        for i, at in enumerate(times)
    ]


if __name__ == "__main__":
    main()
