"""Which documents are held out, by the rule's definition."""

import hashlib

import numpy as np

from dtron.data.shuffle import hash64


def split(texts: list[str], fraction: float) -> tuple[list[int], list[int]]:
    """Indices of training and of held-out documents, by the hash of their byte tokens."""
    contents = [np.array([*text.encode(), 256], "<u2").tobytes() for text in texts]
    digests = [hashlib.blake2b(content, digest_size=8).digest() for content in contents]
    hashes = hash64(np.frombuffer(b"".join(digests), "<u8")).tolist()
    low, high, below = min(hashes), max(hashes), int(fraction * 2**64)
    out = [
        fraction > 0 and low < high and hashed < high and (hashed < below or hashed == low)
        for hashed in hashes
    ]
    sides = [[i for i, held in enumerate(out) if held is side] for side in (False, True)]
    return sides[0], sides[1]
