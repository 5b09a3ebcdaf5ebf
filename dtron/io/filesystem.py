"""Small files, on a disk or in a store: read with errors a user can act on, written to last."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

from dtron.errors import CheckpointError, ConfigError, cause_of
from dtron.io.remote_path import Remote, UnreachableError
from dtron.io.untrusted import JSON_BYTES, parse, read_bytes

Location = Path | Remote
"""Where a file or a folder is."""


def location(text: str | Location) -> Location:
    """What a path or a URL of a config names. Raises ConfigError: the URL cannot be used."""
    if isinstance(text, str) and "://" in text:
        return Remote.of(text)
    try:
        return text if isinstance(text, Remote) else Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{str(text)!r}: {error}") from None


def read(path: Location, limit: int = JSON_BYTES) -> bytes:
    """A whole file of at most `limit` bytes. Raises OSError: also where it is no regular file."""
    return path.read_whole(limit) if isinstance(path, Remote) else read_bytes(path, limit)


def read_json(path: Location, limit: int = JSON_BYTES) -> dict[str, Any]:
    """An object in a file of at most `limit` bytes. Raises CheckpointError; UnreachableError."""
    try:
        content = parse(read(path, limit))
    except UnreachableError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {cause_of(error, path)}") from None
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} is not a JSON object")
    return content


def plain_name(name: Any, where: Location) -> str:
    """A file's name in an index, which must not lead out of the folder. Raises CheckpointError."""
    plain = isinstance(name, str) and Path(name).name == name and not {"\\", "\0"} & set(name)
    if not plain or name in ("", ".", ".."):
        raise CheckpointError(f"{where} names a file outside of its folder: {name!r}")
    return name


def write_synced(path: Location, text: str) -> None:
    """Write a file and wait until the disk has it. Raises OSError."""
    if isinstance(path, Remote):
        path.write_bytes(text.encode())
        return
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Location, text: str) -> None:
    """Write or replace a file so that it is never seen in part. Raises OSError."""
    if isinstance(path, Remote):
        path.write_bytes(text.encode())
        return
    partial = path.with_name(path.name + ".partial")
    write_synced(partial, text)
    os.replace(partial, path)
    sync_directory(path.parent)


def sync_directory(path: Location) -> None:
    """Wait until the names in a directory are on the disk. Raises OSError."""
    if isinstance(path, Remote):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_file(path: Location) -> bool:
    """Whether it is there and no folder. Raises CheckpointError: it may not be looked at."""
    try:
        return path.is_file()
    except OSError as error:
        raise CheckpointError(f"{path}: {cause_of(error, path)}") from None


def listed(folder: Location) -> Location:
    """A folder of a store with a snapshot of what is in it, which saves requests; another folder
    itself. Raises UnreachableError."""
    return folder.listed() if isinstance(folder, Remote) else folder


def names_in(folder: Location) -> list[str]:
    """What is in a folder; nothing if it is not there. Raises OSError."""
    if isinstance(folder, Remote):
        return folder.names()
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def size_of(path: Location) -> int:
    """Bytes of a file. Raises OSError."""
    return path.size() if isinstance(path, Remote) else path.stat().st_size


def make_folder(path: Location) -> None:
    """A new folder; stores have none. Raises OSError."""
    if isinstance(path, Path):
        path.mkdir(parents=True)


def mount_of(path: Location) -> Path | None:
    """Where the file system is mounted that holds a path, or will hold it; None for a store."""
    if isinstance(path, Remote):
        return None
    path = path.resolve()
    return next(folder for folder in (path, *path.parents) if os.path.ismount(folder))


def check_mounted(path: Location, mount: Path | None) -> None:
    """Check that a path still is where it was at a run's start: below an unmounted folder files
    would go to another disk. Raises OSError."""
    if mount_of(path) != mount:
        raise OSError(f"its file system is no longer mounted at {mount}")


def _still_there(_act: Any, _path: str, info: tuple[Any, BaseException, Any]) -> None:
    if not isinstance(info[1], FileNotFoundError):  # somebody else deletes it too
        raise info[1]


def delete(*paths: Location) -> None:
    """Delete files, or folders with all that is in them, of a disk or of one store. Raises
    OSError."""
    remote = [path for path in paths if isinstance(path, Remote)]
    if remote:
        remote[0].delete(*remote[1:])
    for path in paths:
        if isinstance(path, Path):
            _delete_local(path)


def _delete_local(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, onerror=_still_there)
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
