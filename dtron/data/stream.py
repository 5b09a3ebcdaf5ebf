"""Sequences packed from a stream of documents, which can only be read forward.

The order is that of the stream, in every layout: each data-parallel rank reads and tokenizes all
of it and keeps its own sequences. The first documents are held out, and left out where they come
again; when the stream ends it
begins again behind them, and its last tokens are followed by its first.

Where sequence k starts is described by three values: the stream's own state before some batch of
documents, how many documents of the stream lie between that state and the one in which the
sequence starts, and how many tokens of that document belong to earlier sequences. Resuming reads
again at most one batch of documents.

Where documents are kept whole, those of a window of the stream are packed together, and the third
value is how many sequences of the window came before. Resuming reads the window again.
"""

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from dtron.data.best_fit_packing import FixedPieces, PackingPlan
from dtron.data.packing import Packed, State, Waste, pack, refuse_too_short
from dtron.data.tokenizer import Tokenizer, encode_documents
from dtron.errors import DataError

BATCH_DOCUMENTS = 64
WINDOW_DOCUMENTS = 1024  # packed together where documents are kept whole
HOLD_OUT_WINDOW = 10_000  # a share of an endless stream means a share of its first documents
START = ""  # the state of a stream before its first document


class DocumentStream(Protocol):
    """Documents that come one after the other, from any earlier state on."""

    @property
    def name(self) -> str:
        """What messages call it."""
        ...

    @property
    def n_documents(self) -> int | None:
        """How many documents there are, if that is known without reading them."""
        ...

    def read(self, state: str) -> Iterator[str]:
        """The documents that follow a state; START: all of them."""
        ...

    def state(self) -> str:
        """The state behind the last document that `read` gave."""
        ...


def held_out_texts(stream: DocumentStream, fraction: float) -> list[str]:
    """The first documents of a stream: a share of those it has, or of its first 10,000.

    At least one if the stream has two or more; never all of them.
    """
    if fraction == 0:
        return []
    most = math.ceil(fraction * HOLD_OUT_WINDOW)
    texts: list[str] = []
    n = 0
    for text in islice(stream.read(START), HOLD_OUT_WINDOW):
        if n < most:
            texts.append(text)
        n += 1
        if stream.n_documents is not None and n >= most:
            n = min(stream.n_documents, HOLD_OUT_WINDOW)
            break
    return texts[: min(math.ceil(fraction * n), n - 1)]


def join(encoded: Sequence[ArrayLike]) -> tuple[np.ndarray, np.ndarray]:
    """Documents end to end: tokens int64, and where each document starts, int64 (n + 1,)."""
    arrays = [np.asarray(ids, np.int64) for ids in encoded]
    tokens = np.concatenate([np.empty(0, np.int64), *arrays])
    return tokens, np.cumsum([0, *map(len, arrays)])


@dataclass
class _Document:
    ids: np.ndarray  # int64, ended by EOS
    state: str  # of the stream, before the batch this document came with
    index: int  # of this document behind that state


class _DocumentReader:
    """The documents of a stream behind the held-out ones, batch by batch, again and again.

    Args:
        held_out: the first documents, which validation has; copies of them are left out too.
        refuse: called with the number of tokens and of documents of each whole pass; raises if
            they are too few, else they would be read for ever.
    """

    def __init__(
        self,
        stream: DocumentStream,
        tokenizer: Tokenizer,
        held_out: Sequence[str],
        refuse: Callable[[int, int], None],
    ) -> None:
        self._stream, self._tokenizer = stream, tokenizer
        self._n_held_out, self._refuse = len(held_out), refuse
        self._held_out = frozenset(text for text in held_out if text)
        self.begin(START, 0)

    def begin(self, state: str, skip: int) -> None:
        """Go on `skip` documents behind a state of the stream."""
        self._iterator = self._stream.read(state)
        self._whole = state == START and skip <= self._n_held_out
        self._documents = self._tokens = 0
        self._state = state
        self._skip = max(skip, self._n_held_out) if state == START else skip

    def position(self) -> tuple[str, int]:
        """What `begin` wants to go on here."""
        return self._state, self._skip

    def batch(self, size: int) -> list[_Document]:
        """Those of the next `size` documents that have text; fewer at the end of a pass."""
        wanted = self._skip + size
        texts = list(islice(self._iterator, wanted))
        found = texts[self._skip :]
        encoded = encode_documents(self._tokenizer, found)
        documents = [
            _Document(np.array(ids, np.int64), self._state, index)
            for index, (text, ids) in enumerate(zip(found, encoded, strict=True), self._skip)
            if ids and text not in self._held_out
        ]
        self._documents += len(documents)
        self._tokens += sum(len(document.ids) for document in documents)
        if len(texts) == wanted:
            self._state, self._skip = self._stream.state(), 0
            return documents
        if self._whole:
            self._refuse(self._tokens, self._documents)
        self.begin(START, 0)
        return documents


class StreamedDocuments:
    """The training split of a stream: endless sequences in stream order.

    Args:
        stream: where documents come from.
        tokenizer: what turns them into tokens.
        seq_len: T.
        mask_documents: give positions and documents, and no label across two documents.
        held_out: the documents at the start of the stream that belong to validation.
    Raises:
        DataError: a whole pass over the stream does not fill one sequence.
    """

    def __init__(
        self,
        stream: DocumentStream,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        mask_documents: bool,
        held_out: Sequence[str],
    ) -> None:
        self._name, self._seq_len, self._mask = stream.name, seq_len, mask_documents

        def refuse(n_tokens: int, n_documents: int) -> None:
            refuse_too_short(n_tokens, n_documents, seq_len)

        self._reader = _DocumentReader(stream, tokenizer, held_out, refuse)
        self._reset()

    def sequence(self, k: int) -> Packed:
        """Sequence k of the run; k may not lie before what was asked for since `seek`."""
        self._forward(k)
        length = self._seq_len + 1
        self._fill(length)
        pieces, lengths, skip = [], [], self._offset
        for document in self._documents:
            piece = document.ids[skip : skip + length]
            pieces.append(piece)
            lengths.append(len(piece))
            length, skip = length - len(piece), 0
            if not length:
                break
        return pack(np.concatenate(pieces), lengths, mask_documents=self._mask)

    def state(self, k: int) -> State:
        """Where sequence k starts; k as in `sequence`."""
        self._forward(k)
        self._fill(1)
        first = self._documents[0]
        return {"stream": first.state, "skip": first.index, "offset": self._offset}

    def seek(self, k: int, state: State) -> None:
        """Go on at sequence k; without a state, the stream is read again from its start.

        Raises:
            DataError: the stream does not hold what it held when the state was taken.
        """
        self._reset()
        if "stream" not in state:
            self._reader.begin(START, 0)
            return
        self._reader.begin(str(state["stream"]), int(state["skip"]))
        self._fill(1)
        self._offset, self._next = int(state["offset"]), k
        first = self._documents[0]
        found = (first.state, first.index)
        if found != (state["stream"], state["skip"]) or self._offset >= len(first.ids):
            raise DataError(f"{self._name} has changed since the state was saved")

    def waste(self) -> Waste | None:
        """Not known: which documents are split shows as they come."""
        return None

    def _reset(self) -> None:
        self._documents: deque[_Document] = deque()
        self._offset = 0  # tokens of the first document that belong to earlier sequences
        self._buffered = 0  # tokens of all documents in the buffer
        self._next = 0  # the sequence that starts at the offset

    def _forward(self, k: int) -> None:
        assert k >= self._next, f"sequence {k} was passed; a stream is read forward"
        while self._next < k:
            self._fill(self._seq_len + 1)
            self._offset += self._seq_len
            while self._offset >= len(self._documents[0].ids):
                length = len(self._documents.popleft().ids)
                self._offset -= length
                self._buffered -= length
            self._next += 1

    def _fill(self, length: int) -> None:
        while self._buffered - self._offset < length:
            documents = self._reader.batch(BATCH_DOCUMENTS)
            self._documents.extend(documents)
            self._buffered += sum(len(document.ids) for document in documents)


class StreamedPieces:
    """The training split of a stream, whole documents in sequences, window by window.

    Args:
        stream, tokenizer, seq_len, held_out: as in StreamedDocuments.
        packing: a row of dtron.data.best_fit_packing.PACKERS.
        mask_documents: give positions and documents.
    Raises:
        DataError: a whole pass over the stream has no document.
    """

    def __init__(
        self,
        stream: DocumentStream,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        packing: str,
        mask_documents: bool,
        held_out: Sequence[str],
    ) -> None:
        self._seq_len, self._packing, self._mask = seq_len, packing, mask_documents
        self._eos_id = tokenizer.eos_id

        def refuse(n_tokens: int, n_documents: int) -> None:
            if not n_documents:
                raise DataError(f"{stream.name}: the training split has no documents with text")

        self._reader = _DocumentReader(stream, tokenizer, held_out, refuse)
        self._first = 0  # the sequence with which the window begins
        self._window: FixedPieces | None = None  # read when it is needed

    def sequence(self, k: int) -> Packed:
        """Sequence k of the run; k may not lie before what was asked for since `seek`."""
        window = self._forward(k)
        return window.sequence(k - self._first)

    def state(self, k: int) -> State:
        """Where sequence k starts; k as in `sequence`."""
        self._forward(k)
        state, skip = self._begins
        # The last value is for a run that goes on with "cut": at the start of the window.
        return {"stream": state, "skip": skip, "sequence_of_window": k - self._first, "offset": 0}

    def seek(self, k: int, state: State) -> None:
        """Go on at sequence k; without a state, the stream is read again from its start."""
        self._first, self._window = 0, None
        if "stream" not in state:
            self._reader.begin(START, 0)
            return
        self._reader.begin(str(state["stream"]), int(state["skip"]))
        self._first = k - int(state.get("sequence_of_window", 0))  # none: "cut" saved the state

    def waste(self) -> Waste | None:
        """Not known: documents are packed as they come."""
        return None

    def _forward(self, k: int) -> FixedPieces:
        assert k >= self._first, f"sequence {k} was passed; a stream is read forward"
        window = self._read_window() if self._window is None else self._window
        while k - self._first >= len(window):
            self._first += len(window)
            window = self._read_window()
        self._window = window
        return window

    def _read_window(self) -> FixedPieces:
        documents: list[_Document] = []
        while not documents:
            self._begins = self._reader.position()
            documents = self._reader.batch(WINDOW_DOCUMENTS)
        tokens, offsets = join([document.ids for document in documents])
        plan = PackingPlan(
            tokens,
            offsets,
            np.arange(len(documents)),
            seq_len=self._seq_len,
            packing=self._packing,
            mask_documents=self._mask,
            eos_id=self._eos_id,
        )
        return FixedPieces(plan)
