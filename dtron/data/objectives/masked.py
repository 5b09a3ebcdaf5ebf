"""Masked tokens: the model restores a random part of the tokens of a sequence.

Of the chosen tokens, 80% become the mask token, 10% a random token, and 10% stay (BERT). Only they
have a label, which is the token itself. Each token is chosen independently with probability
`data.mask_fraction`. EOS, BOS and padding are never chosen.

Legend: T tokens per sequence.
Source: BERT, arXiv:1810.04805, section 3.1; new masks in each epoch, RoBERTa, arXiv:1907.11692.
"""

from dataclasses import dataclass, replace

import numpy as np

from dtron.config import Data
from dtron.data.packing import IGNORE, Packed
from dtron.data.shuffle import draws
from dtron.data.tokenizer import ByteTokenizer, Tokenizer
from dtron.errors import ConfigError

USUAL_MASKS = ("[MASK]", "<mask>", "<|mask|>", "<MASK>")
MASKED, RANDOM = 0.8, 0.1


@dataclass(frozen=True)
class MaskedTokens:
    """The objective `masked`."""

    mask_id: int
    fraction: float
    """Probability that a token is chosen."""
    n_ids: int
    """Random tokens are drawn from the ids below this one."""
    special: tuple[int, ...]
    """Ids that are never chosen."""
    seed: int

    def __call__(self, k: int, packed: Packed) -> Packed:
        """Return sequence k of the run with masks and their labels.

        Args:
            packed: its tokens and labels are replaced; T tokens.
        """
        tokens = packed.tokens
        chosen, kind, drawn = (draws(self.seed, k, stream, len(tokens)) for stream in range(3))
        masked = (_fractions(chosen) < self.fraction) & ~np.isin(tokens, self.special)
        if packed.pieces is not None:
            masked &= packed.pieces >= 0
        share = _fractions(kind)
        seen = np.where(share < MASKED, self.mask_id, tokens)
        replaced = (share >= MASKED) & (share < MASKED + RANDOM)
        seen = np.where(replaced, (drawn % np.uint64(self.n_ids)).astype(np.int64), seen)
        return replace(
            packed,
            tokens=np.where(masked, seen, tokens),
            labels=np.where(masked, tokens, IGNORE),
        )


def _fractions(values: np.ndarray) -> np.ndarray:
    """Map uint64 (T,) to float64 (T,) in [0, 1]."""
    return values / 2.0**64


def mask_id(data: Data, tokenizer: Tokenizer, vocab_size: int) -> int:
    """Return the id of the mask token. For bytes, it is the first id that the tokenizer leaves.

    Args:
        vocab_size: size of the model's vocabulary.
    Raises:
        ConfigError: the vocabulary of the tokenizer or of the model has no such token.
    """
    if isinstance(tokenizer, ByteTokenizer):
        if data.mask_token:
            raise ConfigError(
                f"data.mask_token = {data.mask_token!r} has no effect with data.tokenizer = "
                '"byte", whose mask is an id of its own; leave it out'
            )
        found = tokenizer.vocab_size
        if found >= vocab_size:
            raise ConfigError(
                f"model.override.vocab_size = {vocab_size} has no id for the mask after those of "
                f'data.tokenizer = "byte"; use {found + 1} or more'
            )
        return found
    wanted = [data.mask_token] if data.mask_token else USUAL_MASKS
    for token in wanted:
        if (known := tokenizer.token_id(token)) is not None:
            return known
    key = f"data.mask_token = {data.mask_token!r}" if data.mask_token else "data.mask_token"
    raise ConfigError(
        f"{key}: the vocabulary of {data.tokenizer} has none of {', '.join(wanted)}; name the "
        "token that masks others"
    )
