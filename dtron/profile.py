"""A torch.profiler window over a few steps, one trace a rank, for chrome://tracing or Perfetto.

Parts of a step are marked in the trace as `dtron::NAME`; the marks cost one call of a C function
while no profiler runs. `dtron bench --breakdown` reads them.
"""

import contextlib
from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from dtron.config import Metrics

MARK = "dtron::"


def phase(name: str) -> contextlib.AbstractContextManager:
    """Mark what runs inside as `dtron::NAME` in the trace; nothing where no profiler runs."""
    if torch.autograd._profiler_enabled():
        return record_function(MARK + name)
    return contextlib.nullcontext()


class ProfileWindow:
    """Profiles steps [profile_start, profile_start + profile_steps) into `directory`."""

    def __init__(self, options: Metrics, directory: Path) -> None:
        self.first = options.profile_start
        self.last = options.profile_start + options.profile_steps - 1
        self.shapes = options.profile_shapes
        self.directory = directory
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """Start the window if this step (1-based) opens it."""
        if self.first and step == self.first:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities, record_shapes=self.shapes)
            self._profile.start()

    def after(self, step: int, final: bool) -> None:
        """Write the trace if this step closes the window or is the run's final one."""
        if self._profile is not None and (step == self.last or final):
            self._profile.stop()
            self.directory.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self.directory / f"rank-{dist.get_rank()}.json"))
            self._profile = None
