"""Pipeline actions as data: their dependencies, a simulation, and checks of an order.

The model is split into stages 0, 1, ...; a rank has one or more of them. A step is one list of
actions per rank, in the notation of torch.distributed.pipelining: `2F1` is stage 2's forward of
micro-batch 1. No function here needs a process group; every rank computes the lists of all ranks.

    F(s, m)         after F(s-1, m)
    B or I (s, m)   after F(s, m) and after B or I (s+1, m)
    W(s, m)         after I(s, m)
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from dtron.errors import ConfigError


class Kind(StrEnum):
    """Kind of an action; values as in torch.distributed.pipelining."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward: gradients of the input and of the weights."""
    INPUT = "I"
    """The gradient of the input only, for which the previous stage waits."""
    WEIGHT = "W"
    """The gradients of the weights only, for which no stage waits (arXiv:2401.10241)."""
    SEND_F = "SEND_F"
    """Send the output to the next stage."""
    RECV_F = "RECV_F"
    """Receive the input from the previous stage; `Action.stage` is the receiving stage."""
    SEND_B = "SEND_B"
    """Send the gradient of the input to the previous stage."""
    RECV_B = "RECV_B"
    """Receive the gradient of the output from the next stage."""
    REDUCE = "REDUCE_GRAD"
    """Reduce a stage's gradients over the data-parallel ranks."""


COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT})
COMMUNICATION = frozenset({Kind.SEND_F, Kind.RECV_F, Kind.SEND_B, Kind.RECV_B})

COSTS: Mapping[Kind, int] = {
    Kind.FORWARD: 1,
    Kind.BACKWARD: 2,
    Kind.INPUT: 1,
    Kind.WEIGHT: 1,
}
"""Relative time of an action on one stage: the backward has two matmuls per forward matmul."""


@dataclass(frozen=True, slots=True)
class Action:
    """One action of a rank.

    Args:
        stage: index of the stage in the pipeline.
        kind: kind of the action.
        micro_batch: index in the step; None for a reduction of the whole step.
        overlapped: whether a forward runs together with the next compute action of its rank, a
            backward (B or I) of another micro-batch; both then start and end together.
    """

    stage: int
    kind: Kind
    micro_batch: int | None = None
    overlapped: bool = field(default=False, compare=False)

    def __str__(self) -> str:
        return (
            f"{self.stage}{self.kind.value}{'' if self.micro_batch is None else self.micro_batch}"
        )


Order = tuple[tuple[Action, ...], ...]
"""The actions of each pipeline rank, in the order of execution."""


@dataclass(frozen=True, slots=True)
class Span:
    """An action that ran on a rank from `start` to `end`."""

    rank: int
    action: Action
    start: float
    end: float


Result = tuple[int, Kind, int | None]
"""(stage, kind, micro-batch) of a result. Kinds: FORWARD, the output; INPUT, the gradient of the
input, from B or I; WEIGHT, the gradients of the weights."""


def result(action: Action) -> Result:
    """Return the result of a compute action; B has the same result as I."""
    kind = Kind.INPUT if action.kind is Kind.BACKWARD else action.kind
    return action.stage, kind, action.micro_batch


def needs(action: Action, n_stages: int) -> list[Result]:
    """Return the results that must exist before a compute action can start."""
    stage, m = action.stage, action.micro_batch
    if action.kind is Kind.FORWARD:
        return [(stage - 1, Kind.FORWARD, m)] if stage > 0 else []
    if action.kind is Kind.WEIGHT:
        return [(stage, Kind.INPUT, m)]
    later: list[Result] = [(stage + 1, Kind.INPUT, m)] if stage + 1 < n_stages else []
    return [(stage, Kind.FORWARD, m), *later]


def one_by_one(order: Order) -> Order:
    """Return an order whose actions run one after another, none overlapped."""
    return tuple(tuple(replace(action, overlapped=False) for action in row) for row in order)


def together(row: Iterable[Action]) -> list[tuple[Action, ...]]:
    """Split a rank's compute actions into single ones and overlapped pairs (forward, backward)."""
    groups: list[tuple[Action, ...]] = []
    for action in row:
        if groups and groups[-1][-1].overlapped:
            groups[-1] = (*groups[-1], action)
        else:
            groups.append((action,))
    return groups


def execute(
    order: Order,
    n_stages: int,
    costs: Mapping[Kind, float] = COSTS,
    source: str = "the schedule",
) -> list[Span]:
    """Simulate the compute actions of an order, each as early as possible.

    Communication takes no time, and reductions are left out. An overlapped pair takes the time of
    both.

    Args:
        order: actions of every rank.
        n_stages: number of stages of the pipeline.
        costs: time of each compute kind.
        source: name of the order in errors.

    Returns:
        One span per action, rank by rank.

    Raises:
        ConfigError: the order deadlocks; the message lists which rank waits for which action.
    """
    todo = [[action for action in row if action.kind in COMPUTE] for row in order]
    waiting = [deque(together(row)) for row in todo]
    spans: list[list[Span]] = [[] for _ in order]
    end_of: dict[Result, float] = {}
    advanced = True
    while advanced:
        advanced = False
        for rank, groups in enumerate(waiting):
            while groups:
                needed = [each for action in groups[0] for each in needs(action, n_stages)]
                if any(each not in end_of for each in needed):
                    break
                free = [spans[rank][-1].end] if spans[rank] else [0]
                start = max(free + [end_of[each] for each in needed])
                end = start + sum(costs[action.kind] for action in groups[0])
                for action in groups.popleft():
                    spans[rank].append(Span(rank, action, start, end))
                    end_of[result(action)] = end
                advanced = True
    stuck = [
        next(a for a in groups[0] if any(each not in end_of for each in needs(a, n_stages)))
        for groups in waiting
        if groups
    ]
    if stuck:
        raise ConfigError(f"{source} deadlocks: {_deadlock_text(stuck, todo, end_of, n_stages)}")
    return [span for row in spans for span in row]


def check(
    order: Order,
    ranks_of_stage: Sequence[int],
    n_micro_batches: int,
    source: str = "the schedule",
) -> None:
    """Check that an order is complete, on the right ranks, and free of deadlocks.

    Args:
        order: actions of every rank; communication and reductions are ignored.
        ranks_of_stage: the rank of each stage.
        n_micro_batches: micro-batches per step.
        source: name of the order in errors, such as a file.

    Raises:
        ConfigError: a stage lacks or repeats a micro-batch's F or its backward (B, or I and W); an
            action is on another rank than its stage; or the order deadlocks.
    """
    n_ranks = max(ranks_of_stage) + 1
    if len(order) != n_ranks:
        raise ConfigError(f"{source} has {len(order)} rows for {n_ranks} ranks; use one per rank")
    for rank, row in enumerate(order):
        for action in row:
            if wrong := misplaced(action, rank, ranks_of_stage, n_micro_batches):
                raise ConfigError(f"{source}: rank {rank} has {wrong}")
    count = Counter(action for row in order for action in row if action.kind in COMPUTE)
    for stage in range(len(ranks_of_stage)):
        for micro_batch in range(n_micro_batches):
            _check_complete(count, stage, micro_batch, source)
    execute(order, len(ranks_of_stage), source=source)


def misplaced(
    action: Action, rank: int, ranks_of_stage: Sequence[int], n_micro_batches: int
) -> str:
    """Return why an action is wrong on this rank, or an empty string."""
    if action.stage not in range(len(ranks_of_stage)):
        return f"{action}: stages are 0 to {len(ranks_of_stage) - 1}"
    if ranks_of_stage[action.stage] != rank:
        return f"{action}: stage {action.stage} is on rank {ranks_of_stage[action.stage]}"
    if action.kind in COMPUTE and action.micro_batch not in range(n_micro_batches):
        return f"{action}: micro-batches are 0 to {n_micro_batches - 1}"
    return ""


def _check_complete(count: Counter[Action], stage: int, m: int, source: str) -> None:
    """Check that stage and micro-batch m have one F, and either one B or one I and one W."""
    forward = Action(stage, Kind.FORWARD, m)
    if count[forward] != 1:
        raise ConfigError(f"{source} has {forward} {_times(count[forward])}; use it once")
    backward = [Action(stage, kind, m) for kind in (Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT)]
    if [count[action] for action in backward] not in ([1, 0, 0], [0, 1, 1]):
        found = ", ".join(f"{action} {_times(count[action])}" for action in backward)
        raise ConfigError(
            f"{source} has {found}; use {backward[0]} once, or {backward[1]} and {backward[2]} "
            "once each"
        )


def _times(count: int) -> str:
    return {0: "never", 1: "once", 2: "twice"}.get(count, f"{count} times")


def _deadlock_text(
    stuck: Iterable[Action], todo: list[list[Action]], done: Mapping[Result, float], n_stages: int
) -> str:
    """Describe a deadlock: `rank 0 is at 0B0 and waits for 1B0 or 1I0 of rank 1; rank 1 ...`."""
    rank_of = {result(action): rank for rank, row in enumerate(todo) for action in row}
    position = {action: rank for rank, row in enumerate(todo) for action in row}
    waiting = []
    for action in stuck:
        stage, kind, m = next(want for want in needs(action, n_stages) if want not in done)
        names = [Kind.BACKWARD, Kind.INPUT] if kind is Kind.INPUT else [kind]
        wanted = " or ".join(str(Action(stage, name, m)) for name in names)
        rank = position[action]
        holder = rank_of.get((stage, kind, m))
        if holder is None:
            where = "which no rank has"
        elif holder == rank:
            where = "which the same rank has later"
        else:
            where = f"of rank {holder}"
        waiting.append(f"rank {rank} is at {action} and waits for {wanted} {where}")
    return "; ".join(waiting[:4]) + ("; ..." if len(waiting) > 4 else "")
