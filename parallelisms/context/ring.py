"""Ring attention: blocks of keys and values are sent around a ring of ranks (arXiv:2310.01889)."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.parallelisms.context.blocks import ALL, Backward, Blocks, Forward, Pair, Where, put, take


class RingBlocks(Blocks):
    """Ring attention: keys are sent from rank to rank; results are merged by log-sum-exp."""

    def over_blocks(self, keys: Tensor, forward: Forward) -> tuple[Tensor, Tensor]:
        """Attend to each block of keys while receiving the next block; merge the results."""
        merged = Merged()
        for block, block_keys in self._ring_steps(keys):
            pair = self._pair(block)
            merged.add(pair.queries, *forward(pair, block_keys))
        return merged.out, merged.lse

    def _ring_steps(self, keys: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Yield (block, its keys) in the order of the ring, while the next keys are received."""
        for step in range(self.size):
            last = step == self.size - 1
            following, works = (keys, []) if last else self._send_receive(keys)
            yield (self.rank - step) % self.size, keys
            _wait(works)
            keys = following

    def key_gradients(self, keys: Tensor, dtype: torch.dtype, backward: Backward) -> Tensor:
        """Compute the gradients of each block's keys and sum them over the ring.

        Gradients are sent one step after their keys, until they reach the owner of the keys.
        """
        received, works = None, []
        for block, block_keys in self._ring_steps(keys):
            grads = torch.zeros_like(block_keys, dtype=dtype)
            backward(self._pair(block), block_keys, grads)
            _wait(works)
            # A local name keeps the sent tensor alive until the next wait.
            sent = grads if received is None else grads.add_(received)
            received, works = (sent, []) if self.size == 1 else self._send_receive(sent)
        _wait(works)
        assert received is not None
        return received

    def _pair(self, block: int) -> Pair:
        early, late = slice(0, self.half), slice(self.half, None)
        queries: Where = ALL
        keys: Where = ALL
        segments = None
        if self.tables:
            _, order, bounds = self.tables
            queries, keys, segments = order[self.rank], order[block], bounds[block]
        if not self.causal:
            return Pair(queries, keys, False, segments)
        if block == self.rank:
            return Pair(queries, keys, True, segments)
        if block < self.rank:
            return Pair(queries, early, False, segments)
        return Pair(late, keys, False, segments)

    def _send_receive(self, x: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """Send to the next rank and receive from the previous one, without waiting."""
        received = torch.empty_like(x)
        following, previous = (
            dist.get_global_rank(self.group, (self.rank + step) % self.size) for step in (1, -1)
        )
        return received, dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, following, self.group),
                dist.P2POp(dist.irecv, received, previous, self.group),
            ]
        )


class Merged:
    """Merges attention over several blocks of keys; all queries must attend to the first block."""

    out: Tensor
    lse: Tensor

    def __init__(self) -> None:
        self.empty = True

    def add(self, where: Where, out: Tensor, lse: Tensor) -> None:
        """Merge a block's out (., n, H, K) and log-sum-exp (., n, H) of n queries at `where`."""
        if self.empty:
            self.empty = False
            self.out, self.lse = (put(x.to(lse.dtype), where) for x in (out, lse))
            return
        previous = take(self.lse, where)
        total = torch.logaddexp(previous, lse)
        scaled = take(self.out, where) * (previous - total).exp().unsqueeze(-1)
        self.out[:, where] = scaled + out * (lse - total).exp().unsqueeze(-1)
        self.lse[:, where] = total


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
