"""What the guards of a run cost on CPUs: python -m benchmarks.guards

Two ranks of a small Llama; each guard's own work is timed inside the run, over its steps.
"""

import statistics
import tempfile
import time
from pathlib import Path

from dtron.config import RunConfig
from dtron.faults.corruption import Replicas
from dtron.faults.guards import Guards
from dtron.faults.spikes import Spikes
from dtron.training.trainer import Trainer
from tests.harness import run_ranks

STEPS = 24


def measure(config: RunConfig) -> dict[str, float]:
    """Median seconds of a plain step, of a sampled one, and of each guard's work."""
    seconds: dict[str, list[float]] = {"plain step": [], "sampled step": []}
    for owner, name, label in (
        (Spikes, "observe", "spikes: each step"),
        (Replicas, "differences", "replicas: a comparison"),
        (Guards, "alive", "watchdog: each step"),
    ):
        _timed(owner, name, seconds.setdefault(label, []))
    trainer = Trainer(config)
    one_step = trainer._one_step

    def timed() -> None:
        begun, number = time.perf_counter(), trainer.step + 1
        one_step()
        if number > 2:
            sampled = number % config.faults.stragglers_interval == 0
            seconds["sampled step" if sampled else "plain step"].append(time.perf_counter() - begun)

    trainer._one_step = timed  # type: ignore[method-assign]
    trainer.fit()
    return {label: statistics.median(values) for label, values in seconds.items()}


def _timed(owner: type, name: str, kept: list[float]) -> None:
    act = getattr(owner, name)

    def timed(*args: object) -> object:
        begun = time.perf_counter()
        result = act(*args)
        kept.append(time.perf_counter() - begun)
        return result

    setattr(owner, name, timed)


def main() -> None:
    """Print a line for each."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [
            f"run.dir={Path(folder) / 'run'}",
            f"train.steps={STEPS}",
            "train.eval_sequences=0",
            "train.sample_tokens=0",
            "train.global_batch=4",
            "parallel.dp_replicate=2",
            "checkpoint.last=false",
            "metrics.log_interval=1",
            "metrics.tensorboard=false",
            "faults.on_spike=warn",
            "faults.spike_window=10",
            "faults.stragglers_interval=4",
            "faults.replicas_interval=5",
        ]
        found = run_ranks(
            2, measure, RunConfig.load("configs/quickstart.toml", overrides), seconds=500
        )
    for label, value in found[0].items():
        print(f"{label:24} {value * 1e3:9.3f} ms")


if __name__ == "__main__":
    main()
