"""The picture of speed over the number of GPUs."""

from itertools import combinations
from xml.etree import ElementTree

from dtron.plan.scaling import Point, draw


def test_labels_do_not_overlap() -> None:
    """Curves that start and end within a per cent of each other, as weak and strong scaling do."""
    ends = {"weak": (860, 849), "weak, stragglers": (855, 848), "strong": (860, 840)}
    curves = {name: [Point(64, a), Point(128, b)] for name, (a, b) in ends.items()}
    root = ElementTree.fromstring(draw(curves, "title"))
    texts = [
        (float(text.attrib["x"]), float(text.attrib["y"]), text.text)
        for text in root.iter("{http://www.w3.org/2000/svg}text")
    ]
    numbers = [(x, y) for x, y, text in texts if text in {"860", "855", "849", "848", "840"}]
    assert len(numbers) == 5
    for (x, y), (other_x, other_y) in combinations(numbers, 2):
        assert abs(x - other_x) > 30 or abs(y - other_y) >= 12
