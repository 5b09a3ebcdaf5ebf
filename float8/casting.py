"""Scales and casts to float8 and back, in plain PyTorch that torch.compile fuses.

    scale = largest float8 / max |x| over the tile        x8 = round(x * scale)       x ~ x8 / scale

A scale is a function of the values only, so that recomputation gives the same scale. A per-tensor
scale of a tensor whose parts are on several ranks uses the maximum over those ranks.

Sources: arXiv:2209.05433; the rule and its rounding are torchao.float8's.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dtron.float8.recipes import Cast
from dtron.kernels.float8 import SMALLEST, cast_both, cast_turned, rounded, turned
from dtron.parallelisms.functional_collectives import all_reduce, wait_tensor


class Scaled(NamedTuple):
    """An operand in float8."""

    data: Tensor
    """(M, S), float8."""
    scale: Tensor
    """(tiles along M, tiles along S), float32."""
    cast: Cast

    def turned(self, after: Tensor) -> "Scaled":
        """Return the transposed operand, which has the same tiles; computed after the gradient
        `after`."""
        assert self.cast.turns, f"a tile of {self.cast.tile} does not turn"
        return Scaled(turned(self.data.contiguous(), after), self.scale.t(), self.cast)


def wide(dtype: torch.dtype) -> torch.dtype:
    """Dtype in which scales are applied: float32 at least."""
    return torch.promote_types(dtype, torch.float32)


def quantize(
    x: Tensor, cast: Cast, groups: Sequence[str] = (), scale: Tensor | None = None
) -> Scaled:
    """Cast an operand to float8; values beyond the dtype's range saturate.

    Args:
        x: (M, S); the matmul sums over the last dim.
        groups: names of the process groups whose ranks hold other parts of the operand; they share
            the scale of a whole tensor, other tiles are the rank's own.
        scale: the scale, if it is already known.
    """
    if cast.whole:  # without views, for which inductor would write a copy per matmul
        scale = _scale_of_all(x, cast, groups) if scale is None else scale
        return Scaled(rounded(x.to(wide(x.dtype)), scale, cast.dtype), scale, cast)
    tiles = _tiled(x, cast)
    if scale is None:
        scale = scale_of(_largest(tiles), cast)
    data = rounded(tiles.to(wide(x.dtype)), scale[:, None, :, None], cast.dtype)
    return Scaled(_untiled(data, x.shape), scale, cast)


def quantize_both(
    x: Tensor, cast: Cast, groups: Sequence[str] = (), scale: Tensor | None = None
) -> tuple[Scaled, Scaled]:
    """Cast an operand with a per-tensor scale, like `quantize`, plain and transposed."""
    assert cast.whole, "tiles of parts do not turn"
    scale = _scale_of_all(x, cast, groups) if scale is None else scale
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
    """Cast a weight like `quantize`, or return its data and scale if it is already in float8.

    Args:
        known: the scale of a weight in high precision, if it is already known.
    """
    if data is None or scale is None:
        return quantize(weight, cast, groups, known)
    tiles = [
        -(-size // tile) if tile else 1 for size, tile in zip(data.shape, cast.tile, strict=True)
    ]
    return Scaled(data, scale.view(tiles), cast)


def turn_weight(weight: Tensor, scale: Tensor, cast: Cast, after: Tensor) -> Scaled:
    """Return the transposed weight, computed after the gradient `after`.

    Args:
        weight: (O, K), in float8 or not.
        scale: of the tiles of `cast`, which can be transposed.
    """
    if weight.dtype == cast.dtype:
        return Scaled(weight, scale, cast).turned(after)
    if cast.whole:
        data = cast_turned(weight.contiguous(), scale, cast.dtype, after)
        return Scaled(data, scale, cast)
    return quantize(weight.t(), cast, scale=scale.t())


def largest(x: Tensor, cast: Cast) -> Tensor:
    """Return the largest magnitude of each tile, (tiles along M, tiles along S) in x's dtype."""
    return _largest(_tiled(x, cast))


def dequantize(operand: Scaled, dtype: torch.dtype) -> Tensor:
    """Return the values (M, S) in a wider dtype."""
    tiles = _tiled(operand.data.to(dtype), operand.cast)
    return _untiled(tiles / operand.scale[:, None, :, None], operand.data.shape)


def scale_of(amax: Tensor, cast: Cast) -> Tensor:
    """Compute float32 scales from the largest magnitudes of tiles."""
    # In float64, since eager and compiled float32 division differ in the last bit.
    ratio = torch.finfo(cast.dtype).max / amax.to(torch.float64).clamp(min=SMALLEST)
    scale = ratio.to(torch.float32)
    return torch.exp2(torch.floor(torch.log2(scale))) if cast.power_of_two else scale


def shared(amax: Tensor, groups: Sequence[str]) -> Tensor:
    """Return the maximum over the ranks of process groups."""
    for group in groups:
        amax = wait_tensor(all_reduce(amax, "max", group))
    return amax


def magnitude(x: Tensor) -> Tensor:
    """Return the largest |x|, () in x's dtype, in one pass even without compilation."""
    return torch.linalg.vector_norm(x, torch.inf)


def scales_together(xs: Sequence[Tensor], cast: Cast, groups: Sequence[str]) -> list[Tensor]:
    """Compute per-tensor scales (1, 1) of several operands with one reduction over the ranks."""
    amax = shared(torch.stack([magnitude(x) for x in xs]), groups)
    return [scale.view(1, 1) for scale in scale_of(amax, cast).unbind()]


def _scale_of_all(x: Tensor, cast: Cast, groups: Sequence[str]) -> Tensor:
    return scale_of(shared(magnitude(x).view(1, 1), groups), cast)


def _largest(tiles: Tensor) -> Tensor:
    return tiles.abs().amax(dim=(1, 3))


def _tiled(x: Tensor, cast: Cast) -> Tensor:
    """Reshape (M, S) to (tiles along M, r, tiles along S, c), padded with zeros."""
    rows, columns = cast.tile[0] or x.shape[0], cast.tile[1] or x.shape[1]
    below, right = -x.shape[0] % rows, -x.shape[1] % columns
    if below or right:
        x = torch.nn.functional.pad(x, (0, right, 0, below))
    return x.unflatten(1, (-1, columns)).unflatten(0, (-1, rows))


def _untiled(tiles: Tensor, shape: torch.Size) -> Tensor:
    """Invert `_tiled`: return (M, S)."""
    return tiles.flatten(2, 3).flatten(0, 1)[: shape[0], : shape[1]]
