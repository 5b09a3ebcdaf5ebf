"""The Triton kernel of `dtron/kernels/peers.py`."""

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
    """`each` rows of the result, ROWS x BLOCK at a time."""
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
            read = at < tl.where(slot >= 0, width, 0)[:, None]
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
            written = at < tl.where(row < end, width, 0)[:, None]
            tl.store(out + row[:, None] * width + at, values, mask=written)
