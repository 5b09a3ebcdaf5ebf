"""Trace one step of one rank with the real code, without its memory and without other ranks.

`dtron.training.build` and the passes build the model on the meta device, under a fake process group
of the real world size. `TrainStep` runs the step on fake tensors. A dispatch mode sees every
operator. It counts collectives, and the bytes of storages from their allocation to their release.

Differences from a step on GPUs:

    attention       one operator with the results of a fused kernel; its inside is not traced
    RMSNorm         one operator, likewise
    compiled code   runs eagerly
    experts         get even loads, since fake counts cannot be read
    documents       each sequence is one document
"""

import contextlib
import functools
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtron.config import DEGREES, RunConfig
from dtron.data import Batch
from dtron.kernels.torch_internals import FakeTensor, FakeTensorMode, unset_fake_temporarily
from dtron.models.attention import Backend, Mask
from dtron.models.flops import images_that_fit
from dtron.models.layers import RMSNorm
from dtron.models.vision import CHANNELS
from dtron.parallelisms.context.attention import (
    run_context_attention,
    run_context_attention_backward,
)
from dtron.parallelisms.expert.all_to_all import AllToAll
from dtron.parallelisms.fsdp.sharding import DTYPES
from dtron.parallelisms.fsdp.torch_internals import gathered_buffers, parameter_groups
from dtron.parallelisms.gradients import local_part
from dtron.parallelisms.initialize import materialize
from dtron.parallelisms.mesh import MICRO_AXES, TOKEN_AXES
from dtron.parallelisms.pipeline.executor import Pipeline
from dtron.parallelisms.pipeline.split_backward import (
    run_grouped_input_gradient,
    run_linear_input_gradient,
)
from dtron.parallelisms.placement import leaves, sent_tensors
from dtron.run.collective_counter import CollectiveCounter, namespace_and_name
from dtron.setup.preflight import ModelSetup
from dtron.setup.rules import resolve
from dtron.training.batches import shard_batch
from dtron.training.build import BuiltRun, ModelBuilder, build_mesh, build_run

CPU = torch.device("cpu")
CLASSES = ("parameters", "optimizer", "gathered", "buffers", "forward", "backward", "update")
"""Classes of live bytes: weight shards; moments; gathered weights; FSDP's buffers; tensors made by
the forward; by the backward, with gradients and recomputed tensors; by norm and update."""

Table = dict[str, dict[str, dict[str, int]]]


@dataclass(frozen=True)
class RankTrace:
    """Memory and collectives of one rank's step; bytes."""

    rank: int
    """Global rank."""
    place: Mapping[str, int]
    """The rank's index on every axis of the mesh."""
    parameters: int
    gradients: int
    """Allocated bytes when the last backward is complete."""
    optimizer: int
    """Allocated bytes of moments."""
    peak: int
    at_peak: Mapping[str, int]
    """Bytes by CLASSES, at the peak."""
    collectives: Table
    """Result of `CollectiveCounter.table`."""
    seconds: float
    """Duration of the trace."""


def trace(config: RunConfig, world_size: int, rank: int) -> RankTrace:
    """Trace a training step of one rank, with fake tensors and a fake process group.

    Args:
        config: result of `exact.traceable`; `exact.refusals` must return an empty list for it.
    """
    start = time.perf_counter()
    with _fake_group(world_size, rank), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        built = _BuiltRank.of(config, world_size)
        with built.fake:
            found = built.trace()
    return replace(found, rank=rank, seconds=time.perf_counter() - start)


@contextlib.contextmanager
def _fake_group(world_size: int, rank: int) -> Iterator[None]:
    dist.init_process_group("fake", rank=rank, world_size=world_size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float, causal: bool = True
) -> Tensor:
    return torch.ops.dtron.attention(q, k, v, None, None, "flash", scale, 0, 0.0, causal)[0]


def _no_mask(documents: Any, positions: Tensor, causal: bool = True) -> Mask:
    return None


FUSED = Backend("traced", _attend, lambda need: None, _no_mask, narrow_values=True, kernel="math")
"""Attention as one operator: the trace sees only its inputs and outputs."""


class Balanced(AllToAll):
    """All-to-all dispatch with even loads."""

    def read(self, sizes: Tensor, _n_rows: int) -> list[list[int]]:
        """Return the rows to send to and to receive from each rank, for even loads.

        `AllToAll` reads these numbers from `sizes`.
        """
        each, more = divmod(_n_rows, self.ep)
        counts = [each + (i < more) for i in range(self.ep) for _ in range(self.etp)]
        received = [counts[self.etp * (self.group.rank() // self.etp)]] * (self.ep * self.etp)
        return [counts, received]


@dataclass(frozen=True)
class _BuiltRank:
    """A rank of a run, built and ready for a step."""

    config: RunConfig
    builder: ModelBuilder
    run: BuiltRun
    batches: list[Batch]
    fake: FakeTensorMode

    @classmethod
    def of(cls, config: RunConfig, world_size: int) -> "_BuiltRank":
        """Build a rank: its meshes, sharded model, optimizer and batches.

        Parallelisms are applied on the meta device. Weights, and all tensors that a step creates,
        are fake tensors.
        """
        model, layout, _ = resolve(config, world_size)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        mesh = build_mesh(config, world_size, "cpu")
        attention = replace(FUSED, narrow_values=config.parallel.cp == 1)
        setup = ModelSetup(model, attention, layout, None)
        builder = ModelBuilder(config, setup, mesh)

        def give_storage(part: nn.Module) -> None:
            with fake:
                materialize(part, CPU)

        passes = replace(builder.passes(), init=give_storage)
        if passes.experts is not None:
            passes = replace(passes, experts=replace(passes.experts, dispatcher=Balanced))
        parallel_model = builder.build(passes)
        _fuse_norms(parallel_model.applied.parts.values())
        if model.n_experts:
            for axes in (TOKEN_AXES, MICRO_AXES):
                mesh.group(*axes)  # not under fake tensors, with which no mesh can be created
        n = config.micro_batches(world_size)
        batches = [_batch(config, builder) for _ in range(n)]
        with fake:
            run = build_run(config, setup, parallel_model)
        return cls(config, builder, run, batches, fake)

    def trace(self) -> RankTrace:
        """Trace the second step.

        By then moments exist, and DTensor has cached the sharding of its operators; to derive a
        sharding, it makes tensors of full size.
        """
        mesh, applied = self.run.model.mesh, self.run.model.applied
        parameters = list(dict(applied.named_parameters()).values())
        if isinstance(self.run.model.execution, Pipeline):
            self._expect_shapes(self.run.model.execution)
        names, parts = mesh.group_names(), applied.parts.values()
        few = self.batches[: 2 * mesh.size("pp")]  # enough for any schedule
        with _UsageTracker(names, parts):
            self.run.step(few, 0, self.config.optim.lr)
        moments = [v for s in self.run.optimizer.state.values() for v in s.values()]
        moments = [local_part(v) for v in moments if isinstance(v, DTensor)]
        watch = _UsageTracker(names, parts)
        watch.begin({"parameters": [local_part(p) for p in parameters], "optimizer": moments})
        gradients = 0

        def compute(accumulate: Callable[[], Tensor]) -> Tensor:
            nonlocal gradients
            loss = accumulate()
            gradients = sum(local_part(p.grad).nbytes for p in parameters if p.grad is not None)
            watch.updates = True
            return loss

        with watch:
            self.run.step(self.batches, 1, self.config.optim.lr, compute)
        return RankTrace(
            rank=-1,
            place={axis: mesh.rank(axis) for axis in DEGREES},
            parameters=sum(local_part(p).nbytes for p in parameters),
            gradients=gradients,
            optimizer=sum(moment.nbytes for moment in moments),
            peak=watch.peak,
            at_peak=watch.at_peak,
            collectives=watch.table(),
            seconds=0.0,
        )

    def _expect_shapes(self, pipeline: Pipeline) -> None:
        """Set the shape of stage outputs, and check it in the trace.

        Outside of the trace, pipeline ranks receive this shape.
        """
        train, mesh = self.config.train, self.run.model.mesh
        tokens = self.batches[0].tokens.shape
        between = mesh.size("tp") if self.config.parallel.sequence_parallel else 1
        shape = torch.Size([tokens[0], tokens[1] // between, self.run.setup.config.dim])
        pipeline.expect(shape, DTYPES[train.dtype])

        def check(_module: nn.Module, _inputs: Any, out: Any) -> None:
            (given,) = sent_tensors(out)
            assert (given.shape, given.dtype) == (shape, DTYPES[train.dtype]), given

        for stage, part in pipeline.parts.items():
            if stage < pipeline.last_stage:
                part.register_forward_hook(check)


def _batch(config: RunConfig, builder: ModelBuilder) -> Batch:
    """Make a micro-batch of this rank with one document per sequence and no padding.

    If routers take a padding mask, it has one. It has as many images as fit.
    """
    shape = (config.train.micro_batch, config.train.seq_len)
    tokens = torch.zeros(shape, dtype=torch.int64)
    model = builder.setup.config
    padded = model.n_experts and config.data.packing != "cut"
    pieces = tokens.int() if padded else None
    batch = Batch(tokens, tokens, tokens[:, 0], None, None, pieces=pieces)
    if model.vision_layers:
        n, size = images_that_fit(model, shape[1]) * shape[0], model.vision_image_size
        images = torch.zeros((n, CHANNELS, size, size), dtype=torch.uint8)
        batch = replace(batch, images=images, image_index=tokens.unsqueeze(-1).repeat(1, 1, 2))
    local = shard_batch(batch, builder.mesh, builder.context, model.mtp)
    return local if model.n_experts else replace(local, order=None)


def _run_inside(body: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the body of an operator so that it runs on fake tensors, visible to the trace."""

    @functools.wraps(body)
    def run(*args: Any) -> Any:
        return body(*(_readable(arg) for arg in args))

    return run


def _readable(arg: Any) -> Any:
    """Replace an argument by a value that code can read while tensors are fake.

    The name `math` of an attention kernel becomes that of a fused kernel; a real scalar tensor
    becomes its number.
    """
    if isinstance(arg, Tensor):
        real = not isinstance(arg, FakeTensor) and arg.dim() == 0
        with unset_fake_temporarily():
            return arg.item() if real else arg
    return "flash" if isinstance(arg, str) and arg == "math" else arg


OPENED = {
    torch.ops.dtron.context_attention.default: _run_inside(run_context_attention),
    torch.ops.dtron.context_attention_backward.default: _run_inside(run_context_attention_backward),
    torch.ops.dtron.grouped_input_gradient.default: _run_inside(run_grouped_input_gradient),
    torch.ops.dtron.linear_input_gradient.default: _run_inside(run_linear_input_gradient),
}
"""Operators whose bodies are traced too: they issue collectives or defer gradients."""


def _fuse_norms(parts: Iterable[nn.Module]) -> None:
    """Make each RMSNorm one operator, as on GPUs; on a CPU torch decomposes it."""
    for module in (m for part in parts for m in part.modules() if isinstance(m, RMSNorm)):
        module.forward = functools.partial(_normed, module)  # type: ignore[method-assign]


def _normed(module: RMSNorm, x: Tensor) -> Tensor:
    if not module.zero_centered:
        return _Norm.apply(x, module.weight)  # type: ignore[return-value]
    wide = torch.promote_types(x.dtype, torch.float32)
    return _Norm.apply(x.to(wide), 1 + module.weight.to(wide)).to(x.dtype)  # type: ignore[union-attr]


class _Norm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        roots = x.new_empty((*x.shape[:-1], 1), dtype=torch.promote_types(x.dtype, torch.float32))
        ctx.save_for_backward(x, weight, roots)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        x, weight, _ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight)


class _UsageTracker(CollectiveCounter):
    """Dispatch mode that counts collectives and live bytes.

    FSDP frees gathered weights by a resize, which is not an operator. Their sizes are read at each
    operator of FSDP, and before a peak is recorded.
    """

    def __init__(self, axis_of_group: dict[str, str], parts: Iterable[nn.Module]) -> None:
        super().__init__(axis_of_group)
        self.groups = [group for part in parts for group in parameter_groups(part)]
        self.updates = self.in_backward = False
        self.peak = 0
        self.at_peak: dict[str, int] = {}
        self._entered = 0
        """Nesting depth: 1 outside of operators, 1 more inside each of OPENED."""
        self._live: dict[int, tuple[weakref.ref, int, str]] = {}
        self._bytes: Counter[str] = Counter()
        self._total = self._gathered = 0

    def __enter__(self) -> "_UsageTracker":
        if not self._entered:
            self._plain_backward = torch.autograd.backward
            torch.autograd.backward = self._backward
        self._entered += 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._entered -= 1
        if not self._entered:
            torch.autograd.backward = self._plain_backward

    def _backward(self, *args: Any, **kwargs: Any) -> None:
        """Replace torch.autograd.backward, which Tensor.backward also calls.

        All that runs inside, including recomputation, counts as backward.
        """
        self.in_backward = True
        try:
            self._plain_backward(*args, **kwargs)
        finally:
            self.in_backward = False

    def begin(self, held: Mapping[str, Iterable[Tensor]]) -> None:
        """Count the tensors that exist before the step. `held`: tensors by memory class."""
        for name, tensors in held.items():
            for tensor in tensors:
                self._add(tensor, name)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a DTensor: its inner operators are traced
        if func in OPENED:
            with self:
                return OPENED[func](*args, **(kwargs or {}))
        result = super().__torch_dispatch__(func, types, args, kwargs)
        space, _ = namespace_and_name(func)
        for tensor in leaves(result):
            if isinstance(tensor, Tensor):
                self._add(tensor, self._class(space))
        if space == "fsdp":
            self._look_at_gathered()
        if self._total + self._gathered > self.peak:
            self._look_at_gathered()
            self._reach()
        return result

    def _class(self, space: str) -> str:
        if self.updates:
            return "update"
        if space == "fsdp":
            return "buffers"
        return "backward" if self.in_backward else "forward"

    def _add(self, tensor: Tensor, name: str) -> None:
        storage = tensor.untyped_storage()
        key = id(storage)  # the same object as long as any tensor uses it
        if key in self._live:
            return
        size = storage.nbytes()
        self._live[key] = (weakref.ref(storage, lambda _: self._drop(key)), size, name)
        self._bytes[name] += size
        self._total += size

    def _drop(self, key: int) -> None:
        _, size, name = self._live.pop(key, (None, 0, ""))
        self._bytes[name] -= size
        self._total -= size

    def _look_at_gathered(self) -> None:
        self._gathered = 0
        for tensor in gathered_buffers(self.groups):
            storage = tensor.untyped_storage()
            if id(storage) in self._live:
                self._forget(id(storage))
            self._gathered += storage.nbytes()

    def _forget(self, key: int) -> None:
        """Stop counting a storage in its first class, since it now counts as a gathered weight."""
        reference, size, name = self._live[key]
        self._live[key] = (reference, 0, name)
        self._bytes[name] -= size
        self._total -= size

    def _reach(self) -> None:
        if self._total + self._gathered > self.peak:
            self.peak = self._total + self._gathered
            self.at_peak = {n: self._bytes[n] for n in CLASSES} | {"gathered": self._gathered}
