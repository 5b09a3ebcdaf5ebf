"""Search for the fastest layout: legal, within memory, most predicted tokens per second.

    tp x pp x cp x dp_replicate (dp_shard takes the rest); ep x etp; schedule x stages per rank;
    micro-batch size; recompute mode; float8 with --float8
    with experts on other ranks, micro-batches that overlap, in a pipeline by DualPipeV

Degrees are powers of two. tp and cp are at most 8, cp > 1 only from 8,192 tokens on, ep at least 8
if there are enough ranks. Layouts with an average rank that cannot fit are dropped first. The
others are visited in the order of an upper bound of their speed, computed from the time of their
layers with balanced pipeline ranks and without communication of parameters. A visit checks the
rules of a run's start (`dtron.setup.rules`), drops a layout that cannot fit even without
fragmentation, and predicts the time. Fragmentation is replayed for the fastest layouts, until ten
fit; the rest are pruned. Activations are offloaded only if a layout does not fit otherwise: offload
is never faster.
"""

import functools
import heapq
import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from dtron.config import RunConfig
from dtron.errors import ConfigError, counted
from dtron.models.config import DecoderConfig
from dtron.parallelisms.expert.dispatchers import in_graphs
from dtron.plan.feasibility import far_memory
from dtron.plan.hardware import Hardware
from dtron.plan.memory import RankMemory, fitting, least, worst
from dtron.plan.parameters import parts
from dtron.plan.run_shape import ELEMENT, Resolved
from dtron.plan.saved_tensors import block
from dtron.plan.steptime import Prediction, busy_seconds, predict, why_no_time
from dtron.plan.workers import most_processes, pool

SCHEDULES = (
    ("1F1B", 1, False),
    ("Interleaved1F1B", 2, False),
    ("Interleaved1F1B", 4, False),
    ("ZBVZeroBubble", 2, False),
    ("DualPipeV", 2, True),
)
"""(schedule, stages per rank, whether micro-batches overlap)."""
MARGIN = 0.02
"""Fraction by which overlapped micro-batches must be faster: over NVLink they gained 1%."""
MODES = ("none", "selective", "attention", "full")
MICRO_BATCHES = (1, 2, 4, 8)
EXPERT_TP = (1, 2, 4, 8)
_DEGREES = ("tp", "cp", "pp", "ep", "etp", "dp_replicate", "schedule", "stages_per_rank")
RECIPE = "tensorwise"
"""The float8 recipe that hardware rows have rates for."""
HEADROOM = 0.05
"""Fraction of memory to leave free: predictions were off by up to 5% (docs/planning.md)."""
TELL_EVERY = 10.0
"""Seconds between two lines of progress."""
COUNTS: tuple[str, ...] = ("enumerated", "pruned", "illegal", "too large", "predicted")


class LayoutPoint(NamedTuple):
    """A predicted layout as a point of the plot."""

    n_bytes: float
    speed: float
    """Tokens per second and GPU."""
    label: str
    """The layout in words."""


@dataclass(frozen=True)
class FoundLayout:
    """A layout that fits, with its predicted memory and time."""

    label: str
    run: Resolved
    memory: RankMemory
    time: Prediction

    @property
    def rated(self) -> float:
        """The speed by which the layout is ranked."""
        overlaps = self.run.config.parallel.overlap_micro_batches
        return _rated(self.time.tokens_per_second_per_gpu, overlaps)

    @property
    def limited(self) -> str:
        """The two largest parts of the step time, as text."""
        parts = sorted(self.time.parts.items(), key=lambda part: -part[1])[:2]
        return ", ".join(f"{name} {seconds / self.time.step:.0%}" for name, seconds in parts)

    @property
    def point(self) -> LayoutPoint:
        """The layout as a point of the plot; its bytes are those that the fullest rank reserves."""
        return LayoutPoint(self.memory.reserved, self.time.tokens_per_second_per_gpu, self.label)


@dataclass(frozen=True)
class SearchResult:
    """The best layouts of a search, all predicted layouts, and counts."""

    best: tuple[FoundLayout, ...]
    seen: tuple[LayoutPoint, ...]
    """All predicted layouts, the best first. Bytes of layouts that are not in `best` are a lower
    bound without fragmentation."""
    counts: dict[str, int]
    """Numbers of layouts: enumerated, pruned by the bound, illegal, too large, predicted."""
    headroom: float
    """Fraction of the device's memory left free."""


def search(
    config: RunConfig,
    world: int,
    hardware: Hardware,
    most: int = 10,
    float8: bool = False,
    processes: int = 0,
    tell: Callable[[str], None] | None = None,
    headroom: float = HEADROOM,
) -> SearchResult:
    """Find the best layouts for a model and a global batch.

    Args:
        headroom: fraction of the device's memory to leave free.
        float8: also try float8, which changes numerics.
        processes: number of worker processes, which does not affect the result; 0: the number of
            processors, at most `workers.PROCESSES`. Systems without fork use one thread.
        tell: called every TELL_EVERY seconds with a line of progress.
    Raises:
        ConfigError: no layout is legal and fits, or the given settings have no rates.
    """
    if why := why_no_time(config, hardware):
        raise ConfigError(f"--search cannot predict times: {why}")
    if float8 and not hardware.ceiling_float8:
        raise ConfigError(f"--float8: {hardware.name} has no float8; leave it out")
    model = Resolved.model_of(config)
    hardware = replace(hardware, outside=hardware.outside + headroom * hardware.room)
    space = _SearchQueue(config, model, world, hardware, processes or most_processes())
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
                waiting = f"{len(space.queue):,} queued"
                tell(f"{len(best)} of the best {most} found; {space.progress()}, {waiting}")
    best.sort(key=lambda found: -found.rated)  # a bound may be too low
    counts = space.counts
    for entry in space.queue:
        counts["pruned" if entry.timed is None else "predicted"] += 1
    if not best:
        limit = hardware.room / (1 - headroom)
        raise ConfigError(
            f"--search found no legal layout of {counted(world, 'GPU')} that fits "
            f"{limit / 2**30:.0f} GiB, of which --headroom leaves {headroom:.0%} free "
            f"({space.progress()}); use more GPUs, or another train.global_batch"
        )
    seen = [found.point for found in best]
    for entry in sorted(space.queue):
        if entry.timed:
            seen.append(
                LayoutPoint(max(entry.timed.least), entry.timed.speed, _label(entry.choice))
            )
    return SearchResult(tuple(best), tuple(seen), counts, headroom)


def _label(choice: dict[str, Any]) -> str:
    """Return a layout in words; degrees of 1 are left out."""
    words = [f"{key} {choice[key]}" for key in ("tp", "cp", "pp", "ep", "etp", "dp_replicate")]
    words = [word for word in words if not word.endswith(" 1")]
    if choice["pp"] > 1:
        words.append(f"{choice['schedule']} x {choice['stages_per_rank']}")
    words += [f"micro-batch {choice['micro']}", f"recompute {choice['mode']}"]
    if choice["zero"] == 3:
        words.append("zero 3")
    words += [key for key in ("offload", "overlap") if choice[key]]
    if choice["recipe"]:
        words.append(f"float8 {choice['recipe']}")
    return ", ".join(words)


def _rated(speed: float, overlaps: bool) -> float:
    """Return the speed by which a layout is ranked."""
    return speed * (1 - MARGIN if overlaps else 1)


@dataclass(frozen=True)
class _TimedLayout:
    """A layout that fits without fragmentation, with its predicted time."""

    least: tuple[float, ...]
    """Lower bounds of `reserved` by pipeline rank, bytes."""
    time: Prediction

    @property
    def speed(self) -> float:
        """Tokens per second and GPU."""
        return self.time.tokens_per_second_per_gpu


def _time(
    config: RunConfig, choice: dict[str, Any], world: int, hardware: Hardware
) -> _TimedLayout | str:
    """Predict the time of a choice; return "illegal" or "too large" if the choice cannot run."""
    try:
        run = Resolved.of(_with_choice(config, choice), world)
    except ConfigError:
        return "illegal"
    if any(far_memory(run, hardware)):
        return "illegal"
    if not (bounds := least(run, hardware)):
        return "too large"
    return _TimedLayout(bounds, predict(run, hardware))


def _fitting(
    config: RunConfig,
    choice: dict[str, Any],
    world: int,
    hardware: Hardware,
    bounds: tuple[float, ...],
    part: int,
    of: int,
) -> tuple[RankMemory, ...] | None:
    """Return the memory of every `of`-th rank of a choice; None if a rank does not fit.

    See `fitting` of `dtron.plan.memory`.
    """
    return fitting(Resolved.of(_with_choice(config, choice), world), hardware, bounds, part, of)


@dataclass(frozen=True, order=True)
class _QueueEntry:
    """Entry of the queue, sorted fastest first."""

    slowness: float
    """Negative `_rated` speed; until it is predicted, of the upper bound from `_bound`."""
    number: int
    choice: dict[str, Any] = field(compare=False)
    timed: _TimedLayout | None = field(compare=False, default=None)


@dataclass
class _SearchQueue:
    """Priority queue of choices, highest bound of speed first.

    A popped choice without a time is timed and queued again. When a choice with a time is popped,
    no other choice can be faster; its memory is then replayed, which takes by far the longest.
    """

    config: RunConfig
    model: DecoderConfig
    world: int
    hardware: Hardware
    processes: int
    queue: list[_QueueEntry] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=lambda: dict.fromkeys(COUNTS, 0))
    done: dict[tuple[Any, ...], float] = field(default_factory=dict)
    """Cache of seconds per micro-batch in `_bound`."""
    workers: Executor = field(default_factory=lambda: ThreadPoolExecutor(1))
    begun: dict[int, Future[_TimedLayout | str]] = field(default_factory=dict)
    """Pending times, by the entry's number."""

    def push(self, choice: dict[str, Any]) -> None:
        """Queue a choice if an average rank can fit; else try it with activations offloaded."""
        self.counts["enumerated"] += 1
        limit = self.hardware.room
        if _least_bytes(self.config, self.model, choice, self.weights, self.world) > limit:
            return self._refuse(choice)
        bound = _bound(self.config, self.model, choice, self.world, self.hardware, self.done)
        slowness = -_rated(bound, choice["overlap"])
        heapq.heappush(self.queue, _QueueEntry(slowness, self.counts["enumerated"], choice))

    def pop(self) -> FoundLayout | None:
        """Pop the first entry; return the layout if it has a time and fits, else None.

        An entry without a time is timed and queued again.
        """
        if self.queue[0].timed is None:
            self._begin()
        entry = heapq.heappop(self.queue)
        if entry.timed is None:
            timed = self.begun.pop(entry.number).result()
            if isinstance(timed, _TimedLayout):
                slowness = -_rated(timed.speed, entry.choice["overlap"])
                again = _QueueEntry(slowness, entry.number, entry.choice, timed)
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
        run = Resolved.of(_with_choice(self.config, entry.choice), self.world)
        label = _label(entry.choice)
        return FoundLayout(
            label, run, worst(sorted(held, key=lambda each: each.rank)), entry.timed.time
        )

    def progress(self) -> str:
        """Format the numbers of layouts examined so far."""
        return ", ".join(f"{n:,} {what}" for what, n in self.counts.items())

    def _begin(self) -> None:
        """Start to time the next entries in the background.

        Two entries per process are timed, since most of them will be popped soon.
        """
        several = 2 * self.processes if self.processes > 1 else 1
        nearest = [heapq.heappop(self.queue) for _ in range(min(several, len(self.queue)))]
        for entry in nearest:
            heapq.heappush(self.queue, entry)
            if entry.timed is None and entry.number not in self.begun:
                self.begun[entry.number] = self.workers.submit(
                    _time, self.config, entry.choice, self.world, self.hardware
                )

    def _refuse(self, choice: dict[str, Any]) -> None:
        """Drop a choice that is too large; queue it with what takes less memory: weights gathered
        for each micro-batch, and activations offloaded."""
        self.counts["too large"] += 1
        if choice["overlap"]:  # legal with neither
            return
        first = choice["offload"] == self.config.recompute.offload
        shards = self.world // (choice["tp"] * choice["dp_replicate"])
        if first and choice["zero"] == 1 and choice["pp"] == 1 and shards > 1:
            self.push({**choice, "zero": 3})
        if not choice["offload"]:
            self.push({**choice, "offload": True})

    @functools.cached_property
    def weights(self) -> tuple[int, int]:
        """Cached result of `_weights`."""
        return _weights(self.config, self.model)


def _choices(
    config: RunConfig, model: DecoderConfig, world: int, float8: bool = False
) -> Iterator[dict[str, Any]]:
    batch, own = config.train.global_batch, config.float8.recipe
    for tp, cp in itertools.product(_divisors(world, 8), _divisors(world, 8)):
        # Ranks may share key/value heads.
        heads = [each.n_kv_heads for each in model.attention_configs]
        if any(n % tp and tp % n for n in heads) or (cp > 1 and config.train.seq_len < 8192):
            continue
        for pp in _divisors(world // tp // cp if world % (tp * cp) == 0 else 0, model.n_layers + 2):
            shards = world // (tp * cp * pp)
            for (ep, etp), replicas, way, mode, micro, recipe in itertools.product(
                _expert_degrees(model, shards * cp * tp),
                _replicas(shards),
                SCHEDULES if pp > 1 else (("1F1B", 0, False), ("1F1B", 0, True)),
                MODES,
                MICRO_BATCHES,
                ("", RECIPE) if float8 and not own else (own,),
            ):
                schedule, v, overlap = way
                if shards // replicas * cp * tp % (ep * etp):
                    continue
                if batch % (shards * micro) or pp * v > model.n_layers + 2:
                    continue
                if pp > 1 and batch // (shards * micro) < pp:
                    continue  # ranks would wait for most of the step
                if overlap and (ep * etp == 1 or batch == shards * micro):
                    continue
                yield {
                    "tp": tp,
                    "cp": cp,
                    "pp": pp,
                    "ep": ep,
                    "etp": etp,
                    "dp_replicate": replicas,
                    "schedule": schedule,
                    "overlap": overlap,
                    "stages_per_rank": v if pp > 1 else 0,
                    "mode": mode,
                    "offload": config.recompute.offload,
                    "recipe": recipe,
                    "micro": micro,
                    "micro_batches": batch // (shards * micro),
                    "zero": 1 if batch > shards * micro else 0,
                }


def _divisors(n: int, most: int) -> list[int]:
    return [d for d in (2**i for i in range(12)) if d <= most and n and n % d == 0]


def _expert_degrees(model: DecoderConfig, ranks: int) -> list[tuple[int, int]]:
    """List the degrees (ep, etp) to try."""
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
    """List the values of dp_replicate to try.

    The values are 1, which shards over all ranks, and above 8 ranks the value that shards over 8
    ranks.
    """
    return [1, shards // 8] if shards > 8 and shards % 8 == 0 else [1]


def _with_choice(config: RunConfig, choice: dict[str, Any]) -> RunConfig:
    """Return the config with a choice.

    With several micro-batches, zero = 1 keeps weights gathered over the step, and zero = 3 does
    not; a choice's zero = 0 leaves the key as it is. `pp_layout`, `defer_head` and `high_priority`
    are reset. An encoder that is split over tp stays so. Unset keys stay unset, for
    `dtron.plan.automatic`.
    """
    parallel = {key: choice[key] for key in _DEGREES}
    parallel |= {"overlap_micro_batches": choice["overlap"]}
    parallel |= {"dp_shard": -1, "pp_layout": "", "defer_head": 0, "high_priority": []}
    if choice["zero"]:
        parallel["zero"] = choice["zero"]
    if choice["tp"] == 1:
        parallel["sequence_parallel"] = True
        if config.parallel.async_tp:
            parallel["async_tp"] = False
    if choice["cp"] == 1:
        parallel |= {"cp_method": "ring", "cp_inner": 0}
    if config.parallel.encoder_tp > 1:
        parallel["encoder_tp"] = choice["tp"]
    leaves = choice["ep"] * choice["etp"] > 1 and not in_graphs(config.parallel.dispatcher)
    eager = leaves and choice["mode"] == "selective"
    return config.changed(
        parallel=parallel,
        train={"micro_batch": choice["micro"]},
        recompute={
            "mode": choice["mode"],
            "every": 1,
            "first": 0,
            "modules": [],
            "offload": choice["offload"],
        },
        float8={"recipe": choice["recipe"]},
        compile={"enable": config.compile.enable and not eager},
    )


_NO_BUBBLE = ("ZBVZeroBubble", "DualPipeV")
"""Schedules of which `_bound` counts no bubble."""
_BUSY = ("tp", "cp", "ep", "etp", "mode", "offload", "overlap", "recipe", "micro")
"""Keys that a micro-batch's time depends on."""


def _bound(
    config: RunConfig,
    model: DecoderConfig,
    choice: dict[str, Any],
    world: int,
    hardware: Hardware,
    done: dict[tuple[Any, ...], float],
) -> float:
    """Return an upper bound of tokens per second and GPU, from a lower bound of the step's time.

    The lower bound has computation, exposed collectives and bubble, without FSDP and update.
    Pipeline ranks count as balanced, since the slowest rank is at least as slow as the mean.

    Args:
        done: cache of seconds per micro-batch through all layers, by the keys they depend on.
    """
    p, m = choice["pp"], choice["micro_batches"]
    key = tuple(choice[name] for name in _BUSY)
    if key not in done:
        whole = _with_choice(config, {**choice, "pp": 1, "schedule": "1F1B", "stages_per_rank": 0})
        ranks = world // p
        each = ranks // choice["tp"] // choice["cp"] * choice["micro"]
        run = Resolved(whole.changed(train={"global_batch": each}), ranks, model, None, None)
        done[key] = busy_seconds(run, hardware)
    v = max(1, choice["stages_per_rank"])
    bubble = 0.0 if choice["schedule"] in _NO_BUBBLE else (p - 1) / (v * m)
    step = done[key] * m / p * (1 + bubble)
    return config.train.global_batch * config.train.seq_len / step / world


def _weights(config: RunConfig, model: DecoderConfig) -> tuple[int, int]:
    """Return the numbers of parameters in all blocks: (dense part, experts)."""
    found = [0, 0]
    for kind, number in Counter(model.layer_kinds).items():
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
    """Return a lower bound of an average pipeline rank's bytes.

    It counts parameters, gradients and optimizer state divided evenly over the ranks, and the
    activations of the fewest micro-batches in flight.
    """
    tp, pp, cp = (choice[key] for key in ("tp", "pp", "cp"))
    ep = choice["ep"] * choice["etp"]
    shards = world // (tp * pp * choice["dp_replicate"])
    dense, experts = weights[0] / (tp * pp), weights[1] / (ep * pp)
    # Gathered weights and unsharded gradients; shards of weights, gradients and moments.
    frozen = config.lora.rank > 0  # adapters are small
    moments = min(sum(config.optim.state_bytes(hidden)) for hidden in (True, False))
    moments *= 1 - config.optim.offload
    own = ELEMENT[config.train.dtype] if frozen else 8.0 + moments
    state = 0.0
    for elements, over in ((dense, shards), (experts, max(1, shards * tp / ep))):
        whole = 2.0 if frozen or over == 1 else 6.0  # gradients on one rank are whole anyway
        state += elements * ((whole if choice["zero"] == 1 else 0.0) + own / over)
    mode = choice["mode"]
    tables = [
        [r for r in block(model, kind) if mode in r.modes and r.eager is not True]
        for kind in set(model.layer_kinds)
    ]
    width = min(sum(r.width * (4 if r.wide else 2) for r in rows) for rows in tables) / tp
    tokens = choice["micro"] * config.train.seq_len / cp
    if model.encoder_layers:  # all layers count as those of the decoder, which read fewer tokens
        tokens = choice["micro"] * config.data.span_lengths(config.train.seq_len).decoder
    layers, flying = model.n_layers / pp, min(pp, choice["micro_batches"])
    if choice["offload"]:  # activations of all but two layers are in host memory
        layers, flying = min(2.0, layers), 1
    return state + width * tokens * layers * flying


def pareto(points: tuple[tuple[float, float], ...]) -> list[tuple[float, float]]:
    """Return the Pareto front of points (bytes, speed), in ascending order of bytes.

    Each point is faster than all points with fewer bytes.
    """
    front: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda each: (each[0], -each[1])):
        if not front or point[1] > front[-1][1]:
            front.append(point)
    return front
