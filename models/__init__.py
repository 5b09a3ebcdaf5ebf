"""Models: plain unsharded modules, described by a row each in MODELS and built by `build_model`."""

if __name__ == "models":
    raise ImportError(
        "import dtron.models: the folder models/ is a package of dtron, not a top-level one"
    )

from collections.abc import Mapping
from typing import Any

from torch import nn

from dtron.errors import ConfigError, nearest
from dtron.models.attention import BACKENDS, Backend, choose_backend
from dtron.models.config import DecoderConfig, overridden
from dtron.models.deepseek_v3 import DEEPSEEK_V3
from dtron.models.gpt import GPT
from dtron.models.gpt_oss import GPT_OSS
from dtron.models.llama import LLAMA
from dtron.models.mixtral import MIXTRAL
from dtron.models.qwen3 import QWEN3
from dtron.models.qwen3_moe import QWEN3_MOE
from dtron.models.spec import ModelSpec

__all__ = [
    "BACKENDS",
    "MODELS",
    "Backend",
    "DecoderConfig",
    "ModelSpec",
    "build_model",
    "choose_backend",
    "model_config",
]

MODELS: dict[str, ModelSpec] = {
    spec.name: spec for spec in (LLAMA, QWEN3, GPT, MIXTRAL, QWEN3_MOE, DEEPSEEK_V3, GPT_OSS)
}


def model_config(name: str, size: str, override: Mapping[str, Any] | None = None) -> DecoderConfig:
    """The config of one size of one model, with the user's `[model.override]` applied.

    Raises:
        ConfigError: an unknown model, size or field, or a value that is not legal.
    """
    if name not in MODELS:
        raise ConfigError(
            f"model.name = {name} is not known{nearest(name, MODELS)}; use {', '.join(MODELS)}"
        )
    sizes = MODELS[name].sizes
    if size not in sizes:
        raise ConfigError(
            f"model.size = {size} is not a size of {name}{nearest(size, sizes)}; "
            f"use {', '.join(sizes)}"
        )
    return overridden(sizes[size], override or {})


def build_model(name: str, config: DecoderConfig, attention: Backend) -> nn.Module:
    """An unsharded model on the current default device (`with torch.device("meta"):`).

    Weights are uninitialised; MODELS[name].init_parameter fills each by its name.

    Args:
        name: a row of MODELS.
        config: of `model_config`.
        attention: of `choose_backend`.
    Raises:
        ConfigError: the model drops attention weights and the backend cannot.
    """
    if config.attention_dropout and not attention.dropout:
        able = [row.name for row in BACKENDS.values() if row.dropout]
        raise ConfigError(
            f"model.attention = {attention.name} cannot drop attention weights "
            f"(model.override.attention_dropout = {config.attention_dropout}); "
            f"use {' or '.join(able)}"
        )
    return MODELS[name].build(config, attention)
