"""A run's settings with all parallel degrees resolved: the input of the other planner modules."""

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from dtron.config import DEGREES, ExpertDegree, RunConfig
from dtron.config.data_section import SpanLengths
from dtron.config.setting_rules import Candidate
from dtron.errors import ConfigError
from dtron.lora.adapters import adapters, flops_model
from dtron.models import model_config, model_spec
from dtron.models.attention import WIDEST_FLASH, modifies_scores
from dtron.models.config import DecoderConfig, LayerKind
from dtron.models.flops import attended_by_layers, flops_per_token, images_that_fit
from dtron.models.moe import capacity
from dtron.models.vision import encoder_config
from dtron.parallelisms.context.halo import received_tokens
from dtron.parallelisms.context.layout import ContextLayout, layout_of
from dtron.parallelisms.expert.bounded_all_to_all import chunk_size
from dtron.parallelisms.expert.symmetric_dispatch import rows_at_most
from dtron.parallelisms.fsdp.sharding import Policy
from dtron.parallelisms.pipeline.executor import Layout
from dtron.parallelisms.pipeline.schedule_ops import Order
from dtron.parallelisms.placement import matches
from dtron.setup.float8_plan import Float8Plan
from dtron.setup.rules import resolve

ELEMENT = {"bfloat16": 2, "float32": 4}
"""Bytes per element, by dtype."""
ROUNDS = 4


def shortened(config: RunConfig, world_size: int) -> RunConfig:
    """Return the config with at most ROUNDS x pp micro-batches per step.

    Schedules repeat every pp micro-batches, so the bubble's seconds and the micro-batches in flight
    do not change.
    """
    try:
        p, m = config.parallel.pp, config.micro_batches(world_size)
    except ConfigError:  # the rules report it
        return config
    if p == 1 or m % p or m <= ROUNDS * p or config.parallel.schedule.endswith(".csv"):
        return config
    return config.changed(train={"global_batch": config.train.global_batch // m * p * ROUNDS})


@dataclass(frozen=True)
class Stage:
    """Modules of a pipeline stage; without a pipeline the whole model is one stage."""

    index: int
    rank: int
    """The pipeline rank of the stage."""
    embedding: bool
    layers: tuple[int, ...]
    head: bool


@dataclass(frozen=True)
class Resolved(Candidate):
    """A legal run on a number of ranks, with all degrees resolved."""

    model: DecoderConfig
    layout: Layout | None
    float8: Float8Plan | None
    memo: dict[Any, Any] = field(default_factory=dict, repr=False, compare=False)
    """Cache of values that many layers share."""

    @classmethod
    def of(cls, config: RunConfig, world_size: int) -> "Resolved":
        """Return the run with all degrees, the model config, layout and float8 layers resolved.

        Raises:
            ConfigError: the run is not legal; the message lists all reasons.
        """
        return cls(config, world_size, *resolve(shortened(config, world_size), world_size))

    @staticmethod
    def model_of(config: RunConfig) -> DecoderConfig:
        """Return the model config of a run; the run need not be legal."""
        return model_config(config.model.name, config.model.size, config.model.override)

    @functools.cached_property
    def experts(self) -> dict[ExpertDegree, int]:
        """Number of ranks of each axis of the expert mesh."""
        return self.config.expert_degrees(self.world_size)

    @property
    def tp(self) -> int:
        """Degree of tensor parallelism."""
        return self.degrees["tp"]

    @property
    def between(self) -> int:
        """Number of ranks that split the tokens of hidden states.

        The number is tp with sequence parallelism, else 1.
        """
        return self.tp if self.config.parallel.sequence_parallel else 1

    @property
    def separate_experts(self) -> bool:
        """Whether experts use a separate mesh (`expert_parallel.on_separate_mesh`)."""
        return self.tp > 1 or self.experts["ep"] * self.experts["etp"] > 1

    @property
    def keeps_dense(self) -> bool:
        """Whether dp_replicate x dp_shard x cp = 1, so that dense gradients are not reduced.

        See `bypass_reduction` of `dtron.parallelisms.fsdp.torch_internals`.
        """
        return self.degrees["dp_replicate"] * self.shards == 1

    @property
    def keeps_experts(self) -> bool:
        """Whether experts' gradients are not reduced.

        True if experts are on a separate mesh with dp_replicate x edp_shard = 1.
        """
        copies = self.degrees["dp_replicate"] * self.experts["edp_shard"]
        return self.separate_experts and copies == 1

    @property
    def policy(self) -> Policy:
        """FSDP's policy: when parameters are freed and gradients reduced."""
        return Policy.resolve(self.config.parallel, self.shards > 1)

    @property
    def tokens(self) -> int:
        """Tokens per micro-batch on a rank, before tp splits them."""
        return self.config.tokens

    def share(self, kind: LayerKind, encoded: bool = False) -> float:
        """Return the tokens that a layer reads, as a fraction of `tokens`.

        It is 1 but in an encoder-decoder. `encoded`: the encoder's tokens, in the decoder.
        """
        if not self.model.encoder_layers:
            return 1.0
        spans = self._spans
        return (spans.encoder if kind.encoder or encoded else spans.decoder) / spans.text

    @functools.cached_property
    def _spans(self) -> SpanLengths:
        return self.config.data.span_lengths(self.config.train.seq_len)

    @property
    def predicted(self) -> int:
        """Tokens per micro-batch on a rank for which there are logits, before tp splits them."""
        return round(self.tokens * self.share(LayerKind(cross=True)))

    @property
    def hidden_tokens(self) -> float:
        """Tokens per micro-batch of all hidden states between two layers, before tp splits them."""
        both = self.share(LayerKind(cross=True)) + self.share(LayerKind(encoder=True))
        return self.tokens * (both if self.model.encoder_layers else 1.0)

    @property
    def tokens_per_step(self) -> int:
        """Tokens per step on all ranks."""
        return self.config.train.global_batch * self.config.train.seq_len

    @property
    def element(self) -> int:
        """Bytes per element in the dtype of computation."""
        return ELEMENT[self.config.train.dtype]

    @property
    def frozen(self) -> bool:
        """Whether the model's weights are frozen, and adapters are trained (`lora.rank`)."""
        return self.config.lora.rank > 0

    @property
    def frozen_element(self) -> int:
        """Bytes per element in which frozen weights are kept; 4 without frozen weights."""
        return self.element if self.frozen else 4

    @property
    def reduce_element(self) -> int:
        """Bytes per element in the dtype of reductions."""
        return ELEMENT[self.config.parallel.reduce_dtype]

    @property
    def exchanges(self) -> bool:
        """Whether gradients are reduced by an all-to-all, in the dtype of computation."""
        return self.shards > 1 and self.config.parallel.reduce_by == "all_to_all"

    @property
    def sent_element(self) -> int:
        """Bytes per element of a reduction's send buffer.

        0 with copy engines, which send from memory outside the allocator.
        """
        if self.exchanges:
            return 0 if self.config.parallel.copy_engines else self.element
        return self.reduce_element

    @property
    def times_reduced(self) -> int:
        """Number of reductions of a gradient per step."""
        return self.micro_batches if self.policy.reduce_each_micro_batch else 1

    @property
    def n_layers(self) -> int:
        """Number of layers, including those of multi-token prediction."""
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
        spec = model_spec(self.config.model.name)
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

    @functools.cached_property
    def encoder(self) -> "Resolved | None":
        """The vision encoder as a run: its blocks are layers, images are sequences.

        A micro-batch has as many images as fit into its sequences. Blocks of the encoder are those
        of GPT without a causal mask. None: the model has no encoder.
        """
        if not self.model.vision_layers:
            return None
        train, tp, m = self.config.train, self.config.parallel.encoder_tp, self.micro_batches
        images = train.micro_batch * images_that_fit(self.model, train.seq_len)
        own = -(-images // (self.degrees["cp"] * self.tp // tp))
        axes = {"dp_replicate": 1, "dp_shard": -1, "cp": 1, "pp": 1}
        config = self.config.changed(
            model={"name": "gpt", "override": {}},
            parallel={**axes, "tp": tp, "sequence_parallel": False, "async_tp": False},
            train={
                "seq_len": self.model.image_tokens,
                "micro_batch": own,
                "global_batch": m * own * (self.world_size // tp),
            },
            compile={"enable": self.config.compile.enable and tp == 1},
            float8={"recipe": ""},
            lora={"rank": 0},
        )
        model = encoder_config(self.model)
        return replace(self, config=config, model=model, layout=None, float8=None, memo={})

    def blocks(self, stage: Stage) -> Iterator[tuple["Resolved", int]]:
        """Yield (run, layer) of each block of a stage: of the encoder, then of the decoder."""
        if stage.embedding and self.encoder is not None:
            yield from ((self.encoder, layer) for layer in range(self.model.vision_layers))
        yield from ((self, layer) for layer in stage.layers)

    def stages_of(self, rank: int) -> tuple[Stage, ...]:
        """The stages of a pipeline rank."""
        return tuple(stage for stage in self.stages if stage.rank == rank)

    def kind(self, layer: int) -> LayerKind:
        """Kind of a layer or MTP block."""
        return self._kinds[layer]

    @functools.cached_property
    def _kinds(self) -> tuple[LayerKind, ...]:
        return self.model.layer_kinds

    def window(self, layer: int) -> int:
        """Sliding window of a layer, in tokens; 0: no window."""
        return self._windows[layer] if layer < self.model.n_layers else self.model.window

    @functools.cached_property
    def _windows(self) -> tuple[int, ...]:
        return self.model.windows

    def context(self, layer: int) -> ContextLayout:
        """Context-parallel layout of a layer's attention."""
        parallel = self.config.parallel
        methods = parallel.cp_methods()
        return layout_of(methods[layer % len(methods)], self.degrees["cp"], parallel.cp_inner)

    def unfused(self, layer: int) -> bool:
        """Whether a layer's attention has no fused kernel on GPUs.

        No fused kernel that returns a log-sum-exp, which context parallelism, windows, soft caps
        and sinks need, supports heads wider than WIDEST_FLASH. None has dropout.
        """
        kind = self.kind(layer)
        wide = kind.mixer == "attention" and self.model.of_layer(kind).head_size > WIDEST_FLASH
        return self._by_math(kind) or (wide and self._needs_statistics(kind))

    def saves_weights(self, layer: int) -> bool:
        """Whether a layer's attention is plain PyTorch, whose weights autograd saves."""
        kind = self.kind(layer)
        return self._by_math(kind) and not self._needs_statistics(kind)

    def _by_math(self, kind: LayerKind) -> bool:
        """Whether attention is that of `model.attention = "math"`, or its twin with dropout."""
        asked = self.config.model.attention == "math" or self.model.attention_dropout > 0
        return kind.mixer == "attention" and asked

    def _needs_statistics(self, kind: LayerKind) -> bool:
        """Whether attention needs a kernel that returns a log-sum-exp."""
        return self.degrees["cp"] > 1 or modifies_scores(self.model.of_layer(kind))

    def exchanges_halos(self, layer: int) -> bool:
        """Whether ring attention has a sliding window, so that ranks exchange halos of keys."""
        return self.context(layer).rings and 0 < self.window(layer) < self.config.train.seq_len

    def halo(self, layer: int) -> int:
        """Halo tokens per micro-batch that a layer receives, on the rank that receives most."""
        outer, train, window = self.context(layer).outer, self.config.train, self.window(layer)
        half = train.seq_len // (2 * outer)
        most = max(received_tokens(outer, rank, half, window) for rank in range(outer))
        return most * train.micro_batch

    def float8_layers(self, layer: int | None) -> frozenset[str]:
        """Return the FQNs of a block's float8 layers, relative to the block.

        `layer` None: of the float8 layers outside blocks.
        """
        key = ("float8", layer)
        if key not in self.memo:
            pattern = model_spec(self.config.model.name).layer
            block = "" if layer is None else f"{pattern.format(layer)}."
            names = self.float8.layers if self.float8 else ()
            found = [name.removeprefix(block) for name in names if name.startswith(block)]
            outside = pattern.partition("{")[0]
            self.memo[key] = frozenset(n for n in found if block or not n.startswith(outside))
        return self.memo[key]

    def adapters(self, layer: int | None) -> frozenset[str]:
        """Return the FQNs of the factors of a block's adapters, relative to the block.

        `layer` None: outside of blocks, where there are none.
        """
        key = ("adapters", layer)
        if key not in self.memo:
            name, lora, found = self.config.model.name, self.config.lora, frozenset[str]()
            if lora.rank and layer is not None:
                block = model_spec(name).layer.format(layer) + "."
                own = [x for x in adapters(name, self.model, lora) if x.weight.startswith(block)]
                found = frozenset(
                    fqn.removeprefix(block) for each in own for fqn in each.parameters(lora)
                )
            self.memo[key] = found
        return self.memo[key]

    def gathered_in_float8(self, layer: int | None) -> frozenset[str]:
        """Return the `float8_layers` whose weights FSDP gathers in float8, 1 byte per element."""
        return self.float8_layers(layer) if self.config.float8.all_gather else frozenset()

    def recomputes(self, layer: int, module: str = "") -> bool:
        """Whether a layer recomputes anything.

        With `module`: whether it recomputes that module of `recompute.modules`.
        """
        recompute = self.config.recompute
        inside = not module or not recompute.modules or module in recompute.modules
        return recompute.acts_on(layer) and inside

    def recomputes_whole(self, layer: int) -> bool:
        """Whether recomputation applies to a layer's whole block, including collectives.

        False if it applies only to the modules of `recompute.modules`.
        """
        return self.config.recompute.acts_on(layer) and not self.config.recompute.modules

    def ffn_chunks(self, layer: int) -> int:
        """Return the number of chunks of a layer's feed-forward (`recompute.ffn_chunks`)."""
        return self.config.recompute.ffn_chunks if self.kind(layer).ffn == "dense" else 1

    def flops(self) -> dict[str, float]:
        """Return FLOPs per token, by how attention is counted: full or causal.

        Windows count as in training, by the keys that queries see.
        """
        length = attended_by_layers(self.config.train.seq_len, self.model)
        sizes = flops_model(self.config, self.model_of(self.config))
        seq_len = self.config.train.seq_len
        images = images_that_fit(self.model, seq_len) / seq_len
        full = flops_per_token(sizes, length, "full", images)
        return {"full": full, "causal": flops_per_token(sizes, length, "causal", images)}

    def parallel(self) -> dict[str, Any]:
        """Return the resolved degrees, batch sizes and pipeline stages that `dtron plan` prints."""
        parallel = self.config.parallel
        found: dict[str, Any] = {"world_size": self.world_size}
        found |= {axis: self.degrees[axis] for axis in DEGREES}
        found |= {axis: self.experts[axis] for axis in ("ep", "etp", "edp_shard")}
        found |= {"zero": parallel.zero, "sequence_parallel": self.between > 1}
        found |= {"micro_batch": self.config.train.micro_batch, "micro_batches": self.micro_batches}
        if parallel.overlap_micro_batches:
            found["overlap_micro_batches"] = True
        if self.layout is not None:
            found["schedule"] = parallel.schedule
            found["stages_per_rank"] = len(self.stages) // self.degrees["pp"]
            found["layers_by_stage"] = [len(stage.layers) for stage in self.stages]
        return found


def expert_rows(run: Resolved) -> int:
    """Number of token copies that a rank's experts receive per micro-batch with even loads.

    With `capacity_pad`, each expert receives as many as its capacity.
    """
    model, own = run.model, -(-run.tokens // run.between)
    rows = own * model.experts_per_token
    if model.capacity_pad:
        choices = run.tokens * run.degrees["cp"] * model.experts_per_token
        most = capacity(choices, model.n_experts, model.capacity_factor)
        rows = model.n_experts * min(most, own)
    return rows * run.experts["etp"]


def pulls_rows(run: Resolved) -> bool:
    """Whether token copies are dispatched through symmetric memory, at least inside hosts."""
    pulls = run.config.parallel.dispatcher in ("symmetric_memory", "hierarchical")
    return pulls and run.experts["ep"] * run.experts["etp"] > 1


def expert_room(run: Resolved) -> float:
    """Capacity of a rank's expert buffers, as a multiple of the token copies that the rank sends.

    Without buffers of a fixed size the multiple is etp, that of even loads.
    """
    ep, etp, parallel = run.experts["ep"], run.experts["etp"], run.config.parallel
    if not parallel.bounded or ep * etp == 1:
        return float(etp)
    sent = expert_rows(run) // etp
    if pulls_rows(run):
        return rows_at_most(sent, ep, etp, parallel.ep_capacity) / sent
    return ep * etp * chunk_size(sent, ep, parallel.ep_capacity) / sent
