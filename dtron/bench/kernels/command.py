"""Benchmark single kernels: time, error and device limit of every kernel in dtron/kernels.

A problem (problem.py) has a reference in plain PyTorch, kernels that compute the same, and the
minimum numbers of operations and bytes of each part, such as forward and backward. A kernel is
compared with

    the reference             in eager mode, and under torch.compile
    the device's limit        max(operations / measured FLOP/s of a square matmul, bytes / measured
                              bytes per second of a copy) (measure.py)

Each input and each output counts once in the bytes; tensors updated in place count twice. The error
is |x - reference| / |reference| over outputs, or over gradients. The reference computes in the
dtype of the inputs. For an in-place update, the results of the first call are compared.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from dtron.bench.kernels.problem import Figures, KernelRow, Problem, Shape, Tensors
from dtron.bench.kernels.problems import PROBLEMS
from dtron.bench.measure import copy_rate, device_name, gemm_rate, seconds
from dtron.bench.report import bench_console, share, versions
from dtron.bench.run import one_line
from dtron.errors import ArgumentParser, ConfigError, nearest
from dtron.parallelisms.fsdp.sharding import DTYPES


@dataclass(frozen=True)
class DeviceLimit:
    """Measured floating-point operations and bytes per second of the device."""

    flops_per_second: float
    bytes_per_second: float

    def seconds(self, flops: float, n_bytes: float) -> float:
        """Return the minimum seconds for a number of operations and bytes."""
        return max(flops / self.flops_per_second, n_bytes / self.bytes_per_second)


@dataclass(frozen=True)
class Timing:
    """Times, rates and error of one kernel, by part (forward, backward)."""

    name: str
    reason: str = ""
    """Why the kernel was not timed; empty: it was timed."""
    seconds: Figures | None = None
    tflops: Figures | None = None
    """TFLOP/s."""
    of_limit: Figures | None = None
    """Time at the device's limit / time of the kernel."""
    error: Figures | None = None
    """Error relative to the reference; None: the reference did not run."""


def time_problem(
    problem: Problem,
    shape: Shape,
    dtype: torch.dtype,
    device: torch.device,
    limit: DeviceLimit,
    backend: str = "inductor",
) -> list[Timing]:
    """Time the reference, the reference compiled with `backend`, then all other kernels."""
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
            except Exception as error:  # out of memory, or any error of a kernel package
                timing = Timing(row.name, reason=one_line(str(error)))
        if row is reference:
            truth = results
        found.append(timing)
    return found


def _compiled(row: KernelRow, backend: str) -> KernelRow:
    def compiled(part: Callable[..., Tensors]) -> Callable[..., Tensors]:
        return torch.compile(part, backend=backend, dynamic=False)

    return replace(
        row,
        name=f"{row.name}, compiled",
        forward=compiled(row.forward),
        backward=compiled(row.backward) if row.backward else None,
    )


def _time(
    row: KernelRow,
    problem: Problem,
    drawn: Tensors,
    shape: Shape,
    limit: DeviceLimit,
    device: torch.device,
    truth: list[Tensors] | None,
) -> tuple[Timing, list[Tensors]]:
    """Time one row; return its figures, and each part's results for the comparison."""
    inputs, outputs, calls = row.calls(drawn)
    # Copies, since later calls of an in-place update change its outputs.
    results: list[Tensors] = [[x.clone() for x in outputs[: problem.compared]]]
    results += [backward() for backward in calls[1:]]
    error = tuple(map(_error, results, truth)) if truth else None
    times = tuple(seconds(call, device) for call in calls)
    work = list(zip(times, problem.flops(shape), problem.n_bytes(*inputs), strict=True))
    timing = Timing(
        row.name,
        seconds=times,
        tflops=tuple(flops / time / 1e12 for time, flops, _ in work),
        of_limit=tuple(limit.seconds(flops, n_bytes) / time for time, flops, n_bytes in work),
        error=error,
    )
    return timing, results


def _error(found: Tensors, wanted: Tensors) -> float:
    """Return the relative error over all tensors, computed in float64, one pair at a time."""
    off = size = 0.0
    for a, b in zip(found, wanted, strict=True):
        off += (a.double() - b.double()).square().sum().item()
        size += b.double().square().sum().item()
    return (off / size) ** 0.5


# -- the command -----------------------------------------------------------------------------------


def main(arguments: Sequence[str]) -> int:
    """Run `dtron bench kernels`; return the exit status.

    Raises:
        ConfigError: an argument is invalid.
    """
    given = kernels_parser().parse_args(arguments)
    _check(given)
    console = bench_console()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = DTYPES[given.dtype or ("bfloat16" if device.type == "cuda" else "float32")]
    limit = DeviceLimit(gemm_rate(device, dtype), copy_rate(device))
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
        console.print(
            timings_table(timings, problem.parts, f"{name}: {shape} ({problem.dims}), {own}")
        )
        for timing in timings:
            if timing.reason:
                console.print(f"{timing.name}: {timing.reason}", markup=False, soft_wrap=True)
    rates = f"{limit.flops_per_second / 1e12:.4g} TFLOP/s, {limit.bytes_per_second / 1e12:.3g} TB/s"
    console.print(f"limit of {device_name(device)}, measured: {rates}", soft_wrap=True)
    if given.out:
        given.out.write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")
    return 0


def _check(given: argparse.Namespace) -> None:
    """Check the arguments before measuring."""
    for name in given.problems:
        if name not in PROBLEMS:
            hint = nearest(name, PROBLEMS)
            raise ConfigError(f"unknown problem {name!r}{hint}; use {', '.join(PROBLEMS)}")
    if given.shape is None:
        return
    if len(given.problems) != 1:
        raise ConfigError(f"--shape needs exactly one problem, of {', '.join(PROBLEMS)}")
    _shape(given.shape, PROBLEMS[given.problems[0]])


def _shape(text: str | None, problem: Problem) -> Shape | None:
    if text is None:
        return None
    words = text.split(",")
    expected = len(problem.shapes["cpu"])
    if len(words) != expected or not all(word.isdigit() and int(word) for word in words):
        raise ConfigError(f"--shape {text}: write {expected} whole numbers: {problem.dims}")
    return tuple(int(word) for word in words)


def timings_table(timings: Sequence[Timing], parts: Sequence[str], title: str) -> Table:
    """Build a table with one row per kernel and part."""
    table = Table(title=title, title_justify="left")
    for heading in ("kernel", "part"):
        table.add_column(heading, no_wrap=True)
    for heading in ("ms", "TFLOP/s", "of limit", "x reference", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    base = timings[0].seconds
    for timing in timings:
        if not (timing.seconds and timing.tflops and timing.of_limit):
            table.add_row(timing.name)
            continue
        for i, part in enumerate(parts):
            table.add_row(
                timing.name if i == 0 else "",
                part,
                f"{timing.seconds[i] * 1e3:.4g}",
                f"{timing.tflops[i]:.4g}",
                share(timing.of_limit[i]),
                f"{base[i] / timing.seconds[i]:.2f}" if base else "–",
                f"{timing.error[i]:.1e}" if timing.error else "–",
            )
    return table


def kernels_parser() -> argparse.ArgumentParser:
    """Build the argument parser of `dtron bench kernels`."""
    parser = ArgumentParser(
        prog="dtron bench kernels",
        description="Time single kernels, their eager and compiled reference, and the device's "
        "limit.",
    )
    parser.add_argument("problems", nargs="*", help=f"{', '.join(PROBLEMS)} (default: all)")
    parser.add_argument(
        "--shape", metavar="A,B,...", help="sizes, in the order of the table's title"
    )
    dtype = "dtype of inputs (default: bfloat16; float32 on a CPU); adamw always uses float32"
    parser.add_argument("--dtype", choices=list(DTYPES), help=dtype)
    backends = ("inductor", "aot_eager")
    parser.add_argument(
        "--backend", choices=backends, default=backends[0], help="backend of torch.compile"
    )
    parser.add_argument("--out", type=Path, metavar="FILE", help="also write JSON")
    return parser
