"""Automatic settings: a key that is unset, or "auto", takes the fastest value that fits and that
gives the same results up to the order of summation. Chosen once at the start, on GPUs; on CPUs
and in code that builds a RunConfig itself, such keys have their default.

A row needs a measured gain in benchmarks/RESULTS.md. Choices without one are not made:
`parallel.prefetch` ("nothing waits for a gather", benchmarks/NOTES.md), zero = 1, settings across
hosts. `parallel.reduce` and `model.attention` have "auto" as a value of their own.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.run.process import Place
from dtron.setup.rules import ModelCandidate, all_broken
from dtron.setup.versions import release

HEADROOM = 0.05
"""Share of a GPU's memory that a choice leaves free: predictions are off by some per cent."""


@dataclass(frozen=True)
class Machine:
    """What automatic settings depend on. The default is a machine without GPUs."""

    gpus: bool = False
    host: int = 1
    """Ranks per host; 1 if hosts differ."""
    peers: bool = False
    """Whether the GPUs of a host read each other's memory."""
    torch: tuple[int, int] = (2, 11)

    @classmethod
    def of_place(cls, place: Place) -> "Machine":
        """The machine of this process. Ranks of equal hosts find the same."""
        if place.device.type != "cuda":
            return cls()
        host, count = place.local_world_size, torch.cuda.device_count()
        hosts = int(os.environ.get("GROUP_WORLD_SIZE", place.world_size // host))
        host = host if hosts * host == place.world_size else 1
        pairs = [(a, b) for a in range(host) for b in range(host) if a != b]
        peers = count >= host and all(torch.cuda.can_device_access_peer(*pair) for pair in pairs)
        return cls(True, host, peers, release(torch.__version__))


@dataclass(frozen=True)
class _Known:
    """Argument of a row's condition."""

    run: ModelCandidate
    machine: Machine
    used: Callable[[RunConfig], float]

    @cached_property
    def share(self) -> float:
        """Predicted share of a GPU's memory that the run reserves; inf: unknown."""
        return self.used(self.run.config)

    def inside(self, ranks: int) -> bool:
        """Whether neighbouring ranks are on GPUs of one host that read each other's memory."""
        return ranks > 1 and self.machine.peers and self.machine.host % ranks == 0

    @property
    def shards_inside(self) -> bool:
        """Whether the ranks that share parameters are on such GPUs."""
        return self.inside(self.run.shards * self.run.parallel.tp)


@dataclass(frozen=True)
class Row:
    """A key, its values from the fastest on, when they are tried, and the logged reason."""

    key: str
    values: tuple[Any, ...]
    holds: Callable[[_Known], bool]
    reason: str


ROWS = (
    # "Experts, DeepSeek-V2-Lite's shapes", 2 x H200: 40,099 against 37,893 tok/s/GPU.
    Row(
        "parallel.dispatcher",
        ("symmetric_memory",),
        lambda c: (
            c.run.parallel.etp == 1
            and c.inside(c.run.parallel.ep)
            and c.run.parallel.ep <= c.run.parallel.ep_capacity
        ),
        "ep is inside a host, and ep_capacity is enough for any load",
    ),
    # "Head and loss in chunks": peak memory. More chunks are slower ("by copy engines", machine A).
    Row(
        "train.loss_chunks",
        (4, 8, 16),
        lambda c: 1 < c.share < float("inf"),
        "whole logits do not fit",
    ),
    # "Llama-3-8B with context parallelism", 4 x H200: 7,023 and 6,865 against 6,739 tok/s/GPU.
    Row(
        "parallel.cp_method",
        ("ulysses", "all_gather"),
        lambda c: (
            c.run.parallel.cp > 1
            and c.inside(c.run.parallel.cp * c.run.parallel.tp)
            and not (any(c.run.model.windows) or c.run.model.kv_lora_rank)
        ),
        "cp is inside a host",
    ),
    # "Llama-3-8B, 8192 tokens, bfloat16, 4 x H200": 1.515 against 1.541 s.
    Row(
        "parallel.zero",
        (2,),
        lambda c: c.run.shards > 1,
        "unsharded parameters fit and are gathered once per step",
    ),
    # "Llama-3-8B with tensor and pipeline parallelism", 4 x H200: 10,669 and 10,206 against 9,870
    # tok/s/GPU, without tp and recomputation, parameters gathered once per step.
    Row(
        "parallel.schedule",
        ("ZBVZeroBubble", "Interleaved1F1B"),
        lambda c: (
            c.run.parallel.pp > 1
            and (c.run.parallel.tp, c.run.config.recompute.mode) == (1, "none")
            and (c.run.parallel.zero < 3 or c.run.shards == 1)
            and not c.run.model.n_experts
        ),
        "a smaller bubble, and it fits",
    ),
    # "Llama-3-8B by copy engines", 4 x H200, with the next row: 11,238 tok/s/GPU, against 11,018
    # with reduce_scatter in bfloat16 where torchtitan was 1% slower. torch 2.15 passes gradients of
    # norms in float32, which would be rounded.
    Row(
        "parallel.reduce_by",
        ("all_to_all",),
        lambda c: (
            c.shards_inside
            and c.run.train.dtype == "bfloat16"
            and c.run.parallel.reduce_dtype == "float32"
            and c.machine.torch < (2, 15)
        ),
        "the same float32 sums from half the bytes",
    ),
    Row(
        "parallel.copy_engines",
        (True,),
        lambda c: c.shards_inside and c.run.parallel.reduce_by == "all_to_all",
        "dp_shard x cp is inside a host",
    ),
    # "Llama-3-8B with tensor and pipeline parallelism", compiled: 9,986 against 9,608 tok/s/GPU. A
    # mixture lost 3% ("Automatic settings, 2 x H100"); latent attention and split backwards are not
    # measured.
    Row(
        "parallel.async_tp",
        (True,),
        lambda c: (
            c.inside(c.run.parallel.tp)
            and c.run.config.compile.enable
            and not (c.run.model.n_experts or c.run.model.kv_lora_rank or c.run.splits_backward)
        ),
        "tp is inside a host",
    ),
)


@dataclass(frozen=True)
class Automatic:
    """A config with concrete values."""

    config: RunConfig
    chosen: dict[str, dict[str, Any]] = field(default_factory=dict)
    """{"value", "reason"} by key, of the automatic keys that are not at their default."""

    def line(self) -> str:
        """The log line; empty if all keys have their default."""
        shown = [f"{k} = {json.dumps(v['value'])} ({v['reason']})" for k, v in self.chosen.items()]
        return f"chosen automatically: {', '.join(shown)}" if shown else ""


def choose(run: ModelCandidate, machine: Machine, used: Callable[[RunConfig], float]) -> Automatic:
    """Set the automatic keys of a run; a value that a rule refuses or that does not fit is not
    taken.

    Args:
        run: the run; a MachineCandidate at a start, so that rules about this machine count.
        used: predicts the share of a GPU's memory that a run reserves; inf: unknown.
    """
    chosen: dict[str, dict[str, Any]] = {}
    for row in ROWS if machine.gpus else ():
        known = _Known(run, machine, used)
        section, name = row.key.split(".")
        if name in getattr(run.config, section).model_fields_set or not _holds(row, known):
            continue
        for value in row.values:
            changed = replace(run, config=_with_value(run.config, section, name, value))
            if not any(all_broken(changed)) and _fits(used(changed.config), known):
                run, chosen[row.key] = changed, {"value": value, "reason": row.reason}
                break
    return Automatic(run.config, chosen)


def _holds(row: Row, known: _Known) -> bool:
    try:
        return row.holds(known)
    except ConfigError:  # which the rules report
        return False


def _fits(share: float, before: _Known) -> bool:
    """Whether a value fits, or needs no more memory than the run without it."""
    return share <= 1 - HEADROOM or share <= before.share <= 1


def _with_value(config: RunConfig, section: str, name: str, value: Any) -> RunConfig:
    changed = getattr(config, section).model_copy(update={name: value})
    return config.model_copy(update={section: changed})
