"""Next-token cross-entropy, summed; over a vocabulary that is whole or split over tp.

The sum over local tokens is divided by the global number of labelled tokens before backward, so
that every layout gives the same number; a mean of means would not where labels are spread unevenly.

A split vocabulary is never gathered. With z the local logits, the ranks share two rounds of
per-token numbers: the maximum m, then s = sum(exp(z - m)) and the label's z - m, which one rank
holds. The loss is log(s) - (z_label - m), its gradient exp(z - m) / s - [label].

Source: Megatron-LM, arXiv:1909.08053, section 3.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.nn import functional as F

IGNORE = -100


@dataclass(frozen=True)
class VocabularyShard:
    """Which columns of the logits a rank holds."""

    size: int
    """Tokens of the whole vocabulary; columns from there on are padding."""
    rank: int
    """Index of this rank's part: its columns start at rank * width."""
    group: dist.ProcessGroup
    """The tp ranks."""


def cross_entropy_sum(
    logits: Tensor, labels: Tensor, vocabulary: VocabularyShard | None = None
) -> Tensor:
    """Summed negative log-likelihood in nats of the labelled tokens.

    Args:
        logits: (B, T, V) in any float dtype, or the rank's columns (B, T, V / tp) of a split
            vocabulary; the softmax is taken in float32 at least.
        labels: int64 (B, T); -100 where no loss is due.
        vocabulary: the split, if there is one.
    Returns:
        A scalar, float32 (float64 for float64 logits); the same on all tp ranks.
    """
    logits, labels = logits.flatten(0, 1), labels.flatten()
    if vocabulary is not None:
        total: Tensor = _SplitCrossEntropy.apply(logits, labels, vocabulary)  # type: ignore[assignment]
        return total
    return F.cross_entropy(_wide(logits), labels, ignore_index=IGNORE, reduction="sum")


def count_labels(labels: Tensor) -> Tensor:
    """Number of labels that are not -100: an int64 scalar on the labels' device."""
    return (labels != IGNORE).sum()


class _SplitCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocabulary: VocabularyShard) -> Tensor:
        z = _masked(logits, vocabulary)
        top = funcol.all_reduce(z.amax(dim=1), "max", vocabulary.group)
        z = z - top.unsqueeze(1)
        picked = torch.where(_is_label(z, labels, vocabulary), z, 0.0).sum(dim=1)
        sums = torch.stack([z.exp().sum(dim=1), picked])
        total, picked = funcol.all_reduce(sums, "sum", vocabulary.group).unbind()
        ctx.save_for_backward(logits, labels, top, total)
        ctx.vocabulary = vocabulary
        return torch.where(labels == IGNORE, 0.0, total.log() - picked).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        logits, labels, top, total = ctx.saved_tensors
        z = _masked(logits, ctx.vocabulary)
        softmax = (z - top.unsqueeze(1)).exp() / total.unsqueeze(1)
        gradient = softmax - _is_label(z, labels, ctx.vocabulary).to(z.dtype)
        due = torch.where(labels == IGNORE, 0.0, grad).unsqueeze(1)
        return (gradient * due).to(logits.dtype), None, None


def _wide(logits: Tensor) -> Tensor:
    return logits if logits.dtype == torch.float64 else logits.float()


def _columns(z: Tensor, vocabulary: VocabularyShard) -> Tensor:
    """Token of each local column: int64 (V / tp,)."""
    return vocabulary.rank * z.shape[1] + torch.arange(z.shape[1], device=z.device)


def _masked(logits: Tensor, vocabulary: VocabularyShard) -> Tensor:
    """Logits in float32 at least, -inf in padded columns."""
    return _wide(logits).masked_fill(_columns(logits, vocabulary) >= vocabulary.size, -torch.inf)


def _is_label(z: Tensor, labels: Tensor, vocabulary: VocabularyShard) -> Tensor:
    """Where a column is the token's label: bool (B * T, V / tp)."""
    return _columns(z, vocabulary) == labels.unsqueeze(1)
