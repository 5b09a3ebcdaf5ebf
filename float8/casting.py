"""Scales, casts to float8 and back, as plain PyTorch that torch.compile fuses.

    scale = largest float8 / max |x| over the tile        x8 = round(x * scale)       x ~ x8 / scale

A scale is a function of the values alone: computed again, as by recomputation, it is the same. One
for a whole tensor of which ranks hold parts comes from the maximum over those ranks.

Sources: arXiv:2209.05433; the rule and its rounding are torchao.float8's.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dtron.float8.recipes import Cast

_c10d = torch.ops._c10d_functional
SMALLEST = 2.0**-100
"""Maxima below are taken for this, so that a scale and its inverse are finite in float32. Far below
the gradients of a loss that is divided by the tokens of a large batch."""


class Scaled(NamedTuple):
    """An operand in float8."""

    data: Tensor
    """(M, S), float8."""
    scale: Tensor
    """(tiles along M, tiles along S), float32."""
    cast: Cast

    def turned(self) -> "Scaled":
        """The transposed operand, whose tiles are the same."""
        assert self.cast.turns, f"a tile of {self.cast.tile} does not turn"
        return Scaled(self.data.t(), self.scale.t(), self.cast)


def wide(dtype: torch.dtype) -> torch.dtype:
    """What scales are applied in: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def quantize(
    x: Tensor, cast: Cast, groups: Sequence[str] = (), scale: Tensor | None = None
) -> Scaled:
    """Cast an operand to float8; what is larger than the dtype's largest value saturates.

    Args:
        x: (M, S), summed over the last dim by the product.
        groups: names of the process groups whose ranks hold other parts of the operand; they share
            the scale of a whole tensor, other tiles are the rank's own.
        scale: the scale, where it is known already.
    """
    largest = torch.finfo(cast.dtype).max
    tiles = _tiled(x, cast)
    if scale is None:
        amax = tiles.abs().amax(dim=(1, 3))
        scale = scale_of(shared(amax, groups) if cast.whole else amax, cast)
    values = tiles.to(wide(x.dtype)) * scale[:, None, :, None]
    data = values.clamp(-largest, largest).to(cast.dtype)
    return Scaled(_untiled(data, x.shape), scale, cast)


def dequantize(operand: Scaled, dtype: torch.dtype) -> Tensor:
    """(M, S) in a wider dtype."""
    tiles = _tiled(operand.data.to(dtype), operand.cast)
    return _untiled(tiles / operand.scale[:, None, :, None], operand.data.shape)


def scale_of(amax: Tensor, cast: Cast) -> Tensor:
    """float32 scales by the largest magnitudes of their tiles."""
    # In float64, since eager and compiled division differ in the last bit of float32.
    ratio = torch.finfo(cast.dtype).max / amax.to(torch.float64).clamp(min=SMALLEST)
    scale = ratio.to(torch.float32)
    return torch.exp2(torch.floor(torch.log2(scale))) if cast.power_of_two else scale


def shared(amax: Tensor, groups: Sequence[str]) -> Tensor:
    """The maximum over the ranks of these process groups."""
    for group in groups:
        amax = _c10d.wait_tensor(_c10d.all_reduce(amax, "max", group))
    return amax


def _tiled(x: Tensor, cast: Cast) -> Tensor:
    """(M, S) -> (tiles along M, r, tiles along S, c), zeros beyond the edge."""
    rows, columns = cast.tile[0] or x.shape[0], cast.tile[1] or x.shape[1]
    below, right = -x.shape[0] % rows, -x.shape[1] % columns
    if below or right:
        x = torch.nn.functional.pad(x, (0, right, 0, below))
    return x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def _untiled(tiles: Tensor, shape: torch.Size) -> Tensor:
    """The (M, S) of `_tiled`."""
    return tiles.flatten(2, 3).flatten(0, 1)[: shape[0], : shape[1]]
