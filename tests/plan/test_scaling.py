"""The picture of speed over the number of GPUs."""

from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.scaling import (
    CHARACTER,
    LINE,
    Box,
    CurvePoint,
    Disorder,
    crosses,
    draw,
    overlap,
    slowest_of,
)

PICTURES = sorted((Path(__file__).parents[2] / "docs/plans").glob("scaling_*.svg"))
SVG = "{http://www.w3.org/2000/svg}"


def boxes(root: ElementTree.Element) -> dict[Box, str]:
    """Every text by the box it is drawn in."""
    found = {}
    for text in root.iter(f"{SVG}text"):
        x, y, words = float(text.attrib["x"]), float(text.attrib["y"]), text.text or ""
        width = len(words) * CHARACTER
        x -= {"end": width, "middle": width / 2}.get(text.attrib.get("text-anchor", ""), 0)
        found[x, y - LINE + 3, x + width, y + 3] = words
    return found


def check_labels(picture: str) -> int:
    root = ElementTree.fromstring(picture)
    labels = boxes(root)
    for one, other in combinations(labels, 2):
        assert not overlap(one, other), (labels[one], labels[other])
    lines = [line.attrib["points"].split() for line in root.iter(f"{SVG}polyline")]
    for line in lines:
        points = [(float(x), float(y)) for x, y in (point.split(",") for point in line)]
        for box, words in labels.items():
            inside = (box[0], box[1] + 1, box[2], box[3] - 1)  # coordinates are rounded
            assert not any(crosses(inside, *ends) for ends in pairwise(points)), words
    return len(labels)


def test_labels_do_not_overlap() -> None:
    """Curves that start and end within a per cent of each other, as weak and strong scaling do."""
    ends = {"weak": (860, 849), "weak, stragglers": (855, 848), "strong": (860, 840)}
    curves = {name: [CurvePoint(64, a), CurvePoint(128, b)] for name, (a, b) in ends.items()}
    assert check_labels(draw(curves, "title")) == 1 + 2 + 3 + 5 + 1


@pytest.mark.parametrize("path", PICTURES, ids=lambda path: path.stem)
def test_labels_of_the_pages_do_not_overlap(path: Path) -> None:
    """Nor do they lie on a curve."""
    assert check_labels(path.read_text()) == 1 + (9 if "70b" in path.name else 12) + 3 + 5 + 1


def test_more_ranks_wait_for_a_slower_one() -> None:
    calm, rough = Disorder(jitter=0.0), Disorder(jitter=0.02)
    assert slowest_of(1024, calm) == 1.0
    assert 1 < slowest_of(8, rough) < slowest_of(1024, rough) < 1.2
