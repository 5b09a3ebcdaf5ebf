"""Measure how much overlapped computation and collectives slow each other down.

Each kind of computation is called repeatedly on one stream and a collective on another; both are
queued before either begins, and both fill a window of time. The mean time of calls inside the other
stream's window is compared with that of calls that run alone. All ranks measure at the same time.

The collectives are FSDP's: all-gathers in bfloat16 and reduce-scatters in float32, on a stream of
FSDP's priority.
"""

import functools
import itertools
import math
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from dtron.bench.kernels.problems import PROBLEMS
from dtron.bench.measure import seconds
from dtron.errors import TrainingError
from dtron.kernels.grouped import grouped_gradient, grouped_matmul
from dtron.plan.measure_hardware import Calibration, collective_call, fastest

Kinds = tuple[tuple[str, tuple[int, ...]], ...]
DTYPE = torch.bfloat16
WORK: Mapping[str, Kinds] = {
    # Matmuls (m, k, n): a feed-forward of Llama-3-8B, a narrow one. Grouped matmuls (groups, tokens
    # per group, k, n): experts with few tokens and with more. Attention has the shapes of dtron
    # bench kernels. Copies: elements.
    "cuda": (
        ("matmul", (8192, 4096, 14336)),
        ("matmul", (2048, 2048, 1408)),
        ("grouped_matmul", (32, 384, 2048, 1408)),
        ("grouped_matmul", (32, 1536, 2048, 1408)),
        ("grouped_matmul_gradient", (32, 384, 2048, 1408)),
        ("grouped_matmul_gradient", (32, 1536, 2048, 1408)),
        ("attention", (1, 8192, 32, 8, 128)),
        ("attention_backward", (1, 8192, 32, 8, 128)),
        ("copy", (2**28,)),
    ),
    "cpu": (
        ("matmul", (256, 128, 256)),
        ("grouped_matmul", (2, 32, 64, 64)),
        ("grouped_matmul_gradient", (2, 32, 64, 64)),
        ("attention", (1, 128, 4, 2, 64)),
        ("attention_backward", (1, 128, 4, 2, 64)),
        ("copy", (2**20,)),
    ),
}
SENT = (("all_gather", torch.bfloat16), ("reduce_scatter", torch.float32))
SIZES: Mapping[str, tuple[int, ...]] = {"cuda": (2**26, 2**28), "cpu": (2**16,)}
"""Sizes of the collectives: bytes of a rank's input or output, whichever is larger."""
WINDOW: Mapping[str, float] = {"cuda": 0.02, "cpu": 0.002}
"""Seconds of queued computation without overlap; collectives are queued for twice as long."""
REPEATS = 3
_CALLS = range(8, 301)
_FILLER = (8192, 40)
"""(rows of square bfloat16 matrices, number of their matmuls) that keep a GPU busy for at least 50
ms, while the host queues a window."""

Call = Callable[[], Any]
Marks = list[float]
"""Times in seconds: when a stream's first call began, and when each call ended."""


def measure_overlap(made: Calibration, group: Any, device: torch.device) -> None:
    """Measure seconds per call of computations and collectives, alone and overlapped.

    The results are added to `Calibration.overlap`, one row per pair.

    Args:
        group: the ranks that communicate; each of them calls this.
    Raises:
        TrainingError: the collectives end before one call of the computation does, even if 8
            times as many are queued.
    """
    lanes = _ConcurrentCalls(group, device)
    sends = [
        (kind, size, collective_call(kind, size, group, device, dtype))
        for kind, dtype in SENT
        for size in SIZES[device.type]
    ]
    apart = [lanes.alone(call) for _, _, call in sends]
    for kind, shape in WORK[device.type]:
        work = _work(kind, shape, device, made.attention)
        alone = lanes.alone(work)
        for (sent, size, call), sent_alone in zip(sends, apart, strict=True):
            both = lanes.together(work, alone, call, sent_alone)
            what = {"work": kind, "shape": shape, "collective": sent, "bytes": size}
            times = {"alone": alone, "overlapped": both[0]}
            times |= {"collective_alone": sent_alone, "collective_overlapped": both[1]}
            made.overlap.append({**what, "ranks": dist.get_world_size(group), **times})


POOLED = {"grouped_matmul_gradient": "grouped_matmul", "attention_backward": "attention"}
"""Measured kinds of computation -> kinds of the planner (`dtron.plan.compute_time.Work`)."""


def overlap_fields(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the field `Hardware.overlap` from the rows of `Calibration.overlap`.

    Its fractions, at most 1, are the parts of their full rates that a computation and a collective
    keep while they overlap: means over the measured shapes and sizes.
    """
    shares: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        work = str(row["work"])
        kind = POOLED.get(work, work)
        both = (
            row["alone"] / row["overlapped"],
            row["collective_alone"] / row["collective_overlapped"],
        )
        shares.setdefault((kind, row["collective"]), []).append(both)
    found = tuple(
        (*key, *(min(1.0, statistics.fmean(each)) for each in zip(*pairs, strict=True)))
        for key, pairs in shares.items()
    )
    return {"overlap": found} if found else {}


def _work(
    kind: str, shape: Sequence[int], device: torch.device, kernels: Sequence[Mapping[str, Any]]
) -> Call:
    """Return a function that runs one kind of computation once.

    Attention uses the fastest of `kernels`.
    """
    if kind.startswith("attention"):
        return _attention(kind, tuple(shape), device, kernels)
    draw = functools.partial(torch.randn, dtype=DTYPE, device=device)
    if kind == "copy":
        source = draw(*shape)
        target = torch.empty_like(source)
        return lambda: torch.mul(source, 2, out=target)
    if kind == "matmul":
        m, k, n = shape
        x, weight, out = draw(m, k), draw(n, k), draw(m, n)
        return lambda: torch.mm(x, weight.t(), out=out)
    groups, each, k, n = shape
    ends = torch.arange(1, groups + 1, dtype=torch.int32, device=device) * each
    rows, gradient = draw(groups * each, k), draw(groups * each, n)
    if kind == "grouped_matmul_gradient":
        return lambda: grouped_gradient(gradient, rows, ends)
    weights = draw(groups, n, k)
    return lambda: grouped_matmul(rows, weights, ends)


def _attention(
    kind: str,
    shape: tuple[int, ...],
    device: torch.device,
    kernels: Sequence[Mapping[str, Any]],
) -> Call:
    problem, best = PROBLEMS["attention"], fastest(kernels, shape)
    (row,) = (each for each in problem.rows if each.name == best["kernel"])
    *_, (forward, backward) = row.calls(problem.draw(shape, DTYPE, device))
    return forward if kind == "attention" else backward


class _ConcurrentCalls:
    """Times a computation and a collective, each alone and then both overlapped."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.window = WINDOW[device.type]

    def alone(self, call: Call) -> float:
        """Return the seconds per call without overlap, on the slowest rank."""
        # The number of calls is the same on all ranks, as collectives need.
        once = self._slowest(seconds(call, self.device, 5))
        calls = self._calls(self.window / once)
        # The first collective waits for the slowest rank and is left out.
        found = (_inside_window(self._run(call, calls, None, 0)[0][1:]) for _ in range(REPEATS))
        return self._slowest(statistics.median(map(statistics.fmean, found)))

    def together(
        self, work: Call, alone: float, send: Call, sent_alone: float
    ) -> tuple[float, float]:
        """Return the seconds per call of (computation, collective) while both run.

        Only calls inside the other stream's window count. The times are those of the slowest rank.
        """
        calls = self._calls(self.window / alone)
        sends = 2 * math.ceil(calls * alone / sent_alone) + 2
        found = [self._inside(work, calls, send, sends) for _ in range(REPEATS)]
        worked, sent = (statistics.median(each) for each in zip(*found, strict=True))
        return self._slowest(worked), self._slowest(sent)

    def _inside(self, work: Call, calls: int, send: Call, sends: int) -> tuple[float, float]:
        for times in (1, 2, 4, 8):
            worked, sent = self._run(work, calls * times, send, sends * times)
            means = _inside_window(worked, sent[1:]), _inside_window(sent[1:], worked)
            if self._slowest(float(not all(means))) == 0:
                return statistics.fmean(means[0]), statistics.fmean(means[1])
        raise TrainingError(
            "no call of work lies inside a window of collectives; calibrate on an idle machine"
        )

    def _run(self, work: Call, calls: int, send: Call | None, sends: int) -> tuple[Marks, Marks]:
        dist.barrier(self.group)
        run = _on_streams if self.device.type == "cuda" else _on_threads
        return run(work, calls, send, sends, self.device)

    def _calls(self, wanted: float) -> int:
        return min(_CALLS[-1], max(_CALLS[0], math.ceil(wanted)))

    def _slowest(self, value: float) -> float:
        most = torch.tensor([value], device=self.device)
        dist.all_reduce(most, dist.ReduceOp.MAX, self.group)
        return float(most)


def _inside_window(
    marks: Sequence[float], other: Sequence[float] = (-math.inf, math.inf)
) -> list[float]:
    """Return the seconds of each call that lies inside the other stream's window."""
    pairs = itertools.pairwise(marks)
    return [end - begin for begin, end in pairs if other[0] <= begin and end <= other[-1]]


def _on_streams(
    work: Call, calls: int, send: Call | None, sends: int, device: torch.device
) -> tuple[Marks, Marks]:
    own, other = torch.cuda.current_stream(device), torch.cuda.Stream(device, priority=-1)
    _keep_busy(device)
    gate = _mark(own)
    other.wait_event(gate)
    lanes = ((own, work, calls), (other, send, sends))
    marks = tuple([_mark(stream)] for stream, _, _ in lanes)
    order = [(i / lane[2], place) for place, lane in enumerate(lanes) for i in range(lane[2])]
    for _, place in sorted(order):
        stream, call, _ = lanes[place]
        assert call is not None
        with torch.cuda.stream(stream):
            call()
        marks[place].append(_mark(stream))
    torch.cuda.synchronize(device)
    first, second = ([gate.elapsed_time(mark) / 1e3 for mark in lane] for lane in marks)
    return first, second


def _keep_busy(device: torch.device) -> None:
    """Keep the current stream busy for 50 ms or more."""
    rows, products = _FILLER
    x = torch.zeros(rows, rows, device=device, dtype=torch.bfloat16)
    out = torch.empty_like(x)
    for _ in range(products):
        torch.mm(x, x, out=out)


def _mark(stream: torch.cuda.Stream) -> torch.cuda.Event:
    event = torch.cuda.Event(enable_timing=True)
    event.record(stream)
    return event


def _on_threads(
    work: Call, calls: int, send: Call | None, sends: int, _device: torch.device
) -> tuple[Marks, Marks]:
    """Run computation and collectives on two threads.

    The collectives wait for other ranks; the computation continues until they are done.
    """
    first, second = [time.perf_counter()], [time.perf_counter()]
    thread = threading.Thread(target=_repeat, args=(send, sends, second))
    thread.start()
    _repeat(work, calls, first)
    while thread.is_alive():
        _repeat(work, 1, first)
    return first, second


def _repeat(call: Call, calls: int, marks: Marks) -> None:
    for _ in range(calls):
        call()
        marks.append(time.perf_counter())
