"""Dispatcher that uses all-to-all collectives of a fixed size, over any ranks.

Each rank sends S rows to each other rank, however many it has for it, so that the host reads no
counts and a block compiles to one graph, which all layers share. It sends more bytes than
`all_to_all.py`, by the capacity; in return no rank's host waits in the middle of a layer.

    S = ceil(capacity x M / ep), at least LEAST and at most M

where M / ep is the number of rows with even loads. See `bounded.py` for rows that do not fit.

    rows by expert (M, D) -> slots by receiver (ep, S, D) -> all-to-all -> (P, S, D) by sender
      ^                                                                        |
      | sum over etp, by row <- all-to-all <- (P, S, D) by sender <- experts <-+ rows by expert

`begin` issues the dispatch and `finish` waits for it; the backward likewise issues gradients when
it reaches `finish` and waits for them at `begin`.

All ranks must have the same M, which the size of messages follows from.

Shapes: M rows of a rank; D width, E experts, P = ep x etp ranks, S rows from a
rank to a rank.
Sources: GShard, arXiv:2006.16668, has a fixed capacity of each expert; here it is of each rank.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.errors import ConfigError
from dtron.kernels.peer_gather import LOST, NONE
from dtron.parallelisms.expert.bounded import RADIX, Bounded, LayerTensors, bucket, recorded
from dtron.parallelisms.expert.dispatcher import Compute
from dtron.parallelisms.functional_collectives import issue_all_to_all_even, wait_tensor

LEAST = 512
"""Minimum of S, since loads of few tokens are never even."""


class _InFlight(NamedTuple):
    """An issued dispatch whose rows have not arrived."""

    rows: Tensor
    """(P S, D) by (sender, expert); not to be read before the wait."""
    ends: Tensor
    """int64 (P, E / ep): end of each sender's rows for each expert; as `rows`."""
    slots: Tensor
    """int64 (M,): the slot among (ep S,) of each row of this rank, or NONE, or LOST."""
    back: Tensor
    """int64 (ep S,): the row of this rank in each slot, or NONE."""


class BoundedAllToAll(Bounded):
    """Dispatcher with all-to-alls of a fixed size: ends of experts' rows; dispatch; combine.

    Args:
        group: ep x etp ranks, etp innermost.
        capacity: maximum number of rows from a rank to a rank, as a multiple of M / ep.
        float8: not implemented.
    """

    dropped_rows = "rank {rank} had {rows} tokens for one rank's experts"

    def __init__(
        self, group: dist.ProcessGroup, ep: int, etp: int, capacity: float, float8: bool = False
    ) -> None:
        check_float8(float8)
        super().__init__(group, ep, etp, capacity)

    def begin(  # type: ignore[override]
        self, rows: Tensor, offsets: Tensor, layer: LayerTensors, even: int | None = None
    ) -> _InFlight:
        """Exchange the ends of experts' rows, and issue the dispatch; see `Bounded`."""
        n_rows, even = len(rows), len(rows) if even is None else even
        most = chunk_size(n_rows, self.ep, self.capacity, even)
        ends = offsets.long().view(self.ep, -1)  # of each rank's experts
        last = ends[:, -1]
        first = torch.cat([last.new_zeros(1), last[:-1]])
        counts = last - first

        slot = torch.arange(most, device=rows.device)
        back = torch.where(slot < counts.unsqueeze(1), first.unsqueeze(1) + slot, NONE).flatten()
        row = torch.arange(n_rows, device=rows.device)
        receiver = bucket(last, row).clamp(max=self.ep - 1)
        place = row - first[receiver]
        slots = torch.where(place < most, receiver * most + place, LOST)
        slots = torch.where(row < last[-1], slots, NONE)

        largest = counts.amax().unsqueeze(0)
        exceeded = torch.where(largest > most, largest * RADIX + even, 0)
        sent = (ends - first.unsqueeze(1)).clamp(max=most)
        sent = recorded(sent, layer.number, exceeded, self.record.name)
        ends = issue_all_to_all_even(sent.repeat_interleave(self.etp, 0), *self._ranks())
        chunks = select(rows, back, slots).view(self.ep, 1, most, rows.shape[1])
        chunks = chunks.expand(-1, self.etp, -1, -1).reshape(-1, rows.shape[1])
        return _InFlight(send_chunks(chunks, *self._ranks()), ends, slots, back)

    def finish(self, pending: _InFlight, compute: Compute) -> Tensor:
        """Wait for the dispatch, compute, combine, and return the results; see `Dispatcher`."""
        ends, most = wait_tensor(pending.ends), len(pending.back) // self.ep
        rows = chunks_arrived(pending.rows, *self._ranks())
        order, inverse, offsets = by_expert(ends, most)
        results = self.computed(compute, select(rows, order, inverse), offsets)
        combined = send_chunks(select(results, inverse, order), *self._ranks())
        partials = chunks_arrived(combined, *self._ranks())
        summed = partials.view(self.ep, self.etp, most, rows.shape[1]).sum(1)
        return select(summed.flatten(0, 1), pending.slots, pending.back)

    def even_load(self, n_rows: int) -> float:
        """Return the number of rows from a rank to a rank; see `Bounded`."""
        return n_rows / self.ep

    def _ranks(self) -> tuple[int, str]:
        return self.group.size(), self.group.group_name


def check_float8(float8: bool, key: str = 'parallel.dispatcher = "bounded_all_to_all"') -> None:
    """Raise ConfigError if rows would be sent in float8; `key` is the dispatcher's setting."""
    if float8:
        raise ConfigError(
            f"float8.dispatch with {key}: it sends rows in the "
            "compute dtype only; use float8.dispatch = false, or use parallel.dispatcher = "
            '"symmetric_memory" (inside a host) or "all_to_all"'
        )


def chunk_size(n_rows: int, ep: int, capacity: float, even: int | None = None) -> int:
    """Return S, the number of rows from a rank to a rank, for n_rows rows per rank.

    `even` is an argument of `Bounded.begin`.
    """
    return min(n_rows, max(LEAST, math.ceil(capacity * (even or n_rows) / ep)))


def by_expert(ends: Tensor, most: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the order by (expert, sender) of rows that are by (sender, expert).

    Args:
        ends: int64 (P, E_r), end of each expert's rows among a sender's S slots.
        most: S.
    Returns:
        int64 (P S,): the slot of each row in that order, NONE after the last row;
        int64 (P S,): the place of each slot in that order, NONE for an empty slot;
        int32 (E_r,): end of each expert's rows.
    """
    n_senders, n_experts = ends.shape
    counts = ends.diff(dim=1, prepend=ends.new_zeros(n_senders, 1))
    starts = ends - counts
    after = counts.t().flatten().cumsum(0)  # by (expert, sender)
    before = after - counts.t().flatten()

    place = torch.arange(n_senders * most, device=ends.device)
    block = bucket(after, place).clamp(max=len(after) - 1)
    sender, expert = block % n_senders, block // n_senders
    order = sender * most + starts[sender, expert] + place - before[block]
    order = torch.where(place < after[-1], order, NONE)

    slot = torch.arange(most, device=ends.device)
    expert = bucket(ends, slot.expand(n_senders, -1)).clamp(max=n_experts - 1)
    sender = torch.arange(n_senders, device=ends.device).unsqueeze(1)
    inverse = before[expert * n_senders + sender] + slot - starts[sender, expert]
    inverse = torch.where(slot < ends[:, -1:], inverse, NONE).flatten()
    return order, inverse, after.view(n_experts, n_senders)[:, -1].int()


def select(x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
    """Return rows of x (N, D) by index (M,): (M, D). Rows for NONE are 0, those for LOST are NaN.

    Args:
        inverse: (N,), the index of each row in the result, or a negative number, by which
            gradients are selected.
    """
    return _Select.apply(x, index, inverse)  # type: ignore[return-value]


def _selected(x: Tensor, index: Tensor) -> Tensor:
    rows, index = x[index.clamp(min=0)], index.unsqueeze(1)
    rows = torch.where(index == NONE, 0.0, rows)  # not a product: what is not read may be NaN
    return torch.where(index == LOST, torch.nan, rows)


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(inverse)
        return _selected(x, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return _selected(gradients[0], ctx.saved_tensors[0]), None, None


def send_chunks(rows: Tensor, ranks: int, group: str) -> Tensor:
    """Issue an all-to-all of equal chunks; only `chunks_arrived` may read the result.

    The backward waits for the gradients that the backward of `chunks_arrived` issued; no hook may
    read them between the two.

    Args:
        rows: (ranks S, D).
        group: name of the process group.
    """
    return _Issue.apply(rows, ranks, group)  # type: ignore[return-value]


def chunks_arrived(pending: Tensor, ranks: int, group: str) -> Tensor:
    """Wait for the result of `send_chunks`; the backward issues the all-to-all of gradients."""
    return _Wait.apply(pending, ranks, group)  # type: ignore[return-value]


class _Issue(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, ranks: int, group: str) -> Tensor:
        return issue_all_to_all_even(rows, ranks, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return wait_tensor(gradients[0]), None, None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, pending: Tensor, ranks: int, group: str) -> Tensor:
        ctx.ranks = ranks, group
        return wait_tensor(pending)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return issue_all_to_all_even(gradients[0], *ctx.ranks), None, None
