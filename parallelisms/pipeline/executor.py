"""Pipeline parallelism: execute a schedule's actions on this rank's stages.

The schedule is data (`schedules.py`, `lowering.py`): a list of actions per rank, free of deadlocks
by construction. `Pipeline` loops over that list and calls one method per action:

    F     forward of a micro-batch through a stage     SEND_F, RECV_F   hidden states
    B     its whole backward                           SEND_B, RECV_B   gradients of hidden states
    I     its backward for the input's gradient        REDUCE           reduction of gradients
    W     its backward for the weights' gradients

Sends and receives are posted without waiting and overlap computation; the action that reads a
received tensor waits for it. An output is freed once it is sent: the backward needs only its node
in the graph. Hidden states are plain local tensors, sharded along the sequence under sequence
parallelism. Before its first output for each shape of tokens, a stage sends dtype and shape.

FSDP: the first micro-batch of a step gathers parameters and keeps them (zero 1, 2), or each forward
and backward gathers them (zero 3). B reduces gradients inside the backward, layer by layer. In
stages with deferred weight gradients, REDUCE reduces gradients after the last W or after each W.

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

from dtron.errors import ConfigError
from dtron.parallelisms.fsdp.sharding import Policy, begin_micro_batch
from dtron.parallelisms.fsdp.torch_internals import accumulate_gradients, reduce_gradients
from dtron.parallelisms.mesh import Mesh
from dtron.parallelisms.pipeline.accumulate import Loss, MicroBatch
from dtron.parallelisms.pipeline.lowering import add_communication, add_reductions
from dtron.parallelisms.pipeline.schedule_ops import Action, Kind, Order
from dtron.parallelisms.pipeline.schedules import forward_only
from dtron.parallelisms.pipeline.weight_gradients import WeightGradients
from dtron.parallelisms.placement import first_tensor

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_HEADER = 8  # length of a header: index of dtype, number of dims, sizes

Key = tuple[int, int]
"""(stage, micro-batch)"""


@dataclass(frozen=True)
class Layout:
    """Modules and ranks of all pipeline stages, and the schedule's order."""

    stages: tuple[tuple[str, ...], ...]
    """Patterns of the modules of each stage."""
    ranks: tuple[int, ...]
    """The pp rank of each stage."""
    order: Callable[[int], Order]
    """Number of micro-batches -> compute actions of each rank."""
    splits_backward: bool
    """Whether the order has split backwards, I and W; then all stages defer weight gradients."""
    head: tuple[str, ...] = ()
    """Modules of the last stage with deferred weight gradients; unused if `splits_backward`."""

    def deferred(self, stage: int, part: nn.Module) -> list[nn.Module]:
        """Return the modules of a stage whose weight gradients are deferred."""
        if self.splits_backward:
            return [part]
        is_last = stage == len(self.ranks) - 1
        return [part.get_submodule(name) for name in self.head] if is_last else []


@dataclass
class _PassState:
    """Tensors and pending transfers while the actions of one step or evaluation are executed."""

    micro_batches: Sequence[MicroBatch]
    consume: Callable[[Tensor, int], Tensor | None]
    train: bool
    total: Tensor
    received: dict[Key, Tensor] = field(default_factory=dict)
    """Inputs of stages, from another rank or from a stage on this rank."""
    gradients: dict[Key, Tensor] = field(default_factory=dict)
    """Gradients of stage outputs, from another rank or from a stage on this rank."""
    pending: dict[tuple[Kind, Key], dist.Work] = field(default_factory=dict)
    inputs: dict[Key, Tensor] = field(default_factory=dict)
    """Inputs whose gradient is not computed yet."""
    outputs: dict[Key, Tensor] = field(default_factory=dict)
    """Outputs, and gradients of inputs, to send to another rank."""
    edges: dict[Key, Tensor | GradientEdge] = field(default_factory=dict)
    """Root of each backward: the loss, or the autograd node of an output."""
    shapes: dict[Key, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    sending: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)
    weights_due: dict[int, int] = field(default_factory=dict)
    """By stage: number of micro-batches whose weight gradients are not computed yet."""


class Pipeline:
    """Executes steps on this rank's stages; an `Execution`.

    Args:
        parts: this rank's parallelised stages, by stage number.
        layout: layout of the whole pipeline.
        policy: when FSDP frees parameters and reduces gradients.
        deferred: queues of deferred weight gradients, by stage number.

    Attributes:
        executed: actions of the previous step, in order.
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
        self._actions: dict[Kind, Callable[[_PassState, Key], None]] = {
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
        """Run a training step; return the sum of losses, zero on ranks without the last stage."""
        return self._run(micro_batches, loss, train=True)

    @torch.no_grad()
    def evaluate(
        self, micro_batches: Sequence[MicroBatch], consume: Callable[[Tensor, int], None]
    ) -> None:
        """Run all forwards without gradients; the last stage passes outputs to `consume`."""
        self._run(micro_batches, consume, train=False)

    def actions(self, n_micro_batches: int, train: bool) -> Sequence[Action]:
        """Return this rank's actions in a training step, or in an evaluation (train=False)."""
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
        """Set shape and dtype of the tensors between stages, so that stages do not send them.

        Args:
            tokens: shape of a micro-batch's tokens.
            shape, dtype: of the tensors between stages, for micro-batches of this shape.
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
        state = _PassState(micro_batches, consume, train, total)
        state.weights_due = dict.fromkeys(self.parts, len(micro_batches))
        self.executed = []
        for action in self.actions(len(micro_batches), train):
            micro_batch = -1 if action.micro_batch is None else action.micro_batch
            self._actions[action.kind](state, (action.stage, micro_batch))
            self.executed.append(action)
        for work, _ in state.sending:
            work.wait()
        return state.total

    # -- computing --------------------------------------------------------------------------

    def _forward(self, state: _PassState, key: Key) -> None:
        stage, i = key
        x, others = state.micro_batches[i]
        if stage > 0:
            x = self._wait_for(state, Kind.RECV_F, state.received, key)
            if state.train:
                state.inputs[key] = x.requires_grad_()
        out = self.parts[stage](x, **others)
        if stage == self.last_stage:
            loss = state.consume(out, i)
            if state.train:
                assert loss is not None, "the loss is a tensor"
                state.edges[key] = loss
                state.total = state.total + loss.detach()
            return
        out = first_tensor(out)
        if state.train:
            if not out.requires_grad:  # all parameters of the first stage are frozen
                out = out.detach().requires_grad_()
            state.edges[key] = get_gradient_edge(out)
            state.shapes[key] = (out.shape, out.dtype)
        if self.layout.ranks[stage + 1] == self.rank:
            state.received[stage + 1, i] = out.detach()
        else:
            state.outputs[key] = out.detach()

    def _backward(self, state: _PassState, key: Key) -> None:
        part = self._part(key[0])
        last = self._count_weight(state, key[0])
        split = key[0] in self.deferred
        if split:
            self._disable_reduction(part)
        else:
            begin_micro_batch(part, self.policy, last)
        self._differentiate(state, key)
        if split:
            accumulate_gradients(self.parts[key[0]])

    def _input(self, state: _PassState, key: Key) -> None:
        self._disable_reduction(self._part(key[0]))
        with self.deferred[key[0]].collect(key[1]):
            self._differentiate(state, key)

    def _weight(self, state: _PassState, key: Key) -> None:
        self._count_weight(state, key[0])
        self.deferred[key[0]].run(key[1])
        accumulate_gradients(self.parts[key[0]])

    def _reduce(self, state: _PassState, key: Key) -> None:
        reduce_gradients(self.parts[key[0]], last=state.weights_due[key[0]] == 0)

    def _differentiate(self, state: _PassState, key: Key) -> None:
        """Run autograd from the gradient of a stage's output to the gradient of its input."""
        stage, i = key
        edge = state.edges.pop(key)
        gradient = None
        if stage < self.last_stage:
            gradient = self._wait_for(state, Kind.RECV_B, state.gradients, key)
        torch.autograd.backward([edge], [gradient])  # type: ignore[list-item]
        if stage == 0:
            return
        input_gradient = state.inputs.pop(key).grad
        assert input_gradient is not None, f"stage {stage} does not depend on its input"
        if self.layout.ranks[stage - 1] == self.rank:
            state.gradients[stage - 1, i] = input_gradient
        else:
            state.outputs[key] = input_gradient

    def _disable_reduction(self, part: FSDPModule) -> None:
        part.set_requires_gradient_sync(False)
        part.set_reshard_after_backward(not self.policy.keep_gathered)
        part.set_is_last_backward(False)

    def _count_weight(self, state: _PassState, stage: int) -> bool:
        """Count a micro-batch's weight gradients as done; return whether all are done now."""
        state.weights_due[stage] -= 1
        return state.weights_due[stage] == 0

    def _part(self, stage: int) -> FSDPModule:
        part = self.parts[stage]
        assert isinstance(part, FSDPModule), "stages are parallelised before they are trained"
        return part

    # -- communicating ----------------------------------------------------------------------

    def _send_output(self, state: _PassState, key: Key) -> None:
        stage, i = key
        peer, tensor = self._peer(stage + 1), state.outputs.pop(key)
        known = (stage, state.micro_batches[i][0].shape)
        if known not in self._shapes:
            self._shapes[known] = (tensor.shape, tensor.dtype)
            self._post(dist.isend, _header(tensor), peer).wait()
        self._send(state, tensor, peer)

    def _receive_input(self, state: _PassState, key: Key) -> None:
        stage, i = key
        peer = self._peer(stage - 1)
        known = (stage - 1, state.micro_batches[i][0].shape)
        if known not in self._shapes:
            header = torch.zeros(_HEADER, dtype=torch.int64, device=self.device)
            self._post(dist.irecv, header, peer).wait()
            self._shapes[known] = _read_header(header)
        self._receive(state, Kind.RECV_F, state.received, key, peer, self._shapes[known])

    def _send_gradient(self, state: _PassState, key: Key) -> None:
        self._send(state, state.outputs.pop(key), self._peer(key[0] - 1))

    def _receive_gradient(self, state: _PassState, key: Key) -> None:
        peer, shape = self._peer(key[0] + 1), state.shapes.pop(key)
        self._receive(state, Kind.RECV_B, state.gradients, key, peer, shape)

    def _peer(self, stage: int) -> int:
        return self.peers[self.layout.ranks[stage]]

    def _send(self, state: _PassState, tensor: Tensor, peer: int) -> None:
        # While a CUDA graph is recorded nothing is sent, and asking is an error.
        recorded = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        while not recorded and state.sending and state.sending[0][0].is_completed():
            state.sending.popleft()
        tensor = tensor.contiguous()
        state.sending.append((self._post(dist.isend, tensor, peer), tensor))

    def _receive(
        self,
        state: _PassState,
        kind: Kind,
        received: dict[Key, Tensor],
        key: Key,
        peer: int,
        shape: tuple[torch.Size, torch.dtype],
    ) -> None:
        received[key] = torch.empty(shape[0], dtype=shape[1], device=self.device)
        state.pending[kind, key] = self._post(dist.irecv, received[key], peer)

    def _post(self, operation: Callable, tensor: Tensor, peer: int) -> dist.Work:
        # As a batch of one: for a plain isend, NCCL would create a communicator per pair, or warn.
        (work,) = dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, self.group)])
        return work

    def _wait_for(
        self, state: _PassState, kind: Kind, received: dict[Key, Tensor], key: Key
    ) -> Tensor:
        work = state.pending.pop((kind, key), None)  # None: from a stage on this rank
        if work is not None:
            work.wait()
        return received.pop(key)


def _header(tensor: Tensor) -> Tensor:
    if tensor.dtype not in _DTYPES or tensor.dim() > _HEADER - 2:
        raise ConfigError(
            f"a stage returns a tensor of {tensor.dim()} dimensions and {tensor.dtype}; between "
            f"stages, use at most {_HEADER - 2} dimensions and one of "
            f"{', '.join(map(str, _DTYPES))}"
        )
    numbers = [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
    numbers += [0] * (_HEADER - len(numbers))
    return torch.tensor(numbers, dtype=torch.int64, device=tensor.device)


def _read_header(header: Tensor) -> tuple[torch.Size, torch.dtype]:
    dtype, dims, *sizes = header.tolist()
    return torch.Size(sizes[:dims]), _DTYPES[dtype]
