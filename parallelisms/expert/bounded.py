"""Dispatchers whose buffers have a fixed number of rows, so that the host reads no counts.

Rows that do not fit are dropped: their results are NaN, and their number is recorded on the device.
Training then skips all updates (`dropped`) until the host reads the numbers, raises the capacity
(`grow`), and repeats the steps.
"""

import itertools
import math
from collections.abc import MutableMapping
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.errors import ConfigError, TrainingError
from dtron.parallelisms.expert.dispatcher import Compute, Dispatcher

RADIX = 2**32
"""Larger than any number of rows: two numbers n, m of rows are recorded as n * RADIX + m."""
UNEVEN = 2**62
"""Recorded if ranks have different numbers of rows; larger than any record of two numbers."""
_SPARE = 1.25
"""A capacity that was exceeded grows to what was needed times this factor, since loads change from
step to step, and a change of the capacity compiles blocks again."""
_COUNT = itertools.count()
_RECORDS: MutableMapping[str, "Record"] = WeakValueDictionary()
"""Records by name, since operators take only tensors and plain values."""


class Record:
    """For each layer, the largest number that was recorded: int64, on the device."""

    def __init__(self) -> None:
        self.name = str(next(_COUNT))
        _RECORDS[self.name] = self
        self.layers: dict[str, int] = {}
        """FQNs of the layers and their indices."""
        self._largest = torch.zeros(0, dtype=torch.int64)

    def add(self, layer: Tensor, number: Tensor) -> None:
        """Record a number of a layer. Both are int64 (1,), on the device."""
        # In place, by atomic operations: two micro-batches may record numbers on two streams.
        self.largest(number.device).scatter_reduce_(0, layer, number, "amax")

    def largest(self, device: torch.device) -> Tensor:
        """Return the largest number of each layer, int64 (layers,); 0: none since `forget`."""
        # Training writes to it in place, also if the first call is in inference mode.
        with torch.inference_mode(False):
            if missing := len(self.layers) - len(self._largest):
                self._largest = torch.cat([self._largest, self._largest.new_zeros(missing)])
            self._largest = self._largest.to(device)
        return self._largest

    def forget(self) -> None:
        """Set all numbers to 0, in place: a CUDA graph adds to this tensor."""
        self._largest.zero_()


@torch.library.custom_op("dtron::record", mutates_args=())
def recorded(x: Tensor, layer: Tensor, number: Tensor, record: str) -> Tensor:
    """Return a copy of x, and call `Record.add`.

    An operator, since the compiler must not see that recorded numbers are modified: it would copy
    them.
    """
    _RECORDS[record].add(layer, number)
    return x.clone()


@recorded.register_fake
def _(x: Tensor, layer: Tensor, number: Tensor, record: str) -> Tensor:
    return torch.empty_like(x)


class LayerTensors(NamedTuple):
    """Constants of a layer and rank, as tensors so that all layers and ranks have equal graphs."""

    number: Tensor
    """int64 (1,), index of the layer in the record."""
    rank: Tensor
    """int64 (1,), this rank's index in the group."""
    ranks: Tensor
    """int64 (P,), indices of all ranks."""


class Bounded(Dispatcher):
    """A dispatcher with buffers of a fixed number of rows.

    If n rows exceed the capacity, a layer's `begin` records n * RADIX + M, where M is the number of
    rows of each rank, or UNEVEN if ranks differ in M.

    `begin` may have an argument `even`: the number of rows that experts have of each rank with even
    loads, from which the size of buffers follows; None: M, all rows.
    """

    in_graphs = True
    dropped_rows: str
    """Part of the message: the rows that did not fit, with {rank} and {rows}."""

    def __init__(self, group: dist.ProcessGroup, ep: int, etp: int, capacity: float) -> None:
        self.group, self.ep, self.etp, self.capacity = group, ep, etp, capacity
        self.enough = float(ep)
        """A capacity that is enough for any loads."""
        self.record = Record()

    def layer(self, fqn: str, device: torch.device) -> LayerTensors:
        """Number a layer and return its constants as tensors; see `Dispatcher`."""
        number = self.record.layers.setdefault(fqn, len(self.record.layers))
        numbers = ([number], [self.group.rank()], list(range(self.group.size())))
        return LayerTensors(*(torch.tensor(each, device=device) for each in numbers))

    def even_load(self, n_rows: int) -> float:
        """Return the number of rows with even loads, of which the capacity is a multiple.

        Args:
            n_rows: M.
        """
        raise NotImplementedError

    def computed(self, compute: Compute, rows: Tensor, offsets: Tensor) -> Tensor:
        """Return the experts' results. Raises ConfigError: their shape is not that of the rows."""
        results = compute(rows, offsets)
        if results.shape != rows.shape:
            raise ConfigError(
                f"experts returned shape {tuple(results.shape)} for rows {tuple(rows.shape)}; with "
                "a bounded parallel.dispatcher return one row per input row, padding included"
            )
        return results

    def dropped(self, device: torch.device) -> Tensor:
        """Return whether a layer of this rank dropped rows; see `Dispatcher`."""
        return self.record.largest(device).any()

    def grow(self, device: torch.device) -> str:
        """Raise the capacity if rows were dropped; see `Dispatcher`.

        Blocks that were compiled with the old capacity compile again.

        Raises:
            TrainingError: on all ranks, if numbers of rows differed.
        """
        largest = self.record.largest(device)
        most = torch.cat([largest, largest.new_zeros(1)]).amax()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        if not most.item():
            return ""
        numbers = zip(self.record.layers, largest.tolist(), strict=True)
        own = [(fqn, *divmod(number, RADIX)) for fqn, number in numbers if number]
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own[:1])  # inputs of later layers were NaN
        self.record.forget()
        message = self._raise_capacity(of_ranks)
        torch.compiler.reset()  # graphs of the old capacity count towards the recompilation limit
        return message

    def _raise_capacity(self, of_ranks: list[list[tuple[str, int, int]]]) -> str:
        """Set the capacity that the first layer that dropped rows needs; return the message."""
        found = [(entry, rank) for rank, entries in enumerate(of_ranks) for entry in entries]
        first = min((fqn for (fqn, *_), _ in found), key=_in_order)
        rows, n_rows, rank = max((*counts, rank) for (fqn, *counts), rank in found if fqn == first)
        if rows == UNEVEN // RADIX:
            raise TrainingError(
                "parallel.dispatcher: ranks had different numbers of tokens for the experts of "
                f"{first}; the step was skipped. Pad them to equal numbers, or use "
                'parallel.dispatcher = "all_to_all"'
            )
        before, load = self.capacity, rows / self.even_load(n_rows)
        self.capacity = min(self.enough, math.ceil(_SPARE * load * 10) / 10)
        assert self.capacity > before, "rows that exceed a capacity need a larger one"
        return (
            f"parallel.ep_capacity = {before}: {self.dropped_rows.format(rank=rank, rows=rows)} of "
            f"{first}, {load:.2f} times an even load; continuing with parallel.ep_capacity = "
            f"{self.capacity}"
        )


def _in_order(fqn: str) -> list[tuple[str, int]]:
    """Sort key that puts blocks.9 before blocks.10."""
    return [("", int(word)) if word.isdigit() else (word, 0) for word in fqn.split(".")]


def bucket(ends: Tensor, rows: Tensor) -> Tensor:
    """Return the index of the bucket that contains each row, int64, in the shape of `rows`.

    The index is B for rows after the last of B buckets. Like torch.searchsorted, which inductor of
    torch 2.11 cannot compile for GPUs if the searched tensor is a view.

    Args:
        ends: (..., B), end of each bucket.
        rows: (..., N), indices of rows.
    """
    return (rows.unsqueeze(-1) >= ends.unsqueeze(-2)).sum(-1)
