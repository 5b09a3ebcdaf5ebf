"""Rows of a disturbed run's metrics, compared with those of a run that nothing happens to."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

NEAR = 1e-4
"""Of losses in another layout, relative."""


def complete_rows(run_dir: Path) -> list[dict[str, Any]]:
    """Rows of a run's metrics, whose last line may be half-written."""
    path = run_dir / "metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def worst_difference(
    found: Sequence[dict[str, Any]], wanted: Mapping[int, dict[str, Any]], near: float = NEAR
) -> float:
    """Compare rows with those of another run, by step: none is lost or repeated, batches are equal,
    losses differ by `near` at most. Returns the largest relative difference of a loss."""
    assert [row["step"] for row in found] == list(range(1, len(found) + 1))
    for row in found:
        assert row["batch"] == wanted[row["step"]]["batch"], f"step {row['step']}: another batch"
    losses = [(row["loss"], wanted[row["step"]]["loss"]) for row in found]
    worst = max((abs(loss - other) / other for loss, other in losses), default=0.0)
    assert worst <= near, f"losses differ by {worst}"
    return worst
