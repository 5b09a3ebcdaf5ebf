"""Read and write small files on a disk or in an object store, durably and with clear errors."""

import contextlib
import errno
import os
import shutil
import stat
import uuid
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

from dtron.errors import CheckpointError, ConfigError, cause_of
from dtron.io.remote_path import Remote, UnreachableError
from dtron.io.untrusted import JSON_BYTES, parse, read_bytes

Location = Path | Remote
"""Path of a file or folder, on a disk or in an object store."""
PARTIAL_SUFFIX = r"\.[0-9a-f]{32}\.partial"
"""Regular expression of the suffix of a file's name until the file is complete."""
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_OWN = os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def location(text: str | Location) -> Location:
    """Convert a path or URL of a config. Raises ConfigError: the path or URL cannot be used."""
    if isinstance(text, str) and "://" in text:
        return Remote.of(text)
    try:
        return text if isinstance(text, Remote) else Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{str(text)!r}: {error}") from None


def read(path: Location, limit: int = JSON_BYTES) -> bytes:
    """Read a file of at most `limit` bytes. Raises OSError: also if the file is not regular."""
    return path.read_whole(limit) if isinstance(path, Remote) else read_bytes(path, limit)


def read_json(path: Location, limit: int = JSON_BYTES) -> dict[str, Any]:
    """Read a JSON object of at most `limit` bytes.

    Raises:
        CheckpointError: the file cannot be read or is not a JSON object.
        UnreachableError: the object store does not answer or denies access.
    """
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
    """Return a file name from an index. Raises CheckpointError: the name leaves the folder."""
    plain = isinstance(name, str) and Path(name).name == name and not {"\\", "\0"} & set(name)
    if not plain or name in ("", ".", ".."):
        raise CheckpointError(f"{where} names a file outside of its folder: {name!r}")
    return name


def write_atomically(path: Location, text: str | Iterable[str], synced: bool = True) -> None:
    """Write or replace a file atomically: readers see the old or the new file.

    On a disk, the file is written under a new random name and then renamed to `path`. A link at
    `path` is replaced, not followed.

    Args:
        text: the content, or its parts in order.
        synced: wait until the file is on the disk.
    Raises:
        OSError: the file cannot be written.
    """
    parts = [text] if isinstance(text, str) else text
    if isinstance(path, Remote):
        path.write_bytes("".join(parts).encode())
        return
    partial = path.with_name(f"{path.name}.{uuid.uuid4().hex}.partial")
    try:
        with os.fdopen(os.open(partial, _NEW, 0o666), "w", encoding="utf-8") as file:
            file.writelines(parts)
            file.flush()
            if synced:
                os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.strerror:  # the error names the partial file
            raise OSError(error.errno, error.strerror, str(path)) from None
        raise
    if synced:
        sync_directory(path.parent)


def open_own(path: Path, flags: int) -> IO[bytes]:
    """Open or create a regular file of a run, without buffering; a link is not followed.

    Args:
        flags: flags for `os.open`, such as `os.O_RDWR | os.O_APPEND`.
    Raises:
        OSError: also if the path is a link, a FIFO or another special file.
    """
    descriptor = os.open(path, flags | _OWN, 0o666)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    mode = {os.O_RDONLY: "rb", os.O_WRONLY: "wb", os.O_RDWR: "r+b"}[flags & os.O_ACCMODE]
    return os.fdopen(descriptor, mode, buffering=0)


def is_link(path: Location) -> bool:
    """Whether a path is a symbolic link."""
    return isinstance(path, Path) and path.is_symlink()


def sync_directory(path: Location) -> None:
    """Wait until the entries of a directory are on the disk; no-op in an object store.

    Raises OSError: the directory cannot be opened or synchronized.
    """
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

    Any other folder is returned as it is.
    Raises UnreachableError: the store does not answer or denies access.
    """
    return folder.listed() if isinstance(folder, Remote) else folder


def names_in(folder: Location) -> list[str]:
    """Return the names in a folder; an empty list if the folder does not exist.

    Raises OSError: the folder cannot be read.
    """
    if isinstance(folder, Remote):
        return folder.names()
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []


def size_of(path: Location) -> int:
    """Return the size of a file in bytes. Raises OSError: the file cannot be accessed."""
    return path.size() if isinstance(path, Remote) else path.stat().st_size


def make_folder(path: Location) -> None:
    """Make a new folder and missing parents; in an object store, do nothing.

    Raises OSError: the folder exists or cannot be made.
    """
    if isinstance(path, Path):
        path.mkdir(parents=True)


def dangling_link(path: Path) -> Path | None:
    """Return the first dangling link among a path and its parents; None without one."""
    return next((p for p in (path, *path.parents) if p.is_symlink() and not p.exists()), None)


def mount_of(path: Location) -> Path | None:
    """Return the mount point of a path, even if the path does not exist; None for a store."""
    if isinstance(path, Remote):
        return None
    path = path.resolve()
    return next(folder for folder in (path, *path.parents) if os.path.ismount(folder))


def check_mounted(path: Location, mount: Path | None) -> None:
    """Raise OSError if the file system of a path is no longer mounted at `mount`.

    Without the mount, files would be written to the disk below it.
    """
    if mount_of(path) != mount:
        raise OSError(f"its file system is no longer mounted at {mount}")


def _raise_unless_missing(_act: Any, _path: str, info: tuple[Any, BaseException, Any]) -> None:
    if not isinstance(info[1], FileNotFoundError):  # another process may delete the folder too
        raise info[1]


def delete(*paths: Location) -> None:
    """Delete files, and folders with their content, on a disk or in one object store.

    Raises OSError: a path cannot be deleted. A missing file or folder is no error.
    """
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
