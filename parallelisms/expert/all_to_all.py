"""Dispatcher that uses all-to-all collectives, over any ranks.

First, ranks exchange counts of rows, which the host reads once per call as message sizes. Then one
all-to-all dispatches rows and one combines results; the backward sends gradients with two more.
Because the host waits for the counts, these calls cannot be in a compiled graph.

`begin` issues the dispatch, `finish` waits for it. Collectives run on a separate stream, so that
computation between the two calls overlaps with them. The backward has the reverse order, since
autograd runs the most recently created of the ready nodes first:

    forward    _IssueExchange: all-to-all   computation between   _WaitExchange: wait
    backward   _WaitExchange: all-to-all    its gradients         _IssueExchange: wait

Shapes: M rows, N received rows, D width, E experts, P = ep x etp ranks.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from dtron.kernels.float8_rows import packed, unpacked
from dtron.kernels.permute import inverse_of, reordered
from dtron.parallelisms.expert.dispatcher import Compute, Dispatcher
from dtron.parallelisms.functional_collectives import all_to_all, wait_tensor


@dataclass
class _Exchange:
    """An all-to-all of rows, (M, D) -> (N, D), and the inverse all-to-all of their gradients."""

    received: list[int]
    sent: list[int]
    """Numbers of rows received from and sent to each rank; their sums are N and M."""
    group: str
    float8: tuple[bool, bool]
    """(whether rows are sent in float8, whether gradients of rows are sent in float8)"""
    width: int
    """D."""
    pending_gradients: Tensor | None = None
    """Pending gradients (M, D), passed from the backward of `_WaitExchange` to the backward of
    `_IssueExchange`. Autograd cannot pass them: it requires the placeholder's shape, (N, D)."""


@dataclass  # not frozen: torch 2.11 recompiles when sizes in a frozen dataclass change
class _InFlight:
    """An issued dispatch whose rows have not arrived; compiled code passes it on unread."""

    placeholder: Tensor
    """(N, D), rows by (sender, expert); valid only after the wait."""
    exchange: _Exchange
    counts: Tensor
    """int64 (P, E / ep), number of rows from each sender for each local expert."""
    n_rows: int
    """Number of rows given to `begin`; rows after the last offset are not sent."""


class AllToAll(Dispatcher):
    """Dispatcher with three all-to-alls: counts, which the host reads; dispatch; combine.

    Args:
        group: ep x etp ranks, etp innermost.
        capacity: ignored; buffers have the size of the received rows.
        float8: send rows and gradients of results in float8.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        ep: int,
        etp: int,
        capacity: float = math.inf,
        float8: bool = False,
    ) -> None:
        self.group, self.ep, self.etp, self.float8 = group, ep, etp, float8

    def begin(self, rows: Tensor, offsets: Tensor, layer: str = "") -> _InFlight:
        """Exchange counts, wait for them on the host, and issue the dispatch; see `Dispatcher`."""
        counts = offsets.diff(prepend=offsets.new_zeros(1)).long()
        to_send = counts.view(self.ep, 1, -1).expand(-1, self.etp, -1).flatten(0, 1)  # (P, E_r)
        each = [1] * len(to_send)
        to_receive = wait_tensor(all_to_all(to_send, each, each, self.group.group_name))
        sent, received = self.read(torch.stack([to_send.sum(1), to_receive.sum(1)]), len(rows))
        cast, width = (self.float8, False), rows.shape[1]
        exchange = _Exchange(received, sent, self.group.group_name, cast, width)
        copies = self._repeat(rows[: sum(sent) // self.etp], sent)
        return _InFlight(self._issue(copies, exchange), exchange, to_receive, len(rows))

    def finish(self, pending: _InFlight, compute: Compute) -> Tensor:
        """Wait for the dispatch, compute, combine, and return the results; see `Dispatcher`."""
        dispatch, counts = pending.exchange, pending.counts
        order, inverse = _by_expert(counts, sum(dispatch.received))
        rows = _WaitExchange.apply(pending.placeholder, dispatch)
        results = compute(reordered(rows, order, inverse), counts.sum(0).cumsum(0).int())
        cast = (False, self.float8)
        combine = _Exchange(dispatch.sent, dispatch.received, dispatch.group, cast, dispatch.width)
        combined = self._issue(reordered(results, inverse, order), combine)
        out = self._sum_partials(_WaitExchange.apply(combined, combine), dispatch.sent)
        return F.pad(out, (0, 0, 0, pending.n_rows - len(out)))

    def _issue(self, rows: Tensor, exchange: _Exchange) -> Tensor:
        return _IssueExchange.apply(rows, exchange)

    def read(self, sizes: Tensor, _n_rows: int) -> list[list[int]]:
        """Read the numbers of rows to and from each rank, int64 (2, P); the host waits here."""
        return sizes.tolist()

    def _repeat(self, rows: Tensor, sent: list[int]) -> Tensor:
        """Repeat the rows for each ep index, once per etp rank."""
        if self.etp == 1:
            return rows
        parts = rows.split(sent[:: self.etp])
        return torch.cat([part for part in parts for _ in range(self.etp)])

    def _sum_partials(self, rows: Tensor, sent: list[int]) -> Tensor:
        """Sum each row's partial results over the etp ranks."""
        if self.etp == 1:
            return rows
        parts = rows.split(sent)
        partials = [parts[i : i + self.etp] for i in range(0, len(parts), self.etp)]
        return torch.cat([torch.stack(each).sum(0) for each in partials])


class _IssueExchange(torch.autograd.Function):
    """Issue an all-to-all of rows (M, D) -> (N, D); only `_WaitExchange` may read the result.

    The backward waits for the gradients that `_WaitExchange`'s backward sent.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange = e = exchange
        return _issue_rows(rows, e.received, e.sent, e.group, e.float8[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        e = ctx.exchange
        pending, e.pending_gradients = e.pending_gradients, None
        return _wait_rows(pending, e.width, e.float8[1]), None


class _WaitExchange(torch.autograd.Function):
    """Wait for received rows, (N, D) -> (N, D). The backward issues the all-to-all of gradients."""

    @staticmethod
    def forward(ctx: Any, placeholder: Tensor, exchange: _Exchange) -> Tensor:
        ctx.exchange, ctx.shape = exchange, placeholder.shape
        return _wait_rows(placeholder, exchange.width, exchange.float8[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        e, rows = ctx.exchange, gradients[0]
        e.pending_gradients = _issue_rows(rows, e.sent, e.received, e.group, e.float8[1])
        if rows.shape == ctx.shape:  # not read: `_IssueExchange` waits for `pending_gradients`
            return rows, None
        return rows.new_empty(()).expand(ctx.shape), None  # float8 rows have another shape


def _issue_rows(
    rows: Tensor, received: list[int], sent: list[int], group: str, float8: bool
) -> Tensor:
    """Issue an all-to-all of rows; `_wait_rows` returns its result.

    The process group keeps the input alive until the wait. Float8 bytes are viewed as the rows'
    dtype, as autograd requires.
    """
    if not float8:
        return all_to_all(rows, received, sent, group)
    return all_to_all(packed(rows), received, sent, group).view(rows.dtype)


def _wait_rows(rows: Tensor, width: int, float8: bool) -> Tensor:
    """Wait for the result of `_issue_rows`: (N, D)."""
    received = wait_tensor(rows)
    return unpacked(received.view(torch.uint8), width, rows.dtype) if float8 else received


def _by_expert(counts: Tensor, n_rows: int) -> tuple[Tensor, Tensor]:
    """Return the permutation from order by (sender, expert) to order by expert, and its inverse.

    Args:
        counts: int64 (P, E_r), number of rows of each (sender, expert).
        n_rows: their sum, known on the host.
    Returns:
        order and its inverse, int64 (n_rows,).
    """
    n_senders, n_experts = counts.shape
    experts = torch.arange(n_experts, device=counts.device).repeat(n_senders)
    order = experts.repeat_interleave(counts.flatten(), output_size=n_rows).argsort(stable=True)
    return order, inverse_of(order)
