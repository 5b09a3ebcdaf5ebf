"""Pictures of the recipes in the docs are those that the code draws."""

import pytest

from benchmarks.float8_pictures import DOCS, draw
from dtron.float8 import RECIPES


@pytest.mark.parametrize("name", RECIPES)
def test_picture_is_that_of_the_recipe(name: str) -> None:
    assert (DOCS / f"{name}.svg").read_text() == draw(RECIPES[name])


def test_tiles_are_those_of_the_row() -> None:
    background = 1
    assert draw(RECIPES["tensorwise"]).count("<rect") == background + 6
    squares, lines = 2 * 2, 16 * 2
    assert draw(RECIPES["blockwise"]).count("<rect") == background + 2 * squares + 4 * lines
