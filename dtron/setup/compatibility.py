"""Which settings of a run must be those of the checkpoint that it resumes, and which may change.

The optimizer, the model and the data of a checkpoint must be the run's; a changed learning-rate
schedule is logged.
"""

import logging
from collections.abc import Iterator
from typing import Any

from dtron.checkpoint.directory import CheckpointMetadata, check_model, read_metadata
from dtron.config import RunConfig, Schedule, fields
from dtron.config.learning_rate import learning_rate, warmup_steps
from dtron.data.sources import BY_POSITION, SPLIT
from dtron.errors import CheckpointError, ConfigError
from dtron.io.filesystem import Location
from dtron.models.config import DecoderConfig

log = logging.getLogger("dtron")

_CONTENT = ("source", "paths", "text_key", "tokenizer", "eos_token")
_CONTENT_KEYS = (*(f"data.{key}" for key in _CONTENT), "data.hf_path", "data.hf_name")
"""Keys that act through the content alone, of which `check_data` compares hashes."""


def read_compatible(
    config: RunConfig, model: DecoderConfig, checkpoint: Location
) -> CheckpointMetadata:
    """Read the metadata of a checkpoint that a run of this config can resume.

    Raises:
        CheckpointError: it is damaged or of another model, optimizer or kind.
    """
    metadata = read_metadata(checkpoint)
    if metadata.weights_only:
        raise CheckpointError(
            f"{checkpoint} holds weights only; set checkpoint.initial instead of checkpoint.resume"
        )
    check_model(checkpoint, {**_defaults(), **metadata.model}, model_metadata(config, model))
    for key, value, saved in _changed_settings(config, metadata):
        if key.startswith("optim."):
            raise CheckpointError(
                f"{checkpoint} holds the state of {key} = {saved!r}, not of {value!r}; keep {key}"
            )
    return metadata


def model_metadata(config: RunConfig, model: DecoderConfig) -> dict[str, Any]:
    """Name and resolved fields of the model, as a checkpoint keeps them."""
    return {"name": config.model.name, **model.model_dump(mode="json")}


def _defaults() -> dict[str, Any]:
    """Defaults for fields of the model that were added after a checkpoint was written."""
    fields = DecoderConfig.model_fields.items()
    return {name: field.default for name, field in fields if not field.is_required()}


def resume_settings(config: RunConfig) -> dict[str, Any]:
    """Keys on which a checkpoint's state depends: `optim.*` for the optimizer's state, the others
    for the position in the data."""
    data = config.data.model_dump(mode="json", exclude={"cache_dir"})
    return {
        "optim.name": config.optim.name,
        "optim.moments": config.optim.moments,
        "train.seed": config.train.seed,
        "train.seq_len": config.train.seq_len,
        **{f"data.{key}": value for key, value in data.items()},
    }


def schedule_settings(config: RunConfig, warmup: int) -> dict[str, Any]:
    """All keys that determine a run's learning rates, for `CheckpointMetadata.schedule`.

    Args:
        warmup: number of warm-up steps, from `resumed_warmup`.
    """
    options = config.schedule.model_dump(mode="json")
    keys = {f"schedule.{key}": value for key, value in options.items()}
    rate = {"train.steps": config.train.steps, "optim.lr": config.optim.lr}
    return {**rate, **keys, "warmup_steps": warmup}


def resumed_warmup(config: RunConfig, metadata: CheckpointMetadata | None) -> int:
    """Number of warm-up steps. A complete warm-up keeps its length when the run resumes with
    another train.steps, and is not entered again; another schedule.warmup takes effect."""
    own = warmup_steps(config.train.steps, config.schedule)
    if metadata is None or metadata.schedule.get("schedule.warmup") != config.schedule.warmup:
        return own
    before = metadata.schedule["warmup_steps"]
    same = metadata.schedule["train.steps"] == config.train.steps
    return before if same or metadata.step >= before else own


def _changed_settings(
    config: RunConfig, metadata: CheckpointMetadata
) -> Iterator[tuple[str, Any, Any]]:
    """(key, value, value in the checkpoint) of `resume_settings` that differ."""
    defaults = {key: default for key, default, _ in fields(RunConfig)}
    for key, value in resume_settings(config).items():
        saved = metadata.settings.get(key, defaults[key])  # missing: added after the checkpoint
        if saved != value:
            yield key, value, saved


def _log_schedule_changes(
    checkpoint: Location, config: RunConfig, metadata: CheckpointMetadata
) -> None:
    """Warn of changes that affect the learning rate of the next step."""
    before = metadata.schedule
    after = schedule_settings(config, resumed_warmup(config, metadata))
    changed = [key for key, value in after.items() if key in before and before[key] != value]
    if not changed or metadata.step >= config.train.steps:
        return
    would = ""
    if metadata.step < before["train.steps"]:
        would = f", where it would have been {_rate(metadata.step, before):.3g}"
    changes = ", ".join(f"{key} = {after[key]!r} (was {before[key]!r})" for key in changed)
    log.warning(
        "%s since %s: the learning rate of step %d is %.3g%s; the warm-up is %d steps",
        changes,
        checkpoint,
        metadata.step + 1,
        _rate(metadata.step, after),
        would,
        after["warmup_steps"],
    )


def _rate(step: int, settings: dict[str, Any]) -> float:
    """Learning rate of an update (0-based), from `schedule_settings`."""
    keys = [key for key in settings if key.startswith("schedule.")]
    options = Schedule(**{key.removeprefix("schedule."): settings[key] for key in keys})
    steps, peak, warmup = (settings[key] for key in ("train.steps", "optim.lr", "warmup_steps"))
    return learning_rate(step, steps, peak, options, warmup)


def check_data(
    checkpoint: Location, config: RunConfig, metadata: CheckpointMetadata, data: dict[str, str]
) -> None:
    """Refuse data or a tokenizer that differ from the checkpoint's: the same sequence number would
    select different text.

    Args:
        data: of `identity_of`.
    """
    if config.checkpoint.allow_data_change:
        return
    older = {key: data[key] for key in data if key != SPLIT}  # of which a checkpoint may lack some
    changed = [key for key in older if metadata.data.get(key, older[key]) != older[key]]
    split, saved = (each.get(SPLIT, BY_POSITION) for each in (data, metadata.data))
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


def warn_of_changes(checkpoint: Location, config: RunConfig, metadata: CheckpointMetadata) -> None:
    """Warn of settings that change the text of a sequence number, and of changed learning rates."""
    known = _CONTENT_KEYS if {"content", "tokenizer"} <= metadata.data.keys() else ()
    for key, value, saved in _changed_settings(config, metadata):
        if key in known:
            continue
        log.warning(
            "%s = %r, but %s was made with %r: training continues at the same sequence number, "
            "which now selects different text",
            key,
            value,
            checkpoint,
            saved,
        )
    _log_schedule_changes(checkpoint, config, metadata)
