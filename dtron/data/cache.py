"""Tokens on disk: a corpus is tokenized once and memory-mapped from then on.

    CACHE_DIR/KEY/tokens.bin     uint16 or uint32 (N,), little-endian; every document ends with EOS
    CACHE_DIR/KEY/offsets.npy    int64 (n_documents + 1,), where each document starts
    CACHE_DIR/KEY/copies.npy     int64 (n_copies, 2), of `order.copies_of`
    CACHE_DIR/KEY/meta.json      counts, dtype and a hash of the tokens

KEY is a hash of what the tokens depend on, so that a changed file or tokenizer gets a cache of its
own. A cache is written beside its place and moved there by one rename, so that it is there whole
or not at all; of several processes that build the same one, the first keeps it.
"""

import hashlib
import json
import logging
import os
import shutil
import time
import uuid
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dtron.data.documents import Corpus
from dtron.data.order import copies_of
from dtron.data.tokenizer import Tokenizer, encode_documents
from dtron.errors import DataError

FORMAT = 3  # part of KEY: raise it when the files or the handling of documents change
BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 4_000_000  # bounds memory when documents are long
PROGRESS_SECONDS = 30

logger = logging.getLogger("dtron")


@dataclass(frozen=True)
class TokenCache:
    """A cache, memory-mapped: reading it costs no memory of its own."""

    path: Path
    tokens: np.ndarray
    """uint16 or uint32 (N,)"""
    offsets: np.ndarray
    """int64 (n_documents + 1,)"""
    copies: np.ndarray
    """int64 (n_copies, 2), documents that are copies of earlier ones, and of which"""
    content: str
    """SHA-256 of tokens and offsets, taken when they were written"""

    @property
    def n_documents(self) -> int:
        """Documents that are not empty."""
        return len(self.offsets) - 1


def cache_path(corpus: Corpus, tokenizer: Tokenizer, cache_dir: str) -> Path:
    """Where the tokens of this corpus under this tokenizer belong."""
    identity = json.dumps([FORMAT, corpus.identity, tokenizer.fingerprint])
    key = hashlib.sha256(identity.encode()).hexdigest()[:32]
    return Path(os.path.abspath(os.path.expanduser(cache_dir))) / key


def open_cache(path: Path) -> TokenCache | None:
    """The cache at a path, or None if there is none or its files do not fit each other."""
    try:
        meta = json.loads((path / "meta.json").read_text())
        tokens = np.memmap(path / "tokens.bin", dtype=meta["dtype"], mode="r")
        offsets = np.load(path / "offsets.npy", mmap_mode="r")
        copies = np.load(path / "copies.npy")
        found = (len(tokens), len(offsets) - 1, int(offsets[-1]), len(copies))
        whole = found == (meta["tokens"], meta["documents"], meta["tokens"], meta["copies"])
        content = str(meta["content"])
    except (OSError, EOFError, ValueError, LookupError, TypeError):
        return None
    return TokenCache(path, tokens, offsets, copies, content) if whole else None


def open_or_build(corpus: Corpus, tokenizer: Tokenizer, path: Path) -> TokenCache:
    """The cache at a path; it is built if there is none, and built again if it is damaged.

    Raises:
        DataError: a document cannot be read, there is none, or the directory cannot be written.
    """
    if cache := open_cache(path):
        return cache
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    try:
        temporary.mkdir(parents=True)
        _write(corpus, tokenizer, temporary)
        if corpus.current is not None and corpus.current() != corpus.identity:
            raise DataError(
                f"{corpus.name} changed while it was tokenized; start again once it is complete"
            )
        _publish(temporary, path)
    except OSError as error:
        raise DataError(
            f"data.cache_dir: cannot write {error.filename or path}: {error.strerror or error}; "
            "name a directory you can write"
        ) from None
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    if cache := open_cache(path):
        return cache
    raise DataError(f"data.cache_dir: {path} was removed or damaged while it was opened")


def _write(corpus: Corpus, tokenizer: Tokenizer, directory: Path) -> None:
    dtype = np.dtype("<u2" if tokenizer.vocab_size <= 2**16 else "<u4")
    start = last = time.monotonic()
    offsets, n_empty, content = array("q", [0]), 0, hashlib.sha256()
    each = array("Q")  # a hash a document
    logger.info("tokenizing %s", corpus.name)
    with open(directory / "tokens.bin", "wb") as file:
        for texts in _batches(corpus.texts()):
            for ids in encode_documents(tokenizer, texts):
                if ids:
                    encoded = np.array(ids, dtype).tobytes()
                    file.write(encoded)
                    content.update(encoded)
                    each.append(hash_of(encoded))
                    offsets.append(offsets[-1] + len(ids))
                else:
                    n_empty += 1
            if time.monotonic() - last > PROGRESS_SECONDS:
                last = time.monotonic()
                logger.info("%d documents, %d tokens so far", len(offsets) - 1, offsets[-1])
    n_documents, n_tokens = len(offsets) - 1, offsets[-1]
    if not n_documents:
        raise DataError(f"{corpus.name}: no documents with text ({n_empty} empty ones)")
    content.update(offsets)
    np.save(directory / "offsets.npy", np.frombuffer(offsets, np.int64))
    copies = copies_of(np.frombuffer(each, np.uint64))
    np.save(directory / "copies.npy", copies)
    meta = {
        "documents": n_documents,
        "empty": n_empty,
        "tokens": n_tokens,
        "copies": len(copies),
        "dtype": dtype.str,
        "corpus": corpus.name,
        "tokenizer": tokenizer.fingerprint,
        "content": content.hexdigest(),
    }
    (directory / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")
    logger.info(
        "tokenized %d documents (%d empty ones left out) to %d tokens in %.1f s",
        n_documents,
        n_empty,
        n_tokens,
        time.monotonic() - start,
    )


def hash_of(content: bytes) -> int:
    """64 bits of a document's content."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _publish(temporary: Path, path: Path) -> None:
    if path.exists() and open_cache(path) is None:
        logger.warning("%s is damaged and is replaced", path)
        shutil.rmtree(path, ignore_errors=True)
    try:
        os.rename(temporary, path)
    except OSError:  # the place is taken: another process was faster, and its copy is as good
        if open_cache(path) is None:
            raise


def _batches(texts: Iterable[str]) -> Iterator[list[str]]:
    batch: list[str] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) == BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
