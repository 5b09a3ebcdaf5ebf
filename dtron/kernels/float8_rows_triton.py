"""The Triton kernels of `dtron/kernels/float8_rows.py`."""

# pyright: reportMissingImports=false
import triton
import triton.language as tl


@triton.jit
def packed_kernel(
    rows,
    wire,
    width,
    n_bytes,
    scales_at,
    largest,
    smallest,
    TILE: tl.constexpr,  # noqa: N803
    BLOCKS: tl.constexpr,  # noqa: N803
):
    """Pack BLOCKS tiles of one row into their float8 bits and scales."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    values = tl.load(rows + row * width + at, mask=at < width, other=0.0).to(tl.float32)
    # Magnitudes are ordered like their bits, with NaN above all; a float maximum would ignore NaN.
    bits = tl.max(values.to(tl.int32, bitcast=True) & 0x7FFFFFFF, 1)
    amax = tl.cast(bits, tl.float32, bitcast=True)
    floor = tl.maximum(amax, smallest, propagate_nan=tl.PropagateNan.ALL)
    scale = tl.div_rn(floor, tl.full([BLOCKS], largest, tl.float32))
    inverse = tl.div_rn(tl.full([BLOCKS], 1.0, tl.float32), scale)[:, None]
    limited = tl.clamp(values * inverse, -largest, largest, propagate_nan=tl.PropagateNan.ALL)
    numbers = limited.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    start = wire + row * n_bytes
    tl.store(start + at, numbers, mask=at < width)
    scales = (start + scales_at).to(tl.pointer_type(tl.float32))
    tl.store(scales + tile, scale, mask=tile * TILE < width)


@triton.jit
def unpacked_kernel(
    rows,
    wire,
    width,
    n_bytes,
    scales_at,
    TILE: tl.constexpr,  # noqa: N803
    BLOCKS: tl.constexpr,  # noqa: N803
):
    """Unpack BLOCKS tiles of one row from their float8 bits and scales."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.program_id(1) * BLOCKS + tl.arange(0, BLOCKS)
    at = tile[:, None] * TILE + tl.arange(0, TILE)[None, :]
    start = wire + row * n_bytes
    scales = (start + scales_at).to(tl.pointer_type(tl.float32))
    scale = tl.load(scales + tile, mask=tile * TILE < width, other=0.0)
    numbers = tl.load(start + at, mask=at < width, other=0).to(tl.float8e4nv, bitcast=True)
    values = numbers.to(tl.float32) * scale[:, None]
    tl.store(rows + row * width + at, values.to(rows.dtype.element_ty), mask=at < width)
