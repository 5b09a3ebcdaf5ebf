"""The Triton kernel of `dtron/kernels/lion.py`."""

# pyright: reportMissingImports=false
import triton
import triton.language as tl


@triton.jit
def lion_kernel(
    p,
    g,
    m,
    scale,
    n,
    lr,
    beta1,
    rest1,
    beta2,
    rest2,
    kept,
    BLOCK: tl.constexpr,  # noqa: N803
):
    """Update one block of one tensor.

    Args:
        p, g, m: parameter, gradient and momentum: contiguous, n elements.
        scale: factor of the gradient, a float32 scalar.
        rest1, rest2: 1 - b1 and 1 - b2, computed in float64, since float32 loses digits.
        kept: 1 - lr * decay.
    """
    factor = tl.load(scale)
    if factor - factor == 0:  # finite
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        gradient = tl.load(g + at, mask=inside).to(tl.float32) * factor
        momentum = tl.load(m + at, mask=inside).to(tl.float32)
        mean = beta1 * momentum + rest1 * gradient
        sign = tl.where(mean > 0, 1.0, tl.where(mean < 0, -1.0, 0.0))
        parameter = tl.load(p + at, mask=inside) * kept - lr * sign
        tl.store(p + at, parameter, mask=inside)
        tl.store(m + at, (beta2 * momentum + rest2 * gradient).to(m.dtype.element_ty), mask=inside)
