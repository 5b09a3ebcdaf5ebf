"""Floating-point operations of training, in both conventions of the field.

    full     6 * P + 6 * L * H * (K + V) * S    attention over all S x S pairs (PaLM, torchtitan)
    causal   6 * P + 3 * L * H * (K + V) * S    over the half a causal mask needs (Megatron-Bridge)

per token, forward and backward. P: parameters that are multiplied (embeddings are looked up), L
layers, H heads, K and V widths of query-key and value heads (with K = V the attention term of
`full` is the usual 12 * L * H * K * S), S the sequence length. With packed documents of lengths l
under a document mask, S is sum(l^2) / sum(l). Recomputation is not counted: MFU, not HFU.

Source: PaLM, arXiv:2204.02311, appendix B.
"""

from dataclasses import dataclass
from typing import Literal, Self

from dtron.models.config import DecoderConfig
from dtron.models.layers import ACTIVATIONS

Convention = Literal["full", "causal"]
_PASSES = {"full": 6, "causal": 3}

# Dense bfloat16 peak of one device in FLOP/s, by the name torch.cuda gives; vendors' data sheets.
PEAK_FLOPS = {
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H200": 989e12,
    "NVIDIA H200 NVL": 835e12,
    "NVIDIA B200": 2250e12,
}


@dataclass(frozen=True)
class FlopsModel:
    """The sizes that decide a model's operations."""

    matmul_params: int
    """Parameters a token is multiplied with; of experts those that are active."""
    n_layers: int
    n_heads: int
    qk_head_dim: int
    v_head_dim: int

    @classmethod
    def of(cls, config: DecoderConfig) -> Self:
        """Of a dense decoder; counts its matrices, norms and biases as the model has them."""
        size = config.head_size
        return cls(
            matmul_params=n_parameters(config) - config.lookup_params,
            n_layers=config.n_layers,
            n_heads=config.n_heads,
            qk_head_dim=size,
            v_head_dim=size,
        )


def n_parameters(config: DecoderConfig) -> int:
    """All parameters of a decoder; a tied weight counts once."""
    size, bias = config.head_size, int(config.bias)
    q, kv = config.n_heads * size, config.n_kv_heads * size
    attention = config.dim * (2 * q + 2 * kv) + bias * (q + 2 * kv + config.dim)
    inward = 2 if ACTIVATIONS[config.activation].gated else 1
    ffn = (inward + 1) * config.dim * config.ffn_dim
    ffn += bias * (inward * config.ffn_dim + config.dim)
    vectors = 2 if config.norm == "layernorm" else 1  # weight, and LayerNorm's bias
    norms = vectors * (2 * config.dim + (2 * size if config.qk_norm else 0))
    embeddings = config.vocab_size * config.dim * (1 if config.tied else 2)
    if config.positions == "learned":
        embeddings += config.max_seq_len * config.dim
    attention += config.n_heads if config.sinks else 0
    return config.n_layers * (attention + ffn + norms) + vectors * config.dim + embeddings


def flops_per_token(model: FlopsModel, attended: float, convention: Convention) -> float:
    """Operations of forward and backward for one token.

    Args:
        attended: the sequence length, or sum(l^2) / sum(l) over documents of length l.
    """
    heads = model.n_heads * (model.qk_head_dim + model.v_head_dim)
    return 6 * model.matmul_params + _PASSES[convention] * model.n_layers * heads * attended


def peak_flops(device_name: str) -> float | None:
    """Dense bfloat16 peak of a device in FLOP/s, None where it is not in the table."""
    names = [name for name in PEAK_FLOPS if device_name.startswith(name)]
    return PEAK_FLOPS[max(names, key=len)] if names else None
