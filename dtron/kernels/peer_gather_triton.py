"""The Triton kernels of `dtron/kernels/peer_gather.py`."""

# pyright: reportMissingImports=false
import triton
import triton.language as tl


@triton.jit
def pulled_kernel(
    pointers,
    offset,
    slots,
    out,
    n,
    n_rows,
    width,
    each,
    PARTS: tl.constexpr,  # noqa: N803
    WIDE: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Gather `each` rows of the result, ROWS x BLOCK elements at a time."""
    program = tl.program_id(0).to(tl.int64)
    end = tl.minimum((program + 1) * each, n)
    kind = tl.pointer_type(out.dtype.element_ty)
    for first in range(program * each, end, ROWS):
        row = first + tl.arange(0, ROWS)
        slot = tl.load(slots + row, mask=row < end, other=-1)
        held = tl.maximum(slot, 0)
        rank = held // n_rows
        start = (held % n_rows * width)[:, None]
        for column in range(0, width, BLOCK):
            at = (column + tl.arange(0, BLOCK))[None, :]
            # A bound that differs between rows makes loads one element wide in Triton 3.9.
            read = (slot >= 0)[:, None] & (at < width)
            if PARTS == 1:
                rows = tl.multiple_of((tl.load(pointers + rank) + offset).to(kind), 16)
                values = tl.load(rows[:, None] + start + at, mask=read, other=0)
            else:
                total = tl.zeros([ROWS, BLOCK], dtype=tl.float64 if WIDE else tl.float32)
                for part in range(PARTS):
                    rows = tl.multiple_of((tl.load(pointers + rank + part) + offset).to(kind), 16)
                    total += tl.load(rows[:, None] + start + at, mask=read, other=0).to(total.dtype)
                values = total.to(out.dtype.element_ty)
            if out.dtype.element_ty.is_floating():
                lost = (slot == -2)[:, None]
                values = tl.where(lost, float("nan"), values).to(out.dtype.element_ty)
            written = (row < end)[:, None] & (at < width)
            tl.store(out + row[:, None] * width + at, values, mask=written)


@triton.jit
def pulled_packed_kernel(
    pointers,
    offset,
    slots,
    out,
    n,
    n_rows,
    width,
    n_bytes,
    scales_at,
    each,
    ROWS: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
    BLOCKS: tl.constexpr,  # noqa: N803
):
    """Gather `each` rows of the result from float8 rows, ROWS x BLOCKS tiles at a time.

    A tile's scale is read once, because peers' memory is slow.
    """
    program = tl.program_id(0).to(tl.int64)
    end = tl.minimum((program + 1) * each, n)
    for first in range(program * each, end, ROWS):
        row = first + tl.arange(0, ROWS)
        slot = tl.load(slots + row, mask=row < end, other=-1)
        held = tl.maximum(slot, 0)
        start = tl.load(pointers + held // n_rows) + offset + held % n_rows * n_bytes
        numbers = tl.multiple_of(start.to(tl.pointer_type(tl.uint8)), 16)[:, None, None]
        scales = (start + scales_at).to(tl.pointer_type(tl.float32))[:, None]
        for column in range(0, width, BLOCKS * TILE):
            tile = column // TILE + tl.arange(0, BLOCKS)
            at = tile[None, :, None] * TILE + tl.arange(0, TILE)[None, None, :]
            read = (slot >= 0)[:, None, None] & (at < width)  # contiguous, for wide loads
            bits = tl.load(numbers + at, mask=read, other=0)
            inside = (slot >= 0)[:, None] & (tile * TILE < width)[None, :]
            scale = tl.load(scales + tile[None, :], mask=inside, other=0.0)
            values = bits.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[:, :, None]
            values = tl.where((slot == -2)[:, None, None], float("nan"), values)
            written = (row < end)[:, None, None] & (at < width)
            place = out + row[:, None, None] * width + at
            tl.store(place, values.to(out.dtype.element_ty), mask=written)
