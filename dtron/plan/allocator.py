"""What torch's caching allocator takes from a device for the tensors of one stream.

It asks the device for segments, cuts from them what tensors need, joins what they leave, and gives
nothing back: a tensor that finds no free block as large takes a new segment, whatever is free in
smaller ones. The rules are those of c10/cuda/CUDACachingAllocator.cpp by default: blocks are whole
512 bytes; up to 1 MiB they are cut from segments of 2 MiB, below 10 MiB from segments of 20 MiB,
and larger ones get segments of their own size in whole 2 MiB; the smallest block that is large
enough is taken, and what it has over is cut off.
"""

import bisect
from dataclasses import dataclass

_MIB = 2**20
_UNIT = 512


@dataclass(eq=False, slots=True)
class Block:
    """A part of a segment."""

    nbytes: int
    small: bool
    """Of a segment for blocks up to 1 MiB."""
    free: bool = False
    before: "Block | None" = None
    after: "Block | None" = None
    """Neighbours in the segment."""


class Pool:
    """Memory of one stream.

    Attributes:
        reserved: bytes that were taken from the device.
    """

    def __init__(self) -> None:
        self.reserved = 0
        self._large, self._small = _Free(), _Free()

    def take(self, nbytes: int) -> Block:
        """Memory of a tensor."""
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
        elif len(same) > 1:  # as `first`, which is called too often to be a call
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
        """What a tensor leaves."""
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


class _Free:
    """Free blocks, those of a size in the order in which they came."""

    def __init__(self) -> None:
        self._sizes: list[int] = []
        """Ascending."""
        self.blocks: dict[int, list[Block]] = {}

    def add(self, block: Block) -> None:
        block.free = True
        same = self.blocks.get(block.nbytes)
        if same is None:
            self.blocks[block.nbytes] = [block]
            bisect.insort(self._sizes, block.nbytes)
        else:
            same.append(block)

    def larger(self, size: int) -> int | None:
        """The smallest size of a block that holds so many bytes."""
        place = bisect.bisect_left(self._sizes, size)
        return self._sizes[place] if place < len(self._sizes) else None

    def first(self, size: int) -> Block:
        """Take out the first block of a size."""
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
    """Neighbours become one, the first."""
    first.nbytes += second.nbytes
    first.after = second.after
    if first.after is not None:
        first.after.before = first


class Held:
    """As `Pool`, of an allocator that leaves no holes and rounds nothing: no real one needs less.

    Attributes:
        reserved: the most bytes that tensors had at once.
    """

    def __init__(self) -> None:
        self.reserved = self._now = 0

    def take(self, nbytes: int) -> Block:
        """Memory of a tensor."""
        self._now += nbytes
        self.reserved = max(self.reserved, self._now)
        return Block(nbytes, small=False)

    def give(self, block: Block) -> None:
        """What a tensor leaves."""
        self._now -= block.nbytes


def _segment(size: int) -> int:
    if size <= _MIB:
        return 2 * _MIB
    return 20 * _MIB if size < 10 * _MIB else -(-size // (2 * _MIB)) * 2 * _MIB
