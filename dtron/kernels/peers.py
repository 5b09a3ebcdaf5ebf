"""Rows out of the memory of several ranks, which this rank reads where it lies.

Each of P ranks has (R, D) rows. Row r of rank p is slot p R + r, so that a table of slots says for
each row of the result where it comes from, or that there is none:

    out[i] = sum over j < parts of row slots[i] + j R      0 where slots[i] = NONE, NaN where LOST

The sum is one of `parts` neighbouring ranks, in float32 at least. A Triton kernel on GPUs, which
reads peers' memory by its address; the same in torch elsewhere.

Shapes: P ranks, R rows each, N rows of the result, D width.
"""

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor

NONE, LOST = -1, -2
BLOCK, LANES = 1024, 64
"""Programs that run at a time are spread over so many places of the result: neighbouring rows are
often one rank's, and all would read from the same one."""


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


def rows_of_pointers(
    pointers: Tensor,
    offset: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    slots: Tensor,
    parts: int = 1,
) -> Tensor:
    """The same by one kernel.

    Args:
        pointers: int64 (P,), addresses of memory of each rank.
        offset: bytes from there to its rows.
        shape: (R, D) of these.
        dtype: theirs.
    """
    from dtron.kernels.peers_triton import pulled_kernel  # Triton is a GPU's

    (n_rows, width), n = shape, len(slots)
    out = torch.empty(n, width, dtype=dtype, device=slots.device)
    if not out.numel():
        return out
    each, kernel = -(-n // LANES), cast(Any, pulled_kernel)
    kernel[LANES * each, -(-width // BLOCK)](
        *(pointers, offset, slots, out, n, n_rows, width, each),
        PARTS=parts,
        WIDE=dtype == torch.float64,
        LANES=LANES,
        BLOCK=BLOCK,
    )
    return out
