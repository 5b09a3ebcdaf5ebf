"""Prepared corpora: a folder of token shards that is made before training, and resumed if killed.

FOLDER/plan.json    what is tokenized: files, tokenizer and number of shards; written first
FOLDER/...          the shards, and corpus.json when all are there (dtron/data/corpus/shards.py)
FOLDER/summary.log  counts for people
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from dtron.data.corpus.documents import Corpus
from dtron.data.corpus.shards import FORMAT, Shard, write_corpus, write_json
from dtron.data.corpus.token_corpus import TokenCorpus, open_corpus
from dtron.data.corpus.tokenize import write_shards
from dtron.data.tokenizer import Tokenizer
from dtron.errors import DataError, counted
from dtron.io.filesystem import Location, names_in, read, write_atomically
from dtron.io.remote_path import UnreachableError
from dtron.io.untrusted import parse

_SHOWN_SOURCES = 20


def prepare_folder(
    corpus: Corpus, tokenizer: Tokenizer, out: Location, workers: int, skip_errors: bool
) -> TokenCorpus:
    """Tokenize a corpus to a folder, or what an earlier process has left of it; return it.

    Args:
        out: the folder, on a disk or in an object store.
        workers: most processes to tokenize with.
        skip_errors: leave out documents that cannot be read, with a warning for each.
    Raises:
        DataError: a document cannot be read, the folder is of another corpus, or it cannot be
            written.
    """
    try:
        start_folder(corpus, tokenizer, out, skip_errors)
        shards = write_shards(corpus, tokenizer, out, workers=workers, skip_errors=skip_errors)
        return finish_folder(corpus, tokenizer, out, shards)
    except UnreachableError as error:
        raise DataError(f"--out: {error}") from None
    except OSError as error:
        path = error.filename or out
        raise DataError(f"--out: cannot write {path}: {error.strerror or error}") from None


def start_folder(corpus: Corpus, tokenizer: Tokenizer, out: Location, skip_errors: bool) -> None:
    """Make the folder and its plan, or check that it has the same plan.

    Raises:
        DataError: the folder is of another corpus.
        OSError: it cannot be written.
    """
    plan = {
        "format": FORMAT,
        "corpus": hashlib.sha256(corpus.identity.encode()).hexdigest(),
        "tokenizer": tokenizer.fingerprint,
        "skip_errors": skip_errors,
        "shards": len(corpus.tasks),
    }
    if isinstance(out, Path):
        out.mkdir(parents=True, exist_ok=True)
    path = out / "plan.json"
    if not path.is_file():
        if names_in(out):
            raise DataError(f"--out: {out} is not empty; name a new folder")
        write_json(path, plan)
    try:
        found = parse(read(path))
        found = found if isinstance(found, dict) else {}
    except ValueError as error:
        raise DataError(f"{path} is damaged: {error}; delete the folder") from None
    if skip_errors and found == {**plan, "skip_errors": False}:
        write_json(path, plan)  # the shards that are finished had no errors
        return
    if changed := [key for key in plan if found.get(key) != plan[key]]:
        names = ["--on-error" if key == "skip_errors" else key for key in changed]
        raise DataError(
            f"--out: {out} was begun with another {' and '.join(names)} (or files have changed "
            "since); name a new folder, or delete this one"
        )


def finish_folder(
    corpus: Corpus, tokenizer: Tokenizer, out: Location, shards: Sequence[Shard]
) -> TokenCorpus:
    """Write corpus.json and the summary once all shards are there. Raises DataError; OSError."""
    if corpus.current is not None and corpus.current() != corpus.identity:
        raise DataError(f"{corpus.name} changed while it was tokenized; delete {out}, start again")
    write_corpus(out, shards, corpus.name, tokenizer, corpus.settings.masked)
    if isinstance(out, Path):
        for left in out.glob("*.partial"):
            left.unlink(missing_ok=True)
    opened = open_corpus(out, tokenizer)
    if opened is None:
        raise DataError(f"{out} was changed while it was written; delete it and start again")
    write_atomically(out / "summary.log", f"{summary(corpus.name, opened, shards)}\n")
    return opened


def summary(name: str, corpus: TokenCorpus, shards: Sequence[Shard]) -> str:
    """Return counts of a corpus as text: documents, tokens, lengths, sources, what was left out."""
    n, tokens = corpus.n_documents, len(corpus.tokens)
    characters = sum(shard.characters for shard in shards)
    sources, skipped = Counter[str](), [line for shard in shards for line in shard.skipped]
    for shard in shards:
        for path, _, _, count in shard.sources:
            sources[path] += count
    _, _, lengths = next(corpus.documents())  # of at most 2^22 documents
    lines = [
        name,
        f"  {counted(n, 'document')}, {counted(tokens, 'token')}, {counted(len(shards), 'shard')}",
        f"  left out, without text: {counted(sum(shard.empty for shard in shards), 'document')}",
        f"  duplicates of earlier ones: {counted(corpus.duplicates, 'document')}",
        *([f"  {tokens / characters:.3f} tokens per character"] if characters else []),
        f"  document length in tokens: {percentiles(lengths)}",
        f"  documents by file ({counted(len(sources), 'file')}):",
    ]
    shown = sources.most_common(_SHOWN_SOURCES)
    lines += [f"    {count:12,}  {path}" for path, count in shown]
    if len(sources) > len(shown):
        rest = sum(sources.values()) - sum(count for _, count in shown)
        lines.append(f"    {rest:12,}  in {len(sources) - len(shown):,} other files")
    if skipped:
        lines += [f"  left out because of {len(skipped):,} errors:"]
        lines += [f"    {line}" for line in skipped]
    return "\n".join(lines)


def percentiles(lengths: np.ndarray) -> str:
    """Return percentiles of lengths, any integer dtype (n,), as text."""
    shares = (0, 1, 10, 50, 90, 99, 100)
    values = np.percentile(lengths, shares).astype(int).tolist()
    return ", ".join(f"{share}% {value:,}" for share, value in zip(shares, values, strict=True))
