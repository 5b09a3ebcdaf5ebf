"""Memory of each pipeline rank by class, and its peak over a step.

    parameters   shards of the float32 master weights
    optimizer    shards of the moments, allocated in the first update
    gathered     weights in the dtype of computation: all (zero 1 and 2, or unshared), or those of
                 the computing unit and the prefetched ones
    gradients    float32 shards, or unsharded gradients while they accumulate over the step
    foreign rows of an embedding's gradient, which tp ranks hold unsplit until it is reduced
    reduction    one unit's gradients in the dtype of computation, and the buffer they are sent from
    activations  tensors kept by blocks, for all micro-batches in flight
    working      one block's recomputed tensors, and gradients of its widest hidden states
    logits       logits and their gradient, on the rank with the head
    waiting      the last reduction's send buffer, until the next reduction
    buffers      outputs and sums of collectives, on separate streams

`peak` is the allocated memory at the worst point of the step. `reserved` is what the allocator
holds, and what must fit; for the computation stream it is found by replaying its tensors
(`dtron.plan.replay`). The allocator does not share memory between streams: gradient shards, made on
the reduction stream, come on top of the activations freed before them. Gradients of unshared
parameters are made on the computation stream. The CUDA context, NCCL's channels and libraries are
`outside` the allocator; hardware rows give their size.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dtron.parallelisms.pipeline.schedule_ops import Kind, Order
from dtron.plan import activations, replay
from dtron.plan.allocator import Expandable
from dtron.plan.gather_buffers import Gather, gathered_through
from dtron.plan.hardware import Hardware
from dtron.plan.parameters import Unit, held, reductions, units
from dtron.plan.run_shape import ELEMENT, Resolved, Stage, expert_room, expert_rows

CLASSES = (
    "parameters",
    "optimizer",
    "gathered",
    "gradients",
    "foreign rows",
    "reduction",
    "activations",
    "working",
    "logits",
    "waiting",
    "buffers",
)
MOMENTS = {"adamw": 2, "sgd": 0}


@dataclass(frozen=True)
class RankMemory:
    """Memory of one pipeline rank; its data, context and tensor parallel neighbours need the
    same."""

    rank: int
    elements: int
    """Number of parameters of its stages, after tp and ep."""
    classes: Mapping[str, float]
    """Bytes by class, at each class's maximum."""
    modules: Mapping[str, float]
    """Bytes of activations by module."""
    in_flight: Mapping[int, int]
    """Number of micro-batches in flight at the worst moment, per stage."""
    points: Mapping[str, float]
    """Allocated bytes at points of the step."""
    reserved: float

    @property
    def peak(self) -> float:
        """Maximum of allocated bytes."""
        return max(self.points.values())

    @property
    def state(self) -> float:
        """Bytes of the model: weights, gradients and optimizer, without activations."""
        return sum(
            self.classes[name] for name in ("parameters", "optimizer", "gathered", "gradients")
        )

    def as_json(self) -> dict[str, Any]:
        """Return all values as JSON objects."""
        return {**asdict(self), "peak": self.peak, "state": self.state}


def memory(run: Resolved) -> tuple[RankMemory, ...]:
    """Compute the memory of every pipeline rank."""
    return tuple(_of_rank(run, rank) for rank in range(run.degrees["pp"]))


def expandable(run: Resolved, rank: int) -> float:
    """`reserved` of a pipeline rank under `PYTORCH_ALLOC_CONF=expandable_segments:True`."""
    return replay.reserved(*_replayed(run, rank), Expandable) + _on_other_streams(run, rank)


def least(run: Resolved, hardware: Hardware) -> tuple[float, ...]:
    """Lower bound of `reserved` for each pipeline rank, computed much faster; empty if the run
    cannot fit."""
    found: list[float] = []
    for rank in range(run.degrees["pp"]) if _host_fits(run, hardware) else ():
        found.append(replay.least(*_replayed(run, rank)) + _on_other_streams(run, rank))
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
    own = list(held(run, rank))
    elements, shard = (sum(getattr(u, key) for u in own) for key in ("gathered", "shard"))
    flying = in_flight(run, rank)
    modules = _activations(run, flying)
    classes = {
        "parameters": 4.0 * shard,
        "optimizer": float(MOMENTS[run.config.optim.name] * _moment(run) * shard),
        "gathered": _gathered(run, rank, own),
        "gradients": _gradients(run, own),
        "foreign rows": _foreign(run, own),
        "reduction": _reduction(run, own),
        "activations": sum(modules.values()),
        "working": _working(run, rank),
        "logits": activations.logits(run) if _has_head(run, rank) else 0.0,
        "waiting": _waiting(run, rank),
        "buffers": _all_buffers(run, rank),
    }
    if run.layout is not None and run.layout.splits_backward:
        points = _points_of_parts(run, rank)
    else:
        points = _points(run, rank, classes, flying)
    reserved = replay.reserved(*_replayed(run, rank)) + _on_other_streams(run, rank)
    return RankMemory(rank, elements, classes, modules, flying, points, reserved)


def _moment(run: Resolved) -> int:
    return ELEMENT[run.config.optim.moments]


def _has_head(run: Resolved, rank: int) -> bool:
    return any(stage.head for stage in run.stages_of(rank))


def _gathered(run: Resolved, rank: int, own: list[Unit]) -> float:
    """Bytes of gathered weights: those of a unit and `prefetch` more. The root, unshared experts
    and, without a pipeline, the last unit stay gathered."""
    if run.policy.keep_gathered:
        return float(run.element * sum(u.gathered for u in own))
    window = 1 + run.config.parallel.prefetch
    most = 0
    for stage in run.stages_of(rank):
        listed = units(run, stage)
        root = sum(u.gathered for u in listed if u.name == "root")
        root += sum(whole for u in listed if u.name != "root" for whole in _unshared(u))
        moving = [u.gathered - sum(_unshared(u)) for u in listed if u.name != "root"]
        last = moving.pop() if run.layout is None and moving else 0
        spans = [sum(moving[i : i + window]) for i in range(max(1, len(moving) - window + 1))]
        most = max(most, root + last + max(spans, default=0))
    return float(run.element * most)


def _unshared(unit: Unit) -> list[int]:
    """Elements of parameters that are not sharded."""
    return [whole for whole, shard in unit.groups if shard == whole]


def _sent_at_once(run: Resolved, own: list[Unit]) -> int:
    """Elements of the largest reduction."""
    return max((whole for u in own for whole, _ in reductions(run, u)), default=0)


def _accumulates(run: Resolved) -> bool:
    """Whether unsharded gradients are summed over micro-batches and reduced once."""
    return not run.policy.reduce_each_micro_batch and run.micro_batches > 1


def _gradients(run: Resolved, own: list[Unit]) -> float:
    reduced = ELEMENT[run.config.parallel.reduce_dtype]
    shard, whole = (sum(getattr(u, key) for u in own) for key in ("shard", "gathered"))
    # Shards are allocated unit by unit while the unsharded gradients are freed.
    return max(4.0 * shard, float(reduced * whole)) if _accumulates(run) else 4.0 * shard


def _foreign(run: Resolved, own: list[Unit]) -> float:
    """Bytes of other tp ranks' rows in sums over micro-batches."""
    reduced = ELEMENT[run.config.parallel.reduce_dtype]
    return float(reduced * _unsplit(own)) if _accumulates(run) else 0.0


def _unsplit(own: list[Unit]) -> int:
    """Elements of other tp ranks in an embedding's gradient: DTensor's backward of a lookup makes
    all rows on each rank; they are split when they are reduced."""
    return sum(u.whole - u.gathered for u in own if u.kind == "embedding")


def _reduces_each(run: Resolved) -> bool:
    """Whether several micro-batches are reduced one by one."""
    return run.policy.reduce_each_micro_batch and run.micro_batches > 1


def _exchanges(run: Resolved) -> bool:
    return run.shards > 1 and run.config.parallel.reduce_by == "all_to_all"


def _sent(run: Resolved) -> int:
    """Bytes per element of a reduction's send buffer in the allocator's memory. Exchanged gradients
    are sent in their own dtype; copy engines send from memory outside the allocator."""
    if _exchanges(run):
        return 0 if run.config.parallel.copy_engines else run.element
    return ELEMENT[run.config.parallel.reduce_dtype]


def _reduction(run: Resolved, own: list[Unit]) -> float:
    """Bytes of the largest unit's gradients, as computed and as sent; separate experts' are sent
    first."""
    sizes = (u.gathered * run.element + _sent(run) * _sent_at_once(run, [u]) for u in own)
    return float(max(sizes, default=0))


def _waiting(run: Resolved, rank: int) -> float:
    """Bytes of the last send buffer: FSDP keeps a unit's until the next unit is reduced. Between
    micro-batches, the first unit's (without separate experts) is kept through forward and loss."""
    if not _reduces_each(run) or run.keeps_dense:
        return 0.0
    firsts = [units(run, stage)[:1] for stage in run.stages_of(rank)]
    return float(_sent(run) * sum(u.dense[0] for first in firsts for u in first))


def _gather(run: Resolved, own: list[Unit]) -> float:
    """Bytes of the buffer of the largest all-gather."""
    return float(run.element * max((u.gathered for u in own), default=0))


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
    cast = run.element if run.element < 4 else 0  # sent without a cast
    shared = [(whole, part) for whole, part in unit.groups if part < whole]
    return tuple((run.element * whole, cast * part) for whole, part in shared)


def _reduction_sums(run: Resolved, stage: Stage) -> int:
    """Bytes that the largest unit's reduction holds in addition to existing gradient shards: new
    sums before they are added, sums before they are cast, and received gradients."""
    listed, each = units(run, stage), 0
    if _reduces_each(run):
        each += 4
    if (reduced := ELEMENT[run.config.parallel.reduce_dtype]) < 4:
        each += reduced
    received = run.element if _exchanges(run) else 0
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
        for sizes in ([u.dense for u in listed], [u.experts for u in listed]):
            whole, shard = max(sizes, key=lambda size: size[0], default=(0, 0))
            if shard < whole:  # several ranks share it
                found += run.element * (shard + whole * (parallel.reduce_by == "all_to_all"))
    return found


def _mailbox(run: Resolved) -> float:
    """Bytes of the mailbox that experts' ranks pull from: two halves, each with room for a rank's
    results, which are never in float8."""
    if run.config.parallel.dispatcher != "symmetric_memory":
        return 0.0
    rows = expert_room(run) * expert_rows(run) / run.experts["etp"]
    return 2 * rows * run.model.dim * run.element


def _activations(run: Resolved, flying: Mapping[int, int]) -> dict[str, float]:
    """Bytes of activations by module, for all micro-batches in flight. Offloaded ones are in host
    memory, except those of two blocks of a stage and the stages' inputs, which the executor
    holds."""
    found: dict[str, float] = {}
    for stage in run.stages:
        layers = stage.layers
        if stage.index not in flying:
            continue
        flies = times = float(flying[stage.index])
        if run.config.recompute.offload:
            times, layers = 1.0, layers[:2]
            held = flies - 1 if stage.index > 0 and layers else 0.0
            found["input"] = found.get("input", 0.0) + held * activations.boundary(run)
        for layer in layers:
            for module, size in activations.kept(run, layer).items():
                found[module] = found.get(module, 0.0) + times * size
        if stage.head:  # the last norm: its input, and the head's input
            found["head"] = 2 * activations.boundary(run) * flies
    return found


def _working(run: Resolved, rank: int) -> float:
    """Bytes during a block's backward: recomputed tensors, and gradients of its hidden states."""
    most = 0.0
    for layer in {layer for stage in run.stages_of(rank) for layer in stage.layers}:
        again = 0.0
        if run.recomputes(layer):
            kept = sum(activations.kept(run, layer).values())
            again = sum(activations.kept(run, layer, whole=True).values()) - kept
        most = max(most, again + 2 * activations.widest(run, layer))
    return most


def _points(
    run: Resolved, rank: int, classes: Mapping[str, float], flying: Mapping[int, int]
) -> dict[str, float]:
    """Allocated bytes at the worst moments, as found by traces of the real code
    (tests/plan/test_exact.py). Gradients exist after a micro-batch's backward."""
    peers = _peers(run, rank)
    fixed = classes["parameters"] + classes["optimizer"] + peers
    made = classes["gradients"] + classes["foreign rows"]
    activated = classes["activations"]
    before = made if run.micro_batches > max(flying.values(), default=1) else 0.0
    listed = [unit for stage in run.stages_of(rank) for unit in units(run, stage)]
    embedding = [u for u in listed if u.kind == "embedding"]
    inner = _reduced(run, [u for u in listed if u.kind != "embedding"])
    gathered, at_loss = classes["gathered"], classes["gathered"]
    if not run.policy.keep_gathered:
        gathered += _gather(run, listed) + _context(run)
        at_loss = float(run.element * sum(u.gathered for u in listed if u.name in ("root", "head")))
    working = gathered + classes["working"] + inner
    # A step's last backward frees weights unit by unit.
    last = max((u.gathered for u in listed), default=0) * run.element
    last = min(gathered, last) if run.layout is None else gathered
    points = {
        "loss": fixed + at_loss + before + activated + classes["logits"] + classes["waiting"],
        "first backward": fixed + working + before + activated,
        "last backward": fixed + last + classes["working"] + inner + made,
        "update": fixed + made,
    }
    if embedding:  # reduced when its micro-batch is done
        left = activated * (1 - 1 / max(sum(flying.values()), 1))
        points["embedding"] = fixed + last + made + left + _reduced(run, embedding)
    return points


def _reduced(run: Resolved, own: list[Unit]) -> float:
    """Like `_reduction`, in addition to gradients summed over micro-batches."""
    largest = max((u.gathered for u in own), default=0)
    made = 0 if _accumulates(run) else run.element * (largest + _unsplit(own))
    return float(_sent_at_once(run, own) * _sent(run) + made)


def _replayed(run: Resolved, rank: int) -> tuple[Resolved, int, int, int, int]:
    """Arguments of `replay.reserved` and `replay.least`."""
    return run, rank, _moment(run), MOMENTS[run.config.optim.name], _sent(run)


def _points_of_parts(run: Resolved, rank: int) -> dict[str, float]:
    """Allocated bytes with split backwards, from a replay, since many micro-batches can be between
    the two parts of their backward. Gradient shards exist meanwhile if each micro-batch is
    reduced."""
    shards = _shards(run, rank) if _reduces_each(run) else 0.0
    return {"step": replay.least(*_replayed(run, rank)) + _separate_buffers(run, rank) + shards}


def _on_other_streams(run: Resolved, rank: int) -> float:
    """Bytes allocated on other streams than the computation's."""
    return _separate_buffers(run, rank) + _shards(run, rank)


def _separate_buffers(run: Resolved, rank: int) -> float:
    """Bytes of foreign rows, and of buffers on separate streams."""
    return _foreign(run, list(held(run, rank))) + _all_buffers(run, rank)


def _shards(run: Resolved, rank: int) -> float:
    """Bytes of gradient shards on the reduction stream, as large as the parameters'; those of
    unshared parameters are on the computation stream."""
    return 4.0 * sum(shard for u in held(run, rank) for _, shard in reductions(run, u))


def in_flight(run: Resolved, rank: int) -> dict[int, int]:
    """Number of micro-batches in flight per stage, when the rank holds most activations."""
    if run.layout is None:
        return {0: 1}
    weights = {stage.index: len(stage.layers) + 0.5 * stage.head for stage in run.stages_of(rank)}
    heaviest, best = -1.0, {}
    # If only the head's weight gradients are deferred, I frees the blocks' activations.
    ends = Kind.WEIGHT if run.layout.splits_backward else Kind.INPUT
    for counts in _counts(run.order, rank, ends):
        load = sum(weights[stage] * n for stage, n in counts)
        if load > heaviest:
            heaviest, best = load, dict(counts)
    return best


def _counts(order: Order, rank: int, ends: Kind) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Yield each distinct combination of micro-batches in flight per stage, after a rank's
    forwards.

    Args:
        ends: the part of a backward that frees a micro-batch's activations.
    """
    live: dict[int, int] = {action.stage: 0 for action in order[rank]}
    found: dict[tuple[tuple[int, int], ...], None] = {}
    for action in order[rank]:
        if action.kind is Kind.FORWARD:
            live[action.stage] += 1
            found[tuple(live.items())] = None
        elif action.kind in (Kind.BACKWARD, ends):
            live[action.stage] -= 1
    return tuple(found)
