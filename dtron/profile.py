"""A torch.profiler window over a few steps, one trace a rank, for chrome://tracing or Perfetto."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from dtron.config import Metrics


class ProfileWindow:
    """Profiles steps [profile_start, profile_start + profile_steps) into `directory`."""

    def __init__(self, options: Metrics, directory: Path) -> None:
        self.first = options.profile_start
        self.last = options.profile_start + options.profile_steps - 1
        self.directory = directory
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """Start the window if this step (1-based) opens it."""
        if self.first and step == self.first:
            activities = [ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(ProfilerActivity.CUDA)
            self._profile = profile(activities=activities)
            self._profile.start()

    def after(self, step: int, final: bool) -> None:
        """Write the trace if this step closes the window or is the run's final one."""
        if self._profile is not None and (step == self.last or final):
            self._profile.stop()
            self.directory.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self.directory / f"rank-{dist.get_rank()}.json"))
            self._profile = None
