"""Next-token cross-entropy, summed.

The sum over local tokens is divided by the global number of labelled tokens before backward, so
that every layout gives the same number; a mean of means would not where labels are spread unevenly.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

IGNORE = -100


def cross_entropy_sum(logits: Tensor, labels: Tensor) -> Tensor:
    """Summed negative log-likelihood in nats of the labelled tokens.

    Args:
        logits: (B, T, V) in any float dtype; the softmax is taken in float32 at least.
        labels: int64 (B, T); -100 where no loss is due.
    Returns:
        A scalar, float32 (float64 for float64 logits).
    """
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return F.cross_entropy(
        wide.flatten(0, 1), labels.flatten(), ignore_index=IGNORE, reduction="sum"
    )


def count_labels(labels: Tensor) -> Tensor:
    """Number of labels that are not -100: an int64 scalar on the labels' device."""
    return (labels != IGNORE).sum()
