"""The attention problem of `dtron bench kernels`."""

import torch
from torch import Tensor

from dtron.bench.kernels.problem import Figures, KernelRow, Problem, Shape, Tensors, normal
from dtron.kernels.attention import KERNELS, Score
from dtron.models import BACKENDS
from dtron.models.attention import AttentionNeeds


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
    return normal(dtype, device, *((batch, length, n, size) for n in counts))


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
    """
    lse = q.numel() // q.shape[-1] * 4
    forward = 2 * q.nbytes + 2 * k.nbytes + lse
    return forward, forward + 2 * q.nbytes + 2 * k.nbytes


ATTENTION = Problem(
    modules=("attention", "flash4"),
    dims="sequences, tokens, query heads, key/value heads, width of a head",
    shapes={"cuda": (1, 8192, 32, 8, 128), "cpu": (1, 256, 8, 4, 32)},
    draw=_draw_attention,
    flops=_attention_flops,
    n_bytes=_attention_bytes,
    reference="math",
    rows=tuple(_attention_row(name) for name in KERNELS),
)
