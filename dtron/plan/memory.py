"""Memory of each pipeline rank: bytes by class at the peak of a step, and what the allocator holds.

    parameters   shards of the float32 master weights
    optimizer    shards of the moments, allocated in the first update
    gathered     weights in the dtype of computation: all (zero 1 and 2, or unshared), or those of
                 the computing unit
    gradients    float32 shards, or unsharded gradients while they accumulate over the step, with
                 the rows of other tp ranks of an embedding's until they are reduced
    reduction    the buffer that a unit's gradients are sent from, until the next reduction
    activations  tensors kept by blocks, for all micro-batches in flight
    working      one block's recomputed tensors, temporaries and gradients of hidden states
    logits       logits and their gradient, on the rank with the head
    buffers      outputs of collectives, on separate streams

Both are replays of a step's tensors (`dtron.plan.replay`). `peak` is the most that is allocated at
one time. `reserved` is what the allocator holds, and what must fit; the allocator does not share
memory between streams: gradient shards, made on the reduction stream, come on top of the
activations freed before them. Gradients of unshared parameters are made on the computation stream.
The CUDA context, NCCL's channels and libraries are `outside` the allocator; hardware rows give
their size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dtron.parallelisms.pipeline.schedule_ops import Kind
from dtron.plan import activations, replay
from dtron.plan.allocator import Expandable
from dtron.plan.gather_buffers import Gather, gathered_through
from dtron.plan.hardware import Hardware
from dtron.plan.parameters import Unit, gathered_bytes, held, reductions, units
from dtron.plan.run_shape import Resolved, Stage, expert_room, expert_rows

CLASSES = (*replay.CLASSES, "buffers")


@dataclass(frozen=True)
class RankMemory:
    """Memory of one pipeline rank; its data, context and tensor parallel neighbours need the
    same."""

    rank: int
    elements: int
    """Number of parameters of its stages, after tp and ep."""
    classes: Mapping[str, float]
    """Bytes by class at the peak of a step."""
    in_flight: Mapping[int, int]
    """Number of micro-batches in flight at the worst moment, per stage."""
    state: float
    """Bytes of the model: weights, gradients and optimizer, without activations."""
    reserved: float

    @property
    def peak(self) -> float:
        """Maximum of allocated bytes."""
        return sum(self.classes.values())

    def as_json(self) -> dict[str, Any]:
        """Return all values as JSON objects."""
        return {**asdict(self), "peak": self.peak}


def memory(run: Resolved) -> tuple[RankMemory, ...]:
    """Compute the memory of every pipeline rank."""
    return tuple(_of_rank(run, rank) for rank in range(run.degrees["pp"]))


def expandable(run: Resolved, rank: int) -> float:
    """`reserved` of a pipeline rank under `PYTORCH_ALLOC_CONF=expandable_segments:True`."""
    return replay.reserved(run, rank, Expandable) + _on_other_streams(run, rank)


def least(run: Resolved, hardware: Hardware) -> tuple[float, ...]:
    """Lower bound of `reserved` for each pipeline rank, computed much faster; empty if the run
    cannot fit."""
    found: list[float] = []
    for rank in range(run.degrees["pp"]) if _host_fits(run, hardware) else ():
        found.append(replay.least(run, rank) + _on_other_streams(run, rank))
        if found[-1] > hardware.room:
            return ()
    return tuple(found)


def fitting(
    run: Resolved, hardware: Hardware, bounds: Sequence[float], part: int = 0, of: int = 1
) -> tuple[RankMemory, ...] | None:
    """Return `memory` of a run that fits; None as soon as a rank does not.

    Args:
        bounds: result of `least`; the fullest ranks are checked first.
        part: (index, number): which part of the ranks to check.
    """
    found: list[RankMemory] = []
    for rank in sorted(range(len(bounds)), key=lambda rank: -bounds[rank])[part::of]:
        found.append(_of_rank(run, rank))
        if found[-1].reserved > hardware.room:
            return None
    return tuple(sorted(found, key=lambda each: each.rank))


def worst(ranks: Sequence[RankMemory]) -> RankMemory:
    """The rank that reserves most memory."""
    return max(ranks, key=lambda each: each.reserved)


def offloaded(run: Resolved) -> float:
    """Maximum bytes of activations that a rank offloads to host memory."""
    if not run.config.recompute.offload:
        return 0.0
    most = 0.0
    for rank in range(run.degrees["pp"]):
        flying = in_flight(run, rank)
        kept = {
            stage.index: sum(sum(activations.kept(run, layer).values()) for layer in stage.layers)
            for stage in run.stages_of(rank)
        }
        most = max(most, sum(times * kept[stage] for stage, times in flying.items()))
    return most


def offloaded_by_host(run: Resolved, hardware: Hardware) -> float:
    """Maximum bytes of activations that all ranks of a host offload."""
    return offloaded(run) * min(hardware.host, run.world_size)


def fits(run: Resolved, ranks: Sequence[RankMemory], hardware: Hardware) -> bool:
    """Whether the worst rank fits a device, and its ranks' offloaded activations fit a host."""
    return worst(ranks).reserved <= hardware.room and _host_fits(run, hardware)


def _host_fits(run: Resolved, hardware: Hardware) -> bool:
    """A twentieth of a host's memory stays free (`dtron.parallelisms.offload`)."""
    return offloaded_by_host(run, hardware) <= hardware.host_memory * 19 / 20


def _of_rank(run: Resolved, rank: int) -> RankMemory:
    elements, shard = (sum(getattr(u, k) for u in held(run, rank)) for k in ("gathered", "shard"))
    classes: dict[str, float] = {**replay.at_peak(run, rank)}
    # The replay leaves out the norm before a tied head.
    classes["parameters"], classes["optimizer"] = 4.0 * shard, float(sum(run.moments) * shard)
    summed = run.reduce_element * elements if run.times_reduced < run.micro_batches else 0
    state = sum(classes[name] for name in ("parameters", "optimizer", "gathered"))
    state += max(4.0 * shard, summed)
    classes["gradients"] += _foreign(run, rank)
    classes["buffers"] = _context(run) + _peers(run, rank)
    reserved = replay.reserved(run, rank) + _on_other_streams(run, rank)
    return RankMemory(rank, elements, classes, in_flight(run, rank), state, reserved)


def _foreign(run: Resolved, rank: int) -> float:
    """Bytes of other tp ranks' rows in an embedding's gradient that is summed over micro-batches:
    DTensor's backward of a lookup makes all rows, which are split when they are reduced."""
    if run.times_reduced == run.micro_batches:
        return 0.0
    rows = sum(u.whole - u.gathered for u in held(run, rank) if u.kind == "embedding")
    return float(run.reduce_element * rows)


def _context(run: Resolved) -> float:
    """Bytes of context parallelism's buffers for keys and values."""
    if run.degrees["cp"] == 1:
        return 0.0
    width = 2 * run.model.local_kv_heads(run.tp) * run.model.head_size

    def held(layer: int) -> float:
        shape = run.context(layer)
        if run.exchanges_halos(layer):
            return run.tokens + run.halo(layer) / shape.inner
        return run.tokens * (run.degrees["cp"] if shape.gathers else 2)

    tokens = max(held(layer) for layer in range(run.model.n_layers + run.model.mtp))
    return float(width * tokens * run.element)


def _all_buffers(run: Resolved, rank: int) -> float:
    return _buffers(run, rank) + _context(run) + _peers(run, rank)


def _buffers(run: Resolved, rank: int) -> float:
    """Bytes of buffers on FSDP's streams, which each stage has separately, without gradient
    shards."""
    if run.shards == 1:  # weights are cast where they are used; sums are shards
        return float(sum(_reduction_sums(run, stage) for stage in run.stages_of(rank)))
    depth, again = run.config.parallel.prefetch, not run.policy.keep_gathered
    found = 0.0
    for stage in run.stages_of(rank):
        sizes = tuple(_parts(run, unit) for unit in units(run, stage))
        stays = run.layout is None  # the last unit
        found += gathered_through(sizes, depth, again, stays) + _reduction_sums(run, stage)
    return found


def _parts(run: Resolved, unit: Unit) -> tuple[Gather, ...]:
    """A unit's all-gathers: its dense part and its experts."""
    casts = run.element < 4  # float32 is sent without a cast
    shared = [(whole, part) for whole, part in gathered_bytes(run, unit) if part < whole]
    return tuple((whole, part * casts) for whole, part in shared)


def _reduction_sums(run: Resolved, stage: Stage) -> int:
    """Bytes that the largest unit's reduction holds in addition to existing gradient shards: new
    sums before they are added, sums before they are cast, and received gradients."""
    listed, each = units(run, stage), 0
    if run.times_reduced > 1:
        each += 4
    if run.reduce_element < 4:
        each += run.reduce_element
    received = run.element if run.exchanges else 0
    parts = (part for u in listed for part in reductions(run, u))
    return max((shard * each + gathered * received for gathered, shard in parts), default=0)


def _peers(run: Resolved, rank: int) -> float:
    """Bytes of memory that peers read, allocated for the whole run: token copies for experts; for
    copy engines, per stage and separately for dense part and experts, a shard of the largest unit's
    parameters, and all of its gradients if they are exchanged."""
    parallel, found = run.config.parallel, _mailbox(run)
    if not parallel.copy_engines:
        return found
    for stage in run.stages_of(rank):
        listed = units(run, stage)
        sent = [gathered_bytes(run, u) for u in listed]
        for place, sizes in enumerate(([u.dense for u in listed], [u.experts for u in listed])):
            if any(shard < whole for whole, shard in sizes):  # several ranks share it
                most = max(run.element * whole for whole, _ in sizes)
                found += max(each[place][1] for each in sent)
                found += most * (parallel.reduce_by == "all_to_all")
    return found


def _mailbox(run: Resolved) -> float:
    """Bytes of the mailbox that experts' ranks pull from: two halves, each with room for a rank's
    results, which are never in float8."""
    if run.config.parallel.dispatcher != "symmetric_memory":
        return 0.0
    rows = expert_room(run) * expert_rows(run) / run.experts["etp"]
    return 2 * rows * run.model.dim * run.element


def _on_other_streams(run: Resolved, rank: int) -> float:
    """Bytes allocated on other streams than the computation's: foreign rows, buffers, and gradient
    shards, as large as the parameters'; those of unshared parameters are on the computation
    stream."""
    shards = sum(shard for u in held(run, rank) for _, shard in reductions(run, u))
    return _foreign(run, rank) + _all_buffers(run, rank) + 4.0 * shards


def in_flight(run: Resolved, rank: int) -> dict[int, int]:
    """Number of micro-batches in flight per stage, when the rank holds most activations."""
    if run.layout is None:
        return {0: 1}
    weights = {stage.index: len(stage.layers) + 0.5 * stage.head for stage in run.stages_of(rank)}
    # If only the head's weight gradients are deferred, I frees the blocks' activations.
    ends = Kind.WEIGHT if run.layout.splits_backward else Kind.INPUT
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
