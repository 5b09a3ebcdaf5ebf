"""Parameters of a rank and their numbers of elements.

Shapes come from the model, built on the meta device with one layer of each kind. The model's
placements say which dims tp shards. FSDP's padding counts, since it is allocated:

    whole      elements of the unsharded parameter
    gathered   elements after tp (experts: after ep and etp), which FSDP gathers
    shard      elements of `gathered` on one of dp_shard x cp ranks (experts: of edp_shard ranks)
"""

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, TypeVar

import torch
from torch import nn

from dtron.config import Lora
from dtron.float8.recipes import RECIPES
from dtron.lora.adapters import attach, is_adapter
from dtron.models import ModelSpec, build_model, model_spec
from dtron.models.attention import BACKENDS
from dtron.models.config import DecoderConfig, LayerKind
from dtron.parallelisms.expert.expert_parallel import WIDTHS, shared_dim
from dtron.parallelisms.placement import LOW_RANK, contains
from dtron.parallelisms.tensor.encoder import replicated
from dtron.parallelisms.tensor.tensor_parallel import Placements, Plan, pad_vocabulary, plan
from dtron.plan.run_shape import Resolved, Stage


@dataclass(frozen=True)
class Parameter:
    """One parameter of the embedding, of a block or of the head.

    Args:
        name: FQN; of a block's parameter, relative to the block.
        shape: unsharded shape, with the padded vocabulary.
        split: the dim that tp shards; None: tp does not shard it.
        expert: whether it holds the stacked weights of a layer's experts.
        padded: whether its vocabulary is padded, so that FSDP shards dim 1 instead of dim 0.
        partial: whether its gradient is a partial sum on each tp rank.
        hidden: whether it is a trained matrix that Muon would update.
        trained: whether it has a gradient; with adapters, only these have.
        adapter: whether it belongs to an adapter.
    """

    name: str
    shape: tuple[int, ...]
    split: int | None
    expert: bool
    padded: bool
    partial: bool
    hidden: bool
    trained: bool
    adapter: bool


@dataclass(frozen=True)
class Unit:
    """Numbers of elements of an FSDP unit on one rank.

    The numbers are those without sharding (`whole`), after tp or ep (`gathered`), and in the shard
    of one FSDP rank (`shard`).
    """

    name: str
    kind: "PartKind"
    whole: int
    gathered: int
    shard: int
    experts_gathered: int = 0
    """Elements of `gathered` that belong to experts on a separate mesh."""
    experts_shard: int = 0
    trained_gathered: int = 0
    """Elements of `gathered` that have a gradient."""
    trained_shard: int = 0
    trained_experts_gathered: int = 0
    trained_experts_shard: int = 0
    partial_shard: int = 0
    """Elements of `trained_shard` whose gradient is a partial sum on each tp rank."""
    partial_experts_shard: int = 0
    """Elements of `trained_experts_shard` whose gradient is a partial sum on each etp rank."""
    narrow: int = 0
    """Elements of `gathered` that FSDP gathers in float8 (`float8.all_gather`)."""
    narrow_shard: int = 0
    hidden_shard: int = 0
    """Elements of `trained_shard` in matrices that Muon would update."""
    columns: int = 0
    """Elements of `gathered` that FSDP shards on another dim than dim 0. FSDP copies these elements
    once more after an all-gather and before a reduction."""
    added: int = 0
    """Elements of `trained_gathered` whose gradient the matmul adds to a sum of micro-batches."""
    added_experts: int = 0
    """Elements of `trained_experts_gathered` that are also in `added`."""

    @property
    def dense(self) -> tuple[int, int]:
        """Elements (gathered, shard) without experts on a separate mesh."""
        return self.gathered - self.experts_gathered, self.shard - self.experts_shard

    @property
    def experts(self) -> tuple[int, int]:
        """Elements (gathered, shard) of experts on a separate mesh."""
        return self.experts_gathered, self.experts_shard

    @property
    def gradients(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """Elements (gathered, shard) with a gradient, of `dense` and of `experts`."""
        experts = self.trained_experts_gathered, self.trained_experts_shard
        dense = self.trained_gathered - experts[0], self.trained_shard - experts[1]
        return dense, experts

    def __add__(self, other: "Unit") -> "Unit":
        counts = [each.name for each in fields(self) if each.name not in ("name", "kind")]
        return replace(self, **{key: getattr(self, key) + getattr(other, key) for key in counts})


PartKind = str | LayerKind
""""embedding", "encoder" (one of its blocks), "head" (with the final norm), or a layer's kind."""
T = TypeVar("T")
NOT_LAYERS = ("embedding", "encoder", "head")
"""Parts that are no layers of the decoder."""
Parts = dict[PartKind, tuple[Parameter, ...]]
"""Parameters by part of the model."""


@functools.lru_cache(maxsize=64)
def parts(
    name: str,
    model: DecoderConfig,
    tp: int,
    sequence_parallel: bool = True,
    lora: Lora = Lora(),
    encoder_tp: int = 1,
) -> Parts:
    """List the parameters of each part of a model; a tied weight is in both embedding and head.

    Args:
        lora: its `rank` and `dora` count; all matrices that can have adapters are listed with them.
    """
    spec, small = model_spec(name), _smallest(model)
    with torch.device("meta"):
        built = build_model(
            name, small.model_copy(update={"attention_dropout": 0.0}), BACKENDS["math"]
        )
    if lora.rank:
        attach(built, spec, lora)
    padded = pad_vocabulary(built, spec.vocabulary(small), tp)
    rows: Placements = spec.placements(small, sequence_parallel)
    if spec.encoder and encoder_tp == 1:
        rows = replicated(rows, spec.encoder)
    made = plan(built, rows, tp) if tp > 1 else Plan({}, ())
    splits = _splits(built, made.rows)
    found: dict[PartKind, list[Parameter]] = {}
    for fqn, parameter in built.named_parameters(remove_duplicate=False):
        if fqn.startswith("mtp_embed."):
            continue  # listed as the embedding
        part, inner = _part(spec, fqn, small)
        experts = ".experts." in fqn
        split = None if experts else splits.get(fqn)
        found.setdefault(part, []).append(
            Parameter(
                inner,
                tuple(parameter.shape),
                split,
                experts,
                fqn in padded,
                parameter.requires_grad and fqn in made.partial,
                parameter.requires_grad and spec.is_hidden_matrix(fqn, parameter.dim()),
                parameter.requires_grad,
                is_adapter(fqn),
            )
        )
    return {part: tuple(parameters) for part, parameters in found.items()}


def _smallest(model: DecoderConfig) -> DecoderConfig:
    """Return a config with few layers, but at least one of each kind."""
    if model.layer_pattern:
        kinds = "".join(dict.fromkeys((model.layer_pattern * model.n_layers)[: model.n_layers]))
        return model.model_copy(update={"n_layers": len(kinds), "layer_pattern": kinds})
    if model.encoder_layers:
        encoder = min(model.encoder_layers, 2)
        return model.model_copy(update={"encoder_layers": encoder, "n_layers": encoder + 1})
    differ = bool(model.delta_key_heads) or model.full_layers_differ
    period = 2 if differ else 1
    dense, mixture = min(model.n_dense_layers, period), min(model.n_expert_layers, period)
    first = dense if model.n_experts else 0
    layers = {"n_layers": dense + mixture, "first_dense_layers": first}
    if differ:
        layers["full_attention_every"] = 2
    if model.vision_layers:
        layers["vision_layers"] = 1
    return model.model_copy(update={**layers, "mtp": min(model.mtp, 1)})


def _part(spec: ModelSpec, fqn: str, small: DecoderConfig) -> tuple[PartKind, str]:
    layers = spec.layer.partition("{")[0]
    if fqn.startswith(layers):
        layer, _, inner = fqn.removeprefix(layers).partition(".")
        return small.layer_kinds[int(layer)], inner
    if spec.encoder and contains(spec.encoder.blocks, fqn):
        return "encoder", ".".join(fqn.split(".")[spec.encoder.blocks.count(".") + 1 :])
    embeds = any(fqn.startswith(f"{name}.") for name in spec.embedding(small))
    return ("embedding" if embeds else "head"), fqn


def _splits(model: nn.Module, rows: Mapping[str, Sequence[Any]]) -> dict[str, int]:
    """Map the FQN of each parameter to the dim that tp splits."""
    found = {}
    for name, of_module in rows.items():
        module = model.get_submodule(name)
        for row in of_module:
            if row.kind not in ("colwise", "rowwise"):
                continue
            by_rows = (row.kind == "colwise") == isinstance(module, nn.Linear)
            for child, parameter in module.named_parameters(recurse=False):
                if parameter.dim() == 1 and not by_rows:
                    continue  # the bias of a row-wise linear layer is replicated
                dim = LOW_RANK[row.kind].get(child, 0 if by_rows else 1)
                if dim is not None:
                    found[f"{name}.{child}"] = dim
    return found


def unit(run: Resolved, part: PartKind, name: str, layer: int | None = None) -> Unit:
    """Return the numbers of elements of a part of the model (a key of `Parts`) on one rank.

    Args:
        layer: index of a block; None for embedding and head.
    """
    key = (part, run.float8_layers(layer), run.adapters(layer))
    if key not in run.memo:
        run.memo[key] = _unit(run, part, layer)
    return replace(run.memo[key], name=name)


def _unit(run: Resolved, part: PartKind, layer: int | None) -> Unit:
    total = Unit("", part, 0, 0, 0)
    for parameter in parameters(run, part, layer):
        total += _sizes_of(run, part, parameter, layer)
    return total


def _parts(run: Resolved) -> Parts:
    split, lora = run.config.parallel.sequence_parallel, run.config.lora
    every = Lora(rank=lora.rank, dora=lora.dora)
    encoder_tp = run.config.parallel.encoder_tp
    return parts(run.config.model.name, run.model, run.tp, split, every, encoder_tp)


def _sizes_of(
    run: Resolved, part: PartKind, parameter: Parameter, layer: int | None = None
) -> Unit:
    """Return the numbers of elements of one parameter as a Unit."""
    sizes = _sizes(run, part, parameter, layer)
    return Unit(
        "root",
        part,
        math.prod(parameter.shape),
        sizes.gathered,
        sizes.shard,
        sizes.gathered * sizes.separate,
        sizes.shard * sizes.separate,
        sizes.gathered * parameter.trained,
        sizes.shard * parameter.trained,
        sizes.gathered * (parameter.trained and sizes.separate),
        sizes.shard * (parameter.trained and sizes.separate),
        sizes.shard * parameter.partial,
        sizes.shard * _is_partial_over_etp(run, parameter),
        sizes.gathered * sizes.narrow,
        sizes.shard * sizes.narrow,
        sizes.shard * sizes.hidden,
        sizes.gathered * sizes.columns,
        sizes.gathered * sizes.added,
        sizes.gathered * (sizes.added and sizes.separate),
    )


def _is_partial_over_etp(run: Resolved, parameter: Parameter) -> bool:
    alike = parameter.expert and WIDTHS[parameter.name.rpartition(".")[2]] is None
    return alike and run.experts["etp"] > 1


@dataclass(frozen=True)
class Sizes:
    """Numbers of elements of a parameter on one rank.

    The numbers are those after tp or ep (`gathered`), and in the shard of one FSDP rank (`shard`).
    """

    gathered: int
    shard: int
    columns: bool
    """Whether FSDP shards the parameter on another dim than dim 0."""
    separate: bool
    """Whether the parameter belongs to experts on a separate mesh."""
    narrow: bool
    """Whether FSDP gathers the parameter in float8."""
    hidden: bool
    """Whether it is a trained matrix that Muon would update."""
    trained: bool
    """Whether the parameter has a gradient."""
    added: bool
    """Whether the matmul of its gradient adds to the sum over micro-batches."""


def _sizes(run: Resolved, part: PartKind, parameter: Parameter, layer: int | None) -> Sizes:
    separate = parameter.expert and run.separate_experts
    shape, shard, dim, ranks = local_shapes(run, parameter)
    narrow = parameter.name.removesuffix(".weight") in run.gathered_in_float8(layer)
    columns = dim > 0 and ranks > 1
    added = not columns and _adds_in_matmul(run, part, parameter, layer)
    kind = parameter.hidden, parameter.trained, added
    return Sizes(math.prod(shape), math.prod(shard), columns, separate, narrow, *kind)


def _adds_in_matmul(run: Resolved, part: PartKind, parameter: Parameter, layer: int | None) -> bool:
    """Whether a parameter is a matrix on which `parallel.accumulate_in_matmul` acts.

    Embeddings have no matmul, not even tied ones here; a chunked head adds up its own gradient;
    float8 matmuls cannot add to a float32 sum, nor grouped ones with operands in float32.
    """
    matrix = len(parameter.shape) == (3 if parameter.expert else 2) and parameter.trained
    if not run.config.parallel.accumulate_in_matmul or not matrix or part == "embedding":
        return False
    if parameter.expert:
        return run.config.train.dtype == "bfloat16" and not run.config.float8.experts
    if part == "head" and run.config.train.loss_chunks > 1:
        return False
    recipe = run.config.float8.recipe
    narrow = bool(recipe) and RECIPES[recipe].grad_weight is not None
    return not (narrow and parameter.name.removesuffix(".weight") in run.float8_layers(layer))


def local_shapes(run: Resolved, parameter: Parameter) -> tuple[list[int], list[int], int, int]:
    """Return (shape after tp or ep, shape of a shard, the dim that FSDP shards, its ranks)."""
    separate = parameter.expert and run.separate_experts
    shape, dim, ranks = (_expert_part if separate else _dense_part)(run, parameter)
    return shape, [-(-n // ranks) if i == dim else n for i, n in enumerate(shape)], dim, ranks


def _dense_part(run: Resolved, parameter: Parameter) -> tuple[list[int], int, int]:
    """Return (shape after tp, the dim that FSDP shards, number of ranks that shard it)."""
    shape = list(parameter.shape)
    if parameter.split is not None:
        shape[parameter.split] //= run.tp
    return shape, int(parameter.padded), run.shards


def _expert_part(run: Resolved, parameter: Parameter) -> tuple[list[int], int, int]:
    """Return (shape after ep and etp, the dim that FSDP shards, number of ranks that shard it)."""
    ep, etp, ranks = (run.experts[axis] for axis in ("ep", "etp", "edp_shard"))
    shape = list(parameter.shape)
    shape[0] //= ep
    dim = WIDTHS[parameter.name.rpartition(".")[2]]
    if dim is not None:
        shape[dim] //= etp
    taken = ({0} if ep > 1 else set()) | ({dim} if dim is not None and etp > 1 else set())
    return shape, shared_dim(shape, taken, ranks), ranks


def units(run: Resolved, stage: Stage) -> tuple[Unit, ...]:
    """List the FSDP units of a stage in forward order, as if each block were one.

    `joined_units` lists them with `parallel.blocks_per_unit`.

    The root unit stays gathered while the stage computes; it has the tied weight, or the embedding
    that multi-token prediction also reads. A tied weight counts once if the stage has both
    embedding and head.
    """
    found: list[Unit] = []
    tied, mtp = run.model.tied, run.model.mtp > 0
    if stage.embedding:
        found.append(unit(run, "embedding", "root" if tied or mtp else "embedding"))
    elif stage.head and mtp and not tied:
        found.append(unit(run, "embedding", "root"))
    for layer in range(run.model.vision_layers if stage.embedding else 0):
        found.append(unit(run, "encoder", f"encoder layer {layer}"))
    for layer in stage.layers:
        found.append(unit(run, run.kind(layer), f"layer {layer}", layer))
    if stage.head and not (tied and stage.embedding):
        found.append(unit(run, "head", "root" if tied else "head"))
    elif stage.head:
        found[0] += _untied(run)
    return tuple(found)


def joined_units(run: Resolved, stage: Stage) -> list[Unit]:
    """List the FSDP units of a stage in forward order; one of several blocks has their sums."""
    listed = units(run, stage)
    return [sum(blocks[1:], blocks[0]) for blocks in split_by_unit(run, stage, listed)]


def split_by_unit(run: Resolved, stage: Stage, listed: Sequence[T]) -> Iterator[Sequence[T]]:
    """Yield the items of each FSDP unit; `listed` has one item for each of `units`, in order.

    Blocks of a vision encoder, of the model and of multi-token prediction are in different units.
    """
    n, layers = run.config.parallel.blocks_per_unit, iter(stage.layers)

    def part(each: tuple[Unit, T]) -> tuple[str, int]:
        kind = each[0].kind
        if kind in NOT_LAYERS:
            return str(kind), n if kind == "encoder" else 1
        return ("mtp" if next(layers) >= run.model.n_layers else "layer"), n

    for (_, size), run_of in itertools.groupby(zip(units(run, stage), listed, strict=True), part):
        items = [item for _, item in run_of]
        yield from (items[i : i + size] for i in range(0, len(items), size))


def _untied(run: Resolved) -> Unit:
    """Return the numbers of elements of the head as a Unit, without the tied weight.

    The unit of a tied embedding includes them: the final norm, and what a post-norm model has
    before its head.
    """
    total = Unit("root", "embedding", 0, 0, 0)
    for parameter in _parts(run)["head"]:
        if parameter.name != "head.weight":
            total += _sizes_of(run, "embedding", parameter)
    return total


def parameters(run: Resolved, kind: PartKind, layer: int | None = None) -> tuple[Parameter, ...]:
    """List the parameters of a unit of the given `Unit.kind`.

    `layer`: index of a block; None: without adapters.
    """
    listed, adapters = _parts(run).get(kind, ()), run.adapters(layer)
    return tuple(each for each in listed if not each.adapter or each.name in adapters)


def sizes(run: Resolved, kind: PartKind, layer: int | None = None) -> list[Sizes]:
    """List the sizes of each parameter of a unit of the given `Unit.kind`.

    `layer`: index of a block; None: without adapters.
    """
    return [_sizes(run, kind, parameter, layer) for parameter in parameters(run, kind, layer)]


def gathered_bytes(run: Resolved, unit: Unit) -> tuple[tuple[int, int], tuple[int, int]]:
    """Return bytes (gathered, shard) in FSDP's all-gather.

    One pair is for a unit's dense part, and one for its experts on a separate mesh. Weights are in
    the dtype of computation, or float8.
    """
    dense, experts = (tuple(run.element * n for n in part) for part in (unit.dense, unit.experts))
    less = run.element - 1
    dense = (dense[0] - less * unit.narrow, dense[1] - less * unit.narrow_shard)
    return dense, (experts[0], experts[1])


def by_keeping(
    run: Resolved, unit: Unit
) -> tuple[tuple[tuple[int, int], tuple[int, int], bool], ...]:
    """Return elements (gathered, shard), those with a gradient, and whether these are not reduced.

    One item is for a unit's dense part, and one for its experts on a separate mesh.
    """
    dense, experts = unit.gradients
    return (unit.dense, dense, run.keeps_dense), (unit.experts, experts, run.keeps_experts)


def reductions(run: Resolved, unit: Unit) -> tuple[tuple[int, int], ...]:
    """Return elements (gathered, shard) of the parts of a unit whose gradients are reduced."""
    return tuple(gradients for _, gradients, keeps in by_keeping(run, unit) if not keeps)


def held(run: Resolved, rank: int) -> Iterator[Unit]:
    """Yield all FSDP units of a pipeline rank."""
    for stage in run.stages_of(rank):
        yield from units(run, stage)
