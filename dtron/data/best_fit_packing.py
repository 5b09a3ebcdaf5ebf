"""Whole documents in sequences: by best fit, or one a sequence; what is left is padding.

A document longer than T tokens is split into pieces of T and a rest; any other is one piece. Pieces
that share a sequence are laid one after another, each with its EOS, and padded with EOS:

    pieces      a a a a a a | a a E    b b b E    c E         E = EOS, T = 6, a is split
    sequence 0  a a a a a a                                   labels  a a a a a a
    sequence 1  b b b E c E                                   labels  b b E - E -     - = IGNORE
    sequence 2  a a E E E E                                   labels  a E - - - -

The label of a token is the next token of its document, also where that lies in the next piece; EOS
and padding have none. So in an epoch every token of every document is there once, and all but the
first of each document are a label once.

Which lengths share a sequence is planned once and holds for all epochs, which therefore have as
many sequences each: sequence k of a run is number k % n of epoch k // n, and nothing needs to be
remembered in order to resume. An epoch draws by its own permutation which of the pieces of equal
length takes which place, in which order pieces follow each other in a sequence, and in which order
sequences come.

Legend: T tokens a sequence, N pieces.
Source: best-fit-decreasing, here over all documents at once, Ding et al., Fewer Truncations Improve
Language Modeling, arXiv:2404.10830.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from dtron.data.packing import (
    IGNORE,
    CutDocuments,
    Packed,
    State,
    Tokens,
    Waste,
    number_documents,
    number_pieces,
    read_spans,
)
from dtron.data.shuffle import shuffle


@dataclass(frozen=True)
class Pieces:
    """Documents in pieces of at most T tokens, the longest first."""

    starts: np.ndarray
    """int64 (N,), where each piece starts in the tokens"""
    lengths: np.ndarray
    """int32 (N,), 1 to T"""
    go_on: np.ndarray
    """bool (N,), whether the document has a token behind the piece"""


@dataclass(frozen=True)
class Order:
    """What an epoch draws."""

    pieces: np.ndarray
    """int64 (N,), the piece that takes each place of the plan"""
    sequences: np.ndarray
    """int64 (n,), sequences of the plan in the order in which they come"""
    seed: int
    epoch: int


def pieces_of(offsets: np.ndarray, documents: np.ndarray, seq_len: int) -> Pieces:
    """Pieces of documents.

    Args:
        offsets: int64 (n_documents + 1,), where each document starts in the tokens.
        documents: int64 (n,), which of them; none is empty.
        seq_len: T.
    """
    starts, ends = offsets[documents], offsets[documents + 1]
    counts = -(-(ends - starts) // seq_len)
    earlier = np.repeat(np.cumsum(counts) - counts, counts)  # pieces of earlier documents
    starts, ends = np.repeat(starts, counts), np.repeat(ends, counts)
    starts += (np.arange(len(starts)) - earlier) * seq_len
    lengths = np.minimum(ends - starts, seq_len).astype(np.int32)
    order = _longest_first(lengths, seq_len)
    starts, ends, lengths = starts[order], ends[order], lengths[order]
    return Pieces(starts, lengths, starts + lengths < ends)


def best_fit(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Put each piece, the longest first, into the fullest sequence that has room for it.

    Pieces of equal length and sequences of equal room are handled together: 10 million pieces take
    a second, where T is 8192.

    Args:
        lengths: int32 (N,), 1 to T, descending.
        seq_len: T.
    Returns:
        int64 (N,), the sequence of each piece.
    """
    rooms: list[int] = []  # the rooms there are, ascending
    having: dict[int, list[np.ndarray]] = {}  # room -> sequences that have it, in parts
    placed: list[np.ndarray] = []
    n_sequences = 0

    def put(sequences: np.ndarray, room: int) -> None:
        if len(sequences) and room:
            if room not in having:
                insort(rooms, room)
            having.setdefault(room, []).append(sequences)

    values, counts = np.unique(lengths, return_counts=True)
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            least = bisect_left(rooms, length)
            room = rooms[least] if least < len(rooms) else seq_len
            each = room // length  # pieces that a sequence takes before another one is fuller
            wanted = -(-count // each)
            if least < len(rooms):
                sequences = having[room].pop()
                if not having[room]:
                    del having[room], rooms[least]
                put(sequences[wanted:], room)
                sequences = sequences[:wanted]
            else:
                sequences = np.arange(n_sequences, n_sequences + wanted)
                n_sequences += wanted
            placed.append(np.repeat(sequences, each)[:count])
            whole, rest = divmod(count, each)  # the last sequence takes the rest
            put(sequences[:whole], room - each * length)
            put(sequences[whole:], room - rest * length)
            count -= len(placed[-1])
    return np.concatenate(placed)


def one_each(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """A sequence for each piece; arguments and result as of `best_fit`."""
    return np.arange(len(lengths))


PACKERS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "best_fit": best_fit,
    "pad": one_each,
}


class Plan:
    """Which pieces of some documents share a sequence.

    Args:
        tokens: all tokens of all documents, any integer dtype, usually in a file.
        offsets, documents: as in `pieces_of`; at least 1 document.
        seq_len: T.
        packing: a row of PACKERS.
        mask_documents: give positions and documents.
        eos_id: what to pad with.
    """

    def __init__(
        self,
        tokens: Tokens,
        offsets: np.ndarray,
        documents: np.ndarray,
        *,
        seq_len: int,
        packing: str,
        mask_documents: bool,
        eos_id: int,
    ) -> None:
        self._tokens, self._seq_len = tokens, seq_len
        self._mask, self._eos_id = mask_documents, eos_id
        self._pieces = pieces_of(offsets, documents, seq_len)
        sequence = PACKERS[packing](self._pieces.lengths, seq_len)
        self._places = np.argsort(sequence, kind="stable")  # of sequence 0, then of 1, ...
        self._firsts = np.cumsum(np.bincount(sequence + 1))  # where those of a sequence begin
        lengths = offsets[documents + 1] - offsets[documents]
        self._split = float(np.mean(lengths > seq_len))

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def waste(self, order: Order) -> Waste:
        """The same in every epoch."""
        filled = int(self._pieces.lengths.sum(dtype=np.int64))
        padding = 1 - filled / (len(self) * self._seq_len)
        return Waste(len(self), padding, self._split)

    def order(self, seed: int, epoch: int) -> Order:
        """The order of an epoch."""
        n = len(self._pieces.starts)
        shuffled = shuffle(np.arange(n), seed, epoch)
        pieces = shuffled[_longest_first(self._pieces.lengths[shuffled], self._seq_len)]
        # Numbers of their own, so that this order tells nothing of that of the pieces.
        sequences = shuffle(np.arange(2 * n, 2 * n + len(self)), seed, epoch) - 2 * n
        return Order(pieces, sequences, seed, epoch)

    def sequence(self, order: Order, index: int) -> Packed:
        """Sequence `index` of an epoch, 0 <= index < len(self)."""
        number, n = order.sequences[index], len(order.pieces)
        places = self._places[self._firsts[number] : self._firsts[number + 1]]
        chosen = order.pieces[places]
        return self._lay(shuffle(chosen + n, order.seed, order.epoch) - n)

    def _lay(self, chosen: np.ndarray) -> Packed:
        tokens = np.full(self._seq_len, self._eos_id, np.int64)
        labels = np.full(self._seq_len, IGNORE, np.int64)
        pieces, filled, read = self._pieces, 0, 0
        starts, lengths = pieces.starts[chosen].tolist(), pieces.lengths[chosen].tolist()
        more = pieces.go_on[chosen].tolist()  # the label of a piece's last token lies behind it
        columns = list(zip(starts, lengths, more, strict=True))
        windows = read_spans(self._tokens, [(at, at + n + goes_on) for at, n, goes_on in columns])
        for _, length, goes_on in columns:
            window = windows[read : read + length + goes_on]
            tokens[filled : filled + length] = window[:length]
            labels[filled : filled + len(window) - 1] = window[1:]
            filled, read = filled + length, read + len(window)
        numbers = number_pieces(lengths, self._seq_len)
        if not self._mask:
            return Packed(tokens, labels, None, None, numbers)
        masks = number_documents([*lengths, self._seq_len - filled])
        return Packed(tokens, labels, *masks, numbers)


class Shuffled:
    """The training split: endless epochs, each in an order of its own."""

    def __init__(self, plan: CutDocuments | Plan, seed: int) -> None:
        self._plan, self._seed = plan, seed
        self._epoch = 0
        self._order: Any = plan.order(seed, 0)

    def sequence(self, k: int) -> Packed:
        """Sequence k of the run, k = 0, 1, 2, ..."""
        epoch, index = divmod(k, len(self._plan))
        if epoch != self._epoch:  # one order is kept: sequences are asked for in ascending order
            self._epoch, self._order = epoch, self._plan.order(self._seed, epoch)
        return self._plan.sequence(self._order, index)

    def state(self, k: int) -> State:
        """Nothing: sequence k depends on k alone."""
        return {}

    def seek(self, k: int, state: State) -> None:
        """Nothing to do: any sequence can be read at any time."""

    def waste(self) -> Waste:
        """Of this epoch."""
        return self._plan.waste(self._order)


class FixedPieces:
    """The held-out split, or a part of a stream: one epoch in an order that no seed changes.

    Shuffled all the same, since a plan begins with the longest documents and validation may take
    its first sequences only.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan, self._order = plan, plan.order(0, 0)

    def __len__(self) -> int:
        return len(self._plan)

    def sequence(self, k: int) -> Packed:
        """Sequence k, 0 <= k < len(self)."""
        return self._plan.sequence(self._order, k)


def _longest_first(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Stable order of int32 (N,) lengths, descending."""
    # numpy sorts 16-bit integers by radix, ten times as fast
    key = np.uint16 if seq_len < 2**16 else np.uint32
    return np.argsort((seq_len - lengths).astype(key), kind="stable")
