"""Rules across several settings, as tables.

These rules need a config, or a config and a number of ranks, and do not import torch. Rules that
need the model, its float8 layers or the machine are in `dtron/setup/rules.py`. Bounds of a single
key are in `dtron/config/schema.py` and `data_section.py`.

A rule may need a value that cannot be computed because of another error, such as the number of
micro-batches if the degrees do not multiply to the world size. The rule then reports that error,
and `refuse` shows each message once.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

from dtron.config.rule import Rule, broken, changed, finds_none, passes
from dtron.config.schema import GRAPH_WARM_UP, MOMENTS, Degree, Float8, Parallel, Train
from dtron.errors import nearest
from dtron.io.user_code import registered

if TYPE_CHECKING:
    from dtron.config.run_config import RunConfig


@dataclass(frozen=True)
class Candidate:
    """A config and a number of ranks, legal or not: the argument of rules.

    An attribute that cannot be computed raises a ConfigError.
    """

    config: "RunConfig"
    world_size: int

    @property
    def parallel(self) -> Parallel:
        """Settings of the section [parallel]."""
        return self.config.parallel

    @property
    def train(self) -> Train:
        """Settings of the section [train]."""
        return self.config.train

    @cached_property
    def degrees(self) -> dict[Degree, int]:
        """Degree of each mesh axis."""
        return self.config.degrees(self.world_size)

    @property
    def shards(self) -> int:
        """Ranks over which parameters are sharded: dp_shard x cp."""
        return self.degrees["dp_shard"] * self.degrees["cp"]

    @cached_property
    def micro_batches(self) -> int:
        """Micro-batches per step."""
        return self.config.micro_batches(self.world_size)

    @property
    def sums_micro_batches(self) -> bool:
        """Whether gradients of several micro-batches are summed before they are reduced."""
        return self.micro_batches > 1 and self.parallel.reduces_once(self.shards > 1)

    @property
    def overlaps_freely(self) -> bool:
        """Whether FSDP neither gathers nor reduces between the micro-batches of a step."""
        return self.shards == 1 or (self.parallel.zero < 3 and self.parallel.reduces_once(True))


def broken_settings(run: Candidate) -> Iterator[str]:
    """Yield the messages of all rules of this file that a run breaks."""
    yield from broken(RANKS, run, run.config)
    yield from broken(SETTINGS, run.config, run.config)
    yield from broken(EFFECTS, run.config, run.config)


def idle_keys(config: "RunConfig") -> Iterator[tuple[str, Any, str]]:
    """Yield (key, value, what the key needs) of the keys that have no effect in this config."""
    for rule in EFFECTS:
        if any(rule.messages(config, config)):
            for key, value in changed(config, rule.keys):
                yield key, value, rule.needs


def _repeated_names(config: "RunConfig") -> str:
    """Return the first name that two sources of data have; empty: none."""
    names = [each.name for each in (*config.data.mixture, *config.data.validation)]
    return next((name for name in names if names.count(name) > 1), "")


def _wrong_weights(config: "RunConfig") -> str:
    """Return what is wrong with the weights of `data.mixture`; empty: nothing."""
    stages = len(config.data.mixture_steps) + 1
    for each in config.data.mixture:
        if isinstance(each.weight, tuple) and len(each.weight) != stages:
            return (
                f"data.mixture: {each.name} has {len(each.weight)} weights; give a number, or a "
                f"list of {stages}, one more than data.mixture_steps has"
            )
    for stage in range(stages if config.data.mixture else 0):
        if not any(each.weight_in(stage) for each in config.data.mixture):
            begin = [0, *config.data.mixture_steps][stage]
            return f"data.mixture: all weights after step {begin} are 0; make one larger"
    return ""


def _idle_group_keys(config: "RunConfig") -> Iterator[str]:
    """Yield an error for each table of `optim.groups` that changes nothing."""
    for group in config.optim.groups:
        if group.lr is None and group.weight_decay is None:
            yield f"optim.groups: match = {group.match!r} sets neither lr nor weight_decay; set one"
        elif group.weight_decay is not None and config.optim.name == "sgd":
            yield (
                f"optim.groups: weight_decay = {group.weight_decay} of match = {group.match!r} has "
                'no effect with optim.name = "sgd"; leave it out'
            )


def _unknown_optimizer(config: "RunConfig") -> Iterator[str]:
    known = [*MOMENTS, *registered("dtron.optimizers")]
    if (name := config.optim.name) not in known and ":" not in name:
        yield (
            f"optim.name = {name} is not known{nearest(name, known)}; use {', '.join(known)}, or "
            "MODULE:NAME for a function of your own module"
        )


def _unknown_best(config: "RunConfig") -> Iterator[str]:
    """Yield an error if no validation set logs `checkpoint.best`."""
    sets = [name for name in (*config.data.parts, *config.data.validation_parts) if name]
    metrics = ["validation_loss", *(f"validation_loss/{name}" for name in sets)]
    if (best := config.checkpoint.best) and best not in metrics:
        yield (
            f"checkpoint.best = {best!r} is no metric of this run{nearest(best, metrics)}; use "
            f"{' or '.join(metrics)}"
        )


def _not_overlapped(config: "RunConfig") -> Iterator[str]:
    """Yield an error for each setting that does not support two micro-batches at once."""
    parallel = config.parallel
    key = "parallel.overlap_micro_batches = true with"
    if parallel.pp > 1 and parallel.schedule != "DualPipeV":
        yield (
            f"{key} parallel.schedule = {parallel.schedule!r}: it has no pairs of a forward and a "
            'backward that do not depend on each other; use "DualPipeV", or false'
        )
    reasons = {
        'parallel.dispatcher = "deepep"': (
            parallel.dispatcher == "deepep",
            "DeepEP has one buffer, for one micro-batch",
        ),
        "parallel.async_tp = true": (
            parallel.async_tp,
            "its matmuls share one buffer, for one micro-batch",
        ),
        'compile.cuda_graphs = "step"': (
            config.compile.cuda_graphs == "step",
            "a step is recorded on one stream",
        ),
        f"parallel.blocks_per_unit = {parallel.blocks_per_unit}": (
            parallel.blocks_per_unit > 1,
            "FSDP would take blocks of one micro-batch for those of the other",
        ),
        "recompute.offload = true": (
            config.recompute.offload,
            "activations are fetched back in the order of one backward",
        ),
        'float8.scaling = "delayed"': (
            config.float8.scaling == "delayed",
            "a forward and a recomputation would write the same largest values at once",
        ),
    }
    for setting, (applies, reason) in reasons.items():
        if applies:
            yield f"{key} {setting}: {reason}; leave one of them out"


def _outside_graphs(config: "RunConfig") -> Iterator[str]:
    """Yield an error for each setting with which a step cannot be a CUDA graph."""
    metrics, not_called = config.metrics, "a CUDA graph repeats kernels without calling modules"
    reasons = {
        f"parallel.cp = {config.parallel.cp} and data.mask_documents = true": (
            config.parallel.cp > 1 and config.data.mask_documents,
            "tables of documents have other sizes in each micro-batch, and a CUDA graph has fixed "
            "ones",
        ),
        "recompute.offload = true": (
            config.recompute.offload,
            "the host takes and returns memory of its pool in each step, which a CUDA graph does "
            "not repeat",
        ),
        "float8.report_interval": (
            config.float8.report_interval > 0,
            "a step with a report runs without compiled blocks, but a CUDA graph repeats one "
            "recorded step",
        ),
        "metrics.nvtx = true": (metrics.nvtx, not_called),
        "metrics.memory_snapshot": (metrics.memory_snapshot > GRAPH_WARM_UP, not_called),
        "faults.stragglers_interval": (
            config.faults.stragglers_interval > 0,
            "NCCL does not record the times of collectives in a CUDA graph",
        ),
    }
    for setting, (applies, reason) in reasons.items():
        if applies:
            yield f'compile.cuda_graphs = "step" with {setting}: {reason}; leave one of them out'


def _known_steps(config: "RunConfig") -> float:
    """Return the steps of the run; infinite while they are to follow from epochs or tokens."""
    return math.inf if config.train.epochs or config.train.tokens else config.train.steps


def _ends(config: "RunConfig") -> list[str]:
    """Return the keys that set the end of the run, with their values."""
    keys = "train.tokens train.epochs train.steps"
    return [f"{key} = {value:g}" for key, value in changed(config, keys)]


_FLOAT8 = " ".join(
    f"float8.{key}" for key in Float8.model_fields if key not in ("recipe", "dispatch")
)

EFFECTS: tuple[Rule["RunConfig"], ...] = (
    Rule("optim.name", finds_none(_unknown_optimizer)),
    Rule("optim.groups", lambda c: c.optim.name in MOMENTS, needs="an optim.name of dtron"),
    Rule(
        "optim.beta1 optim.beta2 optim.weight_decay",
        lambda c: c.optim.name != "sgd",
        needs='optim.name = "adamw", "adamw8bit", "muon" or "lion"',
    ),
    Rule(
        "optim.moments",
        lambda c: c.optim.name not in ("sgd", "adamw8bit"),
        needs='optim.name = "adamw", "muon" or "lion"',
    ),
    Rule(
        "optim.eps",
        lambda c: c.optim.name not in ("sgd", "lion"),
        needs='optim.name = "adamw", "adamw8bit" or "muon"',
    ),
    Rule("optim.offload", needs='optim.name = "adamw"'),
    Rule("optim.momentum optim.adjust_lr_fn", needs='optim.name = "muon"'),
    Rule("parallel.sequence_parallel parallel.async_tp", needs="parallel.tp > 1"),
    Rule(
        "parallel.encoder_tp parallel.tp",
        lambda c: c.parallel.encoder_tp in (1, c.parallel.tp),
        "parallel.encoder_tp = {c.parallel.encoder_tp} is neither 1 nor parallel.tp = "
        "{c.parallel.tp}; use one of these",
    ),
    Rule(
        "parallel.schedule parallel.stages_per_rank parallel.pp_layout parallel.defer_head",
        needs="parallel.pp > 1",
    ),
    Rule(
        "parallel.dispatcher parallel.overlap_micro_batches float8.dispatch",
        needs="parallel.ep > 1 or parallel.etp > 1",
    ),
    Rule(
        "parallel.ep_capacity",  # the automatic choice of the dispatcher reads it
        lambda c: (
            c.parallel.ep > 1
            and (c.parallel.bounded or "dispatcher" not in c.parallel.model_fields_set)
        ),
        needs='parallel.ep > 1 and parallel.dispatcher = "symmetric_memory", "bounded_all_to_all", '
        '"hierarchical" or "auto"',
    ),
    Rule(
        "parallel.ep_inner",
        lambda c: c.parallel.dispatcher == "hierarchical",
        needs='parallel.dispatcher = "hierarchical"',
    ),
    Rule("parallel.cp_method", needs="parallel.cp > 1"),
    Rule(
        "parallel.cp_inner",
        lambda c: c.parallel.cp > 1 and "hierarchical" in c.parallel.cp_methods(),
        needs='parallel.cp_method = "hierarchical"',
    ),
    Rule("schedule.decay", needs='schedule.name = "wsd"'),
    Rule(
        "schedule.min_ratio",
        lambda c: c.schedule.name in ("linear", "cosine", "wsd", "exponential"),
        needs="schedule.name = linear, cosine, wsd or exponential",
    ),
    Rule(
        "schedule.min_ratio schedule.name",
        lambda c: c.schedule.name != "exponential" or c.schedule.min_ratio > 0,
        'schedule.min_ratio = 0 with schedule.name = "exponential": the rate would stay 0; use a '
        "ratio such as 1e-6",
    ),
    Rule(
        "recompute.every recompute.first recompute.modules",
        lambda c: c.recompute.mode not in ("none", "auto"),
        needs="a recompute.mode",
    ),
    Rule(
        "recompute.offload recompute.mode",
        lambda c: not c.recompute.offload or c.recompute.mode != "auto",
        'recompute.offload = true with recompute.mode = "auto", which chooses recompute.offload; '
        "leave it out, or use another mode",
    ),
    Rule(_FLOAT8, needs="float8.recipe"),
    Rule("float8.amax_history", needs='float8.scaling = "delayed"'),
    Rule("lora.alpha lora.rank_stabilized lora.dora lora.modules lora.initial", needs="lora.rank"),
    Rule("lora.initial", needs="checkpoint.initial: the weights to which the adapter belongs"),
    Rule("compile.backend compile.cache_dir", needs="compile.enable = true"),
    Rule("compile.cache_dir", needs='compile.backend = "inductor"'),
    Rule("checkpoint.keep_every", needs="checkpoint.keep"),
    Rule("checkpoint.fast_interval checkpoint.fast_keep", needs="checkpoint.fast_dir"),
    Rule(
        "checkpoint.verify checkpoint.allow_data_change",
        needs="checkpoint.resume or checkpoint.initial",
    ),
    Rule("data.hf_path data.hf_name data.hf_split data.hf_streaming", needs='data.source = "hf"'),
    Rule(
        "data.paths",
        lambda c: c.data.source not in ("hf", "python"),
        needs='data.source = "files" or "prepared"',
    ),
    Rule(
        "data.mixture_steps",
        lambda c: any(isinstance(each.weight, tuple) for each in c.data.mixture),
        needs="data.mixture with a list as a weight",
    ),
    Rule("data.validation", needs="train.eval_sequences"),
    Rule(
        "data.bos_token",
        lambda c: not all(part.chats for part in c.data.parts.values()),
        needs='data.format = "text": chats begin as their template says',
    ),
    Rule(
        "data.text_key data.format",
        lambda c: c.data.source != "prepared",
        needs='data.source = "files" or "hf"',
    ),
    Rule("data.text_key", lambda c: not c.data.chats, needs='data.format = "text" or "image_text"'),
    Rule(
        "data.image_size data.image_tokens data.image_token",
        lambda c: c.data.has_images,
        needs='data.format = "image_text"',
    ),
    Rule(
        "data.chat_template",
        lambda c: c.data.has_chats and c.data.source != "prepared",
        needs='data.format = "chat" or "prompt_completion"',
    ),
    Rule("data.max_document_mb", needs='data.source = "files"'),
    Rule("data.substreams", lambda c: c.data.hf_streaming, needs="data.hf_streaming"),
    Rule(
        "data.fetch_ahead",
        lambda c: c.data.hf_streaming or c.data.in_store or c.data.has_images,
        needs='data.hf_streaming, data.format = "image_text", or data.source = "prepared" with a '
        "URL",
    ),
    Rule(
        "data.store_seconds",
        lambda c: c.data.in_store,
        needs='data.source = "prepared" with a URL',
    ),
    Rule("train.eval_interval", needs="train.eval_sequences"),
    Rule(
        "train.eval_interval",
        lambda c: c.data.validation_fraction or c.data.validation,
        needs="data.validation_fraction: nothing is held out",
    ),
    Rule("train.stop_after", needs="checkpoint.best"),
    Rule("checkpoint.best", needs="train.eval_interval"),
    Rule("checkpoint.best", finds_none(_unknown_best)),
    Rule("train.sample_prompt", needs="train.sample_tokens"),
    Rule("faults.spike_window faults.spike_deviations", needs="faults.on_spike"),
    Rule("faults.rollback_steps faults.max_rollbacks", needs='faults.on_spike = "rollback"'),
    Rule("faults.on_corruption", needs="faults.replicas_interval"),
    Rule(
        "faults.replicas_interval",
        needs="parallel.dp_replicate > 1 or parallel.tp > 1 or parallel.pp > 1: no ranks hold "
        "copies",
    ),
    Rule(
        "metrics.profile_steps metrics.profile_shapes metrics.profile_ranks",
        needs="metrics.profile_start",
    ),
)
"""Keys that have an effect only with certain values of other keys."""

SETTINGS: tuple[Rule["RunConfig"], ...] = (
    Rule("optim.groups", finds_none(_idle_group_keys)),
    Rule(
        "optim.moments optim.beta2",
        lambda c: c.optim.moments != "bfloat16" or c.optim.beta2 <= 0.99,
        'optim.moments = "bfloat16" with optim.beta2 = {c.optim.beta2}: a second moment that '
        "changes by less than 1/512 per step is rounded back and never falls; use optim.beta2 = "
        "0.99 or less",
    ),
    Rule(
        "optim.moments optim.momentum",
        lambda c: c.optim.moments != "bfloat16" or c.optim.momentum <= 0.99,
        'optim.moments = "bfloat16" with optim.momentum = {c.optim.momentum}: a momentum that '
        "changes by less than 1/512 per step is rounded back and stays; use optim.momentum = 0.99 "
        "or less",
    ),
    Rule(
        "faults.on_spike faults.spike_window train.steps",
        lambda c: not c.faults.on_spike or _known_steps(c) > c.faults.spike_window,
        "faults.on_spike = {c.faults.on_spike!r} with faults.spike_window = "
        "{c.faults.spike_window} and train.steps = {c.train.steps}: no spike is detected in the "
        "first window; use a smaller faults.spike_window, or more steps",
    ),
    Rule(
        "train.tokens train.epochs train.steps",
        lambda c: len(_ends(c)) < 2,
        lambda c: (
            f"{' and '.join(_ends(c))} both set the end of the run; keep one of them (on the "
            f"command line, {' or '.join(end.split()[0] + '=' for end in _ends(c))} removes the "
            "file's value)"
        ),
    ),
    Rule(
        "train.epochs data.mixture data.hf_streaming",
        lambda c: not c.train.epochs or not (c.data.mixture or c.data.hf_streaming),
        "train.epochs = {c.train.epochs:g} needs data with one length; a mixture and a stream have "
        "none: set train.steps",
    ),
    Rule(
        "parallel.reduce parallel.zero",
        lambda c: c.parallel.zero != 1 or c.parallel.reduce != "micro_batch",
        'parallel.reduce = "micro_batch" with parallel.zero = 1 would shard gradients, which is '
        "zero = 2; use parallel.zero = 2, or leave parallel.reduce out",
    ),
    Rule(
        "parallel.overlap_micro_batches parallel.schedule parallel.dispatcher parallel.async_tp "
        "compile.cuda_graphs recompute.offload float8.scaling",
        lambda c: not c.parallel.overlap_micro_batches or not any(_not_overlapped(c)),
        lambda c: "\n".join(_not_overlapped(c)),
    ),
    Rule(
        "train.loss_chunks train.micro_batch train.seq_len parallel.cp",
        lambda c: c.train.loss_chunks <= c.tokens,
        "train.loss_chunks = {c.train.loss_chunks} is more than the {c.tokens} tokens of a "
        "micro-batch (train.micro_batch x train.seq_len / parallel.cp); use at most {c.tokens}",
    ),
    Rule(
        "parallel.defer_head train.loss_chunks",
        lambda c: not c.parallel.defer_head or c.train.loss_chunks == 1,
        "parallel.defer_head = {c.parallel.defer_head} with train.loss_chunks = "
        "{c.train.loss_chunks}: a chunked loss computes the head's weight gradients itself; use "
        "parallel.defer_head = 0 or train.loss_chunks = 1",
    ),
    Rule(
        "lora.rank float8.gather_inputs",
        lambda c: not c.lora.rank or not c.float8.gather_inputs,
        "lora.rank = {c.lora.rank} with float8.gather_inputs = true: adapters multiply the "
        "gathered input in train.dtype, but float8.gather_inputs gathers only float8 values; use "
        "parallel.async_tp instead",
    ),
    Rule(
        "lora.dora float8.all_gather",
        lambda c: not (c.lora.dora and c.float8.all_gather),
        "lora.dora = true with float8.all_gather: the norms of rows need the weights in "
        "train.dtype, but float8.all_gather gathers only their float8 values; use one of the two",
    ),
    Rule(
        "lora.rank parallel.defer_head",
        lambda c: not c.lora.rank or not c.parallel.defer_head,
        "parallel.defer_head = {c.parallel.defer_head} has no effect with lora.rank = "
        "{c.lora.rank}: a frozen head has no weight gradient; leave it out",
    ),
    Rule(
        "parallel.accumulate_in_matmul parallel.async_tp",
        lambda c: not c.parallel.accumulate_in_matmul or not c.parallel.async_tp,
        "parallel.accumulate_in_matmul with parallel.async_tp, which overlaps the matmuls of "
        "weight gradients with reduce-scatters; leave one of them out",
    ),
    Rule(
        "parallel.accumulate_in_matmul lora.rank",
        lambda c: not c.parallel.accumulate_in_matmul or not c.lora.rank,
        "parallel.accumulate_in_matmul with lora.rank = {c.lora.rank}: the weights of large "
        "matmuls are frozen and have no gradient; leave it out",
    ),
    Rule(
        "compile.cuda_graphs",
        lambda c: _known_steps(c) > GRAPH_WARM_UP,
        needs=f"train.steps > {GRAPH_WARM_UP}: that many steps of a start run without the graph",
    ),
    Rule(
        "compile.cuda_graphs parallel.cp data.mask_documents recompute.offload "
        "float8.report_interval metrics.nvtx metrics.memory_snapshot faults.stragglers_interval",
        lambda c: c.compile.cuda_graphs == "off" or not any(_outside_graphs(c)),
        lambda c: "\n".join(_outside_graphs(c)),
    ),
    Rule(
        "parallel.async_tp parallel.sequence_parallel",
        lambda c: not c.parallel.async_tp or c.parallel.sequence_parallel,
        "parallel.async_tp overlaps the all-gathers and reduce-scatters of "
        "parallel.sequence_parallel, which is false; set it to true",
    ),
    Rule(
        "recompute.modules",
        lambda c: len(set(c.recompute.modules)) == len(c.recompute.modules),
        "recompute.modules = {c.recompute.modules} names a module twice; name each module once",
    ),
    Rule(
        "recompute.ffn_chunks recompute.mode recompute.modules",
        lambda c: (
            c.recompute.ffn_chunks == 1
            or (
                (c.recompute.mode != "selective" or c.recompute.modules)
                and "ffn" not in c.recompute.modules
            )
        ),
        "recompute.ffn_chunks = {c.recompute.ffn_chunks} recomputes the feed-forward, but "
        'recompute.mode = "selective" keeps results of its matmuls, and recompute.modules with ffn '
        'recomputes it a second time; use mode "none", "attention" or "full", or other modules',
    ),
    Rule(
        "recompute.modules parallel.async_tp",
        lambda c: not c.recompute.modules or not c.parallel.async_tp,
        "recompute.modules with parallel.async_tp: a module's first matmuls run before the module, "
        "fused with the gather of its input, and their results are kept; leave out one of the keys",
    ),
    Rule(
        "faults.on_spike checkpoint.interval",
        lambda c: c.faults.on_spike != "rollback" or c.checkpoint.interval,
        'faults.on_spike = "rollback" with checkpoint.interval = 0: there would be no checkpoint '
        "to go back to; set checkpoint.interval",
    ),
    Rule(
        "faults.on_spike checkpoint.keep checkpoint.interval faults.rollback_steps",
        lambda c: (
            c.faults.on_spike != "rollback"
            or not c.checkpoint.keep
            or (c.checkpoint.keep - 1) * c.checkpoint.interval >= c.faults.rollback_steps
        ),
        'checkpoint.keep = {c.checkpoint.keep} is too few for faults.on_spike = "rollback": '
        "({c.checkpoint.keep} - 1) x checkpoint.interval = {c.checkpoint.interval} steps are fewer "
        "than faults.rollback_steps = {c.faults.rollback_steps}; keep more checkpoints",
    ),
    Rule(
        "faults.hang_seconds parallel.timeout_seconds",
        lambda c: c.faults.hang_seconds < c.parallel.timeout_seconds,
        "faults.hang_seconds = {c.faults.hang_seconds} is not below parallel.timeout_seconds = "
        "{c.parallel.timeout_seconds}, at which collectives end the run before the watchdog can "
        "report why; lower faults.hang_seconds or raise parallel.timeout_seconds",
    ),
    Rule(
        "faults.verify_step train.steps",
        lambda c: c.faults.verify_step <= _known_steps(c),
        "faults.verify_step = {c.faults.verify_step} is after the last step (train.steps = "
        "{c.train.steps}); use at most {c.train.steps}",
    ),
    Rule(
        "metrics.memory_snapshot train.steps",
        lambda c: c.metrics.memory_snapshot <= _known_steps(c),
        "metrics.memory_snapshot = {c.metrics.memory_snapshot} is after the last step (train.steps "
        "= {c.train.steps}); use a step of the run",
    ),
    Rule(
        "metrics.profile_start train.steps",
        lambda c: c.metrics.profile_start <= _known_steps(c),
        "metrics.profile_start = {c.metrics.profile_start} is after the last step (train.steps = "
        "{c.train.steps}); use at most {c.train.steps}",
    ),
    Rule(
        "schedule.warmup schedule.decay",
        lambda c: c.schedule.name != "wsd" or c.schedule.warmup + c.schedule.decay <= 1,
        "schedule.warmup = {c.schedule.warmup} and schedule.decay = {c.schedule.decay} overlap; "
        "use values with a sum of at most 1",
    ),
    Rule(
        "data.store_seconds parallel.timeout_seconds",
        lambda c: not c.data.in_store or 2 * c.data.store_seconds <= c.parallel.timeout_seconds,
        "data.store_seconds = {c.data.store_seconds} is more than half of parallel.timeout_seconds "
        "= {c.parallel.timeout_seconds}, at which collectives of other ranks end the run",
    ),
    Rule("data.source", lambda c: c.data.source != "hf" or c.data.hf_path, needs="data.hf_path"),
    Rule(
        "data.source data.mixture data.validation",
        lambda c: (
            c.data.source not in ("hf", "python") or not (c.data.mixture or c.data.validation)
        ),
        'data.source = "{c.data.source}": data.mixture and data.validation read files or prepared '
        'folders; use data.source = "files" or "prepared", or a custom source that reads its paths',
    ),
    Rule(
        "data.format data.packing",
        lambda c: not (c.data.has_chats or c.data.has_images) or c.data.packing != "cut",
        'data.packing = "cut" would cut chats and images anywhere; set data.packing = "best_fit" '
        'and data.mask_documents = true, or data.packing = "pad"',
    ),
    Rule(
        "data.format data.source",
        lambda c: not c.data.has_images or c.data.source == "files",
        'data.format = "image_text" reads JSONL files, which have the paths of images, not '
        'data.source = "{c.data.source}"; use data.source = "files"',
    ),
    Rule(
        "data.format data.image_size data.image_tokens",
        lambda c: not c.data.has_images or (c.data.image_size and c.data.image_tokens),
        needs="data.image_size and data.image_tokens, those of the model's vision encoder",
    ),
    Rule(
        "data.paths data.mixture",
        lambda c: not c.data.mixture or not any(changed(c, "data.paths")),
        "data.paths and data.mixture exclude each other; leave one of them out",
    ),
    Rule(
        "data.mixture data.validation",
        lambda c: not _repeated_names(c),
        lambda c: (
            f"data.mixture and data.validation: {_repeated_names(c)} is named twice; give "
            "each source and each set a name of its own"
        ),
    ),
    Rule(
        "data.mixture_steps",
        lambda c: list(c.data.mixture_steps) == sorted(set(c.data.mixture_steps)),
        "data.mixture_steps = {c.data.mixture_steps} does not ascend",
    ),
    Rule(
        "data.mixture data.mixture_steps",
        lambda c: not _wrong_weights(c),
        lambda c: _wrong_weights(c),
    ),
    Rule(
        "data.source data.paths",
        lambda c: c.data.source not in ("files", "prepared") or c.data.paths,
        "data.paths is empty; name at least one file",
    ),
    Rule(
        "checkpoint.fast_dir",
        needs="checkpoint.fast_interval: set the steps between checkpoints there",
    ),
    Rule(
        "float8.report_interval metrics.log_interval",
        lambda c: c.float8.report_interval % c.metrics.log_interval == 0,
        "float8.report_interval = {c.float8.report_interval} is not a multiple of "
        "metrics.log_interval = {c.metrics.log_interval}; use such a multiple",
    ),
)
"""Settings that exclude each other."""


def _only_in_memory(run: Candidate) -> bool:
    options = run.config.checkpoint
    several = options.mode == "async" or options.fast_dir != "" or run.world_size > 1
    return options.dir.startswith("memory://") and several


def _idle_axes(run: Candidate) -> Iterator[str]:
    wide = [name for name, n in run.degrees.items() if n > 1]
    for axis in run.parallel.high_priority:
        if axis not in wide:
            yield (
                f"parallel.high_priority names {axis}, which has one rank and no collectives; "
                f"use {' or '.join(wide) or '[]'}"
            )


RANKS: tuple[Rule[Candidate], ...] = (
    Rule("parallel.ep parallel.etp", passes(lambda c: c.config.expert_degrees(c.world_size))),
    Rule("train.global_batch train.micro_batch", passes(lambda c: c.micro_batches)),
    Rule("parallel.high_priority", finds_none(_idle_axes)),
    Rule(
        "metrics.profile_ranks",
        lambda c: max(c.config.metrics.profile_ranks, default=0) < c.world_size,
        "metrics.profile_ranks = {c.config.metrics.profile_ranks} with {c.world_size} ranks; use "
        "ranks below {c.world_size}",
    ),
    Rule(
        "parallel.reduce_by parallel.copy_engines parallel.blocks_per_unit",
        lambda c: c.shards > 1,
        needs="parallel.dp_shard or parallel.cp > 1: no parameters are sharded",
    ),
    Rule(
        "parallel.reduce_dtype parallel.zero parallel.reduce parallel.dp_replicate",
        lambda c: (
            c.parallel.reduce_dtype != "bfloat16"
            or c.micro_batches == 1
            or not (c.sums_micro_batches or c.degrees["dp_replicate"] > 1)
        ),
        'parallel.reduce_dtype = "bfloat16" would sum {c.micro_batches} micro-batches in bfloat16 '
        'in this layout; use "float32", or one micro-batch',
    ),
    Rule(
        "parallel.overlap_micro_batches",
        lambda c: c.micro_batches > 1,
        needs="several micro-batches: train.global_batch / (data-parallel ranks x "
        "train.micro_batch) > 1",
    ),
    Rule(
        "parallel.overlap_micro_batches parallel.zero parallel.reduce",
        lambda c: not c.parallel.overlap_micro_batches or c.overlaps_freely,
        "parallel.overlap_micro_batches = true with parallel.zero = {c.parallel.zero} and "
        'parallel.reduce = "{c.parallel.reduce}": between two micro-batches that run together, no '
        "parameters can be freed and no gradients reduced; use parallel.zero = 1, or zero = 2 with "
        'parallel.reduce = "step"',
    ),
    Rule(
        "parallel.accumulate_in_matmul parallel.zero parallel.reduce",
        lambda c: not c.parallel.accumulate_in_matmul or c.sums_micro_batches,
        "parallel.accumulate_in_matmul needs gradients that are summed over micro-batches before "
        "their reduction; use it with several micro-batches and zero = 1 or "
        'parallel.reduce = "step", or leave it out',
    ),
    Rule(
        "parallel.reduce_by parallel.zero parallel.reduce",
        lambda c: c.parallel.reduce_by != "all_to_all" or not c.sums_micro_batches,
        'parallel.reduce_by = "all_to_all" would round sums of {c.micro_batches} micro-batches to '
        'train.dtype; use "reduce_scatter", or one micro-batch',
    ),
    Rule(
        "checkpoint.dir checkpoint.mode checkpoint.fast_dir",
        lambda c: not _only_in_memory(c),
        "checkpoint.dir = {c.config.checkpoint.dir!r} is the memory of one process; use it with "
        'one rank, checkpoint.mode = "sync" and no checkpoint.fast_dir',
    ),
)
"""Rules that depend on the number of ranks."""
