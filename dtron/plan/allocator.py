"""Model of torch's caching allocator: the device memory it reserves for the tensors of one stream.

The allocator requests segments from the device, splits them into blocks for tensors, and merges
freed blocks. It returns no memory in a step: if no free block is large enough for a tensor, it
requests a new segment, however much memory is free in smaller blocks. `Pool` has the default rules
of c10/cuda/CUDACachingAllocator.cpp. Block sizes are multiples of 512 bytes. Blocks up to 1 MiB are
split from segments of 2 MiB, blocks below 10 MiB from segments of 20 MiB; larger blocks get a
segment of their size, rounded up to 2 MiB. A tensor gets the smallest free block that is large
enough; the rest of the block is split off.

With `PYTORCH_ALLOC_CONF=expandable_segments:True` there is one segment for blocks up to 1 MiB and
one for larger blocks. They grow at their ends (`Expandable`).
"""

import bisect
import itertools
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

_MIB = 2**20
_UNIT = 512


@dataclass(eq=False, slots=True)
class Block:
    """A contiguous part of a segment."""

    nbytes: int
    small: bool
    """Whether the block is in a segment for blocks up to 1 MiB."""
    free: bool = False
    before: "Block | None" = None
    after: "Block | None" = None
    """The previous block (`before`) and the next block (`after`) in the segment."""
    kind: str = ""
    """Memory class of the tensor in the block; only `HolelessPool` sets it."""


class Pool:
    """Memory pool of one stream, by the default rules.

    Attributes:
        reserved: bytes requested from the device.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._large, self._small = _FreeBlocks(), _FreeBlocks()

    def take(self, nbytes: int, kind: str = "") -> Block:
        """Allocate the memory of a tensor."""
        size = -(-nbytes // _UNIT) * _UNIT or _UNIT
        small = size <= _MIB
        free = self._small if small else self._large
        same = free.blocks.get(size)
        if same is None:
            found = free.larger(size)
            if found is None:
                block = Block(_segment(size), small)
                self.reserved += block.nbytes
            else:
                block = free.first(found)
        elif len(same) > 1:  # `first`, inlined: this is the inner loop
            block = same.pop(0)
            block.free = False
            return block
        else:
            return free.first(size)
        over = block.nbytes - size
        if over >= _UNIT if small else over > _MIB:
            rest = Block(over, small, before=block, after=block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.nbytes, block.after = size, rest
            free.add(rest)
        return block

    def give(self, block: Block) -> None:
        """Free the block of a tensor."""
        free = self._small if block.small else self._large
        after, before = block.after, block.before
        if after is not None and after.free:
            free.remove(after)
            _join(block, after)
        if before is not None and before.free:
            free.remove(before)
            _join(before, block)
            block = before
        block.free = True
        same = free.blocks.get(block.nbytes)
        if same is None:
            free.add(block)
        else:
            same.append(block)

    @property
    def unused(self) -> int:
        """Bytes of segments without a tensor, which `torch.cuda.empty_cache` returns."""
        each = (block for free in (self._large, self._small) for block in free)
        return sum(block.nbytes for block in each if block.before is block.after is None)


class _FreeBlocks:
    """Free blocks by size; blocks of one size in the order in which they were freed."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        """Sizes of free blocks, ascending."""
        self.blocks: dict[int, list[Block]] = {}

    def add(self, block: Block) -> None:
        block.free = True
        same = self.blocks.get(block.nbytes)
        if same is None:
            self.blocks[block.nbytes] = [block]
            bisect.insort(self._sizes, block.nbytes)
        else:
            same.append(block)

    def __iter__(self) -> Iterator[Block]:
        return itertools.chain.from_iterable(self.blocks.values())

    def larger(self, size: int) -> int | None:
        """Return the size of the smallest free block with at least `size` bytes; None: no block."""
        place = bisect.bisect_left(self._sizes, size)
        return self._sizes[place] if place < len(self._sizes) else None

    def first(self, size: int) -> Block:
        """Remove and return the first block of a size."""
        same = self.blocks[size]
        block = same.pop(0)
        block.free = False
        if not same:
            self._forget(size)
        return block

    def remove(self, block: Block) -> None:
        block.free = False
        same = self.blocks[block.nbytes]
        same.remove(block)
        if not same:
            self._forget(block.nbytes)

    def _forget(self, size: int) -> None:
        del self.blocks[size]
        del self._sizes[bisect.bisect_left(self._sizes, size)]


def _join(first: Block, second: Block) -> None:
    """Merge the second of two adjacent blocks into the first."""
    first.nbytes += second.nbytes
    first.after = second.after
    if first.after is not None:
        first.after.before = first


@dataclass(eq=False, slots=True)
class _PlacedBlock(Block):
    at: int = 0
    """Offset in the segment, bytes."""


class Expandable:
    """Memory pool with expandable segments and the methods of `Pool`.

    For the recorded allocations of a run on a GPU, it reserves as many bytes as the GPU's allocator
    did.

    Attributes:
        reserved: bytes requested from the device.
    """

    def __init__(self) -> None:
        self._small, self._large = _GrowingSegment(2 * _MIB), _GrowingSegment(20 * _MIB)

    @property
    def reserved(self) -> int:
        return self._small.end + self._large.end

    @property
    def unused(self) -> int:
        """Bytes of pages without a tensor, which `torch.cuda.empty_cache` returns."""
        return self._small.unused + self._large.unused

    def take(self, nbytes: int, kind: str = "") -> Block:
        """Allocate the memory of a tensor."""
        size = -(-nbytes // _UNIT) * _UNIT or _UNIT
        small = size <= _MIB
        at = (self._small if small else self._large).take(size)
        return _PlacedBlock(size, small, at=at)

    def give(self, block: Block) -> None:
        """Free the block of a tensor."""
        assert isinstance(block, _PlacedBlock)
        (self._small if block.small else self._large).give(block.at, block.nbytes)


@dataclass
class _GrowingSegment:
    """A segment that grows by whole pages.

    A tensor gets the smallest free block that is large enough; of equally large blocks, the one
    with the lowest offset. The free block at the end, which can grow, is used last.
    """

    page: int
    end: int = 0
    free: list[tuple[int, int]] = field(default_factory=list)
    """(bytes, offset) of free blocks, ascending."""
    sizes: dict[int, int] = field(default_factory=dict)
    """Bytes of free blocks, by the offset of their first byte."""
    begins: dict[int, int] = field(default_factory=dict)
    """Offset of free blocks, by the offset of their end."""

    @property
    def unused(self) -> int:
        """Bytes of pages without a block."""
        whole = ((at + n) // self.page - -(-at // self.page) for n, at in self.free)
        return self.page * sum(max(0, pages) for pages in whole)

    def take(self, size: int) -> int:
        """Allocate a block; return its offset."""
        place = bisect.bisect_left(self.free, (size, 0))
        for nbytes, at in self.free[place : place + 2]:
            if at + nbytes < self.end:
                break
        else:
            at = self.begins.get(self.end, self.end)
            nbytes = self.end - at
        if nbytes:
            self._remove(at)
        if (lacking := size - nbytes) > 0:
            grown = -(-lacking // self.page) * self.page
            self.end += grown
            nbytes += grown
        if nbytes > size:
            self._add(at + size, nbytes - size)
        return at

    def give(self, at: int, nbytes: int) -> None:
        """Free a block, merging it with free blocks before and after it."""
        if at + nbytes in self.sizes:
            nbytes += self._remove(at + nbytes)
        if at in self.begins:
            at = self.begins[at]
            nbytes += self._remove(at)
        self._add(at, nbytes)

    def _add(self, at: int, nbytes: int) -> None:
        bisect.insort(self.free, (nbytes, at))
        self.sizes[at], self.begins[at + nbytes] = nbytes, at

    def _remove(self, at: int) -> int:
        nbytes = self.sizes.pop(at)
        del self.begins[at + nbytes]
        del self.free[bisect.bisect_left(self.free, (nbytes, at))]
        return nbytes


class HolelessPool:
    """Memory pool with the methods of `Pool`, but without fragmentation and rounding.

    Its `reserved` is a lower bound for any real allocator.

    Attributes:
        reserved: the largest number of bytes allocated at once.
    """

    def __init__(self) -> None:
        self.reserved = self._now = 0

    def take(self, nbytes: int, kind: str = "") -> Block:
        """Allocate the memory of a tensor."""
        self._now += nbytes
        self.reserved = max(self.reserved, self._now)
        return Block(nbytes, small=False, kind=kind)

    def give(self, block: Block) -> None:
        """Free the block of a tensor."""
        self._now -= block.nbytes


class PeakPool(HolelessPool):
    """`HolelessPool` that records the bytes of each memory class at the peak.

    Attributes:
        at_peak: bytes by memory class.
    """

    def __init__(self) -> None:
        super().__init__()
        self.at_peak: dict[str, int] = {}
        self._counts: Counter[str] = Counter()

    def take(self, nbytes: int, kind: str = "") -> Block:
        """Allocate the memory of a tensor."""
        before = self.reserved
        block = super().take(nbytes, kind)
        self._counts[kind] += nbytes
        if self.reserved > before:
            self.at_peak = dict(self._counts)
        return block

    def give(self, block: Block) -> None:
        """Free the block of a tensor."""
        self._counts[block.kind] -= block.nbytes
        super().give(block)


def _segment(size: int) -> int:
    if size <= _MIB:
        return 2 * _MIB
    return 20 * _MIB if size < 10 * _MIB else -(-size // (2 * _MIB)) * 2 * _MIB
