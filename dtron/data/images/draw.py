"""Draw a small data set: coloured shapes with captions.

    python -m dtron.data.images.draw runs/shapes

writes `shapes.jsonl` and 2,048 PNG files of 32 x 32 pixels. A caption names colour and shape, which
only the image tells: a model that ignores images cannot have a loss below `text_only_loss()`.
"""

import json
import math
import sys
from pathlib import Path

import numpy as np

COLOURS = {
    "red": (220, 30, 30),
    "green": (30, 170, 60),
    "blue": (40, 70, 220),
    "yellow": (235, 215, 40),
}
SHAPES = ("circle", "square", "triangle", "cross")
SIZE = 32


def text_only_loss() -> float:
    """Return the least mean loss per byte of captions of a model that does not see the images.

    All captions are equally likely, and end with one token.
    """
    captions = [caption(colour, shape) for colour in COLOURS for shape in SHAPES]
    return math.log(len(captions)) / (sum(len(x) + 1 for x in captions) / len(captions))


def caption(colour: str, shape: str) -> str:
    """Return the text of an image."""
    return f"a {colour} {shape}"


def draw(colour: str, shape: str, random: np.random.Generator) -> np.ndarray:
    """Return an image: uint8 (SIZE, SIZE, 3), the shape at a random place on a grey ground."""
    radius = random.uniform(9, 13)
    centre = random.uniform(radius, SIZE - radius, size=2)
    y, x = np.mgrid[:SIZE, :SIZE] + 0.5 - centre[:, None, None]
    inside = {
        "circle": x**2 + y**2 < radius**2,
        "square": np.maximum(abs(x), abs(y)) < 0.85 * radius,
        "triangle": (abs(x) < (y + radius) / 2) & (y < 0.8 * radius),
        "cross": (np.minimum(abs(x), abs(y)) < radius / 4) & (np.maximum(abs(x), abs(y)) < radius),
    }[shape]
    ground = random.integers(60, 200)
    return np.where(inside[..., None], COLOURS[colour], ground).astype(np.uint8)


def write(folder: Path, n: int = 2048, seed: int = 0) -> Path:
    """Write n images, as many of each kind, and the JSONL file that names them; return that."""
    from PIL import Image  # the extra `images`

    random = np.random.default_rng(seed)
    kinds = [(colour, shape) for colour in COLOURS for shape in SHAPES]
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(n):
        colour, shape = kinds[number % len(kinds)]
        Image.fromarray(draw(colour, shape, random)).save(folder / f"{number}.png")
        text = f"<image>{caption(colour, shape)}"
        rows.append(json.dumps({"text": text, "images": [f"{number}.png"]}))
    path = folder / "shapes.jsonl"
    path.write_text("\n".join(rows) + "\n", encoding="utf-8")
    return path


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
