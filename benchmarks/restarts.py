"""Time to recover: random ranks are killed again and again under plain torchrun.

    python benchmarks/restarts.py --agents 2 --ranks 1 --kills 5 -- --config FILE key=value ...

Starts so many torchrun agents on this machine (c10d rendezvous, no variable set), each with so many
ranks, for train.py with these words. Some seconds after training has gone on a random rank gets
SIGKILL. Prints one line per kill: attempts that it has cost (sets of ranks that were started),
seconds until ranks log their model and until the next step is done, and the parts of the recovery
that the run itself has logged in its metrics. No step may be lost or repeated there.

With --launcher all agents are killed instead, and started again at once: their ranks have to save
and end by themselves, while the new ones wait for them. All rows of metrics have to stay, so that a
run without other checkpoints (checkpoint.interval=1000000) has resumed where it was.
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
from typing import Any


def main() -> int:
    """Returns the exit status: 0 where each kill has cost one attempt."""
    given = arguments()
    folder = Path(tempfile.mkdtemp(prefix="restarts-"))
    words = [*given.words, f"run.dir={folder / 'run'}", "checkpoint.resume=latest"]
    ranks = Ranks(given, words, folder)
    fault = ranks.restart_launcher if given.launcher else ranks.kill
    try:
        found = [fault() for _ in range(given.kills)]
    finally:
        ranks.kill_launcher()  # the ranks save and end by themselves
    seconds = [each["seconds"] for each in found]
    attempts = sum(each["attempts"] for each in found)
    killed = "torchrun" if given.launcher else "a rank"
    print(
        f"{killed} killed {given.kills} times, {given.agents} x {given.ranks} ranks: {attempts:g} "
        f"attempts; kill to next step: median {statistics.median(seconds):.1f} s, most "
        f"{max(seconds):.1f} s"
    )
    names = dict.fromkeys(name for each in found for name in each["parts"])
    by_part = {name: [each["parts"].get(name, 0.0) for each in found] for name in names}
    medians = {name: statistics.median(values) for name, values in by_part.items()}
    print(f"medians by part: {listed(medians)}")
    steps = [row["step"] for row in rows(folder)]
    assert steps == list(range(1, len(steps) + 1)), "steps are lost or repeated"
    return 0 if attempts == given.kills else 1


def arguments() -> argparse.Namespace:
    """What the command line says."""
    parser = argparse.ArgumentParser(description=__doc__, add_help=True)
    parser.add_argument("--agents", type=int, default=1, help="torchruns")
    parser.add_argument("--ranks", type=int, default=2, help="of each")
    parser.add_argument("--gpus", default="", help="such as 0,1: each agent takes its own of them")
    parser.add_argument("--launcher", action="store_true", help="kill torchrun, not a rank")
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--port", type=int, default=29511, help="of the rendezvous")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--least", type=float, default=15.0, help="seconds from a step to a kill")
    parser.add_argument("--most", type=float, default=40.0)
    parser.add_argument("words", nargs="+", help="of train.py, after --")
    given = parser.parse_args()
    if given.gpus and len(given.gpus.split(",")) != given.agents * given.ranks:
        parser.error("--gpus names one GPU for each rank")
    random.seed(given.seed)
    return given


def start(given: argparse.Namespace, words: list[str], folder: Path) -> list[subprocess.Popen]:
    """torchrun agents of one rendezvous; their output goes to files of the folder."""
    n, ranks = given.agents, given.ranks
    command = [sys.executable, "-m", "torch.distributed.run", "--max-restarts", "1000"]
    command += ["--nproc-per-node", str(ranks), "--nnodes", str(n), "--rdzv-backend", "c10d"]
    command += ["--rdzv-endpoint", f"127.0.0.1:{given.port}", "--rdzv-id", "restarts"]
    found = []
    for agent in range(n):
        where = ["--rdzv-conf", f"is_host={int(agent == 0)}", "--local-addr", "127.0.0.1"]
        own = given.gpus.split(",")[agent * ranks :][:ranks] if given.gpus else []
        gpus = {"CUDA_VISIBLE_DEVICES": ",".join(own)} if own else {}
        with (folder / f"agent-{agent}.log").open("a") as log:
            found.append(
                subprocess.Popen(
                    [*command, *where, "train.py", *words],
                    stdout=log,
                    stderr=log,
                    env=os.environ | gpus,
                )
            )
    return found


class Ranks:
    """The agents with all their ranks."""

    def __init__(self, given: argparse.Namespace, words: list[str], folder: Path) -> None:
        self.given, self.words, self.folder = given, words, folder
        self.seen = set[int]()
        """Ranks that have been there since the last fault."""
        self.start()

    def start(self) -> None:
        """Start the agents."""
        self.agents = start(self.given, self.words, self.folder)

    def kill_launcher(self) -> None:
        """Kill the agents alone."""
        for agent in self.agents:
            agent.kill()
            agent.wait()

    def kill(self) -> dict[str, Any]:
        """Kill a rank, and wait for the next step."""
        self.train()
        n_seen, logged, at = len(self.seen), len(begun(self.folder)), time.monotonic()
        done = len(rows(self.folder))
        os.kill(random.choice(sorted(self.seen)), signal.SIGKILL)
        self.wait(lambda: len(begun(self.folder)) > logged)
        model = time.monotonic() - at
        self.next_step()
        seconds = time.monotonic() - at
        attempts = (len(self.seen) - n_seen) / (self.given.agents * self.given.ranks)
        print(
            f"killed after step {done}: {attempts:g} attempts; model logged after {model:.1f} s, "
            f"next step after {seconds:.1f} s: {listed(parts(self.folder))}",
            flush=True,
        )
        return {"attempts": attempts, "seconds": seconds, "parts": parts(self.folder)}

    def restart_launcher(self) -> dict[str, Any]:
        """Kill the agents, start them again at once, and wait for the next step."""
        self.train()
        before, at = frozenset(self.seen), time.monotonic()
        done, waits = len(rows(self.folder)), self.logged().count("is in use by process")
        self.kill_launcher()
        self.start()
        self.wait(lambda: not any(parent(pid) for pid in before))
        ended = time.monotonic() - at
        kept = (self.folder / "run/metrics.jsonl").read_text()
        self.next_step()
        seconds = time.monotonic() - at
        assert (self.folder / "run/metrics.jsonl").read_text().startswith(kept), "rows are lost"
        waited = self.logged().count("is in use by process") - waits
        print(
            f"torchrun killed after step {done}: ranks ended after {ended:.1f} s, {waited} starts "
            f"waited, next step after {seconds:.1f} s",
            flush=True,
        )
        return {"attempts": 1, "seconds": seconds, "parts": {}}  # ranks have ended in order

    def train(self) -> None:
        """Wait for a step, then some time."""
        self.next_step()
        time.sleep(random.uniform(self.given.least, self.given.most))
        self.seen = set(self.living())

    def next_step(self) -> None:
        """Wait for a step more than there are."""
        before = len(rows(self.folder))
        self.wait(lambda: len(rows(self.folder)) > before)

    def logged(self) -> str:
        """What agents and ranks have printed."""
        return "".join(path.read_text() for path in sorted(self.folder.glob("agent-*.log")))

    def living(self) -> list[int]:
        """Process ids: the agents' children."""
        agents = {agent.pid for agent in self.agents}
        found = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
        return [pid for pid in found if parent(pid) in agents]

    def wait(self, done: Callable[[], bool]) -> None:
        """Until something is so; at most five minutes."""
        deadline = time.monotonic() + 300
        while not done():
            self.seen |= set(self.living())
            if time.monotonic() > deadline:
                logs = self.logged()[-6000:]
                raise SystemExit(f"nothing happens in {self.folder}:\n{logs}")
            time.sleep(0.1)


def parent(pid: int) -> int:
    """Of a process that runs; 0: it has ended."""
    with contextlib.suppress(OSError):
        state, found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
        return int(found) if state != "Z" else 0
    return 0


def begun(folder: Path) -> list[str]:
    """Lines of attempts that have met and build their model."""
    text = "".join(path.read_text(errors="replace") for path in folder.glob("agent-*.log"))
    return [line for line in text.splitlines() if " parameters, " in line]


def rows(folder: Path) -> list[dict]:
    """Complete rows of the run's metrics."""
    path = folder / "run/metrics.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def parts(folder: Path) -> dict[str, float]:
    """Seconds of the last recovery by part, as the run has logged them."""
    recovered = [row for row in rows(folder) if "recovery_seconds" in row]
    fields = recovered[-1] if recovered else {}
    ends = ("recovery_", "_seconds")
    return {
        name.removeprefix(ends[0]).removesuffix(ends[1]): seconds
        for name, seconds in fields.items()
        if name.startswith(ends[0]) and name != "recovery_seconds"
    }


def listed(seconds: dict[str, float]) -> str:
    """Parts in one line."""
    return ", ".join(f"{name} {value:.1f} s" for name, value in seconds.items()) or "none logged"


if __name__ == "__main__":
    sys.exit(main())
