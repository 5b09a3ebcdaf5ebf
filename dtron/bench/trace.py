"""Read a profiler trace: classified kernels or operators, and the time window of each step.

GPU traces. A span is a kernel or a copy on the device. Its class comes from its name (CLASSES). An
elementwise kernel or copy that the host launched in the phase "optimizer" or "loss"
(`dtron.run.profiler.phase`) gets the class of that name; correlation ids connect launches and
kernels. A step's window begins at the end of the previous step's last kernel and ends with its own
last kernel, so that windows have no gaps; a trace's first step has no previous step and is left
out.

CPU traces. There are no kernels: a span is the self time of an operator, without the operators that
it calls; for its class see `_inner_class`. Communication is the time marked by gloo's threads,
which share the cores with computation, so overlap on a CPU says little about a GPU. A step's window
is its time on the host.

Times are in microseconds. Names of kernels: cuBLAS (nvjet, gemm, xmma, splitK), CUTLASS, cuDNN and
FlashAttention (flash, fmha, sdpa; cuDNN's before and after its backward), NCCL, symmetric memory
(barriers and signals, which spin), inductor's Triton kernels, whose names list the fused operators.
"""

import bisect
import itertools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dtron.bench.intervals import Interval
from dtron.errors import DataError
from dtron.io.untrusted import TRACE_BYTES, parse, read_bytes
from dtron.run.profiler import MARK

COMMUNICATION = "communication"
COMPUTE = ("GEMM", "attention", "loss", "optimizer", "copies", "elementwise")
"""Classes of computation; of concurrent kernels, the class that is first in this list counts."""

DISPATCH, COLLECTIVES, EXPERTS = "dispatch and combine", "collectives", "experts"
"""Parts of classes: all-to-alls and pulls of tokens (and transfers between pipeline stages, whose
kernels have the same names), other communication of GPUs, and grouped GEMMs."""

# (class, part of the class, pattern). The first row with a matching pattern decides; kernels
# without a match are elementwise.
CLASSES: tuple[tuple[str, str, re.Pattern[str]], ...] = tuple(
    (name, part, re.compile(pattern, re.IGNORECASE))
    for name, part, pattern in (
        (COMMUNICATION, DISPATCH, r"nccl.*SendRecv|^gloo:(all_to_all|send|recv)|^pulled_"),
        (COMMUNICATION, DISPATCH, r"symmetric_memory|barrier_kernel|(put|wait)_signal_kernel"),
        (COMMUNICATION, COLLECTIVES, r"nccl|^gloo:|symm_mem|multimem|(one|two)_shot_all_reduce"),
        (COMMUNICATION, COLLECTIVES, r"PtoP|p2p"),
        # copies to or from the host, such as offload's
        (COMMUNICATION, "copies to or from the host", r"memcpy (HtoD|DtoH)"),
        ("attention", "attention", r"flash|fmha|attention|sdpa"),
        ("attention", "attention", r"cudnn::fusion::(compute_dot_do_o|convert_dq)"),
        ("loss", "loss", r"log_?softmax|prepare_softmax|nll_loss|cross_entropy"),
        ("optimizer", "optimizer", r"adam|sgd"),
        ("copies", "copies", r"memcpy|memset|split_with_sizes_copy|chunk_cat|CatArray|fsdp::"),
        ("copies", "copies", r"multi_tensor_apply.*copy|copy_device|direct_copy"),
        ("copies", "copies", r"aten::(_foreach_)?(copy_|_to_copy|clone|cat)$"),
        ("GEMM", EXPERTS, r"grouped_gemm|GroupProblemShape|triton_tem_.*grouped_mm"),
        ("GEMM", EXPERTS, r"aten::_(scaled_)?grouped_mm"),
        ("GEMM", "GEMM", r"gemm|nvjet|cutlass|cublas|wgmma|xmma|splitk|triton_tem_.*mm"),
        ("GEMM", "GEMM", r"aten::(mm|bmm|addmm|baddbmm|_(scaled_)?(grouped_)?mm(_v2)?)(_out)?$"),
    )
)
# In a phase of _PHASES, the name of the phase replaces these classes.
_UNTOLD = ("elementwise", "copies")
_PHASES = ("optimizer", "loss")
_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCH = ("cuda_runtime", "cuda_driver")
_WAIT = re.compile(r"Synchronize|^cudaMemcpy$|^cudaFree$")
_DISPATCH = re.compile(r"^_?c10d")  # operators that pass a collective to another thread


@dataclass(frozen=True)
class Span:
    """A kernel or operator: its begin and end in microseconds, and its class."""

    begin: float
    end: float
    kind: str
    """A member of COMPUTE, or COMMUNICATION."""
    name: str
    work: tuple[Any, ...]
    """Name, grid, block, input shapes and bytes: equal for spans of identical calls."""
    track: str = ""
    """The CUDA stream, or the thread, that it ran on."""

    @property
    def part(self) -> str:
        """The part of the class, for timelines: a second column of CLASSES, or the class."""
        kind, part = _row(self.name)
        return part if kind == self.kind else self.kind


@dataclass(frozen=True)
class Trace:
    """Spans and windows of one rank's trace."""

    device: str
    """`cuda` or `cpu`."""
    spans: list[Span]
    windows: list[tuple[float, float]]
    """Disjoint windows of the steps, in order."""
    host: tuple[Interval, ...] = ()
    """When the host calls the CUDA runtime; empty for CPU traces."""
    waits: tuple[Interval, ...] = ()
    """Those of these calls that wait for the device."""


def classify(name: str, phase: str = "") -> str:
    """Return the class of a kernel or operator launched in a phase of the step."""
    kind, _ = _row(name)
    return phase if kind in _UNTOLD and phase in _PHASES else kind


def _row(name: str) -> tuple[str, str]:
    """Return the class of a name without phase, and its part."""
    found = (row[:2] for row in CLASSES if row[2].search(name))
    return next(found, ("elementwise", "elementwise"))


def read_trace(path: Path) -> Trace:
    """Read a trace written by `metrics.profile_start`.

    Raises:
        DataError: the file is not a trace, or has no complete step.
    """
    try:
        events = parse(read_bytes(path, TRACE_BYTES))["traceEvents"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}: not a profiler's trace: {error!r}") from None
    try:
        complete = [event for event in events if event.get("ph") == "X"]
        found = any(event.get("cat") in _DEVICE for event in complete)
        trace = _device_trace(complete) if found else _host_trace(complete)
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise DataError(f"{path}: not a profiler's trace: {error!r}") from None
    if not trace.windows:
        raise DataError(f"{path}: no complete step; profile at least {2 if found else 1} steps")
    return trace


class _PhaseMarks:
    """Phases and steps on the host; methods look them up by time."""

    def __init__(self, events: Iterable[Mapping[str, Any]]) -> None:
        marks = [
            event
            for event in events
            if event.get("cat") == "user_annotation" and event["name"].startswith(MARK)
        ]
        spans = sorted((e["ts"], e["ts"] + e["dur"], e["name"].removeprefix(MARK)) for e in marks)
        self.steps = [(begin, end) for begin, end, name in spans if name == "step"]
        self._inner = [span for span in spans if span[2] in _PHASES]
        self._begins = [begin for begin, _, _ in self._inner]
        self._step_begins = [begin for begin, _ in self.steps]

    def phase(self, time: float) -> str:
        """Return the phase at a host time; empty: no phase. Phases do not nest."""
        i = bisect.bisect_right(self._begins, time) - 1
        return self._inner[i][2] if i >= 0 and time <= self._inner[i][1] else ""

    def step(self, time: float) -> int | None:
        """Return the index of the step at a host time; None: outside of steps."""
        i = bisect.bisect_right(self._step_begins, time) - 1
        return i if i >= 0 and time <= self.steps[i][1] else None


# -- GPU -------------------------------------------------------------------------------------------


def _device_trace(events: list[dict[str, Any]]) -> Trace:
    marks = _PhaseMarks(events)
    launches = {
        event["args"]["correlation"]: event["ts"]
        for event in events
        if event.get("cat") in _LAUNCH and "correlation" in event.get("args", {})
    }
    shapes = {
        event["args"]["External id"]: json.dumps(event["args"]["Input Dims"])
        for event in events
        if event.get("cat") == "cpu_op" and "Input Dims" in event.get("args", {})
    }
    spans, ends = [], [0.0] * len(marks.steps)
    for event in events:
        if event.get("cat") not in _DEVICE:
            continue
        arguments = event.get("args", {})
        launched = launches.get(arguments.get("correlation"), event["ts"])
        begin, end = event["ts"], event["ts"] + event["dur"]
        name = event["name"]
        work = (
            name,
            str(arguments.get("grid")),
            str(arguments.get("block")),
            shapes.get(arguments.get("External id")),
            arguments.get("bytes"),
        )
        kind, track = classify(name, marks.phase(launched)), f"stream {event.get('tid')}"
        spans.append(Span(begin, end, kind, name, work, track))
        if (step := marks.step(launched)) is not None:
            ends[step] = max(ends[step], end)
    windows = [(a, b) for a, b in itertools.pairwise(ends) if 0 < a < b]
    calls = [(e["name"], (e["ts"], e["ts"] + e["dur"])) for e in events if e.get("cat") in _LAUNCH]
    waits = (interval for name, interval in calls if _WAIT.search(name))
    return Trace("cuda", spans, windows, tuple(interval for _, interval in calls), tuple(waits))


# -- CPU -------------------------------------------------------------------------------------------


def _host_trace(events: list[dict[str, Any]]) -> Trace:
    marks = _PhaseMarks(events)
    collectives = [
        event
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith("gloo:")
    ]
    spans = [
        Span(e["ts"], e["ts"] + e["dur"], COMMUNICATION, e["name"], (e["name"],), _thread(e["tid"]))
        for e in collectives
    ]
    elsewhere = {event["tid"] for event in collectives}
    threads: dict[Any, list[dict[str, Any]]] = {}
    for event in events:
        if event.get("cat") == "cpu_op" and not _DISPATCH.match(event["name"]):
            threads.setdefault(event["tid"], []).append(event)
    for thread, operators in threads.items():
        # gloo's threads also compute sums, which are marked and count as communication.
        if thread not in elsewhere:
            own = _own_times(operators, marks)
            spans += [replace(span, track=_thread(thread)) for span in own]
    return Trace("cpu", spans, marks.steps)


def _thread(number: Any) -> str:
    return f"thread {number}"


def _own_times(operators: list[dict[str, Any]], marks: _PhaseMarks) -> list[Span]:
    """Return the self times of a thread's operators as spans."""
    spans: list[Span] = []
    around: list[tuple[float, str, str]] = []  # (end, name, class) of the open operators
    at = 0.0

    def close(until: float) -> None:
        nonlocal at
        while around and around[-1][0] <= until:
            end, name, kind = around.pop()
            if end > at:
                spans.append(Span(at, end, kind, name, (name,)))
            at = max(at, end)

    for event in sorted(operators, key=lambda event: (event["ts"], -event["dur"])):
        begin, end, name = event["ts"], event["ts"] + event["dur"], event["name"]
        close(begin)
        if around and begin > at:
            spans.append(Span(at, begin, around[-1][2], around[-1][1], (around[-1][1],)))
        at = max(at, begin)
        kind = classify(name, marks.phase(begin))
        outer = around[-1][2] if around else ""
        around.append((end, name, _inner_class(kind, outer)))
    close(float("inf"))
    return spans


def _inner_class(own: str, around: str) -> str:
    """Return the class of an operator that runs inside an operator of class `around`.

    The class is `around` if `around` is attention, loss or optimizer, or if `own` is elementwise;
    else `own`. `around` "": the operator runs inside no other.
    """
    if around in ("attention", "loss", "optimizer"):
        return around
    return around if own == "elementwise" and around else own
