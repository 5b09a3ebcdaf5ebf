"""Interface that runs a step's micro-batches, and gradient accumulation without a pipeline.

`Accumulation` and `Pipeline` (`executor.py`) have the same methods, so that a training loop works
with both.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dtron.parallelisms.fsdp.sharding import Policy, begin_micro_batch
from dtron.parallelisms.pipeline.block_overlap import BlockOverlap, Tape

MicroBatch = tuple[Tensor, Mapping[str, Any]]
"""The model's first argument, and its other arguments by name, which every stage gets."""
Loss = Callable[[Tensor, int], Tensor]
"""(output of the model, index of the micro-batch) -> a scalar to be summed and differentiated."""


class Execution(Protocol):
    """Runs a step's micro-batches: `Accumulation` or `Pipeline`."""

    def train(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> Tensor:
        """Run forward and backward of all micro-batches, including FSDP's gradient reduction.

        Returns:
            Sum of the losses, a float64 scalar on the device; zero on ranks without the last stage.
        """
        ...

    def evaluate(
        self, micro_batches: Sequence[MicroBatch], consume: Callable[[Tensor, int], None]
    ) -> None:
        """Run all forwards without gradients; the last stage passes each output to `consume`."""
        ...


class Accumulation:
    """Gradient accumulation on a model without pipeline stages, one micro-batch after another."""

    def __init__(self, model: nn.Module, policy: Policy, device: torch.device) -> None:
        assert isinstance(model, FSDPModule), "the model is parallelised before it is trained"
        self.model, self.policy, self.device = model, policy, device

    def train(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> Tensor:
        """Run forward and backward of all micro-batches; return the sum of losses, a scalar."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for i, (x, others) in enumerate(micro_batches):
            begin_micro_batch(self.model, self.policy, last=i == len(micro_batches) - 1)
            # No variable holds the output, the largest activation, so that the backward frees it.
            value = loss(self.model(x, **others), i)
            value.backward()
            total = total + value.detach()
        return total

    @torch.no_grad()
    def evaluate(
        self, micro_batches: Sequence[MicroBatch], consume: Callable[[Tensor, int], None]
    ) -> None:
        """Run all forwards without gradients and pass each output to `consume`."""
        for i, (x, others) in enumerate(micro_batches):
            consume(self.model(x, **others), i)


class OverlappedAccumulation(Accumulation):
    """Gradient accumulation in which a forward runs together with the previous backward.

    The order of forwards, and that of backwards, is the order of the micro-batches: results equal
    those of `Accumulation`, bit for bit if the model's operators are deterministic.
    """

    def __init__(
        self, model: nn.Module, policy: Policy, device: torch.device, overlap: BlockOverlap
    ) -> None:
        super().__init__(model, policy, device)
        self.overlap = overlap

    def train(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> Tensor:
        """Run forward and backward of all micro-batches; return the sum of losses, a scalar."""
        together = self.overlap.begin_step()
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        previous: Tape | None = None
        for i, (x, others) in enumerate(micro_batches):
            begin_micro_batch(self.model, self.policy, last=False)
            if previous is not None and not together:
                self.overlap.backward(previous)
                previous = None
            with self.overlap.forward(self.model, i % 2, previous) as tape:
                tape.end = loss(self.model(x, **others), i)
                total += tape.end.detach()  # in place: memory of one lane, used in both
            previous = tape
        assert previous is not None, "a step has micro-batches"
        begin_micro_batch(self.model, self.policy, last=True)
        self.overlap.backward(previous)
        return total
