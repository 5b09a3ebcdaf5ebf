"""Context extension equals Hugging Face's implementations; end points and temperature."""

import math
import random
from typing import Any

import pytest
import torch

from dtron.models import DecoderConfig
from dtron.models.rope import (
    apply_rope,
    rope_frequencies,
    rope_magnitude,
    rope_table,
    yarn_mscale,
)
from tests.models.build import initialized, small_config, tokens

CPU = torch.device("cpu")
NAMES = {
    "factor": "rope_scaling_factor",
    "original_max_position_embeddings": "rope_original_context",
    "low_freq_factor": "rope_low_freq_factor",
    "high_freq_factor": "rope_high_freq_factor",
    "beta_fast": "rope_beta_fast",
    "beta_slow": "rope_beta_slow",
    "mscale": "rope_mscale",
    "mscale_all_dim": "rope_mscale_all_dim",
}
"""A key of Hugging Face's rope_parameters -> our field."""
READ = {
    "llama3": ["low_freq_factor", "high_freq_factor"],
    "yarn": ["beta_fast", "beta_slow", "mscale", "mscale_all_dim"],
}


def yarn(**override: Any) -> DecoderConfig:
    return small_config("llama", **{"rope_scaling": "yarn", "rope_scaling_factor": 4.0, **override})


def drawn(scaling: str, seed: int) -> DecoderConfig:
    """A random config; every second one has YaRN's second temperature."""
    draw = random.Random(f"{scaling}/{seed}")
    both = (draw.choice([0.5, 0.707, 1.0]), draw.choice([0.5, 1.0, 1.3])) if seed % 2 else (1.0, 0)
    own: dict[str, dict[str, Any]] = {
        "llama3": {
            "rope_low_freq_factor": draw.uniform(0.5, 2),
            "rope_high_freq_factor": draw.uniform(3, 8),
        },
        "yarn": {
            "rope_beta_fast": draw.uniform(16, 64),
            "rope_beta_slow": draw.uniform(0.5, 4),
            "rope_mscale": both[0],
            "rope_mscale_all_dim": float(both[1]),
        },
    }
    return small_config(
        "llama",
        head_dim=draw.choice([16, 18, 64, 96, 128, 256]),
        rope_theta=draw.choice([1e4, 5e5, 1e6]) * draw.uniform(0.9, 1.1),
        rope_scaling=scaling,
        rope_scaling_factor=draw.choice([2.0, 4.0, 8.0, 32.0, 40.0, draw.uniform(1.1, 64)]),
        rope_original_context=draw.choice([256, 2048, 4096, 8192, 32768]),
        **own[scaling],
    )


def parameters(config: DecoderConfig) -> dict[str, Any]:
    """As Hugging Face has them; a rope_mscale_all_dim of 0 is absent there."""
    read = ["factor", "original_max_position_embeddings", *READ[config.rope_scaling]]
    values = {key: getattr(config, NAMES[key]) for key in read}
    if values.get("mscale_all_dim") == 0:
        del values["mscale"], values["mscale_all_dim"]
    return {"rope_type": config.rope_scaling, "rope_theta": config.rope_theta, **values}


def hugging_face(config: DecoderConfig) -> Any:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    return transformers.LlamaConfig(
        hidden_size=config.dim,
        num_attention_heads=config.n_heads,
        head_dim=config.head_size,
        max_position_embeddings=int(config.rope_original_context * config.rope_scaling_factor),
        rope_parameters=parameters(config),
    )


@pytest.mark.parametrize("scaling", ["llama3", "yarn"])
@pytest.mark.parametrize("seed", range(24))
def test_scaling_equals_hugging_face(scaling: str, seed: int) -> None:
    config = drawn(scaling, seed)
    reference = hugging_face(config)
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, magnitude = ROPE_INIT_FUNCTIONS[scaling](reference, CPU)
    torch.testing.assert_close(rope_frequencies(config, CPU), frequencies, rtol=2e-6, atol=0)
    assert rope_magnitude(config) == pytest.approx(magnitude, rel=1e-12)


@pytest.mark.parametrize("scaling", ["llama3", "yarn"])
@pytest.mark.parametrize("seed", range(6))
def test_table_equals_hugging_face(scaling: str, seed: int) -> None:
    config = drawn(scaling, seed)
    reference = hugging_face(config)
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    positions = torch.tensor([[0, 1, 5, 100, 1000], [7, 7, 8, 2000, 4095]])
    cos, sin = LlamaRotaryEmbedding(reference)(torch.zeros(1), positions)
    half = config.head_size // 2
    wanted = torch.cat([cos[..., :half], sin[..., :half]], dim=-1)
    # An angle of thousands has lost as many times float32's precision.
    error = (rope_table(config, positions) - wanted).abs()
    assert (error <= 5e-7 * (1 + positions.unsqueeze(-1))).all()


def test_yarn_keeps_fast_and_divides_slow_dimensions() -> None:
    """Exactly: dimensions up to that of 32 turns, and from that of 1 turn on."""
    config = yarn(head_dim=128, rope_scaling_factor=8.0, rope_original_context=4096)
    plain = rope_frequencies(config.model_copy(update={"rope_scaling_factor": 1.0}), CPU)
    scaled = rope_frequencies(config, CPU)
    turns = plain * 4096 / (2 * math.pi)
    fast, slow = turns >= 32, turns <= 1
    slow[int(slow.nonzero()[0])] = False  # the last of the ramp, whose end is rounded up
    assert fast.sum() > 10
    assert slow.sum() > 10
    assert torch.equal(scaled[fast], plain[fast])
    assert torch.equal(scaled[slow], plain[slow] / 8)
    between = (plain / scaled)[~fast & ~slow]
    assert (between.diff() > 0).all()
    assert 1 < between[0] < between[-1] <= 8


@pytest.mark.parametrize(("context", "divided"), [(10**9, 0.0), (4, 1.0)])
def test_yarn_where_all_dimensions_are_on_one_side(context: int, divided: float) -> None:
    config = yarn(head_dim=16, rope_theta=100.0, rope_original_context=context)
    plain = rope_frequencies(config.model_copy(update={"rope_scaling_factor": 1.0}), CPU)
    ratio = (plain / rope_frequencies(config, CPU))[1:]
    assert ((ratio > 2).float() == divided).all()


def test_yarn_gives_scores_their_temperature() -> None:
    """cos and sin times 0.1 ln(s) + 1: scores are multiplied by its square."""
    config, plain = yarn(), yarn(rope_mscale=0.0)
    assert rope_magnitude(config) == 0.1 * math.log(4) + 1 == yarn_mscale(4.0, 1.0)
    assert rope_magnitude(plain) == 1
    positions = torch.arange(6).unsqueeze(0)
    q, k = torch.randn(1, 6, 1, 16), torch.randn(1, 6, 1, 16)
    warm, cold = (
        torch.einsum("bthk,bshk->bts", apply_rope(q, table), apply_rope(k, table))
        for table in (rope_table(config, positions), rope_table(plain, positions))
    )
    torch.testing.assert_close(warm, cold * (0.1 * math.log(4) + 1) ** 2)


def test_two_equal_temperatures_cancel() -> None:
    """DeepSeek-V3's: its scores get the temperature as a whole, by the attention's scale."""
    config = yarn(rope_scaling_factor=40.0, rope_mscale=1.0, rope_mscale_all_dim=1.0)
    assert rope_magnitude(config) == 1


def test_logits_equal_hugging_face() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.0")
    from tests.models.test_references import assert_same_logits, llama_like, llama_weights

    config = yarn(rope_theta=1000.0, rope_original_context=32)
    model = initialized("llama", config)
    changed = {"rope_parameters": parameters(config), "max_position_embeddings": 128}
    reference = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(**llama_like(config, **changed))
    )
    assert_same_logits(model, reference, llama_weights(model))
    x = tokens(length=48)
    unscaled = initialized("llama", config.model_copy(update={"rope_scaling_factor": 1.0}))
    assert not torch.allclose(model(x), unscaled(x), atol=1e-4)
