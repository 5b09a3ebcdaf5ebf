"""Forward and backward of a step's micro-batches, on a whole model or through a pipeline.

Both executions have the same two methods, so that a training loop does not know which it runs.
`Accumulation` is for models that are not cut: one micro-batch after the other.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dtron.parallelisms.fsdp.sharding import Policy, begin_micro_batch

MicroBatch = tuple[Tensor, Mapping[str, Any]]
"""The model's first argument, and the others by name, which every stage gets."""
Loss = Callable[[Tensor, int], Tensor]
"""(output of the model, index of the micro-batch) -> a scalar to be summed and differentiated."""


class Execution(Protocol):
    """What runs a step's micro-batches."""

    def train(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> Tensor:
        """Forward and backward of all; FSDP's gradients are reduced afterwards.

        Returns:
            The sum of the losses, float64 on the device; zero on ranks without the last stage.
        """
        ...

    def evaluate(
        self, micro_batches: Sequence[MicroBatch], consume: Callable[[Tensor, int], None]
    ) -> None:
        """Forward of all without gradients; `consume` gets each output, where the last stage is."""
        ...


class Accumulation:
    """Gradient accumulation on a model that is not cut."""

    def __init__(self, model: nn.Module, policy: Policy, device: torch.device) -> None:
        assert isinstance(model, FSDPModule), "the model is parallelised before it is trained"
        self.model, self.policy, self.device = model, policy, device

    def train(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> Tensor:
        """See `Execution.train`."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        for i, (x, others) in enumerate(micro_batches):
            begin_micro_batch(self.model, self.policy, last=i == len(micro_batches) - 1)
            # Nothing holds the output, the largest activation, beyond what backward needs.
            share = loss(self.model(x, **others), i)
            share.backward()
            total = total + share.detach()
        return total

    @torch.no_grad()
    def evaluate(
        self, micro_batches: Sequence[MicroBatch], consume: Callable[[Tensor, int], None]
    ) -> None:
        """See `Execution.evaluate`."""
        for i, (x, others) in enumerate(micro_batches):
            consume(self.model(x, **others), i)
