"""Experts' grouped products in float8, a scale a row of both operands.

    output        x8 (N, K), a scale a row     weight8 (E, M, K), a scale a column of what comes out
    grad_input    g8 (N, M), likewise          weight8^T (E, K, M), cast again along M
    grad_weight   in the dtype of computation: it sums over an expert's rows, and a scale for each
                  column and expert would need their offsets

Scales are of single rows, so that it makes no difference on which rank a row is, nor which rows of
others are there; where etp splits the width of experts, rows of `down` are shorter.

Shapes: N rows sorted by expert, E experts, K input and M output features; offsets as in
`dtron/kernels/grouped.py`.
Source: rowwise as torchao.float8 and torch's scaled_grouped_mm have it.
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import ScalingType

from dtron.errors import ConfigError
from dtron.float8.casting import Scaled, dequantize, quantize, wide
from dtron.float8.convert import MULTIPLE
from dtron.float8.recipes import EXPERTS, Product
from dtron.kernels.grouped import grouped_gradient, grouped_matmul
from dtron.parallelisms.pipeline.weight_gradients import GroupedMatmul, call_of, site_of


def convert_experts(model: nn.Module, names: Collection[str], emulate: bool) -> None:
    """Make the named modules, which multiply by their `multiply`, do so in float8, in place."""
    for name in names:
        model.get_submodule(name).multiply = Float8Grouped(emulate)  # type: ignore[assignment]


def check_sizes(fqn: str, module: nn.Module, parts: int) -> None:
    """Refuse experts whose matrices float8 kernels do not take.

    Args:
        parts: into which etp splits their width.
    Raises:
        ConfigError: a dim is no multiple of 16.
    """
    down = module.get_parameter("down")
    if down.shape[1] % MULTIPLE or down.shape[2] % (parts * MULTIPLE):
        raise ConfigError(
            f"float8.experts: {fqn} has experts of {down.shape[2]} x {down.shape[1]} in "
            f"{parts} parts (parallel.etp), and float8 needs multiples of {MULTIPLE}; set "
            "float8.experts = false"
        )


class Float8Grouped:
    """In place of `grouped_matmul`: its numbers in float8.

    Args:
        emulate: multiply what the float8 numbers stand for.
    """

    def __init__(self, emulate: bool) -> None:
        self.emulate = emulate

    def __call__(self, x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        """(N, K), (E, M, K), int32 (E,) -> (N, M); rows after the last expert's are undefined."""
        return self.deferred(x, weight, offsets, None)

    def deferred(self, x: Tensor, weight: Tensor, offsets: Tensor, number: Tensor | None) -> Tensor:
        """Multiply by a detached weight, whose gradient goes to a queue (`DeferredMultiply`)."""
        out = _Grouped.apply(x, weight, offsets, number, self.emulate)
        assert isinstance(out, Tensor)
        return out


@torch.compiler.allow_in_graph  # as in linear.py
class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor, number: Tensor | None, emulate: bool
    ) -> Tensor:
        ctx.save_for_backward(x, weight, offsets, number)
        ctx.emulate = emulate
        return _product(x, weight, offsets, EXPERTS.output, emulate)

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


def _product(left: Tensor, right: Tensor, offsets: Tensor, casts: Product, emulate: bool) -> Tensor:
    """(N, S), (E, P, S) -> (N, P) in the dtype of `left`."""
    a, b = _quantize(left, right, casts)
    return _multiply(a, b, offsets, left.dtype, casts, emulate)


def _quantize(left: Tensor, right: Tensor, casts: Product) -> tuple[Scaled, Scaled]:
    """(N, S), (E, P, S) -> (N, S), (E P, S)."""
    return quantize(left, casts.left), quantize(right.flatten(0, 1), casts.right)


def _multiply(
    a: Scaled,
    b: Scaled,
    offsets: Tensor,
    dtype: torch.dtype,
    casts: Product,
    emulate: bool,
) -> Tensor:
    """(N, S), (E P, S) -> (N, P) in `dtype`."""
    if not emulate:
        return multiply_grouped(a, b, offsets, dtype, casts.fast_accumulation)
    exact = wide(dtype)
    stacked = dequantize(b, exact).unflatten(0, (len(offsets), -1))
    return grouped_matmul(dequantize(a, exact), stacked, offsets).to(dtype)


def multiply_grouped(
    left: Scaled, right: Scaled, offsets: Tensor, dtype: torch.dtype, fast_accumulation: bool
) -> Tensor:
    """left_e right_e^T for the rows of each expert, by the GPU.

    Args:
        left: (N, S), sorted by expert, a scale a row.
        right: (E P, S), likewise.
        offsets: int32 (E,), where each expert's rows end.
        dtype: of the result, bfloat16.
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


# An operator, as in products.py: torch 2.11 and 2.13 cannot compile torch's own.
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
    """(N, S), (E, P, S), contiguous, and float32 scales (N,), (E, P) -> (N, P)."""
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


# Of the input's gradient; queues the weight's, as `float8_input_gradient` does.
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
    """Multiply, and hand the operands of the weight's gradient to the queue of its site.

    Args:
        a: float8 (N, M), the gradient cast by rows, with float32 scales (N, 1).
        b: float8 (E K, M), the weight, with float32 scales (E K, 1).
        grad: (N, M), the gradient.
        x: (N, K), the input, likewise as it came.
        offsets: int32 (E,), where each expert's rows end.
        number: of the site, int64 scalar on the CPU.
        call: empty; see `call_of`.
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
