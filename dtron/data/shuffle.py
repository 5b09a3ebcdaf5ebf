"""Random orders as pure functions of integers.

An order sorts by 64-bit hashes of numbers, so that it depends on the arguments only: not on the
version of a library, the number of ranks, or earlier calls.

Source: the finaliser of SplitMix64, Steele, Lea and Flood, OOPSLA 2014.
"""

import numpy as np


def hash64(values: np.ndarray) -> np.ndarray:
    """Hash uint64 (n,) to uint64 (n,): one to one; every output bit depends on every input bit."""
    x = values.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def draws(seed: int, number: int, stream: int, n: int) -> np.ndarray:
    """Return n random numbers, uint64 (n,), as a function of all arguments.

    Args:
        seed, number, stream: e.g. the seed of a run, the number of a sequence, what is drawn; may
            be negative.
    """
    key = np.zeros(1, dtype=np.uint64)
    for part in (seed, number, stream):
        key = hash64(key ^ np.array([part % 2**64], dtype=np.uint64))
    return hash64(np.arange(n, dtype=np.uint64) ^ key)


def shuffled(numbers: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Return a random order of int64 (n,) numbers, as int64 (n,) indices."""
    key = np.array([seed % 2**64], dtype=np.uint64)
    key = hash64(hash64(key) ^ np.array([epoch], dtype=np.uint64))
    return np.argsort(hash64(hash64(numbers) ^ key), kind="stable")


def shuffle(numbers: np.ndarray, seed: int, epoch: int) -> np.ndarray:
    """Permute int64 (n,) numbers, differently for every seed and epoch."""
    return numbers[shuffled(numbers, seed, epoch)]
