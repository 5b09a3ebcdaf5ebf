import itertools
import json
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dtron.config import Data
from dtron.data import Batch, Loader, TrainingSource, open_data, validation_batches
from dtron.errors import ConfigError, DataError

MakeData = Callable[..., Data]
GLOBAL_BATCH = 8
PACKINGS = ["cut", "best_fit", "pad"]
LAYOUTS = [(1, 8), (1, 1), (2, 4), (2, 1), (4, 2), (4, 1), (8, 1)]  # dp_size, micro_batch


@pytest.fixture(params=PACKINGS)
def source(make_data: MakeData, texts: list[str], request: pytest.FixtureRequest) -> TrainingSource:
    data = make_data(texts, mask_documents=True, packing=request.param)
    return open_data(data, seq_len=24, seed=3)[0]


def loaders(source: TrainingSource, dp_size: int, micro_batch: int) -> list[Loader]:
    return [
        Loader(
            source,
            global_batch=GLOBAL_BATCH,
            micro_batch=micro_batch,
            dp_rank=rank,
            dp_size=dp_size,
        )
        for rank in range(dp_size)
    ]


def global_step(ranks: list[Loader]) -> list[Tensor]:
    """One step of all ranks, put together by the rule that the loader states."""
    steps = [rank.step() for rank in ranks]
    batches = [batch for micro_batch in zip(*steps, strict=True) for batch in micro_batch]
    names = ("tokens", "labels", "sequence", "positions", "documents")
    return [torch.cat([getattr(batch, name) for batch in batches]) for name in names]


def assert_equal_steps(a: list[Tensor], b: list[Tensor]) -> None:
    for x, y in zip(a, b, strict=True):
        torch.testing.assert_close(x, y, rtol=0, atol=0)


@pytest.mark.parametrize(("dp_size", "micro_batch"), LAYOUTS)
def test_every_layout_trains_on_the_same_sequences(
    source: TrainingSource, dp_size: int, micro_batch: int
) -> None:
    reference, ranks = loaders(source, 1, GLOBAL_BATCH), loaders(source, dp_size, micro_batch)
    for step in range(20):  # several epochs
        expected = global_step(reference)
        assert expected[2].tolist() == list(range(step * 8, step * 8 + 8))
        assert_equal_steps(global_step(ranks), expected)


def test_shapes_and_dtypes(source: TrainingSource) -> None:
    batches = loaders(source, 2, 2)[1].step()
    assert len(batches) == 2
    for batch in batches:
        assert batch.positions is not None
        assert isinstance(batch.documents, Tensor)
        for tensor in (batch.tokens, batch.labels, batch.positions):
            assert (tensor.shape, tensor.dtype) == ((2, 24), torch.int64)
        assert (batch.documents.shape, batch.documents.dtype) == ((2, 24), torch.int32)
        assert (batch.sequence.shape, batch.sequence.dtype) == ((2,), torch.int64)


def test_without_masks_there_are_no_documents(make_data: MakeData, texts: list[str]) -> None:
    source = open_data(make_data(texts), seq_len=24, seed=0)[0]
    batch = loaders(source, 1, 8)[0].step()[0]
    assert batch.positions is None
    assert batch.documents is None
    assert (batch.labels >= 0).all()


@pytest.mark.parametrize("step", [0, 1, 9, 14])
@pytest.mark.parametrize(("dp_size", "micro_batch"), [(1, 8), (4, 1)])
def test_resume_under_another_layout(
    source: TrainingSource, step: int, dp_size: int, micro_batch: int
) -> None:
    before = loaders(source, 2, 2)
    for _ in range(step):
        global_step(before)
    states = [json.loads(json.dumps(rank.state_dict())) for rank in before]
    assert all(state == states[0] == {"sequence": step * 8} for state in states)
    after = loaders(source, dp_size, micro_batch)
    for rank in after:
        rank.load_state_dict(states[0])
    for _ in range(4):
        assert_equal_steps(global_step(after), global_step(before))


def test_a_batch_counts_its_padding(make_data: MakeData) -> None:
    data = make_data(["a" * 5] * 8, packing="pad", validation_fraction=0.0)
    source = open_data(data, seq_len=8, seed=0)[0]
    batches = loaders(source, 1, 4)[0].step()
    assert [batch.to("cpu").padding for batch in batches] == [8, 8]  # 2 a row


def test_first_sequence(source: TrainingSource) -> None:
    loader = Loader(source, global_batch=4, micro_batch=2, dp_rank=1, dp_size=2, first_sequence=100)
    assert loader.step()[0].sequence.tolist() == [102, 103]
    assert loader.state_dict() == {"sequence": 104}


def test_to_cpu_keeps_the_tensors(source: TrainingSource) -> None:
    batch = loaders(source, 1, 8)[0].step()[0]
    assert batch.to("cpu").tokens is batch.tokens


@pytest.mark.gpu
def test_to_cuda(source: TrainingSource) -> None:
    batch = loaders(source, 1, 8)[0].step()[0]
    moved = batch.to("cuda")
    torch.testing.assert_close(moved.tokens.cpu(), batch.tokens, rtol=0, atol=0)
    assert isinstance(moved.documents, Tensor)
    assert moved.documents.is_cuda


def test_a_batch_that_does_not_divide(source: TrainingSource) -> None:
    with pytest.raises(ConfigError, match=r"train\.global_batch = 8 .* 3 data-parallel ranks"):
        loaders(source, 3, 1)


def test_a_state_of_something_else(source: TrainingSource) -> None:
    with pytest.raises(DataError, match='no "sequence"'):
        loaders(source, 1, 1)[0].load_state_dict({"step": 3})


@pytest.mark.parametrize("sequences", [0, 1, 5, 10_000])
@pytest.mark.parametrize(("dp_size", "micro_batch"), LAYOUTS)
@pytest.mark.parametrize("packing", PACKINGS)
def test_validation_is_the_same_in_every_layout(
    make_data: MakeData,
    texts: list[str],
    packing: str,
    sequences: int,
    dp_size: int,
    micro_batch: int,
) -> None:
    data = make_data(texts, validation_fraction=0.5, packing=packing)
    source = open_data(data, seq_len=24, seed=0)[1]
    assert source is not None
    n = min(sequences, len(source))
    ranks: list[list[Batch]] = [
        list(
            validation_batches(
                source,
                sequences=sequences,
                micro_batch=micro_batch,
                dp_rank=rank,
                dp_size=dp_size,
            )
        )
        for rank in range(dp_size)
    ]
    assert {len(batches) for batches in ranks} == {-(-n // (dp_size * micro_batch))}
    rows = {}
    for batch in itertools.chain(*ranks):
        assert batch.tokens.shape == (micro_batch, 24)
        for k, tokens, labels in zip(batch.sequence, batch.tokens, batch.labels, strict=True):
            rows[int(k)] = (tokens, labels)
    assert sorted(rows) == list(range(len(rows)))
    for k, (tokens, labels) in rows.items():
        expected = source.sequence(k % n)
        assert tokens.tolist() == expected.tokens.tolist()
        assert labels.tolist() == (expected.labels.tolist() if k < n else [-100] * 24)


@pytest.mark.parametrize("masked", [False, True])
def test_what_is_predicted_further_is_of_the_same_piece(masked: bool) -> None:
    """Two documents and padding in one sequence; labels end with each, whether masks are asked for
    or not."""
    tokens = torch.tensor([[1, 2, 3, 4, 5, 6, 0, 0]])
    labels = torch.tensor([[2, 3, -100, 5, 6, -100, -100, -100]])
    pieces = torch.tensor([[0, 0, 0, 1, 1, 1, -1, -1]]).int()
    documents = torch.where(pieces < 0, 2, pieces) if masked else None
    batch = Batch(tokens, labels, torch.tensor([0]), None, documents, 2, pieces).look_ahead(2)
    assert batch.mtp_tokens is not None
    assert batch.mtp_labels is not None
    assert batch.mtp_tokens[0].T.tolist() == [
        [2, 3, 3, 5, 6, 6, 0, 0],
        [3, 2, 3, 6, 5, 6, 0, 0],
    ]
    none = -100
    assert batch.mtp_labels[0].T.tolist() == [
        [3, none, none, 6, none, none, none, none],
        [none] * 8,
    ]


def test_what_is_predicted_further_crosses_documents_that_labels_cross() -> None:
    """As in sequences that are cut from one stream, without masks."""
    tokens = torch.tensor([[1, 2, 3, 4]])
    batch = Batch(tokens, tokens + 1, torch.tensor([0]), None, None).look_ahead(1)
    assert batch.mtp_tokens is not None
    assert batch.mtp_labels is not None
    assert batch.mtp_tokens[0, :, 0].tolist() == [2, 3, 4, 4]
    assert batch.mtp_labels[0, :, 0].tolist() == [3, 4, 5, -100]
