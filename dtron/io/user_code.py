"""Import of objects that a config names as MODULE:NAME: code of the user."""

import importlib
import os
import sys
import traceback
from types import ModuleType
from typing import Any

from dtron.errors import ConfigError, nearest, shorten


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
