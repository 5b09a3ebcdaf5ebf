"""Write safetensors files tensor by tensor, and read parts of them, on disks and in object stores.

The safetensors library writes whole dictionaries of tensors; here, only one tensor at a time is in
memory. A file is hashed while it is written, and is on the disk when `write_tensors` returns. The
library memory-maps the files that it reads; if one is truncated, the process is killed (SIGBUS).
Here, only the needed ranges are read.

Source of the format: github.com/huggingface/safetensors, README, "Format".
"""

import contextlib
import itertools
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dtron.errors import CheckpointError, cause_of, shorten
from dtron.io.filesystem import Location
from dtron.io.remote_path import Remote, RemoteFile, UnreachableError
from dtron.io.untrusted import MB, open_regular, parse
from dtron.io.writer_process import HashedFile

Region = tuple[slice, ...]
"""One slice per dim, with start and stop but without step."""
DTYPE_NAMES: dict[torch.dtype, str] = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
DTYPES_BY_NAME: dict[str, torch.dtype] = {name: dtype for dtype, name in DTYPE_NAMES.items()}
_MAX_HEADER = 32 * MB  # parsed JSON needs up to 25 times as much memory
_MAX_ELEMENTS = 2**56
_READ_BYTES = 64 * MB
_SMALL = MB


def full_region(shape: Sequence[int]) -> Region:
    """Return the region that covers a whole tensor."""
    return tuple(slice(0, n) for n in shape)


@dataclass(frozen=True)
class TensorSpec:
    """Dtype and shape of a tensor."""

    dtype: torch.dtype
    shape: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Size of the elements in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WrittenFile:
    """Size and hash of a file that was written."""

    bytes: int
    sha256: str


def write_order(tensors: Mapping[str, TensorSpec]) -> list[str]:
    """Return the names of the tensors in their order in the file.

    Wide dtypes come first, so that all elements are aligned. Within a dtype width, small tensors
    come first, so that one request to a store reads many of them.
    """

    def place(name: str) -> tuple[int, bool]:
        return -tensors[name].dtype.itemsize, tensors[name].nbytes > _SMALL

    return sorted(tensors, key=place)


def file_header(
    tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None
) -> str:
    """Return the header of a file, without its length field: ASCII, padded to 8 bytes."""
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name in write_order(tensors):
        described = tensors[name]
        table[name] = {
            "dtype": DTYPE_NAMES[described.dtype],
            "shape": list(described.shape),
            "data_offsets": [start, start + described.nbytes],
        }
        start += described.nbytes
    text = json.dumps(table, separators=(",", ":"))
    return text + " " * (-len(text) % 8)


def write_tensors(
    path: Location,
    tensors: Mapping[str, TensorSpec],
    get: Callable[[str], Tensor],
    metadata: Mapping[str, str] | None = None,
) -> WrittenFile:
    """Write a new file, one tensor at a time, and wait until it is on the disk or in the store.

    Args:
        tensors: dtype and shape of each tensor, by name.
        get: name -> tensor, on any device.
        metadata: free text in the file's header, by key.
    Raises:
        OSError: the disk is full, or the file exists or cannot be written.
    """
    file = HashedFile(str(path))
    try:
        header = file_header(tensors, metadata).encode()
        file.put(len(header).to_bytes(8, "little") + header)
        for name in write_order(tensors):
            file.put(_elements(name, get(name), tensors[name]))  # no name keeps it alive
        return WrittenFile(*file.close())
    finally:
        file.abandon()


def _elements(name: str, tensor: Tensor, described: TensorSpec) -> memoryview:
    """Copy a tensor to the host and return its bytes."""
    found = (tensor.dtype, list(tensor.shape))
    assert found == (described.dtype, list(described.shape)), f"{name} is {found}"
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


class Readable(Protocol):
    """A file of which parts can be read."""

    def size(self) -> int:
        """Return the size in bytes."""
        ...

    def read_into(self, start: int, buffer: memoryview) -> int:
        """Read from `start` on into a buffer; return the number of bytes that were read."""
        ...


class LocalFile:
    """`Readable` on a disk. Raises OSError: the file cannot be read."""

    def __init__(self, path: Path) -> None:
        self._file = open_regular(path)

    def size(self) -> int:
        return os.fstat(self._file.fileno()).st_size

    def read_into(self, start: int, buffer: memoryview) -> int:
        filled = 0
        while n := os.preadv(self._file.fileno(), [buffer[filled:]], start + filled):
            filled += n
        return filled


def parse_sizes(value: Any) -> list[int]:
    """Return `value`, a list of offsets or sizes.

    Raises ValueError: it is not a list of at most 16 integers from 0 to 2^56.
    """
    if not isinstance(value, list) or len(value) > 16:
        raise ValueError(f"{shorten(repr(value))} is not a list of at most 16 integers")
    if not all(type(n) is int and 0 <= n <= _MAX_ELEMENTS for n in value):
        raise ValueError(
            f"{shorten(repr(value))} has an entry that is not an integer from 0 to 2^56"
        )
    return value


def parse_shape(value: Any) -> list[int]:
    """Return `value`, a shape. Raises ValueError: it is no shape of at most 2^56 elements."""
    if math.prod(shape := parse_sizes(value)) > _MAX_ELEMENTS:
        raise ValueError(f"{shape} has more than 2^56 elements")
    return shape


class StoredTensors:
    """A safetensors file, read on demand.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is not a safetensors file.
    """

    def __init__(self, path: Location) -> None:
        self._path = path
        self._file = RemoteFile(path) if isinstance(path, Remote) else LocalFile(path)
        size = self._file.size()
        length = int.from_bytes(self._read(0, min(size, 8)), "little")
        if not 2 <= length <= min(size - 8, _MAX_HEADER):
            raise ValueError("it has no safetensors header")
        self._begin = 8 + length
        self._table = parse(self._read(8, length), _loads)
        self._room = size - self._begin
        if not isinstance(self._table, dict):
            raise ValueError("its header is not a JSON object")
        _check_apart(self._table)

    def keys(self) -> set[str]:
        """Return the names of all tensors."""
        return self._table.keys() - {"__metadata__"}

    def get_slice(self, name: str) -> "StoredTensor":
        """Return a tensor without reading its elements.

        Raises ValueError: the tensor is missing or damaged.
        """
        try:
            entry = self._table[name]
            if (dtype := DTYPES_BY_NAME.get(entry["dtype"])) is None:
                raise ValueError(f"its dtype is {shorten(str(entry['dtype']))}")
            shape = parse_shape(entry["shape"])
            first, last = parse_sizes(entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{name} is missing or damaged: {error!r}") from None
        if not 0 <= first <= last <= self._room:
            raise ValueError(f"{name} is outside of the file")
        if last - first != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"the size of {name} does not match its shape")
        return StoredTensor(self._path, dtype, shape, self._file, self._begin + first)

    def plan(self, parts: Sequence[tuple["StoredTensor", Region]]) -> None:
        """Announce which regions will be read, in the order of the file.

        A remote file can then be read with few requests.
        """
        if isinstance(self._file, RemoteFile):
            self._file.plan([tensor.extent(region) for tensor, region in parts])

    def _read(self, start: int, length: int) -> bytes:
        content = bytearray(length)
        if self._file.read_into(start, memoryview(content)) != length:
            raise ValueError("it was truncated while it was read")
        return bytes(content)


def _loads(text: bytes) -> Any:
    return json.loads(text, object_pairs_hook=_unique)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object. Raises ValueError: a key occurs twice; `dict` would drop one value."""
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("its header has a key twice")
    return table


def _check_apart(table: Mapping[str, Any]) -> None:
    """Raise ValueError if two tensors share bytes.

    Malformed entries are skipped here; `get_slice` raises an error for them.
    """
    found = [(e.get("data_offsets"), name) for name, e in table.items() if isinstance(e, dict)]
    extents = sorted(
        (*at, name)
        for at, name in found
        if isinstance(at, list) and [type(n) for n in at] == [int, int] and at[0] < at[1]
    )
    for (_, end, name), (start, _, other) in itertools.pairwise(extents):
        if start < end:
            raise ValueError(f"{shorten(name)} and {shorten(other)} overlap")


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, read on demand."""

    path: Location
    """The file."""
    dtype: torch.dtype
    shape: list[int]
    file: Readable
    begin: int
    """Byte offset of the elements in the file."""

    @property
    def row_bytes(self) -> int:
        """Size of a row (one index of dim 0) in bytes; for a scalar, the size of the scalar."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    def extent(self, region: Region) -> tuple[int, int]:
        """Return the byte range (start, end) in the file of the rows that a region covers."""
        first, last = (region[0].start, region[0].stop) if region else (0, 1)
        return self.begin + first * self.row_bytes, self.begin + last * self.row_bytes

    def __getitem__(self, region: Region) -> Tensor:
        """Read a region, in whole rows of dim 0; dims that are missing in `region` are read whole.

        Raises ValueError: the file was truncated.
        """
        region = (*region, *full_region(self.shape[len(region) :]))
        out = torch.empty([s.stop - s.start for s in region], dtype=self.dtype)
        if not out.numel():
            return out
        first, last = (region[0].start, region[0].stop) if region else (0, 1)
        if list(out.shape[1:]) == self.shape[1:]:  # whole rows
            self._fill(out, first)
            return out
        step = max(1, _READ_BYTES // self.row_bytes)
        for start in range(first, last, step):
            rows = torch.empty([min(step, last - start), *self.shape[1:]], dtype=self.dtype)
            self._fill(rows, start)
            out[start - first : start - first + len(rows)] = rows[(slice(None), *region[1:])]
        return out

    def _fill(self, out: Tensor, first_row: int) -> None:
        buffer = out.reshape(-1).view(torch.uint8).numpy().data
        if self.file.read_into(self.begin + first_row * self.row_bytes, buffer) != len(buffer):
            raise ValueError("it was truncated while it was read")


@contextlib.contextmanager
def reading(path: Location) -> Iterator[None]:
    """In this context, turn an OSError or ValueError into a CheckpointError that names the file.

    An UnreachableError is passed on, since the checkpoint may still be intact.
    """
    try:
        yield
    except UnreachableError:
        raise
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read: {cause_of(error, path)}") from None
