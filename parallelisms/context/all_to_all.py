"""Ulysses: all-to-all between shards of the sequence and shards of the heads (arXiv:2309.14509).

Legend: B sequences, t tokens on a rank, n ranks, H query heads, G key/value heads, K head_dim.
"""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.parallelisms.functional_collectives import all_to_all_even


def to_heads(
    q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup, n: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Exchange t tokens of all heads for n * t tokens, in rank order, of 1 / n of the heads.

    Key/value heads are repeated first if n does not divide their number.
    """
    repeats = math.lcm(k.shape[2], n) // k.shape[2]
    if repeats > 1:
        k, v = k.repeat_interleave(repeats, 2), v.repeat_interleave(repeats, 2)
    heads = [x.shape[2] // n for x in (q, k, v)]
    by_rank = torch.cat([x.unflatten(2, (n, -1)) for x in (q, k, v)], dim=3)
    q, k, v = exchange_heads(by_rank.flatten(2, 3), group, n).split(heads, dim=2)
    return q, k, v


def exchange_heads(x: Tensor, group: dist.ProcessGroup, n: int) -> Tensor:
    """Exchange (B, t, H, K), t tokens of all heads, for (B, n * t, H / n, K), in rank order."""
    sent = x.unflatten(2, (n, -1)).permute(2, 0, 1, 3, 4).contiguous()
    return all_to_all_even(sent, group).permute(1, 0, 2, 3, 4).flatten(1, 2)


def to_tokens(out: Tensor, group: dist.ProcessGroup, n: int) -> Tensor:
    """Undo `to_heads` for the output: (B, n * t, H / n, K) -> (B, t, H, K)."""
    sent = out.unflatten(1, (n, -1)).transpose(0, 1).contiguous()
    received = all_to_all_even(sent, group)
    return received.permute(1, 2, 0, 3, 4).flatten(2, 3)
