"""Attention kernels that also return the log-sum-exp, with separate forward and backward.

Attention over all keys can be combined from attention over blocks of keys, given each block's
output o and log-sum-exp l of its scores (natural logarithm):

    l = log(exp(l1) + exp(l2)),   o = exp(l1 - l) o1 + exp(l2 - l) o2

and the backward of one block needs the o and l of *all* keys: p = exp(s - l) and
ds = p (dp - sum(do o)). So each row of KERNELS has two functions without autograd, forward and
backward; context parallelism (`parallelisms/context/attention.py`) calls them block by
block.

Shapes: B sequences, T queries, S keys, H query heads, G key/value heads (H a multiple of G),
K = head_dim, V width of values; q (B, T, H, K), k (B, S, G, K), v (B, S, G, V), lse (B, H, T) in
float32 at least. The flash row supports only V = K. `causal` aligns queries and keys at their ends:
the last query sees all keys, the query before it all except the last key.

Segments: int32 (2, n + 1), for B = 1: bounds of n segments (cu_seqlens), of queries in row 0 and of
keys in row 1. Queries see only keys of their segment, and `causal` aligns each segment at its end.
A segment may have no queries or no keys: queries without keys give out = 0 and lse = -inf.

Private names, tested with torch 2.11, 2.13 and 2.15: the operators of torch.ops.aten whose backward
can be called by itself, `_flash_attention_forward`, `_flash_attention_backward`,
`_scaled_dot_product_cudnn_attention` and `_scaled_dot_product_cudnn_attention_backward`.

Source: FlashAttention, arXiv:2205.14135; ring attention, arXiv:2310.01889.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dtron.kernels.flash4 import flash4_backward, flash4_forward

aten = torch.ops.aten


@dataclass(frozen=True)
class Score:
    """Scale, mask and soft cap of q k^T before the softmax."""

    scale: float
    causal: bool
    window: int = 0
    """Maximum number of keys that a query sees, including its own; 0: all keys. Needs causal."""
    softcap: float = 0.0
    """c: scores s become c tanh(s / c); 0: off."""


Tables = Mapping[str, tuple[Tensor, ...]]
"""Tensors that describe a micro-batch's documents, by name: the tables of each method of context
parallelism, or only "segments". Tables with a name that ends in "on host" stay in host memory."""
Forward = Callable[..., tuple[Tensor, Tensor]]
"""(q, k, v, segments, score) -> (out (B, T, H, V) in q's dtype, lse (B, H, T))."""
Backward = Callable[..., tuple[Tensor, Tensor, Tensor]]
"""(gradient of out, q, k, v, out, lse, segments, score) -> gradients of q, k, v."""


@dataclass(frozen=True)
class Kernel:
    """One attention kernel, and the features that it supports."""

    name: str
    forward: Forward
    backward: Backward
    segments: bool = True
    window: bool = True
    softcap: bool = True
    aligned_at_end: bool = True
    """Whether it supports `causal` with more keys than queries."""


# -- math: the reference, on any device ---------------------------------------------------------


def _math_forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, score: Score
) -> tuple[Tensor, Tensor]:
    scores, _ = _scores(q, k, segments, score)
    lse = scores.logsumexp(-1)
    out = torch.einsum("bghts,bsgk->btghk", _weights(scores, lse), v.to(scores.dtype))
    return out.flatten(2, 3).to(q.dtype), lse.flatten(1, 2)


def _math_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Tensor | None,
    score: Score,
) -> tuple[Tensor, Tensor, Tensor]:
    scores, slope = _scores(q, k, segments, score)
    wide, groups = scores.dtype, k.shape[2]
    weights = _weights(scores, lse.unflatten(1, (groups, -1)))
    grad, out = (x.to(wide).unflatten(2, (groups, -1)) for x in (grad, out))
    delta = torch.einsum("btghk,btghk->bght", grad, out)
    due = torch.einsum("btghk,bsgk->bghts", grad, v.to(wide))
    due = weights * (due - delta.unsqueeze(-1)) * slope * score.scale
    grad_q = torch.einsum("bghts,bsgk->btghk", due, k.to(wide)).flatten(2, 3)
    grad_k = torch.einsum("bghts,btghk->bsgk", due, q.to(wide).unflatten(2, (groups, -1)))
    grad_v = torch.einsum("bghts,btghk->bsgk", weights, grad)
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype)


def _scores(
    q: Tensor, k: Tensor, segments: Tensor | None, score: Score
) -> tuple[Tensor, Tensor | float]:
    """Return attention scores (B, G, H / G, T, S), and their slope.

    A score is -inf where a query does not see a key. The slope is d(score) / d(score before the
    softcap).
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    queries = q.to(wide).unflatten(2, (k.shape[2], -1))
    scores = torch.einsum("btghk,bsgk->bghts", queries * score.scale, k.to(wide))
    slope: Tensor | float = 1.0
    if score.softcap:
        scores = score.softcap * (scores / score.softcap).tanh()
        slope = 1 - (scores / score.softcap).square()
    seen = _seen(q.shape[1], k.shape[1], segments, score, q.device)
    return scores.masked_fill(~seen, -torch.inf), slope


def _seen(
    n_queries: int, n_keys: int, segments: Tensor | None, score: Score, device: torch.device
) -> Tensor:
    """Return which keys each query sees, bool (T, S)."""
    if segments is None:
        ends = torch.arange(2, device=device)  # no copy from the host
        bounds = torch.stack([ends * n_queries, ends * n_keys])
    else:
        bounds = segments.long()
    (own, query_left), (other, key_left) = (
        _places(row, n) for row, n in zip(bounds, (n_queries, n_keys), strict=True)
    )
    seen = own.unsqueeze(1) == other
    ahead = key_left - query_left.unsqueeze(1)  # number of tokens from the key to the query
    if score.causal:
        seen = seen & (ahead >= 0)
    return seen & (ahead < score.window) if score.window else seen


def _places(bounds: Tensor, n: int) -> tuple[Tensor, Tensor]:
    """Return each token's segment and number of later tokens in the segment, int64 (n,) each."""
    index = torch.arange(n, device=bounds.device)
    segment = torch.searchsorted(bounds, index, right=True) - 1
    return segment, bounds[segment + 1] - 1 - index


def _weights(scores: Tensor, lse: Tensor) -> Tensor:
    """Return exp(scores - lse), 0 for queries that see no key."""
    return (scores - lse.nan_to_num(neginf=0.0).unsqueeze(-1)).exp()


# -- FlashAttention-2 of torch ---------------------------------------------------------------------


def _flash_forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, score: Score
) -> tuple[Tensor, Tensor]:
    inputs, lengths = _flash_inputs(q, k, v, segments)
    out, lse = aten._flash_attention_forward(
        *inputs, *lengths, 0.0, score.causal, False, scale=score.scale, **_flash_window(score)
    )[:2]
    if segments is None:
        return out, lse
    # The kernel returns lse = +inf for a query without keys.
    return out.unsqueeze(0), lse.masked_fill(lse == torch.inf, -torch.inf).unsqueeze(0)


def _flash_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Tensor | None,
    score: Score,
) -> tuple[Tensor, Tensor, Tensor]:
    inputs, lengths = _flash_inputs(q, k, v, segments)
    grad, out, lse = (x if segments is None else x.squeeze(0) for x in (grad, out, lse))
    no_dropout = torch.empty(2, dtype=torch.uint64, device=q.device)  # unread random state
    grads = aten._flash_attention_backward(
        grad.contiguous(),
        *inputs,
        out.contiguous(),
        lse.contiguous(),
        *lengths,
        0.0,
        score.causal,
        no_dropout,
        no_dropout[:0],
        scale=score.scale,
        **_flash_window(score),
    )
    dq, dk, dv = (x.view(like.shape) for x, like in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


def _flash_inputs(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None
) -> tuple[list[Tensor], list[Any]]:
    """Return the tensors in the kernel's shapes, and its arguments for sequence lengths."""
    inputs = [x.contiguous() for x in (q, k, v)]
    if segments is None:
        return inputs, [None, None, q.shape[1], k.shape[1]]
    queries, keys = (row.contiguous() for row in segments)
    return [x.squeeze(0) for x in inputs], [queries, keys, q.shape[1], k.shape[1]]


def _flash_window(score: Score) -> dict[str, int]:
    return {"window_size_left": score.window - 1, "window_size_right": 0} if score.window else {}


# -- cuDNN ---------------------------------------------------------------------------------------


def _cudnn_forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, score: Score
) -> tuple[Tensor, Tensor]:
    heads = [x.transpose(1, 2) for x in (q, k, v)]
    out, lse = aten._scaled_dot_product_cudnn_attention(
        *heads, None, True, 0.0, score.causal, False, scale=score.scale
    )[:2]
    return out.transpose(1, 2), lse.view(lse.shape[:3])


def _cudnn_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Tensor | None,
    score: Score,
) -> tuple[Tensor, Tensor, Tensor]:
    grad = grad.contiguous()  # see dense_gradient of models/attention.py
    grad, *heads, out = (x.transpose(1, 2) for x in (grad, q, k, v, out))
    no_dropout = torch.zeros((), dtype=torch.int64, device=q.device)
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        grad,
        *heads,
        out,
        lse.contiguous().unsqueeze(-1),
        no_dropout,
        no_dropout,
        None,
        None,
        None,
        q.shape[1],
        k.shape[1],
        0.0,
        score.causal,
        scale=score.scale,
    )
    dq, dk, dv = (x.transpose(1, 2) for x in grads)
    return dq, dk, dv


# -- FlashAttention-4 ----------------------------------------------------------------------------


def _flash4_forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Tensor | None, score: Score
) -> tuple[Tensor, Tensor]:
    settings = (score.scale, score.causal, segments, score.window, score.softcap)
    out, lse = flash4_forward(q, k, v, *settings)
    return out, lse.masked_fill(lse == torch.inf, -torch.inf) if segments is not None else lse


def _flash4_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Tensor | None,
    score: Score,
) -> tuple[Tensor, Tensor, Tensor]:
    deterministic = torch.are_deterministic_algorithms_enabled()
    settings = (score.scale, score.causal, deterministic, segments, score.window, score.softcap)
    return flash4_backward(grad, q, k, v, out, lse, *settings)


KERNELS: dict[str, Kernel] = {
    row.name: row
    for row in (
        Kernel("fa4", _flash4_forward, _flash4_backward),
        Kernel(
            "cudnn",
            _cudnn_forward,
            _cudnn_backward,
            segments=False,
            window=False,
            softcap=False,
            aligned_at_end=False,
        ),
        Kernel("flash", _flash_forward, _flash_backward, softcap=False),
        Kernel("math", _math_forward, _math_backward),
    )
}


# -- as one operator with gradients ----------------------------------------------------------------


def add_sink(out: Tensor, lse: Tensor, sink: Tensor) -> tuple[Tensor, Tensor]:
    """Return out and lse as if every query saw one more key of score `sink` and value 0 (gpt-oss).

    Args:
        out: (B, T, H, V): B sequences, T queries, H heads, values of width V.
        lse: (B, T, H).
        sink: (H,).
    """
    total = torch.logaddexp(lse, sink.to(lse.dtype))
    return out * (lse - total).exp().unsqueeze(-1), total


def sink_gradient(grad: Tensor, out: Tensor, lse: Tensor, sink: Tensor) -> Tensor:
    """Return the gradient of sink, (H,), from results of `add_sink`: ds = p (0 - sum(do o))."""
    delta = (grad.to(lse.dtype) * out).sum(-1)
    return -((sink - lse).exp() * delta).sum((0, 1)).to(sink.dtype)


def document_segments(documents: Tensor) -> Tensor:
    """Return the segments, int32 (2, n + 1), of B concatenated packed sequences with n documents.

    `documents`: integers (B, T) that are equal within a document. The host waits for the device.
    """
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    starts = begins.flatten().nonzero().flatten()
    bounds = torch.cat([starts, starts.new_tensor([documents.numel()])])
    return torch.stack([bounds, bounds]).int()


@torch.library.custom_op("dtron::attention", mutates_args=())
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sink: Tensor | None,
    segments: Tensor | None,
    kernel: str,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    """Compute causal attention with a row of KERNELS.

    Shapes: B sequences, T tokens, H query heads, G key/value heads, K width of keys, V of values.

    Args:
        q: (B, T, H, K).
        k: (B, T, G, K).
        v: (B, T, G, V).
        sink: (H,) or None.
        segments: segments of the concatenated B * T tokens (`document_segments`); None: each of the
            B sequences is one segment.
        kernel: a key of KERNELS.
        scale: factor of q k^T.
        window: maximum number of keys that a query sees, including its own; 0: all keys.
        softcap: c: scores s become c tanh(s / c); 0: off.
    Returns:
        out (B, T, H, V), lse (B, T, H).
    """
    flat = [_end_to_end(x, segments) for x in (q, k, v)]
    out, lse = KERNELS[kernel].forward(*flat, segments, Score(scale, True, window, softcap))
    lse = lse.transpose(1, 2)
    out, lse = (out, lse) if sink is None else add_sink(out, lse, sink)
    shape = (*q.shape[:3], v.shape[-1])
    return out.to(q.dtype).reshape(shape).contiguous(), lse.reshape(shape[:3]).contiguous()


@attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    wide = torch.promote_types(q.dtype, torch.float32)
    shape = q.shape[:3]
    return q.new_empty(*shape, v.shape[-1]), q.new_empty(shape, dtype=wide)


@torch.library.custom_op("dtron::attention_backward", mutates_args=())
def attention_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    segments: Tensor | None,
    kernel: str,
    scale: float,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v.

    `out` and `lse` are the results of `attention`; `grad` is the gradient of `out`.
    """
    flat = [_end_to_end(x, segments) for x in (grad, q, k, v, out, lse)]
    flat[-1] = flat[-1].transpose(1, 2).contiguous()
    score = Score(scale, True, window, softcap)
    grads = KERNELS[kernel].backward(*flat, segments, score)
    dq, dk, dv = (g.reshape(x.shape).contiguous() for g, x in zip(grads, (q, k, v), strict=True))
    return dq, dk, dv


@attention_backward.register_fake
def _(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _end_to_end(x: Tensor, segments: Tensor | None) -> Tensor:
    return x if segments is None else x.flatten(0, 1).unsqueeze(0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, sink, segments, *ctx.settings = inputs
    ctx.save_for_backward(q, k, v, sink, segments, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx: Any, grad: Tensor | None, _: Any) -> tuple[Any, ...]:
    q, k, v, sink, segments, out, lse = ctx.saved_tensors
    if grad is None:
        return *[None] * 5, *[None] * len(ctx.settings)
    grads = attention_backward(grad, q, k, v, out, lse, segments, *ctx.settings)
    due = None if sink is None else sink_gradient(grad, out, lse, sink)
    return *grads, due, None, *[None] * len(ctx.settings)


attention.register_autograd(_backward, setup_context=_save)
