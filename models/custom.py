"""Model families outside of dtron: entry points of installed packages, and MODULE:NAME."""

import functools
from collections.abc import Sequence
from dataclasses import replace
from importlib.metadata import EntryPoint, entry_points

from dtron.errors import ConfigError
from dtron.io.user_code import import_object
from dtron.models.config import DecoderConfig
from dtron.models.spec import ModelSpec

GROUP = "dtron.models"
"""Group of entry points `SHORT_NAME = "MODULE:NAME"`."""


@functools.cache  # metadata of all packages is read; a run asks often
def registered() -> dict[str, tuple[EntryPoint, ...]]:
    """Return the entry points of installed packages by short name."""
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in entry_points(group=GROUP):
        found[entry.name] = (*found.get(entry.name, ()), entry)
    return found


def check_unique(name: str, is_built_in: bool) -> None:
    """Raise ConfigError if several packages, or dtron and a package, have a model of this name."""
    entries = registered().get(name, ())
    if len(entries) + is_built_in > 1:
        owners = [*(["dtron"] if is_built_in else []), *map(_package, entries)]
        raise ConfigError(
            f"model.name = {name} is a model of {' and of '.join(owners)}; use model.name = "
            f'"{" or ".join(entry.value for entry in entries)}", or uninstall the package that '
            "you do not use"
        )


def custom_spec(name: str) -> ModelSpec | None:
    """Import the family of a `model.name` outside of dtron; None: no package registers this name.

    Its `name` is replaced by `model.name`.

    Raises:
        ConfigError: the import fails, or the object is not a ModelSpec with sizes.
    """
    setting, target = f"model.name = {name}", name
    if ":" not in name:
        if not (entries := registered().get(name)):
            return None
        target = entries[0].value
        setting += f" (entry point {target} of {_package(entries[0])})"
    found = import_object(setting, target)
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


def is_imported(name: str) -> bool:
    """Whether a model name is MODULE:NAME, so that using it runs code of the user."""
    return ":" in name


def _package(entry: EntryPoint) -> str:
    return f"package {entry.dist.name}" if entry.dist else "an installed package"
