"""Time to the first step: a start without compiled graphs, then starts that find them.

    python -m benchmarks.start_times --nproc-per-node 2 --config configs/llama3_8b.toml \
        train.micro_batch=1 train.global_batch=2

Each start trains two steps. The first start has an empty `compile.cache_dir`; the others use it
again. Prints the line of each run's log with the seconds of each phase, from the start of the
process to the end of the first step, and the seconds from torchrun's start to its end.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

SETTINGS = (
    "compile.enable=true",
    "train.steps=2",
    "schedule.warmup=0",
    "train.eval_sequences=0",
    "train.sample_tokens=0",
    "checkpoint.last=false",
    "checkpoint.interval=0",
    "metrics.log_interval=1",
    "metrics.tensorboard=false",
)


def start(ranks: int, config: str, overrides: Sequence[str], run: Path, cache: Path) -> str:
    """Train two steps in new processes; return the log's line about the first one.

    Raises:
        RuntimeError: the run failed; the message is its output.
    """
    words = [*overrides, *SETTINGS, f"run.dir={run}", f"compile.cache_dir={cache}"]
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command = [sys.executable, *launch, "train.py", "--config", config, *words]
    begun = time.monotonic()
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    seconds = time.monotonic() - begun
    found = [line for line in done.stdout.splitlines() if "first step in " in line]
    if done.returncode or not found:
        raise RuntimeError(done.stdout)
    _, _, line = found[0].partition(" ")  # without the time of day
    return f"{line}; {seconds:.1f} s in all"


def main(arguments: Sequence[str] | None = None) -> None:
    """Start cold, then warm, and print a line for each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--config", required=True)
    parser.add_argument("--nproc-per-node", type=int, default=1)
    parser.add_argument("--warm", type=int, default=2, help="number of warm starts")
    parser.add_argument("overrides", nargs="*", metavar="section.key=value")
    args = parser.parse_intermixed_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        for number in range(1 + args.warm):
            run, cache = Path(folder, f"run-{number}"), Path(folder, "cache")
            line = start(args.nproc_per_node, args.config, args.overrides, run, cache)
            print(f"{'warm' if number else 'cold'}: {line}", flush=True)


if __name__ == "__main__":
    main()
