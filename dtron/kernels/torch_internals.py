"""Private names of torch that dtron uses, except those of collectives, attention and FSDP.

Private names, tested with torch 2.11, 2.13 and 2.15:

    torch._foreach_norm                     norms of many tensors with few kernels
    Tensor._version                         how often a tensor was modified in place
    torch._dynamo                           dynamic sizes in graphs; cache statistics
    torch._subclasses                       fake tensors
    torch.utils._python_dispatch            modes that see every operator
"""

import sys
from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "TorchDispatchMode",
    "compile_cache",
    "mark_dynamic",
    "norms",
    "unset_fake_temporarily",
    "version",
]


def norms(
    tensors: Sequence[Tensor], order: float, dtype: torch.dtype | None = None
) -> list[Tensor]:
    """Return the norm of each tensor, a scalar computed in `dtype` (default: the tensor's dtype).

    A separate call per tensor would cost the host a few microseconds each in every step.
    """
    return list(torch._foreach_norm(list(tensors), order, dtype=dtype))


def version(tensor: Tensor) -> int:
    """Return how often the tensor's memory was modified in place."""
    return tensor._version


def mark_dynamic(tensor: Tensor, dim: int) -> None:
    """Let torch.compile use one graph for all sizes of this dim."""
    torch._dynamo.mark_dynamic(tensor, dim)


def compile_cache() -> dict[str, int]:
    """Count this process's hits and misses in inductor's graph cache."""
    if "torch._dynamo" not in sys.modules:  # importing it would load the compiler
        return {"hits": 0, "misses": 0}
    from torch._dynamo.utils import counters

    # aot_autograd's hits would count twice: each is followed by a hit for the graph's code.
    graphs = counters["inductor"]
    return {"hits": graphs["fxgraph_cache_hit"], "misses": graphs["fxgraph_cache_miss"]}
