"""Rows from all ranks of a host to all, as operators that graphs can hold.

    move        put own rows -> barrier -> pull the rows wanted, of all ranks
    exchange    the same of one row of numbers, which every rank pulls of every rank

An operator does all of it in one call. What it gives depends on its arguments alone and nothing
that it leaves behind is read by another call, so that recomputation may call it again, anywhere,
and a compiler may treat it as a function. Its shapes are static.

Order: calls meet at barriers, so that all ranks of a group must make the same calls in the same
order. They run the same model, and graphs that are the same on all ranks are put in the same order
by the compiler: also where a backward has two calls of which neither waits for the other, a
gradient's and a recomputed one. A rank's number comes into them as a tensor, not as a constant (but
for where a split expert's bias goes, a number that orders nothing).

Two halves of the memory are put in turn. A rank that puts into a half has passed the barrier of the
call before, which all ranks reach after the pulls of the call before that, the last ones from this
half; streams run calls in the order in which they were made. This holds for any sequence of calls,
of whatever layers, micro-batches, forwards or backwards, since each call puts once, meets once and
pulls once, on all ranks. Where the memory grows, the device and all ranks are waited for, and the
halves of the new one hold nothing that is wanted.

Shapes: P ranks, R rows of each, the same on all; N rows of the result, D width, E experts.
"""

from collections.abc import MutableMapping
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.kernels.peers import rows_of_peers, rows_of_pointers
from dtron.parallelisms.peer_memory import GrowingMemory


class Mailbox:
    """What each rank of a group puts, all ranks pull; one for all layers, of `mailbox_of`."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.layers = 0
        """How many there are to note something of."""
        self._growing = GrowingMemory(group)
        self._second = False
        self._noted = torch.zeros(0, dtype=torch.int64)

    def moved(self, rows: Tensor, slots: Tensor, parts: int) -> Tensor:
        """See `move`."""
        (n_rows, width), size = rows.shape, rows.element_size()
        half = max(n_rows, len(slots)) * width * size  # what comes back next has as many rows
        memory = self._growing.at_least(2 * half, rows.device)
        self._second = not self._second
        at = memory.nbytes // 2 if self._second else 0
        own = memory.view(self.group.rank(), rows.numel(), rows.dtype, at // size)
        own.view(n_rows, width).copy_(rows)
        memory.barrier()
        if rows.is_cuda:
            shape = (n_rows, width)
            return rows_of_pointers(memory.pointers, at, shape, rows.dtype, slots, parts)
        ranks = range(self.group.size())
        peers = [memory.view(rank, rows.numel(), rows.dtype, at // size) for rank in ranks]
        return rows_of_peers([peer.view(n_rows, width) for peer in peers], slots, parts)

    def note(self, layer: Tensor, number: Tensor) -> None:
        """Remember the largest number of a layer; both int64 (1,), on the device."""
        self._noted = self.noted(number.device).scatter_reduce(0, layer, number, "amax")

    def noted(self, device: torch.device) -> Tensor:
        """int64 (layers,): what was noted of each, 0 at first."""
        if missing := self.layers - len(self._noted):
            self._noted = torch.cat([self._noted, self._noted.new_zeros(missing)])
        self._noted = self._noted.to(device)
        return self._noted


_MAILBOXES: MutableMapping[str, Mailbox] = WeakValueDictionary()
"""By the process group's name, since operators take no objects but tensors: as torch finds groups
by their names, and gone with the last that uses one."""


def mailbox_of(group: dist.ProcessGroup) -> Mailbox:
    """The group's own, to be kept by whoever calls the operators; made by all ranks together."""
    found = _MAILBOXES.get(group.group_name)
    if found is None or found.group is not group:  # else of a group that was destroyed
        found = _MAILBOXES[group.group_name] = Mailbox(group)
    return found


@torch.library.custom_op("dtron::peers_exchange", mutates_args=())
def exchange(numbers: Tensor, senders: Tensor, group: str) -> Tensor:
    """Everybody's numbers.

    Args:
        numbers: int32 (E,).
        senders: int64 (P,), the ranks of the group in order.
        group: name of the process group.
    Returns:
        int32 (P, E).
    """
    return _MAILBOXES[group].moved(numbers.unsqueeze(0), senders, 1)


@exchange.register_fake
def _(numbers: Tensor, senders: Tensor, group: str) -> Tensor:
    return numbers.new_empty(senders.shape[0], numbers.shape[0])


@torch.library.custom_op("dtron::peers_move", mutates_args=())
def move(
    rows: Tensor,
    slots: Tensor,
    parts: int,
    back: Tensor,
    back_parts: int,
    group: str,
    layer: Tensor | None = None,
    number: Tensor | None = None,
) -> Tensor:
    """Rows of all ranks, by their slots; gradients go back as rows do.

    Args:
        rows: (R, D).
        slots: int64 (N,), as in `dtron/kernels/peers.py`, which sums `parts` neighbours.
        back: int64 (R,), where among all ranks' results the gradient of each row is.
        back_parts: neighbours that each have a part of it.
        group: name of the process group.
        layer, number: int64 (1,), to be noted by the way, for `Mailbox.noted`; outside of what the
            compiler knows, which copies what it sees changed.
    Returns:
        (N, D).
    """
    mailbox = _MAILBOXES[group]
    if layer is not None and number is not None:
        mailbox.note(layer, number)
    return mailbox.moved(rows, slots, parts)


@move.register_fake
def _(rows: Tensor, slots: Tensor, *_: Any, **__: Any) -> Tensor:
    return rows.new_empty(slots.shape[0], rows.shape[1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """The ways alone: the memory holds something else by then."""
    _, slots, parts, back, back_parts, group, *_ = inputs
    ctx.save_for_backward(slots, back)
    ctx.settings = parts, back_parts, group
    ctx.mailbox = _MAILBOXES.get(group)  # not read: held as long as a backward may need it


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    slots, back = ctx.saved_tensors
    parts, back_parts, group = ctx.settings
    return move(grad, back, back_parts, slots, parts, group), *[None] * 7


move.register_autograd(_backward, setup_context=_save)
