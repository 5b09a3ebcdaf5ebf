"""What a decoder-only transformer is made of: one flat, frozen description a size.

Fields are flat so that each can be set alone, as `model.override.KEY=value`. Derived values are
properties; nothing is written back.
"""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dtron.errors import ConfigError, config_error


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

    vocab_size: int = Field(ge=1)
    """Tokens of the vocabulary; it has to cover the tokenizer's."""
    dim: int = Field(ge=1)
    """Width of the residual stream."""
    n_layers: int = Field(ge=1)
    """Transformer blocks."""
    n_heads: int = Field(ge=1)
    """Query heads a block."""
    n_kv_heads: int = Field(ge=1)
    """Key and value heads a block; fewer than n_heads is grouped-query attention, 1 is
    multi-query attention (arXiv:2305.13245)."""
    head_dim: int = Field(default=0, ge=0)
    """Width of a head; 0: dim / n_heads."""
    ffn_dim: int = Field(ge=1)
    """Hidden width of the feed-forward layer."""
    activation: Literal["swiglu", "geglu", "gelu", "relu2"] = "swiglu"
    """A row of dtron.models.layers.ACTIVATIONS; swiglu and geglu have a gate projection."""
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    """A row of dtron.models.layers.NORMS."""
    norm_eps: float = Field(default=1e-5, gt=0)
    """Added to the variance before its root is taken."""
    norm_zero_centered: bool = False
    """Store norm weights as gamma - 1, so that weight decay pulls gamma towards 1."""
    qk_norm: bool = False
    """Normalise every query and key head (arXiv:2302.05442)."""
    bias: bool = False
    """Biases in the linear layers of the blocks; the head never has one."""
    window: int = Field(default=0, ge=0)
    """Sliding window: a token attends to this many tokens, itself included (arXiv:2004.05150);
    0: to all before it."""
    softcap: float = Field(default=0.0, ge=0)
    """c: attention scores s become c tanh(s / c) (Gemma 2, arXiv:2408.00118); 0: off."""
    sinks: bool = False
    """A learned score a head that takes part in the softmax without a value (gpt-oss,
    arXiv:2508.10925; attention sinks, arXiv:2309.17453)."""
    positions: Literal["rope", "learned"] = "rope"
    """`rope`: queries and keys are rotated by their position (arXiv:2104.09864). `learned`: an
    embedding a position is added to the token's."""
    max_seq_len: int = Field(default=2048, ge=1)
    """Positions of `positions = "learned"`; rope has no limit."""
    rope_theta: float = Field(default=10000.0, gt=0)
    """Base of the rotation frequencies."""
    rope_scaling: Literal["llama3", "yarn"] = "llama3"
    """How the context is extended: as in Llama 3.1 (arXiv:2407.21783) or by YaRN
    (arXiv:2309.00071). A row of dtron.models.rope.SCALINGS."""
    rope_scaling_factor: float = Field(default=1.0, ge=1)
    """Low frequencies are divided by this; 1: no scaling."""
    rope_original_context: int = Field(default=8192, ge=1)
    """Tokens of context before extension."""
    rope_low_freq_factor: float = Field(default=1.0, gt=0)
    """llama3: wavelengths above rope_original_context / this are scaled in full."""
    rope_high_freq_factor: float = Field(default=4.0, gt=0)
    """llama3: wavelengths below rope_original_context / this are not scaled."""
    rope_beta_fast: float = Field(default=32.0, gt=0)
    """yarn: frequencies that turn at least this often in rope_original_context are not scaled."""
    rope_beta_slow: float = Field(default=1.0, gt=0)
    """yarn: frequencies that turn at most this often in rope_original_context are scaled in
    full."""
    rope_mscale: float = Field(default=1.0, ge=0)
    """yarn: cosines and sines, and so queries and keys, are multiplied by
    (0.1 rope_mscale ln s + 1) / (0.1 rope_mscale_all_dim ln s + 1), s = rope_scaling_factor."""
    rope_mscale_all_dim: float = Field(default=0.0, ge=0)
    """yarn: see rope_mscale. For models with parts of heads that are not rotated, which multiply
    all their scores instead (DeepSeek-V3)."""
    tied: bool = False
    """The head uses the embedding's weight."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the embeddings and of what each attention and feed-forward layer adds."""
    attention_dropout: float = Field(default=0.0, ge=0, lt=1)
    """Dropout of the attention weights; the `math` attention backend alone supports it."""

    @property
    def head_size(self) -> int:
        """Width of a head, with head_dim = 0 resolved."""
        return self.head_dim or self.dim // self.n_heads

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
                f"use {_either(legal)}"
            )
        if self.head_dim == 0 and self.dim % self.n_heads:
            below = self.dim // self.n_heads * self.n_heads
            legal = [n for n in (below, below + self.n_heads) if n]
            raise ValueError(
                f"dim = {self.dim} is not a multiple of n_heads = {self.n_heads}; "
                f"use {_either(legal)}, or set head_dim"
            )
        if self.positions == "rope" and self.head_size % 2:
            raise ValueError(
                f"head_dim = {self.head_size} is odd, but rope rotates pairs; "
                f"use {self.head_size + 1}"
            )
        self._check_rope_scaling()
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


def _either(legal: list[int]) -> str:
    *most, last = map(str, legal)
    return f"{', '.join(most)} or {last}" if most else last
