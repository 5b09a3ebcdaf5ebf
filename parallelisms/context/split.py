"""Which tokens of a micro-batch each cp rank holds, and the index tables of attention over them."""

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
from dtron.parallelisms.context.load_balance import Ints, held, lengths, pieces


class Split:
    """Which tokens of a micro-batch each cp rank holds, made on the host from its documents.

    Args:
        documents: integers (B, T), equal within a document; None: one document a sequence.
        shape: (B, T).

    Raises:
        ConfigError: 2 * cp does not divide T.
    """

    def __init__(self, documents: Tensor | None, shape: tuple[int, int], cp: int) -> None:
        if shape[1] % (2 * cp):
            below = shape[1] // (2 * cp) * 2 * cp
            raise ConfigError(
                f"parallel.cp = {cp} cuts a sequence into {2 * cp} pieces, which does not divide "
                f"its {shape[1]} tokens; use a multiple such as {below or 2 * cp}"
            )
        self.documents = None if documents is None else documents.numpy()
        self.cp, self.shape = cp, shape
        self.piece = pieces(self.documents, shape, 2 * cp)

    def index(self, rank: int) -> Tensor:
        """Where in the sequence the tokens of a rank are: int64 (B, T / cp)."""
        return torch.from_numpy(held(self.piece, rank, 2 * self.cp))

    def tables(self, layouts: Mapping[CpMethod, ContextLayout], rank: int) -> Tables | None:
        """What attention on a rank needs, by method; None where all is one document."""
        if self.documents is None:
            return None
        numbers = _count_documents(self.documents)
        found = {}
        for method, shape in layouts.items():
            pieces = _pieces(self, shape)
            found[method] = _tables(self, numbers, pieces, shape, rank)
            for window in shape.windows if shape.rings else ():
                if window < self.shape[1]:
                    name, on_host = table_names(method, window)
                    *index, counts, bounds = _tables(self, numbers, pieces, shape, rank, window)
                    found |= {name: (*index, bounds), on_host: (counts,)}
        return found


def _count_documents(documents: NDArray) -> Ints:
    """Number of each token's document in the whole micro-batch: (B, T) -> int64 (B * T,)."""
    by_row = [lengths(row) for row in documents]
    return np.arange(sum(map(len, by_row))).repeat(np.concatenate(by_row))


def _tables(
    split: Split, numbers: Ints, pieces: Ints, shape: ContextLayout, rank: int, window: int = 0
) -> tuple[Tensor, ...]:
    """`arrange` (N,) from the order of arrival to early, then late tokens. Then, of a ring: `order`
    (outer, N), from there to the order of the sequences, of every block; segments
    (outer, 2, n + 1) of every step. Gathered: `keys` of the early and of the late queries among the
    gathered tokens, int64 (.,) each; segments (2, 2, n + 1). Of a ring with a window: `index` and
    `counts` of `halo`; segments (2, 2, n + 1) of the early and of the late queries."""
    mine, early, late = rank // shape.inner, pieces, pieces[::-1]
    blocks = np.concatenate([early, late], axis=1)[: shape.outer]
    arrange = _positions(_arrival(split, shape, mine), pieces.size)[blocks[mine]]
    if window:
        index, counts, runs = halo(pieces, numbers, mine, window)
        pairs, rest = list(zip((early[mine], late[mine]), runs, strict=True)), [index, counts]
    elif shape.gathers:
        ends = (mine + 1, 2 * shape.outer - mine)
        gathered = _positions(blocks.ravel(), pieces.size)
        keys = [np.sort(pieces[:end], axis=None) for end in ends]
        pairs = list(zip((early[mine], late[mine]), keys, strict=True))
        rest = [gathered[k] for k in keys]
    else:
        steps = range(shape.outer)
        pairs = [
            (late[mine] if s > mine else blocks[mine], early[s] if s < mine else blocks[s])
            for s in steps
        ]
        rest = [np.argsort(blocks, axis=1, kind="stable")]
    bounds = _bounds([(numbers[q], numbers[k]) for q, k in pairs])
    return (*map(torch.from_numpy, (arrange, *rest)), bounds)


def _pieces(split: Split, shape: ContextLayout) -> Ints:
    """Tokens of each piece of the blocks, ascending, as indices into (B * T,): (2 outer, N / 2).
    Block s has piece s and, counted from the last one, piece s."""
    numbers = split.piece.ravel() // shape.inner
    return np.argsort(numbers, kind="stable").reshape(2 * shape.outer, -1)


def _arrival(split: Split, shape: ContextLayout, block: int) -> Ints:
    """Tokens of a block, as indices into (B * T,), in the order in which `to_heads` gives them."""
    ranks = range(block * shape.inner, (block + 1) * shape.inner)
    by_rank = [held(split.piece, rank, 2 * split.cp) for rank in ranks]
    rows = np.arange(split.shape[0])[:, None] * split.shape[1]
    return (np.concatenate(by_rank, axis=1) + rows).ravel()


def _positions(tokens: Ints, n: int) -> Ints:
    """The inverse of a list of indices below n."""
    found = np.zeros(n, dtype=np.int64)
    found[tokens] = np.arange(len(tokens))
    return found


def _bounds(pairs: Sequence[tuple[Ints, Ints]]) -> Tensor:
    """Segments of pairs of (queries' documents, keys' documents)."""
    documents = 1 + max(int(numbers.max()) for pair in pairs for numbers in pair)
    counts = [[np.bincount(numbers, minlength=documents) for numbers in pair] for pair in pairs]
    sums = np.cumsum(np.pad(np.array(counts), ((0, 0), (0, 0), (1, 0))), axis=-1)
    return torch.from_numpy(sums.astype(np.int32))
