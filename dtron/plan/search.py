"""Which layout is fastest: all legal ones under the memory limit, by predicted tokens a second.

Degrees are enumerated from divisors; what cannot be faster than the best ten found so far is not
looked at: a layout's bound is its products at the ceiling, over the share of the step that the
pipeline's bubble leaves at least. The legality of a layout is preflight's.

    tp x pp x cp x dp_replicate, dp_shard being the rest; ep x etp; schedule x stages a rank;
    micro-batch; recompute; zero
"""

import heapq
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.plan.hardware import Hardware
from dtron.plan.memory import RankMemory, memory, worst
from dtron.plan.resolved import Resolved
from dtron.plan.steptime import Prediction, predict

SCHEDULES = (("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 4), ("ZBVZeroBubble", 2))
MODES = ("none", "selective", "full")
MICRO_BATCHES = (1, 2, 4, 8)


@dataclass(frozen=True)
class Found:
    """One layout of the search."""

    run: Resolved
    memory: RankMemory
    time: Prediction

    @property
    def limited(self) -> str:
        """Where its time goes, the largest part but computation first; and its memory."""
        parts = {k: v for k, v in self.time.parts.items() if k != "compute" and v > 0}
        name = max(parts, key=lambda key: parts[key], default="compute")
        share = parts.get(name, 0.0) / self.time.step
        return f"{name} {share:.0%}, {self.memory.reserved / 2**30:.0f} GiB"

    @property
    def point(self) -> tuple[float, float]:
        """(bytes, tokens a second and GPU)."""
        return self.memory.reserved, self.time.tokens_per_second_per_gpu


@dataclass(frozen=True)
class Searched:
    """The best layouts, and what was looked at."""

    best: tuple[Found, ...]
    seen: tuple[tuple[float, float], ...]
    """Points of all layouts that were predicted, those that do not fit too."""
    counts: dict[str, int]
    """enumerated, pruned by the bound, illegal, too large, predicted."""


def search(config: RunConfig, world: int, hardware: Hardware, most: int = 10) -> Searched:
    """The best layouts of a model and a global batch.

    Raises:
        ConfigError: no layout is legal and fits; tells how many were looked at.
    """
    counts = dict.fromkeys(("enumerated", "pruned", "illegal", "too large", "predicted"), 0)
    best: list[tuple[float, int, Found]] = []
    seen: list[tuple[float, float]] = []
    limit = hardware.memory - hardware.outside
    for number, candidate in enumerate(_ordered(config, world, hardware)):
        counts["enumerated"] += 1
        if len(best) == most and candidate.bound <= best[0][0]:
            counts["pruned"] += 1
            continue
        try:
            run = Resolved.of(candidate.config, world)
        except ConfigError:
            counts["illegal"] += 1
            continue
        held = worst(memory(run))
        if held.reserved > limit:
            counts["too large"] += 1
            continue
        time = predict(run, hardware)
        counts["predicted"] += 1
        found = Found(run, held, time)
        seen.append(found.point)
        heapq.heappush(best, (time.tokens_per_second_per_gpu, -number, found))
        if len(best) > most:
            heapq.heappop(best)
    if not best:
        told = ", ".join(f"{n} {what}" for what, n in counts.items())
        raise ConfigError(
            f"--search found no legal layout of {world} GPUs that fits {limit / 2**30:.0f} GiB "
            f"({told}); use more GPUs, or another train.global_batch"
        )
    ordered = tuple(found for *_, found in sorted(best, key=lambda each: -each[0]))
    return Searched(ordered, tuple(seen), counts)


@dataclass(frozen=True)
class _Candidate:
    config: RunConfig
    bound: float
    """Tokens a second and GPU that it cannot exceed."""


def _ordered(config: RunConfig, world: int, hardware: Hardware) -> list[_Candidate]:
    """Those with the highest bounds first, so that the others are pruned."""
    made = [
        _Candidate(_with(config, choice), _bound(config, choice, world, hardware))
        for choice in _choices(config, world)
    ]
    return sorted(made, key=lambda each: -each.bound)


def _choices(config: RunConfig, world: int) -> Iterator[dict[str, Any]]:
    model = Resolved.model_of(config)
    batch = config.train.global_batch
    for tp, cp in itertools.product(_divisors(world, 8), _divisors(world, 8)):
        if model.n_kv_heads % tp or (cp > 1 and config.train.seq_len < 8192):
            continue
        for pp in _divisors(world // tp // cp if world % (tp * cp) == 0 else 0, model.n_layers + 2):
            shards = world // (tp * cp * pp)
            for ep, replicas, (schedule, v), mode, micro in itertools.product(
                _expert_degrees(model.n_experts, shards * cp * tp),
                _replicas(shards),
                SCHEDULES if pp > 1 else (("1F1B", 0),),
                MODES,
                MICRO_BATCHES,
            ):
                if batch % (shards * micro) or pp * v > model.n_layers + 2:
                    continue
                if pp > 1 and batch // (shards * micro) < pp:
                    continue  # ranks would wait for most of the step
                yield {
                    "tp": tp,
                    "cp": cp,
                    "pp": pp,
                    "ep": ep,
                    "dp_replicate": replicas,
                    "schedule": schedule,
                    "stages_per_rank": v if pp > 1 else 0,
                    "mode": mode,
                    "micro": micro,
                    "micro_batches": batch // (shards * micro),
                }


def _divisors(n: int, most: int) -> list[int]:
    return [d for d in (2**i for i in range(12)) if d <= most and n and n % d == 0]


def _expert_degrees(experts: int, ranks: int) -> list[int]:
    if not experts:
        return [1]
    return [d for d in _divisors(ranks, 64) if experts % d == 0 and d >= min(8, ranks)]


def _replicas(shards: int) -> list[int]:
    """Copies of shards over 8 ranks or all of them sharded."""
    return [1, shards // 8] if shards > 8 else [1]


def _with(config: RunConfig, choice: dict[str, Any]) -> RunConfig:
    """The run with a choice. Weights stay gathered over a step of several micro-batches where that is
    legal to ask for; layouts by hand and keys of other schedules go."""
    cp = {} if choice["cp"] > 1 else {"cp_method": "ring", "cp_inner": 0}
    parallel = config.parallel.model_copy(
        update={
            **{key: choice[key] for key in ("tp", "cp", "pp", "ep", "dp_replicate", "schedule")},
            "stages_per_rank": choice["stages_per_rank"],
            "zero": 1 if choice["micro_batches"] > 1 else config.parallel.zero,
            "etp": 1,
            "dp_shard": -1,
            "pp_layout": "",
            "defer_head": 0,
            "async_tp": False,
            "high_priority": [],
            **({"sequence_parallel": True} if choice["tp"] == 1 else {}),
            **cp,
        }
    )
    eager = choice["ep"] > 1 and choice["mode"] == "selective"
    return config.model_copy(
        update={
            "parallel": parallel,
            "train": config.train.model_copy(update={"micro_batch": choice["micro"]}),
            "recompute": config.recompute.model_copy(update={"mode": choice["mode"], "every": 1}),
            "compile": config.compile.model_copy(
                update={"enable": config.compile.enable and not eager}
            ),
        }
    )


def _bound(config: RunConfig, choice: dict[str, Any], world: int, hardware: Hardware) -> float:
    """Products at the ceiling, and the bubble of the schedule without communication."""
    flops = Resolved.flops_of(config)["causal"]
    p, m, v = choice["pp"], choice["micro_batches"], max(1, choice["stages_per_rank"])
    bubble = 0.0 if choice["schedule"] == "ZBVZeroBubble" else (p - 1) / (v * m)
    again = {"none": 1.0, "selective": 1.0, "full": 4 / 3}[choice["mode"]]
    rate = hardware.ceiling_float8 if config.float8.recipe else hardware.ceiling
    fast = rate / flops / again / (1 + bubble)
    # Tensor parallelism's collectives stand between products; a little less is a tie-breaker.
    return fast * (1 - 0.02 * math.log2(choice["tp"]))


def pareto(points: tuple[tuple[float, float], ...]) -> list[tuple[float, float]]:
    """Of (bytes, speed) those that no other beats in both, by bytes."""
    front: list[tuple[float, float]] = []
    for point in sorted(points, key=lambda each: (each[0], -each[1])):
        if not front or point[1] > front[-1][1]:
            front.append(point)
    return front
