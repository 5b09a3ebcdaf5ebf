"""Overlap the communication of one micro-batch with the computation of another, block by block.

The forward of a micro-batch and the backward of an earlier one run together. The host issues one
block of the backward, then one block of the forward, and so on, on two CUDA streams. While the GPU
waits in one micro-batch for tokens that travel to or from their experts, it computes the other one:

    lane 0   backward of 7   head, block 3           block 2           block 1           block 0
    lane 1   forward of 8                   block 0           block 1           block 2   ...

A `Tape` is the graph of a micro-batch, cut at the input of each block, so that `torch.autograd` can
run the backward of one block at a time. A forward pre-hook of each block runs a part of the other
micro-batch's backward, and then cuts. Models, dispatchers, recomputation and compilation are
unchanged: they run inside of a block.

**Streams.** Forward and backward of a micro-batch run in one lane: autograd runs a backward on the
stream of its forward, and a tensor's memory is reused on the stream on which it was allocated. So
tensors of a micro-batch need no further care. All else is ordered by two waits: each lane waits for
the other when a forward begins and when it ends. Within such a period only the forward changes what
outlives it (counts of routers, the loss), and only the backward adds gradients.

**Process groups.** A lane has its own process group for dispatch and combine, since NCCL runs the
collectives of one group one after another: a lane would wait for the other's computation. All ranks
issue the collectives of both groups in the same order.

**Weight gradients of experts.** Without a pipeline they are queued (`split_backward.py`). The lane
sends the gradients of tokens back first; while these travel, a separate stream computes the weight
gradients. It starts when the last one of the block is queued, and the lane waits for it at the end
of the block's backward, where FSDP takes the gradients. The host issues them there too, so that the
graphs of compiled blocks do not change; the GPU is usually behind the host by then. It is not the
stream on which autograd adds gradients: by then autograd has issued additions there that wait for
the rest of the block's backward.

**Memory.** Activations of two micro-batches, and both lanes have their own pool of free memory.

**FSDP.** Parameters stay gathered, and gradients are reduced in the last backward of the step,
which runs alone (`Policy`).

Sources: DualPipe, DeepSeek-V3, arXiv:2412.19437, section 3.2.1; Megatron-LM's 1F1B overlap of
expert communication, which cuts at operators instead and has one stream for computation.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule

from dtron.errors import ConfigError
from dtron.parallelisms.expert.dispatcher import Dispatcher
from dtron.parallelisms.fsdp.torch_internals import (
    accumulate_on,
    before_reductions,
    end_backward,
    fsdp_units,
    part_of_backward,
)
from dtron.parallelisms.pipeline.weight_gradients import WeightGradients

_PART = "part of a backward"
"""Key of its queued weight gradients."""


@dataclass(frozen=True)
class Lane:
    """What one of the two micro-batches in progress uses, and the other does not."""

    group: dist.ProcessGroup
    """The ranks between which tokens are dispatched."""
    stream: torch.cuda.Stream | None
    """None on CPUs, which have no streams."""


@dataclass
class Tape:
    """The graph of one micro-batch in one model or pipeline stage, cut at the inputs of blocks.

    Args:
        units: FSDP units of the model or stage; the first one is the root.
        lane: index of its lane.
    """

    units: Sequence[FSDPModule]
    lane: int
    end: Tensor | GradientEdge | None = None
    """Where the next part of the backward starts; None before the backward, and after it."""
    gradient: Tensor | None = None
    """Gradient of `end`; None for a loss."""
    cuts: list[tuple[GradientEdge, Tensor]] = field(default_factory=list)
    """For each block whose input was cut, in the order of the forward: node of the graph before the
    cut, and the tensor with which the graph continues."""

    def cut(self, x: Tensor) -> Tensor:
        """Cut the graph at x, the input of a block, and return the tensor to continue with."""
        if x.grad_fn is None:  # nothing before x needs a gradient, or x is the stage's input
            return x
        continued = x.detach().requires_grad_()
        self.cuts.append((get_gradient_edge(x), continued))
        return continued

    @property
    def parts(self) -> int:
        """Number of parts of the backward that have not run."""
        return 0 if self.end is None else 1 + len(self.cuts)

    def run_part(self) -> None:
        """Run the backward from the end of the graph to the last cut, which becomes the end."""
        end, gradient, self.end, self.gradient = self.end, self.gradient, None, None
        with part_of_backward(self.units):
            torch.autograd.backward([end], [gradient])  # type: ignore[list-item]
        del end, gradient
        if self.cuts:
            self.end, continued = self.cuts.pop()
            self.gradient = continued.grad
            assert self.gradient is not None, "a block's output depends on its input"


class BlockOverlap:
    """Runs a forward together with a backward, block by block; see the module's docstring.

    Args:
        roots: the model, or this rank's pipeline stages, after `fully_shard`.
        blocks: their blocks, at whose inputs graphs are cut.
        dispatcher: sends tokens to experts.
        groups: two process groups of the dispatcher's ranks.
        deferred: queues of the experts' weight gradients, of a model without a pipeline; None: they
            are not deferred, or by the pipeline's schedule.
    """

    def __init__(
        self,
        roots: Iterable[nn.Module],
        blocks: Iterable[nn.Module],
        dispatcher: Dispatcher,
        groups: Sequence[dist.ProcessGroup],
        device: torch.device,
        deferred: WeightGradients | None = None,
    ) -> None:
        self.dispatcher, self.deferred = dispatcher, deferred
        self._units = {root: fsdp_units(root) for root in roots}
        streams: list[torch.cuda.Stream | None] = [None, None]
        self._adds: torch.cuda.Stream | None = None
        """The stream on which autograd adds gradients of parameters."""
        self._weights: torch.cuda.Stream | None = None
        """The stream on which deferred weight gradients are computed and added."""
        self._queued: torch.cuda.Event | None = None
        if device.type == "cuda":
            self._queued = torch.cuda.Event()
            streams = [torch.cuda.current_stream(device), torch.cuda.Stream(device)]
            self._adds, self._weights = torch.cuda.Stream(device), torch.cuda.Stream(device)
            # Autograd would warn in each step that gradients are added on another stream.
            torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch(False)
        self.lanes = [Lane(*each) for each in zip(groups, streams, strict=True)]
        for group in reversed(groups):  # on all ranks at once, if a dispatcher makes more groups
            dispatcher.use_group(group)
        self._adders: dict[nn.Module, list[Any] | None] = {}
        self._lane = 0
        """The lane in which work is issued."""
        self._forward: Tape | None = None
        self._backward: Tape | None = None
        for root in self._units if deferred is not None else ():
            before_reductions(root, self._add_weight_gradients)
        for block in blocks:  # a compiled block calls the hook, but does not trace it
            hook: Any = torch.compiler.disable(self._before_block)
            block.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)

    def begin_step(self) -> bool:
        """Prepare a step; return whether its micro-batches may run together.

        On GPUs they may not in the first step, whose forward makes the gathered parameters.
        """
        if self._adds is None:
            return True
        for root in self._units:
            if self._adders.get(root) is None:
                self._adders[root] = accumulate_on(root, self._adds)
        return None not in self._adders.values()

    @contextmanager
    def forward(
        self, root: nn.Module, lane: int = 0, backward: Tape | None = None
    ) -> Iterator[Tape]:
        """Context manager: the forward inside it records its graph, and alternates with a backward.

        Args:
            root: the model or stage whose forward runs.
            lane: index of a lane, not that of `backward`.
            backward: the graph of another micro-batch, whose `end` is set; None: none.
        """
        assert backward is None or backward.lane != lane, "one micro-batch per lane"
        # A gradient from another lane, whose memory must not be used again before the lanes join.
        held = None if backward is None else backward.gradient
        tape = Tape(self._units[root], lane)
        self._join()
        self._forward, self._backward = tape, backward
        try:
            with self._in_lane(lane):
                yield tape
            while self._run_part():
                pass
        finally:
            self._forward = self._backward = None
        self._join()
        del held
        if backward is not None:
            end_backward(backward.units[0])

    def backward(self, tape: Tape) -> None:
        """Run a backward alone, in its lane."""
        held = tape.gradient
        self._join()
        with self._in_lane(tape.lane):
            while tape.parts:
                self._run(tape)
        self._join()
        del held
        end_backward(tape.units[0])

    def _before_block(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        if self._forward is None or not torch.is_grad_enabled():
            return args, kwargs
        x, *others = args
        for other in (*others, *kwargs.values()):
            if isinstance(other, Tensor) and other.requires_grad:
                raise ConfigError(
                    "parallel.overlap_micro_batches cuts the graph at the first argument of each "
                    "block, but another argument requires a gradient too; use false"
                )
        self._run_part()
        return (self._forward.cut(x), *others), kwargs

    def _run_part(self) -> bool:
        """Run a part of the other micro-batch's backward; return False if none is left."""
        if self._backward is None or not self._backward.parts:
            return False
        with self._in_lane(self._backward.lane):
            self._run(self._backward)
        return True

    def _run(self, tape: Tape) -> None:
        """Run a part of a backward, with the weight gradients that it defers."""
        if self.deferred is None:
            tape.run_part()
            return
        with self.deferred.collect(_PART, self._queued):
            tape.run_part()
        self.deferred.run(_PART)  # those of experts in FSDP's root unit

    def _add_weight_gradients(self) -> None:
        """Compute the queued weight gradients, and let the lane wait for them."""
        if self.deferred is None or not self.deferred.collected:
            return
        if self._weights is None or self._queued is None:
            self.deferred.run_collected()
            return
        self._weights.wait_event(self._queued)
        with torch.cuda.stream(self._weights):
            self.deferred.run_collected()
        # Operands belong to the lane's memory, which is used again only after this wait.
        torch.cuda.current_stream().wait_stream(self._weights)

    @contextmanager
    def _in_lane(self, index: int) -> Iterator[None]:
        """Context manager: issue work in a lane, and after it in the lane of before."""
        before, stream = self._lane, self.lanes[index].stream
        self._use_lane(index)
        try:
            with nullcontext() if stream is None else torch.cuda.stream(stream):
                yield
        finally:
            self._use_lane(before)

    def _use_lane(self, index: int) -> None:
        self._lane = index
        self.dispatcher.use_group(self.lanes[index].group)

    def _join(self) -> None:
        """Make each lane wait for all that was issued in the other."""
        first, second = (lane.stream for lane in self.lanes)
        if first is not None and second is not None:
            first.wait_stream(second)
            second.wait_stream(first)
