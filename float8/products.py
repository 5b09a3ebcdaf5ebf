"""The product of two float8 operands: by the GPU's own instructions, or emulated.

Emulation multiplies what the float8 numbers stand for in float32 (float64 for float64): the same
rounding of the operands, on any device, without any gain in speed.
"""

import torch
from torch import Tensor

from dtron.float8.casting import Scaled, dequantize, wide
from dtron.float8.recipes import Recipe

_CAPABILITY = (8, 9)  # Ada and Hopper on


def why_emulated(recipe: Recipe, device: torch.device, dtype: torch.dtype) -> str:
    """Why products of a recipe are emulated on this device; empty where they are not."""
    if device.type != "cuda":
        return "this machine has no GPU"
    capability = torch.cuda.get_device_capability(device)
    if capability < _CAPABILITY:
        return f"{torch.cuda.get_device_name(device)} has no float8 instructions"
    if recipe.kernel == "none":
        return f"{recipe.name} has no kernel for {torch.cuda.get_device_name(device)} yet"
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
