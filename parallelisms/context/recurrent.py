"""Context parallelism of recurrent layers: whole sequences of some heads instead of some tokens.

A recurrence over tokens, such as a gated delta net or Mamba-2, has no blocks of keys to send
around. But its heads are independent, or groups of heads, which share inputs. So an all-to-all over
all cp ranks exchanges this rank's tokens of all groups for all tokens of its shard of the groups,
in the order of the sequence; the module then computes as with cp = 1, and a second all-to-all
returns its outputs. Any distribution of the tokens over ranks is possible, and documents need no
tables.

Legend: B sequences, T tokens, t = T / cp on a rank, n = cp ranks, G heads or groups on a rank.
Source: Ulysses, arXiv:2309.14509; Megatron-Core does the same for Mamba and gated delta nets.
"""

from collections.abc import Sequence
from types import MethodType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtron.parallelisms.context.all_to_all import exchange_heads, to_tokens


def apply_recurrent_context(modules: Sequence[nn.Module], group: dist.ProcessGroup) -> None:
    """Replace the forward of recurrent modules, in place; `group`: all cp ranks.

    Their forward takes (inputs (B, T, G, .), ..., starts, order, shard), as `DeltaCore` of
    `models/gated_delta_net.py` does.
    """

    def forward(module: nn.Module, *arguments: Any) -> Tensor:
        return _forward(module, group, *arguments)

    # Methods of one function, since torch.compile makes a graph per function or callable object.
    for module in modules:
        module.forward = MethodType(forward, module)  # type: ignore[method-assign]


def _forward(module: nn.Module, group: dist.ProcessGroup, *arguments: Any) -> Tensor:
    """Compute the module's outputs (B, t, G, .) of this rank's tokens.

    Args:
        module: the forward of its class computes whole sequences.
        arguments: the module's inputs, each (B, t, G, .), of one dtype; then `starts` and
            `order`. starts: bool (B, t), True at the first token of a document; None: one
            document. order: int64 (B, T), index of each token in its sequence, rank by rank;
            None: that of sequences that are one document each.
    """
    *inputs, starts, order = arguments
    n, flag = group.size(), () if starts is None else (starts,)
    if order is None:
        assert starts is None, "a recurrent layer with documents needs the order of all tokens"
        order = order_of_whole_sequences(n, inputs[0])
    like = inputs[0]
    marks = (s.view(*s.shape, 1, 1).expand(*like.shape[:3], 1).to(like.dtype) for s in flag)
    sent = torch.cat([*inputs, *marks], dim=-1)
    arrived = exchange_heads(sent, group, n)  # (B, T, G / n, .)
    place = torch.arange(order.shape[1], device=order.device).expand_as(order)
    place = order.new_empty(order.shape).scatter_(1, order, place)
    tokens = _Permuted.apply(arrived, place, order)
    widths = [*(x.shape[-1] for x in inputs), *[1 for _ in flag]]
    received = tokens.split(widths, dim=-1)
    shard = module.head_shard * n + group.rank()  # type: ignore[operator]
    starts = received[-1][:, :, 0, 0] > 0 if flag else None
    out = type(module).forward(module, *received[: len(inputs)], starts, None, shard)
    return to_tokens(_Permuted.apply(out, order, place), group, n)


def order_of_whole_sequences(n: int, x: Tensor) -> Tensor:
    """Return the order, int64 (B, T), of n ranks with an early and a late chunk each.

    Args:
        x: (B, t, ...), a rank's tokens.
    """
    half = x.shape[1] // 2
    early = torch.arange(n, device=x.device)
    chunks = torch.stack([early, 2 * n - 1 - early], dim=1).flatten()
    tokens = chunks.unsqueeze(1) * half + torch.arange(half, device=x.device)
    return tokens.flatten().expand(x.shape[0], -1)


class _Permuted(torch.autograd.Function):
    """x[b, place[b]] of x (B, T, ...); `inverse` undoes `place`, int64 (B, T)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return _permuted(x, place)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return _permuted(grads[0], *ctx.saved_tensors), None, None


def _permuted(x: Tensor, place: Tensor) -> Tensor:
    return x.gather(1, place.view(*place.shape, *[1] * (x.dim() - 2)).expand(x.shape))
