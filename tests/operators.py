"""torch's fused operators of symmetric memory on CPUs, and which operators compiled graphs hold.

All of their own code runs but the pipelined copies, in whose place gloo gathers and exchanges the
same parts.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed import _symmetric_memory as symmetric

_LIBRARIES: list[torch.library.Library] = []
"""Kernels are gone with the library that has them."""


def install(kernels: Mapping[str, Callable[..., Any]]) -> None:
    """Let operators of `torch.ops.symm_mem` run on this rank's CPU, by name."""
    symmetric._pipelined_multi_all_gather_and_consume = _gather_and_consume
    symmetric._pipelined_produce_and_all2all = _produce_and_exchange
    library = torch.library.Library("symm_mem", "IMPL")
    for name, kernel in kernels.items():
        library.impl(name, kernel, "CPU")
    _LIBRARIES.append(library)


def _gather_and_consume(
    shard: list[Tensor],
    consume: Callable[[list[Tensor], int], None],
    out: list[Tensor],
    group: str,
    _needed: bool = True,
) -> None:
    n = dist.get_world_size()
    for mine, whole in zip(shard, out, strict=True):
        assert mine.is_contiguous()
        parts = list(whole.view(torch.uint8).chunk(n))
        dist.all_gather(parts, mine.view(torch.uint8))
    for rank in range(n):
        consume([whole.chunk(n)[rank] for whole in out], rank)


def _produce_and_exchange(
    produce: Callable[[int, Tensor], None], output: Tensor, group: str, out_chunk_dim: int = 0
) -> None:
    assert out_chunk_dim == 0
    sent = torch.empty_like(output)
    for rank, part in enumerate(sent.chunk(dist.get_world_size())):
        produce(rank, part)
    dist.all_to_all_single(output, sent)


class CountedOperators(CustomGraphPass):
    """Counts communication in the graphs that inductor compiles, as post_grad_custom_post_pass."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Called by inductor with each graph."""
        for node in graph.nodes:
            namespace, *rest = str(node.target).split(".")
            if namespace in ("symm_mem", "_c10d_functional") and rest[0] != "wait_tensor":
                self.counts[rest[0]] += 1

    def uuid(self) -> Any | None:
        """None: a graph from the cache would not be counted, so none is taken."""
        return None
