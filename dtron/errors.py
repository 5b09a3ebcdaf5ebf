"""Every error a user can cause, each naming key, value, rule and fix.

A DtronError is printed without a traceback; anything else that is raised is our own bug.
"""

import argparse
import difflib
import itertools
import os
import re
import sys
from collections.abc import Iterable
from typing import NoReturn

from pydantic import ValidationError

_MOST_CHARACTERS = 10_000
_CONTROL = {i: f"\\x{i:02x}" for i in (*range(32), *range(127, 160)) if chr(i) not in "\t\n"}


class DtronError(Exception):
    """A mistake the user can mend; the message says how.

    It may quote a file that somebody else wrote: it is cut in the middle beyond 10,000 characters,
    and control characters, which a terminal would obey, are escaped.
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(shorten(str(message), _MOST_CHARACTERS).translate(_CONTROL))


class ConfigError(DtronError, ValueError):
    """A setting that is unknown, of the wrong type, or cannot work with the others."""


class PlacementError(DtronError, ValueError):
    """A pattern that matches nothing, or a parameter that no rule covers."""


class DataError(DtronError, ValueError):
    """A data or tokenizer file that is missing or cannot be read; names file and line."""


class CheckpointError(DtronError, ValueError):
    """A checkpoint that is missing, incomplete or of another model."""


class TrainingError(DtronError, RuntimeError):
    """Training that cannot go on, as with too many non-finite gradients in a row."""


class RankError(TrainingError):
    """A failure of one rank alone, which prints it at once; the other ranks end without a word."""


class OutOfMemoryError(RankError):
    """An allocation failed.

    Args:
        needed: bytes that this rank had in use, with those that it could not get.
        room: bytes that it can have.
    """

    def __init__(self, message: str, needed: float, room: float) -> None:
        super().__init__(message)
        self.needed, self.room = needed, room


class PeerError(TrainingError):
    """Another rank has failed and prints why."""


def note(message: str, kind: str = "note") -> None:
    """Print a line on the first rank, before there is a log."""
    if os.environ.get("RANK", "0") == "0":
        print(f"{kind}: {message}", file=sys.stderr, flush=True)


class ArgumentParser(argparse.ArgumentParser):
    """Whose mistakes are ConfigErrors."""

    def error(self, message: str) -> NoReturn:
        """Raises what is told as any other mistake."""
        raise ConfigError(f"{message}; see {self.prog} --help")


_MOST_WORDS, _WORD = 300_000, 100  # which a file may have more and longer of


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the known word closest to `word`, or the one that it begins, or the
    empty string."""
    words = [name for name in itertools.islice(known, _MOST_WORDS) if len(name) <= _WORD]
    if len(word) > _WORD:
        return ""
    begun = [name for name in words if word and name.lower().startswith(word.lower())]
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5) or begun
    return f"; did you mean {close[0]}?" if close else ""


def nearest_key(key: str, known: Iterable[str]) -> str:
    """The same for a dotted key, by its last part: in its own section, then elsewhere."""
    section, _, name = key.rpartition(".")
    split = [k.rpartition(".") for k in known]
    if hint := nearest(name, [last for own, _, last in split if own == section]):
        return hint.replace("mean ", f"mean {section}.", 1)
    elsewhere = [f"{own}.{last}" for own, _, last in split if last == name]
    return f"; did you mean {elsewhere[0]}?" if elsewhere else ""


def config_error(error: ValidationError, prefix: str, known: Iterable[str]) -> ConfigError:
    """The first failure of a pydantic model as one line in the user's own key names.

    Args:
        error: what pydantic raised.
        prefix: key of the model's section (`model.override`), or "" for the whole config.
        known: every legal key, fully dotted, for the nearest-key hint.
    """
    errors = error.errors()
    # Of a value that may be a list, the last failure is that of an entry.
    first = errors[-1] if isinstance(errors[0]["input"], list) else errors[0]
    # Types that pydantic has tried are no part of the user's key.
    names = [str(part) for part in first["loc"] if part != "str" and "[" not in str(part)]
    key = ".".join([*([prefix] if prefix else []), *names])
    if first["type"] == "extra_forbidden" and "." not in key:
        sections = {name.split(".")[0] for name in known}
        return ConfigError(f"unknown section [{key}]{nearest(key, sections)}")
    if first["type"] == "extra_forbidden":
        return ConfigError(f"unknown key {key}{nearest_key(key, known)}")
    if first["type"] == "missing":
        return ConfigError(f"{key} is required and has no default")
    if first["type"] == "tuple_type":
        return ConfigError(
            f"{key} = {shorten(repr(first['input']))} is not a list; write '[\"...\"]'"
        )
    choices = re.findall("'([^']+)'", str(first.get("ctx", {}).get("expected", "")))
    hint = nearest(str(first["input"]), choices)
    rule = first["msg"].removeprefix("Value error, ")
    return ConfigError(f"{key} = {shorten(repr(first['input']))}: {rule}{hint}")


def cause_of(error: Exception, path: object) -> str:
    """What is wrong with a file, for a message that names its path, which an OSError names too."""
    if isinstance(error, OSError) and error.strerror and str(error.filename) == str(path):
        return error.strerror
    return str(error)


def shorten(text: str, most: int = 80) -> str:
    """A text of at most this many characters, cut in the middle."""
    half = (most - 3) // 2
    return text if len(text) <= most else f"{text[:half]}...{text[-half:]}"
