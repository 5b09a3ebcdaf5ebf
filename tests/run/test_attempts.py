"""Why an attempt ended, what the recovery cost, and when a run without progress is given up."""

import json
import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import HashStore

from dtron.errors import NoProgressError, PeerError
from dtron.faults.signals import StopSignal
from dtron.run import attempts
from dtron.run.attempts import (
    LOST_PEER,
    PEER_FAILED,
    STOPPED,
    Attempts,
    seconds_of,
    why_ended,
)
from dtron.run.fault_handler import FaultHandler
from dtron.run.process import Place
from dtron.run.rendezvous import Rendezvous
from tests.test_architecture import ROOT
from tests.training.test_trainer import tiny

PLACE = Place(rank=0, local_rank=0, world_size=4, job="j")
HOSTS = ["a", "a", "b", "b"]


def end(cause: str, at: float = 0.0, host: str = "a") -> dict:
    return {"cause": cause, "time": at, "host": host}


@pytest.mark.parametrize(
    ("ends", "hosts", "said"),
    [
        ({r: end(LOST_PEER) for r in (0, 1, 2)}, HOSTS, "rank 3 on host b was killed"),
        ({0: end(LOST_PEER)}, HOSTS, "rank 1 on host a and ranks 2, 3 on host b were killed"),
        ({1: end(LOST_PEER), 2: end(LOST_PEER)}, [], "ranks 0, 3 were killed"),
        ({}, HOSTS, "all ranks were stopped"),
        ({r: end(STOPPED) for r in range(4)}, HOSTS, "all ranks were stopped"),
        (
            {r: end(LOST_PEER) for r in range(4)},
            HOSTS,
            "the network failed: all ranks lost connections, and no rank was killed",
        ),
        (
            {r: end(STOPPED if r % 2 else LOST_PEER) for r in range(4)},
            HOSTS,
            "the network failed: ranks 0, 2 lost connections, and no rank was killed",
        ),
        (
            {0: end(LOST_PEER), 1: end(STOPPED), 2: end(PEER_FAILED)},
            HOSTS,
            "rank 3 on host b was killed",
        ),
        (
            {0: end(LOST_PEER, 1.0), 2: end("E: second", 3.0), 3: end("E: first", 2.0, "b")},
            HOSTS,
            "rank 3 on host b: E: first",
        ),
    ],
)
def test_the_cause_is_a_ranks_own_error_or_those_without_a_record(
    ends: dict, hosts: list[str], said: str
) -> None:
    assert why_ended(ends, hosts, 4) == said


def attempt(folder: Path, number: int, step: int, most: int = 0, job: str = "j") -> Attempts:
    made = Attempts(folder, replace(PLACE, attempt=number, job=job))
    made.met(f"token-{number}-{step}")
    made.begin(step, most)
    return made


def test_attempts_without_a_checkpoint_are_counted_and_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    for number in range(3):
        attempt(tmp_path, number, step=8, most=3)
    attempt(tmp_path, 3, step=10, most=3)  # a checkpoint since: counted from 0
    for number in (4, 5):
        attempt(tmp_path, number, step=10, most=3)
    with pytest.raises(NoProgressError, match=r"3 attempts in a row .*faults.max_attempts = 3"):
        attempt(tmp_path, 6, step=10, most=3)
    attempt(tmp_path, 0, step=10, most=3)  # a user has started the run again
    attempt(tmp_path, 1, step=10, most=0)


ATTEMPT = {"token": "x", "job": "j", "step": 9, "without_progress": 1, "hosts": ["a"]}
END = {"token": "x", "host": "a", "cause": LOST_PEER, "time": 1.0}
DAMAGED: list[tuple[str, object]] = [
    ("attempt.json", {**ATTEMPT, "hosts": 5}),
    ("attempt.json", {**ATTEMPT, "hosts": [[1], [2]]}),
    ("attempt.json", {**ATTEMPT, "step": "a"}),
    ("attempt.json", {**ATTEMPT, "without_progress": "many"}),
    ("attempt.json", {"step": 1}),
    ("attempt.json", [1]),
    ("attempt.json", None),
    ("ends/rank-0.json", {**END, "time": "x"}),
    ("ends/rank-0.json", {**END, "cause": {}}),
    ("ends/rank-0.json", [1]),
    ("ends/rank-0.json", None),
]


@pytest.mark.parametrize(("name", "content"), DAMAGED)
def test_a_damaged_record_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, content: object
) -> None:
    """None: a directory."""
    (tmp_path / "ends").mkdir()
    (tmp_path / "attempt.json").write_text(json.dumps(ATTEMPT))
    (tmp_path / "ends/rank-0.json").write_text(json.dumps(END))
    (tmp_path / name).unlink()
    if content is None:
        (tmp_path / name).mkdir()
    else:
        (tmp_path / name).write_text(json.dumps(content))
    attempt(tmp_path, 1, step=8)
    damaged = [text for text in caplog.messages if " is damaged and ignored: " in text]
    assert [text.startswith(str(tmp_path / name)) for text in damaged] == [True]


@pytest.mark.parametrize("name", ["attempt.json", "ends/rank-0.json"])
def test_records_are_not_written_through_links_or_fifos(tmp_path: Path, name: str) -> None:
    run, victim = tmp_path / "run", tmp_path / "victim"
    (run / "ends").mkdir(parents=True)
    victim.write_text("theirs")
    (run / name).symlink_to(victim)
    os.mkfifo(run / f"{name}.partial")
    made = Attempts(run, PLACE)
    made.note_hosts(HOSTS)
    made.record_end("E: x")
    assert victim.read_text() == "theirs"
    assert not (run / name).is_symlink()


def test_an_attempt_that_ends_in_order_is_no_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attempt(tmp_path, 0, step=0).finish()
    with caplog.at_level(logging.INFO, "dtron"):
        second = attempt(tmp_path, 1, step=0)
        assert second.stepped() == {}
        assert second.stepped() == {}  # of later steps nothing is logged
    (line,) = caplog.messages
    assert line.startswith("first step in ")


def test_a_restart_logs_cause_and_parts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_MAX_RESTARTS", "10")
    monkeypatch.setattr(attempts, "_process_start", time.time)  # this process may be an hour old
    first = attempt(tmp_path, 0, step=0)
    first.note_hosts(HOSTS)
    for rank in (0, 1, 3):
        other = Attempts(tmp_path, replace(PLACE, rank=rank))
        other.met("token-0-0")
        other.record_end(LOST_PEER)
    with caplog.at_level(logging.INFO, "dtron"):
        second = attempt(tmp_path, 1, step=4)
        second.mark("prepared")
        second.mark("built")
        second.mark("loaded")
        found = second.stepped()
    assert caplog.messages[0] == "restart 1 of 10: rank 2 on host b was killed"
    assert "until all ranks ended" in caplog.messages[1]
    total = found.pop("recovery_seconds")
    assert 0 <= total < 600
    parts = ["stop", "restart", "import", "rendezvous", "data", "model", "checkpoint", "first_step"]
    assert list(found) == [f"recovery_{part}_seconds" for part in parts]
    assert sum(found.values()) == pytest.approx(total)
    assert second.stepped() == {}


def test_a_signal_while_an_error_is_explained_leaves_its_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun stops the survivors of a kill as soon as it notices: they end with a record."""
    place, previous, missed = replace(PLACE, world_size=1), signal.getsignal(signal.SIGTERM), []
    made = Attempts(tmp_path, place)
    handler = FaultHandler(tiny(tmp_path / "run"), place, made, tmp_path / "hangs")

    def explain(
        _error: Exception, _failure: object, stop: StopSignal, _memory: object
    ) -> PeerError:
        os.kill(os.getpid(), signal.SIGTERM)
        deadline = time.monotonic() + 10
        while not (stop.terminated or missed) and time.monotonic() < deadline:
            time.sleep(0.01)
        return PeerError(LOST_PEER)

    def fail() -> None:
        with handler.process_group(Rendezvous(place, HashStore())) as stop:
            stop._group = dist.group.WORLD  # type: ignore[assignment]  # training has begun
            raise RuntimeError("a connection is gone")

    monkeypatch.setattr(handler, "explain", explain)
    signal.signal(signal.SIGTERM, lambda *_: missed.append(True))
    try:
        with pytest.raises(PeerError) as error:
            fail()
    finally:
        signal.signal(signal.SIGTERM, previous)
        dist.destroy_process_group()
    assert not missed
    assert error.value.stopped
    assert json.loads((tmp_path / "ends/rank-0.json").read_text())["cause"] == LOST_PEER


def test_a_rank_that_was_stopped_has_lost_nobody(tmp_path: Path) -> None:
    made = Attempts(tmp_path, PLACE)
    causes = []
    for cause in (STOPPED, LOST_PEER, "E: its own"):
        made.record_end(cause)
        causes.append(json.loads((tmp_path / "ends/rank-0.json").read_text())["cause"])
    assert causes == [STOPPED, STOPPED, "E: its own"]


def test_a_fault_is_not_replaced_by_what_follows_from_it(tmp_path: Path) -> None:
    made = Attempts(tmp_path, PLACE)
    for cause in ("E: its own", STOPPED, LOST_PEER):
        made.record_end(cause)
    assert json.loads((tmp_path / "ends/rank-0.json").read_text())["cause"] == "E: its own"


def test_parts_of_a_recovery() -> None:
    moments = {"ended": 3.0, "launched": 5.0, "entered": 9.0, "met": 8.5, "prepared": 10.5}
    moments |= {"built": 12.5, "loaded": 13.0, "stepped": 20.0}
    assert seconds_of(moments) == {
        "restart": 2.0,
        "import": 4.0,
        "rendezvous": 0.0,
        "data": 2.0,
        "model": 2.0,
        "checkpoint": 0.5,
        "first_step": 7.0,
    }


def test_a_killed_rank_is_named_and_a_run_without_progress_ends(tmp_path: Path) -> None:
    """torchrun with many restarts left: the run ends itself after two attempts for nothing."""
    words = ["--config", "configs/quickstart.toml", f"run.dir={tmp_path / 'run'}"]
    words += [
        f"data.cache_dir={tmp_path / 'cache'}",
        "train.steps=1000000",
        "metrics.log_interval=1",
    ]
    words += ["checkpoint.interval=1000000", "checkpoint.resume=latest", "faults.max_attempts=2"]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--max-restarts",
        "50",
    ]
    command += ["--nproc-per-node", "2", "train.py", *words, "train.eval_sequences=0"]
    env = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    log = tmp_path / "log"
    with log.open("w") as out:
        agent = subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out)
    try:
        for kill in range(2):
            _until(lambda n=kill: len(re.findall("step +1/", log.read_text())) > n, agent, log)
            os.kill(_children(agent.pid)[1], signal.SIGKILL)
        assert agent.wait(240) != 0
    finally:
        agent.kill()
        agent.wait()
    said = log.read_text()
    assert re.search("restart 1 of 50: rank . on host .* was killed", said), said
    assert "2 attempts in a row have ended without a new checkpoint" in said
    assert "restart 3 of 50" not in said
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert rows[0]["recovery_seconds"] > 0
    assert rows[0]["recovery_import_seconds"] > 0
    assert rows[0]["recovery_first_step_seconds"] > 0


def _children(parent: int) -> list[int]:
    listed = Path(f"/proc/{parent}/task/{parent}/children").read_text().split()
    return [int(pid) for pid in listed]


def _until(done: Callable[[], bool], agent: subprocess.Popen, log: Path) -> None:
    deadline = time.monotonic() + 240
    while not done():
        assert agent.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
