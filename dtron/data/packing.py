"""Packing "cut": concatenate documents, and cut them into sequences of equal length.

`dtron/data/best_fit_packing.py` keeps documents whole. Here the documents of an epoch are
concatenated, each with EOS at its end, and cut every T tokens:

    documents   a a a a E b b E c c c c c c E d d d E ...     E = EOS
    sequence 0  a a a a E b                                   T = 6
    labels      a a a E b b                                   next tokens; the last is of sequence 1
    sequence 1              b E c c c c

Sequence k of a run, k = 0, 1, 2, ... without end, is number k % n of epoch k // n, where n is the
number of whole sequences in an epoch; the tokens after the last whole sequence are dropped. So
sequence k is a pure function of (seed, k), and resuming needs no other state.

With `mask_documents`, documents are independent: positions restart in each document, attention is
limited to tokens with the same document number, and EOS has no label. The part of a document that
continues from an earlier sequence starts at position 0.

Legend: T tokens per sequence.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any, Protocol

import numpy as np

from dtron.data.corpus.document_index import DocumentIndex, Documents
from dtron.data.corpus.token_corpus import TokenShards
from dtron.data.shuffle import shuffle, shuffled
from dtron.data.tokenizer import NO_LOSS
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
    """int32 (T,), number of the document piece within the sequence, -1 for padding; labels do not
    cross pieces. None: the sequence is one piece without padding"""
    spans: tuple[tuple[int, int], ...] = ()
    """(first, last + 1) positions in the corpus of the tokens of each document piece, and of the
    label after them. Empty for a stream"""
    images: np.ndarray | None = None
    """uint8 (n, 3, S, S), images of the sequence, in RGB; None: data without images"""
    image_index: np.ndarray | None = None
    """int64 (T, 2), (image, index among its tokens) of each token; (-1, -1): text"""
    encoder_tokens: np.ndarray | None = None
    """int64 (S,), tokens that an encoder reads; None: the model has none"""
    source: tuple[int, int] | None = None
    """(index, n): the source, among the n of a mixture by name; None: no mixture"""

    @property
    def padding(self) -> int:
        """Number of padding tokens, which are at the end."""
        return 0 if self.pieces is None else int((self.pieces < 0).sum())


class Tokens(Protocol):
    """Token ids (N,) in memory or in a file."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> np.ndarray:
        """Return the tokens of a slice."""
        ...


@dataclass(frozen=True)
class UnreadSequence:
    """A sequence whose tokens are not read yet."""

    tokens: Tokens
    """Where the spans are."""
    spans: list[tuple[int, int]]
    """(first, last + 1) positions of the tokens to read"""
    pack: Callable[[np.ndarray], Packed]
    """Makes the sequence of the tokens of all spans, concatenated."""


@dataclass(frozen=True)
class Waste:
    """The cost of packing: padding, and documents that are split."""

    sequences: int
    """sequences per epoch"""
    padding: float
    """fraction of an epoch's tokens that are padding"""
    split_documents: float
    """fraction of documents that are in more than one sequence, in the first group of documents"""

    def __str__(self) -> str:
        return (
            f"{self.sequences:,} sequences per epoch, {self.padding:.2%} of their tokens padding, "
            f"{self.split_documents:.1%} of documents split"
        )


def read_spans(tokens: Tokens, spans: Sequence[tuple[int, int]]) -> np.ndarray:
    """Return the tokens [start, stop) of all spans, concatenated."""
    if isinstance(tokens, TokenShards):
        return tokens.read(spans)
    return np.concatenate([tokens[start:stop] for start, stop in spans])


def read_sequences(sequences: Sequence[UnreadSequence]) -> list[Packed]:
    """Read the tokens of sequences of one corpus together: a store answers all requests at once."""
    window = read_spans(sequences[0].tokens, [span for each in sequences for span in each.spans])
    sizes = [sum(stop - start for start, stop in each.spans) for each in sequences]
    windows = np.split(window, np.cumsum(sizes)[:-1])
    return [each.pack(part) for each, part in zip(sequences, windows, strict=True)]


class TrainingSource(Protocol):
    """An endless source of sequences; between two calls of `seek`, k must not decrease."""

    def sequence(self, k: int) -> Packed:
        """Return sequence k of the run."""
        ...

    def sequences(self, numbers: Sequence[int]) -> list[Packed]:
        """Return several sequences of the run, in ascending order."""
        return [self.sequence(k) for k in numbers]

    def state(self, k: int) -> State:
        """Return a flat dict, for JSON, that `seek` needs to continue at sequence k."""
        ...

    def seek(self, k: int, state: State) -> None:
        """Continue at sequence k, which may be earlier than the current sequence."""
        ...

    def count_from(self, step: int, k: int) -> None:
        """Note that step `step` of the run, counted from 0, begins with sequence k."""

    def waste(self) -> Waste | None:
        """Return padding and split documents; None: not known in advance."""
        ...


class ValidationSource(Protocol):
    """A source of a fixed number of sequences, which can be read in any order."""

    def __len__(self) -> int: ...

    def sequence(self, k: int) -> Packed:
        """Return sequence k, 0 <= k < len(self)."""
        ...


class ConcatenatedDocuments:
    """Documents concatenated in their order; nothing is copied until a window is read.

    Args:
        documents: each has at least one token.
    """

    def __init__(self, documents: Documents) -> None:
        self._sources = documents.starts
        self._starts = np.zeros(len(documents) + 1, np.int64)
        np.cumsum(documents.lengths, out=self._starts[1:])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def split_documents(self, seq_len: int, start: int = 0) -> float:
        """Return the fraction of documents that a cut at every `seq_len` tokens splits.

        Args:
            start: number of tokens before the first document.
        """
        first, last = (self._starts[:-1] + start) // seq_len, self._starts[1:] + start - 1
        return float(np.mean(first != last // seq_len))

    def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return where the tokens [start, stop) are in the corpus, one span per document."""
        spans: list[tuple[int, int]] = []
        document = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            end = min(int(self._starts[document + 1]), stop)
            source = int(self._sources[document]) + start - int(self._starts[document])
            spans.append((source, source + end - start))
            start, document = end, document + 1
        return spans


class EpochOfDocuments:
    """The documents of an epoch, concatenated: groups in a random order, each group shuffled.

    Args:
        index: groups of documents; two groups are in memory at once.
        seed, epoch: determine the order.
    """

    def __init__(self, index: DocumentIndex, seed: int, epoch: int) -> None:
        groups = order_of_groups(index, seed, epoch)
        self._starts = np.zeros(len(groups) + 1, np.int64)
        np.cumsum(index.group_sizes[groups, 1], out=self._starts[1:])

        @lru_cache(maxsize=2)  # no method: only the cycle collector would free its cache
        def opened(place: int) -> ConcatenatedDocuments:
            documents = index.group(int(groups[place]))
            return ConcatenatedDocuments(documents.take(shuffled(documents.numbers, seed, epoch)))

        self._group = opened

    def spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return where the tokens [start, stop) are in the corpus, one span per document."""
        spans: list[tuple[int, int]] = []
        place = int(np.searchsorted(self._starts, start, side="right")) - 1
        while start < stop:
            first, end = int(self._starts[place]), min(int(self._starts[place + 1]), stop)
            spans += self._group(place).spans(start - first, end - first)
            start, place = end, place + 1
        return spans

    def split_documents(self, seq_len: int) -> float:
        """Return the fraction of documents that a cut at every `seq_len` tokens splits, in the
        first group of the epoch."""
        return self._group(0).split_documents(seq_len)


class CutDocuments:
    """Concatenated documents, cut every T tokens; the order of an epoch is an EpochOfDocuments.

    Args:
        tokens: all tokens of all documents, any integer dtype (N,), usually in files.
        index: the training documents.
        seq_len: T.
        mask_documents: whether to return positions and document numbers; if so, labels do not
            cross documents.
    Raises:
        DataError: the documents do not fill one sequence.
    """

    def __init__(
        self, tokens: Tokens, index: DocumentIndex, *, seq_len: int, mask_documents: bool
    ) -> None:
        total = int(index.group_sizes[:, 1].sum())
        refuse_too_short(total, index.n_documents, seq_len)
        self._n_sequences = (total - 1) // seq_len
        self._tokens, self._index = tokens, index
        self._seq_len, self._mask = seq_len, mask_documents

    def __len__(self) -> int:
        return self._n_sequences

    def order(self, seed: int, epoch: int) -> EpochOfDocuments:
        """Return the documents in the order of an epoch."""
        return EpochOfDocuments(self._index, seed, epoch)

    def unread(self, order: EpochOfDocuments, index: int) -> UnreadSequence:
        """Return sequence `index` of an epoch, 0 <= index < len(self)."""
        start = index * self._seq_len
        spans = order.spans(start, start + self._seq_len + 1)
        return UnreadSequence(
            self._tokens, spans, partial(pack_spans, spans=spans, mask_documents=self._mask)
        )

    def waste(self, order: EpochOfDocuments) -> Waste:
        """Return the split documents of an epoch; there is no padding."""
        return Waste(len(self), 0.0, order.split_documents(self._seq_len))


class SequencePlan(Protocol):
    """The sequences of a split in the order of an epoch.

    `order` returns this order for `unread` and `waste`; its type differs between plans.
    """

    def __len__(self) -> int: ...

    def order(self, seed: int, epoch: int) -> Any: ...

    def unread(self, order: Any, index: int) -> UnreadSequence: ...

    def waste(self, order: Any) -> Waste: ...


class Shuffled(TrainingSource):
    """The training split: endless epochs, each in a different order."""

    def __init__(self, plan: SequencePlan, seed: int) -> None:
        self._plan, self._seed = plan, seed
        self._epoch = 0
        self._order = plan.order(seed, 0)

    @property
    def epoch_length(self) -> int:
        """Number of sequences of an epoch."""
        return len(self._plan)

    def sequence(self, k: int) -> Packed:
        """Return sequence k of the run, k = 0, 1, 2, ..."""
        return self.sequences([k])[0]

    def sequences(self, numbers: Sequence[int]) -> list[Packed]:
        """Return several sequences of the run, whose tokens are read together."""
        return read_sequences([self._unread(k) for k in numbers])

    def _unread(self, k: int) -> UnreadSequence:
        epoch, index = divmod(k, len(self._plan))
        if epoch != self._epoch:  # one order is kept: k usually ascends
            self._epoch, self._order = epoch, self._plan.order(self._seed, epoch)
        return self._plan.unread(self._order, index)

    def state(self, k: int) -> State:
        """Return no state: sequence k depends on k alone."""
        return {}

    def seek(self, k: int, state: State) -> None:
        """Do nothing: any sequence can be read at any time."""

    def waste(self) -> Waste:
        """Return padding and split documents of the current epoch."""
        return self._plan.waste(self._order)


class OrderedDocuments:
    """The held-out split: one epoch in the order of the documents.

    If the documents do not fill one sequence, the only sequence is padded with EOS; the padding is
    a separate document without labels.

    Args:
        tokens, seq_len, mask_documents: as in CutDocuments.
        documents: at least 1.
        eos_id: token to pad with.
    """

    def __init__(
        self,
        tokens: Tokens,
        documents: Documents,
        *,
        seq_len: int,
        mask_documents: bool,
        eos_id: int,
    ) -> None:
        self._tokens, self._seq_len, self._mask = tokens, seq_len, mask_documents
        self._eos_id, self._documents = eos_id, ConcatenatedDocuments(documents)

    def __len__(self) -> int:
        return max((len(self._documents) - 1) // self._seq_len, 1)

    def sequence(self, k: int) -> Packed:
        """Return sequence k, 0 <= k < len(self)."""
        total, start = len(self._documents), k * self._seq_len
        if total > self._seq_len:
            spans = self._documents.spans(start, start + self._seq_len + 1)
            window = read_spans(self._tokens, spans)
            return pack_spans(window, spans=spans, mask_documents=self._mask)
        spans = self._documents.spans(0, total)
        padding = self._seq_len + 1 - total
        window = read_spans(self._tokens, spans).astype(np.int64)
        window = np.pad(window, (0, padding), constant_values=self._eos_id)
        lengths = [stop - start for start, stop in spans]
        packed = pack(window, [*lengths, padding], mask_documents=self._mask)
        packed.labels[self._seq_len - padding :] = IGNORE
        return replace(packed, pieces=number_pieces([total], self._seq_len))


def order_of_groups(index: DocumentIndex, seed: int, epoch: int) -> np.ndarray:
    """Return the numbers of the groups with training documents in the order of an epoch, int64."""
    return shuffle(np.flatnonzero(index.group_sizes[:, 0]), seed, epoch)


def pack_spans(
    window: np.ndarray, *, spans: Sequence[tuple[int, int]], mask_documents: bool
) -> Packed:
    """Make a sequence of T tokens.

    Args:
        window: any integer dtype (T + 1,), the tokens of the spans.
        spans: where they are in the corpus, one span for each successive document.
        mask_documents: as in CutDocuments.
    """
    lengths = [stop - start for start, stop in spans]
    packed = pack(window.astype(np.int64), lengths, mask_documents=mask_documents)
    return replace(packed, spans=tuple(spans))


def pack(window: np.ndarray, lengths: list[int], *, mask_documents: bool) -> Packed:
    """Make a sequence of T tokens and labels from a window of T + 1 tokens.

    Args:
        window: int64 (T + 1,), as stored.
        lengths: number of tokens in the window from each successive document; the sum is T + 1.
        mask_documents: whether to return positions and document numbers; if so, labels do not
            cross documents.
    """
    ids, labels = ids_and_labels(window)
    tokens, labels = ids[:-1], labels[1:]
    if not mask_documents:
        return Packed(tokens, labels, None, None)
    positions, documents = number_documents(lengths)
    labels[documents[1:] != documents[:-1]] = IGNORE
    return Packed(tokens, labels, positions[:-1], documents[:-1])


def ids_and_labels(stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the ids of stored tokens, and the ids as labels: IGNORE where the bit NO_LOSS is set.

    Args:
        stored: int64 (n,).
    Returns:
        Two arrays int64 (n,).
    """
    ids = stored & (NO_LOSS - 1)
    return ids, np.where(stored & NO_LOSS, IGNORE, ids)


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
