"""The charts of the documentation show numbers of RESULTS.md."""

import re
from pathlib import Path

import pytest

from benchmarks.charts import CHARTS, ROOT, draw

RESULTS = (ROOT / "benchmarks/RESULTS.md").read_text()


@pytest.mark.parametrize("path", CHARTS)
def test_a_chart_is_what_is_drawn_now(path: str) -> None:
    assert (ROOT / path).read_text() == draw(CHARTS[path])


@pytest.mark.parametrize("path", CHARTS)
def test_numbers_are_in_the_named_section(path: str) -> None:
    chart = CHARTS[path]
    section = RESULTS.split(f"## {chart['section']}\n")[1].split("\n## ")[0]
    for group in chart["groups"]:
        for _, shown in group["bars"]:
            assert re.search(rf"(?<![\d.,]){re.escape(shown)}(?![\d.]|,\d)", section), shown


def test_readme_and_pages_show_every_chart() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    text = "".join(Path(page).read_text() for page in pages)
    assert all(f"{Path(path).name})" in text for path in CHARTS)
