"""gpt-oss: experts with biases and a clamped SwiGLU, attention with sinks, every second window.

The 4 experts of a token are those of the largest logits, their weights the softmax of these. YaRN
is from the start a part of the model, its two ends not rounded. The releases say nothing of
training; the weight of the balance loss is that of their configuration.

Sources: gpt-oss model card, arXiv:2508.10925, and the released configurations.
"""

from dtron.models.config import DecoderConfig
from dtron.models.spec import ModelSpec


def _gpt_oss(n_layers: int, n_experts: int) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=201088,
        dim=2880,
        n_layers=n_layers,
        n_heads=64,
        n_kv_heads=8,
        head_dim=64,
        activation="clamped_swiglu",
        norm_eps=1e-5,
        bias=True,
        window=128,
        full_attention_every=2,
        sinks=True,
        rope_theta=150000.0,
        rope_scaling="yarn",
        rope_scaling_factor=32.0,
        rope_original_context=4096,
        rope_truncate=False,
        n_experts=n_experts,
        experts_per_token=4,
        expert_dim=2880,
        router="topk_softmax",
        balance="micro_batch",
        balance_coefficient=0.001,
    )


SIZES = {
    "debug": DecoderConfig(
        vocab_size=264,
        dim=128,
        n_layers=4,
        n_heads=8,
        n_kv_heads=4,
        head_dim=16,
        activation="clamped_swiglu",
        norm_eps=1e-5,
        bias=True,
        window=16,
        full_attention_every=2,
        sinks=True,
        rope_theta=150000.0,
        rope_scaling="yarn",
        rope_scaling_factor=32.0,
        rope_original_context=4096,
        rope_truncate=False,
        n_experts=8,
        experts_per_token=4,
        expert_dim=64,
        router="topk_softmax",
        balance="micro_batch",
        balance_coefficient=0.001,
    ),
    "20b": _gpt_oss(24, 32),
    "120b": _gpt_oss(36, 128),
}

GPT_OSS = ModelSpec("gpt_oss", SIZES)
