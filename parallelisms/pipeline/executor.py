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
parallelism. A stage may return a tuple of tensors, such as the hidden states of a decoder and those
of its encoder; the next stage gets the tuple, and returns a gradient for each tensor with a float
dtype. Before its first output for each shape of its arguments, a stage sends dtypes and shapes.

FSDP: the first micro-batch of a step gathers parameters and keeps them (zero 1, 2), or each forward
and backward gathers them (zero 3). B reduces gradients inside the backward, layer by layer. In
stages with deferred weight gradients, REDUCE reduces gradients after the last W or after each W.

Sources: GPipe, arXiv:1811.06965; 1F1B and interleaving, arXiv:2104.04473; zero bubble,
arXiv:2401.10241.
"""

import functools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
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
from dtron.parallelisms.pipeline.block_overlap import BlockOverlap, Tape
from dtron.parallelisms.pipeline.lowering import add_communication, add_reductions
from dtron.parallelisms.pipeline.schedule_ops import Action, Kind, Order, together
from dtron.parallelisms.pipeline.schedules import forward_only
from dtron.parallelisms.pipeline.weight_gradients import WeightGradients
from dtron.parallelisms.placement import sent_tensors

_DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
    *(torch.int64, torch.int32, torch.bool),
)
_MOST_TENSORS = 8
_FIELDS = 8  # of a tensor in a header: index of dtype, number of dims, sizes

Key = tuple[int, int]
"""(stage, micro-batch)"""
Tensors = tuple[Tensor, ...]
Shapes = list[tuple[torch.Size, torch.dtype]]


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
    received: dict[Key, Tensors] = field(default_factory=dict)
    """Inputs of stages, from another rank or from a stage on this rank."""
    gradients: dict[Key, Tensors] = field(default_factory=dict)
    """Gradients of stage outputs, from another rank or from a stage on this rank."""
    pending: dict[tuple[Kind, Key], list[dist.Work]] = field(default_factory=dict)
    inputs: dict[Key, Tensors] = field(default_factory=dict)
    """Inputs with a float dtype whose gradients are not computed yet."""
    outputs: dict[Key, Tensors] = field(default_factory=dict)
    """Outputs, and gradients of inputs, to send to another rank."""
    edges: dict[Key, list[Tensor | GradientEdge]] = field(default_factory=dict)
    """Roots of each backward: the loss, or the autograd nodes of outputs with a float dtype."""
    shapes: dict[Key, Shapes] = field(default_factory=dict)
    """Shapes of these outputs."""
    sending: deque[tuple[dist.Work, Tensor]] = field(default_factory=deque)
    tapes: dict[Key, Tape] = field(default_factory=dict)
    """Graphs cut into blocks, with overlapped micro-batches only."""
    weights_due: dict[int, int] = field(default_factory=dict)
    """By stage: number of micro-batches whose weight gradients are not computed yet."""


class Pipeline:
    """Executes steps on this rank's stages; an `Execution`.

    Args:
        parts: this rank's parallelised stages, by stage number.
        layout: layout of the whole pipeline.
        policy: when FSDP frees parameters and reduces gradients.
        deferred: queues of deferred weight gradients, by stage number.
        overlap: runs the overlapped pairs of the order block by block; None: there are none.

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
        overlap: BlockOverlap | None = None,
    ) -> None:
        self.parts, self.layout, self.policy, self.deferred = parts, layout, policy, deferred
        self.overlap = overlap
        self.group, self.rank = mesh.group("pp"), mesh.rank("pp")
        self.device = torch.device(mesh.device_type)
        self.peers = [dist.get_global_rank(self.group, r) for r in range(mesh.size("pp"))]
        self.last_stage = len(layout.ranks) - 1
        self.executed: list[Action] = []
        self._orders: dict[tuple[int, bool], Sequence[Action]] = {}
        self._shapes: dict[tuple[int, tuple[torch.Size, ...]], Shapes] = {}
        self._expected: Shapes | None = None
        self._actions: dict[Kind, Callable[[_PassState, Key], None]] = {
            Kind.FORWARD: self._forward,
            Kind.BACKWARD: functools.partial(self._backward, Kind.BACKWARD),
            Kind.INPUT: functools.partial(self._backward, Kind.INPUT),
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

    def expect(self, shape: torch.Size, dtype: torch.dtype) -> None:
        """Set shape and dtype of the tensors between stages, so that stages do not send these."""
        self._expected = [(shape, dtype)]

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
        at_once = train and self.overlap is not None and self.overlap.begin_step()
        for action, *paired in together(self.actions(len(micro_batches), train)):
            if paired:
                self._pair(state, action, paired[0], at_once)
            else:
                self._actions[action.kind](state, _key(action))
            self.executed += (action, *paired)
        for work, _ in state.sending:
            work.wait()
        return state.total

    # -- computing --------------------------------------------------------------------------

    def _pair(self, state: _PassState, forward: Action, backward: Action, at_once: bool) -> None:
        """Run a forward and a backward of another micro-batch, in different lanes.

        Args:
            at_once: whether to run them together, block by block.
        """
        lane = 1 - state.tapes[_key(backward)].lane
        if not at_once:
            self._forward(state, _key(forward), lane)
            self._backward(backward.kind, state, _key(backward))
            return
        with self._backward_pass(state, backward.kind, _key(backward)) as tape:
            self._forward(state, _key(forward), lane, tape)

    def _forward(
        self, state: _PassState, key: Key, lane: int = 0, backward: Tape | None = None
    ) -> None:
        if self.overlap is None or not state.train:
            self._compute(state, key)
            return
        with self.overlap.forward(self.parts[key[0]], lane, backward) as state.tapes[key]:
            self._compute(state, key)

    def _compute(self, state: _PassState, key: Key) -> None:
        stage, i = key
        x, others = state.micro_batches[i]
        if stage > 0:
            tensors = self._wait_for(state, Kind.RECV_F, state.received, key)
            if state.train:
                state.inputs[key] = tuple(t.requires_grad_() for t in _floats(tensors))
            x = tensors[0] if len(tensors) == 1 else tensors
        out = self.parts[stage](x, **others)
        if stage == self.last_stage:
            loss = state.consume(out, i)
            if state.train:
                assert loss is not None, "the loss is a tensor"
                state.edges[key] = [loss]
                state.total += loss.detach()
            return
        sent = sent_tensors(out)
        if state.train:
            # Without requires_grad, all parameters before this output are frozen.
            roots = [t if t.requires_grad else t.detach().requires_grad_() for t in _floats(sent)]
            state.edges[key] = [get_gradient_edge(t) for t in roots]
            state.shapes[key] = _shapes_of(roots)
        if self.layout.ranks[stage + 1] == self.rank:
            state.received[stage + 1, i] = tuple(t.detach() for t in sent)
        else:
            state.outputs[key] = tuple(t.detach() for t in sent)

    def _backward(self, kind: Kind, state: _PassState, key: Key) -> None:
        with self._backward_pass(state, kind, key) as tape:
            if tape is not None and self.overlap is not None:
                self.overlap.backward(tape)
            else:
                edges, gradients = self._start(state, key)
                torch.autograd.backward(edges, gradients)  # type: ignore[arg-type]

    @contextmanager
    def _backward_pass(self, state: _PassState, kind: Kind, key: Key) -> Iterator[Tape | None]:
        """Context manager: autograd runs inside it from a stage's output to the stage's input.

        Before, set what FSDP does with gradients; after, take the gradient of the stage's input.

        Args:
            kind: BACKWARD or INPUT.
        Yields:
            The graph to run, if it is cut into blocks.
        """
        stage = key[0]
        split = stage in self.deferred
        last = kind is Kind.BACKWARD and self._count_weight(state, stage)
        if split:
            self._disable_reduction(self._part(stage))
        else:
            begin_micro_batch(self._part(stage), self.policy, last)
        tape = state.tapes.pop(key, None)
        if tape is not None:
            edges, gradients = self._start(state, key)
            assert len(edges) == 1, "models with experts have one tensor between stages"
            tape.end, tape.gradient = edges[0], gradients[0]
        queue = self.deferred[stage].collect(key[1]) if kind is Kind.INPUT else nullcontext()
        with queue:
            yield tape
        self._take_input_gradient(state, key)
        if split and kind is Kind.BACKWARD:
            accumulate_gradients(self.parts[stage])

    def _weight(self, state: _PassState, key: Key) -> None:
        self._count_weight(state, key[0])
        self.deferred[key[0]].run(key[1])
        accumulate_gradients(self.parts[key[0]])

    def _reduce(self, state: _PassState, key: Key) -> None:
        reduce_gradients(self.parts[key[0]], last=state.weights_due[key[0]] == 0)

    def _start(
        self, state: _PassState, key: Key
    ) -> tuple[list[Tensor | GradientEdge], Sequence[Tensor | None]]:
        """Return where a stage's backward starts, and the gradients there; None for a loss."""
        if key[0] == self.last_stage:
            return state.edges.pop(key), [None]
        return state.edges.pop(key), self._wait_for(state, Kind.RECV_B, state.gradients, key)

    def _take_input_gradient(self, state: _PassState, key: Key) -> None:
        stage, i = key
        if stage == 0:
            return
        inputs = state.inputs.pop(key)
        assert any(x.grad is not None for x in inputs), f"stage {stage} ignores its input"
        # A tensor may be of use to an earlier stage only, such as an encoder's output.
        due = tuple(torch.zeros_like(x) if x.grad is None else x.grad for x in inputs)
        if self.layout.ranks[stage - 1] == self.rank:
            state.gradients[stage - 1, i] = due
        else:
            state.outputs[key] = due

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
        peer, tensors = self._peer(stage + 1), state.outputs.pop(key)
        known = (stage, _argument_shapes(state.micro_batches[i]))
        if self._expected is None and known not in self._shapes:
            header = _header(tensors)
            self._shapes[known] = _shapes_of(tensors)
            self._post(dist.isend, header, peer).wait()
        self._send(state, tensors, peer)

    def _receive_input(self, state: _PassState, key: Key) -> None:
        stage, i = key
        peer = self._peer(stage - 1)
        known = (stage - 1, _argument_shapes(state.micro_batches[i]))
        if self._expected is None and known not in self._shapes:
            length = 1 + _MOST_TENSORS * _FIELDS
            header = torch.zeros(length, dtype=torch.int64, device=self.device)
            self._post(dist.irecv, header, peer).wait()
            self._shapes[known] = _read_header(header)
        shapes = self._expected or self._shapes[known]
        self._receive(state, Kind.RECV_F, state.received, key, peer, shapes)

    def _send_gradient(self, state: _PassState, key: Key) -> None:
        self._send(state, state.outputs.pop(key), self._peer(key[0] - 1))

    def _receive_gradient(self, state: _PassState, key: Key) -> None:
        peer, shapes = self._peer(key[0] + 1), state.shapes.pop(key)
        self._receive(state, Kind.RECV_B, state.gradients, key, peer, shapes)

    def _peer(self, stage: int) -> int:
        return self.peers[self.layout.ranks[stage]]

    def _send(self, state: _PassState, tensors: Tensors, peer: int) -> None:
        # While a CUDA graph is recorded nothing is sent, and asking is an error.
        recorded = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        while not recorded and state.sending and state.sending[0][0].is_completed():
            state.sending.popleft()
        for tensor in tensors:
            tensor = tensor.contiguous()
            state.sending.append((self._post(dist.isend, tensor, peer), tensor))

    def _receive(
        self,
        state: _PassState,
        kind: Kind,
        received: dict[Key, Tensors],
        key: Key,
        peer: int,
        shapes: Shapes,
    ) -> None:
        received[key] = tuple(
            torch.empty(shape, dtype=dtype, device=self.device) for shape, dtype in shapes
        )
        state.pending[kind, key] = [self._post(dist.irecv, x, peer) for x in received[key]]

    def _post(self, operation: Callable, tensor: Tensor, peer: int) -> dist.Work:
        # As a batch of one: for a plain isend, NCCL would create a communicator per pair, or warn.
        (work,) = dist.batch_isend_irecv([dist.P2POp(operation, tensor, peer, self.group)])
        return work

    def _wait_for(
        self, state: _PassState, kind: Kind, received: dict[Key, Tensors], key: Key
    ) -> Tensors:
        for work in state.pending.pop((kind, key), []):  # none: from a stage on this rank
            work.wait()
        return received.pop(key)


def _key(action: Action) -> Key:
    return action.stage, -1 if action.micro_batch is None else action.micro_batch


def _floats(tensors: Tensors) -> list[Tensor]:
    """Return the tensors that have a gradient."""
    return [tensor for tensor in tensors if tensor.is_floating_point()]


def _shapes_of(tensors: Sequence[Tensor]) -> Shapes:
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


def _argument_shapes(micro_batch: MicroBatch) -> tuple[torch.Size, ...]:
    """Return the shapes of the model's tensor arguments, which those between stages follow."""
    x, others = micro_batch
    return (x.shape, *(value.shape for value in others.values() if isinstance(value, Tensor)))


def _header(tensors: Tensors) -> Tensor:
    """Return the number of tensors, and dtype and shape of each: int64, of a fixed length."""
    if len(tensors) > _MOST_TENSORS or not _floats(tensors):
        raise ConfigError(
            f"a stage returns {len(tensors)} tensors, {len(_floats(tensors))} of them with a float "
            f"dtype; between stages, use 1 to {_MOST_TENSORS}, and at least one with a float dtype"
        )
    numbers = [len(tensors)]
    for tensor in tensors:
        if tensor.dtype not in _DTYPES or tensor.dim() > _FIELDS - 2:
            raise ConfigError(
                f"a stage returns a tensor of {tensor.dim()} dimensions and {tensor.dtype}; "
                f"between stages, use at most {_FIELDS - 2} dimensions and one of "
                f"{', '.join(map(str, _DTYPES))}"
            )
        numbers += [_DTYPES.index(tensor.dtype), tensor.dim(), *tensor.shape]
        numbers += [0] * (_FIELDS - 2 - tensor.dim())
    numbers += [0] * (1 + _MOST_TENSORS * _FIELDS - len(numbers))
    return torch.tensor(numbers, dtype=torch.int64, device=tensors[0].device)


def _read_header(header: Tensor) -> Shapes:
    n, *numbers = header.tolist()
    rows = [numbers[i * _FIELDS : (i + 1) * _FIELDS] for i in range(n)]
    return [(torch.Size(sizes[:dims]), _DTYPES[dtype]) for dtype, dims, *sizes in rows]
