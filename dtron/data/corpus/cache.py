"""Token cache: a corpus is tokenized once, and its tokens are read from disk from then on.

    CACHE_DIR/KEY/               a tokenized corpus (dtron/data/corpus/shards.py), or the index of
                                 one (dtron/data/corpus/document_index.py)
    CACHE_DIR/IDENTITY.key       the KEY of a corpus whose files have these paths, sizes and times

KEY is a hash of everything that the content depends on: of the files' content, whatever their
names, and of the tokenizer. So that the files are not read at each start, KEY is kept by their
paths, sizes and modification times. A folder is written to CACHE_DIR/KEY.UNIQUE.tmp and renamed, so
that it is complete or absent; if several processes build the same one, the first one to finish
keeps it. A process that builds touches CACHE_DIR/IDENTITY.preparing every few seconds, as a
heartbeat for processes that wait. Both are removed when the build ends, also after an error or a
signal; after SIGKILL, by a later start.
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import re
import shutil
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import TypeVar

from dtron.data.corpus.document_index import DocumentIndex, build_index, index_key, open_index
from dtron.data.corpus.documents import Corpus
from dtron.data.corpus.shards import FORMAT, write_corpus
from dtron.data.corpus.token_corpus import TokenCorpus, open_corpus
from dtron.data.corpus.tokenize import write_shards
from dtron.data.tokenizer import Tokenizer
from dtron.errors import DataError
from dtron.io.filesystem import open_own, write_atomically
from dtron.io.untrusted import read_text

HEARTBEAT_SECONDS = 5.0
STALE_SECONDS = 60.0
"""A process without a heartbeat for this long is considered dead."""
_BUILD_FILES = re.compile(r"([0-9a-f]{32})(\.[0-9a-f]{32}\.tmp|\.preparing)")
"""Names of temporary files of a build; the first group is a key."""

logger = logging.getLogger("dtron")
_T = TypeVar("_T")


def cache_folder(cache_dir: str) -> Path:
    """Return the folder of `data.cache_dir`."""
    return Path(os.path.abspath(os.path.expanduser(cache_dir)))


def identity_path(corpus: Corpus, tokenizer: Tokenizer, folder: Path) -> Path:
    """Return CACHE_DIR/IDENTITY, known without reading the files."""
    return folder / _hash(["files", FORMAT, corpus.identity, tokenizer.fingerprint])


def known_path(corpus: Corpus, tokenizer: Tokenizer, folder: Path) -> Path | None:
    """Return the folder of the corpus's tokens as it was found earlier; None: it was not."""
    try:
        key = read_text(_key_file(identity_path(corpus, tokenizer, folder)), 64)
    except (OSError, ValueError):
        return None
    return folder / key if re.fullmatch("[0-9a-f]{32}", key) else None


def find_path(corpus: Corpus, tokenizer: Tokenizer, folder: Path) -> Path:
    """Return the folder of the corpus's tokens; read its files if it is not known.

    Raises:
        DataError: a file cannot be read.
    """
    if found := known_path(corpus, tokenizer, folder):
        return found
    return folder / _hash(["content", FORMAT, corpus.content(), tokenizer.fingerprint])


def keep_path(corpus: Corpus, tokenizer: Tokenizer, path: Path) -> None:
    """Keep the folder of the corpus's tokens for later starts and for other processes."""
    file = _key_file(identity_path(corpus, tokenizer, path.parent))
    try:
        if known_path(corpus, tokenizer, path.parent) != path:
            write_atomically(file, path.name, synced=False)
    except OSError as error:
        raise DataError(f"data.cache_dir: cannot write {file}: {error.strerror}") from None


def _key_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.key")


def _hash(identity: list[object]) -> str:
    return hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:32]


def open_or_build(
    corpus: Corpus, tokenizer: Tokenizer, path: Path, workers: int = 1
) -> TokenCorpus:
    """Open the tokens at a path; build them if they do not exist or are damaged.

    Args:
        workers: most processes to tokenize with.
    Raises:
        DataError: there are no documents, one cannot be read, or the folder cannot be written.
    """

    def write(folder: Path) -> None:
        shards = write_shards(corpus, tokenizer, folder, workers=workers)
        write_corpus(folder, shards, corpus.name, tokenizer, corpus.settings.masked)
        if corpus.current is not None and corpus.current() != corpus.identity:
            raise DataError(
                f"{corpus.name} changed while it was tokenized; start again once it is complete"
            )

    return _open_or_build(path, lambda: open_corpus(path, tokenizer), write)


def open_or_build_index(corpus: TokenCorpus, fraction: float, folder: Path) -> DocumentIndex:
    """Open the index of a corpus; build it in the cache if it does not exist or is damaged.

    Raises:
        DataError: as `build_index`, or the folder cannot be written.
    """
    path = index_path(corpus, fraction, folder)

    def write(temporary: Path) -> None:
        build_index(corpus, fraction, temporary)

    return _open_or_build(path, lambda: open_index(path, corpus), write)


def index_path(corpus: TokenCorpus, fraction: float, folder: Path) -> Path:
    """Return the folder of a corpus's index, for this fraction of held-out documents."""
    return folder / index_key(corpus, fraction)


def _open_or_build(
    path: Path, opened: Callable[[], _T | None], write: Callable[[Path], None]
) -> _T:
    """Return what `opened` returns; if it is None, write the folder first."""
    if (found := opened()) is not None:
        return found
    temporary = path.with_name(f"{path.name}.{uuid.uuid4().hex}.tmp")
    remove = functools.partial(shutil.rmtree, temporary, ignore_errors=True)
    try:
        temporary.mkdir(parents=True)
        with heartbeat(path), _clean_up_before_signals(remove):
            write(temporary)
        _commit(temporary, path, opened)
    except OSError as error:
        raise DataError(
            f"data.cache_dir: cannot write {error.filename or path}: {error.strerror or error}; "
            "name a directory you can write"
        ) from None
    finally:
        remove()
    if (found := opened()) is not None:
        return found
    raise DataError(f"data.cache_dir: {path} was removed or damaged while it was opened")


def _commit(temporary: Path, path: Path, opened: Callable[[], object]) -> None:
    if path.exists() and opened() is None:
        logger.warning("%s is damaged: replacing it", path)
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()
    try:
        os.rename(temporary, path)
    except OSError:  # another process was faster; its folder is equal
        if opened() is None:
            raise


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
            if found is None or is_alive(
                cache_dir / found[1], entry.stat(follow_symlinks=False).st_mtime
            ):
                continue
            logger.info("removing %s, left over from a killed process", entry.path)
            if entry.is_dir(follow_symlinks=False):
                shutil.rmtree(entry.path, ignore_errors=True)
            else:
                os.unlink(entry.path)


def is_alive(path: Path, last: float | None = None) -> bool:
    """Whether the last heartbeat for a path, or another time, is recent."""
    last = last_heartbeat(path) if last is None else max(last_heartbeat(path), last)
    return abs(time.time() - last) < STALE_SECONDS  # in the future: by a wrong clock
