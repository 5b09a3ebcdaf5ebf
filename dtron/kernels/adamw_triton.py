"""The Triton kernel of `dtron/kernels/adamw.py`."""

# pyright: reportMissingImports=false
import triton
import triton.language as tl


@triton.jit
def adamw_kernel(
    p,
    g,
    m,
    v,
    scalars,
    n,
    beta1,
    rest1,
    beta2,
    rest2,
    eps,
    kept,
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Update one block of one tensor.

    Args:
        p, g, m, v: parameter, gradient and moments: contiguous, n elements.
        scalars: scale, lr / (1 - b1^t) and 1 / sqrt(1 - b2^t), float32.
        rest1, rest2: 1 - b1 and 1 - b2, computed in float64, since float32 loses digits.
        kept: 1 - lr * decay.
    """
    scale = tl.load(scalars)
    if scale - scale == 0:  # finite
        rate = tl.load(scalars + 1)
        root = tl.load(scalars + 2)
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        gradient = tl.load(g + at, mask=inside).to(tl.float32) * scale
        first = tl.load(m + at, mask=inside).to(tl.float32)
        second = tl.load(v + at, mask=inside).to(tl.float32)
        first = beta1 * first + rest1 * gradient
        second = beta2 * second + rest2 * gradient * gradient
        parameter = tl.load(p + at, mask=inside) * kept
        parameter -= rate * first / (tl.sqrt(second) * root + eps)
        tl.store(p + at, parameter, mask=inside)
        tl.store(m + at, first.to(m.dtype.element_ty), mask=inside)
        tl.store(v + at, second.to(v.dtype.element_ty), mask=inside)
