"""Memory of each pipeline rank: bytes by class at the peak of a step, and reserved bytes.

    parameters   shards of the float32 master weights
    optimizer    shards of the moments, allocated in the first update; not those in host memory
    gathered     weights in the dtype of computation: all weights with zero 1 and 2 or without
                 sharding, else the weights of the unit that computes
    gradients    float32 shards, or unsharded sums over micro-batches; an embedding's gradient has
                 the rows of other tp ranks until it is reduced
    reduction    send buffer of a unit's reduction, until the next reduction
    activations  tensors that blocks keep, of all micro-batches in flight
    working      one block's recomputed tensors, temporaries and gradients of hidden states
    logits       logits and their gradient, on the rank with the head
    buffers      context parallelism's keys and values, and symmetric memory

`peak` is the maximum of allocated bytes. `reserved` is what the caching allocator holds, and
symmetric memory, which is outside of it; both must fit the device. The allocator's comes from a
replay of a step's allocations (`dtron.plan.replay`), as `peak`. The allocator does not share memory
between streams: FSDP makes gradient shards on its reduction stream, where they cannot reuse the
memory of freed activations. Gradients that are not reduced are on the computation stream. The CUDA
context, NCCL and libraries are outside the allocator (`Hardware.outside`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dtron.parallelisms.pipeline.schedule_ops import Kind
from dtron.plan import activations, replay
from dtron.plan.allocator import Expandable
from dtron.plan.gather_buffers import Gather, gathered_through
from dtron.plan.hardware import Hardware
from dtron.plan.offloaded_states import bytes_on_host
from dtron.plan.parameters import (
    Unit,
    by_keeping,
    gathered_bytes,
    held,
    joined_units,
    reductions,
    split_by_unit,
    units,
)
from dtron.plan.run_shape import Resolved, Stage, expert_room, expert_rows, pulls_rows

CLASSES = (*replay.CLASSES, "buffers")


@dataclass(frozen=True)
class RankMemory:
    """Memory of one pipeline rank.

    Ranks that differ only in their data, context or tensor parallel index need the same memory.
    """

    rank: int
    elements: int
    """Number of parameters of the rank's stages, after tp and ep."""
    classes: Mapping[str, float]
    """Bytes by class at the peak of a step."""
    in_flight: Mapping[int, int]
    """Micro-batches in flight per stage, at the time when the rank holds the most activations."""
    state: float
    """Bytes of the model: weights, gradients and optimizer, without activations."""
    reserved: float
    gradients: float
    """Bytes of the reduced gradients."""
    symmetric: float
    """Bytes of symmetric memory. `reserved` has them, but what torch's allocator reserves, which a
    run reports, has not."""

    @property
    def by_allocator(self) -> float:
        """Bytes that a run reports: `torch.cuda.max_memory_reserved`."""
        return self.reserved - self.symmetric

    @property
    def peak(self) -> float:
        """Maximum of allocated bytes."""
        return sum(self.classes.values())

    def as_json(self) -> dict[str, Any]:
        """Return all values as one JSON object."""
        return {**asdict(self), "peak": self.peak}


def memory(run: Resolved) -> tuple[RankMemory, ...]:
    """Predict the memory of every pipeline rank."""
    return tuple(_of_rank(run, rank) for rank in range(run.degrees["pp"]))


def expandable(run: Resolved, rank: int) -> float:
    """Return the bytes that a pipeline rank reserves with expandable segments.

    `PYTORCH_ALLOC_CONF=expandable_segments:True` turns these segments on.
    """
    return replay.reserved(run, rank, Expandable) + _on_other_streams(run, rank)


def least(run: Resolved, hardware: Hardware) -> tuple[float, ...]:
    """Return a lower bound of the reserved bytes of each pipeline rank.

    Empty if the run cannot fit. This is much faster than `memory`.
    """
    found: list[float] = []
    for rank in range(run.degrees["pp"]) if _host_fits(run, hardware) else ():
        found.append(replay.least(run, rank) + _on_other_streams(run, rank))
        if found[-1] > hardware.room:
            return ()
    return tuple(found)


def fitting(
    run: Resolved, hardware: Hardware, bounds: Sequence[float], part: int = 0, of: int = 1
) -> tuple[RankMemory, ...] | None:
    """Return the memory of the checked pipeline ranks, or None as soon as one does not fit.

    Args:
        bounds: result of `least`; ranks are checked in descending order of these bounds.
        part: position of the first rank to check in this order; from there, every `of`-th rank is
            checked.
    """
    found: list[RankMemory] = []
    for rank in sorted(range(len(bounds)), key=lambda rank: -bounds[rank])[part::of]:
        found.append(_of_rank(run, rank))
        if found[-1].reserved > hardware.room:
            return None
    return tuple(sorted(found, key=lambda each: each.rank))


def worst(ranks: Sequence[RankMemory]) -> RankMemory:
    """Return the rank that reserves the most memory."""
    return max(ranks, key=lambda each: each.reserved)


def offloaded_by_host(run: Resolved, hardware: Hardware) -> float:
    """Return the maximum bytes of host memory for what a host's ranks offload."""
    return offloaded(run) * min(hardware.host, run.world_size)


def offloaded(run: Resolved) -> float:
    """Return the maximum bytes of host memory for a rank's offloaded activations and moments."""
    ranks = range(run.degrees["pp"])
    return max(_offloaded_activations(run, rank) + bytes_on_host(run, rank) for rank in ranks)


def _offloaded_activations(run: Resolved, rank: int) -> float:
    if not run.config.recompute.offload:
        return 0.0
    kept = {
        stage.index: sum(
            sum(activations.kept(of, layer).values()) for of, layer in run.blocks(stage)
        )
        for stage in run.stages_of(rank)
    }
    return sum(times * kept[stage] for stage, times in in_flight(run, rank).items())


def fits(run: Resolved, ranks: Sequence[RankMemory], hardware: Hardware) -> bool:
    """Whether the fullest rank fits its device, and what is offloaded fits its host."""
    return worst(ranks).reserved <= hardware.room and _host_fits(run, hardware)


def _host_fits(run: Resolved, hardware: Hardware) -> bool:
    """Whether offloading leaves a twentieth of host memory free, as `HostPool` requires."""
    return offloaded_by_host(run, hardware) <= hardware.host_memory * 19 / 20


def _of_rank(run: Resolved, rank: int) -> RankMemory:
    names = ("gathered", "shard", "trained_gathered", "trained_shard")
    elements, shard, gradients, trained = (
        sum(getattr(u, name) for u in held(run, rank)) for name in names
    )
    classes: dict[str, float] = {**replay.at_peak(run, rank)}
    # The replay leaves out the norm before a tied head.
    hidden = sum(unit.hidden_shard for unit in held(run, rank))
    classes["parameters"] = 4.0 * trained + run.frozen_element * (shard - trained)
    classes["optimizer"] = float(
        sum(run.config.optim.state_bytes(hidden=False)) * (trained - hidden)
        + sum(run.config.optim.state_bytes(hidden=True)) * hidden
        - bytes_on_host(run, rank)
    )
    summed = run.reduce_element * gradients if run.times_reduced < run.micro_batches else 0
    state = sum(classes[name] for name in ("parameters", "optimizer", "gathered"))
    state += max(4.0 * trained, summed)
    classes["gradients"] += _foreign(run, rank)
    symmetric = _peers(run, rank)
    classes["buffers"] = _context(run) + symmetric
    reserved = replay.reserved(run, rank) + _on_other_streams(run, rank)
    flying = in_flight(run, rank)
    return RankMemory(rank, elements, classes, flying, state, reserved, 4.0 * trained, symmetric)


def _foreign(run: Resolved, rank: int) -> float:
    """Bytes of other tp ranks' rows in an embedding's gradient, if micro-batches are summed.

    DTensor's embedding backward makes all rows; only the reduction shards them.
    """
    if run.times_reduced == run.micro_batches or run.frozen:
        return 0.0
    rows = sum(u.whole - u.gathered for u in held(run, rank) if u.kind == "embedding")
    return float(run.reduce_element * rows)


def _context(run: Resolved) -> float:
    """Bytes of context parallelism's buffers for keys and values."""
    if run.degrees["cp"] == 1:
        return 0.0
    models = {kind: run.model.of_layer(kind) for kind in set(run.model.layer_kinds)}

    def held(layer: int) -> float:
        shape, model = run.context(layer), models[run.kind(layer)]
        width = 2 * model.local_kv_heads(run.tp) * model.head_size
        if run.exchanges_halos(layer):
            return width * (run.tokens + run.halo(layer) / shape.inner)
        return width * run.tokens * (run.degrees["cp"] if shape.gathers else 2)

    most = max(held(layer) for layer in range(run.model.n_layers + run.model.mtp))
    return float(most * run.element)


def _all_buffers(run: Resolved, rank: int) -> float:
    return _buffers(run, rank) + _context(run) + _peers(run, rank)


def _buffers(run: Resolved, rank: int) -> float:
    """Bytes of buffers on FSDP's streams, without gradient shards.

    Each stage has its own buffers.
    """
    if run.shards == 1:  # weights are cast without a gather
        return float(sum(_reduction_sums(run, stage) for stage in run.stages_of(rank)))
    depth, again = run.config.parallel.prefetch, not run.policy.keep_gathered
    found = 0.0
    for stage in run.stages_of(rank):
        joined = split_by_unit(run, stage, units(run, stage))
        sizes = tuple(_parts(run, blocks) for blocks in joined)
        stays = run.layout is None  # the last unit stays gathered
        found += gathered_through(sizes, depth, again, stays) + _reduction_sums(run, stage)
    return found


def _parts(run: Resolved, blocks: Sequence[Unit]) -> tuple[Gather, ...]:
    """Return all-gathers of an FSDP unit: its dense part and each block's experts, if sharded."""
    unit = sum(blocks[1:], blocks[0])
    casts = run.element < 4  # float32 is sent without a cast
    if run.frozen_element < 4:
        casts *= unit.trained_shard / max(1, unit.shard)
    dense, experts = gathered_bytes(run, unit)[0], [gathered_bytes(run, b)[1] for b in blocks]
    shared = [(whole, part) for whole, part in (dense, *experts) if part < whole]
    return tuple((whole, int(part * casts)) for whole, part in shared)


def _reduction_sums(run: Resolved, stage: Stage) -> int:
    """Bytes that the largest unit's reduction holds in addition to gradient shards.

    These are new sums before they are added to the shards, sums before their cast to float32, and
    received gradients.
    """
    each = 0
    if run.times_reduced > 1:
        each += 4
    if run.reduce_element < 4:
        each += run.reduce_element
    received = run.element if run.exchanges else 0
    reduced = [
        gradients
        for place, listed in enumerate(_in_collectives(run, stage))
        for _, gradients, keeps in (by_keeping(run, u)[place] for u in listed)
        if not keeps
    ]
    return max((shard * each + gathered * received for gathered, shard in reduced), default=0)


def _in_collectives(run: Resolved, stage: Stage) -> tuple[Sequence[Unit], Sequence[Unit]]:
    """Return (units whose dense parts, units whose experts are each in one collective).

    Separate experts are gathered and reduced block by block.
    """
    return joined_units(run, stage), units(run, stage)


def _peers(run: Resolved, rank: int) -> float:
    """Bytes of symmetric memory, which is allocated for the whole run.

    It holds token copies for experts, and the buffers of copy engines. Per stage, copy engines have
    buffers for the dense part and for experts: one for the shard of the largest unit and, if an
    all-to-all reduces gradients, one for all gradients of the largest unit.
    """
    parallel, found = run.config.parallel, _mailbox(run)
    if not parallel.copy_engines:
        return found
    for stage in run.stages_of(rank):
        for place, listed in enumerate(_in_collectives(run, stage)):
            sizes = [(u.dense, u.experts)[place] for u in listed]
            if any(shard < whole for whole, shard in sizes):  # sharded over ranks
                most = max(run.element * whole for whole, _ in sizes)
                found += max(gathered_bytes(run, u)[place][1] for u in listed)
                found += most * (parallel.reduce_by == "all_to_all")
    return found


def _mailbox(run: Resolved) -> float:
    """Bytes of the symmetric memory from which ranks pull token copies.

    It has two buffers, each for the results of a rank's experts, which are never float8; with two
    micro-batches at once, four.
    """
    if not pulls_rows(run):
        return 0.0
    rows = expert_room(run) * expert_rows(run) / run.experts["etp"]
    lanes = 1 + run.config.parallel.overlap_micro_batches
    return 2 * lanes * rows * run.model.dim * run.element


def _on_other_streams(run: Resolved, rank: int) -> float:
    """Bytes outside the computation stream.

    These are buffers, float32 shards of reduced gradients, and other tp ranks' rows of an
    embedding's gradient. Validations and samples cannot use the buffers of a CUDA graph.
    """
    shards = sum(shard for u in held(run, rank) for _, shard in reductions(run, u))
    again = run.config.compile.cuda_graphs == "step" and run.config.train.evaluates
    buffers = _all_buffers(run, rank) + (_buffers(run, rank) if again else 0.0)
    return _foreign(run, rank) + buffers + 4.0 * shards


def in_flight(run: Resolved, rank: int) -> dict[int, int]:
    """Return the micro-batches in flight per stage when a pipeline rank holds most activations."""
    if run.layout is None:
        return {0: 1}
    weights = {stage.index: len(stage.layers) + 0.5 * stage.head for stage in run.stages_of(rank)}
    # If only the head's weight gradients are deferred, its backward without them (I) already frees
    # the blocks' activations.
    # So does the backward of frozen blocks.
    defers = run.layout.splits_backward and not run.frozen
    ends = Kind.WEIGHT if defers else Kind.INPUT
    live = {action.stage: 0 for action in run.order[rank]}
    heaviest, best = -1.0, {}
    for action in run.order[rank]:
        if action.kind is Kind.FORWARD:
            live[action.stage] += 1
            load = sum(weights[stage] * n for stage, n in live.items())
            if load > heaviest:
                heaviest, best = load, dict(live)
        elif action.kind in (Kind.BACKWARD, ends):
            live[action.stage] -= 1
    return best
