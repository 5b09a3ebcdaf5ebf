"""What work and collectives that run at the same time take from each other.

Each kind of work is called again and again on one stream and a collective on another, both queued
before either begins, and both for the whole of a window. Of calls that lie inside of the other's
window the mean is compared with that of calls alone. All ranks measure at the same time.

The collectives are FSDP's: gathers in bfloat16 and reductions in float32, on a stream of the
priority that FSDP gives its own.
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

from dtron.bench.kernel_cases import PROBLEMS
from dtron.bench.measure import seconds
from dtron.errors import TrainingError
from dtron.kernels.grouped import grouped_gradient, grouped_matmul
from dtron.plan.measure_hardware import Calibration, collective_call

Kinds = tuple[tuple[str, tuple[int, ...]], ...]
DTYPE = torch.bfloat16
WORK: Mapping[str, Kinds] = {
    # Products (m, k, n): a feed-forward of Llama-3-8B, a narrow one. Grouped ones (groups, rows of
    # each, k, n): experts with few rows and with more. Attention as dtron bench kernels has it.
    # Copies: elements.
    "cuda": (
        ("product", (8192, 4096, 14336)),
        ("product", (2048, 2048, 1408)),
        ("grouped", (32, 384, 2048, 1408)),
        ("grouped", (32, 1536, 2048, 1408)),
        ("grouped_gradient", (32, 384, 2048, 1408)),
        ("grouped_gradient", (32, 1536, 2048, 1408)),
        ("attention", (1, 8192, 32, 8, 128)),
        ("attention_backward", (1, 8192, 32, 8, 128)),
        ("copy", (2**28,)),
    ),
    "cpu": (
        ("product", (256, 128, 256)),
        ("grouped", (2, 32, 64, 64)),
        ("grouped_gradient", (2, 32, 64, 64)),
        ("attention", (1, 128, 4, 2, 64)),
        ("attention_backward", (1, 128, 4, 2, 64)),
        ("copy", (2**20,)),
    ),
}
SENT = (("all_gather", torch.bfloat16), ("reduce_scatter", torch.float32))
SIZES: Mapping[str, tuple[int, ...]] = {"cuda": (2**26, 2**28), "cpu": (2**16,)}
"""Bytes of a collective, as `Hardware.collective` counts them."""
WINDOW: Mapping[str, float] = {"cuda": 0.02, "cpu": 0.002}
"""Seconds of work alone; of collectives twice as many."""
REPEATS = 3
_CALLS = range(8, 301)
_HELD = (8192, 40)
"""Rows of square matrices in bfloat16, and products of them that keep a GPU busy for 50 ms or more,
in which the host queues a window."""

Call = Callable[[], Any]
Marks = list[float]
"""Seconds when a lane's first call began, and when each ended."""


def measure_beside(made: Calibration, group: Any, device: torch.device) -> None:
    """Rows of `Calibration.beside`: seconds a call of each work and collective, alone and together.

    Args:
        group: the ranks that send, each of which calls this.
    Raises:
        TrainingError: a collective is over before a call of the work is, however many there are.
    """
    lanes = _Lanes(group, device)
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
            times = {"alone": alone, "beside": both[0]}
            times |= {"collective_alone": sent_alone, "collective_beside": both[1]}
            made.beside.append({**what, "ranks": dist.get_world_size(group), **times})


POOLED = {"grouped_gradient": "grouped", "attention_backward": "attention"}
"""Kinds of work that are one to the planner (`dtron.plan.compute_time.Work`)."""


def beside_fields(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The field of Hardware that rows of `Calibration.beside` give: means over shapes and sizes of
    the shares of their rates that work and collectives have beside each other, 1 at most."""
    shares: dict[tuple[str, str], list[tuple[float, float]]] = {}
    for row in rows:
        work = str(row["work"])
        kind = POOLED.get(work, work)
        both = row["alone"] / row["beside"], row["collective_alone"] / row["collective_beside"]
        shares.setdefault((kind, row["collective"]), []).append(both)
    found = tuple(
        (*key, *(min(1.0, statistics.fmean(each)) for each in zip(*pairs, strict=True)))
        for key, pairs in shares.items()
    )
    return {"beside": found} if found else {}


def _work(
    kind: str, shape: Sequence[int], device: torch.device, kernels: Sequence[Mapping[str, Any]]
) -> Call:
    """One call of a kind of work; of attention by the kernel that took least time of `kernels`."""
    if kind.startswith("attention"):
        return _attention(kind, tuple(shape), device, kernels)
    draw = functools.partial(torch.randn, dtype=DTYPE, device=device)
    if kind == "copy":
        source = draw(*shape)
        target = torch.empty_like(source)
        return lambda: torch.mul(source, 2, out=target)
    if kind == "product":
        m, k, n = shape
        x, weight, out = draw(m, k), draw(n, k), draw(m, n)
        return lambda: torch.mm(x, weight.t(), out=out)
    groups, each, k, n = shape
    ends = torch.arange(1, groups + 1, dtype=torch.int32, device=device) * each
    rows, gradient = draw(groups * each, k), draw(groups * each, n)
    if kind == "grouped_gradient":
        return lambda: grouped_gradient(gradient, rows, ends)
    weights = draw(groups, n, k)
    return lambda: grouped_matmul(rows, weights, ends)


def _attention(
    kind: str,
    shape: tuple[int, ...],
    device: torch.device,
    kernels: Sequence[Mapping[str, Any]],
) -> Call:
    own = [each for each in kernels if each["shape"] == shape]
    best = min(own, key=lambda each: each["forward"] + each["backward"])["kernel"]
    problem = PROBLEMS["attention"]
    (row,) = (each for each in problem.rows if each.name == best)
    *_, (forward, backward) = row.calls(problem.draw(shape, DTYPE, device))
    return forward if kind == "attention" else backward


class _Lanes:
    """Calls of work and of a collective, one after another each and at the same time."""

    def __init__(self, group: Any, device: torch.device) -> None:
        self.group, self.device = group, device
        self.window = WINDOW[device.type]

    def alone(self, call: Call) -> float:
        """Seconds of a call that nothing runs beside, as the slowest rank has it."""
        # Collectives too: all ranks call as often.
        once = self._slowest(seconds(call, self.device, 5))
        calls = self._calls(self.window / once)
        # The first collective waits for the last rank.
        found = (_each(self._run(call, calls, None, 0)[0][1:]) for _ in range(REPEATS))
        return self._slowest(statistics.median(map(statistics.fmean, found)))

    def together(
        self, work: Call, alone: float, send: Call, sent_alone: float
    ) -> tuple[float, float]:
        """Seconds of a call of each, of calls that are inside of the other's window."""
        calls = self._calls(self.window / alone)
        sends = 2 * math.ceil(calls * alone / sent_alone) + 2
        found = [self._inside(work, calls, send, sends) for _ in range(REPEATS)]
        worked, sent = (statistics.median(each) for each in zip(*found, strict=True))
        return self._slowest(worked), self._slowest(sent)

    def _inside(self, work: Call, calls: int, send: Call, sends: int) -> tuple[float, float]:
        for times in (1, 2, 4, 8):
            worked, sent = self._run(work, calls * times, send, sends * times)
            means = _each(worked, sent[1:]), _each(sent[1:], worked)
            if self._slowest(float(not all(means))) == 0:
                return statistics.fmean(means[0]), statistics.fmean(means[1])
        raise TrainingError(
            "no call of work lies inside of a window of collectives; calibrate an idle machine"
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


def _each(marks: Sequence[float], other: Sequence[float] = (-math.inf, math.inf)) -> list[float]:
    """Seconds of each call that lies inside of the other lane's marks."""
    pairs = itertools.pairwise(marks)
    return [end - begin for begin, end in pairs if other[0] <= begin and end <= other[-1]]


def _on_streams(
    work: Call, calls: int, send: Call | None, sends: int, device: torch.device
) -> tuple[Marks, Marks]:
    own, other = torch.cuda.current_stream(device), torch.cuda.Stream(device, priority=-1)
    _hold(device)
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


def _hold(device: torch.device) -> None:
    """Keep the current stream busy for a while."""
    rows, products = _HELD
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
    """What a thread sends lasts as long as other ranks let it: work goes on until then."""
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
