"""Overrides and the errors they can cause."""

from typing import get_args

import pytest

from dtron.config import RunConfig, fields
from dtron.config.rule import Rule
from dtron.errors import ALIASES, ConfigError
from dtron.models import BACKENDS, MODELS, DecoderConfig, build_model, model_config
from dtron.models.field_rules import EXPERTS, FIELDS
from dtron.models.layers import ACTIVATIONS, NORMS
from dtron.models.rope import SCALINGS
from dtron.models.router import ROUTERS
from dtron.setup.rules import reasons


def test_override_replaces_fields():
    config = model_config("llama", "debug", {"n_layers": 4, "norm_eps": 1e-6})
    assert (config.n_layers, config.norm_eps, config.dim) == (4, 1e-6, 128)
    assert model_config("llama", "8b") == MODELS["llama"].sizes["8b"]


def test_derived_values():
    assert model_config("llama", "8b").head_size == 128
    assert model_config("qwen3", "0.6b").head_size == 128
    assert model_config("llama", "8b").lookup_params == 128256 * 4096
    assert model_config("llama", "1b").lookup_params == 0
    assert model_config("gpt", "125m").lookup_params == 2048 * 768
    latent = model_config("deepseek_v3", "671b")
    assert (latent.head_size, latent.v_head_size, latent.rope_size) == (192, 128, 64)
    assert (latent.n_dense_layers, latent.n_expert_layers) == (3, 58)
    assert model_config("mixtral", "8x7b").n_expert_layers == 32
    assert model_config("llama", "8b").n_dense_layers == 32


def test_windows_of_layers():
    assert model_config("gpt_oss", "debug").windows == (16, 0, 16, 0)
    every = {"full_attention_every": 3, "n_layers": 7}
    assert model_config("gpt_oss", "debug", every).windows == (16, 16, 0, 16, 16, 0, 16)
    assert model_config("llama", "debug", {"window": 5, "n_layers": 2}).windows == (5, 5)
    model = build_model("gpt_oss", model_config("gpt_oss", "debug"), BACKENDS["math"])
    assert [block.attn.core.window for block in model.blocks.values()] == [16, 0, 16, 0]  # type: ignore[operator,union-attr]


def test_what_draws_random_numbers():
    assert not model_config("mixtral", "debug").draws
    for key in ("jitter", "dropout", "attention_dropout"):
        assert model_config("mixtral", "debug", {key: 0.1}).draws


@pytest.mark.parametrize(
    ("name", "size", "override", "message"),
    [
        ("lama", "debug", {}, "model.name = lama is not known; did you mean llama?"),
        ("llama", "8B", {}, "model.size = 8B is not a size of llama; did you mean 8b?"),
        ("llama", "9", {}, "use debug, 1b, 3b, 8b, 70b, 405b"),
        (
            "llama",
            "debug",
            {"n_layer": 4},
            "unknown key model.override.n_layer; did you mean model.override.n_layers?",
        ),
        ("llama", "debug", {"n_layers": "4"}, "model.override.n_layers = '4': Input should be"),
        ("llama", "debug", {"n_layers": 0}, "model.override.n_layers = 0: Input should be greater"),
        ("llama", "debug", {"activation": "elu"}, "model.override.activation = 'elu': Input"),
        (
            "llama",
            "debug",
            {"n_kv_heads": 3},
            "model.override.n_kv_heads = 3 does not divide n_heads = 8; use 1, 2, 4 or 8",
        ),
        (
            "llama",
            "debug",
            {"dim": 100},
            "model.override.dim = 100 is not a multiple of n_heads = 8; use 96 or 104, or set",
        ),
        ("llama", "debug", {"head_dim": 15}, "model.override.head_dim = 15 is odd"),
        (
            "mixtral",
            "debug",
            {"n_groups": 16},
            "model.override.n_groups = 16 does not divide n_experts = 8; use 1, 2, 4 or 8",
        ),
        (
            "llama",
            "8b",
            {"rope_low_freq_factor": 4.0},
            "model.override.rope_high_freq_factor = 4.0 is not above",
        ),
        (
            "llama",
            "debug",
            {"rope_scaling": "ntk"},
            "model.override.rope_scaling = 'ntk': Input should be 'llama3', 'yarn' or 'linear'",
        ),
        (
            "llama",
            "debug",
            {"rope_scaling": "yarn"},
            'rope_scaling = "yarn" has no effect without a rope_scaling_factor above 1',
        ),
        (
            "gpt",
            "debug",
            {"rope_scaling": "yarn", "rope_scaling_factor": 4.0},
            'rope_scaling = "yarn" has no effect without positions = "rope"; use "llama3"',
        ),
        (
            "llama",
            "8b",
            {"rope_mscale_all_dim": 1.0},
            'rope_mscale_all_dim = 1.0 has no effect with rope_scaling = "llama3"; use 0.0',
        ),
        (
            "llama",
            "debug",
            {"rope_scaling": "linear", "rope_scaling_factor": 2.0, "rope_original_context": 64},
            'rope_original_context = 64 has no effect with rope_scaling = "linear"; use 8192',
        ),
        (
            "gemma3",
            "debug",
            {"window": 0, "full_attention_every": 0},
            "rope_local_theta = 10000.0 has no effect without",
        ),
        (
            "gemma3",
            "debug",
            {"rope_theta": 10000.0},
            "rope_local_theta = 10000.0 has no effect, since rope_theta is equal; use 0.0",
        ),
        (
            "gemma3",
            "debug",
            {"n_layers": 2},
            "full_attention_every = 3 has no effect with n_layers",
        ),
        (
            "llama",
            "debug",
            {"global_head_dim": 64},
            "global_head_dim = 64 has no effect without both",
        ),
        (
            "gemma3",
            "debug",
            {"global_kv_heads": 2, "full_attention_every": 0},
            "global_kv_heads = 2",
        ),
        ("gemma4", "debug", {"global_head_dim": 32}, "no effect, since head_dim is equal; use 0"),
        ("gemma4", "debug", {"global_kv_heads": 4}, "no effect, since n_kv_heads is equal; use 0"),
        (
            "gemma4",
            "debug",
            {"global_kv_heads": 3},
            "global_kv_heads = 3 does not divide n_heads = 8",
        ),
        ("gemma4", "debug", {"global_head_dim": 63}, "global_head_dim = 63 rotates 63 elements"),
        (
            "gemma4",
            "debug",
            {"full_attention_every": 0, "global_head_dim": 0, "global_kv_heads": 0},
            "keys_as_values = true has no effect, since all layers have the window; use false",
        ),
        (
            "llama",
            "debug",
            {"window": 9, "rope_global_fraction": 0.5},
            "rope_global_fraction = 0.5",
        ),
        ("gpt", "debug", {"rope_global_fraction": 0.5}, "no effect without positions"),
        ("gemma4", "debug", {"rope_global_fraction": 0.01}, "rotates nothing; use 0.03125 or more"),
        ("gemma4", "debug", {"rope_fraction": 0.5}, "conflicts with rope_fraction = 0.5"),
        ("gemma4", "debug", {"rope_scaling_factor": 2.0}, 'conflicts with rope_scaling = "llama3"'),
        (
            "gemma4",
            "debug",
            {"norm": "layernorm"},
            'value_norm = true conflicts with norm = "layernorm"',
        ),
        ("bert", "debug", {"layer_scalars": True}, "layer_scalars = True conflicts with post_norm"),
        (
            "deepseek_v3",
            "debug",
            {"value_norm": True},
            "value_norm = true conflicts with kv_lora_rank",
        ),
        (
            "llama",
            "8b",
            {"rope_scaling": "yarn", "rope_low_freq_factor": 2.0},
            'rope_low_freq_factor = 2.0 has no effect with rope_scaling = "yarn"; use 1.0',
        ),
        (
            "llama",
            "8b",
            {"rope_scaling": "yarn", "rope_beta_slow": 32.0},
            "rope_beta_fast = 32.0 is not above rope_beta_slow = 32.0; use 32.0 and 1.0",
        ),
        (
            "llama",
            "8b",
            {"rope_scaling": "yarn", "rope_theta": 1.0},
            "rope_theta = 1.0 is not above 1, but rope_scaling",
        ),
    ],
)
def test_errors_name_key_rule_and_legal_values(name, size, override, message):
    with pytest.raises(ConfigError) as error:
        model_config(name, size, override)
    assert message in str(error.value)


def test_all_errors_are_named_at_once():
    inconsistent = {"n_kv_heads": 3, "head_dim": 15, "z_loss": 0.1, "full_attention_every": 1}
    config = RunConfig.of({"model": {"override": inconsistent}, "train": {"loss_chunks": 2**20}})
    starts = ["train.loss_chunks", "model.override.n_kv_heads = 3", "model.override.head_dim = 15"]
    starts += ["model.override.full_attention_every = 1"] * 2 + ["model.override.z_loss = 0.1"]
    found = reasons(config, 1)
    assert len(found) == len(starts), found
    assert all(line.startswith(start) for line, start in zip(found, starts, strict=True)), found
    with pytest.raises(ConfigError) as error:
        model_config("llama", "debug", {"n_layers": 0, "dim": "x", "width": 1})
    keys = ["n_layers = 0", "dim = 'x'", "width"]
    lines = str(error.value).splitlines()
    assert len(lines) == len(keys)
    assert all(any(f"model.override.{key}" in line for line in lines) for key in keys)


def test_learned_positions_allow_odd_heads():
    assert model_config("gpt", "debug", {"head_dim": 15}).head_size == 15


def test_every_field_is_documented_and_literals_match_the_tables():
    assert all(field.description for field in DecoderConfig.model_fields.values())
    tables = {
        "activation": ACTIVATIONS,
        "norm": NORMS,
        "rope_scaling": SCALINGS,
        "router": ROUTERS,
    }
    for field, table in tables.items():
        assert get_args(DecoderConfig.model_fields[field].annotation) == tuple(table)


def test_backend_that_cannot_drop_attention_weights_is_refused():
    config = model_config("llama", "debug", {"attention_dropout": 0.1})
    with pytest.raises(ConfigError, match=r"sdpa does not support attention dropout.*use math"):
        build_model("llama", config, BACKENDS["sdpa"])


@pytest.mark.parametrize(
    ("name", "size", "near"),
    [
        ("llama", "7b", "8b"),
        ("llama", "8B", "8b"),
        ("llama", "13b", "8b"),
        ("llama", "400b", "405b"),
        ("llama", "500m", "1b"),
        ("llama", "llama3-8b", "8b"),
        ("llama", "debg", "debug"),
    ],
)
def test_an_unknown_size_names_the_nearest_by_number(name: str, size: str, near: str) -> None:
    with pytest.raises(ConfigError, match=rf"did you mean {near}\?"):
        model_config(name, size)


@pytest.mark.parametrize(
    ("key", "ours"),
    [
        ("top_k", "experts_per_token"),
        ("num_experts_per_tok", "experts_per_token"),
        ("hidden_size", "dim"),
        ("num_hidden_layers", "n_layers"),
        ("intermediate_size", "ffn_dim"),
    ],
)
def test_names_of_other_frameworks_give_our_own(key: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=rf"did you mean model\.override\.{ours}\?"):
        model_config("llama", "debug", {key: 2})


def test_every_alias_names_a_key_and_none_is_a_key_itself() -> None:
    known = {key for key, _, _ in fields(RunConfig)}
    known |= {f"model.override.{name}" for name in DecoderConfig.model_fields}
    assert known >= ALIASES.keys()
    last = {key.rpartition(".")[2] for key in known}
    for theirs in ALIASES.values():
        assert not last & set(theirs.split())


@pytest.mark.parametrize("rule", [*FIELDS, *EXPERTS], ids=lambda rule: rule.keys)
def test_a_rule_is_about_fields_that_exist(rule: Rule) -> None:
    assert set(rule.keys.split()) <= DecoderConfig.model_fields.keys()
