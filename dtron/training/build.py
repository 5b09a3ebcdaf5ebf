"""Build a run from its config: mesh, parallel model, optimizer and training step.

Used by the trainer, `dtron plan --exact` and the parity tests.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtron.config import RunConfig
from dtron.float8.delayed import DelayedScales
from dtron.lora import adapters
from dtron.lora.dora import start_magnitudes
from dtron.models import build_model, model_spec
from dtron.models.router import routers
from dtron.parallelisms.apply import Applied, Passes, apply_passes, build_execution
from dtron.parallelisms.context.apply import Context
from dtron.parallelisms.cuda_graph import GradientGraph
from dtron.parallelisms.expert.expert_parallel import ExpertLayers
from dtron.parallelisms.fsdp.sharding import DTYPES, Policy
from dtron.parallelisms.mesh import BATCH_AXES, LOSS_AXES, SHARE_AXES, Mesh
from dtron.parallelisms.placement import Row
from dtron.setup.preflight import ModelSetup
from dtron.training.expert_balancing import Routing
from dtron.training.loss import ChunkedLoss, VocabularyShard, losses_from_head, sequence_losses
from dtron.training.optim import OptimizerFactory, build_optimizer
from dtron.training.step import Guard, LossFunction, ParallelModel, TrainStep


def build_mesh(config: RunConfig, world_size: int, device_type: str) -> Mesh:
    """Build the device mesh of a run, and the process groups that every run uses."""
    parallel = config.parallel
    mesh = Mesh(
        **config.degrees(world_size),
        ep=parallel.ep,
        etp=parallel.etp,
        device_type=device_type,
        high_priority=parallel.high_priority if device_type == "cuda" else (),  # NCCL only
    )
    for axes in (LOSS_AXES, SHARE_AXES, BATCH_AXES):
        mesh.group(*axes)  # creates the group, so that `groups` and `group_names` contain it
    return mesh


@dataclass(frozen=True)
class ModelBuilder:
    """Builds a run's parallel model on a mesh."""

    config: RunConfig
    setup: ModelSetup
    mesh: Mesh

    @functools.cached_property
    def context(self) -> Context | None:
        """Settings of context-parallel attention; None with cp = 1."""
        spec, model = model_spec(self.config.model.name), self.setup.config
        kernel, recurrent = self.setup.attention.kernel, spec.recurrent_cores(model)
        scoring = model.window, model.softcap
        return Context.of(
            self.config.parallel, spec.cores, kernel, *scoring, recurrent, model.causal
        )

    def build(self, passes: Passes | None = None) -> ParallelModel:
        """Build the parallel model with its execution and loss.

        Args:
            passes: passes to apply instead of those of the config.
        """
        with torch.device("meta"):
            model = build_model(self.config.model.name, self.setup.config, self.setup.attention)
        applied = apply_passes(model, self.mesh, passes or self.passes())
        if self.config.lora.rank:
            embedding, *_ = model_spec(self.config.model.name).embedding(self.setup.config)
            adapters.train_from(embedding, applied.parts.values())
            start_magnitudes(applied.parts.values())
        policy = Policy.of(self.config.parallel, self.mesh)
        execution = build_execution(applied, self.setup.layout, self.mesh, policy)
        return ParallelModel(applied, execution, self.mesh, self.loss(applied))

    def passes(self) -> Passes:
        """Return the passes of the config."""
        config, spec = self.config, model_spec(self.config.model.name)

        def fill(fqn: str, full: Tensor, generator: torch.Generator) -> None:
            spec.init_parameter(self.setup.config, fqn, full, generator)

        seed = config.train.seed
        return Passes(
            units=spec.units(self.setup.config),
            blocks=spec.layer.format("*"),
            placements=self._placements(
                spec.placements(self.setup.config, config.parallel.sequence_parallel)
            ),
            parallel=config.parallel,
            dtype=config.train.dtype,
            recompute=config.recompute,
            compile=config.compile,
            init=(seed, adapters.initializer(fill) if config.lora.rank else fill),
            convert=self._conversion(),
            vocabulary=spec.vocabulary(self.setup.config),
            layout=self.setup.layout,
            encoder=spec.encoder,
            replicas="step",
            context=self.context,
            experts=self._expert_layers(),
            loss=self._head_loss(),
        )

    def loss(self, applied: Applied) -> LossFunction:
        """Return the function that computes the losses of sequences from the model's output."""
        if applied.loss_in_head:
            return losses_from_head
        loss = functools.partial(sequence_losses, vocabulary=self._vocabulary())
        if self.config.compile.enable:
            loss = torch.compile(loss, backend=self.config.compile.backend, dynamic=False)
        return loss

    def _expert_layers(self) -> ExpertLayers | None:
        if not self.setup.config.n_experts:
            return None
        spec = model_spec(self.config.model.name)
        parallel, float8 = self.config.parallel, self.config.float8.dispatch
        return ExpertLayers(
            spec.experts,
            parallel.dispatcher,
            capacity=parallel.ep_capacity,
            float8=float8,
            inner=parallel.ep_inner,
        )

    def _conversion(self) -> Callable[[nn.Module], None] | None:
        plan, spec = self.setup.float8, model_spec(self.config.model.name)
        dtype = DTYPES[self.config.train.dtype]
        convert = plan.converter(self.mesh, dtype) if plan else None
        return adapters.conversion(convert, spec, self.config.lora, dtype)

    def _placements(self, rows: dict[str, Row]) -> dict[Any, Any]:
        plan = self.setup.float8
        return plan.placements(rows, self.mesh) if plan else dict(rows)

    def _vocabulary(self) -> VocabularyShard | None:
        if self.mesh.size("tp") == 1:
            return None
        size, rank = self.setup.config.vocab_size, self.mesh.rank("tp")
        return VocabularyShard(size, rank, self.mesh.group("tp"))

    def _head_loss(self) -> tuple[str, ChunkedLoss] | None:
        chunks, compile = self.config.train.loss_chunks, self.config.compile
        if chunks == 1:
            return None
        *_, head = model_spec(self.config.model.name).head
        return head, ChunkedLoss(
            chunks, self._vocabulary(), compile, self.setup.config.logit_softcap
        )


@dataclass(frozen=True)
class BuiltRun:
    """A model with its optimizer and step, ready for the first step."""

    setup: ModelSetup
    model: ParallelModel
    optimizer: torch.optim.Optimizer
    step: TrainStep
    routing: Routing | None
    """Load balancing of experts; None: the model has no routers."""
    scales: DelayedScales | None
    """Delayed float8 scales; None: scaling is not delayed."""


def build_run(
    config: RunConfig,
    setup: ModelSetup,
    model: ParallelModel,
    guard: Guard | None = None,
    step: type[TrainStep] = TrainStep,
    factory: OptimizerFactory | None = None,
) -> BuiltRun:
    """Connect a parallel model with its optimizer, routers, float8 scales and training step.

    Args:
        guard: detects bad losses.
        step: TrainStep or a subclass.
        factory: makes the optimizer; None: `optim.name` says which.
    """
    applied, mesh, float8 = model.applied, model.mesh, setup.float8
    hidden = model_spec(config.model.name).is_hidden_matrix
    optimizer = build_optimizer(applied.named_parameters(), config.optim, hidden, factory)
    micro_batches = config.micro_batches(dist.get_world_size())
    found = routers(applied.parts.values())  # a stage may have no router
    routing = Routing(found, mesh, micro_batches) if setup.config.n_experts else None
    refresh = float8.gather_weights(applied, mesh) if float8 else None
    scales = float8.delay_scales(applied, mesh) if float8 else None

    def after_update(taken: Tensor | None) -> None:
        if routing is not None and taken is not None:
            routing.after_update(taken)
        if refresh is not None:
            refresh()
        if scales is not None and scales.update(taken) and train_step.graph is not None:
            train_step.graph.discard()  # it was recorded with the other kind of scales

    train_step = step(
        model,
        optimizer,
        config.train.max_grad_norm,
        config.train.seed if setup.config.draws else None,
        setup.config.mtp_coefficient,
        guard,
        after_update if routing or refresh or scales else None,
    )
    if config.compile.cuda_graphs == "step":
        device = torch.device(mesh.device_type)
        train_step.graph = GradientGraph(train_step.parameters, device)
    return BuiltRun(setup, model, optimizer, train_step, routing, scales)
