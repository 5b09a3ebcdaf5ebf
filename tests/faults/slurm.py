"""A real Slurm on one machine: slurmctld and four slurmd, each a node of 8 "GPUs".

    with Slurm(folder) as slurm:
        job = slurm.submit(2, words)  # sbatch --nodes 2 launch/slurm.sh WORDS
        slurm.wait(job, "COMPLETED")

Everything lies in one folder: configuration, munge's key and socket, state and logs. Nodes are
addresses of the loopback device, GPUs device files behind which there is nothing. Needs root, and
Debian's packages slurm-wlm and munge.
"""

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.faults.hosts import until
from tests.test_architecture import ROOT

NODES = tuple(f"127.0.0.{i}" for i in range(2, 6))
GPUS = 8
_PROGRAMS = ("slurmctld", "slurmd", "sbatch", "munged")
_REQUEUE_SECONDS = 10
"""After which a job that was queued again may start."""
_CONFIG = """\
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire={requeue}
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
ReturnToService=2
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
MpiDefault=none
SlurmdParameters=config_overrides
GresTypes=gpu
JobRequeue=1
KillWait=30
MinJobAge=600
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


def no_slurm() -> str:
    """Why this machine runs no Slurm; empty if it does."""
    if missing := [program for program in _PROGRAMS if not shutil.which(program)]:
        return f"{', '.join(missing)} not installed (Debian: slurm-wlm, munge)"
    return "" if os.geteuid() == 0 else "slurmd needs root"


class Slurm:
    """Daemons that end with the context, and with them all jobs.

    Args:
        folder: for all files, an empty one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.env = {**os.environ, "SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen] = {}

    def __enter__(self) -> "Slurm":
        for name in ("state", "spool", "log"):
            (self.folder / name).mkdir(parents=True)
        (self.folder / "munge.key").write_bytes(os.urandom(1024))
        (self.folder / "munge.key").chmod(0o400)
        for i in range(GPUS):
            os.mknod(self.folder / f"gpu{i}", 0o600 | 0o020000, os.makedev(1, 3))
        self._configure()
        paths = ("socket", "key", "pid", "log", "seed")
        options = [f"--{name}{'-file' * (name != 'socket')}" for name in paths]
        files = [str(self.folder / f"munge.{name}") for name in paths]
        words = [word for pair in zip(options, files, strict=True) for word in pair]
        self._start("munged", "munged", "--foreground", "--force", *words)
        until((self.folder / "munge.socket").exists, 60, "no munged")
        self._start("slurmctld", "slurmctld", "-D")
        for node in NODES:
            self.start_node(node)
        until(lambda: len(self.states()) == len(NODES), 60, "no slurmctld")
        self.idle()
        return self

    def __exit__(self, *_: object) -> None:
        self.run("scancel", "--user", "root", check=False)
        with contextlib.suppress(AssertionError):
            until(lambda: not self.run("squeue", "--noheader", check=False), 60, "jobs do not end")
        for node in NODES:
            self.kill_node(node)
        for daemon in self._daemons.values():
            daemon.kill()
            daemon.wait()

    def _configure(self) -> None:
        host, ports = socket.gethostname().partition(".")[0], _free_ports(1 + len(NODES))
        text = _CONFIG.format(folder=self.folder, host=host, ports=ports, requeue=_REQUEUE_SECONDS)
        for node, port in zip(NODES, ports[1:], strict=True):
            text += f"NodeName={node} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} "
            text += f"CPUs=64 RealMemory=5000 Gres=gpu:{GPUS}\n"
        (self.folder / "slurm.conf").write_text(text)
        gpus = f"{self.folder}/gpu[0-{GPUS - 1}]"
        lines = [f"NodeName={node} Name=gpu File={gpus}\n" for node in NODES]
        (self.folder / "gres.conf").write_text("".join(lines))

    def _start(self, name: str, *command: str) -> None:
        with (self.folder / f"log/{name}").open("a") as out:
            self._daemons[name] = subprocess.Popen(
                command, env=self.env, stdout=out, stderr=out, start_new_session=True
            )

    def run(self, *command: str, check: bool = True) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(command, env=self.env, capture_output=True, text=True, cwd=ROOT)
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    # -- jobs -------------------------------------------------------------------------------

    def submit(
        self,
        nodes: int | str,
        words: Sequence[str],
        options: Sequence[str] = (),
        env: Mapping[str, str] | None = None,
    ) -> str:
        """Submit launch/slurm.sh with these words, one rank a node; returns the job's id.

        Args:
            nodes: N, or MIN-MAX.
            options: of sbatch; later ones count.
            env: on top of this process's.
        """
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        own = {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **(env or {})}
        command = ["sbatch", "--parsable", "--nodes", str(nodes), "--gpus-per-node", "1"]
        command += ["--time", "30", "--output", f"{self.folder}/log/job-%j", *options]
        done = subprocess.run(
            [*command, "launch/slurm.sh", *words],
            env={**self.env, "CUDA_VISIBLE_DEVICES": "", **own},
            cwd=ROOT,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def log(self, job: str) -> str:
        """What a job has printed."""
        path = self.folder / f"log/job-{job}"
        return path.read_text() if path.exists() else ""

    def show(self, job: str, key: str) -> str:
        """A value of a job, by its name in `scontrol show job`."""
        found = re.search(rf"\b{key}=(\S+)", self.run("scontrol", "show", "job", job))
        return found[1] if found else ""

    def wait(self, job: str, state: str, seconds: float = 400) -> None:
        """Wait until a job is in a state."""
        try:
            until(lambda: self.show(job, "JobState") == state, seconds, f"not {state}")
        except AssertionError as error:
            found = self.show(job, "JobState")
            raise AssertionError(f"{error} but {found}:\n{self.log(job)[-6000:]}") from None

    # -- nodes ------------------------------------------------------------------------------

    def states(self) -> dict[str, str]:
        """States of all nodes that slurmctld knows."""
        lines = self.run("sinfo", "--noheader", "-N", "-o", "%N %t", check=False).splitlines()
        return dict(line.split() for line in lines)

    def start_node(self, node: str) -> None:
        """Start the slurmd of a node."""
        self._start(node, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """SIGKILL everything that runs on a node, as a loss of power does."""
        if daemon := self._daemons.pop(node, None):
            daemon.kill()
            daemon.wait()
        for pid in self.processes(node):
            for each in (_parent(pid), pid):
                if each == pid or "slurmstepd" in _words(each)[0]:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(each, signal.SIGKILL)

    def down(self, node: str) -> None:
        """Let slurmctld know that a node is lost, as it finds out by itself after a while."""
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=test")

    def restore(self, node: str) -> None:
        """Start a node that was lost, and let jobs run on it again."""
        self.start_node(node)
        self.run("scontrol", "update", f"nodename={node}", "state=resume")

    def idle(self) -> None:
        """Wait until all nodes are free."""
        until(lambda: set(self.states().values()) == {"idle"}, 120, f"{self.states()}, not idle")

    def processes(self, node: str) -> list[int]:
        """Processes of jobs on a node."""
        names = f"SLURM_CONF={self.folder}/".encode(), f"SLURMD_NODENAME={node}\0".encode()
        found = []
        for path in Path("/proc").glob("[0-9]*/environ"):
            with contextlib.suppress(OSError):
                env = path.read_bytes()
                if all(name in env for name in names):
                    found.append(int(path.parent.name))
        return found

    def agent(self, node: str) -> int:
        """The process of torchrun on a node."""
        (found,) = [pid for pid in self.processes(node) if _words(pid)[1].endswith("torchrun.py")]
        return found


def _words(pid: int) -> list[str]:
    try:
        return [*Path(f"/proc/{pid}/cmdline").read_text().split("\0"), "", ""]
    except OSError:
        return ["", ""]


def _parent(pid: int) -> int:
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def _free_ports(n: int) -> list[int]:
    with contextlib.ExitStack() as stack:
        taken = [stack.enter_context(socket.socket()) for _ in range(n)]
        for each in taken:
            each.bind(("", 0))
        return [each.getsockname()[1] for each in taken]
