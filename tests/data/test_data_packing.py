import itertools
import logging
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from dtron.config import Data
from dtron.data import Packed, TrainingSource, ValidationSource, open_data
from dtron.data.packing import IGNORE
from dtron.data.shuffle import hash64, shuffle
from dtron.errors import DataError
from tests.data.held_out import split

MakeData = Callable[..., Data]
EOS = 256


def tokens_of(texts: list[str]) -> list[tuple[int, ...]]:
    return [(*text.encode(), EOS) for text in texts]


def held_out(texts: list[str], fraction: float) -> list[tuple[int, ...]]:
    return [tokens_of(texts)[i] for i in split(texts, fraction)[1]]


def opened(data: Data, seq_len: int, seed: int = 0) -> tuple[TrainingSource, ValidationSource]:
    training, validation = open_data(data, seq_len=seq_len, seed=seed)
    assert validation is not None
    return training, validation


def epoch(source: TrainingSource, n: int, number: int) -> list[int]:
    """All tokens of an epoch, the last label included."""
    packed = [source.sequence(number * n + k) for k in range(n)]
    return [t for p in packed for t in p.tokens.tolist()] + [int(packed[-1].labels[-1])]


def as_documents(tokens: list[int]) -> list[tuple[int, ...]]:
    documents, current = [], []
    for token in tokens:
        current.append(token)
        if token == EOS:
            documents.append(tuple(current))
            current = []
    return [*documents, tuple(current)]


@pytest.mark.parametrize("seq_len", [2, 16, 100])
def test_an_epoch_holds_every_training_token_once_but_the_tail(
    make_data: MakeData, texts: list[str], seq_len: int
) -> None:
    training, _ = opened(make_data(texts, validation_fraction=0.2), seq_len)
    expected = Counter(tokens_of(texts)) - Counter(held_out(texts, 0.2))
    total = sum(map(len, expected))
    n = (total - 1) // seq_len
    for number in range(3):
        *whole, cut = as_documents(epoch(training, n, number))
        rest = expected - Counter(whole)
        assert sum(map(len, whole)) + len(cut) + seq_len > total  # the tail fills no sequence
        assert rest.total() == len(expected) - len(whole)
        assert not cut or any(document[: len(cut)] == cut for document in rest)


def test_epochs_and_seeds_have_orders_of_their_own(make_data: MakeData, texts: list[str]) -> None:
    data = make_data(texts)
    total = sum(map(len, tokens_of(texts))) - sum(map(len, held_out(texts, 0.02)))
    n = (total - 1) // 16
    zero, one = opened(data, 16, seed=0)[0], opened(data, 16, seed=-1)[0]
    orders = [epoch(source, n, e) for source in (zero, one) for e in (0, 1)]
    assert all(a != b for a, b in itertools.combinations(orders, 2))
    assert epoch(opened(data, 16, seed=0)[0], n, 1) == orders[1]


def test_a_sequence_depends_on_its_index_alone(make_data: MakeData, texts: list[str]) -> None:
    data = make_data(texts, mask_documents=True)
    forward, backward = opened(data, 32)[0], opened(data, 32)[0]
    indices = range(0, 150, 7)  # several epochs
    first = [forward.sequence(k) for k in indices]
    second = [backward.sequence(k) for k in reversed(indices)][::-1]
    for a, b in zip(first, second, strict=True):
        np.testing.assert_equal(vars(a), vars(b))


def test_labels_are_the_next_tokens(make_data: MakeData, texts: list[str]) -> None:
    training, validation = opened(make_data(texts, validation_fraction=0.3), 16)
    for source, n in ((training, 40), (validation, len(validation))):
        for k in range(n):
            packed = source.sequence(k)
            assert packed.tokens.shape == packed.labels.shape == (16,)
            assert packed.tokens.dtype == packed.labels.dtype == np.int64
            assert (packed.labels[:-1] == packed.tokens[1:]).all()
            assert packed.positions is None
            assert packed.documents is None
    assert training.sequence(0).labels[-1] == training.sequence(1).tokens[0]


def check_masks(masked: Packed, plain: Packed) -> None:
    assert masked.positions is not None
    assert masked.documents is not None
    assert (masked.positions.dtype, masked.documents.dtype) == (np.int64, np.int32)
    np.testing.assert_equal(masked.tokens, plain.tokens)
    number = position = 0
    for t, token in enumerate(plain.tokens):
        assert (masked.documents[t], masked.positions[t]) == (number, position)
        assert masked.labels[t] == (IGNORE if token == EOS else plain.labels[t])
        position += 1
        if token == EOS:
            number, position = number + 1, 0


def test_masks_keep_documents_apart(make_data: MakeData, texts: list[str]) -> None:
    plain, plain_validation = opened(make_data(texts, validation_fraction=0.3), 50)
    data = make_data(texts, validation_fraction=0.3, mask_documents=True)
    masked, validation = opened(data, 50)
    for k in range(60):
        check_masks(masked.sequence(k), plain.sequence(k))
    for k in range(len(validation)):
        check_masks(validation.sequence(k), plain_validation.sequence(k))


def test_held_out_documents_are_not_trained_on(make_data: MakeData, texts: list[str]) -> None:
    training, validation = opened(make_data(texts, validation_fraction=0.3), 8)
    seen = [t for k in range(len(validation)) for t in validation.sequence(k).tokens.tolist()]
    expected = [t for document in held_out(texts, 0.3) for t in document]
    assert seen == expected[: len(seen)]
    assert len(expected) - len(seen) <= 8
    total = sum(map(len, tokens_of(texts))) - len(expected)
    trained = as_documents(epoch(training, (total - 1) // 8, 0))
    assert not set(trained) & set(held_out(texts, 0.3))


def test_validation_has_one_epoch_independent_of_the_seed(
    make_data: MakeData, texts: list[str]
) -> None:
    data = make_data(texts, validation_fraction=0.3)
    first, second = opened(data, 8, seed=0)[1], opened(data, 8, seed=1)[1]
    assert len(first) == len(second) == (sum(map(len, held_out(texts, 0.3))) - 1) // 8
    np.testing.assert_equal(vars(first.sequence(2)), vars(second.sequence(2)))


@pytest.mark.parametrize("mask", [False, True])
@pytest.mark.parametrize("extra", [-1, 0, 1, 30])
def test_short_validation_is_padded_without_labels(
    make_data: MakeData, mask: bool, extra: int
) -> None:
    texts = [letter * 40 for letter in "abcde"]
    (document,) = held_out(texts, 0.01)
    seq_len = len(document) + extra
    _, validation = opened(make_data(texts, validation_fraction=0.01, mask_documents=mask), seq_len)
    packed = validation.sequence(0)
    n = min(len(document), seq_len)
    assert len(validation) == 1
    assert tuple(packed.tokens[:n]) == document[:n]
    assert (packed.tokens[n:] == EOS).all()
    assert tuple(packed.labels[: len(document) - 1]) == document[1:]
    assert (packed.labels[len(document) - 1 :] == IGNORE).all()
    if packed.documents is not None:
        assert packed.documents.tolist() == [0] * n + [1] * (seq_len - n)


def test_too_little_text_says_how_much_is_needed(make_data: MakeData) -> None:
    data = make_data(["abc", "defg"], validation_fraction=0.0)
    message = r"has 9 tokens in 2 documents.*train\.seq_len = 9 needs 10"
    with pytest.raises(DataError, match=message):
        open_data(data, seq_len=9, seed=0)
    training, validation = open_data(data, seq_len=8, seed=0)
    assert validation is None
    assert training.sequence(1).tokens.shape == (8,)


def test_the_last_label_of_an_epoch_needs_a_token(make_data: MakeData) -> None:
    data = make_data(["abc", "defg"], validation_fraction=0.0)  # 9 tokens: 2 sequences of 3 + 1
    training, _ = open_data(data, seq_len=3, seed=0)
    first_of_epoch = [training.sequence(k).tokens[0] for k in range(0, 12, 2)]
    assert set(first_of_epoch) == {ord("a"), ord("d")}
    validation = opened(make_data(["a" * 7, "b" * 7]), 4)[1]  # 8 tokens: 1 sequence of 4 + 1
    assert len(validation) == 1


def test_a_single_document_is_trained_on(
    make_data: MakeData, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "dtron")
    _, validation = open_data(make_data(["abcdef"], validation_fraction=0.9), seq_len=4, seed=0)
    assert validation is None
    assert "too few different documents" in caplog.text


def test_hash_is_splitmix64() -> None:
    states = np.array([0, 0x9E3779B97F4A7C15], np.uint64)  # of the generator seeded with 0
    assert hash64(states).tolist() == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_shuffle_is_a_stable_permutation() -> None:
    documents = np.arange(1000)
    order = shuffle(documents, seed=1, epoch=2)
    assert sorted(order.tolist()) == documents.tolist()
    assert order[:4].tolist() == [647, 210, 759, 720]  # fixed for ever
