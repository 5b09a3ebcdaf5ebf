"""Choose and check the float8 layers of a run, and connect them with its model and training loop.

`dtron.float8` has layers and recipes; this file applies the section [float8] to a model and a
layout. The choice of layers depends on the model only, so that every layout has the same float8
layers; with `float8.filter = "auto"` the choice depends on a measurement.
"""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from dtron.config import Degree, Float8, RunConfig
from dtron.errors import ConfigError
from dtron.float8.all_gather import GatherInput, WeightGather, require_torchao
from dtron.float8.async_tp import AsyncFloat8Linear
from dtron.float8.auto_filter import LayerTimes, Shape, measure, table
from dtron.float8.convert import MULTIPLE, Choice, convert, fuse, layer_names
from dtron.float8.delayed import DelayedScales
from dtron.float8.experts import check_sizes, convert_experts
from dtron.float8.linear import Float8Linear, TokenwiseLinear
from dtron.float8.products import why_emulated
from dtron.float8.recipes import EXPERTS, RECIPES, Recipe
from dtron.float8.scales import ScaleGroups
from dtron.float8.statistics import Statistics
from dtron.models import AttentionNeeds, build_model, choose_backend, model_spec
from dtron.models.attention import Backend
from dtron.models.config import DecoderConfig
from dtron.parallelisms.apply import Applied
from dtron.parallelisms.mesh import Mesh
from dtron.parallelisms.placement import Row, Shard, Style, matches, select

log = logging.getLogger("dtron")


@dataclass(frozen=True)
class Float8Plan:
    """The float8 layers of a run."""

    recipe: Recipe
    settings: Float8
    layers: tuple[str, ...]
    """FQNs, in the model's order."""
    fused: tuple[str, ...] = ()
    """FQNs of gated feed-forward layers that are fused to one autograd function each."""
    shapes: Mapping[str, Shape] = field(default_factory=dict)
    """FQN of each layer in a block -> (tokens, input features, output features) on one rank."""
    experts: tuple[str, ...] = ()
    """FQNs of the modules of experts with matmuls in float8."""
    overlapped: bool = False
    """Whether matmuls are fused with the communication of tp (`parallel.async_tp`)."""
    tokenwise: tuple[str, ...] = ()
    """FQNs of layers with an unsharded weight that process only the tokens of their tp rank."""
    head: Shape | None = None
    """(tokens, input features, output features) of the head; None: the head is not float8."""
    gathering: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """FQN of each module that gathers its input over tp -> FQNs of layers that read the input;
    empty: no input is gathered in float8."""
    scattering: tuple[str, ...] = ()
    """FQNs of the layers whose matmul is fused with a reduce-scatter (`parallel.async_tp`)."""
    unconverted: tuple[str, ...] = ()
    """FQNs of the linear layers that are not float8, experts excepted."""

    def measured(
        self, device: torch.device, dtype: torch.dtype, group: dist.ProcessGroup
    ) -> "Float8Plan":
        """With `float8.filter = "auto"`, measure layers and keep those that are faster in float8.

        Args:
            group: CPU process group of all ranks, which call this together; rank 0 measures.
        Raises:
            ConfigError: no layer is faster in float8.
        """
        if self.settings.filter != "auto" or self.why_emulated(device, dtype):
            return self
        found: list[Any] = [None]
        if dist.get_rank(group) == 0:
            found = [measure(self.shapes.values(), self.recipe, dtype, device)]
            log.info("float8.filter = auto:\n%s", table(found[0]))
        dist.broadcast_object_list(found, group=group, group_src=0)
        return self.keep_faster_layers(found[0])

    def keep_faster_layers(self, times: Mapping[Shape, LayerTimes]) -> "Float8Plan":
        """Return the plan with only the layers that are faster in float8.

        Args:
            times: times by shape, from `measure`.
        Raises:
            ConfigError: no layer is faster.
        """
        blocks = {name for name in self.shapes if times[self.shapes[name]].gains}
        layers = tuple(name for name in self.layers if name in blocks or name not in self.shapes)
        if not layers:
            raise ConfigError(
                'float8.filter = "auto": no layer is faster in float8 on this device; set '
                'float8.recipe = "", or larger micro-batches'
            )
        shapes = {name: shape for name, shape in self.shapes.items() if name in blocks}
        return replace(self, layers=layers, shapes=shapes)

    def converter(self, mesh: Mesh, dtype: torch.dtype) -> Callable[[nn.Module], None]:
        """Return the pass `Passes.convert`, which replaces linear layers by float8 layers."""
        device = torch.device(mesh.device_type)
        emulate = bool(self.why_emulated(device, dtype))
        emulate_experts = bool(why_emulated(EXPERTS, device, dtype))
        groups, kinds = scale_groups(mesh), self._kinds()

        def apply(model: nn.Module) -> None:
            convert(model, self.layers, self.recipe, emulate, groups, kinds)
            fuse(model, self.fused)
            convert_experts(model, self.experts, emulate_experts)

        return apply

    def placements(self, rows: Mapping[str, Row], mesh: Mesh) -> dict[Any, Row | Style]:
        """Return the placement rules, with float8 gathers of inputs that only float8 layers read.

        With `parallel.async_tp`, return them unchanged, since the layers gather their inputs.
        """
        gathered = set(self._gathered_modules())
        if self.overlapped or not gathered:
            return dict(rows)
        style = GatherInput(self.recipe.output.left, scale_groups(mesh).both)
        found: dict[Any, Row | Style] = {}
        for pattern, row in rows.items():
            names = sorted(name for name in self.gathering if matches(pattern, name))
            if row.kind != "prepare_input" or not gathered & set(names):
                found[pattern] = row
                continue
            for name in names:
                found[name] = style if name in gathered else row
        return found

    def _kinds(self) -> dict[str, type[Float8Linear]]:
        """Return FQN -> class of the layers that are `tokenwise` or fused with communication."""
        chosen = set(self.layers) & set(self.tokenwise)
        tokenwise: dict[str, type[Float8Linear]] = dict.fromkeys(chosen, TokenwiseLinear)
        if not self.overlapped:
            return tokenwise
        read = [name for module in self._gathered_modules() for name in self.gathering[module]]
        scattering = [name for name in self.scattering if name in self.layers]
        return {**tokenwise, **dict.fromkeys((*read, *scattering), AsyncFloat8Linear)}

    @property
    def communicated(self) -> frozenset[str]:
        """FQNs of the modules whose input or output gradient is gathered over tp in float8."""
        scattering = self.scattering if self.overlapped else ()
        return frozenset(self._gathered_modules()) | (set(scattering) & set(self.layers))

    def _gathered_modules(self) -> list[str]:
        """Return the FQNs of modules with an input that only float8 layers read."""
        chosen = set(self.layers)
        return [module for module, read in self.gathering.items() if read and set(read) <= chosen]

    def gather_weights(self, applied: Applied, mesh: Mesh) -> Callable[[], None] | None:
        """Set up the all-gather of weights in float8 (`float8.all_gather`).

        Returns:
            Function that computes the scales of weights; call it now and after each update. None:
            `float8.all_gather` is off.
        """
        if not self.settings.all_gather:
            return None
        fsdp_group = mesh.group("dp_shard", "cp")
        # tp ranks share a scale per tensor, but hold different blocks with separate scales.
        per_tensor = self.recipe.output.right.whole
        scale_group = mesh.group("dp_shard", "cp", "tp") if per_tensor else fsdp_group
        return WeightGather(_layers_of(applied).values(), fsdp_group, scale_group).refresh

    def delay_scales(self, applied: Applied, mesh: Mesh) -> DelayedScales | None:
        """Set up delayed scaling; return the scales, which must be updated after each step.

        None: scaling is dynamic.
        """
        if self.settings.scaling != "delayed":
            return None
        group = mesh.group("dp_replicate", "dp_shard", "cp", "tp")
        return DelayedScales(_layers_of(applied), self.settings.amax_history, group)

    def statistics(self, applied: Applied, device: torch.device) -> Statistics:
        """Return a context manager that measures the accuracy of a step's casts."""
        return Statistics(self.layers, _layers_of(applied), device)

    def reports(self, step: int) -> bool:
        """Whether the casts of a step (from 1) are measured."""
        interval = self.settings.report_interval
        return interval > 0 and step % interval == 0

    def announce(self, device: torch.device, dtype: torch.dtype) -> None:
        """Log the number of float8 layers, and whether they are emulated."""
        settings = self.settings
        log.info("float8: %s, %d linear layers", self.recipe.name, len(self.layers))
        found = [
            key
            for key in ("output", "experts", "all_gather", "gather_inputs")
            if getattr(settings, key)
        ]
        if settings.scaling == "delayed":
            log.info("float8: delayed scaling, amax history of %d steps", settings.amax_history)
        if found:
            log.info("float8: %s", ", ".join(found))
        if why := self.why_emulated(device, dtype):
            log.warning("float8 is emulated (same rounding, slower than without float8): %s", why)
        elif self.experts and (why := why_emulated(EXPERTS, device, dtype)):
            log.warning("float8.experts is emulated (slower than without float8): %s", why)

    def why_emulated(self, device: torch.device, dtype: torch.dtype) -> str:
        """Return why float8 matmuls are emulated; empty: they are not emulated."""
        head = () if self.head is None else (self.head,)
        return why_emulated(self.recipe, device, dtype, (*self.shapes.values(), *head))


def _layers_of(applied: Applied) -> dict[str, Float8Linear]:
    """Return the float8 layers of this rank by FQN."""
    return {
        fqn: module
        for part in applied.parts.values()
        for fqn, module in part.named_modules()
        if isinstance(module, Float8Linear)
    }


def scale_groups(mesh: Mesh) -> ScaleGroups:
    """Return the names of process groups whose ranks use the same scale for a tensor."""

    def names(*axes: str) -> tuple[str, ...]:
        wide = tuple(axis for axis in axes if mesh.size(axis) > 1)  # type: ignore[arg-type]
        return (mesh.group(*wide).group_name,) if wide else ()  # type: ignore[arg-type]

    return ScaleGroups(tp=names("tp"), cp=names("cp"), both=names("cp", "tp"))


def plan_float8(config: RunConfig, model: DecoderConfig, world_size: int) -> Float8Plan | None:
    """Choose the float8 layers of a run; None: `float8.recipe` is empty.

    Raises:
        ConfigError: a pattern matches no layer, float8 does not support the dims of a layer, or
            `float8.gather_inputs` has no module to act on.
    """
    settings = config.float8
    if not settings.recipe:
        return None
    recipe = RECIPES[settings.recipe]
    spec = model_spec(config.model.name)
    with torch.device("meta"):
        whole = build_model(config.model.name, model, _any_attention(model))
    choice = Choice(
        spec.layer.format("*"),
        () if settings.filter == "auto" else tuple(settings.filter),
        tuple(settings.skip),
        settings.skip_first,
        settings.skip_last,
        spec.head[-1] if settings.output else "",
        spec.gates,
    )
    # With tp, gate, up and down are not fused: tp splits each layer separately. Adapters add to
    # the result of each layer.
    gated = model.activation == "swiglu" and config.parallel.tp == 1 and not config.lora.rank
    fused = tuple(select(whole, spec.feed_forward)) if gated else ()
    layers = layer_names(whole, choice)
    encoder = spec.encoder.modules if spec.encoder else ()
    if own := [name for name in layers if name.partition(".")[0] in encoder]:
        raise ConfigError(
            f"float8.filter names {own[0]}, a layer of the encoder, whose number of tokens may be "
            f"no multiple of {MULTIPLE}; name layers of {spec.layer.format('*')} only"
        )
    linear = (name for name, module in whole.named_modules() if isinstance(module, nn.Linear))
    unconverted = tuple(name for name in linear if name not in layers)
    plan = Float8Plan(recipe, settings, layers, fused, unconverted=unconverted)
    if settings.all_gather:
        require_torchao()
    degrees = config.degrees(world_size)
    rows = spec.placements(model, config.parallel.sequence_parallel)
    tokenwise = _tokenwise(plan.layers, rows, config)
    shapes = {
        name: (
            config.tokens // (degrees["tp"] if name in tokenwise else 1),
            *_local_features(name, whole.get_submodule(name), rows, degrees, settings),
        )
        for name in plan.layers
    }
    head = shapes.pop(choice.output, None)
    experts = tuple(select(whole, spec.experts)) if settings.experts else ()
    for name in experts:
        check_sizes(name, whole.get_submodule(name), config.parallel.etp)
    plan = replace(plan, shapes=shapes, head=head, experts=experts, tokenwise=tokenwise)
    if not settings.gather_inputs and not config.parallel.async_tp:
        return plan
    plan = replace(plan, gathering=_gathering(whole, rows), overlapped=config.parallel.async_tp)
    if settings.gather_inputs and not plan.communicated:
        raise ConfigError(
            "float8.gather_inputs = true needs an attention or feed-forward with only float8 input "
            "layers, and float8.filter leaves no such module; widen float8.filter"
        )
    return replace(plan, scattering=_scattering(whole, rows))


def _tokenwise(
    layers: Collection[str], rows: Mapping[str, Row], config: RunConfig
) -> tuple[str, ...]:
    """Return the layers that process only the tokens of their tp rank.

    Raises ConfigError: float8 does not support this number of tokens.
    """
    tp, tokens = config.parallel.tp, config.tokens
    own = [pattern for pattern, row in rows.items() if row.kind == "sequence" and tp > 1]
    found = tuple(name for name in layers if any(matches(pattern, name) for pattern in own))
    if found and tokens % (tp * MULTIPLE):
        raise ConfigError(
            f"parallel.tp = {tp} leaves {found[0]} {tokens / tp:g} of the {tokens} tokens of a "
            f"micro-batch, and float8 needs multiples of {MULTIPLE}; raise train.seq_len or "
            "train.micro_batch, or name the layer in float8.skip"
        )
    return found


def _gathering(model: nn.Module, rows: Mapping[str, Row]) -> dict[str, tuple[str, ...]]:
    """Return FQN of each module that gathers its input over tp -> FQNs of the input's layers."""
    kinds = {
        name: {row.kind for pattern, row in rows.items() if matches(pattern, name)}
        for name, _ in model.named_modules()
    }
    return {
        module: tuple(n for n in kinds if n.startswith(f"{module}.") and "colwise" in kinds[n])
        for module in kinds
        if "prepare_input" in kinds[module]
    }


def _scattering(model: nn.Module, rows: Mapping[str, Row]) -> tuple[str, ...]:
    """Return the FQNs of linear layers whose output is reduce-scattered along the sequence."""
    patterns = [p for p, row in rows.items() if row.kind == "rowwise" and row.output == Shard(1)]
    return tuple(
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and any(matches(pattern, name) for pattern in patterns)
    )


def _any_attention(model: DecoderConfig) -> Backend:
    """Return a backend that supports the model; only names and shapes matter here."""
    return choose_backend("math", AttentionNeeds.of(model, "cpu", torch.float32))


def _local_features(
    name: str,
    linear: nn.Module,
    rows: Mapping[str, Row],
    degrees: Mapping[Degree, int],
    settings: Float8,
) -> tuple[int, int]:
    """Return the numbers of input and output features of a layer on one rank.

    Raises ConfigError: float8 does not support these numbers.
    """
    assert isinstance(linear, nn.Linear)
    tp, ranks = degrees["tp"], degrees["dp_shard"] * degrees["cp"]
    kinds = {row.kind for pattern, row in rows.items() if matches(pattern, name)}
    tp = tp if kinds & {"colwise", "rowwise"} else 1
    by_columns, inward, outward = "rowwise" in kinds, linear.in_features, linear.out_features
    dim = inward if by_columns else outward
    if dim % (tp * MULTIPLE):
        raise ConfigError(
            f"parallel.tp = {tp} leaves a rank {dim / tp:g} of the {dim} "
            f"{'columns' if by_columns else 'rows'} of {name}, and float8 needs multiples "
            f"of {MULTIPLE}; lower parallel.tp, or name the layer in float8.skip"
        )
    part = (inward // tp, outward) if by_columns else (inward, outward // tp)
    if settings.all_gather and part[1] % ranks:
        raise ConfigError(
            f"float8.all_gather: the {ranks} ranks of parallel.dp_shard and parallel.cp do not "
            f"divide the {part[1]} rows of {name}; name the layer in float8.skip"
        )
    return part
