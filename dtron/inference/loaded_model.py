"""A parallel model with trained weights, for validation losses and text.

It has neither an optimizer nor a run directory. Weights are loaded as initial weights are, so that
any layout can read them: that of the training run does not matter.
"""

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from dtron.checkpoint.find import find_weights
from dtron.checkpoint.initial_weights import (
    check_named,
    config_of_run,
    fill_from_initial,
    load_initial,
)
from dtron.checkpoint.stored_model import StoredModel
from dtron.config import RunConfig
from dtron.errors import CheckpointError, ConfigError
from dtron.io.filesystem import is_file, location
from dtron.models import model_spec
from dtron.models.hf_weights import CONFIG
from dtron.run.process import Place, host_group
from dtron.setup.automatic import without_choices
from dtron.setup.preflight import open_sets, open_tokenizer, open_weights, set_up_model
from dtron.training.batches import RankTokens
from dtron.training.build import ModelBuilder, build_mesh
from dtron.training.evaluation import Evaluation

SECTIONS = ("model", "data", "train", "lora")
"""Sections of a run's config that hold for its weights wherever they are evaluated."""
_ACTING = ("model.", "data.", "parallel.", "compile.", "lora.")
_KEYS = (
    *("train.seq_len", "train.micro_batch", "train.loss_chunks", "train.dtype", "train.seed"),
    *("train.eval_sequences", "checkpoint.verify"),
)
"""Keys that act without training, besides all of the sections _ACTING."""


def config_of(
    weights: str, file: Path | None, overrides: Sequence[str], world_size: int
) -> RunConfig:
    """Return settings to evaluate weights with `world_size` ranks.

    Args:
        weights: path or URL of a checkpoint, a run or a Hugging Face folder.
        file: a config; None: that of the weights' run, or the defaults for a Hugging Face folder.
        overrides: `section.key=value` words.
    Raises:
        ConfigError: a key is not legal, or a custom model is not named by `overrides` or `file`.
        CheckpointError: the path has no weights, or the config of their run is missing.
    """
    given = {word.partition("=")[0].strip() for word in overrides}
    _check_effect(given)
    words = [f"checkpoint.initial={json.dumps(weights)}", *overrides]
    found = None if file else _config_file(weights)
    if not (file or found):
        words = ["model.size=initial", *words]
    if found:  # before anything is imported
        own = RunConfig.load(found, words, sections=SECTIONS)
        if "model.name" not in given:
            check_named(found, own.model.name, "", "add model.name=")
        if "data.source" not in given:
            check_named(found, own.data.source, "", "add data.source=", "has the data source")
    config = RunConfig.load(file or found, words, fill_from_initial, sections=SECTIONS)
    if found and "lora.initial" not in given:  # the weights have adapters of their own
        config = config.changed(lora={"initial": ""})
    model_spec(config.model.name)  # raises its error before ranks wait for each other
    degrees, train = config.degrees(world_size), config.train
    ranks = degrees["dp_replicate"] * degrees["dp_shard"]
    one_each = train.micro_batch * ranks * config.parallel.pp  # no step is taken
    train = train.model_copy(update={"global_batch": one_each})
    return without_choices(config.model_copy(update={"train": train})).config


def _check_effect(keys: Iterable[str]) -> None:
    """Raise ConfigError if a key acts on training alone."""
    idle = [key for key in keys if "." in key and not key.startswith(_ACTING) and key not in _KEYS]
    if idle:
        raise ConfigError(f"{', '.join(sorted(idle))}: no effect without training; leave it out")


def _config_file(weights: str) -> Path | None:
    """Return config.toml of the weights' run; None: the weights are a Hugging Face folder."""
    where = location(weights)
    if isinstance(where, Path) and is_file(where / CONFIG):
        return None
    checkpoint = find_weights(where, "a Hugging Face folder (with config.json) nor ")
    if (found := config_of_run(checkpoint)) is not None:
        return found
    raise CheckpointError(
        f"{weights} has no run with a config.toml; name a config with --config FILE"
    )


def load(config: RunConfig, place: Place, validation: bool, average: bool = False) -> Evaluation:
    """Build the model of a config and load `checkpoint.initial`; all ranks call it together.

    Args:
        validation: whether to open the data and its validation sets.
        average: load the averages of the weights (`optim.ema`).
    Raises:
        ConfigError, CheckpointError, DataError: as at the start of a run.
    """
    setup = set_up_model(config, place, starts=False)
    tokenizer = open_tokenizer(config, setup.config)
    initial = replace(open_weights(config, setup.config, tokenizer), average=average)
    sets = open_sets(config, setup.config, tokenizer, place) if validation else {}
    group = host_group(config.parallel.timeout_seconds)
    mesh = build_mesh(config, place.world_size, place.device.type)
    builder = ModelBuilder(config, setup.measured(config, place, group), mesh)
    model = builder.build()
    load_initial(initial, StoredModel(model.applied), config.checkpoint.verify, group, group)
    tokens = RankTokens(mesh, builder.context, builder.setup)
    return Evaluation(config, model, tokens, tokenizer, sets)
