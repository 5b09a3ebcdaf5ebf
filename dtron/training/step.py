"""One optimizer step: forward and backward over the micro-batches, norm, clip, update.

Nothing here waits for the device; a non-finite gradient skips the update on every rank by a
decision taken there, and counters that the trainer reads at logging steps tell of it.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.data import Batch
from dtron.faults.corruption import Compute
from dtron.models.dropout import token_keys
from dtron.parallelisms.apply import Applied
from dtron.parallelisms.context.attention import Context, Split
from dtron.parallelisms.gradients import clip_scale, global_norm
from dtron.parallelisms.mesh import LOSS_AXES, SHARE_AXES, Mesh
from dtron.parallelisms.pipeline.accumulate import Execution, MicroBatch
from dtron.run.profiler import phase
from dtron.training.loss import count_labels
from dtron.training.optim import update

Loss = Callable[[Tensor, Tensor], Tensor]


class Guard(Protocol):
    """Judges the loss of a step, on the device."""

    skips: bool
    """Whether steps that it objects to are not taken."""

    def observe(self, share: Tensor, step: int) -> Tensor:
        """Whether it objects, from this rank's share of the loss of a step (1-based)."""
        ...


@dataclass(frozen=True)
class StepResult:
    """Scalars on the device."""

    loss: Tensor
    """This rank's share of the mean loss: summed over SHARE_AXES it is the loss."""
    grad_norm: Tensor
    """Global norm before clipping, the same on every rank."""
    further_loss: Tensor
    """As the loss, of multi-token prediction: the mean over its P predictions; else 0."""


class TrainStep:
    """Trains a parallelised model, a global batch a call.

    Args:
        loss: (logits (B, T, V), labels (B, T)) -> the summed loss; where the model's head computes
            it (`Applied.loss_in_head`), what the model gives comes in place of the logits.
        dropout_seed: seed of the dropout masks; None if the model has no dropout.
        guard: may object to a step for its loss.
        after_update: what depends on the new weights, such as their float8 scales; it gets
            whether the step was taken, as a bool on the device.
        further_weight: of the loss of multi-token prediction; its gradient alone is added.
    """

    def __init__(
        self,
        execution: Execution,
        applied: Applied,
        mesh: Mesh,
        optimizer: torch.optim.Optimizer,
        loss: Loss,
        max_grad_norm: float,
        dropout_seed: int | None,
        after_update: Callable[[Tensor], None] | None = None,
        guard: Guard | None = None,
        further_weight: float = 0.0,
    ) -> None:
        self.execution, self.applied, self.mesh, self.optimizer = (
            execution,
            applied,
            mesh,
            optimizer,
        )
        self.loss, self.max_grad_norm, self.dropout_seed = loss, max_grad_norm, dropout_seed
        self.after_update, self.guard = after_update, guard
        self.further_weight = further_weight
        self.parameters = [p for _, p in applied.named_parameters() if p.requires_grad]
        self.further_loss = torch.zeros((), dtype=torch.float64, device=mesh.device_type)
        self.skipped = torch.zeros((), dtype=torch.int64, device=mesh.device_type)
        self.skipped_in_a_row = torch.zeros_like(self.skipped)
        self.most_in_a_row = torch.zeros_like(self.skipped)

    def __call__(
        self, batches: Sequence[Batch], step: int, lr: float, compute: Compute | None = None
    ) -> StepResult:
        """Run update `step` (0-based) at learning rate `lr` on this rank's micro-batches.

        Args:
            compute: calls what it is given, which computes all gradients; None: once.
        """
        with phase("forward_backward"):
            accumulate = functools.partial(self.accumulate, batches, step)
            loss = compute(accumulate) if compute else accumulate()
        with phase("optimizer"):
            norm = global_norm(self.parameters, self.mesh, self.applied.shared.copies)
            finite = taken = norm.isfinite()
            scale = clip_scale(norm, self.max_grad_norm)
            if self.guard is not None:
                spike = self.guard.observe(loss, step + 1)
                if self.guard.skips:
                    scale = torch.where(spike, torch.nan, scale)
                    taken = finite & ~spike
            update(self.optimizer, scale, lr)
            if self.after_update is not None:
                self.after_update(taken)
            self.optimizer.zero_grad()
        self.skipped += ~finite
        self.skipped_in_a_row = torch.where(finite, 0, self.skipped_in_a_row + 1)
        self.most_in_a_row = torch.maximum(self.most_in_a_row, self.skipped_in_a_row)
        return StepResult(loss, norm, self.further_loss)

    def accumulate(self, batches: Sequence[Batch], step: int) -> Tensor:
        """Forward and backward of all micro-batches; gradients are complete afterwards.

        Returns:
            This rank's share of the mean loss.
        """
        n_valid, *n_further = self._count(batches)
        self.further_loss = torch.zeros_like(self.further_loss)

        def share(output: Tensor | tuple[Tensor, ...], i: int) -> Tensor:
            with phase("loss"):
                first, *others = output if isinstance(output, tuple) else (output,)
                loss = self.loss(first, batches[i].labels) / n_valid
                if not others:
                    return loss
                labels = batches[i].further_labels
                assert labels is not None, "predictions have labels"
                sums = [self.loss(x, y) for x, y in zip(others, labels.unbind(-1), strict=True)]
                means = [total / n for total, n in zip(sums, n_further, strict=True)]
                further = torch.stack(means).mean()
                self.further_loss += further.detach()
                weighed = self.further_weight * further
                return loss + (weighed - weighed.detach())  # of no weight in what is logged

        labelled = self.applied.loss_in_head
        micro_batches = [
            as_micro_batch(batch, self._dropout_keys(batch, step), labelled) for batch in batches
        ]
        total = self.execution.train(micro_batches, share)
        self.applied.complete_gradients(self.mesh)
        return total

    def _count(self, batches: Sequence[Batch]) -> Tensor:
        """Labelled tokens of the whole step, and those of each further prediction: at least 1, on
        the device (1 + P,)."""
        counts = torch.stack([_count_all(batch) for batch in batches]).sum(0)
        dist.all_reduce(counts, group=self.mesh.group(*LOSS_AXES))
        return counts.clamp(min=1)

    def _dropout_keys(self, batch: Batch, step: int) -> Tensor | None:
        if self.dropout_seed is None:
            return None
        index = batch.index
        if index is None:
            index = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        return token_keys(self.dropout_seed, step, batch.sequence, index.expand_as(batch.tokens))


def _count_all(batch: Batch) -> Tensor:
    further = () if batch.further_labels is None else batch.further_labels.unbind(-1)
    return torch.stack([count_labels(labels) for labels in (batch.labels, *further)])


def share_of(batch: Batch, mesh: Mesh, context: Context | None, further: int = 0) -> Batch:
    """This cp rank's tokens of a batch on the host; the batch itself where cp is 1.

    Args:
        context: how attention gets at the others'.
        further: how many tokens ahead are predicted, which may be another rank's.
    """
    if further:
        batch = batch.look_ahead(further)
    cp, rank = mesh.size("cp"), mesh.rank("cp")
    if cp == 1:
        return batch
    assert context is not None, "cp > 1 needs a context"
    assert batch.documents is None or isinstance(batch.documents, Tensor)
    n_rows, length = batch.tokens.shape
    split = Split(batch.documents, (n_rows, length), cp)
    index = split.index(rank)

    def part(x: Tensor | None) -> Tensor | None:
        return None if x is None else x.gather(1, index.unsqueeze(-1).expand(-1, -1, x.shape[-1]))

    return replace(
        batch,
        tokens=batch.tokens.gather(1, index),
        labels=batch.labels.gather(1, index),
        positions=index if batch.positions is None else batch.positions.gather(1, index),
        documents=split.tables(context.layouts(cp), rank),
        index=index,
        order=torch.cat([split.index(r) for r in range(cp)], dim=1),
        pieces=None if batch.pieces is None else batch.pieces.gather(1, index),
        further_tokens=part(batch.further_tokens),
        further_labels=part(batch.further_labels),
    )


def as_micro_batch(
    batch: Batch, dropout_keys: Tensor | None = None, labelled: bool = False
) -> MicroBatch:
    """Tokens (B, T), and what every stage of the model needs beside them; with `labelled` the
    labels too, for a head that computes the loss."""
    positions = batch.positions
    if positions is None:
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).unsqueeze(0)
    others = {"positions": positions, "documents": batch.documents, "dropout_keys": dropout_keys}
    if batch.further_tokens is not None:
        others["further"] = batch.further_tokens
    if batch.order is not None:
        others["order"] = batch.order
    if batch.pieces is not None:
        others["real"] = batch.pieces >= 0
    return batch.tokens, {**others, "labels": batch.labels} if labelled else others


@torch.no_grad()
def evaluate(
    execution: Execution, applied: Applied, mesh: Mesh, batches: Sequence[Batch], loss: Loss
) -> Tensor:
    """Mean loss of batches that are as many on every rank: a scalar, the same on every rank."""
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device_type)

    def add(output: Tensor, i: int) -> None:
        labels = batches[i].labels
        total = loss(output, labels)
        sums.add_(torch.stack([total.double(), count_labels(labels).double()]))

    with applied.evaluating():
        labelled = applied.loss_in_head
        execution.evaluate([as_micro_batch(batch, labelled=labelled) for batch in batches], add)
    dist.all_reduce(sums, group=mesh.group(*SHARE_AXES))
    return sums[0] / sums[1].clamp(min=1)
