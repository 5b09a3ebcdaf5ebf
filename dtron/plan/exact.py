"""`dtron plan --exact`: what the real code allocates and sends, beside what is predicted of it.

Each distinct rank is traced (`tracing.py`) in a process of its own, so that no process group, mesh
or cache of one is seen by another, or is left. Ranks of a pipeline differ; of those between the
first and the last one, the first and the last are traced. Others differ by their index in data,
context or tensor parallelism alone: the first stands for all, as shards are largest there.
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

from dtron.config import Parallel, RunConfig
from dtron.errors import ConfigError
from dtron.plan.communication import collectives
from dtron.plan.memory import RankMemory, memory
from dtron.plan.report import GIB, table
from dtron.plan.run_shape import Resolved, shortened
from dtron.plan.tracing import Traced, trace

MICRO_BATCHES = 3
"""Of a step without a pipeline: the first, one in between and the last differ."""

Counts = defaultdict[tuple[str, str], list[float]]
"""(axis, collective) -> [calls, bytes]."""


def exact(config: RunConfig, world_size: int) -> dict[str, Any]:
    """Trace a legal run: {notes, micro_batches, ranks, seconds}; each of `ranks` has pairs of what
    the code does and what is predicted, by name.

    Raises:
        ConfigError: it cannot be traced.
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
    """What in a run cannot be traced."""
    asked = {
        "float8.recipe: its kernels are for GPUs, and what is emulated allocates otherwise": bool(
            config.float8.recipe
        ),
        "recompute.offload: it copies by streams, which a CPU has not": config.recompute.offload,
        'mixtures in train.dtype = "float32": torch traces grouped products in bfloat16 alone': (
            config.train.dtype == "float32" and Resolved.model_of(config).n_experts > 0
        ),
    }
    return [reason for reason, present in asked.items() if present]


def traceable(config: RunConfig, world_size: int) -> RunConfig:
    """The run as it is traced: eager, on no stream of its own, with fewer micro-batches."""
    plain = {"async_tp": False, "high_priority": [], "copy_engines": False}
    plain |= {"dispatcher": "all_to_all", "ep_capacity": Parallel().ep_capacity}
    parallel = config.parallel.model_copy(update=plain)
    compile = config.compile.model_copy(update={"enable": False})
    eager = config.model_copy(update={"parallel": parallel, "compile": compile})
    m = eager.micro_batches(world_size)
    if parallel.pp > 1:
        return shortened(eager, world_size)
    batch = config.train.global_batch // m * min(m, MICRO_BATCHES)
    train = config.train.model_copy(update={"global_batch": batch})
    return eager.model_copy(update={"train": train})


def notes(config: RunConfig, traced: RunConfig, world_size: int) -> Iterator[str]:
    """What is otherwise in the trace than in the run."""
    if config.compile.enable:
        yield "traced and predicted without compile.enable: eager blocks and losses keep more"
    if config.parallel.async_tp:
        yield "traced and predicted without parallel.async_tp, which fuses tp's collectives"
    if config.parallel.copy_engines:
        yield "traced and predicted without parallel.copy_engines, whose memory torch does not see"
    if config.parallel.dispatcher == "symmetric_memory":
        yield 'traced and predicted with parallel.dispatcher = "all_to_all": nothing is bounded'
    if config.parallel.dispatcher == "deepep":
        yield 'traced and predicted with parallel.dispatcher = "all_to_all": no buffers of DeepEP'
    rings = {"ring", "hierarchical"} & set(config.parallel.cp_methods())
    if config.parallel.cp > 2 and rings and Resolved.model_of(config).window:
        yield "what rings send for windows is predicted of the rank that receives most"
    if config.data.mask_documents:
        yield "each sequence is one document"
    if Resolved.model_of(config).n_experts:
        yield (
            "loads of experts are even; rows are sorted by torch's formulas, which hold more than "
            "the kernels of GPUs"
        )
    whole, part = (each.micro_batches(world_size) for each in (config, traced))
    if whole != part:
        yield f"{part} of the step's {whole} micro-batches: memory is the same, collectives fewer"


def distinct(run: Resolved) -> list[int]:
    """The ranks to trace, in the world."""
    pp = run.degrees["pp"]
    indices = {0, min(1, pp - 1), max(pp - 2, 0), pp - 1}
    return [index * (run.world_size // pp) for index in sorted(indices)]


def traces(config: RunConfig, world_size: int, ranks: Sequence[int]) -> list[Traced]:
    """Each in a process of its own, as many at once as there are processors."""
    at_once = os.cpu_count() or 1
    found: list[Traced] = []
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
    except Exception:  # those of torch may not be sent
        pipe.send(f"rank {rank} could not be traced:\n{traceback.format_exc()}")


def _receive(pipe: Connection) -> Traced:
    try:
        found = pipe.recv()
    except EOFError:
        raise RuntimeError("a process that traces a rank died") from None
    if isinstance(found, str):
        raise RuntimeError(found)
    return found


def compared(run: Resolved, estimate: RankMemory, found: Traced) -> dict[str, Any]:
    """A rank's figures, each a pair {exact, predicted}."""
    # Sums over micro-batches are whole, and reduced into shards as large as the parameters'.
    pairs = {
        "parameters": (found.parameters, estimate.classes["parameters"]),
        "gradients": (found.gradients, estimate.classes["parameters"]),
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


def counted(run: Resolved, found: Traced) -> Counts:
    """What the code sent. What is received is what others send."""
    sums: Counts = defaultdict(lambda: [0.0, 0.0])
    for label, kinds in found.collectives.items():
        for kind, figures in kinds.items():
            if kind != "recv" and (axis := axis_of(run, label)):  # not among one rank alone
                _add(sums, (axis, kind), figures["count"], figures["bytes"])
    return sums


def predicted(run: Resolved, rank: int) -> Counts:
    """The planner's collectives of a pipeline rank."""
    sums: Counts = defaultdict(lambda: [0.0, 0.0])
    for each in collectives(run, rank):
        key = (axis_of(run, each.axis), each.kind)
        _add(sums, key, each.count, each.count * each.size)
    return sums


def _add(sums: Counts, key: tuple[str, str], count: float, size: float) -> None:
    sums[key][0] += count
    sums[key][1] += size


def axis_of(run: Resolved, label: str) -> str:
    """One name for a group of ranks that several axes may name: without axes of one rank, `world`
    if it has all ranks. The parts of cp are all cp."""
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
    """What was traced, as tables: memory of each rank, collectives of the first."""
    for note in found["notes"]:
        console.print(f"exact: {note}", markup=False, soft_wrap=True)
    console.print(_memory_table(found["ranks"]))
    console.print(_collective_table(found["ranks"][0]))
    console.print(f"traced in {found['seconds']:.0f} s", markup=False)


def _memory_table(ranks: list[dict[str, Any]]) -> Table:
    headings = ("pp rank", "GiB", "exact", "predicted", "deviation", "of it")
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
