"""A tokenized corpus, read on demand from a disk or from an object store."""

import contextlib
import hashlib
import logging
import os
import threading
from bisect import bisect_right
from collections import Counter, OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from dtron.data.corpus.shards import (
    CHUNK_DOCUMENTS,
    FIX,
    FORMAT,
    KINDS,
    META,
    Shard,
    as_shard,
    dtype_of,
    read_array,
    read_shard,
    shard_path,
)
from dtron.data.tokenizer import NO_LOSS, Tokenizer
from dtron.errors import DataError, cause_of
from dtron.io.filesystem import Location, listed, read, size_of
from dtron.io.remote_path import STORE_SECONDS, Remote, UnreachableError, read_ranges, retried
from dtron.io.untrusted import open_regular, parse, sha256_of

_OPEN_FILES = 256
_REQUEST_SECONDS = 60.0
"""Longest time limit of the requests of one read, before they are repeated."""
_REQUESTS = 1024  # sent together; more would share the time limit of one read
_STORE_FIX = "check the store, then start again: the run resumes from its last checkpoint"

logger = logging.getLogger("dtron")


class TokenShards:
    """Tokens (N,) of all shards, read on demand.

    It is an error if a file is truncated or changed; memory-mapped, it would end the process
    (SIGBUS).

    Args:
        files: path and number of tokens of each shard.
        dtype: one of DTYPES.
        vocab_size: every token is below it.
        masked: whether tokens may have the bit NO_LOSS.
        store_seconds: how long a request to a store is repeated if it fails.
    """

    def __init__(
        self,
        files: Sequence[tuple[Location, int]],
        dtype: str,
        vocab_size: int,
        store_seconds: float = STORE_SECONDS,
        masked: bool = False,
    ) -> None:
        self.dtype, self._vocab_size = np.dtype(dtype), vocab_size
        self.masked = masked
        self.store_seconds = store_seconds
        self._paths = [path for path, _ in files]
        self._ends = np.cumsum([0, *(n for _, n in files)]).tolist()
        self._opened: OrderedDict[int, BinaryIO] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, part: slice) -> np.ndarray:
        """Read a slice without a step. Raises DataError: as `read`."""
        start, stop, _ = part.indices(len(self))
        return self.read([(start, max(start, stop))])

    def read(self, spans: Sequence[tuple[int, int]]) -> np.ndarray:
        """Read the tokens [start, stop) of all spans, concatenated.

        All are checked together, since a check per document takes up to a fifth of the loader's
        time.

        Raises:
            DataError: a file has become shorter or cannot be read, or holds ids that the tokenizer
                does not have.
        """
        tokens = np.empty(sum(stop - start for start, stop in spans), self.dtype)
        buffer, filled = tokens.data.cast("B") if len(tokens) else memoryview(b""), 0
        remote: list[tuple[memoryview, Remote, int]] = []  # read together, since each one waits
        for start, stop in spans:
            while start < stop:
                shard = bisect_right(self._ends, start) - 1
                end = min(stop, self._ends[shard + 1])
                size = (end - start) * self.dtype.itemsize
                at = (start - self._ends[shard]) * self.dtype.itemsize
                part, path = buffer[filled : filled + size], self._paths[shard]
                if isinstance(path, Remote):
                    remote.append((part, path, at))
                else:
                    self._read_into(shard, part, at)
                filled, start = filled + size, end
        for first in range(0, len(remote), _REQUESTS):
            self._fetch(remote[first : first + _REQUESTS])
        ids = tokens & np.uint32(NO_LOSS - 1) if self.masked else tokens
        if len(ids) and ids.max() >= self._vocab_size:
            raise DataError(
                f"{self._paths[0].parent} is damaged: token {ids.max()} is not in the "
                f"tokenizer's vocabulary of {self._vocab_size}; {FIX}"
            )
        return tokens

    def _fetch(self, parts: Sequence[tuple[memoryview, Remote, int]]) -> None:
        ranges = [(path, at, at + len(buffer)) for buffer, path, at in parts]
        try:
            limit = min(_REQUEST_SECONDS, self.store_seconds / 2)  # one more try is possible
            found = retried(lambda: read_ranges(ranges, limit), self.store_seconds)
        except FileNotFoundError as error:
            raise DataError(f"{error.filename or error} is missing; {_STORE_FIX}") from None
        except OSError as error:
            raise DataError(f"{error}; {_STORE_FIX}") from None
        for (buffer, _, _), content in zip(parts, found, strict=True):
            buffer[:] = content

    def _read_into(self, shard: int, buffer: memoryview, at: int) -> None:
        path, filled = self._paths[shard], 0
        try:
            with self._lock:  # another thread may close the file, and its descriptor be reused
                file = self._file(shard)
                while filled < len(buffer):
                    n = os.preadv(file.fileno(), [buffer[filled:]], at + filled)
                    if not n:
                        raise DataError(f"{path} was truncated while it was read; {FIX}")
                    filled += n
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from None

    def _file(self, shard: int) -> BinaryIO:
        if shard not in self._opened:
            if len(self._opened) >= _OPEN_FILES:
                self._opened.popitem(last=False)[1].close()
            path = self._paths[shard]
            assert isinstance(path, Path)
            self._opened[shard] = open_regular(path)
        self._opened.move_to_end(shard)
        return self._opened[shard]


@dataclass(frozen=True)
class TokenCorpus:
    """A tokenized corpus: one folder of shards, or several, concatenated."""

    folders: tuple[Location, ...]
    tokens: TokenShards
    """uint16 or uint32 (N,), with the bit NO_LOSS if they are masked"""
    shards: tuple[tuple[Location, Shard], ...]
    """Folder and counts of each shard."""
    tokenizer: str
    """Fingerprint of the tokenizer."""
    content: str
    """Hash of all tokens and of the borders between documents, whatever the shards."""
    duplicates: int
    """Number of documents that equal an earlier one of their folder."""

    @property
    def n_documents(self) -> int:
        """Number of documents, without empty ones."""
        return sum(shard.documents for _, shard in self.shards)

    def documents(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield (number of the first document, uint64 hashes, uint32 lengths), chunk by chunk.

        Raises:
            DataError: a file has become shorter, or cannot be read.
        """
        number = 0
        for folder, shard in self.shards:
            path, n = folder / f"{shard.name}.documents", shard.documents
            for first in range(0, n, CHUNK_DOCUMENTS):
                count = min(CHUNK_DOCUMENTS, n - first)
                hashes = read_array(path, "<u8", 8 * first, count)
                yield number + first, hashes, read_array(path, "<u4", 8 * n + 4 * first, count)
            number += n

    def check_documents(self) -> None:
        """Compare hashes and lengths of all documents with their hashes in corpus.json.

        Raises:
            DataError: a file differs, or cannot be read.
        """
        for folder, shard in self.shards:
            path = folder / f"{shard.name}.documents"
            try:
                equal = _sha256_of(path) == shard.documents_sha256
            except OSError as error:
                raise DataError(f"{path}: {cause_of(error, path)}") from None
            if not equal:
                raise DataError(
                    f"{path} is damaged: its SHA-256 is not that in {META}; copy the folder "
                    "again, or delete it and tokenize again"
                )

    def source_of(self, position: int) -> tuple[str, int]:
        """Return the file of the document at a token's position, and its number in that file.

        The path is that at the time of tokenizing; numbers count documents with text, from 0.
        """
        number = bisect_right(self._ends, position) - 1
        folder, shard = self.shards[number]
        path = folder / f"{shard.name}.documents"
        lengths = read_array(path, "<u4", 8 * shard.documents, shard.documents)
        left = int(np.searchsorted(np.cumsum(lengths), position - self._ends[number], "right"))
        earlier = Counter[str]()  # documents of each file in parts before
        for where, each in self.shards[:number]:
            for name, _, _, count in _sources(where, each):
                earlier[name] += count
        for name, _, _, count in _sources(folder, shard):
            if left < count:
                return name, earlier[name] + left
            left -= count
            earlier[name] += count
        return str(path), left

    @property
    def _ends(self) -> list[int]:
        return list(accumulate((shard.tokens for _, shard in self.shards), initial=0))


def _sha256_of(path: Location) -> str:
    if isinstance(path, Path):
        return sha256_of(path)
    found = hashlib.sha256()
    for block in path.blocks():
        found.update(block)
    return found.hexdigest()


def _sources(folder: Location, shard: Shard) -> list[list[Any]]:
    found = read_shard(folder, shard.name)
    return found.sources if found else []


def tokenizer_of(folder: Location) -> str | None:
    """Return the fingerprint of the tokenizer of the corpus in a folder; None: unknown."""
    try:
        return str(parse(read(folder / META))["tokenizer"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def open_corpus(
    folder: Location, tokenizer: Tokenizer, store_seconds: float = STORE_SECONDS
) -> TokenCorpus | None:
    """Open the corpus in a folder; None if it does not exist, is damaged, or of another tokenizer.

    Files on a disk that are newer than corpus.json are compared with their hashes there.

    Args:
        store_seconds: how long a request to a store is repeated if it fails.
    Raises:
        UnreachableError: a store does not answer.
    """
    try:
        folder = retried(lambda: listed(folder), store_seconds)
        meta = parse(retried(lambda: read(folder / META), store_seconds))
        shards = [as_shard(each) for each in meta["shards"]]
        known = meta["format"] == FORMAT and meta["tokenizer"] == tokenizer.fingerprint
        masked = bool(meta.get("masked", False))
        if not known or meta["dtype"] != dtype_of(tokenizer, masked):
            return None
        item = np.dtype(meta["dtype"]).itemsize
        for shard in shards:
            if not 0 < shard.documents <= shard.tokens:
                return None
            sizes = [size_of(shard_path(folder, shard, kind)) for kind in KINDS]
            if sizes != [item * shard.tokens, 12 * shard.documents]:
                return None
        counts = (sum(shard.documents for shard in shards), sum(shard.tokens for shard in shards))
        if not shards or counts != (meta["documents"], meta["tokens"]):
            return None
        if isinstance(folder, Path) and not _unchanged(folder, shards):
            return None
        content, duplicates = str(meta["content"]), int(meta["duplicates"])
    except UnreachableError:
        raise
    except (OSError, ValueError, LookupError, TypeError, OverflowError):
        return None
    files = [(shard_path(folder, shard, "tokens"), shard.tokens) for shard in shards]
    tokens = TokenShards(files, meta["dtype"], tokenizer.vocab_size, store_seconds, masked)
    places = tuple((folder, shard) for shard in shards)
    return TokenCorpus((folder,), tokens, places, tokenizer.fingerprint, content, duplicates)


def _unchanged(folder: Path, shards: Sequence[Shard]) -> bool:
    """Whether all files are older than corpus.json, which is written last, or have its hashes.

    Files that were copied are newer too; corpus.json is touched, so that they are read whole once
    and not at every start.
    """
    written = (folder / META).stat().st_mtime_ns
    newer = [
        shard
        for shard in shards
        if any((folder / f"{shard.name}.{kind}").stat().st_mtime_ns > written for kind in KINDS)
    ]
    if not newer:
        return True
    logger.info(
        "%s is newer than its corpus.json: comparing its content with the hashes there, which is "
        "not necessary after a copy that keeps modification times (cp -a)",
        folder,
    )
    for shard in newer:
        for kind, expected in zip(
            KINDS, (shard.tokens_sha256, shard.documents_sha256), strict=True
        ):
            if sha256_of(folder / f"{shard.name}.{kind}") != expected:
                return False
    with contextlib.suppress(OSError):  # it may be read-only
        os.utime(folder / META)
    return True


def joined(corpora: Sequence[TokenCorpus], vocab_size: int) -> TokenCorpus:
    """Return the concatenation of corpora of one tokenizer.

    Raises:
        DataError: some are texts and others chats.
    """
    if len(corpora) == 1:
        return corpora[0]
    if len({corpus.tokens.masked for corpus in corpora}) > 1:
        raise DataError(
            "data.paths: some folders hold texts and others chats; make them sources of "
            "data.mixture"
        )
    shards = tuple(each for corpus in corpora for each in corpus.shards)
    files = [(shard_path(folder, shard, "tokens"), shard.tokens) for folder, shard in shards]
    first = corpora[0]
    content = hashlib.sha256("".join(corpus.content for corpus in corpora).encode()).hexdigest()
    return TokenCorpus(
        tuple(folder for corpus in corpora for folder in corpus.folders),
        TokenShards(
            files,
            first.tokens.dtype.str,
            vocab_size,
            first.tokens.store_seconds,
            first.tokens.masked,
        ),
        shards,
        first.tokenizer,
        content,
        sum(corpus.duplicates for corpus in corpora),
    )
