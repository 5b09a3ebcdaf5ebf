"""Processes that share the planner's search; where they cannot be forked this one does all."""

import contextlib
import functools
import multiprocessing
import multiprocessing.connection
import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any

from dtron.errors import DtronError

PROCESSES = 4
_FORKS = sys.platform == "linux"  # elsewhere libraries may not survive it


@dataclass(frozen=True)
class Workers:
    """Processes, or none but this one."""

    pool: ProcessPoolExecutor | None
    number: int

    def begin(self, call: Callable[..., Any], *given: Any) -> Callable[[], Any]:
        """What gives a call's result; without other processes it is made then."""
        if self.pool is None:
            return functools.partial(call, *given)
        return self.pool.submit(call, *given).result


def most_processes() -> int:
    """As many as processors, at most PROCESSES."""
    return min(PROCESSES, len(os.sched_getaffinity(0))) if _FORKS else 1


@contextlib.contextmanager
def pool(processes: int) -> Iterator[Workers]:
    """Forked processes, since importing torch takes seconds.

    Raises:
        DtronError: one of them was ended from outside.
    """
    if processes == 1 or not _FORKS:
        yield Workers(None, 1)
        return
    found = ProcessPoolExecutor(processes, multiprocessing.get_context("fork"), _end_with_parent)
    try:
        yield Workers(found, processes)
    except BrokenProcessPool as error:
        raise DtronError(
            "--search: one of its processes was ended from outside, for memory perhaps; run it "
            "where more is free"
        ) from error
    finally:
        found.shutdown(cancel_futures=True)


def _end_with_parent() -> None:
    """Else a worker whose parent was killed would wait for work for good."""
    parent = multiprocessing.parent_process()
    assert parent is not None, "a worker has one"

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()
