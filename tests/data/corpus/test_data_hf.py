"""Hugging Face data sets that the tests write; nothing is read from the network."""

import json
import struct
import sys
from pathlib import Path
from typing import Any

import pytest

from dtron.checkpoint.metadata import read_metadata
from dtron.config import Data
from dtron.data import Loader, open_data, prepare, wait_for
from dtron.data.corpus.documents import Reading
from dtron.data.corpus.hf import HfStream, hf_corpus
from dtron.data.sources import open_corpus_and_index
from dtron.data.stream import START
from dtron.data.tokenizer import Document
from dtron.errors import ConfigError, DataError
from tests.harness import run_ranks
from tests.training.test_trainer import fit, losses, tiny

EOS = 256


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:  # read once, when the library is imported
        patch.setenv("HF_HUB_OFFLINE", "1")
        patch.setenv("HF_DATASETS_OFFLINE", "1")
        patch.setenv("HF_HOME", str(tmp_path_factory.mktemp("hf")))
        datasets = pytest.importorskip("datasets")
        datasets.disable_progress_bars()
        patch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("arrow"))
        yield datasets


@pytest.fixture
def json_file(tmp_path: Path, texts: list[str]) -> Path:
    path = tmp_path / "docs.jsonl"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in texts))
    return path


@pytest.fixture
def saved(tmp_path: Path, texts: list[str], library: Any) -> Path:
    path = tmp_path / "saved"
    library.Dataset.from_dict({"body": texts}).save_to_disk(str(path))
    return path


def section(path: Path | str, **settings: object) -> Data:
    values = {"source": "hf", "hf_path": str(path), "text_key": "body", **settings}
    return Data.model_validate(values)


def first_tokens(data: Data, n: int = 40) -> list[int]:
    source = open_data(data, seq_len=16, seed=0)[0]
    return [token for k in range(n) for token in source.sequence(k).tokens.tolist()]


def all_texts(data: Data) -> list[Document]:
    return list(hf_corpus(data).documents(Reading(data)))


@pytest.mark.parametrize("kind", ["file", "directory", "saved", "saved splits"])
@pytest.mark.usefixtures("library")
def test_what_a_path_may_be(
    kind: str, json_file: Path, saved: Path, texts: list[str], library: Any, tmp_path: Path
) -> None:
    directory = tmp_path / "files"
    directory.mkdir()
    (directory / "train.jsonl").write_bytes(json_file.read_bytes())
    splits = tmp_path / "splits"
    train = library.Dataset.from_dict({"body": texts})
    library.DatasetDict(train=train).save_to_disk(str(splits))
    paths = {"file": json_file, "directory": directory, "saved": saved, "saved splits": splits}
    data = section(paths[kind])
    assert all_texts(data) == texts
    assert list(HfStream(data).read(START)) == texts


@pytest.mark.usefixtures("library")
def test_tokenized_once_like_files(json_file: Path, tmp_path: Path, texts: list[str]) -> None:
    cache = str(tmp_path / "cache")
    hf = section(json_file, cache_dir=cache)
    files = section("", source="files", paths=(str(json_file),), cache_dir=cache)
    prepare(hf)
    assert open_corpus_and_index(hf)[0].n_documents == len(texts)
    wait_for(hf, 8, 0)  # the identity of the data set does not change
    assert first_tokens(hf) == first_tokens(files)


@pytest.mark.parametrize("packing", ["cut", "best_fit"])
def test_stream_resumes_exactly(saved: Path, packing: str) -> None:
    data = section(saved, hf_streaming=True, validation_fraction=0.05, packing=packing)
    prepare(data)  # does nothing
    wait_for(data, 8, 0)

    def loader(rank: int, size: int) -> Loader:
        source = open_data(data, seq_len=16, seed=0)[0]
        return Loader(source, global_batch=4, micro_batch=1, dp_rank=rank, dp_size=size)

    def rows(loaders: list[Loader]) -> list[list[int]]:
        steps = zip(*(loader.step() for loader in loaders), strict=True)
        return [batch.tokens[0].tolist() for micro in steps for batch in micro]

    reference = [loader(0, 1)]
    for _ in range(31):  # into the second pass
        rows(reference)
    state = json.loads(json.dumps(reference[0].state_dict()))
    expected = [rows(reference) for _ in range(3)]
    ranks = [loader(0, 2), loader(1, 2)]
    for rank in ranks:
        rank.load_state_dict(state)
    assert [rows(ranks) for _ in range(3)] == expected


def test_stream_resumes_across_files(library: Any, tmp_path: Path) -> None:
    directory = tmp_path / "files"
    directory.mkdir()
    for i in range(3):
        rows = [{"body": f"{i} {j} " + "x" * j} for j in range(100)]
        library.Dataset.from_list(rows).to_parquet(str(directory / f"train-{i}.parquet"))
    data = section(directory, hf_streaming=True)
    whole = open_data(data, seq_len=64, seed=0)[0]
    sequences = [whole.sequence(k).tokens.tolist() for k in range(300)]
    for k in (0, 10, 130, 260):  # of about 255 in one pass
        state = open_data(data, seq_len=64, seed=0)[0].state(k)
        resumed = open_data(data, seq_len=64, seed=0)[0]
        resumed.seek(k, state)
        assert resumed.sequence(k + 2).tokens.tolist() == sequences[k + 2]


def test_whole_documents_of_a_stream(saved: Path, texts: list[str]) -> None:
    data = section(saved, hf_streaming=True, validation_fraction=0.1, packing="pad")
    training, validation = open_data(data, seq_len=80, seed=0)
    assert training.waste() is None
    assert validation is not None
    found = [
        bytes(source.sequence(k).tokens[: -source.sequence(k).padding - 1].tolist()).decode()
        for source, n in ((validation, 4), (training, len(texts) - 4))
        for k in range(n)
    ]
    assert sorted(found[:4]) == texts[:4]
    assert sorted(found) == sorted(texts)


def test_stream_holds_out_its_first_documents(saved: Path, texts: list[str]) -> None:
    training, validation = open_data(
        section(saved, hf_streaming=True, validation_fraction=0.1), seq_len=16, seed=0
    )
    assert validation is not None
    assert bytes(validation.sequence(0).tokens[:6].tolist()) == texts[0][:6].encode()
    assert bytes(training.sequence(0).tokens[:6].tolist()) == texts[4][:6].encode()


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hf_path": "/nowhere/at/all"}, r"data\.hf_path = '/nowhere/at/all'"),
        ({"hf_split": "test"}, r"data\.hf_split = 'test'.*split"),
        ({"text_key": "boy"}, r"data\.text_key = 'boy'.*which has body; did you mean body"),
    ],
)
@pytest.mark.usefixtures("library")
def test_what_is_not_there(
    json_file: Path, settings: dict[str, str], message: str, streaming: bool
) -> None:
    values = {"hf_path": str(json_file), "hf_streaming": streaming, **settings}
    path = values.pop("hf_path")
    with pytest.raises(DataError, match=message):
        open_data(section(str(path), **values), seq_len=16, seed=0)


def test_splits_and_names_of_saved_data(library: Any, tmp_path: Path, saved: Path) -> None:
    path = tmp_path / "splits"
    train = library.Dataset.from_dict({"body": ["a"]})
    library.DatasetDict(train=train).save_to_disk(str(path))
    with pytest.raises(DataError, match=r"data\.hf_split = 'test' is not among .*: train"):
        hf_corpus(section(path, hf_split="test"))
    with pytest.raises(ConfigError, match=r"data\.hf_name = 'en' has no effect"):
        hf_corpus(section(saved, hf_name="en"))


@pytest.mark.parametrize("streaming", [False, True])
def test_a_row_that_is_no_text(library: Any, tmp_path: Path, streaming: bool) -> None:
    path = tmp_path / "saved"
    library.Dataset.from_dict({"body": [1, 2, 3]}).save_to_disk(str(path))
    data = section(path, hf_streaming=streaming, cache_dir=str(tmp_path / "cache"))
    with pytest.raises(DataError, match=r"^data\.hf_path[^:]*row 1[^:]*: 'body' is int"):
        open_data(data, seq_len=16, seed=0)


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.usefixtures("library")
def test_a_corrupt_file_gives_its_cause(json_file: Path, streaming: bool) -> None:
    with open(json_file, "a") as file:
        file.write("{bad\n")
    data = section(json_file, hf_streaming=streaming)
    with pytest.raises(DataError, match=r"docs\.jsonl.*JSON parse error"):
        open_data(data, seq_len=16, seed=0)


def test_a_missing_library_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="pip install datasets"):
        prepare(section("anything"))


@pytest.mark.parametrize("folder", [False, True])
@pytest.mark.usefixtures("library")
def test_unquoted_commas_of_a_csv_are_refused(tmp_path: Path, folder: bool) -> None:
    path = tmp_path / "csv" / "a.csv"
    path.parent.mkdir()
    path.write_text("body\nhello, world\n")
    for read in (hf_corpus, HfStream):
        with pytest.raises(DataError, match=r"more fields than its header.*into quotes"):
            read(section(path.parent if folder else path))
    path.write_text('body,n\n"hello, world",1\n,2\n')
    assert all_texts(section(path)) == ["hello, world", ""]


@pytest.mark.parametrize("name", ["./corpus", "my/own/corpus", "corpus.jsonl", "~/corpus"])
@pytest.mark.usefixtures("library")
def test_a_misspelt_path_is_not_sought_on_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("datasets.load_dataset", None)
    with pytest.raises(DataError, match="no such file or folder; relative paths start at"):
        hf_corpus(section(name))


def damage_offsets(path: Path) -> None:
    """Make an offset of the text column point behind its bytes."""
    content = bytearray(path.read_bytes())
    offsets = struct.pack("<4i", 0, 3, 6, 11)
    at = content.index(offsets)
    content[at + 8 : at + 12] = struct.pack("<i", 2**30)
    path.write_bytes(content)


@pytest.mark.parametrize("damage", ["info", "state", "arrow", "offsets"])
def test_a_damaged_saved_data_set_is_one_line(library: Any, tmp_path: Path, damage: str) -> None:
    path = tmp_path / "saved"
    library.Dataset.from_dict({"body": ["one", "two", "three"]}).save_to_disk(str(path))
    (arrow,) = path.glob("*.arrow")
    if damage == "offsets":
        damage_offsets(arrow)
    elif damage == "arrow":
        arrow.write_bytes(arrow.read_bytes()[:100])
    else:
        (path / {"info": "dataset_info.json", "state": "state.json"}[damage]).write_text("[1]\n")
    for read in (hf_corpus, HfStream):
        with pytest.raises(DataError, match=r"is damaged: .*; write it again") as error:
            read(section(path))
        assert "\n" not in str(error.value)


@pytest.mark.parametrize("dictionary", [False, True])
@pytest.mark.usefixtures("library")
def test_a_parquet_file_that_grows_without_bound_is_refused(
    tmp_path: Path, dictionary: bool, texts: list[str]
) -> None:
    """Of equal texts, which are a page of zeros or one entry of a dictionary."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "bomb.parquet"
    table = pa.table({"body": ["a" * 100_000] * 400})
    pq.write_table(table, path, use_dictionary=dictionary, compression="zstd")
    for read in (hf_corpus, HfStream):
        with pytest.raises(DataError, match=r"bomb\.parquet becomes more than 200 times its size"):
            read(section(path))
    good = tmp_path / "good.parquet"
    pq.write_table(pa.table({"body": [*texts, None]}), good)
    assert all_texts(section(good)) == [*texts, ""]


@pytest.mark.usefixtures("library")
def test_a_start_does_not_read_the_texts_of_parquet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not to find out that they do not grow: of a stream, a start would read all of it."""
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "texts.parquet"
    texts = [f"{i} " * (i % 50) for i in range(5000)]
    pq.write_table(pa.table({"body": texts}), path, row_group_size=1000)
    monkeypatch.setattr("dtron.data.corpus.parquet._text_bytes", None)
    assert list(HfStream(section(path)).read(START)) == texts


def test_ranks_of_a_divided_stream_train_as_one(library: Any, tmp_path: Path) -> None:
    """Four files; the run ends on two ranks and resumes on one, and each rank reads two files."""
    directory = tmp_path / "files"
    directory.mkdir()
    for i in range(4):
        rows = [{"body": f"{i} {j} " + "x" * (j % 50)} for j in range(60)]
        library.Dataset.from_list(rows).to_parquet(str(directory / f"train-{i}.parquet"))
    stream = {
        "source": "hf",
        "hf_path": str(directory),
        "hf_streaming": True,
        "text_key": "body",
        "substreams": 4,
    }
    keys = {f"data__{key}": value for key, value in stream.items()}
    keys |= {"data__validation_fraction": 0.02, "schedule__name": "constant"}
    whole, split = tmp_path / "whole", tmp_path / "split"
    run_ranks(1, fit, tiny(whole, train__micro_batch=4, **keys))
    keys |= {"checkpoint__interval": 3, "checkpoint__resume": "latest"}
    run_ranks(2, fit, tiny(split, train__steps=3, train__micro_batch=1, **keys))
    state = read_metadata(split / "checkpoints/step-3").data
    assert state["substreams"] == 4
    assert {f"substream {j}" for j in range(4)} <= state.keys()
    run_ranks(1, fit, tiny(split, train__micro_batch=2, **keys))
    assert losses(split) == pytest.approx(losses(whole), rel=1e-5)


def test_fewer_files_than_substreams_are_named(library: Any, tmp_path: Path) -> None:
    directory = tmp_path / "files"
    directory.mkdir()
    library.Dataset.from_list([{"body": "a"}] * 9).to_parquet(str(directory / "a.parquet"))
    with pytest.raises(DataError, match=r"data\.substreams = 4 is more than the 1 file of"):
        open_data(section(directory, hf_streaming=True, substreams=4), seq_len=8, seed=0)
