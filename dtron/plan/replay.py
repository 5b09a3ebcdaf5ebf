"""Replay the allocations of a rank's steps on the computation stream, in the order of a run.

    forward    FSDP copies a unit's weights out of the all-gather buffer, one unit at a time. It
               copies weights twice if they are sharded on another dim than dim 0. Weights that are
               not sharded are cast, then copied. The block allocates two temporaries as large as
               its largest tensor, and the tensors that it keeps. A compiled block with full
               recomputation allocates all that its backward recomputes, and frees it at the end
    loss       logits, then also their gradient
    backward   weights are gathered again, if they were freed. The block allocates recomputed
               tensors, three temporaries as large as its largest tensor, and gradients of the
               weights and of the input. Then the weights and the previous unit's send buffer are
               freed, and this unit's send buffer is allocated. It is freed at the next reduction,
               or at the end of the step. Separate experts are reduced before the rest of their
               block. Gradients that are not reduced are cast to float32 and kept until the update
    split      with deferred weight gradients, the backward (I) computes no gradients of weights.
               It keeps inputs of matmuls and gradients of their results until the weight backward
               (W), and frees other kept tensors. W computes the unsharded gradients of all units in
               the dtype of computation, then adds them to sums, which are reduced unit by unit
               after the stage's last W
    offloaded  a block's kept tensors are freed when the next block is done, and loaded while the
               next block is in backward, as in `dtron.parallelisms.offload`
    update     the first step allocates moments from blocks that activations left free. Activations
               of the second step do not find these blocks, and more memory is reserved. Moments
               in host memory are on the device a few buckets at a time

    graph      with a CUDA graph the third step is in a separate pool (`reserved`)

Three steps are enough: later steps reserve no more. All-gathers and gradient sums are on other
streams (`dtron.plan.memory`). Sources: `foreach_reduce` and `FSDPParamGroup` of
torch.distributed.fsdp._fully_shard, torch 2.11; `dtron.plan.allocator` for the rules.
"""

import functools
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from dtron.config.schema import GRAPH_WARM_UP
from dtron.parallelisms.expert.dispatchers import in_graphs
from dtron.parallelisms.offload import SMALLEST
from dtron.parallelisms.pipeline.executor import Layout
from dtron.parallelisms.pipeline.lowering import add_reductions
from dtron.parallelisms.pipeline.schedule_ops import Kind
from dtron.plan import activations
from dtron.plan.allocator import Block, Expandable, HolelessPool, PeakPool, Pool
from dtron.plan.offloaded_states import bytes_of_buckets, trained_shards
from dtron.plan.parameters import NOT_LAYERS, PartKind, sizes, split_by_unit, units
from dtron.plan.run_shape import Resolved, Stage

CLASSES = (
    "parameters",
    "optimizer",
    "gathered",
    "gradients",
    "reduction",
    "activations",
    "working",
    "logits",
)
STEPS = 3
MICRO_BATCHES = 3
"""Number of replayed micro-batches without a pipeline; more would repeat the second."""


@dataclass
class _ParameterGroup:
    """Parameters of a unit that FSDP gathers and reduces together; sizes in bytes."""

    blocks: list[list[int]]
    """Size of each trained parameter's unsharded gradient, in the dtype of computation, by block of
    the unit; without those of `added`."""
    columns: list[bool]
    """Whether each of `weights` is sharded on another dim than dim 0, and so copied once more."""
    sent: int
    """Size of a reduction's send buffer."""
    shared: bool
    """Whether the parameters are sharded over several ranks."""
    alone: bool = False
    """Whether gradients are kept without a reduction (`Resolved.keeps_dense`)."""
    shard: int = 0
    """Size of the reduced gradients in float32, which are on another stream."""
    gathered: list[int] = field(default_factory=list)
    """Size of each gathered parameter, also of frozen ones; empty: as `weights`."""
    gathered_columns: list[bool] = field(default_factory=list)
    """As `columns`, of each of `gathered`; empty: as `columns`."""
    out: list[Block] = field(default_factory=list)
    """Gathered weights that are allocated."""
    summed: list[Block] = field(default_factory=list)
    """Gradients summed over micro-batches, in the dtype of reductions."""
    added: list[int] = field(default_factory=list)
    """Sizes of the sums to which matmuls add weight gradients, in the dtype of reductions."""
    added_sums: list[Block] = field(default_factory=list)
    """The sums of `added` that are allocated."""
    given: list[Block] = field(default_factory=list)
    """Summed gradients that are not reduced, for the optimizer; only with split backwards."""
    made: list[Block] = field(default_factory=list)
    """Gradients of the blocks whose backward has run, while that of another block is due."""

    @property
    def weights(self) -> list[int]:
        """`blocks`, one after the other."""
        return [size for block in self.blocks for size in block]

    def __add__(self, other: "_ParameterGroup") -> "_ParameterGroup":
        """Return the group of this group's blocks and another one's."""
        names = ("blocks", "columns", "sent", "shard", "gathered", "gathered_columns", "added")
        return replace(self, **{name: getattr(self, name) + getattr(other, name) for name in names})


@dataclass
class _UnitMemory:
    """Tensors of a block, the embedding or the head, in bytes per micro-batch."""

    groups: list[_ParameterGroup]
    """The dense part, and experts on a separate mesh; blocks of one FSDP unit have the same."""
    shards: list[int]
    """Bytes of each parameter's shard."""
    kept: list[int]
    """Tensors kept on the device for the backward."""
    moved: list[int]
    """Kept tensors that are offloaded."""
    again: list[int]
    """Tensors that the backward recomputes."""
    widest: int
    """Size of the largest tensor; 0 for embedding and head."""
    passing: list[int]
    """Temporaries of the forward."""
    stays: bool
    """Whether weights stay gathered between forward and backward."""
    defers_weights: bool = False
    """Whether weight gradients are deferred."""
    read: list[int] = field(default_factory=list)
    """Kept inputs of matmuls that stay until the deferred weight gradients are computed."""
    read_again: list[int] = field(default_factory=list)
    """Inputs of matmuls that the backward recomputes, or loads from host memory."""
    queued: list[int] = field(default_factory=list)
    """Tensors that only deferred weight gradients need: gradients of matmul results and, in
    float8, also inputs."""
    moments: list[int] = field(default_factory=list)
    """Bytes of each moment."""
    place: int = 0
    """Index of the block in its FSDP unit."""

    def groups_at(self, end: Literal["first", "last"]) -> list[_ParameterGroup]:
        """Return the groups of which this is the first or the last block in the forward."""
        return [
            group
            for group in self.groups
            if len(group.blocks) == 1
            or self.place == (0 if end == "first" else len(group.blocks) - 1)
        ]

    def weights_of(self, group: _ParameterGroup) -> list[int]:
        """Return the part of `group.weights` that this block has."""
        return group.blocks[self.place if len(group.blocks) > 1 else 0]

    def join(self) -> None:
        """Merge tensors that are allocated and freed together.

        Weights are merged too, unless they are cast or copied one by one.
        """
        for name in ("shards", "moments", "kept", "moved", "again", "read", "read_again", "queued"):
            sizes = getattr(self, name)
            setattr(self, name, [sum(sizes)] if sizes else [])
        for group in self.groups:
            if group.shared and not any((*group.columns, *group.gathered_columns)):
                gathered = sum(group.gathered or group.weights)
                totals = map(sum, group.blocks)
                group.blocks = [[total] if total else [] for total in totals]
                group.columns = [False] * len(group.weights)
                group.added = [sum(group.added)] if group.added else []
                group.gathered, group.gathered_columns = [gathered], [False]


@dataclass(eq=False)
class _SavedByCall:
    """Tensors that a unit keeps for the backward of one micro-batch."""

    kept: list[Block]
    moved: list[int]
    """Sizes of offloaded tensors."""
    read: list[Block] = field(default_factory=list)
    """Inputs of matmuls with deferred weight gradients, on the device."""
    there: list[Block] = field(default_factory=list)
    """Offloaded tensors while they are on the device."""


def reserved(run: Resolved, rank: int, pool: type[Pool | Expandable] = Pool) -> int:
    """Return the bytes that the allocator `pool` reserves for a rank's computation stream.

    A CUDA graph is recorded in a separate pool, after free memory is returned; offloaded moments,
    validation and sample text then need memory outside of it. Two micro-batches at once have a
    pool each.
    """
    graphs, usual = run.config.compile.cuda_graphs == "step", pool()
    replay = _Replay(run, rank, usual)
    replay.take_weights()
    for step in range(GRAPH_WARM_UP if graphs else STEPS):
        replay.step()
        if step == 0:
            replay.take_moments()
        replay.update_offloaded()
        replay.drop_gradients()
    if not graphs:
        return usual.reserved + _second_lane(replay, pool)
    found = usual.reserved - usual.unused
    for parts in ((replay.step,), (replay.update_offloaded, replay.evaluate)):
        replay.pool = pool()
        for part in parts:
            part()
        found += replay.pool.reserved
    return found


def least(run: Resolved, rank: int) -> int:
    """Return a lower bound of `reserved`: the largest number of bytes allocated at once.

    It ignores fragmentation and is about twenty times as fast as `reserved`.
    """
    pool = HolelessPool()
    replay = _Replay(run, rank, pool)
    _replay_joined(replay)
    return pool.reserved + _second_lane(replay, HolelessPool)


def at_peak(run: Resolved, rank: int) -> dict[str, int]:
    """Return the bytes of each memory class at the peak of a step.

    All streams are counted except those of all-gathers.
    """
    pool = PeakPool()
    _replay_joined(_Replay(run, rank, pool, for_peak=True))
    return {name: pool.at_peak.get(name, 0) for name in CLASSES}


def _second_lane(replay: "_Replay", pool: type[Pool | Expandable | HolelessPool]) -> int:
    """Return the bytes that the second of two micro-batches at once reserves in its pool.

    0 without `parallel.overlap_micro_batches`. Weights are gathered and sums exist by then.
    """
    found = 0
    for stage in replay.stages if replay.run.config.parallel.overlap_micro_batches else ():
        for micro_batch in range(2):
            replay.pool = pool()
            replay._forward(stage, micro_batch)
            replay._backward(stage, micro_batch, last=False)
        found = max(found, replay.pool.reserved)
    return found


def _replay_joined(replay: "_Replay") -> None:
    """Replay a step with existing moments.

    Tensors are joined first (`_UnitMemory.join`), which makes this faster.
    """
    for unit in (unit for listed in replay.stages.values() for unit in listed):
        unit.join()
    replay.take_weights()
    replay.take_moments()
    replay.step()
    replay.update_offloaded()


class _Replay:
    """Allocates and frees a pipeline rank's tensors in the order of a training step.

    Args:
        for_peak: also replay gradient shards, which are on another stream, and free logits once
            their gradient exists.
    """

    def __init__(
        self,
        run: Resolved,
        rank: int,
        pool: Pool | Expandable | HolelessPool,
        for_peak: bool = False,
    ) -> None:
        self.run, self.rank, self.pool, self.for_peak = run, rank, pool, for_peak
        self.stages = {s.index: _listed(run, s) for s in run.stages_of(rank)}
        self.hidden = int(activations.boundary(run))
        self.logits = activations.loss_tensors(run)
        self.flying: dict[tuple[int, int], list[_SavedByCall]] = {}
        self.deferred: dict[tuple[int, int], list[list[Block]]] = {}
        """Tensors for deferred weight gradients, per unit, by (stage, micro-batch)."""
        self.offloads = run.config.recompute.offload
        self.latest: _SavedByCall | None = None
        """Tensors of the block that ran last, unless its backward has begun."""
        self.pending: Block | None = None
        self.sums, self.keep = not run.policy.reduce_each_micro_batch, run.policy.keep_gathered

    def take_weights(self) -> None:
        for shard in self._shards():
            self.pool.take(shard, "parameters")

    def take_moments(self) -> None:
        for unit in (unit for listed in self.stages.values() for unit in listed):
            self._take(unit.moments, "optimizer")

    def update_offloaded(self) -> None:
        """Copy moments of host memory to the device and back."""
        size = int(bytes_of_buckets(self.run, self.rank))
        self._free(self._take([size] if size else [], "working"))

    def _shards(self) -> list[int]:
        return [n for listed in self.stages.values() for unit in listed for n in unit.shards]

    def step(self) -> None:
        acts = list(_actions(self.run, self.rank))
        due = Counter(stage for kind, stage, _ in acts if kind in (Kind.BACKWARD, Kind.WEIGHT))
        for kind, stage, micro_batch in acts:
            due[stage] -= kind in (Kind.BACKWARD, Kind.WEIGHT)
            if kind is Kind.FORWARD:
                self._forward(stage, micro_batch)
            elif kind in (Kind.BACKWARD, Kind.INPUT):
                self._backward(
                    stage, micro_batch, not due[stage], defers_weights=kind is Kind.INPUT
                )
            elif kind is Kind.WEIGHT:
                self._weight(stage, micro_batch)
            else:
                self._reduce_stage(stage, last=not due[stage])
        self._free([self.pending] if self.pending else [])
        self.pending = None

    def evaluate(self) -> None:
        """Replay the forward of a validation or a sample, which keeps nothing for a backward."""
        if not self.run.config.train.evaluates:
            return
        for stage, listed in self.stages.items():
            for unit in listed:
                self._gather(unit)
                self._free(self._take([*unit.passing, self.hidden, self.hidden], "working"))
                for group in () if self.keep else unit.groups_at("last"):
                    self._reshard(group)
            if self.run.stages[stage].head:
                self._free(self._take(self.logits[:1], "logits"))

    def drop_gradients(self) -> None:
        """Free gradients that were not reduced, after an update."""
        for group in (g for listed in self.stages.values() for unit in listed for g in unit.groups):
            self._free([*group.summed, *group.given, *group.added_sums])
            group.summed, group.given, group.added_sums = [], [], []

    def _forward(self, stage: int, micro_batch: int) -> None:
        listed = self.stages[stage]
        calls = self.flying[stage, micro_batch] = []
        for unit in listed:
            self._gather(unit)
            working = self._take(unit.passing, "working")
            read, kept, there = (
                self._take(sizes, "activations") for sizes in (unit.read, unit.kept, unit.moved)
            )
            calls.append(_SavedByCall(kept, unit.moved, read, there))
            self._free(working)
            if self.offloads and unit.widest:  # a block
                self._unload(calls[-1])
            for group in () if unit.stays or self.keep else unit.groups_at("last"):
                if group.shared:  # unsharded weights stay until the backward
                    self._reshard(group)

    def _backward(
        self, stage: int, micro_batch: int, last: bool, defers_weights: bool = False
    ) -> None:
        """Replay a backward (B) or, with `defers_weights`, an input backward (I).

        An input backward defers the weight gradients of units that allow it.
        """
        listed, calls = self.stages[stage], self.flying.pop((stage, micro_batch))
        head = self.run.stages[stage].head
        logits = self._take(self.logits, "logits") if head else []
        if head and self.for_peak and self.run.config.train.loss_chunks == 1:
            self._free(logits)
            logits = self._take([activations.logits_gradient(self.run)], "logits")
        gradient = self._take([self.hidden], "working")
        waiting: list[list[Block]] = []
        split = _is_split(self.run, stage)
        for unit in reversed(listed):
            call = calls.pop()
            self._gather(unit)
            if call.moved:
                self._load(call, stage, calls)
            separate = defers_weights and unit.defers_weights
            read = [*call.read, *self._take(unit.read_again, "working")]
            working = self._take([*unit.again, *[unit.widest] * 3], "working")
            made = [] if separate else self._make_gradients(unit)
            inward = self._take([self.hidden], "working")
            gone = (logits, working, call.kept, call.there, gradient)
            for blocks in gone if separate else (*gone, read):
                self._free(blocks)
            gradient, logits = inward, []
            if separate:
                waiting.append(read + self._take(unit.queued, "activations"))
            elif due := self._due(unit, made):
                if split:
                    for group, blocks in reversed(due):
                        self._fold(group, blocks)
                else:
                    self._reduce(due, last)
            for group in unit.groups_at("first") if split and not self.keep else ():
                self._reshard(group)
        self._free(gradient)
        if defers_weights:
            self.deferred[stage, micro_batch] = waiting

    def _weight(self, stage: int, micro_batch: int) -> None:
        """Replay deferred weight gradients (W).

        Free each unit's operands after use; at the end, add all gradients to sums.
        """
        units = [unit for unit in reversed(self.stages[stage]) if unit.defers_weights]
        made: list[tuple[_ParameterGroup, list[Block]]] = []
        for unit, blocks in zip(units, self.deferred.pop((stage, micro_batch)), strict=True):
            made += self._due(unit, self._make_gradients(unit))
            self._free(blocks)
        for group, blocks in reversed(made):
            self._fold(group, blocks)

    def _due(
        self, unit: _UnitMemory, made: list[list[Block]]
    ) -> list[tuple[_ParameterGroup, list[Block]]]:
        """Return (group, gradients) of the groups of which the backward has passed all blocks."""
        for group, blocks in zip(unit.groups, made, strict=True):
            group.made = blocks + group.made  # backwards begin with the last block
        due = [(group, group.made) for group in unit.groups_at("first")]
        for group, _ in due:
            group.made = []
        return due

    def _fold(self, group: _ParameterGroup, made: list[Block]) -> None:
        """Add gradients to sums, one after the other.

        `accumulate_gradients` of `dtron.parallelisms.fsdp.torch_internals` does the same.
        """
        if group.summed:
            self._free(made)
            return
        for size, block in zip(group.weights, made, strict=True):
            wide = _wide(self.run, size)
            group.summed += self._take([wide], "gradients") if wide > size else [block]
            self._free([block] if wide > size else [])

    def _reduce_stage(self, stage: int, last: bool) -> None:
        """Reduce a stage's sums of gradients.

        `reduce_gradients` of `dtron.parallelisms.fsdp.torch_internals` does the same.
        """
        for unit in reversed(self.stages[stage]):
            for group in reversed(unit.groups_at("first")):
                if not group.alone:
                    self._send(group, [], last)
                    continue
                if last or not self.keep:
                    self._reshard(group)
                summed = group.summed + group.added_sums
                if group.given:
                    self._free(summed)
                else:
                    group.given = summed
                group.summed, group.added_sums = [], []

    def _unload(self, call: _SavedByCall) -> None:
        """Free the tensors that the previous block has copied to the host."""
        if self.latest is not None:
            self._free(self.latest.there)
            self.latest.there = []
        if call.moved:
            self.latest = call

    def _load(self, call: _SavedByCall, stage: int, before: list[_SavedByCall]) -> None:
        """Load the offloaded tensors of a block, and prefetch those of the next block.

        The next block in backward order is the previous block, or the last block of the stage's
        next micro-batch.
        """
        if self.latest is call:
            self.latest = None
        waiting = [calls for (s, _), calls in self.flying.items() if s == stage]
        coming = next((c for calls in (before, *waiting) for c in reversed(calls) if c.moved), None)
        for each in (call, coming):
            if each is not None and not each.there:
                each.there = self._take(each.moved, "activations")

    def _reduce(self, due: list[tuple[_ParameterGroup, list[Block]]], last: bool) -> None:
        """Reduce or sum a unit's gradients: first those of separate experts, then the others."""
        for group, blocks in reversed(due):
            if group.alone:
                self._keep_group(group, blocks, last)
            elif last or not self.sums:
                self._send(group, blocks, last)
            else:
                if not group.summed:
                    wide = [_wide(self.run, size) for size in group.weights]
                    group.summed = self._take(wide, "gradients")
                self._free(blocks)

    def _keep_group(self, group: _ParameterGroup, made: list[Block], last: bool) -> None:
        """Keep gradients without a reduction.

        `bypass_reduction` of `dtron.parallelisms.fsdp.torch_internals` does the same.
        """
        if last or not self.keep:
            self._reshard(group)
        if group.summed and self.sums:  # added without a cast
            self._free(made)
            return
        cast = made
        if self.run.element < 4:
            cast = []
            for size, block in zip(group.weights, made, strict=True):  # one after the other
                cast += self._take([size // self.run.element * 4], "gradients")
                self._free([block])
        if group.summed:
            self._free(cast)
        else:
            group.summed = cast

    def _send(self, group: _ParameterGroup, made: list[Block], last: bool) -> None:
        """Reduce gradients, or their sums, over ranks."""
        n_bytes = group.weights
        if group.summed:
            self._free(made)
            made, group.summed = group.summed, []
            n_bytes = [_wide(self.run, size) for size in n_bytes]
        made, group.added_sums = made + group.added_sums, []
        if last or not self.keep:
            self._reshard(group)
        if self.pending is not None:
            self._free([self.pending])
        for place, turned in enumerate(group.columns):
            if turned:
                (copy,) = self._take([n_bytes[place]], "reduction")
                self._free([made[place]])
                made[place] = copy
        self.pending = self.pool.take(group.sent, "reduction") if group.sent else None
        self._free(made)
        if self.for_peak:
            self._take([group.shard], "gradients")
            group.shard = 0  # later sums are added to these

    def _gather(self, unit: _UnitMemory) -> None:
        for group in unit.groups:
            if group.out:
                continue
            passing: list[Block] = []
            sizes, columns = group.gathered or group.weights, group.gathered_columns
            for size, turned in zip(sizes, columns or group.columns, strict=True):
                if not group.shared:  # cast, then copied; a cast is freed after the next cast
                    before, passing = passing, self._take([size], "gathered")
                    self._free(before)
                group.out += self._take([size], "gathered")
                if turned:  # copied out as received, then concatenated
                    passing += self._take([size], "gathered")
            self._free(passing)

    def _reshard(self, group: _ParameterGroup) -> None:
        self._free(group.out)
        group.out = []

    def _make_gradients(self, unit: _UnitMemory) -> list[list[Block]]:
        made = []
        for group in unit.groups:
            group.added_sums = group.added_sums or self._take(group.added, "gradients")
            made.append(self._take(unit.weights_of(group), "gradients"))
        return made

    def _take(self, sizes: list[int], kind: str) -> list[Block]:
        return [self.pool.take(size, kind) for size in sizes if size]

    def _free(self, blocks: list[Block]) -> None:
        for block in blocks:
            self.pool.give(block)


def _actions(run: Resolved, rank: int) -> Iterator[tuple[Kind, int, int]]:
    """Yield the computations and separate reductions of a step: (kind, stage, micro-batch)."""
    if run.layout is None:
        for i in range(min(run.micro_batches, MICRO_BATCHES)):
            yield Kind.FORWARD, 0, i
            yield Kind.BACKWARD, 0, i
        return
    split = [stage.index for stage in run.stages if _is_split(run, stage.index)]
    each = run.policy.reduce_each_micro_batch
    for action in add_reductions(run.order, each, split)[rank]:
        yield action.kind, action.stage, -1 if action.micro_batch is None else action.micro_batch


def _is_split(run: Resolved, stage: int) -> bool:
    """Whether weight gradients of a stage, or only of its head, may be deferred.

    Gradients are then summed over micro-batches and reduced by a separate action.
    """
    layout = run.layout
    if layout is None:
        return False
    return layout.splits_backward or (bool(layout.head) and run.stages[stage].head)


def _wide(run: Resolved, size: int) -> int:
    return size // run.element * run.reduce_element


def _listed(run: Resolved, stage: Stage) -> list[_UnitMemory]:
    found, layers, blocks = [], iter(stage.layers), run.blocks(stage)
    every, trained = units(run, stage), iter(trained_shards(run, stage))
    for place, unit in enumerate(every):
        is_block = unit.kind not in ("embedding", "head")
        layer = None if unit.kind in NOT_LAYERS else next(layers)
        of, index = next(blocks) if is_block else (run, -1)
        kept, again, widest = _block(of, index) if is_block else ([], [], 0)
        if unit.kind == "encoder" and run.frozen:
            kept = again = []
        moved: list[int] = []
        if run.config.recompute.offload:
            # The pipeline executor holds the input of each stage but the first.
            held = stage.index > 0 and stage.layers[:1] == (index,)
            kept, moved = _offloaded(kept, held)
        if unit.kind == "head" or unit.name == "root":  # kept by the final norm
            kept = [int(activations.boundary(run))] * 2 if stage.head else []
        if unit.kind == "embedding" and run.encoder is not None and stage.embedding:
            kept = [*kept, activations.ends_of_encoder(run, run.encoder)]
        stays = unit.name == "root" or (run.layout is None and place == len(every) - 1)
        each_size = sizes(run, unit.kind, layer)
        optim = run.config.optim
        made = _UnitMemory(
            _groups(run, unit.kind, layer),
            [each.shard * (4 if each.trained else run.frozen_element) for each in each_size],
            kept,
            moved,
            again,
            widest,
            again if is_block and _makes_all(of, index) else [widest] * 2,
            stays,
            moments=[
                round(n.shard * size)
                for n, on_host in next(trained)
                for size in (optim.average_bytes() if on_host else optim.state_bytes(n.hidden))
            ],
        )
        if run.layout is not None and _defers_weights(run, run.layout, stage, unit.kind):
            _separate_held(made, *_held_until_weights(of, unit.kind, index))
        found.append(made)
    for blocks in split_by_unit(run, stage, found):
        _join_blocks(blocks)
    return found


def _join_blocks(blocks: Sequence[_UnitMemory]) -> None:
    """Give blocks of one FSDP unit one dense group; each keeps its group of separate experts."""
    dense = functools.reduce(operator.add, (block.groups[0] for block in blocks))
    for place, block in enumerate(blocks):
        block.groups[0], block.place, block.stays = dense, place, blocks[-1].stays


def _defers_weights(run: Resolved, layout: Layout, stage: Stage, kind: PartKind) -> bool:
    """Whether a unit's weight gradients are deferred.

    A chunked head computes them with the loss; embeddings have no matmul; frozen weights have no
    gradient, and the gradients of adapters are computed with those of the inputs.
    """
    if run.frozen:
        return False
    if kind == "head":
        return run.config.train.loss_chunks == 1 and _is_split(run, stage.index)
    return kind != "embedding" and layout.splits_backward


def _held_until_weights(run: Resolved, kind: PartKind, layer: int) -> tuple[list[int], list[int]]:
    """Return bytes (inputs, queued) that a unit holds for its deferred weight gradients.

    `activations.deferred` defines both.
    """
    if kind == "head":
        hidden, logits = int(activations.boundary(run)), activations.logits_gradient(run)
        if activations.queues_float8(run, None):
            return [], [logits // run.element, hidden // run.element]
        return [hidden], [logits]
    return activations.deferred(run, layer)


def _separate_held(unit: _UnitMemory, reads: list[int], gradients: list[int]) -> None:
    """Move the tensors that stay until W to `read`, `read_again` and `queued`.

    W is the computation of the unit's deferred weight gradients.
    """
    kept, again, wanted = (Counter(sizes) for sizes in (unit.kept, unit.again, reads))
    unit.defers_weights, unit.queued = True, gradients
    unit.read = list((wanted & kept).elements())
    unit.read_again = list((wanted - kept).elements())
    unit.kept = list((kept - wanted).elements())
    unit.again = list((again - Counter(unit.read_again)).elements())


def _groups(run: Resolved, kind: PartKind, layer: int | None) -> list[_ParameterGroup]:
    found = []
    for separate in (False, True):
        own = [each for each in sizes(run, kind, layer) if each.separate == separate]
        trained = [each for each in own if each.trained]
        whole = sum(each.gathered for each in trained)
        made = [each for each in trained if not each.added]
        weights = [run.element * each.gathered for each in made]
        ranks = run.experts["edp_shard"] if separate else run.shards
        copied = own if ranks > 1 else trained  # one rank uses frozen weights as they are stored
        gathered = [each.gathered * (1 if each.narrow else run.element) for each in copied]
        if own:
            found.append(
                _ParameterGroup(
                    [weights],
                    [each.columns for each in made],
                    sent=run.sent_element * whole,
                    shared=ranks > 1,
                    alone=run.keeps_experts if separate else run.keeps_dense,
                    shard=4 * sum(each.shard for each in trained),
                    gathered=gathered,
                    gathered_columns=[each.columns for each in copied],
                    added=[run.reduce_element * each.gathered for each in trained if each.added],
                )
            )
    return found


def _block(run: Resolved, layer: int) -> tuple[list[int], list[int], int]:
    """Return bytes of a layer's (kept tensors, recomputed tensors, largest tensor)."""
    kept, whole = (Counter(activations.tensors(run, layer, every)) for every in (False, True))
    again, widest = list((whole - kept).elements()), int(activations.widest(run, layer))
    if run.ffn_chunks(layer) > 1:
        # The gradient of one weight, before it is added to that of other chunks.
        matrix = run.model.dim * run.model.ffn_dim // run.tp
        again.append(0 if run.frozen else run.element * matrix)
        # The largest temporaries are attention's. When they exist, the input of the feed-forward
        # is freed, and the gradient of the block's input is not allocated.
        others = 3 * widest + 2 * activations.boundary(run)
        again.append(max(0, int(activations.context_gradients(run, layer) - others)))
    if scores := int(activations.unfused_scores(run, layer)):
        again.append(scores)
    return list(kept.elements()), again, widest


def _makes_all(run: Resolved, layer: int) -> bool:
    """Whether a layer's forward allocates all tensors that its backward recomputes at once.

    The single graph of a compiled block with full recomputation does, since it returns all of them.
    Eager operations free their results one by one; a block of several graphs frees them graph by
    graph.
    """
    parallel, recompute = run.config.parallel, run.config.recompute
    if recompute.mode != "full" or recompute.modules or not run.recomputes(layer):
        return False
    separate = run.kind(layer).experts and parallel.ep * parallel.etp > 1
    cut = separate and not in_graphs(parallel.dispatcher)
    return run.config.compile.enable and not cut


def _offloaded(kept: list[int], held: bool) -> tuple[list[int], list[int]]:
    """Split a layer's kept tensors into (tensors on the device, offloaded tensors).

    Args:
        held: whether another object holds the layer's input, the first of the list.
    """
    inputs, others = (kept[:1], kept[1:]) if held else ([], kept)
    small = [size for size in others if size < SMALLEST]
    return inputs + small, [size for size in others if size >= SMALLEST]
