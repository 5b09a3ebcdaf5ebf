"""examples/plugin.ipynb runs: its cells in their order, in one process, as in a kernel."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
WRITE = "%%writefile "


def cells(path: Path) -> list[str]:
    """The sources of a notebook's cells of code."""
    found = json.loads(path.read_text())["cells"]
    return ["".join(cell["source"]) for cell in found if cell["cell_type"] == "code"]


def test_the_notebook_of_the_plug_in_runs(tmp_path: Path) -> None:
    code = []
    for cell in cells(ROOT / "examples/plugin.ipynb"):
        if cell.startswith(WRITE):
            name, _, text = cell.removeprefix(WRITE).partition("\n")
            (tmp_path / name).write_text(text)
        else:
            code.append(cell)
    command = [sys.executable, "-c", "\n".join(code)]
    ours = {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **ours}
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "largest difference of a loss" in done.stdout


def test_the_notebook_holds_no_output() -> None:
    found = json.loads((ROOT / "examples/plugin.ipynb").read_text())["cells"]
    assert not any(cell.get("outputs") for cell in found)
