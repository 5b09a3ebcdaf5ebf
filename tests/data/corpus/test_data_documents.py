import codecs
import gzip
import json
from pathlib import Path

import pytest

from dtron.config import Data
from dtron.data.corpus.documents import READERS, Part, Reading, files_corpus, find_files
from dtron.data.tokenizer import Document
from dtron.errors import DataError


def section(*paths: Path, text_key: str = "text") -> Data:
    return Data.model_validate({"paths": tuple(map(str, paths)), "text_key": text_key})


def read(*paths: Path, text_key: str = "text") -> list[Document]:
    data = section(*paths, text_key=text_key)
    return list(files_corpus(data).documents(Reading(data)))


def write(path: Path, content: bytes) -> Path:
    if path.suffix == ".zst":
        zstandard = pytest.importorskip("zstandard")
        half = len(content) // 2  # of two frames, as a concatenation of files has
        content = b"".join(map(zstandard.compress, (content[:half], content[half:])))
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def rows(*values: object) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz", ".jsonl.zst"])
def test_json_lines(tmp_path: Path, suffix: str) -> None:
    content = rows({"body": "one\u2028line"}, {"id": 1, "body": "zwölf"}).replace(b"\n", b"\r\n")
    path = write(tmp_path / f"a{suffix}", content)
    assert read(path, text_key="body") == ["one\u2028line", "zwölf"]


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz", ".txt.zst"])
def test_a_text_file_is_one_document(tmp_path: Path, suffix: str) -> None:
    path = write(tmp_path / f"a{suffix}", "one\r\ntwö\n".encode())
    assert read(path) == ["one\r\ntwö\n"]


def test_files_follow_each_other(tmp_path: Path) -> None:
    first = write(tmp_path / "b.txt", b"first")
    second = write(tmp_path / "a.jsonl", rows({"text": "second"}, {"text": "third"}))
    assert read(first, second) == ["first", "second", "third"]


GOOD = rows({"text": "good"})
WRONG = [
    (b'{"text": "cut\n', "not JSON"),
    (b'["text"]\n', "expected a JSON object, found list; write one .* per line"),
    (b'{"txt": "x"}\n', "no key 'text'.*among 'txt'.*did you mean txt"),
    (b"{}\n", "no key 'text'.*among nothing"),
    (b'{"text": 3}\n', "'text' is int, not a string"),
    (b"{\n", "not JSON: .*; write one JSON object per line, as jq -c"),
    (b'{"text": "\xff"}\n', "not UTF-8.*LATIN1"),
    (b'{"text": "\\ud800"}\n', "invalid Unicode"),
    (b"[" * 100_000 + b"\n", "not JSON"),
]


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
@pytest.mark.parametrize(("line", "message"), WRONG)
def test_a_wrong_line_is_named(tmp_path: Path, suffix: str, line: bytes, message: str) -> None:
    path = write(tmp_path / f"a{suffix}", GOOD + b"\n" + line + GOOD)
    with pytest.raises(DataError, match=f"{path}, line 3: .*{message}"):
        read(path)


def test_invalid_utf8_in_text_names_the_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", b"one\ntwo\nthr\xff\xff\n")
    with pytest.raises(DataError, match=f"{path}, line 3: not UTF-8"):
        read(path)


@pytest.mark.parametrize("suffix", [".jsonl.gz", ".txt.gz"])
def test_truncated_gzip(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"a{suffix}"
    path.write_bytes(gzip.compress(GOOD * 3)[:-9])
    with pytest.raises(DataError, match=rf"{path}, line \d: .*end-of-stream"):
        read(path)


def test_not_gzip(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(GOOD)
    with pytest.raises(DataError, match=rf"{path}: Not a gzipped file"):
        read(path)


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data\.paths: .*nowhere\.txt: No such file"):
        files_corpus(section(tmp_path / "nowhere.txt"))


def test_unknown_suffix(tmp_path: Path) -> None:
    path = write(tmp_path / "a.csv", b"text\n")
    with pytest.raises(DataError, match=r"a\.csv ends with none of \.jsonl, "):
        files_corpus(section(path))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("a.csv", 'set data.source = "hf" and data.hf_path to it'),
        ("a.json", "one JSON object per line as .jsonl"),
        ("a.jsonl.bz2", "compress it with gzip"),
    ],
)
def test_files_of_other_kinds_name_what_reads_them(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(DataError) as error:
        files_corpus(section(write(tmp_path / name, b"x")))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, "set data.format=chat"),
        ({"id": 1, "prompt": "a", "completion": "b"}, "set data.format=prompt_completion"),
        ({"id": 1, "body": "a"}, "set data.text_key=body"),
        ({"Text": "a"}, "did you mean Text?"),
    ],
)
def test_rows_without_the_key_name_what_to_do(tmp_path: Path, row: dict, message: str) -> None:
    with pytest.raises(DataError) as error:
        read(write(tmp_path / "a.jsonl", rows(row)))
    assert message in str(error.value)


@pytest.mark.parametrize("suffix", list(READERS))
def test_a_file_that_cannot_be_opened_has_no_line(tmp_path: Path, suffix: str) -> None:
    """A folder stands for what the user may not read."""
    if suffix == ".parquet":
        pytest.importorskip("pyarrow")
    with pytest.raises(DataError) as error:
        list(READERS[suffix](Part(str(tmp_path), 0, 1), Reading(Data())))
    assert "Is a directory" in str(error.value)
    assert "line" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".", "no file ends with .jsonl, .jsonl.gz"),
        ("*.txt", "no file fits this pattern"),
        ("nope.txt", "relative paths start at the working directory"),
    ],
)
def test_paths_that_name_no_file(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(DataError) as error:
        files_corpus(section(tmp_path / name))
    assert message in str(error.value)


@pytest.mark.parametrize("suffix", [".jsonl", ".JSONL", ".jsonl.gz"])
def test_null_is_an_empty_document_and_a_byte_order_mark_no_text(
    tmp_path: Path, suffix: str
) -> None:
    content = codecs.BOM_UTF8 + rows({"text": "a"}, {"text": None}, {"text": "b"})
    assert read(write(tmp_path / f"a{suffix}", content)) == ["a", "", "b"]


def test_a_byte_order_mark_is_not_in_the_text(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", codecs.BOM_UTF8 + "ü\r\n".encode())
    assert read(path) == ["ü\r\n"]


@pytest.mark.parametrize("suffix", [".jsonl", ".txt"])
@pytest.mark.parametrize(
    ("content", "message"),
    [
        (gzip.compress(GOOD), "compressed with gzip; let its name end with .gz"),
        (GOOD.decode().encode("utf-16"), "not UTF-8 but UTF-16; convert it: iconv -f UTF-16"),
        ("zwölf\n".encode("latin-1"), "not UTF-8: .*from Latin-1 by iconv -f LATIN1"),
        (b"PAR1\n", "it is Parquet; let its name end with .parquet"),
    ],
    ids=["gzip", "UTF-16", "Latin-1", "Parquet"],
)
def test_other_encodings_name_the_fix(
    tmp_path: Path, suffix: str, content: bytes, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / f"a{suffix}", content))


def test_folders_and_globs_are_the_files_in_them(tmp_path: Path) -> None:
    """Sorted by path; hidden files, and files of a folder with other suffixes, are left out."""
    for name in ("b/2.jsonl", "b/.hidden.jsonl", "b/.git/3.jsonl", "b/readme.md", "a/1.txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True, parents=True)
        write(tmp_path / name, rows({"text": name}))
    found = [tmp_path / "a/1.txt", tmp_path / "b/2.jsonl"]

    def names(*paths: str) -> list[str]:
        return [file.path for file in find_files(paths)]

    assert names(str(tmp_path)) == [str(path) for path in found]
    in_order = [str(path) for path in reversed(found)]
    assert names(str(tmp_path / "*/*.jsonl"), str(tmp_path / "a")) == in_order
    with pytest.raises(DataError, match=r"readme\.md ends with none of"):
        find_files([str(tmp_path / "b/*")])


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_parts_of_a_file_are_its_lines(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the bytes are divided, also behind the end of a line."""
    monkeypatch.setattr("dtron.data.corpus.documents.TASK_BYTES", size)
    monkeypatch.setattr("dtron.data.corpus.documents.MAX_TASKS", 10**6)
    texts = ["", "ab", "zwölf" * 9, "c", "\u2028"]
    first = write(tmp_path / "a.jsonl", rows(*({"text": text} for text in texts)))
    second = write(tmp_path / "b.jsonl", rows({"text": "last"}).rstrip(b"\n"))
    data = section(first, second)
    assert list(files_corpus(data).documents(Reading(data))) == [*texts, "last"]
    assert size == 1000 or len(files_corpus(data).tasks) > 1


def test_small_files_share_a_task(tmp_path: Path) -> None:
    paths = [write(tmp_path / f"{i}.txt", b"a" * i) for i in range(5)]
    (task,) = files_corpus(section(*paths)).tasks
    assert [part.path for part in task] == [str(path) for path in paths]


def test_errors_that_are_skipped_are_listed(tmp_path: Path) -> None:
    """A line of JSON, or the rest of a file that cannot be read on."""
    first = write(tmp_path / "a.jsonl", rows({"text": "a"}) + b"{\n" + rows({"text": "b"}))
    cut = write(tmp_path / "b.jsonl.gz", rows(*({"text": f"{i}"} for i in range(20_000))))
    cut.write_bytes(cut.read_bytes()[:-9000])
    reading = Reading(section(first, cut), skip_errors=True)
    corpus = files_corpus(reading.data)
    found = list(corpus.documents(reading))
    assert found[:3] == ["a", "b", "0"]
    assert 100 < len(found) < 20_000
    line, file = reading.skipped
    assert line.startswith(f"{first}, line 2: not JSON")
    assert file.startswith(f"{cut}, line {len(found) - 1}: ")


def test_parquet(tmp_path: Path) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"text": ["a", None, "b"], "n": [1, 2, 3]}), path)
    assert read(path) == ["a", "", "b"]
    with pytest.raises(DataError, match=r"no column 'body' \(data\.text_key\) among 'text', 'n'"):
        read(path, text_key="body")
    with pytest.raises(DataError, match=r"row 1: 'n' is int, not a string"):
        read(path, text_key="n")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(DataError, match=r"a\.parquet: "):
        read(path)


@pytest.mark.parametrize("size", [50, 300, 10_000])
def test_a_line_that_is_too_long_is_left_out_alone(
    tmp_path: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever parts begin; the lines around it are kept."""
    monkeypatch.setattr("dtron.data.corpus.documents.TASK_BYTES", size)
    monkeypatch.setattr("dtron.data.corpus.documents.MAX_TASKS", 10**6)
    texts = [f"{i}" for i in range(20)]
    path = write(tmp_path / "a.jsonl", rows(*({"text": text} for text in texts)))
    middle = rows({"text": "x" * 900})
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:9], middle, *lines[9:]]))
    data = Data.model_validate({"paths": (str(path),), "max_document_mb": 0.0005})
    reading = Reading(data, skip_errors=True)
    assert list(files_corpus(data).documents(reading)) == texts
    (message,) = reading.skipped
    assert "a document of more than data.max_document_mb" in message
