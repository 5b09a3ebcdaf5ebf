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
from collections import ChainMap
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby, product
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
    seconds: Callable[[RunConfig], float]
    """Predicts the seconds of a step; inf: unknown."""

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

    def row(self, value: Any) -> dict[str, Any]:
        """Return what `Automatic.chosen` has of a value."""
        return {"value": value, "reason": self.reason}


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
    # "Models of 124M and 0.6B parameters": 497,446 against 286,763 tok/s for 50,257 columns. More
    # chunks are slower ("by copy engines", machine A).
    Choice(
        "train.loss_chunks",
        (4, 8, 16),
        lambda c: c.head_is_slow,
        "chunks pad a vocabulary that is no multiple of 8",
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


SAVINGS = (
    # "Blocks of Llama-3-8B on one H200": less memory, in the order of speed. Only with no key of
    # [recompute] set.
    Choice(
        "recompute.mode",
        ("selective", "attention", "full"),
        lambda c: not c.run.config.recompute.model_fields_set,
        "the activations of all blocks do not fit",
    ),
    # "Head and loss in chunks". Chunks cost less than recomputation, so they are tried before.
    Choice(
        "train.loss_chunks",
        (4, 8, 16),
        lambda c: "loss_chunks" not in c.run.train.model_fields_set,
        "the logits of all tokens do not fit",
    ),
)
"""Choices that are made only where a run does not fit without them; the last is tried first."""


@dataclass(frozen=True)
class Automatic:
    """A config in which automatic keys have their chosen values."""

    config: RunConfig
    chosen: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Chosen keys -> {"value": value, "reason": text}; keys that keep their default are missing."""

    @classmethod
    def of(cls, config: RunConfig, chosen: dict[str, dict[str, Any]]) -> "Automatic":
        """Apply choices, such as another rank's, to a config; it has no other value "auto" then."""
        config = without_choices(config).config
        for key, row in chosen.items():
            section, name = key.split(".")
            config = config.changed(**{section: {name: row["value"]}})
        return cls(config, chosen)

    def line(self) -> str:
        """Return the line to log; empty if all keys have their defaults."""
        rows = groupby(self.chosen.items(), lambda row: row[1]["reason"])
        shown = [
            ", ".join(f"{key} = {json.dumps(row['value'])}" for key, row in alike) + f" ({reason})"
            for reason, alike in rows
        ]
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
            slow, so choices are first made without it and their result is checked once.
        seconds: predicts the seconds of a step, for CUDA graphs and `recompute.mode = "auto"`;
            inf: unknown.
    """
    is_searched = run.config.recompute.mode == "auto"
    run = replace(run, config=without_choices(run.config).config)
    if not machine.gpus:
        return Automatic(run.config)
    chooser = _Chooser(machine, used, seconds)
    return chooser.with_policy(run) if is_searched else chooser.fastest(run)


@dataclass(frozen=True)
class _Chooser:
    """What `choose` does; its fields are arguments of `choose`."""

    machine: Machine
    used: Callable[[RunConfig], float]
    seconds: Callable[[RunConfig], float]

    def fastest(self, run: ModelCandidate) -> Automatic:
        """Choose with the first of `savings` with which the run fits; nothing if none is enough.

        A run uses HEADROOM only if it does not fit otherwise.
        """
        free = self.choices(run)
        if free is None:
            return Automatic(run.config)
        if (share := self.used(free.config)) <= 1 - HEADROOM:
            return free
        if share == self.used(run.config) == float("inf"):
            return Automatic(run.config)
        for limit in (1 - HEADROOM, 1.0):
            for saving in self.savings(run):
                if found := self.that_fit(run, Automatic.of(run.config, saving), limit):
                    return found
        return Automatic(run.config)

    def with_policy(self, run: ModelCandidate) -> Automatic:
        """Choose a policy of recomputation too: after the other choices, and before those that fit.

        Return the faster of the two, if both fit, and if neither does, what is found with the most
        chunks of the loss. If nothing fits, return what needs the least memory; if memory is
        unknown, no other choice.
        """
        savings, limit, found = self.savings(run), 1 - HEADROOM, list[Automatic]()
        for saving in (savings[0], *savings[1:][-1:]):
            plain = Automatic.of(run.config, saving)
            free = self.choices(run, plain)
            if free is None:
                return Automatic(run.config)
            found.append(self._policy(run, free))
            if self.used(free.config) <= limit and found[-1].config.recompute.mode == "none":
                return found[-1]
            before = self._policy(run, plain)
            found.append(self.that_fit(run, before, limit) or before)
            if fit := [each for each in found if self.used(each.config) <= limit]:
                return min(fit, key=lambda each: self.seconds(each.config))
            if all(self.used(each.config) == float("inf") for each in found):
                return before
        return min(found, key=lambda each: self.used(each.config))

    def savings(self, run: ModelCandidate) -> list[dict[str, dict[str, Any]]]:
        """Return the combinations of SAVINGS, as `Automatic.chosen`, from none to the slowest."""
        situation = _Situation(run, self.machine, self.seconds)
        rows = [
            [{}, *({choice.key: choice.row(value)} for value in choice.values)]
            if choice.holds(situation)
            else [{}]
            for choice in SAVINGS
        ]
        return [dict(ChainMap(*parts)) for parts in product(*rows)]

    def that_fit(self, run: ModelCandidate, start: Automatic, limit: float) -> Automatic | None:
        """Add all other choices to a start, or those that fit; None: none fits, or a rule."""
        found = self.choices(run, start)
        if found is None or self.used(found.config) <= limit:
            return found
        # The memory of a start that is legal only with a choice is unknown.
        if limit < self.used(start.config) < float("inf"):
            return None
        found = self.choices(run, start, limit)
        return found if found is not None and self.used(found.config) <= limit else None

    def choices(
        self, run: ModelCandidate, start: Automatic | None = None, limit: float | None = None
    ) -> Automatic | None:
        """Set one key of CHOICES after the other; None: a rule stays broken.

        A later choice may fix a rule that a default breaks, such as one stage per rank.

        Args:
            start: the config to begin with; None: that of the run.
            limit: fraction of the memory that each choice may use; None: any.
        """
        start = start or Automatic(run.config)
        run, chosen = replace(run, config=start.config), dict(start.chosen)
        broken = set(all_broken(run))
        for choice in CHOICES:
            situation = _Situation(run, self.machine, self.seconds)
            section, name = choice.key.split(".")
            is_set = name in getattr(run.config, section).model_fields_set
            if is_set or not _holds(choice, situation):
                continue
            for value in choice.values:
                changed = replace(run, config=run.config.changed(**{section: {name: value}}))
                left = set(all_broken(changed))
                if left <= broken and (limit is None or self.used(changed.config) <= limit):
                    run, broken = changed, left
                    chosen[choice.key] = choice.row(value)
                    break
        return None if broken else Automatic(run.config, chosen)

    def _policy(self, run: ModelCandidate, start: Automatic) -> Automatic:
        """Add the fastest policy of recomputation that fits, or the one of the least memory."""
        begun = replace(run, config=start.config)
        policy, reason = choose_policy(begun, 1 - HEADROOM, self.used, self.seconds)
        rows = {f"recompute.{key}": {"value": v, "reason": reason} for key, v in policy.items()}
        return Automatic(start.config.changed(recompute=policy), start.chosen | rows)


def _holds(choice: Choice, situation: _Situation) -> bool:
    try:
        return choice.holds(situation)
    except ConfigError:  # the rules report it
        return False
