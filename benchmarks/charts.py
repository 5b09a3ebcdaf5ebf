"""Draw the bar charts of the documentation from charts.json, whose numbers are RESULTS.md's.

python -m benchmarks.charts
"""

import json
from html import escape
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
CHARTS: dict[str, dict[str, Any]] = json.loads((Path(__file__).parent / "charts.json").read_text())
"""By the file that is drawn: a title, the section of RESULTS.md, and groups of (label, number)."""
WIDTH, LEFT, RIGHT, BAR = 760, 130, 70, 22
COLOURS = {"torchtitan 0.2.2": "#b8bcc4"}


def draw(chart: dict[str, Any]) -> str:
    """Groups of horizontal bars; each group has its own scale, which begins at zero."""
    parts = [text(12, 24, chart["title"], "font-size='15' font-weight='bold'")]
    y = 36
    for group in chart["groups"]:
        y += 22
        parts.append(text(12, y - 6, group["name"]))
        most = max(number(shown) for _, shown in group["bars"])
        for label, shown in group["bars"]:
            length = (WIDTH - LEFT - RIGHT) * number(shown) / most
            fill = COLOURS.get(label, "#3d7fd0")
            parts.append(text(LEFT - 8, y + 15, label, "text-anchor='end'"))
            parts.append(
                f"<rect x='{LEFT}' y='{y}' width='{length:.1f}' height='{BAR - 4}' fill='{fill}'/>"
            )
            parts.append(text(LEFT + length + 6, y + 15, shown, "font-weight='bold'"))
            y += BAR
        y += 8
    style = "font-size='13' font-family='Helvetica, Arial, sans-serif' fill='#222'"
    head = f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {WIDTH} {y}' {style}>"
    return "\n".join(
        [head, f"<rect width='{WIDTH}' height='{y}' fill='#fff'/>", *parts, "</svg>\n"]
    )


def number(shown: str) -> float:
    """A number as RESULTS.md prints it."""
    return float(shown.replace(",", ""))


def text(x: float, y: float, words: str, style: str = "") -> str:
    return f"<text x='{x:.0f}' y='{y:.0f}' {style}>{escape(words)}</text>"


if __name__ == "__main__":
    for path, chart in CHARTS.items():
        (ROOT / path).write_text(draw(chart))
        print(path)
