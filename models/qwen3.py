"""Qwen3: Llama's block with normalised queries and keys and heads of 128 whatever the width.

Source: Qwen3 Technical Report, arXiv:2505.09388, table 1, and the released configurations.
"""

from dtron.models.config import DecoderConfig
from dtron.models.spec import ModelSpec


def _qwen3(
    dim: int, n_layers: int, n_heads: int, ffn_dim: int, tied: bool = False
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=151936,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=8,
        head_dim=128,
        ffn_dim=ffn_dim,
        norm_eps=1e-6,
        qk_norm=True,
        rope_theta=1000000.0,
        tied=tied,
    )


SIZES = {
    "debug": DecoderConfig(
        vocab_size=264,
        dim=128,
        n_layers=8,
        n_heads=8,
        n_kv_heads=4,
        head_dim=32,
        ffn_dim=192,
        norm_eps=1e-6,
        qk_norm=True,
        rope_theta=1000000.0,
        tied=True,
    ),
    "0.6b": _qwen3(1024, 28, 16, 3072, tied=True),
    "1.7b": _qwen3(2048, 28, 16, 6144, tied=True),
    "4b": _qwen3(2560, 36, 32, 9728, tied=True),
    "8b": _qwen3(4096, 36, 32, 12288),
    "14b": _qwen3(5120, 40, 40, 17408),
    "32b": _qwen3(5120, 64, 64, 25600),
}

QWEN3 = ModelSpec("qwen3", SIZES)
