"""Dropout as a pure function of what is dropped, not of a random number generator's state.

Whether an element is kept is a hash of (seed, step, sequence, token, layer, site, feature). Hence
the same elements are dropped in any layout of ranks, in any micro-batching, under recomputation
and under torch.compile, without any state to save. Each token carries one 32-bit key; the decoder
folds the layer into it outside the blocks, so that blocks differ in nothing but their weights and
torch.compile compiles one of them for all.

The mixer is a 32-bit finaliser (xor-shift, multiply, twice) whose multipliers are below 2^31:
in int64 tensors a product of them with a 32-bit value cannot overflow. It is written for
torch.compile, which fuses it into one kernel; run eagerly it makes int64 temporaries of x's shape.

Source: finaliser 21f0aaad/735a2d97 of github.com/skeeto/hash-prospector, issue 19.
"""

import torch
from torch import Tensor, nn

ATTENTION_WEIGHTS, ATTENTION_OUTPUT, FFN_OUTPUT, EMBEDDING, ROUTER = range(5)  # sites

_LOW = 0xFFFFFFFF
_INCREMENT = 0x1E3779B9  # keeps the mixer away from its fixed point mix(0) = 0


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit values in which every input bit flips each output bit half the time."""
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _LOW
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _LOW
    return x ^ (x >> 15)


def fold(key: Tensor, value: int | Tensor) -> Tensor:
    """New keys from keys (int64, below 2**32) and 64-bit integers; the two broadcast."""
    low = mix(((key ^ (value & _LOW)) + _INCREMENT) & _LOW)
    return mix(((low ^ ((value >> 32) & _LOW)) + _INCREMENT) & _LOW)


def token_keys(seed: int, step: int | Tensor, sequence: Tensor, positions: Tensor) -> Tensor:
    """The key of every token of a batch in one step.

    Args:
        seed: the run's seed.
        step: optimizer step; an int, or int64 of shape ().
        sequence: int64 (B,), index of each sequence in the run's global batch.
        positions: int64 (T,) or (B, T), index of each token in its sequence. Not the position in
            a packed document: two documents of one sequence would share their keys.
    Returns:
        int64 (B, T), values below 2**32.
    """
    stream = fold(fold(torch.zeros_like(sequence), seed), step)
    return fold(fold(stream, sequence).unsqueeze(1), positions)


def keep_mask(p: float, keys: Tensor, site: int, n_features: int) -> Tensor:
    """Which of n_features elements of each key stay: int64 (...) -> bool (..., n_features)."""
    return _draws(keys, site, n_features) >= round(p * 2**32)


def uniform(keys: Tensor, site: int, n_features: int) -> Tensor:
    """Noise in [0, 1) for n_features elements of each key: int64 (...) -> float32
    (..., n_features)."""
    return (_draws(keys, site, n_features) >> 8).float() * 2**-24  # as many bits as float32 has


def _draws(keys: Tensor, site: int, n_features: int) -> Tensor:
    features = fold(torch.arange(n_features, device=keys.device), site)
    return mix(keys.unsqueeze(-1) ^ features)


def dropout(x: Tensor, p: float, keys: Tensor, site: int) -> Tensor:
    """Zero a share p of the elements and scale the rest by 1 / (1 - p).

    Args:
        x: (B, T, D), any floating dtype.
        keys: int64 (B, T) of `token_keys`, with the layer folded in.
        site: which dropout of the layer this is.
    """
    return torch.where(keep_mask(p, keys, site, x.shape[-1]), x * (1 / (1 - p)), 0)


def attention_dropout(weights: Tensor, p: float, keys: Tensor, first_head: int = 0) -> Tensor:
    """Dropout of attention weights, keyed by (query token, head, key's index).

    Args:
        weights: (B, H, T, S), softmax of T queries over S keys.
        keys: int64 (B, T), keys of the query tokens with the layer folded in.
        first_head: index in the model of the first of the H heads.
    """
    heads = first_head + torch.arange(weights.shape[1], device=keys.device).view(1, -1, 1)
    keep = keep_mask(p, fold(keys.unsqueeze(1), heads), ATTENTION_WEIGHTS, weights.shape[-1])
    return torch.where(keep, weights * (1 / (1 - p)), 0)


class Dropout(nn.Module):
    """Dropout of one site in training; passes its input through without it."""

    def __init__(self, p: float, site: int):
        super().__init__()
        self.p, self.site = p, site

    def forward(self, x: Tensor, keys: Tensor | None) -> Tensor:
        """(B, T, D) and int64 (B, T) -> (B, T, D)."""
        if not self.p or not self.training:
            return x
        assert keys is not None, "dropout needs dropout keys"
        return dropout(x, self.p, keys, self.site)


class AttentionDropout(nn.Module):
    """Dropout of attention weights.

    Attributes:
        head_shard: which part of the heads the weights belong to, where heads are split evenly.
    """

    def __init__(self, p: float):
        super().__init__()
        self.p, self.head_shard = p, 0

    def forward(self, weights: Tensor, keys: Tensor) -> Tensor:
        """(B, H, T, S) and int64 (B, T) -> (B, H, T, S)."""
        return attention_dropout(weights, self.p, keys, self.head_shard * weights.shape[1])
