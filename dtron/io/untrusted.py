"""Safe reading of untrusted files: regular files only, of bounded size, with bounded nesting.

A path that a run reads may be a FIFO, a device, a sparse file or a text of a million brackets. Only
a config may come from a pipe. These functions raise OSError or ValueError; callers raise an error
that names the file. No file is memory-mapped: if a mapped file is truncated, the process ends with
SIGBUS, while a read returns an error.
"""

import errno
import hashlib
import json
import os
import re
import select
import stat
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

MB = 10**6
TOML_BYTES = 64 * MB
"""Size limit of a TOML file; a config may list many thousand paths."""
JSON_BYTES = 64 * MB
"""Size limit of JSON about a model or a run; parsed JSON needs up to 25 times as much memory."""
TEXT_BYTES = 256 * MB
"""Size limit of a tokenizer.json or a schedule."""
INDEX_BYTES = 1000 * MB
"""Size limit of a checkpoint's index, which has about 60 bytes per tensor and rank."""
TRACE_BYTES = 4000 * MB
"""Size limit of a profiler trace."""
_DEPTH = 100
_KEY_PARTS = 8
_NO_KEYS = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*+(?:""")?'  # strings and comments, terminated or not
    r"|'''(?:[^']|'(?!''))*+(?:''')?"
    r'|"(?:[^"\\\n]|\\.)*+"?'
    r"|'[^'\n]*+'?"
    r"|#[^\n]*+",
    re.DOTALL,
)
_LONG_KEY = re.compile(rf"(?:\.[\w\s-]*+){{{_KEY_PARTS}}}")


def open_regular(path: Path | str, limit: int | None = None) -> BinaryIO:
    """Open a regular file for reading; fail at once if it is a FIFO.

    Raises:
        OSError: the file does not exist, is not a regular file, or has more than `limit` bytes.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # the path has a NUL or a lone surrogate
        raise OSError(errno.EINVAL, f"not a file name: {error}", str(path)) from None
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if limit is not None and status.st_size > limit:
            reason = f"it has {status.st_size} bytes; the limit is {limit}"
            raise OSError(errno.EFBIG, reason, str(path))
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def read_bytes(path: Path | str, limit: int) -> bytes:
    """Read a whole file. Raises OSError: as `open_regular`, or the file changes during the read."""
    with open_regular(path, limit) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size + 1)
    if len(content) != size:
        raise OSError(errno.EIO, "file changed while it was read", str(path))
    return content


def sha256_of(path: Path | str) -> str:
    """Return the SHA-256 of a file, in hexadecimal. Raises OSError: as `open_regular`."""
    found = hashlib.sha256()
    with open_regular(path) as file:
        while block := file.read(MB):
            found.update(block)
    return found.hexdigest()


def read_text_or_pipe(path: Path | str, limit: int, seconds: float) -> str:
    """Read a whole UTF-8 file, or a pipe until its end: stdin, or a shell's `<(command)`.

    A named FIFO raises an error: it may never get a writer.

    Raises:
        OSError: as `read_text`; or the pipe has more than `limit` bytes or has not ended after
            `seconds`.
        ValueError: the content is not UTF-8.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (ValueError, OSError):
        return read_text(path, limit)  # raises the error
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        named = os.path.exists(os.path.realpath(path))
        if named or not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return read_text(path, limit)
        content, deadline = bytearray(), time.monotonic() + seconds
        while len(content) <= limit:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([file], [], [], left)[0]:
                reason = f"the pipe has not ended after {seconds:g} s; use a file"
                raise OSError(errno.ETIMEDOUT, reason, str(path))
            if not (part := file.read(MB)):
                return content.decode()
            content += part
    raise OSError(errno.EFBIG, f"the pipe has more than {limit} bytes", str(path))


def read_text(path: Path | str, limit: int) -> str:
    """Read a whole UTF-8 file. Raises OSError: unreadable; ValueError: not UTF-8."""
    return read_bytes(path, limit).decode()


def parse(text: str | bytes, loads: Callable[[Any], Any] = json.loads) -> Any:
    """Parse JSON, or another format with its function `loads`.

    Raises:
        ValueError: the text cannot be parsed, is nested more than 100 levels deep, or contains an
            integer of more than 64 bits.
    """
    try:
        level = [value := loads(text)]
    except RecursionError:
        raise ValueError("brackets are nested too deep") from None
    for _ in range(_DEPTH):
        following: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                following += each.values()
            elif isinstance(each, list):
                following += each
            elif isinstance(each, int) and not -(2**63) <= each < 2**64:
                raise ValueError(f"an integer has {each.bit_length()} bits; the limit is 64")
        if not (level := following):
            return value
    raise ValueError(f"nested more than {_DEPTH} levels deep")


def parse_toml(text: str) -> dict[str, Any]:
    """Parse TOML. Raises ValueError: as `parse`, or a key has more than 8 parts.

    The time of tomllib is quadratic in the number of parts.
    """
    if _LONG_KEY.search(_NO_KEYS.sub("s", text)):
        raise ValueError(f"a key has more than {_KEY_PARTS} parts")
    return parse(text, tomllib.loads)
