"""A hash of the tokens that a step has trained on, the same in every layout."""

from collections.abc import Iterable

import numpy as np

from dtron.data.loader import Batch
from dtron.data.shuffle import hash64

BITS = 48
"""Bits of the hash that is logged; JSON readers keep 53 bits of a number."""


def fingerprint(batches: Iterable[Batch]) -> int:
    """Hash the tokens of whole sequences on the host, independent of their order.

    The result is the sum, modulo 2^64, of a hash of (sequence index, position, token) over all
    tokens, so that the hashes of several ranks add up to the hash of all their batches.
    """
    total = 0
    for batch in batches:
        parts = [x for x in (batch.tokens, batch.encoder_tokens) if x is not None]
        tokens = np.concatenate([x.numpy() for x in parts], axis=1).astype(np.uint64)
        places = np.arange(tokens.shape[1], dtype=np.uint64)[None, :]
        rows = hash64(batch.sequence.numpy())[:, None]
        hashed = hash64(hash64(rows ^ places) ^ tokens)
        total += int(hashed.sum(dtype=np.uint64))
    return total % 2**64
