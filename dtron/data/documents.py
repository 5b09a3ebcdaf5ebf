"""Readers of text documents: the files of `data.paths`, one reader per suffix.

A reader yields the documents of one file in order; whatever it cannot read is a DataError that
names the file and the line, counted from 1. Reading is lazy: one line of a .jsonl file is in memory
at a time, of at most `data.max_document_mb`.
"""

import codecs
import gzip
import json
import os
import stat
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from dtron.config import Data
from dtron.errors import DataError, nearest, shorten
from dtron.io.untrusted import MB, open_regular

MAX_INFLATION = 200
"""Limit of decompressed over compressed size of a .gz or .parquet; text has 3 to 20."""


@dataclass(frozen=True)
class Corpus:
    """A collection of documents, which can be read from the start any number of times."""

    name: str
    """Name for messages."""
    identity: str
    """Identifier that changes whenever the documents may have changed."""
    texts: Callable[[], Iterator[str]]
    """Function that yields the documents in order, empty ones included."""
    current: Callable[[], str] | None = None
    """Function that computes `identity` again; None: it cannot change."""


def files_corpus(data: Data) -> Corpus:
    """Return the documents of all `data.paths`, one file after the other.

    Raises:
        DataError: a file is missing, or its suffix is not a row of READERS.
    """
    paths = [os.path.abspath(os.path.expanduser(path)) for path in data.paths]

    def identity() -> str:
        files = [(path, *_size_and_time(path), _suffix(path)) for path in paths]
        return json.dumps([files, data.text_key])

    def texts() -> Iterator[str]:
        for path in paths:
            yield from READERS[_suffix(path)](path, data)

    name = paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    return Corpus(name, identity(), texts, identity)


def read_json_lines(path: str, data: Data) -> Iterator[str]:
    """Yield one document per line: the value of `data.text_key` in a JSON object.

    Blank lines, and objects whose text is null, are empty documents.
    """
    for number, line in _lines(path, data.max_document_mb):
        if line.isspace():
            yield ""
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(_utf8(line, path, number))  # keys that are not read may hold anything
        except json.JSONDecodeError as error:
            fix = _ONE_PER_LINE if line.strip() in (b"{", b"[", b"[{") else ""
            raise DataError(f"{where}: not JSON: {error.msg}, column {error.colno}{fix}") from None
        except RecursionError:
            raise DataError(f"{where}: not JSON: too deeply nested brackets") from None
        except DataError:
            raise
        except ValueError as error:  # an integer of more than 4,300 digits
            raise DataError(f"{where}: not JSON: {error}") from None
        yield text_of(row, data.text_key, where)


def read_whole(path: str, data: Data) -> Iterator[str]:
    """Yield the whole file as one document; `data.text_key` is not used."""
    content, most = bytearray(), round(data.max_document_mb * MB)
    for number, line in _lines(path, data.max_document_mb):
        content += line
        if len(content) > most:
            raise _too_long(f"{path}, line {number}", data.max_document_mb)
    yield _utf8(bytes(content), path, 1)


_ONE_PER_LINE = "; write one JSON object per line, as jq -c '.' does, or jq -c '.[]' of a list"


def text_of(row: Any, text_key: str, where: str) -> str:
    """Return the text of one row; empty if it is null.

    Raises:
        DataError: the row is not an object, has no such key, or its value is not valid text.
    """
    if not isinstance(row, dict):
        found = type(row).__name__
        raise DataError(f"{where}: expected a JSON object, found {found}{_ONE_PER_LINE}")
    if text_key not in row:
        known = shorten(", ".join(map(repr, row)), 200) or "nothing"
        raise DataError(
            f"{where}: no key {text_key!r} (data.text_key) among {known}"
            f"{hint_of_key(text_key, row)}"
        )
    if (text := row[text_key]) is None:
        return ""
    if not isinstance(text, str):
        raise DataError(f"{where}: {text_key!r} is {type(text).__name__}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON can spell half of a surrogate pair
        raise DataError(f"{where}: {text_key!r} is not valid Unicode: {error}") from None
    return text


READERS: dict[str, Callable[[str, Data], Iterator[str]]] = {
    ".jsonl": read_json_lines,
    ".jsonl.gz": read_json_lines,
    ".txt": read_whole,
    ".txt.gz": read_whole,
}


_CHAT = ("messages", "conversations", "conversation", "prompt", "instruction", "chosen")
"""Keys of rows that are a conversation, or a question and its answer."""


def hint_of_key(text_key: str, row: Iterable[str]) -> str:
    """Suggest a fix for a missing `data.text_key`; empty: none is known."""
    keys = list(row)
    if chat := [key for key in _CHAT if key in keys]:
        return (
            f"; {chat[0]!r} is a chat, which is not supported: write each conversation as one "
            "string, as the model's chat template does, and name its key, such as "
            "data.text_key=text"
        )
    usual = [key for key in ("content", "raw_content", "body", "document") if key in keys]
    return nearest(text_key, keys) or (f"; set data.text_key={usual[0]}" if usual else "")


_USE_HF = 'set data.source = "hf" and data.hf_path to it, which reads such files'
_SUFFIX_HINTS = {
    ".parquet": _USE_HF,
    ".csv": _USE_HF,
    ".json": f"{_USE_HF}, or write one JSON object per line as .jsonl",
    ".zst": "decompress it, or compress it with gzip",
    ".bz2": "decompress it, or compress it with gzip",
    ".xz": "decompress it, or compress it with gzip",
}
"""Suffix of an unsupported file -> fix."""


def _suffix(path: str) -> str:
    for suffix in READERS:
        if path.lower().endswith(suffix):
            return suffix
    hints = (f"; {fix}" for end, fix in _SUFFIX_HINTS.items() if path.lower().endswith(end))
    hint = next(hints, "")
    raise DataError(f"data.paths: {path} ends with none of {', '.join(READERS)}{hint}")


def _size_and_time(path: str) -> tuple[int, int]:
    try:
        status = os.stat(path)  # without opening: each rank asks for each file
    except OSError as error:
        fix = "relative paths start at the working directory"
        if any(sign in path for sign in "*?["):
            fix = "patterns are not expanded; name each file"
        elif ":/" in path:
            fix = "URLs are not read; download the file"
        raise DataError(f"data.paths: {path}: {error.strerror}; {fix}") from None
    if stat.S_ISDIR(status.st_mode):
        raise DataError(f"data.paths: {path} is a folder; name the files in it")
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"data.paths: {path}: not a regular file")
    return status.st_size, status.st_mtime_ns


def _lines(path: str, most_mb: float) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) of a file, decompressed, without a byte order mark.

    Raises:
        DataError: a line is too long, or the file begins as no text in UTF-8 does.
    """
    number, count, most = 0, 0, round(most_mb * MB)
    try:
        with open_regular(path) as file:
            inflated = path.lower().endswith(".gz")
            room = MAX_INFLATION * os.fstat(file.fileno()).st_size + 16 * MB
            lines = gzip.GzipFile(fileobj=file) if inflated else file
            while line := lines.readline(most + 1):
                number, count = number + 1, count + len(line)
                if number == 1:
                    line = _checked_start(line, path)
                if len(line) > most:
                    raise _too_long(f"{path}, line {number}", most_mb)
                if inflated and count > room:
                    raise DataError(
                        f"{path}, line {number}: it decompresses to more than {MAX_INFLATION} "
                        "times its size; decompress it yourself if you want to train on it"
                    )
                yield number, line
    except (OSError, EOFError, zlib.error) as error:  # EOFError: a .gz that was cut short
        cause = getattr(error, "strerror", None) or error
        where = f", line {number + 1}" if number or isinstance(error, EOFError) else ""
        raise DataError(f"{path}{where}: {cause}") from None


_UTF16 = "not UTF-8 but UTF-16; convert it: iconv -f UTF-16 -t UTF-8"
_STARTS = {
    b"\x1f\x8b": "it is compressed with gzip; let its name end with .gz",
    b"\xff\xfe": _UTF16,
    b"\xfe\xff": _UTF16,
    b"PAR1": f"it is Parquet; {_USE_HF}",
    b"PK\x03\x04": "it is a zip archive; unpack it",
}
"""First bytes of a file that is no text in UTF-8 -> what it is, and the fix."""


def _checked_start(line: bytes, path: str) -> bytes:
    """Return the first line without a byte order mark. Raises DataError."""
    for start, fix in _STARTS.items():
        if line.startswith(start):
            raise DataError(f"{path}: {fix}")
    return line.removeprefix(codecs.BOM_UTF8)


def _too_long(where: str, most_mb: float) -> DataError:
    return DataError(
        f"{where}: a document of more than data.max_document_mb = {most_mb:g} million bytes; "
        "raise the key, or split the document"
    )


def _utf8(content: bytes, path: str, first_line: int) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        line = first_line + content.count(b"\n", 0, error.start)
        raise DataError(
            f"{path}, line {line}: not UTF-8: {error.reason}; convert it, from Latin-1 by iconv -f "
            "LATIN1 -t UTF-8"
        ) from None
