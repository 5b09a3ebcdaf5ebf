"""Documents to batches: sources, tokenizers, the token cache, packing and the resumable loader."""

from dtron.data.cache import TokenCache
from dtron.data.loader import Batch, Loader, validation_batches
from dtron.data.packing import Packed, TrainingSource, ValidationSource, Waste
from dtron.data.sources import identity_of, open_data, prepare, wait_for
from dtron.data.tokenizer import Tokenizer, load_tokenizer

__all__ = [
    "Batch",
    "Loader",
    "Packed",
    "TokenCache",
    "Tokenizer",
    "TrainingSource",
    "ValidationSource",
    "Waste",
    "identity_of",
    "load_tokenizer",
    "open_data",
    "prepare",
    "validation_batches",
    "wait_for",
]
