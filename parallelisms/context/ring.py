"""Ring attention (arXiv:2310.01889): blocks of keys are sent from rank to rank."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.parallelisms.context.blocks import ALL, Backward, Blocks, Forward, Pair, Where, put, take


class RingBlocks(Blocks):
    """Keys are sent around a ring; results are merged by their log-sum-exp."""

    def over_blocks(self, keys: Tensor, forward: Forward) -> tuple[Tensor, Tensor]:
        """Each block while the next one is being received."""
        merged = Merged()
        for block, at_hand in self._round(keys):
            pair = self._pair(block)
            merged.add(pair.queries, *forward(pair, at_hand))
        return merged.out, merged.lse

    def _round(self, keys: Tensor) -> Iterator[tuple[int, Tensor]]:
        """Blocks as they come by, each while the next one is on its way."""
        for step in range(self.size):
            last = step == self.size - 1
            coming, works = (keys, []) if last else self._pass_on(keys)
            yield (self.rank - step) % self.size, keys
            _wait(works)
            keys = coming

    def key_gradients(self, keys: Tensor, dtype: torch.dtype, backward: Backward) -> Tensor:
        """A block's gradients follow it, one step behind, and end where it began."""
        coming, works = None, []
        for block, at_hand in self._round(keys):
            due = torch.zeros_like(at_hand, dtype=dtype)
            backward(self._pair(block), at_hand, due)
            _wait(works)
            sent = due if coming is None else due.add_(coming)  # held until it has been waited for
            coming, works = (sent, []) if self.size == 1 else self._pass_on(sent)
        _wait(works)
        assert coming is not None
        return coming

    def _pair(self, block: int) -> Pair:
        early, late = slice(0, self.half), slice(self.half, None)
        own: Where = ALL
        theirs: Where = ALL
        segments = None
        if self.tables:
            _, order, bounds = self.tables
            own, theirs, segments = order[self.rank], order[block], bounds[block]
        if block == self.rank:
            return Pair(own, own, True, segments)
        if block < self.rank:
            return Pair(own, early, False, segments)
        return Pair(late, theirs, False, segments)

    def _pass_on(self, x: Tensor) -> tuple[Tensor, list[dist.Work]]:
        """Send to the next rank and receive from the one before, without waiting."""
        got = torch.empty_like(x)
        following, before = (
            dist.get_global_rank(self.group, (self.rank + step) % self.size) for step in (1, -1)
        )
        return got, dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, following, self.group),
                dist.P2POp(dist.irecv, got, before, self.group),
            ]
        )


class Merged:
    """Attention over several blocks of keys, put together; the first one is seen by all queries."""

    out: Tensor
    lse: Tensor

    def __init__(self) -> None:
        self.empty = True

    def add(self, where: Where, out: Tensor, lse: Tensor) -> None:
        """Merge out (., n, H, K) and lse (., n, H) of some queries with what they have."""
        if self.empty:
            self.empty = False
            self.out, self.lse = (put(x.to(lse.dtype), where) for x in (out, lse))
            return
        before = take(self.lse, where)
        total = torch.logaddexp(before, lse)
        kept = take(self.out, where) * (before - total).exp().unsqueeze(-1)
        self.out[:, where] = kept + out * (lse - total).exp().unsqueeze(-1)
        self.lse[:, where] = total


def _wait(works: Sequence[dist.Work]) -> None:
    for work in works:
        work.wait()
