"""Small models for the tests: the debug size of a family, cut down and initialised by name."""

import hashlib
import sys
from typing import Any

import pytest
import torch

from dtron.models import (
    BACKENDS,
    MODELS,
    AttentionNeeds,
    Backend,
    DecoderConfig,
    build_model,
    choose_backend,
    model_config,
)
from dtron.models.attention import modifies_scores
from dtron.models.decoder import Decoder

SMALL = {"vocab_size": 97, "dim": 64, "n_layers": 2, "n_heads": 4, "head_dim": 16, "ffn_dim": 96}
MIXTURE = {"ffn_dim": 0, "n_experts": 8, "experts_per_token": 2, "expert_dim": 32}
LATENT = {
    "head_dim": 0,
    "kv_lora_rank": 24,
    "q_lora_rank": 32,
    "nope_head_dim": 16,
    "rope_head_dim": 8,
    "v_head_dim": 12,
}
DELTA = {"delta_key_heads": 2, "delta_value_heads": 4, "delta_key_dim": 8, "delta_value_dim": 12}
DELTA |= {"full_attention_every": 2}
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"n_kv_heads": 2},
    "qwen3": {"n_kv_heads": 1},
    "qwen3_5": {"n_kv_heads": 2, **DELTA},
    "gemma3": {"n_kv_heads": 2, "window": 7, "full_attention_every": 2},
    "gemma4": {
        **{"n_kv_heads": 2, "global_kv_heads": 1, "global_head_dim": 32},
        **{"window": 7, "full_attention_every": 2},
    },
    "gpt": {"n_kv_heads": 4},
    "bert": {"n_kv_heads": 4},
    "t5": {"n_kv_heads": 4, "encoder_layers": 1},
    "mixtral": {"n_kv_heads": 2, **MIXTURE},
    "qwen3_moe": {"n_kv_heads": 1, **MIXTURE},
    "qwen3_5_moe": {"n_kv_heads": 2, **MIXTURE, **DELTA},
    "deepseek_v3": {"n_kv_heads": 4, **MIXTURE, **LATENT, "ffn_dim": 96},
    "gpt_oss": {"n_kv_heads": 2, **MIXTURE, "window": 7},
    "nemotron_h": {
        **{"n_kv_heads": 2, **MIXTURE, "ffn_dim": 96, "n_layers": 4, "layer_pattern": "ME*-"},
        **{"mamba_heads": 4, "mamba_groups": 2, "mamba_head_dim": 12, "mamba_state_dim": 8},
    },
    "llava": {"n_kv_heads": 2, "vision_layers": 1, "image_token": 96},
}


def small_config(name: str, **override: Any) -> DecoderConfig:
    return model_config(name, "debug", {**SMALL, **FAMILIES[name], **override})


def fitting(config: DecoderConfig) -> Backend:
    """A backend for windows, soft caps and sinks."""
    return choose_backend("math", AttentionNeeds.of(config, "cpu", torch.float32))


def initialized(
    name: str, config: DecoderConfig, backend: Backend = BACKENDS["math"], seed: int = 0
) -> Decoder:
    model = build_model(name, config, fitting(config) if modifies_scores(config) else backend)
    assert isinstance(model, Decoder)
    for fqn, parameter in model.named_parameters():
        digest = hashlib.sha256(f"{seed}/{fqn}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        MODELS[name].init_parameter(config, fqn, parameter.data, generator)
    return model


def delta_rule_by_token(monkeypatch: pytest.MonkeyPatch, model: Any) -> None:
    """Let a model of transformers compute the delta rule token by token: by chunks, float32 loses
    three digits of some gradients of decays."""
    rules = sys.modules[type(model).__module__]
    if by_token := getattr(rules, "torch_recurrent_gated_delta_rule", None):
        monkeypatch.setattr(rules, "torch_chunk_gated_delta_rule", by_token)


def with_trained_scalars(model: Any) -> Any:
    """Transformers' Gemma 4 with the scalars of layers, buffers there, as parameters."""
    for module in model.modules():
        if (scalar := module._buffers.pop("layer_scalar", None)) is not None:
            module.layer_scalar = torch.nn.Parameter(scalar)
    return model


def varied(model: Decoder) -> Decoder:
    """Norms and biases away from 1 and 0 and larger matrices, so that a mistake in any shows."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        scale = 0.3 if parameter.ndim == 1 else 0.05
        parameter.data += scale * torch.randn(parameter.shape, generator=generator)
    return model


def tokens(batch: int = 2, length: int = 24, vocab: int = 97, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, vocab, (batch, length), generator=generator)
