"""Any two features of docs/combinations.md that no other test has together equal one process.

pytest -m matrix tests/parallelisms/test_pairs.py
"""

import pytest

from tests.parallelisms.pairs import ON_GPUS, cases
from tests.parallelisms.parity import Case, check
from tests.setup.combinations import cells


@pytest.mark.matrix
@pytest.mark.parametrize("case", cases(), ids=str)
def test_pairs_equal_one_process(case: Case) -> None:
    check(case, seconds=600)


def test_each_legal_pair_has_a_test() -> None:
    legal = [pair for pair, (kind, _) in cells().items() if kind == "legal"]
    assert not [pair for pair in legal if not ON_GPUS.intersection(pair)]
