"""What torch's caching allocator takes from a device for the tensors of one stream.

It asks the device for segments, cuts from them what tensors need, joins what they leave, and gives
nothing back: a tensor that finds no free block as large takes a new segment, whatever is free in
smaller ones. The rules are those of c10/cuda/CUDACachingAllocator.cpp by default: blocks are whole
512 bytes; up to 1 MiB they are cut from segments of 2 MiB, below 10 MiB from segments of 20 MiB,
and larger ones get segments of their own size in whole 2 MiB; the smallest block that is large
enough is taken, and what it has over is cut off.
"""

from dataclasses import dataclass

_MIB = 2**20
_UNIT = 512


@dataclass(eq=False)
class Block:
    """A part of a segment."""

    nbytes: int
    small: bool
    """Of a segment for blocks up to 1 MiB."""
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
        self._free: list[Block] = []

    def take(self, nbytes: int) -> Block:
        """Memory of a tensor."""
        size = max(_UNIT, -(-nbytes // _UNIT) * _UNIT)
        small = size <= _MIB
        able = [b for b in self._free if b.small == small and b.nbytes >= size]
        block = min(able, key=lambda b: b.nbytes, default=None)
        if block is None:
            block = Block(_segment(size), small)
            self.reserved += block.nbytes
        else:
            self._free.remove(block)
        over = block.nbytes - size
        if over >= _UNIT if small else over > _MIB:
            rest = Block(over, small, block, block.after)
            if rest.after is not None:
                rest.after.before = rest
            block.nbytes, block.after = size, rest
            self._free.append(rest)
        return block

    def give(self, block: Block) -> None:
        """What a tensor leaves."""
        if block.after in self._free:
            self._join(block, block.after)
        if block.before in self._free:
            block = self._join(block.before, block)
        if block not in self._free:
            self._free.append(block)

    def _join(self, first: Block, second: Block) -> Block:
        if second in self._free:
            self._free.remove(second)
        first.nbytes += second.nbytes
        first.after = second.after
        if first.after is not None:
            first.after.before = first
        return first


def _segment(size: int) -> int:
    if size <= _MIB:
        return 2 * _MIB
    return 20 * _MIB if size < 10 * _MIB else -(-size // (2 * _MIB)) * 2 * _MIB
