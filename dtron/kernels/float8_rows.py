"""Pack rows in float8 together with their scales, so that a row is one message.

    a row of D elements -> uint8 (W,):  [ D numbers, E4M3 | ceil(D / 128) scales, float32 | - ]

    scale = max |x| of 1 x 128 elements / 448       x8 = round(x / scale)       x ~ x8 scale

If 128 does not divide D, the last scale is that of the remaining elements. Scales begin at a
multiple of 4 bytes, and W is a multiple of 16. Padding bytes are undefined. A row is rounded
independently of other rows, so that its bytes are the same on every rank.

If all 128 elements are zero or tiny, the scale is that of `SMALLEST`, to avoid a division by zero.
If an element is infinite or NaN, so is the scale, and all 128 are NaN when unpacked: a non-finite
step stays non-finite. Float64 values above 448 x 3.4e38, beyond any float32 scale, act likewise.

GPUs with float8 run Triton kernels, which read and write every row once; other devices, and
float64, use the same formula in torch. `peer_gather.py` has a kernel that unpacks rows while it
reads them from peers.

Shapes: N rows, D width, W bytes per packed row.
Source: the tiles of DeepSeek-V3's activations, arXiv:2412.19437, section 3.3.
"""

from typing import Any, cast

import torch
from torch import Tensor

from dtron.kernels.float8 import SMALLEST, rounded

E4M3 = torch.float8_e4m3fn
TILE = 128
"""Number of elements that share a scale."""
TILES, WARPS = 16, 4
"""Maximum number of a row's scales per Triton program; warps per program."""


def scales_at(width: int) -> int:
    """Return the byte offset of the scales in a packed row of `width` elements."""
    return -(-width // 4) * 4


def wire_bytes(width: int) -> int:
    """Return W, the bytes of a packed row of `width` elements."""
    return -(-(scales_at(width) + 4 * -(-width // TILE)) // 16) * 16


def converts(device: torch.device) -> bool:
    """Whether kernels support E4M3 on a device: GPUs from Ada on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def packed(rows: Tensor, out: Tensor | None = None) -> Tensor:
    """Pack rows in float8.

    Args:
        rows: (N, D).
        out: uint8 (N, W), contiguous, to be filled; None: a new one.
    Returns:
        uint8 (N, W).
    """
    n, width = rows.shape
    if out is None:
        out = rows.new_empty(n, wire_bytes(width), dtype=torch.uint8)
    if _by_triton(rows):
        return _packed_on_gpu(rows, out)
    x = rows.to(torch.promote_types(rows.dtype, torch.float32))
    tiles = torch.nn.functional.pad(x, (0, -width % TILE)).unflatten(1, (-1, TILE))
    scale = (tiles.abs().amax(2).clamp(min=SMALLEST) / torch.finfo(E4M3).max).float()
    numbers = rounded(tiles, (1 / scale).unsqueeze(2), E4M3).flatten(1)[:, :width]
    out[:, :width] = numbers.view(torch.uint8)
    _scales(out, width).copy_(scale)
    return out


def unpacked(wire: Tensor, width: int, dtype: torch.dtype) -> Tensor:
    """Unpack contiguous rows, uint8 (N, W), to (N, D) in `dtype`."""
    out = wire.new_empty(len(wire), width, dtype=dtype)
    if _by_triton(out):
        return _unpacked_on_gpu(wire, out)
    wide = torch.promote_types(dtype, torch.float32)
    scale = _scales(wire, width).repeat_interleave(TILE, 1)[:, :width]
    return out.copy_(wire[:, :width].view(E4M3).to(wide) * scale)


def _scales(wire: Tensor, width: int) -> Tensor:
    """View the scales in packed rows: float32 (N, ceil(D / 128))."""
    first = scales_at(width)
    return wire[:, first : first + 4 * -(-width // TILE)].view(torch.float32)


def _by_triton(rows: Tensor) -> bool:
    """Whether to use Triton, whose kernels compute in float32."""
    return rows.dtype != torch.float64 and converts(rows.device)


def _packed_on_gpu(rows: Tensor, out: Tensor) -> Tensor:
    from dtron.kernels.float8_rows_triton import packed_kernel  # Triton needs a GPU

    _launch(packed_kernel, rows.contiguous(), out, torch.finfo(E4M3).max, SMALLEST)
    return out


def _unpacked_on_gpu(wire: Tensor, out: Tensor) -> Tensor:
    from dtron.kernels.float8_rows_triton import unpacked_kernel  # Triton needs a GPU

    _launch(unpacked_kernel, out, wire)
    return out


def _launch(kernel: Any, rows: Tensor, wire: Tensor, *limits: float) -> None:
    """Launch one program per row and per group of at most TILES of the row's scales."""
    if not rows.numel():
        return
    width = rows.shape[1]
    tiles = -(-width // TILE)
    blocks = min(1 << (tiles - 1).bit_length(), TILES)
    cast(Any, kernel)[len(rows), -(-tiles // blocks)](
        *(rows, wire, width, wire.shape[1], scales_at(width), *limits),
        TILE=TILE,
        BLOCKS=blocks,
        num_warps=WARPS,
    )
