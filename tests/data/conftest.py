"""Small corpora and tokenizers that the tests write themselves."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from dtron.config import Data

MakeData = Callable[..., Data]


@pytest.fixture
def texts() -> list[str]:
    """40 documents of 5 to 60 characters, all different."""
    lengths = np.random.default_rng(0).integers(5, 60, 40).tolist()
    alphabet = "abcdefghijklmnopqrstuvwxyz" * 4
    return [f"{i:02d}{alphabet[i % 26 :][:n]}" for i, n in enumerate(lengths)]


@pytest.fixture
def make_data(tmp_path: Path) -> MakeData:
    """A data section over a JSONL file of the given texts, with a cache of its own."""

    def make(texts: Sequence[str], **settings: object) -> Data:
        path = tmp_path / "corpus.jsonl"
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
        values = {"paths": (str(path),), "cache_dir": str(tmp_path / "cache"), **settings}
        return Data.model_validate(values)

    return make


@pytest.fixture(scope="session")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level BPE tokenizer.json that knows <|endoftext|>, with truncation switched on."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)  # type: ignore
    tokenizer.decoder = decoders.ByteLevel()  # type: ignore
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|pad|>", "<|endoftext|>", "<|turn|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["in the beginning was the word"] * 4, trainer)
    tokenizer.enable_truncation(4)
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    tokenizer.save(str(path))
    return path
