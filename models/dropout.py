"""Dropout by a hash of each element's index instead of a random number generator's state.

A hash of (seed, step, sequence, token, layer, site, feature) decides whether an element is kept.
Hence the same elements are dropped in any layout of ranks, in any micro-batching, under
recomputation and under torch.compile, without any state to save. Each token has one 32-bit key. The
decoder folds the layer into the key outside the blocks, so that blocks differ only in their weights
and torch.compile compiles one graph for all blocks.

The mixer is a 32-bit finaliser (xor-shift, multiply, twice). Its multipliers are below 2^31, so
that their int64 product with a 32-bit value cannot overflow. It is written for
torch.compile, which fuses it into one kernel; in eager mode it allocates int64 temporaries of x's
shape.

Source: finaliser 21f0aaad/735a2d97 of github.com/skeeto/hash-prospector, issue 19.
"""

import torch
from torch import Tensor, nn

# values of `site`
ATTENTION_WEIGHTS, ATTENTION_OUTPUT, FFN_OUTPUT, EMBEDDING, ROUTER, CROSS_OUTPUT = range(6)

_LOW = 0xFFFFFFFF
_INCREMENT = 0x1E3779B9  # keeps the mixer away from its fixed point mix(0) = 0


def mix(x: Tensor) -> Tensor:
    """Hash 32-bit values: a bijection; an input bit flips half of the output bits on average."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _LOW
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _LOW
    return x ^ (x >> 15)


def fold(key: Tensor, value: int | Tensor) -> Tensor:
    """Derive new keys from keys (int64, below 2**32) and 64-bit values; the two broadcast."""
    low = mix(((key ^ (value & _LOW)) + _INCREMENT) & _LOW)
    return mix(((low ^ ((value >> 32) & _LOW)) + _INCREMENT) & _LOW)


def token_keys(seed: int, step: int | Tensor, sequence: Tensor, positions: Tensor) -> Tensor:
    """Return the key of every token of a batch in one step.

    Args:
        seed: the run's seed.
        step: optimizer step; an int, or an int64 scalar tensor.
        sequence: int64 (B,), index of each sequence in the run's global batch.
        positions: int64 (T,) or (B, T), index of each token in its sequence. (With positions in
            packed documents, two documents of one sequence would share their keys.)
    Returns:
        int64 (B, T), values below 2**32.
    """
    stream = fold(fold(torch.zeros_like(sequence), seed), step)
    return fold(fold(stream, sequence).unsqueeze(1), positions)


def keep_mask(p: float, keys: Tensor, site: int, n_features: int) -> Tensor:
    """Return which elements of each key to keep: int64 (...) -> bool (..., n_features)."""
    return _draws(keys, site, n_features) >= round(p * 2**32)


def uniform(keys: Tensor, site: int, n_features: int) -> Tensor:
    """Return noise in [0, 1) for n_features elements of each key.

    Shapes: int64 (...) -> float32 (..., n_features).
    """
    return (_draws(keys, site, n_features) >> 8).float() * 2**-24  # as many bits as float32 has


def _draws(keys: Tensor, site: int, n_features: int) -> Tensor:
    features = fold(torch.arange(n_features, device=keys.device), site)
    return mix(keys.unsqueeze(-1) ^ features)


def dropout(x: Tensor, p: float, keys: Tensor, site: int) -> Tensor:
    """Zero elements with probability p and scale the rest by 1 / (1 - p).

    Args:
        x: (B, T, D), any floating dtype.
        keys: int64 (B, T) from `token_keys`, with the layer folded in.
        site: which dropout of the layer it is, such as FFN_OUTPUT.
    """
    return torch.where(keep_mask(p, keys, site, x.shape[-1]), x * (1 / (1 - p)), 0)


def attention_dropout(weights: Tensor, p: float, keys: Tensor, first_head: int = 0) -> Tensor:
    """Apply dropout to attention weights, keyed by (query token, head, key's index).

    Args:
        weights: (B, H, T, S), softmax of T queries over S keys.
        keys: int64 (B, T), keys of the query tokens with the layer folded in.
        first_head: index of the first of the H heads in the model.
    """
    heads = first_head + torch.arange(weights.shape[1], device=keys.device).view(1, -1, 1)
    keep = keep_mask(p, fold(keys.unsqueeze(1), heads), ATTENTION_WEIGHTS, weights.shape[-1])
    return torch.where(keep, weights * (1 / (1 - p)), 0)


class Dropout(nn.Module):
    """Dropout at one site of a layer; the identity in evaluation mode or with p = 0."""

    def __init__(self, p: float, site: int):
        super().__init__()
        self.p, self.site = p, site

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """Apply dropout to x (B sequences, T tokens, D) with dropout keys int64 (B, T)."""
        if not self.p or not self.training:
            return x
        assert keys is not None, "dropout needs dropout keys"
        return dropout(x, self.p, keys, self.site)


class AttentionDropout(nn.Module):
    """Dropout of attention weights.

    Attributes:
        head_shard: index of this rank's shard of the heads, which are sharded evenly.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p, self.head_shard = p, 0

    def forward(self, weights: Tensor, keys: Tensor) -> Tensor:
        """Apply dropout to weights (B, H heads, T queries, S keys); dropout keys: int64 (B, T)."""
        return attention_dropout(weights, self.p, keys, self.head_shard * weights.shape[1])
