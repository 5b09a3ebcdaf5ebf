"""Memory that the caching allocator reserves for FSDP's all-gather stream."""

import functools
from collections.abc import Sequence

from dtron.plan.allocator import Block, Pool

Gather = tuple[int, int]
"""(bytes of gathered parameters, bytes of the rank's shard after its cast; 0: no cast)."""


@functools.lru_cache(maxsize=1024)
def gathered_through(
    sizes: Sequence[Sequence[Gather]], depth: int, again: bool, stays: bool
) -> int:
    """Return the bytes that the allocator reserves for FSDP's all-gather stream.

    An all-gather's buffer is freed in the forward when the next all-gather is copied out, in the
    backward when this all-gather is copied out. The large buffers of embedding and head cannot
    reuse a block while a layer's buffer is in it.

    Args:
        sizes: all-gathers of each unit, in the order of the forward.
        depth: number of units to prefetch.
        again: whether the backward gathers units a second time.
        stays: whether the last unit is still gathered in the backward.
    """
    pool = Pool()
    for _ in range(2):  # the second step splits the first one's free blocks differently
        _forward_gathers(pool, sizes, depth)
        if again:
            _backward_gathers(pool, sizes[: len(sizes) - stays], depth)
    return pool.reserved


def _take(pool: Pool, gather: Gather) -> Block:
    whole, part = gather
    cast = pool.take(part) if part else None
    found = pool.take(whole)
    if cast is not None:
        pool.give(cast)
    return found


def _forward_gathers(pool: Pool, sizes: Sequence[Sequence[Gather]], depth: int) -> None:
    flying: dict[int, list[Block]] = {}
    copied: Block | None = None
    for i in range(len(sizes)):
        for place, block in enumerate(flying.pop(i, None) or [_take(pool, g) for g in sizes[i]]):
            if copied is not None:
                pool.give(copied)
            copied = block
            for ahead in range(i + 1, min(i + 1 + depth, len(sizes))) if place == 0 else ():
                if ahead not in flying:
                    flying[ahead] = [_take(pool, g) for g in sizes[ahead]]
    if copied is not None:
        pool.give(copied)


def _backward_gathers(pool: Pool, sizes: Sequence[Sequence[Gather]], depth: int) -> None:
    flying: dict[int, list[Block]] = {}
    for i in reversed(range(len(sizes))):
        for block in flying.pop(i, None) or [_take(pool, g) for g in sizes[i]]:
            pool.give(block)
        for behind in range(i - 1, max(-1, i - 1 - depth), -1):
            if behind not in flying:
                flying[behind] = [_take(pool, g) for g in sizes[behind]]
