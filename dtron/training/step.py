"""One optimizer step: forward and backward of the micro-batches, norm, clipping, update.

The host never waits for the device. Updates with non-finite gradients are skipped and counted on
the device, with the same result on all ranks. If experts drop tokens in a step, the updates of this
step and of all later steps are skipped too, without being counted, until `Repeats` repeats them.
"""

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.data import Batch
from dtron.faults.corruption import Compute
from dtron.models.dropout import token_keys
from dtron.parallelisms.apply import Applied
from dtron.parallelisms.cuda_graph import GradientGraph
from dtron.parallelisms.gradients import clip_scale, global_norm
from dtron.parallelisms.mesh import LOSS_AXES, SHARE_AXES, Mesh
from dtron.parallelisms.pipeline.accumulate import Execution, MicroBatch
from dtron.run.profiler import phase
from dtron.training.loss import IGNORE, count_labels
from dtron.training.optim import update

log = logging.getLogger("dtron")
LossFunction = Callable[[Any, Tensor], Tensor]
MOST_KEPT = 16
"""Steps whose batches are kept at most to repeat them; then the host waits for the device."""


class Guard(Protocol):
    """Detects bad losses on the device."""

    skips: bool
    """Whether steps with a bad loss are skipped."""

    def observe(self, partial_loss: Tensor, step: int) -> Tensor:
        """Return whether the loss of a step (1-based) is bad: a bool scalar on the device.

        Args:
            partial_loss: this rank's partial loss; the sum over SHARE_AXES is the loss.
        """
        ...

    def forget(self, step: int) -> None:
        """Forget results of steps from `step` (1-based) on, which are repeated."""
        ...


@dataclass(frozen=True)
class StepResult:
    """Results of a step: scalars on the device."""

    loss: Tensor
    """This rank's partial mean loss; the sum over SHARE_AXES is the loss."""
    grad_norm: Tensor
    """Global norm before clipping, the same on every rank."""
    mtp_loss: Tensor
    """This rank's partial mean loss of the P multi-token predictions; 0 without MTP."""
    by_source: Tensor
    """float64 (2, S): this rank's sums, over sequences of each of S sources, of their losses and of
    their labels; the sum over SHARE_AXES is that of the step. S = 0 without a mixture."""


@dataclass(frozen=True)
class ParallelModel:
    """A parallelised model, its execution of micro-batches, and its loss."""

    applied: Applied
    execution: Execution
    mesh: Mesh
    loss: LossFunction
    """(logits (B, T, V), labels (B, T)) -> summed loss of each sequence (B,). If the head computes
    losses (`Applied.loss_in_head`), it is called in evaluations only, with the model's output."""


class TrainStep:
    """Trains a parallel model, one global batch per call.

    Args:
        dropout_seed: seed of the dropout masks; None if the model has no dropout.
        mtp_weight: weight of the loss of multi-token prediction, which contributes gradient only;
            the logged loss is unchanged.
        guard: detects bad losses and may skip their steps.
        after_update: function that is called after each step to update state that depends on
            weights, such as float8 scales. Its argument is a bool scalar on the device: False if
            the step was skipped. None: the weights were initialized or loaded.

    Attributes:
        graph: computes the gradients as a CUDA graph; None: without one.
    """

    def __init__(
        self,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float,
        dropout_seed: int | None = None,
        mtp_weight: float = 0.0,
        guard: Guard | None = None,
        after_update: Callable[[Tensor | None], None] | None = None,
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.max_grad_norm, self.dropout_seed, self.mtp_weight = (
            max_grad_norm,
            dropout_seed,
            mtp_weight,
        )
        self.after_update, self.guard = after_update, guard
        self.graph: GradientGraph | None = None
        self.parameters = [p for _, p in model.applied.named_parameters() if p.requires_grad]
        device = model.mesh.device_type
        self.mtp_loss = torch.zeros((), dtype=torch.float64, device=device)
        self.by_source = torch.zeros((2, 0), dtype=torch.float64, device=device)
        self.skipped = torch.zeros((), dtype=torch.int64, device=device)
        self.skipped_in_a_row = torch.zeros_like(self.skipped)
        self.most_in_a_row = torch.zeros_like(self.skipped)
        self.first_dropped = torch.zeros_like(self.skipped)
        """The first step (1-based) that dropped tokens of experts on any rank; 0: no step did. From
        that step on no update is taken until it is set to 0."""
        dispatcher = model.applied.dispatcher
        self.drops = dispatcher is not None and dispatcher.dropped(self.skipped.device) is not None
        """Whether a step can drop tokens of experts."""

    def __call__(
        self, batches: Sequence[Batch], step: int, lr: float, compute: Compute | None = None
    ) -> StepResult:
        """Run update `step` (0-based) at learning rate `lr` on this rank's micro-batches.

        Args:
            compute: function that runs the gradient computation, perhaps twice; None: run it once.
        """
        with phase("forward_backward"):
            if compute:
                loss = compute(functools.partial(self._accumulate, batches, step))
            else:
                loss = self._accumulate(batches, step)
        with phase("optimizer"):
            norm = global_norm(self.parameters, self.model.mesh, self.model.applied.shared.copies)
            dropped = self._dropped(step + 1)
            if self.drops:
                norm, loss = (torch.where(dropped, torch.nan, x) for x in (norm, loss))
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
        self.skipped += ~finite & ~dropped
        in_a_row = torch.where(finite, 0, self.skipped_in_a_row + 1)
        self.skipped_in_a_row = torch.where(dropped, self.skipped_in_a_row, in_a_row)
        self.most_in_a_row = torch.maximum(self.most_in_a_row, self.skipped_in_a_row)
        return StepResult(loss, norm, self.mtp_loss, self.by_source)

    def _dropped(self, step: int) -> Tensor:
        """Return whether a rank has dropped tokens up to this step (1-based), a bool scalar."""
        if not self.drops:
            return self.first_dropped > 0
        dispatcher = self.model.applied.dispatcher
        assert dispatcher is not None, "it drops"
        own = dispatcher.dropped(self.skipped.device)
        assert own is not None, "it drops"
        dropped = own.long()
        dist.all_reduce(dropped, op=dist.ReduceOp.MAX)
        first = torch.where(self.first_dropped > 0, self.first_dropped, step)
        self.first_dropped = first * dropped
        return dropped > 0

    def _accumulate(self, batches: Sequence[Batch], step: int) -> Tensor:
        """Do the same as `accumulate`, by the CUDA graph if there is one."""
        if self.graph is None:
            return self.accumulate(batches, step)

        def compute(batches: Sequence[Batch], step: Tensor) -> tuple[Tensor, ...]:
            return self.accumulate(batches, step), self.mtp_loss, self.by_source

        loss, self.mtp_loss, self.by_source = self.graph(compute, batches, step)
        return loss

    def accumulate(self, batches: Sequence[Batch], step: int | Tensor) -> Tensor:
        """Run forward and backward of all micro-batches, and complete the gradients.

        Args:
            step: number of the step, from 0; an int64 scalar on the device in a CUDA graph.
        Returns:
            This rank's partial mean loss.
        """
        counts = self._global_label_counts(batches)
        self.mtp_loss = torch.zeros_like(self.mtp_loss)
        sources = batches[0].sources
        n_sources = 0 if sources is None else sources.shape[1]
        self.by_source = self.by_source.new_zeros(2, n_sources)
        applied = self.model.applied
        weights = self._loss_weights(counts)

        def mean_loss(output: Tensor | tuple[Tensor, ...], i: int) -> Tensor:
            with phase("loss"):
                objective, losses = self._losses(output, batches[i], weights)
                self._add_by_source(losses[0], batches[i])
                if len(counts) == 1:
                    return objective / counts[0]
                means = losses.sum(1) / counts
                self.mtp_loss += means[1:].mean()
                return means[0] + (objective - objective.detach())  # the gradient of all losses

        micro_batches = [
            as_micro_batch(
                batch, self._dropout_keys(batch, step), applied.loss_in_head, loss_weights=weights
            )
            for batch in batches
        ]
        total = self.model.execution.train(micro_batches, mean_loss)
        applied.complete_gradients(self.model.mesh)
        return total

    def _loss_weights(self, counts: Tensor) -> Tensor:
        """Return the weights of the predictions' summed losses in the objective: (1 + P,).

        P is the number of multi-token predictions.
        """
        weights = counts.double().reciprocal()
        weights[1:] *= self.mtp_weight / max(1, len(weights) - 1)
        return weights

    def _losses(
        self, output: Tensor | tuple[Tensor, ...], batch: Batch, weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the loss to differentiate, and the losses of all predictions without a gradient.

        Args:
            output: logits (B, T, V / tp), or a tuple of those of 1 + P predictions. If the head
                computes the losses, these: see `HeadLoss`.
            weights: (1 + P,), from `_loss_weights`.
        Returns:
            (the summed loss, with MTP weighted: a scalar; losses of sequences (1 + P, B)).
        """
        if self.model.applied.loss_in_head:
            objective, losses = output
            return objective, losses.detach().view(len(weights), -1)
        if isinstance(output, Tensor):
            losses = self.model.loss(output, batch.labels)
            return losses.sum(), losses.detach().unsqueeze(0)
        assert batch.mtp_labels is not None, "predictions have labels"
        labels = (batch.labels, *batch.mtp_labels.unbind(-1))
        losses = torch.stack([self.model.loss(x, y) for x, y in zip(output, labels, strict=True)])
        return (losses.sum(1) * weights).sum(), losses.detach()

    def _add_by_source(self, losses: Tensor, batch: Batch) -> None:
        """Add losses (B,) of sequences, and their numbers of labels, to those of their sources."""
        if batch.sources is not None:
            labels = (batch.labels != IGNORE).sum(1)
            each = torch.stack([losses.double(), labels.double()]).unsqueeze(-1)
            self.by_source += torch.where(batch.sources, each, 0.0).sum(1)

    def _global_label_counts(self, batches: Sequence[Batch]) -> Tensor:
        """Count the labels of the step on all ranks, for the next token and P MTP predictions.

        Returns:
            (1 + P,) on the device, each at least 1.
        """
        counts = torch.stack([_label_counts(batch) for batch in batches]).sum(0)
        dist.all_reduce(counts, group=self.model.mesh.group(*LOSS_AXES))
        return counts.clamp(min=1)

    def _dropout_keys(self, batch: Batch, step: int | Tensor) -> Tensor | None:
        if self.dropout_seed is None:
            return None
        index = batch.index
        if index is None:
            index = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
        return token_keys(self.dropout_seed, step, batch.sequence, index.expand_as(batch.tokens))


class Repeats:
    """Repeats the steps that were skipped because experts dropped tokens.

    The host does not wait to learn whether a step drops tokens. It keeps the arguments of each step
    until `run`, which raises the dispatcher's capacity and repeats the skipped steps in order. The
    weights are still those before the first of them, so the run equals one that had this capacity
    from its start.

    All ranks call every method together. With dispatchers that never drop tokens it does nothing.

    Args:
        compiling: function that is called after the capacity was raised, which compiles blocks
            again, and after each repeated step.
    """

    def __init__(
        self, step: TrainStep, device: torch.device, compiling: Callable[[], None] = lambda: None
    ) -> None:
        self.step, self.device, self.compiling = step, device, compiling
        self._kept: list[tuple[Sequence[Batch], int, float, Compute | None]] = []

    @property
    def full(self) -> bool:
        """Whether `run` must be called before the next step."""
        return len(self._kept) == MOST_KEPT

    def keep(
        self, batches: Sequence[Batch], step: int, lr: float, compute: Compute | None = None
    ) -> None:
        """Keep the arguments of the call of `TrainStep` that has just returned."""
        if self.step.drops:
            self._kept.append((batches, step, lr, compute))

    def run(self) -> StepResult | None:
        """Wait for the device; repeat steps until none drops tokens.

        Returns:
            The result of the latest step, if it was repeated.
        Raises:
            TrainingError: as `Dispatcher.grow`; on all ranks.
        """
        kept, self._kept, result = self._kept, [], None
        while kept and (first := int(self.step.first_dropped)):
            last = kept[-1][1] + 1
            steps = f"step {first} is" if first == last else f"steps {first} to {last} are"
            self._raise_capacity(f"{steps} repeated")
            if self.step.guard is not None:
                self.step.guard.forget(first)
            for arguments in kept:
                if arguments[1] + 1 >= first:
                    result = self.step(*arguments)
                    self.compiling()
        return result

    def discard(self) -> None:
        """Discard the kept steps, because a checkpoint of an earlier step replaces the weights."""
        self._kept = []
        if int(self.step.first_dropped):
            self._raise_capacity("the steps are discarded")

    def _raise_capacity(self, then: str) -> None:
        dispatcher = self.step.model.applied.dispatcher
        assert dispatcher is not None, "it has dropped tokens"
        log.warning("%s; %s", dispatcher.grow(self.device), then)
        if self.step.graph is not None:
            self.step.graph.discard()  # it has the buffers of the former capacity
        self.step.first_dropped.zero_()
        self.compiling()


def _label_counts(batch: Batch) -> Tensor:
    mtp = () if batch.mtp_labels is None else batch.mtp_labels.unbind(-1)
    return torch.stack([count_labels(labels) for labels in (batch.labels, *mtp)])


def as_micro_batch(
    batch: Batch,
    dropout_keys: Tensor | None = None,
    labelled: bool = False,
    loss_weights: Tensor | None = None,
) -> MicroBatch:
    """Return tokens (B, T), and the keyword arguments of every pipeline stage.

    Args:
        labelled: whether to add the labels, for a head that computes the loss.
        loss_weights: (1 + P,), added with the labels of multi-token prediction.
    """
    positions = batch.positions
    if positions is None:
        positions = torch.arange(batch.tokens.shape[1], device=batch.tokens.device).unsqueeze(0)
    others = {"positions": positions, "documents": batch.documents, "dropout_keys": dropout_keys}
    if batch.mtp_tokens is not None:
        others["mtp_tokens"] = batch.mtp_tokens
    if batch.order is not None:
        others["order"] = batch.order
    if batch.images is not None:
        others |= {"images": batch.images, "image_index": batch.image_index}
    if batch.encoder_tokens is not None:
        others["encoder_tokens"] = batch.encoder_tokens
    if batch.pieces is not None:
        others["real"] = batch.pieces >= 0
    if labelled and batch.mtp_labels is not None:
        others["labels"] = torch.cat([batch.labels.unsqueeze(-1), batch.mtp_labels], -1)
        others["loss_weights"] = loss_weights
    elif labelled:
        others["labels"] = batch.labels
    return batch.tokens, others


@torch.no_grad()
def evaluate(model: ParallelModel, batches: Sequence[Batch]) -> Tensor:
    """Compute the mean loss of batches: a float64 scalar, equal on all ranks.

    All ranks must pass the same number of batches.
    """
    sums = torch.zeros(2, dtype=torch.float64, device=model.mesh.device_type)

    def add(output: Tensor, i: int) -> None:
        labels = batches[i].labels
        total = model.loss(output, labels).sum()
        sums.add_(torch.stack([total.double(), count_labels(labels).double()]))

    with model.applied.evaluating():
        labelled = model.applied.loss_in_head
        micro_batches = [as_micro_batch(batch, labelled=labelled) for batch in batches]
        model.execution.evaluate(micro_batches, add)
    dist.all_reduce(sums, group=model.mesh.group(*SHARE_AXES))
    return sums[0] / sums[1].clamp(min=1)
