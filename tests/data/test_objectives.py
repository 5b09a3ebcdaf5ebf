"""Objectives of training: the same masks in every layout and after a resume."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dtron.config import Data, RunConfig
from dtron.data import Loader, TrainingSource, load_tokenizer, open_data
from dtron.data.objectives import HeldOut, Objective, open_objective
from dtron.data.objectives.masked import MaskedTokens
from dtron.data.packing import IGNORE, Packed
from dtron.data.shuffle import draws
from dtron.errors import ConfigError
from dtron.setup.rules import reasons

MakeData = Callable[..., Data]
MASK, EOS, T = 257, 256, 32


def masked(data: Data, vocab_size: int = 264, seed: int = 3) -> MaskedTokens:
    found = open_objective("masked", data, load_tokenizer(data), vocab_size, seed, T)
    assert isinstance(found, MaskedTokens)
    return found


def step_of(loaders: list[Loader]) -> list[Tensor]:
    """What a global step reads and predicts, in the order of its sequences."""
    steps = [loader.step() for loader in loaders]
    batches = [batch for micro_batch in zip(*steps, strict=True) for batch in micro_batch]
    names = ["tokens", "labels", *["encoder_tokens"] * (batches[0].encoder_tokens is not None)]
    return [torch.cat([getattr(batch, name) for batch in batches]) for name in names]


def differs_between_layouts(source: TrainingSource, objective: Objective) -> bool:
    """Whether 1 and 2 data-parallel ranks, or a run and its resumption, see other masks."""

    def loaders(dp_size: int, micro_batch: int) -> list[Loader]:
        settings = {"global_batch": 8, "micro_batch": micro_batch, "dp_size": dp_size}
        return [
            Loader(source, dp_rank=rank, objective=objective, **settings) for rank in range(dp_size)
        ]

    whole, several, resumed = loaders(1, 8), loaders(2, 2), loaders(1, 8)
    for step in range(6):  # more than an epoch
        state = whole[0].state_dict()
        wanted = step_of(whole)
        found = [step_of(several)]
        if step == 4:
            resumed[0].load_state_dict(state)
            found.append(step_of(resumed))
        if not all(torch.equal(a, b) for each in found for a, b in zip(each, wanted, strict=True)):
            return True
    return False


@pytest.mark.parametrize("packing", ["cut", "best_fit"])
def test_masks_follow_the_sequence(make_data: MakeData, texts: list[str], packing: str) -> None:
    data = make_data(texts, mask_documents=True, packing=packing)
    source = open_data(data, seq_len=T, seed=3)[0]
    objective = masked(data)
    assert not differs_between_layouts(source, objective)
    rows: dict[int, int] = {}

    def drawn_per_rank(k: int, packed: Packed) -> Packed:
        """The bug: masks of the n-th sequence that this process reads."""
        rows[0] = rows.get(0, -1) + 1
        return objective(rows[0], packed)

    assert differs_between_layouts(source, drawn_per_rank)


def test_tokens_are_masked_as_in_bert(make_data: MakeData, texts: list[str]) -> None:
    data = make_data(texts)
    objective = masked(data)
    tokens = np.resize(np.array([65, 66, 67, EOS]), 200_000)
    pieces = np.where(np.arange(len(tokens)) < 190_000, 0, -1).astype(np.int32)
    plain = Packed(tokens, np.roll(tokens, -1), None, None, pieces)
    found = objective(5, plain)
    chosen = found.labels != IGNORE
    np.testing.assert_array_equal(found.labels[chosen], tokens[chosen])
    np.testing.assert_array_equal(found.tokens[~chosen], tokens[~chosen])
    legal = (tokens != EOS) & (pieces >= 0)
    assert not chosen[~legal].any()
    assert chosen[legal].mean() == pytest.approx(0.15, abs=0.005)
    seen = found.tokens[chosen]
    assert (seen == MASK).mean() == pytest.approx(0.8, abs=0.01)
    kept = (seen == tokens[chosen]).mean()  # one of 257 random tokens is the token itself
    assert kept == pytest.approx(0.1 + 0.1 / 257, abs=0.01)
    assert seen.max() == MASK
    for other in (objective(6, plain), masked(data, seed=4)(5, plain)):
        assert (other.labels != found.labels).mean() > 0.1
    assert (replace(objective, fraction=0.5)(5, plain).labels != IGNORE)[legal].mean() > 0.49


def test_held_out_masks_are_fixed_and_others_than_in_training(
    make_data: MakeData, texts: list[str]
) -> None:
    data = make_data(texts, validation_fraction=0.3)
    _, held_out = open_data(data, seq_len=T, seed=3)
    assert held_out is not None
    objective = masked(data)
    source = HeldOut(held_out, objective)
    first, again = source.sequence(1), source.sequence(1)
    np.testing.assert_array_equal(first.labels, again.labels)
    trained = objective(1, held_out.sequence(1))
    assert (first.labels != trained.labels).any()
    assert len(source) == len(held_out)


def test_draws_are_of_every_argument() -> None:
    base = draws(1, 2, 0, 1000)
    for other in (draws(2, 2, 0, 1000), draws(1, -2, 0, 1000), draws(1, 2, 1, 1000)):
        assert not (base == other).any()
    np.testing.assert_array_equal(base[:10], draws(1, 2, 0, 10))


def test_mask_tokens(make_data: MakeData, texts: list[str], bpe: Path) -> None:
    assert masked(make_data(texts)).mask_id == MASK
    named = make_data(texts, tokenizer=str(bpe), mask_token="<|pad|>")
    assert masked(named, 400).mask_id == load_tokenizer(named).token_id("<|pad|>")
    for settings, size, message in (
        ({}, 257, r"vocab_size = 257 has no id for the mask .* use 258 or more"),
        ({"mask_token": "x"}, 264, r'data\.mask_token = .x. has no effect with .* "byte"'),
        ({"tokenizer": str(bpe)}, 400, r"data\.mask_token: the vocabulary .* none of \[MASK\]"),
        (
            {"tokenizer": str(bpe), "mask_token": "<x>"},
            400,
            r"data\.mask_token = .<x>.: the vocabulary",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            masked(make_data(texts, **settings), size)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["data.objective=next_token"], 'data.objective = "next_token" does not fit'),
        (["model.name=llama", "data.objective=masked"], 'use "next_token", or "auto"'),
        (["model.name=llama", "data.mask_fraction=0.3"], "data.mask_fraction = 0.3 has no effect"),
        (["train.sample_tokens=8"], "train.sample_tokens = 8"),
        (["data.format=chat", "data.packing=pad"], "masks are drawn over whole texts"),
        (
            [
                *("model.name=llava", "model.override.causal=false", "data.format=image_text"),
                *("data.packing=pad", "data.image_size=32", "data.image_tokens=16"),
            ],
            "'image_text' with data.objective = \"masked\": masks are drawn over whole texts",
        ),
        (["data.packing=best_fit"], "use data.mask_documents = true"),
        (["train.loss_chunks=2"], "a chunked loss computes a head without bias"),
        (["model.override.mtp=1", "model.override.n_experts=4"], "mtp = 1 conflicts with causal"),
        (["model.override.window=4"], "window = 4 conflicts with causal = false"),
        (["parallel.tp=2", "model.override.vocab_size=265"], "bias of the head cannot be padded"),
    ],
)
def test_what_does_not_fit_masked_tokens_is_refused(words: list[str], message: str) -> None:
    config = RunConfig.load(Path("configs/bert_debug.toml"), words)
    assert any(message in reason for reason in reasons(config, 2))
    assert not reasons(RunConfig.load(Path("configs/bert_debug.toml"), []), 2)
