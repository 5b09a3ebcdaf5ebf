"""Apply all parallelisms to a plain model, in this order:

    model on meta -> float8 -> padded vocabulary -> cut into stages -> for each stage:
        tensor parallel -> inputs of an encoder -> expert parallel -> context parallel
        -> weight gradients deferred or added to sums -> loss in the head
        -> recompute and compile -> offload -> fsdp -> initial weights
    -> optimizer

Patterns are resolved on the whole model, since a stage lacks the modules of other stages. Selective
recomputation is inside the compiled block, so that the compiler sees it; full recomputation wraps
the compiled block. Offload wraps the recomputed and compiled block, and offloads the tensors that
autograd saves in its forward. FSDP is outermost, so that its hooks are not compiled. Passes act in
place and keep every FQN (fully qualified name).
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
from dtron.parallelisms.context.recurrent import apply_recurrent_context
from dtron.parallelisms.expert.dispatcher import Dispatcher
from dtron.parallelisms.expert.dispatchers import breaks_graph, in_graphs, refuse_half_compiled
from dtron.parallelisms.expert.expert_parallel import (
    ExpertLayers,
    apply_experts,
    make_dispatcher,
    on_separate_mesh,
    partial_over_etp,
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
from dtron.parallelisms.pipeline.accumulate import (
    Accumulation,
    Execution,
    OverlappedAccumulation,
)
from dtron.parallelisms.pipeline.block_overlap import BlockOverlap
from dtron.parallelisms.pipeline.executor import Layout, Pipeline
from dtron.parallelisms.pipeline.split_backward import COMPILE_OPTIONS, accumulate_in_matmuls, defer
from dtron.parallelisms.pipeline.stages import Cut, SharedWeights, cut, take_stage, uncut
from dtron.parallelisms.pipeline.weight_gradients import WeightGradients
from dtron.parallelisms.placement import (
    Encoder,
    Unit,
    experts,
    join_units,
    matches,
    present,
    refuse_shared_parameters,
    select,
    select_units,
)
from dtron.parallelisms.recompute import chunk_feed_forward
from dtron.parallelisms.recompute import recompute as apply_recompute
from dtron.parallelisms.tensor.async_tp import check_rows
from dtron.parallelisms.tensor.encoder import replicated, split_inputs
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
    """FSDP units. A pattern such as `blocks.*` makes one unit per module; a tuple of patterns makes
    one unit of all modules that match. Modules without a match belong to the root unit."""
    blocks: str | None = None
    """Pattern of the blocks to recompute, compile and offload; None: the first pattern in `units`
    that contains a *."""
    placements: Placements | None = None
    """Tensor-parallel sharding: {pattern or tuple of patterns: placement rule such as colwise()}.
    The rules must cover every parameter. Required if tp > 1."""
    parallel: Parallel = Parallel()
    """Only `zero`, `reduce`, `reduce_dtype`, `accumulate_in_matmul`, `blocks_per_unit`,
    `reduce_by`, `copy_engines` and `prefetch` are used, the last three only if FSDP shards
    parameters. The mesh sets the degrees."""
    dtype: str = "bfloat16"
    """Compute dtype; parameters keep their dtype."""
    recompute: Recompute = Recompute()
    compile: Compile = Compile()
    init: tuple[int, Initializer] | Callable[[nn.Module], None] | None = None
    """Initial weights. (seed, initializer): draw the weights of a model on the meta device. A
    function: it is called with each stage and must materialize and initialize the stage. None:
    broadcast all tensors of rank 0."""
    convert: Callable[[nn.Module], None] | None = None
    """Function that changes the unsharded model in place, such as float8 conversion."""
    context: Context | None = None
    """Settings of context-parallel attention, required if cp > 1. Each rank then calls the model
    with its shard of each sequence (`context.split.Split`)."""
    experts: ExpertLayers | None = None
    """Which modules are stacked experts. Required if ep or etp > 1, or if a rule is
    `experts()`."""
    loss: tuple[str, HeadLoss] | None = None
    """(FQN of the head, loss function): the head, a Linear without bias, returns the losses of the
    function instead of logits if it is called with `labels`."""


@dataclass(frozen=True)
class Passes(ParallelPlan):
    """A ParallelPlan with internal settings, which the trainer and the plug-in set."""

    vocabulary: tuple[str, ...] = ()
    """FQNs of modules (embedding, head) whose weight has one row per token of the vocabulary. Zero
    rows are appended if tp does not divide the number of rows."""
    layout: Layout | None = None
    """The pipeline stages to cut the model into; None: no pipeline."""
    encoder: Encoder | None = None
    """The model's encoder: cp and tp ranks encode different inputs (`tensor/encoder.py`), and its
    blocks are recomputed, compiled and offloaded as the decoder's. None: the model has none."""
    replicas: Replicas = "backward"
    """When to sum partial gradients of replicated parameters (norms under sequence parallelism)
    over tp. "backward": in each backward; "step": once per step, in `complete_gradients`."""
    keep_rng: bool = False
    """Whether recomputation restores the RNG state that the first forward had."""
    smallest_offload: int = SMALLEST
    """Minimum bytes of an offloaded activation storage; smaller ones stay on the device."""


@dataclass(frozen=True)
class Applied:
    """Result of `apply_passes`: this rank's modules, and what the passes did."""

    parts: Mapping[int, nn.Module]
    """This rank's pipeline stages by stage number; {0: model} without a pipeline."""
    units: int
    recomputed_blocks: int
    compiled: tuple[str, ...]
    padded_rows: Mapping[str, int]
    """{name of a parameter with a padded vocabulary: its number of rows without padding}"""
    partial: frozenset[str]
    """Names of parameters whose gradients `complete_gradients` sums over tp once per step."""
    partial_experts: frozenset[str]
    """Names of experts' parameters whose gradients `complete_gradients` sums over etp."""
    names: Mapping[str, str]
    """{FQN of a parameter: its name}. The name is the FQN; a tied weight with several FQNs has the
    first FQN as its name."""
    shared: SharedWeights
    """Weights tied across two stages; their gradients are summed once per step."""
    deferred: Mapping[int, WeightGradients]
    """Queues of deferred weight gradients, by stage number."""
    loss_in_head: bool
    """Whether the model, called with labels, returns losses (`tensor/head_loss.py`)."""
    offload: Offload | None
    """Activation offload; None if it is off."""
    dispatcher: Dispatcher | None
    """Sends tokens to experts on other ranks; None if all experts are local."""
    overlap: BlockOverlap | None
    """Runs two micro-batches together; None without `parallel.overlap_micro_batches`."""

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name, parameter) of this rank's stages.

        A weight tied across two of these stages is yielded twice.
        """
        for part in self.parts.values():
            for fqn, parameter in part.named_parameters():
                yield self.names[fqn], parameter

    def named_trained(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the `named_parameters` that are not frozen."""
        return ((name, p) for name, p in self.named_parameters() if p.requires_grad)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Context manager: put all stages in evaluation mode.

        At exit, restore the mode of each module and free gathered parameters.
        """
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
        """Sum partial gradients over tp and etp, and those of tied weights over their stages.

        Call it once per step, after the last backward.
        """
        partial = [p for name, p in self.named_trained() if name in self.partial]
        reduce_replicas(partial, mesh.group("tp"))
        if self.partial_experts:
            partial = [p for name, p in self.named_trained() if name in self.partial_experts]
            reduce_replicas(partial, mesh.experts.get_group("etp"))
        self.shared.sum_gradients(mesh.group("pp"))


def build_execution(
    applied: Applied, layout: Layout | None, mesh: Mesh, policy: Policy
) -> Execution:
    """Return a Pipeline if there is a layout of stages, else an Accumulation."""
    if layout is not None:
        return Pipeline(applied.parts, layout, mesh, policy, applied.deferred, applied.overlap)
    model, device = applied.parts[0], torch.device(mesh.device_type)
    if applied.overlap is not None:
        return OverlappedAccumulation(model, policy, device, applied.overlap)
    return Accumulation(model, policy, device)


def apply_passes(model: nn.Module, mesh: Mesh, passes: Passes) -> Applied:
    """Apply all passes in order, in place; arguments and errors: those of `plugin.parallelize`."""
    _check_axes(mesh, passes)
    if passes.init is None:
        broadcast_from_first_rank(model, torch.device(mesh.device_type))
    if passes.convert is not None:
        passes.convert(model)
    tp, pp = mesh.size("tp"), mesh.rank("pp")
    padded = pad_vocabulary(model, passes.vocabulary, tp)
    placements = passes.placements or {}
    if passes.encoder and tp > 1 and passes.parallel.encoder_tp == 1:
        placements = replicated(placements, passes.encoder)
    tp_plan = plan(model, placements, tp) if tp > 1 else Plan({}, ())
    for n_heads in sorted(shared_heads(tp_plan, tp)):
        mesh.heads(n_heads)  # a collective: all ranks call it, also those without such heads
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
        _recurrent_names(model, mesh, passes),
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
    deferred = {s: result.deferred for s, result in results.items() if result.deferred}
    overlaps = passes.parallel.overlap_micro_batches
    queues = deferred.get(0) if passes.layout is None else None  # a pipeline runs its queues itself
    return Applied(
        parts,
        units=sum(result.units for result in results.values()),
        recomputed_blocks=sum(result.recomputed for result in results.values()),
        compiled=tuple(name for result in results.values() for name in result.compiled),
        padded_rows=padded,
        partial=frozenset(tp_plan.partial) if passes.replicas == "step" else frozenset(),
        partial_experts=_partial_experts(model, selection.experts, mesh, passes),
        names=stages.names,
        shared=SharedWeights.of(stages, parts, ranks, pp),
        deferred=deferred,
        loss_in_head=passes.loss is not None,
        offload=offload,
        dispatcher=selection.dispatcher,
        overlap=_overlap(parts, selection, mesh, queues) if overlaps else None,
    )


@dataclass(frozen=True)
class _StageResult:
    """Result of the passes on one stage."""

    units: int
    recomputed: int
    compiled: list[str]
    deferred: WeightGradients | None


@dataclass(frozen=True)
class _Selection:
    """Modules that the passes act on, selected in the model before that is cut into stages."""

    units: list[list[str]]
    """FQNs of the modules of each FSDP unit."""
    blocks: dict[str, int]
    """{FQN of a block to recompute, compile, offload and overlap: its index}, in the order of the
    forward. Blocks of encoder and decoder are numbered separately."""
    cores: list[str]
    """FQNs of the context-parallel attention modules, in order; empty with cp = 1."""
    recurrent: list[str]
    """FQNs of the context-parallel recurrent modules; empty with cp = 1."""
    experts: list[str]
    """FQNs of the expert modules on the expert mesh; empty if experts need no expert mesh."""
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
    """Apply the passes to the selected modules that are in this stage."""
    modules = present(dict(part.named_modules()))
    dispatcher, tp_plan = selection.dispatcher, selection.tp_plan
    if tp_plan.rows:
        overlap = passes.parallel.async_tp
        apply_tensor_parallel(part, mesh.flat("tp"), tp_plan, passes.replicas, overlap, mesh.heads)
    if passes.encoder is not None:
        split_inputs(modules, passes.encoder, mesh, passes.parallel)
    expert_modules = {name: modules[name] for name in selection.experts if name in modules}
    if passes.experts is not None and expert_modules:
        apply_experts(expert_modules, passes.experts, mesh, dispatcher)
    if passes.context is not None and selection.cores:
        cores = [(i, modules[name]) for i, name in enumerate(selection.cores) if name in modules]
        apply_context(cores, passes.context, mesh.size("cp"), mesh.context, mesh.device_type)
    if recurrent := [modules[name] for name in selection.recurrent if name in modules]:
        apply_recurrent_context(recurrent, mesh.context(mesh.size("cp"))[1])
    split = passes.layout.deferred(stage, part) if passes.layout else []
    if passes.layout is None and passes.parallel.overlap_micro_batches:
        split = list(expert_modules.values())
    deferred = defer(split, passes.compile.enable) if split else None
    summed = [deferred] if deferred else []
    if passes.parallel.accumulate_in_matmul:
        summed.append(accumulate_in_matmuls(part, passes.compile.enable))
    if passes.loss is not None and passes.loss[0] in modules:
        head, loss = passes.loss
        attach_loss(modules[head], loss)
    blocks = [(i, b, modules[b]) for b, i in selection.blocks.items() if b in modules]
    broken = {name for name in selection.blocks if breaks_graph(name, expert_modules, dispatcher)}
    if broken:
        compile_activations(expert_modules.values(), passes.compile)
    options = _inductor_options(passes, dispatcher if expert_modules else None)
    recomputed, compiled = _wrap_blocks(blocks, passes, offload, broken, options)
    if offload is not None:
        offload.attach(stage, [block for _, _, block in blocks])
    if compiled:
        settle_outputs(part, compiled, tp_plan)
    single = [{n: modules[n] for n in unit if n in modules} for unit in selection.units]
    blocks_per_unit = passes.parallel.blocks_per_unit
    units = join_units([unit for unit in single if unit], passes.units, blocks_per_unit)
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
    for gradients in summed if passes.parallel.accumulate_in_matmul else ():
        gradients.add_to_sums(part)
    if callable(passes.init):
        passes.init(part)
    elif passes.init is not None:
        seed, fill = passes.init
        materialize(part, torch.device(mesh.device_type))
        initialize(part, seed, fill, names, selection.padded)
    return _StageResult(len(units), recomputed, compiled, deferred)


def _overlap(
    parts: Mapping[int, nn.Module],
    selection: _Selection,
    mesh: Mesh,
    deferred: WeightGradients | None,
) -> BlockOverlap:
    """Return what runs two micro-batches together, after all other passes; a collective.

    Blocks of multi-token prediction are not cut off: they run with the head.
    """
    if selection.dispatcher is None:
        raise ConfigError("parallel.overlap_micro_batches needs ep x etp > 1; use false")
    groups = [mesh.expert_group(0), mesh.expert_group(1)]
    blocks = [
        module
        for part in parts.values()
        for name, module in present(dict(part.named_modules())).items()
        if name in selection.blocks and not getattr(module, "in_training_alone", False)
    ]
    device = torch.device(mesh.device_type)
    return BlockOverlap(parts.values(), blocks, selection.dispatcher, groups, device, deferred)


def _inductor_options(passes: Passes, dispatcher: Dispatcher | None) -> dict[str, Any]:
    layout = passes.layout
    splits = layout.splits_backward if layout else passes.parallel.overlap_micro_batches
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
        blocks: (index in the encoder or the decoder, FQN, block).
        broken: FQNs of blocks whose graph breaks at a dispatcher.
    Returns:
        Number of recomputed blocks, and FQNs of compiled ones.
    """
    named = {name: block for _, name, block in blocks}
    numbered = [(i, block) for i, _, block in blocks]
    dynamic = {n for n in named if passes.encoder and matches(passes.encoder.blocks, n)}
    static = dynamic if passes.parallel.encoder_tp > 1 else ()  # compiled DTensors have one shape
    compilable = {name: block for name, block in named.items() if name not in static}
    if passes.recompute.ffn_chunks > 1:
        chunk_feed_forward(named.values(), passes.recompute.ffn_chunks, passes.keep_rng)
    if passes.recompute.mode == "full" and not passes.recompute.modules:
        # Full recomputation wraps the compiled forward: torch 2.13 cannot save the mesh of a
        # DTensor for a compiled block that contains the recomputation.
        compiled = compile_blocks(compilable, passes.compile, options, True, broken, dynamic)
        return apply_recompute(numbered, passes.recompute, passes.keep_rng), compiled
    # The hooks of offload see the tensors that a compiled graph saves. Eager selective
    # recomputation keeps its tensors in a cache instead, which offload must be passed.
    watch = offload.watch if offload is not None and not passes.compile.enable else None
    recomputed = apply_recompute(numbered, passes.recompute, passes.keep_rng, watch)
    forward_only = offload is not None
    compiled = compile_blocks(compilable, passes.compile, options, forward_only, broken, dynamic)
    return recomputed, compiled


def _check_axes(mesh: Mesh, passes: Passes) -> None:
    if mesh.degrees["cp"] > 1 and passes.context is None:
        raise ConfigError(
            f"cp = {mesh.degrees['cp']} needs `context`, which names the attention modules; use "
            'context=Context(PATTERN), such as Context("blocks.*.attn.core")'
        )
    for axis in ("dp_replicate", "dp_shard", "pp", "cp", "tp"):
        if (degree := getattr(passes.parallel, axis)) not in (-1, 1, mesh.degrees[axis]):
            raise ConfigError(
                f"parallel.{axis} = {degree}, but the mesh has {axis} = {mesh.degrees[axis]}; "
                f"leave parallel.{axis} out"
            )
    for axis in ("ep", "etp"):
        if (degree := getattr(passes.parallel, axis)) not in (1, mesh.expert_degrees[axis]):
            raise ConfigError(
                f"parallel.{axis} = {degree}, but the mesh has {axis} = "
                f"{mesh.expert_degrees[axis]}; leave parallel.{axis} out"
            )
    ranks = mesh.expert_degrees["ep"] * mesh.expert_degrees["etp"]
    if ranks > 1 and passes.experts is None:
        raise ConfigError(
            f"ep x etp = {ranks} needs `experts`, which names the stacked experts; use "
            'experts=ExpertLayers(PATTERN), such as ExpertLayers("blocks.*.experts")'
        )
    if passes.experts is not None:
        kind = passes.experts.dispatcher
        refuse_half_compiled(passes.recompute, passes.compile, ranks, kind)
    if mesh.size("tp") > 1 and passes.experts is None and experts() in _rows(passes):
        raise ConfigError(
            "`placements` has a row experts(), but `experts` names no stacked experts; use "
            'experts=ExpertLayers(PATTERN), such as ExpertLayers("blocks.*.experts")'
        )
    if mesh.size("tp") > 1 and not passes.placements:
        raise ConfigError(
            f"tp = {mesh.size('tp')} needs `placements`, a row for every parameter; use "
            'placements={"blocks.*.up": colwise(), "blocks.*.down": rowwise(), ...}'
        )


def _rows(passes: Passes) -> list[Any]:
    return list((passes.placements or {}).values())


def _check_columns(by_columns: Sequence[nn.Parameter], mesh: Mesh) -> None:
    """Raise ConfigError if dp_shard x cp does not divide dim 1 of a padded parameter.

    FSDP shards padded parameters along dim 1.
    """
    ranks = mesh.size(*FSDP_AXES)
    for parameter in by_columns:
        if parameter.shape[1] % ranks:
            raise ConfigError(
                f"parallel.dp_shard x parallel.cp = {ranks} does not divide {parameter.shape[1]}, "
                "the width along which FSDP shards a padded vocabulary; use a parallel.dp_shard "
                "that does, or a model.override.vocab_size that parallel.tp divides"
            )


def _block_names(model: nn.Module, passes: Passes) -> dict[str, int]:
    """Return {FQN: index} of the blocks to recompute, compile, offload or overlap.

    Empty if all of these are off.
    """
    recompute, overlaps = passes.recompute, passes.parallel.overlap_micro_batches
    if recompute == Recompute() and not passes.compile.enable and not overlaps:
        return {}
    encoder = select(model, passes.encoder.blocks) if passes.encoder else {}
    blocks = select(model, _block_pattern(passes.units, passes.blocks))
    if recompute.ffn_chunks > 1 and not any(hasattr(b, "feed_forward") for b in blocks.values()):
        raise ConfigError(
            f"recompute.ffn_chunks = {recompute.ffn_chunks}, but no block has a method "
            "`feed_forward`, (B, T, D) -> (B, T, D); give the blocks one, or leave the key out"
        )
    chosen = [block for i, block in enumerate(blocks.values()) if recompute.acts_on(i)]
    inside = {name for block in chosen for name, _ in block.named_modules()}
    if missing := [name for name in recompute.modules if name not in inside]:
        raise ConfigError(
            f"recompute.modules has {missing[0]!r}, but no recomputed block has this module; use "
            "FQNs relative to the block"
        )
    return {name: i for found in (encoder, blocks) for i, name in enumerate(found)}


def _core_names(model: nn.Module, mesh: Mesh, passes: Passes) -> list[str]:
    """Return FQNs of the context-parallel attention modules; empty with cp = 1."""
    if mesh.size("cp") == 1 or passes.context is None:
        return []
    cores = list(select(model, passes.context.cores))
    if len(passes.context.methods) not in (1, len(cores)):
        raise ConfigError(
            f"Context.methods has {len(passes.context.methods)} methods for {len(cores)} attention "
            "modules; give one method per module, or one for all"
        )
    for shape in passes.context.layouts(mesh.size("cp")).values():
        mesh.context(shape.inner)  # a collective: all ranks call it, also without attention modules
    return cores


def _recurrent_names(model: nn.Module, mesh: Mesh, passes: Passes) -> list[str]:
    """Return FQNs of the context-parallel recurrent modules; empty with cp = 1."""
    if mesh.size("cp") == 1 or passes.context is None or not passes.context.recurrent:
        return []
    mesh.context(mesh.size("cp"))  # a collective: all ranks call it, also without such modules
    return list(select(model, passes.context.recurrent))


def _expert_names(
    model: nn.Module, mesh: Mesh, passes: Passes, units: Sequence[Collection[str]]
) -> list[str]:
    """Return FQNs of the expert modules on the expert mesh; empty if experts need no such mesh."""
    if passes.experts is None or not on_separate_mesh(mesh):
        return []
    _ = mesh.experts, mesh.expert_group()  # collectives: all ranks call them, also without experts
    found = list(select(model, passes.experts.experts))
    if own := [name for unit in units for name in unit if name in found]:
        raise ConfigError(
            f"units has {own[0]}, but FSDP gathers experts with the block that contains them; name "
            "the block in `units`, or leave the experts out"
        )
    return found


def _partial_experts(
    model: nn.Module, names: Sequence[str], mesh: Mesh, passes: Passes
) -> frozenset[str]:
    """Return names of experts' parameters whose gradients are partial sums over etp."""
    if passes.experts is None or mesh.expert_degrees["etp"] == 1:
        return frozenset()
    modules = {name: model.get_submodule(name) for name in names}
    return frozenset(partial_over_etp(modules, passes.experts))


def _block_pattern(units: Unit | Sequence[Unit], blocks: str | None) -> str:
    if blocks is not None:
        return blocks
    for unit in [units] if isinstance(units, str) else units:
        if isinstance(unit, str) and "*" in unit:
            return unit
    raise ConfigError(
        "`blocks` is not given and `units` has no pattern with a *, but recompute, offload and "
        'compile act on blocks; use blocks=PATTERN, such as blocks="blocks.*"'
    )
