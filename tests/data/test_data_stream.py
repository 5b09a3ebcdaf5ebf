import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from dtron.data import Batch, Loader, TrainingSource
from dtron.data.packing import Packed
from dtron.data.stream import (
    START,
    StreamedDocuments,
    StreamedPieces,
    Substreams,
    held_out_texts,
    merged,
)
from dtron.data.tokenizer import ByteTokenizer
from dtron.errors import DataError

EOS = 256


class ListStream:
    """Documents of a list; the state is how many have been read."""

    name = "a list"
    holds_out = True

    def __init__(self, texts: list[str], n_documents: int | None = None) -> None:
        self.texts, self.n_documents = texts, n_documents
        self.n_read = 0

    def read(self, state: str) -> Iterator[str]:
        self.n_read = 0 if state == START else int(state)
        while self.n_read < len(self.texts):
            self.n_read += 1
            yield self.texts[self.n_read - 1]

    def state(self) -> str:
        return str(self.n_read)


def streamed(
    texts: list[str], *, seq_len: int = 16, mask: bool = False, n_held_out: int = 0
) -> StreamedDocuments:
    return StreamedDocuments(
        ListStream(texts),
        ByteTokenizer(),
        seq_len=seq_len,
        mask_documents=mask,
        held_out=texts[:n_held_out],
    )


def whole(texts: list[str], *, packing: str = "best_fit", n_held_out: int = 0) -> StreamedPieces:
    return StreamedPieces(
        ListStream(texts),
        ByteTokenizer(),
        seq_len=32,
        packing=packing,
        mask_documents=False,
        held_out=texts[:n_held_out],
    )


def source_of(texts: list[str], packing: str, n_held_out: int) -> TrainingSource:
    if packing == "cut":
        return streamed(texts, n_held_out=n_held_out)
    return whole(texts, packing=packing, n_held_out=n_held_out)


def flat(texts: list[str]) -> list[int]:
    return [token for text in texts if text for token in (*text.encode(), EOS)]


def assert_equal(a: Packed, b: Packed) -> None:
    np.testing.assert_equal(vars(a), vars(b))


@pytest.fixture(autouse=True)
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dtron.data.stream.BATCH_DOCUMENTS", 7)
    monkeypatch.setattr("dtron.data.stream.WINDOW_DOCUMENTS", 9)


@pytest.mark.parametrize("n_held_out", [0, 3])
def test_stream_order_from_one_pass_to_the_next(texts: list[str], n_held_out: int) -> None:
    texts[5:7] = ["", ""]
    source = streamed(texts, n_held_out=n_held_out)
    expected = flat(texts[n_held_out:]) * 3
    for k in range((len(expected) - 1) // 16):
        packed = source.sequence(k)
        assert packed.tokens.tolist() == expected[k * 16 : k * 16 + 16]
        assert packed.labels.tolist() == expected[k * 16 + 1 : k * 16 + 17]


def test_masks(texts: list[str]) -> None:
    plain, masked = streamed(texts, seq_len=50), streamed(texts, seq_len=50, mask=True)
    for k in range(30):
        expected, packed = plain.sequence(k), masked.sequence(k)
        ends = expected.tokens == EOS
        assert packed.tokens.tolist() == expected.tokens.tolist()
        assert packed.labels.tolist() == np.where(ends, -100, expected.labels).tolist()
        assert packed.documents is not None
        assert packed.documents.tolist() == (np.cumsum(ends) - ends).tolist()


@pytest.mark.parametrize("packing", ["best_fit", "pad"])
@pytest.mark.parametrize("n_held_out", [0, 3])
def test_a_pass_holds_every_document_once_in_whole_sequences(
    texts: list[str], packing: str, n_held_out: int
) -> None:
    texts[5:7] = ["", ""]
    source = whole(texts, packing=packing, n_held_out=n_held_out)
    expected = sorted(flat(texts[n_held_out:]))
    k = 0
    for _ in range(3):
        tokens: list[int] = []
        while len(tokens) < len(expected):
            packed = source.sequence(k)
            filled = len(packed.tokens) - packed.padding
            tokens += packed.tokens[:filled].tolist()
            assert (packed.labels[filled:] == -100).all()
            ends = packed.tokens == EOS
            assert packed.labels[ends].tolist() == [-100] * ends.sum()
            assert (packed.labels[:-1] == packed.tokens[1:])[~ends[:-1]].all()
            k += 1
        assert sorted(tokens) == expected
    assert source.waste() is None


def test_windows_waste_less_than_padding(texts: list[str]) -> None:
    shares = [
        np.mean([whole(texts, packing=packing).sequence(k).padding for k in range(8)])
        for packing in ("best_fit", "pad")
    ]
    assert shares[0] < 0.7 * shares[1]


@pytest.mark.parametrize("packing", ["cut", "best_fit", "pad"])
@pytest.mark.parametrize("n_held_out", [0, 3])
def test_resume_anywhere(texts: list[str], packing: str, n_held_out: int) -> None:
    reference = source_of(texts, packing, n_held_out)
    sequences = [reference.sequence(k) for k in range(200)]
    for k in range(0, 190, 3):
        first = source_of(texts, packing, n_held_out)
        state = json.loads(json.dumps(first.state(k)))
        second = source_of(texts, packing, n_held_out)
        second.seek(k, state)
        assert second.state(k) == state
        for j in range(k, k + 10, 2):
            assert_equal(second.sequence(j), sequences[j])


def test_resume_reads_no_more_than_a_batch(texts: list[str]) -> None:
    first = streamed(texts)
    state = first.state(60)
    stream = ListStream(texts)
    second = StreamedDocuments(
        stream, ByteTokenizer(), seq_len=16, mask_documents=False, held_out=[]
    )
    second.seek(60, state)
    assert stream.n_read <= int(state["stream"]) + 14


def test_resume_under_another_packing_stays_near(texts: list[str]) -> None:
    before, after = streamed(texts), whole(texts)
    after.seek(60, before.state(60))
    assert after.sequence(60).tokens.shape == (32,)
    after.sequence(90)
    before.seek(90, after.state(90))
    assert before.sequence(90).tokens.shape == (16,)


@pytest.mark.parametrize("packing", ["cut", "best_fit"])
def test_going_back_without_a_stream_state(texts: list[str], packing: str) -> None:
    source = source_of(texts, packing, 0)
    early = source.sequence(2)
    source.sequence(90)
    source.seek(2, {"sequence": 2})
    assert_equal(source.sequence(2), early)


def global_step(loaders: list[Loader]) -> torch.Tensor:
    steps: list[list[Batch]] = [loader.step() for loader in loaders]
    return torch.cat([batch.tokens for micro in zip(*steps, strict=True) for batch in micro])


@pytest.mark.parametrize("packing", ["cut", "best_fit", "pad"])
@pytest.mark.parametrize(("dp_size", "micro_batch"), [(1, 1), (2, 2), (4, 1), (2, 1)])
def test_every_layout_reads_the_same_and_resumes(
    texts: list[str], packing: str, dp_size: int, micro_batch: int
) -> None:
    def loaders(dp_size: int, micro_batch: int) -> list[Loader]:
        return [
            Loader(
                source_of(texts, packing, 2),
                global_batch=4,
                micro_batch=micro_batch,
                dp_rank=rank,
                dp_size=dp_size,
            )
            for rank in range(dp_size)
        ]

    reference, ranks = loaders(1, 4), loaders(dp_size, micro_batch)
    for _ in range(25):
        assert global_step(ranks).tolist() == global_step(reference).tolist()
    states = [rank.state_dict() for rank in [*ranks, *reference]]
    assert all(state == states[0] for state in states)
    resumed = loaders(4, 1)
    for rank in resumed:
        rank.load_state_dict(states[0])
    for _ in range(5):
        assert global_step(resumed).tolist() == global_step(reference).tolist()


# -- substreams -----------------------------------------------------------------------------


class PartOfStream(ListStream):
    """The documents of some files."""

    holds_out = False


def divided(texts: list[str], packing: str, n: int, n_held_out: int = 2) -> Substreams:
    """A stream of six files, in n substreams."""
    files = [texts[i::6] * 3 for i in range(6)]

    def make(j: int, n: int) -> TrainingSource:
        mine = [text for file in files[j::n] for text in file]
        stream = PartOfStream(mine) if n > 1 else ListStream(texts[:n_held_out] + mine)
        if packing == "cut":
            return StreamedDocuments(stream, ByteTokenizer(), **keys)
        return StreamedPieces(stream, ByteTokenizer(), packing=packing, **keys)

    keys: Any = {"seq_len": 32, "mask_documents": False, "held_out": texts[:n_held_out]}
    return Substreams(make, n)


def loaders_of(make: Callable[[], TrainingSource], dp_size: int, micro_batch: int) -> list[Loader]:
    settings: Any = {"global_batch": 12, "micro_batch": micro_batch, "dp_size": dp_size}
    return [Loader(make(), dp_rank=rank, **settings) for rank in range(dp_size)]


@pytest.mark.parametrize("packing", ["cut", "best_fit", "pad"])
@pytest.mark.parametrize(("dp_size", "micro_batch"), [(2, 2), (6, 2), (3, 1)])
@pytest.mark.parametrize("n", [1, 6, 4])
def test_substreams_are_the_same_in_every_layout_and_resume_in_any(
    texts: list[str], packing: str, dp_size: int, micro_batch: int, n: int
) -> None:
    def make() -> Substreams:
        return divided(texts, packing, n)

    reference, ranks = loaders_of(make, 1, 12), loaders_of(make, dp_size, micro_batch)
    for _ in range(9):
        assert global_step(ranks).tolist() == global_step(reference).tolist()
    state = merged([rank.state_dict() for rank in ranks])
    assert state == reference[0].state_dict()
    resumed = loaders_of(make, 12, 1)
    for rank in resumed:
        rank.load_state_dict(state)
    assert merged([rank.state_dict() for rank in resumed]) == state
    for _ in range(3):
        assert global_step(resumed).tolist() == global_step(reference).tolist()


def test_a_rank_reads_its_own_substreams_alone(texts: list[str]) -> None:
    ranks = loaders_of(lambda: divided(texts, "cut", 6), 6, 2)
    for rank in ranks:
        rank.step()
    opened = [sorted(rank._source._opened) for rank in ranks]  # type: ignore[attr-defined]
    assert opened == [[0, 1], [2, 3], [4, 5]] * 2


def test_held_out_documents_are_in_no_substream(texts: list[str]) -> None:
    source = divided(texts, "pad", 6, n_held_out=4)
    found = {bytes(source.sequence(k).tokens.astype(np.uint8)) for k in range(120)}
    assert not any(text[:31].encode() in each for each in found for text in texts[:4])


def test_a_checkpoint_of_an_undivided_stream_goes_on_undivided(texts: list[str]) -> None:
    """As those from before streams were divided."""
    whole, source = divided(texts, "cut", 1), divided(texts, "cut", 1)
    for k in range(7):
        whole.sequence(k)
    old = whole._opened[0].state(7)
    assert "stream" in old
    source.seek(7, old)
    for k in range(7, 20):
        assert_equal(source.sequence(k), whole.sequence(k))


@pytest.mark.parametrize("n", [1, 4])
def test_another_number_of_substreams_is_refused(texts: list[str], n: int) -> None:
    source = divided(texts, "cut", n)
    source.sequence(0)
    with pytest.raises(DataError, match=f"data.substreams = 6, but .* was written with {n}"):
        divided(texts, "cut", 6).seek(1, source.state(1))


@pytest.mark.parametrize("texts", [[], [""], ["abc", "def"]])
def test_a_stream_of_too_little_text(texts: list[str]) -> None:
    with pytest.raises(DataError, match=r"train\.seq_len = 16 needs 17"):
        streamed(texts).sequence(0)


def test_a_stream_without_documents() -> None:
    with pytest.raises(DataError, match="a list: the training split has no documents"):
        whole(["", "abc", " "], n_held_out=2).sequence(0)
    assert whole(["abc"]).sequence(3).tokens.tolist() == [*b"abc", *[EOS] * 29]


def test_resume_near_the_end_of_a_short_stream() -> None:
    texts = ["abcd"] * 5  # 25 tokens, of which few are left behind the state
    reference = streamed(texts)
    sequences = [reference.sequence(k) for k in range(4)]
    second = streamed(texts)
    second.seek(1, streamed(texts).state(1))
    assert_equal(second.sequence(1), sequences[1])
    assert_equal(second.sequence(3), sequences[3])


def test_a_stream_that_has_changed(texts: list[str]) -> None:
    state = streamed(texts).state(60)
    with pytest.raises(DataError, match="a list has changed"):
        streamed(texts[:10]).seek(60, state)
    with pytest.raises(DataError, match="a list has changed"):
        streamed(["x"] * 40).seek(60, {**state, "offset": 5})


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize(
    ("n", "fraction", "expected"),
    [
        (0, 0.1, 0),
        (1, 0.9, 0),
        (2, 0.001, 1),
        (2, 0.999, 1),
        (50, 0.0, 0),
        (100, 0.02, 2),
        (20_000, 0.02, 200),
    ],
)
def test_first_documents_are_held_out(n: int, fraction: float, expected: int, known: bool) -> None:
    texts = [str(i) for i in range(n)]
    stream = ListStream(texts, n if known else None)
    assert held_out_texts(stream, fraction) == texts[:expected]


@pytest.mark.parametrize("packing", ["cut", "best_fit"])
def test_copies_of_held_out_documents_are_left_out(texts: list[str], packing: str) -> None:
    """Of a stream that has its first documents twice; resumed in its middle too."""
    twice = [*texts, *texts[:3]]
    source, whole_ = (source_of(each, packing, 3) for each in (twice, texts))
    n = 30 if packing == "cut" else 10
    expected = [whole_.sequence(k).tokens.tolist() for k in range(n)]
    assert [source.sequence(k).tokens.tolist() for k in range(n)] == expected
    again = source_of(twice, packing, 3)
    again.seek(n, source.state(n))
    assert again.sequence(n).tokens.tolist() == whole_.sequence(n).tokens.tolist()
