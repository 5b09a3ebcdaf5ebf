"""Checks of a run against the checkpoint that it resumes.

Model, optimizer and data must be those of the checkpoint; a changed learning rate schedule is
logged.
"""

import contextlib
import json
import logging
from collections.abc import Iterator
from typing import Any

from dtron.checkpoint.initial_weights import LORA_KEYS
from dtron.checkpoint.metadata import CheckpointMetadata, check_model, read_metadata
from dtron.config import Float8, RunConfig, Schedule, fields
from dtron.config.learning_rate import learning_rate, warmup_steps
from dtron.data.sources import CONTENT, ORDER
from dtron.errors import CheckpointError, ConfigError
from dtron.io.filesystem import Location
from dtron.models.config import DecoderConfig

log = logging.getLogger("dtron")

_CONTENT = (
    *("source", "paths", "format", "chat_template", "text_key"),
    *("tokenizer", "eos_token", "bos_token"),
)
_CONTENT_KEYS = (*(f"data.{key}" for key in _CONTENT), "data.hf_path", "data.hf_name")
"""Keys that determine the content of the data; `check_data` compares hashes of this content."""
_UPDATES = tuple(
    f"{section}.{key}"
    for section, keys in {
        "optim": "beta1 beta2 eps weight_decay momentum adjust_lr_fn ema groups",
        "train": "global_batch dtype max_grad_norm",
        "parallel": "reduce_dtype",
        "data": "mask_documents objective mask_fraction mask_span mask_token",
        "float8": " ".join(key for key in Float8.model_fields if key != "report_interval"),
        "faults": "on_spike",
    }.items()
    for key in keys.split()
)
"""Keys that affect later updates but not the state in a checkpoint. Keys of the learning rate are
in `schedule_settings`; keys that only change the order of sums are left out."""
_EFFECT_OF_DATA = "training continues at the same sequence number, which now selects different text"
_EFFECT_OF_UPDATES = "updates from here on differ from those of an uninterrupted run"


def read_compatible(
    config: RunConfig, model: DecoderConfig, checkpoint: Location
) -> CheckpointMetadata:
    """Read the metadata of a checkpoint, and check that a run of this config can resume from it.

    Raises:
        CheckpointError: the checkpoint is damaged, of another model or optimizer, or has weights
            only.
    """
    metadata = read_metadata(checkpoint)
    if metadata.weights_only:
        raise CheckpointError(
            f"{checkpoint} has weights only; set checkpoint.initial instead of checkpoint.resume"
        )
    check_model(checkpoint, {**_defaults(), **metadata.model}, model_metadata(config, model))
    for key, value, saved in _changed_settings(config, metadata):
        if key in ("optim.name", "optim.moments"):
            raise CheckpointError(
                f"{key} = {value!r}, but {checkpoint} has optimizer state of {key} = {saved!r}; "
                f"set {key}={saved}"
            )
        if key in LORA_KEYS:
            raise CheckpointError(
                f"{key} = {value!r}, but {checkpoint} was trained with {key} = {saved!r}; set "
                f"{key}={json.dumps(saved)}, or checkpoint.initial instead of checkpoint.resume"
            )
    if config.optim.ema and not metadata.settings.get("optim.ema"):
        raise CheckpointError(
            f"optim.ema = {config.optim.ema}, but {checkpoint} has no average of weights; set "
            "optim.ema=0, or start a new run from its weights with checkpoint.initial"
        )
    return metadata


def model_metadata(config: RunConfig, model: DecoderConfig) -> dict[str, Any]:
    """Return name and resolved fields of the model, for `CheckpointMetadata.model`."""
    return {"name": config.model.name, **model.model_dump(mode="json")}


def _defaults() -> dict[str, Any]:
    """Return the defaults of model fields, for fields that an old checkpoint lacks."""
    fields = DecoderConfig.model_fields.items()
    return {name: field.default for name, field in fields if not field.is_required()}


def resume_settings(config: RunConfig) -> dict[str, Any]:
    """Return the keys and values of a run that are compared with those of its checkpoint.

    The state depends on `optim.name`, `optim.moments` and `LORA_KEYS`; the position in the data on
    `data.*`, `train.seed` and `train.seq_len`; and later updates on `_UPDATES`.
    """
    # Compared by name in `check_data` and `Mixture.seek`.
    by_name = {"mixture", "mixture_steps", "validation"}
    data = config.data.model_dump(mode="json", exclude={"cache_dir", *by_name})
    values = config.model_dump(mode="json")
    return {
        **{key: values[key.split(".")[0]][key.split(".")[1]] for key in _UPDATES},
        "optim.name": config.optim.name,
        "optim.moments": config.optim.moments,
        **{key: values["lora"][key.split(".")[1]] for key in LORA_KEYS},
        "train.seed": config.train.seed,
        "train.seq_len": config.train.seq_len,
        **{f"data.{key}": value for key, value in data.items()},
    }


def schedule_settings(config: RunConfig, warmup: int) -> dict[str, Any]:
    """Return all keys that determine the learning rates, for `CheckpointMetadata.schedule`.

    Args:
        warmup: number of warm-up steps, from `resumed_warmup`.
    """
    options = config.schedule.model_dump(mode="json")
    keys = {f"schedule.{key}": value for key, value in options.items()}
    rate = {"train.steps": config.train.steps, "optim.lr": config.optim.lr}
    return {**rate, **keys, "warmup_steps": warmup}


def resumed_warmup(config: RunConfig, metadata: CheckpointMetadata | None) -> int:
    """Return the number of warm-up steps of a new or resumed run.

    If train.steps has changed, a completed warm-up keeps its length, so that the run does not warm
    up again. A changed schedule.warmup takes effect.

    Args:
        metadata: metadata of the checkpoint; None: the run does not resume.
    """
    own = warmup_steps(config.train.steps, config.schedule)
    if metadata is None or metadata.schedule.get("schedule.warmup") != config.schedule.warmup:
        return own
    before = metadata.schedule["warmup_steps"]
    same = metadata.schedule["train.steps"] == config.train.steps
    return before if same or metadata.step >= before else own


def _changed_settings(
    config: RunConfig, metadata: CheckpointMetadata
) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, value, value in the checkpoint) of the `resume_settings` that differ."""
    defaults = {key: default for key, default, _ in fields(RunConfig)}
    for key, value in resume_settings(config).items():
        if key in _UPDATES and key not in metadata.settings:  # an old checkpoint
            continue
        default = defaults[key]
        default = list(default) if isinstance(default, tuple) else default  # as in JSON
        saved = metadata.settings.get(key, default)  # missing: a newer key
        if saved != value:
            yield key, value, saved


def _log_other_choices(
    checkpoint: Location, config: RunConfig, metadata: CheckpointMetadata
) -> None:
    """Log automatic choices of the checkpoint's run that differ from the settings of this run."""
    for key, before in metadata.automatic.items():
        section, name = key.split(".")
        if (value := getattr(getattr(config, section, None), name, before)) != before:
            log.info(
                "%s = %r, but %r was chosen automatically for %s: results can differ by rounding",
                key,
                value,
                before,
                checkpoint,
            )


def _log_schedule_changes(
    checkpoint: Location, config: RunConfig, metadata: CheckpointMetadata
) -> None:
    """Log changed settings that affect the learning rate of the next step."""
    before = metadata.schedule
    after = schedule_settings(config, resumed_warmup(config, metadata))
    changed = [key for key, value in after.items() if key in before and before[key] != value]
    if not changed or metadata.step >= config.train.steps:
        return
    would = ""
    if metadata.step < before["train.steps"]:
        with contextlib.suppress(ValueError, TypeError):  # a schedule that this version lacks
            would = f" (without these changes: {_rate(metadata.step, before):.3g})"
    changes = ", ".join(f"{key} = {after[key]!r} (was {before[key]!r})" for key in changed)
    log.warning(
        "%s: changed since %s; the learning rate of step %d is %.3g%s; the warm-up is %d steps",
        changes,
        checkpoint,
        metadata.step + 1,
        _rate(metadata.step, after),
        would,
        after["warmup_steps"],
    )


def _rate(step: int, settings: dict[str, Any]) -> float:
    """Return the learning rate of an update (0-based), from `schedule_settings`."""
    keys = [key for key in settings if key.startswith("schedule.")]
    # Not validated: values of an older checkpoint may be illegal now.
    options = Schedule.model_construct(
        **{key.removeprefix("schedule."): settings[key] for key in keys}
    )
    steps, peak, warmup = (settings[key] for key in ("train.steps", "optim.lr", "warmup_steps"))
    return learning_rate(step, steps, peak, options, warmup)


def check_data(
    checkpoint: Location, config: RunConfig, metadata: CheckpointMetadata, data: dict[str, str]
) -> None:
    """Raise ConfigError if data or tokenizer differ from those of the checkpoint.

    With other data or another tokenizer, the same sequence number would select different text.

    Args:
        data: result of `identity_of`.
    """
    if config.checkpoint.allow_data_change:
        return
    trained = {key: value for key, value in data.items() if not key.startswith("validation:")}
    changed = [key for key in trained if metadata.data.get(key, trained[key]) != trained[key]]
    if (CONTENT in data) != (CONTENT in metadata.data) and metadata.data:
        changed.append(CONTENT)
    if ORDER in data and ORDER not in metadata.data and metadata.data:
        raise ConfigError(
            f"data.{_key_of_data(config)}: {checkpoint} was "
            "written by an earlier version of dtron, which held out other documents and trained on "
            "the rest in another order (or it trained on a stream); set "
            "checkpoint.allow_data_change=true to continue at the same sequence number of the new "
            "order"
        )
    if not changed:
        return
    if "tokenizer" in changed:
        key, what = "tokenizer", "another tokenizer"
    elif config.data.mixture:
        names = [key.partition(":")[2] for key in changed if key != CONTENT]
        raise ConfigError(
            f"data.mixture: {checkpoint} was trained with other data"
            f"{' of ' + ', '.join(names) if names else ', without a mixture'}; "
            + (
                "give new data a new name, or set checkpoint.allow_data_change=true to continue at "
                "the same position in the new data"
                if names
                else "set checkpoint.allow_data_change=true to begin each source at its start"
            )
        )
    else:
        key, what = _key_of_data(config), "other data"
    raise ConfigError(
        f"data.{key} = {getattr(config.data, key)!r}: {checkpoint} was trained with {what}; "
        "restore it, or set checkpoint.allow_data_change=true to continue at the same "
        "sequence number of the new data"
    )


def _key_of_data(config: RunConfig) -> str:
    """Return the key of `data` that names the data."""
    return {"hf": "hf_path", "python": "source"}.get(config.data.source, "paths")


def warn_of_changes(checkpoint: Location, config: RunConfig, metadata: CheckpointMetadata) -> None:
    """Log each setting that differs from the checkpoint's and affects training, with its effect.

    Effects: a sequence number selects different text, updates or learning rates change, or results
    differ by rounding (settings that were chosen automatically).
    """
    _log_other_choices(checkpoint, config, metadata)
    compared = any(key.split(":")[0] == CONTENT for key in metadata.data)
    known = _CONTENT_KEYS if compared and "tokenizer" in metadata.data else ()
    for key, value, saved in _changed_settings(config, metadata):
        if key in known:
            continue
        effect = _EFFECT_OF_UPDATES if key in _UPDATES else _EFFECT_OF_DATA
        log.warning("%s = %r, but %s was made with %r: %s", key, value, checkpoint, saved, effect)
    _log_schedule_changes(checkpoint, config, metadata)
