"""The order of a corpus of many groups of documents, here of a few documents each."""

import gc
import itertools
import json
import os
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from dtron.config import Data
from dtron.data import TrainingSource, open_data, prepare
from dtron.data.corpus.document_index import DocumentIndex, build_index, open_index
from dtron.data.corpus.documents import files_corpus
from dtron.data.corpus.shards import write_corpus
from dtron.data.corpus.token_corpus import open_corpus
from dtron.data.corpus.tokenize import write_shards
from dtron.data.packing import Shuffled
from dtron.data.shuffle import hash64
from dtron.data.tokenizer import ByteTokenizer
from dtron.errors import DataError
from tests.data.held_out import split

MakeData = Callable[..., Data]
EOS = 256


@pytest.fixture
def small_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 groups for 100 documents, read in chunks of 7 documents."""
    monkeypatch.setattr("dtron.data.corpus.document_index.GROUP_DOCUMENTS", 8)
    monkeypatch.setattr("dtron.data.corpus.shards.CHUNK_DOCUMENTS", 7)


@pytest.fixture
def many() -> list[str]:
    """100 documents of 1 to 60 characters; the last 10 are copies."""
    lengths = np.random.default_rng(0).integers(1, 60, 90).tolist()
    texts = [f"{i:02d}".ljust(n, "abc"[i % 3]) for i, n in enumerate(lengths)]
    return texts + texts[:10]


def index_of(data: Data, folder: Path, fraction: float) -> DocumentIndex:
    tokenizer = ByteTokenizer()
    corpus = files_corpus(data)
    folder.mkdir()
    write_corpus(folder, write_shards(corpus, tokenizer, folder), corpus.name, tokenizer)
    opened = open_corpus(folder, tokenizer)
    assert opened is not None
    (folder / "index").mkdir()
    build_index(opened, fraction, folder / "index")
    index = open_index(folder / "index", opened)
    assert index is not None
    return index


def sequences(source: TrainingSource, number: int) -> Iterator[list[int]]:
    waste = source.waste()
    assert waste is not None
    for k in range(number * waste.sequences, (number + 1) * waste.sequences):
        yield source.sequence(k).tokens.tolist()


@pytest.mark.parametrize("fraction", [0.0, 1e-9, 0.02, 0.5, 0.999999])
@pytest.mark.parametrize("n", [1, 2, 3, 100])
def test_groups_hold_each_document_once(
    make_data: MakeData,
    many: list[str],
    tmp_path: Path,
    n: int,
    fraction: float,
    small_groups: None,
) -> None:
    texts = many[:n]
    index = index_of(make_data(texts), tmp_path / "corpus", fraction)
    train, out = split(texts, fraction)
    assert len(index.group_sizes) == (16 if n == 100 else 1)
    groups = [index.group(g) for g in range(len(index.group_sizes))]
    assert sorted(i for group in groups for i in group.numbers.tolist()) == train
    assert index.held_out().numbers.tolist() == out
    assert not {texts[i] for i in train} & {texts[i] for i in out}  # no copies on both sides
    assert len(train) >= 1
    assert (len(out) >= 1) == (fraction > 0 and n >= 2)
    lengths = np.array([len(text) + 1 for text in texts])
    starts = np.cumsum(lengths) - lengths
    for number, group in enumerate([*groups, index.held_out()]):
        assert group.lengths.tolist() == lengths[group.numbers].tolist()
        assert group.starts.tolist() == starts[group.numbers].tolist()
        assert group.numbers.tolist() == sorted(group.numbers.tolist())
        if n == 100 and number < 16:
            assert set((hash64(group.numbers) >> np.uint64(60)).tolist()) <= {number}


def test_one_document_many_times_is_trained_on(make_data: MakeData, tmp_path: Path) -> None:
    index = index_of(make_data(["same"] * 5), tmp_path / "corpus", 0.5)
    assert (index.n_documents, len(index.held_out())) == (5, 0)


def test_documents_that_are_added_or_moved_do_not_move_others(
    make_data: MakeData, many: list[str], tmp_path: Path
) -> None:
    first = index_of(make_data(many[:60]), tmp_path / "a", 0.2).held_out().numbers
    second = index_of(make_data(many[::-1]), tmp_path / "b", 0.2).held_out().numbers
    found = {many[::-1][i] for i in second.tolist()}
    assert {many[i] for i in first.tolist()} == found & set(many[:60])
    assert found - set(many[:60])


@pytest.mark.parametrize("packing", ["cut", "best_fit", "pad"])
def test_an_epoch_of_many_groups_holds_every_token_once(
    make_data: MakeData, many: list[str], packing: str, small_groups: None
) -> None:
    """Or all but a tail that fills no sequence; in another order in each epoch."""
    data = make_data(many, validation_fraction=0.1, packing=packing)
    prepare(data, 16)
    training, held_out = open_data(data, seq_len=16, seed=0)
    assert held_out is not None
    expected = Counter(t for i in split(many, 0.1)[0] for t in [*many[i].encode(), EOS])
    orders = []
    for epoch in range(3):
        rows = list(sequences(training, epoch))
        found = Counter(itertools.chain(*rows))
        if packing == "cut":
            assert found <= expected
            assert expected.total() - 16 <= found.total() + 1
        else:
            padding = sum(
                training.sequence(epoch * len(rows) + k).padding for k in range(len(rows))
            )
            assert found - Counter({EOS: padding}) == expected
        orders.append(rows)
    assert all(a != b for a, b in itertools.combinations(orders, 2))
    again, _ = open_data(data, seq_len=16, seed=0)
    backwards = [again.sequence(k).tokens.tolist() for k in reversed(range(len(orders[0])))]
    assert backwards[::-1] == orders[0]


def test_neighbours_of_the_corpus_land_anywhere(make_data: MakeData, small_groups: None) -> None:
    """Their distance in an epoch is that of a true shuffle: a third of the documents."""
    texts = [f"{i:07d}" for i in range(2000)]
    data = make_data(texts, validation_fraction=0.0, packing="pad")
    training, _ = open_data(data, seq_len=8, seed=0)
    order = [int(bytes(row[:7])) for row in sequences(training, 0)]
    places = np.argsort(order)
    distances = np.abs(np.diff(places))
    assert distances.mean() == pytest.approx(2000 / 3, rel=0.05)
    assert np.mean(distances < 20) == pytest.approx(0.02, abs=0.01)
    shift = np.corrcoef(places, np.arange(2000))[0, 1]
    assert abs(shift) < 0.1


def test_counts_of_sequences_are_kept(
    make_data: MakeData, many: list[str], small_groups: None
) -> None:
    data = make_data(many, packing="best_fit")
    prepare(data, 16)
    (file,) = Path(data.cache_dir).glob("*/best_fit-16.json")
    first = open_data(data, seq_len=16, seed=0)[0].waste()
    counts = json.loads(file.read_text())["sequences"]
    file.write_text(json.dumps({"sequences": [1]}))  # of another index: counted again
    assert open_data(data, seq_len=16, seed=0)[0].waste() == first
    assert json.loads(file.read_text())["sequences"] == counts


@pytest.mark.parametrize("packing", ["cut", "best_fit", "pad"])
def test_a_group_without_training_documents_is_passed_over(
    make_data: MakeData, many: list[str], packing: str, small_groups: None
) -> None:
    """All documents of one group are copies of a held-out one."""
    copies = [i for i in range(100) if hash64(np.array([i], np.uint64))[0] >> np.uint64(60) == 3]
    held = split(many[:90], 0.02)[1][0]
    texts = [many[held] if i in copies else f"{i} {many[i]}" for i in range(100)]
    data = make_data(texts, validation_fraction=1e-9, packing=packing)
    _, out = split(texts, 1e-9)
    if not {texts[i] for i in out} & {many[held]}:  # the lowest hash is another document's
        texts = [texts[out[0]] if i in copies else text for i, text in enumerate(texts)]
        data = make_data(texts, validation_fraction=1e-9, packing=packing)
    training, held_out = open_data(data, seq_len=16, seed=0)
    assert held_out is not None
    assert len(list(sequences(training, 1))) > 10
    assert training.waste().split_documents >= 0  # type: ignore[union-attr]


def test_orders_of_past_epochs_are_freed(make_data: MakeData, many: list[str]) -> None:
    """Without the cycle collector, which training stops."""
    gc.disable()
    try:
        for packing in ("cut", "best_fit"):
            training, _ = open_data(make_data(many, packing=packing), seq_len=16, seed=0)
            assert isinstance(training, Shuffled)
            training.sequence(0)
            order = weakref.ref(training._order)
            training.sequence(10_000)
            assert order() is None
    finally:
        gc.enable()


def test_damaged_lengths_are_named(make_data: MakeData, many: list[str], tmp_path: Path) -> None:
    """Also with the same sum, and older than corpus.json."""
    index_of(make_data(many), tmp_path / "corpus", 0.1)
    file = tmp_path / "corpus/00000.documents"
    content = bytearray(file.read_bytes())
    content[-8], content[-4] = content[-8] + 1, content[-4] - 1
    times = file.stat()
    file.write_bytes(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
    opened = open_corpus(tmp_path / "corpus", ByteTokenizer())
    assert opened is not None
    with pytest.raises(DataError, match=r"00000\.documents is damaged: its SHA-256 is not that"):
        build_index(opened, 0.1, tmp_path)
