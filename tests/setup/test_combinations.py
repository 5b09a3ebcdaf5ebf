"""docs/combinations.md is what the rules say; all rules can be reported."""

import re

import pytest

from dtron.config import RunConfig, fields
from dtron.config.rule import Rule
from dtron.config.setting_rules import EFFECTS, RANKS, SETTINGS
from dtron.setup.rules import FLOAT8, LAYERS, MACHINE, MODEL, MachineCandidate
from tests.setup.combinations import DOCUMENT, FEATURES, cells, document

RULES = [*EFFECTS, *SETTINGS, *RANKS, *MODEL, *FLOAT8, *LAYERS, *MACHINE]


def test_the_page_is_what_the_rules_say() -> None:
    assert DOCUMENT.read_text() == document(), "run python -m tests.setup.combinations"


def test_known_combinations() -> None:
    found = cells()
    assert len(found) == len(FEATURES) * (len(FEATURES) - 1) // 2
    assert found["tp", "cp ring"][0] == "test"
    assert found["cp ring", "cp ulysses"] == ("same key", "")
    assert found["cp ring", "sliding window"][0] == "test"
    kind, message = found["cp ring", "attention_dropout"]
    assert (kind, "no rank computes all attention weights" in message) == ("rule", True)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.keys)
def test_a_rule_is_about_keys_that_exist_and_has_a_message(rule: Rule) -> None:
    known = {key for key, _, _ in fields(RunConfig)}
    assert set(rule.keys.split()) <= known
    config = RunConfig.of({"float8": {"recipe": "tensorwise"}})
    run = MachineCandidate(config, 1)
    text = rule.message
    if isinstance(text, str) and text:
        shown = text.format(c=config if rule in SETTINGS else run)
        assert "{" not in shown
        assert re.search(r"\w+\.\w+ = ", shown) or any(key in shown for key in rule.keys.split())
    assert bool(rule.message) + bool(rule.needs) < 2
