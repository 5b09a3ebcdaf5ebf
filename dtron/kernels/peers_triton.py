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
    LANES: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """One block of one row; program i + 1 is `each` rows behind program i."""
    program = tl.program_id(0)
    row = (program % LANES * each + program // LANES).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + tl.minimum(row, n - 1))
    held = tl.maximum(slot, 0)
    rank = held // n_rows
    start = held % n_rows * width
    read = at < tl.where(slot >= 0, width, 0)
    kind = tl.pointer_type(out.dtype.element_ty)
    if PARTS == 1:
        rows = tl.multiple_of((tl.load(pointers + rank) + offset).to(kind), 16)
        values = tl.load(rows + start + at, mask=read, other=0)
    else:
        total = tl.zeros([BLOCK], dtype=tl.float64 if WIDE else tl.float32)
        for part in range(PARTS):
            rows = tl.multiple_of((tl.load(pointers + rank + part) + offset).to(kind), 16)
            total += tl.load(rows + start + at, mask=read, other=0).to(total.dtype)
        values = total.to(out.dtype.element_ty)
    if out.dtype.element_ty.is_floating():
        values = tl.where(slot == -2, float("nan"), values).to(out.dtype.element_ty)
    tl.store(out + row * width + at, values, mask=at < tl.where(row < n, width, 0))
