"""Breakdown of the step time from profiler traces, and a lower bound of that time (the ceiling).

Times of one rank (`Budget`). In the window of a step (trace.py), let C be the times at which a
compute kernel runs and M the times at which a communication kernel runs:

    class of computation    times of C at which a kernel of that class runs, and no kernel of a
                            class that is earlier in `trace.COMPUTE`
    exposed                 |M - C|: communication without overlapping computation
    host gaps               window - |C or M|: the device is idle (the host is late, or waits)

These times add up to the window. The following times are included in them:

    overlapped              |M and C|: communication that computation hides
    slow-down               time that overlap adds to computation. For each kernel with more than 5%
                            overlap: its duration minus the median duration of identical kernels
                            (same name, grid, block, shapes) with at most 5% overlap. Kernels that
                            never run alone have no such median and add nothing. `compared` is the
                            fraction of the overlapped kernels' time that has a median. GPUs only.

The time of communication includes waiting for late ranks, since NCCL's kernels spin. All numbers
are means over the traced steps. Tables show the mean, minimum and maximum over ranks.

Ceiling: the step time with the following classes at a lower bound of their time. The bounds are
measured on one idle device right after the run (roofline.py):

    GEMM            time of each matmul of the model's forward and backward, without recomputation,
                    measured at the rank's shapes; not for float8, experts and latent attention
    attention       time of the backend's forward and backward at the rank's shape
    optimizer       bytes that AdamW reads and writes, 28 per float32 parameter of the rank (20 with
                    bfloat16 moments), over the measured bytes per second of a copy
    communication, host gaps    0

Elementwise, loss, copies and classes without a lower bound keep their measured time. The sum is the
time of a step with these kernels, without communication, recomputation, pipeline bubbles and gaps.
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
    """Step time of one rank by class, in milliseconds; `parts` add up to `step`."""

    step: float
    parts: dict[str, float]
    """Milliseconds by class of COMPUTE, EXPOSED and GAPS."""
    overlapped: float
    slow_down: float | None
    compared: float | None
    """Fraction of the overlapped kernels' time for which a slow-down is known."""

    @property
    def hidden(self) -> float | None:
        """Fraction of communication time that is overlapped; None: no communication."""
        whole = self.overlapped + self.parts[EXPOSED]
        return self.overlapped / whole if whole else None


@dataclass(frozen=True)
class Breakdown:
    """Step time of each rank, divided into computation, exposed communication and host gaps."""

    device: str
    steps: int
    """Number of counted steps per rank."""
    ranks: list[Budget]

    @property
    def mean(self) -> Budget:
        """Step time by class, as the mean over ranks."""
        return _mean(self.ranks)

    def as_json(self) -> dict[str, Any]:
        """Return each rank's step time by class, and the mean over ranks."""
        return {**asdict(self), "mean": asdict(self.mean), "hidden": self.mean.hidden}

    @classmethod
    def of_json(cls, written: Mapping[str, Any]) -> Self:
        """Restore a breakdown from `as_json`."""
        ranks = [Budget(**rank) for rank in written["ranks"]]
        return cls(written["device"], written["steps"], ranks)


def read_breakdown(directory: Path) -> Breakdown:
    """Read the breakdown of a run's trace/ directory.

    Raises:
        DataError: no traces exist, or a trace is damaged or has no complete step.
    """
    files = sorted(directory.glob("rank-*.json"), key=lambda file: int(file.stem[5:]))
    if not files:
        raise DataError(f"{directory}: no traces (rank-N.json); set metrics.profile_start")
    traces = [read_trace(file) for file in files]
    steps = min(len(trace.windows) for trace in traces)
    return Breakdown(traces[0].device, steps, [budget(trace) for trace in traces])


def budget(trace: Trace) -> Budget:
    """Compute the step time by class from one rank's trace, as the mean over the traced steps."""
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
    """Return (`slow_down` in milliseconds, summed over all windows; `compared`).

    `compared` None: no kernel overlaps with communication.
    """
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
    """Return the intervals (sorted, disjoint) that may overlap with a span."""
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
    """Return the milliseconds of each part of a step; parts with a lower bound get the bound.

    Args:
        floors: lower bounds in milliseconds, by class (roofline.py).
    """
    nothing = {EXPOSED: 0.0, GAPS: 0.0}
    return {name: {**nothing, **floors}.get(name, value) for name, value in found.parts.items()}


def breakdown_table(found: Breakdown, floors: Mapping[str, float], title: str) -> Table:
    """Build the table of milliseconds per step by class.

    Columns: mean, minimum and maximum over ranks, fraction of the step, ceiling.
    """
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
    row("included: overlapped communication", [b.overlapped for b in own], None)
    lost = [b.slow_down for b in own if b.slow_down is not None]
    if lost:
        row("included: slow-down of computation", lost, None)
    return table


def notes(found: Breakdown) -> list[str]:
    """Return the notes printed under the table."""
    lines = []
    if (hidden := found.mean.hidden) is not None:
        lines.append(f"{hidden:.1%} of communication time is overlapped with computation")
    if found.mean.compared is not None:
        lines.append(
            f"the slow-down is known for {found.mean.compared:.1%} of the overlapped kernels' time"
        )
    if found.device == "cpu":
        lines.append(
            "CPU trace: operators stand for kernels, gloo's threads compete with them for cores, "
            "and gaps are the time outside of operators"
        )
    return lines
