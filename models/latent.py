"""Multi-head latent attention: compute keys and values from one latent vector per token.

    c = kv_a_norm(wkv_a(x)[:R])             latent, of width R = kv_lora_rank
    k_i, v_i = wkv_b(c)                     of head i: N = nope_head_dim and V = v_head_dim wide
    r = rope(wkv_a(x)[R:])                  one rotated key for all heads, P = rope_head_dim wide
    q_i = [n_i, rope(p_i)]                  n, p of wq(x), or of wq_b(q_a_norm(wq_a(x)))
    scores = q_i . [k_i, r]

A KV cache for generation needs only c and r; training computes all heads' keys and values, as
here. DeepSeek's released weights rotate interleaved pairs, this module rotates halves: the two
differ by a permutation of the rows of wq (wq_b) and wkv_a that produce p and r.

Sources: DeepSeek-V2, arXiv:2405.04434, section 2.1; DeepSeek-V3, arXiv:2412.19437.
"""

import torch
from torch import Tensor, nn

from dtron.models.attention import Attention
from dtron.models.config import DecoderConfig
from dtron.models.layers import norm
from dtron.models.rope import apply_rope

LATENT_EPS = 1e-6  # epsilon of the latent norms in released models, independent of norm_eps


class SharedKey(nn.Module):
    """Rotation of the key that all heads share; a module, so that tp placements can name it."""

    def forward(self, key: Tensor, rope: Tensor) -> Tensor:
        """Rotate the key, of width P, and add a dim for heads: (B, T, P) -> (B, T, 1, P)."""
        return apply_rope(key.unsqueeze(2), rope)


class LatentAttention(Attention):
    """Multi-head latent attention, (B, T, D) -> (B, T, D), D the width of the model."""

    def _build_projections(self, config: DecoderConfig) -> None:
        self.nope, self.rotated = config.nope_head_dim, config.rope_head_dim
        self.head_size, self.v_size = config.head_size, config.v_head_size
        q_dim, latent = config.n_heads * self.head_size, config.kv_lora_rank
        kv_dim = config.n_heads * (self.nope + self.v_size)
        if config.q_lora_rank:
            self.wq_a = nn.Linear(config.dim, config.q_lora_rank, bias=config.bias)
            self.q_a_norm = norm(config, config.q_lora_rank, LATENT_EPS)
            self.wq_b = nn.Linear(config.q_lora_rank, q_dim, bias=config.bias)
        else:
            self.wq = nn.Linear(config.dim, q_dim, bias=config.bias)
        self.low_rank_q = bool(config.q_lora_rank)
        self.latent = latent
        self.wkv_a = nn.Linear(config.dim, latent + self.rotated, bias=config.bias)
        self.kv_a_norm = norm(config, latent, LATENT_EPS)
        self.k_rope = SharedKey()
        self.wkv_b = nn.Linear(latent, kv_dim, bias=config.bias)
        self.wo = nn.Linear(config.n_heads * self.v_size, config.dim, bias=config.bias)

    def heads(self, x: Tensor, rope: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Project and rotate: (B, T, D) -> q and k (B, T, H, N + P), v (B, T, H, V)."""
        assert rope is not None, "latent attention needs the rope table"
        q = self.wq_b(self.q_a_norm(self.wq_a(x))) if self.low_rank_q else self.wq(x)
        q = q.unflatten(-1, (-1, self.head_size))
        q, q_rotated = q.split([self.nope, self.rotated], dim=-1)
        latent, k_rotated = self.wkv_a(x).split([self.latent, self.rotated], dim=-1)
        kv = self.wkv_b(self.kv_a_norm(latent)).unflatten(-1, (-1, self.nope + self.v_size))
        k, v = kv.split([self.nope, self.v_size], dim=-1)
        k_rotated = self.k_rope(k_rotated, rope).expand(-1, -1, k.shape[2], -1)
        q = torch.cat([q, apply_rope(q_rotated, rope)], dim=-1)
        return q, torch.cat([k, k_rotated], dim=-1), v
