"""Products of experts: each expert's matrix by its own rows, which are sorted by expert.

Row r belongs to expert e where offsets[e - 1] <= r < offsets[e], with offsets[-1] = 0. Offsets are
on the device: nothing waits for it.

Shapes: N rows, E experts, K input and M output features.
Source: MegaBlocks, arXiv:2211.15841.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_BYTES = 16  # rows of operands of grouped_mm are multiples of this


def grouped_matmul(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """x_e weight_e^T for the rows x_e of each expert e.

    Args:
        x: (N, K), sorted by expert.
        weight: (E, M, K), of x's dtype.
        offsets: int32 (E,), where each expert's rows end.
    Returns:
        (N, M). Rows after the last expert's are anything, NaN too, and so are their gradients.
    """
    if _groupable(x, weight):
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=offsets)
    return looped_matmul(x, weight, offsets)


def _groupable(x: Tensor, weight: Tensor) -> bool:
    """Whether grouped_mm takes these: of torch 2.11 and 2.13 its kernels know no float64, and what
    torch.compile knows of it bfloat16 alone."""
    if any(size * x.element_size() % _BYTES for size in weight.shape[1:]):
        return False
    if torch.compiler.is_compiling():
        return x.dtype == torch.bfloat16
    return x.dtype in (torch.bfloat16, torch.float16, torch.float32)


def looped_matmul(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """The same in any dtype, an expert after the other over all rows: the reference. Rows after the
    last expert's are zero."""
    rows = torch.arange(x.shape[0], device=x.device)
    starts = F.pad(offsets[:-1], (1, 0))
    out = x.new_zeros(x.shape[0], weight.shape[1])
    for matrix, start, end in zip(weight, starts, offsets, strict=True):
        inside = (start <= rows) & (rows < end)
        out = torch.where(inside.unsqueeze(1), x @ matrix.T, out)
    return out


def grouped_gradient(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """grad_e^T x_e of each expert e: the gradient of the weight of `grouped_matmul`.

    Args:
        grad: (N, M), of x's dtype.
        x: (N, K), sorted by expert.
        offsets: int32 (E,), where each expert's rows end; rows after the last one's are left out.
    Returns:
        (E, M, K).
    """
    if _groupable(x, grad.new_empty(1, grad.shape[1], x.shape[1])):
        return F.grouped_mm(grad.contiguous().t(), x, offs=offsets)
    rows = torch.arange(x.shape[0], device=x.device)
    starts, parts = F.pad(offsets[:-1], (1, 0)), []
    for start, end in zip(starts, offsets, strict=True):
        inside = ((start <= rows) & (rows < end)).unsqueeze(1)
        parts.append(torch.where(inside, grad, 0).t() @ torch.where(inside, x, 0))
    return torch.stack(parts)
