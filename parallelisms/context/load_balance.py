"""Assign tokens to cp ranks so that causal attention is balanced.

Later tokens attend to more keys. So each document is split into 2 * cp chunks of equal length, and
rank r gets chunks r and 2 * cp - 1 - r, an early and a late one: every rank computes equally many
(query, key) pairs. For one document of 8 tokens on 2 ranks:

    token   0 1 2 3 4 5 6 7
    chunk   0 0 1 1 2 2 3 3
    rank    0 0 1 1 1 1 0 0

In a packed sequence every document is split this way. If 2 * cp does not divide a length, some
chunks get one more token. These chunks rotate from document to document, so that every chunk number
has T / (2 * cp) tokens of each sequence, whatever its documents: all shapes are static.
Neighbouring ranks have neighbouring chunks. So `inner` neighbouring ranks together have the tokens
that one of cp / inner ranks would have, as the hierarchical method requires.

Legend: B sequences, T tokens, n = 2 * cp chunks.
Source: Llama 3, arXiv:2407.21783, section 3.3.2 (head and tail chunks); striped attention,
arXiv:2311.09431, for the imbalance.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def chunk_numbers(documents: NDArray | None, shape: tuple[int, int], n: int) -> Ints:
    """Return the number of each token's chunk.

    Args:
        documents: (B, T), equal within a document; None: each sequence is one document.
        shape: (B, T); T is a multiple of n.
        n: number of chunks per document.
    Returns:
        int64 (B, T), values 0 ... n - 1, each T / n times per row, ascending in each document.
    """
    batch, length = shape
    assert length % n == 0, f"{length} tokens are not a multiple of {n} chunks"
    if documents is None:
        return np.tile(np.arange(n).repeat(length // n), (batch, 1))
    return np.stack([_chunk_numbers_of(document_lengths(row), n) for row in documents])


def document_lengths(documents: NDArray) -> Ints:
    """Return the lengths of the documents of one sequence: (T,) -> (documents,)."""
    starts = np.flatnonzero(np.diff(documents, prepend=documents[:1] - 1))
    return np.diff(starts, append=len(documents))


def _chunk_numbers_of(of_documents: Ints, n: int) -> Ints:
    quotient, remainder = np.divmod(of_documents, n)
    first = np.cumsum(remainder) - remainder  # each document's first chunk with one more token
    has_more = (np.arange(n) - first[:, None]) % n < remainder[:, None]
    sizes = quotient[:, None] + has_more
    return np.tile(np.arange(n), len(sizes)).repeat(sizes.ravel())


def tokens_of_rank(chunk: Ints, rank: int, n: int) -> Ints:
    """Return the indices in the sequence of a rank's tokens, early chunks before late ones.

    Args:
        chunk: (B, T), result of `chunk_numbers`.
        rank: one of n / 2 ranks.
    Returns:
        int64 (B, 2 * T / n).
    """
    return np.concatenate([_indices(chunk, rank), _indices(chunk, n - 1 - rank)], axis=1)


def _indices(chunk: Ints, number: int) -> Ints:
    return np.nonzero(chunk == number)[1].reshape(len(chunk), -1)


def pairs_per_rank(chunk: Ints, documents: NDArray | None, n: int) -> Ints:
    """Count the (query, key) pairs that each of n / 2 ranks computes: (n / 2,)."""
    batch, length = chunk.shape
    index = np.arange(length)
    places = np.tile(index + 1, (batch, 1))
    if documents is not None:
        starts = [np.concatenate([[0], np.cumsum(document_lengths(row))])[:-1] for row in documents]
        places -= np.stack(
            [s.repeat(document_lengths(row)) for s, row in zip(starts, documents, strict=True)]
        )
    by_piece = np.bincount(chunk.ravel(), weights=places.ravel(), minlength=n)
    return (by_piece + by_piece[::-1])[: n // 2].astype(np.int64)
