"""Lion in one pass over memory.

For each element, with gradient g = scale * gradient and learning rate a:

    p = p (1 - a decay) - a sign(b1 m + (1 - b1) g),   m = b2 m + (1 - b2) g

computed in float32 (float64 for float64 parameters). If `scale` is not finite, nothing changes.
Bytes per element: 20 with a float32 momentum, 16 with bfloat16. GPUs run a Triton kernel, other
devices the same formula in torch.

Source: Lion, arXiv:2302.06675, algorithm 2.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtron.kernels.adamw import BLOCK


@dataclass(frozen=True)
class Rates:
    """Scalars of an update that are known on the host."""

    lr: float
    beta1: float
    beta2: float
    weight_decay: float


def lion_(
    parameters: Sequence[Tensor],
    gradients: Sequence[Tensor],
    moments: Sequence[Tensor],
    scale: Tensor,
    rates: Rates,
) -> None:
    """Update parameters and momenta in place.

    Args:
        parameters: of any shape, contiguous; float32 on GPUs.
        gradients: of the same shapes, contiguous.
        moments: momentum m, of any floating dtype, contiguous.
        scale: factor of all gradients, a float32 scalar on the device.
    """
    # Elements are matched by their position in memory.
    assert all(x.is_contiguous() for x in (*parameters, *gradients, *moments))
    for p, g, m in zip(parameters, gradients, moments, strict=True):
        update = _triton if p.is_cuda else _reference
        update(p, g, m, scale, rates)


def _reference(p: Tensor, g: Tensor, m: Tensor, scale: Tensor, rates: Rates) -> None:
    finite = scale.isfinite()
    g, momentum = g.to(p.dtype) * scale, m.to(p.dtype)
    sign = momentum.lerp(g, 1 - rates.beta1).sign()
    after = p * (1 - rates.lr * rates.weight_decay) - rates.lr * sign
    for tensor, value in ((p, after), (m, momentum.lerp(g, 1 - rates.beta2))):
        tensor.copy_(torch.where(finite, value, tensor))


def _triton(p: Tensor, g: Tensor, m: Tensor, scale: Tensor, rates: Rates) -> None:
    from dtron.kernels.lion_triton import lion_kernel  # Triton is needed on GPUs only

    n = p.numel()
    lion_kernel[(-(-n // BLOCK),)](
        p,
        g,
        m,
        scale,
        n,
        rates.lr,
        rates.beta1,
        1 - rates.beta1,
        rates.beta2,
        1 - rates.beta2,
        1 - rates.lr * rates.weight_decay,
        BLOCK=BLOCK,  # pyright: ignore[reportArgumentType]
    )
