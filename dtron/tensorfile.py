"""Writing a safetensors file one tensor after the other, so that memory holds one at a time.

The safetensors library writes whole dictionaries of tensors; it is what reads these files. A file
is hashed on its way and has reached the disk when `close` returns.

Source of the format: github.com/huggingface/safetensors, README, "Format".
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

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
_PIECE = 1 << 24  # bytes hashed and written at once: they are still in the processor's cache


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


class TensorFile:
    """A safetensors file in the making.

    Attributes:
        order: names in the order in which `write` wants them: wide elements first, so that all lie
            at multiples of their size.
    Args:
        path: a new file.
        tensors: what it will hold, by name.
        metadata: free text by key in the file's header.
    """

    def __init__(
        self, path: Path, tensors: Mapping[str, Described], metadata: Mapping[str, str]
    ) -> None:
        self._tensors = dict(tensors)
        self.order = sorted(tensors, key=lambda name: -tensors[name].dtype.itemsize)
        self._left = list(reversed(self.order))
        self._hash = hashlib.sha256()
        self._bytes = 0
        self._file = path.open("xb", buffering=0)
        self._put(self._header(metadata))

    def _header(self, metadata: Mapping[str, str]) -> bytes:
        table: dict[str, object] = {"__metadata__": dict(metadata)} if metadata else {}
        start = 0
        for name in self.order:
            described = self._tensors[name]
            table[name] = {
                "dtype": DTYPE_NAMES[described.dtype],
                "shape": list(described.shape),
                "data_offsets": [start, start + described.nbytes],
            }
            start += described.nbytes
        text = json.dumps(table, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

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
            self._put(flat.numpy().data)

    def _put(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while view:
            n = self._file.write(view[:_PIECE])  # may be short where the disk fills up
            self._hash.update(view[:n])
            self._bytes += n
            view = view[n:]

    def close(self) -> Written:
        """End the file once all tensors are written, and wait until the disk has it."""
        assert not self._left, f"not written: {self._left[::-1]}"
        os.fsync(self._file.fileno())
        self._file.close()
        return Written(self._bytes, self._hash.hexdigest())

    def abandon(self) -> None:
        """Close what will not be completed."""
        self._file.close()
