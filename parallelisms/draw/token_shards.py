"""Which rank holds which tokens of packed documents, and a picture of it.

    python -m dtron.parallelisms.draw.token_shards --cp 4 --documents 19 13 --out shares.svg

prints how many tokens and how many pairs of query and key each rank has, and draws the sequence:
its documents end to end, then a row a rank. What is drawn is what `Split` gives to a run.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch

from dtron.errors import ConfigError
from dtron.io.svg import FRAME, element, heading, key, picture, rect, text
from dtron.parallelisms.context.load_balance import work
from dtron.parallelisms.context.split import Split
from dtron.parallelisms.draw.timelines import COLOURS, LEFT, ROW, TOP, WIDTH

RIGHT = 92
"""Room for a rank's pairs."""
TONES = tuple(COLOURS.values())
"""(dark, light) of each rank, in turn: early and late pieces."""


@dataclass(frozen=True)
class Shares:
    """One sequence over the ranks of the cp axis.

    Args:
        lengths: of its documents, in order.
        piece: of each token, 0 ... 2 * cp - 1.
        pairs: of query and key that each rank computes.
    """

    lengths: tuple[int, ...]
    piece: tuple[int, ...]
    pairs: tuple[int, ...]

    @property
    def cp(self) -> int:
        """Ranks."""
        return len(self.pairs)

    def rank(self, token: int) -> int:
        """Who holds a token."""
        return min(self.piece[token], 2 * self.cp - 1 - self.piece[token])

    def is_early(self, token: int) -> bool:
        """Whether it is in the rank's early piece of its document."""
        return self.piece[token] < self.cp

    def place(self, token: int) -> int:
        """Its number in its document."""
        starts = accumulate(self.lengths, initial=0)
        return token - max(start for start in starts if start <= token)


def shares(lengths: Sequence[int], cp: int) -> Shares:
    """Cut one sequence of documents of these lengths.

    Raises:
        ConfigError: 2 * cp does not divide its tokens, or a document is empty.
    """
    if cp < 1 or min(lengths, default=0) < 1:
        raise ConfigError("cp and the lengths of documents are at least 1")
    documents = np.arange(len(lengths)).repeat(lengths)[None]
    split = Split(torch.from_numpy(documents), documents.shape, cp)
    pairs = work(split.piece, documents, 2 * cp)
    return Shares(tuple(lengths), tuple(split.piece[0].tolist()), tuple(pairs.tolist()))


def draw(shares: Shares, title: str) -> str:
    """The shares as an SVG picture that stands alone, with its own white background.

    A box is a token with its number in its document, in the colour of its rank; dark in an early
    piece, light in a late one.
    """
    height = TOP + ROW * (shares.cp + 1) + 42
    step = (WIDTH - LEFT - RIGHT) / len(shares.piece)
    tokens = range(len(shares.piece))
    parts = [heading(LEFT, title), _row("tokens", 0, step, shares, tokens, "")]
    for rank in range(shares.cp):
        mine = [token for token in tokens if shares.rank(token) == rank]
        label = f"{shares.pairs[rank]} pairs"
        parts.append(_row(f"rank {rank}", rank + 1, step, shares, mine, label))
    parts += [_borders(shares, step), _caption(shares, height - 14)]
    return picture(WIDTH, height, parts)


def _row(
    name: str, number: int, step: float, shares: Shares, tokens: Sequence[int], label: str
) -> str:
    """A line of the picture: its name, its tokens in their places, and a word on the right."""
    y = TOP + ROW * number
    parts = [
        text(8, y + 17, name),
        text(WIDTH - RIGHT + 8, y + 17, label),
        rect(LEFT, y, WIDTH - LEFT - RIGHT, ROW - 2, FRAME),
    ]
    for token in tokens:
        early, place = shares.is_early(token), str(shares.place(token))
        fill = TONES[shares.rank(token) % len(TONES)][0 if early else 1]
        x = LEFT + step * token
        parts.append(rect(x, y, step, ROW - 2, fill, stroke="#fff"))
        if step >= 3 + 6 * len(place):
            style = {"fill": "#fff" if early else "#222", "text_anchor": "middle"}
            parts.append(text(x + step / 2, y + 16, place, font_size=10, **style))
    return "\n".join(parts)


def _borders(shares: Shares, step: float) -> str:
    """A line wherever a document ends and another begins."""
    ends = list(accumulate(shares.lengths))[:-1]
    low, high = TOP - 4, TOP + ROW * (shares.cp + 1) + 2
    lines = [f"M{LEFT + step * end:.1f} {low}V{high}" for end in ends]
    return element("path", d="".join(lines), stroke="#222", stroke_width=2)


def _caption(shares: Shares, y: int) -> str:
    dark, light = TONES[0]
    rest = (
        "late piece; a number is a token's place in its document. Pairs of query and key: "
        f"{sum(shares.pairs)} in all, at most {_excess(shares)} more on a rank than on average"
    )
    return key(LEFT, y, dark, "early piece") + key(LEFT + 96, y, light, rest)


def _excess(shares: Shares) -> str:
    return f"{max(shares.pairs) * shares.cp / sum(shares.pairs) - 1:.1%}"


def summary(shares: Shares) -> str:
    """Tokens and pairs of each rank in a few lines of text."""
    tokens = len(shares.piece) // shares.cp
    lines = [
        f"rank {rank}  {tokens} tokens, {n} pairs of query and key"
        for rank, n in enumerate(shares.pairs)
    ]
    return "\n".join([*lines, f"at most {_excess(shares)} more than on average"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw shares from the command line; 0, or 2 after an error in the arguments."""
    args = _parser().parse_args(arguments)
    try:
        found = shares(args.documents, args.cp)
        if args.out:
            args.out.write_text(draw(found, title_of(found)), encoding="utf-8")
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(title_of(found), summary(found), sep="\n")
    return 0


def title_of(shares: Shares) -> str:
    """Such as `19 + 13 tokens over 4 ranks`."""
    return f"{' + '.join(map(str, shares.lengths))} tokens over {shares.cp} ranks"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dtron.parallelisms.draw.token_shards",
        description="Show which rank holds which tokens of packed documents.",
    )
    parser.add_argument("--cp", type=int, default=4, help="ranks that share the sequence")
    parser.add_argument("--documents", type=int, nargs="+", default=[32], help="their lengths")
    parser.add_argument("--out", type=Path, help="where to write the picture, an SVG file")
    return parser


if __name__ == "__main__":
    sys.exit(main())
