"""Whole runs under each `data.packing`."""

import dataclasses
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import tokenizers

from dtron.checkpoint.metadata import read_metadata, write_metadata
from dtron.config import RunConfig
from dtron.data import open_data, sources
from dtron.data.corpus import tokenize
from dtron.data.packing import Shuffled
from dtron.errors import ConfigError, DataError
from dtron.plan.plan import cost
from dtron.plan.run_shape import Resolved
from dtron.run.process import Place
from dtron.setup.preflight import preflight
from tests.harness import run_ranks
from tests.training.test_trainer import fit, losses, rows, tiny

PLACE = Place(rank=0, local_rank=0, world_size=1)


@pytest.fixture
def corpus(tmp_path: Path, texts: list[str]) -> dict[str, Any]:
    """Settings of a run on the small documents, with masks."""
    path = tmp_path / "corpus.jsonl"
    lines = [json.dumps({"text": f"{text}{n}"}) + "\n" for n in range(3) for text in texts]
    path.write_text("".join(lines))
    return {"data__paths": [str(path)], "data__mask_documents": True}


@pytest.mark.parametrize("packing", ["cut", "best_fit", "pad"])
def test_ranks_do_not_change_a_run(tmp_path: Path, corpus: dict, packing: str) -> None:
    one, two = tmp_path / "one", tmp_path / "two"
    settings = {**corpus, "data__packing": packing, "metrics__log_interval": 2}
    run_ranks(1, fit, tiny(one, **settings))
    run_ranks(2, fit, tiny(two, **settings))
    for row, other in zip(rows(one), rows(two), strict=True):
        for key in {"loss", "grad_norm", "validation_loss"} & row.keys():
            assert row[key] == pytest.approx(other[key], rel=1e-5), (row["step"], key)
        assert row.get("padding") == other.get("padding")
    assert losses(one)[-1] < losses(one)[0]

    config = tiny(one, **settings)
    source, _ = open_data(config.data, seq_len=32, seed=config.train.seed)
    metadata, waste = json.loads((one / "run.json").read_text()), source.waste()
    assert waste is not None
    assert metadata["packing"] == {"mode": packing, **vars(waste)}
    padding = [source.sequence(k).padding for k in range(48)]
    share = [sum(padding[start : start + 16]) / (16 * 32) for start in (0, 16, 32)]
    logged = [row.get("padding") for row in rows(one)]
    assert logged == ([None] * 3 if packing == "cut" else share)


def test_a_run_of_whole_documents_resumes_under_another_layout(
    tmp_path: Path, corpus: dict
) -> None:
    settings = {**corpus, "data__packing": "best_fit"}
    whole, split = tmp_path / "whole", tmp_path / "split"
    run_ranks(1, fit, tiny(whole, **settings))
    run_ranks(2, fit, tiny(split, checkpoint__interval=3, **settings))
    resume = {"checkpoint__resume": str(split / "checkpoints/step-3"), "train__micro_batch": 4}
    run_ranks(1, fit, tiny(split, **settings, **resume))
    assert losses(split) == pytest.approx(losses(whole), rel=1e-5)


def test_another_packing_warns_on_resuming(
    tmp_path: Path, corpus: dict, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "dtron")
    run_dir = tmp_path / "run"
    run_ranks(1, fit, tiny(run_dir, train__steps=2, **corpus))
    resume = {**corpus, "checkpoint__resume": "latest", "train__steps": 2}
    preflight(tiny(run_dir, **resume), PLACE)
    assert not caplog.records
    preflight(tiny(run_dir, data__packing="best_fit", **resume), PLACE)
    assert "data.packing = 'best_fit', but" in caplog.text
    assert "was made with 'cut'" in caplog.text

    caplog.clear()
    (saved,) = run_dir.glob("checkpoints/step-*")
    metadata = read_metadata(saved)
    del metadata.settings["data.packing"]  # saved before the key was there
    write_metadata(saved, metadata)
    preflight(tiny(run_dir, **resume), PLACE)
    assert not caplog.records


def test_other_data_is_refused_on_resuming(tmp_path: Path, corpus: dict) -> None:
    """By content: files may move, but neither grow nor be replaced."""
    run_dir, path = tmp_path / "run", Path(corpus["data__paths"][0])
    run_ranks(1, fit, tiny(run_dir, train__steps=1, **corpus))
    moved = path.rename(tmp_path / "moved.jsonl")
    resume = {**corpus, "checkpoint__resume": "latest", "data__paths": [str(moved)]}
    preflight(tiny(run_dir, **resume), PLACE)
    with moved.open("a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    with pytest.raises(ConfigError, match=r"was trained with other data.*allow_data_change=true"):
        preflight(tiny(run_dir, **resume), PLACE)
    preflight(tiny(run_dir, **resume, checkpoint__allow_data_change=True), PLACE)


def test_another_tokenizer_is_refused_on_resuming(tmp_path: Path, corpus: dict) -> None:
    run_dir, path = tmp_path / "run", tmp_path / "tokenizer.json"
    run_ranks(1, fit, tiny(run_dir, train__steps=1, **corpus))
    words = {"[UNK]": 0, "</s>": 1}
    model = tokenizers.models.WordLevel(words, unk_token="[UNK]")
    tokenizers.Tokenizer(model).save(str(path))
    resume = {**corpus, "checkpoint__resume": "latest", "data__tokenizer": str(path)}
    with pytest.raises(ConfigError, match=r"data\.tokenizer = .* trained with another tokenizer"):
        preflight(tiny(run_dir, **resume), PLACE)


def test_files_that_change_while_they_are_tokenized_are_refused(
    tmp_path: Path, corpus: dict, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, encode = Path(corpus["data__paths"][0]), tokenize.encode_documents

    def grows(*given: Any) -> Any:
        path.write_text(path.read_text() * 2)
        return encode(*given)

    monkeypatch.setattr(tokenize, "encode_documents", grows)
    config = tiny(tmp_path / "run", data__cache_dir=str(tmp_path / "cache"), **corpus)
    with pytest.raises(DataError, match="changed while it was tokenized"):
        preflight(config, PLACE)
    assert not list((tmp_path / "cache").iterdir())


def held_out_in_training(config: RunConfig) -> tuple[int, int]:
    """Held-out sequences, and how many of them are trained on."""
    train, held_out = open_data(config.data, seq_len=8, seed=0)
    assert held_out is not None
    trained = {tuple(train.sequence(k).tokens) for k in range(400)}
    sequences = [tuple(held_out.sequence(k).tokens) for k in range(len(held_out))]
    return len(sequences), len(trained.intersection(sequences))


def test_a_path_given_twice_leaks_no_held_out_document(
    tmp_path: Path, texts: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor do two files that share documents; each document fills one sequence here."""
    messages: list[str] = []
    monkeypatch.setattr(sources.logger, "warning", lambda form, *rest: messages.append(form % rest))
    path, other = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    rows = [json.dumps({"text": text[:7].ljust(7, ".")}) + "\n" for text in texts]
    path.write_text("".join(rows))
    other.write_text("".join(rows[::-2]))
    for paths in ([path, path], [path, other]):
        keys = {"data__packing": "pad", "data__validation_fraction": 0.2}
        config = tiny(tmp_path / "run", data__paths=list(map(str, paths)), **keys)
        n, leaked = held_out_in_training(config)
        assert n >= 5
        assert leaked == 0
    assert "40 of 80 documents are duplicates" in messages[0]
    assert f"data.paths names {path} more than once" in messages[0]
    assert "20 of 60 documents are duplicates" in messages[1]
    assert "more than once" not in messages[1]


def test_a_checkpoint_of_the_earlier_order_is_refused(tmp_path: Path, corpus: dict) -> None:
    """Which held out documents by their position."""
    run_dir = tmp_path / "run"
    run_ranks(1, fit, tiny(run_dir, train__steps=1, **corpus))
    checkpoint = run_dir / "checkpoints/step-1"
    metadata = read_metadata(checkpoint)
    assert metadata.data["order"] == "groups-1"
    resume = tiny(run_dir, checkpoint__resume="latest", train__steps=2, **corpus)
    preflight(resume, PLACE)
    data = {key: value for key, value in metadata.data.items() if key != "order"}
    write_metadata(checkpoint, dataclasses.replace(metadata, data=data))
    with pytest.raises(ConfigError, match=r"earlier version of dtron.*allow_data_change=true"):
        preflight(resume, PLACE)
    options = resume.checkpoint.model_copy(update={"allow_data_change": True})
    preflight(resume.model_copy(update={"checkpoint": options}), PLACE)


def test_tokens_end_the_run(tmp_path: Path, corpus: dict) -> None:
    """Rounded up to a step of 8 x 32 tokens; with another end given too, refused."""
    settings = {**corpus, "train__steps": 100, "train__tokens": 2 * 8 * 32 + 1}
    found = preflight(tiny(tmp_path / "run", **settings), PLACE).config
    assert (found.train.steps, found.train.tokens) == (3, 0)
    assert cost(Resolved.of(tiny(tmp_path, **settings), 1), 1.0, 0)["steps"] == 2 + 1 / 256
    for more in ({"train__steps": 4}, {"train__epochs": 1.0}):
        with pytest.raises(
            ConfigError,
            match=r"tokens = 513 and .* both set .*on the command line, train\.tokens= or",
        ):
            preflight(tiny(tmp_path / "run", **settings | more), PLACE)


def test_epochs_end_the_run_and_its_schedule(tmp_path: Path, corpus: dict) -> None:
    settings = {**corpus, "data__packing": "best_fit", "train__steps": 100, "train__epochs": 1.5}
    run_ranks(1, fit, tiny(tmp_path / "run", **settings))
    config = RunConfig.load(tmp_path / "run" / "config.toml")
    source, _ = open_data(config.data, seq_len=32, seed=config.train.seed)
    assert isinstance(source, Shuffled)
    length = source.epoch_length
    assert length % 8, "the last step is not full by chance"
    assert (config.train.steps, config.train.epochs) == (-(-3 * length // 16), 0)
    assert rows(tmp_path / "run")[-1]["step"] == config.train.steps
    steps = tiny(tmp_path / "steps", **{**settings, "train__steps": config.train.steps})
    with pytest.raises(ConfigError, match="both set the end of the run"):
        preflight(steps, PLACE)
    for key in ("metrics__profile_start", "faults__verify_step"):
        with pytest.raises(ConfigError, match="after the last step"):
            preflight(tiny(tmp_path / "late", **settings, **{key: config.train.steps + 1}), PLACE)
