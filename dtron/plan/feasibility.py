"""Check whether a run is legal on a number of ranks; if not, list the reasons and similar legal
layouts.

The rules are those of a run's start, except for checks of the machine: the choice of an attention
backend, the presence and features of GPUs, and `unchecked`. With a hardware row, copy engines and
dispatch by symmetric memory or DeepEP are refused across hosts, since ranks cannot read the memory
of another host. Similar layouts differ in the dispatcher or in one or two degrees, the smallest
changes first; dp_shard takes the remaining ranks.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.parallelisms.expert.dispatchers import in_graphs
from dtron.plan.communication import expert_group, sharing
from dtron.plan.hardware import Hardware
from dtron.plan.run_shape import Resolved, shortened
from dtron.setup.rules import reasons

_VARIED = ("tp", "pp", "cp", "ep", "etp", "stages_per_rank")
_FACTORS = (1 / 8, 1 / 4, 1 / 2, 2, 4)
BATCH = "train.global_batch"
_NEAR = 3  # number of similar layouts to list
_TRIES = 120


@dataclass(frozen=True)
class Legality:
    """Whether a run is legal on a number of ranks, and what to change if not."""

    reasons: tuple[str, ...]
    nearest: tuple[dict[str, Any], ...]
    """Similar legal runs, the smallest changes first; empty for a legal run. Each maps keys of
    [parallel], or train.global_batch, to new values."""

    @property
    def legal(self) -> bool:
        """Whether the run is legal: `reasons` is empty."""
        return not self.reasons


def check(config: RunConfig, world_size: int, hardware: Hardware | None = None) -> Legality:
    """Return all reasons against a run, and similar runs that are legal.

    Args:
        hardware: hardware row of the ranks' hosts; None: unknown.
    """
    found = tuple(reasons(shortened(config, world_size), world_size))
    if not found and hardware is not None:
        found = tuple(far_memory(Resolved.of(config, world_size), hardware))
    near = tuple(_nearest(config, world_size, found, hardware)) if found else ()
    return Legality(found, near)


def unchecked(config: RunConfig) -> Iterator[str]:
    """List requirements on the machine that only the start of the run on that machine can check."""
    if config.parallel.dispatcher == "deepep":
        yield (
            'the package deep_ep, which parallel.dispatcher = "deepep" needs; the run checks this '
            "at its start"
        )


def far_memory(run: Resolved, hardware: Hardware) -> Iterator[str]:
    """List settings for which ranks would have to read the memory of another host, or for which
    they need several hosts.

    Each is a reason against the run. At the start of a run, `check_host` of
    `dtron.parallelisms.expert.peer_memory`, or `ranks_per_host` of
    `dtron.parallelisms.expert.hierarchical`, refuses such a run.
    """
    parallel = run.config.parallel
    if parallel.copy_engines:
        for what, ranks, inside in sharing(run, hardware.host):
            fix = f"shard {what} inside a host (parallel.dp_shard, dp_replicate)"
            yield from _split_hosts("parallel.copy_engines", what, ranks, inside, fix, hardware)
    if parallel.dispatcher in ("symmetric_memory", "deepep"):
        ranks, inside = expert_group(run, "ep", hardware.host)
        other = "bounded_all_to_all" if parallel.bounded else "all_to_all"
        fix = f'use fewer ranks (parallel.ep, etp), or parallel.dispatcher = "{other}"'
        key = f'parallel.dispatcher = "{parallel.dispatcher}"'
        yield from _split_hosts(key, "experts", ranks, inside, fix, hardware)
    if parallel.dispatcher == "hierarchical" and not parallel.ep_inner:
        ranks, inside = expert_group(run, "ep", hardware.host)
        if inside == ranks:
            yield (
                f'parallel.dispatcher = "hierarchical": all {ranks} ranks of parallel.ep x '
                f"parallel.etp are in one host of {hardware.host} GPUs ({hardware.name}); use "
                '"symmetric_memory"'
            )


def _split_hosts(
    key: str, what: str, ranks: int, inside: int, fix: str, hardware: Hardware
) -> Iterator[str]:
    if inside < ranks:
        yield (
            f"{key}: {ranks} ranks share {what}, but only {inside} of these ranks are in one host "
            f"of {hardware.host} GPUs ({hardware.name}); ranks cannot read another host's memory; "
            f"{fix}"
        )


def _nearest(
    config: RunConfig, world_size: int, found: tuple[str, ...], hardware: Hardware | None
) -> Iterator[dict[str, Any]]:
    n_near = 0
    changes = [*_changes(config), *_batches(config, world_size, found)]
    changes += _inside_hosts(config, world_size, found)
    for _, change in sorted(changes, key=lambda pair: pair[0])[:_TRIES]:
        try:
            legal = _is_legal(_changed(config, change), world_size, hardware)
        except ConfigError:
            continue
        if not legal:
            continue
        yield change
        n_near += 1
        if n_near == _NEAR:
            return


def _is_legal(config: RunConfig, world_size: int, hardware: Hardware | None) -> bool:
    """Whether the run is legal.

    `far_memory` is checked first: it is fast, while other checks compute the pipeline schedule,
    which can take seconds.

    Raises:
        ConfigError: a parallel degree is impossible with `world_size` ranks.
    """
    run = Resolved(config, world_size, Resolved.model_of(config), None, None)
    if hardware is not None and any(far_memory(run, hardware)):
        return False
    return not reasons(shortened(config, world_size), world_size)


def _changed(config: RunConfig, change: dict[str, Any]) -> RunConfig:
    if BATCH in change:
        return config.changed(train={"global_batch": change[BATCH]})
    return config.changed(parallel=change)


def _batches(
    config: RunConfig, world_size: int, found: tuple[str, ...]
) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield (size of the change, key and value) for values near train.global_batch.

    Yield nothing unless a reason against the run names that key.
    """
    if not any(BATCH in reason for reason in found):
        return
    try:
        degrees = config.degrees(world_size)
    except ConfigError:  # other reasons must be fixed first
        return
    ranks = degrees["dp_replicate"] * degrees["dp_shard"] * config.train.micro_batch
    batch = config.train.global_batch
    for each in {ranks, ranks * degrees["pp"]}:
        for n in (batch // each * each, -(-batch // each) * each):
            if n and n != batch:
                yield abs(math.log2(n / batch)), {BATCH: n}


def _inside_hosts(
    config: RunConfig, world_size: int, found: tuple[str, ...]
) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield (size of the change, keys and values) for changes that keep memory accesses in a host.

    These changes are dispatch by all-to-alls, no copy engines, or more replicas with fewer shards.
    """
    if any(reason.startswith("parallel.dispatcher") for reason in found):
        yield 1.0, {"dispatcher": "all_to_all"}
        yield 1.1, {"dispatcher": "bounded_all_to_all"}  # if ep_capacity is set
        yield 1.2, {"dispatcher": "symmetric_memory"}
    if not any(reason.startswith("parallel.copy_engines:") for reason in found):
        return
    degrees = config.degrees(world_size)
    for factor in (2**n for n in range(1, 12)):
        if degrees["dp_shard"] % factor == 0:
            yield (
                math.log2(factor),
                {"dp_shard": -1, "dp_replicate": degrees["dp_replicate"] * factor},
            )
    yield 1.0, {"copy_engines": False}


def _changes(config: RunConfig) -> Iterator[tuple[float, dict[str, Any]]]:
    """Yield (size of the change, keys and values) for changes of the dispatcher, or of one or two
    degrees."""
    parallel = config.parallel
    free = {} if parallel.dp_shard == -1 else {"dp_shard": -1}
    options = {key: _nearby(key, getattr(parallel, key)) for key in _VARIED}
    if free:
        yield 0.5, dict(free)
    if parallel.pp_layout:
        yield 0.5, {"pp_layout": ""}
    if parallel.ep * parallel.etp > 1 and not in_graphs(parallel.dispatcher):
        yield 0.5, {**free, "dispatcher": "symmetric_memory"}
    for count in (1, 2):
        for keys in combinations(_VARIED, count):
            for values in product(*(options[key] for key in keys)):
                changed = dict(zip(keys, values, strict=True))
                moved = sum(
                    abs(math.log2(value / (getattr(parallel, key) or 1)))
                    for key, value in changed.items()
                )
                # A given pp_layout fits only one number of stages.
                by_hand = parallel.pp_layout and {"pp", "stages_per_rank"} & changed.keys()
                yield (
                    moved + 2 * count,
                    {**free, **changed, **({"pp_layout": ""} if by_hand else {})},
                )


def _nearby(key: str, value: int) -> list[int]:
    """List the products of a degree with _FACTORS, and 1, without the degree itself.

    Empty for stages_per_rank = 0, the schedule's default, which is not varied.
    """
    if key == "stages_per_rank" and value == 0:
        return []
    near = {int(value * factor) for factor in _FACTORS} | {1}
    return sorted(n for n in near if n >= 1 and n != value)
