"""Queues of weight gradients: what the I of a split backward leaves to W.

A `Site` is a weight and the queues of its stage. An operator in the backward, eager or in a
compiled graph, finds it by its number and hands it a `DeferredMatmul`: the operands and how they
are multiplied. W adds the results to `.grad`.

What an operator of a compiled graph needs so that inductor neither drops nor merges its calls is
`call_of`; what it needs so that operands are not overwritten, COMPILE_OPTIONS of
`split_backward.py`.
"""

import itertools
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtron.kernels.grouped import grouped_gradient


class DeferredMatmul(ABC):
    """What W computes of one weight, and what it needs for that."""

    @abstractmethod
    def compute(self) -> Tensor:
        """The gradient of this rank's part of the weight. No collective: ranks differ in when they
        come to it."""

    def add_to(self, total: Tensor) -> None:
        """Add it to the gradient so far, the rank's part, in place."""
        total.add_(self.compute())


@dataclass(frozen=True)
class LinearMatmul(DeferredMatmul):
    """grad^T x, of a weight (out, in)."""

    grad: Tensor
    """(tokens, out)"""
    x: Tensor
    """(tokens, in)"""

    def compute(self) -> Tensor:
        """(out, in)."""
        return self.grad.t() @ self.x

    def add_to(self, total: Tensor) -> None:
        """In one kernel where the dtypes are equal."""
        if total.dtype == self.grad.dtype:
            total.addmm_(self.grad.t(), self.x)
        else:
            super().add_to(total)


@dataclass(frozen=True)
class GroupedMatmul(DeferredMatmul):
    """grad_e^T x_e of each expert e, of a weight (E, out, in)."""

    grad: Tensor
    """(tokens, out), sorted by expert."""
    x: Tensor
    """(tokens, in)"""
    offsets: Tensor
    """int32 (E,), where each expert's tokens end."""

    def compute(self) -> Tensor:
        """(E, out, in)."""
        return grouped_gradient(self.grad, self.x, self.offsets)


_Queued = tuple[Tensor, DeferredMatmul]
"""A parameter, and what is to be added to its `.grad`."""


class WeightGradients:
    """Weight gradients of one stage that are still to be computed, by micro-batch.

    Outside of `collect` weight gradients are added at once, as by a plain backward.
    """

    def __init__(self, compiled: bool = False) -> None:
        self.compiled = compiled
        self._queues: dict[Hashable, deque[_Queued]] = {}
        self._collecting: deque[_Queued] | None = None

    @contextmanager
    def collect(self, key: Hashable) -> Iterator[None]:
        """Queue the weight gradients of the backward that runs inside.

        Args:
            key: the micro-batch; several may be in flight.
        Raises:
            RuntimeError: another backward of the stage is being collected, or this key's weight
                gradients have not been run yet.
        """
        if self._collecting is not None or key in self._queues:
            raise RuntimeError(f"weight gradients of micro-batch {key} are already being collected")
        self._collecting = deque()
        try:
            yield
            self._queues[key] = self._collecting
        finally:
            self._collecting = None

    def run(self, key: Hashable) -> None:
        """Add the weight gradients of a collected backward to `.grad`, first queued first.

        What each was computed from is freed as soon as it is used.

        Raises:
            RuntimeError: no backward was collected under this key, or it has been run.
        """
        if key not in self._queues:
            raise RuntimeError(f"no weight gradients of micro-batch {key} are queued")
        queue = self._queues.pop(key)
        while queue:
            _add_weight_gradient(*queue.popleft())

    def pending(self, key: Hashable) -> int:
        """How many weight gradients of a micro-batch are still to be computed."""
        return len(self._queues.get(key, ()))

    def take(self, weight: Tensor, matmul: DeferredMatmul) -> None:
        """Queue a weight's gradient if a backward is being collected, else add it now.

        Args:
            weight: the parameter whose `.grad` is added to: under FSDP the unsharded one.
        """
        if self._collecting is None:
            _add_weight_gradient(weight, matmul)
        else:
            self._collecting.append((weight, matmul))


class Site:
    """A weight and the queues of its stage."""

    def __init__(self, module: nn.Module, name: str, gradients: WeightGradients) -> None:
        self.module, self.name = module, name
        self.gradients = gradients
        number = next(_NUMBERS)
        # A tensor, since a Python number would be a constant of the graph: blocks share one graph.
        # On the CPU, where it can be read without waiting for a device.
        self.number = torch.tensor(number, dtype=torch.int64, device="cpu")
        _SITES[number] = self

    def defers(self, x: Tensor, weight: Tensor) -> bool:
        """Whether a call's weight gradient is deferred: an input that needs no gradient has no I,
        its weight gradient is all of B."""
        if not (torch.is_grad_enabled() and x.requires_grad and weight.requires_grad):
            return False
        if torch.compiler.is_compiling() and not self.gradients.compiled:
            raise RuntimeError(
                "inductor would overwrite what deferred weight gradients still need; call "
                "defer(..., compiled=True) and compile with "
                "options=dtron.parallelisms.pipeline.split_backward.COMPILE_OPTIONS"
            )
        return True

    def take(self, matmul: DeferredMatmul) -> None:
        """Hand a backward's weight gradient to the queues."""
        # Inside a unit's backward the module holds the parameter that the forward used: FSDP puts
        # the unsharded one there.
        self.gradients.take(getattr(self.module, self.name), matmul)


class DeferringLinear(nn.Linear):
    """A linear that can defer its weight gradient by itself; subclasses multiply."""

    site: Site | None = None

    def defer_weight_gradient(self, gradients: WeightGradients) -> None:
        """See `DefersWeightGradient`."""
        if self.site is not None:
            raise ValueError("the weight gradient of this layer has already been deferred")
        self.site = Site(self, "weight", gradients)

    def weight_of_call(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """The rank's part of the weight; if its gradient is deferred, detached and with the number
        of its site: the gradient does not go through autograd, where None would become zeros."""
        if self.site is None or not self.site.defers(x, weight):
            return weight, None
        return weight.detach(), self.site.number


# An operator takes tensors and numbers, no objects, hence a table of the process. It changes only
# when layers are made or freed; what a backward changes is in the WeightGradients of its stage. So
# it does not matter that autograd runs the backward of CUDA tensors on threads of its own, where
# thread-local and context variables of the caller are not seen.
_NUMBERS = itertools.count()
_SITES: WeakValueDictionary[int, Site] = WeakValueDictionary()


def site_of(number: Tensor) -> Site:
    """The site whose `number` an operator was given."""
    return _SITES[int(number)]


def call_of(grad: Tensor) -> Tensor:
    """Empty, an argument of operators that queue. Two calls with equal arguments would be merged
    into one in a compiled graph, as if the operator were a pure function; results of torch.empty
    are never taken for equal."""
    return torch.empty(0, device=grad.device)


def queue_weight_gradient(needed: Tensor, operands: Sequence[Tensor], number: Tensor) -> None:
    """Hand the operands of a weight gradient to the queue of its layer, in an operator of its own:
    for layers whose input gradient is computed by operators that queue nothing.

    Args:
        needed: the gradient of the layer's input, in the weight gradient's dtype. The operator is
            declared to change it, and does not: so a compiled graph, which needs it, keeps the
            operator.
        operands: of the `deferred_matmul` of the layer.
        number: of the layer's site.
    """
    torch.ops.dtron.queue_weight_gradient(needed, operands, number, call_of(needed))


def run_queue_weight_gradient(
    needed: Tensor, operands: Sequence[Tensor], number: Tensor, call: Tensor
) -> None:
    """The operator; see above and `call_of`."""
    site = site_of(number)
    layer: Any = site.module
    site.take(layer.deferred_matmul(operands, needed.dtype))


# Not by torch.library.custom_op, whose operands inductor may hand over in other strides.
torch.library.define(
    "dtron::queue_weight_gradient",
    "(Tensor(a!) needed, Tensor[] operands, Tensor number, Tensor call) -> ()",
    tags=torch.Tag.needs_exact_strides,
)
torch.library.impl("dtron::queue_weight_gradient", "default", run_queue_weight_gradient)


@torch.library.register_fake("dtron::queue_weight_gradient")
def _(needed: Tensor, operands: Sequence[Tensor], number: Tensor, call: Tensor) -> None:
    pass


@torch.no_grad()
def _add_weight_gradient(weight: Tensor, matmul: DeferredMatmul) -> None:
    """Add it to the weight's `.grad`."""
    total = _placed_as(weight)
    if total is None:
        found = matmul.compute()
        weight.grad = _like(weight, found.to(weight.grad_dtype or found.dtype))
    else:
        matmul.add_to(total)


def _placed_as(weight: Tensor) -> Tensor | None:
    """The local part of a weight's gradient so far, in the weight's own layout. That of an
    embedding that shares the weight is a part of a sum over tp, as autograd leaves it."""
    grad = weight.grad
    if isinstance(grad, DTensor) and isinstance(weight, DTensor):
        if grad.placements != weight.placements:
            weight.grad = grad = grad.redistribute(placements=weight.placements)
        return grad.to_local()
    return grad


def _like(weight: Tensor, local: Tensor) -> Tensor:
    if not isinstance(weight, DTensor):
        return local
    return DTensor.from_local(local, weight.device_mesh, weight.placements, run_check=False)
