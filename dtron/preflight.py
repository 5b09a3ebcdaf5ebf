"""Everything that can be refused before the process group starts.

Each rank checks what is cheap; the first rank of each host prepares the data, and the others wait
for it, so that an error is found and told once.
"""

import logging
import math
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from dtron.config import RunConfig, fields, resolve_expert_degrees
from dtron.data import (
    Tokenizer,
    TrainingSource,
    ValidationSource,
    load_tokenizer,
    open_data,
    prepare,
    wait_for,
)
from dtron.errors import CheckpointError, ConfigError, cause_of
from dtron.files import Location
from dtron.flops import FlopsModel, flops_per_token, n_parameters
from dtron.initial import Initial, check_same_model, open_initial
from dtron.models import MODELS, model_config
from dtron.models.attention import Backend, choose_backend
from dtron.models.config import DecoderConfig
from dtron.parallelisms import deepep, symmetric_dispatch
from dtron.parallelisms.context import shape_of
from dtron.parallelisms.expert import refuse_half_compiled, shared_dim
from dtron.parallelisms.fsdp import DTYPES
from dtron.parallelisms.layout import StageNames, build_layout
from dtron.parallelisms.offload import host_memory
from dtron.parallelisms.pipeline import Layout
from dtron.precision import Float8Plan, plan_float8
from dtron.published import Facts, check_model, complete, find, read_facts
from dtron.rundir import RunDir
from dtron.runtime import Place, check_writable
from dtron.tiers import Tier, owner, tiers_of

log = logging.getLogger("dtron")

_DATA_TIMEOUT_SECONDS = 24 * 3600.0


@dataclass(frozen=True)
class Checked:
    """What the checks resolved."""

    steps: int
    model: DecoderConfig
    attention: Backend
    layout: Layout | None
    float8: Float8Plan | None
    tokenizer: Tokenizer
    train: TrainingSource
    validation: ValidationSource | None
    resume: str
    """`checkpoint.resume`, or `latest` where torchrun has restarted the job."""
    tiers: list[Tier]
    """Where checkpoints go."""
    checkpoint: Location | None
    facts: Facts | None
    initial: Initial | None
    """Of a run that does not resume."""

    @property
    def finished(self) -> bool:
        """Whether what is resumed has nothing left to do, and is where it lasts."""
        lasting = self.tiers[0] is self.tiers[-1] or owner(self.tiers[:-1], self.checkpoint) is None
        return self.facts is not None and self.facts.step >= self.steps and lasting


def preflight(config: RunConfig, place: Place, starts: bool = True) -> Checked:
    """Check a run against this machine.

    Args:
        starts: the model will be built here, so that this machine has to hold it.
    Raises:
        ConfigError, DataError, CheckpointError: the first thing that cannot work.
    """
    config.validate_for(place.world_size)
    _check_device(config, place.device)  # no other model or layout makes up for what it lacks
    model, layout, float8 = resolve(config, place.world_size)
    if starts and place.device.type == "cpu":
        _check_memory(config, model, place)
    attention = _attention(config, model, place.device)
    tokenizer = load_tokenizer(config.data)
    if tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"data.tokenizer = {config.data.tokenizer!r} has {tokenizer.vocab_size} tokens, more "
            f"than model.override.vocab_size = {model.vocab_size}; raise the latter"
        )
    rundir = RunDir(config.run.dir)
    tiers = tiers_of(config)
    goes_on = _goes_on(rundir, place)
    resume, checkpoint, facts = _resumed(config, model, goes_on, tiers)
    _check_tiers(config, place, tiers, checkpoint, goes_on)
    initial = None
    if config.checkpoint.initial and not checkpoint:
        initial = open_initial(config.checkpoint.initial, model.norm_zero_centered)
        check_same_model(initial, config.model.name, model)
        _check_verify(config, initial)
    if place.local_rank == 0:
        _check_writable(rundir.path)
        prepare(config.data)
    else:
        wait_for(config.data, _DATA_TIMEOUT_SECONDS)
    train, validation = open_data(config.data, seq_len=config.train.seq_len, seed=config.train.seed)
    return Checked(
        config.train.steps,
        model,
        attention,
        layout,
        float8,
        tokenizer,
        train,
        validation,
        resume,
        tiers,
        checkpoint,
        facts,
        initial,
    )


def _goes_on(rundir: RunDir, place: Place) -> bool:
    """Whether torchrun has restarted a job that had begun to train. A job is known by torchrun's id
    where it has one: ranks that come or go restart it without being counted as an attempt."""
    if not place.job and place.attempt == 0:
        if place.rank == 0 and rundir.begun.exists():  # of an earlier job
            rundir.begun.unlink()
        return False
    return rundir.begun.exists() and rundir.begun.read_text() == place.job


def _resumed(
    config: RunConfig, model: DecoderConfig, goes_on: bool, tiers: Sequence[Tier]
) -> tuple[str, Location | None, Facts | None]:
    """How this attempt resumes, and from what.

    The first attempt of a job takes what `checkpoint.resume` says. One that torchrun has restarted
    goes on from what the job has written, and if that is nothing, does as the first.
    """
    folders = [tier.folder for tier in tiers]
    if goes_on:
        found = find_checkpoint(config, model, "latest", folders)
        if found[0] is not None:
            return "latest", *found
    resume = config.checkpoint.resume
    return resume, *find_checkpoint(config, model, resume, folders)


def find_checkpoint(
    config: RunConfig,
    model: DecoderConfig,
    resume: str,
    folders: Sequence[Location],
) -> tuple[Location | None, Facts | None]:
    """The checkpoint to resume and what it says of itself; None where the run starts afresh.

    Args:
        resume, folders: as for `published.find`.
    Raises:
        CheckpointError: it is damaged or of another model, optimizer or kind.
        ConfigError: it was named, and has all steps.
    """
    try:
        checkpoint = find(resume, folders)
    except OSError as error:
        raise CheckpointError(f"checkpoints cannot be looked for: {error}") from error
    if checkpoint is None:
        return None, None
    facts = checked_facts(config, model, checkpoint)
    if facts.step >= config.train.steps and resume != "latest":
        raise ConfigError(
            f"train.steps = {config.train.steps} is already reached by the checkpoint of step "
            f"{facts.step}; raise it to train on"
        )
    return checkpoint, facts


def checked_facts(config: RunConfig, model: DecoderConfig, checkpoint: Location) -> Facts:
    """What a checkpoint says of itself, if a run of this config can resume it.

    Raises:
        CheckpointError: it is damaged or of another model, optimizer or kind.
    """
    facts = read_facts(checkpoint)
    if facts.weights_only:
        raise CheckpointError(
            f"{checkpoint} holds weights only; set checkpoint.initial instead of checkpoint.resume"
        )
    check_model(checkpoint, {**_defaults(), **facts.model}, model_facts(config, model))
    _check_settings(checkpoint, config, facts)
    return facts


def _check_tiers(
    config: RunConfig,
    place: Place,
    tiers: Sequence[Tier],
    checkpoint: Location | None,
    goes_on: bool,
) -> None:
    """Refuse tiers that cannot do what they are for, or hold another run's checkpoints."""
    options, own = config.checkpoint, owner(tiers, checkpoint)
    if options.fast_dir and not options.fast_interval:
        raise ConfigError(
            f"checkpoint.fast_dir = {options.fast_dir!r} needs checkpoint.fast_interval; set the "
            "steps between checkpoints there, fewer than checkpoint.interval"
        )
    beside = options.mode == "async" or options.fast_dir or place.world_size > 1
    if options.dir.startswith("memory://") and beside:
        raise ConfigError(
            f"checkpoint.dir = {options.dir!r} is this process's own memory; use it with one rank, "
            'checkpoint.mode = "sync" and no checkpoint.fast_dir'
        )
    local = RunDir(config.run.dir).checkpoints  # which is set aside
    for tier in tiers:
        if own is None and tier.folder != local and _used(tier.folder) and not goes_on:
            raise ConfigError(
                f"{tier.folder} holds checkpoints of an earlier start; set "
                "checkpoint.resume=latest to go on from them, delete them, or use another folder"
            )


def _used(folder: Location) -> bool:
    try:
        return bool(complete(folder))
    except OSError as error:
        cause = cause_of(error, folder)
        raise ConfigError(f"{folder} cannot be read: {cause}; set another folder") from error


def _check_verify(config: RunConfig, initial: Initial) -> None:
    if initial.folder is not None and not (config.checkpoint.verify or config.checkpoint.resume):
        raise ConfigError(
            f"checkpoint.verify = false has no effect: checkpoint.initial = {str(initial.path)!r} "
            "is in Hugging Face's format, which has no checksums; leave it out"
        )


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


def _check_device(config: RunConfig, device: torch.device) -> None:
    for key in ("parallel.async_tp", "parallel.high_priority", "recompute.offload"):
        section, name = key.split(".")
        if (value := getattr(getattr(config, section), name)) and device.type != "cuda":
            raise ConfigError(f"{key} = {value!r} needs GPUs; this machine has none")
    if config.parallel.dispatcher == "deepep":
        deepep.library(config.parallel.ep, device.type == "cuda")
    if config.parallel.dispatcher == "symmetric_memory":
        symmetric_dispatch.check_device(device, config.float8.dispatch)


def _check_memory(config: RunConfig, model: DecoderConfig, place: Place) -> None:
    """Without GPUs a run's state is in the host's memory: told where it takes half of what is
    available, refused where the host has less. Activations come on top."""
    own = int(os.environ.get("LOCAL_WORLD_SIZE", place.world_size))
    moments = 2 * DTYPES[config.optim.moments].itemsize if config.optim.name == "adamw" else 0
    copies = config.degrees(place.world_size)["dp_replicate"]
    each = 4 + 4 + moments  # weights and gradients are float32
    needed = n_parameters(model) * each * copies * own / place.world_size
    total, available = host_memory()
    told = (
        f"this machine has no GPU: weights, gradients and moments of {n_parameters(model):,} "
        f"parameters take {needed / 2**30:.1f} GiB of its memory, activations not counted"
    )
    if total and needed > total:
        raise ConfigError(
            f"{told}, and it has {total / 2**30:.1f} GiB; start on GPUs, or with a smaller "
            "model.size. dtron plan tells what the run needs without building it"
        )
    if needed > available / 2 and place.local_rank == 0:
        log.warning("%s; %.1f GiB are available", told, available / 2**30)


def model_facts(config: RunConfig, model: DecoderConfig) -> dict[str, Any]:
    """Name and resolved fields of the model, as a checkpoint keeps them."""
    return {"name": config.model.name, **model.model_dump(mode="json")}


def _defaults() -> dict[str, Any]:
    """What a checkpoint means by fields of the model that are younger than it."""
    fields = DecoderConfig.model_fields.items()
    return {name: field.default for name, field in fields if not field.is_required()}


def _attention(config: RunConfig, model: DecoderConfig, device: torch.device) -> Backend:
    return choose_backend(
        config.model.attention,
        device_type=device.type,
        dtype=DTYPES[config.train.dtype],
        head_dim=model.head_size,
        documents=config.data.mask_documents,
        dropout=model.attention_dropout > 0,
        deterministic=config.debug.deterministic,
        context=config.parallel.cp_methods() if config.parallel.cp > 1 else (),
        window=model.window,
        softcap=model.softcap,
        sinks=model.sinks,
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
    if model.full_attention_every and parallel.cp > 1:
        raise ConfigError(
            f"model.full_attention_every = {model.full_attention_every} with parallel.cp = "
            f"{parallel.cp}: context parallelism has one window for all layers; use parallel.cp = 1"
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


def resume_settings(config: RunConfig) -> dict[str, Any]:
    """Keys on which the meaning of a checkpoint's state depends: the first the optimizer's state,
    the others that of the data position."""
    data = config.data.model_dump(mode="json", exclude={"cache_dir"})
    return {
        "optim.name": config.optim.name,
        "optim.moments": config.optim.moments,
        "train.seed": config.train.seed,
        "train.seq_len": config.train.seq_len,
        **{f"data.{key}": value for key, value in data.items()},
    }


def _check_settings(checkpoint: Location, config: RunConfig, facts: Facts) -> None:
    defaults = {key: default for key, default, _ in fields(RunConfig)}
    for key, value in resume_settings(config).items():
        saved = facts.settings.get(key, defaults[key])  # not there: a key that came later
        if saved == value:
            continue
        if key.startswith("optim."):
            raise CheckpointError(
                f"{checkpoint} holds the state of {key} = {saved!r}, not of {value!r}; keep {key}"
            )
        log.warning(
            "%s = %r, but %s was made with %r: the data go on at the same sequence number, whose "
            "text is another one",
            key,
            value,
            checkpoint,
            saved,
        )


def _check_writable(path: Path) -> None:
    try:
        check_writable(path)
    except OSError as error:
        cause = cause_of(error, path)
        raise ConfigError(
            f"run.dir = {str(path)!r} cannot be written: {cause}; set another run.dir"
        ) from None
