"""Batches of equal matrices in Muon's update, and the time of Newton-Schulz.

Of k matrices (A, B), a = min(A, B), b = max(A, B), a rank computes ceil(k / ranks), for 5 times
4 a^2 b + 2 a^3 FLOPs each.

Source: parallelisms/matrix_owners.py, dtron/training/optim/muon.py.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from dtron.plan.hardware import Hardware
from dtron.plan.parameters import Parameter, local_shapes, parameters
from dtron.plan.run_shape import Resolved
from dtron.training.optim.muon import LARGEST, STEPS


@dataclass(frozen=True)
class Batch:
    """Equal matrices of one pipeline rank, sharded alike."""

    matrix: tuple[int, int]
    matrices: int
    """Number of matrices of which a rank has shards."""
    elements: int
    """Elements of these shards."""
    calls: int
    """Number of batches that they are divided into."""
    axes: Mapping[str, int]
    """Ranks of each exchange, by axis: fsdp, tp, edp_shard, etp and dp_replicate."""


def batches(run: Resolved, rank: int) -> Iterator[Batch]:
    """Yield the batches of a pipeline rank; none without Muon."""
    if run.config.optim.name != "muon":
        return
    layers = [layer for stage in run.stages_of(rank) for layer in stage.layers]
    hidden = [p for layer in layers for p in parameters(run, run.kind(layer), layer) if p.hidden]
    alike = Counter((p.shape, p.split, *_shard(run, p)) for p in hidden)
    for (shape, split, shard, dim, expert), n in alike.items():
        axes = _axes(run, len(shape) - 2, split, dim, expert)
        ranks = math.prod(axes.values())
        stacked = max(1, math.prod(shard[:-2]))
        each = max(-(-ranks // stacked), LARGEST // max(1, math.prod(shard)))
        matrices = n * math.prod(shard[:-2])
        yield Batch((shape[-2], shape[-1]), matrices, n * math.prod(shard), -(-n // each), axes)


def newton_schulz(run: Resolved, rank: int, hardware: Hardware) -> float:
    """Seconds of Newton-Schulz on a pipeline rank."""
    total = 0.0
    for batch in batches(run, rank):
        a, b = sorted(batch.matrix)
        own = -(-batch.matrices // math.prod(batch.axes.values()))
        products = ((a, b, a), (a, a, a), (a, a, b))
        total += own * STEPS * sum(hardware.product(*sizes) for sizes in products)
    return total


def _shard(run: Resolved, parameter: Parameter) -> tuple[tuple[int, ...], int, bool]:
    _, shard, dim, _ = local_shapes(run, parameter)
    return tuple(shard), dim, parameter.expert and run.separate_experts


def _axes(run: Resolved, stacked: int, split: int | None, dim: int, expert: bool) -> dict[str, int]:
    """Ranks by axis. `stacked`: 1 if dim 0 is that of experts, which needs no exchange."""
    shards = run.experts["edp_shard"] if expert else run.shards
    inside = run.experts["etp"] if expert else run.tp if split is not None else 1
    found = {
        "edp_shard" if expert else "fsdp": shards if dim >= stacked else 1,
        "etp" if expert else "tp": inside,
        "dp_replicate": run.degrees["dp_replicate"],
    }
    return {axis: ranks for axis, ranks in found.items() if ranks > 1}
