"""Parse the axes of a sweep, `section.key=a,b,c`, and return all combinations as points.

Commas outside of brackets, braces and quotes separate values, so that a TOML list is one value:
`pp_layout=[3,5],[4,4]` has two. `env.NAME=a,b` sweeps an environment variable.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from dtron.errors import ConfigError

_OPENS, _CLOSES = "[{", "]}"
ENV = "env."


@dataclass(frozen=True)
class SweepPoint:
    """One combination of values."""

    settings: tuple[tuple[str, str], ...]
    """(key, value as written) of every axis, in order."""
    varies: tuple[str, ...]
    """Keys of the axes with several values."""

    @property
    def overrides(self) -> list[str]:
        """The run's overrides, `section.key=value`."""
        return [f"{key}={value}" for key, value in self.settings if not key.startswith(ENV)]

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that the point sets."""
        found = [(key, value) for key, value in self.settings if key.startswith(ENV)]
        return {key.removeprefix(ENV): value for key, value in found}

    @property
    def label(self) -> str:
        """Short name of the point in tables: the values that differ between points."""
        shown = [f"{key}={value}" for key, value in self.settings if key in self.varies]
        return " ".join(shown) or "as given"


def split_values(text: str) -> list[str]:
    """Split the values of an axis.

    Raises:
        ConfigError: a bracket or a quote is not closed, or a value is empty.
    """
    values, depth, quote, begin = [], 0, "", 0
    for i, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "\"'":
            quote = character
        elif character in _OPENS + _CLOSES:
            depth += 1 if character in _OPENS else -1
        elif character == "," and depth == 0:
            values.append(text[begin:i])
            begin = i + 1
    values = [value.strip() for value in [*values, text[begin:]]]
    if depth or quote:
        raise ConfigError(f"{text!r} has a bracket or quote that is not closed")
    if len(values) > 1 and "" in values:
        raise ConfigError(f"{text!r} has an empty value; write a,b,c")
    return values


def points(axes: Sequence[str]) -> list[SweepPoint]:
    """Return one point per combination of values, the last axis varying fastest.

    Without axes, return one point.

    Raises:
        ConfigError: an axis is not of the form section.key=a,b,c, or an axis or a value is given
            twice.
    """
    values: dict[str, list[str]] = {}
    for axis in axes:
        key, separator, text = axis.partition("=")
        if not separator or not all(key.partition(".")):
            raise ConfigError(f"axis {axis!r} is not of the form section.key=a,b,c (no spaces)")
        if key in values:
            raise ConfigError(f"axis {key} is given twice; write {key}=a,b")
        values[key] = split_values(text)
        if len(set(values[key])) < len(values[key]):
            raise ConfigError(
                f"axis {axis!r} lists a value twice; use --repeat to run points several times"
            )
    varies = tuple(key for key, found in values.items() if len(found) > 1)
    return [
        SweepPoint(tuple(zip(values, combination, strict=True)), varies)
        for combination in itertools.product(*values.values())
    ]
