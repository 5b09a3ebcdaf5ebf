"""Casts to float8 and back: PyTorch code that torch.compile fuses, and custom operators.

    scale = largest float8 / max |x| over the tile        x8 = round(x * scale)       x ~ x8 / scale

Scales are computed, and shared between ranks, in `scales.py`.

Shapes: M rows (tokens, or output features of a weight), S columns, over which the matmul sums.
Sources: arXiv:2209.05433; formula and rounding of the scale are those of torchao.float8.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dtron.float8.recipes import Cast
from dtron.float8.scales import scale_of, scale_of_all
from dtron.kernels.float8 import cast_both, cast_turned, rounded, turned


class Scaled(NamedTuple):
    """An operand in float8, with its scales and the cast that made it."""

    data: Tensor
    """(M, S), float8."""
    scale: Tensor
    """(tiles along M, tiles along S), float32."""
    cast: Cast

    def turned(self, after: Tensor) -> "Scaled":
        """Return the transposed operand, with the same tiles.

        `after`: a gradient, which is not read, but delays the transpose to the backward
        (`dtron.kernels.float8.turned`).
        """
        assert self.cast.turns, f"a tile of {self.cast.tile} cannot be transposed"
        return Scaled(turned(self.data.contiguous(), after), self.scale.t(), self.cast)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which scales are applied: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def quantize(
    x: Tensor, cast: Cast, groups: Sequence[str] = (), scale: Tensor | None = None
) -> Scaled:
    """Cast an operand to float8; values beyond the dtype's range saturate.

    Args:
        x: (M, S): M rows; the matmul sums over the S columns.
        groups: names of the process groups whose ranks hold other shards of the operand. These
            ranks share a per-tensor scale; scales of smaller tiles are local to a rank.
        scale: the scale, if it is already known.
    """
    if cast.whole:  # without views, of which inductor would write one copy per matmul
        scale = scale_of_all(x, cast, groups) if scale is None else scale
        return Scaled(rounded(x.to(wide(x.dtype)), scale, cast.dtype), scale, cast)
    tiles = _tiled(x, cast)
    if scale is None:
        scale = scale_of(_largest(tiles), cast)
    data = rounded(tiles.to(wide(x.dtype)), scale[:, None, :, None], cast.dtype)
    return Scaled(_untiled(data, x.shape), scale, cast)


def quantize_both(
    x: Tensor, cast: Cast, groups: Sequence[str] = (), scale: Tensor | None = None
) -> tuple[Scaled, Scaled]:
    """Return the result of `quantize`, and its transpose, for a cast with a per-tensor scale."""
    assert cast.whole, "a transposed cast needs a per-tensor scale"
    scale = scale_of_all(x, cast, groups) if scale is None else scale
    straight, across = cast_both(x.contiguous(), scale, cast.dtype)
    return Scaled(straight, scale, cast), Scaled(across, scale, cast)


def quantize_weight(
    weight: Tensor,
    data: Tensor | None,
    scale: Tensor | None,
    cast: Cast,
    groups: Sequence[str] = (),
    known: Tensor | None = None,
) -> Scaled:
    """Cast a weight like `quantize`; return a weight that is already in float8 unchanged.

    Args:
        data, scale: the weight in float8 and its scale; None: `weight` is cast here.
        known: the scale for this cast, if it is already known.
    """
    if data is None or scale is None:
        return quantize(weight, cast, groups, known)
    tiles = [
        -(-size // tile) if tile else 1 for size, tile in zip(data.shape, cast.tile, strict=True)
    ]
    return Scaled(data, scale.view(tiles), cast)


def turn_weight(weight: Tensor, scale: Tensor, cast: Cast, after: Tensor) -> Scaled:
    """Return the transposed weight in float8: (K input features, O output features).

    Args:
        weight: (O, K), in float8 or in high precision.
        scale: scales of the weight's tiles, which can be transposed (`Cast.turns`).
        after: a gradient, which is not read, but delays the transpose to the backward.
    """
    if weight.dtype == cast.dtype:
        return Scaled(weight, scale, cast).turned(after)
    if cast.whole:
        data = cast_turned(weight.contiguous(), scale, cast.dtype, after)
        return Scaled(data, scale, cast)
    return quantize(weight.t(), cast, scale=scale.t())


def largest(x: Tensor, cast: Cast) -> Tensor:
    """Return the largest magnitude of each tile of x (M, S): (tiles along M, tiles along S)."""
    return _largest(_tiled(x, cast))


def dequantize(operand: Scaled, dtype: torch.dtype) -> Tensor:
    """Return the values, of the operand's shape (M, S), in a wider dtype."""
    tiles = _tiled(operand.data.to(dtype), operand.cast)
    return _untiled(tiles / operand.scale[:, None, :, None], operand.data.shape)


def _largest(tiles: Tensor) -> Tensor:
    return tiles.abs().amax(dim=(1, 3))


def _tiled(x: Tensor, cast: Cast) -> Tensor:
    """Reshape (M, S) into tiles (r, c): (tiles along M, r, tiles along S, c), padded with zeros."""
    rows, columns = cast.tile[0] or x.shape[0], cast.tile[1] or x.shape[1]
    below, right = -x.shape[0] % rows, -x.shape[1] % columns
    if below or right:
        x = torch.nn.functional.pad(x, (0, right, 0, below))
    return x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def _untiled(tiles: Tensor, shape: torch.Size) -> Tensor:
    """Invert `_tiled`: return the matrix (M, S) without padding."""
    return tiles.flatten(2, 3).flatten(0, 1)[: shape[0], : shape[1]]
