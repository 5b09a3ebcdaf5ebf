"""Lower a schedule to the actions that each rank executes: add sends, receives and reductions.

An order (`schedules.py`) has compute actions only. Each pass here is a pure function from order to
order:

    order_of(...) -> (defer_head) -> add_communication -> add_reductions

**Why it cannot deadlock.** `add_communication` simulates the order and writes one list of the
actions of all ranks: for each point in time, the compute actions that end, then the transfers of
their results, one after another. The inputs of an action precede it in this list. Each rank
executes its actions in the order of the list. So even if every send waits for its receive and
nothing overlaps, the first action that is not done can always be executed.

**Why it overlaps.** A receive is placed at the time when its data is produced, while the receiving
rank computes an earlier action. Posted without waiting, it completes during that computation.
"""

from collections.abc import Collection, Sequence
from itertools import groupby
from operator import attrgetter

from dtron.parallelisms.pipeline.schedule_ops import (
    COMMUNICATION,
    Action,
    Kind,
    Order,
    Span,
    execute,
)


def add_communication(order: Order, ranks_of_stage: Sequence[int]) -> Order:
    """Insert a SEND and a RECV for every result that another rank needs.

    Consecutive stages on one rank (the middle of placement "v") need no communication.

    Args:
        order: compute actions of every rank, as accepted by `check`.
        ranks_of_stage: the rank of each stage.

    Returns:
        The order with communication, in torch's notation: `1SEND_F0` on the rank of stage 1 matches
        `2RECV_F0` on the rank of stage 2.

    Raises:
        ConfigError: the order deadlocks.
    """
    rows: list[list[Action]] = [[] for _ in order]
    spans = sorted(execute(order, len(ranks_of_stage)), key=attrgetter("end", "rank"))
    for _, finished in groupby(spans, key=attrgetter("end")):
        together = list(finished)
        for span in together:
            rows[span.rank].append(span.action)
        for span in sorted(together, key=_transfer_order):
            for action in _transfer(span.action, ranks_of_stage):
                rows[ranks_of_stage[action.stage]].append(action)
    return tuple(map(tuple, rows))


def defer_head(order: Order, last_stage: int, limit: int) -> Order:
    """Defer the head's weight gradients of the last micro-batches to the end of the step.

    In the last stage, the backward of these micro-batches is split into I, which computes all
    gradients but the head's weight gradient, and W, which comes after all other actions of the
    rank. Earlier stages get their gradients earlier, and the rank computes W while it would
    otherwise be idle.

    Args:
        order: compute actions of every rank.
        last_stage: the stage with the head.
        limit: number of micro-batches to defer; each keeps the gradient of its logits and the
            head's input in memory.
    """
    return tuple(_defer_in_row(row, last_stage, limit) for row in order)


def _defer_in_row(row: Sequence[Action], stage: int, limit: int) -> tuple[Action, ...]:
    whole = [a for a in row if a.stage == stage and a.kind is Kind.BACKWARD]
    chosen = set(whole[-limit:])
    kept = [Action(a.stage, Kind.INPUT, a.micro_batch) if a in chosen else a for a in row]
    late = [Action(a.stage, Kind.WEIGHT, a.micro_batch) for a in row if a in chosen]
    return (*kept, *late)


def add_reductions(order: Order, every_micro_batch: bool, stages: Collection[int]) -> Order:
    """Insert reductions of a stage's gradients over its data-parallel ranks.

    One reduction (`0REDUCE_GRAD`) follows the stage's last weight gradient of the step and overlaps
    the rank's remaining computation. With `every_micro_batch`, a reduction (`0REDUCE_GRAD3`)
    follows every weight gradient. Sends and receives that directly follow the weight gradient come
    first, since other ranks wait for them. The ranks that reduce together have the same list, so
    the order stays free of deadlocks.

    Args:
        order: actions of every rank, with or without communication.
        every_micro_batch: reduce after every weight gradient instead of once per step.
        stages: stages whose backward is split; other stages reduce inside their backwards.
    """
    return tuple(_add_reductions_to_row(row, every_micro_batch, stages) for row in order)


def _transfer_order(span: Span) -> tuple[int, int]:
    """Sort key of simultaneous transfers: even ranks send first.

    This lets pairs of neighbouring ranks communicate concurrently.
    """
    return span.rank % 2, span.rank


def _transfer(action: Action, ranks_of_stage: Sequence[int]) -> list[Action]:
    """Return the send and the receive of an action's result, if another rank needs it."""
    if action.kind is Kind.FORWARD:
        to, kinds = action.stage + 1, (Kind.SEND_F, Kind.RECV_F)
    elif action.kind in (Kind.BACKWARD, Kind.INPUT):
        to, kinds = action.stage - 1, (Kind.SEND_B, Kind.RECV_B)
    else:
        return []
    if to not in range(len(ranks_of_stage)) or ranks_of_stage[to] == ranks_of_stage[action.stage]:
        return []
    return [
        Action(action.stage, kinds[0], action.micro_batch),
        Action(to, kinds[1], action.micro_batch),
    ]


def _add_reductions_to_row(
    row: Sequence[Action], every_micro_batch: bool, stages: Collection[int]
) -> tuple[Action, ...]:
    weights = {
        i: a
        for i, a in enumerate(row)
        if a.kind in (Kind.BACKWARD, Kind.WEIGHT) and a.stage in stages
    }
    last = {action.stage: i for i, action in weights.items()}
    out: list[Action] = []
    waiting: list[Action] = []
    for i, action in enumerate(row):
        if action.kind not in COMMUNICATION:
            out += waiting
            waiting = []
        out.append(action)
        if i in weights and every_micro_batch:
            waiting.append(Action(action.stage, Kind.REDUCE, action.micro_batch))
        elif i in weights and last[action.stage] == i:
            waiting.append(Action(action.stage, Kind.REDUCE))
    return (*out, *waiting)
