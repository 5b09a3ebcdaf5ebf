"""Corpora whose files are read from URLs, and prepared folders in a store; over `file://` here.

tests/data/corpus/test_data_s3.py trains from a store over HTTP, under faults.
"""

import gzip
import json
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dtron.config import Data
from dtron.data import Loader, open_data, prepare
from dtron.data.corpus.documents import Reading, files_corpus
from dtron.data.corpus.prepare import prepare_folder
from dtron.data.corpus.token_corpus import TokenShards, open_corpus
from dtron.data.fetch_ahead import FetchAhead
from dtron.data.tokenizer import ByteTokenizer
from dtron.errors import ConfigError, DataError
from dtron.io import remote_path
from dtron.io.filesystem import location
from dtron.io.remote_path import Remote, UnreachableError, read_ranges, retried

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def folder(tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """Three files of several tasks, one compressed, and one that is hidden."""
    monkeypatch.setattr("dtron.data.corpus.documents.TASK_BYTES", 600)
    corpus = tmp_path / "corpus"
    (corpus / "more").mkdir(parents=True)
    lines = [json.dumps({"text": text}) + "\n" for text in texts]
    (corpus / "a.jsonl").write_text("".join(lines[:25]))
    (corpus / "more/b.jsonl.gz").write_bytes(gzip.compress("".join(lines[25:]).encode()))
    (corpus / "c.txt").write_text("one document")
    (corpus / ".hidden.jsonl").write_text("no JSON")
    return corpus


def section(*paths: str | Path, **values: Any) -> Data:
    return Data.model_validate({"paths": [str(path) for path in paths], **values})


def url(path: Path) -> str:
    return f"file://{path}"


def content(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.iterdir() if path.suffix in (".tokens", ".documents")]
    return {path.name: path.read_bytes() for path in files}


@pytest.mark.parametrize("pattern", ["", "/*.*", "/a.jsonl"])
def test_files_of_urls_are_read_as_those_of_a_disk(folder: Path, pattern: str) -> None:
    here = files_corpus(section(f"{folder}{pattern}"))
    there = files_corpus(section(f"{url(folder)}{pattern}"))
    assert list(there.documents(Reading(Data()))) == list(here.documents(Reading(Data())))
    assert len(there.tasks) == len(here.tasks)
    assert there.current is not None
    assert there.current() == there.identity
    with open(folder / "a.jsonl", "a") as file:
        file.write("{}\n")
    assert there.current() != there.identity


def test_parquet_is_read_from_urls(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    pq.write_table(pa.table({"text": ["a", None, "b"]}), tmp_path / "a.parquet")
    found = files_corpus(section(url(tmp_path / "a.parquet"))).documents(Reading(Data()))
    assert list(found) == ["a", "", "b"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("nothing", "no such file"),
        ("corpus/.hidden.jsonl", "not JSON"),
        ("corpus/*.csv", "no such file"),
        ("other", "no file ends with .jsonl"),
        ("other/a.csv", "ends with none of"),
    ],
)
def test_urls_that_name_no_file(folder: Path, tmp_path: Path, path: str, message: str) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other/a.csv").write_text("a")
    with pytest.raises(DataError) as error:
        list(files_corpus(section(url(tmp_path / path))).documents(Reading(Data())))
    assert message in str(error.value)
    assert url(tmp_path) in str(error.value)


def test_a_protocol_without_a_library_is_named() -> None:
    with pytest.raises(ConfigError, match="'nonsense://a' is not a URL"):
        files_corpus(section("nonsense://a"))


@pytest.mark.parametrize("workers", [1, 2])
def test_a_folder_in_a_store_holds_the_bytes_of_one_on_a_disk(
    folder: Path, tmp_path: Path, workers: int
) -> None:
    """It is finished by a second command, and refused for another corpus."""
    corpus, tokenizer = files_corpus(section(url(folder))), ByteTokenizer()
    prepare_folder(corpus, tokenizer, tmp_path / "here", 1, False)
    there = location(url(tmp_path / "there"))
    prepare_folder(corpus, tokenizer, there, workers, False)
    assert content(tmp_path / "there") == content(tmp_path / "here")
    written = (tmp_path / "there/00000.tokens").stat().st_mtime_ns
    (tmp_path / "there/00001.json").unlink()
    prepare_folder(corpus, tokenizer, there, workers, False)
    assert content(tmp_path / "there") == content(tmp_path / "here")
    assert (tmp_path / "there/00000.tokens").stat().st_mtime_ns == written
    names = ("corpus.json", "summary.log", "plan.json")
    for a, b in ((tmp_path / "here" / name, tmp_path / "there" / name) for name in names):
        assert a.read_text() == b.read_text()
    other = files_corpus(section(folder / "a.jsonl"))
    with pytest.raises(DataError, match="was begun with another corpus and shards"):
        prepare_folder(other, tokenizer, there, workers, False)


@pytest.fixture
def prepared(folder: Path, tmp_path: Path) -> Path:
    out = tmp_path / "prepared"
    prepare_folder(files_corpus(section(folder)), ByteTokenizer(), out, 1, False)
    return out


def settings(tmp_path: Path, **more: Any) -> dict[str, Any]:
    return {"source": "prepared", "cache_dir": str(tmp_path / "cache"), **more}


@pytest.mark.parametrize("packing", ["cut", "best_fit"])
def test_sequences_of_a_store_are_those_of_a_disk(
    prepared: Path, tmp_path: Path, packing: str
) -> None:
    keys = settings(tmp_path, packing=packing, validation_fraction=0.1)
    sources = []
    for place in (prepared, url(prepared)):
        data = section(place, **keys)
        prepare(data, 24)
        sources.append(open_data(data, seq_len=24, seed=1))
    (here, _), (there, held_out) = sources
    for k in range(40):
        assert here.sequence(k).tokens.tolist() == there.sequence(k).tokens.tolist()
    assert held_out is not None


@pytest.mark.parametrize("packing", ["cut", "best_fit"])
def test_a_step_is_read_by_requests_that_are_sent_together(
    prepared: Path, tmp_path: Path, packing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of both micro-batches; one sequence after the other would wait for each."""
    batches, calls = [], []
    for place in (prepared, url(prepared)):
        data = section(place, **settings(tmp_path, packing=packing))
        prepare(data, 24)
        source, _ = open_data(data, seq_len=24, seed=1)
        if place != prepared:
            monkeypatch.setattr(
                "dtron.data.corpus.token_corpus.read_ranges",
                lambda ranges, seconds: calls.append(len(ranges)) or read_ranges(ranges, seconds),
            )
        loader = Loader(source, global_batch=8, micro_batch=2, dp_rank=1, dp_size=2)
        batches.append([batch for _ in range(3) for batch in loader.step()])
    assert len(calls) == 3
    for here, there in zip(*batches, strict=True):
        assert here.tokens.tolist() == there.tokens.tolist()
        assert here.labels.tolist() == there.labels.tolist()
        assert here.sequence.tolist() == there.sequence.tolist()


def test_what_a_store_lacks_is_named(prepared: Path, tmp_path: Path) -> None:
    data = section(url(prepared), **settings(tmp_path))
    prepare(data)
    source, _ = open_data(data, seq_len=24, seed=1)
    (prepared / "00001.tokens").rename(prepared / "aside")
    with pytest.raises(DataError, match=r"00001\.tokens is missing; check the store"):
        list(map(source.sequence, range(40)))
    with pytest.raises(DataError, match="is damaged or of another version"):
        open_data(data, seq_len=24, seed=1)
    (prepared / "corpus.json").unlink()
    with pytest.raises(DataError, match=r"has no corpus\.json: dtron data prepare has not ended"):
        open_data(data, seq_len=24, seed=1)


class Flaky:
    """Fails some calls before it returns."""

    def __init__(self, times: int) -> None:
        self.left = times

    def __call__(self) -> int:
        self.left -= 1
        if self.left >= 0:
            raise UnreachableError("s3://bucket/a: 503")
        return 5


def test_requests_are_repeated_with_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    now = [0.0]
    monkeypatch.setattr(remote_path.time, "monotonic", lambda: now[0])

    def sleep(seconds: float) -> None:
        slept.append(seconds)
        now[0] += seconds

    monkeypatch.setattr(remote_path.time, "sleep", sleep)
    assert retried(Flaky(7), 200) == 5
    assert slept == [1, 2, 4, 8, 16, 30, 30]
    with pytest.raises(UnreachableError, match=r"503 \(requests have failed for 7 s\)"):
        retried(Flaky(7), 14)


def test_short_answers_are_errors(prepared: Path) -> None:
    where = location(url(prepared / "00000.tokens"))
    assert isinstance(where, Remote)
    assert read_ranges([(where, 2, 4), (where, 0, 2)], 9) == [
        (prepared / "00000.tokens").read_bytes()[2:4],
        (prepared / "00000.tokens").read_bytes()[:2],
    ]
    with pytest.raises(UnreachableError, match="the store returned"):
        read_ranges([(where, 0, 10**6)], 9)


def test_a_store_that_fails_ends_a_read_with_its_name(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = open_corpus(location(url(prepared)), ByteTokenizer(), 0.0)
    assert corpus is not None

    def fail(ranges: Any, seconds: float) -> Any:
        raise UnreachableError(f"{ranges[0][0]}: connection lost")

    monkeypatch.setattr("dtron.data.corpus.token_corpus.read_ranges", fail)
    assert isinstance(corpus.tokens, TokenShards)
    with pytest.raises(DataError, match=r"00000\.tokens: connection lost .*; check the store"):
        corpus.tokens[0:4]


# -- ahead ----------------------------------------------------------------------------------


MakeLoader = Callable[[int], Loader]


@pytest.fixture
def make_loader(prepared: Path, tmp_path: Path) -> MakeLoader:
    data = section(prepared, **settings(tmp_path))
    prepare(data)

    def make(ahead: int) -> Loader:
        source, _ = open_data(data, seq_len=24, seed=1)
        return Loader(source, global_batch=4, micro_batch=2, dp_rank=0, dp_size=2, ahead=ahead)

    return make


def numbers(loader: Loader) -> list[list[int]]:
    return [batch.sequence.tolist() for batch in loader.step()]


def test_steps_that_are_read_ahead_are_the_same(make_loader: MakeLoader) -> None:
    """The state is that of what was taken, not of what was read."""
    plain, ahead = make_loader(0), make_loader(3)
    for _ in range(20):
        assert ahead.state_dict() == plain.state_dict()
        for a, b in zip(plain.step(), ahead.step(), strict=True):
            assert a.tokens.tolist() == b.tokens.tolist()
    for loader in (plain, ahead):
        loader.load_state_dict({"sequence": 8})
    assert ahead.state_dict() == plain.state_dict()
    assert numbers(ahead) == numbers(plain) == [[8, 9]]
    ahead.close()
    assert ahead.state_dict() == plain.state_dict()
    with pytest.raises(AssertionError, match="the loader is closed"):
        ahead.step()


def test_files_of_equal_times_are_not_taken_for_each_other(tmp_path: Path) -> None:
    """Where a store has no ETag."""
    contents = []
    for name, text in (("a", "one"), ("b", "two")):
        path = tmp_path / f"{name}.jsonl"
        path.write_text(json.dumps({"text": text}))
        os.utime(path, (1, 1))
        contents.append(files_corpus(section(url(path))).content())
    assert contents[0] != contents[1]


def test_errors_that_stay_are_not_repeated() -> None:
    def denied() -> int:
        calls.append(1)
        raise UnreachableError("s3://bucket/a: denied") from PermissionError()

    calls: list[int] = []
    with pytest.raises(UnreachableError, match="denied"):
        retried(denied, 100)
    assert len(calls) == 1


def test_no_more_than_the_bound_is_read_ahead() -> None:
    """One more is in hand while it waits for a place."""
    read, waits = [], threading.Event()

    def next_value() -> int:
        read.append(len(read))
        if len(read) == 5:
            waits.set()
        return len(read)

    values = FetchAhead(next_value, 3)
    assert [values.take()] == [1]
    assert waits.wait(10)
    time.sleep(0.5)
    values.stop()
    assert len(read) == 5


def test_errors_come_after_what_was_read() -> None:
    def fail() -> int:
        if not left:
            raise DataError("s3://bucket/a is gone")
        return left.pop()

    left = [2, 1]
    values = FetchAhead(fail, 8)
    assert [values.take(), values.take()] == [1, 2]
    for _ in range(2):
        with pytest.raises(DataError, match="is gone"):
            values.take()
    values.stop()
