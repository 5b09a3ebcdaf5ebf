"""Runs survive random kills, full disks and changes of layout: a short form, and one of minutes.

pytest -m soak --soak-minutes 60 --soak-seed 1
"""

import time
from pathlib import Path

import pytest

from tests.faults.soak import Soak


@pytest.mark.matrix  # kills and restarts as test_restarts.py, test_attempts.py and others
def test_a_short_soak(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    soak = Soak(tmp_path, seed=3, steps=24, calm=8, changes=True)
    counts = soak.until(time.monotonic() + 20, kills=5)
    assert counts.kills >= 1
    with capsys.disabled():
        print(f"\nseed 3: {counts}")


@pytest.mark.soak
@pytest.mark.parametrize("changes", [False, True], ids=["one layout", "changing layouts"])
def test_a_soak(
    tmp_path: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture, changes: bool
) -> None:
    minutes: float = pytestconfig.option.soak_minutes
    seed: int = pytestconfig.option.soak_seed
    with capsys.disabled():
        print(f"\nseed {seed}")
    soak = Soak(tmp_path, seed, steps=150, calm=50, changes=changes)
    counts = soak.until(time.monotonic() + 30 * minutes, kills=10**6)
    with capsys.disabled():
        print(f"\nseed {seed}: {counts}")
    assert counts.kills > 0
    assert counts.behind, "no run has gone on from a checkpoint"
