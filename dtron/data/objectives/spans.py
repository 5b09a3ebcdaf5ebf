"""Span corruption: an encoder reads a text without some spans, and a decoder restores them (T5).

    text             a b c d e f g h i j      spans: c d, and h
    encoder tokens   a b <0> e f g <1> i j E  <0>, <1>: sentinels; E = EOS
    targets          <0> c d <1> h E
    decoder tokens   S <0> c d <1> h          S: the start token, 0

A fraction `data.mask_fraction` of the tokens is removed, in spans of `data.mask_span` tokens on
average. All sequences have as many tokens removed, and as many spans, so that no padding is needed;
lengths of spans and of what is between them are random, each at least 1. A text begins with tokens
that stay and ends with a span. Sentinels are counted down from the last id.

Legend: L tokens of a text, S of the encoder, T of the decoder.
Source: T5, arXiv:1910.10683, section 3.1.4; random_spans_noise_mask of its code.
"""

import itertools
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from dtron.config import Data
from dtron.data.packing import IGNORE, Packed
from dtron.data.shuffle import draws
from dtron.data.tokenizer import Tokenizer
from dtron.errors import ConfigError

START = 0
"""First token of the decoder, T5's padding token."""
SENTINEL = "<extra_id_{}>"
"""T5's tokens for sentinels, in vocabularies that have them."""


@dataclass(frozen=True)
class SpanCorruption:
    """The objective `span_corruption`."""

    data: Data
    first_sentinel: int
    """Id of the first sentinel; the next ones are below it."""
    eos_id: int
    seed: int

    def __call__(self, k: int, packed: Packed) -> Packed:
        """Return sequence k of the run as tokens of encoder and decoder.

        Args:
            packed: its tokens (L,) are the text; padding, if any, has no loss.
        """
        text, sizes = packed.tokens, self.data.span_lengths(len(packed.tokens))
        removed = self._lengths(k, 0, sizes.removed, sizes.spans)
        kept = self._lengths(k, 1, sizes.text - sizes.removed, sizes.spans)
        begins = np.cumsum(kept + removed) - removed  # of the spans
        inside = np.repeat(
            np.tile([False, True], sizes.spans), np.stack([kept, removed], 1).ravel()
        )
        sentinels = self.first_sentinel - np.arange(sizes.spans)
        real = inside if packed.pieces is None else inside & (packed.pieces >= 0)
        # A sentinel precedes its span in the targets, and takes its place in the encoder's tokens.
        places = np.cumsum(removed) - removed
        targets = np.insert(text[inside], places, sentinels)
        labels = np.insert(np.where(real, text, IGNORE)[inside], places, sentinels)
        encoder = np.insert(text[~inside], begins - places, sentinels)
        return replace(
            packed,
            tokens=np.concatenate([[START], targets]),
            labels=np.concatenate([labels, [self.eos_id]]),
            encoder_tokens=np.concatenate([encoder, [self.eos_id]]),
            pieces=None,
        )

    def _lengths(self, k: int, stream: int, total: int, n: int) -> np.ndarray:
        """Return n random lengths of at least 1 whose sum is `total`: int64 (n,)."""
        order = np.argsort(draws(self.seed, k, stream, total - 1), kind="stable")
        cuts = np.sort(order[: n - 1]) + 1
        return np.diff(np.concatenate([[0], cuts, [total]]))


def first_sentinel(data: Data, tokenizer: Tokenizer, vocab_size: int, n: int) -> int:
    """Return the id of the first of n sentinels.

    It is that of `<extra_id_0>` if the vocabulary has this token; else the last id of the model's
    vocabulary.

    Args:
        vocab_size: size of the model's vocabulary.
    Raises:
        ConfigError: there are fewer than n ids for sentinels.
    """
    own = tokenizer.token_id(SENTINEL.format(0))
    if own is not None:
        last = tokenizer.token_id(SENTINEL.format(n - 1))
        if last == own - n + 1:
            return own
        raise ConfigError(
            f"train.seq_len needs {n} sentinels, but the vocabulary of {data.tokenizer} has fewer "
            f"tokens {SENTINEL.format(0)}, {SENTINEL.format(1)}, ... in descending order; use a "
            "shorter train.seq_len, a smaller data.mask_fraction or a larger data.mask_span"
        )
    if vocab_size - n < tokenizer.vocab_size:
        raise ConfigError(
            f"model.override.vocab_size = {vocab_size} leaves "
            f"{max(vocab_size - tokenizer.vocab_size, 0)} ids above the {tokenizer.vocab_size} of "
            f"data.tokenizer for the {n} sentinels of train.seq_len; use "
            f"{tokenizer.vocab_size + n} or more"
        )
    return vocab_size - 1


_SENTINELS = re.compile(r"<extra_id_(\d+)>")


def encode_prompt(prompt: str, data: Data, tokenizer: Tokenizer, vocab_size: int) -> list[int]:
    """Return the ids that an encoder reads: of a text with sentinels `<extra_id_0>`, ..., and EOS.

    Args:
        vocab_size: size of the model's vocabulary.
    Raises:
        ConfigError: there are too few ids for the sentinels.
    """
    texts = _SENTINELS.split(prompt)
    numbers = [int(number) for number in texts[1::2]]
    first = first_sentinel(data, tokenizer, vocab_size, max(numbers, default=0) + 1)
    ids = tokenizer.encode(texts[0])
    for number, text in zip(numbers, texts[2::2], strict=True):
        ids += [first - number, *tokenizer.encode(text)]
    return [*ids, tokenizer.eos_id]


def decode_spans(ids: Iterable[int], data: Data, tokenizer: Tokenizer, vocab_size: int) -> str:
    """Return the text of a decoder's ids, sentinels as `<extra_id_0>`, ...; arguments as above."""
    first, lowest = first_sentinel(data, tokenizer, vocab_size, 1), tokenizer.vocab_size
    if tokenizer.token_id(SENTINEL.format(0)) is not None:
        lowest = next(
            first - i + 1
            for i in itertools.count()
            if tokenizer.token_id(SENTINEL.format(i)) != first - i
        )
    found, between = "", []
    for token in ids:
        if lowest <= token <= first:
            found += tokenizer.decode(between) + SENTINEL.format(first - token)
            between = []
        else:
            between.append(token)
    return found + tokenizer.decode(between)
