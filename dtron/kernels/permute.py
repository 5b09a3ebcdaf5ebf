"""Copy tokens to rows sorted by expert, and compute weighted sums of the experts' results.

Token n's j-th choice is slot n k + j. A row holds one slot's copy of its token, or is empty and
zero; a slot has one row or no row. Both maps, slots by row and rows by slot, are given. x', y' and
w' are gradients:

    repeated    y[r] = x[slots[r] // k]              x'[n] = sum_j y'[rows[n k + j]]
    collected   y[n] = sum_j x[rows[n k + j]]
                x'[r] = y'[slots[r] // k]
    summed      y[n] = sum_j w[n, j] x[rows[n k + j]]
                x'[r] = w[slots[r]] y'[slots[r] // k],  w'[n, j] = y'[n] . x[rows[n k + j]]

Thus gradients are gathers too, without atomic additions in arbitrary order; autograd's gradient of
indexing adds rows one by one. Sums are in float32 at least. Triton kernels on GPUs read and write
every row once; other devices, and float64, use the same formulas in torch.

Shapes: N tokens, k slots per token, R rows, D width.
Source: MegaBlocks, arXiv:2211.15841, section 5.1.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

BLOCK = 1024


class Copies(NamedTuple):
    """Which rows are the copies of which tokens, and their weights."""

    weights: Tensor
    """(N, k), weight of each slot's result; float32 at least."""
    slots: Tensor
    """int64 (R,), slot of each row; -1: the row is empty."""
    rows: Tensor
    """int64 (N k,), row of each slot; -1: the slot has no row."""


def sort_by_expert(chosen: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort slots by expert, then by token.

    Args:
        chosen: int64 (N, k); n_experts: no expert. Slots without an expert come last.
    Returns:
        Slot of each row, int64 (N k,); row of each slot, int64 (N k,); offsets int32 (E,).
    """
    flat = chosen.flatten()
    order = flat.argsort(stable=True)
    counts = flat.new_zeros(n_experts + 1).scatter_add(0, flat, torch.ones_like(flat))
    return order, inverse_of(order), counts[:-1].cumsum(0).int()


def repeated(x: Tensor, slots: Tensor, rows: Tensor, k: int) -> Tensor:
    """Copy each token to the rows of its slots.

    Args:
        x: (N, D).
        slots: int64 (R,), slot of each row; -1: the row is zero.
        rows: int64 (N k,), row of each slot; -1: the slot has no row.
    Returns:
        (R, D).
    """
    return _RepeatRows.apply(x, slots, rows, k)  # type: ignore[return-value]


def collected(x: Tensor, slots: Tensor, rows: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    """Compute each token's sum of its rows, the transpose of `repeated`.

    Args:
        x: (R, D).
        slots, rows, k: arguments of `repeated`.
    Returns:
        (N, D) in `dtype`.
    """
    return _CollectRows.apply(x, slots, rows, k, dtype)  # type: ignore[return-value]


def summed(x: Tensor, weights: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
    """Compute each token's weighted sum of its rows.

    Args:
        x: (R, D).
        weights: (N, k), float32 at least.
        slots: int64 (R,), slot of each row; -1: the row has no slot.
        rows: int64 (N k,), row of each slot; -1: the slot has no row.
    Returns:
        (N, D) in the dtype of the weights.
    """
    return _SumRows.apply(x, weights, slots, rows)  # type: ignore[return-value]


def reordered(x: Tensor, order: Tensor, inverse: Tensor) -> Tensor:
    """Return x[order] for a permutation int64 (N,) whose inverse is given: (N, D) -> (N, D)."""
    return repeated(x, order, inverse, 1)


def inverse_of(order: Tensor) -> Tensor:
    """Return the inverse of a permutation, int64 (N,)."""
    return order.scatter(0, order, torch.arange(len(order), device=order.device))


class _RepeatRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, slots: Tensor, rows: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.k = k
        return gathered(x, slots, None, k, x.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (rows,) = ctx.saved_tensors
        grad = gradients[0].contiguous()
        return added(grad, rows.view(-1, ctx.k), None, grad.dtype), None, None, None


class _CollectRows(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, slots: Tensor, rows: Tensor, k: int, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(slots)
        ctx.settings = k, x.dtype
        return added(x, rows.view(-1, k), None, dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (slots,), (k, dtype) = ctx.saved_tensors, ctx.settings
        return gathered(gradients[0].contiguous(), slots, None, k, dtype), *[None] * 4


class _SumRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor, slots: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(x, weights, slots, rows)
        return added(x, rows.view_as(weights), weights, weights.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weights, slots, rows = ctx.saved_tensors
        grad = gradients[0].contiguous()
        by_rows = gathered(grad, slots, weights, weights.shape[1], x.dtype)
        return by_rows, dots(grad, x, rows.view_as(weights)), None, None


def _by_triton(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64


def gathered(
    x: Tensor, slots: Tensor, weights: Tensor | None, k: int, dtype: torch.dtype
) -> Tensor:
    """Return y[r] = x[slots[r] // k]: (N, D), (R,) -> (R, D) in `dtype`.

    If weights (N, k) are given, y[r] is multiplied by the slot's weight. It is zero for slot -1.
    """
    if _by_triton(x):
        return _gathered_on_gpu(x.contiguous(), slots, weights, k, dtype)
    held = slots.clamp(min=0)
    y = x[held // k]
    if weights is not None:
        y = y * weights.flatten()[held].unsqueeze(1)
    return _converted(torch.where((slots >= 0).unsqueeze(1), y, 0), dtype)


def added(y: Tensor, rows: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Sum y[rows[n, j]] over j: (R, D), (N, k) -> (N, D) in `dtype`.

    If weights are given, each term is multiplied by weights[n, j]. Row -1 counts as zero.
    """
    if _by_triton(y):
        return _added_on_gpu(y.contiguous(), rows, weights, dtype)
    picked = _picked(y, rows)
    if weights is not None:
        picked = picked.to(weights.dtype) * weights.unsqueeze(-1)
    return _converted(picked.sum(1), dtype)


def dots(grad: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    """Compute the dot products grad[n] . y[rows[n, j]], (N, k) in grad's dtype; 0 for row -1."""
    if _by_triton(grad):
        return _dots_on_gpu(grad, y.contiguous(), rows)
    return (_picked(y, rows).to(grad.dtype) * grad.unsqueeze(1)).sum(-1)


def _converted(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert x to a dtype, but return x itself if it has that dtype.

    An autograd function that ends in a no-op conversion has zero gradients if torch 2.11 compiles
    it.
    """
    return x if x.dtype == dtype else x.to(dtype)


def _picked(y: Tensor, rows: Tensor) -> Tensor:
    """Return y[rows], (N, k, D), with zeros for slots without a row."""
    return torch.where((rows >= 0).unsqueeze(-1), y[rows.clamp(min=0)], 0)


@torch.library.custom_op("dtron::permute_gathered", mutates_args=())
def _gathered_on_gpu(
    x: Tensor, slots: Tensor, weights: Tensor | None, k: int, dtype: torch.dtype
) -> Tensor:
    from dtron.kernels.permute_triton import gathered_kernel  # Triton needs a GPU

    y = x.new_empty(len(slots), x.shape[1], dtype=dtype)
    _launch(gathered_kernel, x, slots, weights, y, k)
    return y


def _launch(
    kernel: Any, source: Tensor, places: Tensor, weights: Tensor | None, to: Tensor, k: int
) -> None:
    """Launch one program per row of `to` and per BLOCK columns of the row."""
    if not to.numel():
        return
    n, width = to.shape
    factors = source if weights is None else weights.contiguous()  # not read without weights
    kernel[n, -(-width // BLOCK)](
        *(source, places, factors, to, k, width), WEIGHTED=weights is not None, BLOCK=BLOCK
    )


@torch.library.custom_op("dtron::permute_added", mutates_args=())
def _added_on_gpu(y: Tensor, rows: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    from dtron.kernels.permute_triton import added_kernel  # Triton needs a GPU

    (n, k), width = rows.shape, y.shape[1]
    out = y.new_empty(n, width, dtype=dtype)
    _launch(added_kernel, y, rows.contiguous(), weights, out, k)
    return out


@torch.library.custom_op("dtron::permute_dots", mutates_args=())
def _dots_on_gpu(grad: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    from dtron.kernels.permute_triton import dots_kernel  # Triton needs a GPU

    k = rows.shape[1]
    out = grad.new_empty(rows.shape)
    if out.numel():
        dots_kernel[(rows.numel(),)](
            grad,
            y,
            rows.contiguous(),
            out,
            k,
            grad.shape[1],
            BLOCK=BLOCK,  # pyright: ignore[reportArgumentType]
        )
    return out


@_gathered_on_gpu.register_fake
def _(x: Tensor, slots: Tensor, weights: Tensor | None, k: int, dtype: torch.dtype) -> Tensor:
    return x.new_empty(slots.shape[0], x.shape[1], dtype=dtype)


@_added_on_gpu.register_fake
def _(y: Tensor, rows: Tensor, weights: Tensor | None, dtype: torch.dtype) -> Tensor:
    return y.new_empty(rows.shape[0], y.shape[1], dtype=dtype)


@_dots_on_gpu.register_fake
def _(grad: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    return grad.new_empty(rows.shape)
