"""Publication, processes that write, slow disks, tiers, stores, and which checkpoint is resumed."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from dtron.checkpoint import save as saving
from dtron.checkpoint.convert import convert_parser, to_hf_from
from dtron.checkpoint.dcp_storage import ShardReader, read_index, tiling_error
from dtron.checkpoint.directory import (
    abandon_after,
    commit,
    complete,
    delete_checkpoint,
    delete_old,
    prepare_folder,
)
from dtron.checkpoint.find import agree, find_weights, newest_good, problem
from dtron.checkpoint.locations import checkpoint_locations
from dtron.checkpoint.metadata import CheckpointMetadata, read_metadata, step_of
from dtron.config import RunConfig
from dtron.errors import CheckpointError, ConfigError
from dtron.io import filesystem as files
from dtron.io import remote_path as remote
from dtron.io.filesystem import location
from dtron.io.remote_path import Remote, UnreachableError
from dtron.io.safetensors_file import (
    DTYPE_NAMES,
    StoredTensors,
    TensorSpec,
    write_order,
    write_tensors,
)
from dtron.run.process import Place
from dtron.setup.preflight import preflight
from dtron.training.trainer import Trainer
from tests.checkpoints.test_damage import fit_and_listen, flipped
from tests.checkpoints.test_saving import fit_with_faults, steps
from tests.faults.processes import finish, start
from tests.faults.processes import output as output_of
from tests.harness import run_ranks
from tests.test_architecture import ROOT
from tests.training.test_trainer import fit, losses, rows, same_checkpoint, tiny


def facts(step: int = 1, **changes: Any) -> CheckpointMetadata:
    return replace(CheckpointMetadata(step, 0, 0, 1, 0, {}, {}, {"next": 0}), **changes)


# -- what an index says ---------------------------------------------------------------------

TILINGS: list[tuple[tuple[int, ...], list[tuple[tuple[int, ...], tuple[int, ...]]], str | None]] = [
    ((), [((), ())], None),
    ((4, 6), [((0, 0), (4, 6))], None),
    ((4, 6), [((0, 0), (4, 2)), ((0, 2), (1, 4)), ((1, 2), (3, 4)), ((4, 0), (0, 6))], None),
    ((), [], "lacks 1"),
    ((), [((), ()), ((), ())], "overlap"),
    ((4, 6), [((0, 0), (3, 6))], "lacks 6"),
    ((4, 6), [((0, 0), (3, 6)), ((2, 0), (2, 6))], "overlap, at [2, 0]"),
    ((4, 6), [((0, 0), (2, 4)), ((2, 2), (2, 4)), ((1, 3), (2, 1))], "overlap"),
    ((4, 6), [((0, 0), (4, 7))], "outside of it"),
    ((4, 6), [((-1, 0), (5, 6))], "outside of it"),
    ((4, 6), [((0,), (24,))], "outside of it"),
]


@pytest.mark.parametrize(("shape", "parts", "wrong"), TILINGS)
def test_parts_that_do_not_make_up_a_tensor(shape: Any, parts: Any, wrong: str | None) -> None:
    chunks = [ChunkStorageMetadata(torch.Size([]), torch.Size([])) for _ in parts]
    for chunk, (offsets, sizes) in zip(chunks, parts, strict=True):
        chunk.offsets, chunk.sizes = offsets, sizes
    found = tiling_error(shape, chunks)
    assert (found is None) if wrong is None else (found is not None and wrong in found)


def make(folder: Path, step: int) -> Path:
    """A small checkpoint that is not published yet."""
    path = folder / f"step-{step}"
    prepare_folder(path)
    x = torch.full((2, 3), float(step))
    spec = {"x": TensorSpec(x.dtype, x.shape)}
    written = write_tensors(path / "rank-0.safetensors", spec, lambda _: x)
    metadata = {"bytes": written.bytes, "sha256": written.sha256}
    entry = {"dtype": "F32", "shape": [2, 3], "parts": [[[0, 0], [2, 3], "rank-0.safetensors"]]}
    index = {"format": 1, "files": {"rank-0.safetensors": metadata}, "tensors": {"x": entry}}
    (path / "index.json").write_text(json.dumps(index))
    return path


def test_a_damaged_index_names_the_tensor(tmp_path: Path) -> None:
    path = make(tmp_path, 1)
    text = (path / "index.json").read_text()
    (path / "index.json").write_text(text.replace("[[0, 0], [2, 3]", "[[0, 0], [1, 3]"))
    with pytest.raises(CheckpointError, match=r"x of shape \[2, 3\] lacks 3 elements"):
        read_index(path)


# -- publication ----------------------------------------------------------------------------


class Killed(BaseException):
    """What nothing catches, as SIGKILL."""


def dying_at(monkeypatch: pytest.MonkeyPatch, deadly: int) -> None:
    """Die before the n-th change of the disk."""
    count = iter(range(1000))

    def wrap(owner: Any, name: str) -> None:
        act = getattr(owner, name)

        def counted(*args: Any, **kwargs: Any) -> Any:
            if next(count) == deadly:
                raise Killed
            return act(*args, **kwargs)

        monkeypatch.setattr(owner, name, counted)

    for name in ("replace", "fsync"):
        wrap(os, name)
    for name in ("mkdir", "unlink"):
        wrap(Path, name)
    wrap(os, "open")
    wrap(shutil, "rmtree")


def test_a_kill_at_any_point_of_publication_leaves_a_good_checkpoint(tmp_path: Path) -> None:
    """One checkpoint is kept, the next one published; killed before each change of the disk."""
    outcomes = set()
    for deadly in range(100):
        folder = tmp_path / str(deadly)
        commit(make(folder, 1), facts(1))
        second = make(folder, 2)
        with pytest.MonkeyPatch.context() as patch:
            dying_at(patch, deadly)
            try:
                commit(second, facts(2))
                delete_old(folder, second, 1, 0)
                break
            except Killed:
                pass
        found = newest_good([folder])
        assert found is not None
        outcomes.add(step_of(found))
        third = make(folder, 3)
        commit(third, facts(3))
        delete_old(folder, third, 1, 0)
        assert {path.name for path in folder.iterdir()} == {"step-3", "latest"}
    assert deadly > 5
    assert outcomes == {1, 2}


def test_a_link_to_another_runs_checkpoint_is_removed_and_not_followed(tmp_path: Path) -> None:
    """By retention, abandonment, a save of the same step and one that fails."""
    folder, theirs = tmp_path / "own", tmp_path / "theirs"
    commit(make(theirs, 2), facts(2))
    (theirs / "step-9").mkdir()  # incomplete
    (theirs / "step-9/index.json").write_text("{}")
    before = {file: file.read_bytes() for file in theirs.rglob("*") if file.is_file()}

    def link(step: int, to: int = 2) -> Path:
        (folder / f"step-{step}").symlink_to(theirs / f"step-{to}")
        return folder / f"step-{step}"

    commit(make(folder, 3), facts(3))
    old, incomplete = link(2), link(1, to=9)
    delete_old(folder, folder / "step-3", 1, 0)
    assert not old.is_symlink()
    assert not incomplete.is_symlink()
    newer = link(4)
    abandon_after(folder, 3)
    assert not newer.is_symlink()
    prepare_folder(link(5, to=9))
    assert not (folder / "step-5").is_symlink()
    delete_checkpoint(link(6))
    assert not (folder / "step-6").is_symlink()
    assert {file: file.read_bytes() for file in theirs.rglob("*") if file.is_file()} == before


def test_a_checkpoint_in_a_folder_of_another_step_is_damaged(tmp_path: Path) -> None:
    commit(make(tmp_path, 2), facts(2))
    commit(make(tmp_path, 3), facts(3))
    (tmp_path / "step-3").rename(tmp_path / "step-999")
    wrong = problem(tmp_path / "step-999")
    assert wrong is not None
    assert wrong.endswith("dtron.json is of step 3; rename the folder to step-3")
    assert newest_good([tmp_path]) == tmp_path / "step-2"
    (tmp_path / "step-2").rename(tmp_path / "best")
    assert find_weights(tmp_path / "best") == tmp_path / "best"
    weights = make(tmp_path, 7)
    commit(weights, CheckpointMetadata.of_weights({}, 1))
    assert find_weights(weights) == weights


def test_a_checkpoint_whose_latest_cannot_be_written_is_committed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "latest").mkdir()
    commit(make(tmp_path, 1), facts(1))
    assert problem(tmp_path / "step-1") is None
    (message,) = caplog.messages
    assert "latest cannot be written: " in message
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", "latest"}


@pytest.mark.parametrize("kind", ["link", "fifo", "directory"])
def test_files_of_a_checkpoint_are_not_written_through_what_is_there(
    tmp_path: Path, kind: str
) -> None:
    victim, path = tmp_path / "victim", make(tmp_path / "own", 1)
    victim.write_text("theirs")
    for name in ("latest.partial", "step-1/dtron.json.partial", "step-1/abandoned.json.partial"):
        put(kind, tmp_path / "own" / name, victim)
    commit(path, facts(1))
    abandon_after(path.parent, 0)
    assert victim.read_text() == "theirs"


def put(kind: str, path: Path, victim: Path) -> None:
    """Something else in the place of a file."""
    acts = {"link": lambda: path.symlink_to(victim), "directory": path.mkdir}
    acts.get(kind, lambda: os.mkfifo(path))()


SCHEDULE = {"train.steps": 4, "warmup_steps": 1, "optim.lr": 0.1}
MALFORMED: list[tuple[dict[str, Any], str]] = [
    ({"data": {"sequence": "abc"}}, "data: sequence = 'abc'"),
    ({"data": {"sequence": -1}}, "data: sequence = -1"),
    ({"settings": {"train.seq_len": [1]}}, r"settings: train.seq_len = \[1\]"),
    ({"settings": {"train.seq_len": 2**62}}, "settings: train.seq_len"),
    ({"schedule": {"optim.lr": 0.1, "warmup_steps": 1}}, "schedule: train.steps = None"),
    ({"schedule": {**SCHEDULE, "train.steps": "x"}}, "schedule: train.steps = 'x'"),
    ({"schedule": {**SCHEDULE, "warmup_steps": "x"}}, "schedule: warmup_steps = 'x'"),
    ({"faults": {"rollbacks": "x"}}, "faults: rollbacks = 'x'"),
    ({"faults": {"spikes": [1]}}, r"faults: spikes = \[1\]"),
    ({"faults": {"spikes": {"mean": "x"}}}, "faults: spikes"),
    ({"automatic": {"zero": 1}}, "automatic"),
    ({"step": -1}, "step = -1"),
    ({"world_size": "x"}, "world_size = 'x'"),
]


@pytest.mark.parametrize(("changes", "wrong"), MALFORMED)
def test_malformed_metadata_is_damage_in_one_line(
    tmp_path: Path, changes: dict[str, Any], wrong: str
) -> None:
    path = make(tmp_path, 1)
    commit(path, facts(1, schedule=SCHEDULE, faults={"rollbacks": 1, "spikes": {"mean": 1}}))
    assert problem(path) is None
    commit(path, replace(facts(1), **changes))
    with pytest.raises(CheckpointError, match=rf"dtron.json is damaged: {wrong}") as error:
        read_metadata(path)
    assert "\n" not in str(error.value)


# -- processes that write -------------------------------------------------------------------

LEADER = """
import sys, time
from dtron.io.writer_process import WriterProcess
process = WriterProcess()
(n, sha256) = process.copy(sys.argv[1], sys.argv[2])
print(process.pid, n, sha256, flush=True)
time.sleep(600)
"""


def test_the_process_that_writes_ends_with_its_parent(tmp_path: Path) -> None:
    """Of a script without a guard, which is not imported again."""
    (tmp_path / "script.py").write_text(LEADER)
    (tmp_path / "source").write_bytes(b"x" * 1000)
    words = [str(tmp_path / name) for name in ("script.py", "source", "target")]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    leader = subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert leader.stdout is not None
    pid, size, found = leader.stdout.readline().split()
    assert (size, found) == ("1000", sha256(b"x" * 1000).hexdigest())
    assert (tmp_path / "target").read_bytes() == b"x" * 1000
    leader.send_signal(signal.SIGKILL)
    leader.wait()
    for _ in range(100):
        if not Path(f"/proc/{pid}").exists() or "Z" in Path(f"/proc/{pid}/stat").read_text():
            return
        time.sleep(0.1)
    raise AssertionError(f"{pid} lives on")


@pytest.mark.parametrize(("act", "reason"), [("die", "has died"), ("hang", "timeout_seconds = 3")])
def test_a_process_or_a_disk_that_fails_costs_one_checkpoint(
    tmp_path: Path, act: str, reason: str
) -> None:
    run = tmp_path / "run"
    config = tiny(
        run, checkpoint__interval=2, checkpoint__mode="async", checkpoint__on_error="continue",
        checkpoint__keep=0, checkpoint__timeout_seconds=3,
    )  # fmt: skip
    found = run_ranks(2, fit_with_faults, config, act, "step-4/rank-1.")
    said = [message for message in found[0] if "could not be written" in message]
    assert len(said) == 1
    assert "step-4 could not be written: rank 1: " in said[0]
    assert reason in said[0]
    assert steps(run) == [2, 6]


def test_a_disk_that_does_not_answer_ends_a_synchronous_save_too(tmp_path: Path) -> None:
    run = tmp_path / "run"
    config = tiny(
        run, checkpoint__interval=2, checkpoint__on_error="continue", checkpoint__keep=0,
        checkpoint__timeout_seconds=1,
    )  # fmt: skip
    found = run_ranks(2, fit_with_faults, config, "hang", "step-4/rank-0.")
    assert any("rank 0" in m and "timeout_seconds = 1" in m for m in found[0])
    assert steps(run) == [2, 6]


# -- which one is resumed -------------------------------------------------------------------


def test_a_restarted_attempt_goes_on_from_what_the_job_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a checkpoint named explicitly, and with none."""
    run_ranks(1, fit, tiny(tmp_path / "first", train__steps=2))
    named = str(tmp_path / "first/checkpoints/step-2")
    for resume in (named, ""):
        config = tiny(tmp_path / "run", checkpoint__resume=resume, checkpoint__interval=4)

        def resumed(attempt: int, config: Any = config) -> tuple[str, str]:
            monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", str(attempt))
            resume = Trainer(config).resume
            return resume.mode, str(resume.checkpoint)

        wanted = (resume, resume or "None")
        assert resumed(0) == wanted
        assert resumed(1) == wanted  # the first attempt has begun nothing
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
        run_ranks(1, fit, config)
        begun, newest = tmp_path / "run/begun", str(tmp_path / "run/checkpoints/step-6")
        assert not begun.exists()  # it has ended
        begun.write_text("")
        assert resumed(1) == ("latest", newest)
        assert resumed(0) == wanted  # another job
        assert resumed(1) == wanted
        begun.write_text("job-1")
        for job, expected in (("job-1", ("latest", newest)), ("job-2", wanted)):
            monkeypatch.setenv("TORCHELASTIC_RUN_ID", job)
            assert resumed(0) == expected  # as when a member has come or gone
        monkeypatch.delenv("TORCHELASTIC_RUN_ID")


def test_a_finished_run_says_so_and_verifies_nothing(tmp_path: Path, reports: list[str]) -> None:
    run = tmp_path / "run"
    run_ranks(1, fit, tiny(run, train__steps=2))
    file = run / "checkpoints/step-2/rank-0.safetensors"
    file.write_bytes(bytes(len(file.read_bytes())))
    Trainer(tiny(run, train__steps=2, checkpoint__resume="latest")).fit()
    assert not dist.is_initialized()
    assert any("the run is finished" in message for message in reports)


def test_a_resumed_run_that_cannot_write_its_checkpoints_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system that is mounted read-only, and not at the first save."""
    run = tmp_path / "run"
    run_ranks(1, fit, tiny(run, train__steps=2))
    folder, access = run / "checkpoints", os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != folder and access(path, mode))
    with pytest.raises(ConfigError) as error:
        preflight(tiny(run, train__steps=3, checkpoint__resume="latest"), Place(0, 0, 1))
    assert str(error.value) == (
        f"{folder}, which has this run's checkpoints, cannot be written; make it writable, or "
        f"continue in another folder: set another run.dir and checkpoint.resume={folder}/step-2"
    )
    finished = tiny(run, train__steps=2, checkpoint__resume="latest")
    assert preflight(finished, Place(0, 0, 1)).resume.is_finished(
        finished.train
    )  # which writes none


def test_a_finished_run_with_tiers_is_copied_once(tmp_path: Path) -> None:
    """Started again it leaves both as they are; on fewer ranks it copies what is missing."""
    run, fast = tmp_path / "run", tmp_path / "fast"
    keys = {"checkpoint__fast_dir": str(fast), "checkpoint__fast_interval": 1}
    options = {"train__steps": 2, "checkpoint__interval": 2, "checkpoint__resume": "latest", **keys}
    run_ranks(2, fit, tiny(run, **options))
    durable = run / "checkpoints/step-2"
    before = (durable / "dtron.json").stat().st_mtime_ns
    run_ranks(1, fit, tiny(run, **options))
    assert (durable / "dtron.json").stat().st_mtime_ns == before
    shutil.rmtree(durable)
    run_ranks(1, fit, tiny(run, **options))
    assert problem(durable) is None
    assert len(list(durable.glob("rank-*"))) == 2


def test_folders_of_others_are_not_touched(tmp_path: Path) -> None:
    """In a folder of one's own choice."""
    folder = tmp_path / "checkpoints"
    (folder / "step-1").mkdir(parents=True)
    (folder / "step-3").mkdir()
    for name in ("step-1/other.pt", "step-3/other.pt", "big.partial"):
        (folder / name).write_text("kept")
    commit(make(folder, 2), facts(2))
    delete_old(folder, folder / "step-2", 1, 0)
    with pytest.raises(CheckpointError, match=r"step-3 has a file other\.pt"):
        prepare_folder(folder / "step-3")
    for name in ("step-1/other.pt", "step-3/other.pt", "big.partial"):
        assert (folder / name).read_text() == "kept"


def test_ranks_agree_on_the_newest_one_that_all_see(tmp_path: Path) -> None:
    """Where a node has lost its fast tier, of both tiers."""
    fast, durable = tmp_path / "fast", tmp_path / "durable"
    for folder, step in ((durable, 1), (durable, 2), (fast, 2), (fast, 3)):
        commit(make(folder, step), facts(step))
    found = run_ranks(2, agreed, fast, durable)
    assert found == [fast / "step-2", durable / "step-2"]
    shutil.rmtree(durable)
    assert run_ranks(2, agreed, fast, durable) == ["refused", "refused"]
    shutil.rmtree(fast)
    assert run_ranks(2, agreed, fast, durable) == [None, None]


def agreed(fast: Path, durable: Path) -> Any:
    folders = [fast if dist.get_rank() == 0 else fast / "lost", durable]
    assert dist.group.WORLD is not None
    try:
        return agree(newest_good(folders), folders, dist.group.WORLD)
    except CheckpointError:
        return "refused"


# -- tiers ----------------------------------------------------------------------------------


def test_a_fast_tier_before_a_durable_one(tmp_path: Path) -> None:
    """Losses are those of an undisturbed run, whichever tier is left, and damaged ones are left
    out."""
    whole, run = tmp_path / "whole", tmp_path / "run"
    same = {"schedule__name": "constant"}
    run_ranks(2, fit, tiny(whole, checkpoint__interval=3, checkpoint__keep=0, **same))
    tiered = {
        **same,
        "checkpoint__fast_dir": str(tmp_path / "fast"),
        "checkpoint__fast_interval": 2,
    }
    tiered |= {"checkpoint__interval": 3, "checkpoint__keep": 0, "checkpoint__mode": "async"}
    config = tiny(run, checkpoint__last=False, train__steps=5, **tiered)
    run_ranks(2, fit, config)
    fast = checkpoint_locations(config)[0].folder
    assert isinstance(fast, Path)
    assert max(map(step_of, complete(fast))) == 4  # and what was copied meanwhile
    assert steps(run) == [3]
    copies = {name: tmp_path / name for name in ("lost", "damaged")}
    for name in copies:
        shutil.copytree(run, copies[name])
    resumed = {**tiered, "checkpoint__resume": "latest"}
    for name, copy in copies.items():
        config = tiny(copy, **resumed)
        if name == "damaged":
            folder = checkpoint_locations(config)[0].folder
            assert isinstance(folder, Path)
            shutil.copytree(fast / "step-4", folder / "step-4")
            flipped(folder / "step-4")
        (said, error), _ = run_ranks(2, fit_and_listen, config)
        assert error is None
        assert any(f"resumed from {copy}/checkpoints/step-3" in message for message in said)
    (said, error), _ = run_ranks(2, fit_and_listen, tiny(run, **resumed))
    assert error is None
    assert any(f"resumed from {fast}/step-4" in message for message in said)
    assert steps(run) == [3, 6]
    for name in ("run", *copies):
        last = tmp_path / name / "checkpoints/step-6"
        assert losses(tmp_path / name)[-1] == losses(whole)[-1]
        assert same_checkpoint(last, whole / "checkpoints/step-6")
    with pytest.raises(ConfigError, match="has checkpoints of an earlier start"):
        Trainer(tiny(run, **tiered))


def fit_and_die_copying(config: RunConfig) -> None:
    """Rank 1 dies before it copies its part of the last checkpoint, rank 0 behind its own."""
    copy = saving._copy_files

    def half(source: Any, folder: Any, process: Any) -> None:
        if folder.name != "step-4":
            return copy(source, folder, process)
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        copy(source, folder, process)
        time.sleep(600)

    saving._copy_files = half
    Trainer(config).fit()


@pytest.mark.parametrize("last", [True, False])
@pytest.mark.parametrize("lost", [False, True])
def test_a_run_that_dies_while_its_last_checkpoint_is_copied(
    tmp_path: Path, last: bool, lost: bool
) -> None:
    """It is copied by the next start, which trains nothing again unless the fast tier is lost."""
    run, fast = tmp_path / "run", tmp_path / "fast"
    keys = {"checkpoint__fast_dir": str(fast), "checkpoint__fast_interval": 1}
    keys |= {"checkpoint__interval": 2, "checkpoint__last": last, "checkpoint__resume": "latest"}
    config = tiny(run, train__steps=4, checkpoint__mode="async", **keys)
    processes = start(2, tmp_path / "ranks", fit_and_die_copying, config)
    processes[1].join(60)
    half = run / "checkpoints/step-4"
    for _ in range(600):
        if (half / "rank-0.safetensors").exists():
            break
        time.sleep(0.1)
    assert finish(processes, 1) == [-signal.SIGKILL] * 2, output_of(tmp_path / "ranks")
    assert [path.name for path in half.iterdir()] == ["rank-0.safetensors"]
    assert steps(run) == [2]
    before = losses(run)
    if lost:
        shutil.rmtree(fast)
    (said, error), _ = run_ranks(2, fit_and_listen, config)
    assert error is None
    wanted = "run/checkpoints/step-2" if lost else "step-4"
    assert any(message.startswith("resumed from") and wanted in message for message in said)
    assert any(message.startswith("step 3/4 ") for message in said) == lost
    assert steps(run) == [2, 4]
    assert problem(half) is None
    assert losses(run) == before


# -- stores ---------------------------------------------------------------------------------


def test_checkpoints_in_a_store(tmp_path: Path) -> None:
    """Two ranks write to a URL, one of whose puts fails; another layout goes on from it, past a
    damaged one; what is old is retired; transformers' format is made of it."""
    pytest.importorskip("fsspec")
    whole, run, store = tmp_path / "whole", tmp_path / "run", tmp_path / "store"
    same = {"schedule__name": "constant"}
    run_ranks(1, fit, tiny(whole, **same))
    away = {**same, "checkpoint__dir": f"file://{store}", "checkpoint__interval": 1}
    away |= {"checkpoint__on_error": "continue", "checkpoint__last": False}
    config = tiny(run, checkpoint__mode="async", train__steps=5, **away)
    found = run_ranks(2, fit_with_faults, config, "full", "step-5/rank-1.")
    assert any("No space left on device" in message for message in found[0])
    assert sorted(map(step_of, complete(store))) == [3, 4]
    assert not list(run.glob("checkpoints/step-*"))
    flipped(store / "step-4")
    changes = {"checkpoint__resume": "latest", "parallel__tp": 2}
    (said, error), *_ = run_ranks(2, fit_and_listen, tiny(run, **changes, **away))
    assert error is None
    assert any("resumed from" in message and "step-3" in message for message in said)
    assert [row["step"] for row in rows(run)] == [1, 2, 3, 4, 5, 6]
    assert losses(run) == pytest.approx(losses(whole), rel=1e-4)
    assert sorted(map(step_of, complete(store))) == [5, 6]
    given = convert_parser().parse_args(["to-hf", f"file://{store}", str(tmp_path / "hf")])
    run_ranks(1, to_hf_from, given)
    assert (tmp_path / "hf/model.safetensors").exists()
    with pytest.raises(ConfigError, match="has checkpoints of an earlier start"):
        Trainer(tiny(run, **away))


def test_a_store_that_cannot_be_used_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("fsspec")
    with pytest.raises(ConfigError, match="is the memory of one process"):
        Trainer(tiny(tmp_path, checkpoint__dir="memory://x", checkpoint__mode="async"))
    with pytest.raises(ConfigError, match="nowhere"):
        Trainer(tiny(tmp_path, checkpoint__dir="nowhere://x"))
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(ConfigError, match=r"pip install fsspec"):
        Trainer(tiny(tmp_path, checkpoint__dir="s3://bucket/run"))


def test_a_store_shows_a_checkpoint_when_its_manifest_is_there() -> None:
    """In fsspec's memory: nothing is renamed, and regions of tensors are read alone."""
    pytest.importorskip("fsspec")
    folder = location("memory://bucket/run")
    assert isinstance(folder, Remote)
    folder.delete()
    path = folder / "step-2"
    prepare_folder(path)
    (path / "index.json").write_bytes(b'{"format": 1, "files": {}, "tensors": {}}')
    assert complete(folder) == []
    commit(path, facts(2))
    assert complete(folder) == [path]
    assert newest_good([folder]) == path
    abandon_after(folder, 1)
    assert complete(folder) == []
    prepare_folder(folder / "step-3")
    assert files.names_in(path)  # what was abandoned is there until the next one is
    delete_old(folder, folder / "step-3", 1, 0)
    assert not files.names_in(path)
    with pytest.raises(OSError, match="nothing"):
        (folder / "nothing").read_whole(10)


def test_what_is_announced_is_read_by_few_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The head by one request, tensors that lie together by one, a large one by several parts."""
    pytest.importorskip("fsspec")
    sizes = {"HEAD_BYTES": 4096, "_BLOCK_BYTES": 8192, "_PART_BYTES": 2048, "_GAP_BYTES": 64}
    for name, size in sizes.items():
        monkeypatch.setattr(remote, name, size)
    asked, read_bytes = [], Remote.read_bytes

    def counted(self: Remote, start: int, end: int) -> bytes:
        asked.append((start, end))
        return read_bytes(self, start, end)

    monkeypatch.setattr(Remote, "read_bytes", counted)
    tensors = {"large": torch.randn(5000)} | {f"x{i}": torch.randn(300, 2) for i in range(6)}
    described = {name: TensorSpec(t.dtype, t.shape) for name, t in tensors.items()}
    write_tensors(tmp_path / "x.safetensors", described, tensors.__getitem__)
    where = location("memory://bucket/x.safetensors")
    assert isinstance(where, Remote)
    where.write_bytes((tmp_path / "x.safetensors").read_bytes())
    stored = StoredTensors(where.parent.listed() / where.name)
    assert asked == [(0, 4096)]  # where small tensors lie too
    order = write_order(described)
    parts = [(stored.get_slice(n), tuple(slice(0, s) for s in tensors[n].shape)) for n in order]
    stored.plan(parts)
    for name, (part, region) in zip(order, parts, strict=True):
        assert torch.equal(part[region], tensors[name]), name
    assert len(asked) == 1 + 3 + 2  # the large one is longer than a block
    content = b"".join((where.parent.listed() / where.name).blocks())
    assert content == (tmp_path / "x.safetensors").read_bytes()


@pytest.mark.parametrize("part_bytes", [4096, 1024])
def test_a_short_answer_of_a_store_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    """Neither for whole files nor for parts of tensors, read by one request or by several."""
    fsspec = pytest.importorskip("fsspec")
    for name in ("HEAD_BYTES", "_BLOCK_BYTES"):
        monkeypatch.setattr(remote, name, 4096)
    monkeypatch.setattr(remote, "_PART_BYTES", part_bytes)
    local = commit_of(tmp_path, TensorSpec(torch.float32, (5000,)))
    folder = location("memory://short/step-1")
    assert isinstance(folder, Remote)
    for file in local.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    reader = ShardReader(folder)
    reader.region("x", (slice(0, 5000),))
    cat_file = fsspec.implementations.memory.MemoryFileSystem.cat_file

    def short(self: Any, path: str, start: int | None = None, end: int | None = None) -> bytes:
        return cat_file(self, path, start, end)[:-7]

    monkeypatch.setattr(fsspec.implementations.memory.MemoryFileSystem, "cat_file", short)
    file = folder / "rank-0.safetensors"
    for read in (
        file.head,
        lambda: list(file.blocks()),
        lambda: reader.region("x", (slice(3000, 4000),)),
        lambda: problem(folder),
    ):
        with pytest.raises(UnreachableError, match=r"the store returned \d+ of \d+ bytes"):
            read()


def commit_of(folder: Path, spec: TensorSpec) -> Path:
    """A checkpoint of one tensor, x."""
    path = folder / "step-1"
    prepare_folder(path)
    zeros = torch.zeros(spec.shape, dtype=spec.dtype)
    written = write_tensors(path / "rank-0.safetensors", {"x": spec}, lambda _: zeros)
    files = {"rank-0.safetensors": asdict(written)}
    shape = list(spec.shape)
    parts = [[[0] * len(shape), shape, "rank-0.safetensors"]]
    entry = {"dtype": DTYPE_NAMES[spec.dtype], "shape": shape, "parts": parts}
    index = {"format": 1, "files": files, "tensors": {"x": entry}}
    (path / "index.json").write_text(json.dumps(index))
    commit(path, facts(1))
    return path


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64, torch.float8_e4m3fn])
def test_weights_that_are_no_floats_are_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    path, wanted = commit_of(tmp_path, TensorSpec(dtype, (3,))), {"x": torch.ones(3)}
    with pytest.raises(dcp.CheckpointException) as error:
        dcp.load(wanted, storage_reader=ShardReader(path), no_dist=True)
    cause = str(saving.first_cause(error.value))
    assert cause.startswith(f"x is stored as {DTYPE_NAMES[dtype]}; it has to be one of F64, F32, ")
    same = {"x": torch.ones(3).to(dtype)}
    dcp.load(same, storage_reader=ShardReader(path), no_dist=True)
    assert not same["x"].float().any()


HEADERS = [
    ('{"a":A,"b":{"dtype":"F32","shape":[2],"data_offsets":[4,12]}}', "a and b overlap"),
    ('{"a":A,"a":A}', "has a key twice"),
    ('{"a":{"dtype":"F32","dtype":"I32","shape":[2],"data_offsets":[0,8]}}', "has a key twice"),
]


@pytest.mark.parametrize(("header", "wrong"), HEADERS)
def test_a_header_of_two_meanings_is_refused(tmp_path: Path, header: str, wrong: str) -> None:
    whole = '{"dtype":"F32","shape":[2],"data_offsets":[0,8]}'
    text = header.replace("A", whole).encode()
    (tmp_path / "x").write_bytes(len(text).to_bytes(8, "little") + text + bytes(16))
    with pytest.raises(ValueError, match=wrong):
        StoredTensors(tmp_path / "x")


def test_a_fast_folder_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny(tmp_path / "run", checkpoint__fast_dir=str(tmp_path / "fast"))
    folder = checkpoint_locations(config)[0].folder
    assert isinstance(folder, Path)
    folder.mkdir(parents=True)
    checkpoint_locations(config)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with pytest.raises(
            ConfigError, match=r"checkpoint\.fast_dir: .* is a folder of user 0, not of this"
        ):
            checkpoint_locations(config)
    folder.rmdir()
    folder.symlink_to(tmp_path)
    with pytest.raises(ConfigError, match="is a link"):
        checkpoint_locations(config)


def test_small_tensors_come_first_in_a_file() -> None:
    """So that a store gives them together with the header."""
    large, small = TensorSpec(torch.float32, (10**6,)), TensorSpec(torch.float32, ())
    half = TensorSpec(torch.bfloat16, (2,))
    tensors = {"a": large, "a.step": small, "h": half, "b": large, "b.step": small}
    assert write_order(tensors) == ["a.step", "b.step", "a", "b", "h"]


def test_regions_of_a_file_in_a_store(tmp_path: Path) -> None:
    pytest.importorskip("fsspec")
    tensors = {"a": torch.randn(5, 4, 3), "b": torch.arange(6).reshape(2, 3).bfloat16()}
    tensors |= {"c": torch.tensor(3.0), "d": torch.empty(0, 3)}
    described = {name: TensorSpec(t.dtype, t.shape) for name, t in tensors.items()}
    write_tensors(tmp_path / "x.safetensors", described, tensors.__getitem__)
    where = location(f"file://{tmp_path}/x.safetensors")
    assert isinstance(where, Remote)
    read = StoredTensors(where)
    for name, tensor in tensors.items():
        whole = tuple(slice(0, n) for n in tensor.shape)
        assert torch.equal(read.get_slice(name)[whole], tensor)
    part = (slice(1, 4), slice(2, 4), slice(0, 1))
    assert torch.equal(read.get_slice("a")[part], tensors["a"][part])
    content = bytearray((tmp_path / "x.safetensors").read_bytes())
    (tmp_path / "x.safetensors").write_bytes(content[:-200])
    with pytest.raises(ValueError, match="is outside of the file"):
        StoredTensors(where).get_slice("b")
    (tmp_path / "x.safetensors").write_bytes(b"\xff" * 64)
    with pytest.raises(ValueError, match="no safetensors header"):
        StoredTensors(where)
