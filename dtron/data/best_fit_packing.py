"""Pack whole documents into sequences: by best fit, or one per sequence; the rest is padding.

A document longer than T tokens is split into pieces of T tokens and a rest; every other document is
one piece. Pieces that share a sequence are concatenated, each document with its EOS, and padded
with EOS:

    pieces      a a a a a a | a a E    b b b E    c E         E = EOS, T = 6, a is split
    sequence 0  a a a a a a                                   labels  a a a a a a
    sequence 1  b b b E c E                                   labels  b b E - E -     - = IGNORE
    sequence 2  a a E E E E                                   labels  a E - - - -

The label of a token is the next token of its document, even if the next token is in another piece;
EOS and padding have no label. So in each epoch every token of every document is an input once, and
every token but the first of each document is a label once.

A plan defines which lengths of pieces share a sequence. It is made once for each group of
documents, so that all epochs have the same number n of sequences: sequence k of a run is number
k % n of epoch k // n, and resuming needs only k. Each epoch permutes three things: the pieces of
equal length among their places in the plan, the pieces within a sequence, and the sequences.

Legend: T tokens per sequence, N pieces.
Source: best-fit decreasing, here over a group of documents at once, Ding et al., Fewer Truncations
Improve Language Modeling, arXiv:2404.10830.
"""

import contextlib
import json
from bisect import bisect_left, insort
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from dtron.data.corpus.document_index import DocumentIndex, Documents
from dtron.data.packing import (
    IGNORE,
    Packed,
    SequencePlan,
    Tokens,
    UnreadSequence,
    Waste,
    ids_and_labels,
    number_documents,
    number_pieces,
    order_of_groups,
    read_sequences,
)
from dtron.data.shuffle import shuffle
from dtron.io.filesystem import write_atomically
from dtron.io.untrusted import JSON_BYTES, parse, read_text


@dataclass(frozen=True)
class Pieces:
    """Pieces of at most T tokens of all documents, the longest first."""

    starts: np.ndarray
    """int64 (N,), where each piece starts in the tokens"""
    lengths: np.ndarray
    """int32 (N,), 1 to T"""
    continues: np.ndarray
    """bool (N,), whether the document has a token after the piece"""


@dataclass(frozen=True)
class EpochOrder:
    """The permutations of one epoch."""

    pieces: np.ndarray
    """int64 (N,), the piece at each place of the plan"""
    sequences: np.ndarray
    """int64 (n,), the sequences of the plan in the order of this epoch"""
    seed: int
    epoch: int


def pieces_of(documents: Documents, seq_len: int) -> Pieces:
    """Split documents, of at least one token each, into pieces of at most T = seq_len tokens."""
    starts, ends = documents.starts, documents.starts + documents.lengths
    counts = -(-(ends - starts) // seq_len)
    earlier = np.repeat(np.cumsum(counts) - counts, counts)  # pieces of earlier documents
    starts, ends = np.repeat(starts, counts), np.repeat(ends, counts)
    starts += (np.arange(len(starts)) - earlier) * seq_len
    lengths = np.minimum(ends - starts, seq_len).astype(np.int32)
    order = _longest_first(lengths, seq_len)
    starts, ends, lengths = starts[order], ends[order], lengths[order]
    return Pieces(starts, lengths, starts + lengths < ends)


def best_fit(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Assign each piece, the longest first, to the fullest sequence that has room for it.

    Pieces of equal length and sequences of equal room are handled together: 10 million pieces take
    a second with T = 8192.

    Args:
        lengths: int32 (N,), 1 to T, descending.
        seq_len: T.
    Returns:
        int64 (N,), the sequence of each piece.
    """
    rooms: list[int] = []  # all values of remaining room, ascending
    by_room: dict[int, list[np.ndarray]] = {}  # room -> sequences with that room, in several arrays
    placed: list[np.ndarray] = []
    n_sequences = 0

    def put(sequences: np.ndarray, room: int) -> None:
        if len(sequences) and room:
            if room not in by_room:
                insort(rooms, room)
            by_room.setdefault(room, []).append(sequences)

    values, counts = np.unique(lengths, return_counts=True)
    for length, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            least = bisect_left(rooms, length)
            room = rooms[least] if least < len(rooms) else seq_len
            each = room // length  # pieces that fit into one sequence with this room
            wanted = -(-count // each)
            if least < len(rooms):
                sequences = by_room[room].pop()
                if not by_room[room]:
                    del by_room[room], rooms[least]
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
    """Assign a separate sequence to each piece; arguments and result as for `best_fit`."""
    return np.arange(len(lengths))


PACKERS: dict[str, Callable[[np.ndarray, int], np.ndarray]] = {
    "best_fit": best_fit,
    "pad": one_each,
}


class PackingPlan:
    """The assignment of documents' pieces to sequences.

    Args:
        tokens: all tokens of all documents, any integer dtype, usually in files.
        documents: at least 1.
        seq_len: T.
        packing: a key of PACKERS.
        mask_documents: whether to return positions and document numbers.
        eos_id: token to pad with.
    """

    def __init__(
        self,
        tokens: Tokens,
        documents: Documents,
        *,
        seq_len: int,
        packing: str,
        mask_documents: bool,
        eos_id: int,
    ) -> None:
        self._tokens, self._seq_len = tokens, seq_len
        self._mask, self._eos_id = mask_documents, eos_id
        self._pieces = pieces_of(documents, seq_len)
        sequence = PACKERS[packing](self._pieces.lengths, seq_len)
        self._places = np.argsort(sequence, kind="stable")  # pieces of sequence 0, then of 1, ...
        self._firsts = np.cumsum(
            np.bincount(sequence + 1)
        )  # index of the first piece of each sequence
        self._split = float(np.mean(documents.lengths > seq_len))

    def __len__(self) -> int:
        return len(self._firsts) - 1

    def waste(self, order: EpochOrder) -> Waste:
        """Return padding and split documents, equal in every epoch."""
        filled = int(self._pieces.lengths.sum(dtype=np.int64))
        padding = 1 - filled / (len(self) * self._seq_len)
        return Waste(len(self), padding, self._split)

    def order(self, seed: int, epoch: int) -> EpochOrder:
        """Return the permutations of an epoch."""
        n = len(self._pieces.starts)
        shuffled = shuffle(np.arange(n), seed, epoch)
        pieces = shuffled[_longest_first(self._pieces.lengths[shuffled], self._seq_len)]
        # Other numbers than those of pieces, so that the two orders are independent.
        sequences = shuffle(np.arange(2 * n, 2 * n + len(self)), seed, epoch) - 2 * n
        return EpochOrder(pieces, sequences, seed, epoch)

    def unread(self, order: EpochOrder, index: int) -> UnreadSequence:
        """Return sequence `index` of an epoch, 0 <= index < len(self)."""
        number, n = order.sequences[index], len(order.pieces)
        places = self._places[self._firsts[number] : self._firsts[number + 1]]
        chosen = order.pieces[places]
        pieces, chosen = self._pieces, shuffle(chosen + n, order.seed, order.epoch) - n
        starts, lengths = pieces.starts[chosen].tolist(), pieces.lengths[chosen].tolist()
        more = pieces.continues[chosen].tolist()  # whether the last token of a piece has a label
        columns = zip(starts, lengths, more, strict=True)
        spans = [(at, at + n + continues) for at, n, continues in columns]
        return UnreadSequence(self._tokens, spans, partial(self._pack, lengths, spans))

    def _pack(
        self, lengths: list[int], spans: list[tuple[int, int]], windows: np.ndarray
    ) -> Packed:
        tokens = np.full(self._seq_len, self._eos_id, np.int64)
        labels = np.full(self._seq_len, IGNORE, np.int64)
        ids, targets = ids_and_labels(windows.astype(np.int64))
        filled, read = 0, 0
        for length, (start, stop) in zip(lengths, spans, strict=True):
            tokens[filled : filled + length] = ids[read : read + length]
            labels[filled : filled + stop - start - 1] = targets[read + 1 : read + stop - start]
            filled, read = filled + length, read + stop - start
        numbers = number_pieces(lengths, self._seq_len)
        if not self._mask:
            return Packed(tokens, labels, None, None, numbers, tuple(spans))
        masks = number_documents([*lengths, self._seq_len - filled])
        return Packed(tokens, labels, *masks, numbers, tuple(spans))


class GroupOrder:
    """The order of an epoch: groups in a random order, each with separate permutations.

    Args:
        open_plan: function that returns the plan of a group; two plans are in memory at once.
        counts: int64 (G,), number of sequences of each group.
        groups: int64, group numbers in the order of the epoch.
        seed, epoch: determine the permutations within each group.
    """

    def __init__(
        self,
        open_plan: Callable[[int], PackingPlan],
        counts: np.ndarray,
        groups: np.ndarray,
        seed: int,
        epoch: int,
    ) -> None:
        self._ends = np.cumsum(counts[groups])

        @lru_cache(maxsize=2)  # no method: only the cycle collector would free its cache
        def opened(place: int) -> tuple[PackingPlan, EpochOrder]:
            group = int(groups[place])
            plan = open_plan(group)
            return plan, plan.order(seed, epoch + (group << 32))

        self.opened = opened

    def locate(self, index: int) -> tuple[int, int]:
        """Return (index in the epoch of the group with sequence `index`, index in this group)."""
        place = int(np.searchsorted(self._ends, index, side="right"))
        return place, index - (int(self._ends[place - 1]) if place else 0)


class PackedGroups:
    """The training split: the documents of each group of an index are packed separately.

    Args:
        tokens, seq_len, packing, mask_documents, eos_id: as in PackingPlan.
        index: the training documents.
        counts: result of `count_sequences`.
    """

    def __init__(
        self, tokens: Tokens, index: DocumentIndex, counts: np.ndarray, **settings: Any
    ) -> None:
        self._counts, self._index, self._seq_len = counts, index, settings["seq_len"]

        def open_plan(group: int) -> PackingPlan:
            return PackingPlan(tokens, index.group(group), **settings)

        self._open_plan = open_plan

    def __len__(self) -> int:
        return int(self._counts.sum())

    def order(self, seed: int, epoch: int) -> GroupOrder:
        """Return the order of an epoch."""
        groups = order_of_groups(self._index, seed, epoch)
        return GroupOrder(self._open_plan, self._counts, groups, seed, epoch)

    def unread(self, order: GroupOrder, index: int) -> UnreadSequence:
        """Return sequence `index` of an epoch, 0 <= index < len(self)."""
        place, within = order.locate(index)
        plan, epoch_order = order.opened(place)
        return plan.unread(epoch_order, within)

    def waste(self, order: GroupOrder) -> Waste:
        """Return padding of the whole split, and split documents of its first group."""
        plan, epoch_order = order.opened(0)
        filled = int(self._index.group_sizes[:, 1].sum())
        padding = 1 - filled / (len(self) * self._seq_len)
        return replace(plan.waste(epoch_order), sequences=len(self), padding=padding)


def count_sequences(index: DocumentIndex, seq_len: int, packing: str) -> np.ndarray:
    """Return int64 (G,), the number of sequences into which each group is packed.

    If there are several groups, the result is saved in the folder of the index.
    """
    if (found := known_counts(index, seq_len, packing)) is not None:
        return found
    counts = np.zeros(len(index.group_sizes), np.int64)
    for group in np.flatnonzero(index.group_sizes[:, 0]).tolist():
        lengths = pieces_of(index.group(group), seq_len).lengths
        counts[group] = PACKERS[packing](lengths, seq_len).max() + 1
    if len(counts) > 1:
        with contextlib.suppress(OSError):  # without the file, each start counts again
            content = json.dumps({"sequences": counts.tolist()})
            write_atomically(_counts_file(index, seq_len, packing), content)
    return counts


def known_counts(index: DocumentIndex, seq_len: int, packing: str) -> np.ndarray | None:
    """Return the saved result of `count_sequences`; None: the result is missing or not valid."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, OverflowError):
        content = read_text(_counts_file(index, seq_len, packing), JSON_BYTES)
        found = np.array(parse(content)["sequences"], np.int64)
        documents, tokens = index.group_sizes.T
        if found.shape == documents.shape and (found * seq_len >= tokens).all():
            return found if (found <= tokens).all() else None
    return None


def _counts_file(index: DocumentIndex, seq_len: int, packing: str) -> Path:
    return index.folder / f"{packing}-{seq_len}.json"


class FixedPieces:
    """The held-out split, or a window of a stream: one epoch in an order that is always the same.

    The order is shuffled, because a plan begins with the longest documents and validation may read
    only the first sequences.
    """

    def __init__(self, plan: SequencePlan) -> None:
        self._plan, self._order = plan, plan.order(0, 0)

    def __len__(self) -> int:
        return len(self._plan)

    def sequence(self, k: int) -> Packed:
        """Return sequence k, 0 <= k < len(self)."""
        return read_sequences([self._plan.unread(self._order, k)])[0]


def _longest_first(lengths: np.ndarray, seq_len: int) -> np.ndarray:
    """Return the stable descending order of int32 (N,) lengths, as indices."""
    # numpy sorts 16-bit integers by radix sort, ten times as fast
    key = np.uint16 if seq_len < 2**16 else np.uint32
    return np.argsort((seq_len - lengths).astype(key), kind="stable")
