"""Model families outside of dtron: entry points of installed packages, and MODULE:NAME."""

from collections.abc import Sequence
from dataclasses import replace

from dtron.errors import ConfigError
from dtron.io.user_code import import_custom
from dtron.models.config import DecoderConfig
from dtron.models.spec import ModelSpec

GROUP = "dtron.models"
"""Group of entry points `SHORT_NAME = "MODULE:NAME"`."""


def custom_spec(name: str) -> ModelSpec | None:
    """Import the family of a `model.name` outside of dtron; None: no package registers this name.

    Its `name` is replaced by `model.name`.

    Raises:
        ConfigError: the import fails, or the object is not a ModelSpec with sizes.
    """
    if (imported := import_custom("model.name", name, GROUP)) is None:
        return None
    setting, found = imported
    if not isinstance(found, ModelSpec):
        raise ConfigError(
            f"{setting} is a {type(found).__name__}, not a ModelSpec; name a "
            "dtron.models.ModelSpec of the module"
        )
    sizes: Sequence[object] = list(found.sizes.values())
    if not sizes or not all(isinstance(size, DecoderConfig) for size in sizes):
        raise ConfigError(
            f"{setting}: ModelSpec.sizes needs at least one size, each a DecoderConfig; use "
            'sizes={"debug": DecoderConfig(...)}'
        )
    return replace(found, name=name)
