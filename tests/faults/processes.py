"""Ranks under torchrun; ranks that may die: as tests/harness.py starts them, with exit codes and
output."""

import datetime
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.harness import _PRELOAD


def torchrun(n: int, *words: object) -> list[str]:
    """The command of n ranks on this host: torchrun's options, the script and its arguments."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*command, "--nproc-per-node", str(n), *map(str, words)]


def start(n: int, folder: Path, body: Callable[..., Any], *args: Any) -> list[Any]:
    """Start n ranks of a gloo group that call `body(*args)`; each writes RANK.log in `folder`."""
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(_PRELOAD)
    folder.mkdir(parents=True)
    processes = [context.Process(target=_rank, args=(r, n, folder, body, args)) for r in range(n)]
    for process in processes:
        process.start()
    return processes


def finish(processes: list[Any], seconds: float = 120) -> list[int]:
    """Exit codes of all ranks; those that do not end are killed (-9)."""
    try:
        for process in processes:
            process.join(seconds)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return [process.exitcode for process in processes]


def output(folder: Path) -> str:
    """What all ranks have printed."""
    return "".join(path.read_text() for path in sorted(folder.glob("*.log")))


def _rank(rank: int, n: int, folder: Path, body: Callable[..., Any], args: tuple) -> None:
    log = os.open(folder / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout, sys.stderr = (os.fdopen(fd, "w", buffering=1) for fd in (1, 2))
    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(n))
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    code = 1
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=n,
            timeout=datetime.timedelta(seconds=60),
        )
        body(*args)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)
