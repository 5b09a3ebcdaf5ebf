"""Data of a run: open the sequences that the `data` section of a config describes.

On each host one process calls `prepare` and the others call `wait_for`, without a process group;
then all of them call `open_all`.
"""

import contextlib
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from dtron.config import Data
from dtron.data.best_fit_packing import (
    FixedPieces,
    PackedGroups,
    PackingPlan,
    count_sequences,
    known_counts,
)
from dtron.data.corpus.cache import (
    cache_folder,
    find_path,
    heartbeat,
    identity_path,
    index_path,
    keep_path,
    known_path,
    last_heartbeat,
    open_or_build,
    open_or_build_index,
    remove_stale,
)
from dtron.data.corpus.document_index import DocumentIndex, Documents, documents_of, open_index
from dtron.data.corpus.documents import Corpus, files_corpus
from dtron.data.corpus.files import absolute, is_url
from dtron.data.corpus.hf import HfStream, hf_corpus, stream_name
from dtron.data.corpus.readers.custom import custom_corpus
from dtron.data.corpus.shards import META
from dtron.data.corpus.token_corpus import TokenCorpus, joined, open_corpus, tokenizer_of
from dtron.data.corpus.tokenize import cores
from dtron.data.images.sequences import with_images
from dtron.data.mixture import MixedSource, Mixture
from dtron.data.packing import (
    CutDocuments,
    OrderedDocuments,
    Shuffled,
    Tokens,
    TrainingSource,
    ValidationSource,
)
from dtron.data.stream import (
    StreamedDocuments,
    StreamedPieces,
    Substreams,
    held_out_texts,
    join,
)
from dtron.data.tokenizer import Tokenizer, encode_documents, load_tokenizer
from dtron.errors import DataError, counted
from dtron.io.filesystem import Location, is_file, location
from dtron.io.remote_path import UnreachableError

POLL_SECONDS = 0.2
CONTENT = "content"
"""Key of `identity_of`: the hash of all training tokens."""
ORDER = "order"
"""Key of `identity_of`: the rule by which documents are held out and ordered."""
BY_GROUPS = "groups-1"
"""Its value: documents are held out by the hash of their tokens, the others are in groups."""

CORPORA: dict[str, Callable[[Data], Corpus]] = {"files": files_corpus, "hf": hf_corpus}
"""Sources that are tokenized to the cache, besides custom ones. `prepared` is tokenized already."""

Sources = tuple[TrainingSource, ValidationSource | None]
logger = logging.getLogger("dtron")


def corpus_of(data: Data) -> Corpus:
    """Return the documents of a data section that is not prepared. Raises: as its source does."""
    return CORPORA.get(data.source, custom_corpus)(data)


def prepare(data: Data, seq_len: int | None = None, training: bool = True) -> None:
    """Tokenize all corpora of a data section and build their indices, by all cores.

    What exists is not built again. Streams need neither.

    Args:
        seq_len: T; count the sequences of T tokens too, where `data.packing` needs that.
        training: false: only what `open_validation` opens.
    Raises:
        DataError: a document cannot be read, or the cache cannot be written.
        ConfigError: the tokenizer lacks an end-of-document token, or an extra is not installed.
    """
    if is_stream(data):
        return
    tokenizer, folder = load_tokenizer(data), cache_folder(data.cache_dir)
    remove_stale(folder)
    for where, part, trained in _corpora_of(data, training):
        with _naming(where), heartbeat(_heartbeat_path(part, tokenizer, folder)):
            corpus = _open_corpus(part, tokenizer, folder)
            index = open_or_build_index(corpus, part.validation_fraction, folder)
            if trained and seq_len is not None and part.packing != "cut":
                count_sequences(index, seq_len, part.packing)


def _corpora_of(data: Data, training: bool) -> list[tuple[str, Data, bool]]:
    """Return, for each corpus, its key in the config, its section, and whether it is trained on.

    Args:
        training: false: leave out corpora of which nothing is held out.
    """
    trained = [
        (f"data.mixture: {name}" if name else "", each, training)
        for name, each in data.parts.items()
        if training or each.validation_fraction
    ]
    sets = data.validation_parts.items()
    return [*trained, *((f"data.validation: {name}", each, False) for name, each in sets)]


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """Let a DataError of one corpus of several begin with its key in the config."""
    try:
        yield
    except DataError as error:
        text = str(error).removeprefix("data.paths: ")
        if not where or text.startswith("data."):  # of a key that all corpora share
            raise
        raise DataError(f"{where}: {text}") from error


def wait_for(data: Data, seq_len: int, silent_seconds: float, training: bool = True) -> None:
    """Wait until another process has prepared the data, for sequences of seq_len tokens.

    Arguments as of `prepare`.

    Raises:
        DataError: that process has had no heartbeat for `silent_seconds`.
    """
    if is_stream(data):
        return
    tokenizer, folder = load_tokenizer(data), cache_folder(data.cache_dir)
    for where, part, trained in _corpora_of(data, training):
        with _naming(where):
            _wait_for_corpus(part, seq_len if trained else None, silent_seconds, tokenizer, folder)


def _wait_for_corpus(
    data: Data, seq_len: int | None, silent_seconds: float, tokenizer: Tokenizer, folder: Path
) -> None:
    path, find = _heartbeat_path(data, tokenizer, folder), _finder(data, tokenizer, folder)
    known, since = last_heartbeat(path), time.monotonic()
    while not _is_prepared(find(), data, seq_len, folder):
        if (last := last_heartbeat(path)) != known:
            known, since = last, time.monotonic()
        if time.monotonic() - since > silent_seconds:
            raise DataError(
                f"the first rank of this host does not tokenize {_name(data)}: it has had no "
                f"heartbeat for {silent_seconds:g} s, and its result is not in {folder}; check "
                "whether that process has started and is not stopped"
            )
        time.sleep(POLL_SECONDS)


def open_all(
    data: Data, *, seq_len: int, seed: int, global_batch: int
) -> tuple[TrainingSource, dict[str, ValidationSource]]:
    """Open the training sequences of a data section, and all its validation sets by name.

    Held-out documents have the name of their source, which is "" without a mixture. Sets without
    documents are left out. Of a corpus of more than 2^18 documents, a set is a random sample.

    Args:
        data: the section.
        seq_len: T, tokens per sequence.
        seed: seed of the order of training documents.
        global_batch: sequences per step.
    Raises:
        DataError: as `prepare`; or the training split of a source does not fill one sequence.
    """
    opened: dict[str, Sources] = {}
    for name, part in data.parts.items():
        with _naming(f"data.mixture: {name}" if name else ""):
            opened[name] = open_data(part, seq_len=seq_len, seed=seed)
    sets = {name: held_out for name, (_, held_out) in opened.items() if held_out is not None}
    sets |= _open_named_sets(data, seq_len)
    if not data.mixture:
        return opened[""][0], sets
    sources = []
    for each in data.mixture:
        sequences, _ = opened[each.name]
        assert isinstance(sequences, Shuffled), "streams are not mixed"
        weights = tuple(each.weight_in(stage) for stage in range(len(data.mixture_steps) + 1))
        most = max(1, round(each.epochs * sequences.epoch_length)) if each.epochs else None
        sources.append(MixedSource(each.name, sequences, sequences.epoch_length, weights, most))
    return Mixture(sources, global_batch, data.mixture_steps), sets


def open_validation(data: Data, seq_len: int) -> dict[str, ValidationSource]:
    """Open the validation sets of a data section by name, as `open_all`, without its training data.

    A corpus of which nothing is held out is not read.
    """
    sets: dict[str, ValidationSource] = {}
    for name, part in data.parts.items():
        if not part.validation_fraction:
            continue
        with _naming(f"data.mixture: {name}" if name else ""):
            if is_stream(part):
                held_out = _open_stream(part, seq_len)[1]
            else:
                corpus, index = open_corpus_and_index(part)
                settings = _settings(part, seq_len, load_tokenizer(part))
                held_out = _validation(part, corpus.tokens, index.held_out(), settings)
        if held_out is not None:
            sets[name] = held_out
    return sets | _open_named_sets(data, seq_len)


def _open_named_sets(data: Data, seq_len: int) -> dict[str, ValidationSource]:
    """Open the sets of `data.validation`; those without documents are left out."""
    sets: dict[str, ValidationSource] = {}
    for name, part in data.validation_parts.items():
        with _naming(f"data.validation: {name}"):
            corpus, index = open_corpus_and_index(part)
            settings = _settings(part, seq_len, load_tokenizer(part))
            if found := _validation(part, corpus.tokens, index.group(0), settings):
                sets[name] = found
    return sets


def open_data(data: Data, *, seq_len: int, seed: int) -> Sources:
    """Open the training and the held-out sequences; the latter are None if nothing is held out.

    Args:
        data: the section, without a mixture.
        seq_len: T, tokens per sequence.
        seed: seed of the order of training documents; a stream keeps its order.
    Raises:
        DataError: as `prepare`; or the training split does not fill one sequence.
    """
    assert not data.mixture, "open_all opens a mixture"
    if is_stream(data):
        return _open_stream(data, seq_len)
    corpus, index = open_corpus_and_index(data)
    _warn_of_duplicates(data, corpus)
    settings = _settings(data, seq_len, load_tokenizer(data))
    if data.packing == "cut":
        plan = CutDocuments(
            corpus.tokens, index, seq_len=seq_len, mask_documents=data.mask_documents
        )
    else:
        counts = count_sequences(index, seq_len, data.packing)
        plan = PackedGroups(corpus.tokens, index, counts, packing=data.packing, **settings)
        plan = with_images(data, corpus.tokens, plan)
    held_out = index.held_out()
    if not len(held_out):
        _warn_of_no_validation(data)
    return Shuffled(plan, seed), _validation(data, corpus.tokens, held_out, settings)


def open_corpus_and_index(data: Data) -> tuple[TokenCorpus, DocumentIndex]:
    """Open the tokens and the index of a data section that is not a stream. Raises DataError."""
    tokenizer, folder = load_tokenizer(data), cache_folder(data.cache_dir)
    corpus = _open_corpus(data, tokenizer, folder)
    return corpus, open_or_build_index(corpus, data.validation_fraction, folder)


def _settings(data: Data, seq_len: int, tokenizer: Tokenizer) -> dict[str, Any]:
    return {
        "seq_len": seq_len,
        "mask_documents": data.mask_documents,
        "eos_id": tokenizer.eos_id,
    }


def _validation(
    data: Data, tokens: Tokens, documents: Documents, settings: dict[str, Any]
) -> ValidationSource | None:
    if not len(documents):
        return None
    if data.packing == "cut":
        return OrderedDocuments(tokens, documents, **settings)
    plan = PackingPlan(tokens, documents, packing=data.packing, **settings)
    return FixedPieces(with_images(data, tokens, plan))


def identity_of(data: Data, tokenizer: Tokenizer) -> dict[str, str]:
    """Return what identifies the training tokens: hashes of their content and of the tokenizer.

    File names do not count. A stream, whose content is not known in advance, has its name instead;
    with a mixture, each source has its own hash, `content:NAME`. Sets of `data.validation` have
    theirs as `validation:NAME`.

    Args:
        data: the section; `prepare` has been called.
        tokenizer: the tokenizer of the section.
    """
    if is_stream(data):
        return {CONTENT: stream_name(data), "tokenizer": tokenizer.fingerprint}
    contents = {
        f"{CONTENT}:{name}" if name else CONTENT: _content_of(part, tokenizer)
        for name, part in data.parts.items()
    } | {
        f"validation:{name}": _content_of(part, tokenizer)
        for name, part in data.validation_parts.items()
    }
    return {**contents, "tokenizer": tokenizer.fingerprint, ORDER: BY_GROUPS}


def _content_of(data: Data, tokenizer: Tokenizer) -> str:
    corpus = _finder(data, tokenizer, cache_folder(data.cache_dir))()
    if corpus is None:
        raise DataError(
            f"data.cache_dir = {data.cache_dir!r}: its files were changed during the start; "
            "start again"
        )
    return corpus.content


def _open_corpus(data: Data, tokenizer: Tokenizer, folder: Path) -> TokenCorpus:
    """Open the tokens of a data section; tokenize them if they are not in the cache."""
    if data.source == "prepared":
        corpus = _open_prepared(data, tokenizer)
    else:
        read = corpus_of(data)
        path = find_path(read, tokenizer, folder)
        corpus = open_or_build(read, tokenizer, path, cores())
        keep_path(read, tokenizer, path)
    return corpus


def _finder(data: Data, tokenizer: Tokenizer, folder: Path) -> Callable[[], TokenCorpus | None]:
    """Return a function that opens the tokens of a data section if they exist.

    It reads no file of the corpus, so that it can be called often.
    """
    if data.source == "prepared":
        opened = _open_prepared(data, tokenizer)
        return lambda: opened
    read = corpus_of(data)

    def find() -> TokenCorpus | None:
        path = known_path(read, tokenizer, folder)
        return open_corpus(path, tokenizer) if path else None

    return find


def _open_prepared(data: Data, tokenizer: Tokenizer) -> TokenCorpus:
    found = []
    for folder in map(location, data.paths):
        try:
            opened = open_corpus(folder, tokenizer, data.store_seconds)
        except UnreachableError as error:
            raise DataError(f"data.paths: {error}") from None
        if opened is None:
            raise DataError(f"data.paths: {folder} {_why_not_open(folder, data, tokenizer)}")
        found.append(opened)
    return joined(found, tokenizer.vocab_size)


def _why_not_open(path: Location, data: Data, tokenizer: Tokenizer) -> str:
    if isinstance(path, Path) and not path.is_dir():
        return "is not a folder; name one that dtron data prepare has written"
    if not is_file(path / META):
        return f"has no {META}: dtron data prepare has not ended; run it again"
    if tokenizer_of(path) not in (tokenizer.fingerprint, None):
        return (
            f"was made with another tokenizer than data.tokenizer = {data.tokenizer!r}; set it, "
            "data.eos_token and data.bos_token to those of dtron data prepare"
        )
    return "is damaged or of another version; delete it and run dtron data prepare again"


def _is_prepared(corpus: TokenCorpus | None, data: Data, seq_len: int | None, folder: Path) -> bool:
    if corpus is None:
        return False
    index = open_index(index_path(corpus, data.validation_fraction, folder), corpus)
    if index is None or seq_len is None or data.packing == "cut" or len(index.group_sizes) == 1:
        return index is not None
    return known_counts(index, seq_len, data.packing) is not None


def _heartbeat_path(data: Data, tokenizer: Tokenizer, folder: Path) -> Path:
    if data.source != "prepared":
        return identity_path(corpus_of(data), tokenizer, folder)
    return index_path(_open_prepared(data, tokenizer), data.validation_fraction, folder)


def _name(data: Data) -> str:
    if data.source in ("files", "prepared"):
        return ", ".join(data.paths)
    return stream_name(data) if data.source == "hf" else data.source


def _open_stream(data: Data, seq_len: int) -> Sources:
    stream, tokenizer = HfStream(data), load_tokenizer(data)
    if data.substreams > stream.n_files:
        raise DataError(
            f"data.substreams = {data.substreams} is more than the "
            f"{counted(stream.n_files, 'file')} of {stream.name}; use at most as many"
        )
    texts = held_out_texts(stream, data.validation_fraction)
    encoded = [ids for ids in encode_documents(tokenizer, texts) if len(ids)]
    tokens, offsets = join(encoded)
    settings = _settings(data, seq_len, tokenizer)
    validation = _validation(data, tokens, documents_of(offsets), settings)
    if validation is None:
        _warn_of_no_validation(data)
    del settings["eos_id"]
    settings["held_out"] = texts

    def substream(j: int, n: int) -> TrainingSource:
        part = stream.part(j, n)
        if data.packing == "cut":
            return StreamedDocuments(part, tokenizer, **settings)
        return StreamedPieces(part, tokenizer, packing=data.packing, **settings)

    return Substreams(substream, data.substreams), validation


def _warn_of_duplicates(data: Data, corpus: TokenCorpus) -> None:
    if not corpus.duplicates:
        return
    paths = Counter(os.path.realpath(p) if not is_url(p) else p for p in map(absolute, data.paths))
    twice = [path for path, n in paths.items() if n > 1] if data.source == "files" else []
    named = f"; data.paths names {', '.join(twice)} more than once" if twice else ""
    logger.warning(
        "%s: %d of %d documents are duplicates%s. Duplicates of held-out documents are held out "
        "too; the others are kept, and trained on as often as they occur",
        _name(data),
        corpus.duplicates,
        corpus.n_documents,
        named,
    )


def _warn_of_no_validation(data: Data) -> None:
    if data.validation_fraction:
        logger.warning(
            "data.validation_fraction = %g, but %s has too few different documents to hold one out",
            data.validation_fraction,
            _name(data),
        )


def is_stream(data: Data) -> bool:
    """Whether documents are read as a stream, without tokenizing them before."""
    return data.source == "hf" and data.hf_streaming
