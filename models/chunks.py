"""Chunks of a sequence, and the decays of a recurrent state in them.

A recurrent layer's state decays by exp(g) at each token, g <= 0, and is zero at the first token of
a document. Evaluated by chunks of C tokens, most of the work is matmuls: decays between the tokens
of a chunk are a matrix, and between chunks only the state is passed on.

Shapes: B sequences, T tokens, G groups of R heads, N chunks of C tokens, K and P widths of a state.
Source: state space duality, arXiv:2405.21060, section 6.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

CHUNK = 64
"""Tokens of a chunk."""
SPAN = 64
"""Chunks whose states `states_before` computes at once."""


@dataclass(frozen=True)
class Decays:
    """Decays of a state in the chunks of a sequence, float32 at least."""

    pairs: Tensor
    """(B, N, G, R, C, C), decay between two tokens; 0 for later ones and other documents."""
    since: Tensor
    """(B, N, G, R, C, 1), decay since the chunk began; 0 after a document has started in it."""
    until: Tensor
    """(B, N, G, R, C, 1), decay until the chunk ends; 0 if a document starts later in it."""
    kept: Tensor
    """(B, N, G, R, 1, 1), decay over the chunk; 0 if a document starts in it."""


def decays(g: Tensor, starts: Tensor | None) -> Decays:
    """Compute the decays of a state.

    Args:
        g: (B, N, G, R, C, 1), logarithm of each token's decay, at most 0.
        starts: bool (B, T), True at the first token of a document; None: each sequence is one
            document.
    """
    order = torch.arange(CHUNK, device=g.device)
    causal = order.unsqueeze(-1) >= order  # (C, C)
    # Sums of only the decays between two tokens: differences of sums from the chunk's first token
    # lose small decays after a large one.
    between = torch.where(order.unsqueeze(-1) > order, g, 0.0).cumsum(-2)
    decay = g.cumsum(-2)
    since, until, kept = decay.exp(), between[..., -1:, :].mT.exp(), decay[..., -1:, :].exp()
    if starts is not None:
        number = in_chunks(starts.int().view(*starts.shape, 1, 1, 1)).cumsum(-2)  # in its chunk
        last = number[..., -1:, :]
        causal = causal & (number == number.transpose(-1, -2))
        since, until, kept = since * (number == 0), until * (number == last), kept * (last == 0)
    return Decays(between.masked_fill(~causal, float("-inf")).exp(), since, until, kept)


def states_before(added: Tensor, kept: Tensor) -> Tensor:
    """Return the states before each chunk of S <- kept S + added, from S = 0: as `added`.

    The states of a span of chunks are one matmul with the decays between these chunks, so that the
    host loops over spans only.

    Args:
        added: (B, N, G, R, K, P), what the tokens of a chunk add to the state after it.
        kept: `Decays.kept`.
    """
    state, found = torch.zeros_like(added[:, :1]), []
    for some, rates in zip(added.split(SPAN, 1), kept.split(SPAN, 1), strict=True):
        n = some.shape[1]
        order = torch.arange(n + 1, device=some.device)
        rates = rates[..., 0, 0].movedim(1, -1).unsqueeze(-2)  # (B, G, R, 1, n)
        # Row 0 is of the state before the span, row i of what chunk i - 1 adds; column t is before
        # chunk t, after the decays of chunks i to t - 1.
        decayed = torch.where(order[:n] >= order.unsqueeze(-1), rates, 1.0).cumprod(-1)
        between = F.pad(decayed, (1, 0), value=1.0).triu()  # (B, G, R, n + 1, n + 1)
        sources = torch.cat([state, some], 1)
        states = torch.einsum("bgrit,bigrkp->btgrkp", between, sources)
        found.append(states[:, :n])
        state = states[:, n:]
    return torch.cat(found, 1)


def decay_gradient(between: Tensor, began: Tensor, ends: Tensor, whole: Tensor) -> Tensor:
    """Return the gradient of g, (B, N, G, R, C, 1).

    The decay of a token acts on what passes it: from earlier tokens of the chunk to itself or later
    ones, from the state before, and to the state after. Sums of only these terms lose less
    precision than the gradient of a cumulative sum, whose terms cancel.

    Args:
        between: (B, N, G, R, C, C), each element of `Decays.pairs` times its gradient; the diagonal
            and what is above it are not read.
        began, ends: (B, N, G, R, C, 1), each element of `since` and `until` times its gradient.
        whole: (B, N, G, R, 1, 1), each element of `kept` times its gradient.
    """
    between = between.tril(-1)
    passing = (between.cumsum(-1) - between).tril().sum(-2).unsqueeze(-1)
    return passing + began.flip(-2).cumsum(-2).flip(-2) + ends.cumsum(-2) - ends + whole


def in_chunks(x: Tensor) -> Tensor:
    """Split (B, T, G, R, W) into chunks of C tokens, padded with zeros: (B, N, G, R, C, W)."""
    x = F.pad(x, (0, 0, 0, 0, 0, 0, 0, -x.shape[1] % CHUNK))
    return x.unflatten(1, (-1, CHUNK)).movedim(2, 4)


def in_tokens(x: Tensor, like: Tensor) -> Tensor:
    """Undo `in_chunks`: return (B, N, G, R, C, W) in the shape and dtype of `like`, contiguous."""
    x = x.movedim(4, 2).flatten(1, 2)[:, : like.shape[1]]
    return x.reshape(like.shape).to(like.dtype).contiguous()
