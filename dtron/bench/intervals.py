"""Set operations on time intervals: sorted lists of disjoint (begin, end)."""

from collections.abc import Iterable
from math import inf

Interval = tuple[float, float]
Intervals = list[Interval]


def union(intervals: Iterable[Interval]) -> Intervals:
    """Merge intervals into disjoint intervals; empty intervals are dropped."""
    joined: Intervals = []
    for begin, end in sorted(interval for interval in intervals if interval[1] > interval[0]):
        if joined and begin <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((begin, end))
    return joined


def intersection(first: Intervals, second: Intervals) -> Intervals:
    """Return the times that are in both lists."""
    found, i, j = [], 0, 0
    while i < len(first) and j < len(second):
        begin, end = max(first[i][0], second[j][0]), min(first[i][1], second[j][1])
        if begin < end:
            found.append((begin, end))
        if first[i][1] < second[j][1]:
            i += 1
        else:
            j += 1
    return found


def difference(first: Intervals, second: Intervals) -> Intervals:
    """Return the times that are in the first list but not in the second."""
    begins = [-inf, *(end for _, end in second)]
    ends = [*(begin for begin, _ in second), inf]
    return intersection(first, list(zip(begins, ends, strict=True)))


def length(intervals: Intervals) -> float:
    """Return the total length of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)
