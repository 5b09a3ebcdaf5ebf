"""Mamba-2: a layer with a state of fixed size instead of keys and values (Nemotron-H).

    [x b c] <- silu(convolution(h w_xbc) + conv_bias)     each channel over its last few tokens
    dt      <- max(softplus(h w_dt + dt_bias), dt_min)
    y       <- state_space(x, dt, -exp(a_log) dt, b, c, d)                   (`state_space.py`)
    out     <- rms_norm(y silu(h w_z)) wo                 the norm is over each group's channels

The H heads are in G groups, which share b and c. Channels and head parameters are ordered by group
(`recurrent.py`): a group's channels are [the inputs x of its R heads, its b, its c].

Shapes: B sequences, T tokens, D = dim, G groups, H heads, R = H / G, P width of a head, K width of
the state, C = R P + 2 K channels per group, W width of the convolution.
Sources: Mamba-2, arXiv:2405.21060; Nemotron-H, arXiv:2504.03624; names and the lower bound of dt,
transformers.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtron.models.config import DecoderConfig
from dtron.models.recurrent import GroupedModule, causal_convolution
from dtron.models.state_space import state_space


class MambaCore(GroupedModule):
    """Convolution and state space recurrence; context parallelism replaces its forward."""

    def __init__(self, config: DecoderConfig):
        super().__init__(config.mamba_groups)
        heads, channels = config.mamba_heads, config.mamba_channels
        self.conv = nn.Parameter(torch.empty(channels, 1, config.mamba_conv))
        self.conv_bias = nn.Parameter(torch.empty(channels))
        self.a_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.d = nn.Parameter(torch.empty(heads))
        self.head_dim, self.state_dim = config.mamba_head_dim, config.mamba_state_dim
        self.dt_min = config.mamba_dt_min

    def forward(
        self,
        xbc: Tensor,
        dt: Tensor,
        starts: Tensor | None = None,
        order: Tensor | None = None,
        shard: int | None = None,
    ) -> Tensor:
        """Compute the outputs of G groups, all groups or a shard of them.

        Args:
            xbc: (B, T, G, C).
            dt: (B, T, G, R).
            starts: bool (B, T), True at the first token of a document; None: one document.
            order: unused here; see `parallelisms/context/recurrent.py`.
            shard: index of the groups among shards of G groups; None: `head_shard`.
        Returns:
            (B, T, G, R P).
        """
        wide = torch.promote_types(xbc.dtype, torch.float32)
        conv, conv_bias, a_log, dt_bias, d = (
            self.own(x, xbc.shape[2], shard)
            for x in (self.conv, self.conv_bias, self.a_log, self.dt_bias, self.d)
        )
        xbc = F.silu(causal_convolution(xbc, conv.squeeze(-2), starts, conv_bias))
        x, b, c = xbc.split([dt.shape[-1] * self.head_dim, self.state_dim, self.state_dim], dim=-1)
        dt = F.softplus(dt.to(wide) + dt_bias).clamp(min=self.dt_min)
        g = -a_log.to(wide).exp() * dt
        x = x.unflatten(-1, (-1, self.head_dim))
        return state_space(x, dt, g, b, c, d, starts).flatten(3)


class GroupedGatedNorm(GroupedModule):
    """RMSNorm of each group's channels after a gate: norm(x silu(gate)), (B, T, G, .) -> the same.

    `gamma` is stored as it is, also with `norm_zero_centered`.
    """

    def __init__(self, config: DecoderConfig):
        super().__init__(config.mamba_groups)
        self.gamma = nn.Parameter(torch.empty(config.mamba_heads * config.mamba_head_dim))
        self.eps = config.norm_eps

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        gated = x.to(wide) * F.silu(gate.to(wide))
        normed = F.rms_norm(gated, gated.shape[-1:], None, self.eps)
        return (normed * self.own(self.gamma, x.shape[2], None)).to(x.dtype)


class Mamba(nn.Module):
    """Mamba-2 layer, (B, T, D) -> (B, T, D).

    The number of groups is read from the projections' outputs, so that the module also works with
    projections that are sharded over groups.
    """

    def __init__(self, config: DecoderConfig):
        super().__init__()
        inner = config.mamba_heads * config.mamba_head_dim
        self.w_z = nn.Linear(config.dim, inner, bias=False)
        self.w_xbc = nn.Linear(config.dim, config.mamba_channels, bias=False)
        self.w_dt = nn.Linear(config.dim, config.mamba_heads, bias=False)
        self.core = MambaCore(config)
        self.gated_norm = GroupedGatedNorm(config)
        self.wo = nn.Linear(inner, config.dim, bias=False)
        self.per_group = config.mamba_heads // config.mamba_groups

    def forward(
        self, x: Tensor, starts: Tensor | None = None, order: Tensor | None = None
    ) -> Tensor:
        """Compute the layer.

        Args:
            x: (B, T, D), normalised.
            starts: bool (B, T), True at the first token of a document; None: one document.
            order: with context parallelism, the index of each token in its sequence, on all ranks.
        """
        dt = self.w_dt(x).unflatten(-1, (-1, self.per_group))
        groups = (dt.shape[2], -1)
        out = self.core(self.w_xbc(x).unflatten(-1, groups), dt, starts, order)
        return self.wo(self.gated_norm(out, self.w_z(x).unflatten(-1, groups)).flatten(2))


def init_core_parameter(
    config: DecoderConfig, name: str, full: Tensor, generator: torch.Generator
) -> None:
    """Initialise a parameter of a `MambaCore` in place, as the Mamba-2 paper's code does.

    Decay rates are in [1, 16], time steps between 0.001 and 0.1, evenly over their logarithm.
    """
    if name == "d":
        full.fill_(1.0)
    elif name == "a_log":
        full.uniform_(1.0, 16.0, generator=generator).log_()
    elif name == "dt_bias":  # the inverse of softplus
        dt = full.uniform_(math.log(0.001), math.log(0.1), generator=generator).exp_()
        full.copy_(dt + torch.log(-torch.expm1(-dt)))
    else:  # conv and conv_bias, as nn.Conv1d
        bound = config.mamba_conv**-0.5
        full.uniform_(-bound, bound, generator=generator)
