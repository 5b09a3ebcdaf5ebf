"""Rows out of the memory of several ranks, which this rank reads where it lies.

Each of P ranks has (R, D) rows. Row r of rank p is slot p R + r, so that a table of slots says for
each row of the result where it comes from, or that there is none:

    out[i] = sum over j < parts of row slots[i] + j R      0 where slots[i] = NONE, NaN where LOST

The sum is one of `parts` neighbouring ranks, in float32 at least. A Triton kernel on GPUs, which
reads peers' memory by its address; the same in torch elsewhere. Rows may lie there in float8, as
`float8_rows.py` packs them, and are cast back on the way: those are not summed.

Shapes: P ranks, R rows each, N rows of the result, D width.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

from dtron.kernels.float8_rows import TILE, scales_at, unpacked, wire_bytes

NONE, LOST = -1, -2
PROGRAMS, WARPS, ROWS, BLOCK = 64, 32, 16, 2048
"""Of the kernel, which runs beside products: programs, each as large as half a multiprocessor
holds, so that they leave most of the others alone; rows, and columns at most, that each reads at a
time, which keep NVLink busy in spite of its latency.

A program has neighbouring rows of the result: these are often one rank's, and programs that run at
a time so read from different ones. On two H200, 98,304 rows of 2,048 bfloat16: 0.61 ms, beside
products of 0.72 ms both in 0.97 ms; a program for each half of a row takes as long alone, and hides
nothing."""


def rows_of_peers(peers: Sequence[Tensor], slots: Tensor, parts: int = 1) -> Tensor:
    """The formula.

    Args:
        peers: (R, D) of each rank.
        slots: int64 (N,).
        parts: ranks to sum over.
    Returns:
        (N, D) in their dtype.
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
    """The same of rows in float8, without sums.

    Args:
        peers: uint8 (R, W) of each rank, of `dtron/kernels/float8_rows.py`.
        slots: int64 (N,).
        width: D.
    Returns:
        (N, D) in `dtype`.
    """
    rows = unpacked(rows_of_peers(peers, slots), width, dtype)  # zeros are zeros in float8 too
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
    """The same by one kernel.

    Args:
        pointers: int64 (P,), addresses of memory of each rank.
        offset: bytes from there to its rows.
        n_rows: R.
        out: (N, D), to be filled; rows have its dtype.
        float8: rows are uint8 (R, W) of `dtron/kernels/float8_rows.py`; with `parts` 1.
    """
    from dtron.kernels.peer_gather_triton import (  # Triton is a GPU's
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
