"""Tokenizes the tasks of a corpus to shards, in this process or in several.

Each task is one shard, whose bytes depend on the corpus and the tokenizer alone. A shard that an
earlier process has finished is kept. Other processes are started by `subprocess`, not forked: a
rank may have threads. They read tasks from their standard input, and end when it is closed, as it
is when this process ends for whatever reason.
"""

import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dtron.config import Data
from dtron.data.corpus.documents import Corpus, Part, Reading, Task, read_part
from dtron.data.corpus.shards import Shard, ShardWriter, dtype_of, read_shard
from dtron.data.tokenizer import (
    Document,
    TokenDocument,
    Tokenizer,
    encode_documents,
    load_tokenizer,
)
from dtron.errors import DataError, DtronError
from dtron.io.filesystem import Location, listed, location
from dtron.io.remote_path import STORE_SECONDS, UnreachableError, retried

BATCH_DOCUMENTS = 1024
BATCH_CHARACTERS = 4_000_000  # bounds memory when documents are long
PROGRESS_SECONDS = 30.0
_REPORT_SECONDS = 1.0

log = logging.getLogger("dtron")


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


def shard_name(number: int) -> str:
    """Return the name of the shard of a task."""
    return f"{number:05d}"


def write_shard(
    corpus_texts: Callable[[Part, Reading], Iterable[Document]],
    task: Task,
    tokenizer: Tokenizer,
    reading: Reading,
    folder: Location,
    name: str,
    report: Callable[[int, int], None] = lambda documents, tokens: None,
) -> Shard:
    """Tokenize a task to a shard.

    Args:
        corpus_texts: yields the documents of a part.
        folder: an existing folder on a disk, or a folder in a store, to which the shard is
            copied when it is complete.
        report: called after each batch with the numbers of documents and of tokens so far.
    Raises:
        DataError: a document cannot be read.
        OSError: the folder cannot be written.
    """
    empty, characters, sources = 0, 0, []
    dtype = dtype_of(tokenizer, reading.data.masked)
    with _local(folder) as local, ShardWriter(local, name, dtype) as writer:
        for part in task:
            before = writer.counts[0]
            for texts in _batches(reading.fitting(corpus_texts(part, reading), tokenizer)):
                characters += sum(len(x) for x in texts if not isinstance(x, TokenDocument))
                encoded = encode_documents(tokenizer, texts)
                for document, ids in zip(texts, encoded, strict=True):
                    if len(ids):
                        writer.add(ids, getattr(document, "images", ()))
                    else:
                        empty += 1
                report(*writer.counts)
            count = writer.counts[0] - before
            sources.append([part.path, part.start, part.end, count])
        return writer.finish(
            empty=empty, characters=characters, sources=sources, skipped=reading.skipped
        )


@contextlib.contextmanager
def _local(folder: Location) -> Iterator[Path]:
    """Yield a folder on the disk; of a store, a temporary one whose files are copied at the end."""
    if isinstance(folder, Path):
        yield folder
        return
    with tempfile.TemporaryDirectory(prefix="dtron-data-") as temporary:
        yield Path(temporary)
        files = Path(temporary).iterdir()
        for file in sorted(files, key=lambda file: file.suffix == ".json"):  # it is written last
            retried(lambda file=file: (folder / file.name).copy_from(file), STORE_SECONDS)


def write_shards(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Location,
    *,
    workers: int = 1,
    skip_errors: bool = False,
) -> list[Shard]:
    """Tokenize all tasks of a corpus that have no shard yet; return all shards.

    Args:
        folder: an existing folder.
        workers: most processes to use.
        skip_errors: leave out documents that cannot be read, with a warning for each.
    Raises:
        DataError: a document cannot be read.
        OSError: the folder cannot be written.
    """
    there = listed(folder)
    found = {n: read_shard(there, shard_name(n)) for n in range(len(corpus.tasks))}
    shards = {n: shard for n, shard in found.items() if shard}
    todo = [n for n in found if n not in shards]
    progress = _Progress(corpus, shards)
    if not shards:
        log.info("tokenizing %s", corpus.name)
    else:
        log.info("tokenizing %s: %d of %d shards exist", corpus.name, len(shards), len(found))
    if min(workers, len(todo)) > 1 and corpus.data is not None:
        pool = _Pool(corpus, corpus.data, folder, skip_errors, progress)
        shards |= pool.run(todo, min(workers, len(todo)))
    else:
        for number in todo:
            shards[number] = _write_here(corpus, tokenizer, folder, skip_errors, progress, number)
    progress.finish(list(shards.values()))
    return [shards[number] for number in sorted(shards)]


def _write_here(
    corpus: Corpus,
    tokenizer: Tokenizer,
    folder: Location,
    skip_errors: bool,
    progress: "_Progress",
    number: int,
) -> Shard:
    reading = Reading(corpus.settings, skip_errors)

    def report(documents: int, tokens: int) -> None:
        progress.update(number, reading.bytes_read, documents, tokens)

    task, name = corpus.tasks[number], shard_name(number)
    return write_shard(corpus.texts, task, tokenizer, reading, folder, name, report)


class _Progress:
    """Logs how much of a corpus is tokenized, every 30 s."""

    def __init__(self, corpus: Corpus, done: dict[int, Shard]) -> None:
        self._bytes = [sum(part.end - part.start for part in task) for task in corpus.tasks]
        self._counts = {
            n: (self._bytes[n], shard.documents, shard.tokens) for n, shard in done.items()
        }
        self._before = sum(self._bytes[n] for n in done)
        self._started = self._last = time.monotonic()

    def update(self, task: int, read: int, documents: int, tokens: int) -> None:
        """Note the counts of a task so far."""
        self._counts[task] = read, documents, tokens
        now = time.monotonic()
        if now - self._last < PROGRESS_SECONDS:
            return
        self._last = now
        read, documents, tokens = map(sum, zip(*self._counts.values(), strict=True))
        if not (total := sum(self._bytes)):
            log.info("tokenized %s documents, %s tokens so far", f"{documents:,}", f"{tokens:,}")
            return
        rate = (read - self._before) / (now - self._started)
        left = (total - read) / rate if rate else float("inf")
        log.info(
            "%.1f%%: %s documents, %s tokens so far; %.1f MB/s, %.0f s left",
            100 * read / total,
            f"{documents:,}",
            f"{tokens:,}",
            rate / 1e6,
            left,
        )

    def finish(self, shards: list[Shard]) -> None:
        """Log the numbers of documents and tokens of all shards."""
        log.info(
            "tokenized %d documents (%d empty ones skipped) to %d tokens in %.1f s",
            sum(shard.documents for shard in shards),
            sum(shard.empty for shard in shards),
            sum(shard.tokens for shard in shards),
            time.monotonic() - self._started,
        )


@dataclass
class _Pool:
    """Processes that tokenize tasks."""

    corpus: Corpus
    data: Data
    folder: Location
    skip_errors: bool
    progress: _Progress
    shards: dict[int, Shard] = field(default_factory=dict)
    errors: list[Exception] = field(default_factory=list)
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def run(self, tasks: list[int], workers: int) -> dict[int, Shard]:
        """Run all tasks; raise the error of the first task that fails."""
        waiting: queue.SimpleQueue[int] = queue.SimpleQueue()
        for number in tasks:
            waiting.put(number)
        threads = [
            threading.Thread(target=self._serve, args=(waiting,), daemon=True)
            for _ in range(workers)
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            for process in self.processes:
                process.kill()
                process.wait()
        if self.errors:
            raise self.errors[0]
        return self.shards

    def _serve(self, waiting: "queue.SimpleQueue[int]") -> None:
        try:
            process = self._start()
            while not self.errors:
                try:
                    number = waiting.get_nowait()
                except queue.Empty:
                    break
                self.shards[number] = self._ask(process, number)
        except Exception as error:
            self.errors.append(error)
            for process in self.processes:
                process.kill()

    def _start(self) -> subprocess.Popen[str]:
        # One thread each: there is a process for each core.
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "false", "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [sys.executable, "-c", f"from {__name__} import worker; worker()"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            text=True,
        )
        self.processes.append(process)
        settings = {
            "data": self.data.model_dump(mode="json"),
            "folder": str(self.folder),
            "skip_errors": self.skip_errors,
        }
        self._send(process, settings)
        return process

    def _ask(self, process: subprocess.Popen[str], number: int) -> Shard:
        task = [asdict(part) for part in self.corpus.tasks[number]]
        self._send(process, {"number": number, "task": task})
        assert process.stdout is not None
        for line in process.stdout:
            answer = json.loads(line)
            if "shard" in answer:
                return Shard(**answer["shard"])
            if "os_error" in answer:
                raise OSError(*answer["os_error"])
            if "error" in answer:
                raise DataError(answer["error"])
            self.progress.update(number, *answer["counts"])
        raise DataError(
            f"a process that tokenizes {self.corpus.name} has ended with status {process.wait()}; "
            "start again; dtron data prepare --out keeps finished shards"
        )

    def _send(self, process: subprocess.Popen[str], value: dict[str, Any]) -> None:
        assert process.stdin is not None
        process.stdin.write(json.dumps(value) + "\n")
        process.stdin.flush()


def worker() -> None:
    """Read tasks from standard input, write shards, report on standard output."""
    settings = json.loads(sys.stdin.readline())
    data, folder = Data.model_validate(settings["data"]), location(settings["folder"])
    tokenizer = load_tokenizer(data)
    for line in sys.stdin:
        asked = json.loads(line)
        task = tuple(Part(**part) for part in asked["task"])
        reading = Reading(data, settings["skip_errors"])
        report = _reporter(reading)
        try:
            name = shard_name(asked["number"])
            shard = write_shard(read_part, task, tokenizer, reading, folder, name, report)
            answer = {"shard": asdict(shard)}
        except UnreachableError as error:
            answer = {"error": f"--out: {error}"}
        except OSError as error:
            answer = {"os_error": [error.errno, error.strerror, error.filename]}
        except DtronError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True)


def _reporter(reading: Reading) -> Callable[[int, int], None]:
    last = 0.0

    def report(documents: int, tokens: int) -> None:
        nonlocal last
        if time.monotonic() - last > _REPORT_SECONDS:
            last = time.monotonic()
            print(json.dumps({"counts": [reading.bytes_read, documents, tokens]}), flush=True)

    return report


def _batches(texts: Iterable[Document]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for text in texts:
        batch.append(text)
        characters += len(text)
        if len(batch) == BATCH_DOCUMENTS or characters >= BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
