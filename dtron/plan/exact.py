"""`dtron plan --exact`: memory and collectives traced from the real code, next to the predictions.

Each distinct rank is traced (`tracing.py`) in a separate process, so that no process group, mesh or
cache is shared or left over. Of the pipeline ranks, the first two and the last two are traced. Of
ranks that differ only in their data, context or tensor parallel index, the first is traced, which
has the largest shards.
"""

import multiprocessing
import os
import time
import traceback
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from dtron.config import MOMENTS, Parallel, RunConfig
from dtron.errors import ConfigError
from dtron.plan.communication import collectives
from dtron.plan.memory import RankMemory, memory
from dtron.plan.report import GIB, table
from dtron.plan.run_shape import Resolved, shortened
from dtron.plan.tracing import RankTrace, trace

MICRO_BATCHES = 3
"""Number of traced micro-batches without a pipeline: the first, one in between and the last
differ."""

Counts = defaultdict[tuple[str, str], list[float]]
"""Mapping (axis, collective) -> [calls, bytes]."""


def exact(config: RunConfig, world_size: int) -> dict[str, Any]:
    """Trace a legal run and return {notes, micro_batches, ranks, seconds}.

    Each entry of `ranks` has pairs {exact: traced value, predicted: predicted value}.

    Raises:
        ConfigError: the run cannot be traced.
    """
    if found := refusals(config):
        raise ConfigError(f"--exact cannot trace {'; nor '.join(found)}; leave --exact out")
    start = time.perf_counter()
    traced = traceable(config, world_size)
    run = Resolved.of(traced, world_size)
    found = traces(traced, world_size, distinct(run))
    estimate = memory(run)
    return {
        "notes": list(notes(config, traced, world_size)),
        "micro_batches": run.micro_batches,
        "ranks": [compared(run, estimate[each.place["pp"]], each) for each in found],
        "seconds": time.perf_counter() - start,
    }


def refusals(config: RunConfig) -> list[str]:
    """List the settings of a run that make tracing impossible, each with the reason."""
    asked = {
        "float8.recipe: its kernels need GPUs, and emulation allocates differently": bool(
            config.float8.recipe
        ),
        "recompute.offload: it copies on streams, which CPUs do not have": config.recompute.offload,
        "optim.offload: it copies on streams, which CPUs do not have": config.optim.offload > 0,
        f"optim.name = {config.optim.name}: its update reads values, which a trace does not have": (
            config.optim.name == "adamw8bit" or config.optim.name not in MOMENTS
        ),
        'mixtures in train.dtype = "float32": torch traces grouped matmuls in bfloat16 only': (
            config.train.dtype == "float32" and Resolved.model_of(config).n_experts > 0
        ),
    }
    return [reason for reason, present in asked.items() if present]


def traceable(config: RunConfig, world_size: int) -> RunConfig:
    """Return the run to trace: eager, on one stream, with fewer micro-batches."""
    plain = {"async_tp": False, "high_priority": [], "copy_engines": False}
    plain |= {"dispatcher": "all_to_all", "ep_capacity": Parallel().ep_capacity, "ep_inner": 0}
    eager = config.changed(parallel=plain, compile={"enable": False})
    m = eager.micro_batches(world_size)
    if config.parallel.pp > 1:
        return shortened(eager, world_size)
    batch = config.train.global_batch // m * min(m, MICRO_BATCHES)
    return eager.changed(train={"global_batch": batch})


def notes(config: RunConfig, traced: RunConfig, world_size: int) -> Iterator[str]:
    """List the differences between the trace and the run."""
    if config.compile.enable:
        yield "traced and predicted without compile.enable: eager blocks and losses keep more"
    if config.parallel.async_tp:
        yield "traced and predicted without parallel.async_tp, which fuses tp's collectives"
    if config.parallel.copy_engines:
        yield "traced and predicted without parallel.copy_engines, whose memory torch does not see"
    if config.parallel.bounded:
        yield 'traced and predicted with parallel.dispatcher = "all_to_all", without a capacity'
    if config.parallel.dispatcher == "deepep":
        yield 'traced and predicted with parallel.dispatcher = "all_to_all", not DeepEP'
    rings = {"ring", "hierarchical"} & set(config.parallel.cp_methods())
    if config.parallel.cp > 2 and rings and Resolved.model_of(config).window:
        yield "ring attention with windows: halos are predicted for the rank that receives most"
    if config.data.mask_documents:
        yield "each sequence is one document"
    if Resolved.model_of(config).n_experts:
        yield (
            "traced with even expert loads; plain torch permutes token copies, in more memory "
            "than the GPU kernels"
        )
    whole, part = (each.micro_batches(world_size) for each in (config, traced))
    if whole != part:
        yield f"traced with {part} of {whole} micro-batches: the same memory, fewer collectives"


def distinct(run: Resolved) -> list[int]:
    """List the global ranks to trace: the first rank of each traced pipeline rank."""
    pp = run.degrees["pp"]
    indices = {0, min(1, pp - 1), max(pp - 2, 0), pp - 1}
    return [index * (run.world_size // pp) for index in sorted(indices)]


def traces(config: RunConfig, world_size: int, ranks: Sequence[int]) -> list[RankTrace]:
    """Trace each rank in a separate process, as many at once as there are processors."""
    at_once = os.cpu_count() or 1
    found: list[RankTrace] = []
    for first in range(0, len(ranks), at_once):
        started = [_start(config, world_size, rank) for rank in ranks[first : first + at_once]]
        try:
            found += [_receive(pipe) for _, pipe in started]
        finally:
            for process, _ in started:
                process.kill()
                process.join()
    return found


def _start(config: RunConfig, world_size: int, rank: int) -> tuple[BaseProcess, Connection]:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([trace.__module__])  # torch is imported once
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_send_trace, args=(theirs, config, world_size, rank))
    process.start()
    theirs.close()
    return process, ours


def _send_trace(pipe: Connection, config: RunConfig, world_size: int, rank: int) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send(trace(config, world_size, rank))
    except Exception:  # torch's own exceptions may not be picklable
        pipe.send(f"rank {rank} could not be traced:\n{traceback.format_exc()}")


def _receive(pipe: Connection) -> RankTrace:
    try:
        found = pipe.recv()
    except EOFError:
        raise RuntimeError("--exact: a tracing process ended without a result") from None
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def compared(run: Resolved, estimate: RankMemory, found: RankTrace) -> dict[str, Any]:
    """Return pairs {exact, predicted} of a rank's memory and collectives."""
    pairs = {
        "parameters": (found.parameters, estimate.classes["parameters"]),
        "gradients": (found.gradients, estimate.gradients),
        "optimizer": (found.optimizer, estimate.classes["optimizer"]),
        "peak": (found.peak, estimate.peak),
    }
    made, planned = counted(run, found), predicted(run, estimate.rank)
    return {
        "rank": found.rank,
        "place": dict(found.place),
        **{name: _pair(*pair) for name, pair in pairs.items()},
        "at_peak": dict(found.at_peak),
        "collectives": [
            {
                "axis": axis,
                "kind": kind,
                "count": _pair(made[axis, kind][0], planned[axis, kind][0]),
                "bytes": _pair(made[axis, kind][1], planned[axis, kind][1]),
            }
            for axis, kind in sorted(made.keys() | planned.keys())
        ],
        "seconds": found.seconds,
    }


def _pair(exact: float, predicted: float) -> dict[str, float]:
    return {"exact": exact, "predicted": predicted}


def counted(run: Resolved, found: RankTrace) -> Counts:
    """Count the collectives that the real code issued.

    A point-to-point transfer counts once, as a send.
    """
    sums: Counts = defaultdict(lambda: [0.0, 0.0])
    for label, kinds in found.collectives.items():
        for kind, figures in kinds.items():
            if kind != "recv" and (axis := axis_of(run, label)):  # "": a group of one rank
                _add(sums, (axis, kind), figures["count"], figures["bytes"])
    return sums


def predicted(run: Resolved, rank: int) -> Counts:
    """Count the collectives that the planner predicts for a pipeline rank."""
    sums: Counts = defaultdict(lambda: [0.0, 0.0])
    for each in collectives(run, rank):
        key = (axis_of(run, each.axis), each.kind)
        _add(sums, key, each.count, each.count * each.size)
    return sums


def _add(sums: Counts, key: tuple[str, str], count: float, size: float) -> None:
    sums[key][0] += count
    sums[key][1] += size


def axis_of(run: Resolved, label: str) -> str:
    """Return the canonical name of a group of ranks.

    Axes with one rank are dropped; a group of all ranks is `world`; inner and outer groups of an
    axis have the name of the axis; empty: a group of one rank.
    """
    sizes: Mapping[str, int] = {**run.degrees, **run.experts}
    names = [name.partition("_outer")[0].partition("_inner")[0] for name in label.split("+")]
    if label != "world" and not sizes.keys() >= set(names):
        return label
    wide = [name for name in names if sizes.get(name, 0) > 1]
    ranks = 1
    for name in wide:
        ranks *= sizes[name]
    return "world" if label == "world" or ranks == run.world_size else "+".join(wide)


def print_exact(console: Console, found: dict[str, Any]) -> None:
    """Print tables: the memory of all traced pipeline ranks, and the collectives of the first."""
    for note in found["notes"]:
        console.print(f"exact: {note}", markup=False, soft_wrap=True)
    console.print(_memory_table(found["ranks"]))
    console.print(_collective_table(found["ranks"][0]))
    console.print(f"traced in {found['seconds']:.0f} s", markup=False)


def _memory_table(ranks: list[dict[str, Any]]) -> Table:
    headings = ("pp rank", "GiB", "exact", "predicted", "deviation", "parts of the peak")
    made = table("memory, GiB: allocated by the code, and predicted", headings, words=2)
    for rank in ranks:
        for name in ("parameters", "gradients", "optimizer", "peak"):
            largest = sorted(rank["at_peak"].items(), key=lambda item: -item[1])
            parts = ", ".join(f"{part} {size / GIB:.2f}" for part, size in largest if size)
            first = str(rank["place"]["pp"]) if name == "parameters" else ""
            shown = parts if name == "peak" else ""
            made.add_row(first, name, *_cells(rank[name], GIB, ".2f"), shown)
    return made


def _collective_table(rank: dict[str, Any]) -> Table:
    headings = ("axis", "collective", "calls", "predicted", "", "GB", "predicted", "deviation")
    made = table("collectives of the first pipeline rank", headings, words=2)
    for row in rank["collectives"]:
        cells = [*_cells(row["count"], 1, ",.0f"), *_cells(row["bytes"], 1e9, ",.4g")]
        made.add_row(row["axis"], row["kind"], *cells)
    return made


def _cells(pair: dict[str, float], unit: float, form: str) -> tuple[str, str, str]:
    real, estimate = pair["exact"], pair["predicted"]
    apart = (
        "equal" if real == estimate else "missed" if not estimate else "absent" if not real else ""
    )
    return (
        format(real / unit, form),
        format(estimate / unit, form),
        apart or f"{estimate / real - 1:+.2%}",
    )
