"""Choose values for config keys that are unset or "auto", from predicted memory; used at the start
of a run and by `dtron plan`."""

import json
import logging
from collections.abc import Callable
from dataclasses import asdict, replace

import torch

from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.models import model_spec
from dtron.models.contract import counted_as_decoder
from dtron.parallelisms.host_memory import host_memory
from dtron.plan.hardware import HOST, Hardware, of_device
from dtron.plan.memory import memory, offloaded_by_host, worst
from dtron.plan.run_shape import Resolved
from dtron.plan.steptime import predict
from dtron.run.process import Place
from dtron.run.rendezvous import Rendezvous
from dtron.setup.automatic import Automatic, Machine, choose, without_choices
from dtron.setup.rules import MachineCandidate, ModelCandidate
from dtron.setup.versions import release

log = logging.getLogger("dtron")

_ROUNDING = 0.02
"""Relative difference between the memory of a hardware row and that of the real GPU above which the
GPU's value replaces the row's; smaller differences are rounding."""
_SECONDS = 300
"""Seconds that rank 0 may take to choose settings."""


def at_start(config: RunConfig, place: Place, rendezvous: Rendezvous) -> Automatic:
    """Choose the automatic settings of a starting run; all ranks call this.

    Rank 0 chooses from what the machines of all ranks have in common, and all ranks return its
    choice.

    Raises:
        RankError, PeerError: a rank does not send its value in time, or rank 0 has ended.
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
    """Choose the automatic settings of a run with all ranks on `machine`; None: this machine."""
    machine = machine or Machine.of_place(place)
    if not machine.gpus:
        return without_choices(config)
    row = of_device(place.device)
    if abs(machine.memory / row.memory - 1) > _ROUNDING:
        row = replace(row, memory=machine.memory)
    if total := host_memory()[0]:
        row = replace(row, host_memory=total)
    return choose(
        MachineCandidate(config, place.world_size, place.device),
        machine,
        *_predictions(place.world_size, row),
    )


def of_hardware(config: RunConfig, world_size: int, row: Hardware) -> Automatic:
    """Choose the automatic settings of a planned run on GPUs of a hardware row.

    The choices are those for the installed torch.
    """
    host = min(row.host, world_size)
    host = host if world_size % host == 0 else 1
    machine = Machine(True, host, row.domain >= host, release(torch.__version__))
    run = ModelCandidate(config, world_size)
    return choose(run, machine, *_predictions(world_size, row))


def _predictions(
    world_size: int, row: Hardware
) -> tuple[Callable[[RunConfig], float], Callable[[RunConfig], float]]:
    """Return two functions of a config; inf: unknown.

    The first, cached, gives the used fraction of the available memory: of the fullest GPU, or of
    the host if that is more. The second gives the seconds of a step; a host that was not measured
    counts as slow as that of HOST.
    """
    priced = replace(row, calls=row.calls or HOST)
    shares: dict[str, float] = {}

    def used(config: RunConfig) -> float:
        key = config.to_toml()
        if key not in shares:
            shares[key] = _share(config, world_size, row)
        return shares[key]

    return used, lambda config: _seconds(config, world_size, priced)


def _share(config: RunConfig, world_size: int, row: Hardware) -> float:
    def share(run: Resolved) -> float:
        on_host = offloaded_by_host(run, row) / (row.host_memory * 19 / 20)
        return max(worst(memory(run)).reserved / row.room, on_host)

    return _predicted(config, world_size, share)


def _seconds(config: RunConfig, world_size: int, row: Hardware) -> float:
    return _predicted(config, world_size, lambda run: predict(run, row).step)


def _predicted(config: RunConfig, world_size: int, value: Callable[[Resolved], float]) -> float:
    """Return a predicted value of a run; inf: the planner cannot predict it.

    It cannot if the run is not legal, its precision has no rates, or its family a custom module.
    """
    try:
        run = Resolved.of(config, world_size)
        if any(counted_as_decoder(config.model.name, model_spec(config.model.name))):
            return float("inf")
        return value(run)
    except ConfigError:
        return float("inf")
    except Exception:  # a run can start without a prediction
        log.exception("the planner failed; settings that depend on predictions keep their defaults")
        return float("inf")
