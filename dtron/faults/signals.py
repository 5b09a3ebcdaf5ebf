"""A run that is asked to stop: all ranks end at one step, save, and exit 0 before a deadline.

A rank that is signalled informs the others by a 1-element all-reduce per step, read one step late,
so that nothing waits. The deadline runs from the signal, also while the main thread is inside a
collective and Python's handlers cannot run: the interpreter writes the number of a signal to a
socket at once (`signal.set_wakeup_fd`), which a thread reads. Where another rank is dead, nothing
can be saved, and the process ends a few seconds later.
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
"""The one that stops a run before training begins."""
EXIT_UNSAVED = 74
"""A signalled run ended before what it had to do; sysexits.h's EX_IOERR."""
EXIT_FAILED = 1
EXIT_SIGNALLED = 128
"""Plus the number of the signal, as shells report it."""
_UNSAVED = (
    "rank {rank}: not done {seconds:g} seconds after {why} (faults.stop_seconds): what is being "
    "saved is abandoned; older checkpoints are as they were"
)
_ALONE = "rank {rank}: another rank is gone, and this one has not ended for {seconds:g} seconds"
_ALONE_SECONDS = 2.0
"""Long enough to commit a checkpoint that all ranks have written."""
_LAST_SECONDS = 60.0
"""For the others to come to their end too."""


class Deadline:
    """Ends the process some seconds after it has begun, unless it is called off.

    Args:
        seconds: 0 for no deadline.
        message: what is printed then, with `rank`, `seconds` and `why` in braces.
        code: of the exit.
    """

    def __init__(self, seconds: float, message: str, code: int) -> None:
        self.seconds, self.message, self.code = seconds, message, code
        self._timer: threading.Timer | None = None
        self._over = False

    def begin(self, why: str = "") -> None:
        """Count from now, if it does not already and is not called off."""
        if self.seconds and self._timer is None and not self._over:
            self._timer = threading.Timer(self.seconds, self._end, (why,))
            self._timer.daemon = True
            self._timer.start()

    def call_off(self) -> None:
        """All is done."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()

    def _end(self, why: str) -> None:
        rank = os.environ.get("RANK", "0")
        message = self.message.format(rank=rank, seconds=self.seconds, why=why)
        print(f"{message}, exit code {self.code}", file=sys.stderr, flush=True)
        os._exit(self.code)


class Peers:
    """Whether all ranks live, asked once some of them are asked to stop.

    When a rank dies, torchrun stops the others. These may wait for it inside a kernel,
    which does not see that it is dead, until torchrun kills them 30 seconds later. A collective on
    the host does: its connections break.

    Args:
        group: over all ranks, on the host, which nothing else uses.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self._asks = threading.Thread(target=self._meet, daemon=True)
        self._asked = threading.Lock()
        self.deadline = Deadline(_ALONE_SECONDS, _ALONE, EXIT_HUNG)

    def ask(self) -> None:
        """Find out in the background; every rank asks once, some only in `end`."""
        with self._asked:
            if self._asks.ident is None:
                self._asks.start()

    def _meet(self) -> None:
        try:
            dist.all_reduce(torch.zeros(1), group=self._group)
        except RuntimeError:
            self.deadline.begin()

    def end(self) -> None:
        """All is done on this rank: nothing may be under way when the process group ends, nor the
        thread inside of torch when the interpreter does, which would abort it."""
        self.deadline.call_off()
        self.ask()
        self._asks.join(_LAST_SECONDS)


class StopSignal:
    """SIGTERM, SIGINT and SIGUSR1 (which Slurm can send before a time limit) as a flag that all
    ranks agree on, one step late and without waiting.

    Before training begins SIGTERM and SIGINT end a rank at once, also inside a collective: it loses
    nothing then, and torchrun waits for it when another rank has failed.

    Args:
        seconds: after a signal, or after the agreement on ranks without one, until the process is
            ended if `end` has not come; 0: for ever.
        failure: where another rank's failure is recorded, after which this rank logs nothing.
        received: is called at each signal, in a thread.
    """

    def __init__(
        self,
        seconds: float = 0,
        failure: FirstFailure | None = None,
        received: Callable[[], None] = lambda: None,
    ) -> None:
        self.launcher_lost = False
        """After `end`: whether torchrun has been killed on a host (`dtron.entry`)."""
        self.terminated = False
        """SIGTERM was received, which torchrun sends to all ranks once one has failed."""
        self.failed = False
        """This rank raises an error: a signal changes nothing."""
        self._failure, self._on_signal, self._launcher = failure, received, os.getppid()
        self._group: dist.ProcessGroup | None = None
        self._raised = False
        self._pending: tuple[dist.Work | None, torch.Tensor] | None = None
        self._previous: dict[int, Any] = {}
        self._caught: frozenset[int] = frozenset()
        self._deadline = Deadline(seconds, _UNSAVED, EXIT_UNSAVED)
        self._peers: Peers | None = None
        self._wakeup: tuple[int, socket.socket, threading.Thread] | None = None

    def __enter__(self) -> "StopSignal":
        if threading.current_thread() is not threading.main_thread():
            return self  # no signals to catch
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        before = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
        listener = threading.Thread(target=self._listen, args=(ours,), name="signals", daemon=True)
        listener.start()
        self._wakeup = before, theirs, listener
        self._catch(*SIGNALS)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {EARLY})  # train.py has held it back until here
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)
        self._previous = {}
        if self._wakeup is not None:
            before, theirs, listener = self._wakeup
            signal.set_wakeup_fd(before)
            theirs.close()
            # It may hold the last reference to this and to process groups, whose end in a thread
            # aborts an interpreter that ends.
            listener.join()
            self._wakeup = None
        self._deadline.call_off()
        if self._peers is not None:
            self._peers.deadline.call_off()

    def begin(self, group: dist.ProcessGroup, separate: dist.ProcessGroup) -> bool:
        """Training begins. Whether it has to stop before its first step, on all ranks.

        Args:
            group: over all ranks, on the host.
            separate: another one, which nothing else uses and whose collectives may wait for hours.
        """
        self._group, self._peers = group, Peers(separate)
        self.agreed()
        return self.agreed()  # of what the first call has asked

    def end(self) -> None:
        """All is done and saved: signals are again what they were."""
        if self._pending is not None and self._pending[0] is not None:
            self._pending[0].wait()
        if self._group is not None and "TORCHELASTIC_RUN_ID" in os.environ:
            lost = torch.tensor([int(os.getppid() != self._launcher)])
            dist.all_reduce(lost, dist.ReduceOp.MAX, group=self._group)
            self.launcher_lost = bool(lost.item())
        if self._peers is not None:
            self._peers.end()
        self.__exit__()

    def _catch(self, *numbers: signal.Signals) -> None:
        for number in numbers:  # the listening thread does the rest
            previous = signal.signal(number, lambda *_: self.request())
            self._previous.setdefault(number, previous)
        self._caught |= set(numbers)

    def _listen(self, ours: socket.socket) -> None:
        with contextlib.closing(ours):
            while received := ours.recv(16):
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
        if self._peers is not None:
            self._peers.ask()

    def request(self) -> None:
        """Stop as after a signal."""
        self._raised = True

    def agreed(self) -> bool:
        """Whether any rank had been signalled at the last call; the same on every rank."""
        previous, flag = self._pending, torch.tensor([int(self._raised)])
        work = dist.all_reduce(flag, dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = (work, flag)
        if previous is None:
            return False
        if previous[0] is not None:
            previous[0].wait()
        stops = bool(previous[1].item())
        if stops:
            self._deadline.begin("ranks had agreed to stop")
            assert self._peers is not None, "training has begun"
            self._peers.ask()
        return stops
