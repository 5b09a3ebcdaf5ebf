"""Memory tables of a run as one HTML page.

Each rank has a chart of the measured and the planned bytes by class, the modules that hold most,
and the largest single entries. Names are escaped, since anyone who writes to the run directory can
choose them.
"""

from collections.abc import Iterator, Mapping, Sequence
from html import escape

from dtron.faults.memory import size
from dtron.faults.memory_table import CLASSES, MemoryTable
from dtron.io.svg import element, key, picture, rect, text
from dtron.plan.html_report import COLOURS, LEFT, ROW, WIDTH, document, table, x_axis
from dtron.plan.report import GIB

_OTHERS = "not attributed"
_NAMES = (*CLASSES, _OTHERS)
_MOST = 30
"""Rows of a table of modules or entries."""
Plan = Mapping[str, float]
"""The planner's bytes, by class and of `not attributed`; empty: there is no plan."""


def page(run: str, ranks: Sequence[tuple[MemoryTable, Plan]]) -> str:
    """Return the HTML page.

    Args:
        run: name of the run, plain text.
        ranks: the table of each rank and its plan.
    """
    title = f"Memory of {run}"
    parts = [element("h1", escape(title))]
    for rank, plan in ranks:
        parts += _of_rank(rank, plan)
    return document(title, parts)


def _of_rank(rank: MemoryTable, plan: Plan) -> Iterator[str]:
    yield element("h2", escape(f"Rank {rank.rank}, {rank.when}"))
    yield _bars({"measured": _measured(rank), "planned": plan})
    totals = _measured(rank)
    rows = [
        (name, size(totals.get(name, 0.0)), size(plan[name]) if name in plan else "")
        for name in _NAMES
    ]
    known = [("peak", rank.peak, plan.get("peak")), ("reserved", rank.reserved, None)]
    rows += [(name, _size(own), _size(planned)) for name, own, planned in known]
    yield table(("class", "measured", "planned"), rows)
    modules = rank.by_module()
    yield element("h3", f"Modules, {min(_MOST, len(modules))} of {len(modules)}")
    yield table(
        ("module", *CLASSES, "sum"),
        (
            (pattern, *(size(of[name]) if of[name] else "" for name in CLASSES), size(of.total()))
            for pattern, of in modules[:_MOST]
        ),
    )
    entries = [(n, fqn, name) for name, of in rank.classes.items() for fqn, n in of.items() if n]
    yield element("h3", f"Largest entries, {min(_MOST, len(entries))} of {len(entries)}")
    largest = sorted(entries, reverse=True)[:_MOST]
    yield table(("tensor or module", "class", "bytes"), ((f, c, size(n)) for n, f, c in largest))


def _size(n_bytes: float | None) -> str:
    return "" if n_bytes is None else size(n_bytes)


def _measured(rank: MemoryTable) -> dict[str, float]:
    return {**rank.totals, **({} if rank.others is None else {_OTHERS: rank.others})}


def _bars(bars: Mapping[str, Plan]) -> str:
    """Draw a bar per entry, split by class."""
    drawn = {name: of for name, of in bars.items() if of}
    sums = [sum(of.get(name, 0.0) for name in _NAMES) for of in drawn.values()]
    most = max([1.0, *sums])
    scale, bottom, parts = (WIDTH - LEFT - 60) / most, 8 + len(drawn) * ROW, []
    for row, ((label, of), whole) in enumerate(zip(drawn.items(), sums, strict=True)):
        x, y = float(LEFT), 8 + row * ROW
        parts.append(text(4, y + 15, label))
        for colour, name in zip(COLOURS, _NAMES, strict=False):
            title = element("title", f"{name}: {size(of.get(name, 0.0))}")
            parts.append(rect(x, y, of.get(name, 0.0) * scale, ROW - 5, colour, title))
            x += of.get(name, 0.0) * scale
        parts.append(text(x + 4, y + 15, f"{whole / GIB:.3g}"))
    parts += x_axis(bottom, most, scale)
    for i, (colour, name) in enumerate(zip(COLOURS, _NAMES, strict=False)):
        parts.append(key(LEFT + i * (WIDTH - LEFT) // len(_NAMES), bottom + 42, colour, name))
    return picture(WIDTH, bottom + 56, parts)
