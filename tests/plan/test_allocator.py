"""The caching allocator's rules, and what the streams of gathers take by them."""

from dtron.plan.allocator import Expandable, Pool
from dtron.plan.gather_buffers import gathered_through

MIB = 2**20
LAYER, LARGE = (100 * MIB, 0), (300 * MIB, 0)


def test_segments_are_as_large_as_the_rules_say() -> None:
    for size, segment in ((1, 2), (MIB, 2), (MIB + 1, 20), (9 * MIB, 20), (11 * MIB, 12)):
        pool = Pool()
        pool.take(size)
        assert pool.reserved == segment * MIB


def test_what_is_left_is_cut_and_joined_again() -> None:
    pool = Pool()
    whole = pool.take(100 * MIB)
    pool.give(whole)
    parts = [pool.take(n * MIB) for n in (30, 30, 40)]
    assert pool.reserved == 100 * MIB
    for part in (parts[0], parts[2], parts[1]):  # the one between joins both
        pool.give(part)
    pool.take(100 * MIB)
    assert pool.reserved == 100 * MIB


def test_the_smallest_block_that_is_large_enough_is_taken() -> None:
    pool = Pool()
    for block in [pool.take(n * MIB) for n in (100, 40, 60)]:
        pool.give(block)
    assert pool.take(50 * MIB).nbytes == 50 * MIB  # of 60
    assert pool.take(100 * MIB).nbytes == 100 * MIB
    assert pool.reserved == 200 * MIB


def test_expandable_segments_grow_at_their_ends() -> None:
    """In MiB; large ones by pages of 20.

    take 30, 50, 30     one segment, of 40, then 80, then 120, of which 110 are taken
    give 50, then 30    80 are free at the beginning
    take 60             of these; 20 are left
    take 40             does not fit there: of the 10 at the end, and 40 more, which end with 10
    take 10             of the 20, though the end is as large
    give all            160, all of it free
    take 150            fits
    """
    pool = Expandable()
    first, second, third = (pool.take(n * MIB) for n in (30, 50, 30))
    assert pool.reserved == 120 * MIB
    pool.give(second)
    pool.give(first)
    fourth = pool.take(60 * MIB)
    assert pool.reserved == 120 * MIB
    fifth = pool.take(40 * MIB)
    assert pool.reserved == 160 * MIB
    sixth = pool.take(10 * MIB)
    assert [pool._large.sizes[at] for at in (70 * MIB, 150 * MIB)] == [10 * MIB, 10 * MIB]
    for block in (third, fifth, sixth, fourth):
        pool.give(block)
    assert pool._large.free == [(160 * MIB, 0)]
    pool.take(150 * MIB)
    assert pool.reserved == 160 * MIB


def test_expandable_segments_of_small_tensors_are_apart() -> None:
    pool = Expandable()
    pool.give(pool.take(100 * MIB))
    small = [pool.take(MIB) for _ in range(3)]
    assert pool.reserved == (100 + 4) * MIB
    pool.give(small[1])
    pool.take(512)  # nothing is too small to be cut off
    assert pool._small.sizes[MIB + 512] == MIB - 512


def test_of_blocks_as_large_the_first_in_a_segment_is_taken() -> None:
    pool = Expandable()
    blocks = [pool.take(10 * MIB) for _ in range(5)]
    for block in (blocks[3], blocks[1]):
        pool.give(block)
    pool.take(10 * MIB)
    assert list(pool._large.sizes) == [50 * MIB, 30 * MIB]


def test_small_tensors_are_not_cut_from_large_segments() -> None:
    pool = Pool()
    pool.give(pool.take(100 * MIB))
    pool.take(1000)
    assert pool.reserved == 102 * MIB


def test_gathers_of_embedding_and_head_do_not_share_a_block_in_use() -> None:
    """An even number of layers leaves the last one in the embedding's block."""
    even = ((LARGE,), *[(LAYER,)] * 4, (LARGE,))
    assert gathered_through(even, 1, False, True) == (300 + 100 + 300) * MIB
    assert gathered_through(((LARGE,), *[(LAYER,)] * 3, (LARGE,)), 1, False, True) == 400 * MIB
    assert gathered_through(even[1:-1], 1, False, True) == 200 * MIB


def test_shares_are_cast_before_they_are_gathered() -> None:
    units = tuple(((100 * MIB, 50 * MIB),) for _ in range(4))
    assert gathered_through(units, 1, False, True) == 250 * MIB


def test_without_prefetch_a_gather_still_waits_for_the_copy_of_the_one_before() -> None:
    units = tuple((LAYER,) for _ in range(4))
    assert gathered_through(units, 0, False, True) == 200 * MIB
    assert gathered_through(units, 2, False, True) == 300 * MIB
