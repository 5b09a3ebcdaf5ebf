"""Assign layers to pipeline stages.

Stages are numbered in the model's order; the schedule defines which rank has which stage
(`schedules.stage_ranks`). `split_layers` balances layers over stages, unless the user gives
`parallel.pp_layout`: numbers of layers, module names, or a string in the grammar of Megatron-LM's
`--pipeline-model-parallel-layout`:

    Et*3|(tt|)*29,m|L

    E   embedding                          |      between two stages
    t   decoder layer                      x*n    x n times, where x is a letter, a | or (...)
    m   multi-token-prediction layer,      ,      ignored, like spaces
        in the last stage
    L   final norm, head and loss
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtron.config import Parallel
from dtron.errors import ConfigError, cause_of, shorten
from dtron.io.untrusted import TEXT_BYTES, read_text
from dtron.parallelisms.pipeline.executor import Layout
from dtron.parallelisms.pipeline.lowering import defer_head
from dtron.parallelisms.pipeline.schedule_ops import Kind, Order
from dtron.parallelisms.pipeline.schedules import (
    Placement,
    order_of,
    read_csv,
    schedule_of,
    stage_ranks,
)

KEY = "parallel.pp_layout"
LETTERS = {"E": "embedding", "t": "layer", "m": "multi-token-prediction layer", "L": "head"}


@dataclass(frozen=True)
class StageNames:
    """Patterns of a model's modules: embedding, layers, head and MTP modules."""

    embedding: tuple[str, ...]
    layer: str
    """Pattern with `{}` for the index of the layer: `blocks.{}`."""
    head: tuple[str, ...]
    mtp: tuple[str, ...] = ()
    """Modules of multi-token prediction (MTP); they are on the last stage, with the head."""


@dataclass(frozen=True)
class Stage:
    """Content of one stage.

    Args:
        embedding: whether it has the token (and position) embedding; true in the first stage.
        layers: indices of its decoder layers; may be empty.
        head: whether it has final norm and output head; true in the last stage.
        prediction_layers: number of multi-token-prediction layers.
    """

    embedding: bool
    layers: range
    head: bool
    prediction_layers: int = 0

    def __str__(self) -> str:
        parts = ["embedding"] if self.embedding else []
        if len(self.layers) == 1:
            parts.append(f"layer {self.layers[0]}")
        elif self.layers:
            parts.append(f"layers {self.layers[0]}-{self.layers[-1]}")
        if self.prediction_layers:
            parts.append(f"{self.prediction_layers} x prediction layer")
        if self.head:
            parts.append("head")
        return " + ".join(parts) or "nothing"


def build_layout(
    parallel: Parallel,
    names: StageNames,
    n_layers: int,
    n_micro_batches: int,
    head_weight: float,
    n_prediction_layers: int = 0,
    encoder_weight: float = 0.0,
) -> Layout:
    """Build the layout that the [parallel] section defines; check its schedule and its stages.

    Args:
        parallel: pp, schedule, stages_per_rank, pp_layout and defer_head are used.
        n_micro_batches: micro-batches per step.
        head_weight: time of norm, head, loss and MTP modules, relative to a layer; it balances the
            stages.
        n_prediction_layers: number of multi-token-prediction layers of the model.
        encoder_weight: time of an encoder before the first layer, relative to a layer.

    Raises:
        ConfigError: the schedule does not support these numbers, or the layout is not legal.
    """
    p = parallel.pp
    if parallel.schedule.endswith(".csv"):
        v = parallel.stages_per_rank or 1
        placement = _placement_of_csv(Path(parallel.schedule), p)
        order = functools.partial(read_csv, Path(parallel.schedule), p, v, placement=placement)
    else:
        row = schedule_of(parallel.schedule)
        v, placement = parallel.stages_per_rank or row.default_stages, row.placement
        overlap = parallel.overlap_micro_batches
        order = functools.partial(order_of, parallel.schedule, p, v, overlap=overlap)
    actions = order(n_micro_batches)
    given = parallel.pp_layout
    if given and isinstance(given[0], list):
        stages = tuple(tuple(patterns) for patterns in given if isinstance(patterns, list))
        _check_number(KEY, "stages", len(stages), p * v)
    else:
        split = (
            parse_layout(given, n_layers, p * v, n_prediction_layers)  # type: ignore[arg-type]
            if given
            else split_layers(
                n_layers, p * v, head_weight, stage_ranks(placement, p, v), encoder_weight
            )
        )
        if any(stage.prediction_layers for stage in split[:-1]):
            raise ConfigError(
                f"{KEY} = {given!r} has m in another stage than L, but MTP layers use the final "
                "norm and the head; write all m in the last stage, as in Ett|tmL"
            )
        stages = tuple(stage_modules(stage, names) for stage in split)
    ranks = stage_ranks(placement, p, v)
    for rank in range(p):
        if not any(stages[stage] for stage, holder in enumerate(ranks) if holder == rank):
            raise ConfigError(f"{KEY} = {given!r} leaves pipeline rank {rank} empty; add a module")
    splits = any(action.kind in (Kind.INPUT, Kind.WEIGHT) for row in actions for action in row)
    if not parallel.defer_head:
        return Layout(stages, ranks, order, splits)
    deferred = functools.partial(_defer_head_in, order, p * v - 1, parallel.defer_head)
    return Layout(stages, ranks, deferred, splits, names.head)


def stage_modules(stage: "Stage", names: StageNames) -> tuple[str, ...]:
    """Return the patterns of a stage's modules."""
    layers = tuple(names.layer.format(i) for i in stage.layers)
    first = names.embedding if stage.embedding else ()
    return (*first, *layers, *((*names.mtp, *names.head) if stage.head else ()))


def _defer_head_in(order: Callable[[int], Order], last_stage: int, limit: int, m: int) -> Order:
    return defer_head(order(m), last_stage, limit)


def _placement_of_csv(path: Path, p: int) -> Placement:
    """Infer the placement from the row of rank 0: "v" if rank 0 has the last of 2p stages."""
    try:
        first = read_text(path, TEXT_BYTES).split("\n", 1)[0]
    except (OSError, ValueError) as error:
        raise ConfigError(f"parallel.schedule = {str(path)!r}: {cause_of(error, path)}") from None
    cells = [cell.strip() for cell in first.split(",")]
    return "v" if any(cell.startswith(f"{2 * p - 1}F") for cell in cells) else "loop"


def split_layers(
    n_layers: int,
    n_stages: int,
    head_weight: float = 1.0,
    ranks: Sequence[int] | None = None,
    encoder_weight: float = 0.0,
) -> list[Stage]:
    """Balance layers, first over ranks and then over the stages of each rank.

    A weight is a time relative to one layer; the embedding, a lookup, has weight 0. The head of
    Llama 3 8B at 8192 tokens has weight 2.1: a head has vocabulary * width parameters, a layer
    about 12 width² and attention.

    If stages cannot be equal, later stages get the additional layers, since earlier ranks hold the
    activations of more micro-batches (rank r of p holds p - r under 1F1B).

    Args:
        n_layers: number of decoder layers of the model.
        n_stages: number of stages, parallel.pp * parallel.stages_per_rank.
        head_weight: time of the final norm, the head and the loss.
        ranks: the rank of each stage; None: one stage per rank.
        encoder_weight: time of an encoder before the first layer.

    Returns:
        The stages. Only the first and the last stage can have no layers: if the head takes as long
        as another stage, or if the model has fewer layers than stages.

    Raises:
        ConfigError: more stages than layers plus 2 (embedding and head), or a negative weight.
    """
    if n_stages < 1 or n_stages > n_layers + 2:
        raise ConfigError(
            f"parallel.pp x parallel.stages_per_rank = {n_stages} stages, but a model of "
            f"{n_layers} layers fills 1 to {n_layers + 2} (each layer, the embedding, the head)"
        )
    if head_weight < 0:
        raise ConfigError(f"head_weight = {head_weight}: a time cannot be negative; use 0 or more")
    # A stage in the middle has at least one layer: an empty one would only forward activations.
    counts = [int(0 < stage < n_stages - 1) for stage in range(n_stages)]
    loads = [float(count) for count in counts]
    loads[-1] += head_weight
    loads[0] += encoder_weight
    ranks = range(n_stages) if ranks is None else ranks
    rank_loads = dict.fromkeys(ranks, 0.0)
    for stage, rank in enumerate(ranks):
        rank_loads[rank] += loads[stage]
    for _ in range(n_layers - sum(counts)):
        # Layers have equal weights, so assigning each to the rank with the least load is optimal.
        lightest = min(
            reversed(range(n_stages)), key=lambda stage: (rank_loads[ranks[stage]], loads[stage])
        )
        counts[lightest] += 1
        loads[lightest] += 1
        rank_loads[ranks[lightest]] += 1
    return _stages(counts)


def parse_layout(
    layout: str | Sequence[int], n_layers: int, n_stages: int, n_prediction_layers: int = 0
) -> list[Stage]:
    """Parse a user's layout: layers per stage, `[5, 6, 6, 5]`, or a string, `Ett|tt|ttL`.

    Args:
        layout: numbers of layers, or a string; the module's docstring has the grammar. Stages may
            be empty.
        n_layers: number of decoder layers of the model.
        n_stages: number of stages, parallel.pp * parallel.stages_per_rank.
        n_prediction_layers: number of multi-token-prediction layers of the model.

    Raises:
        ConfigError: a syntax error, with its position; a wrong number of stages or layers; E is not
            once and first, or L not once and last; m before a t, or m in a model without MTP.
    """
    if not isinstance(layout, str):
        return _from_counts(list(layout), n_layers, n_stages)
    items = _LayoutParser(layout, n_layers + n_prediction_layers + n_stages).read()
    _check_once(layout, items, "E", 0, "first")
    _check_once(layout, items, "L", len(items) - 1, "last")
    _check_prediction_layers(layout, items, n_prediction_layers)
    letters = "".join(letter for letter, _ in items)
    _check_number(layout, "stages", letters.count("|") + 1, n_stages)
    _check_number(layout, "layers (t)", letters.count("t"), n_layers)
    parts = letters.split("|")
    return _stages([part.count("t") for part in parts], [part.count("m") for part in parts])


def _stages(counts: Sequence[int], prediction: Sequence[int] = ()) -> list[Stage]:
    starts = [sum(counts[:i]) for i in range(len(counts))]
    return [
        Stage(
            embedding=i == 0,
            layers=range(start, start + count),
            head=i == len(counts) - 1,
            prediction_layers=prediction[i] if prediction else 0,
        )
        for i, (start, count) in enumerate(zip(starts, counts, strict=True))
    ]


def _from_counts(counts: Sequence[int], n_layers: int, n_stages: int) -> list[Stage]:
    for i, count in enumerate(counts):
        if type(count) is not int or count < 0:
            raise ConfigError(
                f"{KEY} = {counts}: stage {i} has {count!r} layers; give a whole number, at least 0"
            )
    _check_number(counts, "stages", len(counts), n_stages)
    _check_number(counts, "layers", sum(counts), n_layers)
    return _stages(counts)


Item = tuple[str, int]
"""A letter or a |, and its position in the layout string."""


_MAX_ITEMS = 1_000_000
_MAX_DEPTH = 50


class _LayoutParser:
    """Parser of a layout string: items = ((letter | "|" | "(" items ")") ["*" number])*.

    Args:
        text: the layout string.
        most: the largest legal number of repetitions.
    """

    def __init__(self, text: str, most: int) -> None:
        self.text = text
        self.most = most
        self.at = self._open = 0

    def read(self) -> list[Item]:
        """Parse the whole string and expand repetitions."""
        items = self._items()
        if self.at < len(self.text):
            raise _error(self.text, self.at, "unmatched )")
        return items

    def _items(self) -> list[Item]:
        items: list[Item] = []
        while (letter := self._peek()) and letter != ")":
            unit = self._group() if letter == "(" else self._letter(letter)
            times = self._times()
            if len(items) + len(unit) * times > _MAX_ITEMS:
                raise _error(self.text, self.at - 1, f"more than {_MAX_ITEMS} items; repeat fewer")
            items += unit * times
        return items

    def _peek(self) -> str:
        """Skip ignored characters; return the next character, or an empty string at the end."""
        while self.text[self.at : self.at + 1] in (",", " ", "\n", "\t"):
            self.at += 1
        return self.text[self.at : self.at + 1]

    def _letter(self, letter: str) -> list[Item]:
        if letter not in LETTERS and letter != "|":
            known = ", ".join(f"{name} ({meaning})" for name, meaning in LETTERS.items())
            raise _error(self.text, self.at, f"{letter!r} is unknown; use {known}, | ( ) *")
        self.at += 1
        return [(letter, self.at - 1)]

    def _group(self) -> list[Item]:
        start = self.at
        self.at += 1
        self._open += 1
        if self._open > _MAX_DEPTH:
            raise _error(self.text, start, f"more than {_MAX_DEPTH} nested groups; use fewer")
        items = self._items()
        if self._peek() != ")":
            raise _error(self.text, start, "this ( is not closed; add a )")
        self.at += 1
        self._open -= 1
        return items

    def _times(self) -> int:
        if self._peek() != "*":
            return 1
        start = self.at
        self.at += 1
        self._peek()
        digits = self.at
        while self.text[self.at : self.at + 1] in tuple("0123456789"):
            self.at += 1
        number = self.text[digits : self.at]
        if not 0 < len(number) < 10 or not 1 <= int(number) <= self.most:
            raise _error(
                self.text,
                start,
                f"* is followed by {shorten(number) or 'no number'}; use a number from 1 to "
                f"{self.most}",
            )
        return int(number)


def _error(layout: str, position: int, rule: str) -> ConfigError:
    return ConfigError(f"{KEY} = {shorten(repr(layout))}, character {position + 1}: {rule}")


def _check_number(layout: str | Sequence[int], what: str, found: int, right: int) -> None:
    if found != right:
        source = "parallel.pp x parallel.stages_per_rank" if what == "stages" else "the model"
        verb = "is" if what == "stages" else "has"
        raise ConfigError(f"{KEY} = {layout!r} has {found} {what}, but {source} {verb} {right}")


def _check_once(layout: str, items: list[Item], letter: str, place: int, word: str) -> None:
    """Check that a letter, E or L, occurs once, at index `place` of the items."""
    positions = [i for i, (found, _) in enumerate(items) if found == letter]
    if not positions:
        raise ConfigError(
            f"{KEY} = {layout!r} has no {letter} ({LETTERS[letter]}); write it {word}"
        )
    if wrong := [i for i in positions if i != place]:
        raise _error(
            layout,
            items[wrong[0]][1],
            f"{letter} ({LETTERS[letter]}) must occur once, as the {word} letter",
        )


def _check_prediction_layers(layout: str, items: list[Item], right: int) -> None:
    """Check that m comes after every t, once per multi-token-prediction layer of the model."""
    found = [i for i, (letter, _) in enumerate(items) if letter == "m"]
    if found and right == 0:
        rule = "m: this model has no multi-token-prediction layers; leave m out"
        raise _error(layout, items[found[0]][1], rule)
    _check_number(layout, "multi-token-prediction layers (m)", len(found), right)
    late = [
        at for i, (letter, at) in enumerate(items) if letter == "t" and i > min(found, default=i)
    ]
    if late:
        raise _error(layout, late[0], "this t comes after an m; write m after every t")
