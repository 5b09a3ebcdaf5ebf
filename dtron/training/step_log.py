"""Rows of metrics.jsonl: metrics of a step, reduced over ranks only on logging steps."""

import logging
import math
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from dtron.config import RunConfig
from dtron.errors import TrainingError
from dtron.parallelisms.mesh import SHARE_AXES
from dtron.run.metrics import Row, Throughput, peak_memory_gib
from dtron.training.batches import RankBatches
from dtron.training.build import BuiltRun
from dtron.training.step import StepResult

log = logging.getLogger("dtron")
_WAITING = 0.1
"""Fraction of the step time from which a wait for data is logged."""
_FASTER = {
    "stream": "set data.substreams, or tokenize it before the run with dtron data prepare",
    "corpus": "copy the prepared corpus to a faster disk",
}
"""How data becomes faster, for a stream and for tokens in files."""


class StepLog:
    """Collects the metrics of a run's steps; all ranks call `row` together.

    Args:
        host_group: process group of all ranks for CPU tensors.
        sources: names of the sources of a mixture, in order; empty: no mixture.
    """

    def __init__(
        self,
        config: RunConfig,
        run: BuiltRun,
        batches: RankBatches,
        throughput: Throughput,
        host_group: dist.ProcessGroup,
        sources: Sequence[str] = (),
    ) -> None:
        self.config, self.run, self.batches = config, run, batches
        self.throughput, self.host_group, self.sources = throughput, host_group, sources
        self.accuracy: dict[str, float] = {}
        """Accuracy of the float8 casts in the current step, if they are measured."""
        self.recovery: dict[str, float] = {}
        """Recovery times after a restart, for the next row."""
        self._rows, self._warned = 0, False

    def row(self, step: int, tokens: int, result: StepResult, lr: float) -> Row:
        """Return the metrics since the previous row of metrics.jsonl. Waits for the device.

        Args:
            step, tokens: numbers of steps and tokens so far.
        """
        loss, *by_source = self._over_ranks(result.loss, *result.by_source.flatten())
        row: Row = {"step": step, "loss": loss, "grad_norm": result.grad_norm.item(), "lr": lr}
        n = len(self.sources)
        for name, total, labels in zip(self.sources, by_source[:n], by_source[n:], strict=True):
            row |= {f"loss/{name}": total / labels} if labels else {}
        memory, waited = self._most_of_ranks(peak_memory_gib(), self.batches.read_seconds())
        row |= {"tokens": tokens, **self.throughput.read(), "memory_gib": memory}
        row["data_seconds"] = waited
        self._warn_of_waiting(row)
        if skipped := int(self.run.step.skipped):
            row["skipped"] = skipped
        row |= self.accuracy | self.recovery
        self.recovery = {}
        if self.run.routing is not None:
            row |= self.run.routing.read()
        if self.config.metrics.batch_hash:
            row["batch"] = self.batches.read_hash(self.host_group)
        if self.batches.model.config.mtp:
            (row["mtp_loss"],) = self._over_ranks(result.mtp_loss)
        if self.config.data.packing != "cut":
            row["padding"] = self.batches.read_padding()
        return row

    def check_skipped(self, row: Mapping[str, object]) -> None:
        """Raise TrainingError, on all ranks, after too many steps with non-finite gradients."""
        in_a_row = int(self.run.step.most_in_a_row)
        if in_a_row >= self.config.train.max_skipped:
            raise TrainingError(
                f"the gradients of {in_a_row} steps in a row were not finite, noticed at step "
                f"{row['step']} (train.max_skipped = {self.config.train.max_skipped}); lower "
                "optim.lr or resume from an earlier checkpoint"
            )

    def _over_ranks(self, *parts: torch.Tensor) -> list[float]:
        """Return the sum over ranks of each scalar; one collective."""
        total = torch.stack(parts)
        dist.all_reduce(total, group=self.run.model.mesh.group(*SHARE_AXES))
        return total.tolist()

    def _most_of_ranks(self, *values: float) -> list[float]:
        """Return the maximum of each value over all ranks; a collective."""
        most = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.host_group)
        return most.tolist()

    def _warn_of_waiting(self, row: Row) -> None:
        """Log, once, that steps wait for data; not of the first row, whose steps open files."""
        share = (row["data_seconds"] or 0.0) / (row["seconds"] or math.inf)
        if self._rows and share > _WAITING and not self._warned:
            self._warned = True
            log.warning(
                "data: the slowest rank waits for its sequences during %.0f%% of the step time; %s",
                100 * share,
                _FASTER["stream" if self.config.data.hf_streaming else "corpus"],
            )
        self._rows += 1
