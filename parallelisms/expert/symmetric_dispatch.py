"""Tokens to experts on other ranks of a host through each other's memory, without the host.

Every rank puts what others need where they can read it, and they pull it: nobody has to know how
much a message holds before it is sent, so that no count is read by the host.

    put      offsets (E,)             rows (M, D)                        results (C, D)
    pulled   all ranks' (P, E)     -> rows by (expert, sender) (C, D) -> results by expert (M, D)
             `exchange`               `set_off`, `arrived`               `move`

Each puts, meets all ranks at a barrier on the device, and pulls on another stream
(`symmetric_exchange.py`):
what a model computes between `begin` and `finish` runs while rows travel, and its backward while
their gradients do. Where rows are is computed in between by plain torch. So a block compiles whole,
and one graph serves all layers. The same ways are gone backward by gradients, in the opposite
order.

A rank takes at most C rows, of which those after the last expert's are zero:

    C = ceil(capacity x etp x M), at least LEAST and at most P M, which cannot be exceeded

where etp M rows are what a rank gets of even loads. Each tensor that the experts keep for their
backward has C rows, however many have come, and the shared memory, one for all layers, twice
C D elements (what is put goes into two halves in turn).

More rows than C are never passed over. Their results are NaN, and so are the loss and the gradient
norm of all ranks, so that a step that lacks a row is not taken, by the same decision on the device
that is made about any gradient that is not finite. How many rows there were is counted on the
device as well; `check`, which reads it where figures are logged anyway, stops the run.

All ranks have as many rows: where they have not, all results are NaN likewise, and `check` says so
(if memory does not have to grow for them, for which all ranks would have to ask).

Rows, and results' gradients, which go the same way, may be put in float8 (`float8`): what pulls
them casts them back. Results and rows' gradients, which are larger (C rows) and summed over etp,
never are.

Products of experts leave rows after the last offset alone, and what they give there is read by
nobody, neither results nor gradients: nothing is cleared but what is pulled.

Shapes: M rows of a rank, the same on all; D width, E experts, P = ep x etp ranks, C rows at most.
Sources: DeepEP's intra-node dispatch and torch's symmetric memory in intent; the layout is our own.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.errors import ConfigError, TrainingError
from dtron.kernels.float8_rows import converts
from dtron.kernels.peer_gather import LOST, NONE
from dtron.parallelisms.expert.peer_memory import check_host
from dtron.parallelisms.expert.symmetric_exchange import (
    Mailbox,
    Moving,
    arrived,
    exchange,
    move,
    set_off,
)

LEAST = 4096
"""Rows that a rank always takes: loads of a few tokens are never even."""
_NUMBERS = 2**32
"""Above any number of rows: two of them are noted as one number."""
_UNEVEN = 2**62
"""What is noted where ranks have different numbers of rows; above any two."""


class Ways(NamedTuple):
    """Where rows are, of what all ranks put."""

    there: Tensor
    """int64 (C,): of each row of this rank's experts, by (expert, sender), where it is among the
    rows of all ranks."""
    back: Tensor
    """int64 (M,): of each of this rank's rows, where the first part of its result is."""
    offsets: Tensor
    """int32 (E / ep,): where the rows of each expert of this rank end."""
    n_rows: Tensor
    """int64 (1,): how many there are, C or more."""


def ways_of(ends: Tensor, rank: Tensor, etp: int, n_rows: int, most: int) -> Ways:
    """Both ways of a rank's rows, from where the rows of each expert end on each rank.

    Args:
        ends: int32 (P, E).
        rank: int64 (1,), this one of P, etp being the innermost.
        n_rows: M, of each rank.
        most: C.
    """
    ends = ends.long()
    n_ranks, n_experts = ends.shape
    ep = n_ranks // etp
    each = n_experts // ep
    counts = ends.diff(dim=1, prepend=ends.new_zeros(n_ranks, 1))
    starts = ends - counts
    blocks = counts.t().reshape(ep, -1)  # of each ep rank, by (expert, sender)
    after = blocks.cumsum(1)
    before = after - blocks
    own = rank // etp
    own_after, own_before = (table.index_select(0, own).squeeze(0) for table in (after, before))

    row = torch.arange(most, device=ends.device)
    block = _bucket(own_after, row).clamp(max=blocks.shape[1] - 1)
    sender, expert = block % n_ranks, own * each + block // n_ranks
    place = starts[sender, expert] + row - own_before[block]
    there = torch.where(row < own_after[-1], sender * n_rows + place, NONE)
    offsets = own_after.view(each, n_ranks)[:, -1].clamp(max=most).int()

    row = torch.arange(n_rows, device=ends.device)
    mine, starts = (table.index_select(0, rank).squeeze(0) for table in (ends, starts))
    expert = _bucket(mine, row).clamp(max=n_experts - 1)
    first = before.view(n_experts, n_ranks).index_select(1, rank).squeeze(1)
    place = first[expert] + row - starts[expert]
    back = torch.where(place < most, expert // each * (etp * most) + place, LOST)
    back = torch.where(row < mine[-1], back, NONE)
    return Ways(there, back, offsets, own_after[-1:])


def _bucket(ends: Tensor, rows: Tensor) -> Tensor:
    """int64 (N,): which of the buckets, that end where `ends` (B,) says, each row is in; B: none.

    As torch.searchsorted, which inductor of torch 2.11 cannot compile for GPUs where what is
    searched is a view.
    """
    return (rows.unsqueeze(1) >= ends).sum(1)


class _Layer(NamedTuple):
    """As tensors what is another layer's or another rank's: one graph serves all of them."""

    number: Tensor
    """int64 (1,), in the mailbox."""
    rank: Tensor
    """int64 (1,), this one in the group."""
    ranks: Tensor
    """int64 (P,), all of them."""


class _Travelling(NamedTuple):
    """Rows on their way to experts of this rank."""

    moving: Moving
    """(C, D), by expert; zero after the last one's."""
    ways: Ways


def check_device(device: torch.device, float8: bool) -> None:
    """Refuse a GPU whose kernels cannot pull such rows.

    Raises:
        ConfigError: rows in float8, and a GPU that does not know it.
    """
    if float8 and device.type == "cuda" and not converts(device):
        raise ConfigError(
            'float8.dispatch with parallel.dispatcher = "symmetric_memory" needs GPUs with '
            "float8 (compute capability 8.9 or more), which cast rows as they pull them; use "
            'float8.dispatch = false, or parallel.dispatcher = "all_to_all"'
        )


class SymmetricMemory:
    """Rows are pulled from the memory of the ranks that have them, results from that of the
    experts' ranks; see above.

    Args:
        group: of ep x etp ranks of one host, etp being the innermost.
        capacity: rows that a rank takes at most, over those of even loads.
        float8: what goes to experts is put in float8, rows and results' gradients.
    Raises:
        ConfigError: the ranks are on several hosts.
    """

    in_graphs = True

    def __init__(
        self, group: dist.ProcessGroup, ep: int, etp: int, capacity: float, float8: bool = False
    ) -> None:
        fix = 'use fewer of them (parallel.ep, etp), or parallel.dispatcher = "all_to_all"'
        check_host(group, 'parallel.dispatcher = "symmetric_memory"', "experts", fix)
        self.ep, self.etp, self.capacity, self.float8 = ep, etp, capacity, float8
        self.mailbox = Mailbox(group)
        self._layers: dict[str, int] = {}

    def layer(self, fqn: str, device: torch.device) -> _Layer:
        """See Dispatcher."""
        check_device(device, self.float8)
        number = self._layers.setdefault(fqn, len(self._layers))
        self.mailbox.layers = len(self._layers)
        group = self.mailbox.group
        numbers = ([number], [group.rank()], list(range(group.size())))
        return _Layer(*(torch.tensor(each, device=device) for each in numbers))

    def begin(self, rows: Tensor, offsets: Tensor, layer: _Layer) -> _Travelling:
        """See Dispatcher."""
        most = rows_at_most(len(rows), self.ep, self.etp, self.capacity)
        numbers = torch.cat([offsets, offsets.new_full((1,), len(rows))])
        numbers = exchange(numbers, layer.ranks, self.mailbox.name)
        ways = ways_of(numbers[:, :-1], layer.rank, self.etp, len(rows), most)
        uneven = (numbers[:, -1] != len(rows)).any()
        ways = ways._replace(  # neither of which may be out of anybody's memory
            there=torch.where(uneven, NONE, ways.there), back=torch.where(uneven, LOST, ways.back)
        )
        exceeded = torch.where(ways.n_rows > most, ways.n_rows * _NUMBERS + len(rows), 0)
        exceeded = torch.where(uneven, _UNEVEN, exceeded)
        there = (ways.there, 1, ways.back, self.etp)
        noted = (self.mailbox.name, layer.number, exceeded)
        return _Travelling(set_off(rows, *there, *noted, float8=self.float8), ways)

    def finish(self, pending: _Travelling, compute: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        """See Dispatcher."""
        ways, rows = pending.ways, arrived(pending.moving)
        results = compute(rows, ways.offsets)
        if results.shape != rows.shape:
            raise ConfigError(
                f'parallel.dispatcher = "symmetric_memory": experts gave {tuple(results.shape)} '
                f"for rows {tuple(rows.shape)}; rows after the last offset need results "
                "too, of any value"
            )
        back = (ways.back, self.etp, ways.there, 1)
        return move(results, *back, self.mailbox.name, back_float8=self.float8)

    def check(self, device: torch.device) -> None:
        """See Dispatcher."""
        noted = self.mailbox.noted(device)
        most = torch.cat([noted, noted.new_zeros(1)]).amax()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        if not most.item():
            return
        own = [
            (fqn, *divmod(n, _NUMBERS))
            for fqn, n in zip(self._layers, noted.tolist(), strict=True)
            if n
        ]
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)
        raise TrainingError(self._explain(of_ranks))

    def _explain(self, of_ranks: list[list[tuple[str, int, int]]]) -> str:
        """Of the first layer that lacked rows: routers of those behind it saw its NaN."""
        found = [(entry, rank) for rank, entries in enumerate(of_ranks) for entry in entries]
        first = min((fqn for (fqn, *_), _ in found), key=_in_order)
        rows, n_rows, rank = max((*counts, rank) for (fqn, *counts), rank in found if fqn == first)
        if rows == _UNEVEN // _NUMBERS:
            return (
                f'parallel.dispatcher = "symmetric_memory": ranks had different numbers of rows '
                f"for the experts of {first}; no step was taken. Give all ranks as many tokens, "
                'padded, or use parallel.dispatcher = "all_to_all"'
            )
        most = rows_at_most(n_rows, self.ep, self.etp, self.capacity)
        needed = min(float(self.ep), math.ceil(rows / (self.etp * n_rows) * 10) / 10)
        return (
            f"parallel.ep_capacity = {self.capacity}: rank {rank} was to take {rows} rows for its "
            f"experts of {first}, more than the {most} that it has room for; no step was taken "
            "that lacks a row. Resume from a checkpoint, or start again, with "
            f"parallel.ep_capacity = {needed} or more, as loads may yet grow ({self.ep} is enough "
            'for any loads), or with parallel.dispatcher = "all_to_all"'
        )


def _in_order(fqn: str) -> list[tuple[str, int]]:
    """For sorting: blocks.9 comes before blocks.10."""
    return [("", int(word)) if word.isdigit() else (word, 0) for word in fqn.split(".")]


def rows_at_most(n_rows: int, ep: int, etp: int, capacity: float) -> int:
    """C of ranks with n_rows each."""
    return min(ep * etp * n_rows, max(LEAST, math.ceil(capacity * etp * n_rows)))
