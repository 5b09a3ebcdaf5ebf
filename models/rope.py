"""Rotary position embedding: queries and keys are rotated by angles that grow with position.

The table of cosines and sines is computed once a forward from the positions, in float32, and
handed to every block. Models have no buffers, so that they can be built on the meta device, and
any order of tokens works (packed documents, context parallelism). Halves are rotated against
each other (element i with i + head_dim / 2), as in Hugging Face checkpoints, not even against
odd elements as in the original paper; the two differ by a permutation of wq's and wk's rows.

Shapes: B sequences (1 where all share positions), T tokens, H heads, K = head_dim.
Sources: arXiv:2104.09864; context extension of Llama 3.1: arXiv:2407.21783.
"""

import math

import torch
from torch import Tensor

from dtron.models.config import DecoderConfig


def rope_frequencies(config: DecoderConfig, device: torch.device) -> Tensor:
    """Angle a token, float32 (K / 2,), from fastest to slowest, with Llama 3.1's scaling."""
    size = config.head_size
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling_factor == 1:
        return frequencies
    # Turns within the original context decide: at least `high`: kept; at most `low`: slowed by the
    # factor; between: a linear blend of the two.
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    turns = frequencies * (config.rope_original_context / (2 * math.pi))
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / config.rope_scaling_factor)


def rope_table(config: DecoderConfig, positions: Tensor) -> Tensor:
    """Cosines, then sines: positions int64 (B, T) -> float32 (B, T, K)."""
    angles = positions.float().unsqueeze(-1) * rope_frequencies(config, positions.device)
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


def apply_rope(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate heads by their position.

    Args:
        x: (B, T, H, K) queries or keys.
        rope: float32 (B or 1, T, K) of `rope_table`.
    Returns:
        (B, T, H, K) in x's dtype; the rotation itself is computed in float32 at least.
    """
    assert rope.dtype == torch.float32, "the rope table was cast to a lower precision on its way"
    cos, sin = rope.unsqueeze(2).chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)  # the products are promoted to the table's float32
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    return rotated.to(x.dtype)
