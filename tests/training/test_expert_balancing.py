"""Runs of mixtures of experts through the Trainer: biases, figures, checkpoints, refusals."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.models import model_config
from dtron.setup.rules import check_layout
from tests.harness import run_ranks
from tests.training.test_trainer import contents, fit, name_of, rows, same_checkpoint, tiny

ROOT = Path(__file__).parents[2]
SMALL = {
    "model__name": "deepseek_v3",
    "model__override.n_layers": 3,
    "model__override.n_kv_heads": 4,
    "model__override.kv_lora_rank": 16,
    "model__override.q_lora_rank": 16,
    "model__override.nope_head_dim": 8,
    "model__override.rope_head_dim": 4,
    "model__override.v_head_dim": 8,
    "model__override.n_experts": 8,
    "model__override.experts_per_token": 2,
    "model__override.expert_dim": 16,
    "model__override.bias_speed": 0.02,
    "model__override.balance": "micro_batch",
    "model__override.balance_coefficient": 0.01,
    "model__override.z_loss": 0.001,
}
LAYOUTS: list[tuple[int, dict[str, Any]]] = [
    (2, {"parallel__dp_replicate": 2, "recompute__mode": "full"}),
    (2, {"parallel__pp": 2, "parallel__pp_layout": "Et|ttL"}),  # a stage without experts
    (2, {"parallel__tp": 2, "parallel__ep": 2}),
    (4, {"parallel__cp": 2, "parallel__ep": 2, "parallel__etp": 2}),
]


def biases(checkpoint: Path) -> dict[str, torch.Tensor]:
    held = contents(checkpoint).items()
    return {name.removeprefix("model."): x for name, x in held if name.endswith("expert_bias")}


@pytest.fixture(scope="module")
def one_process(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run of one process."""
    run_dir = tmp_path_factory.mktemp("alone") / "run"
    run_ranks(1, fit, tiny(run_dir, train__steps=3, **SMALL))
    return run_dir


@pytest.mark.parametrize(("world", "changes"), LAYOUTS, ids=name_of)
def test_every_layout_moves_the_biases_of_one_process(
    tmp_path: Path, world: int, changes: dict[str, Any], one_process: Path
) -> None:
    run_dir = tmp_path / "run"
    run_ranks(world, fit, tiny(run_dir, train__steps=3, **SMALL, **changes))
    for row, reference in zip(rows(run_dir), rows(one_process), strict=True):
        assert {"balance_loss", "z_loss", "max_expert_load"} <= row.keys()
        for key in ("loss", "grad_norm", "balance_loss", "z_loss", "max_expert_load"):
            assert row[key] == pytest.approx(reference[key], rel=1e-4), (row["step"], key)
    moved, first = (biases(path / "checkpoints/step-3") for path in (run_dir, one_process))
    assert sorted(moved) == [f"blocks.{layer}.ffn.router.expert_bias" for layer in (1, 2)]
    assert all(torch.equal(moved[name], first[name]) and first[name].any() for name in moved)


def test_resumed_run_equals_uninterrupted_bitwise(tmp_path: Path) -> None:
    whole, split = tmp_path / "whole", tmp_path / "split"
    predicting = {**SMALL, "model__override.mtp": 1}
    run_ranks(2, fit, tiny(whole, **predicting))
    run_ranks(2, fit, tiny(split, checkpoint__interval=3, checkpoint__last=False, **predicting))
    resume = {"checkpoint__resume": str(split / "checkpoints/step-3")}
    run_ranks(2, fit, tiny(split, **resume, **predicting))
    assert all(row["mtp_loss"] > 0 for row in rows(whole))
    assert [row["loss"] for row in rows(whole)] == [row["loss"] for row in rows(split)]
    assert same_checkpoint(whole / "checkpoints/step-6", split / "checkpoints/step-6")


@pytest.mark.matrix  # as test_checkpoints_walk_through_all_layouts
def test_a_mixture_walks_through_all_layouts(tmp_path: Path) -> None:
    """Two steps in each layout, by checkpoints; moments, biases, data and counters come along."""
    common = {**SMALL, "train__steps": 8, "train__micro_batch": 1}
    common |= {"optim__name": "adamw", "optim__lr": 1e-3}
    walk: list[tuple[int, dict[str, Any]]] = [
        (4, {"parallel__tp": 2}),
        (4, {"checkpoint__mode": "async"}),
        (4, {"parallel__pp": 2, "parallel__cp": 2}),
        (4, {"parallel__ep": 4}),
    ]
    saves = {"checkpoint__interval": 2, "checkpoint__keep": 0, "checkpoint__last": False}
    run_ranks(1, fit, tiny(tmp_path / "whole", **common, **saves))
    wanted, resume = rows(tmp_path / "whole"), {}
    for i, (world, changes) in enumerate(walk):
        run_dir, step = tmp_path / str(i), 2 * (i + 1)
        run_ranks(world, fit, tiny(run_dir, **common, **saves, **changes, **resume))
        resume = {"checkpoint__resume": str(run_dir / f"checkpoints/step-{step}")}
        found = {row["step"]: row for row in rows(run_dir)}
        for row in wanted[step - 2 : step]:
            for key in ("loss", "grad_norm", "lr", "tokens", "max_expert_load"):
                assert found[row["step"]][key] == pytest.approx(row[key], rel=1e-4), (i, key)
        folder = f"checkpoints/step-{step}"
        moved, first = biases(run_dir / folder), biases(tmp_path / "whole" / folder)
        assert all(torch.equal(moved[name], first[name]) for name in first)


ADAMW: dict[str, Any] = {"optim__name": "adamw", "optim__lr": 1e-3}
OTHERS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (4, {"parallel__ep": 4}),
    (4, {"parallel__dp_replicate": 2, "parallel__ep": 2}),
]


@pytest.fixture(scope="module")
def split_experts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run with 2 x 2 ranks of experts, and a checkpoint half-way."""
    run_dir = tmp_path_factory.mktemp("split") / "run"
    split = {"parallel__tp": 2, "parallel__ep": 2, "parallel__etp": 2}
    half = {"checkpoint__interval": 3, "checkpoint__last": False}
    run_ranks(4, fit, tiny(run_dir, **split, **half, **ADAMW, **SMALL))
    return run_dir


@pytest.mark.parametrize(("world", "changes"), OTHERS, ids=name_of)
def test_checkpoint_loads_under_other_experts(
    tmp_path: Path, world: int, changes: dict[str, Any], split_experts: Path
) -> None:
    """Parameters, moments and biases of 2 x 2 ranks of experts go on over 4, and on one process."""
    saved = {"checkpoint__resume": str(split_experts / "checkpoints/step-3")}
    run_ranks(world, fit, tiny(tmp_path / "run", **saved, **changes, **ADAMW, **SMALL))
    found, wanted = rows(tmp_path / "run"), rows(split_experts)[3:]
    assert [row["step"] for row in found] == [row["step"] for row in wanted]
    for row, reference in zip(found, wanted, strict=True):
        for key in ("loss", "grad_norm", "max_expert_load"):
            assert row[key] == pytest.approx(reference[key], rel=1e-4), (row["step"], key)


@pytest.mark.parametrize(
    ("name", "override", "parallel", "message"),
    [
        (
            "mixtral",
            {},
            {"tp": 2, "dp_shard": 1, "sequence_parallel": False},
            "parallel.sequence_parallel = false with parallel.tp = 2 and experts: each tp rank "
            "routes its own shard of the tokens; use true",
        ),
        ("llama", {}, {"ep": 2}, "parallel.ep = 2 has no effect without model.override.n_experts"),
        (
            "mixtral",
            {"n_experts": 5},
            {"ep": 2},
            "parallel.ep = 2 does not divide model.n_experts = 5; use 1",
        ),
        (
            "gpt_oss",
            {"expert_dim": 63},
            {"etp": 2},
            "parallel.etp = 2 does not divide model.expert_dim = 63; use 1",
        ),
        (
            "mixtral",
            {},
            {"ep": 4},
            "parallel.ep = 4 x parallel.etp = 1 does not divide the 2 ranks of dp_shard x cp x tp; "
            "use parallel.ep = 1, 2",
        ),
    ],
)
def test_layouts_that_experts_cannot_have(
    name: str, override: dict, parallel: dict, message: str
) -> None:
    run = RunConfig.of(
        {
            "model": {"name": name, "override": override},
            "parallel": parallel,
            "train": {"global_batch": 8, "seq_len": 64},
        }
    )
    with pytest.raises(ConfigError) as error:
        check_layout(run, 2)
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (
            {"train": {"seq_len": 4}, "model": {"name": "deepseek_v3", "override": {"mtp": 4}}},
            "model.override.mtp = 4 predicts tokens beyond train.seq_len = 4; use a smaller mtp",
        ),
        (
            {"parallel": {"pp": 2, "pp_layout": "Ettttm|L"}},
            "parallel.pp_layout = 'Ettttm|L' has m in another stage than L",
        ),
    ],
)
def test_predictions_that_cannot_be_made(values: dict, message: str) -> None:
    model = {"name": "deepseek_v3", "override": {"mtp": 1}}
    with pytest.raises(ConfigError) as error:
        check_layout(RunConfig.of({"model": model, **values}), 2)
    assert str(error.value).startswith(message)


def test_float8_of_layers_that_see_too_few_tokens_is_refused() -> None:
    """Latent attention's narrow products, under tp; without them it works."""
    values = {
        "model": {"name": "deepseek_v3", "override": {"expert_dim": 64}},
        "parallel": {"tp": 2, "dp_shard": 1},
        "train": {"seq_len": 16},
        "float8": {"recipe": "tensorwise"},
    }
    with pytest.raises(ConfigError) as error:
        check_layout(RunConfig.of(values), 2)
    assert str(error.value) == (
        "parallel.tp = 2 leaves blocks.0.attn.wq_a 8 of the 16 tokens of a micro-batch, and "
        "float8 needs multiples of 16; raise train.seq_len or train.micro_batch, or name the layer "
        "in float8.skip"
    )
    values["float8"]["skip"] = [f"blocks.*.attn.{name}" for name in ("wq_a", "wkv_a")]
    check_layout(RunConfig.of(values), 2)


RULES: list[tuple[str, dict[str, Any], str]] = [
    ("llama", {"experts_per_token": 2}, "has no effect with n_experts = 0; use 0 or set n_experts"),
    ("llama", {"jitter": 0.1}, "jitter = 0.1 has no effect with n_experts = 0; use 0.0 or set"),
    ("mixtral", {"mtp_coefficient": 0.1}, "mtp_coefficient = 0.1 has no effect with mtp = 0"),
    ("llama", {"z_loss": 0.1}, "z_loss = 0.1 has no effect with n_experts = 0; use 0.0 or set"),
    ("llama", {"ffn_dim": 0}, "ffn_dim = 0 needs experts; use a hidden width such as 512"),
    ("llama", {"v_head_dim": 8}, "v_head_dim = 8 has no effect with kv_lora_rank = 0"),
    ("llama", {"full_attention_every": 2}, "has no effect without a window"),
    ("gpt_oss", {"full_attention_every": 1}, "leaves no layer with a window"),
    (
        "mixtral",
        {"experts_per_token": 9},
        "experts_per_token = 9 is not between 1 and n_experts = 8; use 1 to 8",
    ),
    ("mixtral", {"expert_dim": 0}, "expert_dim = 0 conflicts with n_experts = 8"),
    ("mixtral", {"ffn_dim": 64}, "ffn_dim = 64 has no effect if all layers have experts; use 0"),
    (
        "mixtral",
        {"first_dense_layers": 4, "ffn_dim": 8},
        "first_dense_layers = 4 leaves no experts in n_layers = 4; use at most 3",
    ),
    ("mixtral", {"first_dense_layers": 1}, "ffn_dim = 0 conflicts with first_dense_layers = 1"),
    ("mixtral", {"balance": "none"}, 'balance_coefficient = 0.02 with balance = "none"'),
    ("mixtral", {"balance_coefficient": 0.0}, "balance_coefficient = 0.0 with balance ="),
    ("mixtral", {"capacity_pad": True}, "capacity_pad = True has no effect with capacity_factor"),
    ("mixtral", {"shared_gate": True}, "shared_gate = True has no effect with n_shared_experts"),
    ("mixtral", {"experts_per_token": 1}, "weights that sum to 1 gives the router no gradient"),
    ("mixtral", {"n_groups": 3}, "n_groups = 3 does not divide n_experts = 8; use 1, 2, 4 or 8"),
    ("mixtral", {"n_groups": 4, "top_groups": 4}, "top_groups = 4 has no effect with n_groups = 4"),
    ("mixtral", {"top_groups": 2}, "top_groups = 2 has no effect with n_groups = 1"),
    ("mixtral", {"n_groups": 8, "top_groups": 1}, "fewer experts than experts_per_token = 2"),
    (
        "mixtral",
        {"router": "sinkhorn"},
        'renormalize = True has no effect with router = "sinkhorn"',
    ),
    ("gpt_oss", {"bias_speed": 0.1}, 'bias_speed = 0.1 has no effect with router = "topk_softmax"'),
    ("deepseek_v3", {"n_groups": 16, "top_groups": 8}, "leaves 1 expert per group"),
    ("deepseek_v3", {"n_kv_heads": 2}, "n_kv_heads = 2 conflicts with kv_lora_rank = 32; use 4"),
    ("deepseek_v3", {"head_dim": 8}, "head_dim = 8 conflicts with kv_lora_rank = 32; use 0"),
    ("deepseek_v3", {"v_head_dim": 64}, "v_head_dim = 64 is wider than query heads"),
    ("deepseek_v3", {"rope_head_dim": 7}, "rope_head_dim = 7 is odd"),
    ("deepseek_v3", {"nope_head_dim": 0}, "nope_head_dim = 0 conflicts with kv_lora_rank = 32"),
]


@pytest.mark.parametrize(("name", "override", "message"), RULES)
def test_fields_that_do_not_fit_are_refused(name: str, override: dict, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        model_config(name, "debug", override)
    assert str(error.value).startswith("model.override.")
    assert message in str(error.value)


def test_config_trains(tmp_path: Path) -> None:
    values = tomllib.loads((ROOT / "configs/deepseek_v3_debug.toml").read_text())
    values["run"]["dir"] = str(tmp_path / "run")
    values["data"] = {"cache_dir": str(tmp_path / "cache")}
    values["train"] |= {"steps": 4, "seq_len": 64, "sample_tokens": 2, "eval_sequences": 4}
    values["metrics"] = {"log_interval": 1, "tensorboard": False}
    run_ranks(2, fit, RunConfig.of(values))
    found = [row["loss"] for row in rows(tmp_path / "run")]
    assert found[-1] < found[0]
