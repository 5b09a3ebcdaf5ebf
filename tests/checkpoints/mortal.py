"""A training script whose ranks are killed: run by test_restarts.py under torchrun.

mortal.py CONFIG DEATHS     DEATHS: JSON, of each attempt [rank, step, "step" or "save"]
"""

import json
import os
import signal
import sys
import threading
import time
from typing import Any

from dtron.checkpoint.async_staging import Staging
from dtron.checkpoint.metadata import METADATA
from dtron.config import RunConfig
from dtron.training.trainer import Trainer


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    config, deaths = RunConfig.load(sys.argv[1]), json.loads(sys.argv[2])
    attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
    trainer = Trainer(config)
    if attempt < len(deaths) and deaths[attempt][0] == trainer.place.rank:
        _, step, when = deaths[attempt]
        (_die_after if when == "step" else _die_inside_save)(trainer, step)
    trainer.fit()


def _die_after(trainer: Trainer, step: int) -> None:
    one_step = trainer._one_step

    def then_die() -> None:
        one_step()
        if trainer.step == step:
            _wait_for_save_before(trainer, step)
            die()

    trainer._one_step = then_die  # type: ignore[method-assign]


def _wait_for_save_before(trainer: Trainer, step: int) -> None:
    """The checkpoint of the step before is written in the background, on a busy machine slowly."""
    folder, end = trainer.rundir.path / "checkpoints" / f"step-{step - 1}", time.monotonic() + 60
    while not (folder / METADATA).exists() and time.monotonic() < end:
        time.sleep(0.05)


def _die_inside_save(trainer: Trainer, step: int) -> None:
    write = Staging.write

    def half(self: Staging, target: Any, *given: Any) -> Any:
        """Die once the process that writes has begun to."""
        if f"step-{step}/" in str(target):
            threading.Timer(0.005, die).start()
        return write(self, target, *given)

    Staging.write = half  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
