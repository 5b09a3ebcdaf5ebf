"""List of the matmuls of a layer's forward, with their sizes and tensor-parallel splits.

Each matmul is x (tokens, k) times a weight (k, n). Tensor parallelism splits the weight:

    columns   n over tp; x is gathered, the result is split
    rows      k over tp; x is split, the result is a partial sum for all tokens
    none      the weight is replicated; a rank multiplies its own tokens (sequence parallelism)
"""

from dataclasses import dataclass, replace
from typing import Literal

from dtron.models.config import DecoderConfig, LayerKind
from dtron.models.layers import ACTIVATIONS


@dataclass(frozen=True)
class Matmul:
    """One matmul of an unsharded layer. For `experts`, k and n are the sizes of one expert."""

    module: str
    k: int
    n: int
    split: Literal["columns", "rows", "none"]

    def sharded(self, ranks: int) -> tuple[int, int]:
        """Return (k, n) on one of `ranks` tensor-parallel ranks."""
        k = self.k // ranks if self.split == "rows" else self.k
        return k, self.n // ranks if self.split == "columns" else self.n


def layer_matmuls(model: DecoderConfig, kind: LayerKind) -> list[Matmul]:
    """Return the matmuls of a layer's forward."""
    d = model.dim
    found = [Matmul("merge", 2 * d, d, "none")] if kind.mtp else []
    if kind.mixer:
        found += _MIXERS[kind.mixer](model.of_layer(kind))
    if kind.cross:
        found += _cross_attention(model)
    if not kind.experts:
        return found + (_feed_forward(model, "ffn", model.ffn_dim) if kind.ffn else [])
    found += _feed_forward(model, "experts", model.expert_dim)
    if model.n_shared_experts:
        found += _feed_forward(model, "shared", model.n_shared_experts * model.expert_dim)
    if model.shared_gate:
        found.append(Matmul("shared_gate", d, 1, "none"))
    return [*found, Matmul("router", d, model.n_experts, "none")]


def _attention(model: DecoderConfig) -> list[Matmul]:
    if model.kv_lora_rank:
        return _latent_attention(model)
    q, kv = model.n_heads * model.head_size, model.n_kv_heads * model.head_size
    found = [Matmul("wq", model.dim, q, "columns")]
    names = ("wk",) if model.keys_as_values else ("wk", "wv")
    found += [Matmul(name, model.dim, kv, "columns") for name in names]
    if model.output_gate:
        found.append(Matmul("wg", model.dim, q, "columns"))
    return [*found, Matmul("wo", q, model.dim, "rows")]


def _cross_attention(model: DecoderConfig) -> list[Matmul]:
    """Return the matmuls of a decoder's attention to an encoder; `cross.kv` reads its tokens."""
    names = {"wq": "wq", "wk": "kv.wk", "wv": "kv.wv", "wo": "wo"}
    return [replace(each, module=f"cross.{names[each.module]}") for each in _attention(model)]


def _gated_delta_net(model: DecoderConfig) -> list[Matmul]:
    heads, values = model.delta_value_heads, model.delta_value_heads * model.delta_value_dim
    widths = {"w_a": heads, "w_b": heads, "w_qkv": model.delta_channels, "w_z": values}
    found = [Matmul(name, model.dim, width, "columns") for name, width in widths.items()]
    return [*found, Matmul("delta.wo", values, model.dim, "rows")]


def _mamba(model: DecoderConfig) -> list[Matmul]:
    inner = model.mamba_heads * model.mamba_head_dim
    widths = {"w_z": inner, "w_xbc": model.mamba_channels, "w_dt": model.mamba_heads}
    found = [Matmul(name, model.dim, width, "columns") for name, width in widths.items()]
    return [*found, Matmul("mamba.wo", inner, model.dim, "rows")]


_MIXERS = {"attention": _attention, "delta": _gated_delta_net, "mamba": _mamba}
"""{LayerKind.mixer: function that lists its matmuls}."""


def _latent_attention(model: DecoderConfig) -> list[Matmul]:
    d, q, latent = model.dim, model.n_heads * model.head_size, model.kv_lora_rank
    kv = model.n_heads * (model.nope_head_dim + model.v_head_size)
    found = [Matmul("wq", d, q, "columns")]
    if rank := model.q_lora_rank:
        found = [Matmul("wq_b", rank, q, "columns"), Matmul("wq_a", d, rank, "none")]
    return [
        *found,
        Matmul("wkv_a", d, latent + model.rope_head_dim, "none"),
        Matmul("wkv_b", latent, kv, "columns"),
        Matmul("wo", model.n_heads * model.v_head_size, d, "rows"),
    ]


def _feed_forward(model: DecoderConfig, module: str, width: int) -> list[Matmul]:
    inward = 2 if ACTIVATIONS[model.activation].gated else 1
    first = Matmul(module, model.dim, width, "columns")
    return [first] * inward + [Matmul(module, width, model.dim, "rows")]
