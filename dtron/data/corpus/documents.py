"""Readers of text documents in the files of `data.paths`, one reader per suffix.

A reader yields the documents of a part of a file in order; whatever it cannot read is a DataError
that names the file and the line, counted from 1. Reading is lazy: one line of a .jsonl file is in
memory at a time, of at most `data.max_document_mb`.
"""

import codecs
import gzip
import io
import json
import logging
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import IO, Any, BinaryIO, cast

from dtron.config import Data
from dtron.data.corpus.chat import COLUMNS, OPTIONAL, ChatRows
from dtron.data.corpus.files import (
    INDEX,
    TOKENS,
    File,
    content_of,
    find_files,
    open_file,
    suffix_of,
)
from dtron.data.corpus.parquet import MAX_INFLATION, read_parquet
from dtron.data.corpus.readers.megatron import read_megatron
from dtron.data.images.rows import check_images, image_text
from dtron.data.tokenizer import Document, ImageText, TokenDocument, Tokenizer
from dtron.errors import ConfigError, DataError, nearest, shorten
from dtron.io.untrusted import MB

TASK_BYTES = 64 * MB
"""Bytes of files that one task tokenizes, about; a larger corpus has about MAX_TASKS tasks."""
MAX_TASKS = 1024

log = logging.getLogger("dtron")


@dataclass(frozen=True)
class Part:
    """Bytes [start, end) of a file: the lines that begin there. Compressed files are whole."""

    path: str
    start: int
    end: int


Task = tuple[Part, ...]
"""What one process tokenizes to one shard: parts of files, in order."""


@dataclass
class Reading:
    """How the documents of a task are read, and what became of them."""

    data: Data
    skip_errors: bool = False
    """Leave out what cannot be read instead of raising."""
    skipped: list[str] = field(default_factory=list)
    """Messages of what was left out."""
    bytes_read: int = 0
    """Bytes of files that have been read."""

    @cached_property
    def document(self) -> Callable[[Any, str], Document]:
        """Function that makes a document of a row and its name for messages. Raises DataError."""
        return reader_of_rows(self.data)

    def fitting(self, documents: Iterable[Document], tokenizer: Tokenizer) -> Iterator[Document]:
        """Yield documents; refuse tokens that the vocabulary lacks, and images without a file."""
        for each in documents:
            try:
                if isinstance(each, TokenDocument):
                    each.check(tokenizer)
                elif isinstance(each, ImageText):
                    check_images(each, tokenizer)
            except DataError as error:
                self.refuse(error)
                continue
            yield each

    def refuse(self, error: DataError) -> None:
        """Raise the error, or note what is left out."""
        if not self.skip_errors:
            raise error
        log.warning("left out: %s", error)
        self.skipped.append(str(error))


@dataclass(frozen=True)
class Corpus:
    """A collection of documents, which can be read from the start any number of times."""

    name: str
    """Name for messages."""
    identity: str
    """Identifier that changes whenever the documents may have changed."""
    tasks: tuple[Task, ...]
    """The whole corpus, in order; a function of the files alone."""
    texts: Callable[[Part, Reading], Iterator[Document]]
    """Function that yields the documents of a part in order, empty ones included."""
    content: Callable[[], str]
    """Function that returns an identifier of the documents' content, whatever the files' names."""
    current: Callable[[], str] | None = None
    """Function that computes `identity` again; None: it cannot change."""
    data: Data | None = None
    """The section from which another process can read the tasks; None: only this one can."""
    settings: Data = Data()
    """The section that says what rows are."""

    def documents(self, reading: Reading) -> Iterator[Document]:
        """Yield all documents in order, empty ones included."""
        for task in self.tasks:
            for part in task:
                yield from self.texts(part, reading)


def files_corpus(data: Data) -> Corpus:
    """Return the documents of all `data.paths`, one file after the other.

    Raises:
        ConfigError: `data.format` needs a chat template, and there is none.
        DataError: a file is missing, or its suffix is not a row of READERS; or it is a text,
            whereas `data.format` needs rows.
    """
    files, rows = find_files(data.paths), identity_of_rows(data)

    def current() -> str:
        found = {file.path: file for file in find_files(data.paths)}
        return _identity([found.get(file.path) for file in files], identity_of_rows(data))

    def content() -> str:
        for part, _ in parts:  # a file that is no text is refused before it is read whole
            if part.start == 0:
                next(read_part(part, Reading(data)), None)
        hashes = [(content_of(file), suffix_of(file.path)) for file in files]
        return json.dumps([hashes, rows])

    rowless = [f.path for f in files if suffix_of(f.path).startswith((".txt", INDEX))]
    if data.masked and rowless:
        raise DataError(
            f"data.paths: {rowless[0]} has no rows, as data.format = {data.format!r} needs; write "
            "its chats as .jsonl"
        )
    parts = _parts([(f.path, f.size) for f in files if suffix_of(f.path) != INDEX])
    name = files[0].path if len(files) == 1 else f"{files[0].path} and {len(files) - 1} more"
    identity = _identity(files, rows)
    return Corpus(name, identity, tuple(_tasks(parts)), read_part, content, current, data, data)


def _identity(files: Sequence[File | None], rows: object) -> str:
    return json.dumps([[file and astuple(file) for file in files], rows])


def identity_of_rows(data: Data) -> object:
    """Return what identifies how rows become documents: of chats, the format and the template."""
    if data.has_images:
        return ["image_text", data.text_key, data.image_token, data.image_tokens]
    return ChatRows(data).identity if data.chats else data.text_key


def reader_of_rows(data: Data) -> Callable[[Any, str], Document]:
    """Return a function that makes a document of a row and its name for messages."""
    if data.chats:
        return ChatRows(data).document
    if not data.has_images:
        return lambda row, where: text_of(row, data.text_key, where)
    return lambda row, where: image_text(text_of(row, data.text_key, where), row, where, data)


def columns_of(data: Data, known: Iterable[str]) -> list[str]:
    """Return the columns to read of a table that has the columns `known`."""
    needed = COLUMNS[data.format] if data.chats else (data.text_key,)
    return [*needed, *(key for key in OPTIONAL if data.chats and key in known)]


def _task_bytes(sizes: Iterable[tuple[object, int]]) -> int:
    return max(TASK_BYTES, sum(size for _, size in sizes) // MAX_TASKS)


def _parts(files: list[tuple[str, int]]) -> list[tuple[Part, int]]:
    """Return the parts of files with the bytes that each has, in order."""
    size = _task_bytes(files)
    parts: list[tuple[Part, int]] = []
    for path, length in files:
        step = size if suffix_of(path) in (".jsonl", TOKENS) else max(length, 1)
        starts = range(0, max(length, 1), step)
        ends = [*starts[1:], length]
        parts += [(Part(path, a, b), b - a) for a, b in zip(starts, ends, strict=True)]
    return parts


def _tasks(parts: list[tuple[Part, int]]) -> Iterator[Task]:
    """Group successive small parts."""
    size = _task_bytes(parts)
    task: list[Part] = []
    total = 0
    for part, length in parts:
        if task and total + length > size:
            yield tuple(task)
            task, total = [], 0
        task.append(part)
        total += length
    yield tuple(task)


def read_part(part: Part, reading: Reading) -> Iterator[Document]:
    """Yield the documents of a part of a file."""
    before = reading.bytes_read
    try:
        yield from READERS[suffix_of(part.path)](part, reading)
    except DataError as error:
        reading.refuse(error)
    reading.bytes_read = before + part.end - part.start


def read_json_lines(part: Part, reading: Reading) -> Iterator[Document]:
    """Yield one document per line: the value of `data.text_key` in a JSON object, or a chat.

    Blank lines, and objects whose text is null, are empty documents.
    """
    for number, line in _lines(part, reading, reading.refuse):
        if line.isspace():
            yield ""
            continue
        try:
            where = _where(part, number)
            document = reading.document(_json_row(line, where), where)
        except DataError as error:
            reading.refuse(error)
            continue
        yield document


def _where(part: Part, number: int) -> str:
    """Return the name of a line of a part, counted from 1."""
    after = f" after byte {part.start:,}" if part.start else ""
    return f"{part.path}, line {number}{after}"


def _json_row(line: bytes, where: str) -> Any:
    try:
        return json.loads(_utf8(line, lambda _: where))  # keys that are not read may hold anything
    except json.JSONDecodeError as error:
        fix = _ONE_PER_LINE if line.strip() in (b"{", b"[", b"[{") else ""
        raise DataError(f"{where}: not JSON: {error.msg}, column {error.colno}{fix}") from None
    except RecursionError:
        raise DataError(f"{where}: not JSON: too deeply nested brackets") from None
    except DataError:
        raise
    except ValueError as error:  # an integer of more than 4,300 digits
        raise DataError(f"{where}: not JSON: {error}") from None


def read_whole(part: Part, reading: Reading) -> Iterator[str]:
    """Yield the whole file as one document; `data.text_key` is not used."""
    content, most = bytearray(), round(reading.data.max_document_mb * MB)

    def stop(error: DataError) -> None:
        raise error

    for number, line in _lines(part, reading, stop):
        content += line
        if len(content) > most:
            raise _too_long(f"{part.path}, line {number}", reading.data.max_document_mb)
    yield _utf8(bytes(content), lambda line: _where(part, 1 + line))


def read_parquet_part(part: Part, reading: Reading) -> Iterator[Document]:
    """Yield the documents of a Parquet file, row by row."""
    most_mb = reading.data.max_document_mb
    for number, row in read_parquet(part.path, lambda names: columns_of(reading.data, names)):
        where = f"{part.path}, row {number}"
        try:
            text = reading.document(row, where)
            if len(text) > most_mb * MB:
                raise _too_long(where, most_mb)
        except DataError as error:
            reading.refuse(error)
            continue
        yield text


def read_tokens(part: Part, reading: Reading) -> Iterator[TokenDocument]:
    """Yield the documents that begin in a part of a Megatron-Core file of tokens."""
    most_mb = reading.data.max_document_mb

    def refuse(name: str) -> None:
        reading.refuse(_too_long(name, most_mb))

    yield from read_megatron(part.path, part.start, part.end, round(most_mb * MB), refuse)


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
        raise DataError(f"{where}: invalid Unicode in {text_key!r}: {error}") from None
    return text


READERS: dict[str, Callable[[Part, Reading], Iterator[Document]]] = {
    ".jsonl": read_json_lines,
    ".jsonl.gz": read_json_lines,
    ".jsonl.zst": read_json_lines,
    ".txt": read_whole,
    ".txt.gz": read_whole,
    ".txt.zst": read_whole,
    ".parquet": read_parquet_part,
    TOKENS: read_tokens,
}


_CHAT = ("messages", "conversations", "conversation", "prompt", "instruction", "chosen")
"""Keys of rows that are a conversation, or a question and its answer."""


def hint_of_key(text_key: str, row: Iterable[str]) -> str:
    """Suggest a fix for a missing `data.text_key`; empty: none is known."""
    keys = list(row)
    if chat := [key for key in _CHAT if key in keys]:
        for format, columns in COLUMNS.items():
            if set(columns) <= set(keys):
                return f"; {chat[0]!r} is a chat: set data.format={format}"
        return (
            f"; {chat[0]!r} is a chat: write each row as messages, a list of {{role, content}}, "
            "and set data.format=chat"
        )
    usual = [key for key in ("content", "raw_content", "body", "document") if key in keys]
    return nearest(text_key, keys) or (f"; set data.text_key={usual[0]}" if usual else "")


def _lines(
    part: Part, reading: Reading, refuse: Callable[[DataError], None]
) -> Iterator[tuple[int, bytes]]:
    """Yield (number, line) of a part of a file, decompressed, without a byte order mark.

    A line belongs to the part in which it begins. Numbers count from 1 in the part.

    Args:
        refuse: called with the error of a line that is too long, which is left out.
    Raises:
        DataError: the file begins as no text in UTF-8 does, or cannot be read on.
    """
    path, most_mb = part.path, reading.data.max_document_mb
    number, count, most = 0, 0, round(most_mb * MB)
    before = reading.bytes_read
    try:
        with open_file(path) as file:
            lines = _decompressed(file, path)
            room = MAX_INFLATION * file.seek(0, os.SEEK_END) + 16 * MB
            file.seek(0)
            position = _first_line(file, part.start)
            while lines is not file or position < part.end:
                if not (line := lines.readline(most + 1)):
                    break
                position, number, count = position + len(line), number + 1, count + len(line)
                if number == 1 and part.start == 0:
                    line = _checked_start(line, path)
                if long := len(line) > most:
                    refuse(_too_long(_where(part, number), most_mb))
                    while line and not line.endswith(b"\n"):
                        line = lines.readline(MB)
                        position, count = position + len(line), count + len(line)
                if lines is not file and count > room:
                    raise DataError(
                        f"{_where(part, number)}: it decompresses to more than {MAX_INFLATION} "
                        "times its size; decompress it yourself if you want to train on it"
                    )
                if number % 1024 == 0:
                    reading.bytes_read = before + file.tell() - part.start
                if not long:
                    yield number, line
    except (OSError, EOFError, zlib.error) as error:  # EOFError: a .gz that was cut short
        cause = getattr(error, "strerror", None) or error
        begun = number or isinstance(error, EOFError)
        where = _where(part, number + 1) if begun else path
        raise DataError(f"{where}: {cause}") from None


def _first_line(file: BinaryIO, start: int) -> int:
    """Seek to the first line that begins at a position or behind it; return where it begins."""
    if start:
        file.seek(start - 1)
        while (line := file.readline(MB)) and not line.endswith(b"\n"):
            pass
    return file.tell()


def _decompressed(file: BinaryIO, path: str) -> IO[bytes]:
    """Return a file to read lines from: the same one if it is not compressed."""
    if path.lower().endswith(".gz"):
        return cast(IO[bytes], gzip.GzipFile(fileobj=file))
    if not path.lower().endswith(".zst"):
        return file
    try:
        import zstandard  # the extra `data`
    except ImportError:
        raise ConfigError(f"{path} needs zstandard; run pip install zstandard") from None

    class Stream(io.RawIOBase):
        """Errors of the library as those of a file; its frames may be concatenated."""

        def __init__(self) -> None:
            self._stream = zstandard.ZstdDecompressor().stream_reader(file, read_across_frames=True)

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            try:
                return self._stream.readinto(buffer)
            except zstandard.ZstdError as error:
                raise zlib.error(str(error)) from None

    return io.BufferedReader(Stream(), MB)


_UTF16 = "not UTF-8 but UTF-16; convert it: iconv -f UTF-16 -t UTF-8"
_STARTS = {
    b"\x1f\x8b": "it is compressed with gzip; let its name end with .gz",
    b"\xff\xfe": _UTF16,
    b"\xfe\xff": _UTF16,
    b"\x28\xb5\x2f\xfd": "it is compressed with zstd; let its name end with .zst",
    b"PAR1": "it is Parquet; let its name end with .parquet",
    b"PK\x03\x04": "it is a zip archive; unpack it",
}
"""First bytes of a file that is no text in UTF-8 -> what it is, and the fix."""


def _checked_start(line: bytes, path: str) -> bytes:
    """Return a file's first line without its byte order mark.

    Raises:
        DataError: the line shows that the file is not UTF-8 text, e.g. that it is compressed.
    """
    for start, fix in _STARTS.items():
        if line.startswith(start):
            raise DataError(f"{path}: {fix}")
    return line.removeprefix(codecs.BOM_UTF8)


def _too_long(where: str, most_mb: float) -> DataError:
    return DataError(
        f"{where}: a document of more than data.max_document_mb = {most_mb:g} million bytes; "
        "raise the key, or split the document"
    )


def _utf8(content: bytes, where: Callable[[int], str]) -> str:
    """Decode text; `where` names a line by the number of lines before it. Raises DataError."""
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        lines = content.count(b"\n", 0, error.start)
        raise DataError(
            f"{where(lines)}: not UTF-8: {error.reason}; convert it, from Latin-1 by iconv -f "
            "LATIN1 -t UTF-8"
        ) from None
