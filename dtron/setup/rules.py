"""What the settings of a run alone decide, or rule out: the model, its pipeline, its float8 layers.

No machine is asked: the planner has the same answers for any number of ranks. What a machine has to
have besides is `preflight.py`'s.
"""

import math
from collections.abc import Callable, Iterable, Iterator

from dtron.config import RunConfig, resolve_expert_degrees
from dtron.errors import ConfigError
from dtron.models import MODELS, model_config
from dtron.models.config import DecoderConfig
from dtron.models.contract import ignored
from dtron.models.flops import FlopsModel, flops_per_token
from dtron.parallelisms.context.attention import shape_of
from dtron.parallelisms.expert import deepep
from dtron.parallelisms.expert.expert_parallel import refuse_half_compiled, shared_dim
from dtron.parallelisms.fsdp.sharding import DTYPES
from dtron.parallelisms.pipeline.executor import Layout
from dtron.parallelisms.pipeline.layout import StageNames, build_layout
from dtron.setup.float8_plan import Float8Plan, plan_float8


def check_layout(config: RunConfig, world_size: int) -> tuple[DecoderConfig, Layout | None]:
    """What the settings alone decide: the model, and its pipeline where it has several stages.

    Raises:
        ConfigError: the settings contradict each other, or do not fit the model or the ranks.
    """
    model, layout, _ = resolve(config, world_size)
    return model, layout


def resolve(
    config: RunConfig, world_size: int
) -> tuple[DecoderConfig, Layout | None, Float8Plan | None]:
    """The same, and the float8 layers where there is a recipe."""
    config.validate_for(world_size)
    model = model_config(config.model.name, config.model.size, config.model.override)
    for rule in _model_rules(config, model, world_size):
        rule()
    layout = _layout(config, model, world_size)
    if layout is not None and layout.splits_backward and config.parallel.async_tp:
        raise ConfigError(
            f"parallel.async_tp with parallel.schedule = {config.parallel.schedule!r}: products "
            "whose weight gradients are deferred are not fused; use a schedule with whole "
            'backwards, such as "Interleaved1F1B"'
        )
    if config.parallel.defer_head and config.parallel.async_tp:
        raise ConfigError(
            "parallel.defer_head with parallel.async_tp: the head's products cannot be both fused "
            "and put off; use one of the two"
        )
    if layout is not None and (layout.splits_backward or layout.head):
        _refuse_narrow_sums(config, world_size)
    return model, layout, plan_float8(config, model, world_size, layout)


def reasons(config: RunConfig, world_size: int) -> list[str]:
    """All that is wrong with a run, where `resolve` raises the first; empty where nothing is."""
    found = _refusals(config.rules(world_size))
    try:
        model = model_config(config.model.name, config.model.size, config.model.override)
    except ConfigError as error:
        return [*found, str(error)]
    found += _refusals(_model_rules(config, model, world_size))
    found += _refusals([lambda: _layout(config, model, world_size)])
    if not found:  # what is left depends on these
        found = _refusals([lambda: resolve(config, world_size)])
    return list(dict.fromkeys(found))


def host_warnings(config: RunConfig, world_size: int, host: int) -> Iterator[str]:
    """Axes whose collectives computation waits for in every layer, and whose ranks are on several
    hosts: such a run is legal, and slow.

    Args:
        host: ranks of a host, or of an NVLink domain; neighbouring ranks share one.
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
    """(key, degree, neighbouring ranks that it joins, what to use instead) of axes that want one
    host. cp and tp are innermost, as are etp ranks among those of the experts."""
    parallel, ring = config.parallel, 'parallel.cp_method = "ring"'
    yield "parallel.tp", parallel.tp, parallel.tp, ""
    yield "parallel.etp", parallel.etp, parallel.etp, ""
    if parallel.cp == 1:
        return
    for method in dict.fromkeys(parallel.cp_methods()):
        inner = shape_of(method, parallel.cp, parallel.cp_inner).inner
        if inner > 1:
            key = "parallel.cp_inner" if method == "hierarchical" else "parallel.cp"
            yield key, inner, inner * parallel.tp, ring


def _refusals(rules: Iterable[Callable[[], object]]) -> list[str]:
    found = []
    for rule in rules:
        try:
            rule()
        except ConfigError as error:
            found.append(str(error))
    return found


def _model_rules(
    config: RunConfig, model: DecoderConfig, world_size: int
) -> tuple[Callable[[], object], ...]:
    """Whether the model fits the settings and the ranks; each raises what it refuses."""
    return (
        lambda: _check_read(config),
        lambda: _check_sequence(config, model),
        lambda: _check_further(config, model),
        lambda: _check_experts(config, model, world_size),
        lambda: _check_tensor_parallel(config, model),
        lambda: _check_padding(config, model, world_size),
        lambda: _check_context(config, model),
    )


def _refuse_narrow_sums(config: RunConfig, world_size: int) -> None:
    """Split backwards of several micro-batches are added up before they are reduced."""
    narrow = {
        "reduce_dtype": ("bfloat16", "float32"),
        "reduce_by": ("all_to_all", "reduce_scatter"),
    }
    for key, (value, other) in narrow.items():
        if getattr(config.parallel, key) == value and config.micro_batches(world_size) > 1:
            raise ConfigError(
                f'parallel.{key} = "{value}" would round sums of micro-batches with '
                f'parallel.schedule = {config.parallel.schedule!r}; use "{other}"'
            )


def _check_read(config: RunConfig) -> None:
    """Refuse settings that a family with its own module ignores."""
    spec, chosen = MODELS[config.model.name], config.model
    size = spec.sizes.get(chosen.size)
    own = {
        f"model.override.{key}": (key, value)
        for key, value in chosen.override.items()
        if value != getattr(size, key, None)
    }
    if chosen.attention != "auto":
        own["model.attention"] = ("attention", chosen.attention)
    if config.data.mask_documents:
        own["data.mask_documents"] = ("documents", True)
    for key, (name, value) in own.items():
        if ignored(spec, name):
            raise ConfigError(
                f"{key} = {value!r} has no effect on model.name = {chosen.name}, whose "
                f"ModelSpec.reads does not name {name}; leave it out"
            )


def _check_sequence(config: RunConfig, model: DecoderConfig) -> None:
    if model.positions == "learned" and config.train.seq_len > model.max_seq_len:
        raise ConfigError(
            f"train.seq_len = {config.train.seq_len} is longer than the learned positions of "
            f"model.override.max_seq_len = {model.max_seq_len}; shorten it or raise the latter"
        )


def _check_further(config: RunConfig, model: DecoderConfig) -> None:
    """Refuse what multi-token prediction cannot have."""
    if model.mtp and config.train.loss_chunks > 1:
        raise ConfigError(
            f"train.loss_chunks = {config.train.loss_chunks} with model.override.mtp = "
            f"{model.mtp}: chunks are summed before they could be weighed; use 1, or mtp = 0"
        )
    if model.mtp >= config.train.seq_len:
        raise ConfigError(
            f"model.override.mtp = {model.mtp} looks beyond train.seq_len = "
            f"{config.train.seq_len}; use less"
        )


def _check_context(config: RunConfig, model: DecoderConfig) -> None:
    """Refuse a cp that does not divide the sequence or, after an all-to-all, the heads."""
    parallel, tp = config.parallel, config.parallel.tp
    if parallel.cp == 1:
        return
    whole = 2 * parallel.cp
    whole = math.lcm(whole, parallel.cp * tp) if parallel.sequence_parallel else whole
    if config.train.seq_len % whole:
        below = config.train.seq_len // whole * whole
        raise ConfigError(
            f"parallel.cp = {parallel.cp} cuts train.seq_len = {config.train.seq_len} into 2 x cp "
            f"pieces; use a multiple of {whole} such as {below or whole}"
        )
    if model.attention_dropout:
        raise ConfigError(
            f"model.override.attention_dropout = {model.attention_dropout} with parallel.cp = "
            f"{parallel.cp}: attention weights are never whole on a rank; use 0.0"
        )
    methods = parallel.cp_methods()
    rings = [m for m in methods if shape_of(m, parallel.cp, parallel.cp_inner).rings]
    if model.window and rings:
        raise ConfigError(
            f"parallel.cp_method = {rings[0]!r} with model.override.window = {model.window}: the "
            "blocks that go round do not tell how far they lie apart; use "
            '"all_gather" or "ulysses"'
        )
    if len(methods) not in (1, n_layers := model.n_layers + model.mtp):
        raise ConfigError(
            f"parallel.cp_method has {len(methods)} entries for the {n_layers} layers of the "
            "model; give one for each, or one for all"
        )
    if model.n_heads % tp or model.n_kv_heads % tp:
        return  # refused by _check_tensor_parallel
    for method in set(methods):
        inner = shape_of(method, parallel.cp, parallel.cp_inner).inner
        heads, shared = model.n_heads // tp, model.n_kv_heads // tp
        legal = [n for n in range(1, heads + 1) if heads % math.lcm(n, shared) == 0]
        if inner not in legal:
            raise ConfigError(
                f"parallel.cp_method = {method!r} splits heads over {inner} ranks, but each has "
                f"{heads} query and {shared} key/value heads; use {', '.join(map(str, legal))} "
                f'ranks, or "ring"'
            )


def _check_experts(config: RunConfig, model: DecoderConfig, world_size: int) -> None:
    """Refuse what experts cannot do, and degrees that do not divide them."""
    parallel = config.parallel
    if parallel.async_tp and (model.n_experts or model.kv_lora_rank):
        key = "n_experts" if model.n_experts else "kv_lora_rank"
        raise ConfigError(
            f"parallel.async_tp with model.{key} = {getattr(model, key)}: products of experts and "
            "of latent attention are not fused with communication; use parallel.async_tp = false"
        )
    if not model.n_experts:
        for axis in ("ep", "etp"):
            if (value := getattr(parallel, axis)) > 1:
                raise ConfigError(
                    f"parallel.{axis} = {value} has no effect without model.override.n_experts"
                )
        return
    if parallel.tp > 1 and not parallel.sequence_parallel:
        raise ConfigError(
            f"parallel.sequence_parallel = false with parallel.tp = {parallel.tp} and experts: "
            "each rank routes tokens of its own; use true"
        )
    ranks = parallel.ep * parallel.etp
    refuse_half_compiled(config.recompute, config.compile, ranks, parallel.dispatcher)
    if parallel.dispatcher == "deepep":
        deterministic, float8 = config.debug.deterministic, config.float8.dispatch
        deepep.check_settings(parallel.ep, parallel.etp, deterministic, float8)
        deepep.check_rows(DTYPES[config.train.dtype], model.dim)
    _check_expert_degrees(config, model, world_size)


def _check_expert_degrees(config: RunConfig, model: DecoderConfig, world_size: int) -> None:
    ep, etp = config.parallel.ep, config.parallel.etp
    split = {("ep", ep): {"n_experts": model.n_experts}}
    split["etp", etp] = {
        "expert_dim": model.expert_dim,
        **({"dim": model.dim} if model.bias else {}),
    }
    for (axis, degree), sizes in split.items():
        legal = [n for n in range(1, world_size + 1) if not any(v % n for v in sizes.values())]
        for key, size in sizes.items():
            if size % degree:
                raise ConfigError(
                    f"parallel.{axis} = {degree} does not divide model.{key} = {size}; use "
                    f"{', '.join(map(str, legal))}"
                )
    if ep * etp * config.parallel.tp == 1:
        return
    ranks = resolve_expert_degrees(config.degrees(world_size), ep, etp)["edp_shard"]
    experts, width = model.n_experts // ep, model.expert_dim // etp
    matrix, vector = (experts, width, model.dim), (experts, width)
    for sizes in (matrix, vector) if model.bias else (matrix,):
        shared_dim(sizes, {0, 1} if etp > 1 else {0} if ep > 1 else set(), ranks)


def _check_tensor_parallel(config: RunConfig, model: DecoderConfig) -> None:
    """Refuse a tp that does not divide what it splits, with the degrees that do."""
    tp = config.parallel.tp
    split = {
        "n_heads": model.n_heads,
        "n_kv_heads": model.n_kv_heads,
        "ffn_dim": model.ffn_dim,
        "n_shared_experts x expert_dim": model.n_shared_experts * model.expert_dim,
    }
    legal = [n for n in range(1, model.n_heads + 1) if all(v % n == 0 for v in split.values())]
    for key, value in split.items():
        if value % tp:
            raise ConfigError(
                f"parallel.tp = {tp} does not divide model.{key} = {value}; use "
                f"{', '.join(map(str, legal))}"
            )
    if tp > 1 and config.parallel.sequence_parallel and config.train.seq_len % tp:
        below = config.train.seq_len // tp * tp
        raise ConfigError(
            f"parallel.sequence_parallel splits train.seq_len = {config.train.seq_len} over "
            f"parallel.tp = {tp}; use a multiple of {tp} such as {below or tp}, or "
            "parallel.sequence_parallel = false"
        )


def _check_padding(config: RunConfig, model: DecoderConfig, world_size: int) -> None:
    """A vocabulary that tp does not divide is padded, and then sharded by width."""
    degrees = config.degrees(world_size)
    ranks = degrees["dp_shard"] * degrees["cp"]
    if model.vocab_size % degrees["tp"] and model.dim % ranks:
        raise ConfigError(
            f"model.override.vocab_size = {model.vocab_size} is padded for parallel.tp = "
            f"{degrees['tp']} and then sharded by width, but the {ranks} ranks of "
            f"parallel.dp_shard do not divide model.dim = {model.dim}; use a dp_shard that does, "
            "or a vocab_size that tp divides"
        )


def _layout(config: RunConfig, model: DecoderConfig, world_size: int) -> Layout | None:
    """The pipeline's stages, where there are several; the head weighs as it multiplies."""
    if config.parallel.pp == 1:
        return None
    spec = MODELS[config.model.name]
    names = StageNames(spec.embedding(model), spec.layer, spec.head, spec.further(model))
    whole = flops_per_token(FlopsModel.of(model), config.train.seq_len, "causal")
    head = 6 * model.vocab_size * model.dim * (1 + model.mtp)
    layer = (whole - head) / (model.n_layers + model.mtp)
    weight, micro_batches = head / layer + model.mtp, config.micro_batches(world_size)
    return build_layout(config.parallel, names, model.n_layers, micro_batches, weight, model.mtp)
