"""Rows in another order, with gradients that are gatherings too.

Autograd's own gradient of x[order] adds rows up one by one, on a GPU in any order; where the
inverse order is known it is a gathering, and of rows that were taken k times a sum of k neighbours.
"""

from typing import Any

import torch
from torch import Tensor


class _Repeated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x[order // k]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (inverse,) = ctx.saved_tensors
        return gradients[0][inverse].unflatten(0, (-1, ctx.k)).sum(1), None, None, None


class _Reordered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return x[order]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (inverse,) = ctx.saved_tensors
        return gradients[0][inverse], None, None


def repeated(x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
    """Each row k times, in a given order: row r of the result is x[order[r] // k].

    Args:
        x: (N, D).
        order: int64 (N k,), a permutation.
        inverse: of it.
    Returns:
        (N k, D).
    """
    return _Repeated.apply(x, order, inverse, k)  # type: ignore[return-value]


def reordered(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """x[order] for a permutation int64 (N,) whose inverse is given: (N, D) -> (N, D)."""
    return _Reordered.apply(x, order, inverse)  # type: ignore[return-value]


def inverse_of(order: Tensor) -> Tensor:
    """The inverse of a permutation, int64 (N,)."""
    return order.scatter(0, order, torch.arange(len(order), device=order.device))
