"""Exchange rows between the ranks of a host, with operators that can be in compiled graphs.

    send_rows   write this rank's rows; then, on a separate stream: barrier, pull the needed rows
    arrived     wait for the pulled rows
    exchange    write one row of numbers per rank, pull the rows of all ranks, and wait

The backward of `arrived` sends the gradients, and the backward of `send_rows` waits for them.
Computation between the two calls overlaps with the transfer, in forward and backward. Results
depend only on the arguments, so that recomputation may repeat the operators anywhere, and a
compiler may treat them as pure functions. Shapes are static.

A placeholder, a tensor of the rows' shape without memory, represents pending rows. The wait is an
operator from the placeholder to the rows. So a compiler neither reads rows too early nor reuses
their memory. A placeholder can be waited for only once: recomputation must save the results of both
operators or repeat both (MOVES in `parallelisms/recompute.py`).

Order: calls have barriers, so all ranks of a group must make the same calls in the same order. They
run the same model, and the compiler schedules equal graphs equally on all ranks, even if a backward
has two independent calls, for a gradient and for a recomputation. To keep graphs equal, the rank is
a tensor in them, not a constant (except for the position of a sharded expert's bias, which does not
affect the order).

Calls alternate between two halves of the memory, and no rank writes before its previous pull is
done. So a rank that writes to a half has passed the barrier of the previous call. All ranks reach
that barrier after their pulls of the call before it, which were the last pulls from this half. This
holds for any sequence of calls, since each call has one write, one barrier and one pull on all
ranks. Before the memory grows, the device and all ranks are synchronized.

Shapes: P ranks, R rows of each, the same on all; N rows of the result, D width, E experts.
"""

import itertools
from collections.abc import Callable, MutableMapping
from typing import Any, NamedTuple
from weakref import WeakValueDictionary, finalize

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.kernels.float8_rows import packed, wire_bytes
from dtron.kernels.peer_gather import packed_rows_of_peers, rows_of_peers, rows_of_pointers
from dtron.parallelisms.expert.bounded import Record
from dtron.parallelisms.expert.peer_memory import GrowingMemory, PeerMemory

IN_ORDER: dict[str, Any] = {"reorder_for_peak_memory": False, "reorder_for_locality": False}
"""Options of torch.compile for inductor graphs with these operators: computation that is between
`send_rows` and `arrived` stays there. All blocks of such a model get the options."""


_NUMBERS = itertools.count()
_MAILBOXES: MutableMapping[str, "Mailbox"] = WeakValueDictionary()
"""Mailboxes by name, since operators take only tensors and plain values. A mailbox lives as long as
its creator or a pending backward references it; names are not reused."""


class Mailbox:
    """Shared memory through which the ranks of a group exchange rows, for all layers of a model.

    Each model creates one mailbox, on all ranks of the group, and keeps it as long as it calls the
    operators. Models do not share a mailbox: growing its memory is a collective, and ranks would
    disagree on when to grow if the garbage collector freed an earlier model on some ranks only.

    Attributes:
        name: operators find the mailbox by its name, which is equal on all ranks.
    """

    def __init__(self, group: dist.ProcessGroup, record: Record) -> None:
        self.group, self.record = group, record
        self.name = f"{group.group_name}.{next(_NUMBERS)}"
        _MAILBOXES[self.name] = self
        self._memory = GrowingMemory(group)
        self._second = False
        self._stream: torch.cuda.Stream | None = None
        self._pull: _PendingPull | None = None
        """The latest pull."""

    def start_pull(
        self, rows: Tensor, slots: Tensor, parts: int, float8: bool = False
    ) -> "_PendingPull":
        """Write rows (R, D), in float8 if `float8`, and issue the pull of rows; see `send_rows`."""
        if self._pull is not None:
            self._pull.wait()  # the current stream nearly always has to wait for this pull anyway
        (n_rows, width), size = rows.shape, rows.element_size()
        row = wire_bytes(width) if float8 else width * size
        half = max(n_rows * row, len(slots) * width * size)  # the next call sends results back
        memory = self._memory.at_least(2 * half, rows.device)
        self._second = not self._second
        at = memory.nbytes // 2 if self._second else 0
        own = memory.view(self.group.rank(), n_rows * row, torch.uint8, at).view(n_rows, row)
        if float8:
            packed(rows, own)
        else:
            own.view(rows.dtype).copy_(rows)
        out = rows.new_empty(len(slots), width)
        order = _PullArguments(memory, at, n_rows, row, slots.clone(), parts, float8, out)
        self._pull = self._pull_on_stream(order) if rows.is_cuda else self._pull_on_wait(order)
        return self._pull

    def _pull_on_stream(self, order: "_PullArguments") -> "_PendingPull":
        """Issue the barrier and the pull on a separate stream."""
        memory, at, n_rows, _, slots, parts, float8, out = order
        if self._stream is None:  # high priority, so that its few thread blocks do not queue
            self._stream = torch.cuda.Stream(out.device, priority=-1)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            memory.barrier()
            rows_of_pointers(memory.pointers, at, n_rows, slots, out, parts, float8)
            done = torch.cuda.Event()
            done.record()
        return _PendingPull(out, done.wait, slots)

    def _pull_on_wait(self, order: "_PullArguments") -> "_PendingPull":
        """Defer barrier and pull to `wait`, on CPUs, which have no streams."""
        memory, at, n_rows, row, slots, parts, float8, out = order

        def pull() -> None:
            memory.barrier()
            peers = [
                memory.view(rank, n_rows * row, torch.uint8, at).view(n_rows, row)
                for rank in range(self.group.size())
            ]
            if float8:
                out.copy_(packed_rows_of_peers(peers, slots, out.shape[1], out.dtype))
            else:
                out.copy_(rows_of_peers([rows.view(out.dtype) for rows in peers], slots, parts))

        return _PendingPull(out, pull, slots)


class _PullArguments(NamedTuple):
    """Memory to pull rows from, the slots to pull, and the output."""

    memory: PeerMemory
    at: int
    """Byte offset of the first row."""
    n_rows: int
    """Number of rows of each rank."""
    row: int
    """Bytes of a row."""
    slots: Tensor
    parts: int
    float8: bool
    out: Tensor
    """(N, D), filled by the pull."""


class _PendingPull:
    """An issued pull; keeps the tensors that it reads and writes alive until it is done.

    Args:
        out: (N, D), the pulled rows.
        finish: makes the current stream, not the host, wait for the pull; on CPUs, runs the pull.
        held: tensors that the pull reads, kept alive until the pull is done.
    """

    def __init__(self, out: Tensor, finish: Callable[[], Any], *held: Tensor) -> None:
        self._out = out
        self._finish: Callable[[], Any] | None = finish
        self._held = held

    def wait(self) -> Tensor:
        """Wait for the pull, on the first call, and return the rows."""
        if self._finish is not None:
            self._finish()
        self._finish, self._held = None, ()
        return self._out


_PULLS: dict[int, _PendingPull] = {}
"""Pending pulls by the address of their placeholder's single element."""


def _placeholder(pull: _PendingPull, rows: Tensor, n_rows: int) -> Tensor:
    """Make the placeholder (N, D) of a pull's rows, with the dtype of `rows`, for `_arrived`."""
    placeholder = _without_memory(rows, n_rows)
    storage = placeholder.untyped_storage()
    address = storage.data_ptr()
    _PULLS[address] = pull
    finalize(storage, _PULLS.pop, address, None)
    return placeholder


@torch.library.custom_op("dtron::peers_exchange", mutates_args=())
def exchange(numbers: Tensor, senders: Tensor, mailbox: str) -> Tensor:
    """All-gather numbers of all ranks.

    Args:
        numbers: int32 (E,).
        senders: int64 (P,), the group's ranks in order.
        mailbox: name of the mailbox.
    Returns:
        int32 (P, E).
    """
    return _MAILBOXES[mailbox].start_pull(numbers.unsqueeze(0), senders, 1).wait()


@exchange.register_fake
def _(numbers: Tensor, senders: Tensor, mailbox: str) -> Tensor:
    return numbers.new_empty(senders.shape[0], numbers.shape[0])


class PendingRows(NamedTuple):
    """Pending rows for one call of `arrived`, and the routes of their gradients.

    Between the two backwards the gradients are pending: neither hooks nor
    torch.autograd.detect_anomaly may read them.
    """

    rows: Tensor
    """(N, D), a placeholder."""
    ticket: Tensor
    """(R, D) without memory. In the backward its gradient is the placeholder of the sent rows'
    gradients, since autograd requires gradients to have the shape of their tensors."""
    back: Tensor
    back_parts: int
    mailbox: str
    back_float8: bool


def send_rows(
    rows: Tensor,
    slots: Tensor,
    parts: int,
    back: Tensor,
    back_parts: int,
    mailbox: str,
    layer: Tensor | None = None,
    number: Tensor | None = None,
    *,
    float8: bool = False,
    back_float8: bool = False,
) -> PendingRows:
    """Write this rank's rows, and issue the pull of rows from all ranks; gradients are sent back.

    Args:
        rows: (R, D).
        slots: int64 (N,), slots of the rows to pull (see `dtron/kernels/peer_gather.py`).
        parts: number of neighbouring ranks whose partial rows the pull sums.
        back: int64 (R,), slot of each row's gradient among all ranks' gradients.
        back_parts: number of neighbouring ranks whose partial gradients are summed.
        mailbox: name of the mailbox.
        layer, number: int64 (1,), for `Record.add`, which the operator calls: the compiler must
            not see that recorded numbers are modified, since it would copy them.
        float8, back_float8: write rows, or gradients, in float8 (`dtron/kernels/float8_rows.py`);
            the pull casts them back. Only if parts, or back_parts, is 1.
    """
    rows, ticket = _move(rows, slots, parts, mailbox, layer, number, float8)
    return PendingRows(rows, ticket, back, back_parts, mailbox, back_float8)


def arrived(moving: PendingRows) -> Tensor:
    """Make the current stream wait for the rows (N, D). The backward sends their gradients."""
    return _WaitRows.apply(*moving)  # type: ignore[return-value]


def move(*args: Any, **kwargs: Any) -> Tensor:
    """Send rows and wait for them."""
    return arrived(send_rows(*args, **kwargs))


@torch.library.custom_op("dtron::peers_move", mutates_args=())
def _move(
    rows: Tensor,
    slots: Tensor,
    parts: int,
    mailbox: str,
    layer: Tensor | None = None,
    number: Tensor | None = None,
    float8: bool = False,
) -> tuple[Tensor, Tensor]:
    found = _MAILBOXES[mailbox]
    if layer is not None and number is not None:
        found.record.add(layer, number)
    pull = found.start_pull(rows, slots, parts, float8)
    return _placeholder(pull, rows, len(slots)), _without_memory(rows)


@_move.register_fake
def _(rows: Tensor, slots: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return _without_memory(rows, slots.shape[0]), _without_memory(rows)


# Not a custom_op, whose call overhead exceeds the time of this operator.
torch.library.define("dtron::peers_arrived", "(Tensor placeholder) -> Tensor")


@torch.library.impl("dtron::peers_arrived", "default")
def _arrived(placeholder: Tensor) -> Tensor:
    """Make the current stream wait for the rows of a placeholder; return them."""
    pull = _PULLS.pop(placeholder.untyped_storage().data_ptr(), None)
    assert pull is not None, "rows from other ranks are waited for a second time"
    return pull.wait()


@torch.library.register_fake("dtron::peers_arrived")
def _(placeholder: Tensor) -> Tensor:
    return placeholder.new_empty(placeholder.shape)


def _without_memory(rows: Tensor, n_rows: int | None = None) -> Tensor:
    """Return a tensor (n_rows or R, D) with memory for one element."""
    return rows.new_empty(()).expand(rows.shape[0] if n_rows is None else n_rows, rows.shape[1])


def _save_mailbox(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.mailbox = _MAILBOXES.get(inputs[3])  # only to keep it alive for the backward
    ctx.set_materialize_grads(False)


def _wait_for_gradients(ctx: Any, _: Any, returning: Tensor) -> tuple[Any, ...]:
    return torch.ops.dtron.peers_arrived(returning), *[None] * 6


_move.register_autograd(_wait_for_gradients, setup_context=_save_mailbox)


class _WaitRows(torch.autograd.Function):
    """Wait for rows; saves only routes, since the memory is overwritten before the backward."""

    @staticmethod
    def forward(
        ctx: Any,
        rows: Tensor,
        ticket: Tensor,
        back: Tensor,
        back_parts: int,
        mailbox: str,
        back_float8: bool,
    ) -> Tensor:
        ctx.save_for_backward(back)
        ctx.settings = back_parts, mailbox, back_float8
        return torch.ops.dtron.peers_arrived(rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        (back,) = ctx.saved_tensors
        parts, mailbox, float8 = ctx.settings
        returning, _ = _move(gradients[0], back, parts, mailbox, float8=float8)
        return None, returning, None, None, None, None
