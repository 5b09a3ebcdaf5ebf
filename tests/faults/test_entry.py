"""Signals and errors from a process's first moments on: one line, and an exit code that says it."""

import ctypes
import io
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from dtron import cli, entry
from dtron.cli import _refuse
from dtron.errors import ConfigError, PeerError
from tests.faults.processes import torchrun
from tests.faults.test_launch import ENV, write
from tests.test_architecture import ROOT


def wait_until_it_began(process: subprocess.Popen) -> None:
    """SIGUSR1 is held back from the first line on."""
    status = Path(f"/proc/{process.pid}/status")
    deadline = time.monotonic() + 60
    while not int(re.findall(r"SigBlk:\t(\w+)", status.read_text())[0], 16):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.parametrize(
    ("number", "seconds"),
    [
        *[(signal.SIGINT, seconds) for seconds in (0, 2, 8)],
        *[(signal.SIGTERM, seconds) for seconds in (0.5, 5)],
    ],
)
def test_a_signal_before_training_is_one_line(
    tmp_path: Path, number: signal.Signals, seconds: float
) -> None:
    words = write(tmp_path / "c.toml", tmp_path / "run", train__steps=10**6)
    process = subprocess.Popen(
        [sys.executable, *words], cwd=ROOT, env=ENV, stderr=subprocess.PIPE, text=True
    )
    wait_until_it_began(process)
    time.sleep(seconds)
    process.send_signal(number)
    output = process.communicate(timeout=120)[1]
    if process.returncode == 0:  # it trains by now, and has saved
        assert (tmp_path / "run/checkpoints/latest").exists()
        assert output == ""
        return
    assert process.returncode == 128 + number
    early = f"{number.name}: stopped outside of training, nothing to save\n"
    assert output in (early, "")  # the log has the line where the process group is being made


@pytest.mark.parametrize(
    ("parent", "command", "signals"),
    [
        (1, b"/sbin/init\0", [signal.SIGTERM]),
        (1, b"/usr/bin/tini\0--\0sleep\0", [signal.SIGTERM]),
        (1, b"/opt/venv/bin/torchrun\0train.py\0", []),  # a container's first process
        (1, b"python3\0start.py\0", []),  # which calls torchrun
        (1, None, []),  # hidepid
        (4711, b"bash\0", []),
    ],
)
def test_a_launcher_that_died_before_its_rank_began(
    monkeypatch: pytest.MonkeyPatch,
    parent: int,
    command: bytes | None,
    signals: list[signal.Signals],
) -> None:
    def read(path: str, mode: str) -> io.BytesIO:
        assert (path, mode) == ("/proc/1/cmdline", "rb")
        if command is None:
            raise FileNotFoundError
        return io.BytesIO(command)

    sent, asked = [], []
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setattr(entry.os, "getppid", lambda: parent)
    monkeypatch.setattr(entry.os, "kill", lambda _, number: sent.append(number))
    monkeypatch.setattr(entry, "open", read, raising=False)
    library = type("Library", (), {"prctl": lambda *_: asked.append(_[1:])})
    monkeypatch.setattr(ctypes, "CDLL", lambda _: library())
    entry._end_with_launcher()
    assert sent == signals
    assert asked == [(1, signal.SIGTERM)]


def test_nothing_slow_is_imported_before_signals_are_answered() -> None:
    """train.py sets a handler after `signal` and `sys` alone; dtron.entry adds `os`."""
    code = "import signal, sys\nbefore = set(sys.modules)\nimport dtron.entry\n"
    code += "print(*sorted(set(sys.modules) - before))"
    done = subprocess.run(
        [sys.executable, "-S", "-c", code], env=ENV, cwd=ROOT, capture_output=True, text=True
    )
    assert not {"ctypes", "pathlib", "dtron.cli", "torch"} & set(done.stdout.split()), done.stdout
    assert "dtron.entry" in done.stdout, done.stderr
    lines = (ROOT / "train.py").read_text().splitlines()
    first = [line.strip() for line in lines if line.strip()][1:5]
    assert first[:2] == ["import signal", "import sys"]
    assert first[3].startswith("signal.signal(signal.SIGINT")


def test_ctrl_c_in_another_command_is_one_line(tmp_path: Path) -> None:
    code = (
        "from dtron import cli, entry\ndef stop(): raise KeyboardInterrupt\ncli.commands = stop\n"
    )
    code += "raise SystemExit(entry.commands())"
    done = subprocess.run([sys.executable, "-c", code], env=ENV, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (128 + signal.SIGINT, "SIGINT: stopped\n")


def launched(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(ROOT / "launch/torchrun.sh"), *words],
        cwd=ROOT,
        env=ENV,
        capture_output=True,
        text=True,
        timeout=240,
    )


def test_an_error_of_a_config_is_one_message_under_torchrun(tmp_path: Path) -> None:
    words = write(tmp_path / "c.toml", tmp_path / "run", parallel__tp=3)
    done = launched("--standalone", "--nproc-per-node", "2", *words)
    assert done.returncode == 1
    first, *more, last = done.stderr.splitlines()
    assert all(line.startswith("       parallel.") for line in more), done.stderr
    assert first.startswith("error: parallel degrees (")
    assert last == "torchrun: rank 0 ended first, with exit code 1"


def test_torchruns_own_report_names_the_error(tmp_path: Path) -> None:
    """It cannot be suppressed by ranks: torchrun raises ChildFailedError where one has ended with
    another status than 0 (torch 2.11 to 2.15)."""
    words = write(tmp_path / "c.toml", tmp_path / "run", parallel__tp=3)
    done = subprocess.run(
        torchrun(2, *words), cwd=ROOT, env=ENV, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 1
    printed, _, report = done.stderr.partition("Root Cause (first observed failure):")
    assert len(re.findall("^error: parallel degrees ", printed, re.MULTILINE)) == 1
    assert "rank      : 0 (local_rank: 0)" in report
    assert "traceback : error: parallel degrees (" in report
    assert "To enable traceback" not in done.stderr


def test_the_rank_that_failed_first_is_the_root_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failures = {}
    errors = [PeerError("another rank has failed", stopped=True), ConfigError("x = 1 is wrong")]
    for rank, error in enumerate(errors):
        path = tmp_path / str(rank)
        monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
        _refuse(error)
        failures[rank] = ProcessFailure(rank, 4711, 1, str(path))
    assert ChildFailedError("train.py", failures).get_first_failure()[0] == 1
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "not" / "there"))
    assert _refuse(errors[1]) == 1


def test_a_rank_that_waits_for_the_first_to_print_is_not_the_root_cause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun stops it, though it has found the same error of the config earlier."""
    monkeypatch.setattr(cli, "_GRACE_SECONDS", 0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    failures = {}
    for rank, code in ((1, -signal.SIGTERM), (0, 1)):
        path = tmp_path / str(rank)
        for name, value in (
            ("RANK", rank),
            ("LOCAL_RANK", rank),
            ("TORCHELASTIC_ERROR_FILE", path),
        ):
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(time, "time", lambda rank=rank: 1000.0 - rank)
        _refuse(ConfigError("x = 1 is wrong"))
        failures[rank] = ProcessFailure(rank, 4711, code, str(path))
    assert ChildFailedError("train.py", failures).get_first_failure()[0] == 0


@pytest.fixture
def busy_port() -> Iterator[int]:
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        yield taken.getsockname()[1]


def test_a_port_in_use_is_one_line_under_torchrun(tmp_path: Path, busy_port: int) -> None:
    words = write(tmp_path / "c.toml", tmp_path / "run")
    port = ["--rdzv-backend", "static", "--master-port", str(busy_port)]
    done = launched("--nnodes", "1", *port, "--rdzv-endpoint", f"localhost:{busy_port}", *words)
    assert done.returncode == 69  # as where another host is not there
    (line,) = done.stderr.splitlines()
    assert line.startswith("torchrun: ")
    assert str(busy_port) in line


def test_a_port_in_use_is_one_line_without_torchrun(tmp_path: Path, busy_port: int) -> None:
    words = write(tmp_path / "c.toml", tmp_path / "run")
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=ROOT,
        env={**ENV, **place, "MASTER_PORT": str(busy_port)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if not re.match(r"\[?[WE]\d{4} ", line)]
    assert lines == [
        f"error: MASTER_PORT = {busy_port} is in use on this host by another process; set another "
        "port, the same for all ranks"
    ]


def test_survivors_of_a_kill_end_as_soon_as_torchrun_stops_them(tmp_path: Path) -> None:
    """They must not wait for a second SIGTERM, which does not come."""
    run = tmp_path / "run"
    words = write(tmp_path / "c.toml", run, train__steps=10**6, metrics__log_interval=1)
    log = tmp_path / "log"
    with log.open("w") as file:
        launcher = subprocess.Popen(
            torchrun(2, "--max-restarts", 2, *words), cwd=ROOT, env=ENV, stdout=file, stderr=file
        )
    try:
        _wait(lambda: (run / "metrics.jsonl").exists(), log)
        survivor, killed = sorted(_children(launcher.pid))
        os.kill(survivor, signal.SIGSTOP)  # it notices nothing until torchrun has stopped it
        os.kill(killed, signal.SIGKILL)
        _wait(lambda: "closing signal SIGTERM" in log.read_text(), log)
        os.kill(survivor, signal.SIGCONT)
        _wait(lambda: "recovered in" in log.read_text(), log)
    finally:
        launcher.terminate()
        launcher.wait(60)
    found = re.search(r"([\d.]+) s until the restart", log.read_text())
    assert found, log.read_text()
    assert float(found[1]) < 5, "the survivor has waited"


def _children(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def _wait(done: Callable[[], bool], log: Path) -> None:
    deadline = time.monotonic() + 120
    while not done():
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.1)
