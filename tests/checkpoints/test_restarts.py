"""torchrun --max-restarts: ranks are killed, inside a save too, and the run goes on by itself."""

import json
import os
import re
import subprocess
from pathlib import Path

from tests.faults.processes import torchrun
from tests.harness import run_ranks
from tests.test_architecture import ROOT
from tests.training.test_trainer import fit, losses, tiny


def test_killed_ranks_are_restarted_from_the_newest_good_checkpoint(tmp_path: Path) -> None:
    """Two ranks; one is killed after a step, then one inside a save, then the run ends."""
    changes = {"train__steps": 8, "train__micro_batch": 1, "checkpoint__interval": 2}
    run_ranks(2, fit, tiny(tmp_path / "whole", **changes))
    config = tiny(
        tmp_path / "run", checkpoint__mode="async", checkpoint__resume="latest", **changes
    )
    (tmp_path / "config.toml").write_text(config.to_toml())
    deaths = [[1, 3, "step"], [1, 6, "save"]]
    options = ("--max-restarts", 3, "--monitor-interval", 0.1)
    script = ROOT / "tests/checkpoints/mortal.py"
    done = subprocess.run(
        torchrun(2, *options, script, tmp_path / "config.toml", json.dumps(deaths)),
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    messages = done.stdout + done.stderr
    assert "starting from step 0" in messages
    resumed = re.findall(r"resumed from \S+/(step-\d+) in \d+\.\d s$", messages, re.MULTILINE)
    assert len(resumed) == 2
    assert resumed[1] == "step-4"  # that of step 6 was half-written
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")
    assert not list((tmp_path / "run/checkpoints").glob("*.partial"))
