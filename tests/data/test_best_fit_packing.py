"""Whole documents in sequences: `data.packing` best_fit and pad."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from dtron.config import Data
from dtron.data import Packed, TrainingSource, open_data
from dtron.data.best_fit_packing import PACKERS, best_fit
from dtron.data.corpus.documents import Reading, files_corpus
from dtron.data.packing import IGNORE
from tests.data.held_out import split

MakeData = Callable[..., Data]
Piece = tuple[tuple[int, ...], tuple[int, ...]]  # tokens, and the label of each
EOS = 256
MODES = sorted(PACKERS)
LENGTHS = {
    "one": np.array([7]),
    "short": np.random.default_rng(0).integers(2, 40, 3000),
    "long tail": np.random.default_rng(1).lognormal(4.0, 1.2, 5000).astype(np.int64) + 2,
    "all longer than half": np.random.default_rng(2).integers(130, 257, 300),
}


def expected_pieces(texts: list[str], seq_len: int) -> Counter[Piece]:
    """Documents split at every seq_len tokens, each token with the next of its document."""
    pieces: Counter[Piece] = Counter()
    for text in texts:
        tokens = [*text.encode(), EOS]
        labels = [*tokens[1:], IGNORE]
        for start in range(0, len(tokens), seq_len):
            end = start + seq_len
            pieces[tuple(tokens[start:end]), tuple(labels[start:end])] += 1
    return pieces


def pieces_of(packed: Packed) -> Iterator[Piece]:
    """The pieces of a sequence with masks; checks everything but their content."""
    assert packed.documents is not None
    assert packed.positions is not None
    assert (packed.tokens.dtype, packed.labels.dtype) == (np.int64, np.int64)
    assert (packed.positions.dtype, packed.documents.dtype) == (np.int64, np.int32)
    filled = len(packed.tokens) - packed.padding
    ends = np.flatnonzero(np.diff(packed.documents, append=-1)) + 1
    numbers = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
    assert packed.documents.tolist() == numbers.tolist()
    for start, end in itertools.pairwise([0, *ends.tolist()]):
        assert packed.positions[start:end].tolist() == list(range(end - start))
        tokens, labels = packed.tokens[start:end].tolist(), packed.labels[start:end].tolist()
        if start < filled:
            yield tuple(tokens), tuple(labels)
        else:  # the padding is one document of its own
            assert (start, end) == (filled, len(packed.tokens))
            assert set(tokens) == {EOS}
            assert set(labels) == {IGNORE}


def training_texts(texts: list[str], fraction: float, held_out: bool = False) -> list[str]:
    return [texts[i] for i in split(texts, fraction)[held_out]]


def sequences_of(source: TrainingSource) -> int:
    waste = source.waste()
    assert waste is not None
    return waste.sequences


@pytest.mark.parametrize("packing", MODES)
@pytest.mark.parametrize("seq_len", [2, 16, 23, 100])
def test_an_epoch_holds_every_document_once_and_splits_only_the_long(
    make_data: MakeData, texts: list[str], packing: str, seq_len: int
) -> None:
    data = make_data(texts, validation_fraction=0.2, mask_documents=True, packing=packing)
    training, validation = open_data(data, seq_len=seq_len, seed=0)
    assert validation is not None
    expected = expected_pieces(training_texts(texts, 0.2), seq_len)
    n = sequences_of(training)
    for epoch in range(3):
        sequences = [training.sequence(epoch * n + k) for k in range(n)]
        assert Counter(piece for packed in sequences for piece in pieces_of(packed)) == expected
        padding = sum(packed.padding for packed in sequences)
        waste = training.waste()
        assert waste is not None
        assert waste.padding == pytest.approx(padding / (n * seq_len))
        assert packing != "pad" or all(len(list(pieces_of(packed))) == 1 for packed in sequences)
    held_out = [validation.sequence(k) for k in range(len(validation))]
    found = Counter(piece for packed in held_out for piece in pieces_of(packed))
    assert found == expected_pieces(training_texts(texts, 0.2, held_out=True), seq_len)


@pytest.mark.parametrize("packing", MODES)
def test_without_masks_tokens_and_labels_are_the_same(
    make_data: MakeData, texts: list[str], packing: str
) -> None:
    training, validation = zip(  # with masks and without
        open_data(make_data(texts, packing=packing, mask_documents=True), seq_len=50, seed=0),
        open_data(make_data(texts, packing=packing), seq_len=50, seed=0),
        strict=True,
    )
    for (masked, plain), n in ((training, 40), (validation, 1)):
        assert masked is not None
        assert plain is not None
        for k in range(n):
            one, other = masked.sequence(k), plain.sequence(k)
            np.testing.assert_equal(one.tokens, other.tokens)
            np.testing.assert_equal(one.labels, other.labels)
            assert one.padding == other.padding
            assert other.positions is None
            assert other.documents is None


@pytest.mark.parametrize("packing", MODES)
def test_a_sequence_depends_on_seed_and_index_alone(
    make_data: MakeData, texts: list[str], packing: str
) -> None:
    data = make_data(texts, mask_documents=True, packing=packing)
    forward, backward = (open_data(data, seq_len=32, seed=3)[0] for _ in range(2))
    indices = range(0, 150, 7)  # several epochs
    first = [forward.sequence(k) for k in indices]
    second = [backward.sequence(k) for k in reversed(indices)][::-1]
    for a, b in zip(first, second, strict=True):
        np.testing.assert_equal(vars(a), vars(b))


@pytest.mark.parametrize("packing", MODES)
def test_epochs_and_seeds_have_orders_of_their_own(
    make_data: MakeData, texts: list[str], packing: str
) -> None:
    data = make_data(texts, packing=packing)
    sources = [open_data(data, seq_len=64, seed=seed) for seed in (0, 1)]
    n = sequences_of(sources[0][0])
    orders = [
        [tuple(training.sequence(epoch * n + k).tokens.tolist()) for k in range(n)]
        for training, _ in sources
        for epoch in (0, 1)
    ]
    for a, b in itertools.combinations(orders, 2):
        assert a != b
        assert (sorted(a) == sorted(b)) == (packing == "pad")  # best_fit has other companies too
    held_out = [validation.sequence(0).tokens.tolist() for _, validation in sources if validation]
    assert held_out[0] == held_out[1]


def test_lengths_do_not_decide_the_order(make_data: MakeData) -> None:
    texts = [letter * n for n in range(2, 60) for letter in "abcdefgh"]
    data = make_data(texts, packing="best_fit", mask_documents=True)
    training, _ = open_data(data, seq_len=64, seed=0)
    n = sequences_of(training)
    pieces = [list(pieces_of(training.sequence(k))) for k in range(n)]
    longest = np.array([max(len(tokens) for tokens, _ in sequence) for sequence in pieces])
    assert abs(np.corrcoef(longest, np.arange(n))[0, 1]) < 0.3
    pairs = [sequence for sequence in pieces if len(sequence) == 2]
    longer_first = np.mean([len(a[0]) > len(b[0]) for a, b in pairs])
    assert 0.3 < longer_first < 0.7


def best_fit_one_by_one(lengths: np.ndarray, seq_len: int) -> int:
    rooms: list[int] = []
    for length in lengths.tolist():
        room = min((room for room in rooms if room >= length), default=None)
        if room is None:
            rooms.append(seq_len - length)
        else:
            rooms[rooms.index(room)] -= length
    return len(rooms)


@pytest.mark.parametrize("name", LENGTHS)
def test_best_fit_is_that_of_one_piece_after_the_other(name: str) -> None:
    lengths = -np.sort(-np.minimum(LENGTHS[name], 256))
    sequence = best_fit(lengths, 256)
    filled = np.bincount(sequence, weights=lengths)
    assert filled.min() >= 1
    assert filled.max() <= 256
    assert len(filled) == best_fit_one_by_one(lengths, 256)


@pytest.mark.parametrize("seq_len", [256, 2048, 4096, 8192])
def test_waste_on_the_embedded_corpus_is_near_the_bound(seq_len: int) -> None:
    """No packing needs fewer sequences than all tokens fill, or than there are pieces of more than
    half a sequence."""
    texts = files_corpus(Data()).documents(Reading(Data()))
    lengths = np.array([len(str(text).encode()) + 1 for text in texts])
    whole, rests = lengths // seq_len, lengths % seq_len
    pieces = np.concatenate([np.full(whole.sum(), seq_len), rests[rests > 0]])
    needed = max(-(-lengths.sum() // seq_len), np.count_nonzero(pieces > seq_len // 2))
    found = best_fit(-np.sort(-pieces), seq_len).max() + 1
    assert needed <= found <= 1.01 * needed
    assert found < len(pieces)  # what pad takes


def test_what_packing_costs(make_data: MakeData) -> None:
    texts = ["a" * 9, "b" * 4, "c" * 3, "d" * 19]  # 10, 5, 4 and 20 tokens
    wastes = {}
    for packing in ("cut", *MODES):
        data = make_data(texts, packing=packing, validation_fraction=0.0)
        wastes[packing] = open_data(data, seq_len=10, seed=0)[0].waste()
    assert [(w.sequences, w.padding) for w in wastes.values() if w] == [
        (3, 0.0),  # the tail is dropped
        (4, pytest.approx(1 / 40)),
        (5, pytest.approx(11 / 50)),
    ]
    assert wastes["best_fit"].split_documents == wastes["pad"].split_documents == 0.25
    assert 0.25 <= wastes["cut"].split_documents <= 1
    text = "4 sequences per epoch, 2.50% of their tokens padding, 25.0% of documents split"
    assert str(wastes["best_fit"]) == text


def test_one_short_document_is_enough(make_data: MakeData) -> None:
    data = make_data(["abc"], packing="best_fit", validation_fraction=0.0)
    training, _ = open_data(data, seq_len=8, seed=0)
    packed = training.sequence(5)
    assert packed.tokens.tolist() == [*b"abc", EOS, EOS, EOS, EOS, EOS]
    assert packed.labels.tolist() == [*b"bc", EOS, *[IGNORE] * 5]
