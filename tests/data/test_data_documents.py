import codecs
import gzip
import json
from pathlib import Path

import pytest

from dtron.config import Data
from dtron.data.documents import READERS, files_corpus
from dtron.errors import DataError


def section(*paths: Path, text_key: str = "text") -> Data:
    return Data.model_validate({"paths": tuple(map(str, paths)), "text_key": text_key})


def read(*paths: Path, text_key: str = "text") -> list[str]:
    return list(files_corpus(section(*paths, text_key=text_key)).texts())


def write(path: Path, content: bytes) -> Path:
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def rows(*values: object) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_json_lines(tmp_path: Path, suffix: str) -> None:
    content = rows({"body": "one\u2028line"}, {"id": 1, "body": "zwölf"}).replace(b"\n", b"\r\n")
    path = write(tmp_path / f"a{suffix}", content)
    assert read(path, text_key="body") == ["one\u2028line", "zwölf"]


@pytest.mark.parametrize("suffix", [".txt", ".txt.gz"])
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
    (b'{"text": "\\ud800"}\n', "not valid Unicode"),
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
        ("a.parquet", 'set data.source = "hf" and data.hf_path to it'),
        ("a.csv", 'set data.source = "hf" and data.hf_path to it'),
        ("a.json", "one JSON object per line as .jsonl"),
        ("a.jsonl.zst", "compress it with gzip"),
    ],
)
def test_files_of_other_kinds_name_what_reads_them(tmp_path: Path, name: str, message: str) -> None:
    with pytest.raises(DataError) as error:
        files_corpus(section(write(tmp_path / name, b"x")))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [{"role": "user", "content": "x"}]}, "'messages' is a chat"),
        ({"id": 1, "prompt": "a", "completion": "b"}, "'prompt' is a chat"),
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
    with pytest.raises(DataError) as error:
        list(READERS[suffix](str(tmp_path), Data()))
    assert "Is a directory" in str(error.value)
    assert "line" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (".", "is a folder; name the files in it"),
        ("*.txt", "patterns are not expanded; name each file"),
        ("https://host/a.jsonl", "URLs are not read; download the file"),
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
        (b"PAR1\n", "it is Parquet; set data.source"),
    ],
    ids=["gzip", "UTF-16", "Latin-1", "Parquet"],
)
def test_other_encodings_name_the_fix(
    tmp_path: Path, suffix: str, content: bytes, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / f"a{suffix}", content))
