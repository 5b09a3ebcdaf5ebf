"""The one place that states the order in which a plain model becomes a parallel one.

    model on meta -> float8 -> padded vocabulary -> cut into stages -> for each stage:
        tensor parallel -> expert parallel -> context parallel -> deferred weight gradients
        -> loss in the head -> recompute and compile -> offload -> fsdp -> storage -> weights
    -> optimizer

Patterns are checked on the whole model, before a stage lacks a part of it. Selective recomputation
is inside the compiled block, so that the compiler sees it, full one around it; offload is around
both and sees what they keep. FSDP is outside, so that its hooks are not compiled. Passes act in
place and keep every parameter's FQN.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from dtron.config import Compile, Parallel, Recompute
from dtron.errors import ConfigError
from dtron.parallelisms.compile import compile_activations, compile_blocks
from dtron.parallelisms.context.apply import Context, apply_context
from dtron.parallelisms.expert.expert_parallel import (
    Dispatcher,
    ExpertLayers,
    apply_experts,
    breaks_graph,
    in_graphs,
    make_dispatcher,
    on_separate_mesh,
    refuse_half_compiled,
)
from dtron.parallelisms.expert.symmetric_exchange import IN_ORDER
from dtron.parallelisms.fsdp.sharding import DTYPES, Policy, free_gathered, shard
from dtron.parallelisms.gradients import reduce_replicas
from dtron.parallelisms.initialize import (
    Initializer,
    broadcast_from_first_rank,
    initialize,
    materialize,
)
from dtron.parallelisms.mesh import FSDP_AXES, Mesh
from dtron.parallelisms.offload import SMALLEST, Offload
from dtron.parallelisms.pipeline.accumulate import Accumulation, Execution
from dtron.parallelisms.pipeline.executor import Layout, Pipeline
from dtron.parallelisms.pipeline.split_backward import COMPILE_OPTIONS, defer
from dtron.parallelisms.pipeline.stages import Cut, SharedWeights, cut, take_stage, uncut
from dtron.parallelisms.pipeline.weight_gradients import WeightGradients
from dtron.parallelisms.placement import (
    Unit,
    experts,
    present,
    refuse_shared_parameters,
    select,
    select_units,
)
from dtron.parallelisms.recompute import recompute as apply_recompute
from dtron.parallelisms.tensor.async_tp import check_rows
from dtron.parallelisms.tensor.head_loss import HeadLoss, attach_loss
from dtron.parallelisms.tensor.tensor_parallel import (
    Placements,
    Plan,
    Replicas,
    apply_tensor_parallel,
    pad_vocabulary,
    plan,
    settle_outputs,
    shared_heads,
)


@dataclass(frozen=True)
class ParallelPlan:
    """How to parallelise a model over a mesh; the argument of `parallelize` and `pipeline`."""

    units: Unit | Sequence[Unit]
    """Modules that FSDP gathers together, as patterns (`blocks.*`) or tuples of patterns. Modules
    that no unit covers are gathered by the root."""
    blocks: str | None = None
    """Pattern of the modules to recompute and compile; None: the pattern in `units` with a `*`."""
    placements: Placements | None = None
    """How modules are sharded over tp: rows of `parallelisms.placement` by pattern, or by tuple of
    patterns. Every parameter must be covered. Needed if tp > 1."""
    parallel: Parallel = Parallel()
    """Its keys `zero`, `reduce`, `reduce_dtype`, `reduce_by`, `copy_engines` and `prefetch` apply,
    the last four if ranks share parameters; the degrees are the mesh's."""
    dtype: str = "bfloat16"
    """Dtype of computation; parameters keep theirs."""
    recompute: Recompute = Recompute()
    compile: Compile = Compile()
    init: tuple[int, Initializer] | Callable[[nn.Module], None] | None = None
    """(seed, initializer) draws the weights of a model on the meta device; a function materializes
    a stage by itself; None: the module's own weights and buffers, those of rank 0 on all ranks."""
    convert: Callable[[nn.Module], None] | None = None
    """A pass over the unsharded model that comes first (float8)."""
    context: Context | None = None
    """Settings of context-parallel attention, needed if cp > 1: a rank then calls the model with
    its shard of each sequence, as `Split` gives it."""
    experts: ExpertLayers | None = None
    """Which modules are stacked experts; needed if ep or etp > 1, and for a row `experts()`."""


@dataclass(frozen=True)
class Passes(ParallelPlan):
    """A plan with what the trainer and the plug-in add to it."""

    vocabulary: tuple[str, ...] = ()
    """Modules with one row per vocabulary token, padded with zeros if tp does not divide them."""
    layout: Layout | None = None
    """The stages to cut the model into, if pp > 1."""
    replicas: Replicas = "backward"
    """When gradients of parameters that each tp rank computes in part are summed: by each
    backward, or by the caller's `reduce_replicas` once per step."""
    keep_rng: bool = False
    """Whether recomputation starts from the random state of the first forward."""
    loss: tuple[str, HeadLoss] | None = None
    """FQN of the head, and a function that computes the summed loss in the head's call if the model
    is called with labels."""
    smallest_offload: int = SMALLEST
    """Smaller tensors (bytes) stay on the device under activation offload."""


@dataclass(frozen=True)
class Applied:
    """What the passes made of a model."""

    parts: Mapping[int, nn.Module]
    """This rank's stages by number; {0: the model} where it is not cut."""
    units: int
    recomputed_blocks: int
    compiled: tuple[str, ...]
    padded_rows: Mapping[str, int]
    """Rows without padding, by name, of parameters with a padded vocabulary."""
    partial: frozenset[str]
    """Names of parameters that `reduce_replicas` has to sum over tp once a step."""
    names: Mapping[str, str]
    """FQN of a parameter -> the FQN that names it; they differ for a tied weight's second FQN."""
    shared: SharedWeights
    """Parameters whose gradients have to be summed with another stage's once a step."""
    deferred: Mapping[int, WeightGradients]
    """Queues of weight gradients of the stages whose backward is split."""
    loss_in_head: bool
    """Whether the model, called with labels, gives the summed loss."""
    offload: Offload | None
    """What offloads activations, where it is asked for."""
    dispatcher: Dispatcher | None
    """What brings rows to experts on other ranks, where there are some."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name, parameter) of all stages; a tied weight comes twice if both stages are here."""
        for part in self.parts.values():
            for fqn, parameter in part.named_parameters():
                yield self.names[fqn], parameter

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Stages in evaluation mode; afterwards each module as before, parameters freed."""
        modes = {m: m.training for part in self.parts.values() for m in part.modules()}
        for part in self.parts.values():
            part.eval()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
            for part in self.parts.values():
                free_gathered(part)

    def complete_gradients(self, mesh: Mesh) -> None:
        """What is left to sum once a step, after the backward of the last micro-batch."""
        partial = [p for name, p in self.named_parameters() if name in self.partial]
        reduce_replicas(partial, mesh.group("tp"))
        self.shared.sum_gradients(mesh.group("pp"))


def build_execution(
    applied: Applied, layout: Layout | None, mesh: Mesh, policy: Policy
) -> Execution:
    """What runs micro-batches: through a pipeline, or one after the other."""
    if layout is not None:
        return Pipeline(applied.parts, layout, mesh, policy, applied.deferred)
    return Accumulation(applied.parts[0], policy, torch.device(mesh.device_type))


def apply_passes(model: nn.Module, mesh: Mesh, passes: Passes) -> Applied:
    """All passes in their order; see `plugin.parallelize`. Returns what they made."""
    _check_axes(mesh, passes)
    if passes.init is None:
        broadcast_from_first_rank(model, torch.device(mesh.device_type))
    if passes.convert is not None:
        passes.convert(model)
    tp, pp = mesh.size("tp"), mesh.rank("pp")
    padded = pad_vocabulary(model, passes.vocabulary, tp)
    made = plan(model, passes.placements or {}, tp) if tp > 1 else Plan({}, ())
    for n_heads in sorted(shared_heads(made, tp)):
        mesh.heads(n_heads)  # made by all ranks together, whatever their stages have
    if passes.parallel.async_tp:
        check_rows(dict(model.named_modules()), made.rows)
    units = select_units(model, passes.units)
    refuse_shared_parameters(model, units)
    pieces, ranks, parts = uncut(model), (0,), {0: model}
    if passes.layout is not None:
        pieces, ranks = cut(model, passes.layout.stages), passes.layout.ranks
        parts = {s: take_stage(model, pieces, s) for s, rank in enumerate(ranks) if rank == pp}
    whole = _WholeModel(
        [list(unit) for unit in units],
        _blocks(model, passes),
        _cores(model, mesh, passes),
        _experts(model, mesh, passes, units),
        make_dispatcher(passes.experts, mesh) if passes.experts else None,
        made,
        padded,
        pieces,
    )
    offload = None
    if passes.recompute.offload:
        offload = Offload(torch.device(mesh.device_type), passes.smallest_offload)
    done = [_apply_to_part(s, part, whole, mesh, passes, offload) for s, part in parts.items()]
    return Applied(
        parts,
        units=sum(part.units for part in done),
        recomputed_blocks=sum(part.recomputed for part in done),
        compiled=tuple(name for part in done for name in part.compiled),
        padded_rows=padded,
        partial=frozenset(made.partial) if passes.replicas == "step" else frozenset(),
        names=pieces.names,
        shared=SharedWeights.of(pieces, parts, ranks, pp),
        deferred={
            stage: part.deferred for stage, part in zip(parts, done, strict=True) if part.deferred
        },
        loss_in_head=passes.loss is not None,
        offload=offload,
        dispatcher=whole.dispatcher,
    )


@dataclass(frozen=True)
class _StageResult:
    """What the passes did to one stage."""

    units: int
    recomputed: int
    compiled: list[str]
    deferred: WeightGradients | None


@dataclass(frozen=True)
class _WholeModel:
    """What is known of the whole model before it is cut."""

    units: list[list[str]]
    """FQNs of the modules of each unit."""
    blocks: list[str]
    """FQNs of the blocks to recompute, compile and offload, in order."""
    cores: list[str]
    """FQNs of the modules that attend, in order; none where cp is 1."""
    experts: list[str]
    """FQNs of the experts that have a mesh of their own."""
    dispatcher: Dispatcher | None
    made: Plan
    padded: Mapping[str, int]
    pieces: Cut


def _apply_to_part(
    stage: int,
    part: nn.Module,
    whole: _WholeModel,
    mesh: Mesh,
    passes: Passes,
    offload: Offload | None,
) -> _StageResult:
    """The passes over one stage. Names are those of the whole model; it may lack some."""
    held = present(dict(part.named_modules()))
    split = passes.layout.deferred(stage, part) if passes.layout else []
    if whole.made.rows:
        overlap = passes.parallel.async_tp
        apply_tensor_parallel(
            part, mesh.flat("tp"), whole.made, passes.replicas, overlap, mesh.heads
        )
    apart = {name: held[name] for name in whole.experts if name in held}
    if passes.experts is not None and apart:
        apply_experts(apart, passes.experts, mesh, whole.dispatcher)
    if passes.context is not None and whole.cores:
        cores = [(i, held[name]) for i, name in enumerate(whole.cores) if name in held]
        apply_context(cores, passes.context, mesh.size("cp"), mesh.context, mesh.device_type)
    deferred = defer(split, passes.compile.enable) if split else None
    if passes.loss is not None and passes.loss[0] in held:
        head, loss = passes.loss
        attach_loss(held[head], loss)
    blocks = [(i, name, held[name]) for i, name in enumerate(whole.blocks) if name in held]
    broken = {block for block in whole.blocks if breaks_graph(block, apart, whole.dispatcher)}
    if broken:
        compile_activations(apart.values(), passes.compile)
    options = _inductor_options(passes, whole.dispatcher if apart else None)
    recomputed, compiled = _wrap_blocks(blocks, passes, offload, broken, options)
    if offload is not None:
        offload.attach(stage, [block for _, _, block in blocks])
    if compiled:
        settle_outputs(part, compiled, whole.made)
    units = [[held[name] for name in unit if name in held] for unit in whole.units]
    units = [unit for unit in units if unit]
    names = whole.pieces.names
    by_columns = [p for fqn, p in part.named_parameters() if names[fqn] in whole.padded]
    _check_columns(by_columns, mesh)
    shard(
        part,
        mesh,
        units,
        passes.parallel,
        DTYPES[passes.dtype],
        by_columns,
        keep_last=passes.layout is None,
        experts=apart.values(),
    )
    if callable(passes.init):
        passes.init(part)
    elif passes.init is not None:
        seed, fill = passes.init
        materialize(part, torch.device(mesh.device_type))
        initialize(part, seed, fill, names, whole.padded)
    return _StageResult(len(units), recomputed, compiled, deferred)


def _inductor_options(passes: Passes, dispatcher: Dispatcher | None) -> dict[str, Any]:
    splits = passes.layout is not None and passes.layout.splits_backward
    held = dispatcher is not None and in_graphs(dispatcher)
    return {**(COMPILE_OPTIONS if splits else {}), **(IN_ORDER if held else {})}


def _wrap_blocks(
    blocks: Sequence[tuple[int, str, nn.Module]],
    passes: Passes,
    offload: Offload | None,
    broken: Collection[str],
    options: Mapping[str, Any],
) -> tuple[int, list[str]]:
    """Recompute and compile (index in the model, FQN, block); how many recompute, which compile."""
    named = {name: block for _, name, block in blocks}
    numbered = [(i, block) for i, _, block in blocks]
    if passes.recompute.mode == "full":
        # A block that is recomputed whole is compiled inside: torch 2.13 cannot save the mesh of a
        # DTensor for a compiled block that holds its own recomputation.
        compiled = compile_blocks(named, passes.compile, options, True, broken)
        return apply_recompute(numbered, passes.recompute, passes.keep_rng), compiled
    # What a compiled graph keeps is offloaded as any block's; what is kept eagerly is in a cache.
    watch = offload.watch if offload is not None and not passes.compile.enable else None
    recomputed = apply_recompute(numbered, passes.recompute, passes.keep_rng, watch)
    forward_only = offload is not None
    return recomputed, compile_blocks(named, passes.compile, options, forward_only, broken)


def _check_axes(mesh: Mesh, passes: Passes) -> None:
    if mesh.degrees["cp"] > 1 and passes.context is None:
        raise ConfigError(
            f"cp = {mesh.degrees['cp']} needs `context`: which modules attend, such as "
            'Context("blocks.*.attn.core")'
        )
    for axis in ("dp_replicate", "dp_shard", "pp", "cp", "tp"):
        if (asked := getattr(passes.parallel, axis)) not in (-1, 1, mesh.degrees[axis]):
            raise ConfigError(f"parallel.{axis} = {asked} on a mesh of {mesh.degrees[axis]}")
    for axis in ("ep", "etp"):
        if (asked := getattr(passes.parallel, axis)) not in (1, mesh.expert_degrees[axis]):
            raise ConfigError(f"parallel.{axis} = {asked} on a mesh of {mesh.expert_degrees[axis]}")
    if mesh.expert_degrees["ep"] * mesh.expert_degrees["etp"] > 1 and passes.experts is None:
        raise ConfigError(
            f"ep x etp = {mesh.expert_degrees['ep'] * mesh.expert_degrees['etp']} needs `experts`: "
            'which modules are split, such as ExpertLayers("blocks.*.experts")'
        )
    ranks = mesh.expert_degrees["ep"] * mesh.expert_degrees["etp"]
    if passes.experts is not None:
        kind = passes.experts.dispatcher
        refuse_half_compiled(passes.recompute, passes.compile, ranks, kind)
    if mesh.size("tp") > 1 and passes.experts is None and experts() in _rows(passes):
        raise ConfigError("a row experts() needs `experts`: which modules are stacked experts")
    if mesh.size("tp") > 1 and not passes.placements:
        raise ConfigError(
            f"tp = {mesh.size('tp')} needs `placements`: rows such as "
            '{"blocks.*.up": colwise(), "blocks.*.down": rowwise()}'
        )


def _rows(passes: Passes) -> list[Any]:
    return list((passes.placements or {}).values())


def _check_columns(by_columns: Sequence[nn.Parameter], mesh: Mesh) -> None:
    """A padded vocabulary is sharded by width, so that its padding stays at one end."""
    ranks = mesh.size(*FSDP_AXES)
    for parameter in by_columns:
        if parameter.shape[1] % ranks:
            raise ConfigError(
                f"a padded vocabulary is sharded by width, and {ranks} ranks do not divide "
                f"{parameter.shape[1]}; use a parallel.dp_shard that does, or a "
                "model.override.vocab_size that parallel.tp divides"
            )


def _blocks(model: nn.Module, passes: Passes) -> list[str]:
    """FQNs of the blocks to recompute, compile and offload; none where nothing is asked for."""
    recompute = passes.recompute
    if recompute.mode == "none" and not recompute.offload and not passes.compile.enable:
        return []
    return list(select(model, _block_pattern(passes.units, passes.blocks)))


def _cores(model: nn.Module, mesh: Mesh, passes: Passes) -> list[str]:
    """FQNs of the modules that attend to several ranks' tokens."""
    if mesh.size("cp") == 1 or passes.context is None:
        return []
    cores = list(select(model, passes.context.cores))
    if len(passes.context.methods) not in (1, len(cores)):
        raise ConfigError(
            f"{len(passes.context.methods)} methods of context parallelism for {len(cores)} "
            "modules that attend; give one for each, or one for all"
        )
    for shape in passes.context.layouts(mesh.size("cp")).values():
        mesh.context(shape.inner)  # made by all ranks together, whatever their stages have
    return cores


def _experts(
    model: nn.Module, mesh: Mesh, passes: Passes, units: Sequence[Collection[str]]
) -> list[str]:
    """FQNs of the experts; none where they are sharded as all else is."""
    if passes.experts is None or not on_separate_mesh(mesh):
        return []
    _ = mesh.experts, mesh.expert_group()  # made by all ranks together, whatever their stages have
    found = list(select(model, passes.experts.experts))
    if own := [name for unit in units for name in unit if name in found]:
        raise ConfigError(
            f"{own[0]} is a unit, but experts are gathered with what they are inside of; name "
            "their block in `units`, or leave them out"
        )
    return found


def _block_pattern(units: Unit | Sequence[Unit], blocks: str | None) -> str:
    if blocks is not None:
        return blocks
    for unit in [units] if isinstance(units, str) else units:
        if isinstance(unit, str) and "*" in unit:
            return unit
    raise ConfigError(
        "recompute, offload and compile act on blocks: name their pattern, as in blocks.*"
    )
