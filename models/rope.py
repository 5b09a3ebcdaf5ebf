"""Rotary position embedding: queries and keys are rotated by angles that grow with position.

The table of cosines and sines is computed once a forward from the positions, in float32, and
handed to every block. Models have no buffers, so that they can be built on the meta device, and
any order of tokens works (packed documents, context parallelism). Halves are rotated against
each other (element i with i + head_dim / 2), as in Hugging Face checkpoints, not even against
odd elements as in the original paper; the two differ by a permutation of wq's and wk's rows.

Shapes: B sequences (1 where all share positions), T tokens, H heads, K = head_dim (of latent
attention rope_head_dim).
Sources: arXiv:2104.09864; context extension of Llama 3.1: arXiv:2407.21783, YaRN:
arXiv:2309.00071, its two temperatures: DeepSeek-V3, arXiv:2412.19437, and its released code.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dtron.models.config import DecoderConfig


def _llama3(config: DecoderConfig, frequencies: Tensor) -> Tensor:
    """By the turns within the original context, linearly from the low to the high factor."""
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    turns = frequencies * (config.rope_original_context / (2 * math.pi))
    return ((turns - low) / (high - low)).clamp(0, 1)


def _yarn(config: DecoderConfig, frequencies: Tensor) -> Tensor:
    """By the number of the dimension, linearly from the one that turns beta_fast times within the
    original context, rounded down, to the one that turns beta_slow times, rounded up (both as they
    are without rope_truncate)."""

    def dimension(turns: float) -> float:
        wavelength = config.rope_original_context / (turns * 2 * math.pi)
        return config.rope_size * math.log(wavelength) / (2 * math.log(config.rope_theta))

    first, last = dimension(config.rope_beta_fast), dimension(config.rope_beta_slow)
    if config.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.rope_size - 1)
    last = max(last, first + 0.001)  # a step, where all dimensions are on one side
    index = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
    return 1 - ((index - first) / (last - first)).clamp(0, 1)


SCALINGS: dict[str, Callable[[DecoderConfig, Tensor], Tensor]] = {"llama3": _llama3, "yarn": _yarn}
"""Rows of `rope_scaling`: frequencies float32 (K / 2,) -> the share of each that is kept, from 1 of
the fastest to 0 of the slowest; the rest is divided by the factor."""


def rope_frequencies(config: DecoderConfig, device: torch.device) -> Tensor:
    """Angle a token, float32 (K / 2,), from fastest to slowest, scaled as the config says."""
    size = config.rope_size
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_scaling_factor == 1:
        return frequencies
    kept = SCALINGS[config.rope_scaling](config, frequencies)
    return frequencies * (kept + (1 - kept) / config.rope_scaling_factor)


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1 mscale ln(factor) + 1: by what YaRN multiplies queries and keys."""
    return 0.1 * mscale * math.log(factor) + 1


def rope_magnitude(config: DecoderConfig) -> float:
    """What cosines and sines are multiplied by, so that scores get YaRN's temperature."""
    if config.rope_scaling != "yarn":
        return 1.0
    factor = config.rope_scaling_factor
    return yarn_mscale(factor, config.rope_mscale) / yarn_mscale(factor, config.rope_mscale_all_dim)


def rope_table(config: DecoderConfig, positions: Tensor) -> Tensor:
    """Cosines, then sines, times `rope_magnitude`: positions int64 (B, T) -> float32 (B, T, K)."""
    angles = positions.float().unsqueeze(-1) * rope_frequencies(config, positions.device)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    magnitude = rope_magnitude(config)
    return table if magnitude == 1 else table * magnitude


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
