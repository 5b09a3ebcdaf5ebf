"""Train/validation split and shuffling of documents: pure functions of integers.

Both sort or threshold the 64-bit hash of a document's index, so that the result depends on the
arguments only: not on the version of a library, the number of ranks, or earlier calls.

Source: the finaliser of SplitMix64, Steele, Lea and Flood, OOPSLA 2014.
"""

import numpy as np


def hash64(values: np.ndarray) -> np.ndarray:
    """Hash uint64 (n,) to uint64 (n,): one to one; every output bit depends on every input bit."""
    x = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def copies_of(contents: np.ndarray) -> np.ndarray:
    """Find the documents that are copies of an earlier one.

    Args:
        contents: (n,), equal for equal documents.
    Returns:
        int64 (c, 2): index of each copy, ascending, and of the first document with its content.
    """
    _, first, of = np.unique(contents, return_index=True, return_inverse=True)
    firsts = first[of.reshape(-1)]
    copies = np.flatnonzero(firsts != np.arange(len(contents)))
    return np.stack([copies, firsts[copies]], axis=1).astype(np.int64)


NO_COPIES = np.empty((0, 2), np.int64)


def split(n: int, fraction: float, copies: np.ndarray = NO_COPIES) -> tuple[np.ndarray, np.ndarray]:
    """Split n documents into training and held-out ones by the hash of their index.

    A copy is on the same side as the document that it is a copy of.

    Args:
        n: number of documents, at least 1.
        fraction: fraction to hold out; with 2 or more different documents and a fraction above 0,
            at least one is held out and at least one is left to train on.
        copies: result of `copies_of`.
    Returns:
        Indices of training and of held-out documents, int64, ascending.
    """
    hashes = hash64(np.arange(n, dtype=np.uint64))
    hashes[copies[:, 0]] = hashes[copies[:, 1]]
    held_out = hashes < np.uint64(int(fraction * 2**64))
    different = n - len(copies)
    if fraction > 0 and different > 1:
        held_out[hashes == hashes.min()] = True
        held_out[hashes == hashes.max()] = False
    elif different == 1:
        held_out[:] = False
    return np.flatnonzero(~held_out), np.flatnonzero(held_out)


def shuffle(documents: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Permute int64 (n,) document indices, differently for every seed and epoch."""
    key = np.array([seed % 2**64], dtype=np.uint64)
    key = hash64(hash64(key) ^ np.array([epoch], dtype=np.uint64))
    hashes = hash64(hash64(documents) ^ key)
    return documents[np.argsort(hashes, kind="stable")]
