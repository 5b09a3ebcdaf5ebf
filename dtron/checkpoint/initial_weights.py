"""Initial weights of a run: from a Hugging Face folder or a checkpoint of dtron.

Each rank reads only its shards, which `torch.distributed.checkpoint` plans for any layout.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex

from dtron.checkpoint.dcp_storage import ShardReader, StoredReader, tensor_metadata
from dtron.checkpoint.find import check_agreement, check_content, find_weights
from dtron.checkpoint.metadata import CheckpointMetadata, read_metadata
from dtron.checkpoint.stored_model import StoredModel
from dtron.config import Data, Lora
from dtron.data.tokenizer import Tokenizer, load_tokenizer
from dtron.errors import CheckpointError, ConfigError
from dtron.io.filesystem import Location, is_file, location
from dtron.io.user_code import is_imported
from dtron.lora.adapters import ADAPTERS
from dtron.lora.dora import start_magnitudes
from dtron.lora.peft import PeftFolder
from dtron.models import hf_folder, model_config, model_spec
from dtron.models.config import DecoderConfig
from dtron.models.hf import differences
from dtron.models.hf_weights import CONFIG, HFFolder

INITIAL = "initial"
"""Value of `model.size`: take the shape from `checkpoint.initial`."""


@dataclass(frozen=True)
class InitialWeights:
    """Location of initial weights, and the config of their model."""

    path: Location
    name: str
    """`model.name` of the family."""
    config: DecoderConfig
    folder: HFFolder | None
    """The open Hugging Face folder; None: a checkpoint of dtron."""
    lora: Lora = Lora()
    """Adapters of the checkpoint; `rank` is 0 without adapters."""
    adapter: PeftFolder | None = None
    """An open adapter in PEFT's format, loaded after the weights; None: none."""
    average: bool = False
    """Read the averages of the weights (`optim.ema`)."""

    def reader(self) -> dcp.StorageReader:
        """Return a reader of the weights for `dcp.load`."""
        if self.folder is None:
            return ShardReader(self.path, self.average)
        if self.average:
            raise ConfigError(f"--ema: {self.path} is a Hugging Face folder, which has no averages")
        return HuggingFaceReader(self.folder)


class HuggingFaceReader(StoredReader):
    """Reader of a folder of Hugging Face or PEFT for `dcp.load`; a tensor is stored in one part."""

    def __init__(self, folder: HFFolder | PeftFolder) -> None:
        self.folder = folder

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return the metadata of all tensors, under their names in checkpoints."""
        return Metadata(
            {
                f"model.{fqn}": tensor_metadata(self.folder.dtype(fqn), each.shape)
                for fqn, each in self.folder.ours.items()
            }
        )

    def part(self, index: MetadataIndex, region: tuple[slice, ...]) -> torch.Tensor:
        """Read a region of a tensor."""
        return self.folder.read(index.fqn.removeprefix("model."), region)


def open_initial(
    path: str | Location, zero_centered: bool = False, name: str = ""
) -> InitialWeights:
    """Open initial weights and read the config of their model.

    No custom model is imported but the one that `name` names.

    Args:
        path: a Hugging Face folder, a checkpoint, or a run.
        zero_centered: read norm weights of a Hugging Face folder as gamma - 1.
        name: `model.name`, for a Hugging Face folder of a custom model.
    Raises:
        CheckpointError: the path is none of these, or the folder is incomplete.
        ConfigError: see `model_spec`.
    """
    where = location(path)
    if isinstance(where, Path) and is_file(where / CONFIG):
        folder = hf_folder(where, zero_centered, name)
        return InitialWeights(where, folder.family, folder.config, folder)
    found = find_weights(where, "a Hugging Face folder (with config.json) nor ")
    metadata = read_metadata(found)
    model = dict(metadata.model)
    family = str(model.pop("name", ""))
    try:
        config = DecoderConfig.model_validate(model, strict=False)
        return InitialWeights(found, family, config, None, _lora_of(metadata))
    except ValueError as error:
        raise CheckpointError(
            f"{found}: its model is not supported by this version of dtron: {error}"
        ) from None


LORA_KEYS = ("lora.rank", "lora.alpha", "lora.rank_stabilized", "lora.dora", "lora.modules")
"""Keys that determine the adapters of a checkpoint, and what they add to the weights."""


def _lora_of(metadata: CheckpointMetadata) -> Lora:
    """Return the settings of a checkpoint's adapters. Raises ValueError: they are damaged."""
    found = {key: metadata.settings[key] for key in LORA_KEYS if key in metadata.settings}
    return Lora.model_validate({key.partition(".")[2]: value for key, value in found.items()})


def check_adapters(initial: InitialWeights, lora: Lora) -> None:
    """Check that a run has the adapters of a checkpoint. Raises CheckpointError with the fix."""
    if not initial.lora.rank:
        return
    where = f"checkpoint.initial = {str(initial.path)!r}"
    if not lora.rank:
        raise CheckpointError(
            f"{where} has adapters of lora.rank = {initial.lora.rank}, and this run has none; set "
            f"lora.rank={initial.lora.rank} to train them further, or merge them into the weights "
            "with dtron convert to-hf"
        )
    if lora.initial:
        raise CheckpointError(
            f"{where} has adapters, and lora.initial = {lora.initial!r} is another adapter; leave "
            "one of them out"
        )
    for key in (key.partition(".")[2] for key in LORA_KEYS):
        theirs = getattr(initial.lora, key)
        if getattr(lora, key) != theirs:
            fix = json.dumps(list(theirs) if isinstance(theirs, tuple) else theirs)
            raise CheckpointError(
                f"lora.{key} = {getattr(lora, key)!r}, but {where} has adapters of another one; "
                f"set lora.{key}={fix}"
            )


def load_initial(
    initial: InitialWeights,
    stored: StoredModel,
    verify: bool,
    everyone: dist.ProcessGroup,
    group: dist.ProcessGroup,
) -> None:
    """Load initial weights into a parallel model; all ranks call it together.

    Args:
        verify: whether to check the content of a checkpoint of dtron.
        everyone: CPU process group of all ranks.
        group: the same, for collectives that may wait for a disk.
    Raises:
        CheckpointError: ranks have found different checkpoints, or a tensor is missing or damaged.
    """
    check_agreement(initial.path, everyone)
    if verify and initial.folder is None:
        check_content(initial.path, group)
    absent = () if initial.lora.rank else ADAPTERS
    stored.load_weights(
        initial.reader(), initial.path, group, lambda name: not name.endswith(absent)
    )
    if not initial.lora.rank:
        start_magnitudes([stored.module])
    if (adapter := initial.adapter) is not None:
        reader = HuggingFaceReader(adapter)
        stored.load_weights(reader, adapter.path, group, lambda name: name.endswith(ADAPTERS))


_AS_GIVEN = "model.size=initial model.override= to take the model from there"


def check_same_model(initial: InitialWeights, name: str, config: DecoderConfig) -> None:
    """Check that weights fit this model. Raises CheckpointError with the keys to set."""
    if initial.name != name:
        raise CheckpointError(
            f"checkpoint.initial = {str(initial.path)!r} has the weights of model.name = "
            f"{initial.name}, not of {name}; set model.name={initial.name}, or {_AS_GIVEN}"
        )
    given = initial.config if config.mtp else initial.config.model_copy(update={"mtp": 0})
    unlike = differences(given, config)  # a run without MTP ignores these weights
    if initial.folder is None:
        kept = initial.config.norm_zero_centered
        if kept != config.norm_zero_centered:
            unlike.append(("norm_zero_centered", kept, config.norm_zero_centered))
    if unlike:
        wanted = " ".join(f"model.override.{key}={_toml(there)}" for key, there, _ in unlike)
        raise CheckpointError(
            f"checkpoint.initial = {str(initial.path)!r} is of another model; set {wanted}, or "
            f"{_AS_GIVEN}"
        )


def check_named(
    where: Location, name: str, named: str, fix: str, what: str = "is of the custom model"
) -> None:
    """Check that the user names a custom model, or data source, before it is imported.

    Neither a checkpoint nor the config of its run is trusted: they may not choose which code runs.

    Args:
        where: a checkpoint, or the config of its run.
        name: the model that it is of, or its data source.
        named: the name that the user gave; empty: none.
        fix: end of the error, without the name.
        what: what the place has of this name.
    Raises:
        ConfigError: the name is missing, or another one.
    """
    if is_imported(name) and named != name:
        raise ConfigError(
            f"{where} {what} {name}, whose code runs only if you name it; {fix}{name}"
        )


def config_of_run(checkpoint: Location) -> Path | None:
    """Return config.toml of a checkpoint's run; None: it is missing, or in a store."""
    found = checkpoint.parent.parent / "config.toml"
    return found if isinstance(found, Path) and is_file(found) else None


def model_settings(name: str, config: DecoderConfig) -> str:
    """Return the `model.*` settings of a model: the closest size, and the fields that differ."""
    sizes = model_spec(name).sizes
    unlike = {size: differences(config, model_config(name, size)) for size in sizes}
    size = min(unlike, key=lambda each: len(unlike[each]))
    words = [f"model.override.{key}={_toml(there)}" for key, there, _ in unlike[size]]
    return " ".join([f"model.name={name}", f"model.size={size}", *words])


def _toml(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


TOKENIZER = "tokenizer.json"
_PROBE = "Hello, world 1234! Grüße\n\n  def f(x): return x\t你好 🙂"
"""Text that tokenizers of different vocabularies encode differently."""


def fill_from_initial(values: dict[str, Any]) -> dict[str, Any]:
    """Set the keys that `checkpoint.initial` determines.

    These are the model, if `model.size` is "initial", and `data.tokenizer`, if it is not set.

    Args:
        values: nested values as read from TOML and the command line; not changed.
    Returns:
        The same values, or a copy with `model` and `data.tokenizer` set.
    Raises:
        ConfigError: `model.size` is "initial" without `checkpoint.initial`, or without the
            `model.name` of a checkpoint of a custom model.
        CheckpointError: the path has no model.
    """
    model, data = values.get("model", {}), values.get("data", {})
    path, by_initial = values.get("checkpoint", {}).get("initial", ""), model.get("size") == INITIAL
    if not path:
        if by_initial:
            raise ConfigError('model.size = "initial" needs checkpoint.initial')
        return values
    if by_initial:
        initial = open_initial(path, name=str(model.get("name", "")))
        check_named(initial.path, initial.name, str(model.get("name", "")), "set model.name=")
        override = {**initial.config.model_dump(mode="json"), **model.get("override", {})}
        size = next(iter(model_spec(initial.name).sizes))
        model = {**model, "name": initial.name, "size": size, "override": override}
    if "tokenizer" not in data and (tokenizer := tokenizer_setting(path)):
        data = {**data, "tokenizer": tokenizer}
    return {**values, "model": model, "data": data}


def tokenizer_setting(path: str | Location) -> str:
    """Return the value of `data.tokenizer` for a Hugging Face folder, a checkpoint or a run.

    Empty: unknown.
    """
    where = location(path)
    if isinstance(where, Path) and is_file(where / CONFIG):
        return str(where / TOKENIZER) if is_file(where / TOKENIZER) else ""
    metadata = read_metadata(find_weights(where, "a Hugging Face folder (with config.json) nor "))
    return str(metadata.settings.get("data.tokenizer", ""))


def check_tokenizer(initial: InitialWeights, tokenizer: Tokenizer, data: Data) -> None:
    """Check that the run's tokenizer gives the same ids as the tokenizer of the initial weights.

    Raises:
        ConfigError: the ids differ, or a Hugging Face folder has no tokenizer and data.tokenizer
            is "byte".
    """
    known = tokenizer_setting(initial.path)
    if not known and initial.folder is not None and data.tokenizer == "byte":
        raise ConfigError(
            f"checkpoint.initial = {str(initial.path)!r} has no {TOKENIZER}; set data.tokenizer to "
            "the model's, or checkpoint.allow_data_change=true to train on bytes"
        )
    if not known or known == data.tokenizer:
        return
    theirs = load_tokenizer(data.model_copy(update={"tokenizer": known}))
    if theirs.encode(_PROBE) != tokenizer.encode(_PROBE) or theirs.eos_id != tokenizer.eos_id:
        raise ConfigError(
            f"data.tokenizer = {data.tokenizer!r} is not the tokenizer of checkpoint.initial = "
            f"{str(initial.path)!r}; set data.tokenizer={known}, leave it out, or set "
            "checkpoint.allow_data_change=true to train with another tokenizer"
        )
