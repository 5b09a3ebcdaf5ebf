"""Every error a user can cause, each naming key, value, rule and fix.

A DtronError is printed without a traceback; anything else that is raised is our own bug.
"""

import difflib
from collections.abc import Iterable
from typing import Any

from pydantic import ValidationError


class DtronError(Exception):
    """A mistake the user can mend; the message says how."""


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


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the known word closest to `word`, or the one that it begins, or the
    empty string."""
    words = list(known)
    begun = [name for name in words if word and name.lower().startswith(word.lower())]
    close = difflib.get_close_matches(word, words, n=1, cutoff=0.5) or begun
    return f"; did you mean {close[0]}?" if close else ""


def config_error(error: ValidationError, prefix: str, known: Iterable[str]) -> ConfigError:
    """The first failure of a pydantic model as one line in the user's own key names.

    Args:
        error: what pydantic raised.
        prefix: key of the model's section (`model.override`), or "" for the whole config.
        known: every legal key, fully dotted, for the nearest-key hint.
    """
    first = error.errors()[0]
    key = ".".join([*([prefix] if prefix else []), *(str(part) for part in first["loc"])])
    if first["type"] == "extra_forbidden" and "." not in key:
        sections = {name.split(".")[0] for name in known}
        return ConfigError(f"unknown section [{key}]{nearest(key, sections)}")
    if first["type"] == "extra_forbidden":
        return ConfigError(f"unknown key {key}{nearest(key, known)}")
    if first["type"] == "missing":
        return ConfigError(f"{key} is required and has no default")
    if first["type"] == "tuple_type":
        return ConfigError(f"{key} = {_short(first['input'])} is not a list; write '[\"...\"]'")
    return ConfigError(f"{key} = {_short(first['input'])}: {first['msg']}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
