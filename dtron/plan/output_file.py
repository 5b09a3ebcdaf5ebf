"""Files that options of commands name, such as `--page FILE`."""

import os
from pathlib import Path

from dtron.errors import ConfigError, cause_of


def check_target(option: str, path: Path | None) -> None:
    """Raise ConfigError if the file of an option cannot be written; called before long work."""
    if path is None:
        return
    if not path.parent.is_dir():
        raise ConfigError(f"{option} {path}: there is no folder {path.parent}; create it first")
    if path.is_dir():
        raise ConfigError(f"{option} {path} is a folder; name a file in it")
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"{option} {path} cannot be written; name another file")


def write_target(option: str, path: Path, text: str) -> None:
    """Write the file of an option. Raises ConfigError: it cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"{option} {path} cannot be written: {cause_of(error, path)}; name another file"
        ) from None
