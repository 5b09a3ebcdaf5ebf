"""The elementwise parts of Muon, each in one pass over memory.

For each element, with gradient g = factor * gradient, momentum mu and the orthogonalized update o:

    momentum_    m = mu m + (1 - mu) g,   u = (1 - mu) g + mu m
    move_        p = kept p - step o

computed in float32 (float64 for float64 parameters). If `factor` is not finite, m and p stay as
they are. GPUs run Triton kernels, other devices the same formulas in torch.
"""

import torch
from torch import Tensor

from dtron.kernels.adamw import BLOCK


def momentum_(gradient: Tensor, m: Tensor, u: Tensor, factor: Tensor, mu: float) -> None:
    """Update the momentum m in place, and write u, which is to be orthogonalized.

    Args:
        gradient: contiguous, of any shape; float32 on GPUs.
        m: of the same shape, contiguous, of any floating dtype.
        u: of as many elements, contiguous, of any floating dtype.
        factor: of the gradient, a float32 scalar on the device.
        mu: the momentum.
    """
    assert gradient.is_contiguous()
    assert m.is_contiguous()
    update = _triton_momentum if gradient.is_cuda else _momentum
    update(gradient, m, u, factor, mu)


def move_(p: Tensor, o: Tensor, factor: Tensor, kept: float, step: float) -> None:
    """Update parameters in place.

    Args:
        p: contiguous, of any shape; float32 on GPUs.
        o: of as many elements, contiguous, of any floating dtype.
        factor: as of `momentum_`.
        kept: factor of the parameter: 1 - lr * decay.
        step: factor of o.
    """
    assert p.is_contiguous()
    assert o.is_contiguous()
    update = _triton_move if p.is_cuda else _move
    update(p, o, factor, kept, step)


def _momentum(gradient: Tensor, m: Tensor, u: Tensor, factor: Tensor, mu: float) -> None:
    g = gradient * factor
    after = m.to(g.dtype).lerp(g, 1 - mu)
    u.view_as(g).copy_(g.lerp(after, mu))
    m.copy_(torch.where(factor.isfinite(), after, m))


def _move(p: Tensor, o: Tensor, factor: Tensor, kept: float, step: float) -> None:
    p.copy_(torch.where(factor.isfinite(), kept * p - step * o.view_as(p).to(p.dtype), p))


def _triton_momentum(gradient: Tensor, m: Tensor, u: Tensor, factor: Tensor, mu: float) -> None:
    from dtron.kernels.muon_triton import momentum_kernel  # Triton is needed on GPUs only

    n, block = gradient.numel(), {"BLOCK": BLOCK}
    momentum_kernel[(-(-n // BLOCK),)](gradient, m, u, factor, n, mu, 1 - mu, **block)  # type: ignore[arg-type]


def _triton_move(p: Tensor, o: Tensor, factor: Tensor, kept: float, step: float) -> None:
    from dtron.kernels.muon_triton import move_kernel  # Triton is needed on GPUs only

    n, block = p.numel(), {"BLOCK": BLOCK}
    move_kernel[(-(-n // BLOCK),)](p, o, factor, n, kept, step, **block)  # type: ignore[arg-type]
