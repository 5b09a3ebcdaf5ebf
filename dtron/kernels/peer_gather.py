"""Gather rows from the memory of several ranks, which this rank reads directly.

Each of P ranks has (R, D) rows. Row r of rank p is slot p R + r; a table of slots gives the source
of each row of the result:

    out[i] = sum over j < parts of row slots[i] + j R      0 if slots[i] = NONE, NaN if LOST

The sum is over `parts` neighbouring ranks, in float32 at least. A Triton kernel on GPUs reads
peers' memory by address; other devices use the same formula in torch. Rows that are packed in
float8 by `float8_rows.py` are unpacked while they are read; float8 rows are not summed.

Shapes: P ranks, R rows each, N rows of the result, D width.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from dtron.kernels.float8_rows import TILE, scales_at, unpacked, wire_bytes

NONE, LOST = -1, -2
"""Slots of result rows without a source: zeros for NONE, NaN for LOST."""
PROGRAMS, WARPS, ROWS, BLOCK = 64, 32, 16, 2048
"""Launch options of the kernel, which overlaps with matmuls: the number of programs, each of which
fills half a multiprocessor, so that most multiprocessors stay free; and the rows and columns that a
program reads at a time, enough to hide NVLink's latency.

A program computes adjacent rows of the result, which often come from one rank, so that concurrent
programs read from different ranks. On two H200, 98,304 rows of 2,048 bfloat16 take 0.61 ms;
overlapped with matmuls of 0.72 ms, both take 0.97 ms. With one program per half row, the kernel is
as fast without overlap, but does not overlap with matmuls."""


def rows_of_peers(peers: Sequence[Tensor], slots: Tensor, parts: int = 1) -> Tensor:
    """Gather rows by the formula of this module, in plain torch.

    Args:
        peers: rows (R, D) of each rank.
        slots: int64 (N,), slot p R + r of each result row, or NONE or LOST.
        parts: number of neighbouring ranks to sum over.
    Returns:
        (N, D) in the dtype of the peers.
    """
    n_rows = len(peers[0])
    rank, row = slots.clamp(min=0) // n_rows, slots.clamp(min=0) % n_rows
    wide = torch.promote_types(peers[0].dtype, torch.float32) if parts > 1 else peers[0].dtype
    out = torch.zeros(len(slots), peers[0].shape[1], dtype=wide, device=slots.device)
    for p, rows in enumerate(peers):
        taken = (slots >= 0) & (rank <= p) & (p < rank + parts)
        out += torch.where(taken.unsqueeze(1), rows[row].to(wide), 0)
    if out.is_floating_point():
        out = torch.where((slots == LOST).unsqueeze(1), torch.nan, out)
    return out.to(peers[0].dtype)


def packed_rows_of_peers(
    peers: Sequence[Tensor], slots: Tensor, width: int, dtype: torch.dtype
) -> Tensor:
    """Gather and unpack float8 rows by the formula of this module, in plain torch, without sums.

    Args:
        peers: uint8 (R, W) of each rank, packed by `dtron/kernels/float8_rows.py`.
        slots: int64 (N,), slot p R + r of each result row, or NONE or LOST.
        width: D, number of elements of an unpacked row.
    Returns:
        (N, D) in `dtype`.
    """
    rows = unpacked(rows_of_peers(peers, slots), width, dtype)  # rows of zero bytes become zeros
    return torch.where((slots == LOST).unsqueeze(1), torch.nan, rows)


def rows_of_pointers(
    pointers: Tensor,
    offset: int,
    n_rows: int,
    slots: Tensor,
    out: Tensor,
    parts: int = 1,
    float8: bool = False,
) -> None:
    """Gather rows with one Triton kernel.

    Args:
        pointers: int64 (P,), address of each rank's memory.
        offset: byte offset of the rows from these addresses.
        n_rows: R, number of rows per rank.
        slots: int64 (N,), slot p R + r of each result row, or NONE or LOST.
        out: (N, D), to be filled; rows of peers have its dtype.
        parts: number of neighbouring ranks to sum over.
        float8: rows of peers are uint8 (R, W) of `dtron/kernels/float8_rows.py`; needs parts = 1.
    """
    from dtron.kernels.peer_gather_triton import (  # Triton needs a GPU
        pulled_kernel,
        pulled_packed_kernel,
    )

    n, width = out.shape
    if not out.numel():
        return
    block, each = min(1 << (width - 1).bit_length(), BLOCK), -(-n // PROGRAMS)
    if float8:
        assert parts == 1, "float8 rows are not summed"
        cast(Any, pulled_packed_kernel)[PROGRAMS,](
            *(pointers, offset, slots, out, n, n_rows, width, wire_bytes(width), scales_at(width)),
            each,
            ROWS=ROWS,
            TILE=TILE,
            BLOCKS=max(1, block // TILE),
            num_warps=WARPS,
        )
        return
    kernel = cast(Any, pulled_kernel)
    kernel[PROGRAMS,](
        *(pointers, offset, slots, out, n, n_rows, width, each),
        PARTS=parts,
        WIDE=out.dtype == torch.float64,
        ROWS=ROWS,
        BLOCK=block,
        num_warps=WARPS,
    )
