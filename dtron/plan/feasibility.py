"""Whether a run is legal on a number of ranks, why not, and which layouts near it are.

The reasons are a start's own, but for those that depend on the machine: the choice of an attention
backend, whether there are GPUs, what these can, and `unchecked`. Of hosts of a hardware row copy
engines and the dispatch by symmetric memory are refused, where a run would find that ranks cannot
read each other's memory. Near layouts differ in one or two degrees, by as small a factor as
possible; the rest of the world goes to dp_shard.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.plan.communication import exchanging, sharing
from dtron.plan.hardware import Hardware
from dtron.plan.run_shape import Resolved, shortened
from dtron.setup.rules import reasons

_VARIED = ("tp", "pp", "cp", "ep", "etp", "stages_per_rank")
_FACTORS = (1 / 8, 1 / 4, 1 / 2, 2, 4)
BATCH = "train.global_batch"
_NEAR = 3  # layouts listed
_TRIES = 120


@dataclass(frozen=True)
class Legality:
    """Of a run on a number of ranks."""

    reasons: tuple[str, ...]
    nearest: tuple[dict[str, Any], ...]
    """Keys of [parallel] to change, or train.global_batch, the smallest changes first; empty for a
    legal run."""

    @property
    def legal(self) -> bool:
        """Whether nothing is wrong."""
        return not self.reasons


def check(config: RunConfig, world_size: int, hardware: Hardware | None = None) -> Legality:
    """All that is wrong, and what near is right.

    Args:
        hardware: what the ranks' hosts are; None: not known.
    """
    found = tuple(reasons(shortened(config, world_size), world_size))
    if not found and hardware is not None:
        found = tuple(far_memory(Resolved.of(config, world_size), hardware))
    near = tuple(_nearest(config, world_size, found, hardware)) if found else ()
    return Legality(found, near)


def unchecked(config: RunConfig) -> Iterator[str]:
    """What a run needs of its machine, and nobody looks for before it starts there."""
    if config.parallel.dispatcher == "deepep":
        yield 'the package deep_ep, which parallel.dispatcher = "deepep" needs; a start does'


def far_memory(run: Resolved, hardware: Hardware) -> Iterator[str]:
    """Why ranks cannot reach each other's memory (`peer_memory.check_host` asks the hosts)."""
    parallel = run.config.parallel
    if parallel.copy_engines:
        for what, ranks, inside in sharing(run, hardware.host):
            fix = "share them inside a host (parallel.dp_shard, dp_replicate)"
            yield from _apart("parallel.copy_engines", what, ranks, inside, fix, hardware)
    if parallel.dispatcher in ("symmetric_memory", "deepep"):
        ranks, inside = exchanging(run, hardware.host)
        fix = 'use fewer of them (parallel.ep, etp), or parallel.dispatcher = "all_to_all"'
        key = f'parallel.dispatcher = "{parallel.dispatcher}"'
        yield from _apart(key, "experts", ranks, inside, fix, hardware)


def _apart(
    key: str, what: str, ranks: int, inside: int, fix: str, hardware: Hardware
) -> Iterator[str]:
    if inside < ranks:
        yield (
            f"{key}: {ranks} ranks share {what}, of which a host of {hardware.host} GPUs "
            f"({hardware.name}) has {inside}, and cannot read each other's memory; {fix}"
        )


def _nearest(
    config: RunConfig, world_size: int, found: tuple[str, ...], hardware: Hardware | None
) -> Iterator[dict[str, Any]]:
    n_near = 0
    changes = [*_changes(config), *_batches(config, world_size, found)]
    changes += _inside_hosts(config, world_size, found)
    for _, change in sorted(changes, key=lambda pair: pair[0])[:_TRIES]:
        try:
            run = Resolved.of(_changed(config, change), world_size)
        except ConfigError:
            continue
        if hardware is not None and any(far_memory(run, hardware)):
            continue
        yield change
        n_near += 1
        if n_near == _NEAR:
            return


def _changed(config: RunConfig, change: dict[str, Any]) -> RunConfig:
    if BATCH in change:
        train = config.train.model_copy(update={"global_batch": change[BATCH]})
        return config.model_copy(update={"train": train})
    return config.model_copy(update={"parallel": config.parallel.model_copy(update=change)})


def _batches(
    config: RunConfig, world_size: int, found: tuple[str, ...]
) -> Iterator[tuple[float, dict[str, Any]]]:
    """Batches around the run's own, where it is a reason of refusal."""
    if not any(BATCH in reason for reason in found):
        return
    try:
        degrees = config.degrees(world_size)
    except ConfigError:  # another reason, without which nothing is known of the batch
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
    """What needs no memory of other hosts: more copies of fewer shards each, where copy engines are
    refused, or none of them; all-to-alls, where rows are pulled."""
    bounded = "ep_capacity" in config.parallel.model_fields_set  # has no effect on all-to-alls
    if not bounded and any(reason.startswith("parallel.dispatcher") for reason in found):
        yield 1.0, {"dispatcher": "all_to_all"}
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
    """(size of the change, keys) of one degree and of two."""
    parallel = config.parallel
    free = {} if parallel.dp_shard == -1 else {"dp_shard": -1}
    options = {key: _near(key, getattr(parallel, key)) for key in _VARIED}
    if free:
        yield 0.5, dict(free)
    if parallel.pp_layout:
        yield 0.5, {"pp_layout": ""}
    for count in (1, 2):
        for keys in combinations(_VARIED, count):
            for values in product(*(options[key] for key in keys)):
                changed = dict(zip(keys, values, strict=True))
                moved = sum(
                    abs(math.log2(value / (getattr(parallel, key) or 1)))
                    for key, value in changed.items()
                )
                # A layout of stages by hand fits one number of stages alone.
                by_hand = parallel.pp_layout and {"pp", "stages_per_rank"} & changed.keys()
                yield (
                    moved + 2 * count,
                    {**free, **changed, **({"pp_layout": ""} if by_hand else {})},
                )


def _near(key: str, value: int) -> list[int]:
    """Degrees some factors away; stages_per_rank = 0 is the schedule's own choice and stays."""
    if key == "stages_per_rank" and value == 0:
        return []
    near = {int(value * factor) for factor in _FACTORS} | {1}
    return sorted(n for n in near if n >= 1 and n != value)
