"""A picture of a recipe: which elements of each operand share a scale.

    python -m benchmarks.float8_pictures

draws docs/float8/RECIPE.svg: the six operands of a linear layer's three products, 256 x 256
elements of each, by the tiles of the row in RECIPES.
"""

from pathlib import Path

import torch

from dtron.float8.recipes import RECIPES, Cast, MatmulCasts, Recipe
from dtron.io.svg import FRAME, heading, picture, rect, text

DOCS = Path(__file__).parent.parent / "docs" / "float8"
SIZE, SIDE, LEFT, TOP, GAP = 256, 112, 96, 58, 64
FILLS = ("#9ecae1", "#deebf7")
DTYPES = {torch.float8_e4m3fn: "E4M3", torch.float8_e5m2: "E5M2"}
OPERANDS = {
    "output": ("input (N, K)", "weight (O, K)"),
    "grad_input": ("grad (N, O)", "weight^T (K, O)"),
    "grad_weight": ("grad^T (O, N)", "input^T (K, N)"),
}


def draw(recipe: Recipe) -> str:
    """The picture as SVG, with its own white background; a tile is a box, sums run to the right."""
    products = {name: getattr(recipe, name) for name in OPERANDS}
    width = LEFT + 2 * (SIDE + GAP) + 60
    height = TOP + len(products) * (SIDE + GAP)
    parts = [heading(12, f"{recipe.name}: who shares a scale")]
    for number, (name, product) in enumerate(products.items()):
        parts += _product(name, product, TOP + number * (SIDE + GAP))
    return picture(width, height, parts)


def _product(name: str, product: MatmulCasts | None, y: int) -> list[str]:
    casts = (None, None) if product is None else (product.left, product.right)
    parts = [text(12, y + SIDE // 2, name, font_size=11)]
    for number, (title, cast) in enumerate(zip(OPERANDS[name], casts, strict=True)):
        x = LEFT + number * (SIDE + GAP)
        parts.append(text(x, y - 6, f"{title}, {_caption(cast)}", font_size=11))
        parts += _tiles(cast, x, y)
    return parts


def _caption(cast: Cast | None) -> str:
    return "high precision" if cast is None else DTYPES[cast.dtype]


def _tiles(cast: Cast | None, x: float, y: float) -> list[str]:
    """Boxes of one operand; lines of single rows are drawn 16 times as high."""
    if cast is None:
        return [rect(x, y, SIDE, SIDE, FRAME)]
    rows = 16 if cast.tile[0] == 1 else cast.tile[0] or SIZE
    columns = cast.tile[1] or SIZE
    high, wide = SIDE * rows / SIZE, SIDE * columns / SIZE
    thin = {"stroke": "#fff", "stroke_width": 0.5}
    return [
        rect(x + j * wide, y + i * high, wide, high, FILLS[(i + j) % 2], **thin)
        for i in range(SIZE // rows)
        for j in range(SIZE // columns)
    ]


if __name__ == "__main__":
    for name, recipe in RECIPES.items():
        (DOCS / f"{name}.svg").write_text(draw(recipe))
