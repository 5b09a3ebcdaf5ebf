"""The Triton kernels of `dtron/kernels/muon.py`."""

# pyright: reportMissingImports=false
import triton
import triton.language as tl


@triton.jit
def momentum_kernel(g, m, u, factor, n, mu, rest, BLOCK: tl.constexpr):  # noqa: N803
    """Update the momentum and write u, for one block of one tensor.

    Args:
        g, m, u: gradient, momentum and result: contiguous, n elements.
        rest: 1 - mu, computed in float64, since float32 loses digits.
    """
    scale = tl.load(factor)
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    gradient = tl.load(g + at, mask=inside).to(tl.float32) * scale
    momentum = mu * tl.load(m + at, mask=inside).to(tl.float32) + rest * gradient
    tl.store(u + at, (rest * gradient + mu * momentum).to(u.dtype.element_ty), mask=inside)
    if scale - scale == 0:  # finite
        tl.store(m + at, momentum.to(m.dtype.element_ty), mask=inside)


@triton.jit
def move_kernel(p, o, factor, n, kept, step, BLOCK: tl.constexpr):  # noqa: N803
    """Update one block of one parameter.

    Args:
        p, o: parameter and orthogonalized update: contiguous, n elements.
    """
    scale = tl.load(factor)
    if scale - scale == 0:  # finite
        at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
        inside = at < n
        update = tl.load(o + at, mask=inside).to(tl.float32)
        parameter = tl.load(p + at, mask=inside) * kept - step * update
        tl.store(p + at, parameter, mask=inside)
