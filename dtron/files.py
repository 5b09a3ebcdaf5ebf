"""Small files: read with errors a user can act on, written so that the disk has them."""

import json
import os
from pathlib import Path
from typing import Any

from dtron.errors import CheckpointError


def read_json(path: Path) -> dict[str, Any]:
    """An object in a file. Raises CheckpointError."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content


def plain_name(name: Any, where: Path) -> str:
    """A file's name in an index, which must not lead out of the folder. Raises CheckpointError."""
    plain = isinstance(name, str) and Path(name).name == name and not {"\\", "\0"} & set(name)
    if not plain or name in ("", ".", ".."):
        raise CheckpointError(f"{where} names a file outside of its folder: {name!r}")
    return name


def write_synced(path: Path, text: str) -> None:
    """Write a file and wait until the disk has it. Raises OSError."""
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def sync_directory(path: Path) -> None:
    """Wait until the names in a directory are on the disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
