"""The one place that states the order in which a plain model becomes a parallel one.

    model on meta -> float8 -> recompute -> compile -> fsdp -> storage -> weights -> optimizer

Recomputation is inside the compiled block, so that the compiler sees it; FSDP is outside, so that
its hooks are not compiled. Passes act in place and keep every parameter's FQN.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import nn

from dtron.config import Compile, Parallel, Recompute
from dtron.errors import ConfigError
from dtron.parallelisms.compile import compile_blocks
from dtron.parallelisms.fsdp import DTYPES, shard
from dtron.parallelisms.initialize import (
    Initializer,
    broadcast_from_first_rank,
    initialize,
    materialize,
)
from dtron.parallelisms.mesh import Mesh
from dtron.parallelisms.placement import (
    Unit,
    refuse_shared_parameters,
    select,
    select_units,
)
from dtron.parallelisms.recompute import recompute as apply_recompute

log = logging.getLogger("dtron")
AnyModule = TypeVar("AnyModule", bound=nn.Module)


@dataclass(frozen=True)
class Applied:
    """What the passes did, for run.json and the log."""

    units: int
    recomputed_blocks: int
    compiled: tuple[str, ...]


def parallelize(
    model: AnyModule,
    mesh: Mesh,
    *,
    units: Unit | Sequence[Unit],
    blocks: str | None = None,
    parallel: Parallel = Parallel(),
    dtype: str = "bfloat16",
    recompute: Recompute = Recompute(),
    compile: Compile = Compile(),
    init: tuple[int, Initializer] | None = None,
    convert: Callable[[nn.Module], None] | None = None,
) -> AnyModule:
    """Parallelise any module over a mesh, in place, and return it.

        mesh = Mesh(dp_shard=-1)
        model = parallelize(MyModel(), mesh, units="blocks.*", dtype="float32")

    Args:
        units: modules that are gathered together, as patterns (`blocks.*`) or tuples of patterns.
            What no unit covers is gathered by the root.
        parallel: of its keys `zero`, `reduce_dtype` and `prefetch` act here; the degrees are the
            mesh's. Under gradient accumulation call `begin_micro_batch` before each backward.
        blocks: pattern of the modules to recompute and compile; by default the pattern in `units`
            that has a `*`.
        dtype: dtype of computation; parameters keep theirs.
        init: (seed, initializer) draws the weights of a model built on the meta device; without it
            the module's own weights and buffers are kept: rank 0's, on all ranks.
        convert: a pass over the unsharded model that comes first (float8).

    Raises:
        PlacementError: a pattern matches nothing, a module is in two units, or a parameter is
            shared by modules of different units.
        ConfigError: an axis of the mesh is not built yet, or a model on the meta device comes
            without `init`.
    """
    if init is None:
        broadcast_from_first_rank(model, torch.device(mesh.device_type))
    passes = apply_passes(
        model,
        mesh,
        units=units,
        blocks=blocks,
        parallel=parallel,
        dtype=dtype,
        recompute=recompute,
        compile=compile,
        init=init,
        convert=convert,
    )
    log.debug("parallelised: %s", passes)
    return model


def apply_passes(
    model: nn.Module,
    mesh: Mesh,
    *,
    units: Unit | Sequence[Unit],
    blocks: str | None,
    parallel: Parallel,
    dtype: str,
    recompute: Recompute,
    compile: Compile,
    init: tuple[int, Initializer] | None,
    convert: Callable[[nn.Module], None] | None,
) -> Applied:
    """All passes in their order; see `parallelize`. Returns what they did."""
    for axis in ("pp", "cp", "tp"):
        if mesh.degrees[axis] > 1:
            raise ConfigError(
                f"{axis} = {mesh.degrees[axis]}: only data parallelism is built; use 1"
            )
    for axis in ("dp_replicate", "dp_shard", "pp", "cp", "tp"):
        if (asked := getattr(parallel, axis)) not in (-1, 1, mesh.degrees[axis]):
            raise ConfigError(f"parallel.{axis} = {asked} on a mesh of {mesh.degrees[axis]}")
    if convert is not None:
        convert(model)
    wants_blocks = recompute.mode != "none" or compile.enable
    block_modules = select(model, _block_pattern(units, blocks)) if wants_blocks else {}
    recomputed = apply_recompute(block_modules.values(), recompute)
    compiled = compile_blocks(block_modules, compile)
    found = select_units(model, units)
    refuse_shared_parameters(model, found)
    groups = [list(group.values()) for group in found]
    shard(model, mesh, groups, parallel, DTYPES[dtype])
    if init is not None:
        seed, fill = init
        materialize(model, torch.device(mesh.device_type))
        initialize(model, seed, fill)
    return Applied(len(groups), recomputed, tuple(compiled))


def _block_pattern(units: Unit | Sequence[Unit], blocks: str | None) -> str:
    if blocks is not None:
        return blocks
    for unit in [units] if isinstance(units, str) else units:
        if isinstance(unit, str) and "*" in unit:
            return unit
    raise ConfigError("recompute and compile act on blocks: name their pattern, as in blocks.*")
