"""Floating-point operations of training, in both common conventions.

    full     6 * P + 6 * L * H * (K + V) * S    attention over all S x S pairs (PaLM, torchtitan)
    causal   6 * P + 3 * L * H * (K + V) * S    half of the pairs: causal mask (Megatron-Bridge)

Without a causal mask (BERT) all pairs count in both conventions.
In an encoder-decoder (T5), tokens are those of a text, of which encoder and decoder read S and T
per sequence. Each parameter counts S or T times, and all pairs of attention in both conventions.
A frozen weight has no gradient and counts 4 instead of 6. Recurrent layers count, instead of the
attention term, reads and writes of their states in both conventions: a gated delta net
18 * K * V per value head (each token reads, writes and reads a state of K x V), Mamba-2 12 * K * P
per head (it writes and reads a state of K x P). That is evaluation token by token; evaluation by
chunks takes more. An image of T tokens counts
6 * P' * T + 12 * L' * E * T^2 in both conventions, with P' parameters of encoder and projector and
L' layers of width E; a third of it if they are frozen, without a backward.

These are FLOPs per token, of forward and backward. P: parameters in matmuls (no embeddings; the
head counts once per prediction, so 1 + mtp times), L layers, H heads, K and V widths of query-key
and value heads (with K = V the attention term of `full` is the usual 12 * L * H * K * S), S the
sequence length. With packed documents of lengths l under a document mask, S is sum(l^2) / sum(l).
Recomputation is not counted: the result gives MFU, not HFU.

Source: PaLM, arXiv:2204.02311, appendix B.
"""

from dataclasses import dataclass
from typing import Literal, Self

from dtron.config.data_section import SpanLengths
from dtron.models.config import DecoderConfig, LayerKind
from dtron.models.layers import ACTIVATIONS

Convention = Literal["full", "causal"]
_PASSES = {"full": 6, "causal": 3}

# Dense bfloat16 peak of one device in FLOP/s, by prefix of its name; from data sheets.
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
    """The sizes that determine a model's FLOPs."""

    matmul_params: int
    """Parameters in a token's matmuls, including only the active experts."""
    n_layers: int
    n_heads: int
    qk_head_dim: float
    v_head_dim: float
    """Both are means of the layers with attention."""
    fixed_flops: float = 0.0
    """FLOPs per token of forward and backward whatever the attended length: in the states of
    recurrent layers, and of attention in an encoder-decoder."""
    causal: bool = True
    """Whether the causal convention counts half of the pairs; false: all pairs in both."""
    frozen_params: int = 0
    """Parameters of `matmul_params` whose gradients are not computed."""
    image_flops: float = 0.0
    """FLOPs per image of forward and backward in vision encoder and projector."""

    @classmethod
    def of(cls, config: DecoderConfig, adapters: int = 0, spans: SpanLengths | None = None) -> Self:
        """Return the sizes of a decoder; `matmul_params` includes norms and biases.

        Args:
            adapters: parameters of the adapters that are active for a token; if there are any,
                all others are frozen.
            spans: lengths of corrupted texts, required by an encoder-decoder.
        """
        if config.encoder_layers:
            assert spans is not None, "an encoder-decoder reads parts of a text"
            return cls._of_encoder_decoder(config, adapters, spans)
        own = n_active_parameters(config) - config.lookup_params - n_vision_parameters(config)
        own += config.mtp * config.vocab_size * config.dim
        return cls(
            matmul_params=own + adapters,
            frozen_params=own if adapters else 0,
            n_layers=config.n_layers_of("attention"),
            fixed_flops=3 * sum(state_flops(config, kind) for kind in config.layer_kinds),
            n_heads=config.n_heads,
            qk_head_dim=mean_width(config) or config.head_size,
            v_head_dim=mean_width(config) or config.v_head_size,
            causal=config.causal,
            image_flops=(1 if adapters else 3) * image_flops(config),
        )

    @classmethod
    def _of_encoder_decoder(cls, config: DecoderConfig, adapters: int, spans: SpanLengths) -> Self:
        encoder, decoder = config.encoder_layers, config.n_layers - config.encoder_layers
        n_encoder, n_decoder = spans.encoder, spans.decoder
        layer = _attention(config) + _feed_forward(config, config.ffn_dim)
        layer += 2 * _norm(config, config.dim)
        keys = 2 * _linear(config, config.dim, config.n_kv_heads * config.head_size)
        queries = _attention(config) - keys + _norm(config, config.dim)
        read = n_encoder * (encoder * layer + _norm(config, config.dim) + decoder * keys)
        read += n_decoder * (decoder * (layer + queries) + _norm(config, config.dim))
        read += n_decoder * config.vocab_size * config.dim
        pairs = encoder * n_encoder**2 + decoder * n_decoder * (n_decoder + n_encoder)
        own = round(read / spans.text)
        return cls(
            matmul_params=own + adapters,
            frozen_params=own if adapters else 0,
            n_layers=0,
            fixed_flops=12 * config.n_heads * config.head_size * pairs / spans.text,
            n_heads=config.n_heads,
            qk_head_dim=config.head_size,
            v_head_dim=config.v_head_size,
        )


def mean_width(config: DecoderConfig) -> float:
    """Return the mean width of heads, if it differs between layers; 0: it does not."""
    sizes = [*config.head_sizes, *[config.head_size] * config.mtp]
    return sum(sizes) / len(sizes) if config.global_head_dim else 0.0


def n_parameters(config: DecoderConfig) -> int:
    """Count all parameters of a decoder; a tied weight counts once."""
    layers = sum(_layer(config, kind) for kind in config.layer_kinds)
    embeddings = config.vocab_size * config.dim * (1 if config.tied else 2)
    if config.positions == "learned":
        embeddings += config.max_seq_len * config.dim
    embeddings += config.token_types * config.dim
    if config.encoder_layers:
        cross = _attention(config) + _norm(config, config.dim)
        layers += (config.n_layers - config.encoder_layers) * cross + _norm(config, config.dim)
        embeddings += 2 * config.relative_buckets * config.n_heads
    if config.post_norm:  # of embeddings and before the head; biases of transform and head
        embeddings += _norm(config, config.dim)
        embeddings += config.dim * (config.dim + 1) + config.vocab_size
    return layers + _norm(config, config.dim) + embeddings + n_vision_parameters(config)


def _layer(config: DecoderConfig, kind: LayerKind) -> int:
    """Count the parameters of a layer or MTP block."""
    one, total = _norm(config, config.dim), 0
    if kind.mixer:
        total += _MIXERS[kind.mixer](config.of_layer(kind))
    if kind.ffn:
        total += _mixture(config) if kind.experts else _feed_forward(config, config.ffn_dim)
    norms = (bool(kind.mixer) + bool(kind.ffn)) * (2 if config.sandwich_norms else 1)
    total += config.layer_scalars
    return total + norms * one + (3 * one + 2 * config.dim**2 if kind.mtp else 0)


def n_vision_parameters(config: DecoderConfig) -> int:
    """Count the parameters of vision encoder and projector; 0: the model has none."""
    dim, hidden = config.vision_dim, config.vision_ffn_dim
    if not config.vision_layers:
        return 0
    block = 4 * (dim + 1) * dim + (dim + 1) * hidden + (hidden + 1) * dim + 4 * dim
    patches = (3 * config.vision_patch_size**2 + 1) * dim + config.image_tokens * dim
    projector = (dim + 1) * config.dim + (config.dim + 1) * config.dim
    return config.vision_layers * block + patches + projector


def image_flops(config: DecoderConfig) -> float:
    """Return the FLOPs per image in the forward of vision encoder and projector."""
    tokens, width = config.image_tokens, config.vision_dim
    weights = n_vision_parameters(config) - tokens * width  # without the positions
    return 2.0 * tokens * (weights + 2 * config.vision_layers * width * tokens)


def images_that_fit(config: DecoderConfig, seq_len: int) -> int:
    """Return the number of images that fit into a sequence; 0 without a vision encoder.

    At least 1 with it: every micro-batch has an image, and a sequence may have a part of one.
    """
    return max(1, seq_len // config.image_tokens) if config.vision_layers else 0


def n_active_parameters(config: DecoderConfig) -> int:
    """Count the parameters active for a token: all except the unselected experts' parameters."""
    idle = (config.n_experts - config.experts_per_token) * _expert(config)
    return n_parameters(config) - sum(kind.experts for kind in config.layer_kinds) * idle


def _linear(config: DecoderConfig, inward: int, outward: int) -> int:
    return inward * outward + (outward if config.bias else 0)


def _norm(config: DecoderConfig, width: int) -> int:
    return width * (2 if config.norm == "layernorm" else 1)  # weight, and LayerNorm's bias


def _attention(config: DecoderConfig) -> int:
    sinks = config.n_heads if config.sinks else 0
    if config.kv_lora_rank:
        return _latent_attention(config) + sinks
    size = config.head_size
    q, kv = config.n_heads * size, config.n_kv_heads * size
    both = 1 if config.keys_as_values else 2
    projections = _linear(config, config.dim, q) + both * _linear(config, config.dim, kv)
    projections += _linear(config, config.dim, q) if config.output_gate else 0
    norms = 2 * _norm(config, size) if config.qk_norm else 0
    return projections + _linear(config, q, config.dim) + norms + sinks


def _gated_delta_net(config: DecoderConfig) -> int:
    heads = config.delta_value_heads
    values = heads * config.delta_value_dim
    projections = config.dim * (config.delta_channels + 2 * values + 2 * heads)
    return (
        projections + config.delta_channels * config.delta_conv + 2 * heads + config.delta_value_dim
    )


def _mamba(config: DecoderConfig) -> int:
    heads, channels = config.mamba_heads, config.mamba_channels
    inner = heads * config.mamba_head_dim
    projections = config.dim * (channels + 2 * inner + heads)
    return projections + channels * (config.mamba_conv + 1) + 3 * heads + inner


_MIXERS = {"attention": _attention, "delta": _gated_delta_net, "mamba": _mamba}
"""{LayerKind.mixer: function that counts its parameters}."""


def state_flops(config: DecoderConfig, kind: LayerKind) -> float:
    """Return the FLOPs per token in the forward of a layer's recurrent states; 0: it has none."""
    if kind.mixer == "delta":
        return 6.0 * config.delta_value_heads * config.delta_key_dim * config.delta_value_dim
    if kind.mixer == "mamba":
        return 4.0 * config.mamba_heads * config.mamba_state_dim * config.mamba_head_dim
    return 0.0


def _latent_attention(config: DecoderConfig) -> int:
    heads, rank, latent = config.n_heads, config.q_lora_rank, config.kv_lora_rank
    q, values = heads * config.head_size, heads * config.v_head_dim
    kv = heads * config.nope_head_dim + values
    queries = _linear(config, config.dim, q)
    if rank:
        queries = _linear(config, config.dim, rank) + _norm(config, rank) + _linear(config, rank, q)
    inward = _linear(config, config.dim, latent + config.rope_head_dim) + _norm(config, latent)
    return queries + inward + _linear(config, latent, kv) + _linear(config, values, config.dim)


def _feed_forward(config: DecoderConfig, width: int) -> int:
    inward = 2 if ACTIVATIONS[config.activation].gated else 1
    return inward * _linear(config, config.dim, width) + _linear(config, width, config.dim)


def _expert(config: DecoderConfig) -> int:
    return _feed_forward(config, config.expert_dim)


def _mixture(config: DecoderConfig) -> int:
    total = _linear(config, config.dim, config.n_experts) + config.n_experts * _expert(config)
    if config.n_shared_experts:
        total += _feed_forward(config, config.n_shared_experts * config.expert_dim)
    return total + (config.dim if config.shared_gate else 0)


def flops_per_token(
    model: FlopsModel, attended: float, convention: Convention, images: float = 0.0
) -> float:
    """Return the FLOPs of forward and backward per token.

    Args:
        attended: attended length, 2 * (mean number of keys per query) - 1: the sequence length, or
            sum(L^2) / sum(L) for documents of length L.
        images: number of images per token.
    """
    heads = model.n_heads * (model.qk_head_dim + model.v_head_dim)
    weights = 6 * model.matmul_params - 2 * model.frozen_params
    passes = _PASSES[convention if model.causal else "full"]
    attention = passes * model.n_layers * heads * attended
    return weights + attention + model.fixed_flops + images * model.image_flops


def attended_by_layers(length: int, config: DecoderConfig) -> float:
    """Return the mean of the layers' attended length (see `flops_per_token`), without packing.

    Layers count by the width of their heads. `length`: sequence length, in tokens.
    """

    def attended(window: int) -> float:
        if not window or window >= length:
            return length
        keys = window * (window + 1) / 2 + (length - window) * window  # of all queries
        return 2 * keys / length - 1

    sizes = config.head_sizes
    pairs = zip(config.windows, sizes, strict=True)
    return sum(size * attended(window) for window, size in pairs) / sum(sizes)


def peak_flops(device_name: str) -> float | None:
    """Return the dense bfloat16 peak of a device in FLOP/s; None: not in the table."""
    names = [name for name in PEAK_FLOPS if device_name.startswith(name)]
    return PEAK_FLOPS[max(names, key=len)] if names else None
