"""Tokens to experts on other ranks of a host through each other's memory, without the host.

Every rank puts what others need where they can read it, and they pull it: nobody has to know how
much a message holds before it is sent, so that no count is read by the host.

    rank's memory        [ offsets (E,) | rows (M, D) ]            [ results (C, D) ]
                              put, barrier                           put, barrier
    all ranks' offsets   -> where each row of mine is            -> where each result of mine is
    pulled                  rows by (expert, sender) (C, D)         results by expert (M, D)

The same ways are gone backward by gradients, in the opposite order.

A rank takes at most C rows, of which those after the last expert's are zero:

    C = ceil(capacity x etp x M), at least LEAST and at most P M, which cannot be exceeded

where etp M rows are what a rank gets of even loads. Each tensor that the experts keep for their
backward has C rows, however many have come, and the shared memory, one for all layers, twice
C D elements (a rank's M rows and its C results are put in turn into two halves: a barrier says that
all have put theirs, and thereby that all have read what was there before).

More rows than C are never passed over. Their results are NaN, and so are the loss and the gradient
norm of all ranks, so that a step that lacks a row is not taken, by the same decision on the device
that is made about any gradient that is not finite. How many rows there were is counted on the
device as well; `check`, which reads it where figures are logged anyway, stops the run.

Products of experts leave rows after the last offset alone, and what they give there is read by
nobody, neither results nor gradients: nothing is cleared but what is pulled.

Shapes: M rows of a rank, the same on all; D width, E experts, P = ep x etp ranks, C rows at most.
Sources: DeepEP's intra-node dispatch and torch's symmetric memory in intent; the layout is our own.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.errors import ConfigError, TrainingError
from dtron.kernels.peers import LOST, NONE, rows_of_peers, rows_of_pointers
from dtron.parallelisms.peer_memory import GrowingMemory, PeerMemory, check_host

LEAST = 4096
"""Rows that a rank always takes: loads of a few tokens are never even."""
_ALIGNED = 256
"""Bytes; what is put begins at a multiple."""


class Mailbox:
    """What each rank of a group puts, all ranks pull. All put in turn, as many rows each."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self._growing = GrowingMemory(group)
        self._memory: PeerMemory | None = None
        self._header, self._second = 0, False

    def reserve(self, rows: Tensor, n_rows: int, header: Tensor) -> None:
        """Room for n_rows like the given ones, of which nothing is pulled any more, and a header
        int32 (E,). All ranks ask for the same."""
        self._header = _aligned(header.nbytes)
        half = self._header + _aligned(n_rows * rows.shape[1] * rows.element_size())
        self._memory = None  # or an old one would live while a larger one is made
        self._memory = self._growing.at_least(2 * half, rows.device)

    def put(self, rows: Tensor, header: Tensor | None = None) -> None:
        """For all ranks to pull, until two puts later; afterwards all have put theirs."""
        memory, rank = self._reserved(), self.group.rank()
        self._second = not self._second
        if header is not None:
            at = self._start() // header.element_size()
            memory.view(rank, header.numel(), header.dtype, at).copy_(header)
        at = (self._start() + self._header) // rows.element_size()
        memory.view(rank, rows.numel(), rows.dtype, at).view_as(rows).copy_(rows)
        memory.barrier()

    def headers(self, like: Tensor) -> Tensor:
        """Those that all ranks have put last, int32 (P, E)."""
        ranks = torch.arange(self.group.size(), device=like.device)
        return self._pulled(self._start(), (1, len(like)), like.dtype, ranks, 1)

    def pull(self, like: Tensor, slots: Tensor, parts: int) -> Tensor:
        """Of what all ranks have put last, the rows of slots; see `dtron/kernels/peers.py`.

        Args:
            like: (R, D), what this rank put.
            slots: int64 (N,).
        Returns:
            (N, D).
        """
        at = self._start() + self._header
        return self._pulled(at, (len(like), like.shape[1]), like.dtype, slots, parts)

    def _pulled(
        self, at: int, shape: tuple[int, int], dtype: torch.dtype, slots: Tensor, parts: int
    ) -> Tensor:
        memory = self._reserved()
        if slots.is_cuda:
            return rows_of_pointers(memory.pointers, at, shape, dtype, slots, parts)
        start, numel = at // dtype.itemsize, shape[0] * shape[1]
        ranks = range(self.group.size())
        peers = [memory.view(rank, numel, dtype, start).view(shape) for rank in ranks]
        return rows_of_peers(peers, slots, parts)

    def _start(self) -> int:
        """Bytes before the half that was put last."""
        return self._reserved().nbytes // 2 if self._second else 0

    def _reserved(self) -> PeerMemory:
        assert self._memory is not None, "reserved before"
        return self._memory


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNED) * _ALIGNED


@dataclass(frozen=True)
class Ways:
    """Where rows are, of what all ranks put."""

    there: Tensor
    """int64 (C,): of each row of this rank's experts, by (expert, sender), where it is among the
    rows of all ranks."""
    back: Tensor
    """int64 (M,): of each of this rank's rows, where the first part of its result is."""
    offsets: Tensor
    """int32 (E / ep,): where the rows of each expert of this rank end."""
    n_rows: Tensor
    """int64 scalar: how many there are, C or more."""


def ways_of(ends: Tensor, rank: int, etp: int, n_rows: int, most: int) -> Ways:
    """Both ways of a rank's rows, from where the rows of each expert end on each rank.

    Args:
        ends: int32 (P, E).
        rank: this one of P, etp being the innermost.
        n_rows: M, of each rank.
        most: C.
    """
    ends = ends.long()
    n_ranks, n_experts = ends.shape
    ep = n_ranks // etp
    counts = ends.diff(dim=1, prepend=ends.new_zeros(n_ranks, 1))
    blocks = counts.t().reshape(ep, -1)  # of each ep rank, by (expert, sender)
    after = blocks.cumsum(1)
    before = after - blocks
    own, first = rank // etp, rank // etp * (n_experts // ep)

    row = torch.arange(most, device=ends.device)
    block = torch.searchsorted(after[own], row, right=True).clamp(max=blocks.shape[1] - 1)
    sender, expert = block % n_ranks, first + block // n_ranks
    place = (ends - counts)[sender, expert] + row - before[own][block]
    there = torch.where(row < after[own, -1], sender * n_rows + place, NONE)
    offsets = after[own].view(-1, n_ranks)[:, -1].clamp(max=most).int()

    row = torch.arange(n_rows, device=ends.device)
    expert = torch.searchsorted(ends[rank], row, right=True).clamp(max=n_experts - 1)
    place = before.view(n_experts, n_ranks)[expert, rank] + row - (ends - counts)[rank, expert]
    slot = expert // (n_experts // ep) * (etp * most) + place
    back = torch.where(place < most, slot, LOST)
    back = torch.where(row < ends[rank, -1], back, NONE)
    return Ways(there, back, offsets, after[own, -1])


class _Moved(torch.autograd.Function):
    """Rows to where a way leads them, their gradients the other way.

    `put` says whether the rows have yet to be put. What is kept is the way alone: the memory holds
    something else by then.
    """

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        ways: tuple[Tensor, Tensor],
        parts: tuple[int, int],
        mailbox: Mailbox,
        put: bool,
    ) -> Tensor:
        ctx.save_for_backward(ways[1])
        ctx.parts, ctx.mailbox = parts[1], mailbox
        if put:
            mailbox.put(rows)
        return mailbox.pull(rows, ways[0], parts[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (way,) = ctx.saved_tensors
        ctx.mailbox.put(gradients[0])
        return ctx.mailbox.pull(gradients[0], way, ctx.parts), None, None, None, None


@dataclass
class _Arrived:
    """Rows at experts of this rank."""

    rows: Tensor
    """(C, D), by expert; zero after the last one's."""
    ways: Ways


class SymmetricMemory:
    """Rows are pulled from the memory of the ranks that have them, results from that of the
    experts' ranks; see above.

    Args:
        group: of ep x etp ranks of one host, etp being the innermost.
        capacity: rows that a rank takes at most, over those of even loads.
    Raises:
        ConfigError: the ranks are on several hosts.
    """

    def __init__(self, group: dist.ProcessGroup, ep: int, etp: int, capacity: float) -> None:
        fix = 'use fewer of them (parallel.ep, etp), or parallel.dispatcher = "all_to_all"'
        check_host(group, 'parallel.dispatcher = "symmetric_memory"', "experts", fix)
        self.group, self.ep, self.etp, self.capacity = group, ep, etp, capacity
        self.mailbox = Mailbox(group)
        self._exceeded: dict[str, Tensor] = {}

    def begin(self, rows: Tensor, offsets: Tensor, layer: str) -> _Arrived:
        """See Dispatcher."""
        most = rows_at_most(len(rows), self.ep, self.etp, self.capacity)
        self.mailbox.reserve(rows, most, offsets)
        self.mailbox.put(rows.detach(), offsets)
        ends = self.mailbox.headers(offsets)
        ways = ways_of(ends, self.group.rank(), self.etp, len(rows), most)
        self._count(layer, ways.n_rows, most, self.etp * len(rows))
        both, parts = (ways.there, ways.back), (1, self.etp)
        return _Arrived(_Moved.apply(rows, both, parts, self.mailbox, False), ways)  # type: ignore[arg-type]

    def finish(self, pending: _Arrived, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """See Dispatcher."""
        ways = pending.ways
        results = compute(pending.rows, ways.offsets)
        if results.shape != pending.rows.shape:
            raise ConfigError(
                f'parallel.dispatcher = "symmetric_memory": experts gave {tuple(results.shape)} '
                f"for rows {tuple(pending.rows.shape)}; rows after the last offset need results "
                "too, of any value"
            )
        both, parts = (ways.back, ways.there), (self.etp, 1)
        return _Moved.apply(results, both, parts, self.mailbox, True)  # type: ignore[return-value]

    def check(self, device: torch.device) -> None:
        """See Dispatcher."""
        found = [torch.zeros(3, dtype=torch.int64, device=device), *self._exceeded.values()]
        most = torch.stack(found).amax(0)
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        if not most[0].item():
            return
        own = [(*counts.tolist(), layer) for layer, counts in self._exceeded.items()]
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, max(own, default=(0, 0, 0, "")))
        raise TrainingError(self._told(of_ranks))

    def _told(self, of_ranks: list[tuple[int, int, int, str]]) -> str:
        (rows, most, even, layer), rank = max((found, rank) for rank, found in enumerate(of_ranks))
        needed = min(float(self.ep), math.ceil(rows / even * 10) / 10)
        return (
            f"parallel.ep_capacity = {self.capacity}: rank {rank} was to take {rows} rows for its "
            f"experts of {layer}, more than the {most} that it has room for; no step was taken "
            "that lacks a row. Resume from a checkpoint, or start again, with "
            f"parallel.ep_capacity = {needed} or more, as loads may yet grow ({self.ep} is enough "
            'for any loads), or with parallel.dispatcher = "all_to_all"'
        )

    def _count(self, layer: str, n_rows: Tensor, most: int, even: int) -> None:
        """Remember, on the device, what was too much: rows, how many there was room for, and how
        many even loads would bring."""
        found = torch.stack([n_rows, *(torch.full_like(n_rows, n) for n in (most, even))])
        before = self._exceeded.get(layer, torch.zeros_like(found))
        self._exceeded[layer] = torch.where((n_rows > most) & (n_rows > before[0]), found, before)


def rows_at_most(n_rows: int, ep: int, etp: int, capacity: float) -> int:
    """C of ranks with n_rows each."""
    return min(ep * etp * n_rows, max(LEAST, math.ceil(capacity * etp * n_rows)))
