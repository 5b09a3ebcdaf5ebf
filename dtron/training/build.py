"""What a run's settings make of its model: the passes, and the loss.

The trainer builds runs by it, `dtron plan --exact` traces them by it: there is one way from a
config to a parallel model.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dtron.config import RunConfig
from dtron.models import MODELS, build_model
from dtron.models.attention import Backend
from dtron.models.config import DecoderConfig
from dtron.parallelisms.apply import Applied, Passes
from dtron.parallelisms.context.attention import Context
from dtron.parallelisms.expert.expert_parallel import ExpertLayers
from dtron.parallelisms.fsdp.sharding import DTYPES
from dtron.parallelisms.mesh import Mesh
from dtron.parallelisms.pipeline.executor import Layout
from dtron.parallelisms.placement import Row
from dtron.setup.float8_plan import Float8Plan
from dtron.training.loss import ChunkedLoss, VocabularyShard, cross_entropy_sum, given_sum
from dtron.training.step import Loss


@dataclass(frozen=True)
class Assembly:
    """A run's model on a mesh, as its settings want it."""

    config: RunConfig
    model: DecoderConfig
    attention: Backend
    layout: Layout | None
    float8: Float8Plan | None
    mesh: Mesh

    @functools.cached_property
    def context(self) -> Context | None:
        """How attention gets at other ranks' tokens; None where cp is 1."""
        cores, model = MODELS[self.config.model.name].cores, self.model
        kernel = self.attention.kernel
        return Context.of(self.config.parallel, cores, kernel, model.window, model.softcap)

    def build(self) -> nn.Module:
        """The plain model on the meta device."""
        with torch.device("meta"):
            return build_model(self.config.model.name, self.model, self.attention)

    def passes(self) -> Passes:
        """What makes it a parallel one."""
        config, spec = self.config, MODELS[self.config.model.name]

        def fill(fqn: str, full: Tensor, generator: torch.Generator) -> None:
            spec.init_parameter(self.model, fqn, full, generator)

        return Passes(
            units=spec.units(self.model),
            blocks=spec.layer.format("*"),
            placements=self._placements(
                spec.placements(self.model, config.parallel.sequence_parallel)
            ),
            parallel=config.parallel,
            dtype=config.train.dtype,
            recompute=config.recompute,
            compile=config.compile,
            init=(config.train.seed, fill),
            convert=self._conversion(),
            vocabulary=spec.vocabulary(self.model),
            layout=self.layout,
            replicas="step",
            context=self.context,
            experts=self._expert_layers(),
            loss=self._head_loss(),
        )

    def loss(self, applied: Applied) -> Loss:
        """The summed loss of what the model gives."""
        if applied.loss_in_head:
            return given_sum
        loss = functools.partial(cross_entropy_sum, vocabulary=self._vocabulary())
        if self.config.compile.enable:
            loss = torch.compile(loss, backend=self.config.compile.backend, dynamic=False)
        return loss

    def _expert_layers(self) -> ExpertLayers | None:
        if not self.model.n_experts:
            return None
        spec = MODELS[self.config.model.name]
        parallel, float8 = self.config.parallel, self.config.float8.dispatch
        return ExpertLayers(
            spec.experts, parallel.dispatcher, capacity=parallel.ep_capacity, float8=float8
        )

    def _conversion(self) -> Callable[[nn.Module], None] | None:
        plan = self.float8
        return plan.converter(self.mesh, DTYPES[self.config.train.dtype]) if plan else None

    def _placements(self, rows: dict[str, Row]) -> dict[Any, Any]:
        plan = self.float8
        return plan.placements(rows, self.mesh) if plan else dict(rows)

    def _vocabulary(self) -> VocabularyShard | None:
        if self.mesh.size("tp") == 1:
            return None
        size, rank = self.model.vocab_size, self.mesh.rank("tp")
        return VocabularyShard(size, rank, self.mesh.group("tp"))

    def _head_loss(self) -> tuple[str, ChunkedLoss] | None:
        chunks, compile = self.config.train.loss_chunks, self.config.compile
        if chunks == 1:
            return None
        *_, head = MODELS[self.config.model.name].head
        return head, ChunkedLoss(chunks, self._vocabulary(), compile)
