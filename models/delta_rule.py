"""The gated delta rule, the recurrence of Qwen3.5's linear attention, and DELTA_KERNELS.

Every value head has a state S, a matrix (K, V), instead of keys and values of all earlier tokens:

    S <- exp(g) S                           decay, g <= 0
    S <- S + k (beta (v - k^T S))^T         replace what S holds for the key k by v
    out = q^T S

S is zero at the first token of a document. Evaluated by chunks of C tokens, most of the work is
matmuls: within a chunk, the values that tokens write depend on each other by a triangular system;
between chunks only S is passed on.

Shapes: B sequences, T tokens, G key heads, H value heads (H a multiple of G; H / G value heads
share one key head), K and V widths of their heads, N chunks of C tokens, R = H / G.
Sources: Gated Delta Networks, arXiv:2412.06464; by chunks, arXiv:2406.06484.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from dtron.models.chunks import Decays, decay_gradient, decays, in_chunks, in_tokens


@dataclass(frozen=True)
class _Chunks:
    """What chunks of a sequence need besides the state, float32 at least.

    Every chunk computes written = own - seen S and out = q S + within written, and passes on
    kept S + k^T written.
    """

    q: Tensor
    """(B, N, G, R, C, K), decayed since the chunk began."""
    k: Tensor
    """(B, N, G, R, C, K), decayed until the chunk ends."""
    within: Tensor
    """(B, N, G, R, C, C)."""
    own: Tensor
    """(B, N, G, R, C, V)."""
    seen: Tensor
    """(B, N, G, R, C, K)."""
    system: Tensor
    """(B, N, G, R, C, C): own and seen solve (1 + system) x = right."""
    decay: Decays


Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""q, k (B, N, G, 1, C, K), v (B, N, G, R, C, V), g and beta (B, N, G, R, C, 1)."""


def _inputs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor) -> Inputs:
    wide, groups = torch.promote_types(v.dtype, torch.float32), q.shape[2]
    by_group = (v, g.unsqueeze(-1), beta.unsqueeze(-1))
    v, g, beta = (in_chunks(x.to(wide).unflatten(2, (groups, -1))) for x in by_group)
    q, k = (in_chunks(x.to(wide).unsqueeze(3)) for x in (q, k))
    return q, k, v, g, beta


def _prepare(inputs: Inputs, starts: Tensor | None) -> _Chunks:
    q, k, v, g, beta = inputs
    decay = decays(g, starts)
    system = (beta * (k @ k.transpose(-1, -2)) * decay.pairs).tril(-1)
    right = torch.cat([beta * v, beta * decay.since * k], dim=-1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    own, seen = solved.split([v.shape[-1], k.shape[-1]], dim=-1)
    within = (q @ k.transpose(-1, -2)) * decay.pairs
    return _Chunks(q * decay.since, k * decay.until, within, own, seen, system, decay)


def _scan(c: _Chunks) -> tuple[Tensor, Tensor]:
    """Return states (B, N, G, R, K, V) before each chunk, and `written` (B, N, G, R, C, V)."""
    state = c.own.new_zeros(*c.own[:, 0].shape[:-2], c.k.shape[-1], c.own.shape[-1])
    states, written = [], []
    for n in range(c.own.shape[1]):
        states.append(state)
        written.append(c.own[:, n] - c.seen[:, n] @ state)
        state = state * c.decay.kept[:, n] + c.k[:, n].mT @ written[n]
    return torch.stack(states, 1), torch.stack(written, 1)


def torch_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor | None
) -> Tensor:
    """Compute the gated delta rule in plain PyTorch, in float32 at least.

    Args:
        q: (B, T, G, K), scaled.
        k: (B, T, G, K), of length 1.
        v: (B, T, H, V).
        g: (B, T, H), logarithm of the decay, at most 0.
        beta: (B, T, H), between 0 and 1.
        starts: bool (B, T), True at the first token of a document; None: each sequence is one
            document.
    Returns:
        (B, T, H, V) in v's dtype.
    """
    return torch.ops.dtron.gated_delta_rule(q, k, v, g, beta, starts)


@torch.library.custom_op("dtron::gated_delta_rule", mutates_args=())
def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor | None
) -> Tensor:
    """Compute `torch_delta_rule` as one operator, which saves its inputs only.

    So a compiled block is one graph, and recomputation can save the output.
    """
    chunks = _prepare(_inputs(q, k, v, g, beta), starts)
    states, written = _scan(chunks)
    return in_tokens(chunks.q @ states + chunks.within @ written, v)


@gated_delta_rule.register_fake
def _like_output(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
    return v.new_empty(v.shape)


@torch.library.custom_op("dtron::gated_delta_rule_backward", mutates_args=())
def gated_delta_rule_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k, v, g and beta; `grad`: (B, T, H, V), of the output.

    It computes the forward once more, then the gradient of the state from the last chunk to the
    first.
    """
    inputs = _inputs(q, k, v, g, beta)
    c = _prepare(inputs, starts)
    states, written = _scan(c)
    out = in_chunks(grad.to(states.dtype).unflatten(2, (q.shape[2], -1)))  # (B, N, G, R, C, V)
    to_written, to_next = c.within.mT @ out, []
    state = torch.zeros_like(states[:, 0])  # gradient of the state after a chunk
    for n in reversed(range(out.shape[1])):
        to_next.append(state)
        to_written[:, n] += c.k[:, n] @ state
        state = (
            state * c.decay.kept[:, n]
            + c.q[:, n].mT @ out[:, n]
            - c.seen[:, n].mT @ to_written[:, n]
        )
    following = torch.stack(to_next[::-1], 1)
    grads = _gradients(inputs, c, states, written, out, to_written, following)
    dq, dk, dv, dg, dbeta = (
        in_tokens(x, like) for x, like in zip(grads, (q, k, v, g, beta), strict=True)
    )
    return dq, dk, dv, dg, dbeta


def _gradients(
    inputs: Inputs,
    c: _Chunks,
    states: Tensor,
    written: Tensor,
    out: Tensor,
    to_written: Tensor,
    following: Tensor,
) -> Inputs:
    """Return the gradients of `inputs`.

    Args:
        states, written: results of `_scan`.
        out, to_written, following: gradients of the outputs, of `written`, and of the state after
            each chunk.
    """
    q, k, v, _, beta = inputs
    to_q, to_k, to_within = out @ states.mT, written @ following.mT, out @ written.mT
    solved = torch.cat([c.own, c.seen], dim=-1)
    to_solved = torch.cat([to_written, -to_written @ states.mT], dim=-1)
    transposed = c.system.mT
    right = torch.linalg.solve_triangular(transposed, to_solved, upper=True, unitriangular=True)
    to_system = (-right @ solved.mT).tril(-1)
    to_values, to_keys = right.split([v.shape[-1], k.shape[-1]], dim=-1)

    products, by_beta = q @ k.mT, to_system * beta * c.decay.pairs
    grad_q = (to_q * c.decay.since + (to_within * c.decay.pairs) @ k).sum(3, keepdim=True)
    grad_k = (
        to_k * c.decay.until + (to_within * c.decay.pairs).mT @ q + to_keys * beta * c.decay.since
    )
    grad_k = (grad_k + (by_beta + by_beta.mT) @ k).sum(3, keepdim=True)
    similar = k @ k.mT
    grad_beta = (to_values * v).sum(-1, keepdim=True) + (to_keys * c.decay.since * k).sum(
        -1, keepdim=True
    )
    grad_beta = grad_beta + (to_system * similar * c.decay.pairs).sum(-1, keepdim=True)

    grad_g = decay_gradient(
        to_within * products * c.decay.pairs + by_beta * similar,
        (to_q * q + to_keys * beta * k).sum(-1, keepdim=True) * c.decay.since,
        (to_k * k).sum(-1, keepdim=True) * c.decay.until,
        (following * states).sum((-1, -2), keepdim=True) * c.decay.kept,
    )
    return grad_q, grad_k, to_values * beta, grad_g, grad_beta


@gated_delta_rule_backward.register_fake
def _like_inputs(grad: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dq, dk, dv, dg, dbeta = (x.new_empty(x.shape) for x in inputs[:5])
    return dq, dk, dv, dg, dbeta


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return *gated_delta_rule_backward(grad, *ctx.saved_tensors), None


gated_delta_rule.register_autograd(_backward, setup_context=_save)


@functools.lru_cache(maxsize=8)
def _bounds(starts: Tensor) -> Tensor:
    """Return the bounds of all documents of concatenated sequences: int64 (documents + 1,).

    The host waits for the number of documents. All layers of a forward share `starts`, so that it
    waits once; fla caches its own tables by the identity of the bounds, too.
    """
    starts = starts.clone()
    starts[:, 0] = True
    return F.pad(starts.flatten().nonzero().flatten(), (0, 1), value=starts.numel())


def _fla_inputs(inputs: tuple[Tensor, ...], starts: Tensor | None) -> tuple[list[Tensor], Any]:
    """Return flash-linear-attention's arguments and bounds: documents lie in one sequence."""
    q, k, v, g, beta = inputs
    given = [q, k, v, g.float(), beta]
    if starts is None:
        return given, None
    return [x.flatten(0, 1).unsqueeze(0) for x in given], _bounds(starts)


def _fla(inputs: list[Tensor], bounds: Tensor | None) -> Tensor:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(*inputs, scale=1.0, cu_seqlens=bounds)[0]


def fla_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor | None
) -> Tensor:
    """Compute `torch_delta_rule` by the kernels of flash-linear-attention."""
    return torch.ops.dtron.fla_delta_rule(q, k, v, g, beta, starts)


@torch.library.custom_op("dtron::fla_delta_rule", mutates_args=())
def _fla_forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, starts: Tensor | None
) -> Tensor:
    """Compute `fla_delta_rule` as one operator, which saves its inputs only."""
    with torch.no_grad():
        return _fla(*_fla_inputs((q, k, v, g, beta), starts)).view(v.shape)


_fla_forward.register_fake(_like_output)


@torch.library.custom_op("dtron::fla_delta_rule_backward", mutates_args=())
def _fla_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k, v, g and beta; `grad`: (B, T, H, V), of the output.

    It computes the forward once more, by the autograd function of flash-linear-attention. Inside
    of an operator autograd records such functions alone, so its inputs are the leaves.
    """
    given, bounds = _fla_inputs((q, k, v, g, beta), starts)
    leaves = [x.detach().requires_grad_() for x in given]
    with torch.enable_grad():
        out = _fla(leaves, bounds)
    grads = torch.autograd.grad(out, leaves, grad.reshape(out.shape))
    dq, dk, dv, dg, dbeta = (
        x.reshape(like.shape).to(like.dtype)
        for x, like in zip(grads, (q, k, v, g, beta), strict=True)
    )
    return dq, dk, dv, dg, dbeta


_fla_backward.register_fake(_like_inputs)


def _fla_gradients(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return *_fla_backward(grad, *ctx.saved_tensors), None


_fla_forward.register_autograd(_fla_gradients, setup_context=_save)


DELTA_KERNELS: dict[str, Callable[..., Tensor]] = {
    "torch": torch_delta_rule,
    "fla": fla_delta_rule,
}
"""{model.override.delta_kernel: function with the arguments of `torch_delta_rule`}."""
