"""Files of a corpus, on a disk or in an object store: found, identified and opened."""

import glob
import json
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from dtron.errors import DataError, cause_of
from dtron.io.remote_path import ETAG, STORE_SECONDS, Remote, retried
from dtron.io.untrusted import open_regular, sha256_of

INDEX, TOKENS = ".idx", ".bin"
"""Suffixes of the two files of a Megatron-Core data set."""
SUFFIXES = (
    *(".jsonl", ".jsonl.gz", ".jsonl.zst", ".txt", ".txt.gz", ".txt.zst", ".parquet"),
    INDEX,
)
"""Suffixes of the files that are found in folders."""


@dataclass(frozen=True)
class File:
    """A file of a corpus as it was found."""

    path: str
    """Absolute path, or a URL."""
    size: int
    """In bytes."""
    version: int | str
    """Modification time; in a store `Remote.find`'s version."""


def absolute(path: str) -> str:
    """Return the absolute path of a path of a config; a URL as it is."""
    return path if is_url(path) else os.path.abspath(os.path.expanduser(path))


def is_url(path: str) -> bool:
    """Whether a path of a config is a URL of an object store."""
    return "://" in path


def find_files(paths: Iterable[str]) -> list[File]:
    """Return the files that paths, URLs, folders and globs name, each with a suffix of SUFFIXES.

    The files of a folder, at any depth, and of a glob are sorted by path. Files of a folder with
    other suffixes, and hidden files, are left out. A Megatron-Core data set is two files,
    PREFIX.idx and PREFIX.bin, named by either or by the prefix.

    Raises:
        ConfigError: a URL needs a package that is not installed.
        DataError: a file is missing, has another suffix, or a folder or glob has no files.
    """
    found: list[File] = []
    for path in map(_index_of, map(absolute, paths)):
        if is_url(path):
            found += _in_store(path)
        elif os.path.isdir(path):
            if not (files := sorted(_below(path))):
                raise DataError(f"data.paths: {path}: no file ends with {', '.join(SUFFIXES)}")
            found += map(_on_disk, files)
        elif glob.has_magic(path) and not os.path.lexists(path):
            files = sorted(file for file in glob.glob(path, recursive=True) if os.path.isfile(file))
            if not files:
                raise DataError(f"data.paths: {path}: no file fits this pattern")
            found += map(_on_disk, files)
        else:
            found.append(_on_disk(path))
    return list(_with_tokens(found))


def _index_of(path: str) -> str:
    """Return PREFIX.idx of a Megatron-Core data set that is named otherwise; other paths as is."""
    if path.lower().endswith(TOKENS):
        return path[: -len(TOKENS)] + INDEX
    is_prefix = not is_url(path) and os.path.isfile(path + INDEX) and not os.path.exists(path)
    return path + INDEX if is_prefix else path


def _with_tokens(files: Iterable[File]) -> Iterator[File]:
    """Yield files, and after each PREFIX.idx its PREFIX.bin."""
    for file in files:
        yield file
        if file.path.lower().endswith(INDEX):
            tokens = file.path[: -len(INDEX)] + TOKENS
            yield _in_store(tokens)[0] if is_url(tokens) else _on_disk(tokens)


def _below(folder: str) -> Iterator[str]:
    def stop(error: OSError) -> None:
        raise DataError(f"data.paths: {error.filename}: {error.strerror}") from None

    for parent, folders, files in os.walk(folder, onerror=stop):
        folders[:] = [name for name in folders if not name.startswith(".")]
        for name in files:
            if not name.startswith(".") and name.lower().endswith(SUFFIXES):
                yield os.path.join(parent, name)


def _on_disk(path: str) -> File:
    try:
        status = os.stat(path)  # without opening: each rank asks for each file
    except OSError as error:
        fix = "relative paths start at the working directory"
        raise DataError(f"data.paths: {path}: {error.strerror}; {fix}") from None
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"data.paths: {path}: not a regular file")
    suffix_of(path)
    return File(path, status.st_size, status.st_mtime_ns)


def _in_store(url: str) -> list[File]:
    """Return the file of a URL, or the files of its folder or pattern, by one listing."""
    where = Remote.of(url)
    try:
        found = retried(where.find, STORE_SECONDS)
    except OSError as error:
        raise DataError(f"data.paths: {error}") from None
    if is_file := [each for each, _, _ in found] == [str(where)]:
        suffix_of(url)
    pattern = glob.has_magic(url)  # of a folder, hidden files are left out
    files = [
        File(*each)
        for each in found
        if is_file or _is_text(each[0].removeprefix("" if pattern else str(where)).lower(), pattern)
    ]
    if not files:
        raise DataError(f"data.paths: {url}: no file ends with {', '.join(SUFFIXES)}")
    return files


def _is_text(path: str, of_pattern: bool) -> bool:
    names = path.split("/")[-1:] if of_pattern else path.split("/")
    return path.endswith(SUFFIXES) and not any(name.startswith(".") for name in names)


def suffix_of(path: str) -> str:
    """Return the row of SUFFIXES of a file. Raises DataError: it has none."""
    for suffix in (*SUFFIXES, TOKENS):
        if path.lower().endswith(suffix):
            return suffix
    hints = (f"; {fix}" for end, fix in _SUFFIX_HINTS.items() if path.lower().endswith(end))
    hint = next(hints, "")
    raise DataError(f"data.paths: {path} ends with none of {', '.join(SUFFIXES)}{hint}")


_USE_HF = 'set data.source = "hf" and data.hf_path to it, which reads such files'
_SUFFIX_HINTS = {
    ".csv": _USE_HF,
    ".json": f"{_USE_HF}, or write one JSON object per line as .jsonl",
    ".bz2": "decompress it, or compress it with gzip",
    ".xz": "decompress it, or compress it with gzip",
}
"""Suffix of an unsupported file -> fix."""


def content_of(file: File) -> str:
    """Return an identifier of a file's content: its SHA-256, or in a store its size and ETag.

    Without an ETag, the path and the time identify the content.

    Raises:
        DataError: the file cannot be read.
    """
    if is_url(file.path):
        etag = str(file.version).startswith(ETAG)
        return json.dumps(
            [file.size, file.version] if etag else [file.path, file.size, file.version]
        )
    try:
        return sha256_of(file.path)
    except OSError as error:
        raise DataError(f"data.paths: {file.path}: {cause_of(error, file.path)}") from None


def open_file(path: str) -> BinaryIO:
    """Open a file or a URL for reading. Raises OSError: also if it is not a regular file."""
    if is_url(path):
        return Remote.of(path).open_buffered()
    return open_regular(path)
