"""Norms and feed-forward layers of a transformer block, and the tables that name them.

Shapes: B sequences, T tokens, D width, F hidden width of the feed-forward layer.
Sources: RMSNorm arXiv:1910.07467; gated units arXiv:2002.05202; squared ReLU arXiv:2109.08668.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtron.models.config import DecoderConfig


class RMSNorm(nn.Module):
    """x / rms(x) * gamma over the last dim, computed in float32 at least, returned in x's dtype.

    Args:
        dim: size of the last dim.
        eps: added to the mean square.
        zero_centered: the weight is gamma - 1.
    """

    def __init__(self, dim: int, eps: float, zero_centered: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.zero_centered = zero_centered

    def forward(self, x: Tensor) -> Tensor:
        if not self.zero_centered:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        wide = torch.promote_types(x.dtype, torch.float32)
        gamma = 1 + self.weight.to(wide)  # 1 + w in bfloat16 would round small w away
        return F.rms_norm(x.to(wide), self.weight.shape, gamma, self.eps).to(x.dtype)


class LayerNorm(nn.Module):
    """(x - mean) / std * gamma + bias over the last dim; dtypes and arguments as RMSNorm."""

    def __init__(self, dim: int, eps: float, zero_centered: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(dim))
        self.bias = nn.Parameter(torch.empty(dim))
        self.eps = eps
        self.zero_centered = zero_centered

    def forward(self, x: Tensor) -> Tensor:
        if not self.zero_centered:
            return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
        wide = torch.promote_types(x.dtype, torch.float32)
        gamma, bias = 1 + self.weight.to(wide), self.bias.to(wide)
        return F.layer_norm(x.to(wide), self.weight.shape, gamma, bias, self.eps).to(x.dtype)


NORMS: dict[str, type[RMSNorm] | type[LayerNorm]] = {"rmsnorm": RMSNorm, "layernorm": LayerNorm}


def norm(config: DecoderConfig, dim: int) -> nn.Module:
    """The config's norm over a last dim of this size."""
    return NORMS[config.norm](dim, config.norm_eps, config.norm_zero_centered)


@dataclass(frozen=True)
class Activation:
    """Nonlinearity f of a feed-forward layer: down(f(gate(x)) * up(x)), or down(f(up(x)))."""

    function: Callable[[Tensor], Tensor]
    gated: bool


def _gelu(x: Tensor) -> Tensor:
    # The tanh approximation is what GPT-2 and GPT-3 were trained with (arXiv:1606.08415, sec. 2).
    return F.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: dict[str, Activation] = {
    "swiglu": Activation(F.silu, gated=True),
    "geglu": Activation(_gelu, gated=True),
    "gelu": Activation(_gelu, gated=False),
    "relu2": Activation(_relu2, gated=False),
}


class FeedForward(nn.Module):
    """(B, T, D) -> (B, T, F) -> (B, T, D), the same for every token."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        activation = ACTIVATIONS[config.activation]
        if activation.gated:
            self.gate = nn.Linear(config.dim, config.ffn_dim, bias=config.bias)
        self.up = nn.Linear(config.dim, config.ffn_dim, bias=config.bias)
        self.down = nn.Linear(config.ffn_dim, config.dim, bias=config.bias)
        self.function = activation.function
        self.gated = activation.gated

    def forward(self, x: Tensor) -> Tensor:
        if self.gated:
            return self.down(self.function(self.gate(x)) * self.up(x))
        return self.down(self.function(self.up(x)))
