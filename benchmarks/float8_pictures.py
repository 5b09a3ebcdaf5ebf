"""A picture of a recipe: which elements of each operand share a scale.

    python -m dtron.float8.pictures tensorwise --out tensorwise.svg

draws the six operands of a linear layer's three products, 256 x 256 elements of each, by the tiles
of the row in RECIPES.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch

from dtron.float8.recipes import RECIPES, Cast, Product, Recipe

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
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="11" fill="#222">',
        f'<rect width="{width}" height="{height}" fill="#fff"/>',
        f'<text x="12" y="22" font-size="15" font-weight="bold">{recipe.name}: who shares a scale'
        "</text>",
    ]
    for number, (name, product) in enumerate(products.items()):
        parts += _product(name, product, TOP + number * (SIDE + GAP))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _product(name: str, product: Product | None, y: int) -> list[str]:
    casts = (None, None) if product is None else (product.left, product.right)
    parts = [f'<text x="12" y="{y + SIDE / 2:.0f}">{name}</text>']
    for number, (title, cast) in enumerate(zip(OPERANDS[name], casts, strict=True)):
        x = LEFT + number * (SIDE + GAP)
        parts.append(f'<text x="{x}" y="{y - 6}">{title}, {_caption(cast)}</text>')
        parts += _tiles(cast, x, y)
    return parts


def _caption(cast: Cast | None) -> str:
    return "high precision" if cast is None else DTYPES[cast.dtype]


def _tiles(cast: Cast | None, x: float, y: float) -> list[str]:
    """Boxes of one operand; lines of single rows are drawn 16 times as high."""
    if cast is None:
        return [f'<rect x="{x}" y="{y}" width="{SIDE}" height="{SIDE}" fill="#f0f0f0"/>']
    rows = 16 if cast.tile[0] == 1 else cast.tile[0] or SIZE
    columns = cast.tile[1] or SIZE
    high, wide = SIDE * rows / SIZE, SIDE * columns / SIZE
    return [
        f'<rect x="{x + j * wide:.1f}" y="{y + i * high:.1f}" width="{wide:.1f}" '
        f'height="{high:.1f}" fill="{FILLS[(i + j) % 2]}" stroke="#fff" stroke-width="0.5"/>'
        for i in range(SIZE // rows)
        for j in range(SIZE // columns)
    ]


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw a recipe from the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m dtron.float8.pictures", description="Draw which elements share a scale."
    )
    parser.add_argument("recipe", choices=list(RECIPES))
    parser.add_argument("--out", type=Path, required=True, help="an SVG file")
    args = parser.parse_args(arguments)
    args.out.write_text(draw(RECIPES[args.recipe]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
