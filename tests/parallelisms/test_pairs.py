"""Any two features of docs/combinations.md that no other test has together equal one process.

pytest -m matrix tests/parallelisms/test_pairs.py
"""

import pytest

from tests.parallelisms.pairs import LINES, ON_GPUS, case_of_line
from tests.parallelisms.parity import check
from tests.setup.combinations import cells


@pytest.mark.matrix
@pytest.mark.parametrize("line", LINES, ids=str)
def test_pairs_equal_one_process(line: str) -> None:
    check(case_of_line(line), seconds=600)


@pytest.mark.full
def test_each_line_is_legal_and_has_its_features() -> None:
    assert all(case_of_line(line) for line in LINES)


def test_each_legal_pair_has_a_test() -> None:
    legal = [pair for pair, (kind, _) in cells().items() if kind == "legal"]
    assert not [pair for pair in legal if not ON_GPUS.intersection(pair)]
