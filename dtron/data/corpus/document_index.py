"""Index of the documents of a corpus: held-out documents, and groups of training documents.

The groups let a rank shuffle the documents without an array of all documents. They are random, of
at most about 2^18 training documents each: document number i is in group g if the hash of i
begins with the bits of g. An epoch permutes the groups, and the documents in each group
(`dtron/data/packing.py`). A rank reads one group at a time. To open a corpus of 10^9 documents, it
reads only the sizes of 4096 groups.

    FOLDER/documents.bin    (n,) start int64, length uint32, number uint32 of each document: group
                            0, group 1, ..., then the held-out documents; in each, by number
    FOLDER/groups.bin       int64 (G + 1, 2), documents and tokens of each group; last: held out
    FOLDER/index.json       hash of groups.bin; written last

Whether a document is held out depends on the hash of its tokens, so that copies of it are held out
too. If documents are added or moved, the split of the other documents stays the same, unless
MAX_HELD_OUT limits the number of held-out documents.
"""

import hashlib
import json
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dtron.data.corpus.shards import write_json
from dtron.data.corpus.token_corpus import TokenCorpus
from dtron.data.shuffle import hash64
from dtron.errors import DataError
from dtron.io.untrusted import MB, open_regular, parse, read_bytes, read_text

GROUP_DOCUMENTS = 1 << 18
"""Maximum number of documents per group, on average; a smaller corpus is one group."""
MAX_HELD_OUT = 1 << 18
"""Maximum number of held-out documents, on average; more would never be read."""
MAX_DOCUMENTS = 2**32
_FORMAT = 1
_RECORD = np.dtype([("start", "<i8"), ("length", "<u4"), ("number", "<u4")])
_FIX = "delete the folder; the next start builds it again"


@dataclass(frozen=True)
class Documents:
    """Some documents of a corpus."""

    numbers: np.ndarray
    """int64 (n,), number of each document in the corpus"""
    starts: np.ndarray
    """int64 (n,), position of each document's first token in the corpus"""
    lengths: np.ndarray
    """int64 (n,), number of tokens of each document, at least 1"""

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def tokens(self) -> int:
        """Number of tokens."""
        return int(self.lengths.sum())

    def take(self, order: np.ndarray) -> "Documents":
        """Return the documents in the order of `order`, int64 (n,) indices."""
        return Documents(self.numbers[order], self.starts[order], self.lengths[order])


def documents_of(offsets: np.ndarray) -> Documents:
    """Return successive documents: document i has the tokens [offsets[i], offsets[i + 1]).

    Args:
        offsets: int64 (n + 1,).
    """
    return Documents(np.arange(len(offsets) - 1), offsets[:-1], np.diff(offsets))


class DocumentIndex:
    """An open index.

    Args:
        path: documents.bin.
        sizes: int64 (G + 1, 2), as in groups.bin.
    """

    def __init__(self, path: Path, sizes: np.ndarray) -> None:
        self._path, self._sizes = path, sizes
        self._ends = np.cumsum([0, *sizes[:, 0].tolist()])

    @property
    def folder(self) -> Path:
        """The folder of the index."""
        return self._path.parent

    @property
    def group_sizes(self) -> np.ndarray:
        """int64 (G, 2): number of documents and of tokens of each group of training documents."""
        return self._sizes[:-1]

    @property
    def n_documents(self) -> int:
        """Number of training documents."""
        return int(self.group_sizes[:, 0].sum())

    def group(self, number: int) -> Documents:
        """Return the documents of a group of training documents. Raises DataError."""
        assert 0 <= number < len(self.group_sizes)
        return self._read(number)

    def held_out(self) -> Documents:
        """Return the held-out documents. Raises DataError."""
        return self._read(len(self.group_sizes))

    def _read(self, number: int) -> Documents:
        start, stop = int(self._ends[number]), int(self._ends[number + 1])
        size = (stop - start) * _RECORD.itemsize
        try:
            with open_regular(self._path) as file:
                content = os.pread(file.fileno(), size, start * _RECORD.itemsize)
        except OSError as error:
            raise DataError(f"{self._path}: {error.strerror}") from None
        if len(content) != size:
            raise DataError(f"{self._path} was truncated while it was read; {_FIX}")
        records = np.frombuffer(content, _RECORD)
        columns = (records[name].astype(np.int64) for name in ("number", "start", "length"))
        found = Documents(*columns)
        ends, total = found.starts + found.lengths, int(self._sizes[:, 1].sum())
        inside = (found.starts >= 0).all() and (ends <= total).all() and (found.lengths > 0).all()
        if not inside or found.tokens != self._sizes[number, 1]:
            raise DataError(f"{self._path} is damaged; {_FIX}")
        return found


def index_key(corpus: TokenCorpus, fraction: float) -> str:
    """Return a hash of everything that an index depends on."""
    identity = json.dumps([_FORMAT, GROUP_DOCUMENTS, corpus.content, fraction])
    return hashlib.sha256(identity.encode()).hexdigest()[:32]


def open_index(folder: Path, corpus: TokenCorpus) -> DocumentIndex | None:
    """Open the index in a folder; None if it does not exist, is damaged or of another corpus."""
    try:
        meta = parse(read_text(folder / "index.json", MB))
        content = read_bytes(folder / "groups.bin", 64 * MB)
        if hashlib.sha256(content).hexdigest() != meta["groups"]:
            return None
        sizes = np.frombuffer(content, "<i8").reshape(-1, 2)
        documents = (folder / "documents.bin").stat()
        if documents.st_mtime_ns > (folder / "index.json").stat().st_mtime_ns:
            return None  # changed, or copied without its times: the caller builds it again
    except (OSError, ValueError, LookupError, TypeError):
        return None
    if len(sizes) < 2 or documents.st_size != corpus.n_documents * _RECORD.itemsize:
        return None
    if sizes.sum(axis=0).tolist() != [corpus.n_documents, len(corpus.tokens)]:
        return None
    return DocumentIndex(folder / "documents.bin", sizes)


def build_index(corpus: TokenCorpus, fraction: float, folder: Path) -> None:
    """Write the index of a corpus to an existing folder, in two passes over hashes and lengths.

    Args:
        fraction: fraction of the documents to hold out; with two different documents and a
            fraction above 0, at least one is held out and at least one is left to train on.
    Raises:
        DataError: the corpus has more than 2^32 documents, is damaged or cannot be read.
        OSError: the index cannot be written.
    """
    n = corpus.n_documents
    corpus.check_documents()
    if n > MAX_DOCUMENTS:
        raise DataError(f"the corpus has {n:,} documents; the limit is {MAX_DOCUMENTS:,}")
    rule = _SplitRule.of(corpus, fraction)
    bits = max(0, math.ceil(math.log2(n / GROUP_DOCUMENTS)))
    sizes = np.zeros((2**bits + 1, 2), np.int64)
    for _, lengths, groups in _chunks(corpus, rule, bits):
        sizes[:, 0] += np.bincount(groups, minlength=len(sizes))
        sizes[:, 1] += np.bincount(groups, lengths, len(sizes)).astype(np.int64)
    _scatter(corpus, rule, bits, sizes[:, 0], folder / "documents.bin")
    content = sizes.astype("<i8").tobytes()
    (folder / "groups.bin").write_bytes(content)
    write_json(folder / "index.json", {"groups": hashlib.sha256(content).hexdigest()})


@dataclass(frozen=True)
class _SplitRule:
    """Decides from the hash of its tokens whether a document is held out."""

    below: int
    """Documents with hashes below this number are held out."""
    lowest: int
    """Lowest hash of all documents; held out if any document is held out."""
    highest: int
    """Highest hash of all documents; never held out."""

    @classmethod
    def of(cls, corpus: TokenCorpus, fraction: float) -> "_SplitRule":
        fraction = min(fraction, MAX_HELD_OUT / corpus.n_documents)
        lowest, highest = 2**64 - 1, 0
        for _, hashes, _ in corpus.documents() if fraction else ():
            mixed = hash64(hashes)
            lowest, highest = min(lowest, int(mixed.min())), max(highest, int(mixed.max()))
        return cls(int(fraction * 2**64), lowest, highest)

    def held_out(self, hashes: np.ndarray) -> np.ndarray:
        """Return which documents are held out: bool (n,), from their hashes, uint64 (n,)."""
        if not self.below or self.lowest == self.highest:
            return np.zeros(len(hashes), bool)
        mixed = hash64(hashes)
        out = (mixed < np.uint64(self.below)) | (mixed == np.uint64(self.lowest))
        return out & (mixed != np.uint64(self.highest))


def _chunks(
    corpus: TokenCorpus, rule: _SplitRule, bits: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yield (number of the first document, lengths, group of each document) of each chunk."""
    for first, hashes, lengths in corpus.documents():
        numbers = np.arange(first, first + len(hashes), dtype=np.uint64)
        groups = np.zeros(len(hashes), np.uint32)
        if bits:
            groups = (hash64(numbers) >> np.uint64(64 - bits)).astype(np.uint32)
        groups[rule.held_out(hashes)] = 2**bits
        yield first, lengths, groups


def _scatter(
    corpus: TokenCorpus, rule: _SplitRule, bits: int, counts: np.ndarray, path: Path
) -> None:
    """Write the record of each document to the place of its group in documents.bin."""
    cursors = (np.cumsum(counts) - counts) * _RECORD.itemsize
    start = 0
    with open(path, "wb") as file:
        file.truncate(int(counts.sum()) * _RECORD.itemsize)
        for first, lengths, groups in _chunks(corpus, rule, bits):
            records = np.empty(len(lengths), _RECORD)
            ends = start + np.cumsum(lengths, dtype=np.int64)
            records["start"], records["length"] = ends - lengths, lengths
            records["number"] = np.arange(first, first + len(lengths), dtype=np.uint32)
            start = int(ends[-1])
            narrow = groups.astype(np.uint16) if bits < 16 else groups  # radix sort
            records = records[np.argsort(narrow, kind="stable")]
            found = np.bincount(groups, minlength=len(counts))
            content, at = memoryview(records.tobytes()), 0
            for group in np.flatnonzero(found).tolist():
                size = int(found[group]) * _RECORD.itemsize
                os.pwrite(file.fileno(), content[at : at + size], int(cursors[group]))
                cursors[group] += size
                at += size
        file.flush()
        os.fsync(file.fileno())
