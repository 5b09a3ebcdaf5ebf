"""Log-likelihoods of continuations, in any layout."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.data import Batch
from dtron.parallelisms.mesh import BATCH_AXES, SHARE_AXES
from dtron.training.evaluation import Evaluation
from dtron.training.loss import IGNORE
from dtron.training.step import as_micro_batch

_MULTIPLE = 64


def padded_length(n_tokens: int, seq_len: int) -> int:
    """Return the length to which a text is padded: a multiple of 64, which cp and tp can split."""
    return min(seq_len, math.ceil(n_tokens / _MULTIPLE) * _MULTIPLE)


@dataclass(frozen=True)
class Continuation:
    """A text whose last tokens are scored."""

    tokens: list[int]
    """At most `train.seq_len` + 1."""
    n_scored: int
    """Number of tokens at the end that are scored; fewer than there are tokens."""


@torch.no_grad()
def score(loaded: Evaluation, texts: Sequence[Continuation]) -> list[tuple[float, bool]]:
    """Score continuations; all ranks call it together, with the same texts.

    Data-parallel ranks share the texts out, `train.micro_batch` at a time.

    Returns:
        For each text, the sum of the log-probabilities of its scored tokens, in nats, and whether
        each of them is the most likely token; equal on all ranks.
    """
    mesh, size = loaded.model.mesh, loaded.config.train.micro_batch
    rank, ranks = mesh.rank(*BATCH_AXES), mesh.size(*BATCH_AXES)
    found = torch.zeros(len(texts), 2, dtype=torch.float64, device=loaded.tokens.device)
    longest_first = sorted(range(len(texts)), key=lambda i: -len(texts[i].tokens))
    with loaded.model.applied.evaluating():
        for start in range(0, len(texts), size * ranks):
            longest = len(texts[longest_first[start]].tokens) - 1
            length = padded_length(longest, loaded.config.train.seq_len)
            own = longest_first[start + rank * size :][:size]
            batch = loaded.tokens.prepare(_batch([texts[i] for i in own], size, length))
            rows = loaded.repeated(lambda batch=batch: _scores(loaded, batch))
            found[own] = rows[: len(own)]
    dist.all_reduce(found, group=mesh.group(*SHARE_AXES))
    return [(row[0], row[1] == 0) for row in found.tolist()]


def _batch(texts: Sequence[Continuation], size: int, length: int) -> Batch:
    """Return a batch (size, length) with labels for scored tokens only."""
    tokens = torch.zeros(size, length, dtype=torch.int64)
    labels = torch.full_like(tokens, IGNORE)
    pieces = torch.full_like(tokens, -1, dtype=torch.int32)  # routers ignore padding
    for row, text in enumerate(texts):
        n = len(text.tokens) - 1
        ids = torch.tensor(text.tokens)
        tokens[row, :n], pieces[row, :n] = ids[:-1], 0
        labels[row, n - text.n_scored : n] = ids[1:][n - text.n_scored :]
    return Batch(tokens, labels, torch.arange(size), None, None, pieces=pieces)


def _scores(loaded: Evaluation, batch: Batch) -> Tensor:
    """Return the log-likelihood of each sequence, and its number of tokens that others exceed.

    Args:
        batch: this rank's tokens (B, T / cp).
    Returns:
        float64 (B, 2), of this rank's tokens; 0 on all but the last pipeline stage.
    """
    labels, mesh = batch.labels, loaded.model.mesh
    vocabulary = loaded.tokens.model.config.vocab_size
    rows = torch.zeros(len(labels), 2, dtype=torch.float64, device=labels.device)

    def add(logits: Tensor, _i: int) -> None:
        scored = labels != IGNORE
        each = token_scores(
            logits[scored], labels[scored], vocabulary, mesh.rank("tp"), mesh.group("tp")
        )
        rows.index_add_(0, scored.nonzero()[:, 0], each)

    loaded.model.execution.evaluate([as_micro_batch(batch)], add)
    return rows


def token_scores(
    logits: Tensor, labels: Tensor, vocab_size: int, rank: int, group: dist.ProcessGroup
) -> Tensor:
    """Return the log-probability of each label, and whether another token is more likely.

    Args:
        logits: (N, V / tp), columns of this tp rank; those from `vocab_size` on are padding.
        labels: int64 (N,), the same on all tp ranks.
        rank: index of this rank among the tp ranks.
        group: the tp ranks.
    Returns:
        float64 (N, 2).
    """
    logits, width = logits.double(), logits.shape[-1]
    columns = torch.arange(width, device=labels.device) + rank * width
    logits = logits.masked_fill(columns >= vocab_size, -torch.inf)
    highest = logits.amax(-1)
    dist.all_reduce(highest, op=dist.ReduceOp.MAX, group=group)
    sums = (logits - highest[:, None]).exp().sum(-1)
    own = logits.masked_fill(columns != labels[:, None], 0.0).sum(-1)
    dist.all_reduce(sums, group=group)
    dist.all_reduce(own, group=group)
    return torch.stack([own - highest - sums.log(), (own < highest).double()], -1)
