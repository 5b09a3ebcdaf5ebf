"""Problems of `dtron bench kernels` with experts: token copies, and grouped matmuls."""

import torch
from torch import Tensor

from dtron.bench.kernels.problem import (
    Figures,
    KernelRow,
    Problem,
    Shape,
    Tensors,
    by_autograd,
    needs_triton,
    normal,
    own_sum,
    seeded,
)
from dtron.kernels.float8_rows import packed
from dtron.kernels.grouped import grouped_gradient, grouped_matmul
from dtron.kernels.grouped_accumulate import grouped_multiply_into
from dtron.kernels.peer_gather import packed_rows_of_peers, rows_of_peers, rows_of_pointers
from dtron.kernels.permute import inverse_of, repeated


def _draw_rows(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Draw tokens and their permutation by expert (`kernels/permute.py`).

    Return the tokens, the slot of each row, the row of each slot, and the gradient of the rows.
    """
    tokens, width, k = shape
    order = torch.randperm(tokens * k, generator=seeded(device), device=device)
    x, grad = normal(dtype, device, (tokens, width), (tokens * k, width))
    return [x.requires_grad_(), order, inverse_of(order), grad]


def _indexed(x: Tensor, order: Tensor, *_: Tensor) -> Tensors:
    return [x.detach()[order // (len(order) // len(x))]]


def _indexed_backward(_outputs: Tensors, *inputs: Tensor) -> Tensors:
    x, order, _, grad = inputs
    return [torch.zeros_like(x).index_add(0, order // (len(order) // len(x)), grad)]


def _repeated(x: Tensor, order: Tensor, inverse: Tensor, _: Tensor) -> Tensors:
    return [repeated(x, order, inverse, len(order) // len(x))]


def _peers(float8: bool) -> Problem:
    """Make the problem that gathers rows from several ranks, in the drawn dtype or in float8.

    Inputs: rows of all ranks (here on one device), slot of each result row, address of each rank's
    rows, and a row with the width and dtype of the result."""

    def draw(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
        ranks, rows, width = shape
        (held,) = normal(dtype, device, (ranks, rows, width))
        slots = torch.randperm(ranks * rows, generator=seeded(device), device=device)[:rows]
        sent = packed(held.flatten(0, 1)).unflatten(0, held.shape[:2]) if float8 else held
        pointers = torch.tensor([part.data_ptr() for part in sent], device=device)
        return [sent, slots, pointers, held[0, :1]]

    def chosen(sent: Tensor, slots: Tensor, _: Tensor, row: Tensor) -> Tensors:
        if float8:
            return [packed_rows_of_peers(sent.unbind(), slots, row.shape[1], row.dtype)]
        return [rows_of_peers(sent.unbind(), slots)]

    def pulled(sent: Tensor, slots: Tensor, pointers: Tensor, row: Tensor) -> Tensors:
        out = row.new_empty(len(slots), row.shape[1])
        rows_of_pointers(pointers, 0, sent.shape[1], slots, out, float8=float8)
        return [out]

    def n_bytes(sent: Tensor, slots: Tensor, _: Tensor, row: Tensor) -> Figures:
        """Return the bytes of rows that are read and written."""
        return (float(len(slots) * (sent[0, 0].nbytes + row.nbytes)),)

    return Problem(
        modules=("peer_gather", "peer_gather_triton", *(["float8_rows"] if float8 else [])),
        dims="ranks, rows per rank and of the result, width",
        shapes={"cuda": (4, 98304, 2048), "cpu": (4, 512, 64)},
        draw=draw,
        flops=lambda _shape: (0.0,),
        n_bytes=n_bytes,
        rows=(
            KernelRow("formula", chosen),
            KernelRow("dtron", pulled, None, needs_triton),
        ),
        parts=("pull",),
        compared=None,
    )


def _draw_experts(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Draw rows (equally many per expert), matrices, end offsets, and the output's gradient."""
    rows, experts, inward, outward = shape
    sizes = ((rows, inward), (experts, outward, inward), (rows, outward))
    x, weight, grad = normal(dtype, device, *sizes)
    ends = torch.arange(1, experts + 1, device=device).int() * (rows // experts)
    return [x.requires_grad_(), weight.requires_grad_(), ends, grad]


def _batched(*inputs: Tensor) -> Tensors:
    x, weight, *_ = (tensor.detach() for tensor in inputs)
    return [(x.unflatten(0, (len(weight), -1)) @ weight.mT).flatten(0, 1)]


def _batched_backward(_outputs: Tensors, *inputs: Tensor) -> Tensors:
    x, weight, _, grad = (tensor.detach() for tensor in inputs)
    grads, rows = (tensor.unflatten(0, (len(weight), -1)) for tensor in (grad, x))
    return [(grads @ weight).flatten(0, 1), grads.mT @ rows]


def _experts_flops(shape: Shape) -> Figures:
    rows, _, inward, outward = shape
    product = 2.0 * rows * inward * outward
    return product, 2 * product


def _experts_bytes(x: Tensor, weight: Tensor, _: Tensor, grad: Tensor) -> Figures:
    """Return bytes; each operand and result counts once."""
    forward = float(x.nbytes + weight.nbytes + grad.nbytes)
    return forward, forward + x.nbytes + weight.nbytes


def _draw_gradients(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Draw sums (E, out, in) in float32, gradients (N, out), inputs (N, in), and end offsets."""
    x, weight, ends, grad = (tensor.detach() for tensor in _draw_experts(shape, dtype, device))
    return [weight.float(), grad, x, ends]


def _added_after(total: Tensor, *operands: Tensor) -> Tensors:
    return [total.add_(grouped_gradient(*operands))]


def _added_in_matmul(total: Tensor, *operands: Tensor) -> Tensors:
    grouped_multiply_into(total, *operands, add=True)
    return [total]


PERMUTE = Problem(
    modules=("permute", "permute_triton"),
    dims="tokens, width, experts per token",
    shapes={"cuda": (16384, 2048, 6), "cpu": (512, 64, 2)},
    draw=_draw_rows,
    flops=lambda shape: (0.0, float(shape[0] * shape[1] * shape[2])),
    # Tokens and their copies; index tensors are negligible.
    n_bytes=lambda x, _order, _inverse, grad: (float(x.nbytes + grad.nbytes),) * 2,
    reference="indexing",
    rows=(
        KernelRow("indexing", _indexed, _indexed_backward),
        KernelRow("dtron", _repeated, by_autograd),
    ),
)

PEERS = _peers(float8=False)

FLOAT8_PEERS = _peers(float8=True)

EXPERTS = Problem(
    modules=("grouped",),
    dims="rows, experts, width in, width out",
    shapes={"cuda": (98304, 64, 2048, 1408), "cpu": (512, 4, 64, 32)},
    draw=_draw_experts,
    flops=_experts_flops,
    n_bytes=_experts_bytes,
    reference="batched",
    rows=(
        KernelRow("batched", _batched, _batched_backward),
        KernelRow("grouped", lambda *inputs: [grouped_matmul(*inputs[:3])], by_autograd),
    ),
)

GRADIENT_SUMS = Problem(
    modules=("grouped_accumulate", "grouped_accumulate_triton"),
    dims="rows, experts, width in, width out",
    # The half of DeepSeek-V2-Lite's experts that one of two ranks has, and their rows.
    shapes={"cuda": (98304, 32, 2048, 1408), "cpu": (512, 4, 64, 32)},
    draw=_draw_gradients,
    flops=lambda shape: (_experts_flops(shape)[0],),
    # The sum is read and written.
    n_bytes=lambda total, grad, x, _: (2.0 * total.nbytes + grad.nbytes + x.nbytes,),
    reference="separate",
    rows=(
        KernelRow("separate", _added_after, inputs=own_sum),
        KernelRow("in the matmul", _added_in_matmul, None, needs_triton, own_sum),
    ),
    parts=("matmul and sum",),
)
