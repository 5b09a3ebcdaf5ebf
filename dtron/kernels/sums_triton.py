"""The Triton kernel of `dtron/kernels/sums.py`."""

# pyright: reportMissingImports=false
import triton
import triton.language as tl


@triton.jit
def sum_kernel(parts, out, n, PARTS: tl.constexpr, BLOCK: tl.constexpr):  # noqa: N803
    """Sum one block of elements over all parts."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(parts + at, mask=inside).to(tl.float32)
    for part in range(1, PARTS):
        # In 64 bits: all parts together may have more than 2^31 elements.
        from_part = tl.cast(n, tl.int64) * part
        total += tl.load(parts + from_part + at, mask=inside).to(tl.float32)
    tl.store(out + at, total, mask=inside)
