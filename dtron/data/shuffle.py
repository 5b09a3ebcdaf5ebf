"""Which documents are held out, and the order of the others: pure functions of integers.

Both sort or threshold the 64-bit hash of a document's index, so that the answer depends on
nothing but its arguments: not on the library's version, the number of ranks, or earlier calls.

Source: the finaliser of SplitMix64, Steele, Lea and Flood, OOPSLA 2014.
"""

import numpy as np


def hash64(values: np.ndarray) -> np.ndarray:
    """uint64 (n,) -> uint64 (n,), one to one, every output bit depending on every input bit."""
    x = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def copies_of(contents: np.ndarray) -> np.ndarray:
    """Documents that are copies of an earlier one: int64 (c, 2), the index of each and of the first
    with its content, by index.

    Args:
        contents: (n,), equal where documents are.
    """
    _, first, of = np.unique(contents, return_index=True, return_inverse=True)
    firsts = first[of.reshape(-1)]
    copies = np.flatnonzero(firsts != np.arange(len(contents)))
    return np.stack([copies, firsts[copies]], axis=1).astype(np.int64)


NO_COPIES = np.empty((0, 2), np.int64)


def split(n: int, fraction: float, copies: np.ndarray = NO_COPIES) -> tuple[np.ndarray, np.ndarray]:
    """Divide n documents into those to train on and those held out, by the hash of their index, and
    copies as the document that they are copies of.

    Args:
        n: number of documents, at least 1.
        fraction: share to hold out; with 2 different documents or more a share above 0 holds out at
            least one, and training keeps at least one.
        copies: of `copies_of`.
    Returns:
        Indices of both, int64, ascending.
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
    """A permutation of int64 (n,) document indices, of its own for every seed and epoch."""
    key = np.array([seed % 2**64], dtype=np.uint64)
    key = hash64(hash64(key) ^ np.array([epoch], dtype=np.uint64))
    hashes = hash64(hash64(documents) ^ key)
    return documents[np.argsort(hashes, kind="stable")]
