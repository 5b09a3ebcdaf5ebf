"""Collectives as functions of tensors, for compiled graphs and for asynchronous use.

Each function issues a collective and returns its result at once: a plain tensor that must not be
read before `wait_tensor`. Computation between the two calls overlaps with the collective. Only
`all_to_all_even`, which waits itself, is differentiable.

Private names, tested with torch 2.11, 2.13 and 2.15:

    torch.ops._c10d_functional              the operators behind DTensor's collectives
    torch.distributed._symmetric_memory     memory that all GPUs of a host can address
"""

from collections.abc import MutableMapping, Sequence
from typing import Any, ClassVar, Literal
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symmetric_memory
from torch import Tensor

__all__ = [
    "NamedGroup",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_even",
    "is_pending",
    "issue_all_to_all_even",
    "reduce_scatter",
    "symmetric_memory",
    "wait_tensor",
]

_ops = torch.ops._c10d_functional
wait_tensor = _ops.wait_tensor
"""Wait for the tensor of a collective: on GPUs the current stream waits, on CPUs the host."""


def all_reduce(x: Tensor, operation: Literal["sum", "max"], group: str) -> Tensor:
    """Compute the sum or maximum over ranks, in x's shape.

    Args:
        group: name of the process group.
    """
    return _ops.all_reduce(x, operation, group)


def all_gather(x: Tensor, ranks: int, group: str) -> Tensor:
    """All-gather along dim 0, in rank order: (N, ...) -> (ranks * N, ...)."""
    return _ops.all_gather_into_tensor(x.contiguous(), ranks, group)


def reduce_scatter(x: Tensor, ranks: int, group: str) -> Tensor:
    """Reduce-scatter along dim 0: (ranks * N, ...) -> (N, ...)."""
    return _ops.reduce_scatter_tensor(x.contiguous(), "sum", ranks, group)


def all_to_all(x: Tensor, received: Sequence[int], sent: Sequence[int], group: str) -> Tensor:
    """Exchange rows with each rank: (sum of sent, ...) -> (sum of received, ...).

    The process group keeps the input alive until `wait_tensor`.

    Args:
        received, sent: number of rows from each rank, and to each rank.
    """
    return _ops.all_to_all_single(x.contiguous(), received, sent, group)


def all_to_all_even(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Exchange the same number of rows with each rank and wait; differentiable.

    Args:
        x: (ranks * N, ...).
    """
    return _AllToAllEven.apply(x, group.size(), group.group_name)  # type: ignore[return-value]


class _AllToAllEven(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: int, group: str) -> Tensor:
        ctx.group = ranks, group
        return _exchanged(x, ranks, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _exchanged(grad, *ctx.group), None, None


def _exchanged(x: Tensor, ranks: int, group: str) -> Tensor:
    return wait_tensor(issue_all_to_all_even(x, ranks, group))


def issue_all_to_all_even(x: Tensor, ranks: int, group: str) -> Tensor:
    """Exchange the same number of rows with each rank.

    Args:
        x: (ranks * N, ...).
    """
    sizes = [x.shape[0] // ranks] * ranks
    return all_to_all(x, sizes, sizes, group)


def is_pending(x: Any) -> bool:
    """Whether x is a pending collective of DTensor, which waits when it is first used."""
    return hasattr(x, "trigger_wait")


class NamedGroup:
    """A process group that custom operators find by its name, since they cannot take objects.

    `find` works as long as the object that `of` returned exists.
    """

    _held: ClassVar[MutableMapping[str, "NamedGroup"]] = WeakValueDictionary()

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    @classmethod
    def of(cls, group: dist.ProcessGroup) -> "NamedGroup":
        """Return the NamedGroup of a group; create it on first use.

        A new group replaces a destroyed group of the same name.
        """
        found = cls._held.get(group.group_name)
        if found is None or found.group is not group:
            found = cls._held[group.group_name] = cls(group)
        return found

    @classmethod
    def find(cls, name: str) -> dist.ProcessGroup:
        """Return the process group with this name."""
        return cls._held[name].group
