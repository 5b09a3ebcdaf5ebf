"""Automatic settings with the planner's memory: for a start on this machine, and for a plan."""

from dataclasses import replace

import torch

from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.models import MODELS
from dtron.models.contract import counted_as_decoder
from dtron.plan.hardware import Hardware, of_device
from dtron.plan.memory import memory, worst
from dtron.plan.run_shape import Resolved
from dtron.run.process import Place
from dtron.setup.automatic import Automatic, Machine, choose
from dtron.setup.rules import MachineCandidate, ModelCandidate
from dtron.setup.versions import release

_ROUNDING = 0.02
"""Largest difference between a row's memory and what torch reports for the same GPU."""


def of_place(config: RunConfig, place: Place) -> Automatic:
    """Choose the automatic settings of a run that starts here."""
    machine = Machine.of_place(place)
    if not machine.gpus:
        return Automatic(config)
    row, total = of_device(place.device), torch.cuda.get_device_properties(place.device)
    if abs(total.total_memory / row.memory - 1) > _ROUNDING:
        row = replace(row, memory=float(total.total_memory))
    return _choose(MachineCandidate(config, place.world_size, place.device), machine, row)


def of_hardware(config: RunConfig, world_size: int, row: Hardware) -> Automatic:
    """Choose the automatic settings of a planned run."""
    host = min(row.host, world_size)
    machine = Machine(True, host, row.domain >= host, release(torch.__version__))
    return _choose(ModelCandidate(config, world_size), machine, row)


def _choose(run: ModelCandidate, machine: Machine, row: Hardware) -> Automatic:
    shares: dict[str, float] = {}

    def used(config: RunConfig) -> float:
        key = config.to_toml()
        if key not in shares:
            shares[key] = _used(config, run.world_size, row)
        return shares[key]

    return choose(run, machine, used)


def _used(config: RunConfig, world_size: int, row: Hardware) -> float:
    """Predicted share of a GPU's memory that the worst rank reserves; inf: unknown."""
    try:
        run = Resolved.of(config, world_size)
    except ConfigError:
        return float("inf")
    if any(counted_as_decoder(config.model.name, MODELS[config.model.name])):
        return float("inf")
    return worst(memory(run)).reserved / row.room
