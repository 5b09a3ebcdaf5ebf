"""Print the progress of a run, from its run directory.

    python launch/progress.py train.py --config ...

prints the step of the newest complete checkpoint. Hosts have to share the run directory. Where the
arguments of train.py are wrong, a run is at step 0: its ranks report the error.
"""

import json
import sys
from collections.abc import Sequence

from dtron.config import RunConfig
from dtron.errors import DtronError
from dtron.run.directory import RunDir


def newest_step(words: Sequence[str]) -> int:
    """Step of the newest complete checkpoint; 0: there is none.

    Args:
        words: train.py and its arguments, as given to torchrun.
    """
    config = _config(words)
    checkpoint = RunDir(config.run.dir).noted_checkpoint() if config else ""
    step = checkpoint.rpartition("step-")[2]
    return int(step) if step.isdigit() else 0


def finished(words: Sequence[str]) -> bool:
    """Whether a run whose ranks have ended without an error is at its last step, which is always
    logged; ranks that a signal has stopped end without an error too."""
    config = _config(words)
    if config is None:
        return True
    try:
        lines = RunDir(config.run.dir).metrics.read_text().splitlines()
        return json.loads(lines[-1])["step"] >= config.train.steps
    except (OSError, ValueError, LookupError, TypeError):
        return True  # nothing was logged, or not where this host can read it


def _config(words: Sequence[str]) -> RunConfig | None:
    at = next((i for i, word in enumerate(words) if word.partition("=")[0] == "--config"), None)
    if at is None:
        return None
    path = words[at].partition("=")[2] or "".join(words[at + 1 : at + 2])
    keys = [word for word in words[1:] if "=" in word and not word.startswith("-") and word != path]
    try:
        return RunConfig.load(path, keys)
    except DtronError:
        return None


if __name__ == "__main__":
    print(newest_step(sys.argv[1:]))
