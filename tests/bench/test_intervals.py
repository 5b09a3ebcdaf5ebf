"""Interval arithmetic against sets of integers."""

import itertools
import random

from dtron.bench.intervals import Intervals, difference, intersection, length, union


def points(intervals: Intervals) -> set[int]:
    return {x for begin, end in intervals for x in range(int(begin), int(end))}


def test_intervals_equal_sets() -> None:
    draw = random.Random(0)
    for _ in range(500):
        raw = [
            [
                (begin, begin + draw.randrange(6))
                for begin in (draw.randrange(40) for _ in range(draw.randrange(8)))
            ]
            for _ in range(2)
        ]
        first, second = (union((float(a), float(b)) for a, b in part) for part in raw)
        for joined, part in zip((first, second), raw, strict=True):
            assert points(joined) == points([(float(a), float(b)) for a, b in part])
            assert all(a[1] < b[0] for a, b in itertools.pairwise(joined))
        assert points(intersection(first, second)) == points(first) & points(second)
        assert points(difference(first, second)) == points(first) - points(second)
        assert length(first) == len(points(first))
        assert length(difference(first, second)) == len(points(first) - points(second))
