"""What a rank sends for one attention: formulas and figures of docs/context-details.md, counted."""

import math
import re
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtron.config import CpMethod
from dtron.parallelisms.context.attention import ContextAttention
from dtron.parallelisms.context.blocks import Blocks
from dtron.parallelisms.context.layout import layout_of
from dtron.parallelisms.context.split import Split
from dtron.run.collective_counter import CollectiveCounter
from tests.harness import run_ranks
from tests.parallelisms.context.test_context_attention import groups

PAGE = Path(__file__).parents[3] / "docs" / "context-details.md"
BATCH, TOKENS, HEADS, SIZE = 2, 32, 8, 4
Sent = dict[str, int]
"""Bytes by collective."""


def formulas(
    method: CpMethod, t: int, h: int, g: int, k: int, b: int, o: int, i: int
) -> list[Sent]:
    """Forward and backward: t tokens of a rank, h heads of width k, g of keys and values, b bytes a
    number; cp = o x i."""
    repeated = math.lcm(g, i)
    keys, due = 2 * t * repeated * k * b, 2 * t * repeated * k * 4
    exchanged = {"all_to_all": 2 * t * (h + repeated) * k * b * (i - 1) // i} if i > 1 else {}
    if method == "all_gather":
        gathered = {"all_gather": (o - 1) * keys}
        return [gathered, {**gathered, "reduce_scatter": (o - 1) * due}]
    if o == 1:
        return [exchanged, exchanged]
    passed = (o - 1) * keys
    return [{**exchanged, "send": passed}, {**exchanged, "send": passed + o * due}]


def sent(counter: CollectiveCounter, group: dist.ProcessGroup) -> Sent:
    """Bytes that leave a rank: the counter tells those of the whole, of whose n parts one stays."""
    found: Sent = {}
    for axis in counter.table().values():
        for name, figures in axis.items():
            size, n = figures["bytes"], group.size()
            found[name] = size if name == "send" else size * (n - 1) // n
    return {name: size for name, size in found.items() if name != "recv"}


def count(method: CpMethod, kv_heads: int, width: int, inner: int, packed: bool) -> list[Sent]:
    """Forward and backward of one attention on a rank."""
    cp, rank = dist.get_world_size(), dist.get_rank()
    shape = layout_of(method, cp, inner)
    inside, between = groups(shape.inner)
    documents = (torch.arange(TOKENS) >= 5).long().expand(BATCH, -1) if packed else None
    tables = Split(documents, (BATCH, TOKENS), cp).tables({method: shape}, rank)
    dtype = torch.bfloat16 if width == 2 else torch.float32
    q, k, v = (
        torch.randn(BATCH, TOKENS // cp, n, SIZE, dtype=dtype, requires_grad=True)
        for n in (HEADS, kv_heads, kv_heads)
    )
    attention = ContextAttention(method, shape, between, inside, "math")
    operator = watch_operator(between)
    with CollectiveCounter({}) as forward:
        out = attention(q, k, v, tables)
    ways = [{**sent(forward, inside), **operator}]
    with CollectiveCounter({}) as backward:
        out.sum().backward()
    return [*ways, {**sent(backward, inside), **operator}]


def watch_operator(group: dist.ProcessGroup) -> Sent:
    """What the operator's last call has sent: a counter outside does not see into it."""
    found: Sent = {}
    for name in ("attend", "differentiate"):
        original = getattr(Blocks, name)

        def call(self, *args, original=original):
            with CollectiveCounter({}) as inside:
                result = original(self, *args)
            found.clear()
            found.update(sent(inside, group))
            return result

        setattr(Blocks, name, call)
    return found


CASES: list[tuple[CpMethod, int, int, int, int, bool]] = [
    ("ring", 4, 1, 4, 2, False),
    ("ring", 2, 1, 1, 4, True),
    ("all_gather", 4, 1, 2, 2, True),
    ("all_gather", 2, 1, 8, 4, False),
    ("ulysses", 4, 4, 4, 2, False),
    ("ulysses", 4, 4, 2, 4, True),
    ("hierarchical", 4, 2, 4, 2, False),
    ("hierarchical", 8, 4, 2, 2, True),
]


@pytest.mark.parametrize(("method", "cp", "inner", "kv_heads", "width", "packed"), CASES, ids=str)
def test_bytes_that_a_rank_sends(
    method: CpMethod, cp: int, inner: int, kv_heads: int, width: int, packed: bool
) -> None:
    sizes = (BATCH * TOKENS // cp, HEADS, kv_heads, SIZE, width)
    wanted = formulas(method, *sizes, cp // inner, inner)
    chosen = inner if method == "hierarchical" else 0
    for found in run_ranks(cp, count, method, kv_heads, width, chosen, packed):
        assert found == wanted


def test_the_figures_of_the_documentation() -> None:
    """Rows of `method | MiB forward | MiB backward`, for Llama-3-8B at 131,072 tokens over 8."""
    rows = re.findall(
        r"^\| `(\w+)`[^|]* \| (\d+) MiB \| (\d+) MiB \|", PAGE.read_text(), re.MULTILINE
    )
    assert [name for name, _, _ in rows] == ["ring", "all_gather", "ulysses", "hierarchical"]
    for name, *messages in rows:
        shape = layout_of(name, 8)
        ways = formulas(name, 131_072 // 8, 32, 8, 128, 2, shape.outer, shape.inner)
        assert [int(x) for x in messages] == [sum(way.values()) / 2**20 for way in ways], name
