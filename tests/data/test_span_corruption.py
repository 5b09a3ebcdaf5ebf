"""Span corruption: nothing of a text is lost, and lengths are those of T5."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dtron.config import Data
from dtron.data import load_tokenizer, open_data
from dtron.data.objectives import open_objective
from dtron.data.objectives.spans import (
    START,
    SpanCorruption,
    decode_spans,
    encode_prompt,
    first_sentinel,
)
from dtron.data.packing import IGNORE, Packed
from dtron.errors import ConfigError
from tests.data.test_objectives import differs_between_layouts

MakeData = Callable[..., Data]
EOS, LAST = 256, 319


def packed(n: int, padding: int = 0) -> Packed:
    """A text of n tokens, of which the last are padding."""
    pieces = np.where(np.arange(n) < n - padding, 0, -1).astype(np.int32)
    return Packed(np.arange(n) % 200, np.arange(n), None, None, pieces if padding else None)


def corruption(seed: int = 3, **keys: Any) -> SpanCorruption:
    return SpanCorruption(Data(**keys), LAST, EOS, seed)


def restored(found: Packed) -> tuple[list[int], list[int]]:
    """The text, with spans of the labels in place of sentinels; and the lengths of the spans."""
    assert found.encoder_tokens is not None
    assert found.tokens[0] == START
    assert np.array_equal(found.tokens[1:], found.labels[:-1])
    assert found.labels[-1] == found.encoder_tokens[-1] == EOS
    spans: dict[int, list[int]] = {}
    for label in found.labels[:-1].tolist():
        if label > EOS:
            spans[label] = []
        else:
            spans[next(reversed(spans))].append(label)
    assert list(spans) == [LAST - i for i in range(len(spans))]
    text = [spans.get(i, [i]) for i in found.encoder_tokens[:-1].tolist()]
    return [i for part in text for i in part], [len(span) for span in spans.values()]


@pytest.mark.parametrize(
    ("n", "keys"),
    [(568, {}), (64, {}), (64, {"mask_fraction": 0.5, "mask_span": 8.0}), (2, {}), (7, {})],
)
def test_a_text_is_restored(n: int, keys: dict[str, Any]) -> None:
    sizes = Data(**keys).span_lengths(n)
    seen = set()
    for k in range(20):
        found = corruption(**keys)(k, packed(n))
        text, lengths = restored(found)
        assert text == (np.arange(n) % 200).tolist()
        assert (sum(lengths), len(lengths)) == (sizes.removed, sizes.spans)
        assert min(lengths) >= 1
        assert len(found.tokens) == len(found.labels) == sizes.decoder
        assert found.encoder_tokens is not None
        assert len(found.encoder_tokens) == sizes.encoder
        seen.add(tuple(found.encoder_tokens.tolist()))
    assert len(seen) > 10 or n < 10


def test_lengths_are_those_of_t5() -> None:
    """568 tokens of text are 512 and 114, as in T5's pre-training."""
    sizes = Data().span_lengths(568)
    assert (sizes.encoder, sizes.decoder) == (512, 114)


def test_lengths_of_spans_are_uniform_over_all_divisions() -> None:
    """3 spans of 5 tokens: the first one has 1, 2 or 3 tokens in 3, 2 and 1 of 6 divisions."""
    first = [int(corruption()._lengths(k, 0, 5, 3)[0]) for k in range(3000)]
    shares = np.bincount(first, minlength=4)[1:] / len(first)
    np.testing.assert_allclose(shares, [1 / 2, 1 / 3, 1 / 6], atol=0.03)


def test_padding_has_no_loss() -> None:
    found = corruption(mask_fraction=0.5)(0, packed(64, padding=40))
    labels = found.labels[:-1]
    assert set(labels[labels < 200].tolist()) <= {*range(24), IGNORE}
    assert (labels == IGNORE).sum() > 10
    assert found.pieces is None


def test_ranks_and_a_resumption_see_the_same_spans(make_data: MakeData, texts: list[str]) -> None:
    data = make_data(texts)
    source, _ = open_data(data, seq_len=32, seed=3)
    objective = open_objective("span_corruption", data, load_tokenizer(data), 320, 3, 32)
    assert objective is not None
    assert not differs_between_layouts(source, objective)
    others = open_objective("span_corruption", data, load_tokenizer(data), 320, 4, 32)
    assert others is not None
    one, other = (each(0, source.sequence(0)) for each in (objective, others))
    assert one.encoder_tokens is not None
    assert other.encoder_tokens is not None
    assert not np.array_equal(one.encoder_tokens, other.encoder_tokens)


def test_sentinels(make_data: MakeData, texts: list[str], bpe: Path) -> None:
    bytes_only = make_data(texts)
    tokenizer = load_tokenizer(bytes_only)
    assert first_sentinel(bytes_only, tokenizer, 320, 63) == 319
    with pytest.raises(ConfigError, match=r"vocab_size = 320 leaves 63 ids above the 257"):
        first_sentinel(bytes_only, tokenizer, 320, 64)


class WithSentinels:
    """A vocabulary of 50 tokens with two sentinels."""

    vocab_size = 50

    eos_id = 1

    def encode(self, text: str) -> list[int]:
        return [ord(c) - ord("a") + 2 for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(i - 2 + ord("a")) for i in ids)

    def token_id(self, token: str) -> int | None:
        return {"<extra_id_0>": 41, "<extra_id_1>": 40}.get(token)


def test_sentinels_of_a_vocabulary() -> None:
    data, tokenizer = Data(), WithSentinels()
    assert first_sentinel(data, tokenizer, 64, 2) == 41  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"needs 3 sentinels, but the vocabulary"):
        first_sentinel(data, tokenizer, 64, 3)  # type: ignore[arg-type]


def test_prompts_have_sentinels(make_data: MakeData, texts: list[str]) -> None:
    """Of bytes and of a vocabulary with two sentinels; other ids above are text."""
    data = make_data(texts)
    for tokenizer, first, size in ((load_tokenizer(data), 319, 320), (WithSentinels(), 41, 64)):
        ids = encode_prompt("ab<extra_id_1>c<extra_id_0>", data, tokenizer, size)  # type: ignore[arg-type]
        assert ids[-4:] == [first - 1, tokenizer.encode("c")[0], first, tokenizer.eos_id]
        text = decode_spans(ids[:-1], data, tokenizer, size)  # type: ignore[arg-type]
        assert text == "ab<extra_id_1>c<extra_id_0>"
    with pytest.raises(ConfigError, match="needs 3 sentinels"):
        encode_prompt("<extra_id_2>", data, WithSentinels(), 64)  # type: ignore[arg-type]
