"""The plug-in: parallelism for any nn.Module, in your own training loop.

    parallelize   changes the model in place, with pp = 1; the training loop stays the same
    pipeline      splits the model into stages, with any pp; `step` runs all micro-batches

Both take a ParallelPlan, or its fields as keywords. On a mesh with pp = 1, `pipeline` accumulates
gradients over the micro-batches, so that one script runs on every mesh.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from dtron.config.rule import changed
from dtron.errors import ConfigError
from dtron.parallelisms.apply import Applied, ParallelPlan, Passes, apply_passes, build_execution
from dtron.parallelisms.fsdp.sharding import DTYPES, Policy
from dtron.parallelisms.gradients import clip_scale, global_norm, scale_or_zero_
from dtron.parallelisms.mesh import LOSS_AXES, SHARE_AXES, Mesh
from dtron.parallelisms.pipeline.accumulate import Execution, MicroBatch
from dtron.parallelisms.pipeline.executor import Layout
from dtron.parallelisms.pipeline.schedules import Schedule, order_of, schedule_of, stage_ranks
from dtron.parallelisms.pipeline.stages import cut
from dtron.parallelisms.tensor.tensor_parallel import AnyRow

AnyModule = TypeVar("AnyModule", bound=nn.Module)
Loss = Callable[[Any, Tensor], Tensor]
"""(output of the model, targets of the micro-batch) -> a scalar."""


def parallelize(
    model: AnyModule, mesh: Mesh, plan: ParallelPlan | None = None, **fields: Any
) -> AnyModule:
    """Parallelise any module over a mesh, in place, and return it.

        mesh = Mesh(dp_shard=-1, tp=2)
        model = parallelize(MyModel(), mesh, units="blocks.*", dtype="float32", placements={
            "blocks.*.up": colwise(), "blocks.*.down": rowwise(), "norm": replicate()})

    Gradients are *summed* over data-parallel ranks: if the loss is a mean over local tokens, divide
    it by `mesh.size("dp_replicate", "dp_shard", "cp")`. Gradients are complete after each backward.
    For gradient accumulation, call `begin_micro_batch` before each forward.

    Args:
        plan: settings; None: all settings are in `fields`.
        fields: fields of ParallelPlan, which override those of `plan`.

    Raises:
        PlacementError: a pattern matches nothing, no rule covers a parameter, modules of different
            units share a parameter, or tp does not divide a dim that a rule shards.
        ConfigError: pp > 1 (use `pipeline`), cp > 1 without `context`, ep or etp > 1 without
            `experts`, a model on the meta device without `init`, a model that is already wrapped
            or sharded, or an argument of the wrong type.
    """
    plan = _completed(plan, fields)
    _check(model, mesh, plan)
    if mesh.size("pp") > 1:
        raise ConfigError(f"pp = {mesh.size('pp')}: parallelize takes whole models; use pipeline")
    apply_passes(model, mesh, Passes(**vars(plan), keep_rng=True))
    return model


# Keys that only the Trainer uses, by section. For some, the plug-in has arguments instead.
_TRAINERS_KEYS = {
    "parallel": "sequence_parallel cp_method cp_inner dispatcher ep_capacity ep_inner "
    "overlap_micro_batches async_tp schedule stages_per_rank pp_layout defer_head high_priority "
    "timeout_seconds encoder_tp",
    "compile": "cuda_graphs cache_dir",
}


def _completed(plan: ParallelPlan | None, fields: dict[str, Any]) -> ParallelPlan:
    """Return `plan` with `fields` replaced.

    Raises:
        ConfigError: a key of plan.parallel or plan.compile has no effect in the plug-in, or
            plan.recompute.mode is "auto".
    """
    plan = replace(plan, **fields) if plan is not None else ParallelPlan(**fields)
    for section, keys in _TRAINERS_KEYS.items():
        for key, value in changed(getattr(plan, section), keys):
            raise ConfigError(
                f"{section}.{key} = {value!r} has no effect in the plug-in; leave it out "
                "(schedule, stages and placements are arguments)"
            )
    if plan.recompute.mode == "auto":
        raise ConfigError(
            'recompute.mode = "auto" is chosen by the Trainer alone; use "none", "selective", '
            '"attention" or "full"'
        )
    return plan


def _check(model: Any, mesh: Any, plan: ParallelPlan) -> None:
    """Raise ConfigError for arguments of the wrong type, and for wrapped or sharded models."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {_type(model)}; pass an nn.Module, then the mesh")
    if not isinstance(mesh, Mesh):
        raise ConfigError(f"mesh is a {_type(mesh)}; pass a dtron.parallelisms.Mesh")
    if isinstance(model, DistributedDataParallel):
        raise ConfigError("model is wrapped in DistributedDataParallel; pass model.module")
    if _type(model) == "OptimizedModule":  # a private class of torch
        raise ConfigError(
            "model is compiled; pass the module that torch.compile got, and compile=Compile(...)"
        )
    sharded = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    if sharded:
        raise ConfigError(
            f"{sharded[0]} is a DTensor already; pass a model that is not sharded yet"
        )
    if plan.dtype not in DTYPES:
        raise ConfigError(f"dtype = {plan.dtype!r} is unknown; use {', '.join(map(repr, DTYPES))}")
    several = isinstance(plan.units, Sequence) and not isinstance(plan.units, str)
    for unit in plan.units if several else [plan.units]:
        if not isinstance(unit, Sequence):
            raise ConfigError(
                f"units has a {_type(unit)}; name modules by patterns, such as 'blocks.*'"
            )
    for pattern, row in (plan.placements or {}).items():
        if not isinstance(row, AnyRow):
            raise ConfigError(
                f"placements[{pattern!r}] is a {_type(row)}; use a row of "
                "dtron.parallelisms, such as colwise()"
            )


def _type(value: object) -> str:
    return type(value).__qualname__


def pipeline(
    model: nn.Module,
    mesh: Mesh,
    plan: ParallelPlan | None = None,
    *,
    stages: Sequence[Sequence[str]] = (),
    schedule: str = "1F1B",
    **fields: Any,
) -> "PipelinedModel":
    """Split any module into pipeline stages and parallelise each over the other mesh axes.

        stages = [["embed", "blocks.[01]"], ["blocks.[23]", "norm", "head"]]
        model = pipeline(MyModel(), Mesh(pp=2), stages=stages, units="blocks.*")
        loss = model.step(x, y, cross_entropy, micro_batches=8)

    Every rank runs the model's own forward, in which modules of other stages return their first
    argument that is a tensor or a tuple of tensors. So the forward must pass one tensor, or one
    tuple of them, from stage to stage, as its first argument. Operations
    outside of modules run in every stage and must accept hidden states (example: a mask computed
    from the shape). Operations that must run once (embedding, pooling, dropout) must be in a module
    of a stage.

    Args:
        plan: settings; None: all settings are in `fields`.
        **fields: fields of ParallelPlan, which override those of `plan`.
        stages: patterns of the modules of each stage, in the order of the forward; the schedule
            defines how many stages a rank takes. Modules that no stage names are in all stages.
            With pp = 1 the model is not split.
        schedule: a name in `parallelisms.pipeline.schedules.SCHEDULES`.

    Raises:
        PlacementError: an error of `parallelize`, a module in two stages, or a parameter in none.
        ConfigError: an error of `parallelize`, pp > 1 without stages, an unknown schedule, or a
            number of stages that the schedule does not support.
    """
    plan = _completed(plan, fields)
    _check(model, mesh, plan)
    patterns = [(stage,) if isinstance(stage, str) else tuple(stage) for stage in stages]
    if patterns:
        cut(model, patterns)  # checks the patterns on every mesh
    row = schedule_of(schedule)
    layout = _layout(patterns, schedule, row, mesh.size("pp"))
    passes = Passes(**vars(plan), layout=layout, replicas="step", keep_rng=True)
    applied = apply_passes(model, mesh, passes)
    execution = build_execution(applied, layout, mesh, Policy.of(plan.parallel, mesh))
    return PipelinedModel(applied, execution, mesh, schedule if layout else None)


def _layout(stages: Sequence[tuple[str, ...]], name: str, row: Schedule, pp: int) -> Layout | None:
    """Return the layout of the stages under a schedule; None if pp = 1."""
    if pp == 1:
        return None
    if not stages:
        raise ConfigError(
            f"pp = {pp} needs `stages`, the modules of each stage; use stages=LIST, such as "
            '[["embed", "blocks.0"], ["blocks.1", "norm", "head"]]'
        )
    if () in stages:
        raise ConfigError(f"stage {list(stages).index(())} names no module; name at least one")
    v, rest = divmod(len(stages), pp)
    least, most = row.stages
    if rest or v < least or (most is not None and v > most):
        takes = f"{least}" if least == most else f"{least} or more"
        raise ConfigError(
            f"{len(stages)} stages for pp = {pp}: schedule {name!r} takes {takes} per rank; use "
            f"{pp * least} stages"
        )
    order = functools.partial(order_of, name, pp, v)
    return Layout(tuple(stages), stage_ranks(row.placement, pp, v), order, row.splits_backward)


class PipelinedModel:
    """This rank's stages of a model, and the schedule that runs them. Returned by `pipeline`.

    Attributes:
        parts: this rank's stage modules by stage number; {0: model} if pp = 1.
        mesh: the mesh.
    """

    def __init__(
        self, applied: Applied, execution: Execution, mesh: Mesh, schedule: str | None
    ) -> None:
        self.parts, self.mesh = applied.parts, mesh
        self._applied, self._execution, self._schedule = applied, execution, schedule

    def step(
        self,
        inputs: Tensor,
        targets: Tensor,
        loss: Loss,
        *,
        micro_batches: int = 1,
        divide_by: Tensor | float | None = None,
        **others: Any,
    ) -> Tensor:
        """Run forward and backward of this rank's batch; afterwards every `.grad` is complete.

        Call `zero_grad` before each call: gradients are summed over tp and pp once per call.

        Args:
            inputs: (B, ...), the model's first argument, equal on all pp and tp ranks.
            targets: (B, ...), the second argument of `loss`.
            loss: function (output, targets) -> scalar, for B / micro_batches samples.
            micro_batches: number of micro-batches; divides B.
            divide_by: divisor of the sum of losses over all micro-batches and data-parallel ranks.
                None: the number of these losses; correct if `loss` is a mean and every micro-batch
                has equally many targets. If the numbers of targets differ (missing labels), use a
                summed loss, and pass the global number of targets here.
            others: the model's arguments after `inputs`, by keyword. Tensors whose first dim is B
                are split like the batch; all other values are passed to every micro-batch.

        Returns:
            The loss of the global batch, a float64 scalar, equal on every rank.

        Raises:
            ConfigError: `micro_batches` does not divide B or does not fit the schedule, the loss
                is not a scalar, or `.grad` of the previous call is still set.
        """
        self._refuse_complete_gradients()
        batches, labels = self._split(inputs, targets, micro_batches, others, train=True)
        count = self._count(micro_batches) if divide_by is None else divide_by

        def scaled_loss(output: Any, i: int) -> Tensor:
            value = loss(output, labels[i])
            if value.dim():
                raise ConfigError(
                    f"loss returns a tensor of shape {tuple(value.shape)}, which has no backward; "
                    "return a scalar, such as a mean or a sum"
                )
            return value / count

        total = self._execution.train(batches, scaled_loss)
        self._applied.complete_gradients(self.mesh)
        return self._sum(total)

    def evaluate(
        self,
        inputs: Tensor,
        targets: Tensor,
        loss: Loss,
        *,
        micro_batches: int = 1,
        divide_by: Tensor | float | None = None,
        **others: Any,
    ) -> Tensor:
        """Compute the loss of a batch in evaluation mode, without gradients; see `step`."""
        batches, labels = self._split(inputs, targets, micro_batches, others, train=False)
        count = self._count(micro_batches) if divide_by is None else divide_by
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device_type)

        def add(output: Any, i: int) -> None:
            total.add_(loss(output, labels[i]) / count)

        with self._applied.evaluating():
            self._execution.evaluate(batches, add)
        return self._sum(total)

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale all gradients to a global norm of at most `max_norm`; 0: do not scale.

        If the norm is not finite, gradients become zero.

        Returns:
            The norm before scaling, a scalar on the device, equal on every rank.
        """
        norm = global_norm(self.parameters(), self.mesh, self._applied.shared.copies)
        scale_or_zero_(self.parameters(), clip_scale(norm, max_norm))
        return norm

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of this rank's stages, as DTensors, for an optimizer."""
        return [parameter for _, parameter in self.named_parameters()]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield (name in the whole model, parameter); see `Applied.named_parameters`."""
        return self._applied.named_parameters()

    def state_dict(self) -> dict[str, Tensor]:
        """Return this rank's parameters by name; the tensors share memory with the model.

        torch.distributed.checkpoint can save them, or load into them before `load_state_dict`. A
        weight tied across two local stages is included once.
        """
        state: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters():
            state.setdefault(name, parameter.detach())
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy a `state_dict` of the same layout into the parameters and all tied copies."""
        for name, parameter in self.named_parameters():
            parameter.copy_(state[name])

    def train(self, mode: bool = True) -> "PipelinedModel":
        """Set this rank's stages to training mode; with mode=False, to evaluation mode."""
        for part in self.parts.values():
            part.train(mode)
        return self

    def eval(self) -> "PipelinedModel":
        """Set this rank's stages to evaluation mode."""
        return self.train(False)

    def _refuse_complete_gradients(self) -> None:
        applied = self._applied
        summed = [p for name, p in self.named_parameters() if name in applied.partial]
        summed += applied.shared.parameters()
        if any(p.grad is not None for p in summed):
            raise ConfigError(
                "`.grad` of the last step is still set, and step would reduce it again; call "
                "zero_grad, which sets it to None, or pass more micro_batches to one step"
            )

    def _count(self, micro_batches: int) -> int:
        return micro_batches * self.mesh.size(*LOSS_AXES)

    def _sum(self, partial_loss: Tensor) -> Tensor:
        dist.all_reduce(partial_loss, group=self.mesh.group(*SHARE_AXES))
        return partial_loss

    def _split(
        self, inputs: Tensor, targets: Tensor, n: int, others: Mapping[str, Any], train: bool
    ) -> tuple[list[MicroBatch], Sequence[Tensor]]:
        rows = len(inputs)
        if len(targets) != rows:
            raise ConfigError(f"inputs have {rows} rows, targets {len(targets)}; use equal numbers")
        if n < 1 or rows % n:
            legal = ", ".join(str(m) for m in range(1, rows + 1) if rows % m == 0)
            raise ConfigError(
                f"micro_batches = {n} does not divide the rank's batch of {rows} rows; use {legal}"
            )
        if train and self._schedule is not None:
            self._check_schedule(self._schedule, n)
        tables = [name for name, value in others.items() if isinstance(value, Mapping)]
        if tables and n > 1:
            raise ConfigError(
                f"{tables[0]} is a mapping for the whole batch and cannot be split into "
                f"micro_batches = {n}; use micro_batches = 1"
            )

        def chunks(x: Any) -> Sequence[Any]:
            has_rows = isinstance(x, Tensor) and x.dim() > 0 and len(x) == rows
            return x.chunk(n) if has_rows else [x] * n

        chunked = {name: chunks(x) for name, x in others.items()}
        batches: list[MicroBatch] = [
            (x, {name: values[i] for name, values in chunked.items()})
            for i, x in enumerate(inputs.chunk(n))
        ]
        return batches, targets.chunk(n)

    def _check_schedule(self, name: str, n: int) -> None:
        rule, pp = schedule_of(name).micro_batches, self.mesh.size("pp")
        if not rule.holds(pp, n):
            legal = " or ".join(map(str, rule.nearest(pp, n)))
            raise ConfigError(
                f"micro_batches = {n}: schedule {name!r} takes {rule.text} (pp = {pp}); the "
                f"nearest is {legal}"
            )
