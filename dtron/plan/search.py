"""Which layout is fastest: all legal ones under the memory limit, by predicted tokens a second.

Degrees are powers of two, tp and cp at most 8, cp above 1 from 8,192 tokens on, ep at least 8 where
there are as many ranks. What cannot be faster than the best ten is not looked at: a layout's bound
is the time of its layers, were the pipeline's ranks even and parameters where they are needed.
Layouts whose mean rank cannot fit go first, then those one of whose ranks cannot if the allocator
leaves no holes. Its holes are replayed, the fastest layouts first, until ten fit. The legality is
preflight's.

    tp x pp x cp x dp_replicate, dp_shard being the rest; ep x etp; schedule x stages a rank;
    micro-batch; recompute; zero; where one asks for it, float8

Activations are offloaded where a layout does not fit otherwise: it is never faster.
"""

import functools
import heapq
import itertools
import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.models.config import DecoderConfig
from dtron.plan.activations import block
from dtron.plan.feasibility import far_memory
from dtron.plan.hardware import Hardware
from dtron.plan.memory import MOMENTS, RankMemory, fitting, least, worst
from dtron.plan.parameters import parts
from dtron.plan.run_shape import ELEMENT, Resolved
from dtron.plan.steptime import Prediction, busy_seconds, predict, why_no_time
from dtron.plan.workers import most_processes, pool

SCHEDULES = (("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 4), ("ZBVZeroBubble", 2))
MODES = ("none", "selective", "full")
MICRO_BATCHES = (1, 2, 4, 8)
EXPERT_TP = (1, 2, 4, 8)
_DEGREES = ("tp", "cp", "pp", "ep", "etp", "dp_replicate", "schedule", "stages_per_rank")
RECIPE = "tensorwise"
"""Of float8, the recipe whose rates hardware rows have."""
HEADROOM = 0.05
"""Predicted memory was off by up to 5% (docs/planning.md)."""
TELL_EVERY = 10.0
"""Seconds."""
COUNTS: tuple[str, ...] = ("enumerated", "pruned", "illegal", "too large", "predicted")


class Point(NamedTuple):
    """A layout that was predicted, for a picture."""

    n_bytes: float
    speed: float
    """Tokens a second and GPU."""
    label: str
    """Which layout it is."""


@dataclass(frozen=True)
class Found:
    """One layout of the search."""

    label: str
    run: Resolved
    memory: RankMemory
    time: Prediction

    @property
    def limited(self) -> str:
        """The two largest parts of its time."""
        parts = sorted(self.time.parts.items(), key=lambda part: -part[1])[:2]
        return ", ".join(f"{name} {seconds / self.time.step:.0%}" for name, seconds in parts)

    @property
    def point(self) -> Point:
        """With the bytes that it reserves."""
        return Point(self.memory.reserved, self.time.tokens_per_second_per_gpu, self.label)


@dataclass(frozen=True)
class Searched:
    """The best layouts, and what was looked at."""

    best: tuple[Found, ...]
    seen: tuple[Point, ...]
    """All layouts that were predicted, the best first; of those that are not among these, bytes are
    what they need at least, without holes of the allocator."""
    counts: dict[str, int]
    """enumerated, pruned by the bound, illegal, too large, predicted."""
    headroom: float
    """Share of the device's room that they leave free."""


def search(
    config: RunConfig,
    world: int,
    hardware: Hardware,
    most: int = 10,
    float8: bool = False,
    processes: int = 0,
    tell: Callable[[str], None] | None = None,
    headroom: float = HEADROOM,
) -> Searched:
    """The best layouts of a model and a global batch.

    Args:
        headroom: share of the device's room that a layout leaves free.
        float8: look at float8 too, which changes what is trained.
        processes: that look at layouts, on which nothing found depends; 0: as many as processors,
            at most `workers.PROCESSES`. Where processes cannot be forked this one does all.
        tell: called every TELL_EVERY seconds with how far the search is.
    Raises:
        ConfigError: no layout is legal and fits; tells how many were looked at. Or there are no
            rates for what is asked for.
    """
    if why := why_no_time(config, hardware):
        raise ConfigError(f"--search ranks layouts by time: {why}")
    if float8 and not hardware.ceiling_float8:
        raise ConfigError(f"--float8: {hardware.name} has no float8; leave it out")
    model = Resolved.model_of(config)
    hardware = replace(hardware, outside=hardware.outside + headroom * hardware.room)
    space = _Space(config, model, world, hardware, processes or most_processes())
    for choice in _choices(config, model, world, float8):
        space.push(choice)
    best = []
    with pool(space.processes) as space.workers:
        last = time.monotonic()
        while space.queue and len(best) < most:
            if found := space.pop():
                best.append(found)
            if tell and time.monotonic() - last > TELL_EVERY:
                last = time.monotonic()
                waiting = f"{len(space.queue):,} wait"
                tell(f"{len(best)} of the best {most} found; {space.progress()}, {waiting}")
    best.sort(key=lambda found: -found.time.tokens_per_second_per_gpu)  # a bound may be close
    counts = space.counts
    for entry in space.queue:
        counts["pruned" if entry.timed is None else "predicted"] += 1
    if not best:
        limit = hardware.room / (1 - headroom)
        raise ConfigError(
            f"--search found no legal layout of {world} GPUs that fits {limit / 2**30:.0f} GiB, "
            f"of which --headroom leaves {headroom:.0%} free ({space.progress()}); use more GPUs, "
            "or another train.global_batch"
        )
    seen = [found.point for found in best]
    for entry in sorted(space.queue):
        if entry.timed:
            seen.append(Point(max(entry.timed.least), entry.timed.speed, _label(entry.choice)))
    return Searched(tuple(best), tuple(seen), counts, headroom)


def _label(choice: dict[str, Any]) -> str:
    """A layout in words, without degrees of 1."""
    words = [f"{key} {choice[key]}" for key in ("tp", "cp", "pp", "ep", "etp", "dp_replicate")]
    words = [word for word in words if not word.endswith(" 1")]
    if choice["pp"] > 1:
        words.append(f"{choice['schedule']} x {choice['stages_per_rank']}")
    words += [f"micro-batch {choice['micro']}", f"recompute {choice['mode']}"]
    if choice["offload"]:
        words.append("offload")
    if choice["recipe"]:
        words.append(f"float8 {choice['recipe']}")
    return ", ".join(words)


@dataclass(frozen=True)
class _Timed:
    """A layout that fits if the allocator leaves no holes."""

    least: tuple[float, ...]
    """Bytes by rank; `reserved` is not below."""
    time: Prediction

    @property
    def speed(self) -> float:
        """Tokens a second and GPU."""
        return self.time.tokens_per_second_per_gpu


def _time(
    config: RunConfig, choice: dict[str, Any], world: int, hardware: Hardware
) -> _Timed | str:
    """A choice's time, or what it is: illegal, or too large."""
    try:
        run = Resolved.of(_with(config, choice), world)
    except ConfigError:
        return "illegal"
    if any(far_memory(run, hardware)):
        return "illegal"
    if not (bounds := least(run, hardware)):
        return "too large"
    return _Timed(bounds, predict(run, hardware))


def _fitting(
    config: RunConfig,
    choice: dict[str, Any],
    world: int,
    hardware: Hardware,
    bounds: tuple[float, ...],
    part: int,
    of: int,
) -> tuple[RankMemory, ...] | None:
    """`fitting` of a choice."""
    return fitting(Resolved.of(_with(config, choice), world), hardware, bounds, part, of)


@dataclass(frozen=True, order=True)
class _Entry:
    """The fastest come first."""

    slowness: float
    """Less the speed; until it is known, its bound."""
    number: int
    choice: dict[str, Any] = field(compare=False)
    timed: _Timed | None = field(compare=False, default=None)


@dataclass
class _Space:
    """What is looked at: a queue of choices, the highest bounds first. One whose turn it is gets
    its time and waits again; one whose turn comes with its time is faster than all others can be,
    and its memory is replayed, which takes longest by far."""

    config: RunConfig
    model: DecoderConfig
    world: int
    hardware: Hardware
    processes: int
    queue: list[_Entry] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    done: dict[tuple[Any, ...], float] = field(default_factory=dict)
    """Of `_bound`."""
    workers: Executor = field(default_factory=lambda: ThreadPoolExecutor(1))
    begun: dict[int, Future[_Timed | str]] = field(default_factory=dict)
    """Times by number of an entry."""

    def push(self, choice: dict[str, Any]) -> None:
        """A choice, or the same with activations offloaded, if its mean rank can fit."""
        self.counts["enumerated"] += 1
        limit = self.hardware.room
        if _least_bytes(self.config, self.model, choice, self.weights, self.world) > limit:
            return self._refuse(choice)
        bound = _bound(self.config, self.model, choice, self.world, self.hardware, self.done)
        heapq.heappush(self.queue, _Entry(-bound, self.counts["enumerated"], choice))

    def pop(self) -> Found | None:
        """The fastest of all that are left, if that is known by now and it fits."""
        if self.queue[0].timed is None:
            self._begin()
        entry = heapq.heappop(self.queue)
        if entry.timed is None:
            timed = self.begun.pop(entry.number).result()
            if isinstance(timed, _Timed):
                again = _Entry(-timed.speed, entry.number, entry.choice, timed)
                heapq.heappush(self.queue, again)
            elif timed == "too large":
                self._refuse(entry.choice)
            else:
                self.counts["illegal"] += 1
            return None
        found = (self.config, entry.choice, self.world, self.hardware)
        parts = [
            self.workers.submit(_fitting, *found, entry.timed.least, part, self.processes)
            for part in range(self.processes)
        ]
        held: list[RankMemory] = []
        for part in parts:
            if (ranks := part.result()) is None:
                return self._refuse(entry.choice)
            held += ranks
        self.counts["predicted"] += 1
        run = Resolved.of(_with(self.config, entry.choice), self.world)
        label = _label(entry.choice)
        return Found(label, run, worst(sorted(held, key=lambda each: each.rank)), entry.timed.time)

    def progress(self) -> str:
        """How many layouts are what."""
        return ", ".join(f"{n:,} {what}" for what, n in self.counts.items())

    def _begin(self) -> None:
        """Begin to time the next entry, and as many after it as there are processes: most of them
        will be next."""
        several = 2 * self.processes if self.processes > 1 else 1
        nearest = [heapq.heappop(self.queue) for _ in range(min(several, len(self.queue)))]
        for entry in nearest:
            heapq.heappush(self.queue, entry)
            if entry.timed is None and entry.number not in self.begun:
                self.begun[entry.number] = self.workers.submit(
                    _time, self.config, entry.choice, self.world, self.hardware
                )

    def _refuse(self, choice: dict[str, Any]) -> None:
        """What is too large is looked at with activations offloaded."""
        self.counts["too large"] += 1
        if not choice["offload"]:
            self.push({**choice, "offload": True})

    @functools.cached_property
    def weights(self) -> tuple[int, int]:
        """Of `_weights`."""
        return _weights(self.config, self.model)


def _choices(
    config: RunConfig, model: DecoderConfig, world: int, float8: bool = False
) -> Iterator[dict[str, Any]]:
    batch, own = config.train.global_batch, config.float8.recipe
    for tp, cp in itertools.product(_divisors(world, 8), _divisors(world, 8)):
        shared = tp % model.n_kv_heads == 0  # ranks share key/value heads
        if (model.n_kv_heads % tp and not shared) or (cp > 1 and config.train.seq_len < 8192):
            continue
        for pp in _divisors(world // tp // cp if world % (tp * cp) == 0 else 0, model.n_layers + 2):
            shards = world // (tp * cp * pp)
            for (ep, etp), replicas, (schedule, v), mode, micro, recipe in itertools.product(
                _expert_degrees(model, shards * cp * tp),
                _replicas(shards),
                SCHEDULES if pp > 1 else (("1F1B", 0),),
                MODES,
                MICRO_BATCHES,
                ("", RECIPE) if float8 and not own else (own,),
            ):
                if shards // replicas * cp * tp % (ep * etp):
                    continue
                if batch % (shards * micro) or pp * v > model.n_layers + 2:
                    continue
                if pp > 1 and batch // (shards * micro) < pp:
                    continue  # ranks would wait for most of the step
                yield {
                    "tp": tp,
                    "cp": cp,
                    "pp": pp,
                    "ep": ep,
                    "etp": etp,
                    "dp_replicate": replicas,
                    "schedule": schedule,
                    "stages_per_rank": v if pp > 1 else 0,
                    "mode": mode,
                    "offload": config.recompute.offload,
                    "recipe": recipe,
                    "micro": micro,
                    "micro_batches": batch // (shards * micro),
                }


def _divisors(n: int, most: int) -> list[int]:
    return [d for d in (2**i for i in range(12)) if d <= most and n and n % d == 0]


def _expert_degrees(model: DecoderConfig, ranks: int) -> list[tuple[int, int]]:
    """(ep, etp)."""
    if not model.n_experts:
        return [(1, 1)]
    return [
        (ep, etp)
        for ep in _divisors(ranks, 64)
        for etp in EXPERT_TP
        if model.n_experts % ep == 0 and ep >= min(8, ranks // etp)
        if model.expert_dim % etp == 0 and ranks % (ep * etp) == 0
    ]


def _replicas(shards: int) -> list[int]:
    """Copies of shards over 8 ranks or all of them sharded."""
    return [1, shards // 8] if shards > 8 and shards % 8 == 0 else [1]


def _with(config: RunConfig, choice: dict[str, Any]) -> RunConfig:
    """The run with a choice. Weights stay gathered over a step of several micro-batches; layouts by
    hand and keys of other schedules go."""
    cp = {} if choice["cp"] > 1 else {"cp_method": "ring", "cp_inner": 0}
    parallel = config.parallel.model_copy(
        update={
            **{
                key: choice[key]
                for key in ("tp", "cp", "pp", "ep", "etp", "dp_replicate", "schedule")
            },
            "stages_per_rank": choice["stages_per_rank"],
            "zero": 1 if choice["micro_batches"] > 1 else config.parallel.zero,
            "dp_shard": -1,
            "pp_layout": "",
            "defer_head": 0,
            "async_tp": False,
            "high_priority": [],
            **({"sequence_parallel": True} if choice["tp"] == 1 else {}),
            **cp,
        }
    )
    eager = choice["ep"] * choice["etp"] > 1 and choice["mode"] == "selective"
    recompute = {"mode": choice["mode"], "every": 1, "offload": choice["offload"]}
    return config.model_copy(
        update={
            "parallel": parallel,
            "train": config.train.model_copy(update={"micro_batch": choice["micro"]}),
            "recompute": config.recompute.model_copy(update=recompute),
            "float8": config.float8.model_copy(update={"recipe": choice["recipe"]}),
            "compile": config.compile.model_copy(
                update={"enable": config.compile.enable and not eager}
            ),
        }
    )


_BUSY = ("tp", "cp", "ep", "etp", "mode", "offload", "recipe", "micro")
"""What a micro-batch's time depends on."""


def _bound(
    config: RunConfig,
    model: DecoderConfig,
    choice: dict[str, Any],
    world: int,
    hardware: Hardware,
    done: dict[tuple[Any, ...], float],
) -> float:
    """The slowest rank is no faster than all are in the mean: computation, collectives that stand
    between it, and the schedule's bubble; nothing of parameters and updates.

    Args:
        done: seconds of a micro-batch through all layers, by what they depend on.
    """
    p, m = choice["pp"], choice["micro_batches"]
    key = tuple(choice[name] for name in _BUSY)
    if key not in done:
        whole = _with(config, {**choice, "pp": 1, "schedule": "1F1B", "stages_per_rank": 0})
        ranks = world // p
        each = ranks // choice["tp"] // choice["cp"] * choice["micro"]
        train = whole.train.model_copy(update={"global_batch": each})
        run = Resolved(whole.model_copy(update={"train": train}), ranks, model, None, None)
        done[key] = busy_seconds(run, hardware)
    v = max(1, choice["stages_per_rank"])
    bubble = 0.0 if choice["schedule"] == "ZBVZeroBubble" else (p - 1) / (v * m)
    step = done[key] * m / p * (1 + bubble)
    return config.train.global_batch * config.train.seq_len / step / world


def _weights(config: RunConfig, model: DecoderConfig) -> tuple[int, int]:
    """Parameters of all blocks: of the dense part, and of experts."""
    layers = {"dense": model.n_dense_layers, "mixture": model.n_expert_layers + model.mtp}
    found = [0, 0]
    for kind, number in layers.items():
        for parameter in parts(config.model.name, model, 1).get(kind, ()):
            found[parameter.expert] += number * math.prod(parameter.shape)
    return found[0], found[1]


def _least_bytes(
    config: RunConfig,
    model: DecoderConfig,
    choice: dict[str, Any],
    weights: tuple[int, int],
    world: int,
) -> float:
    """Of a mean pipeline rank: its share of the state, and the least activations in flight."""
    tp, pp, cp = (choice[key] for key in ("tp", "pp", "cp"))
    ep = choice["ep"] * choice["etp"]
    shards = world // (tp * pp * choice["dp_replicate"])
    dense, experts = weights[0] / (tp * pp), weights[1] / (ep * pp)
    optim = config.optim
    # Gathered weights and whole gradients; shards of weights, gradients and moments.
    whole = 6.0 if choice["micro_batches"] > 1 else 0.0
    own = 8.0 + MOMENTS[optim.name] * ELEMENT[optim.moments]
    state = dense * (whole + own / shards) + experts * (whole + own / max(1, shards * tp / ep))
    mode = choice["mode"]
    kind = "mixture" if model.n_experts else "dense"
    rows = [r for r in block(model, kind) if mode in r.modes and r.eager is not True]
    width = sum(r.width * (4 if r.wide else 2) for r in rows) / tp
    tokens = choice["micro"] * config.train.seq_len / cp
    layers, flying = model.n_layers / pp, min(pp, choice["micro_batches"])
    if choice["offload"]:  # all but two layers' are in host memory
        layers, flying = min(2.0, layers), 1
    return state + width * tokens * layers * flying


def pareto(points: tuple[tuple[float, float], ...]) -> list[tuple[float, float]]:
    """Of (bytes, speed) those that no other beats in both, by bytes."""
    front: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda each: (each[0], -each[1])):
        if not front or point[1] > front[-1][1]:
            front.append(point)
    return front
