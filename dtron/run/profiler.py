"""Profile a few steps with torch.profiler: one trace per rank, for chrome://tracing or Perfetto.

Phases of a step are marked in the trace as `dtron::NAME`, at no cost outside of the window.
`dtron bench --breakdown` reads these marks. With `metrics.nvtx`, modules are marked as well, and
all marks are NVTX ranges too, for Nsight Systems (nsys):

    forward, micro-batch 0         one forward of this rank's modules (of a stage, in a pipeline)
    blocks.3 forward, micro-batch 0, blocks.3.attn forward, micro-batch 0
    blocks.3 backward, micro-batch 0    from the gradient of its output to the next such gradient
"""

import contextlib
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile, record_function

from dtron.config import Metrics
from dtron.parallelisms.placement import leaves

MARK = "dtron::"


def phase(name: str) -> contextlib.AbstractContextManager:
    """Return a context manager: traces show the time inside it as `dtron::NAME`.

    The range of a module's backward ends with the phase around it.
    """
    marked = ProfileWindow.is_open or ProfileWindow.ranges is not None
    return _marked(MARK + name) if marked else contextlib.nullcontext()


@contextlib.contextmanager
def _marked(name: str) -> Iterator[None]:
    mark = _Mark(name)
    try:
        yield
    finally:
        if ProfileWindow.ranges is not None:
            ProfileWindow.ranges.end_backward()
        mark.end()


class _Mark:
    """A range in the trace of torch.profiler, if it records, and of NVTX, if a GPU is there.

    It begins now. Ranges need not be nested, and may end in another thread.
    """

    def __init__(self, name: str) -> None:
        self._record = record_function(name) if ProfileWindow.is_open else None
        if self._record is not None:
            self._record.__enter__()
        use_nvtx = ProfileWindow.ranges is not None and torch.cuda.is_available()
        self._id: Any = torch.cuda.nvtx.range_start(name) if use_nvtx else None

    def end(self) -> None:
        if self._record is not None:
            self._record.__exit__(None, None, None)
        if self._id is not None:
            torch.cuda.nvtx.range_end(self._id)


class ModuleRanges:
    """Marks forwards and backwards of modules, by hooks on the modules.

    Marked are modules of the first level (`embed`), blocks (`blocks.3`), and forwards of their
    children (`blocks.3.attn`). Recomputed children are marked within the backward.

    Args:
        parts: this rank's stages, or the model.
        compiled: whether blocks are compiled; then only whole forwards are marked, since hooks
            would split the graphs.
    """

    def __init__(self, parts: Iterable[nn.Module], compiled: bool) -> None:
        self._begun: Counter[int] = Counter()
        """Forwards of this step, by the id of their part."""
        self._index = 0
        self._backward: _Mark | None = None
        self._open: list[_Mark] = []
        for part in parts:
            part.register_forward_pre_hook(self._begin_micro_batch)
            part.register_forward_hook(self._end_forward)
            for fqn, module in [] if compiled else part.named_modules():
                depth = sum(not name.isdigit() for name in fqn.split("."))
                if not fqn or depth > 2 or isinstance(module, nn.ModuleList):
                    continue
                module.register_forward_pre_hook(self._begin_forward(fqn))
                module.register_forward_hook(self._end_forward)
                if depth == 1:
                    module.register_forward_hook(self._mark_backward(fqn))

    def begin_step(self) -> None:
        """Count micro-batches from 0 again; end the ranges of forwards that raised an error."""
        self._begun.clear()
        while self._open:
            self._open.pop().end()
        self.end_backward()

    def _begin_micro_batch(self, part: nn.Module, _: Any) -> None:
        self.end_backward()
        self._index = self._begun[id(part)]
        self._begun[id(part)] += 1
        self._open.append(_Mark(f"forward, micro-batch {self._index}"))

    def _begin_forward(self, fqn: str) -> Any:
        def hook(*_: Any) -> None:
            self._open.append(_Mark(f"{fqn} forward, micro-batch {self._index}"))

        return hook

    def _end_forward(self, *_: Any) -> None:
        self._open.pop().end()

    def _mark_backward(self, fqn: str) -> Any:
        def hook(_module: nn.Module, _inputs: Any, output: Any) -> None:
            index = self._index

            def begin(_gradient: Tensor) -> None:
                self.end_backward()
                self._index = index
                self._backward = _Mark(f"{fqn} backward, micro-batch {index}")

            tensors = (x for x in leaves(output) if isinstance(x, Tensor) and x.requires_grad)
            if (first := next(tensors, None)) is not None:
                first.register_hook(begin)

        return hook

    def end_backward(self) -> None:
        """End the range of the module whose backward runs, if there is one."""
        if self._backward is not None:
            self._backward.end()
            self._backward = None


class ProfileWindow:
    """Profiles steps [profile_start, profile_start + profile_steps) into `directory`.

    Args:
        parts: this rank's stages, or the model, for `metrics.nvtx`.
        compiled: whether blocks are compiled.
    """

    is_open: ClassVar[bool] = False
    """Whether this process is profiling."""
    ranges: ClassVar[ModuleRanges | None] = None
    """The ranges of modules with `metrics.nvtx`; None: modules are not marked, nor NVTX ranges."""

    def __init__(
        self,
        options: Metrics,
        directory: Path,
        parts: Iterable[nn.Module] = (),
        compiled: bool = False,
    ) -> None:
        chosen = not options.profile_ranks or dist.get_rank() in options.profile_ranks
        self.first = options.profile_start if chosen else 0
        self.last = options.profile_start + options.profile_steps - 1
        self.shapes = options.profile_shapes
        self.directory = directory
        self._profile: profile | None = None
        ProfileWindow.ranges = ModuleRanges(parts, compiled) if options.nvtx else None

    def before(self, step: int) -> None:
        """Start the profiler if this step (1-based) is the first step of the window."""
        if ProfileWindow.ranges is not None:
            ProfileWindow.ranges.begin_step()
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
            if ProfileWindow.ranges is not None:
                ProfileWindow.ranges.begin_step()
            self._profile.stop()
            ProfileWindow.is_open = False
            self.directory.mkdir(parents=True, exist_ok=True)
            self._profile.export_chrome_trace(str(self.directory / f"rank-{dist.get_rank()}.json"))
            self._profile = None
