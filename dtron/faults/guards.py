"""Checks of a run's steps, turned on in the section [faults] of the config."""

import contextlib
import logging
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtron.config import Faults
from dtron.errors import TrainingError
from dtron.faults.corruption import Compute, Replicas, compute_twice
from dtron.faults.spikes import Spike, Spikes
from dtron.faults.stragglers import Stragglers
from dtron.faults.watchdog import Watchdog
from dtron.parallelisms.apply import Applied
from dtron.parallelisms.mesh import Mesh

log = logging.getLogger("dtron")


class Guards:
    """All checks of a run's steps. The constructor is a collective.

    Args:
        options: the section [faults].
        watchdog: this rank's watchdog.
        host: process group of all ranks for CPU tensors.
    """

    def __init__(
        self,
        options: Faults,
        watchdog: Watchdog,
        applied: Applied,
        mesh: Mesh,
        device: torch.device,
        host: dist.ProcessGroup,
    ) -> None:
        self.options, self.applied, self.host = options, applied, host
        self.watchdog = watchdog
        self.spikes = self.stragglers = self.replicas = None
        if options.on_spike:
            skips = options.on_spike != "warn"
            self.spikes = Spikes(
                options.spike_window, options.spike_deviations, skips, mesh.size("tp"), device
            )
        if options.stragglers_interval:
            self.stragglers = Stragglers(options.stragglers_interval, device, host)
        if options.replicas_interval:
            self.replicas = Replicas(applied, host)
            if not self.replicas.n_replicated:
                log.warning("faults.replicas_interval has no effect: no parameter has replicas")
        watchdog.set_names(modules_of(applied), mesh.group_names())

    def begin(self, step: int) -> None:
        """Start to watch steps, before training begins; `step` steps are done."""
        self.watchdog.begin_steps(step)

    def end(self) -> None:
        """Stop the watchdog; called when training has ended, also after an error."""
        self.watchdog.end()

    def alive(self, step: int) -> None:
        """Inform the watchdog of progress other than a step; `step` steps are done."""
        self.watchdog.beat(step)

    def compiling(self, step: int) -> None:
        """Inform the watchdog of progress; `step` steps are done, and a compilation may follow.

        The time limit is that of the first step.
        """
        self.watchdog.begin_steps(step)

    @contextlib.contextmanager
    def saving(self, step: int) -> Iterator[None]:
        """Pause the watchdog during a save after `step`; saves have a separate time limit."""
        self.watchdog.pause(step)
        try:
            yield
        finally:
            self.alive(step)

    def sampling(self, step: int) -> contextlib.AbstractContextManager:
        """Return a context manager that times step `step` (1-based) if that step is sampled."""
        if self.stragglers is not None and self.stragglers.samples(step):
            return self.stragglers.sampling()
        return contextlib.nullcontext()

    def data_loaded(self, step: int) -> None:
        """Record that the step's batch is loaded; called inside `sampling`."""
        if self.stragglers is not None and self.stragglers.samples(step):
            self.stragglers.data_loaded()

    def compute(self, step: int) -> Compute | None:
        """Return a function that computes gradients twice if `step` is verify_step; else None."""
        return self._compute_twice if step == self.options.verify_step else None

    def _compute_twice(self, accumulate: Callable[[], Tensor]) -> Tensor:
        partial_loss, wrong = compute_twice(self.applied, accumulate, self.host)
        step = self.options.verify_step
        if wrong:
            raise TrainingError(
                f"step {step} was not bitwise reproducible: computed twice, it differs in {wrong}; "
                "if debug.deterministic = true, the hardware is faulty; otherwise, kernels may be "
                "nondeterministic"
            )
        log.info("step %d, computed twice: loss and gradients are bitwise equal", step)
        return partial_loss

    def after_step(self, step: int) -> Spike | None:
        """Run the checks after step `step` (1-based) has been enqueued.

        Returns:
            The spike before which the run must be rolled back; None: no rollback.
        Raises:
            TrainingError: replicas of a parameter differ; on all ranks.
        """
        self.alive(step)
        if self.stragglers is not None and self.stragglers.samples(step):
            self.stragglers.report(step)
        if self.replicas is not None and step % self.options.replicas_interval == 0:
            self._compare(self.replicas, step)
        return self._read_spike(step) if self.spikes is not None else None

    def _compare(self, replicas: Replicas, step: int) -> None:
        found = replicas.differences()
        if not found:
            return
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        message = f"silent corruption by step {step}: {found[0]}{more}"
        if self.options.on_corruption == "stop":
            raise TrainingError(f"{message}; resume from an earlier checkpoint on other hardware")
        log.error("%s (faults.on_corruption = 'warn')", message)

    def _read_spike(self, step: int) -> Spike | None:
        assert self.spikes is not None, "there is something to read"
        found = self.spikes.read(before=step)
        acts = {"warn": "", "skip_data": "; the step was skipped", "rollback": "; rolling back"}
        for spike in found:
            log.warning("%s%s", spike, acts[self.options.on_spike])
        return found[0] if found and self.options.on_spike == "rollback" else None


def modules_of(applied: Applied) -> dict[nn.Module, str]:
    """Return the FQN of every module of this rank."""
    return {m: fqn for part in applied.parts.values() for fqn, m in part.named_modules() if fqn}
