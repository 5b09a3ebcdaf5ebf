"""Runs over two hosts of network namespaces: faults of cables, hosts and disks, and random kills.

pytest -m soak tests/faults/test_hosts.py --soak-minutes 60 --soak-kills 200
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.faults.hosts import PORT, Hosts, no_namespaces, until
from tests.faults.kills import Kills, alone, words
from tests.faults.trajectory import complete_rows, worst_difference

pytestmark = [
    pytest.mark.soak,
    pytest.mark.skipif(bool(no_namespaces()), reason=f"no network namespaces: {no_namespaces()}"),
]
STEPS = 60
Wanted = dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def wanted(tmp_path_factory: pytest.TempPathFactory) -> Wanted:
    """Rows by step of one process that nothing happens to."""
    return alone(tmp_path_factory.mktemp("reference") / "alone", STEPS)


class Run:
    """A run of one rank on each of two hosts."""

    def __init__(self, hosts: Hosts, folder: Path) -> None:
        self.hosts, self.dir, self.jobs = hosts, folder / "run", 0
        self.more: dict[str, Any] = {"train__steps": STEPS, "parallel__timeout_seconds": 20}

    def start(self, **more: Any) -> None:
        """Start it on both hosts, as another job each time."""
        self.jobs += 1
        self.more |= more
        self.hosts.start_agents(1, words(self.dir, **self.more), f"job-{self.jobs}")

    def start_host(self, host: int) -> None:
        """Start it again on a host that was killed, in the job of the other."""
        self.hosts.start_agent(host, 1, words(self.dir, **self.more), f"job-{self.jobs}")

    def reach(self, step: int) -> None:
        """Wait until a step is done."""
        until(lambda: len(complete_rows(self.dir)) >= step, 300, f"no step {step}")

    def ends_as(self, wanted: Wanted) -> None:
        """Wait for its end: all steps are there once, as without any fault."""
        assert self.hosts.wait(600) == [0, 0], self.hosts.logged()[-6000:]
        assert len(complete_rows(self.dir)) == STEPS
        worst_difference(complete_rows(self.dir), wanted)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    with Hosts(2, tmp_path) as hosts:
        yield Run(hosts, tmp_path)


# -- cables and hosts -----------------------------------------------------------------------


def test_a_run_that_nothing_happens_to(run: Run, wanted: Wanted) -> None:
    run.start()
    run.ends_as(wanted)
    assert "resumed from" not in run.hosts.logged()


def test_a_slow_link(run: Run, wanted: Wanted) -> None:
    run.start()
    run.reach(10)
    run.hosts.slow("20mbit")
    run.ends_as(wanted)
    assert "resumed from" not in run.hosts.logged()


def test_a_link_that_is_cut_and_mended(run: Run, wanted: Wanted) -> None:
    run.start()
    run.reach(10)
    run.hosts.cut()
    time.sleep(30)  # ranks give up after parallel.timeout_seconds
    run.hosts.mend()
    run.ends_as(wanted)
    assert "resumed from" in run.hosts.logged()


@pytest.mark.parametrize("seconds", [2, 30])
def test_a_host_that_is_killed_and_comes_back(run: Run, wanted: Wanted, seconds: float) -> None:
    run.start()
    run.reach(10)
    run.hosts.cut()  # a dead host says nothing
    run.hosts.kill(1)
    time.sleep(seconds)
    run.hosts.mend()
    run.start_host(1)
    run.ends_as(wanted)
    assert "resumed from" in run.hosts.logged()


def test_the_head_is_killed(run: Run, wanted: Wanted) -> None:
    """With the rendezvous: torchrun of the other host ends, and both are started again."""
    run.start()
    run.reach(10)
    run.hosts.kill(0)
    agent = run.hosts.agents[1]
    assert agent is not None
    assert agent.wait(300) != 0
    until(lambda: not run.hosts.ranks(), 60, "ranks outlive their agent")
    run.start()
    run.ends_as(wanted)
    assert "resumed from" in run.hosts.logged()


# -- launch/host.py -------------------------------------------------------------------------

LONG = 10**6


def seconds_to_resume(run: Run, before: int) -> float:
    """Until a step is done after the run has resumed once more than before."""
    begun = time.monotonic()
    until(lambda: resumed(run) > before, 300, "not resumed")
    done = len(complete_rows(run.dir))
    until(lambda: len(complete_rows(run.dir)) != done, 300, "no step is made")
    return time.monotonic() - begun


def resumed(run: Run) -> int:
    return run.hosts.logged().count("resumed from")


def has_all_batches_once(run: Run) -> None:
    found = complete_rows(run.dir)
    assert [row["step"] for row in found] == list(range(1, len(found) + 1))
    assert len({row["batch"] for row in found}) == len(found)


@pytest.mark.parametrize("host", [0, 1], ids=["head", "worker"])
@pytest.mark.parametrize("fault", ["agent", "host"])
def test_host_py_takes_back_what_is_killed(
    tmp_path: Path, capsys: pytest.CaptureFixture, host: int, fault: str
) -> None:
    """Ten times: torchrun alone, or everything on a host, which is started again at once."""
    with Hosts(2, tmp_path, kept=True) as hosts:
        run, seconds = Run(hosts, tmp_path), []
        run.start(train__steps=LONG)
        for _ in range(10):
            run.reach(len(complete_rows(run.dir)) + 10)
            before = resumed(run)
            if fault == "agent":
                hosts.kill_agent(host)
            else:
                hosts.cut()  # a dead host says nothing
                hosts.kill(host)
                time.sleep(2)
                hosts.mend()
                run.start_host(host)
            seconds.append(seconds_to_resume(run, before))
        for each in (0, 1):
            hosts.stop(each)
        assert hosts.wait(120) == [143, 143]
        has_all_batches_once(run)
        with capsys.disabled():
            print(f"\n{fault} {host}: seconds to the next step {[round(s, 1) for s in seconds]}")


def test_host_py_takes_another_host_in_the_place_of_a_dead_one(tmp_path: Path) -> None:
    """With the same --node-rank, and another name and address."""
    with Hosts(2, tmp_path, kept=True) as hosts:
        run = Run(hosts, tmp_path)
        run.start(train__steps=LONG)
        run.reach(10)
        before = resumed(run)
        hosts.cut()  # a dead host says nothing
        hosts.kill(1)
        hosts.replace()
        run.start_host(1)
        seconds_to_resume(run, before)
        for host in (0, 1):
            hosts.stop(host)
        assert hosts.wait(120) == [143, 143]
        has_all_batches_once(run)


def test_host_py_goes_on_with_fewer_hosts_and_with_more(tmp_path: Path) -> None:
    with Hosts(2, tmp_path, kept=True, nnodes="1:2") as hosts:
        run = Run(hosts, tmp_path)
        run.start(train__steps=LONG)
        run.reach(10)
        assert "2 ranks on" in hosts.logged()
        hosts.cut()
        hosts.kill(1)
        until(lambda: "1 ranks on" in hosts.logged(), 300, "does not shrink")
        run.reach(len(complete_rows(run.dir)) + 10)
        hosts.mend()
        run.start_host(1)
        until(lambda: hosts.logged().count("2 ranks on") == 2, 300, "does not grow")
        run.reach(len(complete_rows(run.dir)) + 10)
        for host in (0, 1):
            hosts.stop(host)
        assert hosts.wait(120) == [143, 143]
        has_all_batches_once(run)


LISTEN = (
    "import socket, sys, time; s = socket.create_server(('', int(sys.argv[1]))); time.sleep(999)"
)


def test_the_port_of_the_rendezvous_is_taken(run: Run, wanted: Wanted) -> None:
    """By a server that is no store: torchrun of the head ends before anything is written, those of
    other hosts wait while that server keeps their connections."""
    command = ["ip", "netns", "exec", run.hosts.names[0], sys.executable, "-c", LISTEN, str(PORT)]
    listener = subprocess.Popen(command)
    try:
        time.sleep(2)
        run.start()
        head, other = run.hosts.agents
        assert head is not None
        assert head.wait(300) != 0
        assert not run.dir.exists()
    finally:
        listener.kill()
        listener.wait()
    assert other is not None
    assert other.wait(300) != 0
    run.start()
    run.ends_as(wanted)


# -- disks ----------------------------------------------------------------------------------


@contextlib.contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """A file system of its own at a folder."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "none", folder], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", "-l", folder], stderr=subprocess.DEVNULL)


def fill(folder: Path) -> Path:
    """A file that takes all that is free in a file system."""
    path = folder / "filler"
    with contextlib.suppress(OSError), path.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 16))
    return path


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_full_disk(run: Run, wanted: Wanted, tmp_path: Path, mode: str) -> None:
    """Of everything that the run writes; there is room again later."""
    with mounted(run.dir, "64m"):
        run.start(checkpoint__on_error="continue", checkpoint__mode=mode)
        run.reach(10)
        filler = fill(run.dir)
        until(lambda: "continues without this save" in run.hosts.logged(), 120, "no failed save")
        filler.unlink()
        run.ends_as(wanted)
        assert (run.dir / "checkpoints/latest").read_text() == f"step-{STEPS}\n"


def test_a_full_disk_ends_a_run_that_shall_stop(run: Run, wanted: Wanted) -> None:
    with mounted(run.dir, "64m"):
        run.start()
        run.reach(10)
        filler = fill(run.dir)
        until(lambda: "No space left on device" in run.hosts.logged(), 120, "no failed save")
        filler.unlink()  # torchrun starts the next attempt
        run.ends_as(wanted)


def test_a_deleted_run_directory(run: Run, wanted: Wanted) -> None:
    """Training goes on, and what is saved later can be resumed."""
    run.start(checkpoint__on_error="continue")
    run.reach(10)
    shutil.rmtree(run.dir)
    assert run.hosts.wait() == [0, 0], run.hosts.logged()[-6000:]
    found = complete_rows(run.dir)
    steps = [row["step"] for row in found]
    assert steps == list(range(steps[0], STEPS + 1))
    assert all(row["batch"] == wanted[row["step"]]["batch"] for row in found)
    assert (run.dir / "checkpoints/latest").read_text() == f"step-{STEPS}\n"


@pytest.mark.parametrize("on_error", ["continue", "stop"])
def test_checkpoints_that_are_unmounted(
    run: Run, wanted: Wanted, tmp_path: Path, on_error: str
) -> None:
    """Nothing is written where the file system was: the checkpoints there would be lost."""
    folder = tmp_path / "disk"
    with mounted(folder, "64m"), _bound(folder, tmp_path / "kept"):
        run.start(checkpoint__on_error=on_error, checkpoint__dir=folder)
        run.reach(10)
        run.hosts.in_mounts("umount", "-l", str(folder))
        until(lambda: "no longer mounted" in run.hosts.logged(), 120, "not noticed")
        # Either way it ends with an error, as its last checkpoint cannot be written either; every
        # attempt of torchrun is refused then.
        until(lambda: "finds no checkpoint in" in run.hosts.logged(), 300, "not refused")
        run.hosts.kill(0)
        run.hosts.kill(1)
        assert len(complete_rows(run.dir)) == STEPS or on_error == "stop"
        assert not list(folder.iterdir())
        subprocess.run(["mount", "--bind", tmp_path / "kept", folder], check=True)
        run.start()
        run.ends_as(wanted)


@contextlib.contextmanager
def _bound(folder: Path, other: Path) -> Iterator[None]:
    """Another name of a file system, which keeps it where the first is unmounted."""
    other.mkdir()
    subprocess.run(["mount", "--bind", folder, other], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", other], check=True)


def test_a_run_directory_on_a_link(run: Run, wanted: Wanted, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    run.dir.symlink_to(tmp_path / "elsewhere")
    run.start()
    run.reach(10)
    os.kill(run.hosts.ranks()[0], 9)
    run.ends_as(wanted)
    assert (tmp_path / "elsewhere/checkpoints/latest").read_text() == f"step-{STEPS}\n"


# -- kills ----------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2], ids=["one host", "two hosts"])
def test_kills(
    tmp_path: Path, pytestconfig: pytest.Config, capsys: pytest.CaptureFixture, n: int
) -> None:
    option = pytestconfig.option
    with Hosts(n, tmp_path, shared_store=True) as hosts:
        soak = Kills(hosts, tmp_path, option.soak_seed, steps=80, calm=8)
        try:
            soak.until(time.monotonic() + 30 * option.soak_minutes, option.soak_kills // 2)
        finally:
            with capsys.disabled():
                print(f"\nseed {option.soak_seed}, hosts {n}: {soak.counts}")
    assert sum(soak.counts.kills.values()) > 0
