"""Automatic settings: a key that is unset or "auto" gets the fastest value that fits in memory and
that gives the same results up to the order of summation and of rounding. Rank 0 chooses for all
ranks at each start on GPUs. On CPUs, and in code that builds a RunConfig itself, these keys have
their defaults.

Each choice has a measured gain in benchmarks/RESULTS.md; comments name its section. No gain was
measured, so there is no choice, for `parallel.prefetch` ("nothing waits for a gather",
benchmarks/NOTES.md), `parallel.overlap_micro_batches`, zero = 1, and settings across hosts.
(`parallel.reduce` and `model.attention` resolve their value "auto" elsewhere.)
"""

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch

from dtron.config import RunConfig
from dtron.config.schema import GRAPH_WARM_UP, MAX_RANKS, MOMENTS
from dtron.errors import ConfigError
from dtron.run.process import Place, environment_integer
from dtron.setup.recompute_policy import choose_policy
from dtron.setup.rules import ModelCandidate, all_broken
from dtron.setup.versions import release

_NVLINK, _BRIDGES = ("sxm", "hbm3", "h20", "h800", "b200", "b300"), ("pcie", "nvl")
"""Substrings of GPU names: GPUs with NVLink to all other GPUs of their host, and GPUs with NVLink
to at most one other GPU."""
HEADROOM = 0.05
"""Fraction of a GPU's memory that a choice leaves free: predictions are off by some per cent."""
RECORDED = ("gpt", "llama", "qwen3", "gemma3")
"""Dense families whose steps tests record as a CUDA graph on a GPU."""
GAIN = 0.05
"""Fraction of a step that a CUDA graph must save, as predicted; hosts differ by some per cent."""
_SMALL_HEAD = 8192
"""Columns of a head up to which its time does not matter."""


@dataclass(frozen=True)
class Machine:
    """Hardware and torch version of a run. The default is a machine without GPUs."""

    gpus: bool = False
    host: int = 1
    """Ranks per host; 1 if hosts differ or the number of hosts is unknown."""
    nvlink: bool = False
    """Whether the GPUs of a host read each other's memory over NVLink."""
    torch: tuple[int, int] = (2, 11)
    memory: float = float("inf")
    """Bytes of memory of a GPU."""

    @classmethod
    def of_place(cls, place: Place) -> "Machine":
        """Return the machine that this process sees."""
        if place.device.type != "cuda":
            return cls()
        host, count = place.local_world_size, torch.cuda.device_count()
        hosts = environment_integer("GROUP_WORLD_SIZE", place.world_size // host, 1, MAX_RANKS)
        known = "LOCAL_WORLD_SIZE" in os.environ  # else the number of hosts is unknown
        host = host if known and hosts * host == place.world_size else 1
        pairs = [(a, b) for a in range(host) for b in range(host) if a != b]
        linked = count >= host and all(torch.cuda.can_device_access_peer(*pair) for pair in pairs)
        properties = torch.cuda.get_device_properties(place.device)
        linked = linked and has_nvlink(properties.name)
        return cls(True, host, linked, release(torch.__version__), float(properties.total_memory))

    @classmethod
    def of_all(cls, machines: Sequence["Machine"]) -> "Machine":
        """Return what the machines of all ranks have in common."""
        first = machines[0]
        equal = all(each.host == first.host for each in machines)
        return replace(
            first,
            gpus=all(each.gpus for each in machines),
            host=first.host if equal else 1,
            nvlink=all(each.nvlink for each in machines),
            memory=min(each.memory for each in machines),
        )


def has_nvlink(name: str) -> bool:
    """Whether GPUs of this name have NVLink to all other GPUs of their host.

    Peer access is not enough: it also works over PCIe, for which the choices inside a host were not
    measured.
    """
    name = name.lower()
    return any(x in name for x in _NVLINK) and not any(x in name for x in _BRIDGES)


@dataclass(frozen=True)
class _Situation:
    """Argument of `Choice.holds`: the run with the choices made so far, and its machine."""

    run: ModelCandidate
    machine: Machine
    used: Callable[[RunConfig], float]
    """Predicts the fraction of a GPU's memory that a run reserves; inf: unknown."""
    seconds: Callable[[RunConfig], float]
    """Predicts the seconds of a step; inf: unknown."""

    @cached_property
    def share(self) -> float:
        """Predicted fraction of a GPU's memory that the run reserves; inf: unknown."""
        return self.used(self.run.config)

    def inside(self, ranks: int) -> bool:
        """Whether `ranks` neighbouring ranks are on GPUs of one host with NVLink between them."""
        return ranks > 1 and self.machine.nvlink and self.machine.host % ranks == 0

    @property
    def shards_inside(self) -> bool:
        """Whether ranks that shard the same parameters are `inside` a host."""
        return self.inside(self.run.shards * self.run.parallel.tp)

    @property
    def gains_by_graph(self) -> bool:
        """Whether the host needs longer to launch a step than the GPU needs to compute it.

        Only for what was measured: compiled blocks of the families in RECORDED on one GPU, without
        documents and adapters. Not for custom optimizers, which may keep gradients that the next
        replay overwrites.
        """
        config, alone = self.run.config, self.run.world_size == 1 and self.machine.gpus
        measured = config.compile.enable and not config.data.mask_documents and alone
        known = config.model.name in RECORDED and config.optim.name in MOMENTS
        if not (measured and known and self._outlasts_warm_up) or config.lora.rank:
            return False
        graph = config.changed(compile={"cuda_graphs": "step"})
        return self.seconds(graph) < (1 - GAIN) * self.seconds(config)

    @property
    def _outlasts_warm_up(self) -> bool:
        """Whether the run has more steps than run before a CUDA graph is recorded.

        Of `train.tokens`; a rule checks `train.steps`. False with `train.epochs`, whose steps are
        unknown until the data are open.
        """
        train = self.run.config.train
        warm_up = GRAPH_WARM_UP * train.global_batch * train.seq_len
        return not train.epochs and (not train.tokens or train.tokens > warm_up)

    @property
    def head_is_slow(self) -> bool:
        """Whether the head's columns on a rank have a size for which matmuls are slow."""
        columns = -(-self.run.model.vocab_size // self.run.parallel.tp)
        return columns % 8 > 0 and columns > _SMALL_HEAD and self.run.train.dtype == "bfloat16"

    @property
    def moves_bfloat16_in_memory(self) -> bool:
        """Whether symmetric memory dispatches tokens to experts, and no layer is float8."""
        config = self.run.config
        return config.parallel.dispatcher == "symmetric_memory" and not config.float8.recipe


@dataclass(frozen=True)
class Choice:
    """A key, its values (fastest first), the condition to try them, and the logged reason."""

    key: str
    values: tuple[Any, ...]
    holds: Callable[[_Situation], bool]
    reason: str


CHOICES = (
    # "Experts, DeepSeek-V2-Lite's shapes", 2 x H200: 40,099 against 37,893 tok/s/GPU.
    Choice(
        "parallel.dispatcher",
        ("symmetric_memory",),
        lambda c: (
            c.run.parallel.etp == 1
            and c.inside(c.run.parallel.ep)
            and c.run.parallel.ep <= c.run.parallel.ep_capacity
        ),
        "ep is inside a host, and ep_capacity is enough for any load",
    ),
    # "Head and loss in chunks": less memory. More chunks are slower ("by copy engines", machine A).
    # "Models of 124M and 0.6B parameters": 497,446 against 286,763 tok/s for 50,257 columns.
    Choice(
        "train.loss_chunks",
        (4, 8, 16),
        lambda c: 1 < c.share < float("inf") or c.head_is_slow,
        "the logits of all tokens do not fit, or chunks pad a vocabulary that is no multiple of 8",
    ),
    # "Blocks of Llama-3-8B on one H200": less memory, in the order of speed. After chunks of the
    # loss, which cost less.
    Choice(
        "recompute.mode",
        ("selective", "attention", "full"),
        lambda c: 1 < c.share < float("inf") and not c.run.config.recompute.model_fields_set,
        "the activations of all blocks do not fit",
    ),
    # "Llama-3-8B with context parallelism", 4 x H200: 7,023 and 6,865 against 6,739 tok/s/GPU.
    Choice(
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
    Choice(
        "parallel.zero",
        (2,),
        lambda c: c.run.shards > 1,
        "unsharded parameters fit and are gathered once per step",
    ),
    # "Llama-3-8B with tensor and pipeline parallelism", 4 x H200: 10,669 and 10,206 against 9,870
    # tok/s/GPU, without tp and recomputation, parameters gathered once per step.
    Choice(
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
    # "Llama-3-8B by copy engines", 4 x H200, with copy_engines: 11,238 tok/s/GPU, against 11,018
    # with reduce_scatter in bfloat16 on a machine where torchtitan was 1% slower. Since torch 2.15,
    # gradients of norms are float32, which all_to_all would round.
    Choice(
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
    Choice(
        "parallel.copy_engines",
        (True,),
        lambda c: c.shards_inside and c.run.parallel.reduce_by == "all_to_all",
        "dp_shard x cp is inside a host",
    ),
    # "Llama-3-8B with tensor and pipeline parallelism", compiled: 9,986 against 9,608 tok/s/GPU; a
    # mixture of experts gains 0.7% ("Automatic settings, 2 x H100"). Latent attention, split
    # backwards and other mixtures of experts are not measured.
    Choice(
        "parallel.async_tp",
        (True,),
        lambda c: (
            c.inside(c.run.parallel.tp)
            and c.run.config.compile.enable
            and not (c.run.model.kv_lora_rank or c.run.splits_backward)
            and (not c.run.model.n_experts or c.moves_bfloat16_in_memory)
        ),
        "tp is inside a host",
    ),
    # "Models of 124M and 0.6B parameters": 430,947 against 182,302 tok/s, for 0.2 GiB. After all
    # others, which change how long the GPU computes.
    Choice(
        "compile.cuda_graphs",
        ("step",),
        lambda c: c.gains_by_graph,
        "the host needs longer to launch a step than the GPU to compute it, as predicted",
    ),
    # "Weight gradients added in the matmul": 21,411 against 21,027 tok/s, and 48,224 against 46,353
    # for a mixture of experts, both on one GPU; the matmuls of several ranks are the same ones. It
    # also saves a rounding. After async_tp. Pipelines and CUDA graphs are not measured with it.
    Choice(
        "parallel.accumulate_in_matmul",
        (True,),
        lambda c: (
            c.run.sums_micro_batches
            and c.run.train.dtype == "bfloat16"
            and c.run.parallel.pp == 1
            and c.run.config.compile.cuda_graphs == "off"
        ),
        "gradients of micro-batches are summed on this rank",
    ),
)


@dataclass(frozen=True)
class Automatic:
    """A config in which automatic keys have their chosen values."""

    config: RunConfig
    chosen: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Chosen keys -> {"value": value, "reason": text}; keys that keep their default are missing."""

    @classmethod
    def of(cls, config: RunConfig, chosen: dict[str, dict[str, Any]]) -> "Automatic":
        """Apply another rank's choices to this rank's equal config."""
        for key, row in chosen.items():
            section, name = key.split(".")
            config = config.changed(**{section: {name: row["value"]}})
        return cls(config, chosen)

    def line(self) -> str:
        """Return the line to log; empty if all keys have their defaults."""
        shown = [f"{k} = {json.dumps(v['value'])} ({v['reason']})" for k, v in self.chosen.items()]
        return f"chosen automatically: {', '.join(shown)}" if shown else ""


def without_choices(config: RunConfig) -> Automatic:
    """Return the config with defaults in place of the value "auto", as on CPUs."""
    if config.recompute.mode == "auto":
        config = config.changed(recompute={"mode": "none"})
    return Automatic(config)


def choose(
    run: ModelCandidate,
    machine: Machine,
    used: Callable[[RunConfig], float],
    seconds: Callable[[RunConfig], float] = lambda _: float("inf"),
) -> Automatic:
    """Set the automatic keys of a run to values that are legal and fit in memory.

    Args:
        run: the run; at a start, a MachineCandidate, so that rules about this machine apply.
        used: predicts the fraction of a GPU's memory that a run reserves; inf: unknown. This is
            slow, so the choices are first made without it and their result is checked once.
        seconds: predicts the seconds of a step, for CUDA graphs and `recompute.mode = "auto"`;
            inf: unknown.
    """
    is_searched = run.config.recompute.mode == "auto"
    run = replace(run, config=without_choices(run.config).config)
    if not machine.gpus:
        return Automatic(run.config)
    found = _choose(run, machine, lambda _: 0.0, seconds)
    if used(found.config) > 1 - HEADROOM:
        found = _choose(run, machine, used, seconds)
    if not is_searched:
        return found
    changed = replace(run, config=found.config)
    policy, reason = choose_policy(changed, 1 - HEADROOM, used, seconds)
    rows = {f"recompute.{key}": {"value": v, "reason": reason} for key, v in policy.items()}
    return Automatic(found.config.changed(recompute=policy), found.chosen | rows)


def _choose(
    run: ModelCandidate,
    machine: Machine,
    used: Callable[[RunConfig], float],
    seconds: Callable[[RunConfig], float],
) -> Automatic:
    """Set one key after the other.

    A later choice may fix a rule that a default breaks, such as one stage per rank. If a rule stays
    broken, return the config of the user, which errors then name.
    """
    given, chosen = run.config, dict[str, dict[str, Any]]()
    broken = set(all_broken(run))
    for choice in CHOICES:
        situation = _Situation(run, machine, used, seconds)
        section, name = choice.key.split(".")
        if name in getattr(run.config, section).model_fields_set or not _holds(choice, situation):
            continue
        for value in choice.values:
            changed = replace(run, config=run.config.changed(**{section: {name: value}}))
            left = set(all_broken(changed))
            if left <= broken and _fits(used(changed.config), situation):
                run, broken = changed, left
                chosen[choice.key] = {"value": value, "reason": choice.reason}
                break
    return Automatic(given) if broken else Automatic(run.config, chosen)


def _holds(choice: Choice, situation: _Situation) -> bool:
    try:
        return choice.holds(situation)
    except ConfigError:  # the rules report it
        return False


def _fits(share: float, before: _Situation) -> bool:
    """Whether a value fits in memory.

    HEADROOM may be used if the run without the value does not fit either, or needs at least as much
    memory.

    Args:
        share: predicted fraction of the memory that the run reserves with the value.
        before: the run without the value.
    """
    return share <= 1 - HEADROOM or share <= before.share <= 1 or share <= 1 < before.share
