"""Prompts with images, for text generation."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dtron.config import Data
from dtron.data.images.files import read_image
from dtron.data.images.rows import check_images, image_text
from dtron.data.tokenizer import NO_LOSS, Tokenizer, encode_image_text
from dtron.errors import ConfigError, DataError


def encode_image_prompt(
    prompt: str, paths: Sequence[str], data: Data, tokenizer: Tokenizer
) -> tuple[list[int], Tensor]:
    """Return a prompt's tokens, with placeholders in place of images, and the images.

    Args:
        prompt: text with one `<image>` per path.
        paths: image files.
        data: its `image_token`, `image_tokens` and `image_size` are those of the model.
    Returns:
        Tokens, and uint8 (N, 3, S, S) in RGB.
    Raises:
        ConfigError: an image cannot be read, or the numbers of paths and of `<image>` differ.
    """
    try:
        document = image_text(prompt, {"images": list(paths)}, "--prompt", data)
        check_images(document, tokenizer)
        images = [read_image(path, "--image", data.image_size) for path in document.paths]
    except DataError as error:
        raise ConfigError(str(error)) from None
    ids = [token & ~NO_LOSS for token in encode_image_text(tokenizer, document)]
    return ids[:-1], torch.from_numpy(np.stack(images))  # without EOS


def image_index(first: Sequence[int], shape: tuple[int, int], data: Data) -> Tensor:
    """Return (image, index among its tokens) of each token of the first sequence.

    Args:
        first: the prompt's tokens.
        shape: (B, T) of the batch, whose first sequence begins with the prompt.
        data: as of `encode_image_prompt`.
    Returns:
        int64 (B, T, 2); (-1, -1): text.
    """
    index = torch.full((*shape, 2), -1)
    places = (torch.tensor(first) == data.image_token).nonzero().squeeze(1)
    numbers, per_image = torch.arange(len(places)), data.image_tokens
    index[0, places] = torch.stack([numbers // per_image, numbers % per_image], 1)
    return index
