"""Unsharded models: plain nn.Modules, one row of MODELS per family, built by `build_model`."""

if __name__ == "models":
    raise ImportError("models/ is not a top-level package; use import dtron.models")

import math
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dtron.errors import CheckpointError, ConfigError, nearest
from dtron.io.safetensors_file import Region
from dtron.io.user_code import check_unique, registered
from dtron.models.attention import BACKENDS, AttentionNeeds, Backend, choose_backend
from dtron.models.bert import BERT
from dtron.models.config import DecoderConfig, overridden
from dtron.models.custom import GROUP, custom_spec
from dtron.models.deepseek_v3 import DEEPSEEK_V3
from dtron.models.gemma3 import GEMMA3
from dtron.models.gemma4 import GEMMA4
from dtron.models.gpt import GPT
from dtron.models.gpt_oss import GPT_OSS
from dtron.models.hf import HuggingFace
from dtron.models.hf_export import HFExport
from dtron.models.hf_weights import HFFamily, HFFolder
from dtron.models.llama import LLAMA
from dtron.models.llava import LLAVA
from dtron.models.mixtral import MIXTRAL
from dtron.models.nemotron_h import NEMOTRON_H
from dtron.models.qwen3 import QWEN3
from dtron.models.qwen3_5 import QWEN3_5
from dtron.models.qwen3_5_moe import QWEN3_5_MOE
from dtron.models.qwen3_moe import QWEN3_MOE
from dtron.models.spec import ModelSpec
from dtron.models.t5 import T5

__all__ = [
    "BACKENDS",
    "MODELS",
    "AttentionNeeds",
    "Backend",
    "DecoderConfig",
    "ModelSpec",
    "build_model",
    "choose_backend",
    "fill_model",
    "from_hf",
    "hf_folder",
    "model_config",
    "model_spec",
    "to_hf",
]

MODELS: dict[str, ModelSpec] = {
    spec.name: spec
    for spec in (
        *(LLAMA, QWEN3, QWEN3_5, GEMMA3, GEMMA4, GPT),
        *(MIXTRAL, QWEN3_MOE, QWEN3_5_MOE, DEEPSEEK_V3, GPT_OSS, NEMOTRON_H),
        *(BERT, LLAVA, T5),
    )
}


def model_spec(name: str) -> ModelSpec:
    """Return the family of a `model.name`.

    Args:
        name: a key of MODELS, the name of an entry point of group `dtron.models`, or MODULE:NAME.
    Raises:
        ConfigError: there is no such family, several have the name, or its import fails.
    """
    check_unique("model.name", name, GROUP, name in MODELS)
    if spec := MODELS.get(name) or custom_spec(name):
        return spec
    known = [*MODELS, *registered(GROUP)]
    raise ConfigError(
        f"model.name = {name} is not known{nearest(name, known)}; use {', '.join(known)}, or "
        "MODULE:NAME for a ModelSpec of your own module"
    )


def model_config(name: str, size: str, override: Mapping[str, Any] | None = None) -> DecoderConfig:
    """Return the config of one model size, with the user's `[model.override]` applied.

    Raises:
        ConfigError: unknown model, size or field, or illegal value.
    """
    sizes = model_spec(name).sizes
    if size not in sizes:
        raise ConfigError(
            f"model.size = {size} is not a size of {name}{_nearest_size(size, sizes)}; "
            f"use {', '.join(sizes)}"
        )
    return overridden(sizes[size], override or {})


_SIZE = re.compile(r"(\d+(?:\.\d+)?)([mbt])", re.IGNORECASE)
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}


def _nearest_size(size: str, sizes: Iterable[str]) -> str:
    """Suggest the size with the nearest parameter count, such as 8b for 7b, or a similar name."""
    numbers = {name: n for name in sizes if (n := _number(name))}
    if not (wanted := _number(size)) or not numbers:
        return nearest(size, sizes)
    close = min(numbers, key=lambda name: abs(math.log(numbers[name] / wanted)))
    return f"; did you mean {close}?"


def _number(size: str) -> float:
    """Parse the parameter count in a size's name, such as 8e9 for 8b; 0: the name has no count."""
    found = _SIZE.search(size)
    return float(found[1]) * _UNITS[found[2].lower()] if found else 0.0


def build_model(name: str, config: DecoderConfig, attention: Backend) -> nn.Module:
    """Build an unsharded model on the current default device (`with torch.device("meta"):`).

    Parameters are uninitialised; `model_spec(name).init_parameter` initialises each of them.

    Args:
        name: see `model_spec`.
        config: from `model_config`.
        attention: from `choose_backend`.
    Raises:
        ConfigError: the model has attention dropout, which the backend does not support.
    """
    if config.attention_dropout and not attention.dropout:
        able = [row.name for row in BACKENDS.values() if row.dropout]
        raise ConfigError(
            f"model.attention = {attention.name} does not support attention dropout "
            f"(model.override.attention_dropout = {config.attention_dropout}); "
            f"use {' or '.join(able)}"
        )
    return model_spec(name).build(config, attention)


def hf_folder(path: str | Path, zero_centered: bool | None = None, name: str = "") -> HFFolder:
    """Open a folder in Hugging Face's format and check that the model is in MODELS, or is `name`.

    Args:
        zero_centered: see `HFFolder`.
        name: see `model_spec`; this family is preferred to others of its model_type.
    Raises:
        CheckpointError: see `HFFolder`.
        ConfigError: see `model_spec`.
    """
    specs = [*MODELS.values(), *([model_spec(name)] if name else [])]
    families = {
        spec.hf.model_type: HFFamily(spec.name, spec.hf, _on_meta(spec))
        for spec in specs
        if spec.hf is not None
    }
    return HFFolder(Path(path).expanduser(), families, zero_centered)


@torch.no_grad()
def from_hf(
    path: str | Path,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    attention: str = "auto",
    name: str = "",
) -> nn.Module:
    """Load the unsharded model of a Hugging Face folder, in evaluation mode.

        logits = from_hf("Qwen3-0.6B")(tokens)      # tokens int64 (B, T) -> (B, T, V)

    Args:
        path: a folder with config.json and safetensors files.
        dtype: dtype of all parameters; None: their stored dtypes. `expert_bias` stays float32.
        attention: "auto" or a key of BACKENDS.
        name: see `hf_folder`; needed for a custom model only.
    Raises:
        CheckpointError: the folder does not hold a complete model of MODELS; the message names the
            key or tensor.
        ConfigError: the attention backend cannot run this model on this device.
    """
    folder, device = hf_folder(path, name=name), torch.device(device)
    config, first = folder.config, next(iter(folder.ours))
    needs = AttentionNeeds.of(config, device.type, dtype or folder.dtype(first))
    backend = choose_backend(attention, needs)
    with torch.device("meta"):
        model = build_model(folder.family, config, backend)
    values = ((fqn, folder.read(fqn).to(folder.dtype(fqn, dtype))) for fqn in folder.ours)
    return fill_model(model, config, values, device)


@torch.no_grad()
def fill_model(
    model: nn.Module,
    config: DecoderConfig,
    values: Iterable[tuple[str, Tensor]],
    device: torch.device,
) -> nn.Module:
    """Replace all parameters and saved buffers of a model on meta; return it for evaluation.

    Args:
        values: (FQN, tensor) of each, a tied weight once.
    """
    for fqn, value in values:
        module, _, attribute = fqn.rpartition(".")
        owner, value = model.get_submodule(module), value.to(device)
        is_parameter = isinstance(getattr(owner, attribute), nn.Parameter)
        setattr(owner, attribute, nn.Parameter(value) if is_parameter else value)
    shared = [*(["head"] if config.tied else []), *(["mtp_embed"] if config.mtp else [])]
    for copy in shared:
        model.get_submodule(copy).weight = model.get_submodule("embed").weight
    return model.to(device).eval()  # moves unsaved buffers too, such as router counts


@torch.no_grad()
def to_hf(
    model: nn.Module,
    path: str | Path,
    *,
    name: str,
    dtype: torch.dtype | None = None,
    file_bytes: int = 5 * 10**9,
) -> None:
    """Write an unsharded model for transformers: config.json and safetensors files.

    Args:
        model: from `build_model` or `from_hf`.
        path: a folder that does not exist yet.
        name: see `model_spec`.
        dtype: dtype in the files; None: the dtype of each parameter.
        file_bytes: maximum size of a file, in bytes.
    Raises:
        CheckpointError: the folder exists, or transformers does not support the model.
    """
    hf, folder = hf_of(name), Path(path).expanduser()
    if folder.exists():
        raise CheckpointError(f"{folder} already exists; use another folder")
    state = model.state_dict()

    def get(fqn: str, region: Region) -> Tensor:
        return state[fqn][region]

    config = model.config
    assert isinstance(config, DecoderConfig), "the model keeps its config as an attribute"
    export = HFExport(hf, config, model, lambda fqn: dtype or state[fqn].dtype, get, file_bytes)
    folder.mkdir(parents=True)
    export.write(folder, range(len(export.files)))
    export.write_json(folder)


def hf_of(name: str) -> HuggingFace:
    """Return the Hugging Face translation tables of a model family.

    Raises:
        ConfigError: see `model_spec`.
        CheckpointError: the family has no translation tables.
    """
    if (hf := model_spec(name).hf) is None:
        raise CheckpointError(
            f"model.name = {name} has no names in Hugging Face's format; set hf of its ModelSpec"
        )
    return hf


def _on_meta(spec: ModelSpec) -> Callable[[DecoderConfig], nn.Module]:
    return lambda config: spec.build(config, BACKENDS["math"])
