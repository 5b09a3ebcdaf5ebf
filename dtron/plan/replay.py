"""What the stream of computation takes of the allocator: the tensors of a rank's steps, taken and
given back in the order of a run.

    forward    FSDP copies the unit's weights out of their gather, of one unit at a time; those that
               are shared along another dim than the first in two steps; where none share them, it
               casts and then copies them. The block makes two passing tensors as large
               as its largest, and what it keeps; a compiled block that is computed again in full
               makes all that one without recomputation keeps, and lets it go when it is done
    loss       logits, and beside them their gradient
    backward   weights again, if they were freed; what is computed again, three tensors as large as
               the largest, gradients of the weights and of the input; then weights go, what was
               sent of the unit before goes, and what is sent of this one is made. It waits for the
               next reduction, at the end of a step for nothing. Experts that are apart are
               reduced before the rest of their block. Of experts that are one rank's alone
               nothing is sent: gradients are cast to float32 and stay until the update
    split      where weight gradients are put off, I makes no gradients of weights. Inputs of
               products stay as they are until W, and gradients of their results; all else that was
               kept goes. W makes whole gradients of all units in the dtype of computation, then
               adds them to sums, which are reduced unit by unit when the stage's last is done
    offloaded  what a block keeps goes when the block after it is done, and is there again while the
               one after it is in backward, as `dtron.parallelisms.offload` has it
    update     in the first step moments, cut from what activations left: the activations of the
               second step do not find the same room, and take more

Three steps are enough: later ones take nothing new. Gathers and sums of gradients are of other
streams (`dtron.plan.memory`). Sources: `foreach_reduce` and `FSDPParamGroup` of
torch.distributed.fsdp._fully_shard, torch 2.11; `dtron.plan.allocator` for the rules.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from dtron.parallelisms.offload import SMALLEST
from dtron.parallelisms.pipeline.executor import Layout
from dtron.parallelisms.pipeline.lowering import add_reductions
from dtron.parallelisms.pipeline.schedule_ops import Kind
from dtron.plan import activations
from dtron.plan.allocator import Block, Expandable, Held, Pool
from dtron.plan.parameters import sizes, units
from dtron.plan.run_shape import ELEMENT, Resolved, Stage

STEPS = 3
MICRO_BATCHES = 3
"""Of a step without a pipeline: further ones repeat the last but one."""


@dataclass
class _Group:
    """Parameters of a unit that FSDP gathers and reduces together; bytes."""

    weights: list[int]
    """Of each parameter, gathered, in the dtype of computation."""
    columns: list[bool]
    """Which of them ranks share along another dim than the first: they are copied once more."""
    sent: int
    """What a reduction sends."""
    shared: bool
    """Whether ranks share them."""
    alone: bool = False
    """Whether one rank alone has them, and keeps their gradients."""
    out: list[Block] = field(default_factory=list)
    """Weights that are there."""
    summed: list[Block] = field(default_factory=list)
    """Gradients that are summed over micro-batches, in the dtype of reductions."""
    given: list[Block] = field(default_factory=list)
    """Sums of one rank alone that were handed over, where sums are made apart from a backward."""


@dataclass
class _Unit:
    """What a block, the embedding or the head makes; bytes, of a micro-batch."""

    groups: list[_Group]
    """The dense part, and experts that are apart."""
    shards: list[int]
    """Elements of each."""
    kept: list[int]
    """What stays on the device for the backward."""
    moved: list[int]
    """What is offloaded."""
    again: list[int]
    """What the backward computes again."""
    widest: int
    """Bytes of its largest tensor."""
    passing: list[int]
    """What its forward makes and lets go."""
    stays: bool
    """Weights are not freed between forward and backward."""
    puts_off: bool = False
    """Its weight gradients are computed apart from its backward."""
    read: list[int] = field(default_factory=list)
    """Of what is kept, inputs of products that stay until then."""
    read_again: list[int] = field(default_factory=list)
    """Such inputs that the backward computes again, or brings back to the device."""
    queued: list[int] = field(default_factory=list)
    """What is made for its weight gradients alone: gradients of the products' results, and in
    float8 also their inputs."""

    def join(self) -> None:
        """Count as one what is taken and given back together; weights, unless they are cast or
        copied one by one."""
        for name in ("shards", "kept", "moved", "again", "read", "read_again", "queued"):
            sizes = getattr(self, name)
            setattr(self, name, [sum(sizes)] if sizes else [])
        for group in self.groups:
            if group.shared and not any(group.columns):
                group.weights, group.columns = [sum(group.weights)], [False]


@dataclass(eq=False)
class _Call:
    """What a unit keeps of a micro-batch."""

    kept: list[Block]
    moved: list[int]
    """Bytes of what is offloaded."""
    read: list[Block] = field(default_factory=list)
    """Of what stays on the device, inputs of products whose weight gradients are put off."""
    there: list[Block] = field(default_factory=list)
    """Of what is offloaded, what is on the device."""


def reserved(
    run: Resolved,
    rank: int,
    moment: int,
    moments: int,
    sent: int,
    pool: type[Pool | Expandable] = Pool,
) -> int:
    """Bytes that a pipeline rank's stream of computation has taken of the device.

    Args:
        moment: bytes an element of the optimizer's moments, of which there are `moments`.
        sent: bytes an element of what a reduction takes to send from.
        pool: the allocator's rules.
    """
    replay = _Replay(run, rank, sent, pool())
    replay.take_weights()
    for step in range(STEPS):
        replay.step()
        if step == 0:
            replay.take_moments(moment, moments)
        replay.drop_gradients()
    return replay.pool.reserved


def least(run: Resolved, rank: int, moment: int, moments: int, sent: int) -> int:
    """What `reserved` cannot be below, some twenty times as fast: bytes of the tensors that are
    there at the worst moment of a step, without what an allocator loses. Arguments are those of
    `reserved`."""
    replay = _Replay(run, rank, sent, Held())
    for unit in (unit for listed in replay.stages.values() for unit in listed):
        unit.join()
    replay.take_weights()
    replay.take_moments(moment, moments)
    replay.step()
    return replay.pool.reserved


class _Replay:
    def __init__(self, run: Resolved, rank: int, sent: int, pool: Pool | Expandable | Held) -> None:
        self.run, self.rank, self.pool = run, rank, pool
        self.stages = {s.index: _listed(run, s, sent) for s in run.stages_of(rank)}
        self.hidden = int(activations.boundary(run))
        self.logits = activations.loss_tensors(run)
        self.flying: dict[tuple[int, int], list[_Call]] = {}
        self.put_off: dict[tuple[int, int], list[list[Block]]] = {}
        """By stage and micro-batch, of each unit what its weight gradients are computed from."""
        self.offloads = run.config.recompute.offload
        self.latest: _Call | None = None
        """Of the last block that was called, unless its backward has begun."""
        self.pending: Block | None = None
        self.sums, self.keep = not run.policy.reduce_each_micro_batch, run.policy.keep_gathered

    def take_weights(self) -> None:
        for shard in self._shards():
            self.pool.take(4 * shard)

    def take_moments(self, moment: int, moments: int) -> None:
        for shard in self._shards():
            self._take([moment * shard] * moments)

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
                self._backward(stage, micro_batch, not due[stage], puts_off=kind is Kind.INPUT)
            elif kind is Kind.WEIGHT:
                self._weight(stage, micro_batch)
            else:
                self._reduce_stage(stage, last=not due[stage])
        self._free([self.pending] if self.pending else [])
        self.pending = None

    def drop_gradients(self) -> None:
        """After an update, those that are one rank's alone."""
        for group in (g for listed in self.stages.values() for unit in listed for g in unit.groups):
            self._free([*group.summed, *group.given])
            group.summed, group.given = [], []

    def _forward(self, stage: int, micro_batch: int) -> None:
        listed = self.stages[stage]
        calls = self.flying[stage, micro_batch] = []
        for unit in listed:
            self._gather(unit)
            working = self._take(unit.passing)
            read, kept = self._take(unit.read), self._take(unit.kept)
            calls.append(_Call(kept, unit.moved, read, self._take(unit.moved)))
            self._free(working)
            if self.offloads and unit.widest:  # a block
                self._unload(calls[-1])
            for group in () if unit.stays or self.keep else unit.groups:
                if group.shared:  # experts that no ranks share stay until the backward
                    self._reshard(group)

    def _backward(self, stage: int, micro_batch: int, last: bool, puts_off: bool = False) -> None:
        """B; or I, whose weight gradients are put off as far as units have it so."""
        listed, calls = self.stages[stage], self.flying.pop((stage, micro_batch))
        head = self.run.stages[stage].head
        logits = self._take(self.logits) if head else []
        gradient = self._take([self.hidden])
        waiting: list[list[Block]] = []
        split = _is_split(self.run, stage)
        for unit in reversed(listed):
            call = calls.pop()
            self._gather(unit)
            if call.moved:
                self._load(call, stage, calls)
            apart = puts_off and unit.puts_off
            read = [*call.read, *self._take(unit.read_again)]
            working = self._take([*unit.again, *[unit.widest] * 3])
            made = [] if apart else [self._take(group.weights) for group in unit.groups]
            inward = self._take([self.hidden])
            gone = (logits, working, call.kept, call.there, gradient)
            for blocks in gone if apart else (*gone, read):
                self._free(blocks)
            gradient, logits = inward, []
            if apart:
                waiting.append(read + self._take(unit.queued))
            elif split:
                for group, blocks in reversed(list(zip(unit.groups, made, strict=True))):
                    self._fold(group, blocks)
            else:
                self._reduce(unit, made, last)
            for group in unit.groups if split and not self.keep else ():
                self._reshard(group)
        self._free(gradient)
        if puts_off:
            self.put_off[stage, micro_batch] = waiting

    def _weight(self, stage: int, micro_batch: int) -> None:
        """W. Each pair goes when it is used; sums follow when all are."""
        units = [unit for unit in reversed(self.stages[stage]) if unit.puts_off]
        made: list[tuple[_Group, list[Block]]] = []
        for unit, blocks in zip(units, self.put_off.pop((stage, micro_batch)), strict=True):
            made += [(group, self._take(group.weights)) for group in unit.groups]
            self._free(blocks)
        for group, blocks in reversed(made):
            self._fold(group, blocks)

    def _fold(self, group: _Group, made: list[Block]) -> None:
        """As `dtron.parallelisms.pipeline.split_backward.fold`: gradients into sums, one after the
        other."""
        if group.summed:
            self._free(made)
            return
        for size, block in zip(group.weights, made, strict=True):
            wide = _wide(self.run, size)
            group.summed += self._take([wide]) if wide > size else [block]
            self._free([block] if wide > size else [])

    def _reduce_stage(self, stage: int, last: bool) -> None:
        """As `dtron.parallelisms.pipeline.split_backward.reduce_gradients`."""
        for unit in reversed(self.stages[stage]):
            for group in reversed(unit.groups):
                if not group.alone:
                    self._send(group, [], last)
                    continue
                if last or not self.keep:
                    self._reshard(group)
                if group.given:
                    self._free(group.summed)
                else:
                    group.given = group.summed
                group.summed = []

    def _unload(self, call: _Call) -> None:
        """Free what the block before this one has sent to the host."""
        if self.latest is not None:
            self._free(self.latest.there)
            self.latest.there = []
        if call.moved:
            self.latest = call

    def _load(self, call: _Call, stage: int, before: list[_Call]) -> None:
        """Bring back what a block's backward reads, and what the next one will: of the block before
        it, or of the last block of the stage's next micro-batch."""
        if self.latest is call:
            self.latest = None
        waiting = [calls for (s, _), calls in self.flying.items() if s == stage]
        coming = next((c for calls in (before, *waiting) for c in reversed(calls) if c.moved), None)
        for each in (call, coming):
            if each is not None and not each.there:
                each.there = self._take(each.moved)

    def _reduce(self, unit: _Unit, made: list[list[Block]], last: bool) -> None:
        """Experts that are apart go first: their hooks are around those of the block."""
        for group, blocks in reversed(list(zip(unit.groups, made, strict=True))):
            self._reduce_group(group, blocks, last)

    def _keep_group(self, group: _Group, made: list[Block], last: bool) -> None:
        """As `dtron.parallelisms.fsdp.torch_internals.bypass_reduction`."""
        if last or not self.keep:
            self._reshard(group)
        if group.summed and self.sums:  # added as they are
            self._free(made)
            return
        cast = made
        if self.run.element < 4:
            cast = []
            for size, block in zip(group.weights, made, strict=True):  # one after the other
                cast += self._take([size // self.run.element * 4])
                self._free([block])
        if group.summed:
            self._free(cast)
        else:
            group.summed = cast

    def _reduce_group(self, group: _Group, made: list[Block], last: bool) -> None:
        if group.alone:
            self._keep_group(group, made, last)
            return
        if self.sums and not last:
            if not group.summed:
                group.summed = self._take([_wide(self.run, size) for size in group.weights])
            self._free(made)
            return
        self._send(group, made, last)

    def _send(self, group: _Group, made: list[Block], last: bool) -> None:
        """Reduce gradients, or their sums, among ranks."""
        n_bytes = group.weights
        if group.summed:
            self._free(made)
            made, group.summed = group.summed, []
            n_bytes = [_wide(self.run, size) for size in n_bytes]
        if last or not self.keep:
            self._reshard(group)
        if self.pending is not None:
            self._free([self.pending])
        for place, turned in enumerate(group.columns):
            if turned:
                (copy,) = self._take([n_bytes[place]])
                self._free([made[place]])
                made[place] = copy
        self.pending = self.pool.take(group.sent) if group.sent else None
        self._free(made)

    def _gather(self, unit: _Unit) -> None:
        for group in unit.groups:
            if not group.out:
                self._gather_group(group)

    def _gather_group(self, group: _Group) -> None:
        passing: list[Block] = []
        for size, turned in zip(group.weights, group.columns, strict=True):
            if not group.shared:  # cast, then copied; the last cast goes when the next is made
                before, passing = passing, self._take([size])
                self._free(before)
            group.out += self._take([size])
            if turned:  # copied out as it came, then put together
                passing += self._take([size])
        self._free(passing)

    def _reshard(self, group: _Group) -> None:
        self._free(group.out)
        group.out = []

    def _take(self, sizes: list[int]) -> list[Block]:
        return [self.pool.take(size) for size in sizes if size]

    def _free(self, blocks: list[Block]) -> None:
        for block in blocks:
            self.pool.give(block)


def _actions(run: Resolved, rank: int) -> Iterator[tuple[Kind, int, int]]:
    """What is computed and reduced apart, in order: kind, stage, micro-batch."""
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
    """Whether weight gradients of a stage, or of its head alone, may be put off, so that what was
    made is summed by backwards and reduced apart from them."""
    layout = run.layout
    if layout is None:
        return False
    return layout.splits_backward or (bool(layout.head) and run.stages[stage].head)


def _wide(run: Resolved, size: int) -> int:
    return size // run.element * ELEMENT[run.config.parallel.reduce_dtype]


def _listed(run: Resolved, stage: Stage, sent: int) -> list[_Unit]:
    found, layers = [], iter(stage.layers)
    every = units(run, stage)
    for place, unit in enumerate(every):
        is_layer = unit.kind not in ("embedding", "head")
        layer = next(layers) if is_layer else -1
        kept, again, widest = _block(run, layer) if is_layer else ([], [], 0)
        moved: list[int] = []
        if run.config.recompute.offload:
            # A stage's input is the schedule's, but for the first one's.
            held = stage.index > 0 and stage.layers[:1] == (layer,)
            kept, moved = _offloaded(kept, held)
        if unit.kind == "head" or unit.name == "root":  # the last norm
            kept = [int(activations.boundary(run))] * 2 if stage.head else []
        stays = unit.name == "root" or (run.layout is None and place == len(every) - 1)
        made = _Unit(
            _groups(run, unit.kind, sent),
            [each.shard for each in sizes(run, unit.kind)],
            kept,
            moved,
            again,
            widest,
            again if is_layer and _makes_all(run, layer) else [widest] * 2,
            stays,
        )
        if run.layout is not None and _puts_off(run, run.layout, stage, unit.kind):
            _hold(made, *_held_until_weights(run, unit.kind, layer))
        found.append(made)
    return found


def _puts_off(run: Resolved, layout: Layout, stage: Stage, kind: str) -> bool:
    """Whether a unit's weight gradients are put off. Of a head in chunks they come with the loss;
    embeddings have no product."""
    if kind == "head":
        return run.config.train.loss_chunks == 1 and _is_split(run, stage.index)
    return kind != "embedding" and layout.splits_backward


def _held_until_weights(run: Resolved, kind: str, layer: int) -> tuple[list[int], list[int]]:
    """Inputs of a unit's products, and gradients of their results."""
    if kind == "head":
        hidden, logits = int(activations.boundary(run)), activations.logits_gradient(run)
        if activations.queues_float8(run, None):
            return [], [logits // run.element, hidden // run.element]
        return [hidden], [logits]
    return activations.put_off(run, layer)


def _hold(unit: _Unit, reads: list[int], gradients: list[int]) -> None:
    """Tell apart what of a unit stays until its weight gradients are computed."""
    kept, again, wanted = (Counter(sizes) for sizes in (unit.kept, unit.again, reads))
    unit.puts_off, unit.queued = True, gradients
    unit.read = list((wanted & kept).elements())
    unit.read_again = list((wanted - kept).elements())
    unit.kept = list((kept - wanted).elements())
    unit.again = list((again - Counter(unit.read_again)).elements())


def _groups(run: Resolved, kind: str, sent: int) -> list[_Group]:
    found = []
    for apart in (False, True):
        own = [each for each in sizes(run, kind) if each.apart == apart]
        whole = sum(each.gathered for each in own)
        weights = [run.element * each.gathered for each in own]
        ranks = run.experts["edp_shard"] if apart else run.shards
        if own:
            columns = [each.columns for each in own]
            alone = run.keeps_experts if apart else run.keeps_dense
            found.append(_Group(weights, columns, sent * whole, ranks > 1, alone))
    return found


def _block(run: Resolved, layer: int) -> tuple[list[int], list[int], int]:
    """What a layer keeps, what it computes again, and its largest tensor."""
    kept, whole = (Counter(activations.tensors(run, layer, every)) for every in (False, True))
    return (
        list(kept.elements()),
        list((whole - kept).elements()),
        int(activations.widest(run, layer)),
    )


def _makes_all(run: Resolved, layer: int) -> bool:
    """Whether a layer's forward makes what it is to compute again: recomputation is around a
    compiled block, whose one graph gives all of it. Eager operations let theirs go one by one, and
    a block that is cut graph by graph."""
    parallel, recompute = run.config.parallel, run.config.recompute
    if recompute.mode != "full" or not run.recomputes(layer):
        return False
    apart = run.has_experts(layer) and parallel.ep * parallel.etp > 1
    cut = apart and parallel.dispatcher != "symmetric_memory"
    return run.config.compile.enable and not cut


def _offloaded(kept: list[int], held: bool) -> tuple[list[int], list[int]]:
    """Of what a layer keeps, what stays on the device and what is offloaded.

    Args:
        held: whether another holds its input, the first of the list.
    """
    inputs, others = (kept[:1], kept[1:]) if held else ([], kept)
    small = [size for size in others if size < SMALLEST]
    return inputs + small, [size for size in others if size >= SMALLEST]
