"""Paths in object stores and file systems of fsspec: `s3://`, `gs://`, `memory://`, `file://`, ...

A `Remote` has the part of pathlib's interface that checkpoints need. No file is renamed, since
object stores cannot rename. The only assumption is that an object appears when it is complete. The
store's library retries requests. Listings are not cached implicitly, since other processes write
too: `listed` takes an explicit snapshot, which replaces requests while the caller keeps it.
"""

import contextlib
import errno
import functools
import glob
import io
import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, BinaryIO, TypeVar, cast

from dtron.errors import CheckpointError, ConfigError

HEAD_BYTES = 8 << 20
"""Bytes at the start of a file that one request reads; a whole small file."""
_BLOCK_BYTES = 64 << 20
"""Bytes that are read at once, in concurrent requests of _PART_BYTES."""
_PART_BYTES = 16 << 20
_GAP_BYTES = 1 << 20
"""Largest gap between two ranges that one request reads."""
_MAX_HEADS = 16
ETAG = "ETag "
"""Beginning of a version of `Remote.find` that identifies the content."""
_FINAL = (PermissionError, NotImplementedError, TypeError, ValueError)
"""Causes of errors that do not go away."""
_STREAM_BYTES = 4 << 20
"""Bytes per request of `Remote.open_buffered`."""
STORE_SECONDS = 300.0
"""How long a request to a store is repeated if it fails, in seconds."""
_PAUSES = (1.0, 30.0)
"""First and longest pause before a request is repeated, in seconds."""
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}


logger = logging.getLogger("dtron")
_T = TypeVar("_T")


class UnreachableError(CheckpointError, OSError):
    """An object store does not answer or denies access, so that its content is unknown."""


@dataclass
class Snapshot:
    """Listing of a folder in a store, updated with the writes and deletes of this process."""

    sizes: dict[str, int]
    """Size in bytes of each file, by path."""
    contents: dict[str, bytes] = field(default_factory=dict)
    """Content of small files that were read or written, by path."""
    heads: OrderedDict[str, bytes] = field(default_factory=OrderedDict)
    """First HEAD_BYTES of the most recently read tensor files, by path."""

    def below(self, path: str) -> list[str]:
        """Return the path itself if it is a file, or the paths of all files below it."""
        return [each for each in self.sizes if each == path or each.startswith(f"{path}/")]


class Remote:
    """A path in an object store.

    Args:
        snapshot: is used instead of requests, for this path and paths derived from it.
    Raises:
        FileNotFoundError: from every method that reads.
        UnreachableError: from every method, for any other error of the store's library.
    """

    def __init__(self, files: Any, path: str, snapshot: Snapshot | None = None) -> None:
        self._files, self._path, self._snapshot = files, path.rstrip("/"), snapshot

    @classmethod
    def of(cls, url: str) -> "Remote":
        """Return the path of a URL.

        Raises ConfigError: fsspec does not support the URL, or a package for it is not installed.
        """
        protocol = url.partition("://")[0]
        try:
            import fsspec
        except ImportError:
            raise ConfigError(
                f"{url!r} is a URL, which needs fsspec; run pip install fsspec"
            ) from None
        local = {"auto_mkdir": True} if protocol in ("file", "local") else {}
        try:
            files, path = fsspec.core.url_to_fs(url, use_listings_cache=False, **local)
        except ImportError as error:
            package = _PACKAGES.get(protocol)
            fix = f"run pip install {package}" if package else str(error)
            raise ConfigError(f"{url!r} needs another package: {fix}") from None
        except ValueError as error:
            raise ConfigError(f"{url!r} is not a URL that fsspec supports: {error}") from None
        except Exception as error:  # each store's library has its own classes
            raise ConfigError(f"{url!r} cannot be reached: {error!r}") from None
        return cls(files, path)

    def __truediv__(self, name: str) -> "Remote":
        return Remote(self._files, f"{self._path}/{name}", self._snapshot)

    def __str__(self) -> str:
        return self._files.unstrip_protocol(self._path)

    def __repr__(self) -> str:
        return f"Remote({str(self)!r})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Remote) and str(other) == str(self)

    def __hash__(self) -> int:
        return hash(str(self))

    @property
    def name(self) -> str:
        """The last component of the path."""
        return self._path.rsplit("/", 1)[-1]

    @property
    def parent(self) -> "Remote":
        """The containing folder."""
        return Remote(self._files, self._path.rsplit("/", 1)[0], self._snapshot)

    def with_name(self, name: str) -> "Remote":
        """Return the path of that name in the same folder."""
        return self.parent / name

    def listed(self) -> "Remote":
        """Return the same path with a snapshot of all files below it.

        The snapshot takes one request per 1000 files.
        """
        if self._snapshot is not None or getattr(self._files, "local_file", False):
            return self
        with self._renamed_errors(), contextlib.suppress(FileNotFoundError):
            found = self._files.find(self._path, detail=True)
            sizes = {path: int(info["size"]) for path, info in found.items()}
            return Remote(self._files, self._path, Snapshot(sizes))
        return Remote(self._files, self._path, Snapshot({}))

    def connect(self) -> None:
        """Set up the store's library, without a request; some libraries take half a second."""
        with self._renamed_errors():
            getattr(self._files, "connect", lambda: None)()

    def snapshot(self) -> Snapshot | None:
        """Return the part of the snapshot below this path, to send to other ranks."""
        if self._snapshot is None:
            return None
        sizes = {path: self._snapshot.sizes[path] for path in self._snapshot.below(self._path)}
        contents = self._snapshot.contents
        return Snapshot(sizes, {path: contents[path] for path in sizes if path in contents})

    def with_snapshot(self, snapshot: Snapshot | None) -> "Remote":
        """Return the same path with a snapshot from another rank."""
        return Remote(self._files, self._path, snapshot)

    def exists(self) -> bool:
        """Whether the file or folder exists."""
        if self._snapshot is not None:
            return bool(self._snapshot.below(self._path))
        with self._renamed_errors():
            return self._files.exists(self._path)

    def is_file(self) -> bool:
        """Whether the path exists and is a file."""
        if self._snapshot is not None:
            return self._path in self._snapshot.sizes
        with self._renamed_errors():
            return self._files.isfile(self._path)

    def size(self) -> int:
        """Return the size of a file in bytes."""
        if self._snapshot is not None:
            if self._path not in self._snapshot.sizes:
                raise FileNotFoundError(f"{self} does not exist")
            return self._snapshot.sizes[self._path]
        with self._renamed_errors():
            return int(self._files.size(self._path))

    def names(self) -> list[str]:
        """Return the names in a folder; an empty list if the folder does not exist."""
        if self._snapshot is not None:
            below = (path[len(self._path) + 1 :] for path in self._snapshot.below(self._path))
            return sorted({path.split("/")[0] for path in below} - {""})
        with self._renamed_errors():
            try:
                found = self._files.ls(self._path, detail=False)
            except FileNotFoundError:
                return []
        return [path.rstrip("/").rsplit("/", 1)[-1] for path in found]

    def find(self) -> list[tuple[str, int, str]]:
        """Return URL, size and version of each matching file, sorted by URL.

        A version is ETAG and the store's ETag, or the time of the last change.

        If this path is a file or a pattern such as `data/*.jsonl`, these are the files that it
        names; else all files below this folder, at any depth.

        Raises:
            FileNotFoundError: no file exists at this path.
        """
        with self._renamed_errors():
            if glob.has_magic(self._path):
                found = self._files.glob(self._path, detail=True)
            else:
                found = self._files.find(self._path, detail=True)
        files = [each for each in found.values() if each.get("type", "file") == "file"]
        if not files:
            raise FileNotFoundError(f"{self}: no such file")
        if unknown := [each["name"] for each in files if each.get("size") is None]:
            text = f"{unknown[0]}: the store reports no size of this file; download it"
            raise UnreachableError(text) from ValueError()
        times = ("LastModified", "mtime", "created")

        def version(info: dict[str, Any]) -> str:
            if etag := info.get("ETag") or info.get("etag"):
                return f"{ETAG}{etag}"
            return str(next((info[key] for key in times if info.get(key)), ""))

        return sorted(
            (
                self._files.unstrip_protocol(each["name"]),
                int(each["size"]),
                version(each),
            )
            for each in files
        )

    def open_buffered(self) -> BinaryIO:
        """Open a file for reading from any position; a request that fails is repeated."""
        return cast(BinaryIO, io.BufferedReader(_Stream(self), _STREAM_BYTES))

    def open(self, mode: str = "rb") -> IO[bytes]:
        """Open a file for reading, or a new file for writing."""
        with self._renamed_errors():
            return self._files.open(self._path, mode)

    def read_bytes(self, start: int, end: int) -> bytes:
        """Read bytes [start, end) of a file. Raises UnreachableError: also if bytes are missing."""
        starts = list(range(start, end, _PART_BYTES))
        if not starts:
            return b""
        paths, ends = [self._path] * len(starts), [*starts[1:], end]
        with self._renamed_errors():
            if len(starts) == 1:
                found = self._files.cat_file(self._path, start=start, end=end)
            else:
                found = b"".join(self._files.cat_ranges(paths, starts, ends, on_error="raise"))
        return self.checked(found, start, end)

    def checked(self, found: bytes, start: int, end: int) -> bytes:
        """Return the answer to a request for bytes [start, end). Raises UnreachableError: bytes are
        missing."""
        if len(found) != end - start:
            raise UnreachableError(
                f"{self}: the store returned {len(found)} of {end - start} bytes from {start} on"
            )
        return found

    def read_whole(self, limit: int) -> bytes:
        """Read a whole file. Raises OSError: also if the file has more than `limit` bytes."""
        if self._snapshot is not None and self._path in self._snapshot.contents:
            return self._snapshot.contents[self._path]
        if (size := self.size()) > limit:
            raise OSError(f"{self} has {size} bytes; the limit is {limit}")
        content = self.read_bytes(0, size)
        if self._snapshot is not None:
            self._snapshot.contents[self._path] = content
        return content

    def copy_from(self, file: Path) -> None:
        """Write a copy of a file on the disk; the copy appears in the store once it is complete."""
        with self._renamed_errors():
            self._files.put_file(str(file), self._path)

    def head(self) -> bytes:
        """Read the first HEAD_BYTES of a file; a snapshot caches these bytes."""
        heads = self._snapshot.heads if self._snapshot is not None else OrderedDict[str, bytes]()
        if self._path not in heads:
            heads[self._path] = self.read_bytes(0, min(self.size(), HEAD_BYTES))
            while len(heads) > _MAX_HEADS:
                heads.popitem(last=False)
        return heads[self._path]

    def blocks(self) -> Iterator[bytes]:
        """Yield a whole file in blocks."""
        yield self.head()
        for start in range(HEAD_BYTES, size := self.size(), _BLOCK_BYTES):
            read = functools.partial(self.read_bytes, start, min(start + _BLOCK_BYTES, size))
            yield retried(read, STORE_SECONDS)

    def write_bytes(self, data: bytes) -> None:
        """Write a file; the file appears in the store once it is complete."""
        with self._renamed_errors():
            self._files.pipe_file(self._path, data)
        if self._snapshot is not None:
            self._snapshot.sizes[self._path], self._snapshot.contents[self._path] = len(data), data

    def delete(self, *others: "Remote") -> None:
        """Delete files, and folders with their content; missing paths are ignored.

        With a snapshot, one request deletes up to 1000 files.
        """
        paths, snapshot = [each._path for each in (self, *others)], self._snapshot
        if snapshot is not None:
            paths = [file for path in paths for file in snapshot.below(path)]
        with self._renamed_errors(), contextlib.suppress(FileNotFoundError):
            if paths:
                self._files.rm(paths, recursive=snapshot is None)
        if snapshot is not None:
            for path in paths:
                del snapshot.sizes[path]
                snapshot.contents.pop(path, None)

    @contextlib.contextmanager
    def _renamed_errors(self) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise
        except Exception as error:  # each store's library has its own classes
            reason = str(error) or type(error).__name__
            raise UnreachableError(f"{self}: {reason}") from error


class _Stream(io.RawIOBase):
    """A file in a store as a file object."""

    def __init__(self, where: Remote) -> None:
        self._where, self._position = where, 0
        self._size = retried(where.size, STORE_SECONDS)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        bases = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._size}
        self._position = max(0, bases[whence] + offset)
        return self._position

    def readinto(self, buffer: Any) -> int:
        start = self._position
        end = min(start + len(buffer), self._size)
        if end > start:
            read = functools.partial(self._where.read_bytes, start, end)
            buffer[: end - start] = retried(read, STORE_SECONDS)
        self._position = max(start, end)
        return max(0, end - start)


def read_ranges(ranges: Sequence[tuple[Remote, int, int]], seconds: float) -> list[bytes]:
    """Read bytes [start, end) of files in one store, by concurrent requests.

    Args:
        ranges: (file, start, end) of each.
        seconds: time limit of all requests together.
    Raises:
        FileNotFoundError: a file does not exist.
        UnreachableError: as Remote; also after the time limit, or if bytes are missing.
    """
    files = ranges[0][0]._files
    paths, starts, ends = map(list, zip(*ranges, strict=True))
    columns = [[path._path for path in paths], starts, ends]
    found: Any
    with ranges[0][0]._renamed_errors():
        if getattr(files, "async_impl", False):
            from fsspec.asyn import sync

            read = files._cat_ranges
            found = sync(files.loop, read, *columns, timeout=seconds, on_error="return")
        else:
            found = files.cat_ranges(*columns, on_error="return")
    for (where, start, end), content in zip(ranges, found, strict=True):
        if isinstance(content, FileNotFoundError):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(where))
        if isinstance(content, Exception):
            with where._renamed_errors():
                raise content
        where.checked(content, start, end)
    return found


def retried(read: Callable[[], _T], seconds: float) -> _T:
    """Call a function until it raises no UnreachableError, with pauses of 1 to 30 s.

    Raises:
        UnreachableError: it has raised that for `seconds`.
    """
    begin, pause = time.monotonic(), _PAUSES[0]
    while True:
        try:
            return read()
        except UnreachableError as error:
            past = time.monotonic() - begin
            if isinstance(error.__cause__, _FINAL):
                raise
            if past + pause > seconds:
                raise UnreachableError(f"{error} (requests have failed for {past:.0f} s)") from None
            logger.warning("%s; trying again in %g s", error, pause)
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES[1])


class RemoteFile:
    """A tensor file in an object store, read with few requests.

    One request reads its first HEAD_BYTES; then each group of neighbouring ranges that were
    announced with `plan` takes one request.
    """

    def __init__(self, where: Remote) -> None:
        self._where, self._head = where, where.head()
        self._planned: list[tuple[int, int]] = []
        self._start, self._block = 0, b""

    def size(self) -> int:
        """Return the size in bytes."""
        return self._where.size()

    def plan(self, parts: list[tuple[int, int]]) -> None:
        """Announce the ranges (start, end) that will be read, in ascending order."""
        self._planned = []
        for start, end in parts:
            begun, ended = self._planned[-1] if self._planned else (0, 0)
            if start <= ended + _GAP_BYTES and max(end, ended) - begun <= _BLOCK_BYTES and begun:
                self._planned[-1] = begun, max(end, ended)
            elif end > len(self._head) and end - start <= _BLOCK_BYTES:
                self._planned.append((start, end))

    def read_into(self, start: int, buffer: memoryview) -> int:
        """Read from `start` on into a buffer; return the number of bytes that were read."""
        filled = 0
        while filled < len(buffer):
            first = start + filled
            data = self._read(first, min(start + len(buffer), first + _BLOCK_BYTES))
            buffer[filled : filled + len(data)] = data
            filled += len(data)
            if not data:
                break
        return filled

    def _read(self, start: int, end: int) -> bytes | memoryview:
        if end <= len(self._head):
            return self._head[start:end]
        if not self._start <= start <= end <= self._start + len(self._block):
            around = (each for each in self._planned if each[0] <= start <= end <= each[1])
            self._start, last = next(around, (start, end))
            self._block = self._where.read_bytes(self._start, last)
        return memoryview(self._block)[start - self._start : end - self._start]
