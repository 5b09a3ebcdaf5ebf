"""The plug-in: parallelism for any nn.Module, in your own training loop.

    parallelize   a whole model, in place; the loop calls it as before
    pipeline      a model in stages; `step` runs the micro-batches of a batch through them

Both take a ParallelPlan, or its fields as keywords. `pipeline` also takes a mesh without pp, where
it accumulates gradients over the micro-batches, so that one script serves every mesh.
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

from dtron.config import Parallel
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

    Gradients are *summed* over data-parallel ranks: divide a loss that is a mean over a rank's own
    tokens by `mesh.size("dp_replicate", "dp_shard", "cp")`. They are complete after each backward.
    Under gradient accumulation call `begin_micro_batch` before each forward.

    Args:
        plan: how; None: all of it is in `fields`.
        fields: of ParallelPlan, by name; they replace those of the plan.

    Raises:
        PlacementError: a pattern matches nothing, a parameter is covered by no row or shared by
            modules of different units, or tp does not divide what a row shards.
        ConfigError: pp > 1 (use `pipeline`), a mesh with cp, ep or etp comes without `context` or
            `experts`, a model on the meta device without `init`, a model that is wrapped or sharded
            already, or an argument of another type.
    """
    plan = _completed(plan, fields)
    _check(model, mesh, plan)
    if mesh.size("pp") > 1:
        raise ConfigError(f"pp = {mesh.size('pp')}: parallelize takes whole models; use pipeline")
    apply_passes(model, mesh, Passes(**vars(plan), keep_rng=True))
    return model


# Keys of [parallel] that only the Trainer reads; here they are arguments, or not built.
_TRAINERS_KEYS = (
    "sequence_parallel cp_method cp_inner dispatcher ep_capacity async_tp schedule "
    "stages_per_rank pp_layout defer_head high_priority timeout_seconds"
)


def _completed(plan: ParallelPlan | None, fields: dict[str, Any]) -> ParallelPlan:
    """The plan with these fields. Raises ConfigError: a key of [parallel] has no effect."""
    plan = replace(plan, **fields) if plan is not None else ParallelPlan(**fields)
    for key in _TRAINERS_KEYS.split():
        if (value := getattr(plan.parallel, key)) != getattr(Parallel(), key):
            raise ConfigError(
                f"parallel.{key} = {value!r} has no effect in the plug-in; leave it out "
                "(schedule, stages and placements are arguments)"
            )
    return plan


def _check(model: Any, mesh: Any, plan: ParallelPlan) -> None:
    """Refuse arguments of another type, and models that something else has wrapped or sharded.

    Raises:
        ConfigError: names the argument, its type or value, and the fix.
    """
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is a {_type(model)}; pass an nn.Module, then the mesh")
    if not isinstance(mesh, Mesh):
        raise ConfigError(f"mesh is a {_type(mesh)}; pass a dtron.parallelisms.Mesh")
    if isinstance(model, DistributedDataParallel):
        raise ConfigError("model is wrapped in DistributedDataParallel; pass model.module")
    if isinstance(getattr(model, "_orig_mod", None), nn.Module):
        raise ConfigError(
            "model is compiled; pass the module that torch.compile got, and compile=Compile(...)"
        )
    sharded = [name for name, p in model.named_parameters() if isinstance(p, DTensor)]
    if sharded:
        raise ConfigError(
            f"{sharded[0]} is a DTensor already; parallelize or shard a model once, all of it"
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
    """Cut any module into stages and parallelise each over the other axes of the mesh.

        stages = [["embed", "blocks.[01]"], ["blocks.[23]", "norm", "head"]]
        model = pipeline(MyModel(), Mesh(pp=2), stages=stages, units="blocks.*")
        loss = model.step(x, y, cross_entropy, micro_batches=8)

    Every rank runs the model's own forward with the modules of other stages left out: such a module
    gives back its first tensor. So the forward has to hand one tensor from stage to stage, what it
    computes between them must be right for hidden states as well (a mask made from their shape is),
    and what must happen once (an embedding, a pooling, dropout) is a module that a stage names.

    Args:
        plan: as of `parallelize`.
        **fields: as of `parallelize`.
        stages: patterns of the modules of each stage, in the order of the forward; as many stages
            per rank as the schedule takes. Modules that no stage names are in all. On a mesh with
            pp = 1 the model stays whole.
        schedule: a row of `parallelisms.pipeline.schedules.SCHEDULES`.

    Raises:
        PlacementError: as `parallelize`; a module in two stages, or a parameter in none.
        ConfigError: pp > 1 without stages, a number of stages that the schedule does not take, an
            unknown schedule.
    """
    plan = _completed(plan, fields)
    _check(model, mesh, plan)
    pieces = [(stage,) if isinstance(stage, str) else tuple(stage) for stage in stages]
    if pieces:
        cut(model, pieces)  # checks the patterns on every mesh
    row = schedule_of(schedule)
    layout = _layout(pieces, schedule, row, mesh.size("pp"))
    passes = Passes(**vars(plan), layout=layout, replicas="step", keep_rng=True)
    applied = apply_passes(model, mesh, passes)
    execution = build_execution(applied, layout, mesh, Policy.of(plan.parallel, mesh))
    return PipelinedModel(applied, execution, mesh, schedule if layout else None)


def _layout(stages: Sequence[tuple[str, ...]], name: str, row: Schedule, pp: int) -> Layout | None:
    """Which rank holds which stage, and the schedule's order; None for a model that is not cut."""
    if pp == 1:
        return None
    if not stages:
        raise ConfigError(
            f"pp = {pp} needs `stages`: the modules of each stage, such as "
            '[["embed", "blocks.0"], ["blocks.1", "norm", "head"]]'
        )
    if () in stages:
        raise ConfigError(f"stage {list(stages).index(())} names no module; give each stage some")
    v, rest = divmod(len(stages), pp)
    least, most = row.stages
    if rest or v < least or (most is not None and v > most):
        takes = f"{least}" if least == most else f"{least} or more"
        raise ConfigError(
            f"{len(stages)} stages on pp = {pp} ranks: schedule {name!r} takes {takes} a rank; "
            f"give {pp * least} stages"
        )
    order = functools.partial(order_of, name, pp, v)
    return Layout(tuple(stages), stage_ranks(row.placement, pp, v), order, row.splits_backward)


class PipelinedModel:
    """This rank's stages of a model, and what runs them. Made by `pipeline`.

    Attributes:
        parts: this rank's stages as modules, by number; {0: the model} where it is not cut.
        mesh: the mesh it is parallelised over.
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
        """Forward and backward of this rank's batch; afterwards every `.grad` is complete.

        Call it once between two `zero_grad`: it completes gradients, and must not complete them
        again.

        Args:
            inputs: (B, ...), the model's first argument, equal on all pp and tp ranks.
            targets: (B, ...), what the loss compares the output with.
            loss: (output, targets) of a micro-batch of B / micro_batches rows -> a scalar.
            micro_batches: parts of equal size that B rows are cut into.
            divide_by: what the sum of all losses, over micro-batches and data-parallel ranks, is
                divided by. Without it their number: right for a loss that is a mean, where every
                micro-batch has equally many targets. Where they differ (missing labels), give a
                summed loss and the global number of targets.
            others: further arguments of the model. Tensors of B rows are cut with the batch, all
                else goes whole to every micro-batch.

        Returns:
            The loss of the global batch, float64, equal on every rank.

        Raises:
            ConfigError: a number of micro-batches that does not divide B, or that the schedule does
                not take, or a loss that is no scalar.
        """
        self._refuse_complete_gradients()
        batches, labels = self._split(inputs, targets, micro_batches, others, train=True)
        count = self._count(micro_batches) if divide_by is None else divide_by

        def share(output: Any, i: int) -> Tensor:
            value = loss(output, labels[i])
            if value.dim():
                raise ConfigError(
                    f"loss returns a tensor of shape {tuple(value.shape)}, which has no backward; "
                    "return a scalar, such as a mean or a sum"
                )
            return value / count

        total = self._execution.train(batches, share)
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
        """The loss of a batch in evaluation mode, without gradients; see `step`."""
        batches, labels = self._split(inputs, targets, micro_batches, others, train=False)
        count = self._count(micro_batches) if divide_by is None else divide_by
        total = torch.zeros((), dtype=torch.float64, device=self.mesh.device_type)

        def add(output: Any, i: int) -> None:
            total.add_(loss(output, labels[i]) / count)

        with self._applied.evaluating():
            self._execution.evaluate(batches, add)
        return self._sum(total)

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scale all gradients to a global norm of at most `max_norm`; 0 scales nothing. If the norm
        is not finite, gradients become zero.

        Returns:
            The norm before, a scalar on the device, equal on every rank.
        """
        norm = global_norm(self.parameters(), self.mesh, self._applied.shared.copies)
        scale_or_zero_(self.parameters(), clip_scale(norm, max_norm))
        return norm

    def parameters(self) -> list[nn.Parameter]:
        """Parameters of this rank's stages, as DTensors: what an optimizer takes."""
        return [parameter for _, parameter in self.named_parameters()]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """(name in the whole model, parameter); see `Applied.named_parameters`."""
        return self._applied.named_parameters()

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's parameters by name, sharing memory; what torch.distributed.checkpoint saves,
        and loads into before `load_state_dict`. A tied weight that is here twice comes once."""
        state: dict[str, Tensor] = {}
        for name, parameter in self.named_parameters():
            state.setdefault(name, parameter.detach())
        return state

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy what `state_dict` of the same layout gives, into both holders of a tied weight."""
        for name, parameter in self.named_parameters():
            parameter.copy_(state[name])

    def train(self, mode: bool = True) -> "PipelinedModel":
        """All of this rank's stages into training mode."""
        for part in self.parts.values():
            part.train(mode)
        return self

    def eval(self) -> "PipelinedModel":
        """All of this rank's stages into evaluation mode."""
        return self.train(False)

    def _refuse_complete_gradients(self) -> None:
        applied = self._applied
        summed = [p for name, p in self.named_parameters() if name in applied.partial]
        summed += applied.shared.parameters()
        if any(p.grad is not None for p in summed):
            raise ConfigError(
                "step completes gradients, which are still there from the step before; call "
                "zero_grad, or accumulate by more micro_batches in one step"
            )

    def _count(self, micro_batches: int) -> int:
        return micro_batches * self.mesh.size(*LOSS_AXES)

    def _sum(self, share: Tensor) -> Tensor:
        dist.all_reduce(share, group=self.mesh.group(*SHARE_AXES))
        return share

    def _split(
        self, inputs: Tensor, targets: Tensor, n: int, others: Mapping[str, Any], train: bool
    ) -> tuple[list[MicroBatch], Sequence[Tensor]]:
        rows = len(inputs)
        if len(targets) != rows:
            raise ConfigError(f"inputs have {rows} rows and targets {len(targets)}; give as many")
        if n < 1 or rows % n:
            legal = ", ".join(str(m) for m in range(1, rows + 1) if rows % m == 0)
            raise ConfigError(
                f"micro_batches = {n} does not cut a rank's batch of {rows} rows into equal parts; "
                f"use {legal}"
            )
        if train and self._schedule is not None:
            self._check_schedule(self._schedule, n)
        tables = [name for name, value in others.items() if isinstance(value, Mapping)]
        if tables and n > 1:
            raise ConfigError(
                f"{tables[0]} is a mapping, which describes all rows and cannot be cut with them; "
                "use micro_batches = 1"
            )

        def parts(x: Any) -> Sequence[Any]:
            cuts = isinstance(x, Tensor) and x.dim() > 0 and len(x) == rows
            return x.chunk(n) if cuts else [x] * n

        cut_others = {name: parts(x) for name, x in others.items()}
        batches: list[MicroBatch] = [
            (x, {name: values[i] for name, values in cut_others.items()})
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
