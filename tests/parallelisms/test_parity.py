"""Layouts equal one process: a subset in which any two settings meet, and special cases.

The default run takes a few of them, in which every model, axis, schedule, context-parallel method,
dispatcher, float8 recipe and recompute mode occurs; `-m full` takes those in which any two features
meet, and `-m matrix` the others, with the whole matrix in test_matrix.py.
"""

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from dtron.config import Compile, CpMethod, Lora, Parallel, Recompute
from dtron.data.best_fit_packing import PACKERS
from dtron.models import MODELS
from dtron.parallelisms.pipeline.schedule_ops import Kind
from dtron.parallelisms.pipeline.schedules import SCHEDULES, order_of, write_csv
from tests.parallelisms.parity import (
    DELAYED,
    DENSE,
    EAGER,
    FULL,
    LATENT8,
    LIMITED,
    MIXTURES,
    MTP,
    SELECTIVE,
    SINKHORN,
    SIZES,
    Batches,
    Case,
    check,
    float8,
    rows_of,
    selected,
    shallow,
)

MOST_RANKS, MOST_EXPERT_RANKS = 8, 4
V, LOOP = "ZBVZeroBubble", "Interleaved1F1B"
BUBBLE, DUAL = "InterleavedZeroBubble", "DualPipeV"

Axes = dict[str, list[dict[str, Any]]]
"""Axes of a subset; a value is the keys of a Case that it sets."""

AXES: Axes = {
    "model": [{"model": name} for name in DENSE],
    "replicas": [{}, {"parallel": {"dp_replicate": 2}}],
    "shards": [{}, {"parallel": {"dp_shard": 2}}],
    "tensor": [
        {},
        {"parallel": {"tp": 2}},
        {"parallel": {"tp": 2, "sequence_parallel": False}},
    ],
    "context": [
        {},
        *[{"parallel": {"cp": 2, "cp_method": name}} for name in ("ring", "all_gather", "ulysses")],
    ],
    "pipeline": [{}, *[{"parallel": {"pp": 2, "schedule": name}} for name in SCHEDULES]],
    "zero": [
        {},
        {"parallel": {"reduce": "step"}},
        {"parallel": {"zero": 2}},
        {"parallel": {"zero": 2, "reduce": "step"}},
        {"parallel": {"zero": 1}},
    ],
    "recompute": [
        {},
        {"recompute": Recompute(mode="full")},
        {"recompute": Recompute(mode="attention", offload=True)},
        {"recompute": Recompute(mode="selective")},
    ],
    "compile": [{}, {"compile": EAGER}],
    "tied": [{"override": {"tied": False}}, {"override": {"tied": True}}],
    "dropout": [{}, {"override": {"dropout": 0.1, "attention_dropout": 0.1}}],
    "documents": [{}, {"documents": True}],
    "vocabulary": [{"override": {"vocab_size": 64}}, {"override": {"vocab_size": 67}}],
    "micro_batch": [{}, {"micro_batch": 2}],
    "dtype": [{}, {"dtype": "float64"}],
}
Choice = tuple[int, ...]
"""The index of a value on every axis."""

# The same for mixtures of experts, on at most four ranks.
EXPERT_AXES: Axes = {
    "model": [{"model": name} for name in MIXTURES],
    "data": [{}, {"parallel": {"dp_shard": 2}}, {"parallel": {"dp_replicate": 2}}],
    "experts": [
        {},
        {"parallel": {"ep": 2}},
        {"parallel": {"ep": 2, "dispatcher": "symmetric_memory"}},
        {"parallel": {"ep": 2, "dispatcher": "bounded_all_to_all"}},
        {"parallel": {"ep": 2, "dispatcher": "hierarchical", "ep_inner": 1}},
    ],
    "width": [{}, {"parallel": {"etp": 2}}],
    "tensor": [{}, {"parallel": {"tp": 2}}],
    "context": [
        {},
        {"parallel": {"cp": 2, "cp_method": "all_gather"}},
    ],
    "pipeline": [
        {},
        *[{"parallel": {"pp": 2, "schedule": name}} for name in ("1F1B", "ZBVZeroBubble")],
    ],
    "recompute": [
        {},
        {"recompute": Recompute(mode="full")},
        {"recompute": Recompute(mode="selective")},
    ],
    "compile": [{}, {"compile": EAGER}],
    "routing": [
        {},
        {"override": {"balance": "global_batch"}},
        {"override": {"z_loss": 0.1, "jitter": 0.1}},
        {"override": SINKHORN},
    ],
    "documents": [{}, {"documents": True}],
    "micro_batch": [{}, {"micro_batch": 2}],
    "dtype": [{}, {"dtype": "float64"}],
}

# Packed documents and narrow moments, with all that is pooled over tokens, on at most four ranks.
POOLED = {"balance": "global_batch", "balance_coefficient": 0.5, "z_loss": 0.1}
PADDED = {**LIMITED, "capacity_pad": True}
PACKED_AXES: Axes = {
    "model": [{"model": "deepseek_v3"}],
    "packing": [{"packing": name} for name in ("cut", *PACKERS)],
    "documents": [{}, {"documents": True}],
    "pooled": [
        {},
        {"override": POOLED},
        {"override": {**LIMITED, "balance": "micro_batch", "z_loss": 0.1}},
        {"override": PADDED},
        {"override": SINKHORN},
        {"override": MTP},
    ],
    "data": [{}, {"parallel": {"dp_shard": 2}}],
    "experts": [{}, {"parallel": {"ep": 2}}],
    "width": [{}, {"parallel": {"etp": 2}}],
    "tensor": [{}, {"parallel": {"tp": 2}}],
    "context": [{}, {"parallel": {"cp": 2}}],
    "pipeline": [{}, *[{"parallel": {"pp": 2, "schedule": name}} for name in ("1F1B", V)]],
    "micro_batch": [{}, {"micro_batch": 2}],
    "optimizer": [{}, {"optimizer": "narrow_adamw", "dtype": "float64", "steps": 3}],
}


def case_of(choice: Choice, axes: Axes = AXES, micro_batches: int = 0) -> Case:
    """A case of the chosen settings, with so many micro-batches outside of pipelines."""
    keys: dict[str, Any] = {"parallel": {"dp_shard": 1}, "override": {}, "micro_batch": 1}
    for values, index in zip(axes.values(), choice, strict=True):
        for key, value in values[index].items():
            keys[key] = {**keys[key], **value} if isinstance(value, dict) else value
    parallel = Parallel(**keys.pop("parallel"))
    if parallel.cp > 1 or "window" in SIZES[keys["model"]]:  # refuse it
        keys["override"].pop("attention_dropout", None)
    data_ranks = parallel.dp_replicate * parallel.dp_shard
    world = data_ranks * parallel.tp * parallel.pp * parallel.cp
    number = 0 if parallel.pp > 1 else micro_batches
    sequences = number * data_ranks * keys["micro_batch"]
    return shallow(Case(world=world, parallel=parallel, sequences=sequences, **keys))


def expert_case_of(choice: Choice) -> Case:
    """The same of two micro-batches."""
    return case_of(choice, EXPERT_AXES, 2)


def packed_case_of(choice: Choice) -> Case:
    """The same of packed documents."""
    return case_of(choice, PACKED_AXES, 2)


def pairs(choice: Choice) -> set[tuple[int, int, int, int]]:
    """(axis, value, other axis, value) of each two settings of a choice."""
    indexed = list(enumerate(choice))
    return {(*a, *b) for a, b in itertools.combinations(indexed, 2)}


def all_pairs(axes: Axes) -> set[tuple[int, int, int, int]]:
    """Those of any choice."""
    sizes = [range(len(values)) for values in axes.values()]
    both = itertools.combinations(range(len(sizes)), 2)
    return {(a, i, b, j) for a, b in both for i in sizes[a] for j in sizes[b]}


def cost(case: Case) -> float:
    """About how long a case takes, in no unit: ranks share the cores, each compiles for itself."""
    split = case.parallel.tp > 1
    long_blocks = case.model in MIXTURES or case.recompute.mode in ("selective", "attention")
    compiled = 3 + 2 * long_blocks + 1.5 * split if case.compile.enable else 0
    return 1 + case.world * (1 + 0.8 * split + compiled)


def choose(
    axes: Axes, make: Callable[[Choice], Case], most_ranks: int, candidates: int = 100
) -> list[Choice]:
    """Choices that meet every pair: each time, of some random ones with a pair that is left, the
    one that meets most new pairs for its cost, of those that are not refused. In the end those go
    whose pairs the others meet, the dearest first."""
    draw = random.Random(0)
    left = all_pairs(axes)
    chosen: list[Choice] = []
    while left:
        axis, value, other, other_value = min(left)
        found = []
        while len(found) < candidates:
            drawn = [draw.randrange(len(values)) for values in axes.values()]
            drawn[axis], drawn[other] = value, other_value
            choice = tuple(drawn)
            if (case := make(choice)).world <= most_ranks:
                found.append((len(pairs(choice) & left) / cost(case) ** 0.5, choice))
        best = next(c for _, c in sorted(found, reverse=True) if not make(c).refusal())
        left -= pairs(best)
        chosen.append(best)
    for choice in sorted(chosen, key=lambda c: cost(make(c)), reverse=True):
        others = [other for other in chosen if other != choice]
        if pairs(choice) <= set().union(*map(pairs, others)):
            chosen = others
    return chosen


CHOICES = choose(AXES, case_of, MOST_RANKS)
EXPERT_CHOICES = choose(EXPERT_AXES, expert_case_of, MOST_EXPERT_RANKS)
PACKED_CHOICES = choose(PACKED_AXES, packed_case_of, MOST_EXPERT_RANKS)

# What the pairs above do not meet.


def offloaded(mode: str) -> Recompute:
    """A mode whose activations wait in host memory."""
    return Recompute.model_validate({"mode": mode, "offload": True})


EXCHANGED: Literal["all_to_all"] = "all_to_all"
EACH: list[CpMethod] = ["ring", "all_gather", "ulysses", "hierarchical", "ring"]
VARIED = {"window": 5, "softcap": 1.0, "sinks": True}
ALTERNATE = {"window": 6, "full_attention_every": 2, "sinks": True}
HIERARCHICAL = Parallel(cp=4, cp_method="hierarchical")
TIED, DROPPED = {"tied": True}, {"dropout": 0.1}
IN_MATMUL: Any = {"accumulate_in_matmul": True}
JOINED: Any = {"blocks_per_unit": 2}
ALL_DENSE: dict[str, Any] = {
    **{"n_experts": 0, "experts_per_token": 0, "expert_dim": 0, "first_dense_layers": 0},
    **{"n_shared_experts": 0, "n_groups": 1, "top_groups": 1, "routed_scaling": 1.0},
    **{"router": "softmax", "renormalize": False, "bias_speed": 0.0},
    **{"balance": "none", "balance_coefficient": 0.0},
}
OVERLAPPED = Parallel(tp=2, zero=2, async_tp=True)
V_OVERLAPPED = Parallel(pp=2, tp=2, schedule=V, async_tp=True)
EXCHANGED_CONTEXT = Parallel(tp=2, cp=2, ep=4, dispatcher="symmetric_memory")
HOSTS: Any = {"ep": 4, "dispatcher": "hierarchical", "ep_inner": 2}
BOUNDED = Parallel(ep=2, dispatcher="bounded_all_to_all")
EXCHANGED_OVERLAPPED = Parallel(tp=2, ep=2, dispatcher="symmetric_memory", async_tp=True)
HEAD_OVERLAPPED = Parallel(pp=2, tp=2, schedule="1F1B", defer_head=1, async_tp=True)
DEFERRED: dict[str, dict[str, Any]] = {
    V: {"override": TIED, "dtype": "float64"},
    BUBBLE: {"recompute": FULL, "micro_batch": 2},
    DUAL: {"recompute": SELECTIVE, "compile": EAGER},
}
YARN = {"rope_scaling": "yarn", "rope_scaling_factor": 40.0, "rope_original_context": 16}
SCORED = {**YARN, "rope_mscale": 1.0, "rope_mscale_all_dim": 1.0}
"""Scores that are not those of 1 / sqrt(K), as all sizes of DeepSeek-V3 have them."""
PADDED_LAYOUTS: list[tuple[int, Parallel, dict[str, Any]]] = [
    (2, Parallel(dp_shard=2), {"micro_batch": 2}),
    (2, Parallel(cp=2), {"documents": True}),
    (2, Parallel(tp=2), {"micro_batch": 2}),
    (4, Parallel(cp=2, ep=2), {"compile": EAGER}),
]
PREDICTED: dict[str, Any] = {"override": MTP, "sequences": 4}
EXPERT_CASES = [
    Case("mixtral", 2, recompute=offloaded("selective"), documents=True, loss_chunks=3),
    Case("deepseek_v3", 2, Parallel(pp=2, schedule=LOOP), recompute=FULL, steps=3),
    Case("deepseek_v3", 2, Parallel(tp=2, sequence_parallel=False), override=ALL_DENSE),
    Case("deepseek_v3", 2, Parallel(tp=2), override={"q_lora_rank": 0}, dtype="float64"),
    Case("deepseek_v3", 2, Parallel(ep=2), override={"shared_gate": True}, sequences=4),
    Case("deepseek_v3", 2, Parallel(ep=2), SELECTIVE, sequences=4, steps=3),
    Case("deepseek_v3", 2, Parallel(ep=2), FULL, EAGER, sequences=4),
    *[
        Case("deepseek_v3", 2, Parallel(cp=2, cp_method=method), override=SCORED, documents=True)
        for method in ("ring", "all_gather", "ulysses")
    ],
    Case("deepseek_v3", 2, Parallel(pp=2, tp=1), override=SCORED),
    # every other layer has a window
    Case("gpt_oss", 2, Parallel(cp=2), documents=True, micro_batch=2),
    Case("gpt_oss", 2, Parallel(cp=2), FULL, EAGER, documents=True, dtype="float64", sequences=4),
    Case("gpt_oss", 4, Parallel(cp=4, ep=2), SELECTIVE, override={"window": 3}, dtype="float64"),
    Case("gpt_oss", 4, HIERARCHICAL, SELECTIVE, EAGER, documents=True, sequences=4),
    Case("gpt_oss", 4, Parallel(cp=2, tp=2, ep=4), documents=True, dtype="float64", sequences=4),
    # a stage without experts, whose ranks make the experts' process groups all the same
    Case(
        "deepseek_v3",
        4,
        Parallel(pp=2, ep=2, pp_layout="Et|ttL"),
        override={"n_layers": 3},
        sequences=4,
    ),
    # padding takes no experts, and is in no mean and no capacity
    *[
        Case("mixtral", world, parallel, override={**LIMITED, "z_loss": 0.1}, padded=True, **more)
        for world, parallel, more in PADDED_LAYOUTS
    ],
    Case("mixtral", 2, Parallel(cp=2), override=SINKHORN, padded=True, micro_batch=2),
    Case("mixtral", 2, Parallel(dp_shard=2), override=POOLED, padded=True, sequences=4),
    Case("mixtral", 4, Parallel(cp=2, tp=2), override=POOLED, padded=True),
    Case("mixtral", 3, Parallel(cp=3), override=POOLED, padded=True, dtype="float64", seq_len=18),
    Case("deepseek_v3", 2, Parallel(ep=2, dispatcher="symmetric_memory"), padded=True),
    Case("deepseek_v3", 2, Parallel(tp=2, ep=2), **PREDICTED, documents=True, padded=True),
    Case("qwen3_moe", 2, Parallel(pp=2, schedule=V), FULL, padded=True),
    # capacity over the tokens of all ranks of a micro-batch, in the order of the sequences
    Case("mixtral", 2, Parallel(ep=2), override=LIMITED, sequences=4),
    Case("mixtral", 2, Parallel(cp=2), override=PADDED, documents=True, micro_batch=2),
    Case("deepseek_v3", 4, Parallel(cp=2, tp=2, ep=2), override=LIMITED, micro_batch=2, steps=1),
    Case("mixtral", 4, Parallel(pp=2, tp=2, ep=2, schedule="DualPipeV"), override=TIED),
    # two hosts of two ranks, each of which shares experts or has some of its own
    Case("deepseek_v3", 4, Parallel(**HOSTS, tp=2), SELECTIVE, EAGER, documents=True),
    Case("gpt_oss", 4, Parallel(**{**HOSTS, "ep_inner": 1, "ep": 2}, etp=2), dtype="float64"),
    Case("mixtral", 4, Parallel(**HOSTS), override=LIMITED, padded=True),
    # a second and a third token
    Case("deepseek_v3", 2, Parallel(tp=2, ep=2), **PREDICTED, dtype="float64"),
    Case("deepseek_v3", 2, Parallel(cp=2, ep=2), FULL, **PREDICTED, documents=True),
    Case("deepseek_v3", 2, Parallel(pp=2, schedule=V), **PREDICTED, documents=True),
    Case("deepseek_v3", 2, recompute=SELECTIVE, compile=EAGER, **PREDICTED),
    Case(
        "deepseek_v3",
        2,
        Parallel(pp=2, schedule="1F1B", pp_layout="Ett|tmmL"),
        **{**PREDICTED, "override": {**MTP, **TIED}, "steps": 3},
    ),
    # a weight of whose gradient a part is deferred and a part is not
    *[
        Case("deepseek_v3", 4, parallel, override={**MTP, **TIED})
        for parallel in (
            Parallel(pp=2, tp=2, schedule=V),
            Parallel(pp=2, tp=2, schedule="DualPipeV"),
            Parallel(pp=2, tp=2, schedule="InterleavedZeroBubble"),
            Parallel(pp=2, tp=2, schedule="1F1B", zero=1, defer_head=1),
        )
    ],
    Case("gpt", 4, Parallel(pp=2, tp=2, schedule="1F1B", zero=1, defer_head=1), override=TIED),
    # every axis at once
    Case(
        "deepseek_v3",
        8,
        Parallel(pp=2, tp=2, cp=2, ep=4, schedule=V),
        documents=True,
        sequences=4,
        steps=1,
    ),
]
LONG: dict[str, Any] = {"seq_len": 144, "sequences": 2, "dtype": "float64"}
"""Sequences of more than two chunks of the delta rule."""
SCALED_LINEARLY = {"rope_scaling": "linear", "rope_scaling_factor": 4.0}
GEMMA = {"sandwich_norms": True, "scale_embeddings": True, "logit_softcap": 3.0}
HYBRID_CASES = [
    Case("qwen3_5", 2, Parallel(cp=2), packing="best_fit", documents=True, **LONG),
    Case("qwen3_5", 4, HIERARCHICAL, documents=True, dtype="float64"),
    Case("qwen3_5", 4, Parallel(tp=4), SELECTIVE, dtype="float64"),
    Case("qwen3_5", 2, Parallel(tp=2, async_tp=True), micro_batch=2),
    Case("qwen3_5", 4, Parallel(tp=2, cp=2), compile=EAGER, documents=True),
    Case("qwen3_5", 2, recompute=Recompute(mode="full", modules=["delta", "ffn"])),
    Case("qwen3_5", 4, Parallel(pp=2, tp=2, schedule=V), documents=True),
    Case("llava", 2, Parallel(tp=2), FULL, EAGER, micro_batch=2),
    Case("llava", 4, Parallel(dp_shard=2, tp=2, encoder_tp=2), SELECTIVE, EAGER, sequences=4),
    Case("llava", 4, Parallel(dp_shard=2, tp=2), Recompute(ffn_chunks=2), optimizer="adamw"),
    Case("llava", 2, Parallel(zero=3), override={"tied": True}, optimizer="adamw"),
    Case("llava", 4, Parallel(cp=2, tp=2, sequence_parallel=False), documents=True),
    Case("llava", 4, Parallel(pp=2, tp=2, schedule=V), packing="best_fit", documents=True),
    Case("llava", 4, Parallel(pp=2, cp=2), dtype="float64", loss_chunks=2),
    # the encoder and the embedding on a stage of their own
    Case("llava", 2, Parallel(pp=2, pp_layout=[0, 5]), recompute=SELECTIVE),
    Case("llava", 4, Parallel(pp=2, tp=2, pp_layout="E|t*5L"), documents=True),
    Case("llava", 4, Parallel(pp=4, pp_layout=[0, 1, 2, 2])),
    # with experts, and with a second token
    Case("qwen3_5_moe", 2, Parallel(tp=2, ep=2), override={"mtp": 1}, dtype="float64"),
    Case("qwen3_5_moe", 4, EXCHANGED_CONTEXT, documents=True, micro_batch=2),
    Case("qwen3_5_moe", 2, BOUNDED, FULL, EAGER, sequences=4),
    Case("qwen3_5_moe", 4, Parallel(pp=2, etp=2, schedule=V), override={"mtp": 1}, documents=True),
    Case("qwen3_5_moe", 2, Parallel(cp=2), override={"mtp": 1}, packing="best_fit", **LONG),
    Case("qwen3_5", 2, Parallel(tp=2), SELECTIVE, EAGER, override={"mtp": 1}),
    Case("qwen3_5", 2, Parallel(pp=2), override={"mtp": 1}, documents=True, loss_chunks=3),
]
"""Gated delta nets between layers with attention."""
PATTERN_CASES = [
    Case("nemotron_h", 2, Parallel(cp=2), packing="best_fit", documents=True, **LONG),
    Case("nemotron_h", 4, HIERARCHICAL, documents=True, dtype="float64"),
    Case("nemotron_h", 2, Parallel(tp=2, async_tp=True), micro_batch=2),
    Case("nemotron_h", 2, Parallel(tp=2), SELECTIVE, EAGER, documents=True),
    Case("nemotron_h", 2, recompute=Recompute(mode="full", modules=["mamba", "ffn"])),
    Case("nemotron_h", 4, Parallel(pp=2, tp=2, schedule=V), documents=True),
    Case("nemotron_h", 4, Parallel(pp=2, ep=2, schedule=V), packing="best_fit", documents=True),
]
"""Layers of Mamba-2, attention, feed-forward or experts alone."""
NO_WINDOWS: dict[str, Any] = {
    **{"window": 0, "full_attention_every": 0, "global_head_dim": 0, "global_kv_heads": 0},
    "rope_local_theta": 0.0,
}
LOCAL_CASES = [
    Case("gemma3", 2, Parallel(cp=2), packing="best_fit", documents=True, dtype="float64"),
    Case("gemma3", 4, HIERARCHICAL, SELECTIVE, documents=True, sequences=4),
    Case("gemma3", 4, Parallel(tp=4), loss_chunks=3, dtype="float64"),
    Case("gemma3", 2, Parallel(tp=2, async_tp=True), FULL, micro_batch=2),
    Case("gemma3", 4, Parallel(tp=2, cp=2), compile=EAGER, documents=True),
    Case("gemma3", 4, Parallel(pp=2, tp=2, schedule=V), loss_chunks=2, documents=True),
    Case("gemma3", 2, override={"sinks": True, "softcap": 1.0, **SCALED_LINEARLY}),
    Case("gemma4", 2, Parallel(cp=2), packing="best_fit", documents=True, dtype="float64"),
    Case("gemma4", 4, HIERARCHICAL, SELECTIVE, documents=True, sequences=4),
    Case("gemma4", 4, Parallel(tp=4), loss_chunks=3, documents=True, dtype="float64"),
    Case("gemma4", 4, Parallel(tp=2, cp=2, cp_method="all_gather"), FULL, EAGER),
    Case("gemma4", 4, Parallel(pp=2, tp=2, schedule=V), loss_chunks=2, documents=True),
    Case("gemma4", 2, Parallel(tp=2, async_tp=True), override={**SCALED_LINEARLY, "mtp": 1}),
    Case("gemma4", 2, Parallel(tp=2), lora=Lora(rank=4), override={"keys_as_values": False}),
    Case("gemma4", 2, Parallel(tp=2), lora=Lora(rank=4)),
    Case("gemma4", 2, override={"softcap": 1.0, "sinks": True}, documents=True, compile=EAGER),
    Case("gemma4", 2, Parallel(cp=2, cp_method="ulysses"), override=NO_WINDOWS, documents=True),
    Case("deepseek_v3", 2, Parallel(tp=2), override={**MTP, **GEMMA}, sequences=4, steps=1),
]
"""Layers with a window and a rotary base of their own, post-norms, soft caps."""
TOGETHER: Any = {"ep": 2, "zero": 1, "overlap_micro_batches": True}
TOGETHER_V: Any = {**TOGETHER, "pp": 2, "schedule": DUAL}
DEEP: dict[str, Any] = {"override": {"n_layers": 10}}
"""Stages of several blocks."""
OVERLAP_CASES = [
    Case("deepseek_v3", 2, Parallel(**TOGETHER), override=MTP, documents=True),
    Case("deepseek_v3", 2, Parallel(**TOGETHER, dispatcher="bounded_all_to_all"), SELECTIVE, EAGER),
    Case(
        "mixtral",
        2,
        Parallel(**{**TOGETHER, "zero": 2}, reduce="step", dispatcher="symmetric_memory"),
        FULL,
        EAGER,
    ),
    Case(
        "qwen3_moe",
        4,
        Parallel(**TOGETHER, dp_replicate=2),
        override={"balance": "global_batch", "jitter": 0.1, "dropout": 0.1},
        micro_batch=2,
    ),
    Case("mixtral", 4, Parallel(**TOGETHER, tp=2, **IN_MATMUL), loss_chunks=3, sequences=8),
    Case("gpt_oss", 4, Parallel(**TOGETHER, cp=2), FULL, padded=True),
    Case("mixtral", 2, Parallel(**TOGETHER), lora=Lora(rank=4), recompute=FULL),
    Case("deepseek_v3", 4, Parallel(**{**TOGETHER, **HOSTS}), FULL, EAGER, sequences=8),
    Case(
        "deepseek_v3",
        4,
        Parallel(**TOGETHER_V, dispatcher="bounded_all_to_all"),
        FULL,
        override={**MTP, **TIED, "n_layers": 8},
    ),
    Case("mixtral", 4, Parallel(**TOGETHER_V), compile=EAGER, steps=1, **DEEP),
    Case("qwen3_moe", 4, Parallel(**TOGETHER_V, tp=2, **IN_MATMUL), SELECTIVE, **DEEP),
]
"""A forward of a micro-batch together with a backward of another."""
ENCODER_CASES = [
    Case("bert", 2, Parallel(cp=2), documents=True),
    Case("bert", 2, Parallel(cp=2, cp_method="all_gather"), documents=True),
    Case("bert", 4, HIERARCHICAL),
    Case("bert", 4, Parallel(pp=2, tp=2, schedule=V), override={"dropout": 0.1}),
    Case("bert", 2, Parallel(tp=2), SELECTIVE, EAGER),
    Case("bert", 2, Parallel(dp_shard=2), override={"tied": False}, dtype="float64"),
    Case("llama", 2, Parallel(cp=2, cp_method="all_gather"), override={"causal": False}),
]
"""Attention without a causal mask; post-norm blocks."""
V1_0 = {"tied": True, "activation": "relu"}
SPAN_CASES = [
    Case("t5", 2, Parallel(pp=2, pp_layout="Ett|tttL"), override=V1_0 | DROPPED),
    Case("t5", 4, Parallel(pp=4, pp_layout="Et|t|t|ttL"), FULL, EAGER),
    Case("t5", 4, Parallel(pp=2, tp=2, schedule=V), dtype="float64", loss_chunks=2),
    Case("t5", 4, Parallel(pp=2, dp_shard=2, schedule=DUAL, zero=2), SELECTIVE, sequences=8),
    Case("t5", 4, Parallel(tp=4), override={"n_kv_heads": 2, "head_dim": 8}, optimizer="adamw"),
    Case("t5", 2, Parallel(tp=2, sequence_parallel=False), SELECTIVE, compile=EAGER),
    Case(
        "t5", 2, Parallel(tp=2, async_tp=True), micro_batch=2, override={"attention_dropout": 0.1}
    ),
    Case("t5", 2, Parallel(zero=3), recompute=Recompute(mode="full", ffn_chunks=2)),
    Case("t5", 2, Parallel(tp=2), lora=Lora(rank=4)),
]
"""An encoder before a decoder, on stages of their own and together."""
MQA = {"n_kv_heads": 1, "head_dim": 8}
GQA = {"n_kv_heads": 2}
SHARED_HEADS = [
    Case("llama", 4, Parallel(tp=4)),
    Case("llama", 4, Parallel(tp=4, sequence_parallel=False), FULL, override=MQA | TIED),
    Case("llama", 4, Parallel(tp=4), compile=EAGER, dtype="float64"),
    Case("llama", 2, Parallel(tp=2), SELECTIVE, EAGER, override=MQA, loss_chunks=3),
    Case("qwen3", 4, Parallel(tp=4, async_tp=True), micro_batch=2, recompute=SELECTIVE),
    Case("qwen3", 4, Parallel(tp=4, async_tp=True), compile=EAGER, override={"n_kv_heads": 1}),
    Case("gpt", 4, Parallel(tp=4, async_tp=True), override=GQA | TIED, micro_batch=2),
    Case("gpt", 4, Parallel(tp=4), override=GQA | DROPPED | {"attention_dropout": 0.1}),
    Case("gpt_oss", 4, Parallel(tp=4, ep=2), dtype="float64"),
    Case("qwen3_moe", 4, Parallel(tp=4), recompute=SELECTIVE, override={"n_kv_heads": 1}),
    *[
        Case("qwen3", 4, Parallel(tp=2, cp=2, cp_method=method), override=MQA, documents=True)
        for method in ("ring", "ulysses", "all_gather")
    ],
    Case("llama", 4, Parallel(tp=2, dp_shard=2, zero=2), override=MQA, dtype="float64"),
    # float64: without rope a bias of all keys has a gradient of 0, and in float32 rounding is left
    Case(
        "gpt",
        4,
        Parallel(tp=2, dp_replicate=2, zero=1),
        override=MQA | {"qk_norm": True},
        dtype="float64",
    ),
    Case("llama", 4, Parallel(tp=2, pp=2, schedule=V), override=MQA | {"bias": True}),
    Case("qwen3", 8, Parallel(tp=4, pp=2, schedule=V), override=TIED, sequences=8),
    Case("llama", 8, Parallel(tp=4, cp=2), dtype="float64", recompute=FULL, documents=True),
    Case("llama", 8, Parallel(tp=8), override={"n_heads": 8, "head_dim": 8}, optimizer="adamw"),
]
"""More tp ranks than key/value heads."""
SCALED: dict[str, Any] = {"optimizer": "muon", "dtype": "float64"}
UPDATED = [
    *[
        Case("llama", 2, parallel, **SCALED)
        for parallel in (
            Parallel(zero=3),
            Parallel(zero=1),
            Parallel(dp_replicate=2, dp_shard=1),
            Parallel(tp=2),
            Parallel(pp=2, schedule="1F1B"),
            Parallel(cp=2),
        )
    ],
    Case("llama", 3, **SCALED),  # uneven shards
    Case("llama", 4, override={"n_heads": 4, "n_kv_heads": 1, "head_dim": 2}, **SCALED),  # empty
    Case("llama", 4, Parallel(tp=2), **SCALED),
    Case("deepseek_v3", 2, Parallel(ep=2), override=MTP, **SCALED),
    Case("deepseek_v3", 4, Parallel(pp=2, tp=2, schedule=V), override=MTP, **SCALED),
    Case("qwen3_moe", 4, Parallel(ep=2, etp=2), **SCALED),
    Case("mixtral", 4, Parallel(dp_replicate=2, ep=2), **SCALED),
    Case("gpt_oss", 4, Parallel(tp=2, ep=2), **SCALED),
    Case("llama", 4, Parallel(tp=2), optimizer="lion", dtype="float64"),
]
"""Optimizers in every layout: Muon exchanges shards of its matrices."""
SPECIAL = [
    *[Case(model) for model in MODELS],
    *UPDATED,
    *[Case("llama", 4, Parallel(dp_replicate=n, dp_shard=4 // n)) for n in (1, 4)],
    Case("llama", 4, Parallel(dp_replicate=2, prefetch=2)),
    # several blocks per unit
    Case("gpt", 2, Parallel(zero=2, **JOINED), optimizer="adamw", override=TIED),
    Case(
        "llama",
        4,
        Parallel(pp=2, schedule=V, **JOINED),
        optimizer="adamw",
        override={"n_layers": 9},
    ),
    Case("deepseek_v3", 2, Parallel(ep=2, blocks_per_unit=3), override=MTP),
    Case("llama", 4, Parallel(cp=2, tp=2, **JOINED), FULL, EAGER, loss_chunks=3),
    Case("llava", 2, Parallel(zero=1, **JOINED)),
    Case(
        "gpt",
        2,
        sequences=8,
        micro_batch=4,
        override={"dropout": 0.1, "attention_dropout": 0.1},
    ),
    Case(
        "llama",
        4,
        Parallel(dp_replicate=2),
        override={"rope_scaling_factor": 4.0},
        documents=True,
    ),
    Case("llama", 2, override={"rope_scaling": "yarn", "rope_scaling_factor": 4.0}),
    Case("llama", 2, Parallel(cp=2), override=YARN, documents=True),
    Case("qwen3", 4, Parallel(cp=2, tp=2), override={"rope_scaling_factor": 4.0}),
    Case("llama", 2, recompute=Recompute(mode="selective", every=2)),
    Case("gpt_oss", 2, Parallel(pp=2), Recompute(mode="full", first=3)),
    Case("llama", 4, Parallel(dp_shard=2, tp=2), Recompute(mode="full", modules=["attn"])),
    Case(
        "llama",
        2,
        Parallel(tp=2),
        Recompute(mode="full", modules=["attn", "ffn"]),
        Compile(enable=True, backend="aot_eager"),
    ),
    Case(
        "deepseek_v3",
        4,
        Parallel(pp=2, ep=2, schedule="ZBVZeroBubble"),
        Recompute(mode="selective", modules=["attn", "ffn.experts", "ffn.shared"]),
    ),
    Case("mixtral", 2, Parallel(ep=2), Recompute(mode="full", modules=["ffn.experts"])),
    Case("qwen3", 2, Parallel(cp=2), Recompute(mode="attention", modules=["attn", "ffn"])),
    Case("gpt", 2, Parallel(tp=2), Recompute(mode="attention", ffn_chunks=3), override=DROPPED),
    Case("qwen3", 2, Parallel(cp=2), Recompute(ffn_chunks=3, offload=True), documents=True),
    Case("llama", 4, Parallel(pp=2, tp=2), Recompute(mode="full", ffn_chunks=2), EAGER),
    Case("llama", 2, Parallel(pp=2, schedule=V), Recompute(mode="attention", ffn_chunks=3), EAGER),
    Case("llama", 2, Parallel(zero=1, **IN_MATMUL), Recompute(ffn_chunks=3), EAGER),
    Case("llama", 2, Parallel(tp=2, async_tp=True), Recompute(ffn_chunks=2), lora=Lora(rank=4)),
    Case("qwen3_5", 2, Parallel(tp=2), Recompute(mode="full", modules=["delta"], ffn_chunks=3)),
    Case("deepseek_v3", 2, Parallel(ep=2), Recompute(mode="full", ffn_chunks=3)),
    Case("llama", 2, Parallel(tp=2), recompute=Recompute(mode="attention"), compile=EAGER),
    Case("qwen3", 2, recompute=Recompute(mode="attention", every=2), documents=True),
    Case("gpt", 2, Parallel(pp=2, schedule="ZBVZeroBubble"), Recompute(mode="attention")),
    Case("llama", 4, Parallel(tp=4), override={"n_kv_heads": 4}),
    *SHARED_HEADS,
    # tied weights on the first and last stage, on two ranks and on one
    *[Case("gpt", 2, Parallel(pp=2, schedule=name)) for name in (LOOP, V)],
    *[
        Case("gpt", 4, Parallel(pp=4, schedule=name), override={"n_layers": 7})
        for name in (LOOP, V)
    ],
    Case("gpt", 4, Parallel(pp=2, schedule=V), override=DROPPED, dtype="float64"),
    # other numbers of stages and micro-batches than by default
    Case("llama", 2, Parallel(pp=2, schedule=LOOP, stages_per_rank=3), sequences=6),
    Case("llama", 2, Parallel(pp=2, schedule="InterleavedZeroBubble", stages_per_rank=1)),
    Case("qwen3", 4, Parallel(pp=2, schedule=V), sequences=6),
    Case("llama", 2, Parallel(pp=2), sequences=1),
    # layouts of one's own: an empty stage, counts, names of modules
    Case("llama", 2, Parallel(pp=2, schedule=LOOP, pp_layout="Ett||ttt|L")),
    Case("gpt", 2, Parallel(pp=2, schedule=V, pp_layout="E|t*3|t*2|L"), override=TIED),
    Case("qwen3", 4, Parallel(pp=2, schedule="1F1B", pp_layout=[1, 4])),
    Case(
        "llama",
        2,
        Parallel(pp=2, pp_layout=[["embed", "blocks.[0-3]"], ["blocks.4", "norm", "head"]], zero=2),
    ),
    # head and loss in chunks of unequal length
    Case("llama", 2, Parallel(dp_shard=2), loss_chunks=3),
    Case("llama", 2, Parallel(tp=2), loss_chunks=5),
    Case("gpt", 2, Parallel(tp=2, sequence_parallel=False), override=TIED, loss_chunks=3),
    Case("qwen3", 2, Parallel(pp=2, schedule=V), override=TIED, micro_batch=2, loss_chunks=5),
    Case("llama", 4, Parallel(pp=2, tp=2), compile=EAGER, loss_chunks=3),
    Case("llama", 4, Parallel(dp_replicate=2, zero=1, tp=1), dtype="float64", loss_chunks=7),
    # weight gradients that their matmul adds to the sum
    Case("llama", 2, Parallel(zero=1, **IN_MATMUL), FULL, EAGER),
    Case("gpt", 2, Parallel(tp=2, **IN_MATMUL), override=TIED),
    Case("qwen3", 4, Parallel(cp=2, tp=2, zero=1, **IN_MATMUL), SELECTIVE, EAGER),
    Case("qwen3", 2, Parallel(pp=2, schedule=V, **IN_MATMUL)),
    Case("llama", 2, Parallel(pp=2, zero=1, defer_head=1, **IN_MATMUL)),
    Case("mixtral", 2, Parallel(ep=2, zero=1, **IN_MATMUL), sequences=6),
    Case("llama", 2, Parallel(zero=3, reduce="step", **IN_MATMUL), loss_chunks=3),
    Case("gpt", 4, Parallel(dp_replicate=2, zero=2, reduce="step", **IN_MATMUL)),
    # products fused with their communication: siblings, biases, several sequences
    Case("llama", 2, Parallel(tp=2, async_tp=True), loss_chunks=3),
    Case("llama", 2, Parallel(tp=2, async_tp=True), micro_batch=2, compile=EAGER),
    Case("gpt", 2, Parallel(tp=2, async_tp=True), micro_batch=2, override=TIED),
    Case("qwen3", 4, OVERLAPPED, micro_batch=2, sequences=8, recompute=SELECTIVE, compile=EAGER),
    Case("gpt", 4, Parallel(pp=2, tp=2, schedule=LOOP, async_tp=True), recompute=FULL),
    # their weight gradients deferred
    *[
        Case("gpt", 4, Parallel(pp=2, tp=2, schedule=name, async_tp=True), **more)
        for name, more in DEFERRED.items()
    ],
    Case("gpt", 4, HEAD_OVERLAPPED, override=TIED, dtype="float64", compile=EAGER),
    # in dense layers, attention and shared experts of mixtures, and in latent attention
    Case("mixtral", 2, Parallel(tp=2, async_tp=True), dtype="float64", micro_batch=2),
    Case("qwen3_moe", 2, EXCHANGED_OVERLAPPED, SELECTIVE, EAGER),
    Case("gpt_oss", 2, Parallel(tp=2, etp=2, async_tp=True), FULL, micro_batch=2),
    Case("deepseek_v3", 2, Parallel(tp=2, async_tp=True), micro_batch=2, compile=EAGER),
    Case(
        "deepseek_v3",
        2,
        EXCHANGED_OVERLAPPED,
        override={"shared_gate": True, "q_lora_rank": 0, "bias": True},
        dtype="float64",
    ),
    Case("deepseek_v3", 4, V_OVERLAPPED, override={**MTP, **TIED}, dtype="float64"),
    Case("llama", 2, Parallel(cp=2), loss_chunks=3),
    # head and losses of several predictions in chunks
    Case("deepseek_v3", 1, override=MTP, loss_chunks=3, micro_batch=2, dtype="float64"),
    Case("deepseek_v3", 2, Parallel(tp=2), override={**MTP, **TIED}, loss_chunks=5),
    Case("deepseek_v3", 2, Parallel(cp=2), override=MTP, loss_chunks=2, packing="best_fit"),
    Case("deepseek_v3", 4, Parallel(pp=2, tp=2, schedule=V), override=MTP, loss_chunks=3),
    Case("deepseek_v3", 4, Parallel(pp=2), override=MTP, loss_chunks=4, compile=EAGER),
    # context parallelism on two levels, and by another method in each layer
    Case("llama", 4, Parallel(cp=4, cp_method="hierarchical"), documents=True, micro_batch=2),
    Case("gpt", 4, Parallel(cp=4, cp_method="hierarchical", cp_inner=2), dtype="float64"),
    Case("qwen3", 4, Parallel(cp=4, cp_method=EACH), documents=True, recompute=FULL),
    Case("llama", 4, Parallel(cp=2, tp=2), documents=True, loss_chunks=3, compile=EAGER),
    Case("llama", 4, Parallel(cp=2, pp=2, schedule=V), documents=True, micro_batch=2),
    # scores that are more than products: windows, soft caps, sinks
    *[
        Case("llama", 2, parallel, override=VARIED, documents=True)
        for parallel in (
            Parallel(dp_shard=2),
            Parallel(tp=2),
            Parallel(cp=2),
            Parallel(cp=2, cp_method="all_gather"),
            Parallel(cp=2, cp_method="ulysses"),
        )
    ],
    # windows in rings: less than a piece, one, more, more than a block; in some layers
    Case("llama", 4, HIERARCHICAL, override=VARIED, documents=True, dtype="float64"),
    Case("qwen3", 4, Parallel(cp=4), override={**VARIED, "window": 3}, micro_batch=2),
    Case("gpt", 2, Parallel(cp=2), FULL, override={"window": 3}, dtype="float64"),
    Case("gpt", 4, HIERARCHICAL, override={**VARIED, "window": 4}, micro_batch=2),
    Case("llama", 2, Parallel(cp=2), SELECTIVE, EAGER, override={"window": 11}, dtype="float64"),
    Case("qwen3", 4, Parallel(cp=4, cp_method=EACH), override=ALTERNATE, documents=True),
    Case("llama", 4, Parallel(cp=2, dp_shard=2), override=ALTERNATE, recompute=SELECTIVE),
    Case("llama", 4, Parallel(cp=2, tp=2), override=ALTERNATE, documents=True, loss_chunks=3),
    Case("llama", 4, Parallel(cp=2, pp=2, schedule=V), override=ALTERNATE, documents=True),
    Case("qwen3", 4, Parallel(cp=4), override={"sinks": True, "softcap": 1.0}, documents=True),
    Case("llama", 4, Parallel(tp=2, pp=2, schedule=V), override=VARIED, compile=EAGER),
    # activations in host memory
    *[
        Case("llama", 2, Parallel(dp_shard=2), offloaded(mode), compile)
        for mode, compile in (
            ("none", Compile()),
            ("none", EAGER),
            ("full", EAGER),
            ("attention", Compile()),
            ("selective", Compile()),
            ("selective", EAGER),
        )
    ],
    *[
        Case(
            "llama",
            4,
            Parallel(pp=2, dp_shard=2, schedule=schedule),
            offloaded(mode),
            compile,
        )
        for schedule, mode, compile in (
            ("1F1B", "none", EAGER),
            ("1F1B", "selective", Compile()),
            (V, "full", Compile()),
            (V, "selective", EAGER),
        )
    ],
    Case("gpt", 2, Parallel(pp=2, schedule="GPipe"), Recompute(offload=True), override=DROPPED),
    Case("qwen3", 2, Parallel(tp=2), Recompute(mode="selective", offload=True)),
    # gradients that are sent as they are and summed where they arrive
    Case("llama", 4, Parallel(zero=2, reduce_by=EXCHANGED), sequences=8),
    Case(
        "gpt", 4, Parallel(dp_replicate=2, reduce="micro_batch", reduce_by=EXCHANGED), override=TIED
    ),
    Case("qwen3", 4, Parallel(pp=2, cp=2, reduce_by=EXCHANGED), dtype="float64"),
    # parameters, and gradients too, copied out of each other's memory
    Case("llama", 4, Parallel(copy_engines=True), micro_batch=2),
    Case("qwen3", 4, Parallel(zero=2, copy_engines=True, reduce_by=EXCHANGED), sequences=8),
    Case(
        "gpt",
        4,
        Parallel(dp_replicate=2, reduce="micro_batch", copy_engines=True, reduce_by=EXCHANGED),
        override=TIED,
    ),
    Case("llama", 4, Parallel(pp=2, schedule=LOOP, copy_engines=True), compile=EAGER),
    Case("mixtral", 4, Parallel(ep=2, copy_engines=True, reduce_by=EXCHANGED)),
    Case("mixtral", 4, Parallel(dp_replicate=2, zero=2, copy_engines=True)),
    # experts; balance losses are strong enough to show in gradients
    *EXPERT_CASES,
    *HYBRID_CASES,
    *PATTERN_CASES,
    *LOCAL_CASES,
    *OVERLAP_CASES,
    *ENCODER_CASES,
    *SPAN_CASES,
    # every axis at once
    Case("gpt", 8, Parallel(pp=2, tp=2, cp=2, schedule=V), override=DROPPED, documents=True),
    *[
        Case(model, 8, Parallel(pp=2, tp=2, dp_shard=2, schedule=V), override=TIED, sequences=8)
        for model in DENSE
    ],
]


GATHER = {"all_gather": True}
GATHERS = {**GATHER, "gather_inputs": True}
BLOCKS = {"ffn_dim": 208}
"""Two blocks of 128 x 128 and less; the first one's rows are on both of two ranks."""
BLOCK_0_FFN = ["blocks.0.ffn.*"]
HEAD8 = {"float8": {"output": True, "skip_first": 1}, "override": {"vocab_size": 64}}
TIED8 = {"float8": {"output": True}, "override": {"vocab_size": 64, "tied": True}}
EXPERTS8: dict[str, Any] = {
    "float8": {"experts": True},
    "override": {"expert_dim": 32, "ffn_dim": 0},
}
DEEP8: dict[str, Any] = {**EXPERTS8, "override": {**EXPERTS8["override"], "n_layers": 8}}
DELTA8 = {"delta_key_dim": 16, "delta_value_dim": 16}
HYBRID8 = {"float8": {"experts": True}, "override": {**EXPERTS8["override"], **DELTA8}}
PATTERN8 = {
    "n_layers": 5,
    "expert_dim": 32,
    "ffn_dim": 64,
    "mamba_head_dim": 8,
    "mamba_state_dim": 8,
}
SPANS8: dict[str, Any] = {"seq_len": 16, "micro_batch": 2, "override": {"encoder_layers": 1}}
LATENT_64: dict[str, Any] = {"override": LATENT8, "seq_len": 64}
SKIPPED = ["blocks.0.attn.wq", "blocks.1.ffn.down"]
PARTLY: dict[str, Any] = {
    "float8": {"skip": SKIPPED, "output": True},
    "override": {"vocab_size": 64},
    "micro_batch": 2,
}
WIDE_HEADS, ONE = {"head_dim": 32}, {"n_kv_heads": 1}
WIDE_GLOBAL = {"global_head_dim": 32}
FLOAT8 = [
    # one scale a tensor: equal in every layout
    float8("tensorwise", 4, Parallel(dp_replicate=2), recompute=FULL, micro_batch=2, sequences=8),
    float8("tensorwise", 2, Parallel(tp=2), "gpt", seq_len=16, recompute=FULL),
    float8("tensorwise", 2, Parallel(tp=2, sequence_parallel=False), **HEAD8),
    float8("tensorwise", 2, Parallel(cp=2), documents=True, compile=EAGER),
    float8("tensorwise", 4, Parallel(cp=2, tp=2), recompute=Recompute(mode="selective")),
    float8("tensorwise", 2, Parallel(pp=2, schedule=LOOP), "qwen3"),
    float8("tensorwise", 2, Parallel(tp=2), "qwen3_5", override=DELTA8),
    float8("rowwise", 2, Parallel(ep=2), "qwen3_5_moe", **HYBRID8, recompute=FULL),
    float8("tensorwise", 2, Parallel(tp=2), "nemotron_h", override=PATTERN8),
    float8("tensorwise", 2, Parallel(tp=2), "gemma3", override={"n_layers": 2}),
    float8("tensorwise", 2, Parallel(tp=2), "gemma4", override={"n_layers": 2} | WIDE_GLOBAL),
    float8("tensorwise", 2, Parallel(tp=2), "t5", **SPANS8),
    float8("rowwise_with_gw_hp", 2, Parallel(zero=1, **IN_MATMUL)),
    # ranks that share key/value heads
    float8("tensorwise", 4, Parallel(tp=4), override=WIDE_HEADS, recompute=SELECTIVE),
    float8("tensorwise", 2, Parallel(tp=2, async_tp=True), "qwen3", override=WIDE_HEADS | ONE),
    float8("tensorwise", 4, Parallel(cp=2, tp=2), **DELAYED, override=WIDE_HEADS | ONE),
    float8("tensorwise", 4, Parallel(tp=2), override=WIDE_HEADS | ONE, float8=GATHERS),
    float8("rowwise", 2, Parallel(tp=2), override=WIDE_HEADS | ONE, dtype="float32"),
    # scales of each chunk of a feed-forward, or of each token
    float8("tensorwise", 2, Parallel(tp=2), recompute=Recompute(ffn_chunks=2)),
    float8("rowwise", 2, Parallel(), recompute=Recompute(ffn_chunks=2), dtype="float32"),
    # scales of earlier steps
    float8("tensorwise", 2, Parallel(dp_replicate=2), **DELAYED, recompute=FULL, sequences=8),
    float8("tensorwise", 4, Parallel(cp=2, tp=2), **DELAYED, compile=EAGER),
    float8("tensorwise", 2, Parallel(pp=2, schedule=LOOP), "qwen3", **DELAYED),
    # weights and inputs that travel in float8
    float8("tensorwise", 4, Parallel(dp_replicate=2), float8=GATHER, steps=3),
    float8("blockwise", 4, Parallel(dp_replicate=2), float8=GATHER, override=BLOCKS, steps=3),
    float8("tensorwise", 2, Parallel(**JOINED), float8=GATHER, steps=3),
    # weights that one rank casts once per step
    float8("tensorwise", 1, Parallel(), float8=GATHER, steps=3),
    float8("tensorwise", 2, Parallel(tp=2), float8=GATHER, compile=EAGER),
    float8("blockwise", 2, Parallel(dp_replicate=2), float8=GATHER, override=BLOCKS),
    float8("blockwise", 4, Parallel(tp=2, zero=2), float8=GATHER, compile=EAGER, dtype="float32"),
    float8("tensorwise", 4, Parallel(tp=2), compile=EAGER, float8=GATHERS),
    float8("tensorwise", 4, Parallel(cp=2, tp=2, zero=2), recompute=FULL, float8=GATHERS),
    float8("tensorwise", 2, Parallel(tp=2), float8={"gather_inputs": True, "skip": BLOCK_0_FFN}),
    # products fused with their communication
    float8("tensorwise", 4, OVERLAPPED, float8=GATHER, micro_batch=2, sequences=8),
    float8("tensorwise", 4, Parallel(cp=2, tp=2, async_tp=True), "qwen3", recompute=FULL),
    float8("tensorwise", 2, Parallel(tp=2, async_tp=True), "gpt", seq_len=16, **DELAYED),
    float8("tensorwise", 2, Parallel(tp=2, async_tp=True), **PARTLY, recompute=SELECTIVE),
    float8("tensorwise", 4, V_OVERLAPPED, compile=EAGER),
    float8(
        "tensorwise",
        4,
        Parallel(pp=2, tp=2, schedule=DUAL, async_tp=True),
        "gpt",
        seq_len=16,
        **DELAYED,
    ),
    float8("tensorwise", 4, HEAD_OVERLAPPED, **HEAD8),
    float8("tensorwise", 2, Parallel(tp=2, async_tp=True), "mixtral", **EXPERTS8),
    # layers of a rank's own tokens
    float8("tensorwise", 2, Parallel(tp=2, async_tp=True), "deepseek_v3", override=LATENT8),
    float8("tensorwise", 4, V_OVERLAPPED, "deepseek_v3", override=LATENT8 | {"mtp": 1}),
    float8("tensorwise", 4, Parallel(cp=2, tp=2), "deepseek_v3", **DELAYED, **LATENT_64),
    # experts: a scale a row, wherever the row is
    float8("rowwise", 2, Parallel(ep=2), "mixtral", **EXPERTS8, recompute=FULL),
    float8("tensorwise", 4, Parallel(tp=2, ep=2), "mixtral", **EXPERTS8),
    float8("tensorwise", 4, Parallel(**HOSTS), "mixtral", **EXPERTS8),
    float8("rowwise", 2, Parallel(etp=2), "mixtral", **EXPERTS8, dtype="float32"),
    # two micro-batches at once
    float8("rowwise", 2, Parallel(**TOGETHER), "mixtral", **EXPERTS8, recompute=FULL, sequences=6),
    float8("tensorwise", 4, Parallel(**TOGETHER_V), "mixtral", **DEEP8, sequences=8),
    # weight gradients that a schedule defers
    float8("tensorwise", 2, Parallel(pp=2, schedule=V), compile=EAGER, documents=True),
    float8("tensorwise", 2, Parallel(pp=2, schedule=V), dtype="float32"),
    float8(
        "tensorwise",
        4,
        Parallel(pp=2, tp=2, schedule=BUBBLE),
        "gpt",
        seq_len=16,
        recompute=FULL,
    ),
    float8("tensorwise", 4, Parallel(pp=2, cp=2, schedule=DUAL), recompute=SELECTIVE),
    float8("tensorwise", 2, Parallel(pp=2, schedule=DUAL), **DELAYED, recompute=FULL),
    float8("tensorwise", 4, Parallel(pp=2, tp=2, schedule=V), **DELAYED, compile=EAGER),
    float8("tensorwise", 4, Parallel(pp=2, schedule=BUBBLE), float8=GATHER, steps=3),
    float8("tensorwise", 4, Parallel(pp=2, tp=2, schedule=DUAL), float8={"gather_inputs": True}),
    float8(
        "tensorwise",
        8,
        Parallel(pp=2, tp=2, dp_shard=2, schedule=V, reduce="micro_batch"),
        float8=GATHERS,
        recompute=FULL,
    ),
    float8("tensorwise", 4, Parallel(pp=2, tp=2, schedule=V), "gpt", seq_len=16, **TIED8),
    float8("rowwise", 2, Parallel(pp=2, schedule=V), "mixtral", **EXPERTS8, recompute=FULL),
    float8("tensorwise", 4, Parallel(pp=2, ep=2, schedule=BUBBLE), "mixtral", **EXPERTS8),
    float8("rowwise", 2, Parallel(pp=2, schedule=DUAL), "mixtral", **EXPERTS8, compile=EAGER),
    float8("rowwise", 2, Parallel(pp=2, schedule=BUBBLE), compile=EAGER),
    float8("rowwise_with_gw_hp", 2, Parallel(pp=2, schedule=V), compile=EAGER),
    float8("blockwise", 2, Parallel(pp=2, schedule=DUAL), recompute=FULL),
    float8("mxfp8", 4, Parallel(pp=2, tp=2, schedule=V), dtype="float32"),
    float8("tensorwise", 2, Parallel(pp=2, schedule="1F1B", defer_head=1), **HEAD8),
    float8("tensorwise", 4, Parallel(pp=2, tp=2, schedule="1F1B", defer_head=1, zero=1), **TIED8),
    float8("rowwise_with_gw_hp", 2, Parallel(pp=2, schedule="1F1B", defer_head=1), **HEAD8),
    # scales of rows and blocks: equal where no tensor is split, else as accurate
    float8("rowwise_with_gw_hp", 2, Parallel(zero=1)),
    float8("mxfp8", 4, Parallel(pp=2), recompute=FULL),
    float8("rowwise", 2, Parallel(tp=2), dtype="float32"),
    float8("blockwise", 4, Parallel(tp=2, cp=2), dtype="float32"),
]


# What the default run takes of all of these.


def settings(case: Case) -> set[Any]:
    """What a case tests: rows of the tables that users choose from, and compiled blocks."""
    found = {(table, row) for table, own in rows_of(case).items() for row in own}
    return found | ({("compiled", case.world > 1)} if case.compile.enable else set())


def representatives(cases: Sequence[Case]) -> set[str]:
    """Cases in which all settings occur: each time the one with most new ones for its cost; in the
    end those go whose settings the others have, the dearest first."""
    of_case = {str(case): settings(case) for case in cases}
    left = set().union(*of_case.values())
    chosen: list[Case] = []
    while left:
        best = max(cases, key=lambda case: len(of_case[str(case)] & left) / cost(case))
        left -= of_case[str(best)]
        chosen.append(best)
    for case in sorted(chosen, key=cost, reverse=True):
        others = [other for other in chosen if other is not case]
        if of_case[str(case)] <= set().union(*(of_case[str(other)] for other in others)):
            chosen = others
    return {str(case) for case in chosen}


PAIRED = [
    *map(case_of, CHOICES),
    *map(expert_case_of, EXPERT_CHOICES),
    *map(packed_case_of, PACKED_CHOICES),
]
CARRIED = {"zero", "copy_engines", "async_tp", "reduce_by", "dispatcher", "defer_head", "schedule"}
"""Keys of [parallel] whose code holds something from one step to the next."""


def brief(case: Case) -> Case:
    """One step where a second one only repeats the first."""
    carries = CARRIED & case.parallel.model_fields_set or case.recompute.offload
    plain = not case.compile.enable and case.optimizer == "sgd" and "mtp" not in case.override
    return case if carries or not plain or case.steps != 2 else replace(case, steps=1)


SHALLOW = [brief(shallow(case)) for case in SPECIAL]
ALL = [*PAIRED, *SHALLOW, *FLOAT8]
DEFAULT = representatives(ALL)


# What `-m full` takes: any two features that meet in a case meet in one of these.


def features(case: Case) -> set[str]:
    """The model, and what differs from the defaults: a key, and its value if that is a name."""
    found = {case.model, *(case.override.keys() - {"n_layers", "vocab_size"})}
    for section in (case.parallel, case.recompute, case.compile, case.float8):
        for key, value in section.model_dump(exclude_defaults=True).items():
            found.add(f"{key}={value}" if isinstance(value, str) else key)
    for key in ("loss_chunks", "documents", "padded", "packing", "optimizer"):
        value = getattr(case, key)
        if value != Case.__dataclass_fields__[key].default:
            found.add(f"{key}={value}" if isinstance(value, str) else key)
    return found


def meetings(case: Case) -> set[tuple[str, str]]:
    """Each two features of a case."""
    return set(itertools.combinations_with_replacement(sorted(features(case)), 2))


def covering(cases: Sequence[Case], taken: Sequence[Case]) -> set[str]:
    """Cases in which any two features meet that meet in some case and in none that is taken: the
    cheapest first, without those whose pairs the others have."""
    met = set().union(*map(meetings, taken))
    new = {str(case): meetings(case) - met for case in cases}
    times = Counter[tuple[str, str]]()
    chosen = []
    for case in sorted(cases, key=cost):
        if any(not times[pair] for pair in new[str(case)]):
            chosen.append(case)
            times.update(new[str(case)])
    for case in sorted(chosen, key=cost, reverse=True):
        if all(times[pair] > 1 for pair in new[str(case)]):
            chosen.remove(case)
            times.subtract(new[str(case)])
    return {str(case) for case in chosen}


TAKEN = [case for case in ALL if case in PAIRED or str(case) in DEFAULT]
SELECTED = {str(case) for case in TAKEN} | covering([*SHALLOW, *FLOAT8], TAKEN)


def marks(case: Case) -> list[pytest.MarkDecorator]:
    """Which run takes a case: the default one, `-m full` or `-m matrix`."""
    if str(case) in DEFAULT:
        return []
    return [pytest.mark.full if str(case) in SELECTED else pytest.mark.matrix]


def rows(cases: Sequence[Case]) -> list[Any]:
    """Parameters of a test, by ranks, so that cases that share processes follow each other."""
    ordered = sorted(cases, key=lambda case: case.world)
    return [pytest.param(case, marks=marks(case)) for case in ordered]


@pytest.mark.parametrize(
    ("axes", "choices", "make"),
    [
        (AXES, CHOICES, case_of),
        (EXPERT_AXES, EXPERT_CHOICES, expert_case_of),
        (PACKED_AXES, PACKED_CHOICES, packed_case_of),
    ],
    ids=["dense", "experts", "packed"],
)
def test_any_two_settings_meet(
    axes: Axes, choices: list[Choice], make: Callable[[Choice], Case]
) -> None:
    assert set().union(*map(pairs, choices)) == all_pairs(axes)
    assert not [str(make(choice)) for choice in choices if make(choice).refusal()]


@pytest.fixture(scope="module")
def batches(request: pytest.FixtureRequest) -> Batches:
    """The cases of all tests that were selected."""
    return Batches(selected(request))


@pytest.mark.parametrize("case", rows(PAIRED), ids=str)
def test_settings_together_equal_one_process(case: Case, batches: Batches) -> None:
    assert not batches.outcome(case).wrong(case)


@pytest.mark.parametrize("case", rows(SHALLOW), ids=str)
def test_special_case_equals_one_process(case: Case, batches: Batches) -> None:
    assert not batches.outcome(case).wrong(case)


@pytest.mark.parametrize("case", rows(FLOAT8), ids=str)
def test_float8_equals_one_process(case: Case, batches: Batches) -> None:
    assert not batches.outcome(case).wrong(case)


def test_schedule_of_ones_own_equals_one_process(tmp_path: Path) -> None:
    """GPipe with its backwards in reverse order."""
    order = [
        [*forwards, *reversed(backwards)]
        for forwards, backwards in (
            ([a for a in row if a.kind is kind] for kind in (Kind.FORWARD, Kind.BACKWARD))
            for row in order_of("GPipe", 2, 1, 4)
        )
    ]
    path = tmp_path / "reversed.csv"
    path.write_text(write_csv(tuple(map(tuple, order))))
    check(Case("qwen3", 4, Parallel(pp=2, schedule=str(path))))
