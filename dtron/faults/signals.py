"""Signals: all ranks stop at the same step, save, and exit with status 0 before a deadline.

Ranks learn of a signal from a 1-element all-reduce per step. Its result is read one step later, so
that no rank waits for it. The deadline starts at the signal, also if the main thread is inside a
collective, where Python's handlers cannot run: the interpreter immediately writes the signal's
number to a socket (`signal.set_wakeup_fd`), and a thread reads the socket. If another rank is dead,
nothing can be saved, and the process exits a few seconds later.
"""

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from dtron.faults.failure import FirstFailure
from dtron.faults.watchdog import EXIT_HUNG

log = logging.getLogger("dtron")

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
EARLY = signal.SIGUSR1
"""Before training begins, this signal stops all ranks together; SIGTERM and SIGINT end the rank at
once."""
EXIT_UNSAVED = 74
"""Exit code if the deadline ends the process before the save; sysexits.h's EX_IOERR."""
EXIT_FAILED = 1
EXIT_SIGNALLED = 128
"""Exit code 128 + number of the signal, as shells report it."""
_UNSAVED = (
    "rank {rank}: not done {seconds:g} seconds after {why} (faults.stop_seconds): the save is "
    "abandoned; older checkpoints are unchanged"
)
_RANK_LOST = "rank {rank}: another rank has died, and this rank did not end in {seconds:g} seconds"
_RANK_LOST_SECONDS = 2.0
"""Enough time to commit a checkpoint that all ranks have already written."""
_JOIN_SECONDS = 60.0
"""Maximum wait for the other ranks at the end."""


class Deadline:
    """Timer that exits the process, unless it is cancelled.

    Args:
        seconds: time from `begin` to the exit; 0: no deadline.
        message: message to print, a format string with `rank`, `seconds` and `why`.
        code: exit code.
    """

    def __init__(self, seconds: float, message: str, code: int) -> None:
        self.seconds, self.message, self.code = seconds, message, code
        self._timer: threading.Timer | None = None
        self._over = False

    def begin(self, why: str = "") -> None:
        """Start the timer, if it is neither running nor cancelled."""
        if self.seconds and self._timer is None and not self._over:
            self._timer = threading.Timer(self.seconds, self._end, (why,))
            self._timer.daemon = True
            self._timer.start()

    def cancel(self) -> None:
        """Cancel the timer for good."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()

    def _end(self, why: str) -> None:
        rank = os.environ.get("RANK", "0")
        message = self.message.format(rank=rank, seconds=self.seconds, why=why)
        print(f"{message}, exit code {self.code}", file=sys.stderr, flush=True)
        os._exit(self.code)


class LivenessCheck:
    """When ranks must stop, checks that all ranks are alive; if one is dead, exits the process.

    When a rank dies, torchrun sends SIGTERM to the other ranks. They may wait for the dead rank
    inside a GPU kernel, until torchrun kills them 30 seconds later. A collective on CPU tensors
    fails at once, since its connections break.

    Args:
        group: process group of all ranks for CPU tensors, used only here.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._thread = threading.Thread(target=self._all_reduce, daemon=True)
        self._starting = threading.Lock()
        self.deadline = Deadline(_RANK_LOST_SECONDS, _RANK_LOST, EXIT_HUNG)

    def start(self) -> None:
        """Start the check in the background, if it is not started. Every rank must start it."""
        with self._starting:
            if self._thread.ident is None:
                self._thread.start()

    def _all_reduce(self) -> None:
        try:
            dist.all_reduce(torch.zeros(1), group=self._group)
        except RuntimeError:
            self.deadline.begin()

    def end(self) -> None:
        """Wait for the end of the check; called when this rank has saved everything.

        The collective must end before the process group is destroyed, and the thread must end
        before the interpreter exits; otherwise the interpreter aborts.
        """
        self.deadline.cancel()
        self.start()
        self._thread.join(_JOIN_SECONDS)


class StopSignal:
    """Turns SIGTERM, SIGINT and SIGUSR1 into a stop request on which all ranks agree.

    Ranks agree one step later, without waiting. (Slurm can send SIGUSR1 before its time limit.)

    Before training begins, SIGTERM and SIGINT end a rank immediately, also inside a collective:
    there is nothing to save, and after a failure of another rank torchrun waits for this rank.

    Args:
        seconds: time from the signal (on other ranks, from the agreement) within which `end` must
            be complete; then the process exits. 0: no limit.
        failure: record of the first failure; if another rank has failed, this rank logs nothing.
        received: function that is called at each signal, in a thread.
    """

    def __init__(
        self,
        seconds: float = 0,
        failure: FirstFailure | None = None,
        received: Callable[[], None] = lambda: None,
    ) -> None:
        self.launcher_lost = False
        """After `end`: whether torchrun was killed on a host (`dtron.entry`)."""
        self.terminated = False
        """Whether SIGTERM was received, which torchrun sends to all ranks if a rank fails."""
        self.failed = False
        """Whether this rank has raised an error; then signals are ignored."""
        self._failure, self._on_signal, self._launcher = failure, received, os.getppid()
        self._group: dist.ProcessGroup | None = None
        self._requested = False
        self._pending: tuple[dist.Work | None, torch.Tensor] | None = None
        self._previous: dict[int, Any] = {}
        self._caught: frozenset[int] = frozenset()
        self._deadline = Deadline(seconds, _UNSAVED, EXIT_UNSAVED)
        self._liveness: LivenessCheck | None = None
        self._wakeup: tuple[int, socket.socket, threading.Thread] | None = None

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is not threading.main_thread():
            return self  # only the main thread can catch signals
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        before = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        listener = threading.Thread(
            target=self._listen, args=(reader,), name="signals", daemon=True
        )
        listener.start()
        self._wakeup = before, writer, listener
        for number in SIGNALS:  # `_listen` handles them as well, in its thread
            previous = signal.signal(number, lambda *_: self.request())
            self._previous.setdefault(number, previous)
        self._caught = frozenset(SIGNALS)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {EARLY})  # blocked by train.py until here
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
        if self._wakeup is not None:
            before, writer, listener = self._wakeup
            signal.set_wakeup_fd(before)
            writer.close()
            # The thread may have the last reference to process groups. Their destruction in a
            # thread aborts an interpreter that is shutting down.
            listener.join()
            self._wakeup = None
        self._deadline.cancel()
        if self._liveness is not None:
            self._liveness.deadline.cancel()

    def begin(self, group: dist.ProcessGroup, separate: dist.ProcessGroup) -> bool:
        """Start to agree on stop requests; return whether to stop before the first step.

        A collective.

        Args:
            group: process group of all ranks for CPU tensors.
            separate: a second group of this kind, used only here, with a time-out of hours.
        """
        self._group, self._liveness = group, LivenessCheck(separate)
        self.agreed()
        return self.agreed()  # returns the result of the first call's all-reduce

    def end(self) -> None:
        """End the exchange of stop requests and restore the signal handlers; a collective.

        Call it after the last save.
        """
        if self._pending is not None and self._pending[0] is not None:
            self._pending[0].wait()
        if self._group is not None and "TORCHELASTIC_RUN_ID" in os.environ:
            lost = torch.tensor([int(os.getppid() != self._launcher)])
            dist.all_reduce(lost, dist.ReduceOp.MAX, group=self._group)
            self.launcher_lost = bool(lost.item())
        if self._liveness is not None:
            self._liveness.end()
        self.__exit__()

    def _listen(self, reader: socket.socket) -> None:
        with contextlib.closing(reader):
            while received := reader.recv(16):
                for number in set(received) & self._caught:
                    self._received(signal.Signals(number))

    def _received(self, number: signal.Signals) -> None:
        self.terminated |= number == signal.SIGTERM
        if self.failed:
            return
        self._deadline.begin(number.name)
        self._on_signal()
        if self._failure is not None and self._failure.reported_by_peer():
            os._exit(EXIT_FAILED)
        begun = self._group is not None
        when = "after the next step, with a checkpoint" if begun else "before training begins"
        log.warning("%s: stopping %s", number.name, when)
        if not begun and number is not EARLY:
            sys.stdout.flush()
            os._exit(EXIT_SIGNALLED + number)
        self.request()
        if self._liveness is not None:
            self._liveness.start()

    def request(self) -> None:
        """Request a stop, as a signal does."""
        self._requested = True

    def agreed(self) -> bool:
        """Whether any rank had a stop request at the previous call; equal on all ranks."""
        previous, flag = self._pending, torch.tensor([int(self._requested)])
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = (work, flag)
        if previous is None:
            return False
        if previous[0] is not None:
            previous[0].wait()
        stops = bool(previous[1].item())
        if stops:
            self._deadline.begin("the ranks agreed to stop")
            assert self._liveness is not None, "training has begun"
            self._liveness.start()
        return stops
