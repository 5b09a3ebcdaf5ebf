"""The default run has each row of the tables that users choose from."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import get_args

import pytest

from dtron.config import DEGREES, CpMethod, choices
from dtron.float8 import RECIPES
from dtron.models import MODELS
from dtron.parallelisms.expert.dispatchers import DISPATCHERS
from dtron.parallelisms.pipeline.schedules import SCHEDULES
from tests.parallelisms.parity import rows_of
from tests.selection import COLLECTED, FULL_FILES, KEPT, NONE, REPEATED, only_by_name

TESTS = Path(__file__).parent
WHOLE = ("test_readme.py",)
"""Files of which every test is in the default run."""
FUNCTIONS = (
    "faults/test_elastic.py",
    "faults/test_guards.py",
    "faults/test_hangs.py",
    "parallelisms/expert/test_deepep.py::test_equals_all_to_all",
)
"""Files and functions: of each test function at least one case is in the default run."""
BACKENDS = ("sdpa", "math", "flex")
"""Those that run on CPUs."""
WANTED = {
    "axis": {*DEGREES, "ep", "etp"},
    "model": set(MODELS),
    "schedule": set(SCHEDULES),
    "cp_method": set(get_args(CpMethod)),
    "dispatcher": set(DISPATCHERS) - {"deepep"},  # a library; see FUNCTIONS
    "recipe": {"", *RECIPES},
    "recompute": set(choices("recompute", "mode")) - {"auto"},  # one of the others
}
"""Rows that parity with one process has."""


@pytest.fixture
def collected(pytestconfig: pytest.Config) -> list[pytest.Item]:
    """All tests of the suite that need no GPU."""
    items = pytestconfig.stash[COLLECTED]
    if {item.path for item in items} != set(TESTS.rglob("test_*.py")):
        pytest.skip("a part of the suite was collected")
    return [item for item in items if not only_by_name(item)]


def under(items: Iterable[pytest.Item], start: str) -> list[pytest.Item]:
    return [item for item in items if item.nodeid.startswith(f"tests/{start}")]


def by_default(items: Iterable[pytest.Item]) -> list[pytest.Item]:
    return [item for item in items if not item.get_closest_marker("full")]


@pytest.mark.parametrize("table", WANTED)
def test_parity_has_every_row(table: str, collected: list[pytest.Item]) -> None:
    items = by_default(under(collected, "parallelisms/test_parity.py"))
    found = [item.callspec.params for item in items if hasattr(item, "callspec")]  # type: ignore[attr-defined]
    cases = [params["case"] for params in found if "case" in params]
    assert set().union(*(rows_of(case)[table] for case in cases)) >= WANTED[table]


def test_every_backend_is_compared(collected: list[pytest.Item]) -> None:
    items = by_default(under(collected, "models/test_attention.py::test_backend_equals"))
    assert {item.name.partition("[")[2].partition("-")[0] for item in items} == set(BACKENDS)


def test_every_planted_bug_has_a_case(collected: list[pytest.Item]) -> None:
    items = under(collected, "parallelisms/test_planted_bugs.py")
    assert bugs(by_default(items)) == bugs(items) != set()


def bugs(items: Iterable[pytest.Item]) -> set[str]:
    found = [item.callspec.params for item in items if hasattr(item, "callspec")]  # type: ignore[attr-defined]
    return {str(params["bug"]) for params in found}


def test_documents_are_complete(collected: list[pytest.Item]) -> None:
    for start in WHOLE:
        items = under(collected, start)
        assert items
        assert by_default(items) == items


def test_every_function_has_a_case(collected: list[pytest.Item]) -> None:
    for start in FUNCTIONS:
        items = under(collected, start)
        assert functions(by_default(items)) == functions(items) != set()


def functions(items: Iterable[pytest.Item]) -> set[str]:
    """Node ids without parameters."""
    return {_function(item) for item in items}


def _function(item: pytest.Item) -> str:
    return item.nodeid.partition("[")[0]


def test_rows_of_the_selection_are_needed(collected: list[pytest.Item]) -> None:
    """Each names tests that exist, and leaves some of them out."""
    for file in FULL_FILES:
        items = under(collected, f"{file}::")
        assert items, file
        assert not by_default(items), file
    for file, functions_of in KEPT.items():
        for function, pattern in functions_of.items():
            start = f"{file}::{function}"
            items = [item for item in collected if _function(item) == f"tests/{start}"]
            left = by_default(items)
            assert items, start
            assert len(left) < len(items), start
            assert bool(left) == (pattern != NONE), start


@pytest.mark.usefixtures("collected")
def test_rows_of_what_is_repeated_are_needed(pytestconfig: pytest.Config) -> None:
    for file, functions_of in REPEATED.items():
        for function in functions_of:
            start = f"tests/{file}::{function}"
            items = pytestconfig.stash[COLLECTED]
            runs = [bool(i.get_closest_marker("matrix")) for i in items if _function(i) == start]
            assert set(runs) == {False, True}, start


@pytest.mark.parametrize(("minutes", "outcome"), [("0", "1 skipped"), ("60", "1 passed")])
def test_what_would_begin_too_late_is_skipped_and_counted(minutes: str, outcome: str) -> None:
    test = "tests/test_architecture.py::test_rooms_are_small"
    command = [sys.executable, "-m", "pytest", "-n", "0", "--minutes", minutes, test]
    run = subprocess.run(command, cwd=TESTS.parent, capture_output=True, text=True, check=True)
    assert outcome in run.stdout
    assert ("1 tests not run: past --minutes" in run.stdout) == (minutes == "0")
