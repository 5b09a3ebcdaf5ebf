"""Bytes that a rank of each pipeline stage needs, by class, and its peak over a step.

    parameters   float32 master weights, a shard
    optimizer    moments, a shard; none before the first update, but room for them is needed then
    gathered     weights in the dtype of computation: all of them (zero 1 and 2, and where none
                 shares them), or those of the unit that computes and of those fetched ahead
    gradients    a shard in float32, or under accumulation to the end of the step whole ones
    reduction    the gradient of one unit in the dtype of computation, and as it is reduced
    activations  what blocks keep, of as many micro-batches as the schedule has in flight
    working      of one block what it computes again, and gradients of its widest hidden rows
    logits       of the rank with the head
    buffers      what collectives gather into, on a stream of their own

`peak` is what the allocator has handed out at the worst point of the step. `reserved` is what it
holds: memory of another stream is not given to this one, so shards of gradients, made on the stream
of reductions, come on top of the activations which they follow in time. That is what has to fit.
`outside` the allocator are the context, NCCL's channels and libraries; hardware rows say how much.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dtron.parallelisms.actions import Kind, Order
from dtron.plan import activations
from dtron.plan.hardware import Hardware
from dtron.plan.parameters import Unit, held, units
from dtron.plan.resolved import ELEMENT, Resolved, expert_room, expert_rows

CLASSES = (
    "parameters",
    "optimizer",
    "gathered",
    "gradients",
    "reduction",
    "activations",
    "working",
    "logits",
    "buffers",
)
MOMENTS = {"adamw": 2, "sgd": 0}
FRAGMENTED = 1.02
"""What the allocator holds over what it needs; fitted to the runs named in docs/planning.md."""


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


def worst(ranks: tuple[RankMemory, ...]) -> RankMemory:
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


def fits(run: Resolved, ranks: tuple[RankMemory, ...], hardware: Hardware) -> bool:
    """Whether a device holds the worst rank, and a host what its ranks offload, of which a
    twentieth stays free (`dtron.parallelisms.offload`)."""
    return (
        worst(ranks).reserved <= hardware.memory - hardware.outside
        and offloaded_by_host(run, hardware) <= hardware.host_memory * 19 / 20
    )


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
        "reduction": _reduction(run, own),
        "activations": sum(modules.values()),
        "working": _working(run, rank),
        "logits": activations.logits(run) if _has_head(run, rank) else 0.0,
        "buffers": _buffers(run, own) + _peers(run, rank),
    }
    points = _points(run, rank, classes, flying)
    reserved = _reserved(run, classes)
    return RankMemory(rank, elements, classes, modules, flying, points, reserved)


def _moment(run: Resolved) -> int:
    return ELEMENT[run.config.optim.moments]


def _has_head(run: Resolved, rank: int) -> bool:
    return any(stage.head for stage in run.stages_of(rank))


def _gathered(run: Resolved, rank: int, own: list[Unit]) -> float:
    """FSDP gathers a unit, and `prefetch` more; the root and, without a pipeline, the last unit
    stay gathered."""
    if run.policy.keep_gathered:
        return float(run.element * sum(u.gathered for u in own))
    window = 1 + run.config.parallel.prefetch
    most = 0
    for stage in run.stages_of(rank):
        listed = units(run, stage)
        root = sum(u.gathered for u in listed if u.name == "root")
        moving = [u.gathered for u in listed if u.name != "root"]
        last = moving.pop() if run.layout is None and moving else 0
        spans = [sum(moving[i : i + window]) for i in range(max(1, len(moving) - window + 1))]
        most = max(most, root + last + max(spans, default=0))
    return float(run.element * most)


def _accumulates(run: Resolved) -> bool:
    """Whether whole gradients are summed over micro-batches and reduced once."""
    return not run.policy.reduce_each_micro_batch and run.micro_batches > 1


def _gradients(run: Resolved, own: list[Unit]) -> float:
    reduced = ELEMENT[run.config.parallel.reduce_dtype]
    shard, whole = (sum(getattr(u, key) for u in own) for key in ("shard", "gathered"))
    # The shards appear unit by unit while the whole gradients go.
    return max(4.0 * shard, float(reduced * whole)) if _accumulates(run) else 4.0 * shard


def _reduction(run: Resolved, own: list[Unit]) -> float:
    """Of the largest unit: gradients as the backward makes them, and as they are sent."""
    largest = max((u.gathered for u in own), default=0)
    return float(largest * (run.element + ELEMENT[run.config.parallel.reduce_dtype]))


def _buffers(run: Resolved, own: list[Unit]) -> float:
    """All-gathers of FSDP go into a buffer first; context parallelism sends keys and values."""
    largest = max((u.gathered for u in own), default=0)
    found = float(run.element * largest)
    if run.degrees["cp"] > 1:
        width = 2 * run.model.n_kv_heads * run.model.head_size // run.tp
        whole = any(m == "all_gather" for m in run.config.parallel.cp_methods())
        blocks = run.degrees["cp"] if whole else 2
        found += blocks * width * run.tokens * run.element
    return found


def _peers(run: Resolved, rank: int) -> float:
    """What peers read, for good: rows of experts; by copy engines, of each stage, dense and experts
    apart, a share of the largest unit's parameters, and all of its gradients where they are
    exchanged."""
    parallel, found = run.config.parallel, _mailbox(run)
    if not parallel.copy_engines:
        return found
    for stage in run.stages_of(rank):
        listed = units(run, stage)
        dense = [(u.shard - u.experts_shard, u.gathered - u.experts_gathered) for u in listed]
        experts = [(u.experts_shard, u.experts_gathered) for u in listed]
        for sizes in (dense, experts):
            shard, whole = max(sizes, key=lambda size: size[1], default=(0, 0))
            if shard < whole:  # several ranks share it
                found += run.element * (shard + whole * (parallel.reduce_by == "all_to_all"))
    return found


def _mailbox(run: Resolved) -> float:
    """Rows that experts' ranks pull from each other, twice as many as one has room for."""
    if run.config.parallel.dispatcher != "symmetric_memory":
        return 0.0
    rows = expert_room(run) * expert_rows(run) / run.experts["etp"]
    return 2 * rows * run.model.dim * run.element


def _activations(run: Resolved, flying: Mapping[int, int]) -> dict[str, float]:
    """By module, of all micro-batches in flight. Offloaded ones are in host memory, but for those
    of two blocks."""
    found: dict[str, float] = {}
    for stage in run.stages:
        layers = stage.layers
        if stage.index not in flying:
            continue
        times = float(flying[stage.index])
        if run.config.recompute.offload:
            times, layers = 1.0, layers[:2]
        for layer in layers:
            for module, size in activations.kept(run, layer).items():
                found[module] = found.get(module, 0.0) + times * size
        if stage.head:  # the last norm: its input, and what the head reads
            found["head"] = 2 * activations.boundary(run) * times
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
    made, activated = classes["gradients"], classes["activations"]
    before = made if run.micro_batches > max(flying.values(), default=1) else 0.0
    listed = [unit for stage in run.stages_of(rank) for unit in units(run, stage)]
    embedding = [u for u in listed if u.kind == "embedding"]
    inner = _reduced(run, [u for u in listed if u.kind != "embedding"])
    gathered, at_loss = classes["gathered"], classes["gathered"]
    if not run.policy.keep_gathered:
        gathered += classes["buffers"] - peers
        at_loss = float(run.element * sum(u.gathered for u in listed if u.name in ("root", "head")))
    working = gathered + classes["working"] + inner
    points = {
        "loss": fixed + at_loss + before + activated + classes["logits"],
        "first backward": fixed + working + before + activated,
        "last backward": fixed + working + made,
        "update": fixed + made,
    }
    if embedding:  # reduced when its micro-batch is done
        left = activated * (1 - 1 / max(sum(flying.values()), 1))
        points["embedding"] = fixed + gathered + made + left + _reduced(run, embedding)
    return points


def _reduced(run: Resolved, own: list[Unit]) -> float:
    """As `_reduction`, beside the gradients that are summed over micro-batches."""
    largest = max((u.gathered for u in own), default=0)
    sent = ELEMENT[run.config.parallel.reduce_dtype]
    return float(largest * (sent if _accumulates(run) else run.element + sent))


def _reserved(run: Resolved, classes: Mapping[str, float]) -> float:
    """Shards of gradients, as large as the parameters', and buffers of gathers are of other
    streams."""
    fixed = classes["parameters"] + classes["optimizer"]
    whole = classes["gradients"] if _accumulates(run) else 0.0
    late = max(classes["logits"], classes["working"] + classes["reduction"])
    compute = classes["gathered"] + classes["activations"] + late + whole
    return fixed + FRAGMENTED * compute + classes["buffers"] + classes["parameters"]


def in_flight(run: Resolved, rank: int) -> dict[int, int]:
    """By stage, at the moment when the rank holds most activations."""
    if run.layout is None:
        return {0: 1}
    weights = {stage.index: len(stage.layers) + 0.5 * stage.head for stage in run.stages_of(rank)}
    heaviest, best = -1.0, {}
    for counts in _counts(run.order, rank):
        load = sum(weights[stage] * n for stage, n in counts)
        if load > heaviest:
            heaviest, best = load, dict(counts)
    return best


def _counts(order: Order, rank: int) -> tuple[tuple[tuple[int, int], ...], ...]:
    """Micro-batches in flight by stage after every forward of a rank, each combination once."""
    live: dict[int, int] = {action.stage: 0 for action in order[rank]}
    found: dict[tuple[tuple[int, int], ...], None] = {}
    for action in order[rank]:
        if action.kind is Kind.FORWARD:
            live[action.stage] += 1
            found[tuple(live.items())] = None
        elif action.kind in (Kind.BACKWARD, Kind.WEIGHT):
            live[action.stage] -= 1
    return tuple(found)
