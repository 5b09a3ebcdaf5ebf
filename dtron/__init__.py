"""dtron: PyTorch-native training of large transformers.

The names in `__all__` are imported on first use: `import dtron.models` imports no trainer.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dtron.config import RunConfig
    from dtron.parallelisms import Mesh, parallelize
    from dtron.training.callbacks import Callback
    from dtron.training.optim import AdamW
    from dtron.training.trainer import Trainer

__version__ = "0.1.0"
__all__ = ["AdamW", "Callback", "Mesh", "RunConfig", "Trainer", "parallelize"]

_HOMES = {
    "AdamW": "dtron.training.optim",
    "Callback": "dtron.training.callbacks",
    "Mesh": "dtron.parallelisms",
    "RunConfig": "dtron.config",
    "Trainer": "dtron.training.trainer",
    "parallelize": "dtron.parallelisms",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'dtron' has no attribute {name!r}")
