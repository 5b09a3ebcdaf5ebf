"""What checkpoints in an object store cost: requests of a save and of a start, seconds of a resume.

    python -m benchmarks.object_store [--milliseconds 5] [--ranks 2] [key=value ...]

Runs train.py on the embedded corpus with a model whose checkpoint has about 12 MB, in moto's server
behind a proxy that delays each request, then on the disk. Needs the extra `stores`.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.checkpoints.object_store import BUCKET, object_store

KEYS = "model.override.dim=64 model.override.n_layers=4 model.override.n_heads=4"
KEYS += " model.override.n_kv_heads=4 model.override.ffn_dim=512 model.override.vocab_size=4096"
KEYS += " train.steps=7 train.seq_len=32 train.global_batch=4 train.micro_batch=1"
KEYS += ""
KEYS += " train.dtype=float32 train.sample_tokens=0 train.eval_sequences=0"
KEYS += " checkpoint.interval=1 checkpoint.mode=async metrics.tensorboard=false"
CONFIG = "configs/quickstart.toml"
ROOT = Path(__file__).resolve().parent.parent


def main() -> None:
    """Measure both."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("overrides", nargs="*", help="keys of all runs")
    parser.add_argument("--milliseconds", type=float, default=5.0, help="that a request takes more")
    parser.add_argument("--ranks", type=int, default=2)
    given = parser.parse_intermixed_args()
    with tempfile.TemporaryDirectory() as folder, object_store() as store:
        store.delay = given.milliseconds / 1000
        for where in (f"s3://{BUCKET}/run", f"{folder}/checkpoints"):
            run = [f"run.dir={folder}/{where[:2]}", f"checkpoint.dir={where}", *given.overrides]
            store.requests.clear()
            saved = start(given.ranks, run)
            saves = len(store.requests)
            seconds = re.findall(r"checkpoint: \S+ in (\S+) s", saved)
            print(f"{where}: 7 saves and a start: {saves} requests; save: {seconds[-1]} s")
            store.requests.clear()
            again = ["checkpoint.resume=latest", "train.steps=8", "checkpoint.last=false"]
            resumed = start(given.ranks, [*run, *again, "checkpoint.interval=0"])
            seconds = re.findall(r"resumed from \S+ in (\S+) s", resumed)
            print(f"{where}: a start: {len(store.requests)} requests; resumed in {seconds[0]} s")
        print(f"bytes: {sum(f.stat().st_size for f in Path(folder).rglob('step-7/*')):,}")


def start(ranks: int, words: list[str]) -> str:
    """What a run has printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "train.py", "--config", CONFIG, *KEYS.split()]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *words], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return done.stdout


if __name__ == "__main__":
    main()
