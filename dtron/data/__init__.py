"""Documents to batches: a tokenized corpus, packing and the resumable loader.

The names in `__all__` are imported on first use: processes that tokenize need no torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtron.data.corpus.readers.custom import DocumentSource
    from dtron.data.corpus.token_corpus import TokenCorpus
    from dtron.data.loader import Batch, Loader, validation_batches
    from dtron.data.packing import Packed, TrainingSource, ValidationSource, Waste
    from dtron.data.sources import (
        identity_of,
        open_all,
        open_data,
        open_validation,
        prepare,
        wait_for,
    )
    from dtron.data.tokenizer import Tokenizer, load_tokenizer

_HOMES = {
    "corpus.readers.custom": ("DocumentSource",),
    "corpus.token_corpus": ("TokenCorpus",),
    "loader": ("Batch", "Loader", "validation_batches"),
    "packing": ("Packed", "TrainingSource", "ValidationSource", "Waste"),
    "sources": (
        "identity_of",
        "open_all",
        "open_data",
        "open_validation",
        "prepare",
        "wait_for",
    ),
    "tokenizer": ("Tokenizer", "load_tokenizer"),
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "Batch",
    "DocumentSource",
    "Loader",
    "Packed",
    "TokenCorpus",
    "Tokenizer",
    "TrainingSource",
    "ValidationSource",
    "Waste",
    "identity_of",
    "load_tokenizer",
    "open_all",
    "open_data",
    "open_validation",
    "prepare",
    "validation_batches",
    "wait_for",
]


def __getattr__(name: str) -> Any:
    if name in _HOME_OF:
        return getattr(importlib.import_module(f"dtron.data.{_HOME_OF[name]}"), name)
    raise AttributeError(f"module 'dtron.data' has no attribute {name!r}")
