"""No hostile file and no extreme setting ends in a traceback, a hang, a crash or full memory."""

import multiprocessing
from collections.abc import Sequence
from pathlib import Path

import pytest

from dtron.config import RunConfig
from dtron.data import prepare
from dtron.errors import ConfigError, DataError
from dtron.setup.rules import resolve
from tests.harness import _PRELOAD
from tests.hostile import WALL_SECONDS, cases, serve

N_CASES = 700
QUICK = (
    "attack/a key of 100,000 parts",
    "attack/a broken charsmap",
    "attack/no unknown token",
    "attack/a shard cut while it is open",
    "attack/Hugging Face files cut while they are open",
    "attack/a cache cut while it is open",
    "attack/a cache changed while it is open",
    "attack/inflates to 200 times",
    "attack/an escape in a file's name",
    *(f"{kind}/fifo" for kind in ("toml", "jsonl", "tokenizer", "index", "hf-index", "csv")),
    *(f"{kind}/zero" for kind in ("toml", "gz", "facts", "hf-config", "hardware")),
    *("index/values/0", "shard/values/0", "key/faults.hang_seconds/3", "key/run.dir/2"),
)
"""Of the default run."""


def failures(tmp_path: Path, chosen: Sequence[str]) -> dict[str, str]:
    """What went wrong, by case. All are run by one process; one that dies or hangs is replaced."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    left, wrong = list(reversed(chosen)), {}
    while left:
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(theirs, str(tmp_path)))
        process.start()
        theirs.close()
        try:
            while left:
                ours.send(left[-1])
                if not ours.poll(WALL_SECONDS):
                    raise EOFError
                if (found := ours.recv()) is not None:
                    wrong[left[-1]] = found
                left.pop()
            ours.send(None)
        except (EOFError, OSError):
            wrong[left.pop()] = f"the process hung or died, exit code {process.exitcode}"
        finally:
            process.kill()
            process.join()
    return wrong


def test_hostile_files_end_in_an_error_that_names_them(tmp_path: Path) -> None:
    wrong = failures(tmp_path, QUICK)
    assert not wrong, wrong


@pytest.mark.parametrize(
    ("override", "rule"),
    [
        ("run.dir=~nosuchuser/x", "the user after ~ has no home directory"),
        ('data.cache_dir="a\\u0000b"', "String should match pattern"),
        ("checkpoint.initial=" + "a" * 256, "each name in it 255"),
        ("parallel.timeout_seconds=2147483648", "less than or equal to 2592000"),
        ("train.steps=2147483648", "less than or equal to 2147483647"),
        ("faults.hang_seconds=1e-9", "use -1, 0, or at least 0.1 seconds"),
        ("faults.hang_seconds=-0.5", "use -1, 0, or at least 0.1 seconds"),
        ("model.override.dim=4294967296", "less than or equal to 1048576"),
        ("train.steps=" + "9" * 5000, "override .*digits"),
    ],
)
def test_settings_have_bounds(tmp_path: Path, override: str, rule: str) -> None:
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(ConfigError, match=rule) as error:
        resolve(RunConfig.load(tmp_path / "run.toml", [override]), 1)
    assert override.split("=")[0] in str(error.value)


def test_a_document_of_more_than_its_key_allows_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    path.write_text("In the beginning. " * 1000)
    values = {"paths": [str(path)], "cache_dir": str(tmp_path / "cache"), "max_document_mb": 0.01}
    data = RunConfig.of({"data": values}).data
    with pytest.raises(DataError, match=r"long.txt, line 1: .*data.max_document_mb = 0.01"):
        prepare(data)
    prepare(data.model_copy(update={"max_document_mb": 0.1}))


def test_every_number_of_a_config_has_bounds() -> None:
    for name, section in RunConfig.model_fields.items():
        for key, field in section.annotation.model_fields.items():  # type: ignore[union-attr]
            if field.annotation in (int, float):
                bounds = [type(each).__name__ for each in field.metadata]
                assert {"Le", "Lt"} & set(bounds), f"{name}.{key}"


def test_hostile_cases_end_in_an_error_that_names_them(tmp_path: Path) -> None:
    wrong = failures(tmp_path, cases(N_CASES))
    assert not wrong, "\n\n".join(f"{case}: {what}" for case, what in wrong.items())
