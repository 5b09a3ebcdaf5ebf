"""Training objectives: what a model predicts from a sequence.

    next_token        each token from those before it; the sequences of the packing as they are
    masked            some tokens, of which the model sees a mask or another token (`masked.py`)
    span_corruption   spans of tokens, of which an encoder sees a sentinel each (`spans.py`)

An objective changes sequence k of the run as a function of (train.seed, k) alone. So every layout
of ranks and a resumed run train on the same masks, and each epoch has other ones.
"""

from collections.abc import Callable
from typing import Literal

from dtron.config import Data
from dtron.data.objectives.masked import MaskedTokens, mask_id
from dtron.data.objectives.spans import SpanCorruption, first_sentinel
from dtron.data.packing import Packed, ValidationSource
from dtron.data.tokenizer import Tokenizer

Kind = Literal["next_token", "masked", "span_corruption"]
Objective = Callable[[int, Packed], Packed]
"""(number of the sequence in the run, the sequence) -> the sequence with the objective's labels."""


def open_objective(
    kind: Kind, data: Data, tokenizer: Tokenizer, vocab_size: int, seed: int, seq_len: int
) -> Objective | None:
    """Return the objective of a run; None: next tokens, whose sequences need no change.

    Args:
        vocab_size: size of the model's vocabulary.
        seed: seed of masks and spans.
        seq_len: tokens of a sequence.
    Raises:
        ConfigError: the vocabulary has no mask token, or too few sentinels.
    """
    if kind == "next_token":
        return None
    if kind == "span_corruption":
        n = data.span_lengths(seq_len).spans
        first = first_sentinel(data, tokenizer, vocab_size, n)
        return SpanCorruption(data, first, tokenizer.eos_id, seed)
    return MaskedTokens(
        mask_id=mask_id(data, tokenizer, vocab_size),
        fraction=data.mask_fraction,
        n_ids=tokenizer.vocab_size,
        special=tuple(i for i in (tokenizer.eos_id, tokenizer.bos_id) if i is not None),
        seed=seed,
    )


class HeldOut(ValidationSource):
    """Held-out sequences with the labels of an objective, the same in every evaluation.

    Their numbers are negative, so that their masks differ from those of training.
    """

    def __init__(self, source: ValidationSource, objective: Objective) -> None:
        self._source, self._objective = source, objective

    def __len__(self) -> int:
        return len(self._source)

    def sequence(self, k: int) -> Packed:
        """Return sequence k, 0 <= k < len(self)."""
        return self._objective(-1 - k, self._source.sequence(k))
