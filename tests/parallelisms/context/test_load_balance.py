"""Which tokens each rank of a sequence holds: even shares of tokens and of attention's work."""

import numpy as np
import pytest
import torch

from dtron.parallelisms.context.load_balance import (
    chunk_numbers,
    document_lengths,
    pairs_per_rank,
    tokens_of_rank,
)
from dtron.parallelisms.context.recurrent import order_of_whole_sequences
from dtron.parallelisms.context.split import Split


def drawn(seed: int, rows: int, length: int) -> np.ndarray:
    """Documents of random lengths, from one token to the whole row."""
    rng = np.random.default_rng(seed)
    ends = [
        rng.choice(length, rng.integers(0, min(length, 12)), replace=False) for _ in range(rows)
    ]
    return np.stack([(np.arange(length)[:, None] >= np.sort(end)).sum(1) for end in ends])


@pytest.mark.parametrize("n", [2, 3, 4])
def test_recurrent_layers_know_the_order_of_whole_sequences(n: int) -> None:
    split = Split(None, (2, 4 * n), n)
    wanted = torch.cat([split.index(rank) for rank in range(n)], dim=1)
    assert torch.equal(order_of_whole_sequences(n, torch.zeros(2, 4, 1)), wanted)


def test_one_document_is_held_from_both_ends() -> None:
    chunk = chunk_numbers(None, (1, 8), 4)
    assert tokens_of_rank(chunk, 0, 4).tolist() == [[0, 1, 6, 7]]
    assert tokens_of_rank(chunk, 1, 4).tolist() == [[2, 3, 4, 5]]


@pytest.mark.parametrize("ranks", [1, 2, 4, 8, 16])
def test_causal_work_is_even(ranks: int) -> None:
    pairs = pairs_per_rank(chunk_numbers(None, (3, 4 * ranks), 2 * ranks), None, 2 * ranks)
    assert len(set(pairs.tolist())) == 1
    assert pairs.sum() == 3 * (4 * ranks) * (4 * ranks + 1) // 2


@pytest.mark.parametrize("seed", range(20))
def test_every_chunk_has_as_many_tokens_of_each_row(seed: int) -> None:
    n = 2 ** (1 + seed % 4)
    documents = drawn(seed, 3, n * (1 + seed))
    chunk = chunk_numbers(documents, documents.shape, n)
    for row in chunk:
        assert (np.bincount(row, minlength=n) == 1 + seed).all()
    for row, own in zip(chunk, documents, strict=True):
        for document in np.unique(own):
            assert (np.diff(row[own == document]) >= 0).all()  # chunks follow each other
    everything = np.concatenate([tokens_of_rank(chunk, rank, n) for rank in range(n // 2)], axis=1)
    assert (np.sort(everything, axis=1) == np.arange(documents.shape[1])).all()


def test_work_of_packed_documents_is_nearly_even() -> None:
    """A rank's share differs by what is left over of each document, 2 * cp tokens at most."""
    documents = np.repeat(np.arange(16), [100, 500, 1000, 37, 463, 900, 100, 996] * 2)[None]
    assert documents.shape == (1, 8192)
    pairs = pairs_per_rank(chunk_numbers(documents, (1, 8192), 8), documents, 8)
    of_documents = document_lengths(documents[0])
    assert pairs.sum() == (of_documents * (of_documents + 1) // 2).sum()
    assert pairs.max() / pairs.mean() < 1.01
    # Sharded as if the sequence were one document.
    of_one = pairs_per_rank(chunk_numbers(None, (1, 8192), 8), documents, 8)
    assert of_one.max() / of_one.mean() > pairs.max() / pairs.mean()
