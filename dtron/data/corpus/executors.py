"""Prepares a corpus on many machines by the executors of datatrove (extras `data` and `ray`).

datatrove submits tasks, records which are complete, and runs only the others when it is started
again. A task tokenizes one shard by the same function as on one machine, so that the bytes are the
same. The folder must be on a file system that all machines share, or in an object store.

Source: datatrove's executors, https://github.com/huggingface/datatrove.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dtron.config import Data
from dtron.data.corpus.documents import Corpus, Reading, Task, files_corpus, read_part
from dtron.data.corpus.files import absolute, is_url
from dtron.data.corpus.prepare import finish_folder, start_folder
from dtron.data.corpus.shards import read_shard
from dtron.data.corpus.tokenize import shard_name, write_shard
from dtron.data.tokenizer import Tokenizer, load_tokenizer
from dtron.errors import ConfigError, DataError, cause_of
from dtron.io.filesystem import Location, listed, location, read

LOGS = "datatrove"
"""Folder of datatrove's logs and completions, in that of the corpus."""


@dataclass
class TokenizeTasks:
    """Step of a pipeline: tokenizes the task of a rank."""

    data: dict[str, Any]
    tasks: tuple[Task, ...]
    folder: str
    skip_errors: bool

    def __call__(self, _: object, rank: int = 0, world_size: int = 1) -> None:
        """Write the shard of a rank, if it is not there. Raises DataError, OSError."""
        data, folder = Data.model_validate(self.data), location(self.folder)
        for number in range(rank, len(self.tasks), world_size):
            if read_shard(folder, shard_name(number)) is None:
                tokenizer, reading = load_tokenizer(data), Reading(data, self.skip_errors)
                task, name = self.tasks[number], shard_name(number)
                write_shard(read_part, task, tokenizer, reading, folder, name)


@dataclass
class FinishFolder:
    """Step of a pipeline: completes the folder once all shards are there."""

    data: dict[str, Any]
    folder: str

    def __call__(self, _: object, rank: int = 0, world_size: int = 1) -> None:
        """Write corpus.json and the summary.

        Raises:
            DataError: a shard is missing, or the corpus has changed.
            OSError: the folder cannot be written.
        """
        data, folder = Data.model_validate(self.data), location(self.folder)
        corpus, there = files_corpus(data), listed(folder)
        names = map(shard_name, range(len(corpus.tasks)))
        shards = [read_shard(there, name) or _missing(folder, name) for name in names]
        finish_folder(corpus, load_tokenizer(data), folder, shards)


def _missing(folder: Location, name: str) -> Any:
    raise DataError(
        f"{folder}: shard {name} is missing; look at the logs in {folder / LOGS}, delete that "
        "folder and start again"
    )


def prepare_on(
    kind: str,
    corpus: Corpus,
    tokenizer: Tokenizer,
    out: Location,
    skip_errors: bool,
    workers: int | None,
    options: Sequence[str],
) -> None:
    """Tokenize a corpus of files to a folder by an executor of datatrove.

    Args:
        kind: a key of EXECUTORS.
        workers: most tasks at once; None: no limit.
        options: `KEY=VALUE` arguments of the executor.
    Raises:
        ConfigError: datatrove is not installed, or an option is not legal.
        DataError: the folder is of another corpus, or, with ray, a document cannot be read.
    """
    if corpus.data is None:
        raise ConfigError(f'--on {kind} needs data.source = "files"')
    given = dict(_option(each) for each in options)
    data = corpus.data.model_dump(mode="json")
    if data["tokenizer"] != "byte":
        data["tokenizer"] = os.path.abspath(os.path.expanduser(data["tokenizer"]))
    if data["chat_template"] not in ("", "chatml"):
        data["chat_template"] = os.path.abspath(os.path.expanduser(data["chat_template"]))
    data["paths"] = [absolute(path) for path in corpus.data.paths]
    try:
        start_folder(corpus, tokenizer, out, skip_errors)
    except OSError as error:
        raise DataError(f"--out: cannot write {out}: {cause_of(error, out)}") from None
    steps = (
        TokenizeTasks(data, corpus.tasks, str(out), skip_errors),
        FinishFolder(data, str(out)),
    )
    try:
        EXECUTORS[kind](steps, len(corpus.tasks), workers or -1, str(out), given)
    except ImportError as error:
        extra = "ray" if kind == "ray" else "data"
        raise ConfigError(
            f"--on {kind} needs datatrove ({error}); run pip install 'dtron[{extra}]'"
        ) from None
    except TypeError as error:
        raise ConfigError(f"--on-option: {error}") from None
    except subprocess.CalledProcessError as error:  # it has printed why
        raise ConfigError(
            f"--on {kind}: {error.cmd[0]} has ended with exit status {error.returncode}, see "
            "above; check --on-option"
        ) from None


def _option(text: str) -> tuple[str, Any]:
    key, sign, value = text.partition("=")
    if not sign:
        raise ConfigError(f"--on-option {text} is not KEY=VALUE; write such as partition=cpu")
    words = {"true": True, "false": False}
    return key, int(value) if value.isdecimal() else words.get(value.lower(), value)


_Steps = tuple[TokenizeTasks, FinishFolder]


def _on_slurm(steps: _Steps, tasks: int, workers: int, out: str, options: dict[str, Any]) -> None:
    """Submit an array of tasks and a job that completes the folder after them."""
    from datatrove.executor import SlurmPipelineExecutor  # the extra `data`

    common = {
        "time": "24:00:00",
        # Compute nodes run this Python, whose packages they share.
        "env_command": f"export PATH={Path(sys.executable).parent}:$PATH",
        "requeue": False,
        "mail_type": "NONE",
        # No job waits for ever for one that has failed.
        "sbatch_args": {"kill-on-invalid-dep": "yes"},
        **options,
    }
    if not is_url(out):  # logs of a folder in a store are in the working directory, its default
        common.setdefault("slurm_logs_folder", f"{out}/{LOGS}/slurm")
    if "partition" not in common:
        raise ConfigError("--on slurm needs a partition; add --on-option partition=NAME")
    first = SlurmPipelineExecutor(
        pipeline=[steps[0]],
        tasks=tasks,
        workers=workers,
        job_name="dtron-data",
        logging_dir=f"{out}/{LOGS}/tokenize",
        **common,
    )
    last = SlurmPipelineExecutor(
        pipeline=[steps[1]],
        tasks=1,
        job_name="dtron-data-finish",
        logging_dir=f"{out}/{LOGS}/finish",
        depends=first,
        **common,
    )
    last.run()
    print(f"submitted; {out}/summary.log is there when the last job has ended")


def _on_ray(steps: _Steps, tasks: int, workers: int, out: str, options: dict[str, Any]) -> None:
    """Run all tasks on a Ray cluster, and complete the folder here."""
    from datatrove.executor import RayPipelineExecutor

    executor = RayPipelineExecutor(
        pipeline=[steps[0]],
        tasks=tasks,
        workers=workers,
        logging_dir=f"{out}/{LOGS}/tokenize",
        **options,
    )
    executor.run()
    steps[1](None)
    print(read(location(out) / "summary.log").decode(), end="")


EXECUTORS: dict[str, Callable[[_Steps, int, int, str, dict[str, Any]], None]] = {
    "slurm": _on_slurm,
    "ray": _on_ray,
}
"""Where tasks run: values of --on besides local."""
