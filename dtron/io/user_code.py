"""Import of objects that a config names as MODULE:NAME or by an entry point: code of the user."""

import functools
import importlib
import os
import sys
import traceback
from importlib.metadata import EntryPoint, entry_points
from types import ModuleType
from typing import Any

from dtron.errors import ConfigError, nearest, shorten

_KINDS = {"model.name": "a model", "optim.name": "an optimizer"}


@functools.cache  # metadata of all packages is read; a run asks often
def registered(group: str) -> dict[str, tuple[EntryPoint, ...]]:
    """Return the entry points of installed packages by short name.

    Args:
        group: such as `dtron.models`, of entry points `SHORT_NAME = "MODULE:NAME"`.
    """
    found: dict[str, tuple[EntryPoint, ...]] = {}
    for entry in entry_points(group=group):
        found[entry.name] = (*found.get(entry.name, ()), entry)
    return found


def is_imported(name: str) -> bool:
    """Whether a name is MODULE:NAME, so that using it runs code of the user."""
    return ":" in name


def check_unique(key: str, name: str, group: str, is_built_in: bool) -> None:
    """Raise ConfigError if several packages, or dtron and a package, register this name."""
    entries = registered(group).get(name, ())
    if len(entries) + is_built_in > 1:
        owners = [*(["dtron"] if is_built_in else []), *map(_package, entries)]
        raise ConfigError(
            f"{key} = {name} is {_KINDS[key]} of {' and of '.join(owners)}; "
            f'use {key} = "{" or ".join(entry.value for entry in entries)}", or uninstall the '
            "package that you do not use"
        )


def import_custom(key: str, name: str, group: str) -> tuple[str, Any] | None:
    """Import MODULE:NAME, or what a package registers by this short name.

    Args:
        key: key of the config whose value is the name.
        group: group of entry points `SHORT_NAME = "MODULE:NAME"`.
    Returns:
        (key and value, with which an error about the object begins; the object). None: no package
        registers this name.
    Raises:
        ConfigError: as `import_object`.
    """
    setting, target = f"{key} = {name}", name
    if not is_imported(name):
        if not (entries := registered(group).get(name)):
            return None
        target = entries[0].value
        setting += f" (entry point {target} of {_package(entries[0])})"
    return setting, import_object(setting, target)


def _package(entry: EntryPoint) -> str:
    return f"package {entry.dist.name}" if entry.dist else "an installed package"


def import_object(setting: str, name: str) -> Any:
    """Import MODULE:NAME; modules in the working directory are found too.

    Args:
        setting: key and value, with which an error begins.
        name: MODULE:NAME.
    Raises:
        ConfigError: the name has another form, the module is missing or raises an error, or it has
            no such attribute.
    """
    module, _, attribute = name.partition(":")
    if not all(part.isidentifier() for part in (*module.split("."), attribute)):
        raise ConfigError(f"{setting} is not MODULE:NAME; write it as my_package.my_module:NAME")
    found = _import(setting, module)
    if not hasattr(found, attribute):
        hint = nearest(attribute, vars(found)) or "; use a name that the module defines"
        raise ConfigError(f"{setting}: module {module} has no attribute {attribute!r}{hint}")
    return getattr(found, attribute)


def _import(setting: str, module: str) -> ModuleType:
    try:
        here = os.getcwd()  # torchrun's script has its own folder on the path instead
        if here not in sys.path:
            sys.path.append(here)  # for good: functions of the module may import others
        return importlib.import_module(module)
    except (Exception, SystemExit) as error:
        if isinstance(error, ModuleNotFoundError) and f"{module}.".startswith(f"{error.name}."):
            raise ConfigError(
                f"{setting}: there is no module {error.name}; install its package, or start in the "
                "folder that has it"
            ) from None
        where = _line_of(traceback.extract_tb(error.__traceback__))
        text = shorten(" ".join(str(error).split()), 300)
        raise ConfigError(
            f"{setting}: the import of {module} raised {type(error).__name__}: {text} "
            f"({where.filename}, line {where.lineno}); fix the module"
        ) from error


def _line_of(frames: traceback.StackSummary) -> traceback.FrameSummary:
    """Return the last line of the module that was being imported, not of what it has called."""
    files = [frame.filename for frame in frames if frame.name == "<module>"]
    inside = [frame for frame in frames if files and frame.filename == files[-1]]
    return inside[-1] if inside else frames[-1]
