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
        self._free: dict[bool, list[Block]] = {False: [], True: []}
        """By `Block.small`, ascending by size."""
        self._sizes: dict[bool, list[int]] = {False: [], True: []}
        """Theirs."""

    def take(self, nbytes: int) -> Block:
        """Memory of a tensor."""
        size = max(_UNIT, -(-nbytes // _UNIT) * _UNIT)
        small = size <= _MIB
        able = self._free[small]
        place = bisect.bisect_left(self._sizes[small], size)
        if place == len(able):
            block = Block(_segment(size), small)
            self.reserved += block.nbytes
        else:
            block = able.pop(place)
            del self._sizes[small][place]
            block.free = False
        over = block.nbytes - size
        if over >= _UNIT if small else over > _MIB:
            rest = Block(over, small, before=block, after=block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.nbytes, block.after = size, rest
            self._add(rest)
        return block

    def give(self, block: Block) -> None:
        """What a tensor leaves."""
        if block.after is not None and block.after.free:
            self._join(block, block.after)
        if block.before is not None and block.before.free:
            first = block.before
            self._remove(first)
            block = self._join(first, block)
        self._add(block)

    def _join(self, first: Block, second: Block) -> Block:
        if second.free:
            self._remove(second)
        first.nbytes += second.nbytes
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        return first

    def _add(self, block: Block) -> None:
        block.free = True
        place = bisect.bisect_right(self._sizes[block.small], block.nbytes)
        self._sizes[block.small].insert(place, block.nbytes)
        self._free[block.small].insert(place, block)

    def _remove(self, block: Block) -> None:
        block.free = False
        able = self._free[block.small]
        place = bisect.bisect_left(self._sizes[block.small], block.nbytes)
        while able[place] is not block:  # of its size
            place += 1
        del able[place], self._sizes[block.small][place]


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
