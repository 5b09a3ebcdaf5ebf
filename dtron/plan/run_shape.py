"""A run's settings with every degree resolved: what all other files of the planner start from."""

import functools
from dataclasses import dataclass, field
from typing import Any

from dtron.config import DEGREES, ExpertDegree, RunConfig
from dtron.config.rules import Candidate
from dtron.errors import ConfigError
from dtron.models import MODELS, model_config
from dtron.models.config import DecoderConfig
from dtron.models.flops import FlopsModel, flops_per_token
from dtron.models.moe import capacity
from dtron.parallelisms.context.halo import received_tokens
from dtron.parallelisms.context.layout import ContextLayout, layout_of
from dtron.parallelisms.expert.symmetric_dispatch import rows_at_most
from dtron.parallelisms.fsdp.sharding import Policy
from dtron.parallelisms.pipeline.executor import Layout
from dtron.parallelisms.pipeline.schedule_ops import Order
from dtron.parallelisms.placement import matches
from dtron.setup.float8_plan import Float8Plan
from dtron.setup.rules import resolve

ELEMENT = {"bfloat16": 2, "float32": 4}
"""Bytes of an element, by dtype."""
ROUNDS = 4


def shortened(config: RunConfig, world_size: int) -> RunConfig:
    """The run with 4 rounds of micro-batches where a step has more whole ones: a schedule repeats
    itself, so that what it takes, its bubble and what is in flight are those of the whole step."""
    try:
        p, m = config.parallel.pp, config.micro_batches(world_size)
    except ConfigError:  # which the rules report
        return config
    if p == 1 or m % p or m <= ROUNDS * p or config.parallel.schedule.endswith(".csv"):
        return config
    batch = config.train.global_batch // m * p * ROUNDS
    return config.model_copy(
        update={"train": config.train.model_copy(update={"global_batch": batch})}
    )


@dataclass(frozen=True)
class Stage:
    """What a pipeline stage holds; without a pipeline the whole model is one."""

    index: int
    rank: int
    """Pipeline rank that holds it."""
    embedding: bool
    layers: tuple[int, ...]
    head: bool


@dataclass(frozen=True)
class Resolved(Candidate):
    """A legal run on a number of ranks."""

    model: DecoderConfig
    layout: Layout | None
    float8: Float8Plan | None
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """What is the same for many layers, once computed."""

    @classmethod
    def of(cls, config: RunConfig, world_size: int) -> "Resolved":
        """Resolve a run.

        Raises:
            ConfigError: names all reasons why it cannot run on so many ranks.
        """
        return cls(config, world_size, *resolve(shortened(config, world_size), world_size))

    @staticmethod
    def model_of(config: RunConfig) -> DecoderConfig:
        """The model of a run, legal or not on any number of ranks."""
        return model_config(config.model.name, config.model.size, config.model.override)

    @staticmethod
    def flops_of(config: RunConfig) -> dict[str, float]:
        """FLOPs a token by convention."""
        sizes, length = FlopsModel.of(Resolved.model_of(config)), config.train.seq_len
        full = flops_per_token(sizes, length, "full")
        return {"full": full, "causal": flops_per_token(sizes, length, "causal")}

    @functools.cached_property
    def experts(self) -> dict[ExpertDegree, int]:
        """Ranks by axis of the experts' mesh."""
        return self.config.expert_degrees(self.world_size)

    @property
    def tp(self) -> int:
        """Ranks of tensor parallelism."""
        return self.degrees["tp"]

    @property
    def between(self) -> int:
        """Ranks that share the tokens between attention and feed-forward."""
        return self.tp if self.config.parallel.sequence_parallel else 1

    @property
    def experts_apart(self) -> bool:
        """Whether experts are on another mesh than the rest (`expert.stands_apart`)."""
        return self.tp > 1 or self.experts["ep"] * self.experts["etp"] > 1

    @property
    def keeps_dense(self) -> bool:
        """Whether one rank has all that is not apart alone, and so keeps its gradients
        (`fsdp_internals.bypass_reduction`)."""
        return self.degrees["dp_replicate"] * self.shards == 1

    @property
    def keeps_experts(self) -> bool:
        """The same of experts that are apart."""
        copies = self.degrees["dp_replicate"] * self.experts["edp_shard"]
        return self.experts_apart and copies == 1

    @property
    def policy(self) -> Policy:
        """When parameters are freed and gradients reduced."""
        return Policy.resolve(self.config.parallel, self.shards > 1)

    @property
    def tokens(self) -> int:
        """Tokens of a micro-batch on a rank, before tp splits them."""
        return self.config.tokens

    @property
    def tokens_per_step(self) -> int:
        """Tokens of a step on all ranks."""
        return self.config.train.global_batch * self.config.train.seq_len

    @property
    def element(self) -> int:
        """Bytes of an element of the computation."""
        return ELEMENT[self.config.train.dtype]

    @property
    def n_layers(self) -> int:
        """Layers of the model, with those of multi-token prediction."""
        return self.model.n_layers + self.model.mtp

    @functools.cached_property
    def order(self) -> Order:
        """Actions by pipeline rank, of a shortened step; empty without a pipeline."""
        if self.layout is None:
            return ()
        return self.layout.order(
            shortened(self.config, self.world_size).micro_batches(self.world_size)
        )

    @functools.cached_property
    def stages(self) -> tuple[Stage, ...]:
        """All stages in the model's order."""
        if self.layout is None:
            return (Stage(0, 0, True, tuple(range(self.n_layers)), True),)
        spec = MODELS[self.config.model.name]
        layers = [spec.layer.format(i) for i in range(self.n_layers)]
        first, last = spec.embedding(self.model)[0], spec.head[-1]
        return tuple(
            Stage(
                index,
                rank,
                any(matches(pattern, first) for pattern in patterns),
                tuple(i for i, fqn in enumerate(layers) if any(matches(p, fqn) for p in patterns)),
                any(matches(pattern, last) for pattern in patterns),
            )
            for index, (patterns, rank) in enumerate(
                zip(self.layout.stages, self.layout.ranks, strict=True)
            )
        )

    def stages_of(self, rank: int) -> tuple[Stage, ...]:
        """Those of a pipeline rank."""
        return tuple(stage for stage in self.stages if stage.rank == rank)

    def has_experts(self, layer: int) -> bool:
        """Whether a layer is a mixture of experts."""
        return layer >= self.model.n_dense_layers

    def kind(self, layer: int) -> str:
        """dense, mixture, or prediction: a mixture that merges the tokens ahead."""
        if layer >= self.model.n_layers:
            return "prediction"
        return "mixture" if self.has_experts(layer) else "dense"

    def window(self, layer: int) -> int:
        """Keys that a token sees; 0: all before it."""
        return self._windows[layer] if layer < self.model.n_layers else self.model.window

    @functools.cached_property
    def _windows(self) -> tuple[int, ...]:
        return self.model.windows

    def context(self, layer: int) -> ContextLayout:
        """How a layer's attention arranges the cp ranks."""
        parallel = self.config.parallel
        methods = parallel.cp_methods()
        return layout_of(methods[layer % len(methods)], self.degrees["cp"], parallel.cp_inner)

    def exchanges_halos(self, layer: int) -> bool:
        """Whether a layer with a ring has a window, and so receives only what its queries see."""
        return self.context(layer).rings and 0 < self.window(layer) < self.config.train.seq_len

    def halo(self, layer: int) -> int:
        """Tokens of a micro-batch that a block receives, of the rank that receives most."""
        outer, train, window = self.context(layer).outer, self.config.train, self.window(layer)
        half = train.seq_len // (2 * outer)
        most = max(received_tokens(outer, rank, half, window) for rank in range(outer))
        return most * train.micro_batch

    def recomputes(self, layer: int) -> bool:
        """Whether a layer computes anything twice."""
        recompute = self.config.recompute
        return recompute.mode != "none" and layer % recompute.every == 0

    def flops(self) -> dict[str, float]:
        """FLOPs a token by convention."""
        return self.flops_of(self.config)

    def parallel(self) -> dict[str, Any]:
        """Every degree and choice that shapes the run, resolved."""
        parallel = self.config.parallel
        found: dict[str, Any] = {"world_size": self.world_size}
        found |= {axis: self.degrees[axis] for axis in DEGREES}
        found |= {axis: self.experts[axis] for axis in ("ep", "etp", "edp_shard")}
        found |= {"zero": parallel.zero, "sequence_parallel": self.between > 1}
        found |= {"micro_batch": self.config.train.micro_batch, "micro_batches": self.micro_batches}
        if self.layout is not None:
            found["schedule"] = parallel.schedule
            found["stages_per_rank"] = len(self.stages) // self.degrees["pp"]
            found["layers_by_stage"] = [len(stage.layers) for stage in self.stages]
        return found


def expert_rows(run: Resolved) -> int:
    """Rows that a rank's experts get of a micro-batch where loads are even; with padding to
    capacity as many of each expert."""
    model, own = run.model, -(-run.tokens // run.between)
    rows = own * model.experts_per_token
    if model.capacity_pad:
        choices = run.tokens * run.degrees["cp"] * model.experts_per_token
        most = capacity(choices, model.n_experts, model.capacity_factor)
        rows = model.n_experts * min(most, own)
    return rows * run.experts["etp"]


def pulls_rows(run: Resolved) -> bool:
    """Whether rows come to their experts out of peers' memory."""
    pulls = run.config.parallel.dispatcher == "symmetric_memory"
    return pulls and run.experts["ep"] * run.experts["etp"] > 1


def expert_room(run: Resolved) -> float:
    """Rows for which a rank's experts have room, over the rank's own: where buffers are not
    bounded, as many as come of even loads, to each of etp ranks."""
    ep, etp, parallel = run.experts["ep"], run.experts["etp"], run.config.parallel
    if not pulls_rows(run):
        return float(etp)
    sent = expert_rows(run) // etp
    return rows_at_most(sent, ep, etp, parallel.ep_capacity) / sent
