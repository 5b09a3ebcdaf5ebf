"""Rows of `data.format = "image_text"`: a text with placeholders, and paths of images.

    {"text": "<image>a red circle", "images": ["0.png"]}

Each `<image>` stands for the next path of `images`, which is relative to the folder of the file.
Tokenized, an image is `data.image_tokens` times the token `data.image_token`, without a loss; all
text has a loss, and so has EOS.
"""

from pathlib import Path
from typing import Any

from dtron.config import Data
from dtron.data.images.files import check_image
from dtron.data.tokenizer import ImageText, Tokenizer
from dtron.errors import DataError, shorten

PLACEHOLDER = "<image>"
COLUMN = "images"
"""Key of a row's list of paths; missing or null: no images."""


def image_text(text: str, row: dict[str, Any], where: str, data: Data) -> ImageText:
    """Return the document of a row.

    Args:
        text: the row's text.
        where: file and line, for messages.
    Raises:
        DataError: `images` is no list of paths, or does not have one path per placeholder.
    """
    paths = row.get(COLUMN) or []
    if not isinstance(paths, list) or not all(isinstance(path, str) and path for path in paths):
        raise DataError(f"{where}: {COLUMN!r} is {shorten(repr(paths))}; use a list of paths")
    parts = text.split(PLACEHOLDER)
    if len(parts) - 1 != len(paths):
        raise DataError(
            f"{where}: the text has {len(parts) - 1} times {PLACEHOLDER}, but {COLUMN!r} has "
            f"{len(paths)} paths; write one {PLACEHOLDER} per image"
        )
    folder = Path(where.rpartition(", line ")[0]).parent
    token = data.image_token, data.image_tokens
    return ImageText(tuple(parts), tuple(paths), folder, where, *token)


def check_images(document: ImageText, tokenizer: Tokenizer) -> None:
    """Check a document before it is tokenized.

    Raises:
        DataError: an image is missing or is no image; the message has the row's file and line. Or
            a text has the placeholder token, or the vocabulary lacks it.
    """
    if document.token >= tokenizer.vocab_size:
        raise DataError(
            f"data.image_token = {document.token} is not in the vocabulary of "
            f"{tokenizer.vocab_size} tokens; use an id that no text has, such as 255 for bytes"
        )
    for path in document.paths:
        check_image(path, document.name)
    if any(document.token in ids for ids in tokenizer.encode_batch(document.parts)):
        raise DataError(
            f"{document.name}: a text has the token data.image_token = {document.token}, whose "
            f"places are those of images; write {PLACEHOLDER}, or use another token"
        )
