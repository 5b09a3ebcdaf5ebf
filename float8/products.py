"""Matmul of two float8 operands, by the GPU's float8 instructions or emulated.

Emulation multiplies the dequantised operands in float32 (float64 for float64): the same rounding of
the operands on any device, without a gain in speed.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import ScalingType

from dtron.float8.casting import Scaled, dequantize, wide
from dtron.float8.recipes import Recipe

_CAPABILITY = (8, 9)  # Ada and Hopper on
_HOPPER = (9, 0)
_BLOCKS_CUDA = (12, 9)
_BLOCK = 128


def why_emulated(
    recipe: Recipe,
    device: torch.device,
    dtype: torch.dtype,
    shapes: Iterable[tuple[int, int, int]] = (),
) -> str:
    """Return why a recipe's matmuls are emulated on this device; empty: they are not.

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
        if tuple(int(part) for part in cuda.split(".")) < _BLOCKS_CUDA:
            return f"{recipe.name} has kernels from CUDA 12.9 on, and torch was built with {cuda}"
        odd = next((shape for shape in shapes if any(n % _BLOCK for n in shape)), None)
        if odd:
            sizes = " x ".join(map(str, odd))
            return f"blocks of {_BLOCK} do not divide a layer's tokens x inputs x outputs, {sizes}"
    if dtype != torch.bfloat16:
        return f"the kernels give bfloat16, not {str(dtype).removeprefix('torch.')}"
    return ""


def product(
    left: Scaled, right: Scaled, dtype: torch.dtype, emulate: bool, fast_accumulation: bool
) -> Tensor:
    """Compute left right^T.

    Args:
        left: (M, S).
        right: (P, S).
        dtype: of the result.
        emulate: multiply the dequantised operands in float32 or float64.
        fast_accumulation: let the kernel accumulate in tensor-core registers, with less than
            float32 precision.
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
    ):  # the kernel takes two per-tensor scales, or row scales of both operands
        scales = [scales[0].expand(a.shape[0], 1), scales[1].expand(1, b.shape[0])]
    scales = [scale.contiguous() for scale in scales]
    return torch.ops.dtron.float8_product(a, b, *scales, dtype, fast_accumulation)


# Separate operators, so that torch.compile does not choose strides and does not need to lower
# torch's own operators, which differs between versions. Not custom_ops, whose calls cost the host
# more.
torch.library.define(
    "dtron::float8_product",
    "(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, ScalarType dtype, bool fast) -> Tensor",
    tags=torch.Tag.needs_exact_strides,
)


def multiply(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype, fast: bool
) -> Tensor:
    """Compute a b^T with the GPU's float8 instructions.

    Args:
        a: (M, S), contiguous.
        b: (P, S), likewise.
        scale_a: float32, factor of a: (1, 1), or (M, 1) for rows.
        scale_b: likewise (1, 1) or (1, P); both are for rows or neither.
        fast: see `product`.
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
    """Compute a b^T with scales for each 128 elements of the sum.

    Args:
        a: (M, S), E4M3, contiguous; S a multiple of 128.
        b: (P, S), likewise; P a multiple of 128.
        scale_a: float32 (M, S / 128), factors of a.
        scale_b: float32 (P, S / 128) or (P / 128, S / 128).
    Returns:
        (M, P) in `dtype`.
    """
    rows, missing = a.shape[0], -a.shape[0] % 16
    if missing:  # as in sampling; the padding rows are removed again
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
    """Return scales (P / 128, S / 128) as (L, P / 128) with strides (1, L), where L is S / 128
    rounded up to a multiple of four: the layout of cuBLAS for 128 x 128 tiles."""
    padded = torch.nn.functional.pad(scale, (0, -scale.shape[1] % 4))
    return padded.clone(memory_format=torch.contiguous_format).t()
