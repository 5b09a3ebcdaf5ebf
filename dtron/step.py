"""One optimizer step: forward and backward over the micro-batches, norm, clip, update.

Nothing here waits for the device; a non-finite gradient skips the update on every rank by a
decision taken there, and counters that the trainer reads at logging steps tell of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from dtron.data import Batch
from dtron.loss import count_labels
from dtron.models.dropout import token_keys
from dtron.optim import update
from dtron.parallelisms.fsdp import Policy, begin_micro_batch
from dtron.parallelisms.gradients import clip_scale, global_norm
from dtron.parallelisms.mesh import LOSS_AXES, Mesh

Loss = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class StepResult:
    """Scalars on the device."""

    loss: Tensor
    """This rank's share of the mean loss: summed over the loss axes it is the loss."""
    grad_norm: Tensor
    """Global norm before clipping, the same on every rank."""


class TrainStep:
    """Trains a parallelised model, a global batch a call.

    Args:
        loss: (logits (B, T, V), labels (B, T)) -> the summed loss.
        dropout_seed: seed of the dropout masks; None if the model has no dropout.
    """

    def __init__(
        self,
        model: nn.Module,
        mesh: Mesh,
        policy: Policy,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        max_grad_norm: float,
        dropout_seed: int | None,
    ) -> None:
        assert isinstance(model, FSDPModule), "the model is parallelised before it is trained"
        self.model, self.mesh, self.policy, self.optimizer = model, mesh, policy, optimizer
        self.loss, self.max_grad_norm, self.dropout_seed = loss, max_grad_norm, dropout_seed
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.skipped = torch.zeros((), dtype=torch.int64, device=mesh.device_type)
        self.skipped_in_a_row = torch.zeros_like(self.skipped)
        self.most_in_a_row = torch.zeros_like(self.skipped)

    def __call__(self, batches: Sequence[Batch], step: int, lr: float) -> StepResult:
        """Run update `step` (0-based) at learning rate `lr` on this rank's micro-batches."""
        loss = self.accumulate(batches, step)
        norm = global_norm(self.parameters, self.mesh)
        update(self.optimizer, clip_scale(norm, self.max_grad_norm), lr)
        self.optimizer.zero_grad()
        finite = norm.isfinite()
        self.skipped += ~finite
        self.skipped_in_a_row = torch.where(finite, 0, self.skipped_in_a_row + 1)
        self.most_in_a_row = torch.maximum(self.most_in_a_row, self.skipped_in_a_row)
        return StepResult(loss, norm)

    def accumulate(self, batches: Sequence[Batch], step: int) -> Tensor:
        """Forward and backward of all micro-batches; gradients are complete afterwards.

        Returns:
            This rank's share of the mean loss.
        """
        n_valid = self._count(batches)
        total = torch.zeros((), device=self.mesh.device_type)
        for i, batch in enumerate(batches):
            begin_micro_batch(self.model, self.policy, last=i == len(batches) - 1)
            logits = forward(self.model, batch, self._dropout_keys(batch, step))
            loss = self.loss(logits, batch.labels) / n_valid
            del logits  # the largest activation: backward holds what it needs
            loss.backward()
            total = total + loss.detach()
        return total

    def _count(self, batches: Sequence[Batch]) -> Tensor:
        """Labelled tokens of the whole step: at least 1, a scalar on the device."""
        n_valid = torch.stack([count_labels(batch.labels) for batch in batches]).sum()
        dist.all_reduce(n_valid, group=self.mesh.group(*LOSS_AXES))
        return n_valid.clamp(min=1)

    def _dropout_keys(self, batch: Batch, step: int) -> Tensor | None:
        if self.dropout_seed is None:
            return None
        index = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        return token_keys(self.dropout_seed, step, batch.sequence, index.expand_as(batch.tokens))


def forward(model: nn.Module, batch: Batch, dropout_keys: Tensor | None = None) -> Tensor:
    """Logits (B, T, V) of one micro-batch."""
    return model(
        batch.tokens,
        positions=batch.positions,
        documents=batch.documents,
        dropout_keys=dropout_keys,
    )


@torch.no_grad()
def evaluate(model: nn.Module, mesh: Mesh, batches: Sequence[Batch], loss: Loss) -> Tensor:
    """Mean loss of batches that are as many on every rank: a scalar, the same on every rank."""
    model.eval()
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device_type)
    for batch in batches:
        total = loss(forward(model, batch), batch.labels)
        sums += torch.stack([total.double(), count_labels(batch.labels).double()])
    model.train()
    dist.all_reduce(sums, group=mesh.group(*LOSS_AXES))
    return sums[0] / sums[1].clamp(min=1)
