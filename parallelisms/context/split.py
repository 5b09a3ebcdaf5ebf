"""Shard the tokens of a micro-batch over cp ranks, and make the index tables of attention.

Shapes: B sequences, T tokens of a sequence, N tokens of a block of ranks over all sequences.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dtron.config import CpMethod
from dtron.errors import ConfigError
from dtron.kernels.attention import Tables
from dtron.parallelisms.context.halo import halo
from dtron.parallelisms.context.layout import ContextLayout, table_names
from dtron.parallelisms.context.load_balance import (
    Ints,
    chunk_numbers,
    document_lengths,
    tokens_of_rank,
)


class Split:
    """Assignment of a micro-batch's tokens to cp ranks, computed on the host from its documents.

    Args:
        documents: integers (B, T), equal within a document; None: each sequence is one document.
        shape: (B, T).

    Raises:
        ConfigError: 2 * cp does not divide T.
    """

    def __init__(self, documents: Tensor | None, shape: tuple[int, int], cp: int) -> None:
        if shape[1] % (2 * cp):
            below = shape[1] // (2 * cp) * 2 * cp
            raise ConfigError(
                f"parallel.cp = {cp} splits a sequence into {2 * cp} chunks, but {2 * cp} does not "
                f"divide its {shape[1]} tokens; use a multiple such as {below or 2 * cp}"
            )
        self.documents = None if documents is None else documents.numpy()
        self.cp, self.shape = cp, shape
        self.chunk = chunk_numbers(self.documents, shape, 2 * cp)

    def index(self, rank: int) -> Tensor:
        """Return a rank's tokens as indices into the sequence: int64 (B, T / cp)."""
        return torch.from_numpy(tokens_of_rank(self.chunk, rank, 2 * self.cp))

    def tables(self, layouts: Mapping[CpMethod, ContextLayout], rank: int) -> Tables | None:
        """Return {method: index tables of a rank's attention}.

        Rings have two more entries per window (`table_names`). None if each sequence is one
        document.
        """
        if self.documents is None:
            return None
        numbers = _document_numbers(self.documents)
        found = {}
        for method, shape in layouts.items():
            chunks = _chunk_tokens(self, shape)
            found[method] = _tables(self, numbers, chunks, shape, rank)
            for window in shape.windows if shape.rings else ():
                if window < self.shape[1]:
                    name, on_host = table_names(method, window)
                    *index, counts, bounds = _tables(self, numbers, chunks, shape, rank, window)
                    found |= {name: (*index, bounds), on_host: (counts,)}
        return found


def _document_numbers(documents: NDArray) -> Ints:
    """Return the number of each token's document in the micro-batch: (B, T) -> int64 (B * T,)."""
    by_row = [document_lengths(row) for row in documents]
    return np.arange(sum(map(len, by_row))).repeat(np.concatenate(by_row))


def _tables(
    split: Split, numbers: Ints, chunks: Ints, shape: ContextLayout, rank: int, window: int = 0
) -> tuple[Tensor, ...]:
    """Make the tables of one layout on one rank, with n documents.

    Returns:
        `arrange` (N,): puts a block's tokens, as the all-to-all leaves them, into the order "early,
        then late". The other tables depend on the layout. `segments` are the bounds of each
        document in queries and keys:
        - ring, or one block: `order` (outer, N), puts each block's tokens from "early, then late"
          into the order of the sequences; segments (outer, 2, n + 1), by step.
        - all-gather: indices of the keys among the gathered tokens, int64 (.,), for early and for
          late queries; segments (2, 2, n + 1), of early and late queries.
        - ring with a window: `index` and `counts` of `halo`; segments as for the all-gather.
    """
    block, early, late = rank // shape.inner, chunks, chunks[::-1]
    blocks = np.concatenate([early, late], axis=1)[: shape.outer]
    arrange = _inverse(_arrival_order(split, shape, block), chunks.size)[blocks[block]]
    if window:
        index, counts, keys = halo(chunks, numbers, block, window)
        pairs, rest = list(zip((early[block], late[block]), keys, strict=True)), [index, counts]
    elif shape.gathers:
        whole = 2 * shape.outer
        ends = (block + 1, whole - block) if shape.causal else (whole, whole)
        gathered = _inverse(blocks.ravel(), chunks.size)
        keys = [np.sort(chunks[:end], axis=None) for end in ends]
        pairs = list(zip((early[block], late[block]), keys, strict=True))
        rest = [gathered[k] for k in keys]
    else:
        steps = range(shape.outer)
        pairs = [
            (late[block] if s > block else blocks[block], early[s] if s < block else blocks[s])
            if shape.causal
            else (blocks[block], blocks[s])
            for s in steps
        ]
        rest = [np.argsort(blocks, axis=1, kind="stable")]
    bounds = _segments([(numbers[q], numbers[k]) for q, k in pairs])
    return (*map(torch.from_numpy, (arrange, *rest)), bounds)


def _chunk_tokens(split: Split, shape: ContextLayout) -> Ints:
    """Return the tokens of each chunk, ascending, as indices into (B * T,): (2 outer, N / 2).

    Block s has chunks s and 2 outer - 1 - s.
    """
    numbers = split.chunk.ravel() // shape.inner
    return np.argsort(numbers, kind="stable").reshape(2 * shape.outer, -1)


def _arrival_order(split: Split, shape: ContextLayout, block: int) -> Ints:
    """Return a block's tokens, as indices into (B * T,), in the order that `to_heads` returns."""
    ranks = range(block * shape.inner, (block + 1) * shape.inner)
    by_rank = [tokens_of_rank(split.chunk, rank, 2 * split.cp) for rank in ranks]
    rows = np.arange(split.shape[0])[:, None] * split.shape[1]
    return (np.concatenate(by_rank, axis=1) + rows).ravel()


def _inverse(tokens: Ints, n: int) -> Ints:
    """Invert a list of different indices below n: result[tokens[i]] = i."""
    found = np.zeros(n, dtype=np.int64)
    found[tokens] = np.arange(len(tokens))
    return found


def _segments(pairs: Sequence[tuple[Ints, Ints]]) -> Tensor:
    """Return segment bounds, int32 (pairs, 2, documents + 1).

    Args:
        pairs: for each call of the kernel, the documents of its queries and of its keys.
    """
    documents = 1 + max(int(numbers.max()) for pair in pairs for numbers in pair)
    counts = [[np.bincount(numbers, minlength=documents) for numbers in pair] for pair in pairs]
    sums = np.cumsum(np.pad(np.array(counts), ((0, 0), (0, 0), (1, 0))), axis=-1)
    return torch.from_numpy(sums.astype(np.int32))
