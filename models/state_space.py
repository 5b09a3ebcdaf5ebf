"""The state space recurrence of Mamba-2.

Every head has a state S, a matrix (K, P), instead of keys and values of all earlier tokens:

    S <- exp(g) S + b (dt x)^T              g <= 0
    y = S^T c + d x

S is zero at the first token of a document. It is evaluated by chunks (`chunks.py`): within a chunk,
y = ((c b^T) * decays) (dt x), as attention; between chunks only S is passed on. (The gated delta
rule, `delta_rule.py`, is this recurrence with k = b, q = c, and other values.)

Shapes: B sequences, T tokens, G groups of R heads, which share b and c, K width of the state, P
width of a head, N chunks of C tokens.
Source: Mamba-2, arXiv:2405.21060.
"""

from typing import Any

import torch
from torch import Tensor

from dtron.models.chunks import decay_gradient, decays, in_chunks, in_tokens, states_before

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]
"""x (B, N, G, R, C, P), dt and g (B, N, G, R, C, 1), b and c (B, N, G, 1, C, K)."""


def _inputs(x: Tensor, dt: Tensor, g: Tensor, b: Tensor, c: Tensor) -> Inputs:
    wide = torch.promote_types(x.dtype, torch.float32)
    by_head = (x, dt.unsqueeze(-1), g.unsqueeze(-1), b.unsqueeze(3), c.unsqueeze(3))
    x, dt, g, b, c = (in_chunks(each.to(wide)) for each in by_head)
    return x, dt, g, b, c


@torch.library.custom_op("dtron::state_space", mutates_args=())
def state_space(
    x: Tensor, dt: Tensor, g: Tensor, b: Tensor, c: Tensor, d: Tensor, starts: Tensor | None
) -> Tensor:
    """Compute the recurrence in plain PyTorch, in float32 at least.

    It is one operator, which saves its inputs only. So a compiled block is one graph, and
    recomputation can save the output.

    Args:
        x: (B, T, G, R, P).
        dt: (B, T, G, R), positive.
        g: (B, T, G, R), logarithm of the decay, at most 0.
        b, c: (B, T, G, K).
        d: (G, R).
        starts: bool (B, T), True at the first token of a document; None: each sequence is one
            document.
    Returns:
        (B, T, G, R, P) in x's dtype.
    """
    like, (x, dt, g, b, c) = x, _inputs(x, dt, g, b, c)
    decay, written = decays(g, starts), dt * x
    states = states_before((b * decay.until).mT @ written, decay.kept)
    within = (c @ b.mT) * decay.pairs
    out = (c * decay.since) @ states + within @ written + d.to(x.dtype)[..., None, None] * x
    return in_tokens(out, like)


@state_space.register_fake
def _(x: Tensor, *args: Any) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("dtron::state_space_backward", mutates_args=())
def state_space_backward(
    grad: Tensor,
    x: Tensor,
    dt: Tensor,
    g: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor,
    starts: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the gradients of x, dt, g, b, c and d; `grad`: (B, T, G, R, P), of the output.

    It computes the states once more, then their gradients.
    """
    given, (x, dt, g, b, c) = (x, dt, g, b, c), _inputs(x, dt, g, b, c)
    out = in_chunks(grad.to(x.dtype))
    decay, written = decays(g, starts), dt * x
    b_until, c_since = b * decay.until, c * decay.since
    states = states_before(b_until.mT @ written, decay.kept)
    # The gradient of the state after each chunk passes from the last chunk to the first.
    to_states = c_since.mT @ out
    following = states_before(to_states.flip(1), decay.kept.flip(1)).flip(1)

    products = c @ b.mT
    to_within = (out @ written.mT) * decay.pairs
    to_written = (products * decay.pairs).mT @ out + b_until @ following
    to_c, to_b = out @ states.mT, written @ following.mT  # of c_since and b_until
    grad_c = (to_c * decay.since + to_within @ b).sum(3, keepdim=True)
    grad_b = (to_b * decay.until + to_within.mT @ c).sum(3, keepdim=True)
    grad_g = decay_gradient(
        to_within * products,
        (to_c * c_since).sum(-1, keepdim=True),
        (to_b * b_until).sum(-1, keepdim=True),
        (following * states).sum((-1, -2), keepdim=True) * decay.kept,
    )
    grad_x = to_written * dt + d.to(x.dtype)[..., None, None] * out
    grad_dt = (to_written * x).sum(-1, keepdim=True)
    grads = (grad_x, grad_dt, grad_g, grad_b, grad_c)
    dx, ddt, dg, db, dc = (in_tokens(one, like) for one, like in zip(grads, given, strict=True))
    grad_d = (out * x).sum((0, 1, 4, 5)).to(d.dtype)
    return dx, ddt, dg, db, dc, grad_d


@state_space_backward.register_fake
def _(grad: Tensor, *inputs: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dx, ddt, dg, db, dc, dd = (each.new_empty(each.shape) for each in inputs[:6])
    return dx, ddt, dg, db, dc, dd


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return *state_space_backward(grad, *ctx.saved_tensors), None


state_space.register_autograd(_backward, setup_context=_save)
