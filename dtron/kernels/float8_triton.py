"""The Triton kernels of `dtron/kernels/float8.py`."""

# pyright: reportMissingImports=false
import triton
import triton.language as tl


@triton.jit
def _round(x, scale, largest, DTYPE: tl.constexpr):  # noqa: N803
    """Return the bits of x * scale in float8.

    NaN stays NaN, so that the step's check for non-finite gradients finds it.
    """
    limited = tl.clamp(x * scale, -largest, largest, propagate_nan=tl.PropagateNan.ALL)
    return limited.to(DTYPE).to(tl.uint8, bitcast=True)


@triton.jit
def flat_cast_kernel(
    x,
    scale,
    y,
    n,
    largest,
    DTYPE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Cast one block of x to its float8 bits."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(y + at, _round(values, tl.load(scale), largest, DTYPE), mask=inside)


@triton.jit
def turn_kernel(
    x,
    y,
    rows,
    columns,
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Transpose one tile of bytes x (rows, columns) into y (columns, rows)."""
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    tile = tl.load(x + i.to(tl.int64)[:, None] * columns + j[None, :], mask=inside)
    at = j.to(tl.int64)[:, None] * rows + i[None, :]
    tl.store(y + at, tl.trans(tile), mask=tl.trans(inside))


@triton.jit
def cast_kernel(
    x,
    scale,
    straight,
    turned,
    rows,
    columns,
    largest,
    STRAIGHT: tl.constexpr,  # noqa: N803
    DTYPE: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Cast one tile of x (rows, columns) to its float8 bits, transposed.

    If STRAIGHT, also store the tile without the transpose.
    """
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    at = i.to(tl.int64)[:, None] * columns + j[None, :]
    values = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    bits = _round(values, tl.load(scale), largest, DTYPE)
    if STRAIGHT:
        tl.store(straight + at, bits, mask=inside)
    across = j.to(tl.int64)[:, None] * rows + i[None, :]
    tl.store(turned + across, tl.trans(bits), mask=tl.trans(inside))


@triton.jit
def gated_amax_kernel(
    gate,
    up,
    amax,
    n,
    BLOCK: tl.constexpr,  # noqa: N803
    BLOCKS: tl.constexpr,  # noqa: N803
):
    """Reduce the largest |silu(gate) up| of BLOCKS blocks into amax, float32 (1,)."""
    start = tl.program_id(0).to(tl.int64) * (BLOCK * BLOCKS)
    largest = tl.zeros((BLOCK,), tl.float32)
    for block in range(BLOCKS):
        at = start + block * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        a = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(a * tl.sigmoid(a) * b))
    tl.atomic_max(amax, tl.max(largest, 0))


@triton.jit
def gated_cast_kernel(
    gate,
    up,
    scale,
    hidden,
    n,
    largest,
    DTYPE: tl.constexpr,  # noqa: N803
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Compute the float8 bits of one block of silu(gate) up."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    a = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    bits = _round(a * tl.sigmoid(a) * b, tl.load(scale), largest, DTYPE)
    tl.store(hidden + at, bits, mask=inside)


@triton.jit
def _gradients(a, b, c):
    """Return the gradients of a and b, and sigmoid(a). `c`: gradient of silu(a) b."""
    s = tl.sigmoid(a)
    return c * b * s * (1 + a * (1 - s)), c * a * s, s


@triton.jit
def gated_backward_amax_kernel(
    gate,
    up,
    grad,
    amax,
    n,
    BLOCK: tl.constexpr,  # noqa: N803
    BLOCKS: tl.constexpr,  # noqa: N803
):
    """Reduce the largest magnitudes of both gradients of BLOCKS blocks into amax, float32 (2,)."""
    start = tl.program_id(0).to(tl.int64) * (BLOCK * BLOCKS)
    of_gate = tl.zeros((BLOCK,), tl.float32)
    of_up = tl.zeros((BLOCK,), tl.float32)
    for block in range(BLOCKS):
        at = start + block * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        a = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
        c = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        grad_a, grad_b, _ = _gradients(a, b, c)
        of_gate = tl.maximum(of_gate, tl.abs(grad_a))
        of_up = tl.maximum(of_up, tl.abs(grad_b))
    tl.atomic_max(amax, tl.max(of_gate, 0))
    tl.atomic_max(amax + 1, tl.max(of_up, 0))


@triton.jit
def gated_backward_cast_kernel(
    gate,
    up,
    grad,
    scales,
    hidden_scale,
    grad_gate,
    grad_up,
    hidden_turned,
    rows,
    columns,
    largest_grad,
    largest_hidden,
    GRAD: tl.constexpr,  # noqa: N803
    HIDDEN: tl.constexpr,  # noqa: N803
    ROWS: tl.constexpr,  # noqa: N803
    COLUMNS: tl.constexpr,  # noqa: N803
):
    """Compute one tile's float8 bits of both gradients, and of the transposed silu(gate) up.

    Triton 3.6 writes every fourth row wrong if this kernel also stores the transposed gradients.
    """
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    j = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (i < rows)[:, None] & (j < columns)[None, :]
    at = i.to(tl.int64)[:, None] * columns + j[None, :]
    across = j.to(tl.int64)[:, None] * rows + i[None, :]
    a = tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(up + at, mask=inside, other=0.0).to(tl.float32)
    c = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
    grad_a, grad_b, s = _gradients(a, b, c)
    bits = _round(grad_a, tl.load(scales), largest_grad, GRAD)
    tl.store(grad_gate + at, bits, mask=inside)
    bits = _round(grad_b, tl.load(scales + 1), largest_grad, GRAD)
    tl.store(grad_up + at, bits, mask=inside)
    bits = _round(a * s * b, tl.load(hidden_scale), largest_hidden, HIDDEN)
    tl.store(hidden_turned + across, tl.trans(bits), mask=tl.trans(inside))
