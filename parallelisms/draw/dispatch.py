"""Draw which rank holds which shard of which expert, and how token copies are dispatched.

    python -m dtron.parallelisms.draw.dispatch --dp-shard 4 --tp 2 --ep 4 --etp 2 --mesh mesh.svg
    python -m dtron.parallelisms.draw.dispatch --dp-shard 4 --ep 4 --rows rows.svg

prints each rank's index on the dense axes and on the expert axes. The first picture (--mesh) has
one row per rank, with both indices and the rank's shard of the experts (x axis: expert; y axis:
width). The second picture (--rows) follows the token copies of one layer through the all-to-all.
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
DENSE: tuple[Degree, ...] = ("dp_shard", "cp", "tp")
EXPERTS = ("edp_shard", "ep", "etp")
LEFT, TOP, ROW, BOX = 64, 64, 30, 22


@dataclass(frozen=True)
class Views:
    """Two meshes over the ranks of one pipeline stage and replica.

    Args:
        dense: degrees of dp_shard, cp, tp.
        experts: degrees of edp_shard, ep, etp.
    """

    dense: tuple[int, int, int]
    experts: tuple[int, int, int]

    @property
    def ranks(self) -> range:
        """All ranks."""
        return range(self.experts[0] * self.experts[1] * self.experts[2])

    def place(self, rank: int, experts: bool) -> tuple[int, int, int]:
        """Return a rank's index on the three expert axes, or on the three dense axes."""
        _, middle, inner = self.experts if experts else self.dense
        return rank // (middle * inner), rank // inner % middle, rank % inner


def views(degrees: Mapping[Degree, int], ep: int, etp: int) -> Views:
    """Make the dense mesh and the expert mesh over the same ranks.

    Raises:
        ConfigError: ep x etp does not divide the number of ranks.
    """
    whole: dict[Degree, int] = {"pp": 1, "dp_replicate": 1, **degrees}
    found = resolve_expert_degrees(whole, ep, etp)
    dense = (whole["dp_shard"], whole["cp"], whole["tp"])
    return Views(dense, (found["edp_shard"], found["ep"], found["etp"]))


def draw_mesh(views: Views, n_experts: int) -> str:
    """Draw both meshes as SVG, with one row per rank.

    The coloured box is the shard of the experts that the rank computes, in the colour of its ep
    index. The framed box inside is the part that FSDP (edp_shard) stores on the rank.
    """
    height = TOP + ROW * len(views.ranks) + 40
    shown = _named(DENSE, views.dense), _named(EXPERTS, views.experts)
    parts = [heading(8, f"{shown[0]}: experts on {shown[1]}")]
    columns = [(LEFT, "dense"), (LEFT + 150, "experts"), (LEFT + 310, f"{n_experts} experts")]
    parts += [text(x, TOP - 26, words, fill="#666") for x, words in columns]
    for rank in views.ranks:
        y = TOP + ROW * rank
        parts.append(text(8, y + 16, f"rank {rank}"))
        for x, names, experts in ((LEFT, DENSE, False), (LEFT + 150, EXPERTS, True)):
            place = " ".join(map(str, views.place(rank, experts)))
            parts.append(text(x, y + 16, place))
            if rank == 0:
                parts.append(text(x, TOP - 10, ", ".join(names), font_size=10))
        parts.append(_experts_of(views, rank, n_experts, LEFT + 310, y))
    caption = "Coloured: shard that a rank computes. Framed: part of it that the rank keeps (FSDP)."
    return picture(WIDTH, height, [*parts, text(LEFT, height - 14, caption)])


def _experts_of(views: Views, rank: int, n_experts: int, left: int, top: int) -> str:
    (shard, ep, etp), (n_shards, n_ep, n_etp) = views.place(rank, True), views.experts
    step = (WIDTH - left - 12) / n_experts
    each, tall = n_experts // n_ep, BOX / n_etp
    x, y, wide = left + step * each * ep, top + tall * etp, step * each
    own = rect(x + wide * shard / n_shards, y, wide / n_shards, tall, "none", stroke="#222")
    computed = rect(x, y, wide, tall, TONES[ep % len(TONES)])
    return rect(left, top, step * n_experts, BOX, FRAME) + computed + own


TokenCopy = tuple[int, int, int]
"""(rank of the token, index of the token on this rank, expert)."""


@dataclass(frozen=True)
class Dispatch:
    """Token copies of one layer on each rank, before and after the all-to-all."""

    sent: list[list[TokenCopy]]
    """Copies of each rank's tokens, sorted by expert."""
    received: list[list[TokenCopy]]
    """Copies for each rank's experts, sorted by (sender, expert)."""
    by_expert: list[list[TokenCopy]]
    """Copies for each rank's experts, sorted by expert."""


def dispatch(choices: Sequence[Sequence[Sequence[int]]], n_experts: int) -> Dispatch:
    """Dispatch token copies to experts that are spread evenly over the ranks.

    Args:
        choices: for each rank, for each of its tokens, the token's experts.
    """
    each = n_experts // len(choices)
    sent = [
        sorted(
            ((rank, token, e) for token, experts in enumerate(of_rank) for e in experts),
            key=lambda copy: copy[2],
        )
        for rank, of_rank in enumerate(choices)
    ]
    received = [
        [copy for of_rank in sent for copy in of_rank if copy[2] // each == rank]
        for rank in range(len(sent))
    ]
    return Dispatch(sent, received, [sorted(r, key=lambda copy: copy[2]) for r in received])


def draw_dispatch(dispatch: Dispatch, n_experts: int) -> str:
    """Draw the three states of a dispatch as SVG.

    Each box is one token copy. It shows a letter for the token's rank, the token's index on this
    rank and, below, the expert. Its colour shows the expert's rank.
    """
    states = {
        "1. each rank sorts its token copies by expert": dispatch.sent,
        "2. all-to-all: copies by sender and expert": dispatch.received,
        "3. sorted by expert, for one grouped matmul per matrix": dispatch.by_expert,
    }
    n_ranks = len(dispatch.sent)
    block = ROW * n_ranks + 34
    height = TOP + block * len(states) + 10
    most = max(len(copies) for ranks in states.values() for copies in ranks)
    step = min(34.0, (WIDTH - LEFT - 12) / most)
    parts = [heading(8, f"{n_experts} experts on {n_ranks} ranks: token copies of one layer")]
    for number, (title, ranks) in enumerate(states.items()):
        y = TOP + block * number
        parts.append(text(LEFT, y - 8, title, fill="#666"))
        for rank, copies in enumerate(ranks):
            top = y + ROW * rank
            parts.append(text(8, top + 17, f"rank {rank}"))
            parts += [
                _box(LEFT + step * i, top, step, copy, n_experts // n_ranks)
                for i, copy in enumerate(copies)
            ]
    last = "4. combine: an all-to-all back, then a weighted sum of each token's results"
    return picture(WIDTH, height, [*parts, text(LEFT, height - 16, last, fill="#666")])


def _box(x: float, y: int, step: float, copy: TokenCopy, each: int) -> str:
    sender, token, expert = copy
    middle, name = x + step / 2, f"{chr(ord('a') + sender)}{token}"
    return (
        rect(x, y, step, ROW - 4, TONES[expert // each % len(TONES)], stroke="#fff")
        + text(middle, y + 11, name, font_size=10, text_anchor="middle")
        + text(middle, y + 22, expert, font_size=9, text_anchor="middle", fill="#555")
    )


def _named(names: Sequence[str], degrees: Sequence[int]) -> str:
    named = zip(names, degrees, strict=True)
    return ", ".join(f"{name} {n}" for name, n in named if n > 1) or f"{names[-1]} 1"


def random_choices(n_ranks: int, n_experts: int, tokens: int, top_k: int) -> list[list[list[int]]]:
    """Choose `top_k` different experts for each rank and token, at random with a fixed seed."""
    rng = random.Random(n_experts)
    return [[rng.sample(range(n_experts), top_k) for _ in range(tokens)] for _ in range(n_ranks)]


def summary(views: Views) -> str:
    """Return one line of text per rank: its index on all axes."""
    lines = []
    for rank in views.ranks:
        dense, experts = (views.place(rank, view) for view in (False, True))
        both = zip((*DENSE, *EXPERTS), (*dense, *experts), strict=True)
        lines.append(f"rank {rank}  " + "  ".join(f"{axis} {i}" for axis, i in both))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 after an error in the arguments."""
    args = _parser().parse_args(arguments)
    try:
        degrees: dict[Degree, int] = {"dp_shard": args.dp_shard, "cp": args.cp, "tp": args.tp}
        found = views(degrees, args.ep, args.etp)
        if args.experts % args.ep:
            raise ConfigError(f"--ep {args.ep} does not divide --experts {args.experts}")
        if args.tokens < 1 or not 1 <= args.top_k <= args.experts:
            raise ConfigError(
                f"--tokens {args.tokens}, --top-k {args.top_k}: use at least 1 token, and between "
                f"1 and --experts {args.experts} experts per token"
            )
        if args.mesh:
            args.mesh.write_text(draw_mesh(found, args.experts), encoding="utf-8")
        if args.rows:
            choices = random_choices(args.ep, args.experts, args.tokens, args.top_k)
            drawing = draw_dispatch(dispatch(choices, args.experts), args.experts)
            args.rows.write_text(drawing, encoding="utf-8")
    except (ConfigError, OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(summary(found))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dtron.parallelisms.draw.dispatch",
        description="Show which rank holds which experts, and how tokens are dispatched to them.",
    )
    for axis in ("dp-shard", "cp", "tp", "ep", "etp"):
        parser.add_argument(f"--{axis}", type=int, default=1, help="degree of this axis")
    parser.add_argument("--experts", type=int, default=8, help="number of experts")
    parser.add_argument("--tokens", type=int, default=5, help="tokens per rank (--rows)")
    parser.add_argument("--top-k", type=int, default=2, help="experts per token (--rows)")
    parser.add_argument("--mesh", type=Path, help="file for the picture of the ranks")
    parser.add_argument("--rows", type=Path, help="file for the picture of the token copies")
    return parser


if __name__ == "__main__":
    sys.exit(main())
