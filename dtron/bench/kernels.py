"""Kernels alone: time, error and limit of every row of dtron/kernels, forward and backward.

A problem is what kernels compute, with a reference in plain PyTorch and the operations and bytes
it takes at least; its rows are the kernels that compute it. A new kernel adds a row, a new kind of
kernel a problem. Each row is compared with

    the reference             as it stands, and under torch.compile
    the device's limit        the larger of operations / measured rate of a square product and
                              bytes / measured rate of a copy (measure.py)

Bytes count each input once and each output once. Error is |x - reference| / |reference| over
outputs, or over gradients, in the dtype of the inputs.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

from dtron.bench.measure import copy_rate, device_name, gemm_rate, seconds
from dtron.bench.report import share, versions
from dtron.bench.run import one_line
from dtron.errors import ConfigError, nearest
from dtron.kernels.attention import KERNELS, Score
from dtron.models import BACKENDS
from dtron.models.attention import Need
from dtron.parallelisms.fsdp import DTYPES

Tensors = Sequence[Tensor]
Shape = tuple[int, ...]


@dataclass(frozen=True)
class Row:
    """One kernel."""

    name: str
    forward: Callable[[Tensors], Tensors]
    """Inputs -> outputs."""
    backward: Callable[[Tensors, Tensors], Tensors]
    """(inputs, outputs) -> gradients; the first output's gradient is the last input."""
    unavailable: Callable[[torch.device, torch.dtype, Shape], str | None]
    """Why it cannot run there, or None."""


@dataclass(frozen=True)
class Problem:
    """What some kernels compute."""

    modules: tuple[str, ...]
    """Files of dtron/kernels whose kernels it times."""
    dims: str
    """What a shape's numbers are."""
    shapes: Mapping[str, Shape]
    """The usual shape by device type."""
    draw: Callable[[Shape, torch.dtype, torch.device], Tensors]
    """Inputs, and the gradient of the first output."""
    flops: Callable[[Shape], tuple[float, float]]
    """Operations, forward and backward."""
    n_bytes: Callable[[Shape, torch.dtype], tuple[float, float]]
    """Bytes read and written, forward and backward."""
    reference: str
    rows: tuple[Row, ...]


# -- attention -------------------------------------------------------------------------------------


def _attention_row(name: str) -> Row:
    kernel = KERNELS[name]
    (backend,) = (row for row in BACKENDS.values() if row.kernel == name)

    def score(q: Tensor) -> Score:
        return Score(q.shape[-1] ** -0.5, causal=True)

    def forward(inputs: Tensors) -> Tensors:
        q, k, v, _ = inputs
        return kernel.forward(q, k, v, None, score(q))

    def backward(inputs: Tensors, outputs: Tensors) -> Tensors:
        q, k, v, grad = inputs
        return kernel.backward(grad, q, k, v, *outputs, None, score(q))

    def unavailable(device: torch.device, dtype: torch.dtype, shape: Shape) -> str | None:
        return backend.unavailable(Need(device.type, dtype, shape[-1]))

    return Row(name, forward, backward, unavailable)


def _draw_attention(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    batch, length, heads, groups, size = shape
    generator = torch.Generator(device).manual_seed(0)
    return [
        torch.randn(batch, length, n, size, generator=generator, device=device).to(dtype)
        for n in (heads, groups, groups, heads)
    ]


def _attention_flops(shape: Shape) -> tuple[float, float]:
    """Two products over half of the square; five in the backward, which computes scores again."""
    batch, length, heads, _, size = shape
    product = 2 * batch * heads * size * length**2 / 2
    return 2 * product, 5 * product


def _attention_bytes(shape: Shape, dtype: torch.dtype) -> tuple[float, float]:
    """q, k, v -> out and its log-sum-exp; with both and out's gradient -> three gradients."""
    batch, length, heads, groups, size = shape
    tokens = batch * length
    queries, keys = (tokens * n * size * dtype.itemsize for n in (heads, groups))
    lse = tokens * heads * 4
    forward = 2 * queries + 2 * keys + lse
    return forward, forward + 2 * queries + 2 * keys


PROBLEMS: dict[str, Problem] = {
    "attention": Problem(
        modules=("attention", "flash4"),
        dims="sequences, tokens, query heads, key/value heads, width of a head",
        shapes={"cuda": (1, 8192, 32, 8, 128), "cpu": (1, 256, 8, 4, 32)},
        draw=_draw_attention,
        flops=_attention_flops,
        n_bytes=_attention_bytes,
        reference="math",
        rows=tuple(_attention_row(name) for name in KERNELS),
    ),
}


# -- timing ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Limit:
    """What the device can do."""

    flops_per_second: float
    bytes_per_second: float

    def seconds(self, flops: float, n_bytes: float) -> float:
        """Least time of so many operations on so many bytes."""
        return max(flops / self.flops_per_second, n_bytes / self.bytes_per_second)


@dataclass(frozen=True)
class Timing:
    """Of one row; forward and backward each."""

    name: str
    reason: str = ""
    """Why there are no figures."""
    seconds: tuple[float, float] | None = None
    tflops: tuple[float, float] | None = None
    """TFLOP/s."""
    of_limit: tuple[float, float] | None = None
    """The limit's time over its own."""
    error: tuple[float, float] | None = None
    """Relative to the reference; None where that did not run."""


def time_problem(
    problem: Problem,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    limit: Limit,
    backend: str = "inductor",
) -> list[Timing]:
    """Time the reference, its version compiled by `backend`, then every other row."""
    inputs = problem.draw(shape, dtype, device)
    (reference,) = (row for row in problem.rows if row.name == problem.reference)
    compiled = Row(
        f"{reference.name}, compiled",
        torch.compile(reference.forward, backend=backend, dynamic=False),
        torch.compile(reference.backward, backend=backend, dynamic=False),
        reference.unavailable,
    )
    others = [row for row in problem.rows if row is not reference]
    truth: tuple[Tensors, Tensors] | None = None
    found = []
    for row in (reference, compiled, *others):
        reason = row.unavailable(device, dtype, shape)
        timing, results = Timing(row.name, reason=reason or ""), None
        if not reason:
            try:
                timing, results = _time(row, problem, inputs, shape, limit, device, truth)
            except (RuntimeError, NotImplementedError) as error:  # out of memory, among others
                timing = Timing(row.name, reason=one_line(str(error)))
        if row is reference:
            truth = results
        found.append(timing)
    return found


def _time(
    row: Row,
    problem: Problem,
    inputs: Tensors,
    shape: Shape,
    limit: Limit,
    device: torch.device,
    truth: tuple[Tensors, Tensors] | None,
) -> tuple[Timing, tuple[Tensors, Tensors]]:
    outputs = row.forward(inputs)
    gradients = row.backward(inputs, outputs)
    error = None
    if truth is not None:
        error = (_error(outputs[:1], truth[0][:1]), _error(gradients, truth[1]))
    times = (
        seconds(lambda: row.forward(inputs), device),
        seconds(lambda: row.backward(inputs, outputs), device),
    )
    flops, n_bytes = problem.flops(shape), problem.n_bytes(shape, inputs[0].dtype)
    least = [limit.seconds(*pair) for pair in zip(flops, n_bytes, strict=True)]
    timing = Timing(
        row.name,
        seconds=times,
        tflops=(flops[0] / times[0] / 1e12, flops[1] / times[1] / 1e12),
        of_limit=(least[0] / times[0], least[1] / times[1]),
        error=error,
    )
    return timing, (outputs, gradients)


def _error(found: Tensors, wanted: Tensors) -> float:
    """Of all tensors together."""
    pairs = [(a.double(), b.double()) for a, b in zip(found, wanted, strict=True)]
    off = sum((a - b).square().sum().item() for a, b in pairs)
    return (off / sum(b.square().sum().item() for _, b in pairs)) ** 0.5


# -- the command -----------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Run `dtron bench kernels`; returns the exit status.

    Raises:
        ConfigError: the arguments are wrong.
    """
    given = kernels_parser().parse_args(arguments)
    for name in given.problems:
        if name not in PROBLEMS:
            raise ConfigError(f"no kernels of {name!r}{nearest(name, PROBLEMS)}")
    console = Console(width=None if Console().is_terminal else 160)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = DTYPES[given.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    limit = Limit(gemm_rate(device, dtype), copy_rate(device))
    written: dict[str, Any] = {
        "device": device_name(device),
        "dtype": str(dtype),
        "versions": versions(),
        "limit": asdict(limit),
    }
    for name in given.problems or PROBLEMS:
        problem = PROBLEMS[name]
        shape = _shape(given.shape, problem) or problem.shapes[device.type]
        timings = time_problem(problem, shape, dtype, device, limit, given.backend)
        written[name] = {"shape": shape, "rows": [asdict(timing) for timing in timings]}
        console.print(_table(timings, f"{name}: {shape} ({problem.dims}), {dtype}"))
        for timing in timings:
            if timing.reason:
                console.print(f"{timing.name}: {timing.reason}", markup=False, soft_wrap=True)
    rates = f"{limit.flops_per_second / 1e12:.4g} TFLOP/s, {limit.bytes_per_second / 1e12:.3g} TB/s"
    console.print(f"limit of {device_name(device)}, measured: {rates}", soft_wrap=True)
    if given.out:
        given.out.write_text(json.dumps(written, indent=1) + "\n")
    return 0


def _shape(text: str | None, problem: Problem) -> Shape | None:
    if text is None:
        return None
    words = text.split(",")
    expected = len(problem.shapes["cpu"])
    if len(words) != expected or not all(word.isdigit() and int(word) for word in words):
        raise ConfigError(f"--shape {text}: write {expected} whole numbers: {problem.dims}")
    return tuple(int(word) for word in words)


def _table(timings: Sequence[Timing], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("kernel", no_wrap=True)
    for heading in ("ms", "TFLOP/s", "of limit", "x reference", "error"):
        for part in ("forward", "backward"):
            table.add_column(f"{part} {heading}", justify="right")
    base = timings[0].seconds
    for timing in timings:
        cells: list[str] = []
        if timing.seconds and timing.tflops and timing.of_limit:
            cells += [f"{value * 1e3:.4g}" for value in timing.seconds]
            cells += [f"{value:.4g}" for value in timing.tflops]
            cells += [share(value) for value in timing.of_limit]
            pairs = zip(base or (), timing.seconds, strict=False)
            cells += [f"{first / own:.2f}" for first, own in pairs] or ["–", "–"]
            cells += [f"{value:.1e}" for value in timing.error or ()] or ["–", "–"]
        table.add_row(timing.name, *cells)
    return table


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; see dtron bench kernels --help")


def kernels_parser() -> argparse.ArgumentParser:
    """Of the command's arguments."""
    parser = _Parser(
        prog="dtron bench kernels",
        description="Time kernels alone, forward and backward, beside their reference, that "
        "compiled, and the device's limit.",
    )
    parser.add_argument("problems", nargs="*", help=f"{', '.join(PROBLEMS)} (default: all)")
    parser.add_argument("--shape", metavar="A,B,...", help="sizes, as the table's title names them")
    parser.add_argument("--dtype", choices=list(DTYPES), help="default: bfloat16; float32 on a CPU")
    backends = ("inductor", "aot_eager")
    parser.add_argument("--backend", choices=backends, default=backends[0], help="of torch.compile")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON too")
    return parser
