"""Optimizer states in host memory (`optim.offload`): which ones, and their bytes."""

from dtron.plan.parameters import NOT_LAYERS, Sizes, sizes, units
from dtron.plan.run_shape import Resolved, Stage
from dtron.training.optim.offloaded import BUCKET, ON_DEVICE, choose


def trained_shards(run: Resolved, stage: Stage) -> list[list[tuple[Sizes, bool]]]:
    """Return each unit's trained parameters, with whether their moments are in host memory.

    A rank chooses them over all its stages; here each stage chooses its own, which may differ by
    a parameter per stage.
    """
    layers, listed = iter(stage.layers), []
    for unit in units(run, stage):
        layer = None if unit.kind in NOT_LAYERS else next(layers)
        listed.append([n for n in sizes(run, unit.kind, layer) if n.trained])
    chosen = iter(choose([n.shard for own in listed for n in own], run.config.optim.offload))
    return [[(n, next(chosen)) for n in own] for own in listed]


def bytes_on_host(run: Resolved, rank: int) -> float:
    """Return the bytes of a pipeline rank's moments in host memory."""
    optim = run.config.optim
    if not optim.offload:
        return 0.0
    return sum(
        n.shard * sum(optim.moment_bytes(n.hidden))
        for stage in run.stages_of(rank)
        for unit in trained_shards(run, stage)
        for n, on_host in unit
        if on_host
    )


def bytes_of_buckets(run: Resolved, rank: int) -> float:
    """Return the bytes on the device of the moments that an update copies in and out."""
    most = ON_DEVICE * BUCKET * sum(run.config.optim.moment_bytes(hidden=False))
    return min(most, bytes_on_host(run, rank))
