"""Image files, read by Pillow."""

from pathlib import Path
from typing import Any

import numpy as np

from dtron.errors import ConfigError, DataError
from dtron.io.untrusted import MB, open_regular

IMAGE_BYTES = 64 * MB
"""Size limit of an image file."""
MOST_PIXELS = 64 * MB
"""Limit of height times width: a small file may describe a huge image."""


def check_image(path: str, where: str) -> None:
    """Check that a file exists and begins as an image does; its pixels are not read.

    Args:
        where: row that names the image, for messages.
    Raises:
        DataError: it does not, or it is too large.
        ConfigError: Pillow is not installed.
    """
    _read(path, where, None)


def read_image(path: str, where: str, size: int) -> np.ndarray:
    """Return an image in RGB, resized to a square (bicubic): uint8 (3, size, size).

    Args:
        where: row that names the image, for messages.
    Raises: as `check_image`; or the file is damaged.
    """
    pixels = _read(path, where, size)
    assert pixels is not None, "a size is given"
    return pixels


def _read(path: str, where: str, size: int | None) -> np.ndarray | None:
    pillow = _pillow()
    try:
        with open_regular(Path(path), IMAGE_BYTES) as file, pillow.open(file) as image:
            width, height = image.size
            if width * height > MOST_PIXELS:
                raise ValueError(f"{width} x {height} pixels are more than {MOST_PIXELS:,}")
            if size is None:
                return None
            rgb = image.convert("RGB")
            if rgb.size != (size, size):
                rgb = rgb.resize((size, size), pillow.Resampling.BICUBIC)
            return np.asarray(rgb).transpose(2, 0, 1)
    except (OSError, ValueError, SyntaxError, pillow.DecompressionBombError) as error:
        cause = getattr(error, "strerror", None) or error
        raise DataError(f"{where}: image {path}: {cause}; repair the file or the row") from None


def _pillow() -> Any:
    try:
        from PIL import Image  # the extra `images`
    except ImportError:
        raise ConfigError(
            'data.format = "image_text" needs Pillow; run pip install pillow'
        ) from None
    return Image
