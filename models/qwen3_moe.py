"""Qwen3 with experts: Qwen3's block with 128 experts, of which each token takes 8.

Loads are balanced by an auxiliary loss; Qwen3 counts them over the global batch, which
`model.override.balance = "global_batch"` does; here each micro-batch balances itself.

Source: Qwen3 Technical Report, arXiv:2505.09388, table 2, and the released configurations.
"""

from dtron.models.config import DecoderConfig
from dtron.models.spec import ModelSpec


def _qwen3_moe(
    dim: int, n_layers: int, n_heads: int, n_kv_heads: int, expert_dim: int
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=151936,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_kv_heads,
        head_dim=128,
        norm_eps=1e-6,
        qk_norm=True,
        rope_theta=1000000.0,
        n_experts=128,
        experts_per_token=8,
        expert_dim=expert_dim,
        renormalize=True,
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
        head_dim=32,
        norm_eps=1e-6,
        qk_norm=True,
        rope_theta=1000000.0,
        n_experts=16,
        experts_per_token=4,
        expert_dim=32,
        renormalize=True,
        balance="micro_batch",
        balance_coefficient=0.001,
    ),
    "30b-a3b": _qwen3_moe(2048, 48, 32, 4, 768),
    "235b-a22b": _qwen3_moe(4096, 94, 64, 4, 1536),
}

QWEN3_MOE = ModelSpec("qwen3_moe", SIZES)
