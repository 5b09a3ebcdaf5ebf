"""Weight gradients of experts that a grouped matmul adds to a float32 sum, in place.

    separate    gradient_e = grad_e^T x_e (bfloat16)    sum_e += gradient_e (float32)
    here        sum_e += grad_e^T x_e

So no bfloat16 gradient is written, rounded and read. On GPUs with compute capability 9.0 and above
a Triton kernel computes it for bfloat16 operands and a float32 sum. torch's grouped matmul has no
float32 result.

Row r belongs to expert e if offsets[e - 1] <= r < offsets[e], with offsets[-1] = 0. Offsets are on
the device, so that the host does not wait.

Shapes: N rows, E experts, K input and M output features.
Source: gradient accumulation fusion of Megatron-LM, for grouped matmuls.
"""

from typing import Any, cast

import torch
from torch import Tensor

from dtron.kernels.grouped import grouped_gradient

_HOPPER = (9, 0)


def grouped_multiply_into(
    total: Tensor, grad: Tensor, x: Tensor, offsets: Tensor, add: bool
) -> None:
    """Write grad_e^T x_e of each expert e to total[e], or add it, in place.

    Without a kernel the gradient is a temporary, which is then added: on other GPUs, and for other
    dtypes on GPUs, in the operands' dtype, on a CPU in the dtype of `total`. So with operands of
    that dtype the sum equals that of separate operations bit by bit.

    Args:
        total: (E, M, K), of the operands' dtype or wider.
        grad: (N, M), of x's dtype.
        x: (N, K), sorted by expert.
        offsets: int32 (E,), where each expert's rows end; later rows are ignored.
        add: add to `total` instead of overwriting it.
    """
    torch.ops.dtron.grouped_multiply_into(total, grad, x, offsets, add)


# An operator, as in accumulate.py, so that a trace by fake tensors shows no temporary.
torch.library.define(
    "dtron::grouped_multiply_into",
    "(Tensor(a!) total, Tensor grad, Tensor x, Tensor offsets, bool add) -> ()",
)


@torch.library.impl("dtron::grouped_multiply_into", "cpu")
def _on_cpu(total: Tensor, grad: Tensor, x: Tensor, offsets: Tensor, add: bool) -> None:
    _separate(total, grad.to(total.dtype), x.to(total.dtype), offsets, add)


def _separate(total: Tensor, grad: Tensor, x: Tensor, offsets: Tensor, add: bool) -> None:
    gradient = grouped_gradient(grad, x, offsets)
    if add:
        total.add_(gradient)
    else:
        total.copy_(gradient)


@torch.library.impl("dtron::grouped_multiply_into", "cuda")
def _on_cuda(total: Tensor, grad: Tensor, x: Tensor, offsets: Tensor, add: bool) -> None:
    narrow = x.dtype == torch.bfloat16 and total.dtype == torch.float32 and total.is_contiguous()
    if narrow and torch.cuda.get_device_capability(total.device) >= _HOPPER:
        _triton(total, grad.contiguous(), x.contiguous(), offsets, add)
    else:
        _separate(total, grad, x, offsets, add)


@torch.library.register_fake("dtron::grouped_multiply_into")
def _(total: Tensor, grad: Tensor, x: Tensor, offsets: Tensor, add: bool) -> None:
    pass


def _triton(total: Tensor, grad: Tensor, x: Tensor, offsets: Tensor, add: bool) -> None:
    from dtron.kernels.grouped_accumulate_triton import grid, kernel  # only GPUs need Triton

    experts, *sizes = total.shape
    if experts:
        cast(Any, kernel)[grid(experts, *sizes)](total, grad, x, offsets, *sizes, ADD=add)
