"""Norms, activations and feed-forward layers of a transformer block, as tables.

Shapes: B sequences, T tokens, D width, F hidden width of the feed-forward layer.
Sources: RMSNorm arXiv:1910.07467; gated units arXiv:2002.05202; squared ReLU arXiv:2109.08668;
clamped SwiGLU arXiv:2508.10925.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dtron.models.config import DecoderConfig


class RMSNorm(nn.Module):
    """RMSNorm: x / rms(x) * gamma over the last dim, in x's dtype; computed in float32 at least.

    Args:
        dim: size of the last dim.
        eps: added to the mean square.
        zero_centered: whether the weight is gamma - 1.
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
    """LayerNorm: (x - mean) / std * gamma + bias over the last dim; arguments as in RMSNorm."""

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


class Scalar(nn.Module):
    """Multiplication by a learned scalar."""

    def __init__(self) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.empty(1))

    def forward(self, x: Tensor) -> Tensor:
        """Return x * gamma, in x's shape (B, T, D) and dtype."""
        return x * self.gamma


def norm(config: DecoderConfig, dim: int, eps: float | None = None) -> nn.Module:
    """Build a norm of type config.norm over a last dim of size `dim`; eps None: config.norm_eps."""
    eps = config.norm_eps if eps is None else eps
    return NORMS[config.norm](dim, eps, config.norm_zero_centered)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap), which is between -cap and cap, in x's dtype."""
    return torch.tanh(x / cap) * cap


@dataclass(frozen=True)
class Activation:
    """Nonlinearity f of a feed-forward layer: down(f(gate(x)) * u(up(x))), or down(f(up(x)))."""

    function: Callable[[Tensor], Tensor]
    gated: bool
    linear: Callable[[Tensor], Tensor] | None = None
    """u; None: the identity."""

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        """Return f(gate) * u(up); both tensors have the same shape."""
        return self.function(gate) * (up if self.linear is None else self.linear(up))


def _gelu(x: Tensor) -> Tensor:
    # The tanh approximation is what GPT-2 and GPT-3 were trained with (arXiv:1606.08415, sec. 2).
    return F.gelu(x, approximate="tanh")


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


def _clamped_silu(x: Tensor) -> Tensor:
    # x sigmoid(1.702 x) approximates GELU; both constants are from gpt-oss.
    x = x.clamp(max=7.0)
    return x * torch.sigmoid(1.702 * x)


def _clamped_linear(x: Tensor) -> Tensor:
    return x.clamp(-7.0, 7.0) + 1


ACTIVATIONS: dict[str, Activation] = {
    "swiglu": Activation(F.silu, gated=True),
    "geglu": Activation(_gelu, gated=True),
    "gelu": Activation(_gelu, gated=False),
    "gelu_exact": Activation(F.gelu, gated=False),
    "relu": Activation(F.relu, gated=False),
    "relu2": Activation(_relu2, gated=False),
    "clamped_swiglu": Activation(_clamped_silu, gated=True, linear=_clamped_linear),
}


class FeedForward(nn.Module):
    """Feed-forward layer: (B, T, D) -> (B, T, F) -> (B, T, D).

    Args:
        width: F; None: config.ffn_dim.
    """

    def __init__(self, config: DecoderConfig, width: int | None = None):
        super().__init__()
        self.activation = ACTIVATIONS[config.activation]
        width = width or config.ffn_dim
        if self.activation.gated:
            self.gate = nn.Linear(config.dim, width, bias=config.bias)
        self.up = nn.Linear(config.dim, width, bias=config.bias)
        self.down = nn.Linear(width, config.dim, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        if self.activation.gated:
            return self.down(self.activation(self.gate(x), self.up(x)))
        return self.down(self.activation.function(self.up(x)))
