"""Base class of ring and all-gather attention: order of tokens, and pairs of queries and keys.

Shapes: B sequences, N tokens of a block (of all B sequences), `inner` ranks of a block with t
tokens per sequence each, H query heads, G key/value heads, K head_dim. A dot is any size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtron.kernels.attention import Kernel, Score
from dtron.parallelisms.functional_collectives import NamedGroup

Where = slice | Tensor
"""Index of tokens in a block: dim 1 of (B, N / B, ...), or of (1, N, ...) with documents."""
ALL = slice(None)


@dataclass(frozen=True)
class Pair:
    """Queries of this rank, and the keys of one or all blocks to which they attend."""

    queries: Where
    keys: Where
    causal: bool
    segments: Tensor | None


Forward = Callable[[Pair, Tensor], tuple[Tensor, Tensor]]
"""(pair, keys and values) -> out and log-sum-exp of the pair's queries."""
Backward = Callable[[Pair, Tensor, Tensor], None]
"""(pair, keys and values, their gradients): adds to the gradients."""


class Blocks:
    """Attention of one block's queries, early tokens before late ones, to the keys of all blocks.

    Args:
        q: (B, inner * t, H, K), the block's queries.
        tables: from `Split.tables` for the method; empty: each sequence is one document.
        group: name of the process group over the blocks.
        inner: number of ranks per block.
        causal: whether a query sees only keys up to its own.
    """

    def __init__(
        self,
        q: Tensor,
        tables: Sequence[Tensor],
        group: str,
        inner: int,
        causal: bool = True,
    ) -> None:
        self.batch, self.tables, self.inner, self.causal = q.shape[0], tables, inner, causal
        self.group = NamedGroup.find(group)
        self.rank, self.size = self.group.rank(), self.group.size()
        self.half = q.shape[1] // 2 * (q.shape[0] if tables else 1)

    # Tokens arrive in the order (rank of inner, early or late, token). In the sequence, late chunks
    # of later ranks precede late chunks of earlier ranks.

    def arrange(self, x: Tensor) -> Tensor:
        """Reorder (B, inner * t, ...) to the order of a block: early tokens, then late ones.

        With documents, the result is (1, B * inner * t, ...).
        """
        if self.tables:
            return x.flatten(0, 1)[self.tables[0]].unsqueeze(0)
        if self.inner == 1:
            return x
        early, late = x.unflatten(1, (self.inner, 2, -1)).unbind(2)
        return torch.cat([early.flatten(1, 2), late.flip(1).flatten(1, 2)], dim=1)

    def restore(self, x: Tensor) -> Tensor:
        """Undo `arrange`: return x, in the order of a block, in the original order and shape."""
        if self.tables:
            flat = x.new_empty(x.shape[1:])  # contiguous, whatever strides the kernel gave
            flat[self.tables[0]] = x[0]
            return flat.unflatten(0, (self.batch, -1))
        if self.inner == 1:
            return x.contiguous()
        early, late = (part.unflatten(1, (self.inner, -1)) for part in x.chunk(2, dim=1))
        return torch.stack([early, late.flip(1)], dim=2).flatten(1, 3)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, kernel: Kernel, score: Score
    ) -> tuple[Tensor, Tensor]:
        """Compute out (., ., H heads, K) and log-sum-exp (., ., H), in float32 at least."""

        def forward(pair: Pair, keys: Tensor) -> tuple[Tensor, Tensor]:
            selected = [take(x, pair.keys) for x in keys]
            queries = take(q, pair.queries)
            out, lse = kernel.forward(queries, *selected, pair.segments, score_of(pair, score))
            return out, lse.transpose(1, 2)

        return self.over_blocks(torch.stack([k, v]), forward)

    def differentiate(
        self,
        grad: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        kernel: Kernel,
        score: Score,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Compute gradients of q, k and v, in float32 at least."""
        grad_q = torch.zeros_like(q, dtype=lse.dtype)

        def backward(pair: Pair, keys: Tensor, key_grads: Tensor) -> None:
            inputs = [take(x, pair.queries) for x in (grad, q)]
            inputs += [take(x, pair.keys) for x in keys]
            results = [take(x, pair.queries) for x in (out, lse)]
            results[1] = results[1].transpose(1, 2).contiguous()
            grads = kernel.backward(*inputs, *results, pair.segments, score_of(pair, score))
            for target, where, part in zip(
                (grad_q, *key_grads), (pair.queries, pair.keys, pair.keys), grads, strict=True
            ):
                add(target, where, part)

        grad_k, grad_v = self.key_gradients(torch.stack([k, v]), lse.dtype, backward)
        return grad_q, grad_k, grad_v

    def over_blocks(self, keys: Tensor, forward: Forward) -> tuple[Tensor, Tensor]:
        """Compute attention over all blocks; return out and log-sum-exp, as `attend` does.

        Args:
            keys: (2, ., ., G, K), this rank's keys and values.
        """
        raise NotImplementedError

    def key_gradients(self, keys: Tensor, dtype: torch.dtype, backward: Backward) -> Tensor:
        """Compute gradients of this rank's `keys` in `dtype`, summed over all ranks' queries."""
        raise NotImplementedError


def score_of(pair: Pair, score: Score) -> Score:
    """Return the Score of a pair: windows apply to causal pairs only."""
    return Score(score.scale, pair.causal, score.window if pair.causal else 0, score.softcap)


def take(x: Tensor, where: Where) -> Tensor:
    """Return the tokens of x at `where`; x itself for ALL."""
    return x if where is ALL else x[:, where]


def put(x: Tensor, where: Where) -> Tensor:
    """Return a copy of x with its tokens at `where`, a permutation: the inverse of `take`."""
    if where is ALL:
        return x.clone()
    whole = torch.empty_like(x)
    whole[:, where] = x
    return whole


def add(target: Tensor, where: Where, part: Tensor) -> None:
    """Add to selected tokens of (., n, heads, K); `where` has no duplicates."""
    target[:, where] += part.to(target.dtype)
