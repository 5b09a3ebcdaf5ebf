"""Bytes that a rank of each pipeline stage needs, by class, and its peak over a step.

    parameters   float32 master weights, a shard
    optimizer    moments, a shard; none before the first update, but room for them is needed then
    gathered     weights in the dtype of computation: all of them (zero 1 and 2, and where none
                 shares them), or those of the unit that computes and of those fetched ahead
    gradients    a shard in float32, or under accumulation to the end of the step whole ones
    foreign rows of an embedding, whose gradient tp ranks have whole until it is reduced
    reduction    the gradient of one unit in the dtype of computation, and as it is sent
    activations  what blocks keep, of as many micro-batches as the schedule has in flight
    working      of one block what it computes again, and gradients of its widest hidden rows
    logits       of the rank with the head
    waiting      what the reduction of a micro-batch sent last, until the next one reduces
    buffers      what collectives gather into and sum in, on streams of their own

`peak` is what the allocator has handed out at the worst point of the step. `reserved` is what it
holds, and what has to fit: of the stream of computation by a replay of its tensors
(`dtron.plan.replay`). Memory of another stream is not given to this one, so shards of gradients,
made on the stream of reductions, come on top of the activations which they follow in time; but for
those of what one rank has alone, which are made on this one.
`outside` the allocator are the context, NCCL's channels and libraries; hardware rows say how much.
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
    """Of one pipeline rank; its data, context and tensor parallel neighbours are alike."""

    rank: int
    elements: int
    """Parameters of its stages, after tp and ep."""
    classes: Mapping[str, float]
    """Bytes by class, the most that each takes."""
    modules: Mapping[str, float]
    """Bytes of activations by module."""
    in_flight: Mapping[int, int]
    """Micro-batches of each of its stages whose activations it holds at the worst moment."""
    points: Mapping[str, float]
    """Bytes at points of the step."""
    reserved: float

    @property
    def peak(self) -> float:
        """The most that is allocated at once."""
        return max(self.points.values())

    @property
    def state(self) -> float:
        """Bytes of the model: weights, gradients and optimizer, without activations."""
        return sum(
            self.classes[name] for name in ("parameters", "optimizer", "gathered", "gradients")
        )

    def as_json(self) -> dict[str, Any]:
        """All of it."""
        return {**asdict(self), "peak": self.peak, "state": self.state}


def memory(run: Resolved) -> tuple[RankMemory, ...]:
    """Of every pipeline rank."""
    return tuple(_of_rank(run, rank) for rank in range(run.degrees["pp"]))


def expandable(run: Resolved, rank: int) -> float:
    """What `reserved` of a pipeline rank is under `PYTORCH_ALLOC_CONF=expandable_segments:True`."""
    return replay.reserved(*_replayed(run, rank), Expandable) + _elsewhere(run, rank)


def least(run: Resolved, hardware: Hardware) -> tuple[float, ...]:
    """What `reserved` of each pipeline rank cannot be below, computed much faster; empty if the run
    cannot fit."""
    found: list[float] = []
    for rank in range(run.degrees["pp"]) if _host_fits(run, hardware) else ():
        found.append(replay.least(*_replayed(run, rank)) + _elsewhere(run, rank))
        if found[-1] > hardware.room:
            return ()
    return tuple(found)


def fitting(
    run: Resolved, hardware: Hardware, bounds: Sequence[float], part: int = 0, of: int = 1
) -> tuple[RankMemory, ...] | None:
    """`memory` of a run that fits; None at the first rank that does not.

    Args:
        bounds: `least`; the fullest ranks are looked at first.
        part: which of so many parts of the ranks to look at.
    """
    found: list[RankMemory] = []
    for rank in sorted(range(len(bounds)), key=lambda rank: -bounds[rank])[part::of]:
        found.append(_of_rank(run, rank))
        if found[-1].reserved > hardware.room:
            return None
    return tuple(sorted(found, key=lambda each: each.rank))


def worst(ranks: Sequence[RankMemory]) -> RankMemory:
    """The rank that holds most."""
    return max(ranks, key=lambda each: each.reserved)


def offloaded(run: Resolved) -> float:
    """Bytes of activations that a rank has in host memory, at most."""
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
    """The same of all ranks of a host."""
    return offloaded(run) * min(hardware.host, run.world_size)


def fits(run: Resolved, ranks: Sequence[RankMemory], hardware: Hardware) -> bool:
    """Whether a device holds the worst rank, and a host what its ranks offload."""
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
    reserved = replay.reserved(*_replayed(run, rank)) + _elsewhere(run, rank)
    return RankMemory(rank, elements, classes, modules, flying, points, reserved)


def _moment(run: Resolved) -> int:
    return ELEMENT[run.config.optim.moments]


def _has_head(run: Resolved, rank: int) -> bool:
    return any(stage.head for stage in run.stages_of(rank))


def _gathered(run: Resolved, rank: int, own: list[Unit]) -> float:
    """FSDP gathers a unit and `prefetch` more. The root, experts that no ranks share and, without a
    pipeline, the last unit stay gathered."""
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
    """Elements of what no ranks share."""
    return [whole for whole, shard in unit.groups if shard == whole]


def _sent_at_once(run: Resolved, own: list[Unit]) -> int:
    """Elements of the largest reduction."""
    return max((whole for u in own for whole, _ in reductions(run, u)), default=0)


def _accumulates(run: Resolved) -> bool:
    """Whether whole gradients are summed over micro-batches and reduced once."""
    return not run.policy.reduce_each_micro_batch and run.micro_batches > 1


def _gradients(run: Resolved, own: list[Unit]) -> float:
    reduced = ELEMENT[run.config.parallel.reduce_dtype]
    shard, whole = (sum(getattr(u, key) for u in own) for key in ("shard", "gathered"))
    # The shards appear unit by unit while the whole gradients go.
    return max(4.0 * shard, float(reduced * whole)) if _accumulates(run) else 4.0 * shard


def _foreign(run: Resolved, own: list[Unit]) -> float:
    """Of sums over micro-batches, rows of other tp ranks."""
    reduced = ELEMENT[run.config.parallel.reduce_dtype]
    return float(reduced * _unsplit(own)) if _accumulates(run) else 0.0


def _unsplit(own: list[Unit]) -> int:
    """Elements of other tp ranks in an embedding's gradient: DTensor's backward of a lookup makes
    all rows on each rank, which are split when they are reduced."""
    return sum(u.whole - u.gathered for u in own if u.kind == "embedding")


def _reduces_each(run: Resolved) -> bool:
    """Whether several micro-batches are reduced one by one."""
    return run.policy.reduce_each_micro_batch and run.micro_batches > 1


def _exchanges(run: Resolved) -> bool:
    return run.shards > 1 and run.config.parallel.reduce_by == "all_to_all"


def _sent(run: Resolved) -> int:
    """Bytes an element of what a reduction takes of the allocator to send from. Gradients that are
    exchanged go as they are, and by copy engines out of memory that is not the allocator's."""
    if _exchanges(run):
        return 0 if run.config.parallel.copy_engines else run.element
    return ELEMENT[run.config.parallel.reduce_dtype]


def _reduction(run: Resolved, own: list[Unit]) -> float:
    """Of the largest unit: gradients as the backward makes them, and as they are sent, of experts
    that are apart before the others."""
    sizes = (u.gathered * run.element + _sent(run) * _sent_at_once(run, [u]) for u in own)
    return float(max(sizes, default=0))


def _waiting(run: Resolved, rank: int) -> float:
    """FSDP keeps what it sent of a unit until the next one is reduced, and at the end of a step:
    between micro-batches that of the first unit, without experts that are apart, through the
    forward and the loss."""
    if not _reduces_each(run) or run.keeps_dense:
        return 0.0
    firsts = [units(run, stage)[:1] for stage in run.stages_of(rank)]
    return float(_sent(run) * sum(u.dense[0] for first in firsts for u in first))


def _gather(run: Resolved, own: list[Unit]) -> float:
    """The buffer of the largest gather alone."""
    return float(run.element * max((u.gathered for u in own), default=0))


def _context(run: Resolved) -> float:
    """Keys and values that context parallelism sends and receives."""
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
    """Of FSDP's streams, which each stage has of its own, over shards of gradients."""
    if run.shards == 1:  # weights are cast where they are read, sums are shards
        return float(sum(_sums(run, stage) for stage in run.stages_of(rank)))
    depth, again = run.config.parallel.prefetch, not run.policy.keep_gathered
    found = 0.0
    for stage in run.stages_of(rank):
        sizes = tuple(_parts(run, unit) for unit in units(run, stage))
        stays = run.layout is None  # the last unit
        found += gathered_through(sizes, depth, again, stays) + _sums(run, stage)
    return found


def _parts(run: Resolved, unit: Unit) -> tuple[Gather, ...]:
    """A unit's gathers, of its dense part and of its experts."""
    cast = run.element if run.element < 4 else 0  # what needs no cast is sent as it is
    shared = [(whole, part) for whole, part in unit.groups if part < whole]
    return tuple((run.element * whole, cast * part) for whole, part in shared)


def _sums(run: Resolved, stage: Stage) -> int:
    """Of a stage's largest unit, what its reduction holds beside shards of gradients that are there
    already: new sums before they are added, sums before they are cast, what others have sent."""
    listed, each = units(run, stage), 0
    if _reduces_each(run):
        each += 4
    if (reduced := ELEMENT[run.config.parallel.reduce_dtype]) < 4:
        each += reduced
    received = run.element if _exchanges(run) else 0
    parts = (part for u in listed for part in reductions(run, u))
    return max((shard * each + gathered * received for gathered, shard in parts), default=0)


def _peers(run: Resolved, rank: int) -> float:
    """What peers read, for good: rows of experts; by copy engines, of each stage, dense and experts
    apart, a share of the largest unit's parameters, and all of its gradients where they are
    exchanged."""
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
    """Rows that experts' ranks pull from each other, twice as many as one has room for: results,
    which are not in float8 where rows are."""
    if run.config.parallel.dispatcher != "symmetric_memory":
        return 0.0
    rows = expert_room(run) * expert_rows(run) / run.experts["etp"]
    return 2 * rows * run.model.dim * run.element


def _activations(run: Resolved, flying: Mapping[int, int]) -> dict[str, float]:
    """By module, of all micro-batches in flight. Offloaded ones are in host memory, but for two
    blocks of a stage, and inputs of stages, which the schedule holds."""
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
        if stage.head:  # the last norm: its input, and what the head reads
            found["head"] = 2 * activations.boundary(run) * flies
    return found


def _working(run: Resolved, rank: int) -> float:
    """While a block's backward runs: what it computed again, and gradients of its hidden rows."""
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
    """Allocated bytes at the worst moments, as traces of the real code find them
    (tests/plan/test_exact.py). Gradients are there once a micro-batch's backward has made them."""
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
    """As `_reduction`, beside the gradients that are summed over micro-batches."""
    largest = max((u.gathered for u in own), default=0)
    made = 0 if _accumulates(run) else run.element * (largest + _unsplit(own))
    return float(_sent_at_once(run, own) * _sent(run) + made)


def _replayed(run: Resolved, rank: int) -> tuple[Resolved, int, int, int, int]:
    """Arguments of `replay.reserved` and `replay.least`."""
    return run, rank, _moment(run), MOMENTS[run.config.optim.name], _sent(run)


def _points_of_parts(run: Resolved, rank: int) -> dict[str, float]:
    """Of split backwards: micro-batches are between the two parts of theirs at many moments, which
    are replayed. Shards of gradients are there then if micro-batches are reduced one by one."""
    shards = _shards(run, rank) if _reduces_each(run) else 0.0
    return {"step": replay.least(*_replayed(run, rank)) + _apart(run, rank) + shards}


def _elsewhere(run: Resolved, rank: int) -> float:
    """Not of the stream of computation."""
    return _apart(run, rank) + _shards(run, rank)


def _apart(run: Resolved, rank: int) -> float:
    """Foreign rows, and buffers, which are of streams of their own."""
    return _foreign(run, list(held(run, rank))) + _all_buffers(run, rank)


def _shards(run: Resolved, rank: int) -> float:
    """Of gradients, as large as the parameters', on the stream of reductions; those of what one
    rank has alone are of the stream of computation."""
    return 4.0 * sum(shard for u in held(run, rank) for _, shard in reductions(run, u))


def in_flight(run: Resolved, rank: int) -> dict[int, int]:
    """By stage, at the moment when the rank holds most activations."""
    if run.layout is None:
        return {0: 1}
    weights = {stage.index: len(stage.layers) + 0.5 * stage.head for stage in run.stages_of(rank)}
    heaviest, best = -1.0, {}
    # Where the head's weight gradients alone are put off, I frees the blocks' activations.
    ends = Kind.WEIGHT if run.layout.splits_backward else Kind.INPUT
    for counts in _counts(run.order, rank, ends):
        load = sum(weights[stage] * n for stage, n in counts)
        if load > heaviest:
            heaviest, best = load, dict(counts)
    return best


def _counts(order: Order, rank: int, ends: Kind) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Micro-batches in flight by stage after every forward of a rank, each combination once.

    Args:
        ends: the part of a backward that does away with a micro-batch.
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
