"""One run at a time writes in a run directory."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch.distributed as dist

from dtron.errors import ConfigError, DtronError
from dtron.run import lock
from dtron.run.lock import RunLock
from dtron.run.process import Place
from dtron.run.rendezvous import Rendezvous
from dtron.training.trainer import Trainer
from tests.faults import processes
from tests.harness import run_ranks
from tests.run.test_rendezvous import started
from tests.training.test_trainer import fit, tiny

ALONE = Rendezvous(Place(rank=0, local_rank=0, world_size=1), None)
HOLD = """
import sys, time
from pathlib import Path
from dtron.run.rendezvous import Rendezvous
from dtron.run.lock import RunLock
from dtron.run.process import Place
lock = RunLock(Path(sys.argv[1]), Rendezvous(Place(0, 0, 1), None), 0)
print("held", flush=True)
time.sleep(float(sys.argv[2]))
"""


def holder(path: Path, seconds: float) -> subprocess.Popen[str]:
    """Another process that holds the lock for some seconds."""
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(path), str(seconds)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_a_second_run_is_refused_and_told_who_runs(tmp_path: Path) -> None:
    process = holder(tmp_path, 60)
    try:
        with pytest.raises(ConfigError) as error:
            RunLock(tmp_path, ALONE, 0.2)
        assert f"in use by process {process.pid} on host " in str(error.value)
        with pytest.raises(ConfigError, match=f"process {process.pid}"):
            Trainer(tiny(tmp_path, run__wait_seconds=0.1))
        assert not (tmp_path / "metrics.jsonl").exists()
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    RunLock(tmp_path, ALONE, 0).release()  # which SIGKILL has let go


def test_a_start_waits_for_the_run_before_it(tmp_path: Path) -> None:
    process, begun = holder(tmp_path, 1), time.monotonic()
    held = RunLock(tmp_path, ALONE, 30)
    assert time.monotonic() - begun >= 0.5
    assert json.loads((tmp_path / "lock").read_text())["pid"] == os.getpid()
    held.release()
    process.wait()


def test_ranks_share_the_lock_of_their_first(tmp_path: Path) -> None:
    run_ranks(2, fit, tiny(tmp_path / "run", train__steps=1))
    run_ranks(2, fit, tiny(tmp_path / "run", train__steps=2, checkpoint__resume="latest"))


def hold(directory: Path) -> None:
    held = RunLock(directory, Rendezvous(Place(dist.get_rank(), dist.get_rank(), 2), None), 10)
    (directory / f"held-{dist.get_rank()}").touch()
    time.sleep(600)
    held.release()


@pytest.mark.skipif(not lock._HAS_RECORD_LOCKS, reason="locks of open files are Linux's")
def test_a_start_waits_for_ranks_that_outlive_their_rank_0(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "run"
    first, second = processes.start(2, tmp_path / "logs", hold, directory)
    try:
        until(lambda: all((directory / f"held-{rank}").exists() for rank in (0, 1)))
        with pytest.raises(ConfigError, match=f"in use by process {first.pid} on host "):
            RunLock(directory, ALONE, 0)
        first.kill()
        first.join()
        with pytest.raises(ConfigError) as error:
            RunLock(directory, ALONE, 0.2)
        assert f"in use by rank 1, process {second.pid} on host " in str(error.value)
        with caplog.at_level("INFO", "dtron"):
            waiting = threading.Timer(0.5, second.kill)
            waiting.start()
            RunLock(directory, ALONE, 30).release()
        waits, stale = caplog.messages
        assert f"in use by rank 1, process {second.pid} on host " in waits
        assert waits.endswith("; waiting")
        assert stale.startswith(f"{directory}: process {first.pid} on host ")
        assert stale.endswith(" has ended; its lock is taken over")
        caplog.clear()
        RunLock(directory, ALONE, 0).release()
        assert not caplog.messages
    finally:
        processes.finish([first, second], 0)


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_live_ranks_are_named_and_counted(tmp_path: Path) -> None:
    held = [lock.RankLocks(tmp_path / "ranks") for _ in range(6)]
    assert held[0].owners() == ""
    for rank in (3, 1, 5, 2, 0, 4):  # the system lists locks in the order in which they are taken
        held[rank].acquire(Place(2 * rank, 0, 12))
    named = lock.RankLocks(tmp_path / "ranks").owners()
    assert [part.split(",")[0] for part in named.split("; ")] == [
        "rank 0",
        "rank 2",
        "rank 4",
        "rank 6",
    ]
    assert named.endswith(" and 2 more")
    for each in held[:5]:
        each.release()
    assert held[0].owners().startswith(f"rank 10, process {os.getpid()} on host ")
    held[5].release()
    assert held[0].owners() == ""


def test_a_rank_that_cannot_lock_its_record_warns(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It trains on, out of another start's sight."""
    (tmp_path / "ranks").mkdir()
    lock.RankLocks(tmp_path / "ranks").acquire(Place(5, 0, 8))
    (message,) = caplog.messages
    assert "rank 5 cannot lock its record" in message


@pytest.mark.parametrize("name", ["lock", "ranks"])
@pytest.mark.parametrize("kind", ["link", "dangling link", "fifo", "directory"])
def test_only_regular_files_are_locked(tmp_path: Path, name: str, kind: str) -> None:
    """A link would lead to a file of somebody else, which would be emptied."""
    run, victim = tmp_path / "run", tmp_path / "victim"
    run.mkdir()
    if kind != "dangling link":
        victim.write_text("theirs")
    acts = {"fifo": os.mkfifo, "directory": os.mkdir}
    acts.get(kind, lambda path: path.symlink_to(victim))(run / name)
    with pytest.raises(ConfigError, match=rf"{name} is not a regular file; remove it"):
        RunLock(run, ALONE, 0)
    assert not victim.exists() if kind == "dangling link" else victim.read_text() == "theirs"


def test_a_large_file_of_ranks_is_no_slow_start(tmp_path: Path) -> None:
    """It took a call of the system for each 512 bytes of it."""
    with (tmp_path / "ranks").open("wb") as file:
        file.truncate(2**40)
    begun = time.monotonic()
    RunLock(tmp_path, ALONE, 0).release()
    assert time.monotonic() - begun < 5
    assert (tmp_path / "ranks").stat().st_size == lock._RECORD


def open_locked(directory: Path, seconds: float) -> str:
    place = Place(dist.get_rank(), dist.get_rank(), 2)
    return lock_of(Rendezvous(place, None), directory, seconds, dist.barrier)


def lock_of(
    rendezvous: Rendezvous, directory: Path, seconds: float, barrier: Callable[[], object]
) -> str:
    try:
        held = RunLock(directory, rendezvous, seconds)
        barrier()
        held.release()
    except DtronError as error:
        return f"{type(error).__name__}: {error}"
    return "locked"


def test_other_ranks_hear_from_rank_0_that_the_directory_is_in_use(tmp_path: Path) -> None:
    assert run_ranks(2, open_locked, tmp_path, 1) == ["locked"] * 2
    process = holder(tmp_path, 60)
    first, second = run_ranks(2, open_locked, tmp_path, 1)
    assert first.startswith("ConfigError: run.dir =")
    assert second == "PeerError: rank 0 cannot lock the run directory"
    process.kill()
    process.wait()


def test_the_lock_is_shared_through_the_store_of_a_rendezvous(
    tmp_path: Path,
) -> None:
    def ranks() -> list[Future]:
        store, barrier = dist.HashStore(), threading.Barrier(2).wait
        met = [Rendezvous(Place(rank, rank, 2), store, "", 20) for rank in (0, 1)]
        return [started(lock_of, each, tmp_path, 1, barrier) for each in met]

    assert [each.result(30) for each in ranks()] == ["locked"] * 2
    process = holder(tmp_path, 60)
    first, second = ranks()
    assert first.result(30).startswith("ConfigError: run.dir =")
    assert second.result(30) == "PeerError: rank 0 cannot lock the run directory"
    process.kill()
    process.wait()


def test_a_refused_start_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        Trainer(tiny(tmp_path / "run", data__tokenizer="byte", data__eos_token="none"))
    assert not (tmp_path / "run").exists()


def test_a_directory_without_locks_is_used_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def none(*_: object) -> None:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr("fcntl.flock", none)
    with caplog.at_level("WARNING", "dtron"):
        RunLock(tmp_path, ALONE, 0).release()
    assert "cannot be locked" in caplog.text
