"""Rules about a run's model, float8 layers and machine, as tables; `resolve` checks them.

Rules that need only settings are in `dtron/config/setting_rules.py`. A start, `--dry-run`, `dtron
plan`, its search and docs/combinations.md use the same rules; only a start and `--dry-run` check
MACHINE. Passes repeat some of these checks, for users of the plug-in."""

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from dtron.config import RunConfig
from dtron.config.rule import Rule, broken, changed, finds_none, passes, refuse
from dtron.config.setting_rules import Candidate, broken_settings
from dtron.data.objectives import Kind
from dtron.errors import ConfigError
from dtron.float8.convert import MULTIPLE
from dtron.float8.recipes import RECIPES, Recipe
from dtron.lora.adapters import adapters, wrong_modules
from dtron.models import ModelSpec, model_config, model_spec
from dtron.models.attention import AttentionNeeds, Backend, choose_backend, modifies_scores
from dtron.models.config import DecoderConfig
from dtron.models.contract import has_encoder, ignored, reads_images
from dtron.models.flops import FlopsModel, flops_per_token, images_that_fit
from dtron.parallelisms.context.layout import layout_of
from dtron.parallelisms.expert import (
    bounded_all_to_all,
    deepep,
    hierarchical,
    symmetric_dispatch,
)
from dtron.parallelisms.expert.dispatchers import in_graphs, refuse_half_compiled
from dtron.parallelisms.expert.expert_parallel import shared_dim
from dtron.parallelisms.fsdp.sharding import DTYPES
from dtron.parallelisms.pipeline.executor import Layout
from dtron.parallelisms.pipeline.layout import StageNames, build_layout
from dtron.parallelisms.placement import Row, contains, matches
from dtron.setup.float8_plan import Float8Plan, plan_float8
from dtron.setup.optim_groups import BLOCK, idle_groups, parameter_names, split_rows
from dtron.setup.versions import FLA, has_fla, release


@dataclass(frozen=True)
class ModelCandidate(Candidate):
    """A Candidate with its model, pipeline and float8 layers."""

    @cached_property
    def model(self) -> DecoderConfig:
        """Config of the model: that of `model.size` with `model.override`."""
        chosen = self.config.model
        return model_config(chosen.name, chosen.size, chosen.override)

    @property
    def spec(self) -> ModelSpec:
        """Model family."""
        return model_spec(self.config.model.name)

    @cached_property
    def layout(self) -> Layout | None:
        """Stages of the pipeline, balanced by FLOPs with head and encoder; None with pp = 1."""
        config, model, spec = self.config, self.model, self.spec
        if config.parallel.pp == 1:
            return None
        names = StageNames(spec.embedding(model), spec.layer, spec.head, spec.mtp_modules(model))
        spans = config.data.span_lengths(config.train.seq_len)
        whole = flops_per_token(FlopsModel.of(model, spans=spans), spans.text, "causal")
        head = 6 * model.vocab_size * model.dim * (1 + model.mtp)
        head *= spans.decoder / spans.text if model.encoder_layers else 1
        layer = (whole - head) / (model.n_layers + model.mtp)
        weight, encoder = head / layer + model.mtp, self._encoder_flops / layer
        return build_layout(
            config.parallel, names, model.n_layers, self.micro_batches, weight, model.mtp, encoder
        )

    @property
    def _encoder_flops(self) -> float:
        """FLOPs per token of a vision encoder, with as many images as fit into a sequence."""
        length = self.config.train.seq_len
        if not self.model.vision_layers:
            return 0.0
        return FlopsModel.of(self.model).image_flops * images_that_fit(self.model, length) / length

    @property
    def splits_backward(self) -> bool:
        """Whether the pipeline schedule splits the backward and defers weight gradients."""
        return self.layout is not None and self.layout.splits_backward

    @property
    def sums_micro_batches(self) -> bool:
        """Whether gradients of several micro-batches are summed before they are reduced.

        True also if weight gradients are deferred.
        """
        deferred = self.layout is not None and (self.layout.splits_backward or self.layout.head)
        return super().sums_micro_batches or bool(deferred and self.micro_batches > 1)

    @cached_property
    def objective(self) -> Kind:
        """What the model is trained to predict."""
        return objective_of(self.config, self.model)

    @property
    def recipe(self) -> Recipe:
        """The float8 recipe; to be read only if `float8.recipe` is set."""
        return RECIPES[self.config.float8.recipe]

    @cached_property
    def float8(self) -> Float8Plan | None:
        """The float8 layers; to be read only if no other rule is broken."""
        return plan_float8(self.config, self.model, self.world_size)


@dataclass(frozen=True)
class MachineCandidate(ModelCandidate):
    """A ModelCandidate on a device of this machine."""

    device: torch.device = field(default=torch.device("cpu"))

    @cached_property
    def attention(self) -> Backend:
        """Attention backend for this device."""
        config, model = self.config, self.model
        needs = AttentionNeeds.of(
            model,
            self.device.type,
            DTYPES[config.train.dtype],
            documents=config.data.mask_documents,
            deterministic=config.debug.deterministic,
            context=config.parallel.cp_methods() if config.parallel.cp > 1 else (),
        )
        return choose_backend(config.model.attention, needs)


def check_layout(config: RunConfig, world_size: int) -> tuple[DecoderConfig, Layout | None]:
    """Return model and pipeline of a run. Raises ConfigError as `resolve`."""
    return resolve(config, world_size)[:2]


def resolve(
    config: RunConfig, world_size: int
) -> tuple[DecoderConfig, Layout | None, Float8Plan | None]:
    """Return the model, the pipeline (None with pp = 1) and the float8 layers (None: no float8).

    Raises:
        ConfigError: settings exclude each other, or do not fit the model or the number of ranks;
            one line per error.
    """
    run = ModelCandidate(config, world_size)
    refuse(all_broken(run))
    return run.model, run.layout, run.float8


def objective_of(config: RunConfig, model: DecoderConfig) -> Kind:
    """Return the objective of a run, with `data.objective = "auto"` resolved."""
    chosen = config.data.objective
    if chosen != "auto":
        return chosen
    return _fitting_objective(model)


def _fitting_objective(model: DecoderConfig) -> Kind:
    if model.encoder_layers:
        return "span_corruption"
    return "next_token" if model.causal else "masked"


def reasons(config: RunConfig, world_size: int) -> list[str]:
    """Return all errors for which `resolve` refuses a run; empty: the run is legal."""
    return list(dict.fromkeys(all_broken(ModelCandidate(config, world_size))))


def all_broken(run: ModelCandidate) -> Iterator[str]:
    """Yield the messages of all rules that a run breaks; some may be repeated."""
    config, found = run.config, False
    try:
        assert run.spec
    except ConfigError as error:  # other rules need the family; do not import it for each of them
        yield from broken_settings(run)
        yield str(error)
        return
    for messages in (
        broken_settings(run),
        broken(MACHINE, run, config) if isinstance(run, MachineCandidate) else (),
        broken(MODEL, run, config),
        broken(FLOAT8, run, config) if config.float8.recipe else (),
    ):
        for message in messages:
            found = True
            yield message
    if not found:
        yield from broken(LAYERS, run, config)


def host_warnings(config: RunConfig, world_size: int, host: int) -> Iterator[str]:
    """Yield warnings about tp, etp or cp across hosts: legal but slow.

    Computation waits for the collectives of these axes in every layer.

    Args:
        host: ranks per host or NVLink domain; consecutive ranks share a host.
    """
    for key, degree, block, instead in _blocks(config):
        if world_size <= host or host % block == 0:
            continue
        within = block // degree
        fitting = [n for n in range(2, degree) if degree % n == 0 and host % (n * within) == 0]
        fix = f"{key} = {fitting[-1]}" if fitting else instead or f"{key} = 1"
        if fitting and instead:
            fix += f" or {instead}"
        what = f"{key} = {degree}" + (f" x parallel.tp = {within}" if within > 1 else "")
        yield (
            f"{what} spans hosts of {host} ranks: collectives of every layer cross the network; "
            f"use {fix}, and parallel.pp, dp_shard or dp_replicate for the other ranks"
        )


def _blocks(config: RunConfig) -> Iterator[tuple[str, int, int, str]]:
    """Yield (key, degree, size of its block of consecutive ranks, fix) of axes for one host.

    cp and tp are the innermost axes of the mesh; etp is the innermost axis of the experts' mesh.
    """
    parallel, ring = config.parallel, 'parallel.cp_method = "ring"'
    yield "parallel.tp", parallel.tp, parallel.tp, ""
    yield "parallel.etp", parallel.etp, parallel.etp, ""
    if parallel.cp == 1:
        return
    for method in dict.fromkeys(parallel.cp_methods()):
        inner = layout_of(method, parallel.cp, parallel.cp_inner).inner
        if inner > 1:
            key = "parallel.cp_inner" if method == "hierarchical" else "parallel.cp"
            yield key, inner, inner * parallel.tp, ring


def _multiple(n: int, of: int) -> str:
    return f"a multiple of {of} such as {n // of * of or of}"


_GROUPS = {
    "delta_key_heads": "key heads of gated delta nets",
    "mamba_groups": "groups of Mamba-2 layers",
}
"""{field: what it counts}: groups of heads of recurrent layers, which tp and cp split."""


def _undivided(run: ModelCandidate) -> Iterator[str]:
    """Yield an error for each of tp, ep and etp that does not divide a size of the model."""
    model, parallel, ranks = run.model, run.parallel, run.world_size
    heads = {"n_heads": model.n_heads, "n_kv_heads": model.n_kv_heads, "ffn_dim": model.ffn_dim}
    heads |= {"global_kv_heads": model.global_kv_heads} if model.global_kv_heads else {}
    heads |= {key: getattr(model, key) for key in _GROUPS if getattr(model, key)}
    if model.vision_layers and parallel.encoder_tp > 1:
        heads |= {"vision_heads": model.vision_heads, "vision_ffn_dim": model.vision_ffn_dim}
        heads |= {"dim": model.dim}
    shared = {"n_shared_experts x expert_dim": model.n_shared_experts * model.expert_dim}
    split = [("tp", model.n_heads, heads | shared)]
    if model.n_experts:
        width = {"expert_dim": model.expert_dim} | ({"dim": model.dim} if model.bias else {})
        split += [("ep", ranks, {"n_experts": model.n_experts}), ("etp", ranks, width)]
    for axis, most, sizes in split:
        degree = getattr(parallel, axis)
        for key, size in sizes.items():
            if not _splits(run, key, size, degree):
                every = range(1, most + 1)
                legal = [n for n in every if all(_splits(run, k, v, n) for k, v in sizes.items())]
                reason = f"does not divide model.{key} = {size}; use"
                if key in _KV_HEADS and _shares_heads(run):
                    width = _KV_HEADS[key](model)
                    reason = f"neither divides model.{key} = {size} nor splits each head of "
                    reason += f"{width} features evenly; use"
                yield f"parallel.{axis} = {degree} {reason} {', '.join(map(str, legal))}"
                break


_KV_HEADS: dict[str, Callable[[DecoderConfig], int]] = {
    "n_kv_heads": lambda model: math.gcd(
        *(c.head_size for c in model.attention_configs if c.n_kv_heads == model.n_kv_heads)
    ),
    "global_kv_heads": lambda model: model.full_rope.head_size,
}
"""{field: function that returns the width of these key and value heads}."""


def _splits(run: ModelCandidate, key: str, size: int, degree: int) -> bool:
    """Whether `degree` ranks split a size evenly.

    Ranks that share a key/value head split its features.
    """
    if size % degree == 0 or key not in _KV_HEADS or not _shares_heads(run):
        return size % degree == 0
    return degree % size == 0 and size * _KV_HEADS[key](run.model) % degree == 0


def _shares_heads(run: ModelCandidate) -> bool:
    """Whether the family's placements let several ranks share a key/value head."""
    rows = run.spec.placements(run.model, run.parallel.sequence_parallel).values()
    return any(isinstance(row, Row) and row.n_heads for row in rows)


def _check_expert_shards(run: ModelCandidate) -> None:
    """Raise ConfigError if edp_shard divides no dim of an expert parameter."""
    model, parallel = run.model, run.parallel
    ep, etp = parallel.ep, parallel.etp
    if not model.n_experts or ep * etp * parallel.tp == 1 or any(_undivided(run)):
        return
    ranks = run.config.expert_degrees(run.world_size)["edp_shard"]
    experts, width = model.n_experts // ep, model.expert_dim // etp
    matrix, vector = (experts, width, model.dim), (experts, width)
    for sizes in (matrix, vector) if model.bias else (matrix,):
        shared_dim(sizes, {0, 1} if etp > 1 else {0} if ep > 1 else set(), ranks)


def _check_dispatch(run: ModelCandidate) -> None:
    """Raise ConfigError if the dispatcher does not support the run's settings or width.

    The code that applies the dispatcher repeats these checks.
    """
    config, parallel = run.config, run.parallel
    if not run.model.n_experts:
        return
    ranks = parallel.ep * parallel.etp
    refuse_half_compiled(config.recompute, config.compile, ranks, parallel.dispatcher)
    if parallel.dispatcher == "bounded_all_to_all":
        bounded_all_to_all.check_float8(config.float8.dispatch)
    if parallel.dispatcher == "hierarchical":
        bounded_all_to_all.check_float8(config.float8.dispatch, hierarchical.KEY)
        hierarchical.check_inner(parallel.ep, parallel.ep_inner)
    if parallel.dispatcher == "deepep":
        deterministic, float8 = config.debug.deterministic, config.float8.dispatch
        deepep.check_settings(parallel.ep, parallel.etp, deterministic, float8)
        deepep.check_rows(DTYPES[config.train.dtype], run.model.dim)


def _waits_in_a_graph(run: ModelCandidate) -> bool:
    """Whether a CUDA graph would hold a dispatcher that reads numbers of tokens on the host."""
    parallel = run.parallel
    travels = bool(run.model.n_experts) and parallel.ep * parallel.etp > 1
    graph = run.config.compile.cuda_graphs == "step"
    return graph and travels and not in_graphs(parallel.dispatcher)


def _unread(run: ModelCandidate) -> Iterator[str]:
    """Yield an error for each setting that a model family with a custom module ignores."""
    chosen, size = run.config.model, run.spec.sizes.get(run.config.model.size)
    own = {
        f"model.override.{key}": (key, value)
        for key, value in chosen.override.items()
        if value != getattr(size, key, None)
    }
    for key, name in _READ_BY_MODELS.items():
        own |= {key: (name, value) for key, value in changed(run.config, key)}
    for key, (name, value) in own.items():
        if ignored(run.spec, name):
            yield (
                f"{key} = {value!r} has no effect on model.name = {chosen.name}, whose "
                f"ModelSpec.reads does not name {name}; leave it out"
            )


_READ_BY_MODELS = {
    "model.attention": "attention",
    "parallel.cp": "attention",
    "data.mask_documents": "documents",
    "train.loss_chunks": "labels",
}
"""Key -> name in `ModelSpec.reads` of a custom module on which the key acts."""


def _sequence_chunks(run: ModelCandidate) -> int:
    """Return the number of chunks, which must divide seq_len: two per cp rank, one per tp rank."""
    cp, tp = run.parallel.cp, run.parallel.tp if run.parallel.sequence_parallel else 1
    return math.lcm(2 * cp, cp * tp) if cp > 1 else 1


def _other_images(run: ModelCandidate) -> Iterator[str]:
    """Yield an error for each setting of images that is not the model's."""
    data, model = run.config.data, run.model
    if not data.has_images:
        return
    if not model.vision_layers:
        yield (
            f'data.format = "image_text": model.name = {run.config.model.name} has no vision '
            'encoder; use model.name = "llava"'
        )
        return
    sizes = {
        "image_size": model.vision_image_size,
        "image_tokens": model.image_tokens,
        "image_token": model.image_token,
    }
    for key, value in sizes.items():
        if (found := getattr(data, key)) != value:
            yield f"data.{key} = {found} differs from the model's {value}; use {value}"


def _own_tokens(run: ModelCandidate) -> int:
    """Return the number of tokens of a sequence that a rank holds between blocks."""
    parallel = run.parallel
    tp = parallel.tp if parallel.sequence_parallel else 1
    return run.train.seq_len // (parallel.cp * tp)


def _unknown_modules(run: ModelCandidate) -> Iterator[str]:
    """Yield an error for each name in recompute.modules that no block of a Decoder has."""
    model, recompute = run.model, run.config.recompute
    if recompute.mode == "attention" and recompute.modules and "attn" not in recompute.modules:
        yield 'recompute.mode = "attention" needs attn in recompute.modules; add it, or use "full"'
    known = {
        **{"attn": True, "ffn": model.n_dense_layers > 0},
        **{name: model.n_layers_of(name) > 0 for name in ("delta", "mamba")},
        **{"ffn.experts": model.n_experts > 0, "ffn.shared": model.n_shared_experts > 0},
    }
    names = [name for name, has in known.items() if has]
    for name in recompute.modules if run.spec.reads is None else ():
        if name not in names:
            yield (
                f"recompute.modules names {name!r}, which no block of the model has; use "
                f"{', '.join(names)}"
            )


def _heads_over_cp(run: ModelCandidate) -> Iterator[str]:
    """Yield an error for each cp method whose number of ranks does not divide the heads."""
    parallel, model, tp = run.parallel, run.model, run.parallel.tp
    if parallel.cp == 1 or any(_undivided(run)):
        return
    for key, what in _GROUPS.items():
        if (groups := getattr(model, key) // tp) % parallel.cp:
            legal = [n for n in range(1, groups + 1) if groups % n == 0]
            yield (
                f"parallel.cp = {parallel.cp} does not divide the {groups} {what} on each rank; "
                f"use {', '.join(map(str, legal))}"
            )
    heads = model.n_heads // tp
    shared = math.lcm(*(each.local_kv_heads(tp) for each in model.attention_configs))
    legal = [n for n in range(1, heads + 1) if heads % math.lcm(n, shared) == 0]
    for method in dict.fromkeys(parallel.cp_methods()):
        inner = layout_of(method, parallel.cp, parallel.cp_inner).inner
        if inner not in legal:
            yield (
                f"parallel.cp_method = {method!r} splits heads over {inner} ranks, but each has "
                f"{heads} query and {shared} key/value heads; use "
                f'{", ".join(map(str, legal))} ranks, or "ring"'
            )


def _wrong_objective(run: ModelCandidate) -> Iterator[str]:
    """Yield errors about an objective that the model, the data or the samples do not fit."""
    data, model, kind = run.config.data, run.model, run.objective
    legal = _fitting_objective(model)
    if not ignored(run.spec, "causal") and kind != legal:
        both = "span_corruption" in (kind, legal)
        field = "encoder_layers" if both else "causal"
        yield (
            f'data.objective = "{kind}" does not fit model.override.{field} = '
            f'{json.dumps(getattr(model, field))}; use "{legal}", or "auto"'
        )
    if kind == "next_token":
        return
    if run.train.sample_tokens:
        yield (
            f'train.sample_tokens = {run.train.sample_tokens} with data.objective = "{kind}": the '
            "model generates no text; use 0"
        )
    if data.has_chats or data.has_images:
        yield (
            f'data.format = {data.format!r} with data.objective = "{kind}": masks are drawn over '
            'whole texts; use "text"'
        )
    if kind == "span_corruption":
        for key, value in changed(run.config, "data.packing data.mask_documents"):
            yield (
                f'{key} = {value!r} with data.objective = "{kind}": spans are removed from '
                "sequences without padding and document masks; leave it out"
            )
        return
    if data.packing != "cut" and not data.mask_documents:
        yield (
            f"data.packing = {data.packing!r} without data.mask_documents: without a causal mask, "
            "tokens would attend to padding; use data.mask_documents = true"
        )


def _uneven_spans(run: ModelCandidate) -> Iterator[str]:
    """Yield an error if tp does not divide the tokens of encoder and decoder."""
    data, tp, length = run.config.data, run.parallel.tp, run.train.seq_len
    if not (run.model.encoder_layers and run.parallel.sequence_parallel) or length < 2:
        return

    def even(seq_len: int) -> bool:
        sizes = data.span_lengths(seq_len)
        return sizes.encoder % tp == 0 and sizes.decoder % tp == 0

    if even(length):
        return
    sizes = data.span_lengths(length)
    near = (n for away in range(1, length - 1) for n in (length - away, length + away))
    legal = next((n for n in near if even(n)), None)
    yield (
        f"parallel.sequence_parallel splits the {sizes.encoder} tokens of the encoder and the "
        f"{sizes.decoder} of the decoder, of train.seq_len = {length}, over parallel.tp = {tp}; "
        "use "
        + (f"train.seq_len = {legal}, or " if legal else "")
        + "parallel.sequence_parallel = false"
    )


MODEL: tuple[Rule[ModelCandidate], ...] = (
    Rule("model.name model.size model.override", passes(lambda c: c.model)),
    Rule(f"model.override {' '.join(_READ_BY_MODELS)}", finds_none(_unread)),
    Rule(
        "model.override model.name",
        lambda c: bool(c.model.vision_layers) == reads_images(c.spec),
        lambda c: (
            f"model.override.vision_layers = {c.model.vision_layers} with model.name = "
            f"{c.config.model.name}: "
            + (
                "the family has a vision encoder; use 1 or more"
                if reads_images(c.spec)
                else 'the family has no vision encoder; use 0, or model.name = "llava"'
            )
        ),
    ),
    Rule(
        "model.override model.name",
        lambda c: c.spec.reads is not None or bool(c.model.encoder_layers) == has_encoder(c.spec),
        lambda c: (
            f"model.override.encoder_layers = {c.model.encoder_layers} with model.name = "
            f"{c.config.model.name}: "
            + (
                "the family is an encoder-decoder; use 1 or more"
                if has_encoder(c.spec)
                else 'the family has no encoder before a decoder; use 0, or model.name = "t5"'
            )
        ),
    ),
    Rule(
        "compile.cuda_graphs data.mask_documents model.override",
        lambda c: (
            c.config.compile.cuda_graphs == "off"
            or not c.config.data.mask_documents
            or c.model.delta_kernel != "fla"
        ),
        'compile.cuda_graphs = "step" with data.mask_documents = true and '
        'model.override.delta_kernel = "fla": the host reads the number of documents of each '
        'micro-batch, which a CUDA graph does not allow; leave one of them out, or use "torch"',
    ),
    Rule(
        "compile.cuda_graphs model.override",
        lambda c: c.config.compile.cuda_graphs == "off" or not c.model.vision_layers,
        'compile.cuda_graphs = "step" with model.override.vision_layers = {c.model.vision_layers}: '
        "the number of images differs between micro-batches, and a graph has fixed shapes; use "
        '"off"',
    ),
    Rule(
        "data.format data.image_size data.image_tokens data.image_token model.override",
        finds_none(_other_images),
    ),
    Rule(
        "train.seq_len model.override",
        lambda c: c.model.positions != "learned" or c.train.seq_len <= c.model.max_seq_len,
        "train.seq_len = {c.train.seq_len} is longer than the learned positions of "
        "model.override.max_seq_len = {c.model.max_seq_len}; lower seq_len or raise max_seq_len",
    ),
    Rule(
        "data.objective data.format data.packing data.mask_documents train.sample_tokens "
        "model.override",
        finds_none(_wrong_objective),
    ),
    Rule(
        "data.mask_fraction",
        lambda c: c.objective != "next_token",
        needs='data.objective = "masked" or "span_corruption"',
    ),
    Rule(
        "data.mask_token",
        lambda c: c.objective == "masked",
        needs='data.objective = "masked"',
    ),
    Rule(
        "data.mask_span",
        lambda c: c.objective == "span_corruption",
        needs='data.objective = "span_corruption"',
    ),
    Rule(
        "parallel.cp model.override",
        lambda c: c.parallel.cp == 1 or not c.model.encoder_layers,
        "parallel.cp = {c.parallel.cp} with model.override.encoder_layers = "
        "{c.model.encoder_layers}: context parallelism has no position biases; use 1, and "
        "parallel.tp for long sequences",
    ),
    Rule(
        "train.seq_len data.objective model.override",
        lambda c: c.objective != "span_corruption" or c.train.seq_len > 1,
        "train.seq_len = {c.train.seq_len} leaves no token to the encoder or to the decoder; use 2 "
        "or more",
    ),
    Rule(
        "train.seq_len model.override",
        lambda c: c.model.mtp < c.train.seq_len,
        "model.override.mtp = {c.model.mtp} predicts tokens beyond train.seq_len = "
        "{c.train.seq_len}; use a smaller mtp",
    ),
    Rule("parallel.ep parallel.etp", lambda c: c.model.n_experts, needs="model.override.n_experts"),
    Rule("parallel.encoder_tp", lambda c: c.spec.encoder, needs='an encoder: model.name = "llava"'),
    Rule(
        "parallel.sequence_parallel parallel.tp model.override",
        lambda c: not c.model.n_experts or c.parallel.tp == 1 or c.parallel.sequence_parallel,
        "parallel.sequence_parallel = false with parallel.tp = {c.parallel.tp} and experts: "
        "each tp rank routes its own shard of the tokens; use true",
    ),
    Rule(
        "parallel.dispatcher parallel.ep_inner recompute.mode recompute.modules compile.enable "
        "debug.deterministic float8.dispatch",
        passes(_check_dispatch),
    ),
    Rule(
        "compile.cuda_graphs parallel.dispatcher",
        lambda c: not _waits_in_a_graph(c),
        'compile.cuda_graphs = "step" with parallel.dispatcher = "{c.parallel.dispatcher}": the '
        "host reads how many tokens are sent, which a CUDA graph cannot repeat; use "
        'parallel.dispatcher = "symmetric_memory" inside a host, or "bounded_all_to_all"',
    ),
    Rule("parallel.tp parallel.ep parallel.etp model.override", finds_none(_undivided)),
    Rule("parallel.ep parallel.etp model.override", passes(_check_expert_shards)),
    Rule(
        "parallel.sequence_parallel parallel.tp train.seq_len",
        lambda c: (
            not c.parallel.sequence_parallel
            or bool(c.model.encoder_layers)
            or c.train.seq_len % c.parallel.tp == 0
        ),
        lambda c: (
            f"parallel.sequence_parallel splits train.seq_len = {c.train.seq_len} over "
            f"parallel.tp = {c.parallel.tp}; use {_multiple(c.train.seq_len, c.parallel.tp)}, or "
            "parallel.sequence_parallel = false"
        ),
    ),
    Rule(
        "parallel.sequence_parallel parallel.tp train.seq_len data.mask_fraction data.mask_span "
        "model.override",
        finds_none(_uneven_spans),
    ),
    Rule(
        "parallel.tp parallel.dp_shard parallel.cp model.override",
        lambda c: c.model.vocab_size % c.degrees["tp"] == 0 or c.model.dim % c.shards == 0,
        "model.override.vocab_size = {c.model.vocab_size} is padded for parallel.tp = "
        "{c.parallel.tp} and then sharded by width, but the {c.shards} ranks of dp_shard x cp do "
        "not divide model.dim = {c.model.dim}; use a dp_shard x cp that does, or a vocab_size that "
        "tp divides",
    ),
    Rule(
        "parallel.tp model.override",
        lambda c: not c.model.post_norm or c.model.vocab_size % c.degrees["tp"] == 0,
        "parallel.tp = {c.parallel.tp} does not divide model.override.vocab_size = "
        "{c.model.vocab_size}, but the bias of the head cannot be padded; use a vocab_size that "
        "parallel.tp divides",
    ),
    Rule(
        "train.loss_chunks model.override",
        lambda c: not c.model.post_norm or c.train.loss_chunks == 1,
        "train.loss_chunks = {c.train.loss_chunks}: a chunked loss computes a head without bias, "
        "but the model's head has one (post_norm); use 1",
    ),
    Rule(
        "parallel.cp parallel.tp train.seq_len",
        lambda c: c.train.seq_len % _sequence_chunks(c) == 0,
        lambda c: (
            f"parallel.cp = {c.parallel.cp} cuts train.seq_len = {c.train.seq_len} into 2 x cp "
            f"chunks; use {_multiple(c.train.seq_len, _sequence_chunks(c))}"
        ),
    ),
    Rule(
        "parallel.cp model.override",
        lambda c: c.parallel.cp == 1 or not c.model.attention_dropout,
        "model.override.attention_dropout = {c.model.attention_dropout} with parallel.cp = "
        "{c.parallel.cp}: no rank computes all attention weights; use 0.0",
    ),
    Rule(
        "model.override",
        lambda c: not c.model.attention_dropout or not modifies_scores(c.model),
        "model.override.attention_dropout = {c.model.attention_dropout} with "
        "model.override.window, softcap or sinks: the kernels that these need have no dropout of "
        "attention weights; use 0.0, and model.override.dropout for residuals",
    ),
    Rule(
        "parallel.cp_method model.override",
        lambda c: (
            c.parallel.cp == 1
            or len(c.parallel.cp_methods()) in (1, c.model.n_layers + c.model.mtp)
        ),
        lambda c: (
            f"parallel.cp_method has {len(c.parallel.cp_methods())} entries for the "
            f"{c.model.n_layers + c.model.mtp} layers of the model; give one method per layer, or "
            "one for all layers"
        ),
    ),
    Rule(
        "parallel.cp_method model.override",
        lambda c: (
            c.parallel.cp == 1
            or not c.model.has_recurrent_layers
            or len(c.parallel.cp_methods()) == 1
        ),
        "parallel.cp_method has one entry per layer, but the model's recurrent layers have no "
        "method; give one for all layers",
    ),
    Rule(
        "recompute.first model.override",
        lambda c: c.config.recompute.first <= c.model.n_layers + c.model.mtp,
        lambda c: (
            f"recompute.first = {c.config.recompute.first}: the model has only "
            f"{c.model.n_layers + c.model.mtp} blocks; leave it out to recompute all blocks"
        ),
    ),
    Rule("recompute.modules model.name", finds_none(_unknown_modules)),
    Rule(
        "recompute.ffn_chunks model.name model.override",
        lambda c: c.config.recompute.ffn_chunks == 1 or c.model.n_dense_layers > 0,
        "recompute.ffn_chunks = {c.config.recompute.ffn_chunks}: all blocks of the model have "
        'experts, which chunks do not change; use recompute.modules = ["ffn.experts"], or leave '
        "the key out",
    ),
    Rule(
        "recompute.ffn_chunks train.seq_len parallel.cp parallel.tp",
        lambda c: c.config.recompute.ffn_chunks <= _own_tokens(c),
        lambda c: (
            f"recompute.ffn_chunks = {c.config.recompute.ffn_chunks} is more than the "
            f"{_own_tokens(c)} tokens of a sequence on a rank (train.seq_len / (parallel.cp x "
            "parallel.tp)); use at most that many"
        ),
    ),
    Rule(
        "parallel.cp_method parallel.cp_inner parallel.cp parallel.tp model.override",
        finds_none(_heads_over_cp),
    ),
    Rule(
        "parallel.pp parallel.schedule parallel.stages_per_rank parallel.pp_layout",
        passes(lambda c: c.layout),
    ),
    Rule(
        "parallel.blocks_per_unit parallel.pp model.override",
        lambda c: (
            c.parallel.blocks_per_unit == 1 or c.parallel.blocks_per_unit <= _neighbouring_blocks(c)
        ),
        lambda c: (
            f"parallel.blocks_per_unit = {c.parallel.blocks_per_unit}: the largest number of "
            f"blocks of a stage is {_neighbouring_blocks(c)}; use at most this number"
        ),
    ),
    Rule(
        "parallel.defer_head",
        lambda c: not (c.parallel.defer_head and c.splits_backward),
        needs="a parallel.schedule that does not split the backward, such as 1F1B: others defer "
        "all weight gradients",
    ),
)
"""Rules that depend on the model and its pipeline."""

_ONE_SCALE = {
    "parallel.async_tp": "weight gradients need scales along the tokens of all ranks, which "
    "gathered float8 values do not have: each input would be gathered twice",
    "float8.gather_inputs": "the gathered input has other scales than its shards",
    "float8.scaling": "delayed scaling needs per-tensor scales",
}
"""Key -> why the key needs a recipe with one scale per tensor."""


def _several_scales(run: ModelCandidate) -> Iterator[str]:
    for key, value in changed(run.config, " ".join(_ONE_SCALE)):
        if not run.recipe.shares_scales:
            yield (
                f"{key} = {value!r} with float8.recipe = {run.recipe.name!r}: {_ONE_SCALE[key]}; "
                'use "tensorwise"'
            )


def _micro_batch_tokens(run: ModelCandidate) -> tuple[int, ...]:
    """Return the tokens per micro-batch on a rank, of encoder and decoder if there are both."""
    if not run.model.encoder_layers:
        return (run.config.tokens,)
    spans = run.config.data.span_lengths(run.train.seq_len)
    return run.train.micro_batch * spans.encoder, run.train.micro_batch * spans.decoder


FLOAT8: tuple[Rule[ModelCandidate], ...] = (
    Rule(
        "float8.recipe train.micro_batch train.seq_len parallel.cp",
        lambda c: all(n % MULTIPLE == 0 for n in _micro_batch_tokens(c)),
        lambda c: (
            f"float8.recipe = {c.recipe.name!r} needs a multiple of {MULTIPLE} tokens per "
            f"micro-batch, not {' and '.join(map(str, _micro_batch_tokens(c)))} (train.micro_batch "
            "x train.seq_len / parallel.cp"
            + (", of encoder and decoder)" if c.model.encoder_layers else ")")
        ),
    ),
    Rule(f"float8.recipe {' '.join(_ONE_SCALE)}", finds_none(_several_scales)),
    Rule(
        "float8.gather_inputs parallel.async_tp",
        lambda c: not (c.parallel.async_tp and c.config.float8.gather_inputs),
        "float8.gather_inputs has no effect with parallel.async_tp, which gathers inputs in float8 "
        "itself; leave it out",
    ),
    Rule(
        "float8.output train.loss_chunks",
        lambda c: not c.config.float8.output or c.train.loss_chunks == 1,
        "float8.output with train.loss_chunks = {c.train.loss_chunks}: a chunked loss computes the "
        "head's matmul itself, in train.dtype; use one of the two",
    ),
    Rule(
        "float8.all_gather float8.recipe",
        lambda c: not c.config.float8.all_gather or c.recipe.casts_weight_once,
        "float8.all_gather = True with float8.recipe = {c.recipe.name!r}: the two matmuls with a "
        "weight need different casts of it, together as many bytes as bfloat16; use "
        '"tensorwise" or "blockwise"',
    ),
    Rule(
        "float8.all_gather lora.rank",
        lambda c: not (c.config.float8.all_gather and c.config.lora.rank) or c.shards > 1,
        "float8.all_gather with lora.rank = {c.config.lora.rank} and dp_shard x cp = 1: frozen "
        "weights are not gathered and stay in train.dtype; leave it out",
    ),
    Rule(
        "float8.scaling float8.gather_inputs",
        lambda c: c.config.float8.scaling != "delayed" or not c.config.float8.gather_inputs,
        'float8.scaling = "delayed" with float8.gather_inputs: an input is gathered with the scale '
        "of its values and would be cast again with another scale; use one of the two",
    ),
    Rule(
        "float8.gather_inputs",
        lambda c: c.parallel.tp > 1 and c.parallel.sequence_parallel,
        needs="parallel.tp > 1 and parallel.sequence_parallel: no input is gathered",
    ),
    Rule(
        "float8.filter compile.enable debug.deterministic float8.gather_inputs",
        lambda c: (
            c.config.float8.filter != "auto"
            or (
                c.config.compile.enable
                and not (c.config.debug.deterministic or c.config.float8.gather_inputs)
            )
        ),
        'float8.filter = "auto" times layers as they are compiled, and the choice differs from run '
        "to run; set compile.enable = true, debug.deterministic = false and float8.gather_inputs = "
        "false, or name the layers",
    ),
    Rule("float8.experts", lambda c: c.model.n_experts, needs="model.override.n_experts"),
    Rule(
        "float8.all_gather float8.output model.override",
        lambda c: not (c.config.float8.all_gather and c.config.float8.output and c.model.tied),
        "float8.all_gather with float8.output and tied weights: the embedding looks rows up in "
        "the same weight, in train.dtype; use one of the two",
    ),
)
"""Rules for runs with a float8 recipe."""


def _adds_in_no_matmul(run: ModelCandidate) -> bool:
    """Whether parallel.accumulate_in_matmul finds no matmul that can add to a float32 sum."""
    plan, config = run.float8, run.config
    if not config.parallel.accumulate_in_matmul or plan is None:
        return False
    if plan.recipe.grad_weight is None or config.float8.filter == "auto":
        return False
    if run.model.n_experts and not config.float8.experts:
        return False
    computed_in_loss = {run.spec.head[-1]} if config.train.loss_chunks > 1 else set()
    return not set(plan.unconverted) - computed_in_loss


def _lora_modules(run: ModelCandidate) -> Iterator[str]:
    """Yield an error for each pattern of lora.modules without a layer, and for wrong ranks."""
    lora, name = run.config.lora, run.config.model.name
    if not lora.rank:
        return
    if wrong := list(wrong_modules(name, run.model, lora)):
        yield from wrong
        return
    found = adapters(name, run.model, lora)
    experts = any(len(each.shape) == 3 for each in found)
    if experts and run.train.dtype == "bfloat16" and lora.rank % 8:
        yield (
            f"lora.rank = {lora.rank} is not a multiple of 8, which grouped matmuls of experts in "
            "bfloat16 need; use such a rank, or lora.modules without experts"
        )
    if experts and lora.dora:
        yield (
            "lora.dora = true with adapters of experts: only linear layers have magnitudes; use "
            "lora.modules without experts, such as blocks.*.attn, or leave lora.dora out"
        )
    for rank, patterns in enumerate(_modules_of_ranks(run)):
        if not any(contains(pattern, each.name) for pattern in patterns for each in found):
            yield (
                f"parallel.pp = {run.parallel.pp}: pipeline rank {rank} has no adapters, nothing "
                "to train; use a smaller parallel.pp, or more layers in lora.modules"
            )


def _neighbouring_blocks(run: ModelCandidate) -> int:
    """Return the largest number of blocks that `parallel.blocks_per_unit` can join.

    Blocks of a vision encoder, of the model and of multi-token prediction are in different units;
    the first are all in the first stage, the last all in the last.
    """
    model = run.model
    layers = [run.spec.layer.format(i) for i in range(model.n_layers)]
    stages = run.layout.stages if run.layout else (layers,)
    found = [sum(any(matches(p, fqn) for p in patterns) for fqn in layers) for patterns in stages]
    return max(*found, model.vision_layers, model.mtp)


def _modules_of_ranks(run: ModelCandidate) -> list[list[str]]:
    """Return the patterns of the modules of each pipeline rank; empty with pp = 1."""
    if run.layout is None:
        return []
    found: list[list[str]] = [[] for _ in range(run.parallel.pp)]
    for patterns, rank in zip(run.layout.stages, run.layout.ranks, strict=True):
        found[rank] += patterns
    return found


def _trained_names(run: ModelCandidate) -> Sequence[str]:
    """Return the FQNs of the parameters that the optimizer updates."""
    if not run.config.lora.rank:
        return parameter_names(run.config.model.name, run.model)
    found = adapters(run.config.model.name, run.model, run.config.lora)
    return [fqn for each in found for fqn in each.parameters(run.config.lora)]


def _narrow_blocks(run: ModelCandidate) -> Iterator[str]:
    """Yield an error if a rank's rows are not whole blocks of AdamW's 8-bit moments."""
    ranks = {"tp": run.parallel.tp, "etp": run.parallel.etp}
    if run.config.optim.name != "adamw8bit" or max(ranks.values()) == 1:
        return
    for fqn, axis, width in split_rows(run.config.model.name, run.model, run.config.lora):
        n = ranks[axis]
        if width % (n * BLOCK) and width % n == 0:
            legal = [str(i) for i in range(1, n) if width % (i * BLOCK) == 0]
            yield (
                f'optim.name = "adamw8bit" with parallel.{axis} = {n}: rows of {fqn} have '
                f"{width // n} elements on a rank, not a multiple of {BLOCK}; use "
                f"parallel.{axis} = {' or '.join(legal)}, or another optim.name"
            )
            return


LAYERS: tuple[Rule[ModelCandidate], ...] = (
    Rule("float8.recipe float8.filter float8.skip", passes(lambda c: c.float8)),
    Rule(
        "parallel.accumulate_in_matmul float8.recipe float8.filter float8.skip float8.output "
        "train.loss_chunks",
        lambda c: not _adds_in_no_matmul(c),
        "parallel.accumulate_in_matmul has no effect: all weight gradients are float8 matmuls or "
        "computed by the chunked loss (train.loss_chunks = {c.train.loss_chunks}), and neither can "
        'add to a float32 sum; leave it out, or use float8.recipe = "rowwise_with_gw_hp"',
    ),
    Rule("lora.modules lora.rank lora.dora parallel.pp train.dtype", finds_none(_lora_modules)),
    Rule(
        "lora.rank model.override",
        lambda c: c.config.lora.rank <= c.model.dim,
        "lora.rank = {c.config.lora.rank} is more than the model's width; an adapter would be "
        "larger than its matrix; use at most {c.model.dim}",
    ),
    Rule(
        "lora.rank model.override",
        lambda c: not (c.config.lora.rank and c.config.model.override.get("bias_speed")),
        "model.override.bias_speed has no effect with lora.rank = {c.config.lora.rank}: biases of "
        "routers are frozen; leave it out",
    ),
    Rule("optim.name parallel.tp parallel.etp", finds_none(_narrow_blocks)),
    Rule(
        "optim.groups lora.rank model.name",
        finds_none(lambda c: idle_groups(c.config.optim.groups, lambda: _trained_names(c))),
    ),
)
"""Rules about single layers and parameters, checked if no other rule is broken."""


def cpu_warnings(config: RunConfig, device: torch.device) -> Iterator[str]:
    """Yield a warning about a dtype that is slow without a GPU."""
    if device.type == "cpu" and config.train.dtype == "bfloat16":
        yield (
            'train.dtype = "bfloat16" is many times slower than float32 on most CPUs, and this '
            "machine has no GPU; set train.dtype=float32"
        )


def setting_warnings(config: RunConfig) -> Iterator[str]:
    """Yield warnings about settings whose effect depends on other settings or torch's version."""
    train, parallel = config.train, config.parallel
    wide = train.dtype == "bfloat16" and parallel.reduce_dtype == "float32"
    if wide and parallel.reduce_by == "all_to_all" and release(torch.__version__) >= (2, 15):
        yield (
            'parallel.reduce_by = "all_to_all" rounds gradients of norms to bfloat16 with torch '
            '2.15 and later; use "reduce_scatter" for float32 sums'
        )
    if late := [n for n in config.data.mixture_steps if n >= train.steps]:
        yield (
            f"data.mixture_steps: the run ends with step {train.steps}, so that the weights after "
            f"step {' and '.join(map(str, late))} are not used"
        )
    if not parallel.bounded:
        for key, value in changed(config, "parallel.ep_capacity"):
            yield f'{key} = {value!r} has no effect: parallel.dispatcher is "{parallel.dispatcher}"'


_ON_GPUS = (
    "parallel.async_tp parallel.high_priority recompute.offload optim.offload compile.cuda_graphs"
)


def _without_gpus(run: MachineCandidate) -> Iterator[str]:
    for key, value in changed(run.config, _ON_GPUS) if run.device.type != "cuda" else ():
        yield f"{key} = {value!r} needs GPUs; this machine has none"


def _marks_nothing(run: MachineCandidate) -> Iterator[str]:
    """Yield an error if neither Nsight Systems nor a profile can show the marks of modules."""
    metrics = run.config.metrics
    if metrics.nvtx and run.device.type != "cuda" and not metrics.profile_start:
        yield (
            "metrics.nvtx = true has no effect: this machine has no GPUs, and "
            "metrics.profile_start = 0 records no profile; set metrics.profile_start, or leave "
            "metrics.nvtx out"
        )


def check_dispatcher(run: MachineCandidate) -> None:
    """Raise ConfigError if this machine does not support the dispatcher."""
    if run.parallel.dispatcher == "deepep":
        deepep.library(run.parallel.ep, run.device.type == "cuda")
    if run.parallel.dispatcher == "symmetric_memory":
        symmetric_dispatch.check_device(run.device, run.config.float8.dispatch)


def _without_fla(run: MachineCandidate) -> Iterator[str]:
    if run.model.delta_kernel != "fla":
        return
    key = 'model.override.delta_kernel = "fla"'
    if run.device.type != "cuda":
        yield f'{key} needs GPUs; this machine has none; use "torch"'
    elif not has_fla():
        yield (
            f"{key} needs the package flash-linear-attention {'.'.join(map(str, FLA))} or later; "
            'use pip install -U flash-linear-attention, or "torch"'
        )


MACHINE: tuple[Rule[MachineCandidate], ...] = (
    Rule(_ON_GPUS, finds_none(_without_gpus)),
    Rule("metrics.nvtx metrics.profile_start", finds_none(_marks_nothing)),
    Rule("model.override", finds_none(_without_fla)),
    Rule("parallel.dispatcher float8.dispatch", passes(check_dispatcher)),
    Rule("model.attention data.mask_documents parallel.cp_method", passes(lambda c: c.attention)),
    Rule(
        "compile.cuda_graphs data.mask_documents model.attention",
        lambda c: (
            c.config.compile.cuda_graphs == "off"
            or not c.config.data.mask_documents
            or not c.attention.counts_documents
        ),
        'compile.cuda_graphs = "step" with data.mask_documents = true and model.attention = '
        '"{c.attention.name}": the number of documents, and with it the size of the mask, differs '
        "between micro-batches, and a CUDA graph has fixed sizes; leave one of them out, or use "
        'model.attention = "sdpa" or "flex" where the model allows it',
    ),
)
"""Rules that depend on this machine."""
