"""Packing "cut": documents are cut into sequences of equal length; the order of all sequences.

`dtron/data/best_fit_packing.py` keeps documents whole. Here the documents of an epoch are
concatenated, each with EOS at its end, and cut every T tokens:

    documents   a a a a E b b E c c c c c c E d d d E ...     E = EOS
    sequence 0  a a a a E b                                   T = 6
    labels      a a a E b b                                   next tokens; the last is of sequence 1
    sequence 1              b E c c c c

Sequence k of a run, k = 0, 1, 2, ... without end, is number k % n of epoch k // n, where n is the
number of whole sequences in an epoch; the tokens after the last whole one are dropped. It is a pure
function of (seed, k), so that resuming needs no other state.

With `mask_documents`, documents are independent: positions restart in each, attention is limited to
tokens with the same document number, and EOS has no label. A document that began in an earlier
sequence starts again at position 0.

Legend: T tokens per sequence.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from dtron.data.cache import TokenFile
from dtron.data.shuffle import shuffle
from dtron.errors import DataError

IGNORE = -100  # the label of a token without loss, as in torch.nn.functional.cross_entropy
State = dict[str, int | str]


@dataclass(frozen=True)
class Packed:
    """One sequence on the host."""

    tokens: np.ndarray
    """int64 (T,)"""
    labels: np.ndarray
    """int64 (T,), IGNORE for tokens without loss"""
    positions: np.ndarray | None
    """int64 (T,), from 0 in each document; None without mask_documents"""
    documents: np.ndarray | None
    """int32 (T,), number of the document within the sequence; None without mask_documents"""
    pieces: np.ndarray | None = None
    """int32 (T,), number of the document piece within the sequence, -1 for padding; no label
    crosses from one piece to the next. None: the sequence is one piece without padding"""

    @property
    def padding(self) -> int:
        """Number of padding tokens, which are at the end."""
        return 0 if self.pieces is None else int((self.pieces < 0).sum())


@dataclass(frozen=True)
class Waste:
    """The cost of packing: padding, and documents that are split."""

    sequences: int
    """sequences per epoch"""
    padding: float
    """fraction of an epoch's tokens that are padding"""
    split_documents: float
    """fraction of documents that are in more than one sequence"""

    def __str__(self) -> str:
        return (
            f"{self.sequences:,} sequences per epoch, {self.padding:.2%} of their tokens padding, "
            f"{self.split_documents:.1%} of documents split"
        )


class Tokens(Protocol):
    """Token ids (N,) in memory or in a file."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> np.ndarray:
        """Return the tokens of a slice."""
        ...


def read_spans(tokens: Tokens, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the tokens [start, stop) of all spans, concatenated."""
    if isinstance(tokens, TokenFile):
        return tokens.read(spans)
    return np.concatenate([tokens[start:stop] for start, stop in spans])


class TrainingSource(Protocol):
    """An endless source of sequences; between two calls of `seek`, k may not decrease."""

    def sequence(self, k: int) -> Packed:
        """Return sequence k of the run."""
        ...

    def state(self, k: int) -> State:
        """Return what `seek` needs, besides k, to continue at sequence k; flat, for JSON."""
        ...

    def seek(self, k: int, state: State) -> None:
        """Continue at sequence k, which may be an earlier one."""
        ...

    def waste(self) -> Waste | None:
        """Return what packing costs; None: not known in advance."""
        ...


class ValidationSource(Protocol):
    """A source of a fixed number of sequences, which can be read in any order."""

    def __len__(self) -> int: ...

    def sequence(self, k: int) -> Packed:
        """Return sequence k, 0 <= k < len(self)."""
        ...


class ConcatenatedDocuments:
    """Documents concatenated in one order; nothing is copied until a window is read.

    Args:
        tokens: all tokens of all documents, any integer dtype (N,), usually in a file.
        offsets: int64 (n_documents + 1,), where each document starts in `tokens`.
        order: int64 (n,), indices of the documents in their order; none of them is empty.
    """

    def __init__(self, tokens: Tokens, offsets: np.ndarray, order: np.ndarray) -> None:
        self._tokens, self._offsets, self._order = tokens, offsets, order
        self._starts = np.zeros(len(order) + 1, np.int64)
        np.cumsum(offsets[order + 1] - offsets[order], out=self._starts[1:])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def split_documents(self, seq_len: int) -> float:
        """Share of documents that a cut at every `seq_len` tokens splits."""
        first, last = self._starts[:-1] // seq_len, (self._starts[1:] - 1) // seq_len
        return float(np.mean(first != last))

    def window(self, start: int, length: int) -> tuple[np.ndarray, list[int]]:
        """Tokens [start, start + length) of the tape.

        Returns:
            int64 (length,) tokens, and how many of them are from each successive document.
        """
        spans: list[tuple[int, int]] = []
        document = int(np.searchsorted(self._starts, start, side="right")) - 1
        filled = 0
        while filled < length:
            end = min(int(self._starts[document + 1]), start + length)
            count = end - start - filled
            source = int(self._offsets[self._order[document]])
            source += start + filled - int(self._starts[document])
            spans.append((source, source + count))
            filled += count
            document += 1
        window = read_spans(self._tokens, spans).astype(np.int64)
        return window, [stop - start for start, stop in spans]


class CutDocuments:
    """Documents end to end, cut every T tokens; an epoch's order is a ConcatenatedDocuments.

    Args:
        tokens, offsets: as in ConcatenatedDocuments.
        documents: int64 (n,), indices of the training split.
        seq_len: T.
        mask_documents: return positions and document numbers; no label crosses documents.
    Raises:
        DataError: the documents do not fill one sequence.
    """

    def __init__(
        self,
        tokens: Tokens,
        offsets: np.ndarray,
        documents: np.ndarray,
        *,
        seq_len: int,
        mask_documents: bool,
    ) -> None:
        total = int((offsets[documents + 1] - offsets[documents]).sum())
        refuse_too_short(total, len(documents), seq_len)
        self._n_sequences = (total - 1) // seq_len
        self._tokens, self._offsets, self._documents = tokens, offsets, documents
        self._seq_len, self._mask = seq_len, mask_documents

    def __len__(self) -> int:
        return self._n_sequences

    def order(self, seed: int, epoch: int) -> ConcatenatedDocuments:
        """Return the documents in the order of an epoch."""
        documents = shuffle(self._documents, seed, epoch)
        return ConcatenatedDocuments(self._tokens, self._offsets, documents)

    def sequence(self, order: ConcatenatedDocuments, index: int) -> Packed:
        """Return sequence `index` of an epoch, 0 <= index < len(self)."""
        window = order.window(index * self._seq_len, self._seq_len + 1)
        return pack(*window, mask_documents=self._mask)

    def waste(self, order: ConcatenatedDocuments) -> Waste:
        """Return what packing costs in an epoch: no padding, but split documents."""
        return Waste(len(self), 0.0, order.split_documents(self._seq_len))


class SequencePlan(Protocol):
    """The sequences of a split, given the order of an epoch, which each plan has in a form of its
    own."""

    def __len__(self) -> int: ...

    def order(self, seed: int, epoch: int) -> Any: ...

    def sequence(self, order: Any, index: int) -> Packed: ...

    def waste(self, order: Any) -> Waste: ...


class Shuffled:
    """The training split: endless epochs, each in another order."""

    def __init__(self, plan: SequencePlan, seed: int) -> None:
        self._plan, self._seed = plan, seed
        self._epoch = 0
        self._order = plan.order(seed, 0)

    def sequence(self, k: int) -> Packed:
        """Return sequence k of the run, k = 0, 1, 2, ..."""
        epoch, index = divmod(k, len(self._plan))
        if epoch != self._epoch:  # one order is kept: k usually ascends
            self._epoch, self._order = epoch, self._plan.order(self._seed, epoch)
        return self._plan.sequence(self._order, index)

    def state(self, k: int) -> State:
        """Return no state: sequence k depends on k alone."""
        return {}

    def seek(self, k: int, state: State) -> None:
        """Do nothing: any sequence can be read at any time."""

    def waste(self) -> Waste:
        """Return what packing costs in the current epoch."""
        return self._plan.waste(self._order)


class OrderedDocuments:
    """The held-out split: one epoch in the order of the documents.

    If they do not fill one sequence, the only sequence is padded with EOS; the padding is a
    separate document without labels.

    Args:
        tokens, offsets, documents, mask_documents: as in CutDocuments; at least 1 document.
        seq_len: T.
        eos_id: token to pad with.
    """

    def __init__(
        self,
        tokens: Tokens,
        offsets: np.ndarray,
        documents: np.ndarray,
        *,
        seq_len: int,
        mask_documents: bool,
        eos_id: int,
    ) -> None:
        self._seq_len, self._mask, self._eos_id = seq_len, mask_documents, eos_id
        self._epoch_documents = ConcatenatedDocuments(tokens, offsets, documents)

    def __len__(self) -> int:
        return max((len(self._epoch_documents) - 1) // self._seq_len, 1)

    def sequence(self, k: int) -> Packed:
        """Return sequence k, 0 <= k < len(self)."""
        if len(self._epoch_documents) > self._seq_len:
            window = self._epoch_documents.window(k * self._seq_len, self._seq_len + 1)
            return pack(*window, mask_documents=self._mask)
        window, lengths = self._epoch_documents.window(0, len(self._epoch_documents))
        padding = self._seq_len + 1 - len(window)
        window = np.pad(window, (0, padding), constant_values=self._eos_id)
        packed = pack(window, [*lengths, padding], mask_documents=self._mask)
        packed.labels[self._seq_len - padding :] = IGNORE
        return replace(packed, pieces=number_pieces([len(window) - padding], self._seq_len))


def pack(window: np.ndarray, lengths: list[int], *, mask_documents: bool) -> Packed:
    """Make a sequence of T tokens and labels of a window of T + 1 tokens.

    Args:
        window: int64 (T + 1,).
        lengths: number of its tokens from each successive document; their sum is T + 1.
        mask_documents: return positions and document numbers; no label crosses documents.
    """
    tokens, labels = window[:-1], window[1:].copy()
    if not mask_documents:
        return Packed(tokens, labels, None, None)
    positions, documents = number_documents(lengths)
    labels[documents[1:] != documents[:-1]] = IGNORE
    return Packed(tokens, labels, positions[:-1], documents[:-1])


def number_documents(lengths: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return int64 (n,) positions, from 0 in each document, and int32 (n,) document numbers.

    Args:
        lengths: length of each document; their sum is n.
    """
    documents = np.repeat(np.arange(len(lengths), dtype=np.int32), lengths)
    starts = np.cumsum(lengths) - lengths
    return np.arange(len(documents)) - np.repeat(starts, lengths), documents


def number_pieces(lengths: list[int], seq_len: int) -> np.ndarray:
    """Return int32 (T,), the number of each token's piece; -1 after the last piece.

    Args:
        lengths: length of each piece.
        seq_len: T.
    """
    numbers = np.full(seq_len, -1, np.int32)
    numbers[: sum(lengths)] = np.repeat(np.arange(len(lengths)), lengths)
    return numbers


def refuse_too_short(n_tokens: int, n_documents: int, seq_len: int) -> None:
    """Raise DataError if the tokens do not fill one sequence."""
    if n_tokens <= seq_len:
        raise DataError(
            f"the training split has {n_tokens} tokens in {n_documents} documents, "
            f"but one sequence of train.seq_len = {seq_len} needs {seq_len + 1}; "
            "use more text or a shorter train.seq_len"
        )
