"""The product of two float8 operands: by the GPU's own instructions, or emulated.

Emulation multiplies what the float8 numbers stand for in float32 (float64 for float64): the same
rounding of the operands, on any device, without any gain in speed.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from dtron.float8.casting import Scaled, dequantize, wide
from dtron.float8.recipes import Recipe

_CAPABILITY = (8, 9)  # Ada and Hopper on
_BLOCKS_CAPABILITY = (9, 0)  # Hopper alone
_BLOCK = 128


def why_emulated(
    recipe: Recipe,
    device: torch.device,
    dtype: torch.dtype,
    shapes: Iterable[tuple[int, int, int]] = (),
) -> str:
    """Why products of a recipe are emulated on this device; empty where they are not.

    Args:
        shapes: tokens, input and output features of the layers.
    """
    if device.type != "cuda":
        return "this machine has no GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has no float8 instructions"
    if recipe.kernel == "none" or (recipe.kernel == "blocks" and capability != _BLOCKS_CAPABILITY):
        return f"{recipe.name} has no kernel for {torch.cuda.get_device_name(device)}"
    if recipe.kernel == "blocks":
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
    """left right^T.

    Args:
        left: (M, S).
        right: (P, S).
        dtype: of the result.
        emulate: multiply in float32 or float64 what the operands stand for.
        fast_accumulation: let the kernel add up in its own registers, of less than float32.
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
    if left.cast.whole != right.cast.whole:  # the kernel takes two whole ones, or rows of both
        scales = [scales[0].expand(a.shape[0], 1), scales[1].expand(1, b.shape[0])]
    return torch._scaled_mm(
        a,
        b.t(),
        scale_a=scales[0].contiguous(),
        scale_b=scales[1].contiguous(),
        out_dtype=dtype,
        use_fast_accum=fast_accumulation,
    )


@torch.library.custom_op("dtron::float8_blocks_product", mutates_args=())
def blocks_product(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype
) -> Tensor:
    """a b^T, scales undone for each 128 elements of the sum; one operator, so that torch.compile
    does not choose the layout of scales.

    Args:
        a: (M, S), E4M3, contiguous; S a multiple of 128.
        b: (P, S), likewise; P a multiple of 16.
        scale_a: float32 (M, S / 128), what the numbers of a are multiplied by.
        scale_b: float32 (P or P / 128, S / 128).
    Returns:
        (M, P) in `dtype`.
    """
    rows, missing = a.shape[0], -a.shape[0] % 16
    if missing:  # as in sampling; zeros cast as float8 stay zeros
        a = torch.cat([a, a.new_zeros(missing, a.shape[1])])
        scale_a = torch.cat([scale_a, scale_a.new_ones(missing, scale_a.shape[1])])
    scales = (_laid_out(scale_a, a), _laid_out(scale_b, b).t())
    out = torch._scaled_mm(a, b.t(), scale_a=scales[0], scale_b=scales[1], out_dtype=dtype)
    return out[:rows].clone() if missing else out


@blocks_product.register_fake
def _(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[0], dtype=dtype)


def _laid_out(scale: Tensor, operand: Tensor) -> Tensor:
    """As cuBLAS reads it: rows of tiles contiguous along M, blocks along S, padded to four."""
    if scale.shape[0] == operand.shape[0]:
        return scale.t().contiguous().t()
    rows, columns = scale.shape
    padded = scale.new_zeros(rows, -(-columns // 4) * 4)
    padded[:, :columns] = scale
    return padded[:, :columns]
