"""The type `Rule`, a condition on several keys of a config, and functions over tables of rules.

Tables: `setting_rules.py` (settings alone), `dtron/setup/rules.py` (model, float8, machine),
`models/field_rules.py` (fields of a model's config). Keys are `SECTION.KEY`, or `KEY` in a config
without sections.
"""

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

from dtron.errors import ConfigError

Known = TypeVar("Known")
"""Argument of a rule: a config, or a Candidate."""


@dataclass(frozen=True)
class Rule(Generic[Known]):
    """A condition on some keys, and the message if it does not hold."""

    keys: str
    """The keys that the rule is about, separated by spaces."""
    holds: Callable[[Known], object] | None = None
    """Function that returns a true value if the rule holds. If it raises a ConfigError, the message
    of this error is reported. None: the condition is in `needs`."""
    message: str | Callable[[Known], str] = ""
    """Key, value, rule and fix, one line per error. In a string, `{c.train.steps}` is an attribute
    of the rule's argument."""
    needs: str = ""
    """Instead of a message: what the keys need in order to have an effect. Only keys with other
    values than their defaults are reported. Without `holds`, a condition in the syntax of `is_met`.
    """

    def messages(self, known: Known, config: BaseModel) -> Iterator[str]:
        """Yield the messages of this rule if it is broken."""
        try:
            if self.holds(known) if self.holds else is_met(self.needs, config):
                return
        except ConfigError as error:
            yield from str(error).splitlines()
            return
        if self.needs:
            for key, value in changed(config, self.keys):
                yield f"{key} = {value!r} has no effect without {self.needs}"
        else:
            text = self.message
            found = text.format(c=known) if isinstance(text, str) else text(known)
            yield from found.splitlines()


def broken(rules: Iterable[Rule[Known]], known: Known, config: BaseModel) -> Iterator[str]:
    """Yield the messages of all broken rules."""
    for rule in rules:
        yield from rule.messages(known, config)


def refuse(messages: Iterable[str]) -> None:
    """Raise one ConfigError with all messages, each once, on its own line; if any exist."""
    if found := list(dict.fromkeys(messages)):
        raise ConfigError("\n".join(found))


def changed(config: BaseModel, keys: str) -> Iterator[tuple[str, Any]]:
    """Yield (key, value) of each of `keys`, separated by spaces, whose value is not its default."""
    for key in keys.split():
        section, _, name = key.rpartition(".")
        values = getattr(config, section) if section else config
        field = type(values).model_fields[name]
        if (value := getattr(values, name)) != field.get_default(call_default_factory=True):
            yield key, value


def is_met(needs: str, config: BaseModel) -> bool:
    """Whether a condition holds: `KEY` (not 0 or empty), `KEY > 1` or `KEY = VALUE`.

    Several conditions are joined by " or "; text after a colon is an explanation.
    """
    for condition in needs.partition(":")[0].split(" or "):
        key, sign, bound = [*condition.split(" ", 2), "", ""][:3]
        section, name = key.split(".")
        value = getattr(getattr(config, section), name)
        if value > int(bound) if sign == ">" else value == json.loads(bound) if sign else value:
            return True
    return False


def passes(check: Callable[[Known], object]) -> Callable[[Known], bool]:
    """Make a `Rule.holds` from a function that raises a ConfigError if the rule is broken."""
    return lambda known: bool((check(known), True))


def finds_none(find: Callable[[Known], Iterable[str]]) -> Callable[[Known], bool]:
    """Make a `Rule.holds` from a function that returns one message per error."""
    return passes(lambda known: refuse(find(known)))
