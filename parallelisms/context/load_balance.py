"""Which tokens of a sequence each rank of the cp axis holds, so that causal attention is even work.

Later tokens attend to more keys. Each document is cut into 2 * cp pieces of equal length and rank r
holds pieces r and 2 * cp - 1 - r, an early and a late one: with L tokens a document, every rank
computes the same number of pairs. For one document of 8 tokens on 2 ranks:

    token   0 1 2 3 4 5 6 7
    piece   0 0 1 1 2 2 3 3
    rank    0 0 1 1 1 1 0 0

Of packed sequences every document is cut so. A length that 2 * cp does not divide leaves some
tokens over; the pieces that get one more take turns from document to document, so that every piece
number has T / (2 * cp) tokens of each sequence, whatever its documents: all shapes are static.
Neighbouring ranks hold neighbouring pieces, so that `inner` of them together hold what one of
cp / inner ranks would: what the hierarchical method lives on.

Legend: B sequences, T tokens, n = 2 * cp pieces.
Source: Llama 3, arXiv:2407.21783, section 3.3.2 (head and tail pieces); striped attention,
arXiv:2311.09431, for the imbalance.
"""

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]


def pieces(documents: NDArray | None, shape: tuple[int, int], n: int) -> Ints:
    """Number of the piece that each token belongs to.

    Args:
        documents: (B, T), equal within a document; None: one document a sequence.
        shape: (B, T); T is a multiple of n.
        n: pieces a document.
    Returns:
        int64 (B, T), values 0 ... n - 1, each T / n times a row, ascending in each document.
    """
    batch, length = shape
    assert length % n == 0, f"{length} tokens are not a multiple of {n} pieces"
    if documents is None:
        return np.tile(np.arange(n).repeat(length // n), (batch, 1))
    return np.stack([_pieces_of(lengths(row), n) for row in documents])


def lengths(documents: NDArray) -> Ints:
    """Lengths of the documents of one sequence: (T,) -> (documents,)."""
    starts = np.flatnonzero(np.diff(documents, prepend=documents[:1] - 1))
    return np.diff(starts, append=len(documents))


def _pieces_of(of_documents: Ints, n: int) -> Ints:
    whole, left = np.divmod(of_documents, n)
    first = np.cumsum(left) - left  # where the turn of the tokens left over begins
    turn = (np.arange(n) - first[:, None]) % n < left[:, None]
    sizes = whole[:, None] + turn
    return np.tile(np.arange(n), len(sizes)).repeat(sizes.ravel())


def held(piece: Ints, rank: int, n: int) -> Ints:
    """Indices in the sequence of the tokens that one of n / 2 ranks holds: those of its early
    pieces in order, then those of its late ones.

    Args:
        piece: (B, T) of `pieces`.
    Returns:
        int64 (B, 2 * T / n).
    """
    return np.concatenate([_places(piece, rank), _places(piece, n - 1 - rank)], axis=1)


def _places(piece: Ints, number: int) -> Ints:
    return np.nonzero(piece == number)[1].reshape(len(piece), -1)


def work(piece: Ints, documents: NDArray | None, n: int) -> Ints:
    """Pairs of query and key that each of n / 2 ranks computes: (n / 2,)."""
    batch, length = piece.shape
    index = np.arange(length)
    places = np.tile(index + 1, (batch, 1))
    if documents is not None:
        starts = [np.concatenate([[0], np.cumsum(lengths(row))])[:-1] for row in documents]
        places -= np.stack(
            [s.repeat(lengths(row)) for s, row in zip(starts, documents, strict=True)]
        )
    by_piece = np.bincount(piece.ravel(), weights=places.ravel(), minlength=n)
    return (by_piece + by_piece[::-1])[: n // 2].astype(np.int64)
