"""This rank's batches on its device, and their metrics for the log."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.data import Batch, Loader
from dtron.data.batch_hash import BITS, fingerprint
from dtron.models.config import DecoderConfig
from dtron.parallelisms.context.apply import Context
from dtron.parallelisms.context.split import Split
from dtron.parallelisms.mesh import BATCH_AXES, Mesh
from dtron.setup.preflight import ModelSetup


class RankTokens:
    """Selects this rank's tokens of whole sequences.

    Args:
        context: settings of context-parallel attention; None with cp = 1.
    """

    def __init__(self, mesh: Mesh, context: Context | None, model: ModelSetup) -> None:
        self.mesh, self.context, self.model = mesh, context, model
        self.device = torch.device(mesh.device_type)

    def prepare(self, batch: Batch, mtp: int = 0) -> Batch:
        """Return this rank's tokens of a batch on its device; `mtp`: number of MTP predictions."""
        local = shard_batch(batch, self.mesh, self.context, mtp)
        documents = self.model.attention.described(local.documents)
        config = self.model.config
        if not config.n_experts:  # the forward of a model without routers may lack both
            order = local.order if config.has_recurrent_layers else None
            local = replace(local, pieces=None, order=order)
        if config.vision_layers:
            local = local.with_images(config.vision_image_size)
        return replace(local, documents=documents).to(self.device)


class RankBatches(RankTokens):
    """Loads the micro-batches of this rank, step by step.

    Args:
        context: settings of context-parallel attention; None with cp = 1.
        hashed: whether to hash all batches, for `read_hash`.
    """

    def __init__(
        self, loader: Loader, mesh: Mesh, context: Context | None, model: ModelSetup, hashed: bool
    ) -> None:
        super().__init__(mesh, context, model)
        self.loader = loader
        self._hashed, self._hash, self._n_padding, self._n_tokens = hashed, 0, 0, 0
        self._data_seconds, self._steps = 0.0, 0

    def next_step(self) -> tuple[list[Batch], float, float]:
        """Return this rank's micro-batches of the next step, and two measures of their FLOPs.

        These are their attended length (see `attended_length`) and their images per token.
        """
        begin = time.perf_counter()
        batches = self.loader.step()
        self._data_seconds += time.perf_counter() - begin
        self._steps += 1
        attended = attended_length(batches, self.model.config)
        images = sum(len(batch.images) for batch in batches if batch.images is not None)
        n_tokens = sum(batch.tokens.numel() for batch in batches)
        self._n_padding += sum(batch.padding for batch in batches)
        self._n_tokens += n_tokens
        if self._hashed:
            self._hash += fingerprint(batches)
        local = [self.prepare(batch, self.model.config.mtp) for batch in batches]
        return local, attended, images / n_tokens

    def read_hash(self, group: dist.ProcessGroup) -> int:
        """Return the hash of all ranks' sequences since the previous call; a collective.

        Args:
            group: process group of all ranks for CPU tensors.
        """
        counted = self.mesh.rank("pp", "cp", "tp") == 0  # other ranks have the same sequences
        total = torch.tensor([(self._hash if counted else 0) % 2**BITS])
        dist.all_reduce(total, group=group)
        self._hash = 0
        return int(total) % 2**BITS

    def read_seconds(self) -> float:
        """Return the seconds per step that this rank waited for data since the previous call."""
        seconds = self._data_seconds / max(self._steps, 1)
        self._data_seconds, self._steps = 0.0, 0
        return seconds

    def read_padding(self) -> float:
        """Return the fraction of padding, over all ranks, since the previous call; a collective."""
        counts = torch.tensor(
            [self._n_padding, self._n_tokens], dtype=torch.float64, device=self.device
        )
        dist.all_reduce(counts, group=self.mesh.group(*BATCH_AXES))
        self._n_padding = self._n_tokens = 0
        return (counts[0] / counts[1]).item()


def shard_batch(batch: Batch, mesh: Mesh, context: Context | None, mtp: int = 0) -> Batch:
    """Select this cp rank's tokens of a batch on the host; with cp = 1, all tokens.

    Args:
        batch: whole sequences (B sequences, T tokens).
        context: settings of context-parallel attention; None with cp = 1.
        mtp: number of MTP predictions, whose tokens may be on another rank.
    Returns:
        A batch (B, T / cp).
    """
    if mtp:
        batch = batch.look_ahead(mtp)
    cp, rank = mesh.size("cp"), mesh.rank("cp")
    if cp == 1:
        return batch
    assert context is not None, "cp > 1 needs a context"
    assert batch.documents is None or isinstance(batch.documents, Tensor)
    n_rows, length = batch.tokens.shape
    split = Split(batch.documents, (n_rows, length), cp)
    index = split.index(rank)

    def shard(x: Tensor | None) -> Tensor | None:
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
        mtp_tokens=shard(batch.mtp_tokens),
        mtp_labels=shard(batch.mtp_labels),
        image_index=shard(batch.image_index),
    )


def attended_length(batches: Sequence[Batch], config: DecoderConfig) -> float:
    """Return the attended length for FLOP counts: 2 * (mean number of keys per query) - 1.

    The mean is over layers, by the width of their heads, and tokens. A causal query in a document
    of L tokens sees (L + 1) / 2 keys on average, so the result is L; for several documents it is
    sum(L^2) / sum(L). Sliding windows reduce it.
    """
    # A token at position p sees p + 1 keys; the sum of 2 (p + 1) - 1 over p < L is L^2.
    positions, sizes = [_positions(batch) for batch in batches], config.head_sizes
    total = 0.0
    for (window, size), layers in Counter(zip(config.windows, sizes, strict=True)).items():
        seen = [(p + 1).clamp(max=window) if window else p + 1 for p in positions]
        mean = sum((2 * keys.double() - 1).mean().item() for keys in seen) / len(batches)
        total += mean * layers * size
    return total / sum(sizes)


def _positions(batch: Batch) -> Tensor:
    return torch.arange(batch.tokens.shape[1]) if batch.positions is None else batch.positions
