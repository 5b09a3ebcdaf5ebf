"""Pack sequences from a stream of documents that can only be read forward.

Sequences have one order in every layout. A stream of several files is divided into substreams,
which take turns, and a rank reads and tokenizes those of its own sequences (`Substreams`). The
first documents are held out for validation, and copies of them are skipped. At its end, a
substream is read again from its first training document, whose tokens directly follow the last
tokens.

Three values describe where sequence k starts: the state of the stream before some batch of
documents, the number of documents between that state and the document in which the sequence starts,
and the number of that document's tokens that belong to earlier sequences. So resuming reads at most
one batch of documents again.

With packing = "best_fit" or "pad", documents are packed window by window. Then the third value is
the number of earlier sequences of the same window, and resuming reads the window again.
"""

import json
import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np
from numpy.typing import ArrayLike

from dtron.data.best_fit_packing import FixedPieces, PackingPlan
from dtron.data.corpus.document_index import documents_of
from dtron.data.packing import Packed, State, TrainingSource, Waste, pack, refuse_too_short
from dtron.data.tokenizer import Document, Tokenizer, encode_documents
from dtron.errors import DataError

BATCH_DOCUMENTS = 64
WINDOW_DOCUMENTS = 1024  # packed together with packing = "best_fit" or "pad"
HOLD_OUT_WINDOW = 10_000  # data.validation_fraction is a fraction of these first documents
_COUNT = "substreams"
_SUBSTREAM = "substream "
START = ""  # the state of a stream before its first document


class DocumentStream(Protocol):
    """A stream of documents that can be read from any earlier state on."""

    @property
    def name(self) -> str:
        """Name for messages."""
        ...

    @property
    def n_documents(self) -> int | None:
        """Number of documents; None: not known without reading them."""
        ...

    @property
    def holds_out(self) -> bool:
        """Whether the held-out documents are the first ones of this stream; else they are somewhere
        in the stream of which this one is a part."""
        ...

    def read(self, state: str) -> Iterator[Document]:
        """Yield the documents after a state; START: all of them."""
        ...

    def state(self) -> str:
        """Return the state after the last document that `read` has yielded."""
        ...


class Substreams(TrainingSource):
    """A stream divided by files into n substreams: sequence k is number k // n of substream k % n.

    A rank opens the substreams of its own sequences only, so that it tokenizes no others. Each
    substream repeats its files without end.

    Args:
        make: opens substream j of n, for arguments (j, n).
        count: n.
    """

    def __init__(self, make: Callable[[int, int], TrainingSource], count: int) -> None:
        self._make, self._count = make, count
        self._opened: dict[int, TrainingSource] = {}
        self._saved: dict[int, tuple[int, State]] = {}  # where to continue: (number, state)

    def sequence(self, k: int) -> Packed:
        """Return sequence k of the run; since the last `seek`, k may not decrease."""
        number, j = divmod(k, self._count)
        if j not in self._opened:
            self._opened[j] = self._make(j, self._count)
            if j in self._saved:
                self._opened[j].seek(*self._saved[j])
        return self._opened[j].sequence(number)

    def state(self, k: int) -> State:
        """Return the states of the substreams that this rank reads; `merged` joins those of all
        ranks."""
        state: State = {_COUNT: self._count}
        for j in sorted({*self._opened, *self._saved}):
            number = self._next_number(j, k)
            if j in self._opened:
                state[f"{_SUBSTREAM}{j}"] = json.dumps(self._opened[j].state(number))
            elif self._saved[j][0] == number:  # no sequence of it was read since `seek`
                state[f"{_SUBSTREAM}{j}"] = json.dumps(self._saved[j][1])
        return state

    def seek(self, k: int, state: State) -> None:
        """Continue at sequence k; without a state, read the stream again from its start."""
        self._opened, self._saved = {}, {}
        states = {0: state} if "stream" in state else _states_of_substreams(state)
        count = int(state.get(_COUNT, 1))
        if states and count != self._count:
            raise DataError(
                f"data.substreams = {self._count}, but the checkpoint was written with {count}; "
                "set it to that"
            )
        self._saved = {j: (self._next_number(j, k), each) for j, each in states.items()}

    def waste(self) -> Waste | None:
        """Return None: it is not known in advance."""
        return None

    def _next_number(self, j: int, k: int) -> int:
        """Return the number in substream j of its first sequence that is not before sequence k."""
        return (k - j + self._count - 1) // self._count


def _states_of_substreams(state: State) -> dict[int, State]:
    return {
        int(key.removeprefix(_SUBSTREAM)): json.loads(str(value))
        for key, value in state.items()
        if key.startswith(_SUBSTREAM)
    }


def merged(states: Iterable[State]) -> State:
    """Join the states of all ranks at the same sequence, each with the substreams that it reads."""
    return {key: value for state in states for key, value in sorted(state.items())}


def held_out_texts(stream: DocumentStream, fraction: float) -> list[Document]:
    """Return the held-out documents, the first documents of a stream.

    Their number is `fraction` of the first 10,000 documents, or of all documents if the stream is
    shorter: at least one if the stream has two or more documents, and never all documents.
    """
    if fraction == 0:
        return []
    most = math.ceil(fraction * HOLD_OUT_WINDOW)
    texts: list[Document] = []
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
    """Concatenate documents: int64 (N,) tokens, and int64 (n + 1,) start of each document."""
    arrays = [np.asarray(ids, np.int64) for ids in encoded]
    tokens = np.concatenate([np.empty(0, np.int64), *arrays])
    return tokens, np.cumsum([0, *map(len, arrays)])


@dataclass
class _Document:
    ids: np.ndarray  # int64, as stored; texts are ended by EOS
    state: str  # of the stream before the batch of this document
    index: int  # number of documents between that state and this document


class _DocumentReader:
    """Reads a stream without its held-out documents in batches, repeating it without end.

    Args:
        held_out: the first documents, for validation; copies of them are skipped too.
        refuse: function that is called after each whole pass with the numbers of its tokens and
            documents; raises DataError if these can never fill a sequence.
    """

    def __init__(
        self,
        stream: DocumentStream,
        tokenizer: Tokenizer,
        held_out: Sequence[Document],
        refuse: Callable[[int, int], None],
    ) -> None:
        self._stream, self._tokenizer = stream, tokenizer
        self._n_held_out = len(held_out) if stream.holds_out else 0
        self._refuse = refuse
        self._held_out = frozenset(text for text in held_out if text)
        self.begin(START, 0)

    def begin(self, state: str, skip: int) -> None:
        """Continue `skip` documents after a state of the stream."""
        self._iterator = self._stream.read(state)
        self._whole = state == START and skip <= self._n_held_out
        self._documents = self._tokens = 0
        self._state = state
        self._skip = max(skip, self._n_held_out) if state == START else skip

    def position(self) -> tuple[str, int]:
        """Return the arguments of `begin` to continue here."""
        return self._state, self._skip

    def batch(self, size: int) -> list[_Document]:
        """Read `size` documents, fewer at the end of a pass.

        Return those that have text and are not copies of held-out documents.
        """
        wanted = self._skip + size
        texts = list(islice(self._iterator, wanted))
        found = texts[self._skip :]
        encoded = encode_documents(self._tokenizer, found)
        documents = [
            _Document(np.array(ids, np.int64), self._state, index)
            for index, (text, ids) in enumerate(zip(found, encoded, strict=True), self._skip)
            if len(ids) and text not in self._held_out
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


class StreamedDocuments(TrainingSource):
    """The training split of a stream: endless sequences in stream order.

    Args:
        stream: source of documents.
        seq_len: T, tokens per sequence.
        mask_documents: whether to return positions and document numbers; if so, labels do not
            cross documents.
        held_out: the documents at the start of the stream that belong to validation.
    Raises:
        DataError: the whole stream does not fill one sequence.
    """

    def __init__(
        self,
        stream: DocumentStream,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        mask_documents: bool,
        held_out: Sequence[Document],
    ) -> None:
        self._name, self._seq_len, self._mask = stream.name, seq_len, mask_documents

        def refuse(n_tokens: int, n_documents: int) -> None:
            refuse_too_short(n_tokens, n_documents, seq_len)

        self._reader = _DocumentReader(stream, tokenizer, held_out, refuse)
        self._reset()

    def sequence(self, k: int) -> Packed:
        """Return sequence k of the run; since the last `seek`, k must not decrease."""
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
        """Return the state from which `seek` continues at sequence k; k as in `sequence`."""
        self._forward(k)
        self._fill(1)
        first = self._documents[0]
        return {"stream": first.state, "skip": first.index, "offset": self._offset}

    def seek(self, k: int, state: State) -> None:
        """Continue at sequence k; without a state, read the stream again from its start.

        Raises:
            DataError: the stream has changed since the state was taken.
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
        """Return None: how many documents are split is not known in advance."""
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


class StreamedPieces(TrainingSource):
    """The training split of a stream with whole documents, packed window by window.

    Args:
        stream, tokenizer, seq_len, held_out: as in StreamedDocuments.
        packing: a key of dtron.data.best_fit_packing.PACKERS.
        mask_documents: whether to return positions and document numbers.
    Raises:
        DataError: the training split of the stream has no document with text.
    """

    def __init__(
        self,
        stream: DocumentStream,
        tokenizer: Tokenizer,
        *,
        seq_len: int,
        packing: str,
        mask_documents: bool,
        held_out: Sequence[Document],
    ) -> None:
        self._seq_len, self._packing, self._mask = seq_len, packing, mask_documents
        self._eos_id = tokenizer.eos_id

        def refuse(n_tokens: int, n_documents: int) -> None:
            if not n_documents:
                raise DataError(f"{stream.name}: the training split has no documents with text")

        self._reader = _DocumentReader(stream, tokenizer, held_out, refuse)
        self._first = 0  # first sequence of the window
        self._window: FixedPieces | None = None  # None: not read yet

    def sequence(self, k: int) -> Packed:
        """Return sequence k of the run; since the last `seek`, k must not decrease."""
        window = self._forward(k)
        return window.sequence(k - self._first)

    def state(self, k: int) -> State:
        """Return the state from which `seek` continues at sequence k; k as in `sequence`."""
        self._forward(k)
        state, skip = self._begins
        # A run that resumes with packing = "cut" reads "offset": it begins at this window.
        return {"stream": state, "skip": skip, "sequence_of_window": k - self._first, "offset": 0}

    def seek(self, k: int, state: State) -> None:
        """Continue at sequence k; without a state, read the stream again from its start."""
        self._first, self._window = 0, None
        if "stream" not in state:
            self._reader.begin(START, 0)
            return
        self._reader.begin(str(state["stream"]), int(state["skip"]))
        self._first = k - int(state.get("sequence_of_window", 0))  # missing: saved by "cut"

    def waste(self) -> Waste | None:
        """Return None: padding and split documents are not known in advance."""
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
            documents_of(offsets),
            seq_len=self._seq_len,
            packing=self._packing,
            mask_documents=self._mask,
            eos_id=self._eos_id,
        )
        return FixedPieces(plan)
