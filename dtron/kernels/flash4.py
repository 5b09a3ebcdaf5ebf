"""FlashAttention-4 (package flash-attn-4) as two registered operators, so that torch.compile keeps
one graph and selective recomputation can list the operators.

`dtron::flash4_forward` and `dtron::flash4_backward` call the package's functions below its autograd
layer; the package is imported at the first call. The forward also returns the log-sum-exp, with
which results over several blocks of keys can be merged.

Private names used: `_flash_attn_fwd` and `_flash_attn_bwd` of flash_attn.cute.interface, tested
with flash-attn-4 4.0.0b36. Other releases may move these names. The public function returns no
log-sum-exp without gradients and cannot be traced.

Shapes: B sequences, T queries, S keys, H query heads, G key/value heads (H a multiple of G),
K = head_dim, V width of values. Source: FlashAttention-4,
github.com/Dao-AILab/flash-attention, flash_attn/cute.
"""

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("dtron::flash4_forward", mutates_args=(), device_types="cuda")
def flash4_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    segments: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Compute softmax(q k^T * scale) v and the log of the softmax's denominator.

    Args:
        q: bfloat16 or float16 (B, T, H, K).
        k: (B, S, G, K).
        v: (B, S, G, V).
        scale: factor on q k^T.
        causal: the last query sees all keys, the query before it all except the last, and so on.
        segments: int32 (2, n + 1) for B = 1, bounds of the n segments of queries and of keys
            (`kernels/attention.py`).
        window: maximum number of keys that a query sees; 0: all.
        softcap: c; scores s become c tanh(s / c); 0: off.
    Returns:
        out (B, T, H, V) in q's dtype, and lse float32 (B, H, T), natural logarithm.
    """
    from flash_attn.cute.interface import _flash_attn_fwd

    options = _options(segments, window, softcap)
    q, k, v = (_packed(x, segments) for x in (q, k, v))
    out, lse = _flash_attn_fwd(
        q, k, v, softmax_scale=scale, causal=causal, return_lse=True, **options
    )[:2]
    return (out, lse) if segments is None else (out.unsqueeze(0), lse.unsqueeze(0))


def _packed(x: Tensor, segments: Tensor | None) -> Tensor:
    """Return x contiguous; with segments, without the batch dim."""
    return (x if segments is None else x.squeeze(0)).contiguous()


def _options(segments: Tensor | None, window: int, softcap: float) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if segments is not None:
        options["cu_seqlens_q"], options["cu_seqlens_k"] = (row.contiguous() for row in segments)
    if window:
        options |= {"window_size_left": window - 1, "window_size_right": 0}
    return options | ({"softcap": softcap} if softcap else {})


@flash4_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    batch, queries, heads, _ = q.shape
    out = q.new_empty(batch, queries, heads, v.shape[-1])
    return out, q.new_empty((batch, heads, queries), dtype=torch.float32)


@torch.library.custom_op("dtron::flash4_backward", mutates_args=(), device_types="cuda")
def flash4_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    deterministic: bool,
    segments: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v.

    Args:
        grad: (B, T, H, V), gradient of out.
        q, k, v, scale, causal, segments, window, softcap: as in the forward.
        out, lse: results of the forward. If k and v are a block of the keys, the results over all
            keys.
        deterministic: sum in a fixed order, which is slower.
    """
    from flash_attn.cute.interface import _flash_attn_bwd

    options = _options(segments, window, softcap)
    shapes = [x.shape for x in (q, k, v)]
    grad, q, k, v, out, lse = (_packed(x, segments) for x in (grad, q, k, v, out, lse))
    grads = _flash_attn_bwd(
        q, k, v, out, grad, lse, scale, causal, deterministic=deterministic, **options
    )
    dq, dk, dv = (x.view(shape) for x, shape in zip(grads, shapes, strict=False))
    return dq, dk, dv


@flash4_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.scale, ctx.causal, segments, ctx.window, ctx.softcap = inputs
    ctx.save_for_backward(q, k, v, *output, segments)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    grads: tuple[Tensor | None, ...] = (None, None, None)
    if grad is not None:
        *tensors, segments = ctx.saved_tensors
        deterministic = torch.are_deterministic_algorithms_enabled()
        settings = (ctx.scale, ctx.causal, deterministic, segments, ctx.window, ctx.softcap)
        grads = flash4_backward(grad, *tensors, *settings)
    return *grads, None, None, None, None, None


flash4_forward.register_autograd(_backward, setup_context=_save)


def flash4(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    causal: bool,
    segments: Tensor | None = None,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`flash4_forward` with gradients of q, k and v through its first output."""
    return torch.ops.dtron.flash4_forward(q, k, v, scale, causal, segments, window, softcap)
