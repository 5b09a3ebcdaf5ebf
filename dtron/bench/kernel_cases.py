"""Problems of `dtron bench kernels`: computations, each with a reference and kernels.

To add a kernel of a problem, add a KernelRow; to add a computation, add a Problem.
"""

import importlib.util
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim.adamw import adamw

from dtron.float8.casting import dequantize, quantize
from dtron.float8.recipes import RECIPES
from dtron.float8.scales import scale_of
from dtron.kernels.accumulate import multiply_into
from dtron.kernels.adamw import Rates, adamw_
from dtron.kernels.attention import KERNELS, Score
from dtron.kernels.float8 import (
    cast_both,
    gated_amax,
    gated_backward_amax,
    gated_backward_cast,
    gated_cast,
)
from dtron.kernels.float8_rows import packed, unpacked
from dtron.kernels.grouped import grouped_matmul
from dtron.kernels.peer_gather import packed_rows_of_peers, rows_of_peers, rows_of_pointers
from dtron.kernels.permute import inverse_of, repeated
from dtron.kernels.sums import sum_of_parts_
from dtron.models import BACKENDS
from dtron.models.attention import AttentionNeeds

Tensors = Sequence[Tensor]
Inputs = Sequence[Any]
"""Arguments of a kernel: tensors, or lists of tensors."""
Shape = tuple[int, ...]
Figures = tuple[float, ...]
"""One number per part of a problem (`Problem.parts`)."""


def _seeded(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def _normal(dtype: torch.dtype, device: torch.device, *shapes: Shape) -> list[Tensor]:
    """Draw normal values in float32 with a fixed seed, and cast them to `dtype`."""
    generator = _seeded(device)
    return [torch.randn(x, generator=generator, device=device).to(dtype) for x in shapes]


def _by_autograd(outputs: Tensors, *inputs: Tensor) -> Tensors:
    """Return the gradients of inputs that require grad; the last input is outputs[0]'s gradient."""
    wanted = [x for x in inputs if x.requires_grad]
    return torch.autograd.grad(outputs[0], wanted, inputs[-1], retain_graph=True)


@dataclass(frozen=True)
class KernelRow:
    """One implementation of a problem: its name, forward, and backward."""

    name: str
    forward: Callable[..., Tensors]
    """Inputs -> outputs."""
    backward: Callable[..., Tensors] | None = None
    """(outputs, *inputs) -> gradients; the last input is the gradient of outputs[0]. None: the
    problem has one part."""
    unavailable: Callable[[torch.device, torch.dtype, Shape], str | None] = lambda *_: None
    """(device, dtype, shape) -> why the kernel cannot run; None: it can."""
    inputs: Callable[..., Inputs] = lambda *drawn: drawn
    """Drawn inputs -> the kernel's inputs; tensors that the kernel writes to are copied."""

    def calls(self, drawn: Inputs) -> tuple[Inputs, Tensors, list[Callable[[], Tensors]]]:
        """Return (inputs, outputs of a first forward, one function per timed part)."""
        inputs, backward = self.inputs(*drawn), self.backward
        outputs = self.forward(*inputs)
        calls = [lambda: self.forward(*inputs)]
        if backward:
            calls.append(lambda: backward(outputs, *inputs))
        return inputs, outputs, calls


@dataclass(frozen=True)
class Problem:
    """A computation to benchmark, with its reference and the kernels to compare."""

    modules: tuple[str, ...]
    """Files of dtron/kernels with the timed kernels."""
    dims: str
    """Meaning of the numbers of a shape."""
    shapes: Mapping[str, Shape]
    """Default shape by device type."""
    draw: Callable[[Shape, torch.dtype, torch.device], Inputs]
    """Draws the inputs; the last one is the first output's gradient if there is a backward."""
    flops: Callable[[Shape], Figures]
    """Floating-point operations of each part."""
    n_bytes: Callable[..., Figures]
    """A kernel's inputs -> bytes that each part reads and writes."""
    rows: tuple[KernelRow, ...]
    reference: str = "formula"
    parts: tuple[str, ...] = ("forward", "backward")
    """Names of the timed parts: the forward, and the backward if there is one."""
    compared: int | None = 1
    """Number of outputs to compare; None: all."""
    dtype: torch.dtype | None = None
    """Dtype of the drawn tensors; None: that of --dtype."""


# -- attention -------------------------------------------------------------------------------------


def _attention_row(name: str) -> KernelRow:
    kernel = KERNELS[name]
    (backend,) = (row for row in BACKENDS.values() if row.kernel == name)

    def score(q: Tensor) -> Score:
        return Score(q.shape[-1] ** -0.5, causal=True)

    return KernelRow(
        name,
        lambda q, k, v, _: kernel.forward(q, k, v, None, score(q)),
        lambda outputs, q, k, v, grad: kernel.backward(grad, q, k, v, *outputs, None, score(q)),
        lambda device, dtype, shape: backend.unavailable(
            AttentionNeeds(device.type, dtype, shape[-1])
        ),
    )


def _draw_attention(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    batch, length, heads, groups, size = shape
    counts = (heads, groups, groups, heads)
    return _normal(dtype, device, *((batch, length, n, size) for n in counts))


def _attention_flops(shape: Shape) -> Figures:
    """Return the FLOPs of attention over the causal half of the scores.

    The forward has two matmuls; the backward has five, because it recomputes the scores.
    """
    batch, length, heads, _, size = shape
    product = 2 * batch * heads * size * length**2 / 2
    return 2 * product, 5 * product


def _attention_bytes(q: Tensor, k: Tensor, *_: Tensor) -> Figures:
    """Return the bytes that attention reads and writes.

    Forward: q, k, v, out, log-sum-exp. Backward: all of these, the gradient of out, and the
    gradients of q, k and v.

    Forward: q, k, v, out, log-sum-exp. Backward: all of these, the gradient of out, and the
    gradients of q, k and v.
    """
    lse = q.numel() // q.shape[-1] * 4
    forward = 2 * q.nbytes + 2 * k.nbytes + lse
    return forward, forward + 2 * q.nbytes + 2 * k.nbytes


# -- AdamW -----------------------------------------------------------------------------------------

# Inputs are lists: parameters, gradients, first and second moments, and counts of updates.
_RATES = Rates(lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
_UPDATES = 9.0  # optimizer steps before the timed one


def _draw_adamw(shape: Shape, dtype: torch.dtype, device: torch.device) -> Inputs:
    """Draw the inputs of AdamW.

    Parameters are as small as an update, so that rounding errors are visible.
    """
    count, size = shape
    generator = _seeded(device)

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


def _needs_triton(device: torch.device, _dtype: torch.dtype, _shape: Shape) -> str | None:
    """Return why Triton kernels cannot run; None: they can."""
    if device.type != "cuda":
        return "needs a CUDA device"
    return None if importlib.util.find_spec("triton") else "needs the package triton"


def _adamw_bytes(parameters: Tensors, gradients: Tensors, *moments: Tensors) -> Figures:
    """Return the bytes that an AdamW update reads and writes.

    Gradients are read once; parameters and moments are read and written. Per element these are 28
    bytes, or 20 with bfloat16 moments.
    """
    firsts, squares, _ = moments
    state = sum(x.nbytes for x in (*parameters, *firsts, *squares))
    return (2.0 * state + sum(x.nbytes for x in gradients),)


_WIDE, _NARROW = _own_state(torch.float32), _own_state(torch.bfloat16)


# -- sums over ranks -------------------------------------------------------------------------------


def _summed(parts: Tensor) -> Tensors:
    out = torch.empty(parts.shape[1], device=parts.device)
    sum_of_parts_(out, parts)
    return [out]


# -- weight gradients summed over micro-batches ----------------------------------------------------


def _draw_gradient(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Draw the sum (out, in) in float32, the output's gradient (N, out) and the input (N, in)."""
    tokens, width_in, width_out = shape
    (total,) = _normal(torch.float32, device, (width_out, width_in))
    return [total, *_normal(dtype, device, (tokens, width_out), (tokens, width_in))]


def _added_after(total: Tensor, grad: Tensor, x: Tensor) -> Tensors:
    return [total.add_(grad.t() @ x)]


def _added_in_matmul(total: Tensor, grad: Tensor, x: Tensor) -> Tensors:
    multiply_into(total, grad.t(), x, add=True)
    return [total]


def _own_sum(total: Tensor, *operands: Tensor) -> Inputs:
    return total.clone(), *operands


# -- casts to float8 -------------------------------------------------------------------------------

_INPUT = RECIPES["tensorwise"].output.left
_GRADIENT = RECIPES["tensorwise"].grad_input.left


def _draw_matrix(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Draw a matrix and compute its float8 scale."""
    (x,) = _normal(dtype, device, shape)
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


# -- token copies sorted by expert -----------------------------------------------------------------


def _draw_rows(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Draw tokens and their permutation by expert (`kernels/permute.py`).

    Return the tokens, the slot of each row, the row of each slot, and the gradient of the rows.
    """
    tokens, width, k = shape
    order = torch.randperm(tokens * k, generator=_seeded(device), device=device)
    x, grad = _normal(dtype, device, (tokens, width), (tokens * k, width))
    return [x.requires_grad_(), order, inverse_of(order), grad]


def _indexed(x: Tensor, order: Tensor, *_: Tensor) -> Tensors:
    return [x.detach()[order // (len(order) // len(x))]]


def _indexed_backward(_outputs: Tensors, *inputs: Tensor) -> Tensors:
    x, order, _, grad = inputs
    return [torch.zeros_like(x).index_add(0, order // (len(order) // len(x)), grad)]


def _repeated(x: Tensor, order: Tensor, inverse: Tensor, _: Tensor) -> Tensors:
    return [repeated(x, order, inverse, len(order) // len(x))]


# -- rows gathered from the memory of several ranks ------------------------------------------------


def _peers(float8: bool) -> Problem:
    """Make the problem that gathers rows from several ranks, in the drawn dtype or in float8.

    Inputs: rows of all ranks (here on one device), slot of each result row, address of each rank's
    rows, and a row with the width and dtype of the result."""

    def draw(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
        ranks, rows, width = shape
        (held,) = _normal(dtype, device, (ranks, rows, width))
        slots = torch.randperm(ranks * rows, generator=_seeded(device), device=device)[:rows]
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
            KernelRow("dtron", pulled, None, _needs_triton),
        ),
        parts=("pull",),
        compared=None,
    )


# -- grouped matmuls of experts --------------------------------------------------------------------


def _draw_experts(shape: Shape, dtype: torch.dtype, device: torch.device) -> Tensors:
    """Draw rows (equally many per expert), matrices, end offsets, and the output's gradient."""
    rows, experts, inward, outward = shape
    sizes = ((rows, inward), (experts, outward, inward), (rows, outward))
    x, weight, grad = _normal(dtype, device, *sizes)
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


PROBLEMS: dict[str, Problem] = {
    "attention": Problem(
        modules=("attention", "flash4"),
        dims="sequences, tokens, query heads, key/value heads, width of a head",
        shapes={"cuda": (1, 8192, 32, 8, 128), "cpu": (1, 256, 8, 4, 32)},
        draw=_draw_attention,
        flops=_attention_flops,
        n_bytes=_attention_bytes,
        reference="math",
        rows=tuple(_attention_row(name) for name in KERNELS),
    ),
    "adamw": Problem(
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
            KernelRow("dtron, float32 moments", _dtron_adamw, None, _needs_triton, _WIDE),
            KernelRow("dtron, bfloat16 moments", _dtron_adamw, None, _needs_triton, _NARROW),
        ),
        parts=("update",),
        compared=None,
        dtype=torch.float32,
    ),
    "sums": Problem(
        modules=("sums", "sums_triton"),
        dims="ranks, elements per rank",
        # Parameters of a block of Llama-3-8B, sharded over 2 GPUs.
        shapes={"cuda": (2, 109_056_000), "cpu": (2, 2**18)},
        draw=lambda shape, dtype, device: _normal(dtype, device, shape),
        flops=lambda shape: (float(shape[0] * shape[1]),),
        n_bytes=lambda parts: (parts.nbytes + 4.0 * parts.shape[1],),
        rows=(
            KernelRow("formula", lambda parts: [parts.sum(0, dtype=torch.float32)]),
            KernelRow("dtron", _summed, None, _needs_triton),
        ),
        parts=("sum",),
    ),
    "gradient sums": Problem(
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
            KernelRow("separate", _added_after, inputs=_own_sum),
            KernelRow("in the matmul", _added_in_matmul, inputs=_own_sum),
        ),
        parts=("matmul and sum",),
    ),
    "float8 cast": Problem(
        modules=("float8", "float8_triton"),
        dims="tokens, width",
        shapes={"cuda": (16384, 4096), "cpu": (512, 256)},
        draw=_draw_matrix,
        flops=lambda shape: (2.0 * shape[0] * shape[1],),
        n_bytes=lambda x, _: (x.nbytes + 2.0 * x.numel(),),
        rows=(
            KernelRow("formula", _cast_formula),
            KernelRow("dtron", lambda *x: cast_both(*x, _GRADIENT.dtype), None, _needs_triton),
        ),
        parts=("cast",),
        compared=None,
    ),
    "float8 gated": Problem(
        modules=("float8", "float8_triton"),
        dims="tokens, hidden width",
        shapes={"cuda": (16384, 14336), "cpu": (512, 256)},
        draw=lambda shape, dtype, device: _normal(dtype, device, shape, shape, shape),
        flops=_gated_flops,
        n_bytes=_gated_bytes,
        rows=(
            KernelRow("formula", _gated_formula, _gated_formula_backward),
            KernelRow("dtron", _gated_kernel, _gated_kernel_backward, _needs_triton),
        ),
    ),
    "permute": Problem(
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
            KernelRow("dtron", _repeated, _by_autograd),
        ),
    ),
    "peers": _peers(float8=False),
    "float8 rows": Problem(
        modules=("float8_rows", "float8_rows_triton"),
        dims="rows, width",
        shapes={"cuda": (98304, 2048), "cpu": (512, 256)},
        draw=lambda shape, dtype, device: _normal(dtype, device, shape),
        flops=lambda shape: (4.0 * shape[0] * shape[1],),
        # Rows read and written, float8 rows written and read; scales are negligible.
        n_bytes=lambda x: (2.0 * x.nbytes + 2.0 * x.numel(),),
        rows=(
            KernelRow("formula", _carried_formula),
            KernelRow("dtron", lambda x: [unpacked(packed(x), x.shape[1], x.dtype)]),
        ),
        parts=("both casts",),
    ),
    "float8 peers": _peers(float8=True),
    "experts": Problem(
        modules=("grouped",),
        dims="rows, experts, width in, width out",
        shapes={"cuda": (98304, 64, 2048, 1408), "cpu": (512, 4, 64, 32)},
        draw=_draw_experts,
        flops=_experts_flops,
        n_bytes=_experts_bytes,
        reference="batched",
        rows=(
            KernelRow("batched", _batched, _batched_backward),
            KernelRow("grouped", lambda *inputs: [grouped_matmul(*inputs[:3])], _by_autograd),
        ),
    ),
}
