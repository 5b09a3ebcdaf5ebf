"""The caching allocator's rules, and what the streams of gathers take by them."""

from dtron.plan.allocator import Pool
from dtron.plan.memory import gathered_through

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
