"""A pipeline's step on a clock: every rank's actions with times of their own, and transfers between
ranks; and what many ranks that differ in speed cost.

    run_order    one pipeline, action by action
    slowest_of   many ranks that reduce together: the slowest decides, since all end a step at once
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist

from dtron.parallelisms.actions import COMPUTE, Kind, Order, Span, needs, result


def run_order(
    order: Order,
    n_stages: int,
    costs: Mapping[tuple[int, Kind], float],
    hop: float = 0.0,
) -> tuple[float, tuple[tuple[Span, ...], ...]]:
    """Run an order, each action as early as its rank and its inputs allow.

    Args:
        costs: seconds by (stage, kind).
        hop: seconds from one rank to another; sends run beside the computation.
    Returns:
        Seconds of the step, and spans by rank.
    """
    todo = [[action for action in row if action.kind in COMPUTE] for row in order]
    at, clock = [0] * len(todo), [0.0] * len(todo)
    ends: dict = {}
    spans: list[list[Span]] = [[] for _ in todo]
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(todo):
            while at[rank] < len(row):
                action = row[at[rank]]
                wanted = needs(action, n_stages)
                if any(want not in ends for want in wanted):
                    break
                start = clock[rank]
                for want in wanted:
                    end, holder = ends[want]
                    start = max(start, end + (hop if holder != rank else 0.0))
                clock[rank] = start + costs[action.stage, action.kind]
                ends[result(action)] = (clock[rank], rank)
                spans[rank].append(Span(rank, action, start, clock[rank]))
                at[rank] += 1
                moved = True
    return max(clock, default=0.0), tuple(map(tuple, spans))


@dataclass(frozen=True)
class Disorder:
    """How ranks differ.

    Args:
        jitter: standard deviation of a rank's speed from step to step, as a share.
        stragglers: share of ranks that are slower all the time.
        straggle: how much slower they are, as a share.
    """

    jitter: float = 0.01
    stragglers: float = 0.0
    straggle: float = 0.0


def slowest_of(ranks: int, disorder: Disorder, seed: int = 0, draws: int = 40) -> float:
    """Mean factor by which the slowest of so many ranks is slower than the middle one."""
    rng = random.Random(seed)
    total = 0.0
    for _ in range(draws):
        # The largest of n uniform numbers is u^(1/n): no need to draw all of them.
        level = rng.random() ** (1 / ranks)
        late = 1 + disorder.jitter * _normal(level)
        straggling = rng.random() < 1 - (1 - disorder.stragglers) ** ranks
        total += late * (1 + disorder.straggle * straggling)
    return total / draws


def _normal(level: float) -> float:
    """Quantile of the standard normal distribution."""
    return NormalDist().inv_cdf(min(level, 1 - 1e-12))
