"""Halo exchange: layers with a sliding window receive only the keys that their queries see.

A query with window W sees itself and the W - 1 tokens before it, in its document. So the queries of
a chunk see contiguous keys: the chunk and its halo, the W - 1 tokens before it. A rank receives the
halos of its early and late chunks, and no other keys, in one all-to-all, from one or more ranks.
Early queries then attend to their keys, causally with the window, and late queries to theirs. In
the backward, the reverse all-to-all sends the gradients of halos back to the owners of the keys,
which sum them.

For one document of 16 tokens on 2 ranks, chunks of 4 tokens, and W = 3:

    rank    queries    keys                from rank
    0        0 -  3     0 -  3
            12 - 15    10 - 15             10 11 of 1
    1        4 -  7     2 -  7              2  3 of 0
             8 - 11     6 - 11             none

The last query and the last key belong to the same token. So any kernel can compute the attention if
it supports windows and aligns queries and keys at the end. With documents, there is one segment per
document.

Legend: B sequences, N tokens of a block (of all sequences if there are documents), n blocks.
"""

import functools
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from torch import Tensor

from dtron.parallelisms.context.all_gather import GatheredBlocks
from dtron.parallelisms.context.blocks import Backward, Pair
from dtron.parallelisms.context.load_balance import Ints
from dtron.parallelisms.functional_collectives import all_to_all, wait_tensor


class HaloBlocks(GatheredBlocks):
    """Attention to a block's keys and the received halos of its chunks."""

    def __init__(
        self, q: Tensor, tables: Sequence[Tensor], group: str, inner: int, window: int
    ) -> None:
        super().__init__(q, tables, group, inner)
        self.segments: Sequence[Tensor | None] = (None, None)
        if tables:
            _, index, counts, self.segments = tables  # type: ignore[assignment]
            sent, received = counts.tolist()
        else:
            spans, (sent, received) = whole_sequences(self.size, self.rank, self.half, window)
            index = torch.cat([torch.arange(*span, device=q.device) for span in spans])
        (*self.sent, early), (*self.received, late) = sent, received
        self.index, *self.keys = index.split([sum(self.sent), early, late])

    def _gather(self, keys: Tensor) -> Tensor:
        """Append the received halos to this block's keys (2, B, N, G, K), along dim 2."""
        halos = self._exchange(keys[:, :, self.index], self.received, self.sent)
        return torch.cat([keys, halos], dim=2)

    def _exchange(self, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        rows = all_to_all(x.movedim(2, 0), received, sent, self.group.group_name)
        return wait_tensor(rows).movedim(0, 2)

    def key_gradients(self, keys: Tensor, dtype: torch.dtype, backward: Backward) -> Tensor:
        """Compute gradients of keys; send gradients of halos to the owners of the keys.

        The owners add them rank by rank, since a key can be in several halos.
        """
        gathered = self._gather(keys)
        grads = torch.zeros_like(gathered, dtype=dtype)
        for pair in self._pairs():
            backward(pair, gathered, grads)
        own, halos = grads.split([keys.shape[2], sum(self.received)], dim=2)
        returned = self._exchange(halos, self.sent, self.received)
        for where, part in zip(
            self.index.split(self.sent), returned.split(self.sent, dim=2), strict=True
        ):
            own[:, :, where] += part
        return own

    def _pairs(self) -> Iterator[Pair]:
        halves = (slice(0, self.half), slice(self.half, None))
        for queries, keys, bounds in zip(halves, self.keys, self.segments, strict=True):
            yield Pair(queries, keys, True, bounds)


@functools.lru_cache(maxsize=64)
def whole_sequences(
    size: int, rank: int, half: int, window: int
) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """Compute `index` and `counts` of `halo` for sequences that are one document each.

    The index is a list of (start, end), which a device can expand without a copy from the host.

    Args:
        half: number of tokens of a chunk.
    """
    chunks = np.arange(2 * size * half).reshape(2 * size, half)
    index, counts, _ = halo(chunks, np.zeros(chunks.size, dtype=np.int64), rank, window)
    borders = np.flatnonzero(np.diff(index) != 1) + 1
    spans = [(int(part[0]), int(part[-1]) + 1) for part in np.split(index, borders)]
    return spans, counts.tolist()


def halo(chunks: Ints, numbers: Ints, block: int, window: int) -> tuple[Ints, Ints, list[Ints]]:
    """Compute which keys a block sends, receives and attends to.

    Args:
        chunks: (2 n, N / 2), tokens of each chunk, ascending. Block s has chunks s and 2 n - 1 - s.
        numbers: (N n,), number of each token's document, ascending.
        block: index of the block.
    Returns:
        index: (.,), indices of the block's tokens to send, by receiving block; then the keys of
            early and of late queries, as indices into the block's own keys and the received keys.
        counts: (2, n + 1). Row 0: number of tokens sent to each block, then number of keys of early
            queries. Row 1: number received from each block, then number of keys of late queries.
        keys: tokens that are keys of early queries (.,), and of late queries (.,), ascending.
    """
    n = len(chunks) // 2
    blocks = np.concatenate([chunks, chunks[::-1]], axis=1)[:n]
    visible = [_visible_keys(queries, numbers, window) for queries in chunks]
    needed = np.zeros((n, chunks.size), dtype=bool)
    for b in range(n):
        needed[b, visible[b]] = needed[b, visible[-1 - b]] = True
        needed[b, blocks[b]] = False
    sent = [np.flatnonzero(row[blocks[block]]) for row in needed]
    received = [tokens[needed[block, tokens]] for tokens in blocks]
    position = np.zeros(chunks.size, dtype=np.int64)
    gathered = np.concatenate([blocks[block], *received])
    position[gathered] = np.arange(gathered.size)
    keys = [visible[block], visible[-1 - block]]
    counts = [
        [len(tokens) for tokens in (*by_block, own)]
        for by_block, own in zip((sent, received), keys, strict=True)
    ]
    return np.concatenate([*sent, *(position[k] for k in keys)]), np.array(counts), keys


def _visible_keys(queries: Ints, numbers: Ints, window: int) -> Ints:
    """Return the tokens that the queries of a chunk see, ascending."""
    documents, first = np.unique(numbers[queries], return_index=True)
    ends = np.append(queries[first[1:] - 1], queries[-1]) + 1
    begins = np.maximum(queries[first] - (window - 1), np.searchsorted(numbers, documents))
    sizes = ends - begins
    return np.arange(sizes.sum()) + (begins - np.cumsum(sizes) + sizes).repeat(sizes)


def received_tokens(size: int, rank: int, half: int, window: int) -> int:
    """Compute the number of keys that a block receives for a sequence of one document.

    Closed form: both halos, minus their overlaps with each other and with the early chunk.

    Args:
        half: number of tokens of a chunk.
    """
    early, late = rank * half, (2 * size - 1 - rank) * half  # first tokens of its chunks
    first, second = (max(0, begin - window + 1) for begin in (early, late))
    return early - first + late - second - max(0, early + half - max(first, second))
