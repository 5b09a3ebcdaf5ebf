"""float8.filter = "auto": the layers that gain."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.float8 import RECIPES
from dtron.float8.auto_filter import LayerTimes, measure, table
from dtron.setup import float8_plan as precision
from dtron.setup.float8_plan import Float8Plan
from dtron.setup.rules import resolve
from tests.harness import run_ranks

FAST, SLOW = LayerTimes(plain=2e-3, float8=1e-3), LayerTimes(plain=1e-3, float8=2e-3)


def plan(world: int = 1, **keys: Any) -> Float8Plan:
    """Of a small llama: width 64, 4 heads of 16, 2 of them for keys, 128 hidden features."""
    config = RunConfig.load(
        "configs/quickstart.toml",
        [
            "model.size=debug",
            "model.override.dim=64",
            "model.override.n_heads=4",
            "model.override.n_kv_heads=2",
            "model.override.head_dim=16",
            "model.override.ffn_dim=128",
            "train.seq_len=64",
            "train.micro_batch=2",
            "compile.enable=true",
            "float8.recipe=tensorwise",
            "float8.filter=auto",
            *(f"{key.replace('__', '.')}={value}" for key, value in keys.items()),
        ],
    )
    found = resolve(config, world)[-1]
    assert found is not None
    return found


def test_shapes_are_those_that_a_rank_computes() -> None:
    shapes = plan().shapes
    assert shapes["blocks.0.attn.wq"] == (128, 64, 64)
    assert shapes["blocks.0.attn.wk"] == (128, 64, 32)
    assert shapes["blocks.0.ffn.down"] == (128, 128, 64)
    split = plan(world=2, parallel__tp=2).shapes
    assert split["blocks.0.attn.wq"] == (128, 64, 32)
    assert split["blocks.0.attn.wo"] == (128, 32, 64)
    assert split["blocks.0.ffn.up"] == (128, 64, 64)


def test_layers_that_gain_are_kept() -> None:
    whole = plan()
    times = {shape: FAST if shape[2] >= 64 else SLOW for shape in whole.shapes.values()}
    kept = whole.keep_faster_layers(times).layers
    assert "blocks.0.attn.wq" in kept
    assert "blocks.0.attn.wk" not in kept
    assert set(kept) < set(whole.layers)
    with pytest.raises(ConfigError, match="no layer is faster"):
        whole.keep_faster_layers(dict.fromkeys(times, SLOW))


def test_the_table_says_what_each_shape_takes() -> None:
    _, first, second = table({(128, 64, 32): SLOW, (128, 64, 64): FAST}).splitlines()
    assert first.split() == ["128", "x", "64", "x", "32", "1.000", "2.000", "train.dtype"]
    assert second.split() == ["128", "x", "64", "x", "64", "2.000", "1.000", "float8"]


def test_nothing_is_measured_where_products_are_emulated() -> None:
    whole = plan()
    given: Any = None  # no group is asked
    assert whole.measured(torch.device("cpu"), torch.bfloat16, given) is whole


def test_a_head_that_is_asked_for_is_kept() -> None:
    whole = plan(float8__output="true", model__override__vocab_size=272)
    times = {shape: FAST if shape[2] == 64 else SLOW for shape in whole.shapes.values()}
    assert "head" in whole.keep_faster_layers(times).layers


@pytest.mark.parametrize(
    "settings",
    [
        {"world": 2, "parallel__tp": 2, "float8__gather_inputs": "true"},
        {"compile__enable": "false"},
        {"debug__deterministic": "true"},
    ],
    ids=str,
)
def test_what_auto_cannot_go_with_is_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r'filter = "auto"'):
        plan(**settings)


def _measured(rank: int) -> tuple[str, ...]:
    whole = plan()

    def timed(shapes: Any, *_: Any) -> dict:
        assert rank == 0, "the first rank measures"
        return {shape: FAST if shape[2] == 64 else SLOW for shape in shapes}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(precision, "measure", timed)
        patch.setattr(precision, "why_emulated", lambda *_: "")
        group = dist.group.WORLD
        assert group is not None
        return whole.measured(torch.device("cpu"), torch.bfloat16, group).layers


def _on_rank() -> tuple[str, ...]:
    return _measured(dist.get_rank())


def test_ranks_agree() -> None:
    first, second = run_ranks(2, _on_rank)
    assert first == second
    assert 0 < len(first) < len(plan().layers)


@pytest.mark.gpu
def test_a_measurement_times_each_shape_and_leaves_random_numbers_alone() -> None:
    shapes, device = [(2048, 1024, 1024), (64, 64, 64)], torch.device("cuda")
    torch.cuda.manual_seed(0)
    before = torch.cuda.get_rng_state()
    times = measure([*shapes, shapes[0]], RECIPES["tensorwise"], torch.bfloat16, device)
    assert times.keys() == set(shapes)
    assert all(each.plain > 0 and each.float8 > 0 for each in times.values())
    assert torch.equal(torch.cuda.get_rng_state(), before)
