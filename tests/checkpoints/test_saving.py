"""Saving: once, beside training, kept, refused, and what a full disk leaves."""

import errno
import json
import logging
import math
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dtron.checkpoint import dcp_storage as storage
from dtron.checkpoint import save as saving
from dtron.checkpoint.async_staging import SharedMemory, Staging
from dtron.checkpoint.checkpointer import Checkpointer
from dtron.checkpoint.directory import complete
from dtron.checkpoint.metadata import step_of
from dtron.checkpoint.save_plan import CachedSavePlanner
from dtron.errors import CheckpointError, ConfigError
from dtron.io.writer_process import WriterProcess
from dtron.training.saves import Saving
from dtron.training.trainer import Trainer
from tests.checkpoints.faulty_writer import fail_at
from tests.harness import run_ranks
from tests.training.test_trainer import contents, fit, losses, rows, same_checkpoint, tiny

FAULTY = Path(__file__).parent / "faulty_writer.py"


def steps(run: Path) -> list[int]:
    return sorted(map(step_of, complete(run / "checkpoints")))


def test_one_copy_of_replicated_data_is_written(tmp_path: Path) -> None:
    """Whatever the layout, the files hold as many bytes of tensors as one process writes."""
    sizes = []
    for i, (world, changes) in enumerate(
        [(1, {}), (4, {"parallel__dp_replicate": 2}), (4, {"parallel__tp": 2, "parallel__cp": 2})]
    ):
        run = tmp_path / str(i)
        run_ranks(world, fit, tiny(run, train__steps=1, **changes))
        folder = run / "checkpoints/step-1"
        index = storage.read_index(folder)
        shared = {n: t for n, t in index.tensors.items() if not n.startswith("rng.")}
        sizes.append(
            sum(
                math.prod(chunk.sizes) * tensor.properties.dtype.itemsize
                for tensor in shared.values()
                for chunk in tensor.chunks
            )
        )
        written = sum(file.stat().st_size for file in folder.glob("*.safetensors"))
        rng = sum(math.prod(t.size) for n, t in index.tensors.items() if n.startswith("rng."))
        headers = sum(
            8 + int.from_bytes(file.read_bytes()[:8], "little")
            for file in folder.glob("*.safetensors")
        )
        assert written == sizes[-1] + rng + headers
    assert sizes[0] == sizes[1] == sizes[2]


def test_retention_by_count_and_by_every_n(tmp_path: Path) -> None:
    changes = {"checkpoint__interval": 1, "checkpoint__keep": 2, "checkpoint__keep_every": 2}
    run_ranks(1, fit, tiny(tmp_path / "run", train__steps=7, **changes))
    assert steps(tmp_path / "run") == [2, 4, 6, 7]
    with pytest.raises(ConfigError, match=r"checkpoint\.keep_every = 2 has no effect"):
        Trainer(tiny(tmp_path / "x", checkpoint__keep=0, checkpoint__keep_every=2))


def plans_made(config: Any) -> tuple[int, int]:
    trainer = Trainer(config)
    trainer.fit()
    return trainer.checkpointer.plan.n_global_plans, len(complete(trainer.rundir.checkpoints))


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_the_plan_is_made_once(tmp_path: Path, mode: str) -> None:
    changes = {"checkpoint__interval": 2, "checkpoint__keep": 0, "checkpoint__mode": mode}
    (first, saved), (second, _) = run_ranks(2, plans_made, tiny(tmp_path / "run", **changes))
    assert (first, second, saved) == (1, 0, 3)


def test_a_plan_is_made_again_when_a_tensor_has_changed() -> None:
    plan = CachedSavePlanner()
    for n, shape in enumerate([(2,), (2,), (3,)]):
        plan.set_up_planner({"x": torch.zeros(shape)}, is_coordinator=True)
        plans, metadata = plan.create_global_plan([plan.create_local_plan()])
        final = plan.finish_plan(plans[0])
        assert metadata.state_dict_metadata["x"].size == torch.Size(shape)  # type: ignore[union-attr]
        assert [tuple(i.tensor_data.chunk.sizes) for i in final.items if i.tensor_data] == [shape]
        assert plan.n_global_plans == (1, 1, 2)[n]


def test_saves_beside_training_hold_the_same_bits(tmp_path: Path) -> None:
    """What is copied is the state of its step, though training goes on at once."""
    changes = {"checkpoint__interval": 1, "checkpoint__keep": 0}
    run_ranks(2, fit, tiny(tmp_path / "sync", **changes))
    run_ranks(2, fit, tiny(tmp_path / "async", checkpoint__mode="async", **changes))
    assert steps(tmp_path / "async") == [1, 2, 3, 4, 5, 6]
    assert losses(tmp_path / "async") == losses(tmp_path / "sync")
    for step in range(1, 7):
        folder = f"checkpoints/step-{step}"
        assert same_checkpoint(tmp_path / "sync" / folder, tmp_path / "async" / folder)


def fit_with_slow_copies(config: Any) -> None:
    finish = Staging.finish

    def slowly(self: Staging) -> None:
        time.sleep(0.3)
        finish(self)

    Staging.finish = slowly  # type: ignore[method-assign]
    Trainer(config).fit()


def test_an_update_waits_for_the_copy_of_what_it_changes(tmp_path: Path) -> None:
    changes = {"checkpoint__interval": 1, "checkpoint__keep": 0, "train__steps": 3}
    run_ranks(1, fit, tiny(tmp_path / "sync", **changes))
    slow = tiny(tmp_path / "async", checkpoint__mode="async", **changes)
    run_ranks(1, fit_with_slow_copies, slow)
    for step in (1, 2, 3):
        folder = f"checkpoints/step-{step}"
        assert same_checkpoint(tmp_path / "sync" / folder, tmp_path / "async" / folder)


def memories_of_a_run(config: Any) -> list[tuple[int, str]]:
    """The step and the thread in which memory for copies was made."""
    made: list[tuple[int, str]] = []
    trainer = Trainer(config)
    make = SharedMemory.__init__

    def noted(self: SharedMemory, size: int) -> None:
        is_main = threading.current_thread() is threading.main_thread()
        made.append((trainer.step, "main" if is_main else "beside"))
        make(self, size)

    SharedMemory.__init__ = noted  # type: ignore[method-assign]
    trainer.fit()
    return made


@pytest.mark.parametrize(
    ("changes", "made"),
    [
        ({"checkpoint__mode": "async", "checkpoint__interval": 3}, ["beside"]),
        ({"checkpoint__mode": "async", "checkpoint__interval": 0}, ["main"]),  # at the end alone
        ({"checkpoint__mode": "sync", "checkpoint__interval": 3}, []),
    ],
)
def test_room_for_copies_is_made_beside_training(
    tmp_path: Path, changes: dict[str, Any], made: list[str]
) -> None:
    for found in run_ranks(2, memories_of_a_run, tiny(tmp_path, **changes)):
        assert [thread for _, thread in found] == made
        assert all(step <= 1 for step, thread in found if thread == "beside")


def test_a_first_copy_waits_for_its_room(monkeypatch: pytest.MonkeyPatch) -> None:
    make, tensors = SharedMemory.__init__, {"x": torch.arange(100.0), "y": torch.ones(3)}

    def slowly(self: SharedMemory, size: int) -> None:
        time.sleep(0.3)
        make(self, size)

    monkeypatch.setattr(SharedMemory, "__init__", slowly)
    staging = Staging()
    staging.reserve(tensors)
    reserved = staging._reserving
    assert reserved is not None
    assert reserved.running
    copies = staging.start(tensors)
    assert not reserved.running
    staging.finish()
    staging.end()
    assert all(torch.equal(copies[name], tensor) for name, tensor in tensors.items())

    def refused(self: SharedMemory, size: int) -> None:
        raise OSError("no room")

    monkeypatch.setattr(SharedMemory, "__init__", refused)
    staging = Staging()
    staging.reserve(tensors)
    with pytest.raises(OSError, match="no room"):
        staging.start(tensors)


@pytest.mark.gpu
def test_copies_of_a_gpu_lie_in_pinned_memory_that_is_used_again() -> None:
    staging, places = Staging(), set()
    staging.reserve({"x": torch.randn(1000, device="cuda")})
    for _ in range(2):
        tensor = torch.randn(1000, device="cuda")
        copy = staging.start({"x": tensor})["x"]
        staging.finish()
        assert copy.is_pinned()
        assert torch.equal(copy, tensor.cpu())
        places.add(copy.data_ptr())
    staging.end()
    assert len(places) == 1


def order_of_saves(config: Any) -> list[str]:
    """What happens when a save takes until after the next one has begun."""
    events: list[str] = []
    write = Checkpointer._write

    def slowly(self: Checkpointer, flat: Any, facts: Any, how: Any) -> None:
        assert threading.current_thread() is not threading.main_thread()
        time.sleep(0.5)
        write(self, flat, facts, how)
        events.append(f"written {facts.step}")

    Checkpointer._write = slowly  # type: ignore[method-assign]
    begin = Saving.begin

    def began(self: Saving, durable: bool = False) -> None:
        begin(self, durable)
        events.append(f"begun {self.metadata().step}")

    Saving.begin = began  # type: ignore[method-assign]
    Trainer(config).fit()
    return events


def test_a_save_waits_for_the_one_before(tmp_path: Path) -> None:
    config = tiny(
        tmp_path / "run", checkpoint__mode="async", checkpoint__interval=1, train__steps=3
    )
    wanted = [word for step in (1, 2, 3) for word in (f"begun {step}", f"written {step}")]
    assert run_ranks(2, order_of_saves, config) == [wanted, wanted]


def fit_with_full_disk(config: Any, step: int, rank: int) -> list[str]:
    """Train; at one save a rank's disk is full in the middle of its file. Returns the log."""
    return fit_with_faults(config, "full", f"step-{step}/rank-{rank}.")


def fit_with_faults(config: Any, act: str, name: str) -> list[str]:
    """Train; what writes one file fails in the middle of it. Returns the log."""
    messages = []
    if config.checkpoint.mode == "sync":
        fail_at(act, name)
    WriterProcess.COMMAND = (sys.executable, str(FAULTY), act, name, "2000")
    trainer = Trainer(config)
    logging.getLogger("dtron").addFilter(lambda r: messages.append(r.getMessage()) or True)
    try:
        trainer.fit()
    except CheckpointError as error:
        messages.append(f"raised at {trainer.step}: {error}")
    return messages


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_full_disk_stops_the_run_and_leaves_older_checkpoints(tmp_path: Path, mode: str) -> None:
    run = tmp_path / "run"
    config = tiny(run, checkpoint__interval=2, checkpoint__mode=mode, train__steps=60)
    for messages in run_ranks(2, fit_with_full_disk, config, 4, 1):
        assert "No space left on device" in messages[-1]
        assert "step-4 could not be written: rank 1" in messages[-1]
        assert messages[-1].startswith("raised at ")
        assert int(messages[-1].split()[2].strip(":")) < 60
    assert steps(run) == [2]
    assert not list((run / "checkpoints").glob("*.partial"))
    assert Trainer(tiny(run, checkpoint__resume="latest", train__steps=60)).resume.metadata


def test_a_full_disk_is_reported_and_training_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    changes = {"checkpoint__on_error": "continue", "checkpoint__keep": 0}
    changes |= {"checkpoint__mode": "async"}
    run_ranks(2, fit, tiny(tmp_path / "whole"))
    found = run_ranks(2, fit_with_full_disk, tiny(run, checkpoint__interval=2, **changes), 4, 1)
    assert any("training continues without this save" in message for message in found[0])
    assert steps(run) == [2, 6]
    assert losses(run) == losses(tmp_path / "whole")
    assert same_checkpoint(run / "checkpoints/step-6", tmp_path / "whole/checkpoints/step-6")


def test_nothing_is_written_below_a_folder_that_is_unmounted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From step 3 to 4 the run's file system is not mounted; tests/faults/test_hosts.py has a real
    one."""
    run, messages = tmp_path / "run", []
    changes = {"checkpoint__on_error": "continue", "checkpoint__keep": 0}
    run.mkdir()
    trainer = Trainer(tiny(run, checkpoint__interval=2, **changes))
    is_mount, unmounted = os.path.ismount, (3, 4)

    def mounted(path: Any) -> bool:
        return is_mount(path) or (Path(path) == run and trainer.step not in unmounted)

    one_step = trainer._one_step

    def then_look() -> None:
        one_step()
        if trainer.step in unmounted:
            assert len((run / "metrics.jsonl").read_text().splitlines()) == 2

    trainer.step = 0
    trainer._one_step = then_look  # type: ignore[method-assign]
    monkeypatch.setattr("os.path.ismount", mounted)
    monkeypatch.setattr("dtron.run.metrics._MOUNT_SECONDS", 0)  # its device stays the same here
    logging.getLogger("dtron").addFilter(lambda r: messages.append(r.getMessage()) or True)
    trainer.fit()
    assert steps(run) == [2, 6]
    assert any(f"is no longer mounted at {run}; training continues" in text for text in messages)
    assert [row["step"] for row in rows(run)] == list(range(1, 7))


def commit_fails(config: Any) -> str:
    """Rank 0 alone publishes; the others have to learn that it could not."""

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    saving.commit = full  # type: ignore[assignment]
    with pytest.raises(CheckpointError) as error:
        Trainer(config).fit()
    return str(error.value)


def test_a_failure_of_the_first_rank_is_raised_on_all(tmp_path: Path) -> None:
    found = run_ranks(2, commit_fails, tiny(tmp_path / "run", train__steps=1))
    assert all("No space left on device" in message for message in found)
    assert not steps(tmp_path / "run")


def a_peer_is_lost_once_it_is_committed(config: Any) -> None:
    run_on_first = saving.Saver.run_on_first

    def then_lost(self: Any, act: Any) -> None:
        run_on_first(self, act)
        if steps(Path(config.run.dir)):
            raise RuntimeError("Connection closed by peer")

    saving.Saver.run_on_first = then_lost  # type: ignore[method-assign]
    with pytest.raises(CheckpointError, match="Connection closed by peer"):
        Trainer(config).fit()


def test_a_committed_checkpoint_stays_where_a_rank_is_lost_before_all_know(tmp_path: Path) -> None:
    """It was deleted, and the run directory, which names it, refused each restart."""
    run_ranks(1, a_peer_is_lost_once_it_is_committed, tiny(tmp_path / "run", train__steps=1))
    assert steps(tmp_path / "run") == [1]


def test_what_a_killed_run_left_is_cleared_by_the_next_save(tmp_path: Path) -> None:
    run = tmp_path / "run"
    for name in ("step-1.partial", "step-9.old.partial"):
        (run / "checkpoints" / name).mkdir(parents=True)
    run_ranks(1, fit, tiny(run, train__steps=1, checkpoint__resume="latest"))
    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step-1", "latest"}


def test_files_are_what_the_index_says(tmp_path: Path) -> None:
    run_ranks(2, fit, tiny(tmp_path / "run", train__steps=1))
    folder = tmp_path / "run/checkpoints/step-1"
    index = json.loads((folder / "index.json").read_text())
    assert index["files"].keys() == {"rank-0.safetensors", "rank-1.safetensors"}
    whole = contents(folder)
    assert whole["model.embed.weight"].shape == (264, 32)
    assert whole["optimizer.state.embed.weight.exp_avg"].abs().sum() > 0
