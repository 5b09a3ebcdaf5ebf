"""GPT: learned positions, LayerNorm, GELU, biases; the shapes of GPT-3 and of Megatron-LM.

GELU is the tanh approximation, as in GPT-2 and GPT-3. Attention is dense in every layer, where
GPT-3 alternates with sparse patterns. Dropout is off; GPT-2 had 0.1 (`model.override.dropout`).

Sources: 125m to 175b except as said: GPT-3, arXiv:2005.14165, table 2.1. For 1.3b the paper gives
24 heads of 128, which do not make its width of 2048; here it has 16 heads of 128. 1.7b, 7.1b and
16b, untied: the weak-scaling benchmark of Megatron-LM (github.com/NVIDIA/Megatron-LM, README).
"""

from dtron.models.config import DecoderConfig
from dtron.models.spec import ModelSpec


def _gpt(
    dim: int,
    n_layers: int,
    n_heads: int,
    vocab_size: int = 50257,
    max_seq_len: int = 2048,
    tied: bool = True,
) -> DecoderConfig:
    return DecoderConfig(
        vocab_size=vocab_size,
        dim=dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=n_heads,
        ffn_dim=4 * dim,
        activation="gelu",
        norm="layernorm",
        norm_eps=1e-5,
        bias=True,
        positions="learned",
        max_seq_len=max_seq_len,
        tied=tied,
    )


def _megatron(dim: int, n_layers: int, n_heads: int) -> DecoderConfig:
    return _gpt(dim, n_layers, n_heads, vocab_size=131072, max_seq_len=4096, tied=False)


SIZES = {
    "debug": _gpt(128, 8, 8, vocab_size=264, max_seq_len=512),
    "125m": _gpt(768, 12, 12),
    "350m": _gpt(1024, 24, 16),
    "760m": _gpt(1536, 24, 16),
    "1.3b": _gpt(2048, 24, 16),
    "2.7b": _gpt(2560, 32, 32),
    "6.7b": _gpt(4096, 32, 32),
    "13b": _gpt(5120, 40, 40),
    "175b": _gpt(12288, 96, 96),
    "1.7b": _megatron(2048, 24, 16),
    "7.1b": _megatron(4096, 30, 32),
    "16b": _megatron(6144, 32, 48),
}

GPT = ModelSpec("gpt", SIZES)
