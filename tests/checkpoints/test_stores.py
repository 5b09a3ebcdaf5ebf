"""Checkpoints in an object store over HTTP: its faults, its requests, and what a start refuses.

The proxy of object_store.py fails between the ranks and moto's server.
"""

import functools
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dtron.checkpoint.directory import complete
from dtron.checkpoint.find import problem
from dtron.checkpoint.metadata import step_of
from dtron.config import RunConfig
from dtron.errors import CheckpointError, ConfigError
from dtron.io.filesystem import location
from dtron.io.remote_path import Remote
from dtron.io.writer_process import HashedFile
from dtron.training.trainer import Trainer
from tests.checkpoints.object_store import BUCKET, ObjectStore, Request, as_rank, object_store
from tests.checkpoints.test_damage import fit_and_listen
from tests.faults.processes import finish, start
from tests.faults.processes import output as output_of
from tests.harness import run_ranks
from tests.test_architecture import ROOT
from tests.training.test_trainer import fit, losses, rows, tiny

pytest.importorskip("s3fs")
pytest.importorskip("moto")
URL = f"s3://{BUCKET}/run"


@pytest.fixture(scope="module")
def server() -> Iterator[ObjectStore]:
    with object_store() as server:
        yield server


@pytest.fixture
def store(server: ObjectStore) -> ObjectStore:
    """An empty bucket, and no fault."""
    server.reset()
    return server


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> list[float]:
    """The losses of a run that nothing happened to."""
    run = tmp_path_factory.mktemp("whole") / "run"
    run_ranks(2, fit, tiny(run, **SAME))
    return losses(run)


SAME = {"schedule__name": "constant"}


def away(run: Path, **changes: Any) -> RunConfig:
    """A run whose checkpoints go to the store after each step, asynchronously."""
    keys = {"checkpoint__dir": URL, "checkpoint__interval": 1, "checkpoint__mode": "async", **SAME}
    return tiny(run, **{**keys, "checkpoint__resume": "latest", **changes})


def fit_there(store: ObjectStore, config: RunConfig, n: int = 2) -> tuple[list[str], str | None]:
    """What rank 0 of a run has logged, and the CheckpointError of all its ranks."""
    found = run_ranks(n, as_rank, fit_and_listen, store.environment, config)
    assert len({error is None for _, error in found}) == 1, found
    return found[0]


def whole_steps() -> list[int]:
    """Of the checkpoints that are there, all of which have to be whole."""
    folder = location(URL).listed()  # type: ignore[union-attr]
    found = complete(folder)
    assert [problem(path) for path in found] == [None] * len(found)
    return sorted(map(step_of, found))


# -- requests -------------------------------------------------------------------------------


def test_six_requests_a_rank_for_a_save_and_for_a_start(tmp_path: Path, store: ObjectStore) -> None:
    """Seven saves of two ranks, of which five delete an older checkpoint; then a start alone."""
    _, error = fit_there(store, away(tmp_path / "run", train__steps=7))
    assert error is None
    assert whole_steps() == [6, 7]
    assert not any("latest.partial" in key for key in store.objects())
    for rank, count in store.counts().items():
        assert rank in ("rank-0", "rank-1", "test")
        assert count.total() <= 6 * (7 + 1), store.requests
    seen = store.requests.copy()
    saves = [i for i, each in enumerate(seen) if each.path.endswith("/latest")]
    for first, last in itertools.pairwise(saves):
        assert max(Counter(each.client for each in seen[first:last]).values()) <= 6
    store.requests.clear()
    changes = {"train__steps": 8, "checkpoint__interval": 0, "checkpoint__last": False}
    said, error = fit_there(store, away(tmp_path / "run", **changes))
    assert error is None
    assert any(f"resumed from {URL}/step-7" in message for message in said)
    assert all(count.total() <= 6 for count in store.counts().values()), store.requests


# -- faults ---------------------------------------------------------------------------------


TRANSIENT = ("cut", "lose", "slow down", "internal error", "truncate")


def once_each(first: int) -> Callable[[Request], str]:
    """Every request fails the first time that it comes, by each fault of TRANSIENT in turn."""
    seen: set[str] = set()
    acts = itertools.cycle((*TRANSIENT[first:], *TRANSIENT[:first]))

    def fault(request: Request) -> str:
        name = f"{request.client} {request.method} {request.path}"
        if name in seen or request.client == "test":
            return ""
        seen.add(name)
        return next(acts)

    return fault


@pytest.mark.parametrize("first", [0, 3])
def test_requests_that_fail_once_cost_nothing(
    tmp_path: Path, store: ObjectStore, whole: list[float], first: int
) -> None:
    """Saves, a resume and retention, each of whose requests fails at first; two saves wait for the
    one before, whose requests are made again after a pause."""
    store.fault, run = once_each(first), tmp_path / "run"
    config = away(run, train__steps=4, checkpoint__interval=2)
    assert run_slowly(store, config)[1] is None
    assert whole_steps() == [2, 4]
    store.fault = once_each(first)
    said, error = run_slowly(store, away(run, checkpoint__interval=2))
    assert error is None
    assert any(f"resumed from {URL}/step-4" in message for message in said)
    assert losses(run) == whole
    assert whole_steps() == [4, 6]


def run_slowly(store: ObjectStore, config: RunConfig) -> tuple[list[str], str | None]:
    """As `fit_there`, with time for retries."""
    found = run_ranks(2, as_rank, fit_and_listen, store.environment, config, seconds=200)
    return found[0]


@pytest.mark.matrix  # as a store that does not answer
def test_a_store_that_is_gone_for_a_while_costs_its_saves_alone(
    tmp_path: Path, store: ObjectStore, whole: list[float]
) -> None:
    """From the save of step 3 on it answers 503; what was there stays whole, and a start when it is
    back goes on from it."""
    down = threading.Event()

    def fault(request: Request) -> str:
        if request.client != "test" and "step-3" in request.path:
            down.set()
        return "slow down" if down.is_set() else ""

    store.fault, run = fault, tmp_path / "run"
    changes = {"checkpoint__on_error": "continue", "checkpoint__timeout_seconds": 8}
    said, error = fit_there(store, away(run, train__steps=4, checkpoint__last=False, **changes))
    assert any("step-3 could not be written" in message for message in said)
    assert error is not None  # nothing comes after the last save
    assert "step-4 could not be written" in error
    store.fault = lambda request: ""
    assert whole_steps() == [1, 2]
    said, error = fit_there(store, away(run, **changes))
    assert error is None
    assert any(f"resumed from {URL}/step-2" in message for message in said)
    assert losses(run) == whole
    assert whole_steps() == [5, 6]


def test_training_does_not_wait_for_a_slow_store(tmp_path: Path, store: ObjectStore) -> None:
    """The store answers no request of the save of step 5 before step 8 is logged."""
    run, waited = tmp_path / "run", []

    def fault(request: Request) -> str:
        if "step-5/" in request.path:
            waited.append(waits_for(lambda: rows(run)[-1]["step"] >= 8))
        return ""

    store.fault = fault
    changes = {"train__steps": 10, "checkpoint__interval": 5, "checkpoint__last": False}
    said, error = fit_there(store, away(run, **changes))
    assert error is None
    assert waited
    assert all(waited)
    assert whole_steps() == [5, 10], said


def waits_for(condition: Callable[[], bool], seconds: float = 60) -> bool:
    """Whether it holds within so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@pytest.mark.parametrize(
    ("file", "act"),
    [
        ("rank-1.safetensors", ""),
        ("index.json", "cut"),
        ("dtron.json", ""),
        ("dtron.json", "cut"),
        ("latest", "cut"),
    ],
)
def test_a_kill_inside_a_save(
    tmp_path: Path, store: ObjectStore, whole: list[float], file: str, act: str
) -> None:
    """All ranks are killed when the store is given a file of step 4, which it gets or does not; a
    start goes on from the newest whole checkpoint."""
    run, there = tmp_path / "run", []
    deadly = "/latest" if file == "latest" else f"step-4/{file}"

    def kill(request: Request) -> str:
        late = any("step-4/dtron" in each.path for each in store.requests)
        hit = request.method == "PUT" and request.path.endswith(deadly)
        if not hit or not there or (file == "latest" and not late):
            return ""
        for process in there:
            with_signal(process.pid)
        return act

    def with_signal(pid: int) -> None:
        if pid:
            os.kill(pid, signal.SIGKILL)

    store.fault = kill
    there += start(
        2, tmp_path / "ranks", as_rank, fit, store.environment, away(run, checkpoint__interval=2)
    )
    assert finish(there, 100) == [-signal.SIGKILL] * 2, output_of(tmp_path / "ranks")
    store.fault = lambda request: ""
    newest = whole_steps()[-1]
    assert newest == (4 if file == "latest" or (file, act) == ("dtron.json", "") else 2)
    said, error = fit_there(store, away(run, checkpoint__interval=2))
    assert error is None
    assert any(f"resumed from {URL}/step-{newest}" in message for message in said)
    assert losses(run) == whole
    assert whole_steps() == [4, 6]
    left = {key.split("/")[1] for key in store.objects()}
    assert left == {"latest", "step-4", "step-6"}


# -- what is read ---------------------------------------------------------------------------


def test_a_store_that_does_not_answer_is_no_damage(
    tmp_path: Path, store: ObjectStore, whole: list[float]
) -> None:
    """The newest checkpoint cannot be read for now: a start fails, and does not go on from an older
    one, which would train again what is there."""
    run = tmp_path / "run"
    config = away(run, checkpoint__interval=2, train__steps=4)
    assert fit_there(store, config)[1] is None
    before = store.objects()
    for name in ("rank-1.safetensors", "dtron.json"):
        for act in ("forbidden", "halve"):

            def fault(request: Request, name: str = name, act: str = act) -> str:
                reads = request.method in ("GET", "HEAD") and name in request.path
                return act if reads and "step-4" in request.path else ""

            store.fault = fault
            _, error = fit_there(store, away(run))
            assert error is not None
            assert URL in error
            assert {*store.objects()} - {"run/latest.partial"} == {*before}
    store.fault = lambda request: ""
    assert fit_there(store, away(run))[1] is None
    assert losses(run) == whole


def test_a_damaged_file_of_a_store_is_found(
    tmp_path: Path, store: ObjectStore, whole: list[float]
) -> None:
    run, name = tmp_path / "run", "step-4/rank-1.safetensors"
    assert fit_there(store, away(run, checkpoint__interval=2, train__steps=4))[1] is None
    file = location(f"{URL}/{name}")
    assert isinstance(file, Remote)
    content = bytearray(file.read_whole(10**6))
    content[-5] ^= 1
    file.write_bytes(bytes(content))
    said, error = fit_there(store, away(run))
    assert error is None
    assert any("rank-1.safetensors is corrupt: its SHA-256 differs" in m for m in said)
    assert any(f"resumed from {URL}/step-2" in message for message in said)
    assert losses(run) == whole


def test_a_file_that_is_given_up_is_not_there(store: ObjectStore) -> None:
    """Half of a file is no object: neither when it is given up, nor when its collector comes."""
    for size in (1000, 60_000_000):  # the second one is uploaded in parts
        file = HashedFile(f"{URL}/x")
        file.put(bytes(size))
        file.abandon()
        del file
    assert store.objects() == []


# -- what a start refuses -------------------------------------------------------------------


def start_once(config: RunConfig, folder: Path, n: int = 2) -> tuple[int, str]:
    """Exit status and output of torchrun."""
    (folder / "config.toml").write_text(config.to_toml())
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
    done = subprocess.run(
        [*command, str(n), str(ROOT / "train.py"), "--config", str(folder / "config.toml")],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_bucket_that_is_not_there_is_refused_before_the_model_is_built(
    tmp_path: Path, store: ObjectStore
) -> None:
    config = away(tmp_path / "run", checkpoint__dir="s3://missing/run")
    status, text = start_once(config, tmp_path)
    assert status == 1
    assert "error: checkpoint.dir = 's3://missing/run' cannot be written: " in text
    assert "bucket does not exist; make the bucket" in text
    assert len(re.findall("^error", text, re.MULTILINE)) == 1
    assert "parameters" not in text
    assert "terminate called" not in text


def test_a_store_without_rights_is_refused(tmp_path: Path, store: ObjectStore) -> None:
    for method, error, wanted in (
        ("PUT", ConfigError, "checkpoint.dir = .* cannot be written: .*set credentials"),
        ("GET", CheckpointError, "checkpoint.resume = 'latest': checkpoints cannot be listed"),
    ):
        store.fault = functools.partial(forbidden, method)
        with pytest.raises(error, match=wanted):
            Trainer(away(tmp_path / "run"))
        assert not (tmp_path / "run").exists()


def forbidden(method: str, request: Request) -> str:
    return "forbidden" if request.method == method else ""


def test_a_bucket_that_is_deleted_under_a_run(tmp_path: Path, store: ObjectStore) -> None:
    """The run ends at the next save, with every rank alike and none aborted; a start is refused
    until the bucket is back, and then does not begin anew by itself."""

    def fault(request: Request) -> str:
        if "step-3" in request.path:
            store.delete_bucket()
        return ""

    store.fault, run = fault, tmp_path / "run"
    status, text = start_once(away(run), tmp_path)
    assert status == 1
    assert re.search(r"^error: s3://bucket/run/step-3 could not be written: ", text, re.MULTILINE)
    assert "terminate called" not in text
    store.fault = lambda request: ""
    with pytest.raises(ConfigError, match="bucket does not exist"):
        Trainer(away(run))
    store.make_bucket()
    with pytest.raises(CheckpointError, match=r"finds no checkpoint .* but this run wrote"):
        Trainer(away(run))


ABORTS = """
import os, sys, threading, time
import torch, torch.distributed as dist
from dtron import cli
from dtron.errors import CheckpointError

class Slow:
    def __del__(self):
        time.sleep(3)

rank = int(os.environ["RANK"])
dist.init_process_group("gloo", init_method=f"file://{sys.argv[1]}", rank=rank, world_size=2)
if rank == 1:
    time.sleep(1.5)
    os._exit(0)
threading.Thread(target=dist.all_reduce, args=(torch.zeros(1),), daemon=True).start()
time.sleep(0.5)
sys.slow, kept = Slow(), Slow()  # the interpreter ends slowly
sys.exit(cli._refuse(CheckpointError("it could not be written")))
"""


def test_an_error_ends_a_rank_whose_threads_wait_for_another(tmp_path: Path) -> None:
    """The other rank dies while this one's interpreter ends: a thread that came out of a collective
    then aborted it ("terminate called")."""
    (tmp_path / "script.py").write_text(ABORTS)
    command = [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "store")]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    ranks = [
        subprocess.Popen(command, env={**env, "RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    said = [rank.communicate(timeout=100)[1] for rank in ranks]
    assert "error: it could not be written" in said[0]
    assert "terminate called" not in said[0]
    assert [rank.returncode for rank in ranks] == [1, 0]
