"""Asynchronous tensor parallelism: matrix products that overlap their own communication.

Under sequence parallelism a layer all-gathers before its colwise products and reduce-scatters after
its rowwise ones. Inductor can fuse each pair into one operator over symmetric memory, in which the
product of one part runs while the next part travels over NVLink. Whether it does depends on the
exact form of the graph, so every compiled graph is searched for the fused operators and they are
counted: asked for and absent is an error.

Private names used, tested with torch 2.11: torch._inductor.config._micro_pipeline_tp,
post_grad_custom_post_pass and CustomGraphPass;
torch.distributed._symmetric_memory.enable_symm_mem_for_group.

Source: torch.distributed._symmetric_memory, PyTorch 2.5 on; overlap by decomposition, Wang et al.,
ASPLOS 2023.
"""

from collections import Counter
from typing import Any

import torch
import torch.distributed as dist
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed._symmetric_memory import enable_symm_mem_for_group

from dtron.errors import ConfigError

_COLLECTIVES = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce")


class FusedOps(CustomGraphPass):
    """Counts fused operators and collectives left over in every graph that inductor compiles."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Called with each graph once inductor has fused it."""
        for node in graph.nodes:
            namespace, _, name = str(node.target).partition(".")
            name = name.split(".")[0]
            if namespace == "symm_mem" or (
                namespace == "_c10d_functional" and name in _COLLECTIVES
            ):
                self.counts[name] += 1

    def uuid(self) -> Any | None:
        """None: a graph from the cache would not be counted, so none is taken."""
        return None

    @property
    def fused(self) -> int:
        """Fused operators over all graphs."""
        return sum(n for name, n in self.counts.items() if name.startswith("fused"))

    def check(self) -> None:
        """Raises ConfigError if nothing was fused."""
        if not self.fused:
            left = ", ".join(f"{n} {name}" for name, n in self.counts.items()) or "no collectives"
            raise ConfigError(
                "parallel.async_tp = true, but the compiled graphs hold no fused operator "
                f"({left}); set it to false"
            )

    def __str__(self) -> str:
        return ", ".join(f"{n} {name}" for name, n in sorted(self.counts.items()))


def enable(group: dist.ProcessGroup, fused: FusedOps) -> dict[str, Any]:
    """Let inductor fuse collectives of this group; returns the options for torch.compile."""
    enable_symm_mem_for_group(group.group_name)
    return {"_micro_pipeline_tp": True, "post_grad_custom_post_pass": fused}
