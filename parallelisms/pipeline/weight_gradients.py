"""Queues of deferred weight gradients, and weight gradients that matmuls add to sums.

A split backward has two actions: I computes the gradient of the input and queues the weight
gradients, W computes the queued weight gradients and adds them to `.grad`.

A `Site` is a weight with the queues of its stage. An operator in the backward, eager or in a
compiled graph, finds the site by a number and adds a `DeferredMatmul` to the queue: the operands,
and how to multiply them.

The same operators add weight gradients to FSDP's sums over micro-batches, without a queue:
`accumulate_in_matmuls` (`split_backward.py`) and `WeightGradients.add_to_sums`.

In compiled graphs, `call_of` keeps inductor from merging calls of these operators, and
COMPILE_OPTIONS (`split_backward.py`) keep it from overwriting queued operands.
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

from dtron.kernels.accumulate import multiply_into
from dtron.kernels.grouped import grouped_gradient
from dtron.kernels.grouped_accumulate import grouped_multiply_into
from dtron.parallelisms.fsdp.torch_internals import GradientSum, gradient_sums
from dtron.parallelisms.gradients import local_part


class DeferredMatmul(ABC):
    """The operands of a weight gradient, and the matmul that W computes with them."""

    @abstractmethod
    def compute(self) -> Tensor:
        """Compute the gradient of this rank's shard of the weight.

        It must not run collectives, since ranks run W at different times.
        """

    def add_to(self, total: Tensor) -> None:
        """Add the weight gradient to `total`, a local tensor of its dtype or wider, in place."""
        total.add_(self.compute())

    def write(self, dtype: torch.dtype) -> Tensor:
        """Compute the gradient of this rank's shard of the weight, in `dtype`."""
        return self.compute().to(dtype)


@dataclass(frozen=True)
class LinearMatmul(DeferredMatmul):
    """Deferred weight gradient of a linear: grad^T x, for a weight (out, in)."""

    grad: Tensor
    """(tokens, out)"""
    x: Tensor
    """(tokens, in)"""

    def compute(self) -> Tensor:
        """Return grad^T x, (out, in)."""
        return self.grad.t() @ self.x

    def add_to(self, total: Tensor) -> None:
        """Add grad^T x to `total` (out, in), in the matmul."""
        multiply_into(total, self.grad.t(), self.x, add=True)

    def write(self, dtype: torch.dtype) -> Tensor:
        """Return grad^T x, (out, in), in `dtype`, without rounding it to a narrower one."""
        total = self.grad.new_empty(self.grad.shape[1], self.x.shape[1], dtype=dtype)
        multiply_into(total, self.grad.t(), self.x, add=False)
        return total


@dataclass(frozen=True)
class GroupedMatmul(DeferredMatmul):
    """Deferred weight gradients of experts: grad_e^T x_e of expert e, for a weight (E, out, in)."""

    grad: Tensor
    """(tokens, out), sorted by expert."""
    x: Tensor
    """(tokens, in)"""
    offsets: Tensor
    """int32 (E,), end of each expert's tokens."""

    def compute(self) -> Tensor:
        """Return the gradients of all experts, (E, out, in)."""
        return grouped_gradient(self.grad, self.x, self.offsets)

    def add_to(self, total: Tensor) -> None:
        """Add the gradients to `total` (E, out, in), in the matmul."""
        grouped_multiply_into(total, self.grad, self.x, self.offsets, add=True)

    def write(self, dtype: torch.dtype) -> Tensor:
        """Return the gradients (E, out, in) in `dtype`, not rounded where a kernel allows it."""
        total = self.grad.new_empty(
            len(self.offsets), self.grad.shape[1], self.x.shape[1], dtype=dtype
        )
        grouped_multiply_into(total, self.grad, self.x, self.offsets, add=False)
        return total


_Queued = tuple[Tensor, DeferredMatmul, GradientSum | None]
"""(parameter, deferred matmul, FSDP's sum to which its result is added; None: to the `.grad`)"""


class WeightGradients:
    """Queues of the deferred weight gradients of one stage, by micro-batch.

    Outside of `collect`, weight gradients are computed immediately, as in a plain backward.
    """

    def __init__(self, compiled: bool = False) -> None:
        self.compiled = compiled
        self.sites: list[Site] = []
        self._queues: dict[Hashable, deque[_Queued]] = {}
        self._collecting: deque[_Queued] | None = None
        self._queued: torch.cuda.Event | None = None

    @contextmanager
    def collect(self, key: Hashable, queued: torch.cuda.Event | None = None) -> Iterator[None]:
        """Context manager: queue the weight gradients of the backward inside it.

        Args:
            key: the micro-batch; several micro-batches may be in flight.
            queued: recorded whenever a weight gradient is queued, after its operands.
        Raises:
            RuntimeError: contexts are nested, or weight gradients of this key are still queued.
        """
        if self._collecting is not None or key in self._queues:
            raise RuntimeError(f"collect({key}): already collecting, or run({key}) is missing")
        self._collecting, self._queued = deque(), queued
        try:
            yield
            self._queues[key] = self._collecting
        finally:
            self._collecting = self._queued = None

    def add_to_sums(self, stage: nn.Module) -> None:
        """Add weight gradients to FSDP's sums over micro-batches from now on, not to `.grad`.

        The matmul of a linear or of experts then adds its float32 result to the sum: its gradient
        is not rounded to the dtype of computation, and is neither written nor added separately.

        Args:
            stage: the module that contains all layers, after `fully_shard`.
        """
        sums = gradient_sums(stage)
        for site in self.sites:
            site.total = sums.get(getattr(site.module, site.name))

    def run(self, key: Hashable) -> None:
        """Compute the queued weight gradients of a micro-batch and add them to `.grad`, in order.

        Operands are freed after use.

        Raises:
            RuntimeError: no weight gradients of this micro-batch are queued.
        """
        if key not in self._queues:
            raise RuntimeError(f"no weight gradients of micro-batch {key} are queued")
        _run(self._queues.pop(key))

    def run_collected(self) -> None:
        """Inside of `collect`, compute and add what is queued so far, as `run` does."""
        _run(self._collecting or deque())

    @property
    def collected(self) -> int:
        """Number of weight gradients that the current `collect` has queued; 0 outside of it."""
        return len(self._collecting or ())

    def pending(self, key: Hashable) -> int:
        """Return the number of queued weight gradients of a micro-batch."""
        return len(self._queues.get(key, ()))

    def take(
        self, weight: Tensor, matmul: DeferredMatmul, total: GradientSum | None = None
    ) -> None:
        """Queue a weight gradient; outside of `collect`, compute it and add it now.

        Args:
            weight: the parameter; with FSDP, the unsharded parameter.
            total: the sum to add it to; None: the weight's `.grad`.
        """
        if self._collecting is None:
            _add_weight_gradient(weight, matmul, total)
        else:
            self._collecting.append((weight, matmul, total))
            if self._queued is not None:
                self._queued.record()


class Site:
    """A weight whose gradient can be deferred, and the queues of the weight's pipeline stage.

    Custom operators take the site's `number`, and look up the site with it.
    """

    def __init__(self, module: nn.Module, name: str, gradients: WeightGradients) -> None:
        self.module, self.name = module, name
        self.gradients = gradients
        self.total: GradientSum | None = None
        """FSDP's sum of the weight's gradients; None: they are added to `.grad`."""
        gradients.sites.append(self)
        number = next(_NUMBERS)
        # A tensor, since a Python number would be a constant in the graph, which blocks share. On
        # the CPU, since reading it must not wait for the device.
        self.number = torch.tensor(number, dtype=torch.int64, device="cpu")
        _SITES[number] = self

    def defers(self, x: Tensor, weight: Tensor) -> bool:
        """Whether to defer the weight gradient of a call; false if x requires no gradient.

        Raises:
            RuntimeError: torch.compile traces a layer that was not deferred with compiled=True.
        """
        if not (torch.is_grad_enabled() and x.requires_grad and weight.requires_grad):
            return False
        if torch.compiler.is_compiling() and not self.gradients.compiled:
            raise RuntimeError(
                "inductor would overwrite operands of deferred weight gradients; call "
                "defer(..., compiled=True) and compile with "
                "options=dtron.parallelisms.pipeline.split_backward.COMPILE_OPTIONS"
            )
        return True

    def take(self, matmul: DeferredMatmul) -> None:
        """Queue this weight's gradient or add it now; see `WeightGradients.take`."""
        # During an FSDP unit's backward, the module's parameter is the unsharded one.
        self.gradients.take(getattr(self.module, self.name), matmul, self.total)


class DeferringLinear(nn.Linear):
    """Base class of linears with custom matmuls that can defer their weight gradient."""

    site: Site | None = None

    @property
    def adds_in_matmul(self) -> bool:
        """Whether the matmul of the weight gradient can add to a sum; see `add_to_sums`."""
        return False

    def defer_weight_gradient(self, gradients: WeightGradients) -> None:
        """Queue the weight gradient in all later backwards.

        Raises:
            ValueError: on a second call.
        """
        if self.site is not None:
            raise ValueError("the weight gradient of this layer has already been deferred")
        self.site = Site(self, "weight", gradients)

    def weight_of_call(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return (detached weight, number of the layer's site) if the weight gradient is deferred.

        Otherwise return (weight, None). A deferred weight is detached, since autograd would replace
        a gradient of None by zeros.
        """
        if self.site is None or not self.site.defers(x, weight):
            return weight, None
        return weight.detach(), self.site.number


# Operators take tensors and numbers, not objects, so sites are in a global table. It changes only
# when layers are created or freed; a backward changes only the WeightGradients of its stage. So
# autograd's threads for CUDA tensors, which do not see the caller's thread-locals, can use it.
_NUMBERS = itertools.count()
_SITES: WeakValueDictionary[int, Site] = WeakValueDictionary()


def site_of(number: Tensor) -> Site:
    """Return the `Site` with this number."""
    return _SITES[int(number)]


def call_of(grad: Tensor) -> Tensor:
    """Return a new empty tensor, an argument that makes each call of a queueing operator unique.

    In a compiled graph, two calls with equal arguments would be merged, as for a pure function. The
    compiler never considers results of torch.empty equal.
    """
    return torch.empty(0, device=grad.device)


def queue_weight_gradient(needed: Tensor, operands: Sequence[Tensor], number: Tensor) -> None:
    """Queue the operands of a weight gradient, with a separate operator.

    Layers use it if the operators that compute their input gradient queue nothing.

    Args:
        needed: gradient of the layer's input, in the weight gradient's dtype. The operator's schema
            declares that it modifies this tensor, so that a compiled graph keeps the operator; in
            fact the tensor is unchanged.
        operands: arguments of the layer's `deferred_matmul`.
        number: number of the layer's site.
    """
    torch.ops.dtron.queue_weight_gradient(needed, operands, number, call_of(needed))


def run_queue_weight_gradient(
    needed: Tensor, operands: Sequence[Tensor], number: Tensor, call: Tensor
) -> None:
    """Queue the weight gradient at its site: the implementation of `queue_weight_gradient`."""
    site = site_of(number)
    layer: Any = site.module
    site.take(layer.deferred_matmul(operands, needed.dtype))


# Not a torch.library.custom_op, to whose operands inductor may give other strides.
torch.library.define(
    "dtron::queue_weight_gradient",
    "(Tensor(a!) needed, Tensor[] operands, Tensor number, Tensor call) -> ()",
    tags=torch.Tag.needs_exact_strides,
)
torch.library.impl("dtron::queue_weight_gradient", "default", run_queue_weight_gradient)


@torch.library.register_fake("dtron::queue_weight_gradient")
def _(needed: Tensor, operands: Sequence[Tensor], number: Tensor, call: Tensor) -> None:
    pass


def _run(queue: deque[_Queued]) -> None:
    while queue:
        _add_weight_gradient(*queue.popleft())


@torch.no_grad()
def _add_weight_gradient(
    weight: Tensor, matmul: DeferredMatmul, total: GradientSum | None = None
) -> None:
    """Compute a weight gradient and add it to an open sum, or else to the weight's `.grad`."""
    if total is not None and total.is_open:
        _add_to_sum(weight, matmul, total)
    elif weight.grad is not None:
        weight.grad = _placed(weight, weight.grad)
        matmul.add_to(local_part(weight.grad))
    else:
        grad = matmul.compute()
        weight.grad = _as_dtensor(weight, grad.to(weight.grad_dtype or grad.dtype))


def _add_to_sum(weight: Tensor, matmul: DeferredMatmul, total: GradientSum) -> None:
    if (found := total.get()) is None:
        total.set(_as_dtensor(weight, matmul.write(total.dtype)))
        return
    placed = _placed(weight, found)
    if placed is not found:
        total.set(placed)
    matmul.add_to(local_part(placed))


def _placed(weight: Tensor, total: Tensor) -> Tensor:
    """Return a weight's gradient or sum of gradients with the weight's placements over tp.

    Autograd leaves a partial sum if an embedding shares the weight.
    """
    if not isinstance(total, DTensor) or not isinstance(weight, DTensor):
        return total
    if total.placements == weight.placements:
        return total
    return total.redistribute(placements=weight.placements)


def _as_dtensor(weight: Tensor, local: Tensor) -> Tensor:
    if not isinstance(weight, DTensor):
        return local
    return DTensor.from_local(local, weight.device_mesh, weight.placements, run_check=False)
