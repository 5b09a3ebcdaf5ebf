"""Small models for the tests: the debug size of a family, cut down and initialised by name."""

import hashlib
from typing import Any

import torch

from dtron.models import BACKENDS, MODELS, Backend, DecoderConfig, build_model, model_config
from dtron.models.decoder import Decoder

SMALL = {"vocab_size": 97, "dim": 64, "n_layers": 2, "n_heads": 4, "head_dim": 16, "ffn_dim": 96}
KV_HEADS = {"llama": 2, "qwen3": 1, "gpt": 4}


def small_config(name: str, **override: Any) -> DecoderConfig:
    return model_config(name, "debug", {**SMALL, "n_kv_heads": KV_HEADS[name], **override})


def initialized(
    name: str, config: DecoderConfig, backend: Backend = BACKENDS["math"], seed: int = 0
) -> Decoder:
    model = build_model(name, config, backend)
    assert isinstance(model, Decoder)
    for fqn, parameter in model.named_parameters():
        digest = hashlib.sha256(f"{seed}/{fqn}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        MODELS[name].init_parameter(config, fqn, parameter.data, generator)
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
