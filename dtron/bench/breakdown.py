"""Breakdown of a step's time from profiler traces, and its distance from a ceiling.

Budget of one rank. In the window of a step (trace.py), let C be the times at which a compute kernel
runs and M those at which a communication kernel runs:

    class of computation    times of C at which a kernel of that class runs, and none of a class
                            before it in `trace.COMPUTE`
    exposed                 |M - C|: communication without overlapping computation
    host gaps               window - |C or M|: the device does nothing (a late host, or a wait)

These add up to the window. The following are parts of them:

    overlapped              |M and C|: communication that is hidden
    slow-down               time that overlap costs computation: over kernels with more than 5%
                            overlap, duration minus the median duration of spans with the same work
                            (name, grid, block, shapes) and less than 5% overlap. Kernels that never
                            run alone have no such median and add nothing; `compared` is the
                            fraction of the overlapped kernels' time that has one. Unknown on a CPU.

The time of communication includes waiting for ranks that are late: NCCL's kernels spin. All
numbers are means over the traced steps; then mean, smallest and largest of the ranks.

Ceiling. A class's time is replaced by a floor if that can be measured on one idle device right
after the run (roofline.py):

    GEMM            each matmul of the model's forward and backward at the rank's own shapes,
                    once, without recomputation: its FLOPs at the rate measured for that shape;
                    none where layers multiply in float8
    attention       the backend's forward and backward at the rank's own shape
    optimizer       the bytes that AdamW reads and writes, 28 per float32 parameter of the rank, 20
                    with bfloat16 moments, at the measured rate of a copy
    communication, host gaps    0

Elementwise, loss, copies and classes without a floor keep their measured time. The sum is the time
of a step with these kernels but without communication, recomputation, pipeline bubbles and gaps.
"""

import bisect
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

from rich.table import Table

from dtron.bench.intervals import Intervals, difference, intersection, length, union
from dtron.bench.trace import COMMUNICATION, COMPUTE, Span, Trace, read_trace
from dtron.errors import DataError

_ALONE = 0.05
EXPOSED, GAPS = "exposed communication", "host gaps"


@dataclass(frozen=True)
class Budget:
    """Milliseconds of one step: `parts` add up to `step`."""

    step: float
    parts: dict[str, float]
    """Milliseconds by class of COMPUTE, EXPOSED and GAPS."""
    overlapped: float
    slow_down: float | None
    compared: float | None
    """Fraction of the overlapped kernels' time whose slow-down is known."""

    @property
    def hidden(self) -> float | None:
        """Fraction of communication that is overlapped; None: no communication."""
        whole = self.overlapped + self.parts[EXPOSED]
        return self.overlapped / whole if whole else None


@dataclass(frozen=True)
class Breakdown:
    """Budgets of all ranks."""

    device: str
    steps: int
    """Number of counted steps per rank."""
    ranks: list[Budget]

    @property
    def mean(self) -> Budget:
        """Means over ranks."""
        return _mean(self.ranks)

    @property
    def hidden(self) -> float | None:
        """Fraction of all ranks' communication that is overlapped."""
        return self.mean.hidden

    def as_json(self) -> dict[str, Any]:
        """All budgets, and their mean."""
        return {**asdict(self), "mean": asdict(self.mean), "hidden": self.hidden}

    @classmethod
    def of_json(cls, written: Mapping[str, Any]) -> Self:
        """Restore a breakdown from `as_json`."""
        ranks = [Budget(**rank) for rank in written["ranks"]]
        return cls(written["device"], written["steps"], ranks)


def read_breakdown(directory: Path) -> Breakdown:
    """Read the breakdown of a run's trace/ directory.

    Raises:
        DataError: there are no traces, or one holds no whole step.
    """
    files = sorted(directory.glob("rank-*.json"), key=lambda file: int(file.stem[5:]))
    if not files:
        raise DataError(f"{directory}: no traces (rank-N.json); set metrics.profile_start")
    traces = [read_trace(file) for file in files]
    steps = min(len(trace.windows) for trace in traces)
    return Breakdown(traces[0].device, steps, [budget(trace) for trace in traces])


def budget(trace: Trace) -> Budget:
    """Compute the budget of one rank's trace, as the mean over its steps."""
    slow_down = _slow_down(trace) if trace.device == "cuda" else None
    steps = [_of_window(trace.spans, window) for window in trace.windows]
    mean = _mean(steps)
    if slow_down is None:
        return mean
    lost, compared = slow_down
    return replace(mean, slow_down=lost / len(steps), compared=compared)


def _of_window(spans: Sequence[Span], window: tuple[float, float]) -> Budget:
    whole: Intervals = [window]
    by_class = {
        kind: intersection(union((s.begin, s.end) for s in spans if s.kind == kind), whole)
        for kind in (*COMPUTE, COMMUNICATION)
    }
    communication = by_class[COMMUNICATION]
    parts: dict[str, float] = {}
    compute: Intervals = []
    for kind in COMPUTE:
        parts[kind] = length(difference(by_class[kind], compute))
        compute = union([*compute, *by_class[kind]])
    parts[EXPOSED] = length(difference(communication, compute))
    parts[GAPS] = window[1] - window[0] - length(union([*compute, *communication]))
    overlapped = length(intersection(communication, compute))
    return Budget(
        (window[1] - window[0]) / 1e3,
        {name: value / 1e3 for name, value in parts.items()},
        overlapped / 1e3,
        None,
        None,
    )


def _slow_down(trace: Trace) -> tuple[float, float | None]:
    """Milliseconds that overlap added to kernels in all windows, and the fraction of their time
    that could be compared (None: no overlap)."""
    first, last = trace.windows[0][0], trace.windows[-1][1]
    inside = [span for span in trace.spans if first <= span.begin and span.end <= last]
    communication = union((s.begin, s.end) for s in inside if s.kind == COMMUNICATION)
    alone: dict[tuple[Any, ...], list[float]] = {}
    overlapped: list[Span] = []
    for span in inside:
        duration = span.end - span.begin
        if span.kind == COMMUNICATION or duration <= 0:
            continue
        shared = length(intersection([(span.begin, span.end)], _candidates(communication, span)))
        if shared > _ALONE * duration:
            overlapped.append(span)
        else:
            alone.setdefault(span.work, []).append(duration)
    medians = {work: statistics.median(durations) for work, durations in alone.items()}
    known = [span for span in overlapped if span.work in medians]
    lost = sum(span.end - span.begin - medians[span.work] for span in known)
    time = sum(span.end - span.begin for span in overlapped)
    return lost / 1e3, sum(s.end - s.begin for s in known) / time if time else None


def _candidates(intervals: Intervals, span: Span) -> Intervals:
    """Return the disjoint intervals that may overlap a span."""
    first = max(bisect.bisect_right(intervals, (span.begin, float("inf"))) - 1, 0)
    return intervals[first : bisect.bisect_left(intervals, (span.end,))]


def _mean(budgets: Sequence[Budget]) -> Budget:
    def mean(values: Sequence[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.fmean(known) if known else None

    return Budget(
        statistics.fmean(b.step for b in budgets),
        {name: statistics.fmean(b.parts[name] for b in budgets) for name in budgets[0].parts},
        statistics.fmean(b.overlapped for b in budgets),
        mean([b.slow_down for b in budgets]),
        mean([b.compared for b in budgets]),
    )


def ceiling(found: Budget, floors: Mapping[str, float]) -> dict[str, float]:
    """Milliseconds of each part at its floor.

    Args:
        floors: milliseconds measured without overlap, by class (roofline.py).
    """
    nothing = {EXPOSED: 0.0, GAPS: 0.0}
    return {name: {**nothing, **floors}.get(name, value) for name, value in found.parts.items()}


def breakdown_table(found: Breakdown, floors: Mapping[str, float], title: str) -> Table:
    """Build the table of milliseconds per step by class: mean, minimum and maximum over ranks,
    share, ceiling."""
    mean, own = found.mean, found.ranks
    limit = ceiling(mean, floors) if floors else {}
    table = Table(title=title, title_justify="left")
    for heading in ("class", "ms", "least", "most", "share", "ceiling ms", "above it"):
        table.add_column(heading, justify="left" if heading == "class" else "right")

    def row(name: str, values: Sequence[float], floor: float | None) -> None:
        value = statistics.fmean(values)
        measured = name in floors or name in (EXPOSED, GAPS) or name == "step"
        known = floor is not None and measured
        cells = [f"{value:.2f}", f"{min(values):.2f}", f"{max(values):.2f}"]
        cells += [f"{value / mean.step:.1%}"]
        cells += [f"{floor:.2f}" if floor is not None else "–"]
        cells += [f"{value - floor:.2f}" if known and floor is not None else "–"]
        table.add_row(name, *cells)

    for name in mean.parts:
        row(name, [b.parts[name] for b in own], limit.get(name))
    table.add_section()
    row("step", [b.step for b in own], sum(limit.values()) if limit else None)
    table.add_section()
    row("of it: overlapped communication", [b.overlapped for b in own], None)
    lost = [b.slow_down for b in own if b.slow_down is not None]
    if lost:
        row("of it: slow-down of compute", lost, None)
    return table


def notes(found: Breakdown) -> list[str]:
    """Return the notes printed under the table."""
    lines = []
    if found.hidden is not None:
        lines.append(f"{found.hidden:.1%} of communication time is overlapped with computation")
    if found.mean.compared is not None:
        lines.append(
            f"the slow-down is known for {found.mean.compared:.1%} of the overlapped kernels' time"
        )
    if found.device == "cpu":
        lines.append(
            "a CPU's trace: operators stand for kernels, gloo's threads share the cores, and gaps "
            "are time outside of operators"
        )
    return lines
