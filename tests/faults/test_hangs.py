"""A rank that hangs in the middle of a step: every rank says where it is and ends."""

import os
import re
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from dtron.bench.run import end
from dtron.config import RunConfig
from dtron.faults.signals import EXIT_UNSAVED
from dtron.faults.watchdog import EXIT_HUNG, Watchdog
from dtron.run.fault_handler import FaultHandler
from dtron.training.saves import Saving
from dtron.training.trainer import Trainer
from tests.faults.processes import finish, output, start, torchrun
from tests.faults.test_launch import ENV, write
from tests.training.test_trainer import tiny


def sleep_in_a_step(config: RunConfig) -> None:
    """Rank 2 sleeps in the second block's attention, in the third step."""
    trainer = Trainer(config)
    one_step = trainer._one_step

    def then_sleep() -> None:
        if trainer.step == 2 and trainer.place.rank == 2:
            attention = trainer.model.applied.parts[0].get_submodule("blocks.1.attn")
            attention.register_forward_pre_hook(lambda *_: time.sleep(60))
        one_step()

    trainer._one_step = then_sleep  # type: ignore[method-assign]
    trainer.fit()


def test_a_hang_is_reported_with_rank_collective_and_module(tmp_path: Path) -> None:
    """dp_shard 2 x tp 2: rank 3 waits for rank 2 in tp, ranks 0 and 1 a little later."""
    config = tiny(tmp_path / "run", parallel__tp=2, faults__hang_seconds=5.0)
    processes = start(4, tmp_path / "ranks", sleep_in_a_step, config)
    assert finish(processes) == [EXIT_HUNG] * 4
    text = output(tmp_path / "ranks")
    assert "hang: step 3 has not ended for" in text
    assert "hang: ranks 0, 1, 3 wait in a collective" in text
    assert "hang: rank 2 is in sleep_in_a_step.<locals>" in text
    assert "module blocks.1.attn; ranks wait for it" in text
    of_rank_3 = next(line for line in text.splitlines() if "rank 3 waits in" in line)
    assert "module blocks.1" in of_rank_3
    assert "over tp" in of_rank_3
    report = (tmp_path / "run/hangs/step-3/rank-2.txt").read_text()
    assert "in <lambda>" in report  # where it sleeps
    assert "File" in report


def save_for_ever(config: RunConfig) -> None:
    """Signalled in the second step; the save that follows does not end."""
    Saving.begin = lambda _self, durable=False: time.sleep(60)  # type: ignore[method-assign]
    trainer = Trainer(config)
    one_step = trainer._one_step

    def signalled() -> None:
        one_step()
        if trainer.step == 2:
            signal.raise_signal(signal.SIGTERM)

    trainer._one_step = signalled  # type: ignore[method-assign]
    trainer.fit()


def test_a_save_that_does_not_end_by_the_deadline_is_abandoned(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", train__steps=20, faults__stop_seconds=2)
    processes = start(2, tmp_path / "ranks", save_for_ever, config)
    assert finish(processes) == [EXIT_UNSAVED] * 2
    # from its own signal or from the other rank's, whichever its threads came to first
    line = r"rank 1: not done 2 seconds after (SIGTERM|the ranks agreed to stop) \(faults.stop_sec"
    assert re.search(line, output(tmp_path / "ranks"))


def stuck_when_signalled(config: RunConfig) -> None:
    """Signalled while the main thread is in a collective that nobody joins: no handler runs."""
    trainer = Trainer(config)

    def stuck() -> None:
        if trainer.place.rank == 0:
            threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGUSR1)).start()
            torch.distributed.all_reduce(torch.zeros(1))
        time.sleep(60)

    trainer._one_step = stuck  # type: ignore[method-assign]
    trainer.fit()


def test_the_deadline_runs_inside_a_collective_too(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", faults__stop_seconds=1)
    processes = start(2, tmp_path / "ranks", stuck_when_signalled, config)
    processes[0].join(60)
    assert finish(processes, 0)[0] == EXIT_UNSAVED


def alone_when_signalled(config: RunConfig) -> None:
    """Rank 1 dies in the third step, in which the others wait for ever; then they are signalled."""
    trainer = Trainer(config)
    one_step = trainer._one_step

    def stuck() -> None:
        if trainer.step < 2:
            return one_step()
        if trainer.place.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGTERM)).start()
        time.sleep(60)

    trainer._one_step = stuck  # type: ignore[method-assign]
    trainer.fit()


def test_ranks_that_wait_for_a_dead_one_end_soon_after_the_signal(tmp_path: Path) -> None:
    config = tiny(tmp_path / "run", train__global_batch=6)
    processes = start(3, tmp_path / "ranks", alone_when_signalled, config)
    processes[1].join(60)
    begun = time.monotonic()
    assert finish(processes) == [EXIT_HUNG, -signal.SIGKILL, EXIT_HUNG]
    assert time.monotonic() - begun < 30
    text = output(tmp_path / "ranks")
    assert "rank 2: another rank has died, and this rank did not end in 2 seconds" in text


STOPPED = """
import os, pathlib, signal, sys, time
from dtron import cli
from dtron.faults import watchdog
from dtron.run import process, rendezvous
from dtron.training import trainer

watchdog._START_GATHER_SECONDS = 5.0
here = pathlib.Path(__file__).parent
(here / f"imported-{os.environ['RANK']}").touch()
while len(list(here.glob("imported-*"))) < 3:  # which takes ranks of a busy machine unequally long
    time.sleep(0.05)

def stop(*_, **__):
    os.kill(os.getpid(), signal.SIGSTOP)

if os.environ["RANK"] == STOPS:
    if WHERE == "rendezvous":
        rendezvous._Handshake.host_store = rendezvous._Handshake.join_store = stop
    elif WHERE == "process group":
        process.dist.init_process_group = stop
    else:
        trainer.ModelBuilder.build = stop
sys.exit(cli.main())
"""
"""train.py, of whose ranks one stops while it meets the others, or while it builds the model."""


@pytest.mark.parametrize(
    ("where", "rank"), [("rendezvous", 2), ("process group", 0), ("build", 0), ("build", 2)]
)
def test_a_rank_that_stops_at_the_start_is_named(tmp_path: Path, rank: int, where: str) -> None:
    script = tmp_path / "train.py"
    script.write_text(STOPPED.replace("STOPS", repr(str(rank))).replace("WHERE", repr(where)))
    seconds = 2.0 if where == "rendezvous" else 3.0  # four times that at the start
    keys = {"faults__hang_seconds": seconds, "train__global_batch": 6}
    words = write(tmp_path / "c.toml", tmp_path / "run", **keys)[1:]
    process = subprocess.Popen(
        torchrun(3, script, *words),
        env=ENV,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if line.startswith("hang: no report"):
            break
    ranks = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    for pid in map(int, ranks):  # torchrun kills what is stopped only after half a minute
        os.kill(pid, signal.SIGKILL)
    end(process)
    process.communicate()
    text = "".join(lines)
    others = [str(each) for each in range(3) if each != rank]
    assert f"hang: no report from ranks {rank}: " in lines[-1]
    assert f"hang: ranks {', '.join(others)} wait in a collective" in text
    phase = "rendezvous" if where == "rendezvous" else "start"
    assert f"hang: the {phase} has not ended for" in text
    assert "Traceback" not in text
    assert (tmp_path / f"run/hangs/{phase}/rank-{others[0]}.txt").exists()


@pytest.mark.parametrize(("phase", "ends"), [("rendezvous", False), ("start", True)])
def test_hangs_of_another_run_end_no_rendezvous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, phase: str, ends: bool
) -> None:
    """It may have the same directory, until this one has the lock."""
    ended = threading.Event()
    monkeypatch.setattr(Watchdog, "_report_and_exit", lambda *_: ended.set())
    watchdog = Watchdog(1, tmp_path, 0, 2)
    watchdog.begin(phase)
    (tmp_path / "start").mkdir()
    assert ended.wait(2) == ends
    watchdog.end()


def test_an_error_of_a_start_is_explained_under_watch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether another rank has failed is asked of a store, which may not answer."""
    watched = []

    def fail(*_: object) -> None:
        raise RuntimeError("no such layer")

    def explain(faults: FaultHandler, *_: object) -> None:
        assert faults.watchdog is not None
        watched.append(faults.watchdog._thread.is_alive())

    monkeypatch.setattr(Trainer, "_build", fail)
    monkeypatch.setattr(FaultHandler, "explain", explain)
    with pytest.raises(RuntimeError, match="no such layer"):
        Trainer(tiny(tmp_path / "run")).fit()
    dist.destroy_process_group()  # a rank that fails leaves it as it is
    assert watched == [True]
