"""Worker processes of the planner's search; one thread where processes cannot be forked."""

import contextlib
import multiprocessing
import multiprocessing.connection
import os
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from dtron.errors import DtronError

PROCESSES = 4
_FORKS = sys.platform == "linux"  # on other systems libraries may not survive a fork


def most_processes() -> int:
    """Return the number of processors, at most PROCESSES."""
    return min(PROCESSES, len(os.sched_getaffinity(0))) if _FORKS else 1


@contextlib.contextmanager
def pool(processes: int) -> Iterator[Executor]:
    """Make a pool of forked processes, which need not import torch again.

    For `processes` = 1, make a pool of one thread.

    Raises:
        DtronError: a process was killed.
    """
    found: Executor = ThreadPoolExecutor(1)
    if processes > 1 and _FORKS:
        fork = multiprocessing.get_context("fork")
        found = ProcessPoolExecutor(processes, fork, _end_with_parent)
    try:
        yield found
    except BrokenProcessPool as error:
        raise DtronError(
            "--search: a worker process was killed, perhaps out of memory; run it where more "
            "memory is free"
        ) from error
    finally:
        found.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Exit when the parent process ends; otherwise a worker would wait for tasks forever."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker process has a parent"

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
