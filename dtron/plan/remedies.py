"""Suggest settings for a run that needs too much memory, from the planner's estimates."""

import json
from collections.abc import Iterator
from typing import Any

from dtron.config import RunConfig
from dtron.errors import ConfigError, counted
from dtron.faults.memory import check_host_memory, size
from dtron.models import model_spec
from dtron.models.contract import counted_as_decoder
from dtron.parallelisms.host_memory import host_memory
from dtron.plan.memory import RankMemory, memory, offloaded
from dtron.plan.run_shape import Resolved
from dtron.run.process import Place

_CHUNKS = 8
_AT_MOST = 3
"""Maximum number of settings, and of memory classes, that an error names."""


def most_memory(config: RunConfig, world_size: int) -> RankMemory:
    """Return the memory of the pipeline rank that allocates the most.

    Raises:
        ConfigError: the run is not legal on this number of ranks.
    """
    return max(memory(Resolved.of(config, world_size)), key=lambda rank: rank.peak)


def check_step_memory(config: RunConfig, place: Place) -> None:
    """Check that a step on CPUs fits the available host memory.

    Raises:
        ConfigError: the step does not fit; the message suggests settings that fit.
    """
    if [*counted_as_decoder(config.model.name, model_spec(config.model.name))]:
        return  # the family builds another module, of unknown memory
    needed = most_memory(config, place.world_size)
    here = place.local_world_size
    classes = sorted(needed.classes.items(), key=lambda item: -item[1])[:_AT_MOST]
    most = ", ".join(f"{name} {size(n_bytes)}" for name, n_bytes in classes)
    ranks = f" on each of {here} ranks" if here > 1 else ""
    check_host_memory(
        needed.peak * here,
        f"train.micro_batch = {config.train.micro_batch}: a step needs about {size(needed.peak)}"
        f"{ranks} ({most})",
        lambda available: remedies(config, place, available / here),
    )


def remedies(config: RunConfig, place: Place, room: float, needed: float = 0.0) -> str:
    """Return a clause for the end of an error message.

    It suggests settings with which each rank needs at most `room` bytes: single keys with the
    cheapest value that fits or, if no single key suffices, several keys together.

    Args:
        needed: bytes that a rank was measured to need; estimates are scaled up to it.
    """
    world_size = place.world_size
    planned = _peak(config, world_size)
    factor = max(1.0, needed / planned) if planned else 1.0
    fits = []
    for key, values in _changes(config, place):
        for value in values:
            changed = _with_value(config, key, value, place)
            if changed and (peak := factor * _peak(changed, world_size)) <= room:
                fits.append(f"{key} = {json.dumps(value)} (about {size(peak)})")
                break
    if fits:
        return f"use {' or '.join(fits[:_AT_MOST])}"
    return _all_changes(config, place, room, factor)


def _all_changes(config: RunConfig, place: Place, room: float, factor: float) -> str:
    """Change key after key to its value of least memory, until the run fits.

    Return the clause that lists the changes.
    """
    settings, least, world_size = [], 0.0, place.world_size
    for key, values in _changes(config, place):
        changed = _with_value(config, key, values[-1], place) if values else None
        if changed is None:
            continue
        config, least = changed, factor * _peak(changed, world_size)
        settings.append(f"{key} = {json.dumps(values[-1])}")
        if least <= room:
            return f"use {', '.join(settings)} (about {size(least)})"
    also = f": with {', '.join(settings)} a rank needs about {size(least)}" if settings else ""
    return (
        f"no cheaper setting fits on {counted(world_size, 'rank')}{also}; use more ranks or a "
        "smaller model.size"
    )


def _changes(config: RunConfig, place: Place) -> Iterator[tuple[str, list[Any]]]:
    """Yield (key, values that need less memory).

    Keys and values are sorted from the cheapest change to the most expensive.
    """
    half, batches = config.train.micro_batch // 2, []
    while half:
        batches.append(half)
        half //= 2
    modes = ["none", "selective", "attention", "full"]
    yield "recompute.mode", modes[modes.index(config.recompute.mode) + 1 :]
    yield "recompute.modules", [[]] if config.recompute.modules else []
    on_gpus = place.device.type == "cuda"
    yield "recompute.offload", [True] if on_gpus and not config.recompute.offload else []
    yield "train.micro_batch", batches
    yield "parallel.zero", list(range(config.parallel.zero + 1, 4))
    yield "train.loss_chunks", [_CHUNKS] if config.train.loss_chunks < _CHUNKS else []
    more = [part for part in (0.5, 1.0) if part > config.optim.offload]
    yield "optim.offload", more if on_gpus else []
    yield "optim.moments", ["bfloat16"] if config.optim.moments == "float32" else []


def _peak(config: RunConfig, world_size: int) -> float:
    return most_memory(config, world_size).peak


def _with_value(config: RunConfig, key: str, value: Any, place: Place) -> RunConfig | None:
    """Return the config with another value; None: it is not legal, or the host has no room."""
    section, name = key.split(".")
    values = config.model_dump()
    values[section][name] = value
    try:
        changed = RunConfig.of(values)
        run = Resolved.of(changed, place.world_size)
    except ConfigError:
        return None
    on_host = offloaded(run) * place.local_world_size
    return changed if not on_host or on_host <= host_memory()[0] * 19 / 20 else None
