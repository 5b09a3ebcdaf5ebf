"""From an order of computation to what each rank executes: sends, receives and reductions.

An order (`dtron.parallelisms.pipeline.schedules`) says when stages compute. The passes here add the
rest, each a pure function from order to order:

    order_of(...) -> (defer_head) -> add_communication -> add_reductions

**Why it cannot deadlock.** `add_communication` runs the order on a clock and writes one list of
everything that happens on all ranks: first what is finished at a time, then the hand-overs of those
results, one after another. An action's inputs always come before it in this list. Each rank
gets its part of the list, so all ranks agree on one global order: even if every send waits for its
receive and nothing overlaps, the first entry that is not done can always be done.

**Why it overlaps.** A receive is placed when its data is produced, during an earlier computation of
the receiving rank: posted without waiting, it completes meanwhile.
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
    """Insert a SEND and a RECV wherever a result is needed on another rank.

    Stages that are neighbours on one rank, as at the bottom of a V, hand over locally: no action.

    Args:
        order: compute actions of every rank, such as `check` accepts.
        ranks_of_stage: the rank of every stage.

    Returns:
        The order with communication, named as torch does: `1SEND_F0` on the rank of stage 1 meets
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
        for span in sorted(together, key=_turn):
            for action in _hand_over(span.action, ranks_of_stage):
                rows[ranks_of_stage[action.stage]].append(action)
    return tuple(map(tuple, rows))


def defer_head(order: Order, last_stage: int, limit: int) -> Order:
    """Defer the head's weight gradients of the last micro-batches until the pipeline drains.

    The last stage's backwards become I, which leaves out the head's weight gradient alone, and its
    W come after everything else of that rank: no stage waits for them, so the ones before get their
    gradients earlier, and the rank computes them while it would wait for the others to end.

    Args:
        order: compute actions of every rank.
        last_stage: the stage with the head.
        limit: number of micro-batches to defer; each holds its logits' gradient and the head's
            input.
    """
    return tuple(_deferred(row, last_stage, limit) for row in order)


def _deferred(row: Sequence[Action], stage: int, limit: int) -> tuple[Action, ...]:
    whole = [a for a in row if a.stage == stage and a.kind is Kind.BACKWARD]
    chosen = set(whole[-limit:])
    kept = [Action(a.stage, Kind.INPUT, a.micro_batch) if a in chosen else a for a in row]
    late = [Action(a.stage, Kind.WEIGHT, a.micro_batch) for a in row if a in chosen]
    return (*kept, *late)


def add_reductions(order: Order, every_micro_batch: bool, stages: Collection[int]) -> Order:
    """Insert the reduction of a stage's gradients over its data-parallel ranks.

    It comes after the stage's last weight gradient of the step (`0REDUCE_GRAD`), so that it
    overlaps the rank's remaining computation, or after each one (`0REDUCE_GRAD3`), and behind the
    communication that directly follows: a neighbour waits for that, and nobody for the reduction.
    All ranks that reduce together have the same list, so the order stays free of deadlocks.

    Args:
        order: actions of every rank, with or without communication.
        every_micro_batch: reduce after every weight gradient, not once per step.
        stages: those whose backwards are split; the others reduce inside their backwards.
    """
    return tuple(_reduced(row, every_micro_batch, stages) for row in order)


def _turn(span: Span) -> tuple[int, int]:
    """Sort key of transfers at one time: even ranks send first, so that pairs of neighbours
    communicate concurrently instead of waiting for each other along the whole pipeline."""
    return span.rank % 2, span.rank


def _hand_over(action: Action, ranks_of_stage: Sequence[int]) -> list[Action]:
    """The send and the receive of an action's result, if another rank needs it."""
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


def _reduced(
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
