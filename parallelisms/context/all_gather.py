"""Context parallelism with all-gathered keys and values (arXiv:2407.21783, section 3.3.2)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dtron.parallelisms.context.blocks import Backward, Blocks, Forward, Pair
from dtron.parallelisms.functional_collectives import all_gather, reduce_scatter, wait_tensor


class GatheredBlocks(Blocks):
    """Attention to all-gathered keys and values."""

    def over_blocks(self, keys: Tensor, forward: Forward) -> tuple[Tensor, Tensor]:
        """Attend to the gathered keys: early, then late queries, each up to their own end."""
        gathered = self._gather(keys)
        parts = [forward(pair, gathered) for pair in self._pairs()]
        outs, sums = zip(*parts, strict=True)
        return torch.cat(outs, dim=1), torch.cat(sums, dim=1)

    def _gather(self, keys: Tensor) -> Tensor:
        """All-gather keys (2, B, N / B, G, K) of all blocks to (2, B, T, G, K), in sequence order.

        With documents, to (2, 1, B * T, G, K), in the order of the blocks.
        """
        parts = all_gather(keys.flatten(0, 1), self.size, self.group.group_name)
        gathered = wait_tensor(parts).unflatten(0, (self.size, *keys.shape[:2]))
        if self.tables:
            return gathered.permute(1, 2, 0, 3, 4, 5).flatten(2, 3)
        early, late = gathered.unflatten(3, (2, -1)).unbind(3)  # (blocks, 2, B, half, G, K)
        return torch.cat([*early, *late.flip(0)], dim=2)

    def key_gradients(self, keys: Tensor, dtype: torch.dtype, backward: Backward) -> Tensor:
        """Compute gradients of all ranks' keys and reduce-scatter them; see `Blocks`."""
        gathered = self._gather(keys)
        grads = torch.zeros_like(gathered, dtype=dtype)
        for pair in self._pairs():
            backward(pair, gathered, grads)
        if self.tables:
            by_block = torch.stack(grads.chunk(self.size, dim=2))
        else:
            halves = grads.chunk(2 * self.size, dim=2)
            ends = zip(halves[: self.size], reversed(halves[self.size :]), strict=True)
            by_block = torch.stack([torch.cat(both, dim=2) for both in ends])
        sums = reduce_scatter(by_block.flatten(0, 2), self.size, self.group.group_name)
        return wait_tensor(sums).view(keys.shape)

    def _pairs(self) -> Iterator[Pair]:
        halves = (slice(0, self.half), slice(self.half, None))
        if self.tables:
            _, *keys, segments = self.tables
            for queries, index, bounds in zip(halves, keys, segments, strict=True):
                yield Pair(queries, index, self.causal, bounds)
            return
        ends = (self.rank + 1, 2 * self.size - self.rank) if self.causal else [2 * self.size] * 2
        for queries, end in zip(halves, ends, strict=True):
            yield Pair(queries, slice(0, end * self.half), self.causal, None)
