"""Writing a safetensors file one tensor after the other, so that memory holds one at a time.

The safetensors library writes whole dictionaries of tensors. A file is hashed on its way and has
reached the disk when `close` returns. Files are read here as well, on a disk and in a store, the
parts that are needed alone: the library maps them into memory, and a mapped file that is truncated
ends the process (SIGBUS).

Source of the format: github.com/huggingface/safetensors, README, "Format".
"""

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from dtron.errors import shorten
from dtron.io.remote_path import Remote, RemoteFile
from dtron.io.untrusted import MB, open_regular, parse
from dtron.io.writer_process import HashedFile

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
_MOST_HEADER = 32 * MB  # of which JSON makes 25 times that in memory
_MOST_ELEMENTS = 2**56
_AT_ONCE = 64 * MB
_SMALL = MB


@dataclass(frozen=True)
class TensorSpec:
    """A tensor before it exists."""

    dtype: torch.dtype
    shape: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WrittenFile:
    """A file on the disk."""

    bytes: int
    sha256: str


def write_order(tensors: Mapping[str, TensorSpec]) -> list[str]:
    """Names as they lie in a file: wide elements first, so that all lie at multiples of their
    size; of those small tensors first, so that a store gives them by one request."""

    def place(name: str) -> tuple[int, bool]:
        return -tensors[name].dtype.itemsize, tensors[name].nbytes > _SMALL

    return sorted(tensors, key=place)


def file_header(
    tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str] | None = None
) -> str:
    """The header of a file without its length, in ASCII, padded to 8 bytes."""
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


class TensorFile:
    """A safetensors file in the making.

    Attributes:
        order: names in the order in which `write` wants them.
    Args:
        path: a new file.
        tensors: what it will hold, by name.
        metadata: free text by key in the file's header.
    """

    def __init__(
        self, path: Path | str, tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]
    ) -> None:
        self._tensors = dict(tensors)
        self.order = write_order(tensors)
        self._left = list(reversed(self.order))
        self._file = HashedFile(str(path))
        header = file_header(tensors, metadata).encode()
        self._file.put(len(header).to_bytes(8, "little") + header)

    def write(self, name: str, tensor: Tensor) -> None:
        """Append the next tensor of `order`, from any device.

        Raises:
            OSError: the disk is full, or the file cannot be written for another reason.
        """
        described = self._tensors[name]
        assert name == self._left.pop(), f"{name} is not next in {self.order}"
        found = (tensor.dtype, list(tensor.shape))
        assert found == (described.dtype, list(described.shape)), f"{name} is {found}"
        if tensor.numel():
            flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
            self._file.put(flat.numpy().data)

    def close(self) -> WrittenFile:
        """End the file once all tensors are written, and wait until the disk has it."""
        assert not self._left, f"not written: {self._left[::-1]}"
        return WrittenFile(*self._file.close())

    def abandon(self) -> None:
        """Close what will not be completed."""
        self._file.abandon()


class Readable(Protocol):
    """A file of which parts can be read."""

    def size(self) -> int:
        """Bytes."""
        ...

    def read_into(self, start: int, buffer: memoryview) -> int:
        """Fill a buffer with what is there from `start` on; the number of bytes that were read."""
        ...


class LocalFile:
    """A file on a disk. Raises OSError: it cannot be read."""

    def __init__(self, path: Path) -> None:
        self._file = open_regular(path)

    def size(self) -> int:
        """Bytes."""
        return os.fstat(self._file.fileno()).st_size

    def read_into(self, start: int, buffer: memoryview) -> int:
        """Fill a buffer with what is there from `start` on; the number of bytes that were read."""
        filled = 0
        while n := os.preadv(self._file.fileno(), [buffer[filled:]], start + filled):
            filled += n
        return filled


def parse_sizes(value: Any) -> list[int]:
    """At most 16 integers of 0 to 2^56: offsets or sizes. Raises ValueError: they are not."""
    if not isinstance(value, list) or len(value) > 16:
        raise ValueError(f"{shorten(repr(value))} is no list of at most 16 integers")
    if not all(type(n) is int and 0 <= n <= _MOST_ELEMENTS for n in value):
        raise ValueError(f"{shorten(repr(value))} holds what is no integer of 0 to 2^56")
    return value


def parse_shape(value: Any) -> list[int]:
    """The shape of a tensor of at most 2^56 elements. Raises ValueError: it is none."""
    if math.prod(shape := parse_sizes(value)) > _MOST_ELEMENTS:
        raise ValueError(f"{shape} has more than 2^56 elements")
    return shape


class StoredTensors:
    """A safetensors file, of which only what is asked for is read.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no safetensors file.
    """

    def __init__(self, where: Path | Remote) -> None:
        self._where = RemoteFile(where) if isinstance(where, Remote) else LocalFile(where)
        size = self._where.size()
        length = int.from_bytes(self._read(0, min(size, 8)), "little")
        if not 2 <= length <= min(size - 8, _MOST_HEADER):
            raise ValueError("it has no header of safetensors")
        self._begin = 8 + length
        self._table = parse(self._read(8, length))
        self._room = size - self._begin
        if not isinstance(self._table, dict):
            raise ValueError("its header is no object")

    def keys(self) -> set[str]:
        """Names of its tensors."""
        return self._table.keys() - {"__metadata__"}

    def get_slice(self, name: str) -> "StoredTensor":
        """One of its tensors, unread."""
        try:
            entry = self._table[name]
            if (dtype := DTYPES_BY_NAME.get(entry["dtype"])) is None:
                raise ValueError(f"its dtype is {shorten(str(entry['dtype']))}")
            shape = parse_shape(entry["shape"])
            first, last = parse_sizes(entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"it holds no readable {name}: {error!r}") from None
        if not 0 <= first <= last <= self._room:
            raise ValueError(f"{name} lies outside of the file")
        if last - first != math.prod(shape) * dtype.itemsize:
            raise ValueError(f"{name} has another size than its shape says")
        return StoredTensor(self._where, self._begin + first, entry["dtype"], shape)

    def plan(self, parts: Sequence[tuple["StoredTensor", tuple[slice, ...]]]) -> None:
        """Announce regions of tensors that will be read, in this order."""
        if isinstance(self._where, RemoteFile):
            self._where.plan([tensor.extent(region) for tensor, region in parts])

    def _read(self, start: int, length: int) -> bytes:
        content = bytearray(length)
        if self._where.read_into(start, memoryview(content)) != length:
            raise ValueError("it became shorter while it was read")
        return bytes(content)


class StoredTensor:
    """A tensor of a file."""

    def __init__(self, where: Readable, begin: int, dtype: str, shape: list[int]) -> None:
        self._where, self._begin, self._dtype, self._shape = where, begin, dtype, shape

    def get_dtype(self) -> str:
        """As safetensors names it."""
        return self._dtype

    def get_shape(self) -> list[int]:
        """Its shape."""
        return self._shape

    def extent(self, region: tuple[slice, ...]) -> tuple[int, int]:
        """Where the rows of a region begin and end in the file."""
        row = math.prod(self._shape[1:]) * DTYPES_BY_NAME[self._dtype].itemsize
        first, last = (region[0].start, region[0].stop) if region else (0, 1)
        return self._begin + first * row, self._begin + last * row

    def __getitem__(self, region: tuple[slice, ...]) -> torch.Tensor:
        """A region of it, read in whole rows; dims that `region` lacks are read whole. Raises
        ValueError: the file has become shorter."""
        dtype = DTYPES_BY_NAME[self._dtype]
        region = (*region, *(slice(0, n) for n in self._shape[len(region) :]))
        out = torch.empty([s.stop - s.start for s in region], dtype=dtype)
        if not out.numel():
            return out
        if list(out.shape[1:]) == self._shape[1:]:  # rows of it
            row = out[0].numel() * dtype.itemsize if region else 0
            self._fill(out, region[0].start * row if region else 0)
            return out
        row = math.prod(self._shape[1:]) * dtype.itemsize
        step = max(1, _AT_ONCE // row)
        for start in range(region[0].start, region[0].stop, step):
            stop = min(start + step, region[0].stop)
            rows = torch.empty([stop - start, *self._shape[1:]], dtype=dtype)
            self._fill(rows, start * row)
            into = slice(start - region[0].start, stop - region[0].start)
            out[into] = rows[(slice(None), *region[1:])]
        return out

    def _fill(self, out: torch.Tensor, start: int) -> None:
        buffer = out.reshape(-1).view(torch.uint8).numpy().data
        if self._where.read_into(self._begin + start, buffer) != len(buffer):
            raise ValueError("it became shorter while it was read")
