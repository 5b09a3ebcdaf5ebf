import hashlib
import json
import logging
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtron.config import Data
from dtron.data import TokenCorpus, prepare, sources, wait_for
from dtron.data.corpus import cache
from dtron.data.corpus.cache import cache_folder, open_or_build
from dtron.data.corpus.documents import Corpus, Part, Reading
from dtron.data.sources import open_corpus_and_index
from dtron.data.tokenizer import ByteTokenizer
from dtron.errors import DataError
from tests.test_architecture import ROOT

MakeData = Callable[..., Data]


def prepared(data: Data) -> TokenCorpus:
    prepare(data)
    return open_corpus_and_index(data)[0]


def documents(corpus: TokenCorpus) -> list[list[int]]:
    lengths = np.concatenate([each for _, _, each in corpus.documents()]).astype(int)
    ends = np.cumsum(lengths).tolist()
    return [corpus.tokens[end - n : end].tolist() for end, n in zip(ends, lengths, strict=True)]


def is_ready(data: Data) -> bool:
    folder = cache_folder(data.cache_dir)
    corpus = sources._finder(data, ByteTokenizer(), folder)()
    return sources._is_prepared(corpus, data, 8, folder)


def folder_of(corpus: TokenCorpus) -> Path:
    (folder,) = corpus.folders
    return Path(str(folder))


def corpus_of(*texts: str) -> Corpus:
    """A corpus in memory."""
    return Corpus("one", "1", ((Part("one", 0, 0),),), lambda part, reading: iter(texts), str)


def builds(caplog: pytest.LogCaptureFixture) -> int:
    return sum(record.message.startswith("tokenized") for record in caplog.records)


def test_tokens_and_offsets(make_data: MakeData, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "dtron")
    cache = prepared(make_data(["ab", "", "  ", "c€"]))
    assert documents(cache) == [[97, 98, 256], [*"c€".encode(), 256]]
    assert cache.tokens.dtype == np.uint16
    assert cache.n_documents == 2
    assert "tokenized 2 documents (2 empty ones skipped) to 8 tokens" in caplog.text


def test_many_batches(make_data: MakeData, monkeypatch: pytest.MonkeyPatch) -> None:
    texts = [str(i) * (1 + i % 5) for i in range(50)]
    monkeypatch.setattr("dtron.data.corpus.tokenize.BATCH_DOCUMENTS", 7)
    monkeypatch.setattr("dtron.data.corpus.tokenize.BATCH_CHARACTERS", 20)
    assert documents(prepared(make_data(texts))) == [[*text.encode(), 256] for text in texts]


def test_second_prepare_reads_no_document(
    make_data: MakeData, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dtron")
    data = make_data(["one", "two"])
    assert not is_ready(data)
    first = prepared(data)
    assert is_ready(data)
    assert prepared(data).folders == first.folders
    assert builds(caplog) == 1


def test_a_moved_or_copied_file_is_not_tokenized_again(
    make_data: MakeData, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "dtron")
    data = make_data(["one", "two"])
    first = prepared(data)
    os.rename(data.paths[0], tmp_path / "moved.jsonl")
    moved = data.model_copy(update={"paths": (str(tmp_path / "moved.jsonl"),)})
    assert not is_ready(moved)  # its content is not known yet
    assert prepared(moved).folders == first.folders
    assert is_ready(moved)
    assert builds(caplog) == 1


def test_a_changed_file_is_tokenized_again(make_data: MakeData) -> None:
    data = make_data(["one", "two"])
    before = prepared(data)
    status = os.stat(data.paths[0])
    make_data(["one", "ten"])  # of the same size
    os.utime(data.paths[0], ns=(status.st_atime_ns, status.st_mtime_ns + 1))
    assert not is_ready(data)
    assert documents(prepared(data))[1] == [*b"ten", 256] != documents(before)[1]


def test_another_tokenizer_or_key_has_its_own_cache(make_data: MakeData, bpe: Path) -> None:
    data = make_data(["one", "two"])
    other = prepared(data.model_copy(update={"tokenizer": str(bpe)}))
    assert prepared(data).folders != other.folders
    assert not is_ready(data.model_copy(update={"text_key": "body"}))
    fraction = data.model_copy(update={"validation_fraction": 0.5})
    assert not is_ready(fraction)  # it has another index of the same tokens
    assert prepared(fraction).folders == prepared(data).folders


def test_wide_vocabulary_is_stored_in_32_bits(tmp_path: Path) -> None:
    class Wide(ByteTokenizer):
        vocab_size = 70_000
        eos_id = 69_999
        fingerprint = "wide"

    cache = open_or_build(corpus_of("ab"), Wide(), tmp_path / "cache")
    assert cache.tokens.dtype == np.uint32
    assert documents(cache) == [[97, 98, 69_999]]


def _truncate(path: Path) -> None:
    with open(path / "00000.tokens", "r+b") as file:
        file.truncate(4)


def _change(path: Path, kind: str) -> None:
    """A file of the same size, with another byte in it."""
    later = (path / "corpus.json").stat().st_mtime + 1
    file = path / f"00000.{kind}"
    file.write_bytes(b"x" + file.read_bytes()[1:])
    os.utime(file, (later, later))


def _a_file(path: Path) -> None:
    shutil.rmtree(path)
    path.touch()


def _more_documents_than_tokens(path: Path) -> None:
    """Documents of 12 GB in a sparse file."""
    meta = json.loads((path / "corpus.json").read_text())
    meta["shards"][0]["documents"] = 10**9
    (path / "corpus.json").write_text(json.dumps(meta))
    os.truncate(path / "00000.documents", 12 * 10**9)


def _drop_a_shard(path: Path) -> None:
    """One document in place of two; the shard of the other is not listed any more."""
    meta = json.loads((path / "corpus.json").read_text())
    meta["shards"][0] |= {"documents": 1, "tokens": 4}
    (path / "corpus.json").write_text(json.dumps(meta))
    os.truncate(path / "00000.documents", 12)
    os.truncate(path / "00000.tokens", 8)
    os.utime(path / "corpus.json", (2**32, 2**32))


DAMAGES: list[Callable[[Path], object]] = [
    _truncate,
    lambda path: _change(path, "tokens"),
    lambda path: _change(path, "documents"),
    _a_file,
    lambda path: (path / "00000.documents").write_bytes(b""),
    lambda path: (path / "corpus.json").write_text("[]"),
    lambda path: (path / "corpus.json").write_text('{"format": 4, "shards": [{"name": "../x"}]}'),
    lambda path: (path / "corpus.json").unlink(),
    _more_documents_than_tokens,
    _drop_a_shard,
]
"""Of the tokens."""

INDEX_DAMAGES: list[Callable[[Path], object]] = [
    _a_file,
    lambda path: os.truncate(path / "documents.bin", 16),
    lambda path: (path / "groups.bin").write_bytes(np.array([[9, 9], [0, 0]]).tobytes()),
    lambda path: (path / "index.json").unlink(),
    lambda path: _of_another_corpus(path),
]
"""Of the index."""


def _of_another_corpus(path: Path) -> None:
    """A complete index, of two documents."""
    sizes = np.array([[1, 4], [1, 4]]).tobytes()
    (path / "groups.bin").write_bytes(sizes)
    (path / "index.json").write_text(json.dumps({"groups": hashlib.sha256(sizes).hexdigest()}))
    os.truncate(path / "documents.bin", 32)


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_cache_is_built_again(
    make_data: MakeData, damage: Callable[[Path], object]
) -> None:
    data = make_data(["one", "two"])
    corpus = prepared(data)
    expected = documents(corpus)
    before = names_in_cache(data)
    damage(folder_of(corpus))
    assert not is_ready(data)
    assert documents(prepared(data)) == expected
    assert names_in_cache(data) == before


@pytest.mark.parametrize("damage", INDEX_DAMAGES)
def test_a_damaged_index_is_built_again(
    make_data: MakeData, damage: Callable[[Path], object]
) -> None:
    data = make_data(["one", "two", "three"])
    corpus = prepared(data)
    path = cache.index_path(corpus, data.validation_fraction, cache_folder(data.cache_dir))
    expected = (path / "documents.bin").read_bytes()
    damage(path)
    assert not is_ready(data)
    prepared(data)
    assert (path / "documents.bin").read_bytes() == expected


def names_in_cache(data: Data) -> list[str]:
    return sorted(os.listdir(data.cache_dir)) if os.path.isdir(data.cache_dir) else []


@pytest.mark.parametrize("kind", ["link", "fifo"])
def test_a_heartbeat_is_not_written_through_what_is_there(tmp_path: Path, kind: str) -> None:
    path, victim = tmp_path / "cache" / "key", tmp_path / "victim"
    path.parent.mkdir()
    victim.touch()
    os.utime(victim, (1, 1))
    there = cache._heartbeat_of(path)
    there.symlink_to(victim) if kind == "link" else os.mkfifo(there)
    with cache.heartbeat(path):
        time.sleep(0.2)
    assert victim.stat().st_mtime == 1
    assert not os.path.lexists(there)


def test_a_failed_build_leaves_nothing(make_data: MakeData) -> None:
    data = make_data(["one"])
    with open(data.paths[0], "a") as file:
        file.write("{\n")
    with pytest.raises(DataError, match=r"corpus\.jsonl, line 2: not JSON"):
        prepare(data)
    assert os.listdir(data.cache_dir) == []


def test_no_document_with_text(make_data: MakeData) -> None:
    with pytest.raises(DataError, match=r"corpus\.jsonl: no documents with text \(2 empty"):
        prepare(make_data(["", " "]))


def test_unwritable_directory_names_the_key(make_data: MakeData, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match=r"data\.cache_dir: cannot write .*Not a directory"):
        prepare(make_data(["one"], cache_dir=str(tmp_path / "file" / "cache")))


def _build_with_others(path: Path, barrier: Barrier) -> None:
    def texts(part: Part, reading: Reading) -> Iterator[str]:
        barrier.wait(10)  # everyone is building before anyone has finished
        yield from ("one", "two")

    corpus = Corpus("shared", "1", ((Part("shared", 0, 0),),), texts, str)
    cache = open_or_build(corpus, ByteTokenizer(), path)
    assert documents(cache) == [[*b"one", 256], [*b"two", 256]]


def test_processes_that_build_the_same_cache(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    barrier = context.Barrier(2)
    path = tmp_path / "key"
    processes = [context.Process(target=_build_with_others, args=(path, barrier)) for _ in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(20)
    assert [process.exitcode for process in processes] == [0, 0]
    assert os.listdir(tmp_path) == ["key"]


def test_waiting_for_a_process_that_shows_that_it_runs(
    make_data: MakeData, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as it takes, and no longer than it runs."""
    monkeypatch.setattr(cache, "HEARTBEAT_SECONDS", 0.2)
    data, slow = make_data(["one"]), cache.open_or_build

    def build(*arguments: Any) -> TokenCorpus:
        time.sleep(3)
        return slow(*arguments)

    monkeypatch.setattr(sources, "open_or_build", build)
    builder = threading.Thread(target=prepare, args=(data,))
    builder.start()
    wait_for(data, 8, 1.5)
    builder.join()
    assert is_ready(data)
    assert not list(Path(data.cache_dir).glob("*.preparing"))


def test_waiting_for_another_process(make_data: MakeData) -> None:
    data = make_data(["one"])
    with pytest.raises(DataError, match=r"no heartbeat for 0\.1 s"):
        wait_for(data, 8, 0.1)
    builder = threading.Thread(target=lambda: (time.sleep(0.1), prepare(data)))
    builder.start()
    wait_for(data, 8, 10)
    assert is_ready(data)
    builder.join()


STOPPED = """
import sys, time
from pathlib import Path
from dtron import entry
entry._end_on_signals()
from dtron.data import prepare
from dtron.data.corpus import tokenize
from dtron.config import Data

def stuck(texts):
    yield ["one"]
    Path(sys.argv[2], "began").touch()
    time.sleep(600)

tokenize._batches = stuck
prepare(Data(paths=[sys.argv[1]], cache_dir=sys.argv[2], validation_fraction=0.0))
"""
"""As train.py, which never ends to tokenize."""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_tokenizing_leaves_no_files(
    make_data: MakeData, tmp_path: Path, number: signal.Signals
) -> None:
    (path,), directory = make_data(["one"]).paths, tmp_path / "caches"
    process = subprocess.Popen([sys.executable, "-c", STOPPED, path, str(directory)], cwd=ROOT)
    deadline = time.monotonic() + 120
    while not (directory / "began").exists():
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert {Path(name).suffix for name in os.listdir(directory)} == {"", ".tmp", ".preparing"}
    process.send_signal(number)
    assert process.wait(30) == 128 + number
    assert os.listdir(directory) == ["began"]


def test_what_a_killed_build_left_is_removed(make_data: MakeData) -> None:
    """Once its heartbeat is old; nothing else in the folder."""
    data = make_data(["one"])
    directory = Path(data.cache_dir)
    keys = [f"{i:032x}" for i in range(2)]
    folders = [directory / f"{key}.{keys[0]}.tmp" for key in keys]
    of_tomorrow = directory / f"{2:032x}.{keys[0]}.tmp"
    of_tomorrow.mkdir(parents=True)
    os.utime(of_tomorrow, (0, time.time() + 86400))
    others = [directory / name for name in ("mine.tmp", f"{keys[0]}.tmp", f"{keys[0]}.preparing.1")]
    for folder in (*folders, *others):
        folder.mkdir(parents=True)
    beats = [directory / f"{key}.preparing" for key in keys]
    for file in beats:
        file.touch()
    for file in (folders[0], beats[0], folders[1], *others):
        os.utime(file, (0, time.time() - 2 * cache.STALE_SECONDS))
    prepare(data)
    assert not folders[0].exists()
    assert not beats[0].exists()
    assert not of_tomorrow.exists()
    assert all(path.exists() for path in (folders[1], beats[1], *others))


def test_a_copy_is_read_whole_once(make_data: MakeData, caplog: pytest.LogCaptureFixture) -> None:
    """Its files may be newer than its meta.json."""
    data = make_data(["one", "two"])
    path = folder_of(prepared(data))
    os.utime(path / "corpus.json", (0, 0))
    with caplog.at_level("INFO"):
        assert is_ready(data)
        assert is_ready(data)
    assert sum("newer than its corpus.json" in line for line in caplog.messages) == 1


def test_the_cache_says_what_it_holds(make_data: MakeData) -> None:
    path = folder_of(prepared(make_data(["one", "", "one"])))
    meta = json.loads((path / "corpus.json").read_text())
    assert (meta["documents"], meta["empty"], meta["tokens"], meta["duplicates"]) == (2, 1, 8, 1)


def test_home_directory_is_expanded() -> None:
    assert cache_folder("~/somewhere") == Path.home() / "somewhere"


def test_a_build_that_runs_is_not_removed(make_data: MakeData, tmp_path: Path) -> None:
    """Whatever the age of its folder: a large file changes no time of the folder."""

    def texts(part: Part, reading: Reading) -> Iterator[str]:
        (folder,) = tmp_path.glob("*.tmp")
        os.utime(folder, (0, time.time() - 2 * cache.STALE_SECONDS))
        time.sleep(0.1)
        cache.remove_stale(tmp_path)
        yield "one"

    corpus = Corpus("slow", "1", ((Part("slow", 0, 0),),), texts, str)
    opened = open_or_build(corpus, ByteTokenizer(), tmp_path / f"{1:032x}")
    assert opened.n_documents == 1


def test_a_key_that_was_cut_is_written_again(make_data: MakeData) -> None:
    data = make_data(["one", "two"])
    prepared(data)
    (file,) = Path(data.cache_dir).glob("*.key")
    file.write_bytes(b"")
    assert not is_ready(data)
    prepared(data)
    assert is_ready(data)
