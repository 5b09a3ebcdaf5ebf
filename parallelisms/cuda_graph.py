"""A step's gradients as one CUDA graph, which the host launches at once.

    step 1, 2       computed as without a graph: compilation, first allocations
    step 3          recorded, then replayed
    later steps     copy the batches into the recorded ones | replay

A replay runs the recorded kernels and collectives in their order on the same memory, so that it
gives the bits of a step without a graph. The graph keeps the memory of activations and gradients;
other work, such as validation, has memory of its own.

Source: CUDA C++ Programming Guide, CUDA Graphs; torch.cuda.graph.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from dtron.config.schema import GRAPH_WARM_UP
from dtron.errors import TrainingError

log = logging.getLogger("dtron")
WARM_UP = GRAPH_WARM_UP
"""Calls without a graph before one is recorded: in the first, blocks are compiled and FSDP's and
NCCL's buffers are made; the second is the first with all of them."""


class Input(Protocol):
    """A micro-batch."""

    def map(self, change: Callable[[Tensor], Tensor]) -> Any:
        """Apply a function to all tensors, in a fixed order."""
        ...


Compute = Callable[[Sequence[Any], Any], tuple[Tensor, ...]]
"""(micro-batches, number of the step) -> results on the device. It computes the gradients of all
parameters. The number is an int64 scalar on the device while a graph is recorded, else an int."""
Record = Callable[[Callable[[], tuple[Tensor, ...]]], tuple[Callable[[], None], tuple[Tensor, ...]]]
"""Records a function; returns what replays it, and the function's results."""


def record_cuda(
    function: Callable[[], tuple[Tensor, ...]],
) -> tuple[Callable[[], None], tuple[Tensor, ...]]:
    """Record the kernels that a function launches, without running them."""
    graph = torch.cuda.CUDAGraph()
    # Other threads load data and save checkpoints meanwhile, which a global mode would refuse.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = function()
    return graph.replay, results


@dataclass(frozen=True)
class _Recorded:
    replay: Callable[[], None]
    inputs: list[Tensor]
    """The recorded tensors of all micro-batches."""
    step: Tensor
    """The recorded number of the step."""
    signature: list[tuple[torch.Size, torch.dtype]]
    gradients: list[Tensor | None]
    results: tuple[Tensor, ...]


class GradientGraph:
    """Computes the gradients of a step by a CUDA graph.

    Args:
        parameters: parameters whose `.grad` a call sets; it must be None before the call.
        device: their device.
        record: records a function; by default as a CUDA graph.
    """

    def __init__(
        self, parameters: Sequence[Tensor], device: torch.device, record: Record = record_cuda
    ) -> None:
        self.parameters, self.device, self.record = parameters, device, record
        self._recorded: _Recorded | None = None
        self._warm_up, self._warned = WARM_UP, False

    def __call__(self, compute: Compute, batches: Sequence[Input], step: int) -> tuple[Tensor, ...]:
        """Compute the gradients of micro-batches; return the results of `compute`.

        A step whose micro-batches have other shapes than the recorded ones is computed without the
        graph.

        Raises:
            TrainingError: an operation cannot be recorded, such as one that waits for the device.
        """
        if self._warm_up:
            self._warm_up -= 1
            return compute(batches, step)
        if self._recorded is None:
            self._recorded = self._record(compute, batches)
        recorded, given = self._recorded, _tensors(batches)
        if _signature(given) != recorded.signature:
            self._warn()
            return compute(batches, step)
        for target, source in zip(recorded.inputs, given, strict=True):
            target.copy_(source)
        recorded.step.fill_(step)
        recorded.replay()
        for parameter, gradient in zip(self.parameters, recorded.gradients, strict=True):
            parameter.grad = gradient
        return tuple(x.clone() for x in recorded.results)  # the next replay writes to them

    def discard(self) -> None:
        """Discard the recorded step, since buffers or compiled blocks change."""
        self._recorded, self._warm_up = None, WARM_UP

    def _record(self, compute: Compute, batches: Sequence[Input]) -> _Recorded:
        held = [batch.map(torch.clone) for batch in batches]
        number = torch.zeros((), dtype=torch.int64, device=self.device)
        try:
            replay, results = self.record(lambda: compute(held, number))
        except RuntimeError as error:
            reason = str(error).partition("\n")[0]
            raise TrainingError(
                f"the step cannot be recorded as a CUDA graph: {reason}; set "
                'compile.cuda_graphs to "off"'
            ) from error
        gradients = [p.grad for p in self.parameters]
        for p in self.parameters:
            p.grad = None
        log.info("the gradients of a step are one CUDA graph from now on")
        inputs = _tensors(held)
        return _Recorded(replay, inputs, number, _signature(inputs), gradients, results)

    def _warn(self) -> None:
        if not self._warned:
            log.warning(
                "a step's micro-batches have other shapes than the recorded ones; such steps are "
                "computed without the CUDA graph"
            )
        self._warned = True


def _tensors(batches: Sequence[Input]) -> list[Tensor]:
    found: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        found.append(x)
        return x

    for batch in batches:
        batch.map(keep)
    return found


def _signature(tensors: Sequence[Tensor]) -> list[tuple[torch.Size, torch.dtype]]:
    """Return what a replay cannot change."""
    return [(x.shape, x.dtype) for x in tensors]
