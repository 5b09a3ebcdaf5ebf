import argparse
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dtron.checkpoint.convert import _named_tokenizer, data_of_run, to_hf_from, trained_tokenizer
from dtron.checkpoint.metadata import CheckpointMetadata, write_metadata
from dtron.config import Data, RunConfig
from dtron.config.setting_rules import Candidate, broken_settings
from dtron.data.tokenizer import (
    ByteTokenizer,
    TokenDocument,
    _growth,
    encode_documents,
    load_tokenizer,
)
from dtron.errors import CheckpointError, ConfigError, DataError
from dtron.training.evaluation import sample_text
from tests.harness import run_ranks


def section(**settings: object) -> Data:
    return Data.model_validate(settings)


def test_bytes_round_trip() -> None:
    tokenizer = ByteTokenizer()
    ids = tokenizer.encode("für 1 €")
    assert ids == list("für 1 €".encode())
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == "für 1 €"
    assert tokenizer.decode([0xE2, 0x82]) == "\ufffd"
    assert tokenizer.eos_id < tokenizer.vocab_size == 257


def test_json_round_trip_without_truncation_or_special_tokens(bpe: Path) -> None:
    tokenizer = load_tokenizer(section(tokenizer=str(bpe)))
    text = "in the beginning was a wörd"
    ids = tokenizer.encode(text)
    assert len(ids) > 4  # the file's truncation
    assert tokenizer.eos_id not in ids
    assert tokenizer.encode_batch([text, "the"]) == [ids, tokenizer.encode("the")]
    assert tokenizer.decode([*ids, tokenizer.eos_id]) == text
    assert max(ids) < tokenizer.vocab_size == len(json.loads(bpe.read_text())["model"]["vocab"])


def test_eos_of_a_vocabulary(bpe: Path) -> None:
    usual = load_tokenizer(section(tokenizer=str(bpe)))
    named = load_tokenizer(section(tokenizer=str(bpe), eos_token="<|turn|>"))
    assert (usual.eos_id, named.eos_id) == (1, 2)
    assert usual.fingerprint != named.fingerprint
    with pytest.raises(ConfigError, match=r"data\.eos_token.*did you mean <\|endoftext\|>"):
        load_tokenizer(section(tokenizer=str(bpe), eos_token="<|endoftxt|>"))
    with pytest.raises(ConfigError, match=r"data\.eos_token.*no effect"):
        load_tokenizer(section(eos_token="</s>"))


def test_no_usual_eos_names_the_key(bpe: Path, tmp_path: Path) -> None:
    content = json.loads(bpe.read_text().replace("<|endoftext|>", "<|fin|>"))
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"data\.eos_token is empty"):
        load_tokenizer(section(tokenizer=str(path)))
    assert load_tokenizer(section(tokenizer=str(path), eos_token="<|fin|>")).eos_id == 1


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff\xfe"])
def test_corrupt_tokenizer_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=str(path)):
        load_tokenizer(section(tokenizer=str(path)))


def test_missing_tokenizer_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.json: No such file"):
        load_tokenizer(section(tokenizer=str(tmp_path / "nowhere.json")))


def replace(pattern: str, content: str) -> dict:
    return {"type": "Replace", "pattern": {"String": pattern}, "content": content}


def sequence(*normalizers: dict) -> dict:
    return {"type": "Sequence", "normalizers": list(normalizers)}


@pytest.mark.parametrize(
    ("normalizer", "growth"),
    [
        (replace("ab", "abcd"), 2),
        ({"type": "Prepend", "prepend": "__"}, 3),
        (sequence(replace("a", "bb"), replace("b", "ccc")), 6),
        (sequence(replace("a", "bb"), sequence(replace("b", "cc"), replace("c", "aa"))), 8),
        (sequence(*(replace(c, "''") for c in "abcdefghijkl")), 2),  # none matches another's
        (sequence(replace("a", "BB"), {"type": "Lowercase"}, replace("b", "cc")), 4),
        (sequence(replace("a", "bb"), {**replace("", "cc"), "pattern": {"Regex": "b"}}), 6),
    ],
)
def test_replacements_multiply_only_where_they_match_each_other(
    normalizer: dict, growth: float
) -> None:
    assert _growth(normalizer) == growth


@pytest.mark.parametrize("size", [38, 39])
def test_a_normalizer_that_makes_texts_too_long_is_refused(
    bpe: Path, tmp_path: Path, size: int
) -> None:
    content = json.loads(bpe.read_text())
    content["normalizer"] = sequence(replace("x", "y" * 26), replace("y", "z" * size))
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    if size == 39:  # 26 x 39 > 1000
        with pytest.raises(DataError, match="its normalizer makes texts 1e\\+03 times as long"):
            load_tokenizer(section(tokenizer=str(path)))
    else:
        load_tokenizer(section(tokenizer=str(path)))


def test_a_decoder_that_makes_texts_too_long_is_refused(bpe: Path, tmp_path: Path) -> None:
    content = json.loads(bpe.read_text())
    steps = [replace("x", "y" * 26), replace("y", "z" * 39)]
    content["decoder"] = {"type": "Sequence", "decoders": steps}
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match="its decoder makes texts 1e\\+03 times as long"):
        load_tokenizer(section(tokenizer=str(path)))


def test_dropout_of_merges_is_off(bpe: Path, tmp_path: Path) -> None:
    """It is for training with many encodings of a text; a cache has one."""
    content = json.loads(bpe.read_text())
    content["model"]["dropout"] = 0.5
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    text = "the quick brown fox " * 20
    without, found = (load_tokenizer(section(tokenizer=str(file))) for file in (bpe, path))
    assert found.encode(text) == without.encode(text)


def test_documents_end_with_eos_and_blank_ones_are_empty() -> None:
    assert encode_documents(ByteTokenizer(), ["ab", "", " \n"]) == [[97, 98, 256], [], []]


def tokens_of_prompt(path: str) -> list[int]:
    """On one rank: what the model reads of a prompt, with BOS."""
    tokenizer, seen = load_tokenizer(section(tokenizer=path, bos_token="<|turn|>")), []

    def next_logits(tokens: Tensor, index: int) -> Tensor:
        seen.append(tokens[0, : index + 1].tolist())
        return torch.arange(300) == tokenizer.eos_id

    shape, device = (1, 16), torch.device("cpu")
    keys = {"n_tokens": 2, "batch_shape": shape, "device": device, "seed": 0, "temperature": 0.0}
    assert sample_text(next_logits, tokenizer, prompt="the word", **keys) == "the word"
    return seen[0]


def test_documents_begin_with_bos(bpe: Path) -> None:
    """Texts and tokens do, once; the cache is another one; prompts begin with it too."""
    plain = load_tokenizer(section(tokenizer=str(bpe)))
    found = load_tokenizer(section(tokenizer=str(bpe), bos_token="<|turn|>"))
    turn, eos = found.bos_id, found.eos_id
    assert turn not in (None, eos)
    tokens = [[8, 9], [turn, 8, eos], []]
    documents = ["the word", "", *(TokenDocument(np.array(x, np.int32), "x") for x in tokens)]
    text, *others = (list(ids) for ids in encode_documents(found, documents))
    assert text == [turn, *plain.encode("the word"), eos]
    assert run_ranks(1, tokens_of_prompt, str(bpe)) == [text[:-1]]
    assert others == [[], [turn, 8, 9, eos], [turn, 8, eos], []]
    assert found.decode(text) == "the word"
    assert found.fingerprint != plain.fingerprint
    assert plain.bos_id is None
    with pytest.raises(ConfigError, match=r"data\.bos_token = '<\|turns\|>' .* did you mean"):
        load_tokenizer(section(tokenizer=str(bpe), bos_token="<|turns|>"))
    chats = RunConfig.of({"data": {"format": "chat", "packing": "pad", "bos_token": "<s>"}})
    (message,) = broken_settings(Candidate(chats, 1))
    assert message.startswith("data.bos_token = '<s>' has no effect without data.format = \"text\"")
    with pytest.raises(ConfigError, match=r'bos_token .* no effect with data\.tokenizer = "byte"'):
        load_tokenizer(section(bos_token="<s>"))


def test_a_folder_gives_its_tokenizer(bpe: Path, tmp_path: Path) -> None:
    named, folder = (load_tokenizer(section(tokenizer=str(path))) for path in (bpe, bpe.parent))
    assert named.fingerprint == folder.fingerprint
    with pytest.raises(DataError, match=r"tokenizer\.json or of its folder"):
        load_tokenizer(section(tokenizer=str(tmp_path)))


def test_an_export_takes_the_tokenizer_that_the_run_was_trained_with(
    bpe: Path, tmp_path: Path
) -> None:
    """A file that was changed since gives other ids, and one that is gone none."""
    file, checkpoint = tmp_path / "bpe/tokenizer.json", tmp_path / "run/checkpoints/step-1"
    file.parent.mkdir()
    file.write_bytes(bpe.read_bytes())
    data: dict[str, int | str] = {}
    data["tokenizer"] = load_tokenizer(section(tokenizer=str(file))).fingerprint
    checkpoint.mkdir(parents=True)
    (checkpoint / "index.json").write_text("{}")
    write_metadata(checkpoint, CheckpointMetadata(1, 0, 0, 1, 0, {}, {}, data))
    (tmp_path / "run/config.toml").write_text(f'[data]\ntokenizer = "{file.parent}"\n')
    assert trained_tokenizer(checkpoint, data_of_run(checkpoint)) == file.parent
    file.write_text(json.dumps(json.loads(bpe.read_text()), indent=1))
    with pytest.raises(CheckpointError, match="is no longer the tokenizer that the run was"):
        trained_tokenizer(checkpoint, data_of_run(checkpoint))
    file.unlink()
    with pytest.raises(CheckpointError, match=r"No such file.*; or name its folder with --tok"):
        trained_tokenizer(checkpoint, data_of_run(checkpoint))


def test_converts_tokenizer_is_a_folder_that_has_one(bpe: Path, tmp_path: Path) -> None:
    """Of nothing a folder of weights without a tokenizer was written, and 0 returned."""
    for named in (bpe, bpe.parent):
        assert _named_tokenizer(named) == bpe.parent
    assert _named_tokenizer("byte") == "byte"
    for named in (tmp_path, tmp_path / "nope"):
        with pytest.raises(ConfigError, match="has no tokenizer files; give a folder with one of"):
            _named_tokenizer(named)


@pytest.mark.parametrize("size", [0.0, -1.0, float("nan"), float("inf")])
def test_converts_file_size_is_positive(size: float) -> None:
    with pytest.raises(ConfigError, match="is not a positive number of GB; use a size such as 5"):
        to_hf_from(argparse.Namespace(file_gb=size, checkpoint="nowhere"))
