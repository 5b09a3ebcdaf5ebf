"""Simulation of a pipeline's step: each rank's actions with their durations, and transfers between
ranks.

    run_order    one pipeline, event by event
    Traffic      transfers that share links
"""

import heapq
from collections.abc import Mapping
from math import inf
from typing import Any

from dtron.parallelisms.pipeline.schedule_ops import (
    COMPUTE,
    Kind,
    Order,
    Result,
    Span,
    needs,
    result,
)

Link = tuple[str, int]
"""One direction of a rank's network adapter: ("out", rank) or ("in", rank)."""


class Traffic:
    """Transfers over shared links.

    Concurrent transfers get equal shares of a link; each transfer runs at the speed of its most
    loaded link.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._left: dict[Any, float] = {}
        self._links: dict[Any, tuple[Link, ...]] = {}
        self._rates: dict[Any, float] | None = {}
        """Cached speeds of active transfers; None once one starts or ends."""

    def start(self, name: Any, seconds: float, links: tuple[Link, ...]) -> None:
        """Start a transfer that takes `seconds` without other transfers."""
        self._left[name], self._links[name] = seconds, links
        self._rates = None

    def next_end(self) -> float:
        """Return the time at which the first transfer ends if no other transfer starts.

        Without transfers, return infinity.
        """
        if not self._left:
            return inf
        rates = self._shares()
        return min(self.now + left / rates[name] for name, left in self._left.items())

    def advance(self, until: float) -> list[Any]:
        """Advance time to `until`, at most `next_end()`; return the transfers that end by then."""
        rates, left, passed = self._shares(), self._left, until - self.now
        done = [name for name, rate in rates.items() if self.now + left[name] / rate <= until]
        for name, rate in rates.items():
            left[name] -= passed * rate
        self.now = until
        for name in done:
            del left[name], self._links[name]
            self._rates = None
        return done

    def _shares(self) -> dict[Any, float]:
        if self._rates is None:
            used: dict[Link, int] = {}
            for links in self._links.values():
                for link in links:
                    used[link] = used.get(link, 0) + 1
            self._rates = {
                name: 1 / max([used[link] for link in links]) for name, links in self._links.items()
            }
        return self._rates


def run_order(
    order: Order,
    n_stages: int,
    costs: Mapping[tuple[int, Kind], float],
    hop: float = 0.0,
) -> tuple[float, tuple[tuple[Span, ...], ...]]:
    """Simulate an order: each action starts as early as its rank and inputs allow.

    Args:
        costs: seconds by (stage, kind).
        hop: seconds of a send to another rank. Sends overlap computation; concurrent sends from or
            to the same rank share its link.
    Returns:
        Seconds of the step, and spans by rank.
    """
    todo = [[action for action in row if action.kind in COMPUTE] for row in order]
    number: dict[Result, int] = {}  # hashes of results are slow
    makes = [[number.setdefault(result(action), len(number)) for action in row] for row in todo]
    wanted = [
        [[number.setdefault(r, len(number)) for r in needs(action, n_stages)] for action in row]
        for row in todo
    ]
    lasts = [[costs[action.stage, action.kind] for action in row] for row in todo]
    users = _users(wanted)
    at, busy = [0] * len(todo), [False] * len(todo)
    here: list[set[int]] = [set() for _ in todo]  # results available on a rank
    spans: list[list[Span]] = [[] for _ in todo]
    running: list[tuple[float, int]] = []
    traffic = Traffic()
    ready = list(range(len(todo)))
    while True:
        for rank in ready:
            if busy[rank] or (place := at[rank]) == len(todo[rank]):
                continue
            if here[rank].issuperset(wanted[rank][place]):
                end = traffic.now + lasts[rank][place]
                spans[rank].append(Span(rank, todo[rank][place], traffic.now, end))
                heapq.heappush(running, (end, rank))
                busy[rank] = True
        first = running[0][0] if running else inf
        now = min(first, traffic.next_end())
        if now == inf:
            return max((row[-1].end for row in spans if row), default=0.0), tuple(map(tuple, spans))
        ready = []
        for made, rank in traffic.advance(now):
            here[rank].add(made)
            ready.append(rank)
        while running and running[0][0] <= now:
            _, rank = heapq.heappop(running)
            made = makes[rank][at[rank]]
            busy[rank], at[rank] = False, at[rank] + 1
            ready.append(rank)
            here[rank].add(made)
            for other in users.get(made, ()):
                if other != rank and hop:
                    traffic.start((made, other), hop, (("out", rank), ("in", other)))
                elif other != rank:
                    here[other].add(made)
                    ready.append(other)


def _users(wanted: list[list[list[int]]]) -> dict[int, set[int]]:
    """Map each result to the ranks that need it."""
    found: dict[int, set[int]] = {}
    for rank, row in enumerate(wanted):
        for wants in row:
            for want in wants:
                found.setdefault(want, set()).add(rank)
    return found
