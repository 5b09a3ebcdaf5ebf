"""Reads values in a background thread, a bounded number of them before they are needed."""

import queue
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

_T = TypeVar("_T")
_WAIT_SECONDS = 0.2


class FetchAhead(Generic[_T]):
    """Calls a function again and again in a thread, and keeps its results in order.

    Args:
        read: returns the next value. After its first exception, it is not called again.
        count: most values that wait to be taken.
    """

    def __init__(self, read: Callable[[], _T], count: int) -> None:
        self._read, self._stopped = read, threading.Event()
        self._values: queue.Queue[tuple[_T | None, BaseException | None]] = queue.Queue(count)
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read_all, daemon=True)
        self._thread.start()

    def take(self) -> _T:
        """Return the next value; wait for it if it is not there. Raises what `read` has raised."""
        value = None
        if self._error is None:
            value, self._error = self._values.get()
        if self._error is not None:
            raise self._error
        assert value is not None
        return value

    def stop(self, seconds: float | None = None) -> None:
        """End the thread after the current call of `read`; wait for it, at most for `seconds`."""
        self._stopped.set()
        self._thread.join(seconds)

    def _read_all(self) -> None:
        error = None
        while error is None and not self._stopped.is_set():
            value = None
            try:
                value = self._read()
            except BaseException as raised:
                error = raised
            self._put((value, error))

    def _put(self, item: tuple[_T | None, BaseException | None]) -> None:
        while not self._stopped.is_set():
            try:
                self._values.put(item, timeout=_WAIT_SECONDS)
                return
            except queue.Full:
                continue
