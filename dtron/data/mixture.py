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
from dataclasses import dataclass, field

from dtron.data.packing import Packed, State, TrainingSource, Waste
from dtron.errors import DataError

log = logging.getLogger("dtron")


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

    next: int = 0
    read: dict[str, int] = field(default_factory=dict)
    """Sequences read of each source."""
    shares: dict[str, float] = field(default_factory=dict)
    """Share of each source that has one."""
    since: dict[str, int] = field(default_factory=dict)
    """Sequences read of each source since the shares are what they are."""

    def copy(self) -> "_Position":
        """Return a position that changes independently."""
        return _Position(self.next, dict(self.read), dict(self.shares), dict(self.since))


class Mixture(TrainingSource):
    """A training source that mixes several sources; see the module's docstring.

    Args:
        sources: at least one.
        stages: for each stage after the first, the first sequence of the run in it; ascending.
    """

    def __init__(self, sources: Sequence[MixedSource], stages: Sequence[int] = ()) -> None:
        self.sources = {each.name: each for each in sources}
        self._stages = frozenset(stages)
        self._begin(self._started(0, dict.fromkeys(self.sources, 0)))

    def sequences(self, numbers: Sequence[int]) -> list[Packed]:
        """Return several sequences of the run; those of one source are read together."""
        places = [self.place(k) for k in numbers]
        found: dict[tuple[str, int], Packed] = {}
        for name in dict.fromkeys(name for name, _ in places):
            own = [index for each, index in places if each == name]
            read = self.sources[name].sequences.sequences(own)
            found |= {(name, k): packed for k, packed in zip(own, read, strict=True)}
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
        return {"mixture": json.dumps(rows)}

    def seek(self, k: int, state: State) -> None:
        """Continue at sequence k; sources that `state` does not have begin with their first."""
        rows: dict[str, list[float]] = json.loads(str(state.get("mixture", "{}")))
        read = {name: int(rows[name][0]) if name in rows else 0 for name in self.sources}
        at = self._started(k, read)
        before = {name: share for name, (_, _, share) in rows.items() if share}
        if before == at.shares:
            at.since = {name: int(rows[name][1]) for name in at.shares}
        elif rows:
            log.warning(
                "data.mixture: shares were %s, and are %s from sequence %d on",
                _shown(before),
                _shown(at.shares),
                k,
            )
        self._begin(at)

    def waste(self) -> Waste | None:
        """Return the sequences of an epoch of every source, and padding and splits by share."""
        found = {name: each.sequences.waste() for name, each in self.sources.items()}
        known = {name: each for name, each in found.items() if each is not None}
        shares = self._at.shares
        return Waste(
            sum(each.sequences for each in known.values()),
            sum(shares.get(name, 0.0) * each.padding for name, each in known.items()),
            sum(shares.get(name, 0.0) * each.split_documents for name, each in known.items()),
        )

    def summary(self, sequences: int) -> str:
        """Return how many epochs of each source the first `sequences` of the run have, as text.

        Raises:
            DataError: every source will have had its epochs before.
        """
        read, k = dict.fromkeys(self.sources, 0.0), 0.0
        while k < sequences:
            shares = self._shares(math.ceil(k), read)
            ends = [(self._left(name, read) / share) for name, share in shares.items()]
            ends += [first - k for first in self._stages if first > k]
            length = min(sequences - k, *ends)
            read |= {name: read[name] + share * length for name, share in shares.items()}
            k += length
        return "; ".join(
            f"{name} {n / max(sequences, 1):.1%} of the sequences, "
            f"{n / self.sources[name].epoch:.2f} epochs"
            for name, n in read.items()
        )

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
        name = _chosen(at.shares, at.since)
        at.next += 1
        at.read[name] += 1
        at.since[name] += 1
        return name

    def _refreshed(self) -> _Position:
        """Return the position, with new shares where a stage begins or a source has ended."""
        at = self._at
        if at.next in self._stages or any(self._left(name, at.read) <= 0 for name in at.shares):
            at.shares = self._shares(at.next, at.read)
            at.since = dict.fromkeys(at.shares, 0)
        return at

    def _started(self, k: int, read: dict[str, int]) -> _Position:
        """Return a position at sequence k at which shares begin."""
        shares = self._shares(k, read)
        return _Position(k, read, shares, dict.fromkeys(shares, 0))

    def _shares(self, k: int, read: Mapping[str, float]) -> dict[str, float]:
        """Return the shares of the sources at sequence k, without those that have none."""
        stage = sum(k >= first for first in self._stages)
        weights = {
            name: each.weights[stage if len(each.weights) > 1 else 0]
            for name, each in self.sources.items()
            if self._left(name, read) > 0
        }
        total = sum(weights.values())
        if not total:
            raise DataError(
                f"data.mixture: at sequence {k}, all sources with a weight have had their epochs; "
                "raise epochs, or lower train.steps"
            )
        return {name: weight / total for name, weight in weights.items() if weight}


def _chosen(shares: Mapping[str, float], since: Mapping[str, int]) -> str:
    """Return the source of the next sequence by the rule of the module's docstring."""
    if len(shares) == 1:
        return next(iter(shares))
    slack, m = 1 / (2 * len(shares) - 2), sum(since.values())
    behind = [name for name, share in shares.items() if (m + 1) * share - since[name] >= slack]
    # Empty only by rounding.
    return min(behind or shares, key=lambda name: (since[name] + 1 - slack) / shares[name])


def _shown(shares: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {share:.1%}" for name, share in shares.items()) or "none"
