"""Bubbles and peaks against the papers' formulas and known figures, and the pictures."""

import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from torch.distributed.pipelining._schedule_visualizer import get_schedule_ops

from dtron.errors import ConfigError
from dtron.parallelisms.draw.timelines import Timeline, draw, main, simulate
from dtron.parallelisms.pipeline.schedule_ops import Kind
from dtron.parallelisms.pipeline.schedules import (
    SCHEDULES,
    forward_only,
    order_of,
    stage_ranks,
    write_csv,
)

DOCS = Path(__file__).parents[3] / "docs"


def timeline(name: str, p: int, v: int, m: int) -> Timeline:
    return simulate(order_of(name, p, v, m), stage_ranks(SCHEDULES[name].placement, p, v))


@pytest.mark.parametrize(
    ("name", "v", "length", "percent", "peak"),
    [
        ("GPipe", 1, 117, 17.95, 32),
        ("1F1B", 1, 117, 17.95, 8),
        ("Interleaved1F1B", 2, 106.5, 9.86, 11.5),
        ("Interleaved1F1B", 4, 101.25, 5.19, 9.75),
        ("LoopedBFS", 2, 106.5, 9.86, 32),
        ("InterleavedZeroBubble", 1, 103, 6.80, 8),
        ("InterleavedZeroBubble", 2, 99.5, 3.52, 8),
        ("ZBVZeroBubble", 2, 99.5, 3.52, 8),
        ("DualPipeV", 2, 99.5, 3.52, 8.5),
    ],
)
def test_figures_at_8_ranks_and_32_micro_batches(
    name: str, v: int, length: float, percent: float, peak: float
) -> None:
    found = timeline(name, 8, v, 32)
    assert found.ideal == 96
    assert found.length == length
    assert round(100 * found.bubble_of_total, 2) == percent
    assert max(found.peak_activations) == peak


def test_dualpipev_with_pairs_that_end_together() -> None:
    """torch's own order, in which a pair starts when both its parts can and hands on both results
    at its end: 6.80%, the paper's (p - 1)(F&B + B - 3W) for 2p stages. That is dtron's order with
    overlapped micro-batches. Two actions in a row hand on the first result earlier."""
    rows = [[a for a in row if a is not None] for row in get_schedule_ops("DualPipeV", 8, 32, 2)]
    cost, n_stages = {"F": 1, "B": 2, "I": 1, "W": 1}, 16
    clock, at, ended = [0] * 8, [0] * 8, {}

    def kind_of(part) -> str:
        kind = part.computation_type.value
        return "I" if kind == "B" else kind

    def wanted(part) -> list[tuple[int, str, int]]:
        s, kind, m = part.stage_index, kind_of(part), part.microbatch_index
        if kind == "F":
            return [(s - 1, "F", m)] if s else []
        return [(s, "F", m)] + ([(s + 1, "I", m)] if s + 1 < n_stages and kind == "I" else [])

    for _ in range(sum(map(len, rows))):
        for rank, row in enumerate(rows):
            parts = (row[at[rank]].sub_actions or (row[at[rank]],)) if at[rank] < len(row) else ()
            needed = [want for part in parts for want in wanted(part)]
            if not parts or any(want not in ended for want in needed):
                continue
            start = max([clock[rank], *(ended[want] for want in needed)])
            clock[rank] = start + sum(cost[part.computation_type.value] for part in parts)
            for part in parts:
                ended[part.stage_index, kind_of(part), part.microbatch_index] = clock[rank]
            at[rank] += 1
    assert at == [len(row) for row in rows]
    assert max(clock) / 2 == 103
    assert round(100 * (1 - 96 / 103), 2) == 6.80
    order = order_of("DualPipeV", 8, 2, 32, overlap=True)
    together = simulate(order, stage_ranks("v", 8, 2))
    assert (together.ideal, together.length) == (96, 103)
    assert max(together.peak_activations) == 8.5


@pytest.mark.parametrize(
    ("name", "v", "m", "percent"),
    [
        ("1F1B", 1, 4, 42.86),
        ("1F1B", 1, 8, 27.27),
        ("1F1B", 1, 16, 15.79),
        ("Interleaved1F1B", 4, 4, 15.79),
    ],
)
def test_figures_at_4_ranks(name: str, v: int, m: int, percent: float) -> None:
    assert round(100 * timeline(name, 4, v, m).bubble_of_total, 2) == percent


@pytest.mark.parametrize(("p", "m"), [(2, 2), (3, 7), (4, 8), (8, 8), (8, 40)])
def test_formulas(p: int, m: int) -> None:
    for name in ("GPipe", "1F1B"):
        found = timeline(name, p, 1, m)
        assert found.bubble_of_ideal == pytest.approx((p - 1) / m)
        assert found.bubble_of_total == pytest.approx((p - 1) / (m + p - 1))
    assert timeline("GPipe", p, 1, m).peak_activations == (m,) * p
    assert timeline("1F1B", p, 1, m).peak_activations == tuple(range(p, 0, -1))
    if m >= 2 * p:  # with I = W = F
        for name, peak in (("ZBVZeroBubble", p), ("DualPipeV", p + 1 / 2)):
            found = timeline(name, p, 2, m)
            assert found.bubble_of_ideal == pytest.approx((p - 1) / (6 * m))
            assert found.peak_activations == (peak,) * p


@pytest.mark.parametrize("v", [1, 2, 3, 4])
@pytest.mark.parametrize(("p", "m"), [(2, 4), (4, 8), (8, 16), (4, 24)])
def test_formulas_of_looped_schedules(p: int, m: int, v: int) -> None:
    found = timeline("InterleavedZeroBubble", p, v, m)
    assert found.bubble_of_ideal == pytest.approx((p - 1) / (3 * v * m))
    assert found.peak_activations == pytest.approx((p,) * p)
    if v > 1:
        found = timeline("Interleaved1F1B", p, v, m)
        assert found.bubble_of_ideal == pytest.approx((p - 1) / (v * m))
        assert max(found.peak_activations) == pytest.approx(p + (p - 1) / v)
        found = timeline("LoopedBFS", p, v, m)
        assert found.bubble_of_ideal == pytest.approx((p - 1) / (v * m))
        assert found.peak_activations == (m,) * p


def test_costs_change_the_bubble() -> None:
    order, ranks = order_of("1F1B", 4, 1, 8), stage_ranks("loop", 4, 1)
    costs = {Kind.FORWARD: 1.0, Kind.BACKWARD: 3.0}
    recomputed = simulate(order, ranks, costs)
    assert recomputed.length == 4 * (8 + 3)
    assert recomputed.bubble_of_total == pytest.approx(3 / 11)


def test_spans_do_not_overlap_and_start_at_zero() -> None:
    for name, row in SCHEDULES.items():
        found = timeline(name, 4, row.default_stages, 8)
        assert min(spans[0].start for spans in found.spans) == 0
        for spans in found.spans:
            assert all(a.end <= b.start for a, b in pairwise(spans))


def test_forward_only_has_a_bubble_too() -> None:
    ranks = stage_ranks("loop", 4, 2)
    assert simulate(forward_only(ranks, 4, 8), ranks).length == 8 + 3 / 2


@pytest.mark.parametrize("name", SCHEDULES)
def test_pictures(name: str) -> None:
    """Well-formed, small, and the ones in the documentation are what is drawn now."""
    v = SCHEDULES[name].default_stages
    big = draw(timeline(name, 8, v, 32), "a < b & c")
    root = ElementTree.fromstring(big)
    assert len(big) < 60_000
    texts = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "a < b & c" in texts
    assert "rank 7" in texts
    assert any(text and "Simulated, without communication" in text for text in texts)
    assert (DOCS / "schedules" / f"{name}.svg").read_text() == drawn(name)


def test_the_picture_of_overlapped_pairs(tmp_path: Path) -> None:
    """Boxes of half the height; the one in the documentation is what is drawn now."""
    out = tmp_path / "pairs.svg"
    assert main(["--schedule", "DualPipeV", "--overlap", "--out", str(out)]) == 0
    heights = set(re.findall(r"h[0-9.]+v(\d+)h", out.read_text()))
    assert heights == {"24", "12"}
    assert (DOCS / "schedules/DualPipeV-overlapped.svg").read_text() == out.read_text()


def drawn(name: str) -> str:
    v = SCHEDULES[name].default_stages
    title = f"{name}, 4 ranks, 8 micro-batches" + (f", {v} stages a rank" if v > 1 else "")
    return draw(timeline(name, 4, v, 8), title)


def test_the_table_of_the_documentation() -> None:
    """Rows of `name | v | formula | memory | bubble | memory | bubble | memory`."""
    text = (DOCS / "pipeline.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (\d) \|.*?\|.*?\| (.*%.*) \|$", text, re.MULTILINE)
    assert {name for name, _, _ in rows} == set(SCHEDULES)
    for name, v, figures in rows:
        found = [timeline(name, p, int(v), m) for p, m in ((8, 32), (4, 8))]
        messages = [(f"{t.bubble_of_total:.2%}", f"{max(t.peak_activations):g}") for t in found]
        assert figures.split(" | ") == [*messages[0], *messages[1]], name


def test_the_examples_of_the_documentation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for code in re.findall(r"```python\n(.*?)```", (DOCS / "pipeline.md").read_text(), re.DOTALL):
        exec(code, {})
    out = capsys.readouterr().out
    assert "embedding + layers 0-6\nlayers 7-14\nlayers 15-22\nlayers 23-29 + head" in out
    assert (tmp_path / "zbv.svg").exists()


def test_main_draws_prints_and_refuses(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "zbv.svg"
    assert main(["--schedule", "ZBVZeroBubble", "--stages-per-rank", "2", "--out", str(out)]) == 0
    assert out.read_text() == drawn("ZBVZeroBubble")
    assert "5.88% of the time" in capsys.readouterr().out
    assert main(["--schedule", "DualPipeV", "--micro-batches", "6"]) == 2
    assert "the nearest is 8" in capsys.readouterr().err
    mine = tmp_path / "mine.csv"
    mine.write_text(write_csv(order_of("1F1B", 4, 1, 8)))
    assert main(["--csv", str(mine)]) == 0
    assert "27.27%" in capsys.readouterr().out


def test_a_deadlock_is_an_error() -> None:
    order = order_of("1F1B", 2, 1, 2)
    with pytest.raises(ConfigError, match="deadlocks"):
        simulate((order[0][::-1], order[1]), (0, 1))
