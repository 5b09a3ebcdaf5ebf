"""Profile a few steps with torch.profiler: one trace per rank, for chrome://tracing or Perfetto.

Phases of a step are marked in the trace as `dtron::NAME`, at no cost outside of the window.
`dtron bench --breakdown` reads these marks.
"""

import contextlib
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from dtron.config import Metrics

MARK = "dtron::"


def phase(name: str) -> contextlib.AbstractContextManager:
    """Return a context manager: a profiler trace shows the time inside it as `dtron::NAME`."""
    return record_function(MARK + name) if ProfileWindow.is_open else contextlib.nullcontext()


class ProfileWindow:
    """Profiles steps [profile_start, profile_start + profile_steps) into `directory`."""

    is_open: ClassVar[bool] = False
    """Whether this process is profiling."""

    def __init__(self, options: Metrics, directory: Path) -> None:
        self.first = options.profile_start
        self.last = options.profile_start + options.profile_steps - 1
        self.shapes = options.profile_shapes
        self.directory = directory
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """Start the profiler if this step (1-based) is the first step of the window."""
        if self.first and step == self.first:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities, record_shapes=self.shapes)
            self._profile.start()
            ProfileWindow.is_open = True

    def after(self, step: int, final: bool) -> None:
        """Write the trace if this step is the last step of the window or of the run."""
        if self._profile is not None and (step == self.last or final):
            self._profile.stop()
            ProfileWindow.is_open = False
            self.directory.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self.directory / f"rank-{dist.get_rank()}.json"))
            self._profile = None
