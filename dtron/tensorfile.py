"""Writing a safetensors file one tensor after the other, so that memory holds one at a time.

The safetensors library writes whole dictionaries of tensors; it is what reads these files, on a
disk: of files in a store the parts that are needed are read here. A file is hashed on its way and
has reached the disk when `close` returns.

Source of the format: github.com/huggingface/safetensors, README, "Format".
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from dtron.writer import HashedFile

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
_MOST_HEADER = 100_000_000  # bytes, as the safetensors library allows


@dataclass(frozen=True)
class Described:
    """A tensor before it exists."""

    dtype: torch.dtype
    shape: Sequence[int]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Written:
    """A file on the disk."""

    bytes: int
    sha256: str


def order_of(tensors: Mapping[str, Described]) -> list[str]:
    """Names as they lie in a file: wide elements first, so that all lie at multiples of their
    size."""
    return sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)


def header_of(tensors: Mapping[str, Described], metadata: Mapping[str, str] | None = None) -> str:
    """The header of a file without its length, in ASCII, padded to 8 bytes."""
    table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
    start = 0
    for name in order_of(tensors):
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
        self, path: Path | str, tensors: Mapping[str, Described], metadata: Mapping[str, str]
    ) -> None:
        self._tensors = dict(tensors)
        self.order = order_of(tensors)
        self._left = list(reversed(self.order))
        self._file = HashedFile(str(path))
        header = header_of(tensors, metadata).encode()
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

    def close(self) -> Written:
        """End the file once all tensors are written, and wait until the disk has it."""
        assert not self._left, f"not written: {self._left[::-1]}"
        return Written(*self._file.close())

    def abandon(self) -> None:
        """Close what will not be completed."""
        self._file.abandon()


class Readable(Protocol):
    """A file of which parts can be read."""

    def size(self) -> int:
        """Bytes."""
        ...

    def read_bytes(self, start: int | None = None, end: int | None = None) -> bytes:
        """A part."""
        ...


class RemoteTensors:
    """A safetensors file that is not on a disk, of which only what is asked for is read.

    Raises:
        OSError: it cannot be reached.
        ValueError: it is no safetensors file.
    """

    def __init__(self, where: Readable) -> None:
        self._where = where
        size = where.size()
        length = int.from_bytes(where.read_bytes(0, 8), "little")
        if not 2 <= length <= min(size - 8, _MOST_HEADER):
            raise ValueError("it has no header of safetensors")
        self._begin = 8 + length
        self._table = json.loads(where.read_bytes(8, self._begin))
        self._room = size - self._begin
        if not isinstance(self._table, dict):
            raise ValueError("its header is no object")

    def get_slice(self, name: str) -> "RemoteSlice":
        """One of its tensors, unread."""
        try:
            entry = self._table[name]
            dtype, shape = DTYPES_BY_NAME[entry["dtype"]], [int(n) for n in entry["shape"]]
            first, last = (int(n) for n in entry["data_offsets"])
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"it holds no {name}: {error!r}") from None
        if not 0 <= first <= last <= self._room:
            raise ValueError(f"{name} lies outside of the file")
        if last - first != math.prod(shape) * dtype.itemsize or min(shape, default=0) < 0:
            raise ValueError(f"{name} has another size than its shape says")
        return RemoteSlice(self._where, self._begin + first, entry["dtype"], shape)


class RemoteSlice:
    """A tensor in a store."""

    def __init__(self, where: Readable, begin: int, dtype: str, shape: list[int]) -> None:
        self._where, self._begin, self._dtype, self._shape = where, begin, dtype, shape

    def get_dtype(self) -> str:
        """As safetensors names it."""
        return self._dtype

    def get_shape(self) -> list[int]:
        """Its shape."""
        return self._shape

    def __getitem__(self, region: tuple[slice, ...]) -> torch.Tensor:
        """A region of it: of whole rows from the first to the last, read at once."""
        dtype = DTYPES_BY_NAME[self._dtype]
        start, stop = (region[0].start, region[0].stop) if region else (0, 1)
        row = math.prod(self._shape[1:]) * dtype.itemsize
        begin, end = self._begin + start * row, self._begin + stop * row
        shape = [stop - start, *self._shape[1:]] if region else []
        if begin == end:
            return torch.empty(shape, dtype=dtype)[(slice(None), *region[1:])]
        data = torch.frombuffer(bytearray(self._where.read_bytes(begin, end)), dtype=torch.uint8)
        if len(data) != end - begin:
            raise ValueError("it is shorter than its header says")
        rows = data.view(dtype).reshape(shape)
        return rows[(slice(None), *region[1:])] if region else rows
