"""The process: what the environment says, and a log that cannot be written."""

import errno
import io
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from dtron import cli
from dtron.errors import ConfigError, TrainingError
from dtron.run import process
from dtron.run.process import MAX_RANKS, Place, set_up_logging, warn_of_shared_store

log = logging.getLogger("dtron")
VARIABLES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE"),
    *("TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_RUN_ID"),
)


@pytest.fixture(autouse=True)
def _no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


REFUSED: list[tuple[dict[str, str], str]] = [
    ({"RANK": "abc"}, "RANK = 'abc' in the environment is not an integer from 0 to 0; "),
    ({"RANK": ""}, "RANK = '' "),
    ({"RANK": "-1", "WORLD_SIZE": "2"}, "RANK = '-1' .* from 0 to 1; start ranks with torchrun"),
    ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK = '2' .* from 0 to 1; "),
    ({"RANK": "9" * 5000}, "RANK = '999"),
    ({"RANK": "1_0", "WORLD_SIZE": "20"}, "RANK = '1_0'"),
    ({"RANK": "٣", "WORLD_SIZE": "20"}, "RANK = "),
    ({"WORLD_SIZE": "0"}, f"WORLD_SIZE = '0' .* from 1 to {MAX_RANKS}"),
    ({"WORLD_SIZE": "2000000000"}, "WORLD_SIZE = '2000000000'"),
    ({"LOCAL_RANK": "x"}, "LOCAL_RANK = 'x'"),
    ({"LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE = '0'"),
    ({"TORCHELASTIC_RESTART_COUNT": "x"}, "TORCHELASTIC_RESTART_COUNT = 'x'"),
]


@pytest.mark.parametrize(("environment", "wrong"), REFUSED)
def test_an_environment_that_names_no_place_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    environment: dict[str, str],
    wrong: str,
) -> None:
    """By name, also by `dtron plan`, and where the error itself is printed."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=wrong) as error:
        Place.of_environment()
    assert cli._refuse(error.value) == 1
    assert capsys.readouterr().err == f"error: {error.value}\n"


def test_a_number_of_hosts_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GROUP_WORLD_SIZE", "x")
    with pytest.raises(ConfigError, match="GROUP_WORLD_SIZE = 'x'"):
        warn_of_shared_store(Place(0, 0, 1))


@pytest.fixture
def set_back() -> Iterator[None]:
    """The log, at the end."""
    before = (log.handlers, log.propagate, log.level)
    yield
    log.handlers, log.propagate = before[:2]
    log.setLevel(before[2])


def log_to(file: io.TextIOWrapper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", file)
    set_up_logging(Place(0, 0, 1), Console(file=io.StringIO()))


def closed_pipe() -> io.TextIOWrapper:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


@pytest.mark.parametrize("kind", ["pipe", "full"])
@pytest.mark.usefixtures("set_back")
def test_a_log_that_cannot_be_written_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Neither a traceback for each line, nor an error of the interpreter at its end."""
    file = closed_pipe() if kind == "pipe" else os.fdopen(os.open("/dev/full", os.O_WRONLY), "w")
    log_to(file, monkeypatch)
    for i in range(3):
        log.info("line %d %s", i, "x" * 10_000)
    process.drop_unwritten()
    file.close()
    assert capsys.readouterr().err == ""


@pytest.mark.usefixtures("set_back")
def test_a_log_goes_on_when_its_disk_has_room_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "log").open("w") as file:
        log_to(file, monkeypatch)
        flush = log.handlers[0].flush

        def full() -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(log.handlers[0], "flush", full)
        log.info("first")
        monkeypatch.setattr(log.handlers[0], "flush", flush)
        log.info("second")
    assert (tmp_path / "log").read_text().splitlines()[-1].endswith(" second")


@pytest.mark.usefixtures("set_back")
def test_what_a_terminal_would_obey_or_its_encoding_lacks_is_replaced(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with (tmp_path / "log").open("w", encoding="ascii") as file:
        log_to(file, monkeypatch)
        log.info("%s", "\x1b]0;owned\x07é\tx")
    assert (tmp_path / "log").read_text()[9:] == "\\x1b]0;owned\\x07?\tx\n"


@pytest.mark.parametrize("kind", ["fifo", "link"])
def test_an_error_file_is_a_regular_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    path, victim = tmp_path / "error.json", tmp_path / "victim"
    victim.write_text("theirs")
    if kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(victim)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(path))
    cli._write_error_file(TrainingError("x"), 1.0)
    assert victim.read_text() == "theirs"
    path.unlink()
    cli._write_error_file(TrainingError("x"), 1.0)
    assert '"message": "error: x"' in path.read_text()


def test_hosts_test_a_shared_directory_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two processes with one PID, the second of which writes while the first does."""
    path, write, written = tmp_path / "a" / "b", Path.write_bytes, []

    def slow(file: Path, data: bytes) -> int:
        written.append(file)
        if len(written) == 1:
            process.check_writable(path)
        assert not file.exists()
        return write(file, data)

    monkeypatch.setattr(Path, "write_bytes", slow)
    process.check_writable(path)
    assert len(set(written)) == 2
    assert not list(tmp_path.iterdir())
