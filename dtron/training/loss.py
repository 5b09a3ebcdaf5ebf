"""Next-token cross-entropy, summed by sequence, from logits or the hidden states before the head.

The sum over local tokens is divided by the global number of labels before the backward, so that
every layout gives the same loss. (The mean of the ranks' means would be another loss if ranks have
different numbers of labels.)

If the vocabulary is sharded over tp, the logits z are never gathered. Two all-reduces of a few
values per token suffice: first of the maximum m, then of s = sum(exp(z - m)) and of z_label - m,
which only the rank with the label's column has.
The loss is log(s) - (z_label - m). Its gradient is exp(z - m) / s - one_hot(label).

`ChunkedLoss` also computes the head, one chunk of the N tokens at a time. The forward computes a
chunk's loss and the gradient of its logits, and from this gradient those of the hidden states
(N, D) and of the weight (V, D). Then the memory of the logits is free for the next chunk:

    all logits at once    N V elements, several times: logits, softmax, gradient
    in n chunks           N V / n, and the weight's gradient V D until the backward

Matmuls of a vocabulary that is no multiple of 8, such as GPT-2's 50,257 tokens, are slow on GPUs.
So training computes the chunks with rows of zeros below the weight, up to a multiple of 64.

With multi-token prediction, the losses of all predictions share one weight gradient. The weight of
each prediction in the objective is known before its loss, so that the gradient of each chunk is
scaled before it is added.

Sources: Megatron-LM, arXiv:1909.08053, section 3; Liger Kernel, arXiv:2410.10989, section 3.2; Cut
Your Losses, arXiv:2411.09009.
"""

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from dtron.config import Compile
from dtron.kernels.accumulate import multiply_into
from dtron.models.layers import soft_cap
from dtron.parallelisms.functional_collectives import all_reduce, wait_tensor

IGNORE = -100
EVEN = 64
"""A size of which matmuls with a multiple are fast on all GPUs."""


@dataclass(frozen=True)
class VocabularyShard:
    """The columns of the logits on one rank."""

    size: int
    """Size of the whole vocabulary; columns with this index or a larger one are padding."""
    rank: int
    """Index of this rank's shard: its columns start at rank * width."""
    group: dist.ProcessGroup
    """The tp ranks."""


def sequence_losses(
    logits: Tensor, labels: Tensor, vocabulary: VocabularyShard | None = None
) -> Tensor:
    """Compute the negative log-likelihood, in nats, summed over the labelled tokens of a sequence.

    Args:
        logits: (B sequences, T tokens, V vocabulary), or the rank's columns (B, T, V / tp) of a
            sharded vocabulary, in any float dtype. The softmax is computed in float32 at least.
        labels: int64 (B, T); -100 for tokens without loss.
        vocabulary: this rank's shard; None: the vocabulary is not sharded.
    Returns:
        (B,), float32 (float64 for float64 logits); the same on all tp ranks.
    """
    shape, logits, labels = labels.shape, logits.flatten(0, 1), labels.flatten()
    if vocabulary is not None:
        losses: Tensor = _SplitCrossEntropy.apply(logits, labels, vocabulary)  # type: ignore[assignment]
    else:
        losses = F.cross_entropy(_upcast(logits), labels, ignore_index=IGNORE, reduction="none")
    return losses.view(shape).sum(1)


def count_labels(labels: Tensor) -> Tensor:
    """Count the labels that are not -100: an int64 scalar on the labels' device."""
    return (labels != IGNORE).sum()


def losses_from_head(output: tuple[Tensor, Tensor], _labels: Tensor) -> Tensor:
    """Return the losses of sequences of a model whose head computes them; without a gradient."""
    return output[1]


class ChunkedLoss:
    """Head and summed cross-entropy in one function, with the logits of one chunk at a time.

    The forward computes gradients with the loss; the backward multiplies them by the gradient of
    the loss. The weight's gradient is summed over chunks in float32 at least, since bfloat16 would
    round each addition; it is kept for the backward in the weight's dtype.

    Args:
        chunks: number of chunks; if it does not divide the tokens, the last chunk is smaller or
            there are fewer chunks.
        vocabulary: this rank's shard, with two all-reduces per chunk; None: not sharded.
        compile: whether and how to compile the loss of one chunk.
        cap: soft cap of the logits; 0: off.
    """

    def __init__(
        self,
        chunks: int,
        vocabulary: VocabularyShard | None = None,
        compile: Compile = Compile(),
        cap: float = 0.0,
    ) -> None:
        self.chunks = chunks
        self.per_chunk: _PerChunk = functools.partial(
            _loss_of_chunk, vocabulary=vocabulary, cap=cap
        )
        if compile.enable:
            self.per_chunk = torch.compile(
                self.per_chunk, backend=compile.backend, fullgraph=True, dynamic=False
            )

    def __call__(
        self, hidden: Tensor, weight: Tensor, labels: Tensor, weights: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Compute the summed negative log-likelihood, in nats, of all tokens with a label.

        Args:
            hidden: (B, T, D), equal on all tp ranks. Its gradient is partial on each rank, from the
                rank's columns. With `weights`: (P B, T, D), P predictions one after the other.
            weight: weight of the head (V, D), or the rank's rows (V / tp, D), in hidden's dtype.
            labels: int64 (B, T) or (P B, T); -100 for tokens without loss.
            weights: (P,), float32 at least: the weight of each prediction's sum in the objective.
        Returns:
            (the sum of all losses, with `weights` weighted by prediction: a scalar; the sum of each
            sequence (B,) or (P B,), which has no gradient). Both are float32 (float64 for float64
            hidden) and equal on all tp ranks. The backward can run only once.
        """
        shape, hidden, labels = labels.shape, hidden.flatten(0, 1), labels.flatten()
        predictions = 1 if weights is None else len(weights)
        size = -(-len(labels) // predictions // self.chunks)
        if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
            found = _HeadLoss.apply(hidden, weight, labels, weights, size, self.per_chunk)
            objective, losses = found  # type: ignore[misc]
        else:
            losses = hidden.new_empty(len(labels), dtype=_at_least_float32(hidden.dtype))
            for _, part in _chunks(len(labels), predictions, size):
                logits = F.linear(hidden[part], weight)
                losses[part] = self.per_chunk(logits, labels[part], None, False)
            objective = _objective(losses, weights)
        return objective, losses.view(shape).sum(1)


def _chunks(n: int, predictions: int, size: int) -> Iterator[tuple[int, slice]]:
    """Yield (index of the prediction, slice of at most `size` of its tokens) over all n tokens."""
    each = n // predictions
    for k in range(predictions):
        for start in range(0, each, size):
            yield k, slice(k * each + start, k * each + min(start + size, each))


def _objective(losses: Tensor, weights: Tensor | None) -> Tensor:
    if weights is None:
        return losses.sum()
    return (losses.view(len(weights), -1).sum(1) * weights).sum().to(losses.dtype)


class _PerChunk(Protocol):
    """`_loss_of_chunk` with a fixed `vocabulary` and `cap`, compiled or not."""

    def __call__(
        self, logits: Tensor, labels: Tensor, factor: Tensor | None, gradient: bool, /
    ) -> Tensor:
        """Do what `_loss_of_chunk` does, for this vocabulary and cap."""
        ...


def _loss_of_chunk(
    logits: Tensor,
    labels: Tensor,
    factor: Tensor | None,
    gradient: bool,
    vocabulary: VocabularyShard | None,
    cap: float,
) -> Tensor:
    """Compute the losses (n,) of the tokens of logits (n, V / tp).

    Args:
        factor: factor of the gradient; None: 1.
        gradient: overwrite the logits with their gradient, times `factor`.
        cap: soft cap of the logits; 0: off.
    """
    z = soft_cap(_upcast(logits), cap) if cap else logits
    losses, top, total = _token_losses(z, labels, vocabulary)
    if gradient:
        token_grads = (labels != IGNORE).to(losses.dtype)
        token_grads = token_grads if factor is None else token_grads * factor
        grad = _logits_gradient(z, labels, top, total, token_grads, vocabulary)
        logits.copy_(grad * (1 - (z / cap).square()) if cap else grad)
    return losses


class _HeadLoss(torch.autograd.Function):
    """Autograd function of `ChunkedLoss`.

    It returns (weighted sum of the losses, losses of all tokens of P predictions (P B T,)).
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        weights: Tensor | None,
        size: int,
        per_chunk: _PerChunk,
    ) -> tuple[Tensor, Tensor]:
        by_hidden, by_weight = ctx.needs_input_grad[:2]
        predictions = 1 if weights is None else len(weights)
        losses = hidden.new_empty(len(hidden), dtype=_at_least_float32(hidden.dtype))
        grad_hidden = torch.empty_like(hidden) if by_hidden else None
        columns, dtype = len(weight), weight.dtype
        weight = F.pad(weight, (0, 0, 0, -columns % EVEN)) if columns % EVEN else weight
        grad_weight = None
        if by_weight:
            grad_weight = torch.zeros_like(weight, dtype=_at_least_float32(dtype))
        for k, part in _chunks(len(hidden), predictions, size):
            factor = None if weights is None else weights[k]
            into = None if grad_hidden is None else grad_hidden[part]
            x, y = hidden[part], labels[part]
            losses[part] = _add_chunk(x, weight, columns, y, factor, per_chunk, into, grad_weight)
        ctx.gradients = (
            grad_hidden,
            None if grad_weight is None else grad_weight[:columns].to(dtype),
        )
        ctx.mark_non_differentiable(losses)
        return _objective(losses, weights), losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.gradients is None:
            raise RuntimeError("a chunked loss was differentiated twice; compute the loss again")
        # Scaled in place and not kept, since a copy is as large as the weight.
        (grad_hidden, grad_weight), ctx.gradients = ctx.gradients, None
        for gradient in (grad_hidden, grad_weight):
            if gradient is not None:  # a vector, since torch casts a scalar to the gradient's dtype
                torch.mul(gradient, grad.view(1), out=gradient)
        return grad_hidden, grad_weight, None, None, None, None


def _add_chunk(
    x: Tensor,
    weight: Tensor,
    columns: int,
    labels: Tensor,
    factor: Tensor | None,
    per_chunk: _PerChunk,
    grad_x: Tensor | None,
    grad_weight: Tensor | None,
) -> Tensor:
    """Compute the losses (n,) of the tokens of a chunk; on return, its logits are freed.

    Args:
        x: (n, D).
        weight: (V / tp and further rows of zeros, D).
        columns: V / tp.
        factor: factor of this chunk's gradients; None: 1.
        grad_x: (n, D), is overwritten with the gradient; None: not needed.
        grad_weight: as weight, the gradient is added to it; None: not needed.
    """
    grad = F.linear(x, weight)  # logits at first; further columns are zeros, as is their gradient
    losses = per_chunk(grad[:, :columns], labels, factor, True)
    if grad_x is not None:
        torch.mm(grad, weight, out=grad_x)
    if grad_weight is not None:
        multiply_into(grad_weight, grad.t(), x, add=True)
    return losses


class _SplitCrossEntropy(torch.autograd.Function):
    """Cross-entropy of tokens, (n,), of a vocabulary that is sharded over tp."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, vocabulary: VocabularyShard) -> Tensor:
        losses, top, total = _token_losses(logits, labels, vocabulary)
        ctx.save_for_backward(logits, labels, top, total)
        ctx.vocabulary = vocabulary
        return losses

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        logits, labels, top, total = ctx.saved_tensors
        token_grads = torch.where(labels == IGNORE, 0.0, grad)
        grad = _logits_gradient(logits, labels, top, total, token_grads, ctx.vocabulary)
        return grad.to(logits.dtype), None, None


def _token_losses(
    logits: Tensor, labels: Tensor, vocabulary: VocabularyShard | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute each token's loss, maximum logit, and sum of exp(logit - maximum).

    All three are over the whole vocabulary: (n,), in float32 at least.
    """
    z = _masked(logits, vocabulary)
    top = _over_ranks(z.amax(dim=1), "max", vocabulary)
    z = z - top.unsqueeze(1)
    picked = torch.where(_is_label(z, labels, vocabulary), z, 0.0).sum(dim=1)
    sums = torch.stack([z.exp().sum(dim=1), picked])
    total, picked = _over_ranks(sums, "sum", vocabulary).unbind()
    return torch.where(labels == IGNORE, 0.0, total.log() - picked), top, total


def _logits_gradient(
    logits: Tensor,
    labels: Tensor,
    top: Tensor,
    total: Tensor,
    token_grads: Tensor,
    vocabulary: VocabularyShard | None,
) -> Tensor:
    """Compute the gradient of the logits, in their shape and in float32 at least.

    Args:
        top, total: results of `_token_losses`.
        token_grads: (n,), gradient of each token's loss.
    """
    # The difference is a new tensor; later operations are in place, to save memory.
    gradient = (_masked(logits, vocabulary) - top.unsqueeze(1)).exp_().div_(total.unsqueeze(1))
    gradient.sub_(_is_label(gradient, labels, vocabulary).to(gradient.dtype))
    return gradient.mul_(token_grads.unsqueeze(1))


def _over_ranks(
    x: Tensor, operation: Literal["sum", "max"], vocabulary: VocabularyShard | None
) -> Tensor:
    if vocabulary is None:
        return x
    return wait_tensor(all_reduce(x, operation, vocabulary.group.group_name))


def _at_least_float32(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _upcast(logits: Tensor) -> Tensor:
    return logits.to(_at_least_float32(logits.dtype))


def _columns(z: Tensor, vocabulary: VocabularyShard | None) -> Tensor:
    """Return the token id of each local column: int64 (V / tp,)."""
    first = 0 if vocabulary is None else vocabulary.rank * z.shape[1]
    return first + torch.arange(z.shape[1], device=z.device)


def _masked(logits: Tensor, vocabulary: VocabularyShard | None) -> Tensor:
    """Return logits in float32 at least, with -inf in padded columns."""
    z = _upcast(logits)
    if vocabulary is None:
        return z
    return z.masked_fill(_columns(z, vocabulary) >= vocabulary.size, -torch.inf)


def _is_label(z: Tensor, labels: Tensor, vocabulary: VocabularyShard | None) -> Tensor:
    """Return a mask of the columns that are the token's label: bool (n, V / tp)."""
    return _columns(z, vocabulary) == labels.unsqueeze(1)
