"""Halo exchange: a layer with a window receives only the keys that its queries see.

A query of window W sees itself and the W - 1 tokens before it, in its document. So the queries of a
piece see a contiguous run of keys, the piece and its halo, which are the W - 1 tokens before it. A
rank receives the halos of its early and its late pieces in one all-to-all, however many ranks lie
between: keys that no query of a rank sees are not sent to it. Then the early queries attend to
their run, causally with the window, and the late ones to theirs. In the backward the gradients of
halos are sent back by the reverse all-to-all, and their owner adds them up.

For one document of 16 tokens on 2 ranks, pieces of 4 tokens, and W = 3:

    rank    queries    keys                from rank
    0        0 -  3     0 -  3
            12 - 15    10 - 15             10 11 of 1
    1        4 -  7     2 -  7              2  3 of 0
             8 - 11     6 - 11             its own

A run ends with its queries, so that attention is the kernels' own, aligned at the end: any kernel
with windows can do it. With documents a run is one segment per document.

Legend: B sequences, N tokens of a block (of all sequences where there are documents), n blocks.
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
    """A block's keys are followed by the halos of its pieces, then attended to as gathered ones."""

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
        """(2, B, N, G, K) -> this block's tokens, then those received from each rank."""
        halos = self._exchange(keys[:, :, self.index], self.received, self.sent)
        return torch.cat([keys, halos], dim=2)

    def _exchange(self, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        rows = all_to_all(x.movedim(2, 0), received, sent, self.group.group_name)
        return wait_tensor(rows).movedim(0, 2)

    def key_gradients(self, keys: Tensor, dtype: torch.dtype, backward: Backward) -> Tensor:
        """Those of halos go back to their owners, which add them rank by rank: a key can be in
        several halos."""
        pool = self._gather(keys)
        due = torch.zeros_like(pool, dtype=dtype)
        for pair in self._pairs():
            backward(pair, pool, due)
        own, halos = due.split([keys.shape[2], sum(self.received)], dim=2)
        returned = self._exchange(halos, self.sent, self.received)
        for where, part in zip(
            self.index.split(self.sent), returned.split(self.sent, dim=2), strict=True
        ):
            own[:, :, where] += part
        return own

    def _pairs(self) -> Iterator[Pair]:
        halves = (slice(0, self.half), slice(self.half, None))
        for where, keys, bounds in zip(halves, self.keys, self.segments, strict=True):
            yield Pair(where, keys, True, bounds)


@functools.lru_cache(maxsize=64)
def whole_sequences(
    size: int, rank: int, half: int, window: int
) -> tuple[list[tuple[int, int]], list[list[int]]]:
    """Index and counts of `halo` where each sequence is one document, the index as spans, which a
    device can write without waiting for the host.

    Args:
        half: tokens of a piece.
    """
    pieces = np.arange(2 * size * half).reshape(2 * size, half)
    index, counts, _ = halo(pieces, np.zeros(pieces.size, dtype=np.int64), rank, window)
    borders = np.flatnonzero(np.diff(index) != 1) + 1
    spans = [(int(part[0]), int(part[-1]) + 1) for part in np.split(index, borders)]
    return spans, counts.tolist()


def halo(pieces: Ints, numbers: Ints, mine: int, window: int) -> tuple[Ints, Ints, list[Ints]]:
    """Which keys a block sends, receives and attends to.

    Args:
        pieces: (2 n, N / 2) tokens of each piece, ascending. Block s has piece s and, counted from
            the last one, piece s.
        numbers: (N n,) number of each token's document, ascending.
        mine: number of the block.
    Returns:
        index: (.,) the block's tokens that are sent to each other block in turn; then the keys of
            the early and of the late queries among its own and the received ones.
        counts: (2, n + 1). Tokens sent to each block, and the number of the early queries' keys;
            tokens received from each, and the number of the late queries' keys.
        runs: (.,) the keys of the early and of the late queries as tokens, ascending.
    """
    n = len(pieces) // 2
    blocks = np.concatenate([pieces, pieces[::-1]], axis=1)[:n]
    seen = [_run(queries, numbers, window) for queries in pieces]
    needed = np.zeros((n, pieces.size), dtype=bool)
    for block in range(n):
        needed[block, seen[block]] = needed[block, seen[-1 - block]] = True
        needed[block, blocks[block]] = False
    sent = [np.flatnonzero(row[blocks[mine]]) for row in needed]
    received = [block[needed[mine, block]] for block in blocks]
    place = np.zeros(pieces.size, dtype=np.int64)
    pool = np.concatenate([blocks[mine], *received])
    place[pool] = np.arange(pool.size)
    runs = [seen[mine], seen[-1 - mine]]
    counts = [
        [len(part) for part in (*parts, run)]
        for parts, run in zip((sent, received), runs, strict=True)
    ]
    return np.concatenate([*sent, *(place[run] for run in runs)]), np.array(counts), runs


def _run(queries: Ints, numbers: Ints, window: int) -> Ints:
    """Tokens that the queries of a piece see, ascending."""
    documents, first = np.unique(numbers[queries], return_index=True)
    ends = np.append(queries[first[1:] - 1], queries[-1]) + 1
    begins = np.maximum(queries[first] - (window - 1), np.searchsorted(numbers, documents))
    sizes = ends - begins
    return np.arange(sizes.sum()) + (begins - np.cumsum(sizes) + sizes).repeat(sizes)


def received_tokens(size: int, rank: int, half: int, window: int) -> int:
    """Keys that a block receives of a sequence of one document, in closed form: both halos, less
    what they share with each other and with the block's early piece.

    Args:
        half: tokens of a piece.
    """
    early, late = rank * half, (2 * size - 1 - rank) * half  # where its pieces begin
    first, second = (max(0, begin - window + 1) for begin in (early, late))
    return early - first + late - second - max(0, early + half - max(first, second))
