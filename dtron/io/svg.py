"""SVG pictures that stand alone: what is in one, element by element."""

from collections.abc import Iterable
from html import escape

FRAME = "#f0f0f0"
"""Behind what may be empty."""


def element(name: str, inner: str = "", **attributes: object) -> str:
    """One element; floats get one decimal, and `text_anchor` is the attribute text-anchor.

    Args:
        inner: what it contains, as SVG.
    """
    shown = "".join(
        f' {key.replace("_", "-")}="{f"{value:.1f}" if isinstance(value, float) else value}"'
        for key, value in attributes.items()
    )
    return f"<{name}{shown}>{inner}</{name}>" if inner else f"<{name}{shown}/>"


def rect(
    x: float,
    y: float,
    width: float,
    height: float,
    fill: str,
    inner: str = "",
    **attributes: object,
) -> str:
    """A filled box from its upper left corner."""
    box = {"x": x, "y": y, "width": width, "height": height, "fill": fill}
    return element("rect", inner, **box, **attributes)


def text(x: float, y: float, words: object, **attributes: object) -> str:
    """Words, which are escaped, on a line that begins at (x, y)."""
    return element("text", escape(str(words), quote=False), x=x, y=y, **attributes)


def key(x: float, y: float, fill: str, words: str) -> str:
    """An entry of a legend: a square and what its colour means, on the line y."""
    return rect(x, y - 10, 12, 12, fill) + text(x + 16, y, words)


def heading(x: float, words: str) -> str:
    """The title of a picture."""
    return text(x, 20, words, font_size=15, font_weight="bold")


def picture(width: int, height: int, parts: Iterable[str]) -> str:
    """The file, with its own white background; a pixel is a unit."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#222">'
    )
    background = element("rect", width=width, height=height, fill="#fff")
    return "\n".join([head, background, *parts, "</svg>"]) + "\n"
