"""Sequences packed from a stream of documents, which can only be read forward.

The order is that of the stream, in every layout: each data-parallel rank reads and tokenizes all
of it and keeps its own sequences. The first documents are held out; when the stream ends it
begins again behind them, and its last tokens are followed by its first.

Where sequence k starts is described by three values: the stream's own state before some batch of
documents, how many documents of the stream lie between that state and the one in which the
sequence starts, and how many tokens of that document belong to earlier sequences. Resuming reads
again at most one batch of documents.
"""

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

import numpy as np

from dtron.data.packing import Packed, State, pack, refuse_too_short
from dtron.data.tokenizer import Tokenizer, encode_documents
from dtron.errors import DataError

BATCH_DOCUMENTS = 64
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


@dataclass
class _Document:
    ids: np.ndarray  # int64, ended by EOS
    state: str  # of the stream, before the batch this document came with
    index: int  # of this document behind that state


class StreamedDocuments:
    """The training split of a stream: endless sequences in stream order.

    Args:
        stream: where documents come from.
        tokenizer: what turns them into tokens.
        seq_len: T.
        mask_documents: give positions and documents, and no label across two documents.
        n_held_out: how many documents at the start of the stream belong to validation.
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
        n_held_out: int,
    ) -> None:
        self._stream, self._tokenizer = stream, tokenizer
        self._seq_len, self._mask, self._n_held_out = seq_len, mask_documents, n_held_out
        self._restart(START, 0)

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
        if "stream" not in state:
            self._restart(START, 0)
            return
        self._restart(str(state["stream"]), int(state["skip"]))
        self._fill(1)
        self._offset, self._next = int(state["offset"]), k
        first = self._documents[0]
        found = (first.state, first.index)
        if found != (state["stream"], state["skip"]) or self._offset >= len(first.ids):
            raise DataError(f"{self._stream.name} has changed since the state was saved")

    def _restart(self, state: str, skip: int) -> None:
        self._documents: deque[_Document] = deque()
        self._offset = 0  # tokens of the first document that belong to earlier sequences
        self._buffered = 0  # tokens of all documents in the buffer
        self._next = 0  # the sequence that starts at the offset
        self._begin_pass(state, skip)

    def _begin_pass(self, state: str, skip: int) -> None:
        self._iterator = self._stream.read(state)
        self._whole = state == START and skip <= self._n_held_out
        self._pass_documents = self._pass_tokens = 0
        self._batch_state = state
        self._skip = max(skip, self._n_held_out) if state == START else skip

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
            self._read_batch()

    def _read_batch(self) -> None:
        wanted = self._skip + BATCH_DOCUMENTS
        texts = list(islice(self._iterator, wanted))
        encoded = encode_documents(self._tokenizer, texts[self._skip :])
        for index, ids in enumerate(encoded, self._skip):
            if ids:
                document = _Document(np.array(ids, np.int64), self._batch_state, index)
                self._documents.append(document)
                self._buffered += len(ids)
                self._pass_documents += 1
                self._pass_tokens += len(ids)
        if len(texts) == wanted:
            self._batch_state, self._skip = self._stream.state(), 0
            return
        if self._whole:  # else a stream of too little text would be read for ever
            refuse_too_short(self._pass_tokens, self._pass_documents, self._seq_len)
        self._begin_pass(START, 0)
