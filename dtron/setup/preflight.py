"""Everything that can be refused before the process group starts.

Each rank checks what is cheap; the first rank of each host prepares the data, and the others wait
for it, so that an error is found and printed once.
"""

import contextlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import TypeAdapter

from dtron.checkpoint.directory import PROBE, Facts, check_model, complete, find, read_facts
from dtron.checkpoint.initial_weights import (
    Initial,
    check_same_model,
    check_tokenizer,
    open_initial,
)
from dtron.checkpoint.locations import Tier, owner, tiers_of
from dtron.config import RunConfig, Schedule, fields
from dtron.config.learning_rate import learning_rate, warmup_steps
from dtron.config.rules import refuse
from dtron.data import (
    Tokenizer,
    TrainingSource,
    ValidationSource,
    identity_of,
    load_tokenizer,
    open_data,
    prepare,
    wait_for,
)
from dtron.data.cache import STALE_SECONDS
from dtron.data.sources import BY_POSITION, SPLIT
from dtron.errors import CheckpointError, ConfigError, DtronError, cause_of
from dtron.faults.memory import check_host_memory, size
from dtron.io.filesystem import Location, listed, location
from dtron.io.remote_path import Remote
from dtron.io.untrusted import MB, read_text
from dtron.models.attention import Backend
from dtron.models.config import DecoderConfig
from dtron.models.contract import check_family, counted_as_decoder
from dtron.models.flops import n_parameters
from dtron.parallelisms.fsdp.sharding import DTYPES
from dtron.parallelisms.pipeline.executor import Layout
from dtron.run.directory import RunDir
from dtron.run.process import Place, check_writable
from dtron.run.rendezvous import Rendezvous
from dtron.setup.float8_plan import Float8Plan
from dtron.setup.rules import MachineCandidate, all_broken, host_warnings

log = logging.getLogger("dtron")

"""The least that a process may take to show that it prepares the data."""


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
    data: dict[str, str]
    """Hashes of the training data and the tokenizer."""
    resume: str
    """`checkpoint.resume`, or `latest` where torchrun has restarted the job."""
    tiers: list[Tier]
    """Where checkpoints go."""
    folders: list[Location]
    """Theirs, as they were found."""
    by_rank_0: bool
    """Rank 0 alone has looked for the checkpoint, in a store."""
    checkpoint: Location | None
    facts: Facts | None
    initial: Initial | None
    """Of a run that does not resume."""

    @property
    def finished(self) -> bool:
        """Whether what is resumed has nothing left to do, and is where it lasts."""
        lasting = self.tiers[0] is self.tiers[-1] or owner(self.tiers[:-1], self.checkpoint) is None
        return self.facts is not None and self.facts.step >= self.steps and lasting


def preflight(
    config: RunConfig, place: Place, rendezvous: Rendezvous | None = None, starts: bool = True
) -> Checked:
    """Check a run against this machine.

    Args:
        rendezvous: of all ranks, which call it together; None: of this process alone.
        starts: the model will be built here, so that this machine has to hold it.
    Raises:
        ConfigError: all that settings, model and machine rule out, a line each.
        ConfigError, DataError, CheckpointError: else the first thing that cannot work.
    """
    run = MachineCandidate(config, place.world_size, place.device)
    refuse(all_broken(run))
    model = run.model
    family = config.model.name, run.spec
    check_family(*family, model)
    if starts:
        warnings = [*host_warnings(config, place.world_size, place.local_world_size)]
        for warning in [*warnings, *counted_as_decoder(*family)]:
            log.warning("%s", warning)
    if starts and place.device.type == "cpu":
        _check_memory(config, model, place)
    tokenizer = load_tokenizer(config.data)
    if tokenizer.vocab_size > model.vocab_size:
        raise ConfigError(
            f"data.tokenizer = {config.data.tokenizer!r} has {tokenizer.vocab_size} tokens, more "
            f"than model.override.vocab_size = {model.vocab_size}; raise the latter"
        )
    rundir = RunDir(config.run.dir)
    tiers = tiers_of(config)
    goes_on = _goes_on(rundir, place)

    def look() -> Resumed:
        return _look(config, model, place, tiers, goes_on, probe=starts)

    by_rank_0 = rendezvous is not None and place.world_size > 1 and _in_stores(config, tiers)
    if rendezvous is not None and by_rank_0:
        if place.rank > 0 and isinstance(tiers[-1].folder, Remote):
            tiers[-1].folder.connect()  # while rank 0 looks
        found = _look_once(look, rendezvous, config.checkpoint.timeout_seconds)
    else:
        found = look()
    resume, checkpoint, facts = found.resume, found.checkpoint, found.facts
    initial = None
    if config.checkpoint.initial and not checkpoint:
        initial = open_initial(config.checkpoint.initial, model.norm_zero_centered)
        check_same_model(initial, config.model.name, model)
        _check_verify(config, initial)
        if not config.checkpoint.allow_data_change:
            check_tokenizer(initial, tokenizer, config.data)
    if place.local_rank == 0:
        _check_writable(rundir.path)
        prepare(config.data)
    else:
        wait_for(config.data, max(STALE_SECONDS, config.parallel.timeout_seconds))
    train, validation = open_data(config.data, seq_len=config.train.seq_len, seed=config.train.seed)
    data = identity_of(config.data, tokenizer)
    if checkpoint and facts:
        _check_data(checkpoint, config, facts, data)
        _warn_of_changes(checkpoint, config, facts)
    return Checked(
        config.train.steps,
        model,
        run.attention,
        run.layout,
        run.float8,
        tokenizer,
        train,
        validation,
        data,
        resume,
        tiers,
        found.folders,
        by_rank_0,
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
    with contextlib.suppress(OSError, ValueError):
        return read_text(rundir.begun, MB) == place.job
    return False


class Resumed(NamedTuple):
    """How this attempt resumes, and from what."""

    resume: str
    checkpoint: Location | None
    facts: Facts | None
    folders: list[Location]
    """The tiers', as they were found."""


def _look(
    config: RunConfig,
    model: DecoderConfig,
    place: Place,
    tiers: Sequence[Tier],
    goes_on: bool,
    probe: bool,
) -> Resumed:
    """Look for the checkpoint to resume, where checkpoints can be written."""
    _check_tiers(config, place, tiers)
    if probe and place.rank == 0 and isinstance(tiers[-1].folder, Remote):
        _check_store(config.checkpoint.dir, tiers[-1].folder)
    try:
        folders = [listed(tier.folder) for tier in tiers]
    except OSError as error:
        raise _cannot_look(config.checkpoint.resume, error) from error
    resume, checkpoint, facts = _resumed(config, model, goes_on, folders)
    noted = RunDir(config.run.dir).noted_checkpoint()
    if resume == "latest" and checkpoint is None and noted:
        raise CheckpointError(
            f"checkpoint.resume = 'latest' finds no checkpoint in {tiers[-1].folder}, but this run "
            f"wrote {noted}; mount or restore its file system, or start afresh with "
            "checkpoint.resume= (empty)"
        )
    _check_unused(config, folders, checkpoint if owner(tiers, checkpoint) else None, goes_on)
    return Resumed(resume, checkpoint, facts, folders)


def _in_stores(config: RunConfig, tiers: Sequence[Tier]) -> bool:
    """Whether all places to look for checkpoints are stores, which all ranks see alike."""
    resume = config.checkpoint.resume
    places = [tier.folder for tier in tiers]
    places += [location(resume)] if resume not in ("", "latest") else []
    return all(isinstance(each, Remote) for each in places)


def _look_once(look: Callable[[], Resumed], rendezvous: Rendezvous, seconds: float) -> Resumed:
    """What rank 0 finds, on all ranks. Raises what it raises there, on all of them."""
    name, found, failure = "checkpoint", None, None
    if rendezvous.place.rank == 0:
        try:
            found = look()
        except DtronError as error:
            failure = error
    answer = {"error": str(failure)} if failure else {}
    if found is not None:
        facts = asdict(found.facts) if found.facts else None
        answer = {"resume": found.resume, "at": str(found.checkpoint or ""), "facts": facts}
    answer = json.loads(rendezvous.broadcast_from_rank_0(name, json.dumps(answer), seconds))
    if failure is not None:
        raise failure
    if found is not None:
        return found
    if "error" in answer:
        raise CheckpointError(answer["error"])
    facts = TypeAdapter(Facts).validate_python(answer["facts"]) if answer["facts"] else None
    return Resumed(answer["resume"], location(answer["at"]) if answer["at"] else None, facts, [])


def _cannot_look(resume: str, error: OSError) -> CheckpointError:
    return CheckpointError(
        f"checkpoint.resume = {resume!r}: checkpoints cannot be looked for: {error}; start again "
        "when that works"
    )


def _resumed(
    config: RunConfig, model: DecoderConfig, goes_on: bool, folders: Sequence[Location]
) -> tuple[str, Location | None, Facts | None]:
    """How this attempt resumes, and from what.

    The first attempt of a job takes what `checkpoint.resume` says. One that torchrun has restarted
    goes on from what the job has written, and if that is nothing, does as the first.
    """
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
        raise _cannot_look(resume, error) from error
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
    for key, value, saved in _changed_settings(config, facts):
        if key.startswith("optim."):
            raise CheckpointError(
                f"{checkpoint} holds the state of {key} = {saved!r}, not of {value!r}; keep {key}"
            )
    return facts


def _check_tiers(config: RunConfig, place: Place, tiers: Sequence[Tier]) -> None:
    """Refuse tiers that cannot do what they are for."""
    options = config.checkpoint
    for key, folder in (("dir", options.dir), ("fast_dir", options.fast_dir)):
        if folder and isinstance(where := location(folder), Path):
            _check_folder(f"checkpoint.{key}", where)


def _check_store(url: str, folder: Remote) -> None:
    """Refuse a store to which nothing can be written. What is written is deleted by a save."""
    try:
        (folder / PROBE).write_bytes(b"\n")
    except OSError as error:
        raise ConfigError(
            f"checkpoint.dir = {url!r} cannot be written: {cause_of(error, folder)}; make the "
            "bucket, set credentials that may list, read, write and delete there, or set another "
            "checkpoint.dir"
        ) from error


def _check_unused(
    config: RunConfig, folders: Sequence[Location], own: Location | None, goes_on: bool
) -> None:
    """Refuse folders that hold another run's checkpoints.

    Args:
        own: what this run resumes from them.
    """
    local = RunDir(config.run.dir).checkpoints  # which is set aside
    for folder in folders:
        if own is None and folder != local and _used(folder) and not goes_on:
            raise ConfigError(
                f"{folder} holds checkpoints of an earlier start; set "
                "checkpoint.resume=latest to go on from them, delete them, or use another folder"
            )


def _check_folder(key: str, folder: Path) -> None:
    """Refuse, before a step is trained, where no checkpoint can be written; nothing is made."""
    there = next(each for each in (folder, *folder.parents) if os.path.exists(each))
    fix = "set another folder"
    if not there.is_dir():
        raise ConfigError(f"{key} = {str(folder)!r}: {there} is a file; {fix}")
    if not os.access(there, os.W_OK | os.X_OK):
        raise ConfigError(f"{key} = {str(folder)!r}: {there} cannot be written; {fix}")


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


def _check_memory(config: RunConfig, model: DecoderConfig, place: Place) -> None:
    """Without GPUs a run's state is in the host's memory: warn where it takes half of what is
    available, refuse it where it takes more than that. Activations are not counted."""
    moments = 2 * DTYPES[config.optim.moments].itemsize if config.optim.name == "adamw" else 0
    copies = config.degrees(place.world_size)["dp_replicate"]
    each = 4 + 4 + moments  # weights and gradients are float32
    needed = n_parameters(model) * each * copies * place.local_world_size / place.world_size
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


def model_facts(config: RunConfig, model: DecoderConfig) -> dict[str, Any]:
    """Name and resolved fields of the model, as a checkpoint keeps them."""
    return {"name": config.model.name, **model.model_dump(mode="json")}


def _defaults() -> dict[str, Any]:
    """What a checkpoint means by fields of the model that are younger than it."""
    fields = DecoderConfig.model_fields.items()
    return {name: field.default for name, field in fields if not field.is_required()}


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


def schedule_settings(config: RunConfig, warmup: int) -> dict[str, Any]:
    """What a run's learning rates depend on, for `Facts.schedule`.

    Args:
        warmup: updates of its warm-up, of `kept_warmup`.
    """
    options = config.schedule.model_dump(mode="json")
    keys = {f"schedule.{key}": value for key, value in options.items()}
    rate = {"train.steps": config.train.steps, "optim.lr": config.optim.lr}
    return {**rate, **keys, "warmup_steps": warmup}


def kept_warmup(config: RunConfig, facts: Facts | None) -> int:
    """Number of warm-up steps. A complete warm-up keeps its length when the run resumes with
    another train.steps, and is not entered again; another schedule.warmup takes effect."""
    own = warmup_steps(config.train.steps, config.schedule)
    if facts is None or facts.schedule.get("schedule.warmup") != config.schedule.warmup:
        return own
    before = facts.schedule["warmup_steps"]
    same = facts.schedule["train.steps"] == config.train.steps
    return before if same or facts.step >= before else own


def _changed_settings(config: RunConfig, facts: Facts) -> Iterator[tuple[str, Any, Any]]:
    """(key, value, value in the checkpoint) of `resume_settings` that differ."""
    defaults = {key: default for key, default, _ in fields(RunConfig)}
    for key, value in resume_settings(config).items():
        saved = facts.settings.get(key, defaults[key])  # not there: added after the checkpoint
        if saved != value:
            yield key, value, saved


def _log_schedule_changes(checkpoint: Location, config: RunConfig, facts: Facts) -> None:
    """Warn of changes that move the learning rate where the run goes on."""
    before = facts.schedule
    after = schedule_settings(config, kept_warmup(config, facts))
    changed = [key for key, value in after.items() if key in before and before[key] != value]
    if not changed or facts.step >= config.train.steps:
        return
    would = ""
    if facts.step < before["train.steps"]:
        would = f", where it would have been {_rate(facts.step, before):.3g}"
    changes = ", ".join(f"{key} = {after[key]!r} (was {before[key]!r})" for key in changed)
    log.warning(
        "%s since %s: the learning rate of step %d is %.3g%s; the warm-up is %d steps",
        changes,
        checkpoint,
        facts.step + 1,
        _rate(facts.step, after),
        would,
        after["warmup_steps"],
    )


def _rate(step: int, settings: dict[str, Any]) -> float:
    """Learning rate of an update (0-based), from `schedule_settings`."""
    keys = [key for key in settings if key.startswith("schedule.")]
    options = Schedule(**{key.removeprefix("schedule."): settings[key] for key in keys})
    steps, peak, warmup = (settings[key] for key in ("train.steps", "optim.lr", "warmup_steps"))
    return learning_rate(step, steps, peak, options, warmup)


def _check_data(
    checkpoint: Location, config: RunConfig, facts: Facts, data: dict[str, str]
) -> None:
    """Refuse other data and another tokenizer than those of the checkpoint: each sequence number
    would stand for another text.

    Args:
        data: of `identity_of`.
    """
    if config.checkpoint.allow_data_change:
        return
    older = {key: data[key] for key in data if key != SPLIT}  # of which a checkpoint may lack some
    changed = [key for key in older if facts.data.get(key, older[key]) != older[key]]
    split, saved = (each.get(SPLIT, BY_POSITION) for each in (data, facts.data))
    if not changed and split != saved and config.data.validation_fraction:
        raise ConfigError(
            f"data.validation_fraction = {config.data.validation_fraction}: {checkpoint} holds "
            f"copies of documents out by their {saved}, this dtron by their {split}, which changes "
            "the order of the training documents; set checkpoint.allow_data_change=true to "
            "continue at the same sequence number"
        )
    if not changed:
        return
    if "tokenizer" in changed:
        key, what = "tokenizer", "another tokenizer"
    else:
        key, what = ("hf_path" if config.data.source == "hf" else "paths"), "other data"
    raise ConfigError(
        f"data.{key} = {getattr(config.data, key)!r}: {checkpoint} was trained with {what}; "
        "restore what was there, or set checkpoint.allow_data_change=true to continue at the same "
        "sequence number of the new data"
    )


_CONTENT = ("source", "paths", "text_key", "tokenizer", "eos_token")
_CONTENT_KEYS = (*(f"data.{key}" for key in _CONTENT), "data.hf_path", "data.hf_name")
"""Keys that act through the content alone, of which `_check_data` compares hashes."""


def _warn_of_changes(checkpoint: Location, config: RunConfig, facts: Facts) -> None:
    """Warn of settings that give each sequence number another text, and of learning rates."""
    known = _CONTENT_KEYS if {"content", "tokenizer"} <= facts.data.keys() else ()
    for key, value, saved in _changed_settings(config, facts):
        if key in known:
            continue
        log.warning(
            "%s = %r, but %s was made with %r: the data go on at the same sequence number, whose "
            "text is another one",
            key,
            value,
            checkpoint,
            saved,
        )
    _log_schedule_changes(checkpoint, config, facts)


def _check_writable(path: Path) -> None:
    try:
        check_writable(path)
    except OSError as error:
        cause = cause_of(error, path)
        raise ConfigError(
            f"run.dir = {str(path)!r} cannot be written: {cause}; set another run.dir"
        ) from None
