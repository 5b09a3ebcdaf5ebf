"""What recurrent layers share: the causal convolution, starts of documents, shards of heads.

Recurrent layers are gated delta nets and Mamba-2. Their heads are independent up to the output
matrix and come in groups, which share some inputs: all channels and head parameters are ordered by
group. Tensor parallelism splits between groups, and context parallelism replaces the forward of
their core, which takes whole sequences of any of the groups.

Shapes: B sequences, T tokens, G groups, W width of the convolution.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def document_starts(documents: Any, positions: Tensor) -> Tensor | None:
    """Return bool (B, T), True at the first token of a document; None: one document per sequence.

    Args:
        documents: integers (B, T), equal within a document; None; or tables that
            `Backend.described` or context parallelism made from them: then positions restart in
            each document.
        positions: int64 (B or 1, T).
    """
    if documents is None:
        return None
    if not isinstance(documents, Tensor):
        return positions == 0
    return torch.cat(
        [torch.ones_like(documents[:, :1], dtype=torch.bool), documents.diff(dim=1) != 0], dim=1
    )


def causal_convolution(
    x: Tensor, weight: Tensor, starts: Tensor | None, bias: Tensor | None = None
) -> Tensor:
    """Convolve each channel with its last W tokens of the same document, in float32 at least.

    Args:
        x: (B, T, ...).
        weight: (..., W); the last column multiplies the token itself.
        starts: bool (B, T), True at the first token of a document; None: one document.
        bias: (...), added to each token's sum.
    Returns:
        (B, T, ...) in x's dtype.
    """
    return _Convolution.apply(x, weight, starts, bias)


class _Convolution(torch.autograd.Function):
    """`causal_convolution`, which saves its inputs only, without masked or wider copies."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, starts: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(x, weight, starts, bias)
        wide, number = torch.promote_types(x.dtype, torch.float32), _numbers(starts)
        given, weight = x.to(wide), weight.to(wide)
        out = given * weight[..., -1]
        out = out if bias is None else out + bias.to(wide)
        for back in range(1, min(weight.shape[-1], x.shape[1])):
            out = out + _moved(given, back, number) * weight[..., -1 - back]
        # Compiled with torch 2.11, a forward that ends in a no-op has no gradient.
        return out if out.dtype == x.dtype else out.to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, weight, starts, bias = ctx.saved_tensors
        wide, number = torch.promote_types(x.dtype, torch.float32), _numbers(starts)
        grad, given, taps = grads[0].to(wide), x.to(wide), weight.to(wide)
        width, seen = taps.shape[-1], min(taps.shape[-1], x.shape[1])
        to_x, to_taps = grad * taps[..., -1], [(grad * given).sum((0, 1))]
        for back in range(1, seen):
            later = _moved(grad, -back, number)
            to_x = to_x + later * taps[..., -1 - back]
            to_taps.append((later * given).sum((0, 1)))
        to_weight = F.pad(torch.stack(to_taps[::-1], -1), (width - seen, 0))
        to_bias = None if bias is None else grad.sum((0, 1)).to(bias.dtype)
        return to_x.to(x.dtype), to_weight.to(weight.dtype), None, to_bias


def _numbers(starts: Tensor | None) -> Tensor | None:
    """Return the number of each token's document in its sequence, int64 (B, T)."""
    return None if starts is None else starts.cumsum(1)


def _moved(x: Tensor, by: int, number: Tensor | None) -> Tensor:
    """Return x (B, T, ...) at token t - `by`, 0 outside of the document of token t."""
    n, rest = abs(by), [0] * (2 * (x.dim() - 2))
    kept, ends = (x[:, :-n], (n, 0)) if by > 0 else (x[:, n:], (0, n))
    if number is not None:
        same = number[:, n:] == number[:, :-n]
        kept = kept * same.view(*same.shape, *[1] * (x.dim() - 2))
    return F.pad(kept, (*rest, *ends))


class GroupedModule(nn.Module):
    """Module with parameters of all groups, ordered by group, of which it uses the part of some.

    Attributes:
        n_groups: number of groups of all ranks.
        head_shard: index of this rank's shard of the groups, which are sharded evenly.
    """

    def __init__(self, n_groups: int):
        super().__init__()
        self.n_groups, self.head_shard = n_groups, 0

    def own(self, parameter: Tensor, groups: int, shard: int | None) -> Tensor:
        """Return the part of a parameter, (groups, size per group, ...).

        Args:
            parameter: (size, ...), ordered by group.
            groups: number of groups in a shard.
            shard: index of the shard; None: `head_shard`.
        """
        by_group = parameter.unflatten(0, (-1, groups, parameter.shape[0] // self.n_groups))
        return by_group[self.head_shard if shard is None else shard]
