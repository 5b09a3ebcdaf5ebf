"""Rows of metrics.jsonl: metrics of a step, reduced over ranks only on logging steps."""

from collections.abc import Mapping

import torch
import torch.distributed as dist

from dtron.config import RunConfig
from dtron.errors import TrainingError
from dtron.parallelisms.mesh import SHARE_AXES
from dtron.run.metrics import Row, Throughput, peak_memory_gib
from dtron.training.batches import RankBatches
from dtron.training.build import BuiltRun
from dtron.training.step import StepResult


class StepLog:
    """Collects the metrics of a run's steps; `row` is a collective.

    Args:
        host_group: process group of all ranks for CPU tensors.
    """

    def __init__(
        self,
        config: RunConfig,
        run: BuiltRun,
        batches: RankBatches,
        throughput: Throughput,
        host_group: dist.ProcessGroup,
    ) -> None:
        self.config, self.run, self.batches = config, run, batches
        self.throughput, self.host_group = throughput, host_group
        self.accuracy: dict[str, float] = {}
        """Accuracy of the current step's float8 casts, if they are measured."""
        self.recovery: dict[str, float] = {}
        """Metrics of a restart, for the next row."""

    def row(self, step: int, tokens: int, result: StepResult, lr: float) -> Row:
        """Return the metrics since the last row. Waits for the device.

        Args:
            step, tokens: numbers of steps and tokens done.
        """
        loss = self._over_ranks(result.loss)
        row: Row = {"step": step, "loss": loss, "grad_norm": result.grad_norm.item(), "lr": lr}
        row |= {"tokens": tokens, **self.throughput.read(), "memory_gib": self._peak_memory()}
        if skipped := int(self.run.step.skipped):
            row["skipped"] = skipped
        row |= self.accuracy | self.recovery
        self.recovery = {}
        if self.run.routing is not None:
            row |= self.run.routing.read()
        if self.config.metrics.batch_hash:
            row["batch"] = self.batches.read_hash(self.host_group)
        if self.batches.model.config.mtp:
            row["mtp_loss"] = self._over_ranks(result.mtp_loss)
        if self.config.data.packing != "cut":
            row["padding"] = self.batches.read_padding()
        return row

    def check_skipped(self, row: Mapping[str, object]) -> None:
        """Raise TrainingError, on all ranks, after too many steps with non-finite gradients."""
        in_a_row = int(self.run.step.most_in_a_row)
        if in_a_row >= self.config.train.max_skipped:
            raise TrainingError(
                f"the gradients of {in_a_row} steps in a row, by step {row['step']}, were not "
                f"finite (train.max_skipped = {self.config.train.max_skipped}); lower optim.lr or "
                "resume from an earlier checkpoint"
            )

    def _over_ranks(self, part: torch.Tensor) -> float:
        total = part.clone()
        dist.all_reduce(total, group=self.run.model.mesh.group(*SHARE_AXES))
        return total.item()

    def _peak_memory(self) -> float:
        """Return the maximum of all ranks' peak memory in GiB."""
        most = torch.tensor([peak_memory_gib()], dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.host_group)
        return most.item()
