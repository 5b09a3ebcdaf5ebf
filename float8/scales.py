"""Scales of float8 tensors, and which ranks share a scale.

A scale is a function of the values only, so that recomputation gives the same scale. Ranks that
hold shards of an operand with a per-tensor scale share the scale, so that every layout computes the
values of one process. A scale is shared over these axes ("-": no axis):

    weight over tp             input        weight    grad
    replicated                 cp           -         cp
    replicated, tokens split   cp and tp    -         cp and tp
    split by rows (colwise)    cp           tp        cp and tp
    split by columns (rowwise) cp and tp    tp        cp

Data-parallel ranks share no scale, since each has its own micro-batches. Delayed scales
(delayed.py) are known before the step and are not reduced here.

Sources: arXiv:2209.05433; formula and rounding of the scale are those of torchao.float8.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtron.float8.recipes import Cast
from dtron.kernels.float8 import SMALLEST
from dtron.parallelisms.functional_collectives import all_reduce, wait_tensor


@dataclass(frozen=True)
class ScaleGroups:
    """Names of the process groups whose ranks hold shards of one tensor.

    These are groups over tp, over cp, and over cp and tp (`both`).
    """

    tp: tuple[str, ...] = ()
    cp: tuple[str, ...] = ()
    both: tuple[str, ...] = ()


def scale_of(amax: Tensor, cast: Cast) -> Tensor:
    """Compute float32 scales from the largest magnitudes of tiles."""
    # In float64, since eager and compiled float32 division differ in the last bit.
    ratio = torch.finfo(cast.dtype).max / amax.to(torch.float64).clamp(min=SMALLEST)
    scale = ratio.to(torch.float32)
    return torch.exp2(torch.floor(torch.log2(scale))) if cast.power_of_two else scale


def shared(amax: Tensor, groups: Sequence[str]) -> Tensor:
    """Return the elementwise maximum over the ranks of process groups."""
    for group in groups:
        amax = wait_tensor(all_reduce(amax, "max", group))
    return amax


def magnitude(x: Tensor) -> Tensor:
    """Return max |x| as a 0-dim tensor of x's dtype, in one pass even without compilation."""
    return torch.linalg.vector_norm(x, torch.inf)


def scales_together(xs: Sequence[Tensor], cast: Cast, groups: Sequence[str]) -> list[Tensor]:
    """Compute per-tensor scales (1, 1) of several operands with one reduction over the ranks."""
    amax = shared(torch.stack([magnitude(x) for x in xs]), groups)
    return [scale.view(1, 1) for scale in scale_of(amax, cast).unbind()]


def scale_of_all(x: Tensor, cast: Cast, groups: Sequence[str]) -> Tensor:
    """Compute the scale (1, 1) of a whole operand, sharded over the ranks of `groups`."""
    return scale_of(shared(magnitude(x).view(1, 1), groups), cast)
