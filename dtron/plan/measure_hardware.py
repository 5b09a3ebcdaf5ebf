"""Measurements of `dtron plan calibrate`, and the fields of a hardware row they determine.

    matmuls       shapes of transformer layers, forward and both gradients. Each time implies a
                  ceiling; `ceiling` is the median. `depth` is the value for which the implied
                  ceilings agree best
    attention     every available kernel is timed; the fastest in forward plus backward counts
    collectives   seconds = max(issue, hops x latency + bytes moved / rate). A small collective of
                  any size takes `issue`, the time in which the host issues it. For each kind, the
                  line is fitted to the larger sizes, by least squares of relative errors. Latency
                  and issue are medians over kinds; rates are fitted again with that latency

Every rank measures at the same time, as ranks compute at the same time in training.
"""

import functools
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from dtron.bench.kernels.problems import PROBLEMS
from dtron.bench.measure import copy_rate, host_link_rate, launch_seconds, seconds
from dtron.bench.roofline import StepMatmul, matmul_seconds
from dtron.config.schema import MAX_RANKS
from dtron.errors import TrainingError
from dtron.float8.casting import quantize
from dtron.float8.products import product as float8_product
from dtron.float8.products import why_emulated
from dtron.float8.recipes import RECIPES
from dtron.parallelisms.host_memory import host_memory
from dtron.plan.hardware import Hardware, adapters, hops, moved
from dtron.run.process import Place, environment_integer

Shapes = tuple[tuple[int, ...], ...]
DTYPE = torch.bfloat16
MATMULS: Mapping[str, Shapes] = {
    # (tokens, input features, output features): layers of Llama-3-8B, a part of its head, fewer
    # tokens, its layers with tp = 4, a layer of an expert, and a square.
    "cuda": (
        (16384, 4096, 4096),
        (16384, 4096, 1024),
        (16384, 4096, 14336),
        (16384, 14336, 4096),
        (16384, 4096, 32064),
        (8192, 4096, 4096),
        (2048, 4096, 4096),
        (2048, 4096, 14336),
        (8192, 4096, 3584),
        (8192, 1024, 4096),
        (4096, 2048, 1408),
        (8192, 8192, 8192),
    ),
    "cpu": ((256, 128, 256), (256, 256, 256), (512, 256, 128)),
}
ATTENTION: Mapping[str, Shapes] = {
    # Shapes of dtron bench kernels: heads of 128, and narrower ones.
    "cuda": ((1, 8192, 32, 8, 128), (1, 8192, 32, 8, 64)),
    "cpu": ((1, 128, 4, 2, 128), (1, 128, 4, 2, 64)),
}
SIZES: Mapping[str, tuple[int, ...]] = {
    "cuda": tuple(2**i for i in range(16, 30, 2)),  # 64 KiB to 256 MiB
    "cpu": (2**12, 2**18, 2**24),
}
CALLS: Mapping[str, int] = {"cuda": 20, "cpu": 5}
"""Number of calls per collective and size; all ranks must make the same number."""
KINDS = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
DEPTHS = range(0, 513, 16)


@dataclass
class Calibration:
    """Lists of measurements, and the resulting fields of a hardware row."""

    found: dict[str, Any] = field(default_factory=dict)
    """Fields of Hardware, except those of links."""
    matmuls: list[dict[str, Any]] = field(default_factory=list)
    attention: list[dict[str, Any]] = field(default_factory=list)
    collectives: list[dict[str, Any]] = field(default_factory=list)
    overlap: list[dict[str, Any]] = field(default_factory=list)
    """Seconds of computations and collectives, alone and overlapped."""


# -- one device ------------------------------------------------------------------------------------


def measure_device(base: Hardware, device: torch.device) -> Calibration:
    """Measure matmuls, attention, copies and launches on one device."""
    made = Calibration()
    made.found |= _driver_fields(device)
    made.found["copy"] = copy_rate(device)
    made.found["launch"] = launch_seconds(device)
    made.found["host_link"] = host_link_rate(device)
    row = replace(base, **made.found)
    for float8 in (False, True):
        if float8 and why_emulated(RECIPES["tensorwise"], device, DTYPE):
            made.found["ceiling_float8"] = 0.0
            continue
        times = [t for shape in MATMULS[device.type] for t in _layer_matmuls(shape, float8, device)]
        if not float8:
            made.found["depth"] = fitted_depth(row, times)
            row = replace(row, depth=made.found["depth"])
        made.found["ceiling_float8" if float8 else "ceiling"] = fitted_ceiling(row, times)
        row = replace(row, **made.found)
        made.matmuls += [_compared(row, shape, time, float8) for shape, time in times]
    _attention(made, device)
    return made


def _driver_fields(device: torch.device) -> dict[str, Any]:
    """Fields that the driver reports; a CPU's threads count as multiprocessors."""
    host = host_memory()[0]
    if device.type == "cuda":
        count = torch.cuda.get_device_properties(device).multi_processor_count
        memory = float(torch.cuda.mem_get_info(device)[1])
    else:
        count, memory = torch.get_num_threads(), host
    known = {"host_memory": host} if host else {}
    return {"multiprocessors": count, "memory": memory, **known}


_Times = tuple[tuple[int, int, int], float]
"""(m, k, n) of a matmul, and its seconds."""


def _layer_matmuls(shape: Sequence[int], float8: bool, device: torch.device) -> Iterator[_Times]:
    """Yield (shape, seconds) of a linear layer's three matmuls: forward and both gradients."""
    m, k, n = shape
    times = _float8_seconds if float8 else matmul_seconds
    parts = times(StepMatmul(m, k, n, 1), DTYPE, device)
    yield from zip(((m, k, n), (m, n, k), (n, m, k)), parts, strict=True)


def _float8_seconds(
    matmul: StepMatmul, dtype: torch.dtype, device: torch.device
) -> tuple[float, float, float]:
    """Return the seconds of a float8 linear layer's (forward, input gradient, weight gradient).

    The operands are cast before the timing, by the tensorwise recipe.
    """
    recipe, (m, k, n) = RECIPES["tensorwise"], (matmul.m, matmul.k, matmul.n)
    assert recipe.grad_weight is not None
    found = []
    for casts, rows, depth, columns in (
        (recipe.output, m, k, n),
        (recipe.grad_input, m, n, k),
        (recipe.grad_weight, n, m, k),
    ):
        left = quantize(torch.randn(rows, depth, dtype=dtype, device=device), casts.left)
        right = quantize(torch.randn(columns, depth, dtype=dtype, device=device), casts.right)
        fast = casts.fast_accumulation
        call = functools.partial(float8_product, left, right, dtype, False, fast)
        found.append(seconds(call, device))
    return found[0], found[1], found[2]


def _implied(row: Hardware, times: Sequence[_Times]) -> list[float]:
    """Return for each matmul the ceiling, in FLOP/s, that explains the measured time.

    With this ceiling, the hardware row predicts that time.
    """
    unit = replace(row, ceiling=1.0, ceiling_float8=0.0, launch=0.0)
    return [unit.product(*shape) / max(time - row.launch, 0.1 * time) for shape, time in times]


def fitted_ceiling(row: Hardware, times: Sequence[_Times]) -> float:
    """Median of the ceilings that matmuls imply, FLOP/s."""
    return statistics.median(_implied(row, times))


def fitted_depth(row: Hardware, times: Sequence[_Times]) -> float:
    """Return the value of `Hardware.depth` for which the implied ceilings scatter least."""

    def scatter(depth: int) -> float:
        return statistics.pstdev(map(math.log, _implied(replace(row, depth=depth), times)))

    return float(min(DEPTHS, key=scatter))


def _compared(row: Hardware, shape: tuple[int, int, int], time: float, float8: bool) -> dict:
    m, k, n = shape
    said = row.product(m, k, n, float8=float8)
    rate = 2 * m * k * n / time
    what = {"dtype": "float8" if float8 else "bfloat16", "m": m, "k": k, "n": n}
    return what | {"seconds": time, "flops_per_second": rate, "predicted_seconds": said}


def _attention(made: Calibration, device: torch.device) -> None:
    problem, rates = PROBLEMS["attention"], {}
    for shape in ATTENTION[device.type]:
        drawn = problem.draw(shape, DTYPE, device)
        flops, _ = problem.flops(shape)
        able = [r for r in problem.rows if not r.unavailable(device, DTYPE, shape)]
        # The reference stores all scores: it is timed only if there is no other kernel.
        able = [r for r in able if r.name != problem.reference] or able
        for row in able:
            *_, calls = row.calls(drawn)
            forward, both = (seconds(call, device) for call in calls)
            made.attention.append(
                {"kernel": row.name, "shape": shape, "forward": forward, "backward": both}
            )
        best = fastest(made.attention, shape)
        rates[shape] = (flops / best["forward"], 2 * flops / best["backward"])
    wide, narrow = rates.values()
    made.found["attention"] = wide
    # One fraction, with which the row predicts forward plus backward of narrow heads.
    made.found["narrow"] = _together(narrow) / _together(wide)


def fastest(rows: Sequence[Mapping[str, Any]], shape: tuple[int, ...]) -> Mapping[str, Any]:
    """Return the row of `Calibration.attention` that is fastest for a shape.

    The time is that of forward plus backward.
    """
    own = [each for each in rows if each["shape"] == shape]
    return min(own, key=lambda each: each["forward"] + each["backward"])


def _together(rates: tuple[float, float]) -> float:
    return 3 / (1 / rates[0] + 2 / rates[1])


# -- links -----------------------------------------------------------------------------------------


def collective_call(
    kind: str, size: int, group: Any, device: torch.device, dtype: torch.dtype = DTYPE
) -> Callable[[], Any]:
    """Return a function that issues a collective.

    `size`: bytes of a rank's input or output, whichever is larger.
    """
    ranks, own = dist.get_world_size(group), dist.get_rank(group)
    whole = torch.zeros(size // dtype.itemsize // ranks * ranks, dtype=dtype, device=device)
    part = torch.zeros(len(whole) // ranks, dtype=dtype, device=device)
    other = torch.empty_like(whole)
    if kind != "send":
        return {
            "all_reduce": lambda: dist.all_reduce(whole, group=group),
            "all_gather": lambda: dist.all_gather_into_tensor(whole, part, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(part, whole, group=group),
            "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        }[kind]
    # The first half of a group sends to the second half; with several hosts, to other hosts.
    half = ranks // 2
    if own < half:
        return lambda: dist.send(whole, group=group, group_dst=own + half)
    if own < 2 * half:
        return lambda: dist.recv(whole, group=group, group_src=own - half)
    return lambda: None


def measure_links(made: Calibration, place: Place, device: torch.device) -> Any:
    """Measure collectives among the ranks of each host.

    With several hosts, also measure those among all ranks.

    Returns:
        The group of this host's ranks, or the group of all ranks if this host has one rank.
    """
    inside = environment_integer("LOCAL_WORLD_SIZE", place.world_size, 1, MAX_RANKS)
    starts = range(0, place.world_size, inside)
    hosts = [dist.new_group(list(range(first, first + inside))) for first in starts]
    if inside > 1:
        _links(made, hosts[place.rank // inside], inside, device)
    if inside < place.world_size:
        _links(made, dist.group.WORLD, inside, device)
    return hosts[place.rank // inside] if inside > 1 else dist.group.WORLD


def _links(made: Calibration, group: Any, inside: int, device: torch.device) -> None:
    ranks = dist.get_world_size(group)
    for kind in KINDS:
        for size in SIZES[device.type]:
            dist.barrier(group)
            took = seconds(collective_call(kind, size, group, device), device, CALLS[device.type])
            rate = moved(kind, size, ranks, inside) / took
            what = {"kind": kind, "ranks": ranks, "inside": inside, "bytes": size}
            made.collectives.append({**what, "seconds": took, "bus_rate": rate})


def link_fields(rows: Sequence[Mapping[str, Any]], base: Hardware) -> dict[str, Any]:
    """Fit the fields of Hardware for links to the rows of `Calibration.collectives`.

    Raises:
        TrainingError: larger sizes do not take longer.
    """
    found: dict[str, Any] = {}
    latency = list(base.latency)
    for ranks, inside in sorted({(row["ranks"], row["inside"]) for row in rows}):
        own = [row for row in rows if (row["ranks"], row["inside"]) == (ranks, inside)]
        points = {
            kind: [
                (moved(kind, row["bytes"], ranks, inside), row["seconds"])
                for row in own
                if row["kind"] == kind
            ]
            for kind in dict.fromkeys(row["kind"] for row in own)
        }
        fits = {kind: fit(each) for kind, each in points.items()}
        hop = statistics.median(f.start / hops(kind, ranks, inside) for kind, f in fits.items())
        rates = {  # the rate of the kind's own fit if the common latency exceeds its times
            kind: rate_of(points[kind][f.small :], hop * hops(kind, ranks, inside)) or f.rate
            for kind, f in fits.items()
        }
        latency[inside < ranks] = hop
        if inside < ranks:
            each = (rate / adapters(kind, inside) for kind, rate in rates.items())
            found["network"] = statistics.median(each)
        else:
            gathers = rates["all_gather"]
            found["nvlink"] = gathers
            found["kinds"] = tuple((kind, rate / gathers) for kind, rate in rates.items())
            found["issue"] = statistics.median(f.floor for f in fits.values())
        found["latency"] = tuple(latency)
    return found


@dataclass(frozen=True)
class Fit:
    """Fitted seconds of one kind of collective: max(floor, start + bytes / rate)."""

    floor: float
    start: float
    rate: float
    small: int
    """Number of smallest sizes to which `floor` is fitted."""


def fit(points: Sequence[tuple[float, float]]) -> Fit:
    """Fit a constant and a line to points (bytes, seconds) in ascending order.

    The constant is the median time of the smallest sizes; the line is fitted to the larger sizes.
    The number of smallest sizes is that with the least sum of squared relative errors.

    Raises:
        TrainingError: larger sizes do not take longer.
    """
    fits = []
    for small in range(max(1, len(points) - 1)):
        start, rate = line(points[small:])
        floor = statistics.median([t for _, t in points[:small]] or [0.0])
        if rate is not None:
            fits.append(Fit(floor, start, rate, small))
    if not fits:
        raise TrainingError(
            "larger collectives took no longer than smaller ones; calibrate on an idle machine"
        )

    def off(each: Fit) -> float:
        said = (max(each.floor, each.start + n / each.rate) for n, _ in points)
        return sum((s / t - 1) ** 2 for s, (_, t) in zip(said, points, strict=True))

    best = min(map(off, fits))
    return next(each for each in fits if off(each) <= best + 1e-12)  # with the fewest small sizes


def line(points: Sequence[tuple[float, float]]) -> tuple[float, float | None]:
    """Fit a line to times; return (seconds at 0 bytes, bytes per second).

    The fit minimises the squares of relative errors. Bytes per second None: larger sizes take no
    longer.
    """
    n_bytes, times = np.array(points).T
    columns = np.stack([1 / times, n_bytes / times], axis=1)
    start, slope = np.linalg.lstsq(columns, np.ones(len(points)), rcond=None)[0]
    if start < 0:  # a latency is never negative: the line goes through 0
        return 0.0, rate_of(points, 0.0)
    return float(start), float(1 / slope) if slope > 0 else None


def rate_of(points: Sequence[tuple[float, float]], start: float) -> float | None:
    """Fit bytes per second to times, for a given time `start` at 0 bytes.

    The fit minimises the squares of relative errors. None: larger sizes take no longer than
    `start`.
    """
    n_bytes, times = np.array(points).T
    share = n_bytes / times
    slope = (share * (1 - start / times)).sum() / (share**2).sum()
    return float(1 / slope) if slope > 0 else None
