"""Sum partial gradients over tp, compute the global norm, clip or zero gradients; on the device.

FSDP does not sum gradients over tp. `reduce_replicas` does, for replicated parameters whose modules
compute on a shard of the tokens or heads. Then every gradient is a shard of a complete sum. For the
norm, each rank sums the squares of the shards that it owns (if ranks have equal copies of a shard,
the first of these ranks owns it); one all-reduce over all ranks adds these sums.
"""

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from dtron.config import DEGREES
from dtron.kernels.torch_internals import norms
from dtron.parallelisms.mesh import Mesh, axes_of


def local_part(tensor: Tensor) -> Tensor:
    """Return this rank's shard of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


@torch.no_grad()
def as_dtensor(
    local: Tensor, mesh: DeviceMesh, placements: Sequence[Placement], shape: torch.Size
) -> DTensor:
    """Return a DTensor that shares the memory of a shard, which may be on the host.

    `DTensor.from_local` would copy a shard on the host to the device of the mesh.

    Args:
        local: this rank's shard, contiguous or a view of its first rows.
        shape: of the whole tensor, which is contiguous.
    """
    on_host = local.device.type != mesh.device_type
    made: Any = DTensor.from_local(
        torch.empty_like(local, device="meta") if on_host else local,
        mesh,
        placements,
        run_check=False,
        shape=shape,
        stride=torch.empty(shape, device="meta").stride(),
    )
    if on_host:
        made = torch.empty_like(made, device=local.device)
        made.to_local().set_(local)  # type: ignore[call-overload]
    return made


def local_gradients(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the local shards of all existing gradients, sharing their memory."""
    return [local_part(p.grad) for p in parameters if p.grad is not None]


def flatten(gradients: Sequence[Tensor]) -> Tensor:
    """Flatten gradients of one dtype into one 1-D tensor, for one collective."""
    return torch.cat([gradient.flatten() for gradient in gradients])


def unflatten_(gradients: Sequence[Tensor], flat: Tensor) -> None:
    """Write a flattened tensor back to the gradients, after the collective."""
    sizes = [gradient.numel() for gradient in gradients]
    if all(gradient.is_contiguous() for gradient in gradients):  # with one kernel
        torch.split_with_sizes_copy(flat, sizes, out=[g.view(-1) for g in gradients])
        return
    for gradient, part in zip(gradients, flat.split(sizes), strict=True):
        gradient.copy_(part.view_as(gradient))


@torch.no_grad()
def reduce_replicas(parameters: Iterable[Tensor], group: dist.ProcessGroup) -> None:
    """Sum gradients over a group, in place, with one all-reduce per dtype.

    Args:
        parameters: the same parameters on all ranks of the group, with partial gradients. A missing
            gradient counts as zero.
    """
    by_dtype: dict[torch.dtype, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
        (gradient,) = local_gradients([parameter])
        by_dtype.setdefault(gradient.dtype, []).append(gradient)
    for gradients in by_dtype.values():
        flat = flatten(gradients)
        dist.all_reduce(flat, group=group)
        unflatten_(gradients, flat)


def global_norm(
    parameters: Sequence[Tensor], mesh: Mesh, copies: Collection[Tensor] = ()
) -> Tensor:
    """Compute the global 2-norm of all gradients: a scalar on the device, equal on every rank.

    It is float32, or float64 if a parameter is float64. It is NaN or infinite if a gradient is.

    Args:
        copies: tied weights to leave out, since another pipeline stage counts them.
    """
    left_out = {id(p) for p in copies}
    counted = [p for p in parameters if p.grad is not None and id(p) not in left_out]
    wide = any(p.dtype == torch.float64 for p in parameters)  # over all, so that ranks agree
    dtype = torch.float64 if wide else torch.float32
    gradients = local_gradients(p for p in counted if _owned(p, mesh))
    squares = torch.zeros((), dtype=dtype, device=mesh.device_type)
    if gradients:
        squares = torch.stack(norms(gradients, 2, dtype)).square().sum()
    dist.all_reduce(squares)
    return squares.sqrt()


def _owned(parameter: Tensor, mesh: Mesh) -> bool:
    """Whether this rank counts its shard of the gradient; only the first of equal copies counts.

    Along an axis that is not in the gradient's mesh, ranks have equal copies. Exception: along pp,
    ranks have different parameters.
    """
    gradient = parameter.grad
    names: tuple[str, ...] = ("pp",)
    if isinstance(gradient, DTensor):
        coordinate = gradient.device_mesh.get_coordinate()
        assert coordinate is not None, "a gradient lives on a mesh that this rank is not part of"
        names += gradient.device_mesh.mesh_dim_names or ()
        axes = zip(coordinate, gradient.placements, strict=True)
        if any(c > 0 and p.is_replicate() for c, p in axes):
            return False
    covered = {axis for name in names for axis in axes_of(name)}
    if "edp_shard" in covered:  # edp_shard x ep x etp are the ranks of dp_shard x cp x tp
        covered |= {"dp_shard", "cp", "tp"}
    return all(mesh.rank(axis) == 0 for axis in DEGREES if axis not in covered)


def clip_scale(norm: Tensor, max_norm: float) -> Tensor:
    """Compute the factor for all gradients, min(1, max_norm / norm): a scalar on the device.

    The factor is 1 if max_norm is 0, and NaN if the norm is not finite.
    """
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0) if max_norm else torch.ones_like(norm)
    return torch.where(norm.isfinite(), scale, torch.nan)


@torch.no_grad()
def scale_or_zero_(parameters: Iterable[Tensor], scale: Tensor) -> None:
    """Multiply gradients by `scale`, or set them to zero if `scale` is not finite."""
    finite = scale.isfinite()
    for gradient in local_gradients(parameters):
        gradient.copy_(torch.where(finite, gradient * scale, 0.0))
