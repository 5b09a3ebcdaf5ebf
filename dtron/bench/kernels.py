"""Kernels alone: time, error and limit of every row of dtron/kernels, part by part: forward and
backward, or an optimizer's update.

A problem is what kernels compute, with a reference in plain PyTorch and the operations and bytes
it takes at least; its rows are the kernels that compute it. A new kernel adds a row, a new kind of
kernel a problem. Each row is compared with

    the reference             as it stands, and under torch.compile
    the device's limit        the larger of operations / measured rate of a square product and
                              bytes / measured rate of a copy (measure.py)

Bytes count each input once and each output once; what is updated in place is both. Error is
|x - reference| / |reference| over outputs, or over gradients, in the dtype of the inputs; of an
update in place, over what the first of all calls left.
"""

import argparse
import importlib.util
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor
from torch.optim.adamw import adamw

from dtron.bench.measure import copy_rate, device_name, gemm_rate, seconds
from dtron.bench.report import share, versions
from dtron.bench.run import one_line
from dtron.errors import ArgumentParser, ConfigError, nearest
from dtron.kernels.adamw import Rates, adamw_
from dtron.kernels.attention import KERNELS, Score
from dtron.models import BACKENDS
from dtron.models.attention import Need
from dtron.parallelisms.fsdp import DTYPES

Tensors = Sequence[Tensor]
Shape = tuple[int, ...]
Figures = tuple[float, ...]
"""One number a part of the problem."""


def _as_drawn(drawn: Tensors) -> Tensors:
    return drawn


@dataclass(frozen=True)
class Row:
    """One kernel."""

    name: str
    forward: Callable[[Tensors], Tensors]
    """Inputs -> outputs."""
    backward: Callable[[Tensors, Tensors], Tensors] | None
    """(inputs, outputs) -> gradients; the first output's gradient is the last input. None where
    the problem has one part."""
    unavailable: Callable[[torch.device, torch.dtype, Shape], str | None]
    """Why it cannot run there, or None."""
    inputs: Callable[[Tensors], Tensors] = _as_drawn
    """What is drawn -> what it takes: a copy of its own, if it writes to that."""


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
    """Inputs, and the gradient of the first output if there is a backward."""
    flops: Callable[[Shape], Figures]
    """Operations."""
    n_bytes: Callable[[Tensors], Figures]
    """Bytes read and written, of a row's inputs."""
    reference: str
    rows: tuple[Row, ...]
    parts: tuple[str, ...] = ("forward", "backward")
    """What is timed: the forward by its name, and the backward unless there is none."""
    compared: int | None = 1
    """How many outputs are compared; None: all."""
    dtype: torch.dtype | None = None
    """Of what is drawn; None: as --dtype says."""


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


def _attention_bytes(inputs: Tensors) -> tuple[float, float]:
    """q, k, v -> out and its log-sum-exp; with both and out's gradient -> three gradients."""
    q, k, _, _ = inputs
    lse = q.numel() // q.shape[-1] * 4
    forward = 2 * q.nbytes + 2 * k.nbytes + lse
    return forward, forward + 2 * q.nbytes + 2 * k.nbytes


# -- AdamW -----------------------------------------------------------------------------------------

# Inputs are n parameters, n gradients, n first and n second moments, and n counts of updates.
_RATES = Rates(lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
_UPDATES = 9.0  # before the first that is timed


def _columns(inputs: Tensors) -> list[list[Tensor]]:
    """Parameters, gradients, first moments, second moments, counts."""
    n = len(inputs) // 5
    return [list(inputs[i : i + n]) for i in range(0, 5 * n, n)]


def _draw_adamw(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Parameters are as small as an update is, so that what an update loses shows in them."""
    count, size = shape
    generator = torch.Generator(device).manual_seed(0)

    def normal(scale: float) -> list[Tensor]:
        empty = (torch.empty(size, device=device, dtype=dtype) for _ in range(count))
        return [x.normal_(0, scale, generator=generator) for x in empty]

    squares = [x.square_().add_(0.5) for x in normal(1.0)]
    counts = torch.full((count,), _UPDATES, device=device).unbind()
    return [*normal(_RATES.lr), *normal(1.0), *normal(1.0), *squares, *counts]


def _own_state(moments: torch.dtype) -> Callable[[Tensors], Tensors]:
    """A copy of all that is updated, moments in that dtype; gradients are shared."""

    def inputs(drawn: Tensors) -> Tensors:
        parameters, gradients, firsts, squares, counts = _columns(drawn)
        return [
            *(x.clone() for x in parameters),
            *gradients,
            *(x.to(moments, copy=True) for x in (*firsts, *squares)),
            *(x.clone() for x in counts),
        ]

    return inputs


def _formula(inputs: Tensors) -> Tensors:
    """The update as it is written (dtron/kernels/adamw.py), an operator at a time."""
    columns = _columns(inputs)
    beta1, beta2 = _RATES.beta1, _RATES.beta2
    for p, g, m, v, t in zip(*columns, strict=True):
        t.add_(1)
        m.copy_(beta1 * m + (1 - beta1) * g)
        v.copy_(beta2 * v + (1 - beta2) * g * g)
        root = (v / (1 - beta2**t)).sqrt() + _RATES.eps
        decayed = p * (1 - _RATES.lr * _RATES.weight_decay)
        p.copy_(decayed - _RATES.lr * (m / (1 - beta1**t)) / root)
    return columns[0]


def _torch_fused(inputs: Tensors) -> Tensors:
    parameters, gradients, firsts, squares, counts = _columns(inputs)
    state = (firsts, squares, [], counts)
    rates = asdict(_RATES)
    adamw(parameters, gradients, *state, fused=True, amsgrad=False, maximize=False, **rates)
    return parameters


def _dtron_adamw(inputs: Tensors) -> Tensors:
    parameters, gradients, firsts, squares, counts = _columns(inputs)
    scale = torch.ones((), device=parameters[0].device)
    adamw_(parameters, gradients, firsts, squares, counts, scale, _RATES)
    return parameters


def _needs_triton(device: torch.device, _dtype: torch.dtype, _shape: Shape) -> str | None:
    """On a CPU there is no kernel to time: `adamw_` is the formula there."""
    if device.type != "cuda":
        return "needs a CUDA device"
    return None if importlib.util.find_spec("triton") else "needs the package triton"


def _adamw_flops(shape: Shape) -> Figures:
    """3 for the first moment, 4 for the second, 8 for the parameter."""
    count, size = shape
    return (15.0 * count * size,)


def _adamw_bytes(inputs: Tensors) -> Figures:
    """Gradients are read, all else is read and written: 28 an element, 20 with bfloat16 moments."""
    parameters, gradients, firsts, squares, _ = _columns(inputs)
    state = sum(x.nbytes for x in (*parameters, *firsts, *squares))
    return (2.0 * state + sum(x.nbytes for x in gradients),)


_WIDE, _NARROW = _own_state(torch.float32), _own_state(torch.bfloat16)


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
    "adamw": Problem(
        modules=("adamw", "adamw_triton"),
        dims="tensors, elements of each",
        # 32 of Llama-3-8B's matrices of 4096 x 14336, each split over 4 GPUs: 470 M elements.
        shapes={"cuda": (32, 4096 * 14336 // 4), "cpu": (4, 2**20)},
        draw=_draw_adamw,
        flops=_adamw_flops,
        n_bytes=_adamw_bytes,
        reference="formula",
        rows=(
            Row("formula", _formula, None, lambda *_: None, _WIDE),
            Row("torch, fused", _torch_fused, None, lambda *_: None, _WIDE),
            Row("dtron, float32 moments", _dtron_adamw, None, _needs_triton, _WIDE),
            Row("dtron, bfloat16 moments", _dtron_adamw, None, _needs_triton, _NARROW),
        ),
        parts=("update",),
        compared=None,
        dtype=torch.float32,
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
    """Of one row, part by part."""

    name: str
    reason: str = ""
    """Why there are no figures."""
    seconds: Figures | None = None
    tflops: Figures | None = None
    """TFLOP/s."""
    of_limit: Figures | None = None
    """The limit's time over its own."""
    error: Figures | None = None
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
    drawn = problem.draw(shape, dtype, device)
    (reference,) = (row for row in problem.rows if row.name == problem.reference)
    compiled = _compiled(reference, backend)
    others = [row for row in problem.rows if row is not reference]
    truth: list[Tensors] | None = None
    found = []
    for row in (reference, compiled, *others):
        reason = row.unavailable(device, dtype, shape)
        timing, results = Timing(row.name, reason=reason or ""), None
        if not reason:
            try:
                timing, results = _time(row, problem, drawn, shape, limit, device, truth)
            except Exception as error:  # of memory, or whatever a package of kernels raises
                timing = Timing(row.name, reason=one_line(str(error)))
        if row is reference:
            truth = results
        found.append(timing)
    return found


def _compiled(row: Row, backend: str) -> Row:
    def compiled(part: Callable[..., Tensors]) -> Callable[..., Tensors]:
        return torch.compile(part, backend=backend, dynamic=False)

    return replace(
        row,
        name=f"{row.name}, compiled",
        forward=compiled(row.forward),
        backward=compiled(row.backward) if row.backward else None,
    )


def _time(
    row: Row,
    problem: Problem,
    drawn: Tensors,
    shape: Shape,
    limit: Limit,
    device: torch.device,
    truth: list[Tensors] | None,
) -> tuple[Timing, list[Tensors]]:
    """Figures, and what is compared of each part."""
    inputs, backward = row.inputs(drawn), row.backward
    outputs = row.forward(inputs)
    # Copies, since further calls of an update in place go on changing its outputs.
    results: list[Tensors] = [[x.clone() for x in outputs[: problem.compared]]]
    calls: list[Callable[[], Tensors]] = [lambda: row.forward(inputs)]
    if backward:
        results.append(backward(inputs, outputs))
        calls.append(lambda: backward(inputs, outputs))
    error = tuple(map(_error, results, truth)) if truth else None
    times = tuple(seconds(call, device) for call in calls)
    work = list(zip(times, problem.flops(shape), problem.n_bytes(inputs), strict=True))
    timing = Timing(
        row.name,
        seconds=times,
        tflops=tuple(flops / time / 1e12 for time, flops, _ in work),
        of_limit=tuple(limit.seconds(flops, n_bytes) / time for time, flops, n_bytes in work),
        error=error,
    )
    return timing, results


def _error(found: Tensors, wanted: Tensors) -> float:
    """Of all tensors together; float64 copies of one pair at a time."""
    off = size = 0.0
    for a, b in zip(found, wanted, strict=True):
        off += (a.double() - b.double()).square().sum().item()
        size += b.double().square().sum().item()
    return (off / size) ** 0.5


# -- the command -----------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Run `dtron bench kernels`; returns the exit status.

    Raises:
        ConfigError: the arguments are wrong.
    """
    given = kernels_parser().parse_args(arguments)
    _check(given)
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
        own = problem.dtype or dtype
        timings = time_problem(problem, shape, own, device, limit, given.backend)
        rows = [asdict(timing) for timing in timings]
        written[name] = {"shape": shape, "dtype": str(own), "parts": problem.parts, "rows": rows}
        console.print(_table(timings, problem.parts, f"{name}: {shape} ({problem.dims}), {own}"))
        for timing in timings:
            if timing.reason:
                console.print(f"{timing.name}: {timing.reason}", markup=False, soft_wrap=True)
    rates = f"{limit.flops_per_second / 1e12:.4g} TFLOP/s, {limit.bytes_per_second / 1e12:.3g} TB/s"
    console.print(f"limit of {device_name(device)}, measured: {rates}", soft_wrap=True)
    if given.out:
        given.out.write_text(json.dumps(written, indent=1) + "\n")
    return 0


def _check(given: argparse.Namespace) -> None:
    """Before anything is measured."""
    for name in given.problems:
        if name not in PROBLEMS:
            raise ConfigError(f"no kernels of {name!r}{nearest(name, PROBLEMS)}")
    if given.shape is None:
        return
    if len(given.problems) != 1:
        raise ConfigError(f"--shape is of one problem: name it, one of {', '.join(PROBLEMS)}")
    _shape(given.shape, PROBLEMS[given.problems[0]])


def _shape(text: str | None, problem: Problem) -> Shape | None:
    if text is None:
        return None
    words = text.split(",")
    expected = len(problem.shapes["cpu"])
    if len(words) != expected or not all(word.isdigit() and int(word) for word in words):
        raise ConfigError(f"--shape {text}: write {expected} whole numbers: {problem.dims}")
    return tuple(int(word) for word in words)


def _table(timings: Sequence[Timing], parts: Sequence[str], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("kernel", no_wrap=True)
    for heading in ("ms", "TFLOP/s", "of limit", "x reference", "error"):
        for part in parts:
            table.add_column(f"{part} {heading}", justify="right")
    base, none = timings[0].seconds, ["–"] * len(parts)
    for timing in timings:
        cells: list[str] = []
        if timing.seconds and timing.tflops and timing.of_limit:
            cells += [f"{value * 1e3:.4g}" for value in timing.seconds]
            cells += [f"{value:.4g}" for value in timing.tflops]
            cells += [share(value) for value in timing.of_limit]
            pairs = zip(base or (), timing.seconds, strict=False)
            cells += [f"{first / own:.2f}" for first, own in pairs] or none
            cells += [f"{value:.1e}" for value in timing.error or ()] or none
        table.add_row(timing.name, *cells)
    return table


def kernels_parser() -> argparse.ArgumentParser:
    """Of the command's arguments."""
    parser = ArgumentParser(
        prog="dtron bench kernels",
        description="Time kernels alone, beside their reference, that compiled, and the device's "
        "limit.",
    )
    parser.add_argument("problems", nargs="*", help=f"{', '.join(PROBLEMS)} (default: all)")
    parser.add_argument("--shape", metavar="A,B,...", help="sizes, as the table's title names them")
    dtype = "of inputs (default: bfloat16; float32 on a CPU); what adamw updates is float32"
    parser.add_argument("--dtype", choices=list(DTYPES), help=dtype)
    backends = ("inductor", "aot_eager")
    parser.add_argument("--backend", choices=backends, default=backends[0], help="of torch.compile")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write JSON too")
    return parser
