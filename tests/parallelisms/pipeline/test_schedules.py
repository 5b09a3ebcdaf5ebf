"""Orders of every schedule, their checks, and their communication under blocking rendezvous."""

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping
from torch.distributed.pipelining.schedules import _Action

from dtron.errors import ConfigError
from dtron.parallelisms.pipeline.lowering import add_communication, add_reductions, defer_head
from dtron.parallelisms.pipeline.schedule_ops import (
    COMMUNICATION,
    COMPUTE,
    COSTS,
    Action,
    Kind,
    Order,
    check,
    execute,
    needs,
    result,
)
from dtron.parallelisms.pipeline.schedules import (
    SCHEDULES,
    TWICE,
    Placement,
    forward_only,
    from_torch,
    order_of,
    read_csv,
    stage_ranks,
    write_csv,
)

SENDS = {Kind.SEND_F: (Kind.RECV_F, 1), Kind.SEND_B: (Kind.RECV_B, -1)}


def sizes(name: str) -> Iterator[tuple[int, int, int]]:
    """Every (p, v, m) in a grid that a schedule takes."""
    schedule = SCHEDULES[name]
    least, most = schedule.stages
    for p in (1, 2, 3, 4, 8):
        for v in range(least, (most or 4) + 1):
            for m in (1, 2, 3, 4, 6, 8, 12, 16, 24):
                if schedule.micro_batches.holds(p, m):
                    yield p, v, m


def cases() -> list[tuple[str, int, int, int]]:
    """A few sizes of every schedule: uneven ones, and the least that it takes."""
    some = [(1, 3), (2, 4), (3, 6), (4, 4), (4, 8), (4, 10), (8, 16)]
    return [
        (name, p, v, m)
        for name, row in SCHEDULES.items()
        for v in range(row.stages[0], (row.stages[1] or 3) + 1)
        for p, m in some
        if row.micro_batches.holds(p, m)
    ]


def ranks_of(name: str, p: int, v: int) -> tuple[int, ...]:
    return stage_ranks(SCHEDULES[name].placement, p, v)


def actions(text: str) -> tuple[Action, ...]:
    """`0F0 0B0` -> actions."""
    return tuple(Action(int(a[0]), Kind(a[1:-1]), int(a[-1])) for a in text.split())


@pytest.mark.parametrize("name", SCHEDULES)
def test_every_schedule_is_complete_and_free_of_deadlock(name: str) -> None:
    seen = 0
    for p, v, m in sizes(name):
        order = order_of(name, p, v, m)  # checks itself
        kinds = {action.kind for row in order for action in row}
        if not SCHEDULES[name].splits_backward:
            assert kinds == {Kind.FORWARD, Kind.BACKWARD}
        seen += 1
    assert seen > 10
    if SCHEDULES[name].splits_backward:
        assert {Kind.INPUT, Kind.WEIGHT} <= kinds


def test_small_orders_by_hand() -> None:
    assert order_of("GPipe", 2, 1, 2) == (
        actions("0F0 0F1 0B0 0B1"),
        actions("1F0 1F1 1B0 1B1"),
    )
    assert order_of("1F1B", 2, 1, 3) == (
        actions("0F0 0F1 0B0 0F2 0B1 0B2"),
        actions("1F0 1B0 1F1 1B1 1F2 1B2"),
    )
    # Fewer micro-batches than ranks: no rank warms up with more than there are.
    assert order_of("1F1B", 3, 1, 1)[0] == actions("0F0 0B0")


def test_actions_are_written_as_torch_writes_them() -> None:
    messages = [Action(0, Kind.FORWARD, 3), Action(2, Kind.INPUT, 1), Action(1, Kind.SEND_F, 0)]
    assert [str(action) for action in messages] == ["0F3", "2I1", "1SEND_F0"]
    assert str(Action(0, Kind.REDUCE)) == "0REDUCE_GRAD"
    for action in messages:
        assert str(_Action.from_str(str(action))) == str(action)


@pytest.mark.parametrize("placement", ["loop", "v"])
def test_placement_is_torchs(placement: Placement) -> None:
    for p in (1, 2, 3, 8):
        ranks = stage_ranks(placement, p, 2)
        assert dict(enumerate(ranks)) == generate_stage_to_rank_mapping(p, 2 * p, placement)
    second = [stage for stage, rank in enumerate(stage_ranks(placement, 4, 2)) if rank == 1]
    assert second == ([1, 6] if placement == "v" else [1, 5])


@pytest.mark.parametrize("name", [name for name in SCHEDULES if name not in ("GPipe", "1F1B")])
def test_rules_are_torchs(name: str) -> None:
    """torch's generator refuses exactly the numbers of micro-batches that our rule refuses."""
    rule, order = SCHEDULES[name].micro_batches, from_torch(name)
    for p in range(1, 6):
        for m in range(1, 17):
            if rule.holds(p, m):
                order(p, 2, m)
            else:
                with pytest.raises(ValueError, match="requires"):
                    order(p, 2, m)


@pytest.mark.parametrize(
    ("name", "p", "v", "m", "message"),
    [
        ("1F1b", 4, 1, 8, r"parallel\.schedule = '1F1b' is unknown; did you mean 1F1B\?"),
        ("1F1B", 4, 2, 8, r"parallel\.stages_per_rank = 2: .*'1F1B' takes exactly 1"),
        ("ZBVZeroBubble", 4, 3, 8, r"parallel\.stages_per_rank = 3: .* takes exactly 2"),
        ("LoopedBFS", 4, 1, 8, r"parallel\.stages_per_rank = 1: .* takes at least 2"),
        ("DualPipeV", 4, 2, 6, r"train\.global_batch / .* = 6 .*parallel\.pp = 4\).* is 8$"),
        ("Interleaved1F1B", 4, 2, 9, r"train\.global_batch / .* = 9 .* is 8 or 10$"),
        ("InterleavedZeroBubble", 2, 2, 5, r"train\.global_batch / .* = 5 .* is 4 or 6$"),
        ("GPipe", 4, 1, 0, r"train\.global_batch / .* = 0 .* is 1$"),
        ("GPipe", 0, 1, 4, r"parallel\.pp = 0"),
    ],
)
def test_numbers_that_a_schedule_does_not_take(
    name: str, p: int, v: int, m: int, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        order_of(name, p, v, m)


def test_the_nearest_legal_numbers() -> None:
    assert TWICE.nearest(4, 3) == [8]
    assert SCHEDULES["Interleaved1F1B"].micro_batches.nearest(4, 13) == [12, 15]


GOOD = (actions("0F0 0B0"), actions("1F0 1B0"))


@pytest.mark.parametrize(
    ("order", "message"),
    [
        (GOOD[:1], "has 1 rows for 2 ranks; use one per rank"),
        ((actions("0F0 1B0"), GOOD[1]), "rank 0 has 1B0: stage 1 is on rank 1"),
        ((actions("0F0 2B0"), GOOD[1]), "rank 0 has 2B0: stages are 0 to 1"),
        ((actions("0F0 0B1"), GOOD[1]), "rank 0 has 0B1: micro-batches are 0 to 0"),
        ((actions("0F0"), GOOD[1]), "has 0B0 never, 0I0 never, 0W0 never; use 0B0 once, or"),
        ((actions("0B0"), GOOD[1]), "has 0F0 never; use it once"),
        ((actions("0F0 0F0 0B0"), GOOD[1]), "has 0F0 twice"),
        ((actions("0F0 0B0 0W0"), GOOD[1]), "has 0B0 once, 0I0 never, 0W0 once"),
        ((actions("0F0 0I0"), GOOD[1]), "0I0 once, 0W0 never"),
        ((actions("0F0 0W0 0I0"), GOOD[1]), "rank 0 is at 0W0 .* 0B0 or 0I0 which the same rank"),
        (
            (actions("0B0 0F0"), GOOD[1]),
            "deadlocks: rank 0 is at 0B0 and waits for 0F0 which the same rank has later; "
            "rank 1 is at 1F0 and waits for 0F0 of rank 0",
        ),
    ],
)
def test_wrong_orders_are_refused(order: Order, message: str) -> None:
    check(GOOD, (0, 1), 1)
    with pytest.raises(ConfigError, match=message):
        check(order, (0, 1), 1)


def test_a_wrong_placement_is_an_error_and_no_hang() -> None:
    """Looped stages under a V schedule hang torch's runtime without a word."""
    order = order_of("ZBVZeroBubble", 4, 2, 8)
    with pytest.raises(ConfigError, match="stage 7 is on rank 3"):
        check(order, stage_ranks("loop", 4, 2), 8)


# Execution of a lowered order, by two machines that know nothing of how it was made.


def inputs(action: Action, ranks: tuple[int, ...]) -> list[Action]:
    """The receives that a compute action needs."""
    stage, m = action.stage, action.micro_batch
    if action.kind is Kind.FORWARD and stage > 0 and ranks[stage - 1] != ranks[stage]:
        return [Action(stage, Kind.RECV_F, m)]
    last = stage + 1 == len(ranks) or ranks[stage + 1] == ranks[stage]
    if action.kind in (Kind.BACKWARD, Kind.INPUT) and not last:
        return [Action(stage, Kind.RECV_B, m)]
    return []


def partner(send: Action) -> Action:
    kind, step = SENDS[send.kind]
    return Action(send.stage + step, kind, send.micro_batch)


def rendezvous(order: Order, ranks: tuple[int, ...]) -> None:
    """Every rank does one action after the other, and a send waits for its receive."""
    at = [0] * len(order)
    done: set[object] = set()
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(order):
            action = row[at[rank]] if at[rank] < len(row) else None
            if action is None or action.kind in (Kind.RECV_F, Kind.RECV_B):
                continue
            if action.kind in SENDS:
                other = partner(action)
                peer = ranks[other.stage]
                if at[peer] == len(order[peer]) or order[peer][at[peer]] != other:
                    continue
                at[peer] += 1
                done.add(other)
            elif action.kind in COMPUTE:
                # In a blocking world whatever stands before was done, so nothing may be missing.
                local = [n for n in needs(action, len(ranks)) if ranks[n[0]] == rank]
                assert all(need in done for need in [*local, *inputs(action, ranks)]), action
                done.add(result(action))
            at[rank] += 1
            moved = True
    left = [str(row[i]) for row, i in zip(order, at, strict=True) if i < len(row)]
    assert not left, f"blocked at {left}"


def overlapped(order: Order, ranks: tuple[int, ...]) -> float:
    """When the last rank ends if communication takes no time, runs beside computation, and on each
    rank strictly in order."""
    clock, link, at = ([0.0] * len(order) for _ in range(3))
    queues: list[list[tuple[Action, float]]] = [[] for _ in order]
    arrived: dict[Action, float] = {}
    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(order):
            while int(at[rank]) < len(row):
                action = row[int(at[rank])]
                if action.kind in COMMUNICATION:
                    queues[rank].append((action, clock[rank]))
                else:
                    wanted = inputs(action, ranks)
                    if any(want not in arrived for want in wanted):
                        break
                    clock[rank] = max([clock[rank], *(arrived[want] for want in wanted)])
                    clock[rank] += COSTS[action.kind]
                at[rank] += 1
                moved = True
        for rank, queue in enumerate(queues):
            while queue and queue[0][0].kind in SENDS:
                other = partner(queue[0][0])
                peer = ranks[other.stage]
                if not queues[peer] or queues[peer][0][0] != other:
                    break
                posted = [queue.pop(0)[1], queues[peer].pop(0)[1]]
                link[rank] = link[peer] = arrived[other] = max(*posted, link[rank], link[peer])
                moved = True
    assert not any(queues)
    return max(clock)


@pytest.mark.parametrize(("name", "p", "v", "m"), cases())
def test_communication_under_rendezvous(name: str, p: int, v: int, m: int) -> None:
    ranks = ranks_of(name, p, v)
    order = order_of(name, p, v, m)
    lowered = add_communication(order, ranks)
    rendezvous(lowered, ranks)
    for before, after in zip(order, lowered, strict=True):
        assert before == tuple(action for action in after if action.kind in COMPUTE)
    flat = [action for row in lowered for action in row if action.kind in COMMUNICATION]
    cuts = sum(a != b for a, b in pairwise(ranks))
    assert len(flat) == len(set(flat)) == 4 * cuts * m
    for rank, row in enumerate(lowered):
        assert all(ranks[action.stage] == rank for action in row)


@pytest.mark.parametrize(("name", "p", "v", "m"), cases())
def test_communication_in_order_delays_nothing(name: str, p: int, v: int, m: int) -> None:
    ranks = ranks_of(name, p, v)
    order = order_of(name, p, v, m)
    ideal = max(span.end for span in execute(order, len(ranks)))
    assert overlapped(add_communication(order, ranks), ranks) == ideal


def test_a_v_hands_over_locally_at_its_bottom() -> None:
    lowered = add_communication(order_of("ZBVZeroBubble", 2, 2, 2), stage_ranks("v", 2, 2))
    assert not {str(action) for action in lowered[1]} & {"1SEND_F0", "2RECV_F0", "2SEND_B0"}
    assert {"0SEND_F0", "3RECV_F0", "0RECV_B1", "3SEND_B1"} <= {str(a) for a in lowered[0]}


def test_the_rendezvous_machine_finds_a_deadlock() -> None:
    """Two ranks that both send first, as 1F1B written without care does."""
    order = (
        actions("0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1"),
        actions("1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1"),
    )
    with pytest.raises(AssertionError, match="blocked at"):
        rendezvous(order, (0, 1))


@pytest.mark.parametrize("name", SCHEDULES)
def test_reductions(name: str) -> None:
    p, m = 4, 8
    v = SCHEDULES[name].default_stages
    ranks = ranks_of(name, p, v)
    lowered = add_communication(order_of(name, p, v, m), ranks)
    for every in (False, True):
        reduced = add_reductions(lowered, every, range(p * v))
        rendezvous(reduced, ranks)
        for before, row in zip(lowered, reduced, strict=True):
            assert before == tuple(a for a in row if a.kind is not Kind.REDUCE)
            _check_reductions(row, every)
        assert sum(a.kind is Kind.REDUCE for row in reduced for a in row) == p * v * (
            m if every else 1
        )


def _check_reductions(row: tuple[Action, ...], every: bool) -> None:
    """A reduction comes after its weight gradients and before the next computation."""
    gradients = [i for i, a in enumerate(row) if a.kind in (Kind.BACKWARD, Kind.WEIGHT)]
    for at, action in enumerate(row):
        if action.kind is not Kind.REDUCE:
            continue
        mine = [i for i in gradients if row[i].stage == action.stage]
        if every:
            assert next(i for i in mine if row[i].micro_batch == action.micro_batch) < at
        else:
            assert max(mine) < at
        before = [a for a in row[:at] if a.kind in COMPUTE]
        assert before[-1].stage == action.stage


def test_reductions_by_hand() -> None:
    row = actions("0F0 0F1 0RECV_B0 0B0 0RECV_B1 0B1")
    once, each = (add_reductions((row,), every, [0])[0] for every in (False, True))
    assert [str(a) for a in once][-2:] == ["0B1", "0REDUCE_GRAD"]
    assert [str(a) for a in each][3:6] == ["0B0", "0RECV_B1", "0REDUCE_GRAD0"]


def test_the_heads_weight_gradients_come_last() -> None:
    order = order_of("1F1B", 2, 1, 3)
    deferred = defer_head(order, last_stage=1, limit=2)
    check(deferred, (0, 1), 3)
    assert deferred[0] == order[0]
    assert " ".join(map(str, deferred[1])) == "1F0 1B0 1F1 1I1 1F2 1I2 1W1 1W2"
    reduced = add_reductions(add_communication(deferred, (0, 1)), False, stages=[1])
    assert str(reduced[1][-1]) == "1REDUCE_GRAD"
    assert not any(action.kind is Kind.REDUCE for action in reduced[0])


@pytest.mark.parametrize("placement", ["loop", "v"])
@pytest.mark.parametrize("p", [1, 2, 4])
def test_forward_only(placement: Placement, p: int) -> None:
    ranks = stage_ranks(placement, p, 2)
    for m in (1, 2, 5, 16):
        order = forward_only(ranks, p, m)
        found = sorted((a.stage, a.micro_batch) for row in order for a in row)
        assert found == [(stage, i) for stage in range(2 * p) for i in range(m)]
        rendezvous(add_communication(order, ranks), ranks)
    # In a V, micro-batches come back to the first rank, which adds a way through the pipeline.
    length = max(span.end for span in execute(order, 2 * p))
    assert length == 2 * 16 + (p - 1) * (2 if placement == "v" else 1)


@pytest.mark.parametrize("name", SCHEDULES)
def test_csv_round_trip(name: str, tmp_path: Path) -> None:
    v, placement = SCHEDULES[name].default_stages, SCHEDULES[name].placement
    order = order_of(name, 2, v, 4)
    file = tmp_path / "mine.csv"
    file.write_text(write_csv(order))
    assert read_csv(file, 2, v, 4, placement) == order
    assert read_csv(write_csv(order), 2, v, 4, placement) == order
    for row, line in zip(order, write_csv(order).splitlines(), strict=True):
        assert [str(_Action.from_str(cell)) for cell in line.split(",")] == [str(a) for a in row]


def test_csv_as_torch_writes_it() -> None:
    """With empty cells where a rank waits, and pairs that overlap."""
    rows = get_schedule_ops("DualPipeV", 2, 4, 2)
    text = "\n".join(",".join("" if a is None else str(a) for a in row) for row in rows)
    assert "OVERLAP_F_B" in text
    assert read_csv(text, 2, 2, 4, "v") == order_of("DualPipeV", 2, 2, 4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0B0\n", r"mine\.csv has 1 rows, but parallel\.pp = 2"),
        ("0F0,0X0\n1F0,1B0", r"mine\.csv row 1 \(rank 0\) cell 2: '0X0' is not an action"),
        ("0F0,0B0\n\n1F0,,1SEND_B0,1B0", r"row 3 \(rank 1\) cell 3: '1SEND_B0' is not an action"),
        ("0F0,0B0\n1F0,0B0", r"row 2 \(rank 1\) cell 2: 0B0: stage 0 is on rank 0"),
        ("0F0,0B0\n1F0,1B7", r"row 2 \(rank 1\) cell 2: 1B7: micro-batches are 0 to 0"),
        ("0F0,0B0\n1F0,1I0", r"mine\.csv has 1B0 never, 1I0 once, 1W0 never"),
        ("0F0,0B0\n1B0,1F0", r"mine\.csv deadlocks: rank 0 is at 0B0 .* rank 1 is at 1B0"),
    ],
)
def test_csv_errors_name_file_row_and_cell(text: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.csv"
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_csv(file, 2, 1, 1, "loop")


def test_a_large_csv_is_refused(tmp_path: Path) -> None:
    """Its empty cells took gigabytes."""
    (tmp_path / "mine.csv").write_text("," * 17_000_000)
    with pytest.raises(ConfigError, match=r"mine\.csv cannot be read: it has 17000000 bytes"):
        read_csv(tmp_path / "mine.csv", 2, 1, 1, "loop")


def test_csv_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"schedule file no\.csv cannot be read"):
        read_csv("no.csv", 2, 1, 1, "loop")
