"""Rows from all ranks of a host to all, as operators that graphs can hold.

    send_rows     put own rows, and then, on a stream beside: barrier -> pull the rows wanted
    arrived     wait for them                 of gradients the same, set off by the backward of
                                              `arrived` and waited for by that of `send_rows`
    exchange    the same at once, of one row of numbers, which every rank pulls of every rank

What is computed between the first two runs while rows travel, forward and backward. What they give
depends on their arguments alone, so that recomputation may call them again, anywhere, and a
compiler may treat them as functions. Shapes are static.

Rows on their way are a tensor of their shape without memory, a placeholder, and waiting for them
is an operator from the placeholder to the rows: a compiler neither reads rows that are not there
nor takes their memory for another tensor. A placeholder gives its rows once: recomputation keeps
the results of both operators or calls both again (MOVES in `parallelisms/recompute.py`).

Order: calls meet at barriers, so that all ranks of a group must make the same calls in the same
order. They run the same model, and graphs that are the same on all ranks are put in the same order
by the compiler: also where a backward has two calls of which neither waits for the other, a
gradient's and a recomputed one. A rank's number comes into them as a tensor, not as a constant (but
for where a split expert's bias goes, a number that orders nothing).

Two halves of the memory are put in turn, and nobody puts before the pull of the call before is
done. A rank that puts into a half has so passed the barrier of the call before, which all ranks
reach after the pulls of the call before that, the last ones from this half. This holds for any
sequence of calls, of whatever layers, micro-batches, forwards or backwards, since each call puts
once, meets once and pulls once, on all ranks. Where the memory grows, the device and all ranks are
waited for, and the halves of the new one hold nothing that is wanted.

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
from dtron.parallelisms.expert.peer_memory import GrowingMemory, PeerMemory

IN_ORDER: dict[str, Any] = {"reorder_for_peak_memory": False, "reorder_for_locality": False}
"""Options of torch.compile that graphs with rows on their way need under inductor: what a model
computes between `send_rows` and `arrived` stays there, forward, backward and without gradients. All
blocks of such a model get them."""


_NUMBERS = itertools.count()
_MAILBOXES: MutableMapping[str, "Mailbox"] = WeakValueDictionary()
"""By name, since operators take no objects but tensors. A mailbox belongs to what made it, and a
backward that is due; names are not used again."""


class Mailbox:
    """What each rank of a group puts, all ranks pull: one for all layers of a model.

    Each model makes one, on all ranks of the group, and keeps it as long as it calls the operators.
    Models do not share one: its memory grows by a collective, which one rank would enter and
    another not, where the garbage collector has freed an earlier model on one of them alone.

    Attributes:
        name: by which operators find it; the same on all ranks that have made as many.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.name = f"{group.group_name}.{next(_NUMBERS)}"
        _MAILBOXES[self.name] = self
        self.layers = 0
        """How many there are to note something of."""
        self._growing = GrowingMemory(group)
        self._second = False
        self._noted = torch.zeros(0, dtype=torch.int64)
        self._stream: torch.cuda.Stream | None = None
        self._pull: _PendingPull | None = None
        """The last one."""

    def moved(
        self, rows: Tensor, slots: Tensor, parts: int, float8: bool = False
    ) -> "_PendingPull":
        """Set off (N, D); see `send_rows`. Rows lie in the memory in float8 where that is asked
        for."""
        if self._pull is not None:
            self._pull.wait()  # nearly always once more
        (n_rows, width), size = rows.shape, rows.element_size()
        row = wire_bytes(width) if float8 else width * size
        half = max(n_rows * row, len(slots) * width * size)  # comes back next, as it is
        memory = self._growing.at_least(2 * half, rows.device)
        self._second = not self._second
        at = memory.nbytes // 2 if self._second else 0
        own = memory.view(self.group.rank(), n_rows * row, torch.uint8, at).view(n_rows, row)
        if float8:
            packed(rows, own)
        else:
            own.view(rows.dtype).copy_(rows)
        out = rows.new_empty(len(slots), width)
        order = _PullOrder(memory, at, n_rows, row, slots.clone(), parts, float8, out)
        self._pull = self._pulled_on_stream(order) if rows.is_cuda else self._pulled_late(order)
        return self._pull

    def _pulled_on_stream(self, order: "_PullOrder") -> "_PendingPull":
        """The barrier and the pull, on a stream of their own."""
        memory, at, n_rows, _, slots, parts, float8, out = order
        if self._stream is None:  # of high priority: its programs are few, and not to queue
            self._stream = torch.cuda.Stream(out.device, priority=-1)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            memory.barrier()
            rows_of_pointers(memory.pointers, at, n_rows, slots, out, parts, float8)
            done = torch.cuda.Event()
            done.record()
        return _PendingPull(out, done.wait, slots)

    def _pulled_late(self, order: "_PullOrder") -> "_PendingPull":
        """CPUs have no streams: both where they are waited for."""
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

    def note(self, layer: Tensor, number: Tensor) -> None:
        """Remember the largest number of a layer; both int64 (1,), on the device."""
        self._noted = self.noted(number.device).scatter_reduce(0, layer, number, "amax")

    def noted(self, device: torch.device) -> Tensor:
        """int64 (layers,): what was noted of each, 0 at first."""
        if missing := self.layers - len(self._noted):
            self._noted = torch.cat([self._noted, self._noted.new_zeros(missing)])
        self._noted = self._noted.to(device)
        return self._noted


class _PullOrder(NamedTuple):
    """What is to be pulled."""

    memory: PeerMemory
    at: int
    """Bytes to the first row."""
    n_rows: int
    """Of each rank."""
    row: int
    """Bytes of one."""
    slots: Tensor
    parts: int
    float8: bool
    out: Tensor
    """(N, D), to be filled."""


class _PendingPull:
    """A pull that was set off; it holds what is read and written until it is done.

    Args:
        out: (N, D), the rows.
        finish: the current stream waits for it, and the host does not; on CPUs it is done.
    """

    def __init__(self, out: Tensor, finish: Callable[[], Any], *held: Tensor) -> None:
        self._out = out
        self._finish: Callable[[], Any] | None = finish
        self._held = held

    def wait(self) -> Tensor:
        """The rows; waited for once."""
        if self._finish is not None:
            self._finish()
        self._finish, self._held = None, ()
        return self._out


_PULLS: dict[int, _PendingPull] = {}
"""By the address of the memory of one element that their placeholder has."""


def _placeholder(pull: _PendingPull, rows: Tensor, n_rows: int) -> Tensor:
    """(N, D) of rows on their way, like `rows`: what `_arrived` takes."""
    found = _without_memory(rows, n_rows)
    storage = found.untyped_storage()
    address = storage.data_ptr()
    _PULLS[address] = pull
    finalize(storage, _PULLS.pop, address, None)
    return found


@torch.library.custom_op("dtron::peers_exchange", mutates_args=())
def exchange(numbers: Tensor, senders: Tensor, mailbox: str) -> Tensor:
    """Everybody's numbers.

    Args:
        numbers: int32 (E,).
        senders: int64 (P,), the ranks of the group in order.
        mailbox: its name.
    Returns:
        int32 (P, E).
    """
    return _MAILBOXES[mailbox].moved(numbers.unsqueeze(0), senders, 1).wait()


@exchange.register_fake
def _(numbers: Tensor, senders: Tensor, mailbox: str) -> Tensor:
    return numbers.new_empty(senders.shape[0], numbers.shape[0])


class PendingRows(NamedTuple):
    """Rows on their way, for `arrived`, once, and the way back. Gradients are on their way between
    the two backwards too, where nothing may read them: no hook, and not
    torch.autograd.detect_anomaly."""

    rows: Tensor
    """(N, D), a placeholder."""
    ticket: Tensor
    """(R, D) without memory. What arrives backward as its gradient is the placeholder of that of
    the rows put: autograd wants gradients to have the shape of what they are gradients of."""
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
    """Put rows and begin to pull those of all ranks, by their slots; gradients go back as rows do.

    Args:
        rows: (R, D).
        slots: int64 (N,), as in `dtron/kernels/peer_gather.py`, which sums `parts` neighbours.
        back: int64 (R,), where among all ranks' results the gradient of each row is.
        back_parts: neighbours that each have a part of it.
        mailbox: its name.
        layer, number: int64 (1,), to be noted by the way, for `Mailbox.noted`; outside of what the
            compiler knows, which copies what it sees changed.
        float8, back_float8: rows, and gradients, are put in float8 (`dtron/kernels/float8_rows.py`)
        and
            cast back by what pulls them; not where neighbours are summed.
    """
    rows, ticket = _move(rows, slots, parts, mailbox, layer, number, float8)
    return PendingRows(rows, ticket, back, back_parts, mailbox, back_float8)


def arrived(moving: PendingRows) -> Tensor:
    """The rows, (N, D), for which the current stream waits. Backward their gradients set off."""
    return _WaitRows.apply(*moving)  # type: ignore[return-value]


def move(*args: Any, **kwargs: Any) -> Tensor:
    """Both at once."""
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
        found.note(layer, number)
    pull = found.moved(rows, slots, parts, float8)
    return _placeholder(pull, rows, len(slots)), _without_memory(rows)


@_move.register_fake
def _(rows: Tensor, slots: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return _without_memory(rows, slots.shape[0]), _without_memory(rows)


# Not a custom_op, whose call takes longer: this one does next to nothing.
torch.library.define("dtron::peers_arrived", "(Tensor placeholder) -> Tensor")


@torch.library.impl("dtron::peers_arrived", "default")
def _arrived(placeholder: Tensor) -> Tensor:
    """The rows of a placeholder, for which the current stream waits."""
    pull = _PULLS.pop(placeholder.untyped_storage().data_ptr(), None)
    assert pull is not None, "rows from other ranks are waited for a second time"
    return pull.wait()


@torch.library.register_fake("dtron::peers_arrived")
def _(placeholder: Tensor) -> Tensor:
    return placeholder.new_empty(placeholder.shape)


def _without_memory(rows: Tensor, n_rows: int | None = None) -> Tensor:
    """(n_rows or R, D) of one element."""
    return rows.new_empty(()).expand(rows.shape[0] if n_rows is None else n_rows, rows.shape[1])


def _hold(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.mailbox = _MAILBOXES.get(inputs[3])  # not read: held as long as a backward may need it
    ctx.set_materialize_grads(False)


def _wait_for_gradients(ctx: Any, _: Any, returning: Tensor) -> tuple[Any, ...]:
    return torch.ops.dtron.peers_arrived(returning), *[None] * 6


_move.register_autograd(_wait_for_gradients, setup_context=_hold)


class _WaitRows(torch.autograd.Function):
    """It keeps the ways alone: the memory holds something else by the time of its backward."""

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
