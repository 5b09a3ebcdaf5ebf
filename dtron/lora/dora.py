"""DoRA: adapters that train the length of each row of a matrix separately from its direction.

    y = m / |V| * (V x) + bias       V = W + scale B A, |V| (N,): norms of the rows of V

The magnitudes m (N,) start as the norms of the rows of W. As in the paper's section 4.3 and in
PEFT, |V| is a constant of the backward. So m gets its exact gradient, and A and B theirs times
m / |V|.

V is never built. With G = A A^T (rank, rank),

    |V|^2 = |W|^2 + scale sum(2 B * (W A^T) + scale B * (B G))       sum: over rank, of each row

Each term is a sum over the K input features. Where tensor parallelism splits them (rowwise), ranks
add their sums: one all-reduce of N float32 values per layer and forward. FSDP has already gathered
W for the layer itself.

Sources: DoRA, arXiv:2402.09353; peft.tuners.lora.dora.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

MAGNITUDE = "lora_magnitude"
"""Name of the parameter m of a linear layer."""


@torch.no_grad()
def squared_norms(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Return the squared norms of the rows of weight + scale b a: (N,), float32 or wider.

    Args:
        weight: (N, K), or a rank's K / tp columns of it.
        a: (rank, K), or the same columns of it.
        b: (N, rank).
    """
    wide = torch.promote_types(weight.dtype, torch.float32)
    own = torch.linalg.vector_norm(weight, dim=1, dtype=wide).square()
    crossed, b, a_wide = F.linear(weight, a).to(wide), b.to(wide), a.to(wide)
    return own + scale * (b * (2 * crossed + scale * (b @ (a_wide @ a_wide.t())))).sum(1)


def rescale(layer: Any, out: Tensor, partial: bool) -> Tensor:
    """Return m / |V| * (out - bias) + bias: (..., N), in the dtype of `out`.

    Args:
        layer: a linear layer with an adapter and magnitudes.
        out: (..., N), V x + bias of this rank's rows of V.
        partial: whether `out` is a partial sum over tp.
    """
    a, b = local(layer.lora_a), local(layer.lora_b)
    square = squared_norms(local(layer.weight), a, b, layer.lora_scale)
    norms = sum_columns(square, layer.weight).sqrt().clamp(min=torch.finfo(square.dtype).tiny)
    magnitude = local(layer.lora_magnitude)
    # Both in the dtype of m, so that their quotient is 1 before the first update.
    ratio = (magnitude / norms.to(magnitude.dtype)).to(out.dtype)
    if layer.bias is None:
        return out * ratio
    ranks = layer.weight.device_mesh.size() if partial else 1
    return out * ratio + (1 - ratio) * (local(layer.bias) / ranks)


def sum_columns(squares: Tensor, weight: Tensor) -> Tensor:
    """Sum squared norms (N,) over tp if tp splits the columns of a weight; else return them."""
    if not isinstance(weight, DTensor) or weight.placements != (Shard(1),):
        return squares
    sums = DTensor.from_local(squares, weight.device_mesh, [Partial()], run_check=False)
    return sums.redistribute(placements=[Replicate()]).to_local()


def rescaled(weight: Tensor, magnitude: Tensor) -> Tensor:
    """Return weight (N, K) with the rows' lengths `magnitude` (N,), in weight's dtype."""
    norms = torch.linalg.vector_norm(weight, dim=1, keepdim=True)
    norms = norms.clamp(min=torch.finfo(norms.dtype).tiny)  # a row of zeros stays one
    return weight * (magnitude.to(weight.dtype).unsqueeze(1) / norms)


@torch.no_grad()
def start_magnitudes(parts: Iterable[nn.Module]) -> None:
    """Set all magnitudes to the norms of the rows of W, in place; all ranks call it together.

    Call it after the weights were drawn or loaded. An adapter whose B is not zero is loaded with
    magnitudes of its own.

    Args:
        parts: this rank's pipeline stages, sharded.
    """
    for layer in (module for part in parts for module in part.modules()):
        if (magnitude := getattr(layer, MAGNITUDE, None)) is None:
            continue
        assert isinstance(layer.weight, Tensor)
        square = _wide(local(layer.weight)).square().sum(1)
        if isinstance(layer.weight, DTensor):
            mesh = layer.weight.device_mesh
            for axis, placement in enumerate(layer.weight.placements):
                if placement.is_shard(1):
                    dist.all_reduce(square, group=mesh.get_group(axis))
        local(magnitude).copy_(square.sqrt())  # sharded by rows as W is


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def local(parameter: Tensor) -> Tensor:
    """Return this rank's shard of a parameter, or the parameter itself if it is not split."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
