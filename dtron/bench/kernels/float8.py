"""Problems of `dtron bench kernels` that cast to float8."""

import torch
import torch.nn.functional as F
from torch import Tensor

from dtron.bench.kernels.problem import (
    Figures,
    KernelRow,
    Problem,
    Shape,
    Tensors,
    needs_triton,
    normal,
)
from dtron.float8.casting import dequantize, quantize
from dtron.float8.recipes import RECIPES
from dtron.float8.scales import scale_of
from dtron.kernels.float8 import (
    cast_both,
    gated_amax,
    gated_backward_amax,
    gated_backward_cast,
    gated_cast,
)
from dtron.kernels.float8_rows import packed, unpacked

_INPUT = RECIPES["tensorwise"].output.left
_GRADIENT = RECIPES["tensorwise"].grad_input.left


def _draw_matrix(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Draw a matrix and compute its float8 scale."""
    (x,) = normal(dtype, device, shape)
    return [x, scale_of(x.abs().amax().view(1, 1), _GRADIENT)]


def _cast_formula(x: Tensor, scale: Tensor) -> Tensors:
    """Return a matrix in float8, plain and transposed."""
    done = quantize(x, _GRADIENT, scale=scale).data
    return done, done.t().contiguous()


# Inputs are gate, up, and the gradient of silu(gate) * up.


def _gated_formula(gate: Tensor, up: Tensor, _: Tensor) -> Tensors:
    hidden = quantize(F.silu(gate.float()) * up.float(), _INPUT)
    return hidden.data, hidden.scale


def _gated_formula_backward(outputs: Tensors, *inputs: Tensor) -> Tensors:
    """Return the gradients of gate and up and the transposed output, in float8."""
    gate, up, grad = (x.float() for x in inputs)
    s = gate.sigmoid()
    both = (grad * up * s * (1 + gate * (1 - s)), grad * gate * s)
    found = [quantize(x, _GRADIENT).data for x in both]
    hidden = quantize(gate * s * up, _INPUT, scale=outputs[1]).data
    return *found, hidden.t().contiguous()


def _gated_kernel(gate: Tensor, up: Tensor, _: Tensor) -> Tensors:
    scale = scale_of(gated_amax(gate, up), _INPUT)
    return gated_cast(gate, up, scale, _INPUT.dtype), scale


def _gated_kernel_backward(outputs: Tensors, *inputs: Tensor) -> Tensors:
    scales = scale_of(gated_backward_amax(*inputs), _GRADIENT)
    return gated_backward_cast(*inputs, scales, outputs[1], _GRADIENT.dtype, _INPUT.dtype)


def _gated_flops(shape: Shape) -> Figures:
    """Return the FLOPs of the gated unit.

    Per element, the forward has 6 for the output and its cast; the backward has 20 for both
    gradients, the recomputed output and the casts of all three.
    """
    size = shape[0] * shape[1]
    return 6.0 * size, 20.0 * size


def _gated_bytes(gate: Tensor, up: Tensor, grad: Tensor) -> Figures:
    """Return the bytes that the gated unit reads and writes.

    Inputs are read twice, for the maximum and for the cast; a result has one byte per element.
    """
    forward = 2.0 * (gate.nbytes + up.nbytes)
    return forward + gate.numel(), forward + 2 * grad.nbytes + 3 * gate.numel()


def _carried_formula(x: Tensor) -> Tensors:
    """Cast to float8 and back to the dtype of x, with the same tiles as the kernel."""
    cast = RECIPES["blockwise"].output.left
    return [dequantize(quantize(x, cast), torch.float32).to(x.dtype)]


CAST = Problem(
    modules=("float8", "float8_triton"),
    dims="tokens, width",
    shapes={"cuda": (16384, 4096), "cpu": (512, 256)},
    draw=_draw_matrix,
    flops=lambda shape: (2.0 * shape[0] * shape[1],),
    n_bytes=lambda x, _: (x.nbytes + 2.0 * x.numel(),),
    rows=(
        KernelRow("formula", _cast_formula),
        KernelRow("dtron", lambda *x: cast_both(*x, _GRADIENT.dtype), None, needs_triton),
    ),
    parts=("cast",),
    compared=None,
)

GATED = Problem(
    modules=("float8", "float8_triton"),
    dims="tokens, hidden width",
    shapes={"cuda": (16384, 14336), "cpu": (512, 256)},
    draw=lambda shape, dtype, device: normal(dtype, device, shape, shape, shape),
    flops=_gated_flops,
    n_bytes=_gated_bytes,
    rows=(
        KernelRow("formula", _gated_formula, _gated_formula_backward),
        KernelRow("dtron", _gated_kernel, _gated_kernel_backward, needs_triton),
    ),
)

ROWS = Problem(
    modules=("float8_rows", "float8_rows_triton"),
    dims="rows, width",
    shapes={"cuda": (98304, 2048), "cpu": (512, 256)},
    draw=lambda shape, dtype, device: normal(dtype, device, shape),
    flops=lambda shape: (4.0 * shape[0] * shape[1],),
    # Rows read and written, float8 rows written and read; scales are negligible.
    n_bytes=lambda x: (2.0 * x.nbytes + 2.0 * x.numel(),),
    rows=(
        KernelRow("formula", _carried_formula),
        KernelRow("dtron", lambda x: [unpacked(packed(x), x.shape[1], x.dtype)]),
    ),
    parts=("both casts",),
)
