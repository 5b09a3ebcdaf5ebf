"""Base of ring and gathered attention: tokens in block order, and pairs of queries and keys."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dtron.kernels.attention import Kernel, Score
from dtron.parallelisms.functional_collectives import NamedGroup

Where = slice | Tensor
"""Some of a block's tokens: dim 1 of a tensor (B, N / B, ...), or of (1, N, ...) with documents."""
ALL = slice(None)


@dataclass(frozen=True)
class Pair:
    """Queries of this rank that attend to keys of one block, or of all gathered blocks."""

    queries: Where
    keys: Where
    causal: bool
    segments: Tensor | None


Forward = Callable[[Pair, Tensor], tuple[Tensor, Tensor]]
"""(pair, keys and values at hand) -> out and lse of the pair's queries."""
Backward = Callable[[Pair, Tensor, Tensor], None]
"""(pair, keys and values at hand, their gradients), which it adds to."""


class Blocks:
    """Attention of one rank's tokens, arranged early before late, to the keys of all blocks.

    Args:
        q: (B, inner * t, H, K), the rank's queries.
        tables: of `Split.tables` for the method; empty: one document per sequence.
        group: name of the process group over the blocks.
        inner: ranks whose tokens a block holds.
    """

    def __init__(
        self,
        q: Tensor,
        tables: Sequence[Tensor],
        group: str,
        inner: int,
    ) -> None:
        self.batch, self.tables, self.inner = q.shape[0], tables, inner
        self.group = NamedGroup.find(group)
        self.rank, self.size = self.group.rank(), self.group.size()
        self.half = q.shape[1] // 2 * (q.shape[0] if tables else 1)

    # A rank's tokens arrive as (inner, early and late, piece); late pieces of later ranks lie
    # before those of earlier ones.

    def arrange(self, x: Tensor) -> Tensor:
        """(B, inner * t, ...) -> the same in the order of the block, (1, B * inner * t, ...) where
        there are documents."""
        if self.tables:
            return x.flatten(0, 1)[self.tables[0]].unsqueeze(0)
        if self.inner == 1:
            return x
        early, late = x.unflatten(1, (self.inner, 2, -1)).unbind(2)
        return torch.cat([early.flatten(1, 2), late.flip(1).flatten(1, 2)], dim=1)

    def restore(self, x: Tensor) -> Tensor:
        """The inverse of `arrange`."""
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
        """out (., ., H, K) and lse (., ., H), in float32 at least."""

        def forward(pair: Pair, keys: Tensor) -> tuple[Tensor, Tensor]:
            found = [take(x, pair.keys) for x in keys]
            queries = take(q, pair.queries)
            out, lse = kernel.forward(queries, *found, pair.segments, score_of(pair, score))
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
        """Gradients of q, k and v, in float32 at least."""
        grad_q = torch.zeros_like(q, dtype=lse.dtype)

        def backward(pair: Pair, keys: Tensor, due: Tensor) -> None:
            parts = [take(x, pair.queries) for x in (grad, q)]
            parts += [take(x, pair.keys) for x in keys]
            sums = [take(x, pair.queries) for x in (out, lse)]
            sums[1] = sums[1].transpose(1, 2).contiguous()
            found = kernel.backward(*parts, *sums, pair.segments, score_of(pair, score))
            for target, where, part in zip(
                (grad_q, *due), (pair.queries, pair.keys, pair.keys), found, strict=True
            ):
                add(target, where, part)

        grad_k, grad_v = self.key_gradients(torch.stack([k, v]), lse.dtype, backward)
        return grad_q, grad_k, grad_v

    def over_blocks(self, keys: Tensor, forward: Forward) -> tuple[Tensor, Tensor]:
        """Attention over all blocks: out and lse as of `attend`.

        Args:
            keys: (2, ., ., G, K), this rank's keys and values.
        """
        raise NotImplementedError

    def key_gradients(self, keys: Tensor, dtype: torch.dtype, backward: Backward) -> Tensor:
        """Gradients of this rank's `keys` in `dtype`, summed over all ranks' queries."""
        raise NotImplementedError


def score_of(pair: Pair, score: Score) -> Score:
    return Score(score.scale, pair.causal, score.window if pair.causal else 0, score.softcap)


def take(x: Tensor, where: Where) -> Tensor:
    return x if where is ALL else x[:, where]


def put(x: Tensor, where: Where) -> Tensor:
    """The inverse of `_take` for all tokens in another order; a copy."""
    if where is ALL:
        return x.clone()
    whole = torch.empty_like(x)
    whole[:, where] = x
    return whole


def add(target: Tensor, where: Where, part: Tensor) -> None:
    """Add to some tokens of (., n, heads, K); none of them comes twice."""
    target[:, where] += part.to(target.dtype)
