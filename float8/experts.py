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
        """(N, K), (E, M, K), int32 (E,) -> (N, M); rows after the last expert's are anything."""
        out = _Grouped.apply(x, weight, offsets, self.emulate)
        assert isinstance(out, Tensor)
        return out


@torch.compiler.allow_in_graph  # as in linear.py
class _Grouped(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor, emulate: bool) -> Tensor:
        ctx.save_for_backward(x, weight, offsets)
        ctx.emulate = emulate
        return _product(x, weight, offsets, EXPERTS.output, emulate)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, offsets = ctx.saved_tensors
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            turned = weight.transpose(1, 2)
            of_x = _product(grad, turned, offsets, EXPERTS.grad_input, ctx.emulate)
        if ctx.needs_input_grad[1]:
            of_weight = grouped_gradient(grad, x, offsets)
        return of_x, of_weight, None, None


def _product(left: Tensor, right: Tensor, offsets: Tensor, casts: Product, emulate: bool) -> Tensor:
    """(N, S), (E, P, S) -> (N, P) in the dtype of `left`."""
    a, b = quantize(left, casts.left), quantize(right.flatten(0, 1), casts.right)
    if not emulate:
        return multiply_grouped(a, b, offsets, left.dtype, casts.fast_accumulation)
    exact = wide(left.dtype)
    stacked = dequantize(b, exact).view(right.shape)
    return grouped_matmul(dequantize(a, exact), stacked, offsets).to(left.dtype)


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
