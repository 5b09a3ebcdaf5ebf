"""Paths in object stores and file systems of fsspec: `s3://`, `gs://`, `memory://`, `file://`, ...

A `Remote` has the part of pathlib's interface that checkpoints need. Object stores cannot rename,
and an object appears only when it is complete; nothing here relies on more. The store's library
retries requests. Listings are not cached implicitly, since other processes write too: `listed`
takes a snapshot explicitly, which answers as long as the caller keeps it.
"""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import IO, Any

from dtron.errors import CheckpointError, ConfigError

HEAD_BYTES = 8 << 20
"""Bytes at the start of a file that one request reads; a whole small file."""
_BLOCK_BYTES = 64 << 20
"""Bytes that are read at once, by concurrent requests of _PART_BYTES."""
_PART_BYTES = 16 << 20
_GAP_BYTES = 1 << 20
"""Largest gap between two ranges that are read by one request."""
_MAX_HEADS = 16
_PACKAGES = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}


class UnreachableError(CheckpointError, OSError):
    """A store that does not answer or denies access, so that its content is not known."""


@dataclass
class Snapshot:
    """The listing of a folder in a store, updated by this process's own writes and deletes."""

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
    """A path in a store.

    Args:
        snapshot: answers instead of the store, for this path and paths derived from it.
    Raises:
        FileNotFoundError: from every method that reads.
        UnreachableError: from every method, whatever the store's library raises.
    """

    def __init__(self, files: Any, path: str, snapshot: Snapshot | None = None) -> None:
        self._files, self._path, self._snapshot = files, path.rstrip("/"), snapshot

    @classmethod
    def of(cls, url: str) -> "Remote":
        """Return the path of a URL. Raises ConfigError: fsspec does not know it, or a package that
        it needs is not installed."""
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
            fix = f"pip install {package}" if package else str(error)
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
        """Return the same path with a snapshot of all files below it: one request per 1000
        files."""
        if self._snapshot is not None or getattr(self._files, "local_file", False):
            return self
        with self._renamed_errors(), contextlib.suppress(FileNotFoundError):
            found = self._files.find(self._path, detail=True)
            sizes = {path: int(info["size"]) for path, info in found.items()}
            return Remote(self._files, self._path, Snapshot(sizes))
        return Remote(self._files, self._path, Snapshot({}))

    def connect(self) -> None:
        """Set up the store's library, without a request; for some this takes half a second."""
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
        """Whether it exists and is a file."""
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
        """Return the names in a folder; none if it does not exist."""
        if self._snapshot is not None:
            below = (path[len(self._path) + 1 :] for path in self._snapshot.below(self._path))
            return sorted({path.split("/")[0] for path in below} - {""})
        with self._renamed_errors():
            try:
                found = self._files.ls(self._path, detail=False)
            except FileNotFoundError:
                return []
        return [path.rstrip("/").rsplit("/", 1)[-1] for path in found]

    def open(self, mode: str = "rb") -> IO[bytes]:
        """Open a file for reading, or a new one for writing."""
        with self._renamed_errors():
            return self._files.open(self._path, mode)

    def read_bytes(self, start: int, end: int) -> bytes:
        """Read bytes [start, end) of a file. Raises UnreachableError: also for a short answer."""
        starts = list(range(start, end, _PART_BYTES))
        if not starts:
            return b""
        paths, ends = [self._path] * len(starts), [*starts[1:], end]
        with self._renamed_errors():
            if len(starts) == 1:
                found = self._files.cat_file(self._path, start=start, end=end)
            else:
                found = b"".join(self._files.cat_ranges(paths, starts, ends, on_error="raise"))
        if len(found) != end - start:
            raise UnreachableError(
                f"{self}: the store returned {len(found)} of {end - start} bytes from {start} on"
            )
        return found

    def read_whole(self, limit: int) -> bytes:
        """Read a whole file. Raises OSError: also if it has more than `limit` bytes."""
        if self._snapshot is not None and self._path in self._snapshot.contents:
            return self._snapshot.contents[self._path]
        if (size := self.size()) > limit:
            raise OSError(f"{self} has {size} bytes; the limit is {limit}")
        content = self.read_bytes(0, size)
        if self._snapshot is not None:
            self._snapshot.contents[self._path] = content
        return content

    def head(self) -> bytes:
        """Read the first HEAD_BYTES of a file; a snapshot caches them."""
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
            yield self.read_bytes(start, min(start + _BLOCK_BYTES, size))

    def write_bytes(self, data: bytes) -> None:
        """Write a file; it appears when it is complete."""
        with self._renamed_errors():
            self._files.pipe_file(self._path, data)
        if self._snapshot is not None:
            self._snapshot.sizes[self._path], self._snapshot.contents[self._path] = len(data), data

    def delete(self, *others: "Remote") -> None:
        """Delete files, and folders with their content; it is no error if they do not exist.

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


class RemoteFile:
    """A tensor file in a store, read by few requests: one for its head, then one per group of
    neighbouring ranges that were announced with `plan`."""

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
