"""Hosts as network namespaces of one machine, each with a torchrun agent, over real TCP.

    with Hosts(2) as hosts:
        hosts.start_agents(2, words)  # torchrun --nnodes 2 --nproc-per-node 2 train.py WORDS
        os.kill(random.choice(hosts.ranks()), signal.SIGKILL)
        hosts.wait()

Two hosts have a cable (veth) between them. Needs root and the `ip` command of iproute2.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.test_architecture import ROOT

ADDRESSES = ("10.77.0.1", "10.77.0.2")
PORT = 29500
"""Of the rendezvous, on the first host."""
FRESH_STORE = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Without it an agent that comes back never learns the address of the store that others share."""


def no_namespaces() -> str:
    """Why this machine permits no network namespaces; empty if it does."""
    if not shutil.which("ip"):
        return "no ip command"
    name = f"dtron-probe-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode == 0:
        subprocess.run(["ip", "netns", "del", name], check=True)
    return made.stderr.strip()


def until(done: Callable[[], bool], seconds: float, what: str) -> None:
    """Wait until something is so; fails with `what` after some seconds."""
    deadline = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


class Hosts:
    """One or two network namespaces, removed with all their processes at the end.

    Args:
        shared_store: agents lend the ranks of all attempts one store, as by default.
        kept: agents are started, and started again, by launch/host.py.
        nnodes: of torchrun; empty: all of them.
    """

    def __init__(
        self,
        n: int,
        logs: Path,
        shared_store: bool = False,
        kept: bool = False,
        nnodes: str = "",
    ) -> None:
        self.kept, self.nnodes = kept, nnodes or str(n)
        self.names = [f"dtron-{os.getpid()}-{i}" for i in range(n)]
        self.addresses = list[str](ADDRESSES) if n == 2 else ["127.0.0.1"]
        self.replaced = list[str]()
        self.devices = [f"dt{os.getpid()}-{i}" for i in range(n)] if n == 2 else ["lo"]
        self.logs, self.store = logs, {} if shared_store else FRESH_STORE
        self.agents: list[subprocess.Popen | None] = [None] * n

    def __enter__(self) -> "Hosts":
        for name in self.names:
            _ip("netns", "add", name)
            _ip("-n", name, "link", "set", "lo", "up")
        if len(self.names) == 2:
            _connect(self.names, self.devices, self.addresses)
        return self

    def __exit__(self, *_: object) -> None:
        for host, name in enumerate(self.names):
            self.kill(host)
            _ip("netns", "del", name)
        for name in self.replaced:
            _ip("netns", "del", name)

    # -- agents and ranks -------------------------------------------------------------------

    def start_agents(self, ranks: int, words: Sequence[str], job: str = "job") -> None:
        """Start torchrun with so many ranks on each host, for train.py with these words."""
        for host in range(len(self.names)):
            self.start_agent(host, ranks, words, job)

    def start_agent(self, host: int, ranks: int, words: Sequence[str], job: str = "job") -> None:
        """Start torchrun on one host; its output is added to `log(host)`."""
        address, head = self.addresses[host], self.addresses[0]
        command = ["ip", "netns", "exec", self.names[host], sys.executable]
        own = ["--nnodes", self.nnodes, "--nproc-per-node", str(ranks)]
        own += ["--local-addr", address]
        if self.kept:
            own += ["--node-rank", str(host), "--head", head, "--port", str(PORT), "--id", job]
            command += ["launch/host.py", *own]
        else:
            conf = f"is_host={int(host == 0)},join_timeout=120,read_timeout=120"
            own += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{head}:{PORT}"]
            own += ["--rdzv-id", job, "--rdzv-conf", conf, "--max-restarts", "1000"]
            command += ["-m", "torch.distributed.run", *own, "--monitor-interval", "0.2"]
        env = {**os.environ, **self.store, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        env |= {"GLOO_SOCKET_IFNAME": self.devices[host], "CUDA_VISIBLE_DEVICES": ""}
        with self.log(host).open("a") as out:
            self.agents[host] = subprocess.Popen(
                [*command, "train.py", *words], cwd=ROOT, env=env, stdout=out, stderr=out
            )

    def log(self, host: int) -> Path:
        """What the agents of a host and their ranks have printed."""
        return self.logs / f"host-{host}.log"

    def logged(self) -> str:
        """Likewise, of all hosts."""
        return "".join(self.log(h).read_text() for h in range(len(self.names)))

    def ranks(self) -> list[int]:
        """Process ids of all ranks that live: the agents' children."""
        agents = {agent.pid for agent in self.agents if agent is not None}
        found = []
        for path in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, parent = path.read_text().rpartition(")")[2].split()[:2]
                if int(parent) in agents and state != "Z":
                    found.append(int(path.parent.name))
        return found

    def wait(self, seconds: float = 300) -> list[int]:
        """Exit statuses of the agents, which have to end by themselves."""
        deadline = time.monotonic() + seconds
        codes = []
        for agent in self.agents:
            assert agent is not None
            try:
                codes.append(agent.wait(max(0.1, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                raise AssertionError(f"still running:\n{self.logged()[-6000:]}") from None
        return codes

    # -- faults -----------------------------------------------------------------------------

    def processes(self, host: int) -> list[int]:
        """Everything that runs on a host."""
        listed = ["ip", "netns", "pids", self.names[host]]
        return [
            int(pid)
            for pid in subprocess.run(listed, capture_output=True, text=True).stdout.split()
        ]

    def kill_agent(self, host: int) -> None:
        """SIGKILL torchrun alone, under launch/host.py."""
        for pid in self.processes(host):
            words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
            if words[1].endswith("launch/torchrun.py"):
                os.kill(pid, signal.SIGKILL)

    def stop(self, host: int) -> None:
        """SIGTERM what was started on a host."""
        agent = self.agents[host]
        assert agent is not None
        agent.terminate()

    def kill(self, host: int) -> None:
        """SIGKILL everything that runs on a host."""
        for _ in range(3):  # what was started meanwhile too
            for pid in self.processes(host):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        agent, self.agents[host] = self.agents[host], None
        if agent is not None:
            agent.wait()

    def in_mounts(self, *command: str) -> None:
        """Run a command where each agent and its ranks see mounts, and here."""
        for agent in self.agents:
            assert agent is not None
            subprocess.run(["nsenter", "-t", str(agent.pid), "-m", *command], check=True)
        subprocess.run(command, check=True)

    def cut(self) -> None:
        """Pull the cable: nothing arrives, and nobody is informed."""
        _ip("-n", self.names[1], "link", "set", self.devices[1], "down")

    def mend(self) -> None:
        """Put the cable back."""
        _ip("-n", self.names[1], "link", "set", self.devices[1], "up")

    def replace(self) -> None:
        """Let a new host, with another name, address and cable, be the second one; the host of
        before stays as it is."""
        name, cable = f"{self.names[1]}-new", ("10.77.1.1", "10.77.1.2")
        devices = [f"{device}n" for device in self.devices]
        _ip("netns", "add", name)
        _ip("-n", name, "link", "set", "lo", "up")
        _connect([self.names[0], name], devices, cable)
        _ip("-n", name, "route", "add", f"{self.addresses[0]}/32", "via", cable[0])
        self.replaced.append(self.names[1])
        self.names[1], self.devices[1], self.addresses[1] = name, devices[1], cable[1]

    def slow(self, rate: str) -> None:
        """Let no more through the cable than a rate, as of `tc`: 20mbit."""
        for name, device in zip(self.names, self.devices, strict=True):
            limit = ["rate", rate, "burst", "16kbit", "latency", "400ms"]
            command = ["tc", "-n", name, "qdisc", "replace", "dev", device, "root", "tbf", *limit]
            subprocess.run(command, check=True)


def _connect(names: Sequence[str], devices: Sequence[str], addresses: Sequence[str]) -> None:
    """A cable (veth) between two hosts."""
    first, second = devices
    cable = ["link", "add", first, "netns", names[0], "type", "veth"]
    _ip(*cable, "peer", "name", second, "netns", names[1])
    for name, device, address in zip(names, devices, addresses, strict=True):
        _ip("-n", name, "addr", "add", f"{address}/24", "dev", device)
        _ip("-n", name, "link", "set", device, "up")


def _ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)
