"""Grouped matmuls of experts in float8, with one scale per row of both operands.

    output        x8 (N, K), a scale per row    weight8 (E, M, K), a scale per expert and row
    grad_input    g8 (N, M), a scale per row    weight8^T (E, K, M), cast again along M
    grad_weight   not in float8: it sums over an expert's rows, and scales per column and expert
                  would need the offsets

A scale depends only on its row, so that results do not depend on the rank that computes the row or
on other rows. If etp shards the width of experts, each rank's shard of a row has its own scale.

Shapes: N rows sorted by expert, E experts, K input and M output features; offsets as in
`dtron/kernels/grouped.py`.
Source: rowwise scaling of torchao.float8 and of torch's scaled_grouped_mm.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import ScalingType

from dtron.errors import ConfigError
from dtron.float8.casting import Scaled, dequantize, quantize, wide
from dtron.float8.convert import MULTIPLE
from dtron.float8.recipes import EXPERTS, MatmulCasts
from dtron.kernels.grouped import grouped_gradient, grouped_matmul
from dtron.parallelisms.pipeline.weight_gradients import GroupedMatmul, call_of, site_of


def convert_experts(model: nn.Module, names: Collection[str], emulate: bool) -> None:
    """Replace, in place, `multiply` of the named modules by a float8 grouped matmul."""
    for name in names:
        model.get_submodule(name).multiply = Float8Grouped(emulate)  # type: ignore[assignment]


def check_sizes(fqn: str, module: nn.Module, parts: int) -> None:
    """Check that float8 kernels support the experts' matrices.

    Args:
        parts: number of shards of the experts' width (parallel.etp).
    Raises:
        ConfigError: a dim is not a multiple of 16.
    """
    down = module.get_parameter("down")
    if down.shape[1] % MULTIPLE or down.shape[2] % (parts * MULTIPLE):
        raise ConfigError(
            f"float8.experts = true: experts of {fqn} are {down.shape[2]} x {down.shape[1]} with "
            f"parallel.etp = {parts}, and float8 needs shards with dims that are multiples of "
            f"{MULTIPLE}; set float8.experts = false"
        )


class Float8Grouped:
    """float8 replacement of `grouped_matmul`.

    Args:
        emulate: whether to multiply the dequantised operands in high precision.
    """

    def __init__(self, emulate: bool) -> None:
        self.emulate = emulate

    def __call__(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        """Multiply the rows x (N, K) of each expert by its matrix in `weight` (E, M, K): (N, M).

        Rows after the last of `offsets`, int32 (E,), are undefined.
        """
        return self.deferred(x, weight, offsets, None)

    def deferred(self, x: Tensor, weight: Tensor, offsets: Tensor, number: Tensor | None) -> Tensor:
        """Multiply as `__call__` does.

        With a `number`, `weight` is detached, and the backward queues the operands of its gradient
        (see `DeferredMultiply`).
        """
        out = _Grouped.apply(x, weight, offsets, number, self.emulate)
        assert isinstance(out, Tensor)
        return out


@torch.compiler.allow_in_graph  # as in linear.py
class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor, number: Tensor | None, emulate: bool
    ) -> Tensor:
        trained = number is not None or ctx.needs_input_grad[1]
        ctx.save_for_backward(x if trained else None, weight, offsets, number)
        ctx.emulate = emulate
        a, b = _quantize(x, weight, EXPERTS.output)
        return _multiply(a, b, offsets, x.dtype, EXPERTS.output, emulate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, offsets, number = ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            turned, casts = weight.transpose(1, 2), EXPERTS.grad_input
            a, b = _quantize(grad, turned, casts)
            if number is None:
                of_x = _multiply(a, b, offsets, grad.dtype, casts, ctx.emulate)
            else:
                queued = [grad, x, offsets, number, call_of(grad)]
                of_x = torch.ops.dtron.float8_grouped_input_gradient(
                    a.data, a.scale, b.data, b.scale, *queued, ctx.emulate
                )
        if ctx.needs_input_grad[1]:
            of_weight = grouped_gradient(grad, x, offsets)
        return of_x, of_weight, None, None, None


def _quantize(left: Tensor, right: Tensor, casts: MatmulCasts) -> tuple[Scaled, Scaled]:
    """Cast tokens (N, S) and weights (E, P, S) of E experts to float8: (N, S), (E P, S)."""
    return quantize(left, casts.left), quantize(right.flatten(0, 1), casts.right)


def _multiply(
    a: Scaled,
    b: Scaled,
    offsets: Tensor,
    dtype: torch.dtype,
    casts: MatmulCasts,
    emulate: bool,
) -> Tensor:
    """Multiply each expert's rows, with float8 instructions or emulated.

    Shapes, with N rows, S summed elements, E experts and P outputs: a (N, S), b (E P, S) -> (N, P)
    in `dtype`.
    """
    if not emulate:
        return multiply_grouped(a, b, offsets, dtype, casts.fast_accumulation)
    exact = wide(dtype)
    stacked = dequantize(b, exact).unflatten(0, (len(offsets), -1))
    return grouped_matmul(dequantize(a, exact), stacked, offsets).to(dtype)


def multiply_grouped(
    left: Scaled, right: Scaled, offsets: Tensor, dtype: torch.dtype, fast_accumulation: bool
) -> Tensor:
    """Compute left_e right_e^T for each expert e, with the GPU's float8 instructions.

    Args:
        left: (N rows, S summed columns), sorted by expert, one scale per row.
        right: (E P, S): P output columns of each of E experts, one scale per row.
        offsets: int32 (E,), where each expert's rows end.
        dtype: dtype of the result, bfloat16.
    Returns:
        (N, P) in `dtype`.
    """
    by_expert = (len(offsets), -1)
    return torch.ops.dtron.float8_grouped_product(
        left.data.contiguous(),
        right.data.contiguous().unflatten(0, by_expert),
        (1.0 / left.scale).flatten(),
        (1.0 / right.scale).view(by_expert),
        offsets,
        dtype,
        fast_accumulation,
    )


# A custom operator, as in products.py: torch 2.11 and 2.13 cannot compile torch's operator.
torch.library.define(
    "dtron::float8_grouped_product",
    "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor offsets, ScalarType dtype, "
    "bool fast) -> Tensor",
    tags=torch.Tag.needs_exact_strides,
)


def multiply(
    a: Tensor,
    b: Tensor,
    scale_a: Tensor,
    scale_b: Tensor,
    offsets: Tensor,
    dtype: torch.dtype,
    fast: bool,
) -> Tensor:
    """Compute a_e b_e^T for each expert e: a (N, S), b (E, P, S) -> (N, P).

    N rows, S summed elements, E experts, P outputs. a and b are contiguous, with float32 scales
    (N,) and (E, P).
    """
    return torch.nn.functional.scaled_grouped_mm(  # type: ignore[attr-defined]
        a,
        b.transpose(1, 2),
        scale_a=scale_a,
        scale_recipe_a=ScalingType.RowWise,
        scale_b=scale_b,
        scale_recipe_b=ScalingType.RowWise,
        offs=offsets,
        output_dtype=dtype,
        use_fast_accum=fast,
    )


torch.library.impl("dtron::float8_grouped_product", "default", multiply)


@torch.library.register_fake("dtron::float8_grouped_product")
def _(a: Tensor, b: Tensor, *others: Any) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=others[3])


# Computes the input's gradient and queues the weight's gradient, like `float8_input_gradient`.
torch.library.define(
    "dtron::float8_grouped_input_gradient",
    "(Tensor a, Tensor scale_a, Tensor b, Tensor scale_b, Tensor grad, Tensor x, Tensor offsets, "
    "Tensor number, Tensor call, bool emulate) -> Tensor",
    tags=torch.Tag.needs_exact_strides,
)


def run_input_gradient(
    a: Tensor,
    scale_a: Tensor,
    b: Tensor,
    scale_b: Tensor,
    grad: Tensor,
    x: Tensor,
    offsets: Tensor,
    number: Tensor,
    call: Tensor,
    emulate: bool,
) -> Tensor:
    """Compute the input's gradient, and queue the operands of the weight's gradient.

    Args:
        a: float8 (N, M), the gradient cast by rows, with float32 scales (N, 1).
        b: float8 (E K, M), the weight, with float32 scales (E K, 1).
        grad: (N, M), the gradient.
        x: (N, K), the input; grad and x are not in float8.
        offsets: int32 (E,), where each expert's rows end.
        number: int64 scalar on the CPU, key of the weight's `Site`.
        call: (0,), from `call_of`; keeps the compiler from merging equal calls.
    Returns:
        (N, K) in the dtype of `grad`.
    """
    grad = grad.contiguous()
    site_of(number).take(GroupedMatmul(grad, x, offsets))
    casts = EXPERTS.grad_input
    left, right = Scaled(a, scale_a, casts.left), Scaled(b, scale_b, casts.right)
    return _multiply(left, right, offsets, grad.dtype, casts, emulate)


torch.library.impl("dtron::float8_grouped_input_gradient", "default", run_input_gradient)


@torch.library.register_fake("dtron::float8_grouped_input_gradient")
def _(a: Tensor, scale_a: Tensor, b: Tensor, *others: Any) -> Tensor:
    grad, x = others[1:3]
    return grad.new_empty(x.shape)
