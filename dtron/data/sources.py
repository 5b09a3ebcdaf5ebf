"""From the `data` section to sequences: every data source is a row of CORPORA.

On each host one process calls `prepare` and the others `wait_for`, which needs no process group;
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
from dtron.data.best_fit_packing import FixedPieces, Plan, Shuffled
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
"""Key of `identity_of`, and how copies of held-out documents are dealt with: held out too, or, in
checkpoints without the key, by their own position."""

CORPORA: dict[str, Callable[[Data], Corpus]] = {"files": files_corpus, "hf": hf_corpus}

Sources = tuple[TrainingSource, ValidationSource | None]
logger = logging.getLogger("dtron")


def prepare(data: Data) -> TokenCache | None:
    """The token cache of a data section, built if it is not there yet; None for a stream.

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


def is_ready(data: Data) -> bool:
    """Whether `prepare` would find its work done."""
    if _is_stream(data):
        return True
    _, tokenizer, path = _locate(data)
    return open_cache(path, tokenizer) is not None


def wait_for(data: Data, silent_seconds: float) -> None:
    """Return once another process has prepared the data.

    Raises:
        DataError: for so long there has been no heartbeat of a process that does.
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
                f"the first rank of this host does not tokenize {corpus.name}: no heartbeat for "
                f"{silent_seconds:g} s, and {path} is not there; look at that process, which is "
                "stopped or has not started"
            )
        time.sleep(POLL_SECONDS)


def open_data(data: Data, *, seq_len: int, seed: int) -> Sources:
    """Training and held-out sequences; the latter None if nothing is held out.

    Args:
        data: the section.
        seq_len: T, tokens a sequence.
        seed: of the order of training documents; a stream keeps its own order.
    Raises:
        DataError: as `prepare`; or the training split does not fill one sequence.
    """
    if _is_stream(data):
        return _open_stream(data, seq_len)
    corpus, tokenizer, path = _locate(data)
    cache = open_or_build(corpus, tokenizer, path)
    _warn_of_copies(data, corpus, cache)
    train, held_out = split(cache.n_documents, data.validation_fraction, cache.copies)
    opened = Opened(data, cache.tokens, cache.offsets, seq_len, tokenizer.eos_id)
    return opened.training(train, seed), opened.validation(held_out)


@dataclass(frozen=True)
class Opened:
    """Tokens in memory or in a file, packed by `data.packing`."""

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

    def _plan(self, documents: np.ndarray) -> Plan:
        return Plan(
            self.tokens,
            self.offsets,
            documents,
            seq_len=self.seq_len,
            packing=self.data.packing,
            mask_documents=self.data.mask_documents,
            eos_id=self.eos_id,
        )


def identity_of(data: Data, tokenizer: Tokenizer) -> dict[str, str]:
    """What the tokens are, whatever the files are called: hashes of content and tokenizer. Of a
    stream, whose content is not known in advance, the name. Where copies are held out that the hash
    of their position leaves in training, how documents are held out too, as SPLIT.

    Args:
        tokenizer: that of the section, whose data are prepared.
    """
    if _is_stream(data):
        content = stream_name(data)
    else:
        path = cache_path(CORPORA[data.source](data), tokenizer, data.cache_dir)
        cache = open_cache(path, tokenizer)
        if cache is None:
            raise DataError(f"data.cache_dir = {data.cache_dir!r} was changed; start again")
        content = cache.content
        if _copies_move(cache, data.validation_fraction):
            return {"content": content, "tokenizer": tokenizer.fingerprint, SPLIT: BY_CONTENT}
    return {"content": content, "tokenizer": tokenizer.fingerprint}


def _copies_move(cache: TokenCache, fraction: float) -> bool:
    """Whether the split differs from that of earlier versions, which split copies by position."""
    if not len(cache.copies) or not fraction:
        return False
    n = cache.n_documents
    return not np.array_equal(split(n, fraction)[1], split(n, fraction, cache.copies)[1])


def _open_stream(data: Data, seq_len: int) -> Sources:
    stream, tokenizer = HfStream(data), load_tokenizer(data)
    texts = held_out_texts(stream, data.validation_fraction)
    encoded = [ids for ids in encode_documents(tokenizer, texts) if ids]
    tokens, offsets = join(encoded)
    opened = Opened(data, tokens, offsets, seq_len, tokenizer.eos_id)
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
        "%s: %d of %d documents are copies of others%s. Copies of held-out documents are held out, "
        "the others are trained on as often as they are there",
        corpus.name,
        len(cache.copies),
        cache.n_documents,
        named,
    )


def _warn_of_no_validation(data: Data) -> None:
    if data.validation_fraction:
        logger.warning(
            "data.validation_fraction = %g, but there are too few documents, without copies, to "
            "hold one out: no validation will run",
            data.validation_fraction,
        )


def _locate(data: Data) -> tuple[Corpus, Tokenizer, Path]:
    corpus, tokenizer = CORPORA[data.source](data), load_tokenizer(data)
    return corpus, tokenizer, cache_path(corpus, tokenizer, data.cache_dir)


def _is_stream(data: Data) -> bool:
    return data.source == "hf" and data.hf_streaming
