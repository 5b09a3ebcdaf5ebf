"""Checks of a run before the process group starts.

Each rank does the cheap checks. The first rank of each host prepares the data while the other ranks
wait, so that an error in the data is found and printed once."""

import logging
import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from dtron.checkpoint.initial_weights import (
    InitialWeights,
    check_adapters,
    check_same_model,
    check_tokenizer,
    open_initial,
)
from dtron.config import RunConfig
from dtron.config.rule import changed, refuse
from dtron.config.schema import MAX_STEPS
from dtron.config.setting_rules import Candidate, broken_settings
from dtron.data import (
    Tokenizer,
    TrainingSource,
    ValidationSource,
    identity_of,
    load_tokenizer,
    open_all,
    open_validation,
    prepare,
    wait_for,
)
from dtron.data.corpus.cache import STALE_SECONDS
from dtron.data.mixture import Mixture
from dtron.data.objectives import HeldOut, Objective, open_objective
from dtron.data.packing import Shuffled
from dtron.errors import ConfigError, cause_of, counted
from dtron.faults.memory import check_host_memory, size
from dtron.lora.adapters import adapters, n_adapter_parameters
from dtron.lora.peft import PeftFolder
from dtron.models import build_model, hf_of, model_spec
from dtron.models.attention import BACKENDS, Backend
from dtron.models.config import DecoderConfig
from dtron.models.contract import check_family, counted_as_decoder
from dtron.models.flops import n_parameters
from dtron.parallelisms.fsdp.sharding import DTYPES
from dtron.parallelisms.pipeline.executor import Layout
from dtron.run.directory import RunDir
from dtron.run.process import Place, check_writable
from dtron.run.rendezvous import Rendezvous
from dtron.run.trackers import check_trackers
from dtron.setup.float8_plan import Float8Plan
from dtron.setup.resume import ResumeState, find_resume_state
from dtron.setup.resume_checks import check_data, warn_of_changes
from dtron.setup.rules import (
    MachineCandidate,
    all_broken,
    cpu_warnings,
    host_warnings,
    objective_of,
    setting_warnings,
)

log = logging.getLogger("dtron")


@dataclass(frozen=True)
class ModelSetup:
    """Model, attention backend, pipeline and float8 layers of a run, resolved from its config."""

    config: DecoderConfig
    attention: Backend
    layout: Layout | None
    """Stages of the pipeline; None with parallel.pp = 1."""
    float8: Float8Plan | None

    def measured(self, config: RunConfig, place: Place, group: dist.ProcessGroup) -> "ModelSetup":
        """With `float8.filter = "auto"`, keep only layers that are faster in float8.

        Args:
            group: CPU process group of all ranks, which call this together.
        """
        if self.float8 is None:
            return self
        dtype = DTYPES[config.train.dtype]
        return replace(self, float8=self.float8.measured(place.device, dtype, group))


@dataclass(frozen=True)
class DataSetup:
    """Tokenizer and open data of a run."""

    tokenizer: Tokenizer
    train: TrainingSource
    validation: dict[str, ValidationSource]
    """Validation sets by name; "": documents that are held out of the only source."""
    objective: Objective | None
    """Sets the labels of training sequences; None: next tokens."""
    identity: dict[str, str]
    """Hashes of the training data and the tokenizer."""


class Preflight(NamedTuple):
    """What `preflight` has checked and opened: model, data and the checkpoint to resume from."""

    model: ModelSetup
    data: DataSetup
    resume: ResumeState
    config: RunConfig
    """The config, with the steps that follow from `train.epochs` or `train.tokens` in its place."""


def preflight(
    config: RunConfig, place: Place, rendezvous: Rendezvous | None = None, starts: bool = True
) -> Preflight:
    """Check that a run can start on this machine, and open its data and checkpoint.

    Args:
        rendezvous: rendezvous of all ranks, which call this together; None: one process only.
        starts: whether the run starts now; then also check memory and the object store, and log
            warnings.
    Raises:
        ConfigError: all broken rules about settings, model and machine, one per line.
        ConfigError, DataError, CheckpointError: the first other error, if no rule is broken.
    """
    check_trackers(config)
    config = _with_steps_of_tokens(config)
    model = set_up_model(config, place, starts)
    tokenizer = open_tokenizer(config, model.config)
    data = None
    if config.train.epochs:
        data = _open_data(config, model.config, tokenizer, place)
        config = _with_steps(config, data.train, place)
    resume = find_resume_state(config, model.config, place, rendezvous, starts)
    if config.checkpoint.initial and not resume.checkpoint:
        resume = replace(resume, initial=open_weights(config, model.config, tokenizer))
    data = data or _open_data(config, model.config, tokenizer, place)
    if resume.checkpoint and resume.metadata:
        check_data(resume.checkpoint, config, resume.metadata, data.identity)
        warn_of_changes(resume.checkpoint, config, resume.metadata)
    mixture_of(data.train, config, resume)  # raises where epochs end before the run
    return Preflight(model, data, resume, config)


def _with_steps_of_tokens(config: RunConfig) -> RunConfig:
    """Return the config with the steps that follow from `train.tokens` in its place, and log them.

    If it has both, a rule refuses it later.

    Raises:
        ConfigError: there are too many steps.
    """
    train = config.train
    if not train.tokens or any(changed(config, "train.steps train.epochs")):
        return config
    each = train.global_batch * train.seq_len
    if (steps := -(-train.tokens // each)) > MAX_STEPS:
        raise ConfigError(
            f"train.tokens = {train.tokens} are {steps} steps of {each} tokens; the limit is "
            f"{MAX_STEPS} steps"
        )
    shown = f"{train.tokens:,}", counted(steps, "step"), counted(each, "token")
    log.info("train.tokens = %s: %s of %s", *shown)
    return config.changed(train={"tokens": 0, "steps": steps})


def _with_steps(config: RunConfig, source: TrainingSource, place: Place) -> RunConfig:
    """Return the config with the steps that follow from `train.epochs` in its place, and log them.

    Raises:
        ConfigError: another key does not fit these steps.
    """
    assert isinstance(source, Shuffled), "mixtures and streams are refused"
    epochs, length, batch = config.train.epochs, source.epoch_length, config.train.global_batch
    steps = max(1, math.ceil(epochs * length / batch))
    config = config.changed(train={"epochs": 0.0, "steps": steps})
    refuse(broken_settings(Candidate(config, place.world_size)))
    shown = counted(steps, "step"), counted(batch, "sequence"), length
    log.info("train.epochs = %g: %s of %s; an epoch has %d", epochs, *shown)
    return config


def mixture_of(mixture: TrainingSource, config: RunConfig, resume: ResumeState) -> str:
    """Return what the rest of a run reads of each source of a mixture; "": it is no mixture.

    The mixture does not move, since ranks may still agree on another checkpoint.

    Raises:
        DataError: the epochs of all sources end before the run.
    """
    if not isinstance(mixture, Mixture):
        return ""
    metadata = resume.metadata
    if metadata is None or "sequence" not in metadata.data:
        return mixture.summary(config.train.steps)
    first = int(metadata.data["sequence"])
    mixture.count_from(metadata.step, first)
    mixture.seek(first, metadata.data)
    try:
        return mixture.summary(config.train.steps - metadata.step)
    finally:
        mixture.count_from(0, 0)
        mixture.seek(0, {})


def open_tokenizer(config: RunConfig, model: DecoderConfig) -> Tokenizer:
    """Load the tokenizer. Raises ConfigError: it has more tokens than the model."""
    tokenizer = load_tokenizer(config.data)
    if tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"data.tokenizer = {config.data.tokenizer!r} has {tokenizer.vocab_size} tokens, more "
            f"than model.override.vocab_size = {model.vocab_size}; raise vocab_size"
        )
    return tokenizer


def set_up_model(config: RunConfig, place: Place, starts: bool) -> ModelSetup:
    """Resolve the model; if the run starts now (`starts`), check memory and log warnings.

    Raises:
        ConfigError: all broken rules, one per line, or the model does not fit into memory.
    """
    run = MachineCandidate(config, place.world_size, place.device)
    refuse(all_broken(run))
    family = config.model.name, run.spec
    check_family(*family, run.model)
    if starts:
        warnings = [*host_warnings(config, place.world_size, place.local_world_size)]
        warnings += cpu_warnings(config, place.device)
        for warning in [*warnings, *setting_warnings(config), *counted_as_decoder(*family)]:
            log.warning("%s", warning)
    if starts and place.device.type == "cpu":
        _check_memory(config, run.model, place)
    return ModelSetup(run.model, run.attention, run.layout, run.float8)


def open_weights(config: RunConfig, model: DecoderConfig, tokenizer: Tokenizer) -> InitialWeights:
    """Open `checkpoint.initial`. Raises ConfigError, CheckpointError: it is of another model."""
    name = config.model.name
    initial = open_initial(config.checkpoint.initial, model.norm_zero_centered, name)
    check_same_model(initial, name, model)
    check_adapters(initial, config.lora)
    if config.lora.initial:
        folder = Path(config.lora.initial).expanduser()
        found = adapters(name, model, config.lora)
        initial = replace(initial, adapter=PeftFolder(folder, hf_of(name), found, config.lora))
    if initial.folder is not None and not (config.checkpoint.verify or config.checkpoint.resume):
        raise ConfigError(
            f"checkpoint.verify = false has no effect: checkpoint.initial = {str(initial.path)!r} "
            "is in Hugging Face's format, which has no checksums; leave checkpoint.verify out"
        )
    if not config.checkpoint.allow_data_change:
        check_tokenizer(initial, tokenizer, config.data)
    return initial


def _open_data(
    config: RunConfig, model: DecoderConfig, tokenizer: Tokenizer, place: Place
) -> DataSetup:
    objective = _open_objective(config, model, tokenizer)
    if place.local_rank == 0:
        _check_writable(RunDir(config.run.dir).path)
    _prepare(config, place, training=True)
    train, validation = open_all(
        config.data,
        seq_len=config.train.seq_len,
        seed=config.train.seed,
        global_batch=config.train.global_batch,
    )
    identity = identity_of(config.data, tokenizer)
    return DataSetup(tokenizer, train, _labelled(validation, objective), objective, identity)


def open_sets(
    config: RunConfig, model: DecoderConfig, tokenizer: Tokenizer, place: Place
) -> dict[str, ValidationSource]:
    """Open the validation sets by name, without the training data."""
    objective = _open_objective(config, model, tokenizer)
    _prepare(config, place, training=False)
    return _labelled(open_validation(config.data, config.train.seq_len), objective)


def _open_objective(
    config: RunConfig, model: DecoderConfig, tokenizer: Tokenizer
) -> Objective | None:
    kind = objective_of(config, model)
    return open_objective(kind, config.data, tokenizer, model.vocab_size, config.train.seed)


def _labelled(
    sets: dict[str, ValidationSource], objective: Objective | None
) -> dict[str, ValidationSource]:
    if objective is None:
        return sets
    return {name: HeldOut(source, objective) for name, source in sets.items()}


def _prepare(config: RunConfig, place: Place, training: bool) -> None:
    """Prepare the data on the first rank of a host; the others wait for its cache."""
    data, seq_len = config.data, config.train.seq_len
    if place.local_rank == 0:
        prepare(data, seq_len, training)
    else:
        seconds = max(STALE_SECONDS, config.parallel.timeout_seconds)
        wait_for(data, seq_len, seconds, training)


def _check_memory(config: RunConfig, model: DecoderConfig, place: Place) -> None:
    """Check that weights, gradients and moments fit into host memory, for a run without GPUs.

    Warn if they take more than half of the available memory. Raises ConfigError: they do not fit.
    Activations are not counted.
    """
    copies = config.degrees(place.world_size)["dp_replicate"]
    trained, frozen = n_parameters(model), 0
    if config.lora.rank:
        frozen, trained = trained, n_adapter_parameters(config.model.name, model, config.lora)
        state = trained * sum(config.optim.state_bytes(hidden=True))
    else:
        state = _state_bytes(config, model)
    # Trained weights and gradients are float32, frozen weights as in computation.
    state += (4 + 4) * trained + DTYPES[config.train.dtype].itemsize * frozen
    needed = state * copies * place.local_world_size / place.world_size
    what = (
        f"this machine has no GPU: weights, gradients and moments of {n_parameters(model):,} "
        f"parameters take {size(needed)} of its memory, without activations"
    )
    fix = (
        "start on GPUs, or with a smaller model.size; dtron plan lists what the run needs without "
        "building it"
    )
    available = check_host_memory(needed, what, lambda _: fix)
    if needed > available / 2 and place.local_rank == 0:
        log.warning("%s; %s are available", what, size(available))


def _state_bytes(config: RunConfig, model: DecoderConfig) -> float:
    """Return the bytes of the optimizer's state of all parameters."""
    with torch.device("meta"):
        undropped = model.model_copy(update={"attention_dropout": 0.0})
        built = build_model(config.model.name, undropped, BACKENDS["math"])
    hidden = model_spec(config.model.name).is_hidden_matrix
    return sum(
        p.numel() * sum(config.optim.state_bytes(hidden(fqn, p.dim())))
        for fqn, p in built.named_parameters()
    )


def _check_writable(path: Path) -> None:
    try:
        check_writable(path)
    except OSError as error:
        cause = cause_of(error, path)
        raise ConfigError(
            f"run.dir = {str(path)!r} cannot be written: {cause}; set another run.dir"
        ) from None
