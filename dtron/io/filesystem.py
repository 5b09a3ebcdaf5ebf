"""Small files on a disk or in an object store: reading with clear errors, durable writing."""

import contextlib
import os
import shutil
from pathlib import Path
from typing import Any

from dtron.errors import CheckpointError, ConfigError, cause_of
from dtron.io.remote_path import Remote, UnreachableError
from dtron.io.untrusted import JSON_BYTES, parse, read_bytes

Location = Path | Remote
"""Path of a file or folder, on a disk or in an object store."""


def location(text: str | Location) -> Location:
    """Convert a path or URL of a config. Raises ConfigError: the URL cannot be used."""
    if isinstance(text, str) and "://" in text:
        return Remote.of(text)
    try:
        return text if isinstance(text, Remote) else Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{str(text)!r}: {error}") from None


def read(path: Location, limit: int = JSON_BYTES) -> bytes:
    """Read a file of at most `limit` bytes. Raises OSError: also if it is not a regular file."""
    return path.read_whole(limit) if isinstance(path, Remote) else read_bytes(path, limit)


def read_json(path: Location, limit: int = JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object of at most `limit` bytes. Raises CheckpointError; UnreachableError."""
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
    """Check a file name from an index: it must not leave the folder. Raises CheckpointError."""
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
    """Write or replace a file atomically: readers see all or nothing of it. Raises OSError."""
    if isinstance(path, Remote):
        path.write_bytes(text.encode())
        return
    partial = path.with_name(path.name + ".partial")
    write_synced(partial, text)
    os.replace(partial, path)
    sync_directory(path.parent)


def sync_directory(path: Location) -> None:
    """Wait until the entries of a directory are on the disk. Raises OSError."""
    if isinstance(path, Remote):
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def is_file(path: Location) -> bool:
    """Whether a path exists and is a file. Raises CheckpointError: access is denied."""
    try:
        return path.is_file()
    except OSError as error:
        raise CheckpointError(f"{path}: {cause_of(error, path)}") from None


def listed(folder: Location) -> Location:
    """Return a folder of a store with a snapshot of its content, which saves requests.

    Any other folder is returned as it is. Raises UnreachableError.
    """
    return folder.listed() if isinstance(folder, Remote) else folder


def names_in(folder: Location) -> list[str]:
    """Return the names in a folder; none if it does not exist. Raises OSError."""
    if isinstance(folder, Remote):
        return folder.names()
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def size_of(path: Location) -> int:
    """Return the size of a file in bytes. Raises OSError."""
    return path.size() if isinstance(path, Remote) else path.stat().st_size


def make_folder(path: Location) -> None:
    """Make a new folder; does nothing in a store, which has none. Raises OSError."""
    if isinstance(path, Path):
        path.mkdir(parents=True)


def dangling_link(path: Path) -> Path | None:
    """The link to nothing that a path is, or leads through; None: there is none."""
    return next((p for p in (path, *path.parents) if p.is_symlink() and not p.exists()), None)


def mount_of(path: Location) -> Path | None:
    """Return the mount point of the file system of a path, existing or not; None for a store."""
    if isinstance(path, Remote):
        return None
    path = path.resolve()
    return next(folder for folder in (path, *path.parents) if os.path.ismount(folder))


def check_mounted(path: Location, mount: Path | None) -> None:
    """Check that the file system of a path is still mounted at `mount`. Raises OSError.

    Below an unmounted folder, files would be written to another disk.
    """
    if mount_of(path) != mount:
        raise OSError(f"its file system is no longer mounted at {mount}")


def _raise_unless_missing(_act: Any, _path: str, info: tuple[Any, BaseException, Any]) -> None:
    if not isinstance(info[1], FileNotFoundError):  # another process deletes it too
        raise info[1]


def delete(*paths: Location) -> None:
    """Delete files, or folders with their content, of a disk or of one store. Raises OSError."""
    remote = [path for path in paths if isinstance(path, Remote)]
    if remote:
        remote[0].delete(*remote[1:])
    for path in paths:
        if isinstance(path, Path):
            _delete_local(path)


def _delete_local(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, onerror=_raise_unless_missing)
    else:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
