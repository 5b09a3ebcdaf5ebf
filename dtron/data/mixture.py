"""A mixture: sequences from several sources by weight, in one order that is equal in every layout.

Each sequence of the run is from one source. While the weights stay the same, w_i is the share of
source i (their sum is 1), and c_i(m) of the first m sequences are from it. Then for n sources

    |c_i(m) - m w_i| <= 1 - 1 / (2 n - 2)     for every source i and every m

The rule that keeps this bound: among the sources with (m + 1) w_i - c_i >= 1 / (2 n - 2), take the
one that would exceed the bound first, that is, with the least (c_i + 1 - 1 / (2 n - 2)) / w_i.
Whenever the shares change (at a stage, when a source has had its epochs, at a resume with other
weights) all c_i and m restart at 0; the sequences that were read of each source do not.

The position is the number of sequences read of each source, and the c_i: `state` holds both, so
that sources may be added, left out and weighted differently at a resume.

Source: Tijdeman, The chairman assignment problem, Discrete Mathematics 32 (1980).
"""

import json
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from dtron.data.packing import Packed, State, TrainingSource, Waste
from dtron.errors import DataError

log = logging.getLogger("dtron")
_TOLERANCE = 1e-9
"""Relative difference of equal shares: weights of 7 and 3 are weights of 0.7 and 0.3."""


@dataclass(frozen=True)
class MixedSource:
    """A source of a mixture."""

    name: str
    sequences: TrainingSource
    epoch: int
    """Number of sequences of an epoch."""
    weights: tuple[float, ...]
    """Weight in each stage."""
    most: int | None = None
    """Number of sequences after which the source ends; None: it does not end."""


@dataclass
class _Position:
    """Position of a mixture: the next sequence of the run, and what was read until there."""

    next: int
    read: dict[str, int]
    """Sequences read of each source."""
    shares: dict[str, float] = field(default_factory=dict)
    """Share of each source that has one, by name; empty: all have ended."""
    since: dict[str, int] = field(default_factory=dict)
    """Sequences read of each source since the shares are what they are."""
    until: float = 0.0
    """The shares stay the same before this sequence of the run."""

    def copy(self) -> "_Position":
        """Return a position that changes independently."""
        own = dict(self.read), dict(self.shares), dict(self.since)
        return _Position(self.next, *own, self.until)


class Mixture(TrainingSource):
    """A training source that mixes several sources; see the module's docstring.

    Args:
        sources: at least one; their order has no effect.
        global_batch: sequences per step.
        stages: for each stage after the first, its first step, counted from 0; ascending.
    """

    def __init__(
        self, sources: Sequence[MixedSource], global_batch: int, stages: Sequence[int] = ()
    ) -> None:
        self.sources = {each.name: each for each in sorted(sources, key=lambda each: each.name)}
        """Sources by name, in the order of names."""
        self._global_batch, self._steps = global_batch, tuple(stages)
        self._left_out: dict[str, list[float]] = {}  # rows of `state` of sources that were left out
        self._warned = ""
        self.count_from(0, 0)
        self._begin(_Position(0, dict.fromkeys(self.sources, 0)))

    def count_from(self, step: int, k: int) -> None:
        """Begin stages by the steps of a run whose step `step`, counted from 0, begins with k."""
        self._step, self._first = step, k
        self._stages = [k + (each - step) * self._global_batch for each in self._steps]

    def sequences(self, numbers: Sequence[int]) -> list[Packed]:
        """Return several sequences of the run; those of one source are read together."""
        places = [self.place(k) for k in numbers]
        found: dict[tuple[str, int], Packed] = {}
        for name in dict.fromkeys(name for name, _ in places):
            own = [index for each, index in places if each == name]
            read = self.sources[name].sequences.sequences(own)
            source = (list(self.sources).index(name), len(self.sources))
            found |= {(name, k): replace(x, source=source) for k, x in zip(own, read, strict=True)}
        return [found[place] for place in places]

    def sequence(self, k: int) -> Packed:
        """Return sequence k of the run."""
        return self.sequences([k])[0]

    def place(self, k: int) -> tuple[str, int]:
        """Return the source of sequence k, and the sequence's number among those of the source.

        Raises:
            DataError: every source has had its epochs before.
        """
        self._go_to(k)
        name = self._take()
        return name, self._at.read[name] - 1

    def state(self, k: int) -> State:
        """Return the position at sequence k, as JSON: {source: [read, since, share]}."""
        self._go_to(k)
        at = self._refreshed()
        rows = {n: [at.read[n], at.since.get(n, 0), at.shares.get(n, 0.0)] for n in at.read}
        return {"mixture": json.dumps(self._left_out | rows)}

    def seek(self, k: int, state: State) -> None:
        """Continue at sequence k; sources that `state` does not have begin with their first."""
        rows: dict[str, list[float]] = json.loads(str(state.get("mixture", "{}")))
        self._left_out = {name: [row[0], 0, 0.0] for name, row in rows.items()}
        read = {name: int(self._left_out.pop(name, [0])[0]) for name in self.sources}
        before = {name: row[2] for name, row in sorted(rows.items()) if row[2]}
        self._at = at = _Position(k, read)
        self._refreshed()
        if before.keys() == at.shares.keys() and all(
            math.isclose(share, at.shares[name], rel_tol=_TOLERANCE)
            for name, share in before.items()
        ):
            at.since = {name: int(rows[name][1]) for name in at.shares}
        elif k:
            self._warn_once(
                f"data.mixture: shares were {_shown(before)}, and are {_shown(at.shares)} from "
                f"step {self._step_of(k)} on"
            )
        self._begin(at)

    def _warn_once(self, message: str) -> None:
        """Log a warning, once: a start seeks twice, to check and to train."""
        if message != self._warned:
            log.warning("%s", message)
        self._warned = message

    def waste(self) -> Waste | None:
        """Return the sequences of an epoch of every source, and padding and splits by share."""
        found = {name: each.sequences.waste() for name, each in self.sources.items()}
        known = {name: each for name, each in found.items() if each is not None}
        shares = self._refreshed().shares
        return Waste(
            sum(each.sequences for each in known.values()),
            sum(shares.get(name, 0.0) * each.padding for name, each in known.items()),
            sum(shares.get(name, 0.0) * each.split_documents for name, each in known.items()),
        )

    def summary(self, steps: int) -> str:
        """Return what the next `steps` steps read of each source, as text; to about a sequence.

        Raises:
            DataError: every source will have had its epochs before.
        """
        first, end = self._at.next, self._at.next + steps * self._global_batch
        k, read = float(first), {name: float(n) for name, n in self._at.read.items()}
        while end - k > 0.5:
            shares, until = self._shares(math.floor(k + 0.5), read)
            if not shares:
                raise self._ended(round(k))
            length = min(until, end) - k
            ends = [(self._left(name, read) / share) for name, share in shares.items()]
            length = max(min(length, *ends), 0.5)  # by rounding, a source may have less left
            read |= {name: read[name] + share * length for name, share in shares.items()}
            k += length
        n = max(end - first, 1)
        return ", ".join(
            f"{name} {(read[name] - self._at.read[name]) / n:.1%} "
            f"(then {read[name] / each.epoch:.2f} epochs read)"
            for name, each in self.sources.items()
        )

    def warn_of_end(self, steps: int) -> None:
        """Warn if every source will have had its epochs within the next `steps` steps."""
        try:
            self.summary(steps)
        except DataError as error:
            log.warning("%s", error)

    def _left(self, name: str, read: Mapping[str, float]) -> float:
        """Return how many sequences of a source are left until it ends."""
        most = self.sources[name].most
        return math.inf if most is None else most - read[name]

    def _begin(self, at: _Position) -> None:
        self._at, self._origin = at, at.copy()

    def _go_to(self, k: int) -> None:
        if k < self._at.next:
            assert k >= self._origin.next, "sequences before the position of `seek` are not known"
            self._at = self._origin.copy()
        while self._at.next < k:
            self._take()

    def _take(self) -> str:
        """Return the source of the next sequence, and count it."""
        at = self._refreshed()
        if not at.shares:
            raise self._ended(at.next)
        name = _chosen(at.shares, at.since)
        at.next += 1
        at.read[name] += 1
        at.since[name] += 1
        return name

    def _refreshed(self) -> _Position:
        """Return the position, with new shares where a stage begins or a source has ended."""
        at = self._at
        if at.next >= at.until:
            shares, stage_ends = self._shares(at.next, at.read)
            if shares != at.shares or at.next in self._stages:
                at.shares, at.since = shares, dict.fromkeys(shares, 0)
            # A source cannot end before as many sequences as it has left.
            least = min((self._left(name, at.read) for name in shares), default=math.inf)
            at.until = min(stage_ends, at.next + least)
        return at

    def _shares(self, k: int, read: Mapping[str, float]) -> tuple[dict[str, float], float]:
        """Return the shares of the sources that have one at sequence k, and where the stage ends.

        No shares: all sources with a weight have ended.
        """
        stage = sum(k >= first for first in self._stages)
        weights = {
            name: each.weights[stage]
            for name, each in self.sources.items()
            if each.weights[stage] and self._left(name, read) > _TOLERANCE
        }
        total = math.fsum(weights.values())
        ends = self._stages[stage] if stage < len(self._stages) else math.inf
        return {name: weight / total for name, weight in weights.items()}, ends

    def _step_of(self, k: int) -> int:
        """Return the step of sequence k, counted from 1 as in the log."""
        return self._step + (k - self._first) // self._global_batch + 1

    def _ended(self, k: int) -> DataError:
        return DataError(
            f"data.mixture: all sources with a weight will have had their epochs in step "
            f"{self._step_of(k)}; raise epochs, leave it out of a source, or lower train.steps"
        )


def _chosen(shares: Mapping[str, float], since: Mapping[str, int]) -> str:
    """Return the source of the next sequence: of those due, the first to exceed its bound.

    Args:
        shares: w_i by source.
        since: c_i by source, of the first m sequences; see the top of this file.
    """
    if len(shares) == 1:
        return next(iter(shares))
    slack, m = 1 / (2 * len(shares) - 2), sum(since.values()) + 1
    lead, best, least = 1 - slack, "", math.inf
    for name, share in shares.items():
        count = since[name]
        if m * share - count >= slack and (count + lead) / share < least:
            best, least = name, (count + lead) / share
    # Empty only by rounding.
    return best or max(shares, key=lambda name: m * shares[name] - since[name])


def _shown(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items()) or "none"
