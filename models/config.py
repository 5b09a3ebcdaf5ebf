"""Configuration of a decoder-only transformer: one flat, frozen DecoderConfig per size.

Fields are flat so that each can be overridden alone, as `model.override.KEY=value`. Derived values
are properties and are never stored.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dtron.config.schema import MAX_LAYERS
from dtron.errors import ConfigError, config_error
from dtron.models.field_rules import broken_rules

MOST_FACTOR = 1e30


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
    """Size of the vocabulary; at least that of the tokenizer."""
    dim: int = Field(ge=1, le=2**20)
    """Width of the residual stream."""
    n_layers: int = Field(ge=1, le=MAX_LAYERS)
    """Transformer blocks."""
    n_heads: int = Field(ge=1, le=2**16)
    """Query heads per block."""
    n_kv_heads: int = Field(ge=1, le=2**16)
    """Key and value heads per block; fewer than n_heads is grouped-query attention, 1 is
    multi-query attention (arXiv:2305.13245)."""
    head_dim: int = Field(default=0, ge=0, le=2**16)
    """Width of a head; 0: dim / n_heads."""
    ffn_dim: int = Field(default=0, ge=0, le=2**24)
    """Hidden width of the dense feed-forward layers; 0 if every layer has experts."""
    activation: Literal["swiglu", "geglu", "gelu", "relu2", "clamped_swiglu"] = "swiglu"
    """A row of dtron.models.layers.ACTIVATIONS; swiglu, geglu and clamped_swiglu have a gate
    projection."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """A row of dtron.models.layers.NORMS."""
    norm_eps: float = Field(default=1e-5, gt=0, le=MOST_FACTOR)
    """Added to the variance before the square root; norms of latent vectors use 1e-6."""
    norm_zero_centered: bool = False
    """Store norm weights as gamma - 1, as Megatron-LM checkpoints may do. Norm weights have no
    weight decay in either form."""
    qk_norm: bool = False
    """Normalise every query and key head (arXiv:2302.05442)."""
    bias: bool = False
    """Biases in all linear layers of the blocks, including experts and routers; the head has
    none."""
    window: int = Field(default=0, ge=0, le=2**31)
    """Sliding window: a token attends to this many tokens, itself included (arXiv:2004.05150);
    0: full causal attention."""
    full_attention_every: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """n: every n-th layer has full attention (gpt-oss: 2); 0: all layers have the window."""
    softcap: float = Field(default=0.0, ge=0, le=MOST_FACTOR)
    """c: attention scores s become c tanh(s / c) (Gemma 2, arXiv:2408.00118); 0: off."""
    sinks: bool = False
    """Attention sinks: one learned score per head in the softmax, without a value (gpt-oss,
    arXiv:2508.10925; arXiv:2309.17453)."""
    kv_lora_rank: int = Field(default=0, ge=0, le=2**20)
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): keys and values come from a
    latent vector of this width; 0: ordinary attention."""
    q_lora_rank: int = Field(default=0, ge=0, le=2**20)
    """Latent attention: queries come from a latent vector of this width; 0: from the input."""
    nope_head_dim: int = Field(default=0, ge=0, le=2**16)
    """Latent attention: width of the part of query and key heads that is not rotated."""
    rope_head_dim: int = Field(default=0, ge=0, le=2**16)
    """Latent attention: width of the part that is rotated, whose key all heads share."""
    v_head_dim: int = Field(default=0, ge=0, le=2**16)
    """Latent attention: width of value heads, at most that of query heads."""
    positions: Literal["rope", "learned"] = "rope"
    """`rope`: queries and keys are rotated by their position (arXiv:2104.09864). `learned`: a
    position embedding is added to the token embedding."""
    max_seq_len: int = Field(default=2048, ge=1, le=2**31)
    """Positions of `positions = "learned"`; rope has no limit."""
    rope_theta: float = Field(default=10000.0, gt=0, le=MOST_FACTOR)
    """Base of the rotation frequencies."""
    rope_scaling: Literal["llama3", "yarn"] = "llama3"
    """How the context is extended: as in Llama 3.1 (arXiv:2407.21783) or by YaRN
    (arXiv:2309.00071). A row of dtron.models.rope.SCALINGS."""
    rope_scaling_factor: float = Field(default=1.0, ge=1, le=MOST_FACTOR)
    """Low frequencies are divided by this; 1: no scaling."""
    rope_original_context: int = Field(default=8192, ge=1, le=2**31)
    """Tokens of context before extension."""
    rope_low_freq_factor: float = Field(default=1.0, gt=0, le=MOST_FACTOR)
    """llama3: wavelengths above rope_original_context / this are scaled in full."""
    rope_high_freq_factor: float = Field(default=4.0, gt=0, le=MOST_FACTOR)
    """llama3: wavelengths below rope_original_context / this are not scaled."""
    rope_beta_fast: float = Field(default=32.0, gt=0, le=MOST_FACTOR)
    """yarn: frequencies that turn at least this often in rope_original_context are not scaled."""
    rope_beta_slow: float = Field(default=1.0, gt=0, le=MOST_FACTOR)
    """yarn: frequencies that turn at most this often in rope_original_context are scaled in
    full."""
    rope_truncate: bool = True
    """yarn: round the first and last scaled dimension down and up; gpt-oss does not."""
    rope_mscale: float = Field(default=1.0, ge=0, le=MOST_FACTOR)
    """yarn: cosines and sines, and so queries and keys, are multiplied by
    (0.1 rope_mscale ln s + 1) / (0.1 rope_mscale_all_dim ln s + 1), s = rope_scaling_factor."""
    rope_mscale_all_dim: float = Field(default=0.0, ge=0, le=MOST_FACTOR)
    """yarn: see rope_mscale. Latent attention also multiplies all attention scores by
    (0.1 rope_mscale_all_dim ln s + 1)^2 (DeepSeek-V3)."""
    tied: bool = False
    """The head uses the embedding's weight."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the embeddings and of each attention and feed-forward layer's output."""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the attention weights; only the `math` attention backend supports it."""
    n_experts: int = Field(default=0, ge=0, le=2**16)
    """Routed experts per layer (arXiv:1701.06538); 0: all layers are dense."""
    experts_per_token: int = Field(default=0, ge=0, le=2**16)
    """Top-k: routed experts per token."""
    expert_dim: int = Field(default=0, ge=0, le=2**20)
    """Hidden width of an expert."""
    first_dense_layers: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """Dense layers before the first layer with experts; their width is ffn_dim."""
    n_shared_experts: int = Field(default=0, ge=0, le=2**10)
    """Shared experts, which process every token, computed as one feed-forward layer of this many
    times expert_dim (DeepSeekMoE, arXiv:2401.06066)."""
    shared_gate: bool = False
    """Multiply the shared experts' output by a learned sigmoid gate per token (Qwen2-MoE)."""
    router: Literal["softmax", "sigmoid", "topk_softmax", "sinkhorn"] = "softmax"
    """A row of dtron.models.router.ROUTERS: how logits select and weight experts."""
    renormalize: bool = False
    """softmax and sigmoid: divide a token's expert weights by their sum."""
    routed_scaling: float = Field(default=1.0, gt=0, le=MOST_FACTOR)
    """Factor on the weights of the routed experts."""
    n_groups: int = Field(default=1, ge=1, le=2**16)
    """softmax and sigmoid: groups of experts; a token selects its experts within its top_groups
    best groups (device-limited routing, arXiv:2405.04434); 1: no groups."""
    top_groups: int = Field(default=1, ge=1, le=2**16)
    """Groups that a token may select experts from."""
    bias_speed: float = Field(default=0.0, ge=0, le=MOST_FACTOR)
    """softmax and sigmoid: update rate of a bias per expert that affects the selection only and
    balances loads (auxiliary-loss-free balancing, arXiv:2408.15664); 0: no bias."""
    balance: Literal["none", "sequence", "micro_batch", "global_batch"] = "none"
    """Auxiliary load-balancing loss (arXiv:2006.16668, 2101.03961), and the tokens over which it
    counts loads: a sequence, a micro-batch, or all micro-batches of the step so far
    (arXiv:2501.11873)."""
    balance_coefficient: float = Field(default=0.0, ge=0, le=MOST_FACTOR)
    """Weight of the load-balancing loss, which is 1 for even loads."""
    z_loss: float = Field(default=0.0, ge=0, le=MOST_FACTOR)
    """Weight of the mean square of the router's log-sum-exp (ST-MoE, arXiv:2202.08906)."""
    jitter: float = Field(default=0.0, ge=0, lt=1)
    """In training, multiply the router's input by uniform noise in [1 - jitter, 1 + jitter)
    (Switch Transformer, arXiv:2101.03961)."""
    capacity_factor: float = Field(default=0.0, ge=0, le=MOST_FACTOR)
    """Capacity of an expert, as a multiple of the mean load of a micro-batch; the last tokens over
    it are dropped (GShard, arXiv:2006.16668). 0: dropless."""
    capacity_pad: bool = False
    """Pad each expert's input with zeros to its capacity, for static shapes."""
    mtp: int = Field(default=0, ge=0, le=MAX_LAYERS)
    """Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): number of extra blocks
    with experts; block k predicts the token k + 2 ahead, k = 0, 1, ...; 0: none."""
    mtp_coefficient: float = Field(default=0.3, gt=0, le=MOST_FACTOR)
    """Weight of the mean of the MTP losses."""
    force_balance: bool = False
    """For benchmarks: assign experts round-robin instead of by the router, for even loads."""

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
        return self.rope_head_dim if self.kv_lora_rank else self.head_size

    def local_kv_heads(self, tp: int) -> int:
        """Key and value heads of one of `tp` ranks; with more ranks than heads they share one."""
        return max(1, self.n_kv_heads // tp)

    @property
    def n_expert_layers(self) -> int:
        """Layers with experts; they come last."""
        return self.n_layers - self.first_dense_layers if self.n_experts else 0

    @property
    def n_dense_layers(self) -> int:
        """Layers without experts; they come first."""
        return self.n_layers - self.n_expert_layers

    @property
    def windows(self) -> tuple[int, ...]:
        """The window of each layer; 0: none."""
        every = self.full_attention_every
        return tuple(
            0 if every and (layer + 1) % every == 0 else self.window
            for layer in range(self.n_layers)
        )

    @property
    def draws(self) -> bool:
        """Whether training draws random numbers and so needs `dropout_keys`."""
        return bool(self.dropout or self.attention_dropout or self.jitter)

    @property
    def lookup_params(self) -> int:
        """Parameters that are only looked up, never in a matmul: untied embeddings."""
        tokens = 0 if self.tied else self.vocab_size * self.dim
        positions = self.max_seq_len * self.dim if self.positions == "learned" else 0
        return tokens + positions

    @model_validator(mode="after")
    def _check(self) -> "DecoderConfig":
        if broken := list(broken_rules(self)):
            raise ValueError("\n".join(broken))
        return self


def overridden(config: DecoderConfig, values: Mapping[str, Any]) -> DecoderConfig:
    """Return the config with some fields replaced by the user's `[model.override]`.

    Raises:
        ConfigError: unknown field, illegal value, or inconsistent values; one line per error, which
            starts with the key under `model.override`.
    """
    try:
        return DecoderConfig.model_validate({**config.model_dump(), **values})
    except ValidationError as error:
        first = error.errors()[0]
        if "ctx" in first and first["type"] == "value_error":  # from _check; starts with the field
            broken = str(first["ctx"]["error"]).splitlines()
            raise ConfigError("\n".join(f"model.override.{each}" for each in broken)) from None
        known = [f"model.override.{name}" for name in DecoderConfig.model_fields]
        raise config_error(error, "model.override", known) from None
