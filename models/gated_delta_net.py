"""Gated delta net: attention with a state of fixed size instead of keys and values (Qwen3.5).

    [q k v] <- silu(convolution(x w_qkv))         each channel over its last few tokens
    g       <- -exp(a_log) softplus(x w_a + dt_bias)        beta <- sigmoid(x w_b)
    out     <- (rms_norm(delta_rule(q, k, v, g, beta)) silu(x w_z)) wo

q and k have length 1; the state of a value head decays by exp(g) at each token (`delta_rule.py`).
Channels and head parameters are ordered by key head (`recurrent.py`): a key head's channels are
[its query, its key, the values of its R value heads].

Shapes: B sequences, T tokens, D = dim, G key heads, H value heads, R = H / G, K and V widths of
their heads, C = 2 K + R V channels per key head, W width of the convolution.
Sources: Gated Delta Networks, arXiv:2412.06464; the configuration class and names of transformers.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtron.models.config import DecoderConfig
from dtron.models.delta_rule import DELTA_KERNELS
from dtron.models.recurrent import GroupedModule, causal_convolution

L2_EPS = 1e-6


class DeltaCore(GroupedModule):
    """Convolution and gated delta rule, of groups of heads that share a key head.

    Context parallelism replaces its forward.
    """

    def __init__(self, config: DecoderConfig):
        super().__init__(config.delta_key_heads)
        groups, heads = config.delta_key_heads, config.delta_value_heads
        self.conv = nn.Parameter(torch.empty(config.delta_channels, 1, config.delta_conv))
        self.a_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.key_dim, self.value_dim = config.delta_key_dim, config.delta_value_dim
        self.per_group = heads // groups
        self.kernel = config.delta_kernel

    def forward(
        self,
        qkv: Tensor,
        a: Tensor,
        b: Tensor,
        starts: Tensor | None = None,
        order: Tensor | None = None,
        shard: int | None = None,
    ) -> Tensor:
        """Compute the outputs of G key heads, all heads or a shard of them.

        Args:
            qkv: (B, T, G, C).
            a: (B, T, G, R), input of the decay.
            b: (B, T, G, R), input of beta.
            starts: bool (B, T), True at the first token of a document; None: one document.
            order: unused here; see `parallelisms/context/recurrent.py`.
            shard: index of the heads among shards of G heads; None: `head_shard`.
        Returns:
            (B, T, G, R V).
        """
        groups = qkv.shape[2]
        conv, a_log, dt_bias = (
            self.own(x, groups, shard) for x in (self.conv, self.a_log, self.dt_bias)
        )
        qkv = F.silu(causal_convolution(qkv, conv.squeeze(-2), starts))
        sizes = [self.key_dim, self.key_dim, self.per_group * self.value_dim]
        q, k, v = qkv.split(sizes, dim=-1)
        wide = torch.promote_types(qkv.dtype, torch.float32)
        q, k = (_unit(x.to(wide)) for x in (q, k))
        q = q * self.key_dim**-0.5
        g = -a_log.to(wide).exp() * F.softplus(a.to(wide) + dt_bias)
        inputs = (q.to(v.dtype), k.to(v.dtype), v.unflatten(-1, (-1, self.value_dim)).flatten(2, 3))
        gates = (g.flatten(2), b.sigmoid().flatten(2))
        out = DELTA_KERNELS[self.kernel](*inputs, *gates, starts)
        return out.unflatten(2, (groups, -1)).flatten(3)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_EPS)


class GatedNorm(nn.Module):
    """RMSNorm of each value head, times silu of a gate: (B, T, ..., V) -> the same shape.

    `gamma` is stored as it is, also with `norm_zero_centered`.
    """

    def __init__(self, dim: int, eps: float):
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(dim))
        self.eps = eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        normed = F.rms_norm(x.to(wide), self.gamma.shape, None, self.eps).to(x.dtype) * self.gamma
        return (normed * F.silu(gate.to(wide))).to(x.dtype)


class GatedDeltaNet(nn.Module):
    """Gated delta net, (B, T, D) -> (B, T, D).

    The number of heads is read from the projections' outputs, so that the module also works with
    projections that are sharded over heads.
    """

    def __init__(self, config: DecoderConfig):
        super().__init__()
        heads, width = config.delta_value_heads, config.delta_value_dim
        self.w_qkv = nn.Linear(config.dim, config.delta_channels, bias=False)
        self.w_z = nn.Linear(config.dim, heads * width, bias=False)
        self.w_a = nn.Linear(config.dim, heads, bias=False)
        self.w_b = nn.Linear(config.dim, heads, bias=False)
        self.core = DeltaCore(config)
        self.gated_norm = GatedNorm(width, config.norm_eps)
        self.wo = nn.Linear(heads * width, config.dim, bias=False)
        self.value_dim, self.per_group = width, heads // config.delta_key_heads

    def forward(
        self, x: Tensor, starts: Tensor | None = None, order: Tensor | None = None
    ) -> Tensor:
        """Compute the layer.

        Args:
            x: (B, T, D), normalised.
            starts: bool (B, T), True at the first token of a document; None: one document.
            order: with context parallelism, the index of each token in its sequence, on all ranks.
        """
        a, b = (w(x).unflatten(-1, (-1, self.per_group)) for w in (self.w_a, self.w_b))
        out = self.core(self.w_qkv(x).unflatten(-1, (a.shape[2], -1)), a, b, starts, order)
        gate = self.w_z(x).unflatten(-1, (-1, self.value_dim))
        out = self.gated_norm(out.unflatten(-1, (-1, self.value_dim)).flatten(2, 3), gate)
        return self.wo(out.flatten(2))
