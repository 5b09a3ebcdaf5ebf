"""Build standalone SVG pictures from elements."""

from collections.abc import Iterable
from html import escape

FRAME = "#f0f0f0"
"""Background colour of an area that may be empty."""


def element(name: str, inner: str = "", **attributes: object) -> str:
    """Return an element; floats get one decimal, and `text_anchor` is the attribute text-anchor.

    Args:
        inner: content of the element, as SVG.
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
    """Return a filled rectangle; (x, y) is its upper left corner."""
    box = {"x": x, "y": y, "width": width, "height": height, "fill": fill}
    return element("rect", inner, **box, **attributes)


def text(x: float, y: float, words: object, **attributes: object) -> str:
    """Return a line of text that begins at (x, y); `words` are escaped."""
    return element("text", escape(str(words), quote=False), x=x, y=y, **attributes)


def key(x: float, y: float, fill: str, words: str) -> str:
    """Return an entry of a legend: a square of colour `fill` and its meaning, on baseline y."""
    return rect(x, y - 10, 12, 12, fill) + text(x + 16, y, words)


def heading(x: float, words: str) -> str:
    """Return the title of a picture."""
    return text(x, 20, words, font_size=15, font_weight="bold")


def picture(width: int, height: int, parts: Iterable[str]) -> str:
    """Return the content of an SVG file with a white background; sizes are in pixels."""
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        'font-family="Helvetica, Arial, sans-serif" font-size="12" fill="#222">'
    )
    background = element("rect", width=width, height=height, fill="#fff")
    return "\n".join([head, background, *parts, "</svg>"]) + "\n"
