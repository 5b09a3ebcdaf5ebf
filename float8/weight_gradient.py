"""The weight gradient of float8 matmuls: at once, or deferred by a split backward.

    B   grad_x = g8 w8,  grad_weight = g8^T x8
    I   grad_x = g8 w8, and `Operands` of grad_weight to the queue       W   grad_weight = g8^T x8

All casts, and the collectives of scales that ranks share, are in I: W multiplies the same float8
numbers by the same scales as B does, whatever the weight or another micro-batch's scales are by
then, and in whatever order ranks come to it.

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
from dtron.float8.recipes import Product, Recipe
from dtron.parallelisms.pipeline.weight_gradients import DeferredMatmul, call_of, site_of


@dataclass(frozen=True)
class Operands:
    """grad_weight = left right^T, left (O, N) and right (K, N), N tokens."""

    left: Tensor
    """float8 (O, N), or transposed; without scales the gradient itself, (N, O)."""
    right: Tensor
    """float8 (K, N), or transposed; without scales the input itself, (N, K)."""
    scales: tuple[Tensor, ...] = ()
    """Of left and right, as long as they lie; none where the recipe's grad_weight is not float8."""
    transposed: tuple[bool, bool] = (True, True)
    """Whether left and right are (N, O) and (N, K), of tiles that turn."""

    @staticmethod
    def of(left: Scaled, right: Scaled, transposed: tuple[bool, bool]) -> "Operands":
        """Operands in float8."""
        return Operands(left.data, right.data, (left.scale, right.scale), transposed)

    def multiply(
        self, casts: Product | None, dtype: torch.dtype, emulate: bool, after: Tensor
    ) -> Tensor:
        """The gradient of the weight, (O, K) in `dtype`.

        Args:
            casts: the recipe's `grad_weight`.
            after: see `Scaled.turned`.
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
    """The queued grad_weight of a float8 layer."""

    operands: Operands
    casts: Product | None
    dtype: torch.dtype
    emulate: bool

    def compute(self) -> Tensor:
        """See `Operands.multiply`."""
        return self.operands.multiply(self.casts, self.dtype, self.emulate, self.operands.left)


Deferred = tuple[Tensor, Operands]
"""The number of a layer's `Site`, and the operands of its weight gradient."""


def input_gradient(
    left: Scaled,
    right: Scaled,
    dtype: torch.dtype,
    recipe: Recipe,
    emulate: bool,
    deferred: Sequence[Deferred] = (),
) -> Tensor:
    """grad_x = left right^T, and the weight gradients that are to be queued beside it.

    Args:
        left: (N, O), the gradient.
        right: (K, O), the weight.
        deferred: of layers of this recipe, such as this one.
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


# Defined as in products.py. What is queued is only read, hence no alias annotations.
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
    """Multiply, and hand the operands of weight gradients to the queues of their layers.

    That side effect is not in the schema, and safe as in `run_linear_input_gradient`.

    Args:
        matmul: data and scale of the gradient (N, O) and of the weight (K, O).
        operands: by layer, left, right and scales of `Operands`.
        transposed: by layer, two.
        numbers: of the layers' sites, int64 scalars on the CPU. The layers are of one recipe.
        call: empty; see `call_of`.
        dtype: of all gradients.
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
