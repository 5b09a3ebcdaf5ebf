"""Stop a rank after a hang, a signal, or an error of this or of another rank.

Only the rank that fails first reports its error. Ranks that fail as a consequence raise PeerError.
"""

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from torch import nn

from dtron.config import RunConfig
from dtron.errors import DtronError, PeerError, TrainingError
from dtron.faults.failure import FirstFailure, is_of_lost_peer
from dtron.faults.memory import MemoryInUse, is_out_of_memory
from dtron.faults.signals import StopSignal
from dtron.faults.watchdog import Watchdog
from dtron.run.attempts import LOST_PEER, PEER_FAILED, STOPPED, Attempts
from dtron.run.process import Place, process_group
from dtron.run.rendezvous import Rendezvous

log = logging.getLogger("dtron")


class FaultHandler:
    """Runs the watchdog of one rank, and decides which error the rank raises.

    Args:
        attempts: records why this rank ends.
        hangs: folder for the watchdog's reports.
    """

    def __init__(self, config: RunConfig, place: Place, attempts: Attempts, hangs: Path) -> None:
        self.config, self.place, self.attempts, self.hangs = config, place, attempts, hangs
        self.watchdog = Watchdog(0, hangs, place.rank, place.world_size)
        self._modules: Mapping[nn.Module, str] = {}
        self._step: Callable[[], int] = int
        self.out_of_memory: Callable[[], None] = lambda: None
        """Called before a failed allocation is explained."""

    @contextlib.contextmanager
    def watching(self, phase: str) -> Iterator[None]:
        """Run the watchdog in this context; `phase` is "rendezvous" or "start"."""
        seconds = self.config.faults.watched_seconds(self.config.parallel.timeout_seconds)
        place, record = self.place, self.attempts.record_end
        self.watchdog = Watchdog(seconds, self.hangs, place.rank, place.world_size, record)
        self.watchdog.begin(phase)
        try:
            yield
        finally:
            self.watchdog.end()

    def paused(self) -> contextlib.AbstractContextManager[None]:
        """Return a context manager that pauses the watchdog, for checkpoint reads."""
        return self.watchdog.paused()

    def built(self, modules: Mapping[nn.Module, str], step: Callable[[], int]) -> None:
        """Set modules and step for error messages, once the model is built.

        Args:
            modules: FQN of every module of this rank.
            step: returns the number of steps done.
        """
        self._modules, self._step = modules, step

    @contextlib.contextmanager
    def process_group(self, rendezvous: Rendezvous) -> Iterator[StopSignal]:
        """Open the process group and catch signals; record and explain errors.

        Raises:
            PeerError: this rank failed because another rank failed.
            OutOfMemoryError: names step, module and memory in use.
        """
        memory = MemoryInUse(self.place.local_world_size)
        failure = FirstFailure(self.place.rank, self.place.world_size, rendezvous.token)
        stop = StopSignal(self.config.faults.stop_seconds, failure, self._record_signal)
        timeout = self.config.parallel.timeout_seconds
        with stop:  # also around the error handling, since torchrun may send SIGTERM during it
            try:
                with process_group(self.place, timeout, rendezvous.store):
                    yield stop
            except DtronError as error:
                stop.failed = True
                self.attempts.record_end(str(error))
                raise
            except Exception as error:
                stop.failed = True
                explained = self.explain(error, failure, stop, memory)
                line = str(explained or error).partition("\n")[0]
                of_peer = isinstance(explained, PeerError)
                self.attempts.record_end(line if of_peer else f"{type(error).__name__}: {line}")
                if isinstance(explained, PeerError):
                    explained.stopped = stop.terminated
                if explained is not None:
                    raise explained from error
                raise

    def explain(
        self, error: Exception, failure: FirstFailure, stop: StopSignal, memory: MemoryInUse
    ) -> TrainingError | None:
        """Return the error to raise instead of `error`; None: `error` itself."""
        if failure.reported_by_peer():
            return PeerError(PEER_FAILED, stop.terminated)
        if not is_out_of_memory(error):
            self.watchdog.timed_out(error)
            if self._modules and is_of_lost_peer(error):  # while building, an address may be wrong
                log.error("rank %d lost a connection: %s", self.place.rank, error)
                return PeerError(LOST_PEER, stop.terminated)
            return None
        if not failure.claim():
            return PeerError(PEER_FAILED, stop.terminated)
        with contextlib.suppress(OSError):  # the run directory's disk may be full
            self.out_of_memory()
        where = f"step {self._step() + 1}" if self._modules else "building the model"
        return memory.explain(error, f"rank {self.place.rank}, {where}", self._modules)

    def _record_signal(self) -> None:
        """Record that a signal stops this rank; torchrun sends SIGTERM if another rank fails.

        If all ranks stop without an error, `Attempts.finish` invalidates the record.
        """
        self.attempts.record_end(STOPPED)
