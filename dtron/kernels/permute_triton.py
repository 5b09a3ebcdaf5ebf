"""The Triton kernels of `dtron/kernels/permute.py`."""

# pyright: reportMissingImports=false
import triton
import triton.language as tl


@triton.jit
def gathered_kernel(
    x,
    slots,
    weights,
    y,
    k,
    width,
    WEIGHTED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Compute one block of one row of y: the slot's token.

    If WEIGHTED, the token is multiplied by the slot's weight. The row is zero for slot -1.
    """
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(slots + row)
    held = tl.maximum(slot, 0)
    read = at < tl.where(slot >= 0, width, 0)
    values = tl.load(x + held // k * width + at, mask=read, other=0.0)
    if WEIGHTED:
        values = values.to(tl.float32) * tl.load(weights + held).to(tl.float32)
    tl.store(y + row * width + at, values.to(y.dtype.element_ty), mask=at < width)


@triton.jit
def added_kernel(
    y,
    rows,
    weights,
    out,
    k,
    width,
    WEIGHTED: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Compute one block of one token: the (weighted) sum of the token's rows, in float32."""
    token = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for j in range(k):
        row = tl.load(rows + token * k + j)
        held = tl.maximum(row, 0)
        read = at < tl.where(row >= 0, width, 0)
        values = tl.load(y + held * width + at, mask=read, other=0.0).to(tl.float32)
        if WEIGHTED:
            values *= tl.load(weights + token * k + j).to(tl.float32)
        total += values
    tl.store(out + token * width + at, total.to(out.dtype.element_ty), mask=at < width)


@triton.jit
def dots_kernel(grad, y, rows, out, k, width, BLOCK: tl.constexpr):  # noqa: N803
    """Compute one slot's dot product, in float32: of the token's gradient and the slot's row."""
    slot = tl.program_id(0).to(tl.int64)
    row = tl.load(rows + slot)
    held = tl.maximum(row, 0)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < tl.where(row >= 0, width, 0)
        left = tl.load(grad + slot // k * width + at, mask=inside, other=0.0).to(tl.float32)
        right = tl.load(y + held * width + at, mask=inside, other=0.0).to(tl.float32)
        total += left * right
    tl.store(out + slot, tl.sum(total, axis=0).to(out.dtype.element_ty))
