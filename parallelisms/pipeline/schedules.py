"""Pipeline schedules: the order in which each rank computes the micro-batches of its stages.

A schedule is a row of SCHEDULES. GPipe and 1F1B are defined here; the orders of all others come
from the classes of torch.distributed.pipelining, whose executor is not used. Every order is checked
(`schedule_ops.check`) before anything runs, and is a pure function of its name and three numbers:

    p   pipeline ranks, parallel.pp
    v   stages per rank, parallel.stages_per_rank; the pipeline has p * v stages
    m   micro-batches per step, train.global_batch / (data-parallel ranks * train.micro_batch)
"""

import csv
import functools
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from torch.distributed.pipelining.schedules import get_schedule_class

from dtron.errors import ConfigError, cause_of, nearest
from dtron.io.untrusted import MB, read_text
from dtron.parallelisms.pipeline.schedule_ops import (
    Action,
    Kind,
    Order,
    check,
    misplaced,
    one_by_one,
)

Placement = Literal["loop", "v"]
"""Which rank has which stages. `loop`: stage s is on rank s % p. `v`: rank r has stages r and
2p - 1 - r, so that the first rank has both the first and the last stage."""


@dataclass(frozen=True)
class Rule:
    """Rule for the number of micro-batches of a schedule.

    Args:
        text: the rule in words, for errors.
        holds: (p ranks, m micro-batches) -> whether m is legal.
    """

    text: str
    holds: Callable[[int, int], bool]

    def nearest(self, p: int, m: int) -> list[int]:
        """Return the largest legal number below m, if one exists, and the smallest above m."""
        below = next((n for n in range(m - 1, 0, -1) if self.holds(p, n)), None)
        above = next(n for n in count(max(m, 0) + 1) if self.holds(p, n))
        return [above] if below is None else [below, above]


def _equal_rounds(p: int, m: int) -> bool:
    """Whether m micro-batches split into max(1, m // p) equal rounds through a rank's stages."""
    return m >= 1 and m % max(1, m // p) == 0


ANY = Rule("at least 1 micro-batch", lambda p, m: m >= 1)
ROUNDS = Rule(
    "a multiple of the number of rounds, max(1, micro-batches // parallel.pp)", _equal_rounds
)
TWICE = Rule("at least 2 x parallel.pp micro-batches", lambda p, m: m >= 2 * p)


@dataclass(frozen=True)
class Schedule:
    """A row of SCHEDULES.

    Args:
        order: (p, v, m) -> compute actions of every rank.
        stages: minimum and maximum number of stages per rank; None: no maximum.
        default_stages: default number of stages per rank.
        placement: which rank has which stages.
        splits_backward: whether it has I (input gradient) and W (weight gradients) instead of B.
        micro_batches: rule for the number of micro-batches.
    """

    order: Callable[[int, int, int], Order]
    stages: tuple[int, int | None]
    default_stages: int
    placement: Placement
    splits_backward: bool
    micro_batches: Rule


def gpipe(p: int, v: int, m: int) -> Order:
    """GPipe (arXiv:1811.06965): all forwards, then all backwards, with m micro-batches in flight.

    Backwards run in the order of the forwards, so that gradients are summed in the order of 1F1B.
    """
    return tuple(_row(rank, "F" * m + "B" * m) for rank in range(p))


def one_f_one_b(p: int, v: int, m: int) -> Order:
    """1F1B, or PipeDream-flush (arXiv:2104.04473).

    Rank r of p runs p - 1 - r forwards, then alternates one forward and one backward. The bubble is
    as large as that of GPipe, but at most p - r micro-batches are in flight.
    """
    warmup = [min(p - 1 - rank, m) for rank in range(p)]
    return tuple(_row(r, "F" * w + "FB" * (m - w) + "B" * w) for r, w in enumerate(warmup))


def _row(stage: int, kinds: str) -> tuple[Action, ...]:
    """Return the actions of one stage; each kind takes the micro-batches in order."""
    numbers = {kind: count() for kind in set(kinds)}
    return tuple(Action(stage, Kind(kind), next(numbers[kind])) for kind in kinds)


TORCH_KINDS = {
    "FORWARD": Kind.FORWARD,
    "FULL_BACKWARD": Kind.BACKWARD,
    "BACKWARD_INPUT": Kind.INPUT,
    "BACKWARD_WEIGHT": Kind.WEIGHT,
}


def from_torch(name: str) -> Callable[[int, int, int], Order]:
    """Return the `Schedule.order` of a schedule class of torch.distributed.pipelining.

    In torch's DualPipeV, a forward and a backward form a pair, in which each overlaps the other's
    communication: two consecutive actions, of which the first is `overlapped`.
    """

    def order(p: int, v: int, m: int) -> Order:
        # The constructor reads only these attributes, so no process group is needed.
        stages: Any = [
            SimpleNamespace(group_rank=0, group_size=p, num_stages=p * v, submod=None)
            for _ in range(v)
        ]
        rows = get_schedule_class(name)(stages, m).pipeline_order
        return tuple(_from_torch(rows[rank]) for rank in range(p))

    return order


def _from_torch(row: Sequence[Any]) -> tuple[Action, ...]:
    """Convert one rank's actions of torch; drop padding (None) and actions such as unshard."""
    flat = [
        (part, bool(action.sub_actions) and i == 0)
        for action in row
        if action
        for i, part in enumerate(action.sub_actions or (action,))
    ]
    return tuple(
        Action(
            part.stage_index,
            TORCH_KINDS[part.computation_type.name],
            part.microbatch_index,
            overlapped,
        )
        for part, overlapped in flat
        if part.computation_type.name in TORCH_KINDS
    )


# Sources: interleaved arXiv:2104.04473, breadth-first arXiv:2211.05953, zero bubble
# arXiv:2401.10241, its V form arXiv:2405.15362, DualPipe arXiv:2412.19437 (as a V:
# github.com/deepseek-ai/DualPipe).
SCHEDULES: dict[str, Schedule] = {
    "GPipe": Schedule(gpipe, (1, 1), 1, "loop", False, ANY),
    "1F1B": Schedule(one_f_one_b, (1, 1), 1, "loop", False, ANY),
    "Interleaved1F1B": Schedule(from_torch("Interleaved1F1B"), (2, None), 2, "loop", False, ROUNDS),
    "LoopedBFS": Schedule(from_torch("LoopedBFS"), (2, None), 2, "loop", False, ANY),
    "InterleavedZeroBubble": Schedule(
        from_torch("InterleavedZeroBubble"), (1, None), 2, "loop", True, ROUNDS
    ),
    "ZBVZeroBubble": Schedule(from_torch("ZBVZeroBubble"), (2, 2), 2, "v", True, ANY),
    "DualPipeV": Schedule(from_torch("DualPipeV"), (2, 2), 2, "v", True, TWICE),
}


def schedule_of(name: str) -> Schedule:
    """Return the row of SCHEDULES with this name.

    Raises:
        ConfigError: unknown name; the message suggests the most similar one.
    """
    if name not in SCHEDULES:
        raise ConfigError(
            f"parallel.schedule = {name!r} is unknown{nearest(name, SCHEDULES)} "
            f"(there are {', '.join(SCHEDULES)})"
        )
    return SCHEDULES[name]


def stage_ranks(placement: Placement, p: int, v: int) -> tuple[int, ...]:
    """Return the rank of each of the p * v stages.

    Raises:
        ConfigError: placement "v" with v != 2.
    """
    if placement == "loop":
        return tuple(stage % p for stage in range(p * v))
    if v != 2:
        raise ConfigError(f'parallel.stages_per_rank = {v}: placement "v" needs 2 per rank; use 2')
    return (*range(p), *reversed(range(p)))


@functools.lru_cache(maxsize=32)
def order_of(name: str, p: int, v: int | None, m: int, overlap: bool = False) -> Order:
    """Return the order of a schedule, checked.

    Args:
        name: a row of SCHEDULES.
        p: pipeline ranks.
        v: stages per rank; None: the schedule's default.
        m: micro-batches per step.
        overlap: whether the pairs of DualPipeV run together; if not, one action after another, and
            the result of the first is sent before the second starts.

    Returns:
        Compute actions of every rank; `lowering.py` adds communication.

    Raises:
        ConfigError: the schedule does not support these numbers; the message has legal numbers.
    """
    schedule = schedule_of(name)
    v = schedule.default_stages if v is None else v
    if p < 1:
        raise ConfigError(f"parallel.pp = {p} is not a number of ranks; use at least 1")
    _check_stages(name, schedule, v)
    _check_micro_batches(name, schedule.micro_batches, p, m)
    order = schedule.order(p, v, m)
    if not overlap:
        order = one_by_one(order)
    check(order, stage_ranks(schedule.placement, p, v), m, f"parallel.schedule = {name!r}")
    return order


def _check_stages(name: str, schedule: Schedule, v: int) -> None:
    least, most = schedule.stages
    if v < least or (most is not None and v > most):
        takes = f"exactly {least}" if least == most else f"at least {least}"
        raise ConfigError(
            f"parallel.stages_per_rank = {v}: parallel.schedule = {name!r} takes {takes}"
        )


def _check_micro_batches(name: str, rule: Rule, p: int, m: int) -> None:
    if not rule.holds(p, m):
        legal = " or ".join(map(str, rule.nearest(p, m)))
        raise ConfigError(
            f"train.global_batch / (data-parallel ranks x train.micro_batch) = {m} micro-batches: "
            f"parallel.schedule = {name!r} takes {rule.text} (parallel.pp = {p}); the nearest is "
            f"{legal}"
        )


def forward_only(ranks_of_stage: Sequence[int], p: int, m: int) -> Order:
    """Make an order for evaluation: every stage's forward of every micro-batch.

    At each simulated step, a rank runs the last of its stages that has an input. So few outputs
    wait to be sent, and no rank idles while it has an input.

    Args:
        ranks_of_stage: the rank of each stage.
        p: pipeline ranks.
        m: micro-batches.
    """
    rows: list[list[Action]] = [[] for _ in range(p)]
    done = [0] * len(ranks_of_stage)  # micro-batches that have left each stage
    while min(done) < m:
        arrived = [m, *done[:-1]]
        ready = {r: s for s, r in enumerate(ranks_of_stage) if done[s] < arrived[s]}
        for rank, stage in ready.items():  # the dict keeps the last ready stage of each rank
            rows[rank].append(Action(stage, Kind.FORWARD, done[stage]))
            done[stage] += 1
    return tuple(map(tuple, rows))


# A cell has one action, or torch's overlapped forward and backward: (0F8;7B0)OVERLAP_F_B.
_CELL = re.compile(r"([0-9]{1,9})([FBIW])([0-9]{1,9})")
_CSV_BYTES = 16 * MB
"""Size limit of a schedule file in bytes; in memory, cells take up to 100 times as many."""
_PAIR = re.compile(r"\((.*)\)OVERLAP_F_B")


def read_csv(source: str | Path, p: int, v: int, m: int, placement: Placement) -> Order:
    """Read a custom schedule in the compute-only CSV format of torch.distributed.pipelining.

    The file has one row per rank, with cells such as `0F0`, `1B2`, `0I1`, `0W1`. Empty cells and
    blank lines are skipped.

    Args:
        source: a path, or the text itself (a string with a comma or a line break).
        p: pipeline ranks.
        v: stages per rank.
        m: micro-batches per step.
        placement: which rank has which stages.

    Raises:
        ConfigError: the file cannot be read, a cell is not an action of its row's rank, or the
            order is incomplete or deadlocks (`check`).
    """
    name, text = _read(source)
    lines = [
        (number, row)
        for number, row in enumerate(_rows(name, text), start=1)
        if any(cell.strip() for cell in row)
    ]
    if len(lines) != p:
        raise ConfigError(f"{name} has {len(lines)} rows, but parallel.pp = {p}; use one per rank")
    ranks = stage_ranks(placement, p, v)
    placed = [
        (f"{name} row {number} (rank {rank}) cell {column}", rank, action)
        for rank, (number, row) in enumerate(lines)
        for column, cell in enumerate(row, start=1)
        for action in _cell(cell, f"{name} row {number} (rank {rank}) cell {column}")
    ]
    n_found = len({a.micro_batch for _, rank, a in placed if rank == 0 and a.kind is Kind.FORWARD})
    if n_found != m:
        raise ConfigError(
            f"{name} holds {n_found} micro-batches, but a step has {m}: train.global_batch / "
            f"(data-parallel ranks x train.micro_batch); use {m}, or change one of these keys"
        )
    for where, rank, action in placed:
        if wrong := misplaced(action, rank, ranks, m):
            raise ConfigError(f"{where}: {wrong}")
    order = tuple(tuple(a for _, rank, a in placed if rank == r) for r in range(p))
    check(order, ranks, m, name)
    return order


def _rows(name: str, text: str) -> list[list[str]]:
    try:
        return list(csv.reader(io.StringIO(text)))
    except csv.Error as error:
        raise ConfigError(f"{name} is not valid CSV: {error}") from None


def write_csv(order: Order) -> str:
    """Write an order in the format of `read_csv` and torch: one row per rank."""
    return "".join(",".join(map(str, row)) + "\n" for row in order)


def _read(source: str | Path) -> tuple[str, str]:
    """Return the source's name for errors, and its text."""
    if isinstance(source, str) and ("," in source or "\n" in source):
        return "the schedule", source
    try:
        return str(source), read_text(source, _CSV_BYTES)
    except (OSError, ValueError) as error:
        cause = cause_of(error, source)
        raise ConfigError(f"schedule file {source} cannot be read: {cause}") from error


def _cell(cell: str, where: str) -> list[Action]:
    """Parse a cell: an empty cell has no action, an overlapped pair has two."""
    text = cell.strip()
    pair = _PAIR.fullmatch(text)
    found = [_CELL.fullmatch(part.strip()) for part in (pair[1].split(";") if pair else [text])]
    if not text:
        return []
    if not all(found):
        raise ConfigError(
            f"{where}: {text!r} is not an action; write STAGE[F|B|I|W]MICROBATCH, such as 0F0 "
            "(leave out communication and reductions)"
        )
    return [Action(int(a[1]), Kind(a[2]), int(a[3])) for a in found if a]
