"""Rotary position embedding (rope): queries and keys are rotated by position-dependent angles.

The table of cosines and sines is computed once per forward from the positions, in float32, and
passed to every block. So the model needs no buffers, which the meta device would lose, and tokens
can be in any order (packed documents, context parallelism). Element i is rotated with
i + head_dim / 2 (halves), as in Hugging Face checkpoints, not with its neighbour (interleaved) as
in the original paper; the two differ by a permutation of the rows of wq and wk.

Shapes: B sequences (1 if all share positions), T tokens, H heads, K = head_dim (rope_head_dim with
latent attention), R <= K rotated elements.
Sources: arXiv:2104.09864; context extension of Llama 3.1: arXiv:2407.21783, YaRN:
arXiv:2309.00071, its two temperatures: DeepSeek-V3, arXiv:2412.19437, and its released code;
linear: arXiv:2306.15595; proportional: Gemma 4 of transformers.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from dtron.models.config import DecoderConfig


def _llama3(config: DecoderConfig, frequencies: Tensor) -> Tensor:
    """Return a ramp over the turns of a frequency in the original context.

    It is 0 at rope_low_freq_factor turns and 1 at rope_high_freq_factor turns.
    """
    low, high = config.rope_low_freq_factor, config.rope_high_freq_factor
    turns = frequencies * (config.rope_original_context / (2 * math.pi))
    return ((turns - low) / (high - low)).clamp(0, 1)


def _yarn(config: DecoderConfig, frequencies: Tensor) -> Tensor:
    """Return a ramp over the dimensions of a head.

    It is 1 at the dimension with rope_beta_fast turns in the original context, and 0 at the
    dimension with rope_beta_slow turns. rope_truncate rounds both dimensions outwards.
    """

    def dimension(turns: float) -> float:
        wavelength = config.rope_original_context / (turns * 2 * math.pi)
        return config.rope_size * math.log(wavelength) / (2 * math.log(config.rope_theta))

    first, last = dimension(config.rope_beta_fast), dimension(config.rope_beta_slow)
    if config.rope_truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, config.rope_size - 1)
    last = max(last, first + 0.001)  # no division by 0 if both are equal
    index = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
    return 1 - ((index - first) / (last - first)).clamp(0, 1)


def _linear(config: DecoderConfig, frequencies: Tensor) -> Tensor:
    """Return 0 for all frequencies."""
    return torch.zeros_like(frequencies)


SCALINGS: dict[str, Callable[[DecoderConfig, Tensor], Tensor]] = {
    "llama3": _llama3,
    "yarn": _yarn,
    "linear": _linear,
}
"""{rope_scaling: function}. The function gets frequencies, float32 (K / 2,), and returns the
fraction of each that stays unscaled, in general from 1 for the fastest to 0 for the slowest. The
rest is divided by rope_scaling_factor."""


def rope_frequencies(config: DecoderConfig, device: torch.device) -> Tensor:
    """Return the radians per position, float32 (K / 2,), fastest first, with rope scaling."""
    size = config.rope_size
    exponents = torch.arange(0, size, 2, dtype=torch.float32, device=device) / size
    frequencies = 1.0 / config.rope_theta**exponents
    if config.rope_global_fraction < 1:
        rotated = int(config.rope_global_fraction * size // 2)  # as transformers rounds
        index = torch.arange(size // 2, device=device)
        frequencies = torch.where(index < rotated, frequencies, 0.0)
    if config.rope_scaling_factor == 1:
        return frequencies
    kept = SCALINGS[config.rope_scaling](config, frequencies)
    return frequencies * (kept + (1 - kept) / config.rope_scaling_factor)


def yarn_mscale(factor: float, mscale: float) -> float:
    """Return YaRN's factor on queries and keys, 0.1 mscale ln(factor) + 1."""
    return 0.1 * mscale * math.log(factor) + 1


def rope_magnitude(config: DecoderConfig) -> float:
    """Return the factor by which YaRN multiplies cosines and sines; 1 without YaRN."""
    if config.rope_scaling != "yarn":
        return 1.0
    factor = config.rope_scaling_factor
    return yarn_mscale(factor, config.rope_mscale) / yarn_mscale(factor, config.rope_mscale_all_dim)


def rope_table(config: DecoderConfig, positions: Tensor) -> Tensor:
    """Compute [cosines, sines] * `rope_magnitude`: positions int64 (B, T) -> float32 (B, T, K)."""
    angles = positions.float().unsqueeze(-1) * rope_frequencies(config, positions.device)
    table = torch.cat([angles.cos(), angles.sin()], dim=-1)
    magnitude = rope_magnitude(config)
    return table if magnitude == 1 else table * magnitude


def apply_rope(x: Tensor, rope: Tensor) -> Tensor:
    """Rotate heads by their position.

    Args:
        x: (B, T, H, K) queries or keys.
        rope: float32 (B or 1, T, R) from `rope_table`; the first R elements of heads are rotated.
    Returns:
        (B, T, H, K) in x's dtype; computed in float32 at least.
    """
    assert rope.dtype == torch.float32, "the rope table was cast to another dtype"
    cos, sin = rope.unsqueeze(2).chunk(2, dim=-1)
    size = rope.shape[-1]
    first, second = x[..., :size].chunk(2, dim=-1)  # the products below are float32
    rotated = torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
    rotated = rotated.to(x.dtype)
    return rotated if size == x.shape[-1] else torch.cat([rotated, x[..., size:]], dim=-1)
