"""Time to recover: random ranks are killed again and again under plain torchrun.

    python benchmarks/restarts.py --agents 2 --ranks 1 --kills 5 -- --config FILE key=value ...

Starts so many torchrun agents on this machine (c10d rendezvous, no variable set), each with so many
ranks, for train.py with these words. Some seconds after training has gone on a random rank gets
SIGKILL. Prints one line a kill: attempts that it has cost (sets of ranks that were started), and
seconds until ranks log their model (noticed, ended, imported, met) and until the next step is done
(built, loaded, compiled). No step may be lost or repeated in the run's metrics.
"""

import argparse
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path


def main() -> int:
    """Returns the exit status: 0 where each kill has cost one attempt."""
    given = arguments()
    folder = Path(tempfile.mkdtemp(prefix="restarts-"))
    words = [*given.words, f"run.dir={folder / 'run'}", "checkpoint.resume=latest"]
    agents = start(given.agents, given.ranks, words, folder)
    try:
        found = [Ranks(agents, folder).kill(given) for _ in range(given.kills)]
    finally:
        for agent in agents:
            agent.kill()  # their ranks save and end by themselves
            agent.wait()
    seconds = [each["seconds"] for each in found]
    attempts = sum(each["attempts"] for each in found)
    print(
        f"{given.kills} SIGKILLs, {given.agents} x {given.ranks} ranks: {attempts:g} attempts; "
        f"kill to next step: median {statistics.median(seconds):.1f} s, most {max(seconds):.1f} s"
    )
    steps = [row["step"] for row in rows(folder)]
    assert steps == list(range(1, len(steps) + 1)), "steps are lost or repeated"
    return 0 if attempts == given.kills else 1


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("--agents", type=int, default=1, help="torchruns")
    parser.add_argument("--ranks", type=int, default=2, help="of each")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--least", type=float, default=15.0, help="seconds from a step to a kill")
    parser.add_argument("--most", type=float, default=40.0)
    parser.add_argument("words", nargs="+", help="of train.py, after --")
    given = parser.parse_args()
    random.seed(given.seed)
    return given


def start(n: int, ranks: int, words: list[str], folder: Path) -> list[subprocess.Popen]:
    """torchrun agents of one rendezvous; their output goes to files of the folder."""
    command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "1000"]
    command += ["--nproc-per-node", str(ranks), "--nnodes", str(n), "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", "127.0.0.1:29511", "--rdzv-id", "restarts"]
    found = []
    for agent in range(n):
        where = ["--rdzv-conf", f"is_host={int(agent == 0)}", "--local-addr", "127.0.0.1"]
        with (folder / f"agent-{agent}.log").open("w") as log:
            found.append(
                subprocess.Popen([*command, *where, "train.py", *words], stdout=log, stderr=log)
            )
    return found


class Ranks:
    """The ranks of all agents, and those that have been there since this was made."""

    def __init__(self, agents: list[subprocess.Popen], folder: Path) -> None:
        self.agents, self.folder, self.seen = agents, folder, set[int]()

    def kill(self, given: argparse.Namespace) -> dict[str, float]:
        """Wait for a step, then some time, kill a rank, and wait for the next step."""
        before = len(rows(self.folder))
        self.wait(lambda: len(rows(self.folder)) > before)
        time.sleep(random.uniform(given.least, given.most))
        self.seen = set(self.living())
        n_seen, logged = len(self.seen), len(begun(self.folder))
        at, done = time.monotonic(), len(rows(self.folder))
        os.kill(random.choice(sorted(self.seen)), signal.SIGKILL)
        self.wait(lambda: len(begun(self.folder)) > logged)
        model = time.monotonic() - at
        resumed = len(rows(self.folder))
        self.wait(lambda: len(rows(self.folder)) > resumed)
        seconds = time.monotonic() - at
        attempts = (len(self.seen) - n_seen) / (given.agents * given.ranks)
        print(
            f"killed after step {done}: {attempts:g} attempts; model logged after {model:.1f} s, "
            f"next step after {seconds:.1f} s",
            flush=True,
        )
        return {"attempts": attempts, "seconds": seconds}

    def living(self) -> list[int]:
        """Process ids: the agents' children."""
        agents, found = {agent.pid for agent in self.agents}, []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, parent = path.read_text().rpartition(")")[2].split()[:2]
                if int(parent) in agents and state != "Z":
                    found.append(int(path.parent.name))
        return found

    def wait(self, done: Callable[[], bool]) -> None:
        """Until something is so; at most five minutes."""
        deadline = time.monotonic() + 300
        while not done():
            self.seen |= set(self.living())
            if time.monotonic() > deadline:
                logs = "\n".join(path.read_text()[-3000:] for path in self.folder.glob("agent-*"))
                raise SystemExit(f"nothing happens in {self.folder}:\n{logs}")
            time.sleep(0.1)


def begun(folder: Path) -> list[str]:
    """Lines of attempts that have met and build their model."""
    text = "".join(path.read_text(errors="replace") for path in folder.glob("agent-*.log"))
    return [line for line in text.splitlines() if " parameters, " in line]


def rows(folder: Path) -> list[dict]:
    """Complete rows of the run's metrics."""
    path = folder / "run/metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


if __name__ == "__main__":
    sys.exit(main())
