"""FlashAttention-4 (package flash-attn-4) as two registered operators, so that compile keeps one
graph and selective recomputation can name them.

`dtron::flash4_forward` and `dtron::flash4_backward` call the package's own functions below its
autograd layer; the package is imported at the first call. Both the output and the log-sum-exp
are returned: partial results over several blocks of keys can be merged with it.

Private names used: `_flash_attn_fwd` and `_flash_attn_bwd` of flash_attn.cute.interface, tested
with flash-attn-4 4.0.0b36. They move between releases; the public function has no lse without a
gradient and cannot be traced.

Shapes: B sequences, T queries, S keys, H query heads, G key/value heads (H a multiple of G),
K = head_dim. Source: FlashAttention-4, github.com/Dao-AILab/flash-attention, flash_attn/cute.
"""

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("dtron::flash4_forward", mutates_args=(), device_types="cuda")
def flash4_forward(
    q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool
) -> tuple[Tensor, Tensor]:
    """softmax(q k^T * scale) v and the log of the softmax's denominator.

    Args:
        q: bfloat16 or float16 (B, T, H, K).
        k: (B, S, G, K).
        v: (B, S, G, K).
        scale: of the scores.
        causal: the last query sees all keys, the one before it all but the last key, and so on.
    Returns:
        out (B, T, H, K) in q's dtype, and lse float32 (B, H, T), natural logarithm.
    """
    from flash_attn.cute.interface import _flash_attn_fwd

    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    out, lse = _flash_attn_fwd(q, k, v, softmax_scale=scale, causal=causal, return_lse=True)[:2]
    return out, lse


@flash4_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
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
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v.

    Args:
        grad: (B, T, H, K), gradient of out.
        q, k, v, scale, causal: as in the forward.
        out: what the forward returned.
        lse: likewise; over all keys, if k and v are but a block of them.
        deterministic: sum in a fixed order, which is slower.
    """
    from flash_attn.cute.interface import _flash_attn_bwd

    grad, q, k, v, out = (x.contiguous() for x in (grad, q, k, v, out))
    return _flash_attn_bwd(
        q, k, v, out, grad, lse.contiguous(), scale, causal, deterministic=deterministic
    )


@flash4_backward.register_fake
def _(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    scale: float,
    causal: bool,
    deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, ctx.scale, ctx.causal = inputs
    out, lse = output
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None, None
    deterministic = torch.are_deterministic_algorithms_enabled()
    grads = flash4_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.causal, deterministic)
    return *grads, None, None


flash4_forward.register_autograd(_backward, setup_context=_save)


def flash4(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> tuple[Tensor, Tensor]:
    """`flash4_forward` with gradients of q, k and v through its first output."""
    return torch.ops.dtron.flash4_forward(q, k, v, scale, causal)
