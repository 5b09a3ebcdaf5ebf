"""Attention to gathered keys; their gradients are reduce-scattered (arXiv:2407.21783, 3.3.2)."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dtron.parallelisms.context.blocks import Backward, Blocks, Forward, Pair
from dtron.parallelisms.functional_collectives import all_gather, reduce_scatter, wait_tensor


class GatheredBlocks(Blocks):
    """All keys are gathered, then attended to at once."""

    def over_blocks(self, keys: Tensor, forward: Forward) -> tuple[Tensor, Tensor]:
        """Early queries, then late ones, each over all keys before their end."""
        gathered = self._gather(keys)
        parts = [forward(pair, gathered) for pair in self._pairs()]
        outs, sums = zip(*parts, strict=True)
        return torch.cat(outs, dim=1), torch.cat(sums, dim=1)

    def _gather(self, keys: Tensor) -> Tensor:
        """(2, B, N / B, G, K) of all blocks, in the order of the sequence where there are no
        documents, else one after the other in a row: (2, 1, all, G, K)."""
        parts = all_gather(keys.flatten(0, 1), self.size, self.group.group_name)
        got = wait_tensor(parts).unflatten(0, (self.size, *keys.shape[:2]))
        if self.tables:
            return got.permute(1, 2, 0, 3, 4, 5).flatten(2, 3)
        early, late = got.unflatten(3, (2, -1)).unbind(3)  # (blocks, 2, B, half, G, K)
        return torch.cat([*early, *late.flip(0)], dim=2)

    def key_gradients(self, keys: Tensor, dtype: torch.dtype, backward: Backward) -> Tensor:
        """Gradients of all keys, reduce-scattered to the ranks that hold them."""
        gathered = self._gather(keys)
        due = torch.zeros_like(gathered, dtype=dtype)
        for pair in self._pairs():
            backward(pair, gathered, due)
        if self.tables:
            by_block = torch.stack(due.chunk(self.size, dim=2))
        else:
            halves = due.chunk(2 * self.size, dim=2)
            ends = zip(halves[: self.size], reversed(halves[self.size :]), strict=True)
            by_block = torch.stack([torch.cat(both, dim=2) for both in ends])
        sums = reduce_scatter(by_block.flatten(0, 2), self.size, self.group.group_name)
        return wait_tensor(sums).view(keys.shape)

    def _pairs(self) -> Iterator[Pair]:
        halves = (slice(0, self.half), slice(self.half, None))
        if self.tables:
            _, *keys, segments = self.tables
            for where, found, bounds in zip(halves, keys, segments, strict=True):
                yield Pair(where, found, True, bounds)
            return
        for where, end in zip(halves, (self.rank + 1, 2 * self.size - self.rank), strict=True):
            yield Pair(where, slice(0, end * self.half), True, None)
