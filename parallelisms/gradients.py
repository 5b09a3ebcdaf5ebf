"""The gradients' global norm, and what follows from it, without waiting for the device.

Every gradient is a shard of a sum that is already complete. Each rank adds up the squares of what
it owns, a replicated part being owned by the first rank of the axis, and one all-reduce over the
world gives the same norm on every rank, whatever the layout.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from dtron.parallelisms.mesh import Mesh


def local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Local shards of all gradients that exist; writing to them writes to the gradients."""
    gradients = (p.grad for p in parameters if p.grad is not None)
    return [g.to_local() if isinstance(g, DTensor) else g for g in gradients]


def global_norm(parameters: Sequence[Tensor], mesh: Mesh) -> Tensor:
    """2-norm over all gradients of all ranks: a scalar on the device, equal on every rank.

    float32, or float64 for float64 gradients. Not finite if any gradient is not.
    """
    wide = any(p.dtype == torch.float64 for p in parameters)  # alike on all ranks, owners or not
    dtype = torch.float64 if wide else torch.float32
    gradients = local_gradients(p for p in parameters if p.grad is not None and _owned(p))
    squares = torch.zeros((), dtype=dtype, device=mesh.device_type)
    if gradients:
        norms = torch._foreach_norm(gradients, 2, dtype=dtype)
        squares = torch.stack(norms).square().sum()
    dist.all_reduce(squares)
    return squares.sqrt()


def _owned(parameter: Tensor) -> bool:
    """Whether this rank is the one that counts its local part of the gradient."""
    gradient = parameter.grad
    if not isinstance(gradient, DTensor):
        return dist.get_rank() == 0
    coordinate = gradient.device_mesh.get_coordinate()
    assert coordinate is not None, "a gradient lives on a mesh that this rank is not part of"
    axes = zip(coordinate, gradient.placements, strict=True)
    return all(c == 0 or not p.is_replicate() for c, p in axes)


def clip_scale(norm: Tensor, max_norm: float) -> Tensor:
    """Factor for all gradients: min(1, max_norm / norm), 1 where max_norm is 0, NaN where the norm
    is not finite. A scalar on the device."""
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)
    return torch.where(norm.isfinite(), scale, torch.nan)


@torch.no_grad()
def scale_or_zero_(parameters: Iterable[Tensor], scale: Tensor) -> None:
    """Multiply gradients by `scale`, or set them to zero where `scale` is not finite."""
    finite = scale.isfinite()
    for gradient in local_gradients(parameters):
        gradient.copy_(torch.where(finite, gradient * scale, 0.0))
