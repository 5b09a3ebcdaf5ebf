"""Automatic settings with the planner's memory: for a start on this machine, and for a plan."""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, replace

import torch

from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.models import MODELS
from dtron.models.contract import counted_as_decoder
from dtron.plan.hardware import Hardware, of_device
from dtron.plan.memory import memory, worst
from dtron.plan.run_shape import Resolved
from dtron.run.process import Place
from dtron.run.rendezvous import Rendezvous
from dtron.setup.automatic import Automatic, Machine, choose
from dtron.setup.rules import MachineCandidate, ModelCandidate
from dtron.setup.versions import release

log = logging.getLogger("dtron")

_ROUNDING = 0.02
"""Largest difference between a row's memory and what torch reports for the same GPU."""
_SECONDS = 300
"""That rank 0 may take to choose."""


def at_start(config: RunConfig, place: Place, rendezvous: Rendezvous) -> Automatic:
    """Choose the automatic settings of a run that starts here; all ranks call it together, and rank
    0 chooses by what all their machines have in common.

    Raises:
        RankError, PeerError: rank 0 does not answer.
    """
    own = Machine.of_place(place)
    found = rendezvous.gather_at_rank_0("machine", json.dumps(asdict(own)))
    if place.rank == 0:
        machines = [Machine(**{**json.loads(each), "torch": own.torch}) for each in found]
        automatic = of_place(config, place, Machine.of_all(machines))
        rendezvous.broadcast_from_rank_0("automatic", json.dumps(automatic.chosen))
        return automatic
    text = rendezvous.broadcast_from_rank_0("automatic", seconds=_SECONDS)
    return Automatic.of(config, json.loads(text))


def of_place(config: RunConfig, place: Place, machine: Machine | None = None) -> Automatic:
    """Choose them for ranks of which each is on such a machine; None: this one."""
    machine = machine or Machine.of_place(place)
    if not machine.gpus:
        return Automatic(config)
    row = of_device(place.device)
    if abs(machine.memory / row.memory - 1) > _ROUNDING:
        row = replace(row, memory=machine.memory)
    return choose(
        MachineCandidate(config, place.world_size, place.device),
        machine,
        _predictions(place.world_size, row),
    )


def of_hardware(config: RunConfig, world_size: int, row: Hardware) -> Automatic:
    """Choose the automatic settings of a planned run, with the installed torch."""
    host = min(row.host, world_size)
    host = host if world_size % host == 0 else 1
    machine = Machine(True, host, row.domain >= host, release(torch.__version__))
    run = ModelCandidate(config, world_size)
    return choose(run, machine, _predictions(world_size, row))


def _predictions(world_size: int, row: Hardware) -> Callable[[RunConfig], float]:
    """Predict the share of a GPU's memory that the fullest rank of a run reserves; inf: unknown."""
    shares: dict[str, float] = {}

    def used(config: RunConfig) -> float:
        key = config.to_toml()
        if key not in shares:
            shares[key] = _share(config, world_size, row)
        return shares[key]

    return used


def _share(config: RunConfig, world_size: int, row: Hardware) -> float:
    try:
        run = Resolved.of(config, world_size)
        if any(counted_as_decoder(config.model.name, MODELS[config.model.name])):
            return float("inf")
        return worst(memory(run)).reserved / row.room
    except ConfigError:
        return float("inf")
    except Exception:  # a start needs no prediction
        log.exception("the planner failed; settings that depend on memory keep their defaults")
        return float("inf")
