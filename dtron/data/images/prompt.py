"""Prompts with images, for text generation."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from dtron.config import Data
from dtron.data.images.files import read_image
from dtron.data.images.rows import PLACEHOLDER, check_images, image_text
from dtron.data.tokenizer import NO_LOSS, Tokenizer, encode_image_text
from dtron.errors import ConfigError, DataError
from dtron.models.config import DecoderConfig


def encode_image_prompt(
    prompt: str, paths: Sequence[str], config: DecoderConfig, tokenizer: Tokenizer, data: Data
) -> tuple[list[int], Tensor]:
    """Return a prompt's tokens, with placeholders in place of images, and the images.

    Args:
        prompt: text with one `<image>` per path.
        paths: image files.
        config: of the model; it has the placeholder token, tokens per image and pixels per side.
    Returns:
        Tokens, and uint8 (N, 3, S, S) in RGB.
    Raises:
        ConfigError: an image cannot be read, or the numbers of paths and of `<image>` differ.
    """
    if prompt.count(PLACEHOLDER) != len(paths):
        raise ConfigError(
            f"--prompt has {prompt.count(PLACEHOLDER)} times {PLACEHOLDER}, but --image was given "
            f"{len(paths)} times; write one {PLACEHOLDER} per --image"
        )
    own = {"image_token": config.image_token, "image_tokens": config.image_tokens}
    row = {"images": list(paths)}
    size = config.vision_image_size
    try:
        document = image_text(prompt, row, "--prompt", data.model_copy(update=own))
        check_images(document, tokenizer)
        images = [read_image(path, "--image", size) for path in document.paths]
    except DataError as error:
        raise ConfigError(str(error)) from None
    ids = [token & ~NO_LOSS for token in encode_image_text(tokenizer, document)]
    return ids[:-1], torch.from_numpy(np.stack(images))  # without EOS


def image_index(first: Sequence[int], shape: tuple[int, int], config: DecoderConfig) -> Tensor:
    """Return (image, index among its tokens) of each token of the first sequence.

    Args:
        first: the prompt's tokens.
        shape: (B, T) of the batch, whose first sequence begins with the prompt.
    Returns:
        int64 (B, T, 2); (-1, -1): text.
    """
    index = torch.full((*shape, 2), -1)
    places = (torch.tensor(first) == config.image_token).nonzero().squeeze(1)
    numbers = torch.arange(len(places))
    per_image = config.image_tokens
    index[0, places] = torch.stack([numbers // per_image, numbers % per_image], 1)
    return index
