"""Casts to float8 in one pass over memory: plain, transposed, both, and fused with gated units.

Hopper's float8 matmuls sum over the contiguous dim of both operands, so an operand of two matmuls
is needed both plain and transposed. torch.compile writes both from one kernel at half the bandwidth
or less, because of the transposed store; these kernels process tiles.

A gated unit, with gradient c of its output h:

    h = silu(a) b      a' = c b s (1 + a (1 - s)),  b' = c a s,   s = sigmoid(a)

takes one pass for the largest magnitude, which gives the scale, and one pass that casts. Both
passes compute h, a' and b' in float32; only their float8 values are stored.

Bytes per element, with operands of two bytes:

    cast_plain         2 + 1          gated_amax               4
    turned             1 + 1          gated_cast               4 + 1
    cast_turned        2 + 1          gated_backward_amax      6
    cast_both          2 + 2          gated_backward_cast      6 + 3

GPUs with float8 run Triton kernels, other devices the same formulas in torch. Values are x * scale,
clamped to the range of the dtype and rounded to nearest. NaN stays NaN in casts; the kernels'
maxima ignore NaN, so that the cast, not the scale, makes a bad step non-finite.

Shapes: M rows, N columns; all operands are contiguous.
Source: gated units, arXiv:2002.05202.
"""

import math
from typing import Any

import torch
from torch import Tensor

TILE = (32, 128)
"""Rows and columns of a program's tile: 32 rows make the 32-byte sectors of a transposed store."""
BLOCK, BLOCKS = 1024, 16
SMALLEST = 2.0**-100
"""Lower bound of maxima, so that a scale and its inverse are finite in float32. It is far below the
gradients of a loss that is divided by the tokens of a large batch."""
_BYTES_TILE = (64, 256)
_WARPS = 8


def _by_triton(x: Tensor) -> bool:
    """Whether to use Triton: its kernels compute in float32, and need Ada or newer for E4M3."""
    return x.is_cuda and x.dtype != torch.float64 and torch.cuda.get_device_capability() >= (8, 9)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rounded(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return x * scale in float8, for any scale that broadcasts.

    This is plain PyTorch code, which inductor fuses.
    """
    largest = torch.finfo(dtype).max
    return (x * scale).clamp(-largest, largest).to(dtype)


def _gradients(gate: Tensor, up: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of gate and up, and silu(gate) * up; `grad`: gradient of the latter."""
    a, b, c = _wide(gate), _wide(up), _wide(grad)
    s = a.sigmoid()
    return c * b * s * (1 + a * (1 - s)), c * a * s, a * s * b


def _transposed(x: Tensor) -> Tensor:
    return x.t().clone(memory_format=torch.contiguous_format)


def _empty_turned(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape[1], x.shape[0], dtype=dtype)


@torch.library.custom_op("dtron::float8_cast", mutates_args=())
def cast_plain(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast a matrix to float8 in eager code.

    An example is the cast of weight shards before FSDP gathers them.

    Args:
        x: (M, N).
        scale: one value, float32 (float64 for a float64 x).
        dtype: float8.
    Returns:
        (M, N), float8.
    """
    if _by_triton(x):
        return _cast_plain_on_gpu(x, scale, dtype)
    return rounded(_wide(x), scale.view(()), dtype)


@torch.library.custom_op("dtron::float8_turned", mutates_args=())
def turned(x: Tensor, after: Tensor) -> Tensor:
    """Transpose a float8 matrix into contiguous memory.

    Args:
        x: (M, N), float8.
        after: a gradient, which is not read. The dependence on it makes torch.compile transpose in
            the backward; otherwise the forward could make a transposed copy of each weight, which
            would be kept until the backward.
    Returns:
        (N, M), float8.
    """
    if _by_triton(x):
        return _turned_on_gpu(x, after)
    return _transposed(x)


@torch.library.custom_op("dtron::float8_cast_turned", mutates_args=())
def cast_turned(x: Tensor, scale: Tensor, dtype: torch.dtype, after: Tensor) -> Tensor:
    """Cast to float8 and transpose.

    Args:
        x: (M, N).
        scale: one value, float32 (float64 for a float64 x).
        dtype: float8.
        after: a gradient, which is not read; it delays the transpose to the backward (`turned`).
    Returns:
        (N, M), float8.
    """
    if _by_triton(x):
        return _cast_turned_on_gpu(x, scale, dtype, after)
    return _transposed(rounded(_wide(x), scale.view(()), dtype))


@torch.library.custom_op("dtron::float8_cast_both", mutates_args=())
def cast_both(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cast to float8, plain and transposed.

    Args:
        x: (M, N).
        scale: one value, float32 (float64 for a float64 x).
        dtype: float8.
    Returns:
        (M, N) and the transposed (N, M), float8.
    """
    if _by_triton(x):
        return _cast_both_on_gpu(x, scale, dtype)
    straight = rounded(_wide(x), scale.view(()), dtype)
    return straight, _transposed(straight)


@torch.library.custom_op("dtron::float8_gated_amax", mutates_args=())
def gated_amax(gate: Tensor, up: Tensor) -> Tensor:
    """Return the largest magnitude of silu(gate) up.

    Args:
        gate: (M, N).
        up: (M, N).
    Returns:
        (1, 1), float32 (float64 for float64).
    """
    if _by_triton(gate):
        return _gated_amax_on_gpu(gate, up)
    a, b = _wide(gate), _wide(up)
    return (a * a.sigmoid() * b).abs().amax().view(1, 1)


@torch.library.custom_op("dtron::float8_gated_cast", mutates_args=())
def gated_cast(gate: Tensor, up: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute silu(gate) up in float8. `gate`, `up`: (M, N); `scale`: one value.

    Returns:
        (M, N), float8.
    """
    if _by_triton(gate):
        return _gated_cast_on_gpu(gate, up, scale, dtype)
    a, b = _wide(gate), _wide(up)
    return rounded(a * a.sigmoid() * b, scale.view(()), dtype)


@torch.library.custom_op("dtron::float8_gated_backward_amax", mutates_args=())
def gated_backward_amax(gate: Tensor, up: Tensor, grad: Tensor) -> Tensor:
    """Return the largest magnitudes of the gradients of gate and up.

    Args:
        gate: (M, N).
        up: (M, N).
        grad: (M, N), gradient of silu(gate) up.
    Returns:
        (2,), float32 (float64 for float64).
    """
    if _by_triton(gate):
        return _gated_backward_amax_on_gpu(gate, up, grad)
    return torch.stack([x.abs().amax() for x in _gradients(gate, up, grad)[:2]])


@torch.library.custom_op("dtron::float8_gated_backward_cast", mutates_args=())
def gated_backward_cast(
    gate: Tensor,
    up: Tensor,
    grad: Tensor,
    scales: Tensor,
    hidden_scale: Tensor,
    dtype: torch.dtype,
    hidden_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of gate and up, and recompute silu(gate) up, in float8.

    Args:
        gate: (M, N).
        up: (M, N).
        grad: (M, N), gradient of silu(gate) up.
        scales: (2,), scales of both gradients.
        hidden_scale: one value, scale of silu(gate) up.
        dtype: dtype of the gradients.
        hidden_dtype: dtype of silu(gate) up.
    Returns:
        Gradient of gate (M, N), gradient of up (M, N), transposed silu(gate) up (N, M).
    """
    if _by_triton(gate):
        types = (dtype, hidden_dtype)
        return _gated_backward_cast_on_gpu(gate, up, grad, scales, hidden_scale, *types)
    of_gate, of_up, hidden = _gradients(gate, up, grad)
    of_gate, of_up = rounded(of_gate, scales[0], dtype), rounded(of_up, scales[1], dtype)
    hidden = rounded(hidden, hidden_scale.view(()), hidden_dtype)
    return of_gate, of_up, _transposed(hidden)


@cast_plain.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(x, dtype=dtype)


@turned.register_fake
def _(x: Tensor, after: Tensor) -> Tensor:
    return _empty_turned(x, x.dtype)


@cast_turned.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype, after: Tensor) -> Tensor:
    return _empty_turned(x, dtype)


@cast_both.register_fake
def _(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, dtype=dtype), _empty_turned(x, dtype)


@gated_amax.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return _wide(gate.new_empty(1, 1))


@gated_cast.register_fake
def _(gate: Tensor, up: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.empty_like(gate, dtype=dtype)


@gated_backward_amax.register_fake
def _(gate: Tensor, up: Tensor, grad: Tensor) -> Tensor:
    return _wide(gate.new_empty(2))


@gated_backward_cast.register_fake
def _(gate: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor]:
    *_tensors, dtype, hidden_dtype = rest
    of_gate, of_up = (torch.empty_like(gate, dtype=dtype) for _ in range(2))
    return of_gate, of_up, _empty_turned(gate, hidden_dtype)


# -- GPUs ------------------------------------------------------------------------------------------


def _cast_plain_on_gpu(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    y = torch.empty_like(x, dtype=dtype)
    _by_blocks("flat_cast_kernel", x, scale, y, **_cast_to(dtype))
    return y


def _turned_on_gpu(x: Tensor, _after: Tensor) -> Tensor:
    y = _empty_turned(x, x.dtype)
    _by_tiles("turn_kernel", _BYTES_TILE, x, y)
    return y


def _cast_turned_on_gpu(x: Tensor, scale: Tensor, dtype: torch.dtype, _after: Tensor) -> Tensor:
    y = _empty_turned(x, dtype)
    _by_tiles("cast_kernel", TILE, x, scale, y, y, STRAIGHT=False, **_cast_to(dtype))
    return y


def _cast_both_on_gpu(x: Tensor, scale: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    if x.element_size() == 4:  # Triton 3.6 writes every fourth row of its second store wrong
        straight = _cast_plain_on_gpu(x, scale, dtype)
        return straight, _turned_on_gpu(straight, x)
    straight, y = torch.empty_like(x, dtype=dtype), _empty_turned(x, dtype)
    _by_tiles("cast_kernel", TILE, x, scale, straight, y, STRAIGHT=True, **_cast_to(dtype))
    return straight, y


def _gated_amax_on_gpu(gate: Tensor, up: Tensor) -> Tensor:
    amax = gate.new_zeros((1, 1), dtype=torch.float32)
    _by_blocks("gated_amax_kernel", gate, up, amax, BLOCKS=BLOCKS)
    return amax


def _gated_cast_on_gpu(gate: Tensor, up: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    hidden = torch.empty_like(gate, dtype=dtype)
    _by_blocks("gated_cast_kernel", gate, up, scale, hidden, **_cast_to(dtype))
    return hidden


def _gated_backward_amax_on_gpu(gate: Tensor, up: Tensor, grad: Tensor) -> Tensor:
    amax = gate.new_zeros(2, dtype=torch.float32)
    _by_blocks("gated_backward_amax_kernel", gate, up, grad, amax, BLOCKS=BLOCKS)
    return amax


def _gated_backward_cast_on_gpu(
    gate: Tensor,
    up: Tensor,
    grad: Tensor,
    scales: Tensor,
    hidden_scale: Tensor,
    dtype: torch.dtype,
    hidden_dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    of_gate, of_up = (torch.empty_like(gate, dtype=dtype) for _ in range(2))
    results = (of_gate, of_up, _empty_turned(gate, hidden_dtype))
    _by_tiles(
        "gated_backward_cast_kernel",
        TILE,
        *(gate, up, grad, scales, hidden_scale, *results),
        largest_grad=torch.finfo(dtype).max,
        largest_hidden=torch.finfo(hidden_dtype).max,
        GRAD=_triton_dtype(dtype),
        HIDDEN=_triton_dtype(hidden_dtype),
    )
    return results


def _by_blocks(kernel: str, *tensors: Tensor, **settings: Any) -> None:
    """Launch a kernel over the elements of the first tensor."""
    n = tensors[0].numel()
    grid = (math.ceil(n / (BLOCK * settings.get("BLOCKS", 1))),)
    _launch(kernel, grid, tensors, n, BLOCK=BLOCK, **settings)


def _by_tiles(kernel: str, tile: tuple[int, int], *tensors: Tensor, **settings: Any) -> None:
    """Launch a kernel over tiles of the first tensor's matrix."""
    rows, columns = tensors[0].shape
    grid = math.ceil(rows / tile[0]), math.ceil(columns / tile[1])
    settings |= {"ROWS": tile[0], "COLUMNS": tile[1], "num_warps": _WARPS}
    _launch(kernel, grid, tensors, rows, columns, **settings)


def _launch(
    kernel: str, grid: tuple[int, ...], tensors: tuple[Tensor, ...], *sizes: int, **settings: Any
) -> None:
    """Import Triton, which needs a GPU, and launch a kernel; float8 tensors are passed as bytes."""
    from dtron.kernels import float8_triton

    as_bytes = (x.view(torch.uint8) if x.element_size() == 1 else x for x in tensors)
    getattr(float8_triton, kernel)[grid](*as_bytes, *sizes, **settings)


def _cast_to(dtype: torch.dtype) -> dict[str, Any]:
    return {"largest": torch.finfo(dtype).max, "DTYPE": _triton_dtype(dtype)}


def _triton_dtype(dtype: torch.dtype) -> object:
    import triton.language as tl

    return {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}[dtype]
