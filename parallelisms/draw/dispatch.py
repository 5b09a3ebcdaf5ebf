"""Which rank holds which part of which expert, and how rows get there, drawn.

    python -m dtron.parallelisms.draw.dispatch --dp-shard 4 --tp 2 --ep 4 --etp 2 --mesh mesh.svg
    python -m dtron.parallelisms.draw.dispatch --dp-shard 4 --ep 4 --rows rows.svg

prints the ranks by both views. The first picture has a row a rank: its place on the axes of all
else, on those of experts, and what it holds of the experts, whose numbers run to the right and
whose width runs down. The second follows one layer's rows through the all-to-all.
"""

import argparse
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from dtron.config import Degree, resolve_expert_degrees
from dtron.errors import ConfigError
from dtron.io.svg import FRAME, heading, picture, rect, text
from dtron.parallelisms.draw.timelines import COLOURS, WIDTH

TONES = tuple(light for _, light in COLOURS.values())
INNER: tuple[Degree, ...] = ("dp_shard", "cp", "tp")
APART = ("edp_shard", "ep", "etp")
LEFT, TOP, ROW, BOX = 64, 64, 30, 22


@dataclass(frozen=True)
class Views:
    """Ranks of one pipeline stage and replica, by both views.

    Args:
        dense: degrees of dp_shard, cp, tp.
        apart: degrees of edp_shard, ep, etp.
    """

    dense: tuple[int, int, int]
    apart: tuple[int, int, int]

    @property
    def ranks(self) -> range:
        """All of them."""
        return range(self.apart[0] * self.apart[1] * self.apart[2])

    def place(self, rank: int, apart: bool) -> tuple[int, int, int]:
        """A rank's index on each of the three axes."""
        _, middle, inner = self.apart if apart else self.dense
        return rank // (middle * inner), rank // inner % middle, rank % inner


def views(degrees: Mapping[Degree, int], ep: int, etp: int) -> Views:
    """Both views of the ranks.

    Raises:
        ConfigError: ep x etp does not divide them.
    """
    whole: dict[Degree, int] = {"pp": 1, "dp_replicate": 1, **degrees}
    found = resolve_expert_degrees(whole, ep, etp)
    dense = (whole["dp_shard"], whole["cp"], whole["tp"])
    return Views(dense, (found["edp_shard"], found["ep"], found["etp"]))


def draw_mesh(views: Views, n_experts: int) -> str:
    """A row a rank as SVG; what it computes is coloured by ep, and of that it keeps the part of
    its edp_shard, which is framed."""
    height = TOP + ROW * len(views.ranks) + 40
    shown = _named(INNER, views.dense), _named(APART, views.apart)
    parts = [heading(8, f"{shown[0]}: experts on {shown[1]}")]
    columns = [(LEFT, "all else"), (LEFT + 150, "experts"), (LEFT + 310, f"{n_experts} experts")]
    parts += [text(x, TOP - 26, words, fill="#666") for x, words in columns]
    for rank in views.ranks:
        y = TOP + ROW * rank
        parts.append(text(8, y + 16, f"rank {rank}"))
        for x, names, apart in ((LEFT, INNER, False), (LEFT + 150, APART, True)):
            place = " ".join(map(str, views.place(rank, apart)))
            parts.append(text(x, y + 16, place))
            if rank == 0:
                parts.append(text(x, TOP - 10, ", ".join(names), font_size=10))
        parts.append(_held(views, rank, n_experts, LEFT + 310, y))
    caption = "Coloured: what a rank computes. Framed: what it keeps of that between steps."
    return picture(WIDTH, height, [*parts, text(LEFT, height - 14, caption)])


def _held(views: Views, rank: int, n_experts: int, left: int, top: int) -> str:
    (shard, ep, etp), (n_shards, n_ep, n_etp) = views.place(rank, True), views.apart
    step = (WIDTH - left - 12) / n_experts
    each, tall = n_experts // n_ep, BOX / n_etp
    x, y, wide = left + step * each * ep, top + tall * etp, step * each
    own = rect(x + wide * shard / n_shards, y, wide / n_shards, tall, "none", stroke="#222")
    computed = rect(x, y, wide, tall, TONES[ep % len(TONES)])
    return rect(left, top, step * n_experts, BOX, FRAME) + computed + own


Row = tuple[int, int, int]
"""(rank it comes from, token there, expert)."""


@dataclass(frozen=True)
class Journey:
    """Rows of one layer through the all-to-all, by rank."""

    sorted: list[list[Row]]
    """Where they come from, by expert."""
    arrived: list[list[Row]]
    """On the ranks of their experts, by sender and expert."""
    computed: list[list[Row]]
    """There, by expert."""


def journey(choices: Sequence[Sequence[Sequence[int]]], n_experts: int) -> Journey:
    """Follow rows to as many ranks as there are senders, each with as many experts.

    Args:
        choices: by rank and token, the experts that it takes.
    """
    each = n_experts // len(choices)
    rows = [
        sorted(
            ((rank, token, e) for token, taken in enumerate(of_rank) for e in taken),
            key=lambda row: row[2],
        )
        for rank, of_rank in enumerate(choices)
    ]
    arrived = [
        [row for of_rank in rows for row in of_rank if row[2] // each == rank]
        for rank in range(len(rows))
    ]
    return Journey(rows, arrived, [sorted(a, key=lambda row: row[2]) for a in arrived])


def draw_rows(journey: Journey, n_experts: int) -> str:
    """The three stages as SVG: a box is a row, in the colour of the rank that has its expert, named
    by a letter for the rank it comes from and its token's number there, and below it the expert."""
    stages = {
        "1. each rank sorts its rows by expert": journey.sorted,
        "2. all-to-all: rows by sender and expert": journey.arrived,
        "3. sorted by expert, for one grouped product a matrix": journey.computed,
    }
    n_ranks = len(journey.sorted)
    block = ROW * n_ranks + 34
    height = TOP + block * len(stages) + 10
    most = max(len(rows) for ranks in stages.values() for rows in ranks)
    step = min(34.0, (WIDTH - LEFT - 12) / most)
    parts = [heading(8, f"{n_experts} experts on {n_ranks} ranks: the rows of one layer")]
    for number, (title, ranks) in enumerate(stages.items()):
        y = TOP + block * number
        parts.append(text(LEFT, y - 8, title, fill="#666"))
        for rank, rows in enumerate(ranks):
            top = y + ROW * rank
            parts.append(text(8, top + 17, f"rank {rank}"))
            places = enumerate(rows)
            parts += [
                _box(LEFT + step * i, top, step, row, n_experts // n_ranks) for i, row in places
            ]
    last = "4. the results go back the same ways and are summed by weight"
    return picture(WIDTH, height, [*parts, text(LEFT, height - 16, last, fill="#666")])


def _box(x: float, y: int, step: float, row: Row, each: int) -> str:
    sender, token, expert = row
    middle, name = x + step / 2, f"{chr(ord('a') + sender)}{token}"
    return (
        rect(x, y, step, ROW - 4, TONES[expert // each % len(TONES)], stroke="#fff")
        + text(middle, y + 11, name, font_size=10, text_anchor="middle")
        + text(middle, y + 22, expert, font_size=9, text_anchor="middle", fill="#555")
    )


def _named(names: Sequence[str], degrees: Sequence[int]) -> str:
    named = zip(names, degrees, strict=True)
    return ", ".join(f"{name} {n}" for name, n in named if n > 1) or f"{names[-1]} 1"


def drawn_choices(n_ranks: int, n_experts: int, tokens: int, top_k: int) -> list[list[list[int]]]:
    """By rank and token, different experts, drawn from a fixed seed."""
    draw = random.Random(n_experts)
    return [[draw.sample(range(n_experts), top_k) for _ in range(tokens)] for _ in range(n_ranks)]


def summary(views: Views) -> str:
    """The ranks by both views, a line each."""
    lines = []
    for rank in views.ranks:
        dense, apart = (views.place(rank, view) for view in (False, True))
        both = zip((*INNER, *APART), (*dense, *apart), strict=True)
        lines.append(f"rank {rank}  " + "  ".join(f"{axis} {i}" for axis, i in both))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw from the command line; 0, or 2 after an error in the arguments."""
    args = _parser().parse_args(arguments)
    try:
        degrees: dict[Degree, int] = {"dp_shard": args.dp_shard, "cp": args.cp, "tp": args.tp}
        found = views(degrees, args.ep, args.etp)
        if args.experts % args.ep:
            raise ConfigError(f"--ep {args.ep} does not divide --experts {args.experts}")
        if args.mesh:
            args.mesh.write_text(draw_mesh(found, args.experts), encoding="utf-8")
        if args.rows:
            choices = drawn_choices(args.ep, args.experts, args.tokens, args.top_k)
            args.rows.write_text(
                draw_rows(journey(choices, args.experts), args.experts), encoding="utf-8"
            )
    except (ConfigError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(summary(found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dtron.parallelisms.draw.dispatch",
        description="Show which rank holds which experts, and how rows get there.",
    )
    for axis in ("dp-shard", "cp", "tp", "ep", "etp"):
        parser.add_argument(f"--{axis}", type=int, default=1, help="ranks of this axis")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=5, help="tokens a rank, of the rows")
    parser.add_argument("--top-k", type=int, default=2, help="experts a token, of the rows")
    parser.add_argument("--mesh", type=Path, help="where to write the picture of the ranks")
    parser.add_argument("--rows", type=Path, help="where to write the picture of the rows")
    return parser


if __name__ == "__main__":
    sys.exit(main())
