"""Apply all parallelisms to a plain model, in this order:

    model on meta -> float8 -> padded vocabulary -> cut into stages -> for each stage:
        tensor parallel -> expert parallel -> context parallel -> deferred weight gradients
        -> loss in the head -> recompute and compile -> offload -> fsdp -> storage -> weights
    -> optimizer

Patterns are resolved on the whole model, since a stage lacks the modules of other stages. Selective
recomputation is inside the compiled block, so that the compiler sees it; full recomputation wraps
the compiled block. Offload wraps both, and offloads the tensors that they save. FSDP wraps all of
them, so that its hooks are not compiled. Passes act in place and keep every parameter's FQN.
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
    """Settings of `parallelize` and `pipeline`: how to parallelise a model over a mesh."""

    units: Unit | Sequence[Unit]
    """FSDP units: patterns, one unit per module (`blocks.*`), or tuples of patterns, one unit for
    all their modules. All other modules belong to the root's unit."""
    blocks: str | None = None
    """Pattern of the modules to recompute and compile; None: the pattern in `units` with a `*`."""
    placements: Placements | None = None
    """Tensor-parallel sharding: pattern, or tuple of patterns -> row of `parallelisms.placement`.
    Every parameter must be covered. Required if tp > 1."""
    parallel: Parallel = Parallel()
    """Of its keys, `zero`, `reduce`, `reduce_dtype`, `reduce_by`, `copy_engines` and `prefetch` are
    used, the last four only if FSDP shards parameters. Degrees come from the mesh."""
    dtype: str = "bfloat16"
    """Compute dtype; parameters keep their own dtype."""
    recompute: Recompute = Recompute()
    compile: Compile = Compile()
    init: tuple[int, Initializer] | Callable[[nn.Module], None] | None = None
    """How weights are set. (seed, initializer): initialize a model on the meta device. Function:
    it materializes and initializes a stage. None: broadcast weights and buffers from rank 0."""
    convert: Callable[[nn.Module], None] | None = None
    """A pass over the unsharded model, before all others (float8 conversion)."""
    context: Context | None = None
    """Settings of context-parallel attention, required if cp > 1. Each rank then calls the model
    with its shard of each sequence (`context.split.Split`)."""
    experts: ExpertLayers | None = None
    """Which modules are stacked experts; required if ep or etp > 1, and for a row `experts()`."""


@dataclass(frozen=True)
class Passes(ParallelPlan):
    """A ParallelPlan with the settings that only the trainer and the plug-in set."""

    vocabulary: tuple[str, ...] = ()
    """Modules whose weight has one row per vocabulary token. Zero rows are added if tp does not
    divide their number."""
    layout: Layout | None = None
    """The stages to cut the model into, if pp > 1."""
    replicas: Replicas = "backward"
    """When partial gradients of replicated parameters (norms under sequence parallelism) are summed
    over tp: "backward", in each backward; "step", once per step by `complete_gradients`."""
    keep_rng: bool = False
    """Whether recomputation restores the RNG state of the first forward."""
    loss: tuple[str, HeadLoss] | None = None
    """FQN of the head, and a function with which the head returns the summed loss instead of logits
    if the model is called with labels."""
    smallest_offload: int = SMALLEST
    """Activation offload leaves tensors of fewer bytes on the device."""


@dataclass(frozen=True)
class Applied:
    """A model after all passes, as modules of this rank."""

    parts: Mapping[int, nn.Module]
    """This rank's pipeline stages by stage number; {0: model} without a pipeline."""
    units: int
    recomputed_blocks: int
    compiled: tuple[str, ...]
    padded_rows: Mapping[str, int]
    """Number of rows without padding, by name of each parameter with a padded vocabulary."""
    partial: frozenset[str]
    """Names of parameters whose gradients `complete_gradients` sums over tp once per step."""
    names: Mapping[str, str]
    """FQN of a parameter -> its name. They differ only for the second FQN of a tied weight, whose
    name is the first one."""
    shared: SharedWeights
    """Tied weights, whose gradients are summed with those of another stage once per step."""
    deferred: Mapping[int, WeightGradients]
    """Queues of deferred weight gradients, by stage number."""
    loss_in_head: bool
    """Whether the model, called with labels, returns the summed loss."""
    offload: Offload | None
    """Activation offload; None if it is off."""
    dispatcher: Dispatcher | None
    """Sends tokens to experts on other ranks; None if all experts are local."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter) of this rank's stages; a weight tied across them comes twice."""
        for part in self.parts.values():
            for fqn, parameter in part.named_parameters():
                yield self.names[fqn], parameter

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Set evaluation mode inside; then restore the mode and free gathered parameters."""
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
        """Sum the gradients that are summed once per step; call it after the last backward."""
        partial = [p for name, p in self.named_parameters() if name in self.partial]
        reduce_replicas(partial, mesh.group("tp"))
        self.shared.sum_gradients(mesh.group("pp"))


def build_execution(
    applied: Applied, layout: Layout | None, mesh: Mesh, policy: Policy
) -> Execution:
    """Return a Pipeline if the model has stages, else an Accumulation."""
    if layout is not None:
        return Pipeline(applied.parts, layout, mesh, policy, applied.deferred)
    return Accumulation(applied.parts[0], policy, torch.device(mesh.device_type))


def apply_passes(model: nn.Module, mesh: Mesh, passes: Passes) -> Applied:
    """Apply all passes in order, in place; arguments and errors as of `plugin.parallelize`."""
    _check_axes(mesh, passes)
    if passes.init is None:
        broadcast_from_first_rank(model, torch.device(mesh.device_type))
    if passes.convert is not None:
        passes.convert(model)
    tp, pp = mesh.size("tp"), mesh.rank("pp")
    padded = pad_vocabulary(model, passes.vocabulary, tp)
    tp_plan = plan(model, passes.placements or {}, tp) if tp > 1 else Plan({}, ())
    for n_heads in sorted(shared_heads(tp_plan, tp)):
        mesh.heads(n_heads)  # a collective, also for ranks whose stages have no such heads
    if passes.parallel.async_tp:
        check_rows(dict(model.named_modules()), tp_plan.rows)
    units = select_units(model, passes.units)
    refuse_shared_parameters(model, units)
    stages, ranks, parts = uncut(model), (0,), {0: model}
    if passes.layout is not None:
        stages, ranks = cut(model, passes.layout.stages), passes.layout.ranks
        parts = {s: take_stage(model, stages, s) for s, rank in enumerate(ranks) if rank == pp}
    selection = _Selection(
        [list(unit) for unit in units],
        _block_names(model, passes),
        _core_names(model, mesh, passes),
        _expert_names(model, mesh, passes, units),
        make_dispatcher(passes.experts, mesh) if passes.experts else None,
        tp_plan,
        padded,
        stages,
    )
    offload = None
    if passes.recompute.offload:
        offload = Offload(torch.device(mesh.device_type), passes.smallest_offload)
    results = {
        s: _apply_to_stage(s, part, selection, mesh, passes, offload) for s, part in parts.items()
    }
    return Applied(
        parts,
        units=sum(result.units for result in results.values()),
        recomputed_blocks=sum(result.recomputed for result in results.values()),
        compiled=tuple(name for result in results.values() for name in result.compiled),
        padded_rows=padded,
        partial=frozenset(tp_plan.partial) if passes.replicas == "step" else frozenset(),
        names=stages.names,
        shared=SharedWeights.of(stages, parts, ranks, pp),
        deferred={s: result.deferred for s, result in results.items() if result.deferred},
        loss_in_head=passes.loss is not None,
        offload=offload,
        dispatcher=selection.dispatcher,
    )


@dataclass(frozen=True)
class _StageResult:
    """What the passes report of one stage."""

    units: int
    recomputed: int
    compiled: list[str]
    deferred: WeightGradients | None


@dataclass(frozen=True)
class _Selection:
    """Modules that the passes act on, selected in the whole model before it is cut into stages."""

    units: list[list[str]]
    """FQNs of the modules of each unit."""
    blocks: list[str]
    """FQNs of the blocks to recompute, compile and offload, in order."""
    cores: list[str]
    """FQNs of the context-parallel attention modules, in order; empty with cp = 1."""
    experts: list[str]
    """FQNs of the expert modules on a separate mesh; empty if they are sharded as all else."""
    dispatcher: Dispatcher | None
    tp_plan: Plan
    padded: Mapping[str, int]
    stages: Cut


def _apply_to_stage(
    stage: int,
    part: nn.Module,
    selection: _Selection,
    mesh: Mesh,
    passes: Passes,
    offload: Offload | None,
) -> _StageResult:
    """Apply the passes to one stage, which has some of the selected modules."""
    modules = present(dict(part.named_modules()))
    dispatcher, tp_plan = selection.dispatcher, selection.tp_plan
    split = passes.layout.deferred(stage, part) if passes.layout else []
    if tp_plan.rows:
        overlap = passes.parallel.async_tp
        apply_tensor_parallel(part, mesh.flat("tp"), tp_plan, passes.replicas, overlap, mesh.heads)
    expert_modules = {name: modules[name] for name in selection.experts if name in modules}
    if passes.experts is not None and expert_modules:
        apply_experts(expert_modules, passes.experts, mesh, dispatcher)
    if passes.context is not None and selection.cores:
        cores = [(i, modules[name]) for i, name in enumerate(selection.cores) if name in modules]
        apply_context(cores, passes.context, mesh.size("cp"), mesh.context, mesh.device_type)
    deferred = defer(split, passes.compile.enable) if split else None
    if passes.loss is not None and passes.loss[0] in modules:
        head, loss = passes.loss
        attach_loss(modules[head], loss)
    blocks = [(i, b, modules[b]) for i, b in enumerate(selection.blocks) if b in modules]
    broken = {name for name in selection.blocks if breaks_graph(name, expert_modules, dispatcher)}
    if broken:
        compile_activations(expert_modules.values(), passes.compile)
    options = _inductor_options(passes, dispatcher if expert_modules else None)
    recomputed, compiled = _wrap_blocks(blocks, passes, offload, broken, options)
    if offload is not None:
        offload.attach(stage, [block for _, _, block in blocks])
    if compiled:
        settle_outputs(part, compiled, tp_plan)
    units = [[modules[name] for name in unit if name in modules] for unit in selection.units]
    units = [unit for unit in units if unit]
    names = selection.stages.names
    by_columns = [p for fqn, p in part.named_parameters() if names[fqn] in selection.padded]
    _check_columns(by_columns, mesh)
    shard(
        part,
        mesh,
        units,
        passes.parallel,
        DTYPES[passes.dtype],
        by_columns,
        keep_last=passes.layout is None,
        experts=expert_modules.values(),
    )
    if callable(passes.init):
        passes.init(part)
    elif passes.init is not None:
        seed, fill = passes.init
        materialize(part, torch.device(mesh.device_type))
        initialize(part, seed, fill, names, selection.padded)
    return _StageResult(len(units), recomputed, compiled, deferred)


def _inductor_options(passes: Passes, dispatcher: Dispatcher | None) -> dict[str, Any]:
    splits = passes.layout is not None and passes.layout.splits_backward
    in_graph = dispatcher is not None and in_graphs(dispatcher)
    return {**(COMPILE_OPTIONS if splits else {}), **(IN_ORDER if in_graph else {})}


def _wrap_blocks(
    blocks: Sequence[tuple[int, str, nn.Module]],
    passes: Passes,
    offload: Offload | None,
    broken: Collection[str],
    options: Mapping[str, Any],
) -> tuple[int, list[str]]:
    """Apply recomputation and compilation to blocks, in place.

    Args:
        blocks: (index in the model, FQN, block).
        broken: FQNs of blocks whose graph breaks at a dispatcher.
    Returns:
        Number of recomputed blocks, and FQNs of compiled ones.
    """
    named = {name: block for _, name, block in blocks}
    numbered = [(i, block) for i, _, block in blocks]
    if passes.recompute.mode == "full":
        # Full recomputation wraps the compiled forward: torch 2.13 cannot save the mesh of a
        # DTensor for a compiled block that contains the recomputation.
        compiled = compile_blocks(named, passes.compile, options, True, broken)
        return apply_recompute(numbered, passes.recompute, passes.keep_rng), compiled
    # Offload sees the tensors that a compiled graph saves; eager selective recomputation keeps its
    # tensors in a cache instead, which offload has to watch.
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
        if (degree := getattr(passes.parallel, axis)) not in (-1, 1, mesh.degrees[axis]):
            raise ConfigError(f"parallel.{axis} = {degree} on a mesh of {mesh.degrees[axis]}")
    for axis in ("ep", "etp"):
        if (degree := getattr(passes.parallel, axis)) not in (1, mesh.expert_degrees[axis]):
            raise ConfigError(
                f"parallel.{axis} = {degree} on a mesh of {mesh.expert_degrees[axis]}"
            )
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
    """Check that FSDP can shard padded parameters along dim 1, so that padding rows stay last."""
    ranks = mesh.size(*FSDP_AXES)
    for parameter in by_columns:
        if parameter.shape[1] % ranks:
            raise ConfigError(
                f"a padded vocabulary is sharded by width, and {ranks} ranks do not divide "
                f"{parameter.shape[1]}; use a parallel.dp_shard that does, or a "
                "model.override.vocab_size that parallel.tp divides"
            )


def _block_names(model: nn.Module, passes: Passes) -> list[str]:
    """FQNs of the blocks to recompute, compile or offload; empty if all three are off."""
    recompute = passes.recompute
    if recompute.mode == "none" and not recompute.offload and not passes.compile.enable:
        return []
    return list(select(model, _block_pattern(passes.units, passes.blocks)))


def _core_names(model: nn.Module, mesh: Mesh, passes: Passes) -> list[str]:
    """FQNs of the context-parallel attention modules; empty with cp = 1."""
    if mesh.size("cp") == 1 or passes.context is None:
        return []
    cores = list(select(model, passes.context.cores))
    if len(passes.context.methods) not in (1, len(cores)):
        raise ConfigError(
            f"{len(passes.context.methods)} methods of context parallelism for {len(cores)} "
            "modules that attend; give one for each, or one for all"
        )
    for shape in passes.context.layouts(mesh.size("cp")).values():
        mesh.context(shape.inner)  # a collective, also for ranks whose stages have no attention
    return cores


def _expert_names(
    model: nn.Module, mesh: Mesh, passes: Passes, units: Sequence[Collection[str]]
) -> list[str]:
    """FQNs of the expert modules on a separate mesh; empty if they are sharded as all else."""
    if passes.experts is None or not on_separate_mesh(mesh):
        return []
    _ = mesh.experts, mesh.expert_group()  # collectives, also for ranks without experts
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
