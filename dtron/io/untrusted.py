"""Files that anyone may have written: regular ones alone, of a bounded size, with bounded content.

A FIFO, a device, a sparse file or a text of a million brackets can be in the place of any file that
a run reads; a pipe is read only as a config. What is wrong is an OSError or a ValueError here; the
caller names the file in an error of its own. Nothing is mapped into memory: a mapped file that is
truncated ends the process (SIGBUS), while reading it is an error.
"""

import errno
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
"""A config may list a path for each of many thousand files."""
JSON_BYTES = 64 * MB
"""Of JSON that describes a model or a run; it takes up to 25 times that in memory."""
TEXT_BYTES = 256 * MB
"""Of a tokenizer.json or a schedule."""
INDEX_BYTES = 1000 * MB
"""Of a checkpoint's index: 60 bytes for each tensor of each rank."""
TRACE_BYTES = 4000 * MB
_DEPTH = 100
_KEY_PARTS = 8
_NO_KEYS = re.compile(
    r'"""(?:[^"\\]|\\.|"(?!""))*+(?:""")?'  # strings and comments, closed or not
    r"|'''(?:[^']|'(?!''))*+(?:''')?"
    r'|"(?:[^"\\\n]|\\.)*+"?'
    r"|'[^'\n]*+'?"
    r"|#[^\n]*+",
    re.DOTALL,
)
_LONG_KEY = re.compile(rf"(?:\.[\w\s-]*+){{{_KEY_PARTS}}}")


def open_regular(path: Path | str, limit: int | None = None) -> BinaryIO:
    """Open a file for reading, without waiting for the writer of a FIFO.

    Raises:
        OSError: it is not there, is no regular file, or has more than `limit` bytes.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL, or half of a surrogate pair
        raise OSError(errno.EINVAL, f"not a file name: {error}", str(path)) from None
    try:
        status = os.fstat(descriptor)
        if stat.S_ISDIR(status.st_mode):
            raise OSError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(status.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", str(path))
        if limit is not None and status.st_size > limit:
            reason = f"it has {status.st_size} bytes, and at most {limit} are read"
            raise OSError(errno.EFBIG, reason, str(path))
        return os.fdopen(descriptor, "rb")
    except OSError:
        os.close(descriptor)
        raise


def read_bytes(path: Path | str, limit: int) -> bytes:
    """A whole file. Raises OSError: as `open_regular`, or it changes while it is read."""
    with open_regular(path, limit) as file:
        size = os.fstat(file.fileno()).st_size
        content = file.read(size + 1)
    if len(content) != size:
        raise OSError(errno.EIO, "it changed while it was read", str(path))
    return content


def read_text_or_pipe(path: Path | str, limit: int, seconds: float) -> str:
    """A whole file in UTF-8, or all that comes from a pipe: of a shell's `<(command)`, of stdin. A
    FIFO, which has a name, is none: nobody may ever write to it.

    Raises:
        OSError: as `read_text`; a pipe has more than `limit` bytes, or no end for `seconds`.
        ValueError: it is not UTF-8.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except (ValueError, OSError):
        return read_text(path, limit)  # which raises the error
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        named = os.path.exists(os.path.realpath(path))
        if named or not stat.S_ISFIFO(os.fstat(descriptor).st_mode):
            return read_text(path, limit)
        content, deadline = bytearray(), time.monotonic() + seconds
        while len(content) <= limit:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([file], [], [], left)[0]:
                reason = f"a pipe that has not ended for {seconds:g} s; write it to a file"
                raise OSError(errno.ETIMEDOUT, reason, str(path))
            if not (part := file.read(MB)):
                return content.decode()
            content += part
    raise OSError(errno.EFBIG, f"a pipe of more than {limit} bytes", str(path))


def read_text(path: Path | str, limit: int) -> str:
    """A whole file in UTF-8. Raises OSError, and ValueError: it is not UTF-8."""
    return read_bytes(path, limit).decode()


def parse(text: str | bytes, loads: Callable[[Any], Any] = json.loads) -> Any:
    """A text as JSON, or as `loads` reads it.

    Raises:
        ValueError: it is none, is nested more than 100 levels deep, or holds an integer of more
            than 64 bits.
    """
    try:
        level = [value := loads(text)]
    except RecursionError:
        raise ValueError("too many brackets inside each other") from None
    for _ in range(_DEPTH):
        following: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                following += each.values()
            elif isinstance(each, list):
                following += each
            elif isinstance(each, int) and not -(2**63) <= each < 2**64:
                raise ValueError(f"an integer of {each.bit_length()} bits; at most 64 are read")
        if not (level := following):
            return value
    raise ValueError(f"nested more than {_DEPTH} levels deep")


def parse_toml(text: str) -> dict[str, Any]:
    """A text as TOML. Raises ValueError: as `parse`, or a key has more than 8 parts, of which
    tomllib takes quadratic time."""
    if _LONG_KEY.search(_NO_KEYS.sub("s", text)):
        raise ValueError(f"a key of more than {_KEY_PARTS} parts")
    return parse(text, tomllib.loads)
