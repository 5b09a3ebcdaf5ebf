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

Rows beyond C are never dropped silently. Their results are NaN, and their number is recorded on the
device. Training takes no step after that (`dropped`), until the host reads the numbers, makes C
larger (`grow`), and repeats the steps.

All ranks must have the same number of rows: if not, all results are NaN as well, and `grow` raises
an error (unless memory has to grow, for which all ranks must request the same size).

With `float8`, rows and gradients of results are written in float8; the pull casts them back.
Results and gradients of rows keep their dtype: they are larger (C rows) and are summed over etp.

The experts' grouped matmuls skip rows after the last offset. The results and gradients of these
rows are undefined and never read, so only pulled rows are zeroed.

Shapes: M rows of a rank, the same on all; D width, E experts, P = ep x etp ranks, C rows at most.
Sources: DeepEP's intra-node dispatch and torch's symmetric memory have the idea; the layout is new.
"""

import math
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.errors import ConfigError, TrainingError
from dtron.kernels.float8_rows import converts
from dtron.kernels.peer_gather import LOST, NONE
from dtron.parallelisms.expert.dispatcher import Compute, Dispatcher
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
_NUMBERS = 2**32
"""Larger than any number of rows: two numbers n, m of rows are recorded as n * _NUMBERS + m."""
_UNEVEN = 2**62
"""Recorded if ranks have different numbers of rows; larger than any record of two numbers."""
_SPARE = 1.25
"""A capacity that was exceeded grows to what was needed times this factor, since loads change from
step to step, and a change of the capacity compiles blocks again."""


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
    block = _bucket(own_after, row).clamp(max=blocks.shape[1] - 1)
    sender, expert = block % n_ranks, own * each + block // n_ranks
    place = starts[sender, expert] + row - own_before[block]
    dispatch = torch.where(row < own_after[-1], sender * n_rows + place, NONE)
    offsets = own_after.view(each, n_ranks)[:, -1].clamp(max=most).int()

    row = torch.arange(n_rows, device=ends.device)
    own_ends, starts = (table.index_select(0, rank).squeeze(0) for table in (ends, starts))
    expert = _bucket(own_ends, row).clamp(max=n_experts - 1)
    first = before.view(n_experts, n_ranks).index_select(1, rank).squeeze(1)
    place = first[expert] + row - starts[expert]
    combine = torch.where(place < most, expert // each * (etp * most) + place, LOST)
    combine = torch.where(row < own_ends[-1], combine, NONE)
    return RowRoutes(dispatch, combine, offsets, own_after[-1:])


def _bucket(ends: Tensor, rows: Tensor) -> Tensor:
    """Return the index of the bucket that contains each row, int64 (N,).

    The index is B for rows after the last of B buckets. Like torch.searchsorted, which inductor of
    torch 2.11 cannot compile for GPUs if the searched tensor is a view.

    Args:
        ends: (B,), end of each bucket.
        rows: (N,), indices of rows.
    """
    return (rows.unsqueeze(1) >= ends).sum(1)


class _LayerTensors(NamedTuple):
    """Constants of a layer and rank, as tensors so that all layers and ranks have equal graphs."""

    number: Tensor
    """int64 (1,), index of the layer in the mailbox."""
    rank: Tensor
    """int64 (1,), this rank's index in the group."""
    ranks: Tensor
    """int64 (P,), indices of all ranks."""


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


class SymmetricMemory(Dispatcher):
    """Dispatcher with symmetric memory: ranks pull rows and results; see the module's docstring.

    Args:
        group: ep x etp ranks of one host, etp innermost.
        capacity: maximum number of rows per rank, as a multiple of the number with even loads.
        float8: write rows and gradients of results in float8.
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

    def layer(self, fqn: str, device: torch.device) -> _LayerTensors:
        """Number a layer and return its constants as tensors; see `Dispatcher`."""
        check_device(device, self.float8)
        number = self._layers.setdefault(fqn, len(self._layers))
        self.mailbox.layers = len(self._layers)
        group = self.mailbox.group
        numbers = ([number], [group.rank()], list(range(group.size())))
        return _LayerTensors(*(torch.tensor(each, device=device) for each in numbers))

    def begin(self, rows: Tensor, offsets: Tensor, layer: _LayerTensors) -> _InFlight:
        """Exchange offsets, compute routes, and issue the dispatch; see `Dispatcher`."""
        most = rows_at_most(len(rows), self.ep, self.etp, self.capacity)
        numbers = torch.cat([offsets, offsets.new_full((1,), len(rows))])
        numbers = exchange(numbers, layer.ranks, self.mailbox.name)
        routes = routes_of(numbers[:, :-1], layer.rank, self.etp, len(rows), most)
        uneven = (numbers[:, -1] != len(rows)).any()
        routes = routes._replace(  # no slot may be outside of a rank's memory
            dispatch=torch.where(uneven, NONE, routes.dispatch),
            combine=torch.where(uneven, LOST, routes.combine),
        )
        exceeded = torch.where(routes.n_rows > most, routes.n_rows * _NUMBERS + len(rows), 0)
        exceeded = torch.where(uneven, _UNEVEN, exceeded)
        slots = (routes.dispatch, 1, routes.combine, self.etp)
        recorded = (self.mailbox.name, layer.number, exceeded)
        return _InFlight(send_rows(rows, *slots, *recorded, float8=self.float8), routes)

    def finish(self, pending: _InFlight, compute: Compute) -> Tensor:
        """Wait for the dispatch, compute, combine, and return the results; see `Dispatcher`."""
        routes, rows = pending.routes, arrived(pending.pending)
        results = compute(rows, routes.offsets)
        if results.shape != rows.shape:
            raise ConfigError(
                f'parallel.dispatcher = "symmetric_memory": expert output has shape '
                f"{tuple(results.shape)} for input {tuple(rows.shape)}; return one row per input "
                "row, padding included"
            )
        slots = (routes.combine, self.etp, routes.dispatch, 1)
        return move(results, *slots, self.mailbox.name, back_float8=self.float8)

    def dropped(self, device: torch.device) -> Tensor:
        """Return whether a layer of this rank dropped rows; see `Dispatcher`."""
        return self.mailbox.recorded(device).any()

    def grow(self, device: torch.device) -> str:
        """Raise the capacity if rows were dropped; see `Dispatcher`.

        Blocks that were compiled with the old capacity compile again.

        Raises:
            TrainingError: on all ranks, if numbers of rows differed.
        """
        recorded = self.mailbox.recorded(device)
        most = torch.cat([recorded, recorded.new_zeros(1)]).amax()
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        if not most.item():
            return ""
        own = [
            (fqn, *divmod(n, _NUMBERS))
            for fqn, n in zip(self._layers, recorded.tolist(), strict=True)
            if n
        ]
        of_ranks: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(of_ranks, own)
        self.mailbox.forget()
        said = self._make_room(of_ranks)
        torch.compiler.reset()  # a second value of a number would compile to symbolic shapes
        return said

    def _make_room(self, of_ranks: list[list[tuple[str, int, int]]]) -> str:
        """Set the capacity that the first layer that dropped rows needs; return what is said of it.

        Layers after it may have recorded numbers that are wrong, since their inputs were NaN.
        """
        found = [(entry, rank) for rank, entries in enumerate(of_ranks) for entry in entries]
        first = min((fqn for (fqn, *_), _ in found), key=_in_order)
        rows, n_rows, rank = max((*counts, rank) for (fqn, *counts), rank in found if fqn == first)
        if rows == _UNEVEN // _NUMBERS:
            raise TrainingError(
                f'parallel.dispatcher = "symmetric_memory": ranks had different numbers of tokens '
                f"for the experts of {first}; the step was skipped. Pad them to equal numbers, or "
                'use parallel.dispatcher = "all_to_all"'
            )
        before, most = self.capacity, rows_at_most(n_rows, self.ep, self.etp, self.capacity)
        needed = _SPARE * rows / (self.etp * n_rows)
        self.capacity = min(float(self.ep), math.ceil(needed * 10) / 10)
        return (
            f"parallel.ep_capacity = {before}: rank {rank} was to receive {rows} tokens for its "
            f"experts of {first}, more than its capacity of {most}; it is {self.capacity} from now "
            "on"
        )


def _in_order(fqn: str) -> list[tuple[str, int]]:
    """Sort key that puts blocks.9 before blocks.10."""
    return [("", int(word)) if word.isdigit() else (word, 0) for word in fqn.split(".")]


def rows_at_most(n_rows: int, ep: int, etp: int, capacity: float) -> int:
    """Return C, the maximum number of rows that a rank can receive, for n_rows rows per rank."""
    return min(ep * etp * n_rows, max(LEAST, math.ceil(capacity * etp * n_rows)))
