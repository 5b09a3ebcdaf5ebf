"""Dispatch tokens to experts on other ranks of a host through symmetric memory, without host waits.

Every rank writes the data that other ranks need to shared memory, and the other ranks pull it. No
message sizes are needed in advance, so the host reads no counts.

    write    offsets (E,)             rows (M, D)                        results (C, D)
    pull     offsets of all (P, E) -> rows by (expert, sender) (C, D) -> results by expert (M, D)
             `exchange`               `send_rows`, `arrived`             `move`

Each operator writes, waits for all ranks at a barrier on the device, and pulls, on a separate
stream (`symmetric_exchange.py`): computation between `begin` and `finish` overlaps with the
dispatch, and its backward with the dispatch of gradients. Positions of rows are computed by plain
torch operators. So a block compiles to one graph, which all layers share. Gradients take the same
routes in the opposite direction.

A rank receives at most C rows; rows after the last expert's rows are zero:

    C = ceil(capacity x etp x M), at least LEAST and at most P M, which cannot be exceeded

where etp M is the number of rows with even loads. Each tensor that the experts save for their
backward has C rows, however many were received. All layers use the same shared memory of 2 C D
elements: two halves that are written alternately.

See `bounded.py` for rows beyond C. All ranks must have the same number of rows: if not, all results
are NaN, and `grow` raises an error (unless memory has to grow, for which all ranks must request the
same size).

With `float8`, rows and gradients of results are written in float8; the pull casts them back.
Results and gradients of rows keep their dtype: they are larger (C rows) and are summed over etp.

The experts' grouped matmuls skip rows after the last offset. The results and gradients of these
rows are undefined and never read, so only pulled rows are zeroed.

Shapes: M rows of a rank, the same on all; D width, E experts, P = ep x etp ranks, C rows at most.
Sources: DeepEP's intra-node dispatch and torch's symmetric memory have the idea; the layout is new.
"""

import math
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.errors import ConfigError
from dtron.kernels.float8_rows import converts
from dtron.kernels.peer_gather import LOST, NONE
from dtron.parallelisms.expert.bounded import RADIX, UNEVEN, Bounded, LayerTensors, bucket
from dtron.parallelisms.expert.dispatcher import Compute
from dtron.parallelisms.expert.peer_memory import check_host
from dtron.parallelisms.expert.symmetric_exchange import (
    Mailbox,
    PendingRows,
    arrived,
    exchange,
    move,
    send_rows,
)

LEAST = 4096
"""Minimum of C, the maximum number of received rows, since loads of few tokens are never even."""


class RowRoutes(NamedTuple):
    """Slots (indices) of rows in the shared memory of all ranks."""

    dispatch: Tensor
    """int64 (C,): for each row of this rank's experts, by (expert, sender), its slot among the rows
    of all ranks."""
    combine: Tensor
    """int64 (M,): for each row of this rank, the slot of its first partial result."""
    offsets: Tensor
    """int32 (E / ep,): end of the rows of each expert of this rank."""
    n_rows: Tensor
    """int64 (1,): number of rows for this rank's experts; it may exceed C."""


def routes_of(ends: Tensor, rank: Tensor, etp: int, n_rows: int, most: int) -> RowRoutes:
    """Compute the routes of one rank's rows.

    Args:
        ends: int32 (P, E), end of each expert's rows on each rank.
        rank: int64 (1,), this rank's index in the P ranks, etp innermost.
        n_rows: M, rows of each rank.
        most: C, maximum number of received rows.
    """
    ends = ends.long()
    n_ranks, n_experts = ends.shape
    ep = n_ranks // etp
    each = n_experts // ep
    counts = ends.diff(dim=1, prepend=ends.new_zeros(n_ranks, 1))
    starts = ends - counts
    blocks = counts.t().reshape(ep, -1)  # for each ep rank, by (expert, sender)
    after = blocks.cumsum(1)
    before = after - blocks
    own = rank // etp
    own_after, own_before = (table.index_select(0, own).squeeze(0) for table in (after, before))

    row = torch.arange(most, device=ends.device)
    block = bucket(own_after, row).clamp(max=blocks.shape[1] - 1)
    sender, expert = block % n_ranks, own * each + block // n_ranks
    place = starts[sender, expert] + row - own_before[block]
    dispatch = torch.where(row < own_after[-1], sender * n_rows + place, NONE)
    offsets = own_after.view(each, n_ranks)[:, -1].clamp(max=most).int()

    row = torch.arange(n_rows, device=ends.device)
    own_ends, starts = (table.index_select(0, rank).squeeze(0) for table in (ends, starts))
    expert = bucket(own_ends, row).clamp(max=n_experts - 1)
    first = before.view(n_experts, n_ranks).index_select(1, rank).squeeze(1)
    place = first[expert] + row - starts[expert]
    combine = torch.where(place < most, expert // each * (etp * most) + place, LOST)
    combine = torch.where(row < own_ends[-1], combine, NONE)
    return RowRoutes(dispatch, combine, offsets, own_after[-1:])


class _InFlight(NamedTuple):
    """Rows that are being received, and the routes by which results are sent back."""

    pending: PendingRows
    """(C, D), sorted by expert; rows after the last expert's rows are zero."""
    routes: RowRoutes


def check_device(device: torch.device, float8: bool) -> None:
    """Raise ConfigError if float8 rows are requested on a GPU without float8."""
    if float8 and device.type == "cuda" and not converts(device):
        raise ConfigError(
            'float8.dispatch with parallel.dispatcher = "symmetric_memory" needs GPUs with '
            "float8 (compute capability 8.9 or more), which cast rows as they pull them; use "
            'float8.dispatch = false, or parallel.dispatcher = "all_to_all"'
        )


class SymmetricMemory(Bounded):
    """Dispatcher with symmetric memory: ranks pull rows and results; see the module's docstring.

    Args:
        group: ep x etp ranks of one host, etp innermost.
        capacity: maximum number of rows per rank, as a multiple of the number with even loads.
        float8: write rows and gradients of results in float8.
    Raises:
        ConfigError: the ranks are on several hosts.
    """

    dropped_rows = "rank {rank} was to receive {rows} tokens for its experts"

    def __init__(
        self, group: dist.ProcessGroup, ep: int, etp: int, capacity: float, float8: bool = False
    ) -> None:
        fix = 'use fewer of them (parallel.ep, etp), or parallel.dispatcher = "bounded_all_to_all"'
        check_host(group, 'parallel.dispatcher = "symmetric_memory"', "experts", fix)
        super().__init__(group, ep, etp, capacity)
        self.float8 = float8
        self._mailboxes: dict[str, Mailbox] = {}
        self.use_group(group)

    def use_group(self, group: dist.ProcessGroup) -> None:
        """Use the shared memory of this group; see `Dispatcher`."""
        super().use_group(group)
        name = group.group_name
        if name not in self._mailboxes:
            self._mailboxes[name] = Mailbox(group, self.record)
        self.mailbox = self._mailboxes[name]

    def layer(self, fqn: str, device: torch.device) -> LayerTensors:
        """Number a layer and return its constants as tensors; see `Dispatcher`."""
        check_device(device, self.float8)
        return super().layer(fqn, device)

    def even_load(self, n_rows: int) -> float:
        """Return the number of rows for a rank's experts; see `Bounded`."""
        return float(self.etp * n_rows)

    def begin(  # type: ignore[override]
        self, rows: Tensor, offsets: Tensor, layer: LayerTensors, even: int | None = None
    ) -> _InFlight:
        """Exchange offsets, compute routes, and issue the dispatch; see `Bounded`."""
        even = len(rows) if even is None else even
        most = rows_at_most(len(rows), self.ep, self.etp, self.capacity, even)
        numbers = torch.cat([offsets, offsets.new_full((1,), len(rows))])
        numbers = exchange(numbers, layer.ranks, self.mailbox.name)
        routes = routes_of(numbers[:, :-1], layer.rank, self.etp, len(rows), most)
        uneven = (numbers[:, -1] != len(rows)).any()
        routes = routes._replace(  # no slot may be outside of a rank's memory
            dispatch=torch.where(uneven, NONE, routes.dispatch),
            combine=torch.where(uneven, LOST, routes.combine),
        )
        exceeded = torch.where(routes.n_rows > most, routes.n_rows * RADIX + even, 0)
        exceeded = torch.where(uneven, UNEVEN, exceeded)
        slots = (routes.dispatch, 1, routes.combine, self.etp)
        record = (self.mailbox.name, layer.number, exceeded)
        return _InFlight(send_rows(rows, *slots, *record, float8=self.float8), routes)

    def finish(self, pending: _InFlight, compute: Compute) -> Tensor:
        """Wait for the dispatch, compute, combine, and return the results; see `Dispatcher`."""
        routes, rows = pending.routes, arrived(pending.pending)
        results = self.computed(compute, rows, routes.offsets)
        slots = (routes.combine, self.etp, routes.dispatch, 1)
        return move(results, *slots, self.mailbox.name, back_float8=self.float8)


def rows_at_most(n_rows: int, ep: int, etp: int, capacity: float, even: int | None = None) -> int:
    """Return C, the maximum number of rows that a rank can receive, for n_rows rows per rank.

    `even` is an argument of `Bounded.begin`.
    """
    return min(ep * etp * n_rows, max(LEAST, math.ceil(capacity * etp * (even or n_rows))))
