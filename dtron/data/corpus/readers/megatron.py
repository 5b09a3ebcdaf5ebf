"""Megatron-Core's tokenized data: PREFIX.bin holds the tokens, PREFIX.idx where documents are.

PREFIX.idx, little-endian:

    b"MMIDIDX\\0\\0"  uint64 version = 1   uint8 type of the tokens, a key of TYPES
    uint64 S, D      number of sequences, and of documents + 1
    int32 (S,)       tokens of each sequence
    int64 (S,)       byte of the first token of each sequence in PREFIX.bin
    int64 (D,)       document d has the sequences documents[d] to documents[d + 1] - 1
    int8 (S,)        modes, in files of multimodal data only

Sequences follow each other in PREFIX.bin without gaps, as Megatron-Core writes them. All of this is
checked while documents are read, so that none is lost or read twice.

Source: Megatron-LM, module megatron.core.datasets.indexed_dataset.
"""

import os
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from dtron.data.corpus.files import INDEX, TOKENS, open_file
from dtron.data.tokenizer import TokenDocument
from dtron.errors import DataError, cause_of

MAGIC = b"MMIDIDX\x00\x00"
TYPES = {1: "<u1", 2: "<i1", 3: "<i2", 4: "<i4", 5: "<i8", 8: "<u2"}
"""Code of a type in PREFIX.idx -> dtype of the tokens; 6 and 7 are floats."""
_HEADER_BYTES = len(MAGIC) + 8 + 1 + 16
_BLOCK_DOCUMENTS = 4096


def read_megatron(
    path: str, start: int, end: int, most: int, refuse: Callable[[str], None]
) -> Iterator[TokenDocument]:
    """Yield the documents that begin in bytes [start, end) of PREFIX.bin.

    Args:
        most: bytes of the largest document to read.
        refuse: called with the name of a larger one, which is left out.
    Raises:
        DataError: a file is damaged or cannot be read; it names the file and the byte.
    """
    where = path[: -len(TOKENS)] + INDEX
    try:
        with open_file(path) as tokens, open_file(where) as opened:
            size = tokens.seek(0, os.SEEK_END)
            index = _Index.open(opened, where, path, size)
            first = index.first_from(start) if start else 0
            last = index.first_from(end) if end < size else index.n_documents
            for block in range(first, last, _BLOCK_DOCUMENTS):
                stop = min(block + _BLOCK_DOCUMENTS, last)
                offsets = index.offsets(block, stop)
                yield from _read_block(tokens, index, block, offsets, most, refuse)
    except OSError as error:
        named = str(error.filename or path)
        raise DataError(f"{named}: {cause_of(error, named)}") from None


def _read_block(
    tokens: BinaryIO,
    index: "_Index",
    first: int,
    offsets: np.ndarray,
    most: int,
    refuse: Callable[[str], None],
) -> Iterator[TokenDocument]:
    tokens.seek(int(offsets[0]))
    for number, size in enumerate(np.diff(offsets).tolist(), first + 1):
        at, name = tokens.tell(), f"{index.tokens}, document {number:,}"
        if size > most:
            refuse(name)
            tokens.seek(at + size)
            continue
        content = tokens.read(size)
        if len(content) != size:
            raise DataError(
                f"{index.tokens}, byte {at + len(content)}: truncated while it was read"
            )
        yield TokenDocument(np.frombuffer(content, index.dtype), name, at)


@dataclass(frozen=True)
class _Column:
    """An array in a file, read on demand."""

    file: BinaryIO
    path: str
    offset: int
    dtype: np.dtype
    n: int

    def at(self, i: int) -> int:
        """Return the position of element i in the file, in bytes."""
        return self.offset + i * self.dtype.itemsize

    def read(self, start: int, stop: int) -> np.ndarray:
        """Return the elements [start, stop), int64."""
        self.file.seek(self.at(start))
        content = self.file.read((stop - start) * self.dtype.itemsize)
        if len(content) != (stop - start) * self.dtype.itemsize:
            where = self.at(start) + len(content)
            raise DataError(f"{self.path}, byte {where}: truncated while it was read")
        return np.frombuffer(content, self.dtype).astype(np.int64)


@dataclass(frozen=True)
class _Index:
    """An open PREFIX.idx."""

    path: str
    tokens: str
    """Path of PREFIX.bin."""
    size: int
    """Number of bytes of PREFIX.bin."""
    dtype: np.dtype
    """Of the tokens."""
    lengths: _Column
    pointers: _Column
    documents: _Column

    @classmethod
    def open(cls, file: BinaryIO, path: str, tokens: str, size: int) -> "_Index":
        """Read the header. Raises DataError: it is not one, or the file has another size."""
        header = file.read(_HEADER_BYTES)
        if not header.startswith(MAGIC):
            raise DataError(
                f"{path}, byte 0: it does not begin with MMIDIDX, so it is no index of "
                "Megatron-Core; write it with Megatron-LM's preprocess_data"
            )
        found = file.seek(0, os.SEEK_END)
        if len(header) < _HEADER_BYTES:
            raise DataError(f"{path}, byte {found}: truncated inside the header")
        version = int.from_bytes(header[9:17], "little")
        if version != 1:
            raise DataError(f"{path}, byte 9: version {version}; version 1 is supported")
        if header[17] not in TYPES:
            known = ", ".join(f"{code} ({np.dtype(name)})" for code, name in TYPES.items())
            raise DataError(f"{path}, byte 17: type {header[17]} of tokens; use one of {known}")
        n, n_documents = (int.from_bytes(header[i : i + 8], "little") for i in (18, 26))
        places, end = [], _HEADER_BYTES
        for count, name in ((n, "<i4"), (n, "<i8"), (n_documents, "<i8")):
            places.append((end, np.dtype(name), count))
            end += count * np.dtype(name).itemsize
        if found < end or not n_documents:
            raise DataError(
                f"{path}, byte {min(found, end)}: truncated: {n} sequences and "
                f"{n_documents} document borders need {end} bytes, but it has {found}; copy or "
                "write it again"
            )
        if found not in (end, end + n):
            raise DataError(f"{path}, byte {end}: {found - end} bytes more than an index has")
        columns = [_Column(file, path, *place) for place in places]
        index = cls(path, tokens, size, np.dtype(TYPES[header[17]]), *columns)
        if found != end and _Column(file, path, end, np.dtype("i1"), n).read(0, n).any():
            raise DataError(f"{path}, byte {end}: multimodal data are not supported")
        index._check_ends()
        return index

    @property
    def n_documents(self) -> int:
        """Number of documents."""
        return self.documents.n - 1

    def first_from(self, byte: int) -> int:
        """Return the first document that begins at this byte of PREFIX.bin or after it."""
        return bisect_left(range(self.n_documents), byte, key=lambda d: self.offsets(d, d).item())

    def offsets(self, first: int, stop: int) -> np.ndarray:
        """Return the bytes at which the documents [first, stop) begin, and the end of the last.

        Returns:
            int64 (stop - first + 1,).
        Raises:
            DataError: the index is damaged.
        """
        borders, n = self.documents.read(first, stop + 1), self.lengths.n
        wrong = np.flatnonzero((borders < 0) | (borders > n) | (np.diff(borders, prepend=0) < 0))
        if len(wrong):
            at, border = self.documents.at(first + int(wrong[0])), borders[wrong[0]]
            raise DataError(
                f"{self.path}, byte {at}: document {first + int(wrong[0]) + 1:,} begins with "
                f"sequence {border}, out of range or before the previous document; there are {n}"
            )
        a, b = int(borders[0]), int(borders[-1])
        lengths, begins = self.lengths.read(a, b), self.pointers.read(a, min(b + 1, n))
        begins = begins if b < n else np.append(begins, self.size)
        if len(short := np.flatnonzero(lengths < 0)):
            at = self.lengths.at(a + int(short[0]))
            raise DataError(f"{self.path}, byte {at}: a sequence of {lengths[short[0]]} tokens")
        ends = begins[:-1] + lengths * self.dtype.itemsize
        outside = (begins < 0) | (begins > self.size)
        outside[:-1] |= ends > self.size
        rules = (
            (outside, f"which has {self.size} bytes"),
            (ends != begins[1:], "but the next begins at byte {}, and gaps are not supported"),
        )
        for wrong, rule in rules:
            if wrong.any():
                i = int(wrong.argmax())
                end, after = [*ends, begins[-1]][i], [*begins, 0][i + 1]
                at = self.pointers.at(a + i)
                raise DataError(
                    f"{self.path}, byte {at}: sequence {a + i + 1:,} has the bytes {begins[i]} to "
                    f"{end} of {self.tokens}, {rule.format(after)}; copy both files again"
                )
        return begins[borders - a]

    def _check_ends(self) -> None:
        """Check that documents have the first and the last sequence, and where the first begins."""
        first, last = (int(self.documents.read(i, i + 1)[0]) for i in (0, self.documents.n - 1))
        if (first, last) != (0, self.lengths.n):
            raise DataError(
                f"{self.path}, byte {self.documents.at(0)}: documents have the sequences {first} "
                f"to {last}, but there are {self.lengths.n}; copy it again"
            )
        if not self.lengths.n and self.size:
            raise DataError(
                f"{self.path} has no sequences, but {self.tokens} has {self.size} bytes; copy both "
                "files again"
            )
        if self.lengths.n and (begin := int(self.pointers.read(0, 1)[0])):
            raise DataError(
                f"{self.path}, byte {self.pointers.at(0)}: the first sequence begins at byte "
                f"{begin} of {self.tokens}, not at 0; copy it again"
            )
