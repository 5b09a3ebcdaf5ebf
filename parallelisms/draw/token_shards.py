"""Draw which cp rank holds which tokens of packed documents.

    python -m dtron.parallelisms.draw.token_shards --cp 4 --documents 19 13 --out shards.svg

prints each rank's number of tokens and of (query, key) pairs. The picture's first row is the whole
sequence; each further row has the tokens of one rank. `context.split.Split` computes the shards.
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
from dtron.parallelisms.context.load_balance import pairs_per_rank
from dtron.parallelisms.context.split import Split
from dtron.parallelisms.draw.timelines import COLOURS, LEFT, ROW, TOP, WIDTH

RIGHT = 92
"""Width of the column with each rank's number of pairs."""
TONES = tuple(COLOURS.values())
"""(dark, light) colours of each rank, for early and late chunks."""


@dataclass(frozen=True)
class Shards:
    """One sequence, sharded over the ranks of the cp axis.

    Args:
        lengths: lengths of its documents, in order.
        chunk: number of each token's chunk, 0 ... 2 * cp - 1.
        pairs: number of (query, key) pairs that each rank computes.
    """

    lengths: tuple[int, ...]
    chunk: tuple[int, ...]
    pairs: tuple[int, ...]

    @property
    def cp(self) -> int:
        """Number of cp ranks."""
        return len(self.pairs)

    def rank(self, token: int) -> int:
        """Return the rank that holds a token."""
        return min(self.chunk[token], 2 * self.cp - 1 - self.chunk[token])

    def is_early(self, token: int) -> bool:
        """Whether a token is in the rank's early chunk of its document."""
        return self.chunk[token] < self.cp

    def place(self, token: int) -> int:
        """Return a token's index in its document."""
        starts = accumulate(self.lengths, initial=0)
        return token - max(start for start in starts if start <= token)


def shard_documents(lengths: Sequence[int], cp: int) -> Shards:
    """Shard one sequence of documents of these lengths over cp ranks.

    Raises:
        ConfigError: 2 * cp does not divide the number of tokens, cp < 1, or a document is empty.
    """
    if cp < 1 or min(lengths, default=0) < 1:
        raise ConfigError(f"cp = {cp}, documents = {list(lengths)}: use numbers of at least 1")
    documents = np.arange(len(lengths)).repeat(lengths)[None]
    split = Split(torch.from_numpy(documents), documents.shape, cp)
    pairs = pairs_per_rank(split.chunk, documents, 2 * cp)
    return Shards(tuple(lengths), tuple(split.chunk[0].tolist()), tuple(pairs.tolist()))


def draw(shards: Shards, title: str) -> str:
    """Draw the shards as a standalone SVG picture.

    Each box is one token and shows the token's index in its document. It has the colour of the
    token's rank: dark in an early chunk, light in a late chunk.
    """
    height = TOP + ROW * (shards.cp + 1) + 42
    step = (WIDTH - LEFT - RIGHT) / len(shards.chunk)
    tokens = range(len(shards.chunk))
    parts = [heading(LEFT, title), _row("tokens", 0, step, shards, tokens, "")]
    for rank in range(shards.cp):
        of_rank = [token for token in tokens if shards.rank(token) == rank]
        label = f"{shards.pairs[rank]} pairs"
        parts.append(_row(f"rank {rank}", rank + 1, step, shards, of_rank, label))
    parts += [_borders(shards, step), _caption(shards, height - 14)]
    return picture(WIDTH, height, parts)


def _row(
    name: str, number: int, step: float, shards: Shards, tokens: Sequence[int], label: str
) -> str:
    """Draw a row of the picture: name, tokens at their positions, and a label on the right."""
    y = TOP + ROW * number
    parts = [
        text(8, y + 17, name),
        text(WIDTH - RIGHT + 8, y + 17, label),
        rect(LEFT, y, WIDTH - LEFT - RIGHT, ROW - 2, FRAME),
    ]
    for token in tokens:
        early, place = shards.is_early(token), str(shards.place(token))
        fill = TONES[shards.rank(token) % len(TONES)][0 if early else 1]
        x = LEFT + step * token
        parts.append(rect(x, y, step, ROW - 2, fill, stroke="#fff"))
        if step >= 3 + 6 * len(place):
            style = {"fill": "#fff" if early else "#222", "text_anchor": "middle"}
            parts.append(text(x + step / 2, y + 16, place, font_size=10, **style))
    return "\n".join(parts)


def _borders(shards: Shards, step: float) -> str:
    """Draw vertical lines between documents."""
    ends = list(accumulate(shards.lengths))[:-1]
    low, high = TOP - 4, TOP + ROW * (shards.cp + 1) + 2
    lines = [f"M{LEFT + step * end:.1f} {low}V{high}" for end in ends]
    return element("path", d="".join(lines), stroke="#222", stroke_width=2)


def _caption(shards: Shards, y: int) -> str:
    dark, light = TONES[0]
    rest = (
        "late chunk; a number is a token's index in its document. Pairs of query and key: "
        f"{sum(shards.pairs)} in all, at most {_excess(shards)} more on a rank than on average"
    )
    return key(LEFT, y, dark, "early chunk") + key(LEFT + 96, y, light, rest)


def _excess(shards: Shards) -> str:
    return f"{max(shards.pairs) * shards.cp / sum(shards.pairs) - 1:.1%}"


def summary(shards: Shards) -> str:
    """Return one line of text per rank: its numbers of tokens and of (query, key) pairs."""
    tokens = len(shards.chunk) // shards.cp
    lines = [
        f"rank {rank}  {tokens} tokens, {n} pairs of query and key"
        for rank, n in enumerate(shards.pairs)
    ]
    return "\n".join([*lines, f"at most {_excess(shards)} more than on average"])


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 0, or 2 after an error in the arguments."""
    args = _parser().parse_args(arguments)
    try:
        found = shard_documents(args.documents, args.cp)
        if args.out:
            args.out.write_text(draw(found, title_of(found)), encoding="utf-8")
    except (ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(title_of(found), summary(found), sep="\n")
    return 0


def title_of(shards: Shards) -> str:
    """Return the title of the picture: `19 + 13 tokens over 4 ranks`."""
    return f"{' + '.join(map(str, shards.lengths))} tokens over {shards.cp} ranks"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m dtron.parallelisms.draw.token_shards",
        description="Show which rank holds which tokens of packed documents.",
    )
    parser.add_argument("--cp", type=int, default=4, help="ranks that share the sequence")
    parser.add_argument("--documents", type=int, nargs="+", default=[32], help="lengths")
    parser.add_argument("--out", type=Path, help="SVG file for the picture")
    return parser


if __name__ == "__main__":
    sys.exit(main())
