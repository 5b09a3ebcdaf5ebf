"""Batches for one data-parallel rank, the same global order in every layout.

Step s of a run takes sequences [s * G, (s + 1) * G), G = global_batch. Micro-batch m of the step,
on data-parallel rank r of R with B = micro_batch rows, holds sequences

    s * G + m * (R * B) + r * B + j,   j = 0 ... B - 1

so that a step trains on the same sequences whatever R and B are, and the next sequence's index is
all that a checkpoint needs to hold.

Legend: B rows of a micro-batch, T tokens a sequence.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from dtron.data.packing import IGNORE, Packed, State, TrainingSource, ValidationSource
from dtron.errors import ConfigError, DataError

Tables = Mapping[str, tuple[Tensor, ...]]


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one data-parallel rank."""

    tokens: Tensor
    """int64 (B, T)"""
    labels: Tensor
    """int64 (B, T), -100 where no loss is due"""
    sequence: Tensor
    """int64 (B,), index of each row among all sequences of the run"""
    positions: Tensor | None
    """int64 (B, T), from 0 in each document; only with data.mask_documents"""
    documents: Tensor | Tables | None
    """int32 (B, T), number of the document within its row; only with data.mask_documents. Of a part
    of the sequences: what context parallelism has made of it"""
    padding: int = 0
    """Tokens of all rows that belong to no document."""
    pieces: Tensor | None = None
    """int32 (B, T), number of the piece of a document within its row, across whose end no label
    goes; -1: padding, which routers and capacities leave out. None: there is neither"""
    index: Tensor | None = None
    """int64 (B, T), where in its sequence each token is; None: all are there, in order"""
    order: Tensor | None = None
    """int64 (B, T of all ranks), `index` of all ranks that share the sequences, rank after rank"""
    mtp_tokens: Tensor | None = None
    """int64 (B, T, P), with multi-token prediction: the tokens 1, 2, ... P ahead; the token itself
    where that is in another document or sequence"""
    mtp_labels: Tensor | None = None
    """int64 (B, T, P), the labels there; -100 in another document or sequence"""

    def to(self, device: torch.device | str) -> "Batch":
        """The same batch on a device; to CUDA through pinned memory, without waiting for it."""
        device = torch.device(device)
        return Batch(
            tokens=_move(self.tokens, device),
            labels=_move(self.labels, device),
            sequence=_move(self.sequence, device),
            positions=_move_optional(self.positions, device),
            documents=_move_documents(self.documents, device),
            padding=self.padding,
            pieces=_move_optional(self.pieces, device),
            index=_move_optional(self.index, device),
            order=_move_optional(self.order, device),
            mtp_tokens=_move_optional(self.mtp_tokens, device),
            mtp_labels=_move_optional(self.mtp_labels, device),
        )

    def look_ahead(self, n: int) -> "Batch":
        """The same batch with MTP tokens and labels, up to n tokens ahead, of the same piece of
        the same document; whole sequences."""
        assert not isinstance(self.documents, Mapping), "sequences are looked at whole"
        borders = [x for x in (self.documents, self.pieces) if x is not None]
        length = self.tokens.shape[1]
        here = torch.arange(length, device=self.tokens.device)
        tokens, labels = [], []
        for ahead in range(1, n + 1):
            there = (here + ahead).clamp(max=length - 1)
            inside = (here + ahead < length).expand_as(self.tokens)
            for numbers in borders:
                inside = inside & (numbers[:, there] == numbers)
            tokens.append(torch.where(inside, self.tokens[:, there], self.tokens))
            labels.append(torch.where(inside, self.labels[:, there], IGNORE))
        return replace(self, mtp_tokens=torch.stack(tokens, -1), mtp_labels=torch.stack(labels, -1))


class Loader:
    """The batches of one data-parallel rank, step by step.

    Args:
        source: training sequences.
        global_batch: sequences a step, over all ranks and micro-batches.
        micro_batch: rows of a Batch.
        dp_rank, dp_size: which data-parallel rank this is, of how many.
        first_sequence: index of the first step's first sequence.
    Raises:
        ConfigError: global_batch is not a multiple of dp_size * micro_batch.
    """

    def __init__(
        self,
        source: TrainingSource,
        *,
        global_batch: int,
        micro_batch: int,
        dp_rank: int,
        dp_size: int,
        first_sequence: int = 0,
    ) -> None:
        assert 0 <= dp_rank < dp_size, f"data-parallel rank {dp_rank} of {dp_size}"
        if global_batch % (dp_size * micro_batch):
            raise ConfigError(
                f"train.global_batch = {global_batch} is not a multiple of {dp_size} "
                f"data-parallel ranks x train.micro_batch = {micro_batch}"
            )
        self._source = source
        self._global_batch, self._micro_batch = global_batch, micro_batch
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._next = first_sequence

    def step(self) -> list[Batch]:
        """The micro-batches of the next step, global_batch / (dp_size * micro_batch) of them."""
        first = self._next + self._dp_rank * self._micro_batch
        stride = self._dp_size * self._micro_batch
        batches = []
        for offset in range(0, self._global_batch, stride):
            rows = range(first + offset, first + offset + self._micro_batch)
            batches.append(stacked(self._source.sequence, rows))
        self._next += self._global_batch
        return batches

    def state_dict(self) -> State:
        """Where the next step begins: ints and strings, the same on every rank, fit for JSON."""
        return {"sequence": self._next, **self._source.state(self._next)}

    def load_state_dict(self, state: Mapping[str, int | str]) -> None:
        """Go on where `state_dict` was taken, under any dp_size, micro_batch and global_batch.

        Raises:
            DataError: the state has no "sequence", or the stream it describes has changed.
        """
        if "sequence" not in state:
            raise DataError('the data loader\'s saved state has no "sequence"')
        self._next = int(state["sequence"])
        self._source.seek(self._next, dict(state))


def validation_batches(
    source: ValidationSource, *, sequences: int, micro_batch: int, dp_rank: int, dp_size: int
) -> Iterator[Batch]:
    """The first held-out sequences, as many batches on every rank.

    The forward pass is a collective, so ranks may not differ in their number of batches. Rows
    that fill up the last ones repeat earlier sequences and have no labels: the loss is that of
    the same sequences in every layout.

    Args:
        source: held-out sequences.
        sequences: how many of them to take; fewer if there are not so many.
        micro_batch: rows of a Batch.
        dp_rank, dp_size: which data-parallel rank this is, of how many.
    """
    n = min(sequences, len(source))
    stride = dp_size * micro_batch

    def read(k: int) -> Packed:
        packed = source.sequence(k % n)
        if k >= n:
            packed.labels[:] = IGNORE
        return packed

    for batch in range(math.ceil(n / stride)):
        first = batch * stride + dp_rank * micro_batch
        yield stacked(read, range(first, first + micro_batch))


def _move(tensor: Tensor, device: torch.device) -> Tensor:
    if device.type == "cuda" and tensor.device.type == "cpu":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _move_optional(tensor: Tensor | None, device: torch.device) -> Tensor | None:
    return None if tensor is None else _move(tensor, device)


def _move_documents(
    documents: Tensor | Tables | None, device: torch.device
) -> Tensor | Tables | None:
    if documents is None or isinstance(documents, Tensor):
        return None if documents is None else _move(documents, device)
    return {
        key: row if key.endswith("on host") else tuple(_move(x, device) for x in row)
        for key, row in documents.items()
    }


def stacked(read: Callable[[int], Packed], rows: range) -> Batch:
    """A Batch of the sequences `rows`."""
    packed = [read(k) for k in rows]
    masked = packed[0].documents is not None
    return Batch(
        tokens=_field(packed, "tokens"),
        labels=_field(packed, "labels"),
        sequence=torch.tensor(list(rows), dtype=torch.int64),
        positions=_field(packed, "positions") if masked else None,
        documents=_field(packed, "documents") if masked else None,
        padding=sum(row.padding for row in packed),
        pieces=_field(packed, "pieces") if packed[0].pieces is not None else None,
    )


def _field(packed: list[Packed], name: str) -> Tensor:
    return torch.from_numpy(np.stack([getattr(row, name) for row in packed]))
