"""A plan as one HTML page without external files: parts of a step's time, cost of the training,
memory by class and rank, the pipeline's timeline with the predicted time of each action,
communication by link, and the search's layouts by memory and speed. Pictures are SVG."""

import html
import math
from collections.abc import Iterable, Sequence
from typing import Any

from dtron.io.svg import element, key, picture, rect
from dtron.io.svg import text as words
from dtron.models import model_config
from dtron.parallelisms.draw.timelines import Timeline, draw
from dtron.plan.hardware import Hardware
from dtron.plan.memory import CLASSES
from dtron.plan.report import (
    COLLECTIVES,
    GIB,
    PARTS,
    collective_rows,
    costs,
    number,
    parameters,
    part_rows,
)
from dtron.plan.run_shape import Resolved
from dtron.plan.search import LayoutPoint, SearchResult, pareto
from dtron.plan.steptime import timeline

COLOURS = (
    "#3d7fd0", "#7fb0e8", "#2f9c8d", "#c96f16", "#e8b26f", "#7b5bb8", "#b9a3e0", "#c04a62",
    "#8a8f98",
)  # fmt: skip
WIDTH, LEFT, ROW = 1100, 90, 26
_LEGEND = 6
"""Entries per row of a legend."""


def page(
    run: Resolved, plan: dict[str, Any], hardware: Hardware, searched: SearchResult | None = None
) -> str:
    """Return the HTML page of a plan.

    Args:
        plan: result of `dtron.plan.plan.plan` for a legal run.
        searched: result of the search that found the run; None: no search.
    """
    title = f"{_model(run, plan)} on {run.world_size} x {hardware.name}"
    time = plan["time"]
    text = (
        f"Predicted, not measured: {number(time['step_seconds'])} s per step, "
        f"{time['tokens_per_second_per_gpu']:,.0f} tok/s/GPU, MFU {time['mfu']['full']:.1%} (full)."
    )
    parts = [f"<h1>{html.escape(title)}</h1>", f"<p>{text}</p>", _degrees(plan["parallel"])]
    parts += [f"<p>{html.escape(parameters(plan['memory']))}. {costs(plan['cost'])}.</p>"]
    parts += ["<h2>Time of a step</h2>", table(PARTS, part_rows(time))]
    parts += ["<h2>Memory by pipeline rank</h2>", _memory(plan["memory"])]
    if run.layout is not None:
        parts += ["<h2>Pipeline</h2>", _pipeline(timeline(run, hardware), run, time)]
    links = table(COLLECTIVES, collective_rows(plan["communication"]))
    parts += ["<h2>Communication by link</h2>", links]
    if searched:
        parts += ["<h2>Layouts by memory and speed</h2>", _front(searched, hardware.room)]
    return document(title, parts)


def document(title: str, parts: Iterable[str]) -> str:
    """Return an HTML page without external files.

    Args:
        title: plain text, which is escaped.
        parts: the body, as HTML.
    """
    style = (
        "body{font-family:Helvetica,Arial,sans-serif;max-width:1120px;margin:24px auto;color:#222}"
    )
    head = f"<meta charset='utf-8'><title>{html.escape(title)}</title><style>{style}</style>"
    return f"<!doctype html><html><head>{head}</head><body>{''.join(parts)}</body></html>\n"


def _model(run: Resolved, plan: dict[str, Any]) -> str:
    """Return the model's name and size; with overrides, its name and number of parameters."""
    name, size = run.config.model.name, run.config.model.size
    if run.model == model_config(name, size):
        return f"{name} {size}"
    return f"{name} of {parameters(plan['memory'])}"


def table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return an HTML table; cells are plain text, which is escaped, headings are HTML."""
    heads = "".join(f"<th align='left'>{heading}</th>" for heading in headings)
    lines = ("".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table cellpadding='4'><tr>{heads}</tr>{body}</table>"


def ticks(most: float) -> list[float]:
    """Return axis ticks from 0 to at most `most` > 0, in steps of 1, 2 or 5 times a power of 10."""
    power = 10.0 ** math.floor(math.log10(most / 4))
    step = next(n * power for n in (5, 2, 1) if most / (n * power) >= 4)
    return [i * step for i in range(int(most / step) + 1)]


def x_axis(y: float, most: float, scale: float) -> list[str]:
    """Draw an axis in GiB below the height y.

    Args:
        most: bytes at the right end.
        scale: pixels per byte.
    """
    parts = []
    for tick in ticks(most / GIB):
        x = LEFT + tick * GIB * scale
        parts.append(element("path", d=f"M{x:.1f} {y:.0f}v5", stroke="#888"))
        parts.append(words(x, y + 17, f"{tick:g}", text_anchor="middle"))
    return [*parts, words(4, y + 17, "GiB")]


def _degrees(parallel: dict[str, Any]) -> str:
    shown = (f"{k} <b>{html.escape(str(v))}</b>" for k, v in parallel.items() if k[:6] != "layers")
    return f"<p>{' &middot; '.join(shown)}</p>"


def _memory(memory: dict[str, Any]) -> str:
    """Draw a bar per pipeline rank, split by class, and a line at the device's limit."""
    ranks, limit = memory["ranks"], memory["limit"]
    most = max(limit, *(sum(rank["classes"].values()) for rank in ranks))
    scale, parts = (WIDTH - LEFT - 60) / most, []
    for row, rank in enumerate(ranks):
        x, y = float(LEFT), 8 + row * ROW
        parts.append(words(4, y + 15, f"pp rank {rank['rank']}"))
        for colour, name in zip(COLOURS, CLASSES, strict=True):
            size = rank["classes"][name]
            title = element("title", f"{name}: {size / GIB:.1f} GiB")
            parts.append(rect(x, y, size * scale, ROW - 5, colour, title))
            x += size * scale
        parts.append(words(x + 4, y + 15, f"{rank['reserved'] / GIB:.1f}"))
    end, bottom = LEFT + limit * scale, 8 + len(ranks) * ROW
    parts += [_device_end(end, bottom)]
    parts += x_axis(bottom, most, scale)
    for i, (colour, name) in enumerate(zip(COLOURS, CLASSES, strict=True)):
        row, column = divmod(i, _LEGEND)
        x, y = LEFT + column * (WIDTH - LEFT) // _LEGEND, bottom + 32 + row * 18
        parts += [key(x, y + 10, colour, name)]
    text = (
        "<p>Bars: memory allocated at the peak of a step. Numbers: GiB that the allocator "
        f"reserves. Dashed line: {limit / GIB:.1f} GiB, the limit.</p>"
    )
    return picture(WIDTH, bottom + 32 + 18 * -(-len(CLASSES) // _LEGEND), parts) + text


def _device_end(x: float, bottom: int) -> str:
    return element("path", d=f"M{x:.0f} 0V{bottom}", stroke="#c00", stroke_dasharray=4)


def _pipeline(times: Timeline, run: Resolved, time: dict[str, Any]) -> str:
    """Draw the first micro-batches, in the style of docs/pipeline.md."""
    shown = max(span.action.micro_batch or 0 for row in times.spans for span in row) + 1
    caption = (
        f"{shown} of {run.micro_batches} micro-batches, without communication; mean idle time of a "
        f"rank: {times.bubble_of_total:.2%} of the drawn time. Bubble of the step, slowest rank: "
        f"{time['bubble_of_step']:.2%}"
    )
    return draw(times, f"{run.config.parallel.schedule}, times of each stage as predicted", caption)


def _front(searched: SearchResult, room: float) -> str:
    """Draw the layouts as dots, and list the best layouts below.

    A dot has the layout's name as tooltip. The Pareto front is a line, the device's limit a dashed
    line.
    """
    height, points = 320, searched.seen
    x_most = max(room * 1.02, *(point.n_bytes * 1.05 for point in points))
    y_most = max(point.speed for point in points) * 1.05

    def at(n_bytes: float, speed: float) -> tuple[float, float]:
        x = LEFT + n_bytes / x_most * (WIDTH - LEFT - 20)
        return x, height - 30 - speed / y_most * (height - 50)

    parts = []
    for point in points:
        x, y = at(point.n_bytes, point.speed)
        title = element("title", _named(point))
        parts.append(element("circle", title, cx=x, cy=y, r=3, fill="#a9cdf5"))
    parts.append(_device_end(at(room, 0.0)[0], height - 30))
    front = [at(*point) for point in pareto(tuple(point[:2] for point in points))]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in front)
    parts.append(element("polyline", points=line, fill="none", stroke="#c96f16", stroke_width=2))
    parts += x_axis(height - 30, x_most, (WIDTH - LEFT - 20) / x_most)
    for tick in ticks(y_most):
        _, y = at(0.0, tick)
        parts.append(element("path", d=f"M{LEFT - 5} {y:.1f}h5", stroke="#888"))
        parts.append(words(LEFT - 8, y + 4, f"{tick:,g}", text_anchor="end"))
    parts.append(words(4, 12, "tok/s/GPU, by GiB reserved"))
    listed = "".join(f"<li>{_named(found.point)}</li>" for found in searched.best)
    return picture(WIDTH, height, parts) + f"<ol>{listed}</ol>"


def _named(point: LayoutPoint) -> str:
    size, speed = f"{point.n_bytes / GIB:.1f} GiB", f"{point.speed:,.0f} tok/s/GPU"
    return f"{html.escape(point.label)}: {size}, {speed}"
