"""Images of packed sequences: which image has which tokens of a corpus.

The corpus holds `data.image_tokens` placeholder tokens per image, in the order in which rows name
the images. A piece of a document that is split may begin or end within an image; then the whole
image is read, and only its tokens in the piece are used.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from dtron.config import Data
from dtron.data.corpus.documents import Reading, files_corpus
from dtron.data.images.files import read_image
from dtron.data.packing import Packed, SequencePlan, Tokens, UnreadSequence, Waste, ids_and_labels
from dtron.data.tokenizer import ImageText
from dtron.errors import DataError

_BLOCK = 1 << 24  # tokens read at a time


@dataclass(frozen=True)
class ImageTable:
    """The images of a corpus, in its order."""

    starts: np.ndarray
    """int64 (n,), position in the corpus of each image's first token"""
    files: Sequence[tuple[str, str]]
    """path of each image, and the row that names it, for messages"""
    data: Data

    @classmethod
    def of(cls, data: Data, tokens: Tokens) -> "ImageTable":
        """Read the rows of `data.paths` and find the placeholder tokens of the corpus.

        Raises:
            DataError: the files have changed since they were tokenized.
        """
        places = [np.empty(0, np.int64)]
        for first in range(0, len(tokens), _BLOCK):
            ids, _ = ids_and_labels(tokens[first : first + _BLOCK].astype(np.int64))
            places.append(first + np.flatnonzero(ids == data.image_token))
        starts = np.concatenate(places)[:: data.image_tokens]
        files = [
            (path, document.name)
            for document in files_corpus(data).documents(Reading(data))
            if isinstance(document, ImageText)
            for path in document.paths
        ]
        if len(starts) != len(files):
            raise DataError(
                f"data.paths: {len(files)} images in rows, but {len(starts)} in the tokenized "
                "corpus; the files changed during the start; start again"
            )
        return cls(starts, files, data)

    def added(self, packed: Packed) -> Packed:
        """Return a sequence with its images.

        Raises:
            DataError: an image cannot be read; the message has its row's file and line.
        """
        assert packed.pieces is not None, "documents are packed whole"
        lengths = np.bincount(packed.pieces[packed.pieces >= 0])
        starts = [start for start, _ in packed.spans]
        places = np.concatenate([np.arange(n) + at for n, at in zip(lengths, starts, strict=True)])
        own = np.flatnonzero(packed.tokens[: len(places)] == self.data.image_token)
        numbers = np.searchsorted(self.starts, places[own], side="right") - 1
        used, image = np.unique(numbers, return_inverse=True)
        index = np.full((len(packed.tokens), 2), -1, np.int64)
        index[own] = np.stack([image, places[own] - self.starts[numbers]], axis=1)
        size = self.data.image_size
        files = [self.files[number] for number in used.tolist()]
        pixels = [read_image(path, where, size) for path, where in files]
        images = np.stack(pixels) if pixels else np.empty((0, 3, size, size), np.uint8)
        return replace(packed, images=images, image_index=index)


@dataclass(frozen=True)
class WithImages:
    """The sequences of another plan, with their images."""

    plan: SequencePlan
    table: ImageTable

    def __len__(self) -> int:
        return len(self.plan)

    def order(self, seed: int, epoch: int) -> Any:
        """Return the order of an epoch."""
        return self.plan.order(seed, epoch)

    def unread(self, order: Any, index: int) -> UnreadSequence:
        """Return sequence `index` of an epoch; images are read with its tokens."""
        unread = self.plan.unread(order, index)
        return replace(unread, pack=lambda window: self.table.added(unread.pack(window)))

    def waste(self, order: Any) -> Waste:
        """Return padding and split documents of an epoch."""
        return self.plan.waste(order)


def with_images(data: Data, tokens: Tokens, plan: SequencePlan) -> SequencePlan:
    """Return a plan whose sequences have their images, if `data.format` has any."""
    return WithImages(plan, ImageTable.of(data, tokens)) if data.has_images else plan
