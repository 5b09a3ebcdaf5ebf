"""Triton kernels without a GPU."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


def numbers_of(module: str) -> list[float]:
    """What `python -m module` prints under Triton's interpreter, which a process has from its start
    or not at all; skips the test where Triton is not installed."""
    pytest.importorskip("triton")
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=Path(__file__).parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [float(word) for word in done.stdout.split()]
