"""Random models in random layouts equal one process, or are refused: pytest --fuzz 40.

Sizes are odd on purpose: heads and layers that do not divide evenly, a padded vocabulary, 3 and 6
ranks, numbers of micro-batches that fit no round. They are compared in float64: among random models
are some whose gradients of a parameter cancel (of a bias of all keys, to 0), and what is left in
float32 is rounding. A draw is a pure function of the seed.
"""

import random
from typing import Any

import pytest

from dtron.config import Compile, Parallel, Recompute
from dtron.parallelisms.schedules import SCHEDULES
from tests.parallelisms.parity import DENSE, Case, check

MOST_RANKS = 8


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    seed, n = metafunc.config.option.fuzz_seed, metafunc.config.option.fuzz
    metafunc.parametrize("draw", [f"{seed}.{number}" for number in range(n)])


def test_random_layout_equals_one_process(draw: str) -> None:
    case = draw_case(random.Random(draw))
    if refusal := case.refusal():
        pytest.skip(f"{case} is refused: {refusal}")
    check(case)


def draw_case(random: random.Random) -> Case:
    """A model, a layout of at most 8 ranks, and settings of all kinds."""
    model = random.choice(DENSE)
    degrees = _draw_degrees(random)
    data_ranks = degrees["dp_replicate"] * degrees["dp_shard"]
    micro_batch = random.choice([1, 1, 2, 3])
    n_micro_batches = random.randint(degrees["pp"], 4 * degrees["pp"])
    seq_len = random.choice([7, 12, 16, 18])
    return Case(
        model,
        world=data_ranks * degrees["pp"] * degrees["tp"],
        parallel=Parallel(**degrees, **_draw_parallel(random, degrees)),
        recompute=random.choice(
            [
                Recompute(),
                Recompute(mode="full"),
                Recompute(mode="attention"),
                Recompute(mode="selective", every=2),
            ]
        ),
        compile=Compile(enable=True, backend="aot_eager") if random.random() < 0.15 else Compile(),
        override=_draw_model(random, seq_len),
        dtype="float64",
        sequences=n_micro_batches * data_ranks * micro_batch,
        micro_batch=micro_batch,
        seq_len=seq_len,
        documents=random.random() < 0.3,
    )


def _draw_degrees(random: random.Random) -> dict[str, int]:
    while True:
        degrees = {
            "pp": random.choice([1, 2, 2, 3, 4]),
            "dp_replicate": random.choice([1, 1, 2, 3]),
            "dp_shard": random.choice([1, 2, 2, 3]),
            "tp": random.choice([1, 2, 2, 3]),
        }
        ranks = degrees["pp"] * degrees["dp_replicate"] * degrees["dp_shard"] * degrees["tp"]
        if ranks <= MOST_RANKS:
            return degrees


def _draw_parallel(random: random.Random, degrees: dict[str, int]) -> dict[str, Any]:
    keys: dict[str, Any] = {
        "zero": random.choice([1, 2, 3]),
        "reduce": random.choice(["auto", "step", "micro_batch"]),
        "prefetch": random.choice([0, 1, 3]),
    }
    if degrees["tp"] > 1:
        keys["sequence_parallel"] = random.choice([True, False])
    if degrees["pp"] > 1:
        keys["schedule"] = random.choice(list(SCHEDULES))
        keys["stages_per_rank"] = random.choice([0, 0, 0, 0, 1, 2, 3])
    return keys


def _draw_model(random: random.Random, seq_len: int) -> dict[str, Any]:
    return {
        "n_layers": random.randint(4, 9),
        "vocab_size": random.choice([256, 257]),
        "dim": 36,
        "n_heads": 6,
        "n_kv_heads": random.choice([6, 6, 6, 3, 2]),
        "ffn_dim": random.choice([42, 42, 42, 45]),
        "max_seq_len": seq_len,
        "tied": random.choice([True, False]),
        "dropout": random.choice([0.0, 0.0, 0.1]),
        "attention_dropout": random.choice([0.0, 0.0, 0.1]),
        "qk_norm": random.choice([True, False]),
        "bias": random.choice([True, False]),
        "norm": random.choice(["rmsnorm", "layernorm"]),
        "norm_zero_centered": random.choice([True, False]),
        "activation": random.choice(["swiglu", "geglu", "gelu", "relu2"]),
    }
