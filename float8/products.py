"""Matmul of two float8 operands, by the GPU's float8 instructions or emulated.

Emulation multiplies the dequantised operands in float32 (float64 for float64). It rounds operands
in the same way on any device, but is not faster.

Shapes: M rows of the left operand, P rows of the right operand, S columns, which are summed.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from dtron.float8.casting import Scaled, dequantize, wide
from dtron.float8.recipes import Recipe

_CAPABILITY = (8, 9)  # Ada or newer
_HOPPER = (9, 0)
_BLOCKS_CUDA = (12, 9)
_BLOCK = 128


def why_emulated(
    recipe: Recipe,
    device: torch.device,
    dtype: torch.dtype,
    shapes: Iterable[tuple[int, int, int]] = (),
) -> str:
    """Return why a recipe's matmuls are emulated on a device; empty: they are not emulated.

    Args:
        shapes: (tokens, input features, output features) of the layers.
    """
    if device.type != "cuda":
        return "this machine has no GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has no float8 instructions"
    hopper = recipe.kernel in ("blocks", "grouped")
    if recipe.kernel == "none" or (hopper and capability != _HOPPER):
        return f"{recipe.name} has no kernel for {torch.cuda.get_device_name(device)}"
    if recipe.kernel == "blocks":
        cuda = torch.version.cuda or ""
        if not cuda or tuple(int(part) for part in cuda.split(".")) < _BLOCKS_CUDA:
            built = f"with {cuda}" if cuda else "without CUDA"
            return f"{recipe.name} needs CUDA 12.9 or newer, but torch was built {built}"
        odd = next((shape for shape in shapes if any(n % _BLOCK for n in shape)), None)
        if odd:
            sizes = " x ".join(map(str, odd))
            return f"blocks of {_BLOCK} do not divide a layer's tokens x inputs x outputs, {sizes}"
    if dtype != torch.bfloat16:
        return f"the kernels return bfloat16, not {str(dtype).removeprefix('torch.')}"
    return ""


def product(
    left: Scaled, right: Scaled, dtype: torch.dtype, emulate: bool, fast_accumulation: bool
) -> Tensor:
    """Compute left right^T, a sum over S columns.

    Args:
        left: (M, S).
        right: (P, S).
        dtype: dtype of the result.
        emulate: whether to multiply the dequantised operands in float32 or float64.
        fast_accumulation: whether the kernel may accumulate in tensor-core registers, with less
            than float32 precision.
    Returns:
        (M, P) in `dtype`.
    """
    if emulate:
        exact = wide(dtype)
        return (dequantize(left, exact) @ dequantize(right, exact).t()).to(dtype)
    a, b = left.data.contiguous(), right.data.contiguous()
    if left.cast.tile[1] == _BLOCK:
        return blocks_product(a, b, 1.0 / left.scale, 1.0 / right.scale, dtype)
    scales = [1.0 / left.scale, 1.0 / right.scale.t()]
    if (
        left.cast.whole != right.cast.whole
    ):  # the kernel takes per-tensor scales of both operands, or row scales of both
        scales = [scales[0].expand(a.shape[0], 1), scales[1].expand(1, b.shape[0])]
    scales = [scale.contiguous() for scale in scales]
    return torch.ops.dtron.float8_product(a, b, *scales, dtype, fast_accumulation)


# Separate operators, so that torch.compile does not choose strides and does not need to lower
# torch's own operators, which it does differently in each version. Not custom_op: its calls cost
# the host more.
torch.library.define(
    "dtron::float8_product",
    "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, ScalarType dtype, bool fast) -> Tensor",
    tags=torch.Tag.needs_exact_strides,
)


def multiply(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Compute a b^T, a sum over S columns, with the GPU's float8 instructions.

    Args:
        a: (M, S), contiguous.
        b: (P, S), contiguous.
        scale_a: float32, factor of a: (1, 1), or (M, 1) for rows.
        scale_b: float32, factor of b: (1, 1), or (1, P) for rows; both scales are for rows, or
            neither.
        fast: whether the kernel may accumulate in less than float32.
    Returns:
        (M, P) in `dtype`.
    """
    whole = scale_a.numel() == scale_b.numel() == 1
    scaling = ScalingType.TensorWise if whole else ScalingType.RowWise
    return torch.nn.functional.scaled_mm(
        a,
        b.t(),
        scale_a=scale_a,
        scale_recipe_a=scaling,
        scale_b=scale_b,
        scale_recipe_b=scaling,
        output_dtype=dtype,
        use_fast_accum=fast,
    )


torch.library.impl("dtron::float8_product", "default", multiply)


@torch.library.register_fake("dtron::float8_product")
def _(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: Any, fast: bool) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


def multiply_blocks(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype
) -> Tensor:
    """Compute a b^T with separate scales for every 128 of the S summed columns.

    Args:
        a: (M, S), E4M3, contiguous; S a multiple of 128.
        b: (P, S), E4M3, contiguous; P a multiple of 128.
        scale_a: float32 (M, S / 128), factors of a.
        scale_b: float32 (P, S / 128) or (P / 128, S / 128), factors of b.
    Returns:
        (M, P) in `dtype`.
    """
    rows, missing = a.shape[0], -a.shape[0] % 16
    if missing:  # as in sampling; the result is cut to `rows`
        a = torch.cat([a, a.new_zeros(missing, a.shape[1])])
        scale_a = torch.cat([scale_a, scale_a.new_ones(missing, scale_a.shape[1])])
    lines = scale_b.shape[0] == b.shape[0]
    out = torch.nn.functional.scaled_mm(
        a,
        b.t(),
        scale_a=scales_of_lines(scale_a),
        scale_recipe_a=ScalingType.BlockWise1x128,
        scale_b=scales_of_lines(scale_b) if lines else scales_of_squares(scale_b),
        scale_recipe_b=ScalingType.BlockWise1x128 if lines else ScalingType.BlockWise128x128,
        output_dtype=dtype,
    )
    return out.narrow(0, 0, rows).clone() if missing else out


# A separate operator, so that torch.compile does not choose the strides of scales.
blocks_product = torch.library.custom_op(
    "dtron::float8_blocks_product", multiply_blocks, mutates_args=()
)


@blocks_product.register_fake
def _(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


def scales_of_lines(scale: Tensor) -> Tensor:
    """Return scales (M, S / 128) with strides (1, M), the layout of cuBLAS for 1 x 128 tiles."""
    return scale.t().clone(memory_format=torch.contiguous_format).t()


def scales_of_squares(scale: Tensor) -> Tensor:
    """Return scales of 128 x 128 tiles, (P / 128, S / 128), in the layout of cuBLAS.

    The result is (L, P / 128) with strides (1, L), where L is S / 128 rounded up to a multiple of
    four.
    """
    padded = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4))
    return padded.clone(memory_format=torch.contiguous_format).t()
