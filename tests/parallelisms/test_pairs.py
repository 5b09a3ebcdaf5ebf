"""Any two features of docs/combinations.md that no other test has together equal one process.

pytest -m matrix tests/parallelisms/test_pairs.py
"""

import pytest

from tests.parallelisms.pairs import ON_GPUS, cases
from tests.parallelisms.parity import Batches, Case, selected
from tests.setup.combinations import cells


@pytest.fixture(scope="module")
def batches(request: pytest.FixtureRequest) -> Batches:
    """The cases of pairs.txt that were selected."""
    return Batches(selected(request))


@pytest.mark.matrix
@pytest.mark.parametrize("case", sorted(cases(), key=lambda case: case.world), ids=str)
def test_pairs_equal_one_process(case: Case, batches: Batches) -> None:
    assert not batches.outcome(case).wrong(case)


def test_each_legal_pair_has_a_test() -> None:
    legal = [pair for pair, (kind, _) in cells().items() if kind == "legal"]
    assert not [pair for pair in legal if not ON_GPUS.intersection(pair)]
