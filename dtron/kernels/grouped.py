"""Grouped matmuls of experts: multiply rows that are sorted by expert by their expert's matrix.

Row r belongs to expert e if offsets[e - 1] <= r < offsets[e], with offsets[-1] = 0. Offsets are on
the device, so that the host does not wait.

Shapes: N rows, E experts, K input and M output features.
Source: MegaBlocks, arXiv:2211.15841.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

_BYTES = 16  # grouped_mm needs rows with a multiple of this many bytes


def grouped_matmul(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Compute x_e weight_e^T for the rows x_e of each expert e.

    Args:
        x: (N, K), sorted by expert.
        weight: (E, M, K), of x's dtype.
        offsets: int32 (E,), where each expert's rows end.
    Returns:
        (N, M). Rows after the last expert's rows, and their gradients, are undefined and may be
        NaN.
    """
    if _groupable(x, weight):
        return F.grouped_mm(x, weight.transpose(-2, -1), offs=offsets)
    return looped_matmul(x, weight, offsets)


def _groupable(x: Tensor, weight: Tensor) -> bool:
    """Whether grouped_mm supports these operands.

    In torch 2.11 and 2.13 its kernels lack float64; under torch.compile it supports only bfloat16.
    """
    if any(size * x.element_size() % _BYTES for size in weight.shape[1:]):
        return False
    if torch.compiler.is_compiling():
        return x.dtype == torch.bfloat16
    return x.dtype in (torch.bfloat16, torch.float16, torch.float32)


def looped_matmul(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Compute `grouped_matmul` in any dtype, with one matmul per expert.

    Each matmul multiplies all rows; then the expert's rows are selected. Rows after the last
    expert's rows are zero.
    """
    rows = torch.arange(x.shape[0], device=x.device)
    starts = F.pad(offsets[:-1], (1, 0))
    out = x.new_zeros(x.shape[0], weight.shape[1])
    for matrix, start, end in zip(weight, starts, offsets, strict=True):
        inside = (start <= rows) & (rows < end)
        out = torch.where(inside.unsqueeze(1), x @ matrix.T, out)
    return out


def grouped_gradient(grad: Tensor, x: Tensor, offsets: Tensor) -> Tensor:
    """Compute grad_e^T x_e for each expert e: the weight's gradient of `grouped_matmul`.

    Args:
        grad: (N, M), of x's dtype.
        x: (N, K), sorted by expert.
        offsets: int32 (E,), where each expert's rows end; later rows are ignored.
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
