"""Which layouts of which models are compared on 1, 2 and 4 GPUs, as tables; see gpu_parity.py."""

import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from dtron.config import Compile, Float8, Parallel, Recompute
from dtron.float8 import RECIPES
from dtron.models import MODELS
from dtron.parallelisms.pipeline.schedules import SCHEDULES
from tests.parallelisms.parity import (
    DELTA,
    FULL,
    LIMITED,
    MIXTURES,
    MTP,
    SELECTIVE,
    SIZES,
    Case,
)

Keys = dict[str, Any]
WORLDS = (1, 2, 4)
V = "ZBVZeroBubble"
COMPILED = Compile(enable=True)


@dataclass(frozen=True)
class Row:
    """A line of a table: one layout, and its case for each model that has one."""

    label: str
    cases: Mapping[str, Case]


def row(
    world: int,
    parallel: Keys | None = None,
    models: Iterable[str] = MODELS,
    label: str = "",
    sizes: Mapping[str, Keys] | None = None,
    **keys: Any,
) -> Row:
    """Cases of one layout; models whose settings refuse it have none.

    Args:
        parallel: keys of [parallel]; dp_shard is 1 where it is not among them.
        label: default: the keys.
        sizes: fields of the models' configs; default: those of `parity.SIZES`, with 3 layers
            outside of pipelines.
        keys: of Case.
    """
    layout = Parallel(**{"dp_shard": 1, **(parallel or {})})
    cases = {}
    for model in models:
        override = {**(shallow(model, layout) if sizes is None else sizes[model])}
        override |= keys.get("override", {})
        case = Case(model, world, layout, **{**keys, "override": override})
        if not case.refusal():
            cases[model] = case
    return Row(label or label_of(world, parallel or {}, keys), cases)


def shallow(model: str, parallel: Parallel) -> Keys:
    """A first, a middle and a last layer of each kind; in pipelines the layers of SIZES."""
    if parallel.pp > 1 or "layer_pattern" in SIZES[model]:
        return {}
    return {"n_layers": 3 + SIZES[model].get("first_dense_layers", 0)}


def label_of(world: int, parallel: Keys, keys: Keys) -> str:
    """Keys of the layout, and what else differs from the defaults."""
    shown = [f"{key} {value}" for key, value in parallel.items()]
    for key, value in keys.items():
        if key == "recompute":
            shown.append(f"recompute {value.mode}{' offloaded' if value.offload else ''}")
        elif key == "override":
            shown += [f"{name} {each}" for name, each in value.items()]
        elif key not in ("dtype", "compile", "float8", "sequences"):
            shown.append(f"{key} {value}")
    if keys.get("dtype") == "float64":
        shown.append("float64")
    return ", ".join(shown) or f"{world} GPU{'s' if world > 1 else ''}"


# -- float32: every model -------------------------------------------------------------------------

VARIED: Keys = {"window": 5, "softcap": 1.0, "sinks": True}
TIED_DROPPED: Keys = {"tied": True, "dropout": 0.1, "attention_dropout": 0.1}
EXCHANGED: Keys = {"reduce_by": "all_to_all"}
COPIED: Keys = {"copy_engines": True}
EP2: Keys = {"dp_shard": 2, "ep": 2}
SYMMETRIC: Keys = {"dispatcher": "symmetric_memory"}
HOSTS: Keys = {"dispatcher": "hierarchical", "ep_inner": 1}
TOGETHER: Keys = {"zero": 1, "overlap_micro_batches": True}
METHODS = ("ring", "all_gather", "ulysses")
OFFLOADED = Recompute(mode="selective", offload=True)

FLOAT32: dict[int, list[Row]] = {
    1: [
        row(1),
        row(1, recompute=FULL),
        row(1, recompute=SELECTIVE, documents=True),
    ],
    2: [
        row(2, {"dp_shard": 2}),
        row(2, {"dp_shard": 2, "zero": 2}),
        row(2, {"dp_shard": 2, "zero": 1}),
        row(2, {"dp_replicate": 2}),
        row(2, {"tp": 2}),
        *[row(2, {"cp": 2, "cp_method": method}) for method in METHODS],
        *[row(2, {"pp": 2, "schedule": name}) for name in ("1F1B", "Interleaved1F1B", V)],
        row(2, EP2, MIXTURES),
        row(2, {**EP2, **SYMMETRIC}, MIXTURES),
        row(2, {**EP2, "dispatcher": "bounded_all_to_all"}, MIXTURES),
        row(2, {**EP2, **HOSTS}, MIXTURES),
        row(2, {"tp": 2, "ep": 2}, MIXTURES),
        row(2, {"dp_shard": 2, "etp": 2}, MIXTURES),
        row(2, {"dp_shard": 2, "etp": 2, **SYMMETRIC}, ["mixtral"]),
        row(2, {"tp": 2}, dtype="float64"),
        # settings, on one model each
        *[
            row(2, {"pp": 2, "schedule": name}, ["llama"])
            for name in SCHEDULES
            if name not in ("1F1B", "Interleaved1F1B", V)
        ],
        row(2, {"tp": 2, "sequence_parallel": False}, ["llama"]),
        row(2, {"tp": 2, "async_tp": True}, ["llama", "mixtral", "deepseek_v3"]),
        row(2, {"tp": 2, "ep": 2, "async_tp": True}, ["mixtral"]),
        row(2, {"dp_shard": 2, "zero": 2, **EXCHANGED}, ["qwen3"]),
        row(2, {"dp_shard": 2, **COPIED}, ["llama"]),
        row(2, {"dp_shard": 2, "zero": 2, **COPIED, **EXCHANGED}, ["qwen3"]),
        row(2, {**EP2, **COPIED, **EXCHANGED}, ["mixtral"]),
        row(2, {"tp": 2}, ["llama"], loss_chunks=5),
        row(2, {"dp_shard": 2}, ["llama"], recompute=FULL),
        row(2, {"dp_shard": 2}, ["llama"], recompute=OFFLOADED),
        row(2, {"pp": 2, "schedule": "1F1B"}, ["qwen3"], recompute=OFFLOADED),
        row(2, {"cp": 2, "cp_method": "ring"}, ["qwen3"], documents=True),
        row(
            2,
            {"cp": 2, "cp_method": "ulysses"},
            ["llama"],
            "cp 2, cp_method ulysses, documents, window, softcap, sinks",
            override=VARIED,
            documents=True,
        ),
        row(
            2,
            {"pp": 2, "schedule": V},
            ["gpt"],
            f"pp 2, schedule {V}, tied, dropout",
            override=TIED_DROPPED,
        ),
        row(2, EP2, ["mixtral"], override=LIMITED),
        # from the second step on, in two streams
        row(2, {**EP2, **TOGETHER}, MIXTURES, sequences=6, steps=3),
        row(2, {**EP2, **TOGETHER, **SYMMETRIC}, ["deepseek_v3"], sequences=6, steps=3),
        row(2, {**EP2, **TOGETHER}, ["mixtral"], recompute=FULL, sequences=6, steps=3),
        row(2, {"pp": 2, "schedule": V}, ["deepseek_v3"], override=MTP, sequences=4),
        row(2, {"tp": 2, "ep": 2}, ["qwen3_5_moe"], "tp 2, ep 2, mtp", override={"mtp": 1}),
    ],
    4: [
        row(4, {"dp_replicate": 2, "dp_shard": 2}),
        row(4, {"dp_shard": 2, "tp": 2}),
        row(4, {"dp_shard": 2, "cp": 2, "cp_method": "all_gather"}),
        row(4, {"cp": 2, "cp_method": "all_gather", "tp": 2}),
        row(4, {"cp": 4, "cp_method": "hierarchical"}),
        row(4, {"pp": 2, "schedule": "1F1B", "dp_shard": 2}),
        row(4, {"pp": 2, "schedule": V, "tp": 2}),
        row(4, {"pp": 2, "schedule": V, "cp": 2, "cp_method": "all_gather"}),
        row(4, {"dp_shard": 4, "ep": 2}, MIXTURES),
        row(4, {"dp_shard": 4, "ep": 4, **SYMMETRIC}, MIXTURES),
        row(4, {"dp_shard": 4, "ep": 2, "etp": 2}, MIXTURES),
        row(4, {"tp": 2, "dp_shard": 2, "ep": 2, **SYMMETRIC}, MIXTURES),
        row(4, {"pp": 2, "schedule": V, "dp_shard": 2, "ep": 2}, MIXTURES),
        row(4, {"cp": 2, "cp_method": "all_gather", "tp": 2, "ep": 2}, MIXTURES),
        row(
            4,
            {**TOGETHER, "pp": 2, "schedule": "DualPipeV", "dp_shard": 2, "ep": 2},
            MIXTURES,
            override={"n_layers": 8},
            steps=3,
        ),
    ],
}

# -- bfloat16: widths that every kernel takes -----------------------------------------------------

WIDE: Keys = {
    **{"dim": 64, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 128},
    **{"vocab_size": 128, "n_layers": 4},
}
# Experts in turn: of scores that rounding decides between, others would be chosen.
WIDE_EXPERTS: Keys = {**WIDE, "ffn_dim": 0, "expert_dim": 32, "force_balance": True}
LATENT: Keys = {
    **{"n_kv_heads": 4, "ffn_dim": 128, "first_dense_layers": 1, "head_dim": 0},
    **{"kv_lora_rank": 16, "q_lora_rank": 16, "nope_head_dim": 16, "rope_head_dim": 8},
    **{"v_head_dim": 16},
}
WIDTHS: dict[str, Keys] = {
    "llama": WIDE,
    "qwen3": WIDE,
    "qwen3_5": {**WIDE, **DELTA, "delta_key_dim": 16, "delta_value_dim": 16},
    "gemma3": {
        **{**WIDE, "window": 20, "full_attention_every": 2, "rope_local_theta": 50.0},
        **{"query_pre_attn_scalar": 12, "logit_softcap": 3.0},
    },
    "gemma4": {
        **{**WIDE, "window": 20, "full_attention_every": 2, "rope_local_theta": 50.0},
        **{"global_head_dim": 32, "global_kv_heads": 1, "logit_softcap": 3.0},
    },
    "gpt": {**WIDE, "n_kv_heads": 4, "max_seq_len": 64},
    "bert": {**WIDE, "n_kv_heads": 4, "max_seq_len": 64},
    "t5": {**WIDE, "n_kv_heads": 4, "encoder_layers": 2},
    "mixtral": WIDE_EXPERTS,
    "qwen3_moe": WIDE_EXPERTS,
    "qwen3_5_moe": {**WIDE_EXPERTS, **DELTA, "delta_key_dim": 16, "delta_value_dim": 16},
    "deepseek_v3": {**WIDE_EXPERTS, **LATENT},
    "gpt_oss": {**WIDE_EXPERTS, "window": 20},
    "nemotron_h": {
        **{**WIDE_EXPERTS, "ffn_dim": 128, "layer_pattern": "ME*-"},
        **{"mamba_heads": 8, "mamba_groups": 4, "mamba_head_dim": 16, "mamba_state_dim": 16},
    },
    "llava": {**WIDE, "vision_dim": 64, "vision_ffn_dim": 128},
}


def narrow(world: int, parallel: Keys, models: Iterable[str] = MODELS, **keys: Any) -> Row:
    """A row in bfloat16."""
    given = {"dtype": "bfloat16", "seq_len": 64, "sequences": 4, **keys}
    label = label_of(world, parallel, {})
    return row(world, parallel, models, label, WIDTHS, **given)


BFLOAT16: dict[int, list[Row]] = {
    2: [
        narrow(2, {"dp_shard": 2}),
        narrow(2, {"tp": 2}),
        narrow(2, {"cp": 2, "cp_method": "ring"}),
        narrow(2, {"cp": 2, "cp_method": "all_gather"}),
        narrow(2, {"pp": 2, "schedule": V}),
        narrow(2, EP2, MIXTURES),
        narrow(2, {**EP2, **SYMMETRIC}, MIXTURES),
    ],
    4: [
        narrow(4, {"dp_shard": 2, "tp": 2}),
        narrow(4, {"pp": 2, "schedule": V, "tp": 2}),
        narrow(4, {"tp": 2, "dp_shard": 2, "ep": 2, **SYMMETRIC}, MIXTURES),
        narrow(4, {"dp_shard": 4, "ep": 4, **HOSTS, "ep_inner": 2}, MIXTURES),
    ],
}
BFLOAT16_COMPILED: dict[int, list[Row]] = {
    2: [
        narrow(2, {"dp_shard": 2}, compile=COMPILED),
        narrow(2, {"tp": 2}, ["llama"], compile=COMPILED),
        narrow(2, {"cp": 2, "cp_method": "ring"}, ["llama"], compile=COMPILED),
        narrow(2, {"pp": 2, "schedule": V}, ["llama"], compile=COMPILED),
        narrow(2, EP2, ["mixtral"], compile=COMPILED),
        narrow(2, {**EP2, **SYMMETRIC}, ["mixtral"], compile=COMPILED),
        narrow(2, {**EP2, "dispatcher": "bounded_all_to_all"}, ["mixtral"], compile=COMPILED),
        narrow(2, {**EP2, **HOSTS}, ["mixtral"], compile=COMPILED),
    ],
}

# -- float8: every recipe -------------------------------------------------------------------------

BLOCKS: Keys = {**WIDE, "dim": 256, "n_kv_heads": 4, "head_dim": 64, "ffn_dim": 512}
"""Multiples of 128 on each of two ranks."""


def eight(world: int, recipe: str, parallel: Keys, model: str = "llama", **float8: Any) -> Row:
    """A row in bfloat16 with float8."""
    sizes = BLOCKS if recipe == "blockwise" else WIDTHS[model]
    settings = Float8(recipe=recipe, **float8)  # type: ignore[arg-type]
    label = f"{recipe}: {label_of(world, parallel, float8)}"
    keys: Keys = {"dtype": "bfloat16", "sequences": 4, "float8": settings}
    keys["seq_len"] = 256 if recipe == "blockwise" else 64
    return row(world, parallel, [model], label, {model: {**sizes, "n_layers": 2}}, **keys)


FLOAT8: dict[int, list[Row]] = {
    1: [eight(1, recipe, {}) for recipe in RECIPES],
    2: [
        *[eight(2, recipe, {"dp_shard": 2}) for recipe in RECIPES],
        *[eight(2, recipe, {"tp": 2}) for recipe in RECIPES],
        eight(2, "tensorwise", {"cp": 2, "cp_method": "all_gather"}),
        *[eight(2, r, {"dp_shard": 2}, all_gather=True) for r in ("tensorwise", "blockwise")],
        eight(2, "tensorwise", {"tp": 2}, gather_inputs=True),
        eight(2, "tensorwise", {"tp": 2, "async_tp": True}),
        eight(2, "tensorwise", {"tp": 2}, scaling="delayed", amax_history=2),
        *[eight(2, recipe, {"pp": 2, "schedule": V}) for recipe in RECIPES],
        eight(2, "rowwise", EP2, "mixtral", experts=True),
        eight(2, "rowwise", {**EP2, **SYMMETRIC}, "mixtral", experts=True, dispatch=True),
    ],
}

TABLES: dict[str, dict[int, list[Row]]] = {
    "float32": FLOAT32,
    "bfloat16": BFLOAT16,
    "float8": FLOAT8,
    "bfloat16, compiled": BFLOAT16_COMPILED,
}
"""In the order in which they run."""


def cases_of(table: str, worlds: Iterable[int] = WORLDS) -> list[Case]:
    """All cases of a table, those of fewer ranks first."""
    rows = [each for world in worlds for each in TABLES[table].get(world, [])]
    return [case for each in rows for case in each.cases.values()]


@functools.cache
def _labels() -> dict[str, str]:
    of_worlds = [rows for worlds in TABLES.values() for rows in worlds.values()]
    return {
        str(case): each.label for rows in of_worlds for each in rows for case in each.cases.values()
    }


def name_of(case: Case) -> str:
    """Of a test: ranks, model, layout and form."""
    label = _labels()[str(case)].replace(", ", "-").replace(": ", "-").replace(" ", "=")
    form = "" if case.float8.recipe or case.dtype != "bfloat16" else "-bfloat16"
    form += "-compiled" if case.compile.enable else ""
    return f"{case.world}-{case.model}-{label}{form}"
