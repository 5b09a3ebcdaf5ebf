"""Keep a torchrun agent running on this host until the run has all its steps.

    python launch/host.py --nnodes 2 --node-rank 0 --head HOST --nproc-per-node 8 \
        train.py --config my.toml

The same command on every host, but for --node-rank; HOST is the host of node rank 0. An agent that
ends before the run does is started again. All agents use one rendezvous id: its store lives in the
agent of node rank 0, so a new agent there is a new rendezvous for all, and agents of other hosts
join the one that is there. SIGUSR1, SIGTERM and SIGINT stop the ranks with a checkpoint.

Exit status: 0: the run has all its steps; 1: agents have ended again and again without a new
checkpoint; 143: stopped by a signal before the last step.
"""

import argparse
import ctypes
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from progress import finished, newest_step

_PR_SET_PDEATHSIG = 1
_STOPPED = 128 + signal.SIGTERM
LOST = 69
"""Exit status of torchrun.py when it has lost, or not found, the agents of other hosts."""
MOST_RESTARTS = 3
"""Restarts of the ranks by one agent; a new agent counts from 0."""
MOST_AGENTS = 3
"""Agents in a row that may end without a new checkpoint."""
JOIN_SECONDS = 600
"""An agent waits so long for others; one that lives longer has trained."""
PAUSE_SECONDS = 1
KEEP_ALIVE = "keep_alive_interval=1,keep_alive_max_attempt=5"
"""An agent is dead after 5 silent seconds, not torch's 15, for which its successor would wait."""


class Host:
    """The agents of this host, one after another.

    Args:
        options: of the command line.
        words: train.py and its arguments.
    """

    def __init__(self, options: argparse.Namespace, words: list[str]) -> None:
        self.options, self.words = options, words
        self.agent: subprocess.Popen | None = None
        self.stopping = False
        for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._stop)

    def run(self) -> int:
        """Start agents until the run or the job ends; returns the exit status."""
        step, failures, waited = newest_step(self.words), 0, 0.0
        while not self.stopping:
            begun = time.monotonic()
            code = self._run_agent()
            seconds, reached = time.monotonic() - begun, newest_step(self.words)
            if code == 0 and finished(self.words):
                return 0
            if reached != step or seconds > 2 * JOIN_SECONDS:
                step, failures, waited = reached, 0, 0.0
            if code == LOST:
                waited += seconds
            elif code:
                failures += 1
            if self.stopping:
                break
            if failures == MOST_AGENTS or waited > self.options.wait_seconds:
                why = f"{failures} agents in a row have failed" if failures else "hosts are missing"
                _log(f"{why}, without a checkpoint after step {step}; exit code 1")
                return 1
            _log(f"the agent of node rank {self.options.node_rank} ended (exit code {code}); again")
            time.sleep(PAUSE_SECONDS)
        return _STOPPED

    def _run_agent(self) -> int:
        options = self.options
        conf = f"is_host={int(options.node_rank == 0)},join_timeout={JOIN_SECONDS},{KEEP_ALIVE}"
        command = [str(Path(__file__).parent / "torchrun.sh")]
        command += ["--nnodes", options.nnodes, "--nproc-per-node", str(options.nproc_per_node)]
        command += ["--rdzv-backend", "c10d", "--rdzv-id", options.id, "--rdzv-conf", conf]
        command += ["--rdzv-endpoint", f"{options.head}:{options.port}"]
        command += ["--local-addr", options.local_addr] if options.local_addr else []
        command += ["--numa-binding", options.numa_binding] if options.numa_binding else []
        command += ["--max-restarts", str(MOST_RESTARTS), *self.words, "checkpoint.resume=latest"]
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # torchrun of this environment
        env = {**os.environ, "PATH": path}
        self.agent = subprocess.Popen(command, env=env, preexec_fn=_end_with_parent)
        if self.stopping:
            self.agent.send_signal(signal.SIGUSR1)
        return self.agent.wait()

    def _stop(self, *_: object) -> None:
        self.stopping = True
        if self.agent is not None:
            self.agent.send_signal(signal.SIGUSR1)


def _end_with_parent() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def _log(what: str) -> None:
    print(f"host.py: {what}", file=sys.stderr, flush=True)


def parser() -> argparse.ArgumentParser:
    """Parser of the command line."""
    made = argparse.ArgumentParser(prog="host.py", description=__doc__.splitlines()[0])
    made.add_argument("--nnodes", required=True, help="hosts: N, or MIN:MAX")
    made.add_argument("--node-rank", type=int, required=True, help="0: the head")
    made.add_argument("--head", required=True, help="host or address of node rank 0")
    made.add_argument("--port", type=int, default=29500, help="of the rendezvous, on the head")
    made.add_argument("--nproc-per-node", required=True, help="ranks on each host")
    made.add_argument("--id", default="dtron", help="of the rendezvous, the same on all hosts")
    made.add_argument("--local-addr", default="", help="of this host, as the others reach it")
    made.add_argument("--numa-binding", default="", help="torchrun's: node, socket, exclusive ...")
    made.add_argument(
        "--wait-seconds", type=float, default=3600, help="in which missing hosts have to come back"
    )
    made.add_argument("words", nargs=argparse.REMAINDER, help="train.py and its arguments")
    return made


def main() -> int:
    """Run as the command line says; returns the exit status."""
    options = parser().parse_args()
    return Host(options, options.words).run()


if __name__ == "__main__":
    sys.exit(main())
