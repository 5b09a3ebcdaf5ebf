"""Pipeline parallelism: executes a schedule's actions on this rank's stages.

The schedule is data (`schedules.py`, `lowering.py`): a list of actions a rank, free of deadlocks by
construction. Executing it is a loop over that list, one short method an action:

    F   forward of a micro-batch through a stage       SEND_F, RECV_F   hidden states onwards
    B   its backward                                   SEND_B, RECV_B   gradients backwards
    I, W  its two parts (`split_backward.py`)          REDUCE           sum over data parallel ranks

Sends and receives are posted without waiting and run beside the computation; a receive is waited
for by the action that reads it. An output is let go once it is sent: the backward needs only its
place in the graph. Hidden states are plain local tensors, under sequence parallelism the rank's
part of them. What a stage's output looks like is sent to the next one with the first micro-batch.

FSDP: parameters are gathered by the first micro-batch of a step and kept (zero 1, 2), or by each
forward and backward (zero 3). Where the backward is whole, gradients are reduced inside it, layer
by layer; where it is split, by the REDUCE action after the last W.

Sources: GPipe, arXiv:1811.06965; 1F1B and interleaving, arXiv:2104.04473; zero bubble,
arXiv:2401.10241.
"""

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule

from dtron.parallelisms.fsdp.sharding import Policy, begin_micro_batch
from dtron.parallelisms.fsdp.torch_internals import accumulate_gradients, reduce_gradients
from dtron.parallelisms.mesh import Mesh
from dtron.parallelisms.pipeline.accumulate import Loss, MicroBatch
from dtron.parallelisms.pipeline.lowering import add_communication, add_reductions
from dtron.parallelisms.pipeline.schedule_ops import Action, Kind, Order
from dtron.parallelisms.pipeline.schedules import forward_only
from dtron.parallelisms.pipeline.split_backward import WeightGradients
from dtron.parallelisms.placement import first_tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_HEADER = 8  # numbers that describe a tensor: dtype, dims, sizes

Key = tuple[int, int]
"""(stage, micro-batch)"""


@dataclass(frozen=True)
class Layout:
    """How the stages of a pipeline lie on its ranks, and in which order they compute."""

    stages: tuple[tuple[str, ...], ...]
    """Patterns of the modules of each stage."""
    ranks: tuple[int, ...]
    """The pp rank of each stage."""
    order: Callable[[int], Order]
    """Number of micro-batches -> compute actions by rank."""
    splits_backward: bool
    """Whether the order has I and W for all stages."""
    head: tuple[str, ...] = ()
    """Modules of the last stage whose weight gradients alone are put off."""

    def deferred(self, stage: int, part: nn.Module) -> list[nn.Module]:
        """The modules of a stage whose weight gradients are computed apart."""
        if self.splits_backward:
            return [part]
        is_last = stage == len(self.ranks) - 1
        return [part.get_submodule(name) for name in self.head] if is_last else []


@dataclass
class _Run:
    """What one pass over the action list holds."""

    micro_batches: Sequence[MicroBatch]
    consume: Callable[[Tensor, int], Tensor | None]
    train: bool
    total: Tensor
    arrived: dict[Key, Tensor] = field(default_factory=dict)
    """Inputs of stages, received or handed over."""
    gradients: dict[Key, Tensor] = field(default_factory=dict)
    """Gradients of outputs of stages, received or handed over."""
    pending: dict[tuple[Kind, Key], dist.Work] = field(default_factory=dict)
    inputs: dict[Key, Tensor] = field(default_factory=dict)
    """Inputs whose gradient is due."""
    outputs: dict[Key, Tensor] = field(default_factory=dict)
    """Outputs to send."""
    edges: dict[Key, Tensor | GradientEdge] = field(default_factory=dict)
    """Where each backward starts: the loss, or an output's place in the graph."""
    shapes: dict[Key, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    sending: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)
    weights_due: dict[int, int] = field(default_factory=dict)
    """Weight gradients still to come this step, by stage."""


class Pipeline:
    """Executes steps on this rank's stages; an `Execution`.

    Args:
        parts: this rank's stages, parallelised, by stage.
        layout: of the whole pipeline.
        policy: when FSDP frees and reduces.
        deferred: queues of weight gradients of the stages whose backward is split.

    Attributes:
        executed: actions of the last step, in their order.
    """

    def __init__(
        self,
        parts: Mapping[int, nn.Module],
        layout: Layout,
        mesh: Mesh,
        policy: Policy,
        deferred: Mapping[int, WeightGradients],
    ) -> None:
        self.parts, self.layout, self.policy, self.deferred = parts, layout, policy, deferred
        self.group, self.rank = mesh.group("pp"), mesh.rank("pp")
        self.device = torch.device(mesh.device_type)
        self.peers = [dist.get_global_rank(self.group, r) for r in range(mesh.size("pp"))]
        self.last_stage = len(layout.ranks) - 1
        self.executed: list[Action] = []
        self._orders: dict[tuple[int, bool], Sequence[Action]] = {}
        self._shapes: dict[tuple[int, torch.Size], tuple[torch.Size, torch.dtype]] = {}
        self._actions: dict[Kind, Callable[[_Run, Key], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: self._backward,
            Kind.INPUT: self._input,
            Kind.WEIGHT: self._weight,
            Kind.REDUCE: self._reduce,
            Kind.SEND_F: self._send_output,
            Kind.RECV_F: self._receive_input,
            Kind.SEND_B: self._send_gradient,
            Kind.RECV_B: self._receive_gradient,
        }

    def train(self, micro_batches: Sequence[MicroBatch], loss: Loss) -> Tensor:
        """See `Execution.train`."""
        return self._run(micro_batches, loss, train=True)

    @torch.no_grad()
    def evaluate(
        self, micro_batches: Sequence[MicroBatch], consume: Callable[[Tensor, int], None]
    ) -> None:
        """See `Execution.evaluate`."""
        self._run(micro_batches, consume, train=False)

    def actions(self, n_micro_batches: int, train: bool) -> Sequence[Action]:
        """What this rank does in a step, or in an evaluation."""
        key = (n_micro_batches, train)
        if key not in self._orders:
            ranks, n_ranks = self.layout.ranks, len(self.peers)
            if train:
                order = add_communication(self.layout.order(n_micro_batches), ranks)
                split = range(len(ranks)) if self.layout.splits_backward else (self.last_stage,)
                if self.layout.splits_backward or self.layout.head:
                    order = add_reductions(order, self.policy.reduce_each_micro_batch, split)
            else:
                order = add_communication(forward_only(ranks, n_ranks, n_micro_batches), ranks)
            self._orders[key] = order[self.rank]
        return self._orders[key]

    def expect(self, tokens: torch.Size, shape: torch.Size, dtype: torch.dtype) -> None:
        """Take what goes between stages to look like this, so that no stage has to tell.

        Args:
            tokens: shape of a micro-batch's tokens, to which it belongs.
        """
        for stage in range(self.last_stage):
            self._shapes[stage, tokens] = (shape, dtype)

    def _run(
        self,
        micro_batches: Sequence[MicroBatch],
        consume: Callable[[Tensor, int], Tensor | None],
        train: bool,
    ) -> Tensor:
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        run = _Run(micro_batches, consume, train, total)
        run.weights_due = dict.fromkeys(self.parts, len(micro_batches))
        self.executed = []
        for action in self.actions(len(micro_batches), train):
            micro_batch = -1 if action.micro_batch is None else action.micro_batch
            self._actions[action.kind](run, (action.stage, micro_batch))
            self.executed.append(action)
        for work, _ in run.sending:
            work.wait()
        return run.total

    # -- computing --------------------------------------------------------------------------

    def _forward(self, run: _Run, key: Key) -> None:
        stage, i = key
        x, others = run.micro_batches[i]
        if stage > 0:
            x = self._arrived(run, Kind.RECV_F, run.arrived, key)
            if run.train:
                run.inputs[key] = x.requires_grad_()
        out = self.parts[stage](x, **others)
        if stage == self.last_stage:
            share = run.consume(out, i)
            if run.train:
                assert share is not None, "the loss is a tensor"
                run.edges[key] = share
                run.total = run.total + share.detach()
            return
        out = first_tensor(out)
        if run.train:
            if not out.requires_grad:  # a first stage of frozen parameters: nothing to compute
                out = out.detach().requires_grad_()
            run.edges[key] = get_gradient_edge(out)
            run.shapes[key] = (out.shape, out.dtype)
        if self.layout.ranks[stage + 1] == self.rank:
            run.arrived[stage + 1, i] = out.detach()
        else:
            run.outputs[key] = out.detach()

    def _backward(self, run: _Run, key: Key) -> None:
        part = self._part(key[0])
        last = self._count_weight(run, key[0])
        split = key[0] in self.deferred
        if split:
            self._hold_reduction(part)
        else:
            begin_micro_batch(part, self.policy, last)
        self._differentiate(run, key)
        if split:
            accumulate_gradients(self.parts[key[0]])

    def _input(self, run: _Run, key: Key) -> None:
        self._hold_reduction(self._part(key[0]))
        with self.deferred[key[0]].collect(key[1]):
            self._differentiate(run, key)

    def _weight(self, run: _Run, key: Key) -> None:
        self._count_weight(run, key[0])
        self.deferred[key[0]].run(key[1])
        accumulate_gradients(self.parts[key[0]])

    def _reduce(self, run: _Run, key: Key) -> None:
        reduce_gradients(self.parts[key[0]], last=run.weights_due[key[0]] == 0)

    def _differentiate(self, run: _Run, key: Key) -> None:
        """Backward of a stage from its output's gradient to its input's."""
        stage, i = key
        edge = run.edges.pop(key)
        gradient = None
        if stage < self.last_stage:
            gradient = self._arrived(run, Kind.RECV_B, run.gradients, key)
        torch.autograd.backward([edge], [gradient])  # type: ignore[list-item]
        if stage == 0:
            return
        due = run.inputs.pop(key).grad
        assert due is not None, f"stage {stage} does not depend on its input"
        if self.layout.ranks[stage - 1] == self.rank:
            run.gradients[stage - 1, i] = due
        else:
            run.outputs[key] = due

    def _hold_reduction(self, part: FSDPModule) -> None:
        part.set_requires_gradient_sync(False)
        part.set_reshard_after_backward(not self.policy.keep_gathered)
        part.set_is_last_backward(False)

    def _count_weight(self, run: _Run, stage: int) -> bool:
        """Count a micro-batch's weight gradients as done; whether it was the stage's last."""
        run.weights_due[stage] -= 1
        return run.weights_due[stage] == 0

    def _part(self, stage: int) -> FSDPModule:
        part = self.parts[stage]
        assert isinstance(part, FSDPModule), "stages are parallelised before they are trained"
        return part

    # -- communicating ----------------------------------------------------------------------

    def _send_output(self, run: _Run, key: Key) -> None:
        stage, i = key
        peer, tensor = self._peer(stage + 1), run.outputs.pop(key)
        known = (stage, run.micro_batches[i][0].shape)
        if known not in self._shapes:
            self._shapes[known] = (tensor.shape, tensor.dtype)
            self._post(dist.isend, _header(tensor), peer).wait()
        self._send(run, tensor, peer)

    def _receive_input(self, run: _Run, key: Key) -> None:
        stage, i = key
        peer = self._peer(stage - 1)
        known = (stage - 1, run.micro_batches[i][0].shape)
        if known not in self._shapes:
            header = torch.zeros(_HEADER, dtype=torch.int64, device=self.device)
            self._post(dist.irecv, header, peer).wait()
            self._shapes[known] = _read_header(header)
        self._receive(run, Kind.RECV_F, run.arrived, key, peer, self._shapes[known])

    def _send_gradient(self, run: _Run, key: Key) -> None:
        self._send(run, run.outputs.pop(key), self._peer(key[0] - 1))

    def _receive_gradient(self, run: _Run, key: Key) -> None:
        peer, shape = self._peer(key[0] + 1), run.shapes.pop(key)
        self._receive(run, Kind.RECV_B, run.gradients, key, peer, shape)

    def _peer(self, stage: int) -> int:
        return self.peers[self.layout.ranks[stage]]

    def _send(self, run: _Run, tensor: Tensor, peer: int) -> None:
        while run.sending and run.sending[0][0].is_completed():
            run.sending.popleft()
        tensor = tensor.contiguous()
        run.sending.append((self._post(dist.isend, tensor, peer), tensor))

    def _receive(
        self,
        run: _Run,
        kind: Kind,
        arrived: dict[Key, Tensor],
        key: Key,
        peer: int,
        shape: tuple[torch.Size, torch.dtype],
    ) -> None:
        arrived[key] = torch.empty(shape[0], dtype=shape[1], device=self.device)
        run.pending[kind, key] = self._post(dist.irecv, arrived[key], peer)

    def _post(self, operation: Callable, tensor: Tensor, peer: int) -> dist.Work:
        # As a batch of one: alone, NCCL would open another communicator for the pair, or warn.
        (work,) = dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, self.group)])
        return work

    def _arrived(self, run: _Run, kind: Kind, arrived: dict[Key, Tensor], key: Key) -> Tensor:
        work = run.pending.pop((kind, key), None)  # none where the stage before is on this rank
        if work is not None:
            work.wait()
        return arrived.pop(key)


def _header(tensor: Tensor) -> Tensor:
    numbers = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    numbers += [0] * (_HEADER - len(numbers))
    return torch.tensor(numbers, dtype=torch.int64, device=tensor.device)


def _read_header(header: Tensor) -> tuple[torch.Size, torch.dtype]:
    dtype, dims, *sizes = header.tolist()
    return torch.Size(sizes[:dims]), _DTYPES[dtype]
