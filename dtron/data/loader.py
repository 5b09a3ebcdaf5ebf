"""Batches for one data-parallel rank, the same global order in every layout.

Step s of a run takes sequences [s * G, (s + 1) * G), G = global_batch. Micro-batch m of the step,
on data-parallel rank r of R with B = micro_batch rows, holds sequences

    s * G + m * (R * B) + r * B + j,   j = 0 ... B - 1

so that a step trains on the same sequences whatever R and B are, and a checkpoint needs to hold no
more than the index of the next sequence.

Legend: B sequences per micro-batch and rank, T tokens per sequence.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dtron.data.fetch_ahead import FetchAhead
from dtron.data.objectives import Objective
from dtron.data.packing import IGNORE, Packed, State, TrainingSource, ValidationSource
from dtron.errors import ConfigError, DataError

Tables = Mapping[str, tuple[Tensor, ...]]
ON_HOST = "on host"
"""End of the names of tables that stay on the host."""


@dataclass(frozen=True)
class Batch:
    """One micro-batch of one data-parallel rank."""

    tokens: Tensor
    """int64 (B, T)"""
    labels: Tensor
    """int64 (B, T), -100 for tokens without loss"""
    sequence: Tensor
    """int64 (B,), index of each row among all sequences of the run"""
    positions: Tensor | None
    """int64 (B, T), from 0 in each document; only with data.mask_documents"""
    documents: Tensor | Tables | None
    """int32 (B, T), number of the document within its row; only with data.mask_documents. With
    context parallelism: the tables that its attention makes of these numbers"""
    padding: int = 0
    """Number of padding tokens in all rows."""
    pieces: Tensor | None = None
    """int32 (B, T), number of the document piece within its row, -1 for padding. No label crosses
    from one piece to the next, and routers and capacities ignore padding. None: each row is one
    piece without padding"""
    index: Tensor | None = None
    """int64 (B, T), position of each token in its sequence; None: whole sequences, in order"""
    order: Tensor | None = None
    """int64 (B, T of all cp ranks), `index` of all ranks that share the sequences, concatenated"""
    mtp_tokens: Tensor | None = None
    """int64 (B, T, P), for multi-token prediction: the tokens 1, 2, ... P ahead; the token itself
    where that one is in another document or sequence"""
    mtp_labels: Tensor | None = None
    """int64 (B, T, P), labels of `mtp_tokens`; -100 where they are in another document or
    sequence"""
    images: Tensor | None = None
    """uint8 (N, 3, S, S), images of all rows, in RGB; None: data without images"""
    image_index: Tensor | None = None
    """int64 (B, T, 2), (image, index among its tokens) of each token; (-1, -1): text"""
    encoder_tokens: Tensor | None = None
    """int64 (B, S), tokens that an encoder reads; `tokens` are those of its decoder. None: the
    model has none"""
    sources: Tensor | None = None
    """bool (B, S), whether a row is from each of the S sources of a mixture; None: no mixture"""

    def to(self, device: torch.device | str) -> "Batch":
        """Copy to a device; to CUDA from pinned memory, asynchronously."""
        device = torch.device(device)
        return self.map(lambda x: _move(x, device))

    def map(self, change: Callable[[Tensor], Tensor]) -> "Batch":
        """Apply a function to all tensors, in a fixed order, but not to tables on the host."""
        found = {each.name: getattr(self, each.name) for each in fields(self)}
        changed: dict[str, Any] = {k: change(x) for k, x in found.items() if isinstance(x, Tensor)}
        if isinstance(self.documents, Mapping):
            changed["documents"] = map_tables(self.documents, change)
        return replace(self, **changed)

    def with_images(self, size: int) -> "Batch":
        """Return the batch with images: with a blank one, which no token uses, if it has none.

        Every rank encodes an image, so that all ranks take part in the collectives of the encoder.

        Args:
            size: S, pixels per side of images.
        """
        if self.images is not None and len(self.images):
            return self
        text = self.tokens.new_full((*self.tokens.shape, 2), -1)
        blank = torch.zeros((1, 3, size, size), dtype=torch.uint8)
        return replace(self, images=blank, image_index=text)

    def look_ahead(self, n: int) -> "Batch":
        """Return the batch with `mtp_tokens` and `mtp_labels`, up to n tokens ahead.

        The sequences must be whole. Only tokens of the same piece of the same document count.
        """
        assert not isinstance(self.documents, Mapping), "the batch has whole sequences"
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
        global_batch: sequences per step, over all ranks and micro-batches.
        micro_batch: rows of a Batch.
        dp_rank, dp_size: which data-parallel rank this is, of how many.
        first_sequence: index of the first step's first sequence.
        ahead: number of steps to read ahead in a background thread; 0: none, without a thread.
        objective: sets the labels of each sequence; None: those of the source.
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
        ahead: int = 0,
        objective: Objective | None = None,
    ) -> None:
        assert 0 <= dp_rank < dp_size, f"data-parallel rank {dp_rank} of {dp_size}"
        if global_batch % (dp_size * micro_batch):
            raise ConfigError(
                f"train.global_batch = {global_batch} is not a multiple of {dp_size} "
                f"data-parallel ranks x train.micro_batch = {micro_batch}"
            )
        self._source, self._objective = source, objective
        self._global_batch, self._micro_batch = global_batch, micro_batch
        self._dp_rank, self._dp_size = dp_rank, dp_size
        self._next, self._ahead = first_sequence, ahead
        self._background: FetchAhead[tuple[list[Batch], State]] | None = None
        self._closed = False
        self._taken: State = {}  # state after the last step that `step` has returned

    def step(self) -> list[Batch]:
        """Return the micro-batches of the next step: global_batch / (dp_size * micro_batch) of
        them."""
        if not self._ahead:
            return self._read_step()
        assert not self._closed, "the loader is closed; call load_state_dict to continue"
        if self._background is None:
            self._taken = self._state()
            self._background = FetchAhead(self._read_with_state, self._ahead)
        batches, self._taken = self._background.take()
        return batches

    def close(self, seconds: float | None = None) -> None:
        """End the background thread, if there is one; wait for it, at most for `seconds`.

        `state_dict` still returns the position after the last step that was returned.
        """
        if self._background is not None:
            self._background.stop(seconds)
            self._background, self._closed = None, True

    def _read_with_state(self) -> tuple[list[Batch], State]:
        return self._read_step(), self._state()

    def _state(self) -> State:
        return {"sequence": self._next, **self._source.state(self._next)}

    def _read_step(self) -> list[Batch]:
        rows = sequences_of_step(
            self._next, self._global_batch, self._micro_batch, self._dp_rank, self._dp_size
        )
        numbers = [k for each in rows for k in each]
        packed = dict(zip(numbers, self._source.sequences(numbers), strict=True))
        if self._objective is not None:
            packed = {k: self._objective(k, each) for k, each in packed.items()}
        batches = [stacked(packed.__getitem__, each) for each in rows]
        self._next += self._global_batch
        return batches

    def state_dict(self) -> State:
        """Return the position of the next step: ints and strings, for JSON.

        Equal on every rank, but of a stream that is divided: then `dtron.data.stream.merged` joins
        the states of all ranks.
        """
        read_ahead = self._background is not None or self._closed
        return self._taken if read_ahead else self._state()

    def load_state_dict(self, state: Mapping[str, int | str], step: int | None = None) -> None:
        """Continue at the position of a `state_dict`, of any dp_size, micro_batch and global_batch.

        Args:
            step: the step of the run that begins there, counted from 0; None: as counted so far.
        Raises:
            DataError: the state has no "sequence", or the stream it describes has changed.
        """
        if "sequence" not in state:
            raise DataError('the data loader\'s saved state has no "sequence"')
        self.close()
        self._closed = False
        self._next = int(state["sequence"])
        if step is not None:
            self._source.count_from(step, self._next)
        self._source.seek(self._next, dict(state))


def sequences_of_step(
    first: int, global_batch: int, micro_batch: int, dp_rank: int, dp_size: int
) -> list[range]:
    """Return the sequences of each micro-batch of a step on one data-parallel rank.

    Args:
        first: index of the step's first sequence.
        global_batch, micro_batch, dp_rank, dp_size: as in Loader.
    """
    begin, stride = first + dp_rank * micro_batch, dp_size * micro_batch
    starts = range(begin, begin + global_batch, stride)
    return [range(start, start + micro_batch) for start in starts]


def validation_batches(
    source: ValidationSource, *, sequences: int, micro_batch: int, dp_rank: int, dp_size: int
) -> Iterator[Batch]:
    """Yield batches of the first held-out sequences, equally many on every rank.

    The forward pass is a collective, so all ranks need the same number of batches. Rows that fill
    up the last batches repeat earlier sequences without labels, so that the loss is that of the
    same sequences in every layout.

    Args:
        source: held-out sequences.
        sequences: the most to take.
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


def map_tables(tables: Tables, change: Callable[[Tensor], Tensor]) -> Tables:
    """Apply a function to all tensors of tables, but not to those that stay on the host."""
    # Read-only: FSDP moves the tensors of a dict to the device, also what stays on the host.
    return MappingProxyType(
        {
            key: row if key.endswith(ON_HOST) else tuple(change(x) for x in row)
            for key, row in tables.items()
        }
    )


def stacked(read: Callable[[int], Packed], rows: range) -> Batch:
    """Stack the sequences `rows` to a Batch."""
    packed = [read(k) for k in rows]
    images, image_index = _images(packed)
    masked, encoded = (x is not None for x in (packed[0].documents, packed[0].encoder_tokens))
    return Batch(
        tokens=_field(packed, "tokens"),
        labels=_field(packed, "labels"),
        sequence=torch.tensor(list(rows), dtype=torch.int64),
        positions=_field(packed, "positions") if masked else None,
        documents=_field(packed, "documents") if masked else None,
        padding=sum(row.padding for row in packed),
        pieces=_field(packed, "pieces") if packed[0].pieces is not None else None,
        images=images,
        image_index=image_index,
        encoder_tokens=_field(packed, "encoder_tokens") if encoded else None,
        sources=_sources([row.source for row in packed if row.source is not None]),
    )


def _images(packed: list[Packed]) -> tuple[Tensor | None, Tensor | None]:
    """Return the images of all rows, and the index of their tokens: see `Batch`."""
    given = [row.images for row in packed if row.images is not None]
    if not given:
        return None, None
    shifted, before = [], 0
    for row in packed:
        own = row.image_index
        own = np.full((len(row.tokens), 2), -1) if own is None else own
        shifted.append(np.where(own < 0, -1, own + np.array([before, 0])))
        before += 0 if row.images is None else len(row.images)
    return torch.from_numpy(np.concatenate(given)), torch.from_numpy(np.stack(shifted))


def _sources(sources: list[tuple[int, int]]) -> Tensor | None:
    if not sources:
        return None
    return torch.stack([torch.arange(n) == i for i, n in sources])


def _field(packed: list[Packed], name: str) -> Tensor:
    return torch.from_numpy(np.stack([getattr(row, name) for row in packed]))
