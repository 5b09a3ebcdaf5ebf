"""What a decoder-only transformer is made of: one flat, frozen description a size.

Fields are flat so that each can be set alone, as `model.override.KEY=value`. Derived values are
properties; nothing is written back.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dtron.config.schema import MOST_LAYERS
from dtron.errors import ConfigError, config_error
from dtron.models.rules import broken_rules, either

MOST_FACTOR = 1e30


class DecoderConfig(BaseModel):
    """Shape and ingredients of a `dtron.models.decoder.Decoder`."""

    model_config = ConfigDict(
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
        use_attribute_docstrings=True,
        protected_namespaces=(),
    )

    vocab_size: int = Field(ge=1, le=2**28)
    """Tokens of the vocabulary; it has to cover the tokenizer's."""
    dim: int = Field(ge=1, le=2**20)
    """Width of the residual stream."""
    n_layers: int = Field(ge=1, le=MOST_LAYERS)
    """Transformer blocks."""
    n_heads: int = Field(ge=1, le=2**16)
    """Query heads a block."""
    n_kv_heads: int = Field(ge=1, le=2**16)
    """Key and value heads a block; fewer than n_heads is grouped-query attention, 1 is
    multi-query attention (arXiv:2305.13245)."""
    head_dim: int = Field(default=0, ge=0, le=2**16)
    """Width of a head; 0: dim / n_heads."""
    ffn_dim: int = Field(default=0, ge=0, le=2**24)
    """Hidden width of the feed-forward layer; 0 where every layer has experts instead."""
    activation: Literal["swiglu", "geglu", "gelu", "relu2", "clamped_swiglu"] = "swiglu"
    """A row of dtron.models.layers.ACTIVATIONS; swiglu, geglu and clamped_swiglu have a gate
    projection."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """A row of dtron.models.layers.NORMS."""
    norm_eps: float = Field(default=1e-5, gt=0, le=MOST_FACTOR)
    """Added to the variance before its root is taken; norms of latents add 1e-6."""
    norm_zero_centered: bool = False
    """Store norm weights as gamma - 1, as checkpoints of Megatron-LM may have them. Norms are not
    decayed either way."""
    qk_norm: bool = False
    """Normalise every query and key head (arXiv:2302.05442)."""
    bias: bool = False
    """Biases in the linear layers of the blocks, experts and routers too; the head never has
    one."""
    window: int = Field(default=0, ge=0, le=2**31)
    """Sliding window: a token attends to this many tokens, itself included (arXiv:2004.05150);
    0: to all before it."""
    full_attention_every: int = Field(default=0, ge=0, le=MOST_LAYERS)
    """n: of every n layers the last has no window, as in gpt-oss with 2; 0: all have it."""
    softcap: float = Field(default=0.0, ge=0, le=MOST_FACTOR)
    """c: attention scores s become c tanh(s / c) (Gemma 2, arXiv:2408.00118); 0: off."""
    sinks: bool = False
    """A learned score a head that takes part in the softmax without a value (gpt-oss,
    arXiv:2508.10925; attention sinks, arXiv:2309.17453)."""
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
    """`rope`: queries and keys are rotated by their position (arXiv:2104.09864). `learned`: an
    embedding a position is added to the token's."""
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
    """yarn: those two numbers of dimensions are rounded down and up; gpt-oss does not."""
    rope_mscale: float = Field(default=1.0, ge=0, le=MOST_FACTOR)
    """yarn: cosines and sines, and so queries and keys, are multiplied by
    (0.1 rope_mscale ln s + 1) / (0.1 rope_mscale_all_dim ln s + 1), s = rope_scaling_factor."""
    rope_mscale_all_dim: float = Field(default=0.0, ge=0, le=MOST_FACTOR)
    """yarn: see rope_mscale. For models with parts of heads that are not rotated, which multiply
    all their scores instead (DeepSeek-V3)."""
    tied: bool = False
    """The head uses the embedding's weight."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the embeddings and of what each attention and feed-forward layer adds."""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the attention weights; the `math` attention backend alone supports it."""
    n_experts: int = Field(default=0, ge=0, le=2**16)
    """Experts of a layer, of which each token takes some (arXiv:1701.06538); 0: all layers are
    dense."""
    experts_per_token: int = Field(default=0, ge=0, le=2**16)
    """Experts that a token takes."""
    expert_dim: int = Field(default=0, ge=0, le=2**20)
    """Hidden width of an expert."""
    first_dense_layers: int = Field(default=0, ge=0, le=MOST_LAYERS)
    """Layers before the first with experts; they have ffn_dim."""
    n_shared_experts: int = Field(default=0, ge=0, le=2**10)
    """Experts that every token takes beside its own, as one layer of this many times expert_dim
    (DeepSeekMoE, arXiv:2401.06066)."""
    shared_gate: bool = False
    """The shared experts' output is multiplied by a learned sigmoid a token (Qwen2-MoE)."""
    router: Literal["softmax", "sigmoid", "topk_softmax", "sinkhorn"] = "softmax"
    """A row of dtron.models.router.ROUTERS: how logits become experts and weights."""
    renormalize: bool = False
    """softmax and sigmoid: a token's weights are divided by their sum."""
    routed_scaling: float = Field(default=1.0, gt=0, le=MOST_FACTOR)
    """The experts' weights are multiplied by this."""
    n_groups: int = Field(default=1, ge=1, le=2**16)
    """softmax and sigmoid: groups of experts, of which a token takes top_groups and in them its
    experts (device-limited routing, arXiv:2405.04434; 1: no groups)."""
    top_groups: int = Field(default=1, ge=1, le=2**16)
    """Groups that a token may take experts from."""
    bias_speed: float = Field(default=0.0, ge=0, le=MOST_FACTOR)
    """softmax and sigmoid: a bias an expert, which acts on the choice alone, moves by this after
    each step towards even loads (auxiliary-loss-free balancing, arXiv:2408.15664); 0: no bias."""
    balance: Literal["none", "sequence", "micro_batch", "global_batch"] = "none"
    """An auxiliary loss for even loads (arXiv:2006.16668, 2101.03961), over what its loads are
    counted: each sequence, a micro-batch, or all micro-batches of the step so far
    (arXiv:2501.11873)."""
    balance_coefficient: float = Field(default=0.0, ge=0, le=MOST_FACTOR)
    """Weight of the balance loss; the loss is 1 where loads are even."""
    z_loss: float = Field(default=0.0, ge=0, le=MOST_FACTOR)
    """Weight of the mean square of the router's log-sum-exp (ST-MoE, arXiv:2202.08906)."""
    jitter: float = Field(default=0.0, ge=0, lt=1)
    """In training the router's input is multiplied by uniform noise in 1 - jitter to 1 + jitter
    (Switch Transformer, arXiv:2101.03961)."""
    capacity_factor: float = Field(default=0.0, ge=0, le=MOST_FACTOR)
    """An expert takes at most this times the mean load of a micro-batch, the first tokens first;
    what is over is dropped (GShard, arXiv:2006.16668). 0: nothing is dropped."""
    capacity_pad: bool = False
    """Every expert computes as many rows as it may take, zeros where fewer came."""
    mtp: int = Field(default=0, ge=0, le=MOST_LAYERS)
    """Multi-token prediction (DeepSeek-V3, arXiv:2412.19437, section 2.2): blocks with experts
    after the last, each of which predicts a token further; 0: none."""
    mtp_coefficient: float = Field(default=0.3, gt=0, le=MOST_FACTOR)
    """Weight of the mean of their losses."""
    force_balance: bool = False
    """For benchmarks: experts in turn instead of those of the router, so that loads are even."""

    if TYPE_CHECKING:  # pydantic gives frozen models one

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
        """Width of the part of a head that is rotated."""
        return self.rope_head_dim if self.kv_lora_rank else self.head_size

    @property
    def n_expert_layers(self) -> int:
        """Layers with experts: the last ones."""
        return self.n_layers - self.first_dense_layers if self.n_experts else 0

    @property
    def n_dense_layers(self) -> int:
        """Layers with one feed-forward layer: the first ones."""
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
        """Whether training draws random numbers, for which it needs keys of tokens."""
        return bool(self.dropout or self.attention_dropout or self.jitter)

    @property
    def lookup_params(self) -> int:
        """Parameters that are looked up and never multiplied: embeddings, but not a tied one."""
        tokens = 0 if self.tied else self.vocab_size * self.dim
        positions = self.max_seq_len * self.dim if self.positions == "learned" else 0
        return tokens + positions

    @model_validator(mode="after")
    def _check(self) -> "DecoderConfig":
        if self.n_heads % self.n_kv_heads:
            legal = [n for n in range(1, self.n_heads + 1) if self.n_heads % n == 0]
            raise ValueError(
                f"n_kv_heads = {self.n_kv_heads} does not divide n_heads = {self.n_heads}; "
                f"use {either(legal)}"
            )
        if self.head_dim == 0 and not self.kv_lora_rank and self.dim % self.n_heads:
            below = self.dim // self.n_heads * self.n_heads
            legal = [n for n in (below, below + self.n_heads) if n]
            raise ValueError(
                f"dim = {self.dim} is not a multiple of n_heads = {self.n_heads}; "
                f"use {either(legal)}, or set head_dim"
            )
        if self.positions == "rope" and self.rope_size % 2:
            key = "rope_head_dim" if self.kv_lora_rank else "head_dim"
            raise ValueError(
                f"{key} = {self.rope_size} is odd, but rope rotates pairs; use {self.rope_size + 1}"
            )
        self._check_rope_scaling()
        for reason in broken_rules(self):
            raise ValueError(reason)
        return self

    def _check_rope_scaling(self) -> None:
        scales = self.rope_scaling_factor > 1
        if self.rope_scaling == "yarn" and (self.positions != "rope" or not scales):
            need = "a rope_scaling_factor above 1" if self.positions == "rope" else "rope positions"
            raise ValueError(f'rope_scaling = "yarn" has no effect without {need}; use "llama3"')
        for key, scaling in _ROPE_KEYS.items():
            default = type(self).model_fields[key].default
            if scaling != self.rope_scaling and getattr(self, key) != default:
                raise ValueError(
                    f"{key} = {getattr(self, key)} has no effect with "
                    f'rope_scaling = "{self.rope_scaling}"; use {default}'
                )
        low, high, source = _ROPE_RANGES[self.rope_scaling]
        if scales and getattr(self, high) <= getattr(self, low):
            raise ValueError(
                f"{high} = {getattr(self, high)} is not above {low} = {getattr(self, low)}; "
                f"{source}"
            )
        if self.rope_scaling == "yarn" and self.rope_theta <= 1:
            raise ValueError(
                f"rope_theta = {self.rope_theta} has no logarithm above 0, which "
                'rope_scaling = "yarn" divides by; use more than 1, such as 10000.0'
            )


_ROPE_RANGES = {
    "llama3": ("rope_low_freq_factor", "rope_high_freq_factor", "Llama 3.1 has 4 and 1"),
    "yarn": ("rope_beta_slow", "rope_beta_fast", "YaRN has 32 and 1"),
}
"""Fields between which frequencies are scaled in part, by scaling, and what its source has."""
_ROPE_KEYS = {
    "rope_low_freq_factor": "llama3",
    "rope_high_freq_factor": "llama3",
    "rope_beta_fast": "yarn",
    "rope_beta_slow": "yarn",
    "rope_truncate": "yarn",
    "rope_mscale": "yarn",
    "rope_mscale_all_dim": "yarn",
}
"""The scaling that reads a field."""


def overridden(config: DecoderConfig, values: Mapping[str, Any]) -> DecoderConfig:
    """The config with some fields replaced by the user's `[model.override]`.

    Raises:
        ConfigError: an unknown field, an illegal value, or values that do not fit together; the
            message starts with the key under `model.override`.
    """
    try:
        return DecoderConfig.model_validate({**config.model_dump(), **values})
    except ValidationError as error:
        first = error.errors()[0]
        if "ctx" in first and first["type"] == "value_error":  # of _check; starts with the field
            raise ConfigError(f"model.override.{first['ctx']['error']}") from None
        known = [f"model.override.{name}" for name in DecoderConfig.model_fields]
        raise config_error(error, "model.override", known) from None
