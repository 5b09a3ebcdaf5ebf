"""Configuration of a transformer: one flat, frozen DecoderConfig per size.

Fields are flat so that each can be overridden alone, as `model.override.KEY=value`. Derived values
are properties and are never stored.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dtron.config.schema import MAX_LAYERS
from dtron.errors import ConfigError, config_error
from dtron.models.field_rules import broken_rules

MOST_FACTOR = 1e30


class LayerKind(NamedTuple):
    """Modules of a layer. Layers of one kind differ only in their weights and windows."""

    mixer: Literal["attention", "delta", "mamba", ""] = "attention"
    """What mixes tokens: attention, a gated delta net or Mamba-2; empty: nothing."""
    ffn: Literal["dense", "experts", ""] = "dense"
    """The feed-forward layer, dense or a mixture of experts; empty: none."""
    mtp: bool = False
    """A block of multi-token prediction."""
    encoder: bool = False
    """A layer of an encoder before the decoder."""
    normed: bool = False
    """The encoder's last layer, whose output is normalised."""
    cross: bool = False
    """A layer of a decoder that also attends to the encoder's output."""
    full: bool = False
    """A layer without a window whose attention has other sizes than that of layers with one
    (`DecoderConfig.of_layer`)."""

    @property
    def experts(self) -> bool:
        """Whether the layer has a mixture of experts."""
        return self.ffn == "experts"

    @property
    def recurrent(self) -> bool:
        """Whether the layer has a state of fixed size instead of keys and values."""
        return self.mixer in ("delta", "mamba")


PATTERN = {
    "M": LayerKind("mamba", ""),
    "*": LayerKind("attention", ""),
    "-": LayerKind("", "dense"),
    "E": LayerKind("", "experts"),
}
"""{character of `layer_pattern`: kind of the layer}."""


class DecoderConfig(BaseModel):
    """Sizes and variants of a `dtron.models.decoder.Decoder`."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    vocab_size: int = Field(ge=1, le=2**28)
    """Size of the vocabulary; at least the size of the tokenizer's vocabulary."""
    dim: int = Field(ge=1, le=2**20)
    """Width of the residual stream."""
    n_layers: int = Field(ge=1, le=MAX_LAYERS)
    """Number of transformer blocks, with those of an encoder."""
    encoder_layers: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """n: the first n blocks are an encoder, the others a decoder that attends to its output
    (arXiv:1706.03762), in models that have both (t5). 0: no encoder."""
    n_heads: int = Field(ge=1, le=2**16)
    """Number of query heads per block."""
    n_kv_heads: int = Field(ge=1, le=2**16)
    """Number of key and value heads per block; fewer than n_heads is grouped-query attention, 1 is
    multi-query attention (arXiv:2305.13245)."""
    head_dim: int = Field(default=0, ge=0, le=2**16)
    """Width of a head; 0: dim / n_heads."""
    ffn_dim: int = Field(default=0, ge=0, le=2**24)
    """Hidden width of the dense feed-forward layers; 0 if every layer has experts."""
    activation: Literal[
        "swiglu", "geglu", "gelu", "gelu_exact", "relu", "relu2", "clamped_swiglu"
    ] = "swiglu"
    """Activation of the feed-forward layers; swiglu, geglu and clamped_swiglu have a gate
    projection (dtron.models.layers.ACTIVATIONS)."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """Type of all norms (dtron.models.layers.NORMS)."""
    norm_eps: float = Field(default=1e-5, gt=0, le=MOST_FACTOR)
    """Epsilon of the norms, added before the square root; norms of latent vectors use 1e-6."""
    post_norm: bool = False
    """Post-norm, as BERT (arXiv:1810.04805): x becomes norm(x + layer(x)), and embeddings are
    normalised. Before the head, which has a bias, are a linear layer, the activation and a norm."""
    norm_zero_centered: bool = False
    """Store norm weights as gamma - 1, as Megatron-LM checkpoints may do. Norm weights have no
    weight decay in either form."""
    qk_norm: bool = False
    """Normalise every query and key head (arXiv:2302.05442)."""
    sandwich_norms: bool = False
    """Also normalise the output of attention and of the feed-forward layer, before it is added to
    the residual stream (Gemma 2, arXiv:2408.00118)."""
    bias: bool = False
    """Whether linear layers of the blocks have biases, experts and routers included. shared_gate,
    MTP's merge and the head never have one."""
    causal: bool = True
    """Whether tokens attend to earlier tokens only; false: to all tokens, as in an encoder."""
    window: int = Field(default=0, ge=0, le=2**31)
    """Sliding window: maximum number of tokens that a token attends to, including itself
    (arXiv:2004.05150); 0: full causal attention."""
    full_attention_every: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """n: every n-th layer has full attention, the other layers have the window (gpt-oss: 2), or are
    a gated delta net (delta_key_heads). 0: all layers have the window."""
    global_head_dim: int = Field(default=0, ge=0, le=2**16)
    """Width of a head in layers without a window, in a model that has both (Gemma 4); 0: as in
    layers with one."""
    global_kv_heads: int = Field(default=0, ge=0, le=2**16)
    """Number of key and value heads in layers without a window, in a model that has both; 0: as in
    layers with one."""
    keys_as_values: bool = False
    """Layers without a window have no wv: their values are the results of wk, before the keys are
    normalised and rotated (Gemma 4)."""
    value_norm: bool = False
    """Normalise every value head by an RMSNorm without a weight (Gemma 4)."""
    layer_scalars: bool = False
    """Multiply each block's output by a learned scalar (Gemma 4)."""
    softcap: float = Field(default=0.0, ge=0, le=MOST_FACTOR)
    """Soft cap c: attention scores s become c tanh(s / c) (Gemma 2, arXiv:2408.00118); 0: off."""
    query_pre_attn_scalar: int = Field(default=0, ge=0, le=2**16)
    """n: attention scores are q k^T / sqrt(n), as in Gemma; 0: the width of a head."""
    sinks: bool = False
    """Attention sinks: one learned score per head in the softmax, without a value (gpt-oss,
    arXiv:2508.10925; arXiv:2309.17453)."""
    output_gate: bool = False
    """Multiply attention's output, before wo, by a learned sigmoid gate per element (Qwen3.5,
    arXiv:2505.06708)."""
    layer_pattern: str = Field(default="", max_length=MAX_LAYERS, pattern=r"^[M*E-]*$")
    """Kind of each layer, of which each then has one norm and one sum, as in Nemotron-H: M
    (Mamba-2), * (attention), - (feed-forward), E (experts); repeated as often as n_layers needs.
    Empty: each layer has attention, or a gated delta net, and a feed-forward layer."""
    mamba_heads: int = Field(default=0, ge=0, le=2**16)
    """Mamba-2 (arXiv:2405.21060): number of heads."""
    mamba_groups: int = Field(default=0, ge=0, le=2**16)
    """Mamba-2: number of groups of heads that share b and c (n_groups of transformers)."""
    mamba_head_dim: int = Field(default=0, ge=0, le=2**16)
    """Mamba-2: width of a head."""
    mamba_state_dim: int = Field(default=0, ge=0, le=2**16)
    """Mamba-2: width of the state, of which each channel of a head has one."""
    mamba_conv: int = Field(default=4, ge=1, le=64)
    """Mamba-2: number of tokens that the causal convolution sees, with the token itself."""
    mamba_dt_min: float = Field(default=0.0, ge=0, le=MOST_FACTOR)
    """Mamba-2: lower bound of time steps, as time_step_min of transformers' Nemotron-H; 0: none."""
    delta_key_heads: int = Field(default=0, ge=0, le=2**16)
    """Number of query and key heads of the gated delta net (arXiv:2412.06464), in all layers but
    every full_attention_every-th; 0: no such layers."""
    delta_value_heads: int = Field(default=0, ge=0, le=2**16)
    """Gated delta net: number of value heads, a multiple of delta_key_heads."""
    delta_key_dim: int = Field(default=0, ge=0, le=2**16)
    """Gated delta net: width of a query or key head."""
    delta_value_dim: int = Field(default=0, ge=0, le=2**16)
    """Gated delta net: width of a value head."""
    delta_conv: int = Field(default=4, ge=1, le=64)
    """Gated delta net: number of tokens that the causal convolution sees, with the token itself."""
    delta_kernel: Literal["torch", "fla"] = "torch"
    """Gated delta net: implementation of the delta rule (dtron.models.delta_rule.DELTA_KERNELS);
    fla: the package flash-linear-attention, on GPUs."""
    kv_lora_rank: int = Field(default=0, ge=0, le=2**20)
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values come from a
    latent vector of this width; 0: ordinary attention."""
    q_lora_rank: int = Field(default=0, ge=0, le=2**20)
    """Latent attention: queries come from a latent vector of this width; 0: from the input."""
    nope_head_dim: int = Field(default=0, ge=0, le=2**16)
    """Latent attention: width of the part of query and key heads that is not rotated."""
    rope_head_dim: int = Field(default=0, ge=0, le=2**16)
    """Latent attention: width of the rotated part of query and key heads. All heads share the
    rotated part of the key."""
    v_head_dim: int = Field(default=0, ge=0, le=2**16)
    """Latent attention: width of value heads, at most the width of query heads."""
    positions: Literal["rope", "learned", "relative", "none"] = "rope"
    """`rope`: queries and keys are rotated by their position (arXiv:2104.09864). `learned`: a
    position embedding is added to the token embedding. `relative`: each head adds a learned bias to
    attention scores, by the distance of query and key (T5, arXiv:1910.10683). `none`: only the
    causal mask and recurrent layers tell positions apart."""
    relative_buckets: int = Field(default=32, ge=4, le=2**16)
    """`positions = "relative"`: number of groups of distances that share a bias."""
    relative_distance: int = Field(default=128, ge=2, le=2**31)
    """`positions = "relative"`: all distances from this one on share a bias."""
    max_seq_len: int = Field(default=2048, ge=1, le=2**31)
    """Maximum sequence length with `positions = "learned"`, in tokens; the others have no limit."""
    token_types: int = Field(default=0, ge=0, le=2**16)
    """Number of token types, whose embeddings are added to those of tokens (BERT). dtron's data
    have type 0 only. 0: no such embeddings."""
    rope_theta: float = Field(default=10000.0, gt=0, le=MOST_FACTOR)
    """Base of the rotation frequencies."""
    rope_local_theta: float = Field(default=0.0, ge=0, le=MOST_FACTOR)
    """Base of the rotation frequencies in layers with a window, which rope scaling then leaves
    unchanged (Gemma 3, arXiv:2503.19786); 0: as in the other layers."""
    rope_fraction: float = Field(default=1.0, gt=0, le=1)
    """Fraction of each head that is rotated, its first elements (partial rotary)."""
    rope_global_fraction: float = Field(default=1.0, gt=0, le=1)
    """Fraction of the rotation frequencies, the fastest, with which layers without a window rotate;
    the others are 0 (proportional rope, Gemma 4)."""
    rope_scaling: Literal["llama3", "yarn", "linear"] = "llama3"
    """Method of context extension: `llama3`, as in Llama 3.1 (arXiv:2407.21783), `yarn`
    (arXiv:2309.00071), or `linear`, all frequencies alike (arXiv:2306.15595); see
    dtron.models.rope.SCALINGS."""
    rope_scaling_factor: float = Field(default=1.0, ge=1, le=MOST_FACTOR)
    """Context extension divides low frequencies by this factor; 1: no scaling."""
    rope_original_context: int = Field(default=8192, ge=1, le=2**31)
    """Context length before extension, in tokens."""
    rope_low_freq_factor: float = Field(default=1.0, gt=0, le=MOST_FACTOR)
    """llama3: wavelengths above rope_original_context / rope_low_freq_factor are fully scaled."""
    rope_high_freq_factor: float = Field(default=4.0, gt=0, le=MOST_FACTOR)
    """llama3: wavelengths below rope_original_context / rope_high_freq_factor are not scaled."""
    rope_beta_fast: float = Field(default=32.0, gt=0, le=MOST_FACTOR)
    """yarn: frequencies with at least this many turns in rope_original_context are not scaled."""
    rope_beta_slow: float = Field(default=1.0, gt=0, le=MOST_FACTOR)
    """yarn: frequencies with at most this many turns in rope_original_context are fully scaled."""
    rope_truncate: bool = True
    """yarn: round the bounds of the partly scaled dimensions outwards; gpt-oss does not round."""
    rope_mscale: float = Field(default=1.0, ge=0, le=MOST_FACTOR)
    """yarn: cosines and sines, and so queries and keys, are multiplied by
    (0.1 rope_mscale ln s + 1) / (0.1 rope_mscale_all_dim ln s + 1), s = rope_scaling_factor."""
    rope_mscale_all_dim: float = Field(default=0.0, ge=0, le=MOST_FACTOR)
    """yarn: see rope_mscale. Latent attention also multiplies all attention scores by
    (0.1 rope_mscale_all_dim ln s + 1)^2 (DeepSeek-V3)."""
    tied: bool = False
    """Whether the head uses the embedding's weight."""
    scale_embeddings: bool = False
    """Multiply token embeddings by sqrt(dim), rounded to the dtype of computation (Gemma)."""
    logit_softcap: float = Field(default=0.0, ge=0, le=MOST_FACTOR)
    """Soft cap c: logits z become c tanh(z / c) (Gemma 2, arXiv:2408.00118); 0: off."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the embeddings and of each attention and feed-forward layer's output."""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the attention weights; only the `math` attention backend supports it."""
    n_experts: int = Field(default=0, ge=0, le=2**16)
    """Number of routed experts per layer (arXiv:1701.06538); 0: all layers are dense."""
    experts_per_token: int = Field(default=0, ge=0, le=2**16)
    """Top-k: number of routed experts per token."""
    expert_dim: int = Field(default=0, ge=0, le=2**20)
    """Hidden width of an expert."""
    first_dense_layers: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """Number of dense layers before the first layer with experts; their hidden width is ffn_dim."""
    n_shared_experts: int = Field(default=0, ge=0, le=2**10)
    """Number of shared experts, which process every token (DeepSeekMoE, arXiv:2401.06066). They are
    one feed-forward layer with a hidden width of n_shared_experts * expert_dim."""
    shared_gate: bool = False
    """Multiply the shared experts' output by a learned sigmoid gate per token (Qwen2-MoE)."""
    router: Literal["softmax", "sigmoid", "topk_softmax", "sinkhorn"] = "softmax"
    """How router logits select and weight experts (dtron.models.router.ROUTERS)."""
    renormalize: bool = False
    """Routers softmax and sigmoid: divide a token's expert weights by their sum."""
    routed_scaling: float = Field(default=1.0, gt=0, le=MOST_FACTOR)
    """Factor on the weights of the routed experts."""
    n_groups: int = Field(default=1, ge=1, le=2**16)
    """Routers softmax and sigmoid: number of groups of experts. A token selects experts within its
    top_groups best groups (device-limited routing, arXiv:2405.04434). 1: no groups."""
    top_groups: int = Field(default=1, ge=1, le=2**16)
    """Number of groups from which a token may select experts."""
    bias_speed: float = Field(default=0.0, ge=0, le=MOST_FACTOR)
    """Routers softmax and sigmoid: update rate of each expert's bias, which balances loads and
    affects only the selection (auxiliary-loss-free balancing, arXiv:2408.15664); 0: no bias."""
    balance: Literal["none", "sequence", "micro_batch", "global_batch"] = "none"
    """Auxiliary load-balancing loss (arXiv:2006.16668, 2101.03961). The value names the tokens over
    which it counts loads: a sequence, a micro-batch, or (global_batch) all micro-batches of the
    step so far (arXiv:2501.11873)."""
    balance_coefficient: float = Field(default=0.0, ge=0, le=MOST_FACTOR)
    """Weight of the load-balancing loss. (The loss itself is 1 for even loads.)"""
    z_loss: float = Field(default=0.0, ge=0, le=MOST_FACTOR)
    """Weight of the mean square of the router's log-sum-exp (ST-MoE, arXiv:2202.08906)."""
    jitter: float = Field(default=0.0, ge=0, lt=1)
    """In training, multiply the router's input by uniform noise in [1 - jitter, 1 + jitter)
    (Switch Transformer, arXiv:2101.03961)."""
    capacity_factor: float = Field(default=0.0, ge=0, le=MOST_FACTOR)
    """Capacity of an expert, as a multiple of the mean load of a micro-batch; an expert drops its
    last tokens over capacity (GShard, arXiv:2006.16668). 0: dropless."""
    capacity_pad: bool = False
    """Pad each expert's input with zeros to its capacity, for static shapes."""
    mtp: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): number of extra blocks,
    with attention, and with experts if the model has them. Block k = 0, 1, ... predicts the token
    k + 2 ahead. 0: no MTP."""
    mtp_coefficient: float = Field(default=0.3, gt=0, le=MOST_FACTOR)
    """Weight of the mean of the MTP losses."""
    force_balance: bool = False
    """For benchmarks: assign experts round-robin instead of by the router, for even loads."""
    vision_layers: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """Number of blocks of the vision encoder (ViT, arXiv:2010.11929), in models that have one
    (llava)."""
    vision_dim: int = Field(default=0, ge=0, le=2**20)
    """Vision encoder: width."""
    vision_heads: int = Field(default=0, ge=0, le=2**16)
    """Vision encoder: number of heads, each of width vision_dim / vision_heads."""
    vision_ffn_dim: int = Field(default=0, ge=0, le=2**24)
    """Vision encoder: hidden width of the feed-forward layers."""
    vision_image_size: int = Field(default=0, ge=0, le=2**14)
    """Vision encoder: height and width of an image, in pixels."""
    vision_patch_size: int = Field(default=0, ge=0, le=2**14)
    """Vision encoder: height and width of a patch, in pixels. A patch becomes one token; pixels
    that fill no patch are not read."""
    image_token: int = Field(default=0, ge=0, le=2**28)
    """Id of the placeholder token, in whose places the tokens of images are."""

    if TYPE_CHECKING:  # pydantic defines it for frozen models

        def __hash__(self) -> int: ...

    @property
    def head_size(self) -> int:
        """Width of a query or key head, with head_dim = 0 resolved."""
        if self.kv_lora_rank:
            return self.nope_head_dim + self.rope_head_dim
        return self.head_dim or self.dim // self.n_heads

    @property
    def v_head_size(self) -> int:
        """Width of a value head."""
        return self.v_head_dim if self.kv_lora_rank else self.head_size

    @property
    def rope_size(self) -> int:
        """Width of the rotated part of a head."""
        if self.kv_lora_rank:
            return self.rope_head_dim
        return int(self.head_size * self.rope_fraction)

    def local_kv_heads(self, tp: int) -> int:
        """Number of key and value heads per tp rank; 1 if tp > n_kv_heads: ranks share a head."""
        return max(1, self.n_kv_heads // tp)

    @property
    def has_full_layers(self) -> bool:
        """Whether attention layers have no window, all or some of them."""
        return not self.window or bool(self.full_attention_every)

    @property
    def full_layers_differ(self) -> bool:
        """Whether layers without a window have other weights than layers with one."""
        differs = self.global_head_dim or self.global_kv_heads or self.keys_as_values
        return bool(self.window and self.full_attention_every and differs)

    def of_layer(self, kind: LayerKind) -> "DecoderConfig":
        """Return the config with the sizes of attention in layers of this kind."""
        if not self.full_layers_differ:
            return self
        sizes: dict[str, Any] = {"global_head_dim": 0, "global_kv_heads": 0}
        if not kind.full:
            return self.model_copy(update={**sizes, "keys_as_values": False})
        sizes["head_dim"] = self.global_head_dim or self.head_dim
        sizes["n_kv_heads"] = self.global_kv_heads or self.n_kv_heads
        return self.model_copy(update={**sizes, "window": 0, "full_attention_every": 0})

    @property
    def attention_configs(self) -> "tuple[DecoderConfig, ...]":
        """`of_layer` of each kind of attention."""
        kinds = (LayerKind(), LayerKind(full=True)) if self.full_layers_differ else (LayerKind(),)
        return tuple(self.of_layer(kind) for kind in kinds)

    @property
    def n_expert_layers(self) -> int:
        """Number of layers with experts, without MTP blocks."""
        return sum(kind.experts for kind in self.layer_kinds[: self.n_layers])

    @property
    def n_dense_layers(self) -> int:
        """Number of layers with a dense feed-forward layer, without MTP blocks."""
        return sum(kind.ffn == "dense" for kind in self.layer_kinds[: self.n_layers])

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kind of each layer, then of each MTP block."""
        if self.encoder_layers:
            encoder = [LayerKind(encoder=True)] * (self.encoder_layers - 1)
            decoder = [LayerKind(cross=True)] * (self.n_layers - self.encoder_layers)
            return (*encoder, LayerKind(encoder=True, normed=True), *decoder)
        pattern, ffn = self.layer_pattern, "experts" if self.n_experts else "dense"
        if pattern:
            layers = (PATTERN[pattern[layer % len(pattern)]] for layer in range(self.n_layers))
        else:
            layers = (self._layer_kind(layer) for layer in range(self.n_layers))
        return (*layers, *[LayerKind(ffn=ffn, mtp=True)] * self.mtp)

    def _layer_kind(self, layer: int) -> LayerKind:
        """Return the kind of a layer of a model without `layer_pattern`."""
        every = self.full_attention_every
        last = bool(every) and (layer + 1) % every == 0
        mixer = "delta" if self.delta_key_heads and not last else "attention"
        experts = self.n_experts and layer >= self.first_dense_layers
        full = last and self.full_layers_differ
        return LayerKind(mixer, "experts" if experts else "dense", full=full)

    @property
    def has_recurrent_layers(self) -> bool:
        """Whether layers are gated delta nets or Mamba-2."""
        return any(kind.recurrent for kind in self.layer_kinds)

    def n_layers_of(self, mixer: str) -> int:
        """Return the number of layers with this `LayerKind.mixer`, with MTP blocks."""
        return sum(kind.mixer == mixer for kind in self.layer_kinds)

    @property
    def windows(self) -> tuple[int, ...]:
        """Sliding window of each layer, in tokens; 0: full attention."""
        every = self.full_attention_every
        return tuple(
            0 if every and (layer + 1) % every == 0 else self.window
            for layer in range(self.n_layers)
        )

    @property
    def head_sizes(self) -> tuple[int, ...]:
        """Width of a query head in each layer."""
        usual, *full = (config.head_size for config in self.attention_configs)
        return tuple(usual if w or not full else full[0] for w in self.windows)

    @property
    def local_rope(self) -> "DecoderConfig | None":
        """The config whose rotary frequencies layers with a window have; None: `full_rope`."""
        differs = self.rope_local_theta or self.rope_global_fraction < 1 or self.global_head_dim
        if not (self.window and differs):
            return None
        local: dict[str, Any] = {"rope_global_fraction": 1.0}
        if self.rope_local_theta:
            local |= {"rope_theta": self.rope_local_theta, "rope_scaling_factor": 1.0}
            local["rope_scaling"] = "llama3"
        return self.of_layer(LayerKind()).model_copy(update=local)

    @property
    def full_rope(self) -> "DecoderConfig":
        """The config whose rotary frequencies layers without a window have."""
        return self.of_layer(LayerKind(full=True))

    @property
    def delta_channels(self) -> int:
        """Gated delta net: width of all queries, keys and values."""
        keys = 2 * self.delta_key_heads * self.delta_key_dim
        return keys + self.delta_value_heads * self.delta_value_dim

    @property
    def mamba_channels(self) -> int:
        """Mamba-2: width of all inputs, b and c."""
        states = 2 * self.mamba_groups * self.mamba_state_dim
        return self.mamba_heads * self.mamba_head_dim + states

    @property
    def image_tokens(self) -> int:
        """Number of tokens per image; 0 without a vision encoder."""
        patch = self.vision_patch_size
        return (self.vision_image_size // patch) ** 2 if self.vision_layers and patch else 0

    @property
    def draws(self) -> bool:
        """Whether training draws random numbers and so needs `dropout_keys`."""
        return bool(self.dropout or self.attention_dropout or self.jitter)

    @property
    def lookup_params(self) -> int:
        """Number of parameters that no matmul uses: untied token embeddings, learned positions."""
        tokens = 0 if self.tied else self.vocab_size * self.dim
        positions = self.max_seq_len * self.dim if self.positions == "learned" else 0
        if self.positions == "relative":
            positions = 2 * self.relative_buckets * self.n_heads
        return tokens + positions + self.token_types * self.dim

    @model_validator(mode="after")
    def _check(self) -> "DecoderConfig":
        if broken := list(broken_rules(self)):
            raise ValueError("\n".join(broken))
        return self


def overridden(config: DecoderConfig, values: Mapping[str, Any]) -> DecoderConfig:
    """Return the config with some fields replaced by the user's `[model.override]`.

    Raises:
        ConfigError: unknown field, illegal value, or inconsistent values. Each error is one line
            that starts with its key under `model.override`.
    """
    try:
        return DecoderConfig.model_validate({**config.model_dump(), **values})
    except ValidationError as error:
        first = error.errors()[0]
        if "ctx" in first and first["type"] == "value_error":  # from _check, one line per field
            broken = str(first["ctx"]["error"]).splitlines()
            raise ConfigError("\n".join(f"model.override.{each}" for each in broken)) from None
        known = [f"model.override.{name}" for name in DecoderConfig.model_fields]
        raise config_error(error, "model.override", known) from None
