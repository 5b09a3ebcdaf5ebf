"""Problems of `dtron bench kernels` about gradients: their sums, and optimizers."""

from collections.abc import Callable
from dataclasses import asdict

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from dtron.bench.kernels.problem import (
    Figures,
    Inputs,
    KernelRow,
    Problem,
    Shape,
    Tensors,
    needs_triton,
    normal,
    own_sum,
    seeded,
)
from dtron.kernels import lion
from dtron.kernels.accumulate import multiply_into
from dtron.kernels.adamw import Rates, adamw_
from dtron.kernels.muon import momentum_, move_
from dtron.kernels.sums import sum_of_parts_

# Inputs are lists: parameters, gradients, first and second moments, and counts of updates.
_RATES = Rates(lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
_UPDATES = 9.0  # optimizer steps before the timed one


def _draw_adamw(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Draw the inputs of AdamW.

    Parameters are as small as an update, so that rounding errors are visible.
    """
    count, size = shape
    generator = seeded(device)

    def normal(scale: float) -> list[Tensor]:
        empty = (torch.empty(size, device=device, dtype=dtype) for _ in range(count))
        return [x.normal_(0, scale, generator=generator) for x in empty]

    squares = [x.square_().add_(0.5) for x in normal(1.0)]
    counts = torch.full((count,), _UPDATES, device=device).unbind()
    return normal(_RATES.lr), normal(1.0), normal(1.0), squares, counts


def _own_state(moments: torch.dtype) -> Callable[..., Inputs]:
    """Return a function that copies all inputs except gradients, and casts moments to a dtype."""

    def inputs(
        parameters: Tensors, gradients: Tensors, firsts: Tensors, squares: Tensors, counts: Tensors
    ) -> Inputs:
        return (
            [x.clone() for x in parameters],
            gradients,
            [x.to(moments, copy=True) for x in firsts],
            [x.to(moments, copy=True) for x in squares],
            [x.clone() for x in counts],
        )

    return inputs


def _formula(*inputs: list[Tensor]) -> Tensors:
    """Update with the formula of dtron/kernels/adamw.py, one operator at a time."""
    beta1, beta2 = _RATES.beta1, _RATES.beta2
    for p, g, m, v, t in zip(*inputs, strict=True):
        t.add_(1)
        m.copy_(beta1 * m + (1 - beta1) * g)
        v.copy_(beta2 * v + (1 - beta2) * g * g)
        root = (v / (1 - beta2**t)).sqrt() + _RATES.eps
        decayed = p * (1 - _RATES.lr * _RATES.weight_decay)
        p.copy_(decayed - _RATES.lr * (m / (1 - beta1**t)) / root)
    return inputs[0]


def _torch_fused(*inputs: list[Tensor]) -> Tensors:
    parameters, gradients, firsts, squares, counts = inputs
    state = (firsts, squares, [], counts)
    rates = asdict(_RATES)
    adamw(parameters, gradients, *state, fused=True, amsgrad=False, maximize=False, **rates)
    return parameters


def _dtron_adamw(*inputs: list[Tensor]) -> Tensors:
    parameters, gradients, firsts, squares, counts = inputs
    scale = torch.ones((), device=parameters[0].device)
    adamw_(parameters, gradients, firsts, squares, torch.stack(counts), scale, _RATES)
    return parameters


def _adamw_bytes(parameters: Tensors, gradients: Tensors, *moments: Tensors) -> Figures:
    """Return the bytes that an AdamW update reads and writes.

    Gradients are read once; parameters and moments are read and written. Per element these are 28
    bytes, or 20 with bfloat16 moments.
    """
    firsts, squares, _ = moments
    state = sum(x.nbytes for x in (*parameters, *firsts, *squares))
    return (2.0 * state + sum(x.nbytes for x in gradients),)


_WIDE, _NARROW = _own_state(torch.float32), _own_state(torch.bfloat16)


def _summed(parts: Tensor) -> Tensors:
    out = torch.empty(parts.shape[1], device=parts.device)
    sum_of_parts_(out, parts)
    return [out]


def _draw_gradient(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Draw the sum (out, in) in float32, the output's gradient (N, out) and the input (N, in)."""
    tokens, width_in, width_out = shape
    (total,) = normal(torch.float32, device, (width_out, width_in))
    return [total, *normal(dtype, device, (tokens, width_out), (tokens, width_in))]


def _added_after(total: Tensor, grad: Tensor, x: Tensor) -> Tensors:
    return [total.add_(grad.t() @ x)]


def _added_in_matmul(total: Tensor, grad: Tensor, x: Tensor) -> Tensors:
    multiply_into(total, grad.t(), x, add=True)
    return [total]


def _draw_moved(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Draw a parameter, its gradient and its momentum, of (elements,)."""
    return normal(dtype, device, shape, shape, shape)


def _own_three(*drawn: Tensor) -> Inputs:
    return [x.clone() for x in drawn]


def _torch_lion(p: Tensor, g: Tensor, m: Tensor) -> Tensors:
    """Update with the formula of dtron/kernels/lion.py, one operator at a time."""
    p.mul_(1 - 0.001).sub_(m.lerp(g, 0.1).sign_().mul_(0.01))
    m.lerp_(g, 0.01)
    return [p]


def _dtron_lion(p: Tensor, g: Tensor, m: Tensor) -> Tensors:
    rates = lion.Rates(lr=0.01, beta1=0.9, beta2=0.99, weight_decay=0.1)
    lion.lion_([p], [g], [m], torch.ones((), device=p.device), rates)
    return [p]


def _torch_muon(p: Tensor, g: Tensor, m: Tensor) -> Tensors:
    """Do the elementwise parts of Muon, one operator at a time."""
    m.lerp_(g, 0.05)
    p.mul_(0.999).sub_(g.lerp(m, 0.95).bfloat16(), alpha=0.01)
    return [p]


def _dtron_muon(p: Tensor, g: Tensor, m: Tensor) -> Tensors:
    one, u = torch.ones((), device=p.device), torch.empty_like(p, dtype=torch.bfloat16)
    momentum_(g, m, u, one, 0.95)
    move_(p, u, one, 0.999, 0.01)
    return [p]


ADAMW = Problem(
    modules=("adamw", "adamw_triton"),
    dims="tensors, elements per tensor",
    # 32 of Llama-3-8B's matrices of 4096 x 14336, each split over 4 GPUs: 470 M elements.
    shapes={"cuda": (32, 4096 * 14336 // 4), "cpu": (4, 2**20)},
    draw=_draw_adamw,
    # FLOPs per element: 3 for the first moment, 4 for the second, 8 for the parameter.
    flops=lambda shape: (15.0 * shape[0] * shape[1],),
    n_bytes=_adamw_bytes,
    rows=(
        KernelRow("formula", _formula, inputs=_WIDE),
        KernelRow("torch, fused", _torch_fused, inputs=_WIDE),
        KernelRow("dtron, float32 moments", _dtron_adamw, None, needs_triton, _WIDE),
        KernelRow("dtron, bfloat16 moments", _dtron_adamw, None, needs_triton, _NARROW),
    ),
    parts=("update",),
    compared=None,
    dtype=torch.float32,
)

SUMS = Problem(
    modules=("sums", "sums_triton"),
    dims="ranks, elements per rank",
    # Parameters of a block of Llama-3-8B, sharded over 2 GPUs.
    shapes={"cuda": (2, 109_056_000), "cpu": (2, 2**18)},
    draw=lambda shape, dtype, device: normal(dtype, device, shape),
    flops=lambda shape: (float(shape[0] * shape[1]),),
    n_bytes=lambda parts: (parts.nbytes + 4.0 * parts.shape[1],),
    rows=(
        KernelRow("formula", lambda parts: [parts.sum(0, dtype=torch.float32)]),
        KernelRow("dtron", _summed, None, needs_triton),
    ),
    parts=("sum",),
)

GRADIENT_SUMS = Problem(
    modules=("accumulate",),
    dims="tokens, width in, width out",
    # Llama-3-8B's gate and up.
    shapes={"cuda": (8192, 4096, 14336), "cpu": (256, 64, 96)},
    draw=_draw_gradient,
    flops=lambda shape: (2.0 * shape[0] * shape[1] * shape[2],),
    # The sum is read and written.
    n_bytes=lambda total, grad, x: (2.0 * total.nbytes + grad.nbytes + x.nbytes,),
    reference="separate",
    rows=(
        KernelRow("separate", _added_after, inputs=own_sum),
        KernelRow("in the matmul", _added_in_matmul, inputs=own_sum),
    ),
    parts=("matmul and sum",),
)

LION = Problem(
    modules=("lion", "lion_triton"),
    dims="elements",
    shapes={"cuda": (2**28,), "cpu": (2**18,)},
    draw=_draw_moved,
    flops=lambda shape: (9.0 * shape[0],),
    # The gradient is read once; parameter and momentum are read and written.
    n_bytes=lambda p, g, m: (2.0 * p.nbytes + g.nbytes + 2.0 * m.nbytes,),
    rows=(
        KernelRow("formula", _torch_lion, inputs=_own_three),
        KernelRow("dtron", _dtron_lion, None, needs_triton, _own_three),
    ),
    parts=("update",),
    compared=None,
    dtype=torch.float32,
)

MUON = Problem(
    modules=("muon", "muon_triton"),
    dims="elements",
    shapes={"cuda": (2**28,), "cpu": (2**18,)},
    draw=_draw_moved,
    flops=lambda shape: (9.0 * shape[0],),
    # As Lion's, and a bfloat16 tensor is written and read.
    n_bytes=lambda p, g, m: (2.0 * p.nbytes + g.nbytes + 2.0 * m.nbytes + 4.0 * p.numel(),),
    rows=(
        KernelRow("formula", _torch_muon, inputs=_own_three),
        KernelRow("dtron", _dtron_muon, None, needs_triton, _own_three),
    ),
    parts=("momentum and update",),
    compared=None,
    dtype=torch.float32,
)
