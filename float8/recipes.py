"""float8 recipes as a table: which elements of an operand share a scale, and the dtypes.

A linear layer is three matmuls, each a sum over the last dim of two matrices (N tokens, K input
features, O output features):

    matmul        left              right            sums over
    output        input    (N, K)   weight   (O, K)  input features
    grad_input    grad     (N, O)   weight^T (K, O)  output features
    grad_weight   grad^T   (O, N)   input^T  (K, N)  tokens

A tile (r, c) of an operand shares one scale: r rows times c elements along the summed dim, where 0
means all. A scale that is constant along this dim factors out of the matmul; otherwise the matmul
is a sum of matmuls, one for each c elements.

    recipe            input and grad     weight
    tensorwise        whole              whole             E5M2 gradients
    rowwise           row                row               scales are powers of two
    rowwise_with_gw_hp  row     row; grad_input: whole     as rowwise; grad_weight not in float8
    blockwise         1 x 128            128 x 128; along tokens 1 x 128 for both
    mxfp8             1 x 32             1 x 32            scales are powers of two (E8M0)

Sources: float8 formats, arXiv:2209.05433; tensorwise and rowwise as torchao.float8 has them;
blockwise, DeepSeek-V3, arXiv:2412.19437, section 3.3; MXFP8, OCP Microscaling specification 1.0 and
arXiv:2506.08027, which rounds scales up, so that nothing saturates. Scales here are the inverse:
they multiply x in the cast, and are rounded down.
"""

from dataclasses import dataclass
from typing import Literal

import torch

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
Kernel = Literal["scaled_mm", "blocks", "grouped", "none"]


@dataclass(frozen=True)
class Cast:
    """Cast of an operand to float8: dtype, tile and scale."""

    dtype: torch.dtype
    tile: tuple[int, int]
    """(rows, elements along the summed dim) of a tile, whose elements share a scale; 0: all."""
    power_of_two: bool = False
    """Whether scales are rounded down to powers of two: multiplying by them is exact."""

    @property
    def turns(self) -> bool:
        """Whether the transposed operand has the same tiles.

        One cast then serves two matmuls.
        """
        return self.tile[0] == self.tile[1]

    @property
    def whole(self) -> bool:
        """Whether the whole tensor has one scale, shared by all ranks that hold a shard."""
        return self.tile == (0, 0)


@dataclass(frozen=True)
class MatmulCasts:
    """Casts of the operands of one matmul of a layer."""

    left: Cast
    right: Cast
    fast_accumulation: bool = False
    """Whether the kernel may accumulate in less than float32."""


@dataclass(frozen=True)
class Recipe:
    """Casts of a linear layer's three matmuls; grad_weight None: this matmul is not in float8."""

    name: str
    output: MatmulCasts
    grad_input: MatmulCasts
    grad_weight: MatmulCasts | None
    kernel: Kernel
    """Kernel of the matmuls on a GPU with float8; `none`: the matmuls are emulated."""

    @property
    def shares_scales(self) -> bool:
        """Whether every operand has per-tensor scales.

        Every layout then gives the same values.
        """
        products = (self.output, self.grad_input, self.grad_weight)
        return all(p.left.whole and p.right.whole for p in products if p is not None)

    @property
    def casts_weight_once(self) -> bool:
        """Whether one cast of the weight serves both matmuls with the weight."""
        return self.output.right == self.grad_input.right and self.output.right.turns


_WHOLE, _WHOLE_GRAD = Cast(E4M3, (0, 0)), Cast(E5M2, (0, 0))
_ROW = Cast(E4M3, (1, 0), power_of_two=True)
_WHOLE_2 = Cast(E4M3, (0, 0), power_of_two=True)
_LINE, _SQUARE = Cast(E4M3, (1, 128)), Cast(E4M3, (128, 128))
_MX = Cast(E4M3, (1, 32), power_of_two=True)

RECIPES: dict[str, Recipe] = {
    recipe.name: recipe
    for recipe in (
        Recipe(
            "tensorwise",
            output=MatmulCasts(_WHOLE, _WHOLE, fast_accumulation=True),
            grad_input=MatmulCasts(_WHOLE_GRAD, _WHOLE),
            grad_weight=MatmulCasts(_WHOLE_GRAD, _WHOLE),
            kernel="scaled_mm",
        ),
        Recipe(
            "rowwise",
            output=MatmulCasts(_ROW, _ROW, fast_accumulation=True),
            grad_input=MatmulCasts(_ROW, _ROW),
            grad_weight=MatmulCasts(_ROW, _ROW),
            kernel="scaled_mm",
        ),
        Recipe(
            "rowwise_with_gw_hp",
            output=MatmulCasts(_ROW, _ROW, fast_accumulation=True),
            grad_input=MatmulCasts(_ROW, _WHOLE_2),
            grad_weight=None,
            kernel="scaled_mm",
        ),
        Recipe(
            "blockwise",
            output=MatmulCasts(_LINE, _SQUARE),
            grad_input=MatmulCasts(_LINE, _SQUARE),
            grad_weight=MatmulCasts(_LINE, _LINE),
            kernel="blocks",
        ),
        Recipe(
            "mxfp8",
            output=MatmulCasts(_MX, _MX),
            grad_input=MatmulCasts(_MX, _MX),
            grad_weight=MatmulCasts(_MX, _MX),
            kernel="none",
        ),
    )
}

EXPERTS = Recipe(
    "float8.experts",
    output=MatmulCasts(_ROW, _ROW, fast_accumulation=True),
    grad_input=MatmulCasts(_ROW, _ROW),
    grad_weight=None,
    kernel="grouped",
)
"""Recipe of the experts' grouped matmuls, in addition to any recipe of linear layers."""
