"""Token cache: a corpus is tokenized once, and its tokens are read from disk from then on.

    CACHE_DIR/KEY/tokens.bin     uint16 or uint32 (N,), little-endian; every document ends with EOS
    CACHE_DIR/KEY/offsets.npy    int64 (n_documents + 1,), where each document starts
    CACHE_DIR/KEY/copies.npy     int64 (n_copies, 2), result of `shuffle.copies_of`
    CACHE_DIR/KEY/meta.json      counts, dtype and a hash of the tokens

KEY is a hash of everything that the tokens depend on, so that a changed file or tokenizer gets
another cache. A cache is written to CACHE_DIR/KEY.UNIQUE.tmp and renamed, so that it is complete or
absent; if several processes build the same cache, the first one to finish keeps it. A process that
builds touches CACHE_DIR/KEY.preparing every few seconds, as a heartbeat for processes that wait.
Both are removed when the build ends, also after an error or a signal; after SIGKILL, by a later
start.
"""

import contextlib
import functools
import hashlib
import io
import json
import logging
import math
import os
import re
import shutil
import signal
import threading
import time
import uuid
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import numpy as np

from dtron.data.documents import Corpus
from dtron.data.shuffle import copies_of
from dtron.data.tokenizer import Tokenizer, encode_documents
from dtron.errors import DataError
from dtron.io.filesystem import open_own
from dtron.io.untrusted import MB, open_regular, parse, read_bytes, read_text

FORMAT = 3  # part of KEY: raise it when the files or the handling of documents change
BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 4_000_000  # bounds memory when documents are long
PROGRESS_SECONDS = 30
HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
"""A process without a heartbeat for this long is considered dead."""
DTYPES = ("<u2", "<u4")  # for vocabularies of up to 2^16 tokens, and for larger ones
_BUILD_FILES = re.compile(r"([0-9a-f]{32})(\.[0-9a-f]{32}\.tmp|\.preparing)")
"""Names of temporary files of a build; the first group is KEY."""
_ARRAYS = ("tokens.bin", "offsets.npy", "copies.npy")
_DELETE_FIX = "delete the folder; the next start builds it again"

logger = logging.getLogger("dtron")


class TokenFile:
    """Tokens (N,) in a file, read on demand.

    It is an error if the file is truncated or changed; memory-mapped, it would end the process
    (SIGBUS).

    Args:
        dtype: one of DTYPES.
        vocab_size: every token is below it.
    Raises:
        OSError: the file cannot be read.
    """

    def __init__(self, path: Path, dtype: str, vocab_size: int) -> None:
        self.dtype, self._path, self._vocab_size = np.dtype(dtype), path, vocab_size
        self._file = open_regular(path)
        self._length = os.fstat(self._file.fileno()).st_size // self.dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> np.ndarray:
        """Read a slice without a step. Raises DataError: as `read`."""
        start, stop, _ = part.indices(self._length)
        return self.read([(start, max(start, stop))])

    def read(self, spans: Sequence[tuple[int, int]]) -> np.ndarray:
        """Read the tokens [start, stop) of all spans, concatenated.

        All are checked together, since a check per document takes up to a fifth of the loader's
        time.

        Raises:
            DataError: the file has become shorter, or holds ids that the tokenizer does not have.
        """
        size, filled = self.dtype.itemsize, 0
        tokens = np.empty(sum(stop - start for start, stop in spans), self.dtype)
        buffer = tokens.data.cast("B") if len(tokens) else memoryview(b"")
        for start, stop in spans:
            at, end = start * size, stop * size
            while at < end:
                n = os.preadv(self._file.fileno(), [buffer[filled : filled + end - at]], at)
                if not n:
                    raise DataError(f"{self._path} was truncated while it was read; {_DELETE_FIX}")
                at, filled = at + n, filled + n
        if len(tokens) and tokens.max() >= self._vocab_size:
            raise DataError(
                f"{self._path} is damaged: token {tokens.max()} is not in the tokenizer's "
                f"vocabulary of {self._vocab_size}; {_DELETE_FIX}"
            )
        return tokens


@dataclass(frozen=True)
class TokenCache:
    """An open cache; tokens are read from disk on demand."""

    path: Path
    tokens: TokenFile
    """uint16 or uint32 (N,)"""
    offsets: np.ndarray
    """int64 (n_documents + 1,)"""
    copies: np.ndarray
    """int64 (n_copies, 2), index of each copy and of the earlier document that it equals"""
    content: str
    """SHA-256 of tokens and offsets, computed when they were written"""

    @property
    def n_documents(self) -> int:
        """Number of documents, without empty ones."""
        return len(self.offsets) - 1


def cache_path(corpus: Corpus, tokenizer: Tokenizer, cache_dir: str) -> Path:
    """Return the folder of the cache of this corpus with this tokenizer."""
    identity = json.dumps([FORMAT, corpus.identity, tokenizer.fingerprint])
    key = hashlib.sha256(identity.encode()).hexdigest()[:32]
    return Path(os.path.abspath(os.path.expanduser(cache_dir))) / key


def open_cache(path: Path, tokenizer: Tokenizer) -> TokenCache | None:
    """Open the cache at a path; None if it does not exist or is damaged."""
    try:
        meta = parse(read_text(path / "meta.json", MB))
        if meta["dtype"] not in DTYPES:
            return None
        tokens = TokenFile(path / "tokens.bin", meta["dtype"], tokenizer.vocab_size)
        n = meta["documents"]
        if max(n, meta["copies"]) > len(tokens):  # every document has a token
            return None
        offsets = _read_array(path / "offsets.npy", n + 1)
        copies = _read_array(path / "copies.npy", meta["copies"], 2)
        ends = (offsets[0], offsets[-1], len(tokens))
        whole = ends == (0, meta["tokens"], meta["tokens"]) and bool((np.diff(offsets) > 0).all())
        whole = whole and bool(((copies >= 0) & (copies < n)).all())
        content = str(meta["content"])
        whole = whole and (_unchanged(path) or _verified(path, offsets, content))
    except (OSError, ValueError, LookupError, TypeError):
        return None
    return TokenCache(path, tokens, offsets, copies, content) if whole else None


def _unchanged(path: Path) -> bool:
    """Whether no file of a cache is newer than meta.json, which is written last."""
    written = (path / "meta.json").stat().st_mtime_ns
    return all((path / name).stat().st_mtime_ns <= written for name in _ARRAYS)


def _verified(path: Path, offsets: np.ndarray, content: str) -> bool:
    """Whether tokens and offsets have the hash that was computed when they were written.

    Files that were copied are newer than meta.json too; it is touched, so that they are read whole
    once and not at every start.
    """
    logger.info("%s is newer than its meta.json: comparing its content with the hash there", path)
    found = hashlib.sha256()
    with open_regular(path / "tokens.bin") as file:
        while block := file.read(MB):
            found.update(block)
    found.update(offsets.tobytes())
    if found.hexdigest() != content:
        return False
    with contextlib.suppress(OSError):  # a cache may be read-only
        os.utime(path / "meta.json")
    return True


def _read_array(path: Path, *shape: int) -> np.ndarray:
    """Read an int64 array of this shape that np.save has written.

    The header is compared with the expected one instead of parsed. Raises OSError, ValueError.
    """
    if not all(type(n) is int and 0 <= n < 2**40 for n in shape):
        raise ValueError(f"{shape} is not a shape")
    header = io.BytesIO()
    known = {"descr": "<i8", "fortran_order": False, "shape": shape}
    np.lib.format.write_array_header_1_0(header, known)
    start, count = header.getvalue(), math.prod(shape)
    content = read_bytes(path, len(start) + 8 * count)
    if not content.startswith(start):
        raise ValueError("the header of the array differs from the expected one")
    return np.frombuffer(content, "<i8", count, len(start)).reshape(shape)


def open_or_build(corpus: Corpus, tokenizer: Tokenizer, path: Path) -> TokenCache:
    """Open the cache at a path; build it if it does not exist or is damaged.

    Raises:
        DataError: there are no documents, one cannot be read, or the folder cannot be written.
    """
    if cache := open_cache(path, tokenizer):
        return cache
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    remove = functools.partial(shutil.rmtree, temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        with _clean_up_before_signals(remove):
            _write(corpus, tokenizer, temporary)
        if corpus.current is not None and corpus.current() != corpus.identity:
            raise DataError(
                f"{corpus.name} changed while it was tokenized; start again once it is complete"
            )
        _commit(temporary, path, tokenizer)
    except OSError as error:
        raise DataError(
            f"data.cache_dir: cannot write {error.filename or path}: {error.strerror or error}; "
            "name a directory you can write"
        ) from None
    finally:
        remove()
    if cache := open_cache(path, tokenizer):
        return cache
    raise DataError(f"data.cache_dir: {path} was removed or damaged while it was opened")


@contextlib.contextmanager
def heartbeat(path: Path) -> Iterator[None]:
    """Touch PATH.preparing every few seconds in a thread, as a sign of life for waiting processes.

    The file is removed at the end, also on SIGINT and SIGTERM.
    """
    file, done = _heartbeat_of(path), threading.Event()

    def touch() -> None:
        while True:
            with contextlib.suppress(OSError):  # `open_or_build` reports what cannot be written
                file.parent.mkdir(parents=True, exist_ok=True)
                with open_own(file, os.O_WRONLY) as opened:
                    os.utime(opened.fileno())
            if done.wait(HEARTBEAT_SECONDS):
                return

    def end() -> None:
        done.set()
        thread.join()
        with contextlib.suppress(OSError):
            file.unlink()

    thread = threading.Thread(target=touch, daemon=True)
    thread.start()
    try:
        with _clean_up_before_signals(end):
            yield
    finally:
        end()


@contextlib.contextmanager
def _clean_up_before_signals(clean: Callable[[], None]) -> Iterator[None]:
    """Call `clean` before the handlers of SIGINT and SIGTERM, which may end the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield  # other threads set no handlers
        return
    found = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    before = {number: handler for number, handler in found.items() if handler is not None}

    def handle(number: int, frame: FrameType | None) -> None:
        clean()
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)
        elif handler == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    try:
        for number in before:
            signal.signal(number, handle)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def last_heartbeat(path: Path) -> float:
    """Return the time of the last heartbeat for the cache at a path; 0.0: none."""
    try:
        return _heartbeat_of(path).lstat().st_mtime
    except OSError:
        return 0.0


def _heartbeat_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.preparing")


def remove_stale(cache_dir: Path) -> None:
    """Remove files of killed builds, which have no heartbeat any more."""
    with contextlib.suppress(OSError):
        for entry in list(os.scandir(cache_dir)):
            found = _BUILD_FILES.fullmatch(entry.name)
            if found is None or _is_alive(cache_dir / found[1], entry):
                continue
            logger.info("removing %s, left over from a killed process", entry.path)
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)


def _is_alive(path: Path, entry: os.DirEntry[str]) -> bool:
    last = max(last_heartbeat(path), entry.stat(follow_symlinks=False).st_mtime)
    return abs(time.time() - last) < STALE_SECONDS  # in the future: by a wrong clock


def _write(corpus: Corpus, tokenizer: Tokenizer, directory: Path) -> None:
    dtype = np.dtype(DTYPES[tokenizer.vocab_size > 2**16])
    start = last = time.monotonic()
    offsets, n_empty, content = array("q", [0]), 0, hashlib.sha256()
    each = array("Q")  # one hash per document
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
    (directory / "meta.json").write_text(json.dumps(meta, indent=1) + "\n", encoding="utf-8")
    logger.info(
        "tokenized %d documents (%d empty ones skipped) to %d tokens in %.1f s",
        n_documents,
        n_empty,
        n_tokens,
        time.monotonic() - start,
    )


def hash_of(content: bytes) -> int:
    """Return a 64-bit hash of a document's content."""
    return int.from_bytes(hashlib.blake2b(content, digest_size=8).digest(), "little")


def _commit(temporary: Path, path: Path, tokenizer: Tokenizer) -> None:
    if path.exists() and open_cache(path, tokenizer) is None:
        logger.warning("%s is damaged: replacing it", path)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    try:
        os.rename(temporary, path)
    except OSError:  # another process was faster; its cache is equal
        if open_cache(path, tokenizer) is None:
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
