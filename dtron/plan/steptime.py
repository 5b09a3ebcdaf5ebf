"""Predicted time of a step and its parts: computation, communication, bubble, update.

    compute    matmuls, attention and elementwise kernels of the slowest pipeline rank
    tp, cp, ep exposed collectives; async TP and ring attention hide a fraction of theirs (HIDDEN),
               overlapped micro-batches one of dispatch and combine (PAIRED_HIDDEN)
    offload    waits for copies of activations over the host link
    fsdp       exposed all-gathers and reduce-scatters, and the slowdown of computation that they
               overlap, by measured rates; the first gather and the last reduction overlap nothing
    copies     FSDP's copies on the computation stream: weights out of all-gather buffers, gradients
               into send buffers and into sums over micro-batches
    bubble     length of the schedule, simulated with the time of each stage, minus computation and
               exposed collectives of the slowest rank
    update     norm, clip and AdamW, at memory bandwidth
    host       time by which issuing the step takes longer than all of the above

benchmarks/PLANNING.md lists which constants were fitted, and to which runs. Hardware rows have
rates for bfloat16 and float8; runs in float32 get no time.
"""

import functools
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.float8.recipes import RECIPES
from dtron.models.config import LayerKind
from dtron.parallelisms.draw.timelines import Timeline
from dtron.parallelisms.pipeline.schedule_ops import Kind
from dtron.plan.communication import (
    Collective,
    activation_collectives,
    collectives,
    gathers,
    muon_collectives,
)
from dtron.plan.compute_time import (
    Seconds,
    Work,
    ends_of_encoder,
    forward_only,
    head,
    layer,
    offload_wait,
    together,
    total,
)
from dtron.plan.hardware import Hardware
from dtron.plan.host_overhead import host_seconds
from dtron.plan.muon import newton_schulz
from dtron.plan.offloaded_states import bytes_of_buckets, bytes_on_host
from dtron.plan.parameters import by_keeping, gathered_bytes, held, joined_units, reductions
from dtron.plan.run_shape import Resolved, Stage, shortened
from dtron.plan.simulate import run_order
from dtron.training.optim.offloaded import ON_DEVICE

COPIED = 0.1
"""Fraction of its time that an overlapped collective adds to the step if copy engines run it.
Fitted to one pair of runs of Llama-3-8B on 4 H200: collectives take 71 ms alone, and the step
became 29 ms shorter. For collectives that run in kernels, `Hardware.overlap` is measured."""
HIDDEN = {"async_tp": 0.6, "ring": 0.6}
"""Fraction of a collective's time that computation hides. The fraction of async TP is that of dense
models."""
PAIRED_HIDDEN, PAIRED_SLOWER = 0.48, 0.036
"""With `parallel.overlap_micro_batches`, of a forward and a backward that run together: fraction of
dispatch and combine that computation hides, and fraction by which the computation takes longer.
Fitted to the two rows of "Overlapped micro-batches" (benchmarks/RESULTS.md): 1.011 times as fast
over NVLink, 1.210 times through the host's memory."""
TENSOR_COPIES = 3.0
"""Bytes that copies move around a tp collective, as a multiple of its size: chunks gathered along
the sequence are concatenated, and tensors are split before a reduction."""
ADAMW = {"float32": 28, "bfloat16": 20}
UPDATE_RATE = 0.93
"""ADAMW: bytes per element that the update moves, by dtype of the moments. UPDATE_RATE: rate of
norm and update, as a fraction of a copy's rate; fitted to six profiled steps on H200s
(benchmarks/PLANNING.md)."""
MUON, LION = {"float32": 30, "bfloat16": 26}, {"float32": 20, "bfloat16": 16}
"""Bytes per element that their kernels move, by dtype of the moments; of Muon with the division by
the norm before Newton-Schulz, without its matmuls."""
ADAMW8BIT = 135
"""Bytes per element that would take as long as its update, which computes longer than it moves 18;
measured on an H200 (benchmarks/RESULTS.md)."""


@dataclass(frozen=True)
class Prediction:
    """Predicted time of one step; seconds."""

    step: float
    parts: dict[str, float]
    bubble_of_step: float
    """Fraction of the step in which the slowest pipeline rank waits for others."""
    tokens_per_second_per_gpu: float
    flops: dict[str, float]
    """FLOP/s per GPU, by how attention is counted: full or causal."""
    mfu: dict[str, float]

    def as_json(self) -> dict[str, Any]:
        """Return all values as a JSON object."""
        values = asdict(self)
        return {
            "step_seconds": values.pop("step"),
            "flops_per_second": values.pop("flops"),
            **values,
        }


def why_no_time(config: RunConfig, hardware: Hardware) -> str:
    """Return why a run's precision has no rates; empty: rates exist."""
    recipe = config.float8.recipe
    if config.train.dtype != "bfloat16":
        return f"train.dtype = {config.train.dtype!r} has no rates; use bfloat16"
    if recipe and RECIPES[recipe].kernel != "scaled_mm":
        return f"float8.recipe = {recipe!r} is emulated or has no measured rates; use tensorwise"
    if recipe and RECIPES[recipe].grad_weight is None:
        return f"float8.recipe = {recipe!r} has bfloat16 and float8 GEMMs: no rates; use tensorwise"
    if config.float8.experts:
        return "float8.experts = True: grouped float8 matmuls have no rates; leave it out"
    if recipe and not hardware.ceiling_float8:
        return f"float8.recipe = {recipe!r} is emulated on {hardware.name}: no rates; leave it out"
    return ""


def predict(run: Resolved, hardware: Hardware) -> Prediction:
    """Predict the time of a step.

    Raises:
        ConfigError: the hardware row has no rates for the run's precision.
    """
    if why := why_no_time(run.config, hardware):
        raise ConfigError(f"no time is predicted: {why}")
    loads = {rank: _load(run, rank, hardware) for rank in range(run.degrees["pp"])}
    slowest = max(loads, key=lambda rank: loads[rank].busy)
    load = loads[slowest]
    body = load.busy if run.layout is None else _pipelined(run, hardware, loads)
    parts = {
        "compute": load.compute,
        **load.exposed,
        "fsdp": _fsdp(run, slowest, load, hardware),
        "copies": copied_bytes(run, slowest) / hardware.copy,
        "bubble": max(0.0, body - load.busy),
        "update": _update(run, hardware),
    }
    step = body + parts["fsdp"] + parts["copies"] + parts["update"]
    parts["host"] = max(0.0, _issued(run, hardware) - step)
    return _prediction(run, hardware, step + parts["host"], parts)


@dataclass(frozen=True)
class _RankSeconds:
    """Seconds of a pipeline rank's step, before overlap."""

    work: dict[str, float]
    """Computation by kind."""
    exposed: dict[str, float]
    """Waits of computation for collectives and offload, by purpose."""
    sent: dict[str, float]
    """FSDP's collectives without overlap, by kind."""

    @property
    def compute(self) -> float:
        """Seconds of computation of all kinds."""
        return sum(self.work.values())

    @property
    def busy(self) -> float:
        """Seconds of computation and waits, without FSDP, bubble and update."""
        return self.compute + sum(self.exposed.values())


def _load(run: Resolved, rank: int, hardware: Hardware) -> _RankSeconds:
    sent, stages = collectives(run, rank, hardware.domain), run.stages_of(rank)
    each = together(*(stage_work(run, stage, hardware) for stage in stages))
    work = {kind: run.micro_batches * seconds.sum for kind, seconds in each.items()}
    exposed = _exposed(run, sent, hardware)
    exposed["ep"] -= _hidden_by_pairs(exposed["ep"], sum(work.values()), _paired(run, rank))
    exposed["offload"] = _offload(run, stages, hardware)
    own = [c for c in sent if c.purpose == "fsdp"]
    return _RankSeconds(work, exposed, _sent(run, own, hardware))


def _fsdp(run: Resolved, rank: int, load: _RankSeconds, hardware: Hardware) -> float:
    """Seconds that FSDP's collectives add to a step.

    Overlap is computed for each forward and each backward; with a pipeline, for the whole step at
    once.
    """
    phases = [_OverlapPhase(load.sent, _spread(load.work, load.busy))]
    if run.layout is None:
        phases = list(_phases(run, rank, load.busy, hardware))
    return sum(_added(phase, hardware) for phase in phases) + _alone(run, rank, hardware)


def _issued(run: Resolved, hardware: Hardware) -> float:
    """Seconds that the slowest host needs to issue a step."""
    prices = dict(hardware.calls)
    return max(host_seconds(run, rank, prices) for rank in range(run.degrees["pp"]))


def _prediction(
    run: Resolved, hardware: Hardware, step: float, parts: dict[str, float]
) -> Prediction:
    each = run.tokens_per_step / step / run.world_size
    flops = {name: each * value for name, value in run.flops().items()}
    mfu = {name: value / hardware.peak for name, value in flops.items()}
    return Prediction(step, parts, parts["bubble"] / step, each, flops, mfu)


def busy_seconds(run: Resolved, hardware: Hardware) -> float:
    """Return the seconds of a step with one micro-batch and one stage.

    Computation, exposed collectives and waits for offload count; FSDP and update do not. Overlapped
    micro-batches count as if all ran in pairs.
    """
    (stage,) = run.stages
    exposed = _exposed(run, activation_collectives(run, stage, hardware.domain), hardware)
    offload, work = _offload(run, (stage,), hardware), stage_seconds(run, stage, hardware).sum
    every = 1.0 if run.config.parallel.overlap_micro_batches else 0.0
    hidden = _hidden_by_pairs(exposed["ep"], work, every)
    return work + sum(exposed.values()) + offload - hidden


def _offload(run: Resolved, stages: tuple[Stage, ...], hardware: Hardware) -> float:
    """Seconds per step that layers wait for copies to the host and back.

    Without a pipeline, the last layer is not offloaded.
    """
    if not run.config.recompute.offload:
        return 0.0
    blocks = [block for stage in stages for block in run.blocks(stage)]
    copied = blocks[:-1] if run.layout is None else blocks
    waits = sum(offload_wait(of, layer, hardware) for of, layer in copied)
    return run.micro_batches * waits


def stage_work(run: Resolved, stage: Stage, hardware: Hardware) -> Work:
    """Return the seconds of a stage's computation per micro-batch, by kind."""
    alike: dict[tuple[bool, LayerKind, bool, int], Work] = {}
    found = ends_of_encoder(run, hardware) if stage.embedding else {}
    for of, index in run.blocks(stage):
        kind = (of is run, of.kind(index), of.recomputes(index), of.window(index))
        if kind not in alike:
            frozen = run.frozen and of is not run
            work = layer(of, index, hardware)
            alike[kind] = forward_only(work) if frozen else work
        found = together(found, alike[kind])
    return together(found, head(run, hardware)) if stage.head else found


def stage_seconds(run: Resolved, stage: Stage, hardware: Hardware) -> Seconds:
    """Return the seconds of a stage's computation per micro-batch, summed over kinds."""
    return total(stage_work(run, stage, hardware))


def _exposed(run: Resolved, sent: list[Collective], hardware: Hardware) -> dict[str, float]:
    """Seconds per step that a rank's computation waits for collectives, by purpose."""
    found = {"tp": 0.0, "cp": 0.0, "ep": 0.0}
    for each in sent:
        seconds = each.seconds(hardware)
        if each.purpose in ("tp", "loss"):
            copies = TENSOR_COPIES * each.size * each.count / hardware.copy
            hidden = HIDDEN["async_tp"] if run.config.parallel.async_tp else 0.0
            found["tp"] += (seconds + copies) * (1 - hidden)
        elif each.purpose == "cp":
            found["cp"] += seconds * (1 - HIDDEN["ring"] if each.kind == "send" else 1)
        elif each.purpose == "ep":
            found["ep"] += seconds
    return found


def _paired(run: Resolved, rank: int) -> float:
    """Return the fraction of a pipeline rank's forwards that run together with a backward."""
    m = run.micro_batches
    if not run.config.parallel.overlap_micro_batches:
        return 0.0
    if run.layout is None:
        return (m - 1) / m
    # A longer step than the simulated one has more pairs, and as many forwards that run alone.
    row = run.order[rank]
    alone = sum(each.kind is Kind.FORWARD and not each.overlapped for each in row)
    return 1 - alone / (m * len(run.stages_of(rank)))


def _hidden_by_pairs(exchanged: float, work: float, paired: float) -> float:
    """Return the seconds that pairs of a forward and a backward save; less than 0: they cost.

    Args:
        exchanged: seconds of dispatch and combine in a step.
        work: seconds of computation in a step.
        paired: result of `_paired`.
    """
    return paired * (min(PAIRED_HIDDEN * exchanged, work) - PAIRED_SLOWER * work)


def _sent(run: Resolved, sent: Iterable[Collective], hardware: Hardware) -> dict[str, float]:
    """Return the seconds of FSDP's collectives without overlap, by kind.

    `all_gather` and `reduce_scatter` run in kernels; `copied` are all-gathers and all-to-alls of
    copy engines.
    """
    found = {"all_gather": 0.0, "reduce_scatter": 0.0, "copied": 0.0}
    for each in sent:
        kind = "all_gather" if each.kind == "all_gather" else "reduce_scatter"
        if run.config.parallel.copy_engines and each.kind in ("all_gather", "all_to_all"):
            kind = "copied"
        found[kind] += each.seconds(hardware)
    return found


def _spread(work: dict[str, float], busy: float) -> dict[str, float]:
    """Scale seconds of computation to `busy` in total, so that waits count as computation."""
    share = busy / max(sum(work.values()), 1e-12)
    return {kind: seconds * share for kind, seconds in work.items()}


@dataclass(frozen=True)
class _OverlapPhase:
    """Collectives and computation that overlap: seconds of each without overlap, by kind."""

    sent: dict[str, float]
    work: dict[str, float]


def _added(phase: _OverlapPhase, hardware: Hardware) -> float:
    """Return the seconds that collectives add to a phase: slower computation, and exposed time.

    While both overlap, computation runs at a fraction r of its full speed, and a collective at a
    fraction q (`Hardware.left`). All computation of the phase, W seconds without overlap, then
    takes W / r seconds. In this time, q W / r seconds of collectives complete. Collectives of C
    seconds thus overlap a fraction f = C / (q W / r) of the computation and add f W (1 / r - 1)
    seconds. If f > 1, only 1 / f of the collectives is overlapped; the rest is exposed.
    """
    covered = added = 0.0
    for sent, seconds in phase.sent.items():
        if not seconds:
            continue
        room = slower = 0.0
        for kind, alone in phase.work.items():
            own, other = (1 - COPIED, 1.0) if sent == "copied" else hardware.left(kind, sent)
            room += alone * other / own
            slower += alone * (1 / own - 1)
        part = seconds / max(room, 1e-12)
        covered, added = covered + part, added + part * slower
    if covered <= 1:
        return added
    return added / covered + sum(phase.sent.values()) * (1 - 1 / covered)


def _phases(run: Resolved, rank: int, busy: float, hardware: Hardware) -> Iterator[_OverlapPhase]:
    """Yield the computation and collectives that overlap, for each forward and each backward.

    FSDP orders its streams as follows (`FSDPParamGroup.wait_for_unshard`, `post_backward`; torch
    2.11):

    forward     the next gather overlaps a unit, and the copy out of the previous gather
    backward    the next gather begins when the previous one is copied out. A unit's reduction ends
                before the next one is copied in. So a unit overlaps one gather, with its cast and
                copy in, and one reduction, with its sum. Copies on the computation stream overlap
                nothing

    Units are added up: of a collective that is longer than its unit, the excess counts as hidden by
    the computation of other units.
    """
    m, policy = run.micro_batches, run.policy
    own = [c for c in collectives(run, rank, hardware.domain) if c.purpose == "fsdp"]
    gathered = [c for c in own if c.kind == "all_gather"]
    once = _sent(run, (replace(c, count=1) for c in gathered), hardware)
    sums = _sent(run, (c for c in own if c.kind != "all_gather"), hardware)
    every = _sent(run, gathered, hardware)
    again = {} if policy.keep_gathered else {k: every[k] / m - once[k] for k in every}
    (stage,) = run.stages
    computed = stage_work(run, stage, hardware)
    share = busy / m / total(computed).sum
    ahead = {kind: share * seconds.forward for kind, seconds in computed.items()}
    back = {k: share * (s.inputs + s.weights) for k, s in computed.items()}
    sent = [part for u in held(run, rank) for part in gathered_bytes(run, u)]
    whole, part = (sum(n_bytes) for n_bytes in zip(*sent, strict=True))
    shard = sum(u.trained_shard for u in held(run, rank))  # frozen weights need no cast
    out = 2 * whole / hardware.copy
    cast = 4 * shard + part if run.element < 4 else 0
    copied_in = (cast + 2 * part) / hardware.copy if sum(again.values()) else 0.0
    # Gradients that are not reduced are summed on the computation stream (`copied_bytes`).
    summed = sum(part for u in held(run, rank) for _, part in reductions(run, u))
    for i in range(m):
        gather = once if i == 0 or not policy.keep_gathered else {}
        yield _OverlapPhase(gather, _plus(ahead, {"copy": out} if sum(gather.values()) else {}))
        part = 1 / m if policy.reduce_each_micro_batch else float(i == m - 1)
        reduce = {kind: seconds * part for kind, seconds in sums.items()}
        if i and policy.reduce_each_micro_batch and sum(sums.values()):
            # float32: read the new sum and the old one, write the total
            reduce = _plus(reduce, {_most(sums): 12 * summed / hardware.copy})
        inward = _plus(again, {_most(again): copied_in}) if copied_in else again
        yield _OverlapPhase(_plus(inward, reduce), back)


def _plus(some: dict[str, float], more: dict[str, float]) -> dict[str, float]:
    return {kind: some.get(kind, 0.0) + more.get(kind, 0.0) for kind in {**some, **more}}


def _most(seconds: dict[str, float]) -> str:
    return max(seconds, key=lambda kind: seconds[kind])


def _alone(run: Resolved, rank: int, hardware: Hardware) -> float:
    """Return the seconds of FSDP's collectives that overlap nothing.

    These are the first unit's all-gather, which runs before all computation, and the first unit's
    reduction, which runs after all computation.
    """
    own = [c for c in collectives(run, rank, hardware.domain) if c.purpose == "fsdp"]
    if not own:
        return 0.0
    first = own[:2]
    return sum(hardware.collective(c.kind, c.size, c.ranks, c.inside) for c in first)


def copied_bytes(run: Resolved, rank: int) -> float:
    """Bytes per step that FSDP reads and writes on the computation stream.

    A gathered weight is copied out of its buffer. A weight that is not sharded is cast from
    float32. A gradient is copied into the reduction's buffer; if gradients are first summed over
    micro-batches, that of the first is cast and those of the others are added. Parameters sharded
    on another dim than dim 0 are concatenated once more after a gather, and split before a
    reduction.
    Gradients that are not reduced (`bypass_reduction` of
    `dtron.parallelisms.fsdp.torch_internals`) are cast to float32 and added to those of earlier
    micro-batches; if they wait for the last micro-batch, they are added without a cast.
    A matmul that adds a gradient to the sum writes the sum instead of the gradient, and from the
    second micro-batch on also reads it.
    """
    m, policy, sums = run.micro_batches, run.policy, run.reduce_element
    summed = run.times_reduced < m
    if summed:
        gradient = (run.element + sums) + (m - 1) * (run.element + 2 * sums) + 2 * sums
    else:
        gradient = m * (run.element + (run.element if run.exchanges else sums))
    later = run.element + (4 + 12 if policy.reduce_each_micro_batch else 8)
    kept = run.element + 4 + (m - 1) * later
    in_matmul = m * (sums - run.element) + (m - 1) * sums
    turned = 2 * (sums if summed else m * run.element)
    found = 0.0
    for stage in run.stages_of(rank):
        listed = joined_units(run, stage)
        for place, unit in enumerate(listed):
            times = gathers(run, unit, place == len(listed) - 1)
            for (whole, shard), (trained, _), keeps in by_keeping(run, unit):
                if shard < whole:
                    weight = times * 2 * run.element
                else:  # cast, and kept until the backward
                    weight = (1 if policy.keep_gathered else m) * (4 + run.element)
                found += whole * weight + trained * (kept if keeps else gradient)
            dense, experts = unit.added - unit.added_experts, unit.added_experts
            for added, keeps in ((dense, run.keeps_dense), (experts, run.keeps_experts)):
                change = in_matmul - kept if keeps else in_matmul + 2 * sums - gradient
                found += added * change if summed else 0
            found += unit.columns * 2 * times * run.element
            found += unit.columns * turned if not run.frozen else 0
            found -= (2 * times if run.shards > 1 else 1) * (run.element - 1) * unit.narrow
    return found


def _update(run: Resolved, hardware: Hardware) -> float:
    return max(_update_of(run, rank, hardware) for rank in range(run.degrees["pp"]))


def _update_of(run: Resolved, rank: int, hardware: Hardware) -> float:
    optim, muon_too = run.config.optim, run.config.optim.name == "muon"
    every = sum(unit.trained_shard for unit in held(run, rank))
    hidden = sum(unit.hidden_shard for unit in held(run, rank)) if muon_too else 0
    moments = optim.moments
    others = {"lion": LION[moments], "adamw8bit": ADAMW8BIT}.get(optim.name, ADAMW[moments])
    moved = (every - hidden) * others
    moved += hidden * MUON[moments] + every * 4  # the norm also reads gradients
    moved += every * 12 if optim.ema else 0
    sent = muon_collectives(run, rank, hardware.domain)
    exchanged = sum(each.seconds(hardware) for each in sent)
    own = moved / (UPDATE_RATE * hardware.copy) + exchanged + newton_schulz(run, rank, hardware)
    return max(own, _moments_copied(run, rank, hardware))


def _moments_copied(run: Resolved, rank: int, hardware: Hardware) -> float:
    """Seconds of copies of moments from and to the host, which overlap each other and the update.

    The first bucket is copied in before any is copied out.
    """
    copied = bytes_on_host(run, rank) + bytes_of_buckets(run, rank) / ON_DEVICE
    return copied / hardware.host_link


def timeline(run: Resolved, hardware: Hardware) -> Timeline:
    """Simulate the schedule of a shortened step, with seconds of computation.

    Transfers between ranks take no time.
    """
    costs = _costs(run, hardware, dict.fromkeys(range(run.degrees["pp"]), 1.0))
    _, spans = run_order(run.order, len(run.stages), costs)
    ranks = tuple(stage.rank for stage in run.stages)
    return Timeline(spans, len(run.stages) // run.degrees["pp"], ranks)


def _pipelined(run: Resolved, hardware: Hardware, loads: dict[int, _RankSeconds]) -> float:
    """Seconds of the simulated schedule of a step.

    A rank's waits lengthen each of its actions by the same factor.
    """
    short = shortened(run.config, run.world_size).micro_batches(run.world_size)
    stretch = {  # a rank may have only empty stages
        rank: 1 + sum(load.exposed.values()) / load.compute if load.compute else 1.0
        for rank, load in loads.items()
    }
    costs = _costs(run, hardware, stretch)
    sends = [c for c in collectives(run, 0, hardware.domain) if c.purpose == "pp"]
    hop = sends[0].seconds(hardware) / sends[0].count if sends else 0.0
    length = run_order(run.order, len(run.stages), costs, hop)[0]
    each = max(load.busy / run.micro_batches for load in loads.values())
    return length + (run.micro_batches - short) * each


def _costs(
    run: Resolved, hardware: Hardware, stretch: dict[int, float]
) -> dict[tuple[int, Kind], float]:
    """Seconds of each action, by stage and kind."""
    times = functools.lru_cache(lambda stage: stage_seconds(run, stage, hardware))
    found = {}
    for stage in run.stages:
        seconds, more = times(stage), stretch[stage.rank]
        found[stage.index, Kind.FORWARD] = seconds.forward * more
        found[stage.index, Kind.BACKWARD] = (seconds.inputs + seconds.weights) * more
        found[stage.index, Kind.INPUT] = seconds.inputs * more
        found[stage.index, Kind.WEIGHT] = seconds.weights * more
    return found
