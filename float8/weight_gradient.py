"""Weight gradients of float8 matmuls, computed immediately or deferred by a split backward.

    B (backward)          grad_x = g8 w8,  grad_weight = g8^T x8
    I (input gradients)   grad_x = g8 w8;  queues `Operands` of grad_weight
    W (weight gradients)  grad_weight = g8^T x8

All casts, and the collectives of shared scales, run in I. W multiplies the same float8 values and
scales as B does, independently of later weights and scales and of the order in which ranks run W.

In a compiled block the casts stay in the graph; the matmul of grad_x and the queueing are one
operator, `float8_input_gradient`, as in `parallelisms/pipeline/split_backward.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dtron.float8.casting import Scaled
from dtron.float8.products import product
from dtron.float8.recipes import MatmulCasts, Recipe
from dtron.parallelisms.pipeline.weight_gradients import (
    DeferredMatmul,
    LinearMatmul,
    call_of,
    site_of,
)


@dataclass(frozen=True)
class Operands:
    """Operands of grad_weight = left right^T: left (O, N), right (K, N).

    Shapes: N tokens, K input features, O output features.
    """

    left: Tensor
    """float8 (O, N), or transposed (N, O); without scales the gradient itself, (N, O)."""
    right: Tensor
    """float8 (K, N), or transposed (N, K); without scales the input itself, (N, K)."""
    scales: tuple[Tensor, ...] = ()
    """Scales of left and right as stored; empty if the recipe's grad_weight is not float8."""
    transposed: tuple[bool, bool] = (True, True)
    """Whether left and right are stored transposed; their casts allow it (`Cast.turns`)."""

    @staticmethod
    def of(left: Scaled, right: Scaled, transposed: tuple[bool, bool]) -> "Operands":
        """Return the operands for a float8 grad_weight."""
        return Operands(left.data, right.data, (left.scale, right.scale), transposed)

    def multiply(
        self, casts: MatmulCasts | None, dtype: torch.dtype, emulate: bool, after: Tensor
    ) -> Tensor:
        """Compute the weight's gradient (O output features, K input features) in `dtype`.

        Args:
            casts: the recipe's `grad_weight`.
            after: a gradient, which is not read, but delays the transpose to the backward.
        """
        if casts is None:
            return self.left.t() @ self.right
        left = Scaled(self.left, self.scales[0], casts.left)
        right = Scaled(self.right, self.scales[1], casts.right)
        left = left.turned(after) if self.transposed[0] else left
        right = right.turned(after) if self.transposed[1] else right
        return product(left, right, dtype, emulate, casts.fast_accumulation)


@dataclass(frozen=True)
class Float8Matmul(DeferredMatmul):
    """A queued grad_weight of a float8 layer."""

    operands: Operands
    casts: MatmulCasts | None
    dtype: torch.dtype
    emulate: bool

    def compute(self) -> Tensor:
        """Compute the weight's gradient; see `Operands.multiply`."""
        return self.operands.multiply(self.casts, self.dtype, self.emulate, self.operands.left)

    def add_to(self, total: Tensor) -> None:
        """Add the gradient to `total`; in the matmul, if that is not float8."""
        if self.casts is None:
            LinearMatmul(self.operands.left, self.operands.right).add_to(total)
        else:
            super().add_to(total)

    def write(self, dtype: torch.dtype) -> Tensor:
        """Compute the gradient in `dtype`; it is rounded to `self.dtype` first if it is float8."""
        if self.casts is None:
            return LinearMatmul(self.operands.left, self.operands.right).write(dtype)
        return super().write(dtype)


Deferred = tuple[Tensor, Operands]
"""(number of a layer's `Site`, operands of the layer's weight gradient)."""


def input_gradient(
    left: Scaled,
    right: Scaled,
    dtype: torch.dtype,
    recipe: Recipe,
    emulate: bool,
    deferred: Sequence[Deferred] = (),
) -> Tensor:
    """Compute grad_x = left right^T, and queue the deferred weight gradients.

    Args:
        left: gradient (N tokens, O output features).
        right: transposed weight (K input features, O).
        deferred: weight gradients to queue; all are of layers with this recipe.
    Returns:
        (N, K) in `dtype`.
    """
    if not deferred:
        return product(left, right, dtype, emulate, recipe.grad_input.fast_accumulation)
    listed = [operands for _, operands in deferred]
    return torch.ops.dtron.float8_input_gradient(
        [left.data, left.scale, right.data, right.scale],
        [tensor for each in listed for tensor in (each.left, each.right, *each.scales)],
        [flag for each in listed for flag in each.transposed],
        [number for number, _ in deferred],
        call_of(left.data),
        dtype,
    )


# Defined as in products.py. Queued tensors are only read, hence no alias annotations.
torch.library.define(
    "dtron::float8_input_gradient",
    "(Tensor[] matmul, Tensor[] operands, bool[] transposed, Tensor[] numbers, Tensor call, "
    "ScalarType dtype) -> Tensor",
    tags=torch.Tag.needs_exact_strides,
)


def run_input_gradient(
    matmul: Sequence[Tensor],
    operands: Sequence[Tensor],
    transposed: Sequence[bool],
    numbers: Sequence[Tensor],
    call: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Compute grad_x, and queue the operands of weight gradients.

    The schema does not declare this side effect, which is safe for the reason given in
    `run_linear_input_gradient`.

    Args:
        matmul: data and scale of the gradient (N, O) and of the weight (K, O).
        operands: left, right and scales of `Operands`, layer after layer.
        transposed: two flags per layer: whether left and right are stored transposed.
        numbers: int64 scalars on the CPU, keys of the layers' `Site`s; all layers have one recipe.
        call: (0,), from `call_of`; keeps the compiler from merging equal calls.
        dtype: dtype of all gradients.
    Returns:
        (N, K) in `dtype`.
    """
    sites = [site_of(number) for number in numbers]
    layer: Any = sites[0].module
    recipe, emulate, size = layer.recipe, layer.emulate, len(operands) // len(sites)
    for i, site in enumerate(sites):
        left, right, *scales = operands[i * size : (i + 1) * size]
        flags = (transposed[2 * i], transposed[2 * i + 1])
        queued = Operands(left, right, tuple(scales), flags)
        site.take(Float8Matmul(queued, recipe.grad_weight, dtype, emulate))
    grad, grad_scale, weight, weight_scale = matmul
    casts = recipe.grad_input
    left8, right8 = Scaled(grad, grad_scale, casts.left), Scaled(weight, weight_scale, casts.right)
    return product(left8, right8, dtype, emulate, casts.fast_accumulation)


torch.library.impl("dtron::float8_input_gradient", "default", run_input_gradient)


@torch.library.register_fake("dtron::float8_input_gradient")
def _(matmul: Sequence[Tensor], *others: Any) -> Tensor:
    grad, _, weight, _ = matmul
    return grad.new_empty(grad.shape[0], weight.shape[0], dtype=others[-1])
