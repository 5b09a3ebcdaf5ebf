"""Folders and files in stores that fsspec knows: `s3://`, `gs://`, `memory://`, `file://`, ...

A `Remote` has the part of pathlib's interface that checkpoints need. Object stores cannot rename,
and show an object when all of it is there; nothing here relies on more. Listings are never cached,
since other processes write too.
"""

import contextlib
from collections.abc import Iterator
from typing import IO, Any

from dtron.errors import ConfigError

_EXTRA = {"s3": "s3fs", "gs": "gcsfs", "gcs": "gcsfs", "abfs": "adlfs", "az": "adlfs"}


class Remote:
    """A path in a store.

    Raises:
        OSError: from every method that reaches the store, whatever its library raises.
    """

    def __init__(self, files: Any, path: str) -> None:
        self._files, self._path = files, path.rstrip("/")

    @classmethod
    def of(cls, url: str) -> "Remote":
        """The path that a URL names. Raises ConfigError: what would reach it is not installed."""
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
            package = _EXTRA.get(protocol)
            fix = f"pip install {package}" if package else str(error)
            raise ConfigError(f"{url!r} needs another package: {fix}") from None
        except ValueError as error:
            raise ConfigError(f"{url!r} is no URL that fsspec knows: {error}") from None
        except Exception as error:  # libraries of stores raise classes of their own
            raise ConfigError(f"{url!r} cannot be reached: {error!r}") from None
        return cls(files, path)

    def __truediv__(self, name: str) -> "Remote":
        return Remote(self._files, f"{self._path}/{name}")

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
        """The last part."""
        return self._path.rsplit("/", 1)[-1]

    @property
    def parent(self) -> "Remote":
        """The folder that holds it."""
        return Remote(self._files, self._path.rsplit("/", 1)[0])

    def with_name(self, name: str) -> "Remote":
        """Another one of the same folder."""
        return self.parent / name

    def exists(self) -> bool:
        """Whether it is there."""
        with self._renamed_errors():
            return self._files.exists(self._path)

    def is_file(self) -> bool:
        """Whether it is there and no folder."""
        with self._renamed_errors():
            return self._files.isfile(self._path)

    def size(self) -> int:
        """Bytes of a file."""
        with self._renamed_errors():
            return int(self._files.size(self._path))

    def names(self) -> list[str]:
        """What is in a folder; nothing if it is not there."""
        with self._renamed_errors():
            try:
                found = self._files.ls(self._path, detail=False)
            except FileNotFoundError:
                return []
        return [path.rstrip("/").rsplit("/", 1)[-1] for path in found]

    def open(self, mode: str = "rb") -> IO[bytes]:
        """Open a file, to read it or to write a new one."""
        with self._renamed_errors():
            return self._files.open(self._path, mode)

    def read_bytes(self, start: int | None = None, end: int | None = None) -> bytes:
        """A file, or a part of it."""
        with self._renamed_errors():
            return self._files.cat_file(self._path, start=start, end=end)

    def read_whole(self, limit: int) -> bytes:
        """A file. Raises OSError: also where it has more than `limit` bytes."""
        if (size := self.size()) > limit:
            raise OSError(f"{self} has {size} bytes, and at most {limit} are read")
        return self.read_bytes(0, size)

    def read_into(self, start: int, buffer: memoryview) -> int:
        """Fill a buffer with what is there from `start` on; the number of bytes that were read."""
        data = self.read_bytes(start, start + len(buffer))
        buffer[: len(data)] = data
        return len(data)

    def write_bytes(self, data: bytes) -> None:
        """Write a file, which is there when all of it is."""
        with self._renamed_errors():
            self._files.pipe_file(self._path, data)

    def delete(self) -> None:
        """Delete a file, or a folder and all that is in it; what is not there is no error."""
        with self._renamed_errors(), contextlib.suppress(FileNotFoundError):
            self._files.rm(self._path, recursive=True)

    @contextlib.contextmanager
    def _renamed_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError:
            raise
        except Exception as error:  # libraries of stores raise classes of their own
            raise OSError(f"{self}: {str(error) or type(error).__name__}") from error
