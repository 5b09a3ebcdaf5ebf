"""Random models in random layouts equal one process, or are refused: pytest --fuzz 40.

Sizes are odd on purpose: heads and layers that do not divide evenly, a padded vocabulary, 3 and 6
ranks, numbers of micro-batches that fit no round. They are compared in float64: among random models
are some whose gradients of a parameter cancel (of a bias of all keys, to 0), and what is left in
float32 is rounding. A draw is a pure function of its seed; what is refused is drawn again. The last
lines of a run say how many draws had each feature. Rows are from the three sources of a mixture.
"""

import math
import random
from typing import Any

import pytest

from dtron.config import Compile, Lora, Parallel, Recompute
from dtron.models import MODELS
from dtron.parallelisms.pipeline.schedules import SCHEDULES
from tests.parallelisms.parity import SIZES, Case, check

MOST_RANKS, TRIES = 8, 400
SEED, IN_FULL = 20261123, 12
"""Without --fuzz: the draws of `-m full`."""
YARN = {
    **{"rope_scaling": "yarn", "rope_scaling_factor": 4.0, "rope_original_context": 8},
    **{"rope_mscale": 1.0, "rope_mscale_all_dim": 1.0},
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    config = metafunc.config
    seed, n = config.option.fuzz_seed, config.option.fuzz
    seeds = [f"{seed}.{i}" for i in range(n)] or [f"{SEED}.{i}" for i in range(IN_FULL)]
    metafunc.parametrize("draw", seeds)


def test_random_layout_equals_one_process(draw: str, record_property: Any) -> None:
    case = draw_legal(draw)
    for feature in sorted(features(case)):
        record_property("feature", feature)
    check(case, seconds=300)


def draw_legal(seed: str) -> Case:
    """The first legal case of a seed, of the family that it draws."""
    model = random.Random(seed).choice(list(MODELS))
    for i in range(TRIES):
        case = draw_case(random.Random(f"{seed}.{i}"), model)
        if not case.refusal():
            return case
    raise AssertionError(f"none of {TRIES} draws of {seed} is legal")


def features(case: Case) -> set[str]:
    """What a draw has beside a dense model on one axis."""
    config, layout = case.resolved()
    parallel = case.parallel
    degrees = case.config().degrees(case.world) | {"ep": parallel.ep, "etp": parallel.etp}
    found = {axis for axis, ranks in degrees.items() if ranks > 1} | {case.model}
    more = {
        **{"experts": config.n_experts, "mtp": config.mtp, "window": config.window},
        **{"sinks": config.sinks, "soft cap": config.softcap, "tied": config.tied},
        **{"capacity": config.capacity_factor, "YaRN": config.rope_scaling == "yarn"},
        **{"balance": config.balance_coefficient, "dropout": config.dropout},
        **{"latent": config.kv_lora_rank, "bias": config.bias},
        **{"gated delta nets": config.delta_key_heads},
        **{"post-norms": config.sandwich_norms, "local rope": config.rope_local_theta},
        **{"scaled embeddings": config.scale_embeddings, "logit cap": config.logit_softcap},
        **{"shared heads": parallel.tp > config.n_kv_heads},
        **{"chunks": case.loss_chunks > 1, "offload": case.recompute.offload},
        **{"documents": case.documents, "padding": case.padded},
        **{"AdamW": case.optimizer == "adamw", "compile": case.compile.enable},
        **{"Muon": case.optimizer == "muon", "LoRA": case.lora.rank},
        **{"DoRA": case.lora.dora},
        **{"narrow moments": case.optimizer == "narrow_adamw"},
        **{"recompute": case.recompute.mode != "none", "step reduction": parallel.reduce == "step"},
        "split backward": layout is not None and layout.splits_backward,
    }
    found |= {name for name, has in more.items() if has}
    found |= {f"packing {case.packing}"} if case.packing else set()
    return found | (set(parallel.cp_methods()) if parallel.cp > 1 else set())


def draw_case(random: random.Random, model: str) -> Case:
    """Sizes, a layout of at most 8 ranks, and settings of all kinds; it may be refused."""
    degrees = _draw_degrees(random)
    data_ranks = degrees["dp_replicate"] * degrees["dp_shard"]
    world = data_ranks * degrees["pp"] * degrees["tp"] * degrees["cp"]
    micro_batch = random.choice([1, 1, 2, 3])
    n_micro_batches = random.randint(degrees["pp"], 3 * degrees["pp"])
    seq_len = random.choice([7, 12, 16, 18, 24])
    if degrees["cp"] > 1:
        seq_len = 2 * degrees["cp"] * degrees["tp"] * random.choice([2, 3])
    compiled = random.random() < 0.06
    packed = random.random() < 0.5
    return Case(
        model,
        world=world,
        parallel=Parallel(**degrees, **_draw_parallel(random, model, degrees)),
        recompute=random.choice(
            [
                Recompute(),
                Recompute(mode="full"),
                Recompute(mode="attention"),
                Recompute(mode="selective", every=2),
                Recompute(offload=True),
            ]
        ),
        compile=Compile(enable=True, backend="aot_eager") if compiled else Compile(),
        override=_draw_model(random, model, seq_len),
        dtype="float64",
        sequences=n_micro_batches * data_ranks * micro_batch,
        micro_batch=micro_batch,
        loss_chunks=random.choice([1, 1, 1, 3]),
        seq_len=seq_len,
        documents=random.random() < 0.3,
        padded=not packed and random.random() < 0.4,
        packing=random.choice(["cut", "best_fit", "pad"]) if packed else "",
        # not Lion, which takes the signs of rounding errors
        optimizer=random.choice(["sgd", "adamw", "narrow_adamw", "muon"]),
        lora=_draw_lora(random, model),
    )


def _draw_lora(random: random.Random, model: str) -> Lora:
    if random.random() >= 0.15:
        return Lora()
    dense = not MODELS[model].sizes["debug"].n_experts  # experts have no magnitudes
    return Lora(rank=random.choice([2, 3]), dora=dense and random.random() < 0.5)


def _draw_degrees(random: random.Random) -> dict[str, int]:
    while True:
        degrees = {
            "pp": random.choice([1, 1, 2, 2, 3, 4]),
            "dp_replicate": random.choice([1, 1, 1, 2, 3]),
            "dp_shard": random.choice([1, 1, 2, 2, 3]),
            "cp": random.choice([1, 1, 1, 2, 2, 3, 4]),
            "tp": random.choice([1, 1, 2, 2, 3, 6]),
        }
        if math.prod(degrees.values()) <= MOST_RANKS:
            return degrees


def _draw_parallel(random: random.Random, model: str, degrees: dict[str, int]) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "zero": random.choice([1, 2, 3]),
        "reduce": random.choice(["auto", "step", "micro_batch"]),
        "prefetch": random.choice([0, 1, 3]),
    }
    if degrees["cp"] > 1:
        keys["cp_method"] = random.choice(["ring", "all_gather", "ulysses", "hierarchical"])
    if MODELS[model].sizes["debug"].n_experts:
        inside = degrees["dp_shard"] * degrees["cp"] * degrees["tp"]
        keys["ep"] = random.choice([n for n in (1, 2, 4) if inside % n == 0])
        keys["etp"] = random.choice([n for n in (1, 1, 2) if inside // keys["ep"] % n == 0])
        if keys["ep"] > 1:
            keys["dispatcher"] = random.choice(
                ["all_to_all", "symmetric_memory", "bounded_all_to_all", "hierarchical"]
            )
            if keys["dispatcher"] == "hierarchical":
                keys["ep_inner"] = random.choice([n for n in (1, 2) if n < keys["ep"]])
    elif degrees["tp"] > 1:
        keys["sequence_parallel"] = random.choice([True, False])
    if degrees["pp"] > 1:
        keys["schedule"] = random.choice(list(SCHEDULES))
        keys["stages_per_rank"] = random.choice([0, 0, 0, 0, 1, 2, 3])
    return keys


def _draw_model(random: random.Random, model: str, seq_len: int) -> dict[str, Any]:
    debug = MODELS[model].sizes["debug"]
    rotated = debug.positions == "rope"
    found: dict[str, Any] = {
        "vocab_size": random.choice([64, 67]),
        "tied": random.choice([True, False]),
        "dropout": random.choice([0.0, 0.0, 0.1]),
    }
    found |= _draw_mixture(random, model) if debug.n_experts else _draw_dense(random)
    if debug.delta_key_heads:
        found |= _draw_delta(random)
    found["mtp"] = random.choice([0, 0, 1, 2])
    if debug.delta_key_heads:
        found |= {"softcap": random.choice([0.0, 0.0, 1.0]), "sinks": random.random() < 0.25}
    elif not debug.kv_lora_rank:
        found |= {
            "window": random.choice([0, 0, 3, 5]),
            "softcap": random.choice([0.0, 0.0, 1.0]),
            "sinks": random.random() < 0.25,
        }
        found["full_attention_every"] = random.choice([0, 2]) if found["window"] else 0
    found |= {
        "sandwich_norms": debug.sandwich_norms ^ (random.random() < 0.3),
        "scale_embeddings": debug.scale_embeddings ^ (random.random() < 0.3),
        "logit_softcap": random.choice([0.0, 0.0, 3.0]),
        "query_pre_attn_scalar": random.choice([0, 0, 12]),
    }
    local = rotated and found.get("window") and random.random() < 0.5
    found["rope_local_theta"] = 50.0 if local else 0.0
    if any(found.get(key) for key in ("window", "softcap", "sinks")):
        found.pop("attention_dropout", None)  # no backend drops weights of these
    found |= YARN if rotated and random.random() < 0.3 else {}
    return found | ({"max_seq_len": seq_len} if not rotated else {})


def _draw_dense(random: random.Random) -> dict[str, Any]:
    return {
        "n_layers": random.randint(4, 9),
        "dim": 36,
        "n_heads": 6,
        "n_kv_heads": random.choice([6, 6, 3, 2, 1]),
        "head_dim": 0,
        "ffn_dim": random.choice([42, 42, 42, 45]),
        "attention_dropout": random.choice([0.0, 0.0, 0.1]),
        "qk_norm": random.choice([True, False]),
        "bias": random.choice([True, False]),
        "norm": random.choice(["rmsnorm", "layernorm"]),
        "norm_zero_centered": random.choice([True, False]),
        "activation": random.choice(["swiglu", "geglu", "gelu", "relu2"]),
    }


def _draw_delta(random: random.Random) -> dict[str, Any]:
    """Gated delta nets of six or twelve value heads, and what they do not go with turned off."""
    return {
        "head_dim": 8,
        "bias": False,
        "rope_fraction": random.choice([0.25, 0.5, 1.0]),
        "output_gate": random.choice([True, True, False]),
        "full_attention_every": random.choice([2, 2, 3, 4]),
        "delta_key_heads": 6,
        "delta_value_heads": random.choice([6, 12]),
        "delta_key_dim": random.choice([4, 5]),
        "delta_value_dim": random.choice([4, 6]),
        "delta_conv": random.choice([1, 2, 4]),
    }


def _draw_mixture(random: random.Random, model: str) -> dict[str, Any]:
    balance = random.choice(["none", "sequence", "micro_batch", "global_batch"])
    found: dict[str, Any] = {
        "n_layers": random.randint(3, 6),
        "balance": balance,
        "balance_coefficient": 0.0 if balance == "none" else 0.3,
        "z_loss": random.choice([0.0, 0.1]),
        "jitter": random.choice([0.0, 0.0, 0.1]),
        # the reference computes at once what ranks do, so that their capacity would be one
        "capacity_factor": random.choice([0.0, 0.0, 1.0, 1.5]) * (balance != "global_batch"),
    }
    found["capacity_pad"] = bool(found["capacity_factor"]) and random.random() < 0.3
    assert SIZES[model]["n_experts"]
    return found
