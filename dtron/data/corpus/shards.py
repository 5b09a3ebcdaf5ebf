"""Token shards: the files of a tokenized corpus, on a disk or in an object store.

    FOLDER/NAME.tokens       uint16 or uint32 (N,), little-endian; every text ends with EOS. Of
                             chats uint32, with the bit NO_LOSS where a token has no loss
    FOLDER/NAME.documents    uint64 (n,) hash of each document's tokens, then uint32 (n,) lengths
    FOLDER/NAME.json         counts and hashes of the two files; written last
    FOLDER/corpus.json       the shards in order, dtype and tokenizer; written after all shards

The corpus is the concatenation of its shards. A position of a token or the number of a document
counts from the start of the corpus. `dtron/data/corpus/token_corpus.py` reads them.
"""

import hashlib
import json
import math
import os
import uuid
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

import numpy as np

from dtron.data.tokenizer import Ids, Tokenizer
from dtron.errors import DataError, cause_of
from dtron.io.filesystem import Location, read, size_of, write_atomically
from dtron.io.remote_path import STORE_SECONDS, Remote, UnreachableError, retried
from dtron.io.untrusted import open_regular, parse

FORMAT = 4  # raise it when the files or the handling of documents change
DTYPES = ("<u2", "<u4")  # for vocabularies of up to 2^16 tokens, and for larger ones
CHUNK_DOCUMENTS = 1 << 22
"""Documents whose hashes and lengths are in memory at once, at most."""
_SORTED_HASHES = 1 << 26
META = "corpus.json"
"""File that makes a folder of shards a corpus."""
KINDS = ("tokens", "documents")
"""Suffixes of the two files of a shard."""
FIX = "delete the folder and tokenize again; a cache is built by the next start"


@dataclass(frozen=True)
class Shard:
    """Counts and hashes of one shard."""

    name: str
    documents: int
    tokens: int
    empty: int = 0
    """Number of documents without text, which are left out."""
    tokens_sha256: str = ""
    documents_sha256: str = ""
    characters: int = 0
    """Length of all texts, in characters."""
    sources: list[list[Any]] = field(default_factory=list)
    """[path, first byte, last byte + 1, number of documents] of each part of a file, in order."""
    skipped: list[str] = field(default_factory=list)
    """Messages of the documents that were left out because of an error."""


class ShardWriter:
    """Writes one shard; a context manager, which leaves no complete shard after an error.

    Args:
        folder: an existing folder.
        name: name of the shard in it.
        dtype: one of DTYPES.
    """

    def __init__(self, folder: Path, name: str, dtype: str) -> None:
        self._folder, self._name, self._dtype = folder, name, np.dtype(dtype)
        self._hashes, self._lengths = array("Q"), array("I")
        self._content, self._tokens = hashlib.sha256(), 0
        self._partial = folder / f"{name}.{uuid.uuid4().hex}.partial"

    def __enter__(self) -> "ShardWriter":
        self._file = open(self._partial, "wb")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()
        self._partial.unlink(missing_ok=True)

    @property
    def counts(self) -> tuple[int, int]:
        """Number of documents and of tokens so far."""
        return len(self._lengths), self._tokens

    def add(self, ids: Ids, images: Sequence[str] = ()) -> None:
        """Append a document, at least one token.

        Args:
            images: the document's images as its row names them; documents with equal tokens but
                other images are no duplicates.
        """
        encoded = np.array(ids, self._dtype).tobytes()
        self._file.write(encoded)
        self._content.update(encoded)
        self._hashes.append(hash_of(encoded + "\0".join(images).encode()))
        self._lengths.append(len(ids))
        self._tokens += len(ids)

    def finish(self, **counts: Any) -> Shard:
        """Write the remaining files of the shard, durably (fsync), and return its metadata.

        Args:
            counts: the fields of Shard that the writer does not compute: `empty`, `characters`,
                `sources` and `skipped`.
        """
        documents = self._hashes.tobytes() + self._lengths.tobytes()
        _sync(self._file)
        os.replace(self._partial, self._folder / f"{self._name}.tokens")
        with open(self._partial, "wb") as file:
            file.write(documents)
            _sync(file)
        os.replace(self._partial, self._folder / f"{self._name}.documents")
        shard = Shard(
            self._name,
            len(self._lengths),
            self._tokens,
            tokens_sha256=self._content.hexdigest(),
            documents_sha256=hashlib.sha256(documents).hexdigest(),
            **counts,
        )
        write_json(self._folder / f"{self._name}.json", asdict(shard))
        return shard


def read_shard(folder: Location, name: str) -> Shard | None:
    """Return a complete shard that an earlier process has written; None: there is none.

    Raises:
        UnreachableError: a store does not answer.
    """
    try:
        shard = as_shard(parse(read(folder / f"{name}.json")))
        sizes = [size_of(folder / f"{name}.{kind}") for kind in KINDS]
    except UnreachableError:
        raise
    except (OSError, ValueError, TypeError):
        return None
    whole = shard.name == name and sizes[1] == 12 * shard.documents
    return shard if whole and sizes[0] in (2 * shard.tokens, 4 * shard.tokens) else None


def as_shard(value: Any) -> Shard:
    """Convert JSON to a Shard. Raises ValueError, TypeError: of another form."""
    shard = Shard(**value)
    counts = (shard.documents, shard.tokens, shard.empty, shard.characters)
    texts = (shard.name, shard.tokens_sha256, shard.documents_sha256, *shard.skipped)
    rows = [(str, int, int, int) == tuple(map(type, row)) for row in shard.sources]
    whole = all(type(n) is int and 0 <= n < 2**62 for n in counts) and all(rows)
    if not whole or not all(type(text) is str for text in texts) or "/" in shard.name:
        raise ValueError("not a shard")
    return shard


def write_json(path: Location, value: dict[str, Any]) -> None:
    """Write a JSON file, durably. Raises OSError."""
    write_atomically(path, json.dumps(value, indent=1) + "\n")


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def hash_of(content: bytes) -> int:
    """Return a 64-bit hash of a document's tokens."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def dtype_of(tokenizer: Tokenizer, masked: bool = False) -> str:
    """Return the row of DTYPES in which tokens of a tokenizer are stored; masked: with NO_LOSS."""
    return DTYPES[masked or tokenizer.vocab_size > 2**16]


def write_corpus(
    folder: Location,
    shards: Sequence[Shard],
    name: str,
    tokenizer: Tokenizer,
    masked: bool = False,
) -> None:
    """Write corpus.json, which makes a folder of shards a corpus.

    Args:
        name: name of the corpus for people.
        masked: whether tokens may have the bit NO_LOSS.
    Raises:
        DataError: no shard has a document.
    """
    full = [shard for shard in shards if shard.documents]
    if not full:
        empty = sum(shard.empty for shard in shards)
        raise DataError(f"{name}: no documents with text ({empty} empty ones)")
    content = hashlib.sha256()
    for hashes in _hashes(folder, full):
        content.update(hashes.tobytes())
    meta = {
        "format": FORMAT,
        "corpus": name,
        "documents": sum(shard.documents for shard in full),
        "tokens": sum(shard.tokens for shard in full),
        "empty": sum(shard.empty for shard in shards),
        "dtype": dtype_of(tokenizer, masked),
        "masked": masked,
        "tokenizer": tokenizer.fingerprint,
        "vocab_size": tokenizer.vocab_size,
        "eos_id": tokenizer.eos_id,
        "content": content.hexdigest(),
        "duplicates": _count_duplicates(folder, full),
        "shards": [asdict(shard) | {"sources": [], "skipped": []} for shard in full],
    }
    write_json(folder / META, meta)


def _hashes(folder: Location, shards: Sequence[Shard]) -> Iterator[np.ndarray]:
    for shard in shards:
        for first in range(0, shard.documents, CHUNK_DOCUMENTS):
            count = min(CHUNK_DOCUMENTS, shard.documents - first)
            yield read_array(shard_path(folder, shard, "documents"), "<u8", 8 * first, count)


def _count_duplicates(folder: Location, shards: Sequence[Shard]) -> int:
    """Return how many documents equal an earlier one.

    Hashes are sorted range by range, so that at most about 2^26 of them are in memory.
    """
    n = sum(shard.documents for shard in shards)
    bits, different = max(0, math.ceil(math.log2(n / _SORTED_HASHES))), 0
    shift = np.uint64(64 - bits if bits else 0)
    for part in range(2**bits):
        hashes = np.concatenate(
            [each[each >> shift == part] if bits else each for each in _hashes(folder, shards)]
        )
        hashes.sort()  # 80 times faster than np.unique of numpy 2.4
        different += int(np.count_nonzero(hashes[1:] != hashes[:-1])) + (len(hashes) > 0)
    return n - different


def read_array(path: Location, dtype: str, start: int, count: int) -> np.ndarray:
    """Read an array of `count` elements that begins at byte `start` of a file.

    Raises:
        DataError: the file is shorter, or cannot be read.
    """
    size = count * np.dtype(dtype).itemsize
    try:
        if isinstance(path, Remote):
            found = retried(lambda: path.read_bytes(start, start + size), STORE_SECONDS)
        else:
            with open_regular(path) as file:
                found = os.pread(file.fileno(), size, start)
    except OSError as error:
        raise DataError(f"{path}: {cause_of(error, path)}") from None
    if len(found) != size:
        raise DataError(f"{path} was truncated while it was read; {FIX}")
    return np.frombuffer(found, dtype)


def shard_path(folder: Location, shard: Shard, kind: str) -> Location:
    """Return the path of a file of a shard; kind: one of KINDS."""
    return folder / f"{shard.name}.{kind}"
