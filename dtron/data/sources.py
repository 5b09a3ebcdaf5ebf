"""Data of a run: from the `data` section to sequences. Every data source is a row of CORPORA.

On each host one process calls `prepare` and the others call `wait_for`, without a process group;
then all of them call `open_data`.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from dtron.config import Data
from dtron.data.best_fit_packing import FixedPieces, PackingPlan
from dtron.data.cache import (
    TokenCache,
    cache_path,
    heartbeat,
    last_heartbeat,
    open_cache,
    open_or_build,
    remove_stale,
)
from dtron.data.documents import Corpus, files_corpus
from dtron.data.hf import HfStream, hf_corpus, stream_name
from dtron.data.packing import (
    CutDocuments,
    OrderedDocuments,
    Shuffled,
    Tokens,
    TrainingSource,
    ValidationSource,
)
from dtron.data.shuffle import split
from dtron.data.stream import StreamedDocuments, StreamedPieces, held_out_texts, join
from dtron.data.tokenizer import Tokenizer, encode_documents, load_tokenizer
from dtron.errors import DataError

POLL_SECONDS = 0.2
SPLIT, BY_CONTENT, BY_POSITION = "split", "content", "position"
"""Key of `identity_of` and its values: copies of held-out documents are held out too ("content"),
or by their own position ("position"), as in checkpoints without the key."""

CORPORA: dict[str, Callable[[Data], Corpus]] = {"files": files_corpus, "hf": hf_corpus}

Sources = tuple[TrainingSource, ValidationSource | None]
logger = logging.getLogger("dtron")


def prepare(data: Data) -> TokenCache | None:
    """Return the token cache of a data section, built if it does not exist; None for a stream.

    Raises:
        DataError: a document cannot be read, or the cache cannot be written.
        ConfigError: the tokenizer lacks an end-of-document token, or an extra is not installed.
    """
    if _is_stream(data):
        return None
    corpus, tokenizer, path = _locate(data)
    remove_stale(path.parent)
    with heartbeat(path):
        return open_or_build(corpus, tokenizer, path)


def wait_for(data: Data, silent_seconds: float) -> None:
    """Wait until another process has prepared the data.

    Raises:
        DataError: that process has had no heartbeat for `silent_seconds`.
    """
    if _is_stream(data):
        return
    corpus, tokenizer, path = _locate(data)
    known, since = last_heartbeat(path), time.monotonic()
    while open_cache(path, tokenizer) is None:
        if (last := last_heartbeat(path)) != known:
            known, since = last, time.monotonic()
        if time.monotonic() - since > silent_seconds:
            raise DataError(
                f"the first rank of this host does not tokenize {corpus.name}: it has had no "
                f"heartbeat for {silent_seconds:g} s, and {path} does not exist; check whether "
                "that process has started and is not stopped"
            )
        time.sleep(POLL_SECONDS)


def open_data(data: Data, *, seq_len: int, seed: int) -> Sources:
    """Open the training and the held-out sequences; the latter are None if nothing is held out.

    Args:
        data: the section.
        seq_len: T, tokens per sequence.
        seed: seed of the order of training documents; a stream keeps its order.
    Raises:
        DataError: as `prepare`; or the training split does not fill one sequence.
    """
    if _is_stream(data):
        return _open_stream(data, seq_len)
    corpus, tokenizer, path = _locate(data)
    cache = open_or_build(corpus, tokenizer, path)
    _warn_of_copies(data, corpus, cache)
    train, held_out = split(cache.n_documents, data.validation_fraction, cache.copies)
    opened = TokenizedDocuments(data, cache.tokens, cache.offsets, seq_len, tokenizer.eos_id)
    return opened.training(train, seed), opened.validation(held_out)


@dataclass(frozen=True)
class TokenizedDocuments:
    """Tokenized documents in memory or in a file, to be packed as `data.packing` says."""

    data: Data
    tokens: Tokens
    offsets: np.ndarray
    seq_len: int
    eos_id: int

    def training(self, documents: np.ndarray, seed: int) -> TrainingSource:
        if self.data.packing != "cut":
            return Shuffled(self._plan(documents), seed)
        length, mask = self.seq_len, self.data.mask_documents
        cut = CutDocuments(
            self.tokens, self.offsets, documents, seq_len=length, mask_documents=mask
        )
        return Shuffled(cut, seed)

    def validation(self, documents: np.ndarray) -> ValidationSource | None:
        if not len(documents):
            _warn_of_no_validation(self.data)
            return None
        if self.data.packing != "cut":
            return FixedPieces(self._plan(documents))
        return OrderedDocuments(
            self.tokens,
            self.offsets,
            documents,
            seq_len=self.seq_len,
            mask_documents=self.data.mask_documents,
            eos_id=self.eos_id,
        )

    def _plan(self, documents: np.ndarray) -> PackingPlan:
        return PackingPlan(
            self.tokens,
            self.offsets,
            documents,
            seq_len=self.seq_len,
            packing=self.data.packing,
            mask_documents=self.data.mask_documents,
            eos_id=self.eos_id,
        )


def identity_of(data: Data, tokenizer: Tokenizer) -> dict[str, str]:
    """Return what identifies the training tokens: hashes of their content and of the tokenizer.

    File names do not count. A stream, whose content is not known in advance, has its name instead.
    The key SPLIT is added if the split depends on whether copies of documents are held out
    together.

    Args:
        data: the section; `prepare` has been called.
        tokenizer: the tokenizer of the section.
    """
    if _is_stream(data):
        content = stream_name(data)
    else:
        path = cache_path(CORPORA[data.source](data), tokenizer, data.cache_dir)
        cache = open_cache(path, tokenizer)
        if cache is None:
            raise DataError(
                f"data.cache_dir = {data.cache_dir!r}: its files were changed during the start; "
                "start again"
            )
        content = cache.content
        if _split_differs_by_position(cache, data.validation_fraction):
            return {"content": content, "tokenizer": tokenizer.fingerprint, SPLIT: BY_CONTENT}
    return {"content": content, "tokenizer": tokenizer.fingerprint}


def _split_differs_by_position(cache: TokenCache, fraction: float) -> bool:
    """Whether the split differs from one in which copies are split by their own position."""
    if not len(cache.copies) or not fraction:
        return False
    n = cache.n_documents
    return not np.array_equal(split(n, fraction)[1], split(n, fraction, cache.copies)[1])


def _open_stream(data: Data, seq_len: int) -> Sources:
    stream, tokenizer = HfStream(data), load_tokenizer(data)
    texts = held_out_texts(stream, data.validation_fraction)
    encoded = [ids for ids in encode_documents(tokenizer, texts) if ids]
    tokens, offsets = join(encoded)
    opened = TokenizedDocuments(data, tokens, offsets, seq_len, tokenizer.eos_id)
    validation = opened.validation(np.arange(len(encoded)))
    settings = {
        "seq_len": seq_len,
        "mask_documents": data.mask_documents,
        "held_out": texts,
    }
    if data.packing == "cut":
        return StreamedDocuments(stream, tokenizer, **settings), validation
    return StreamedPieces(stream, tokenizer, packing=data.packing, **settings), validation


def _warn_of_copies(data: Data, corpus: Corpus, cache: TokenCache) -> None:
    if not len(cache.copies):
        return
    paths = Counter(os.path.realpath(os.path.expanduser(path)) for path in data.paths)
    twice = [path for path, n in paths.items() if n > 1] if data.source == "files" else []
    named = f"; data.paths names {', '.join(twice)} more than once" if twice else ""
    logger.warning(
        "%s: %d of %d documents are duplicates%s. Duplicates of held-out documents are held out "
        "too; the others are kept, and trained on as often as they occur",
        corpus.name,
        len(cache.copies),
        cache.n_documents,
        named,
    )


def _warn_of_no_validation(data: Data) -> None:
    if data.validation_fraction:
        logger.warning(
            "data.validation_fraction = %g, but there are too few different documents to hold one "
            "out; no validation will run",
            data.validation_fraction,
        )


def _locate(data: Data) -> tuple[Corpus, Tokenizer, Path]:
    corpus, tokenizer = CORPORA[data.source](data), load_tokenizer(data)
    return corpus, tokenizer, cache_path(corpus, tokenizer, data.cache_dir)


def _is_stream(data: Data) -> bool:
    return data.source == "hf" and data.hf_streaming
