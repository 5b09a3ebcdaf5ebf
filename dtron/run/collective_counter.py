"""Count the collectives of a step: calls and bytes by mesh axis.

Every collective of torch.distributed passes through the dispatcher with its process group, as an
operator of c10d (FSDP2, plain calls) or of functional collectives (DTensor). The bytes of a call
are the larger of its input and output. Compiled blocks run eagerly during the count.
"""

from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist

from dtron.kernels.torch_internals import TorchDispatchMode
from dtron.parallelisms.placement import leaves

_NAMES = {
    "all_gather_into_tensor": "all_gather",
    "all_gather_into_tensor_coalesced": "all_gather",
    "_allgather_base_": "all_gather",
    "allgather_": "all_gather",
    "allgather_into_tensor_coalesced_": "all_gather",
    "reduce_scatter_tensor": "reduce_scatter",
    "reduce_scatter_tensor_coalesced": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "reduce_scatter_": "reduce_scatter",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter",
    "all_reduce": "all_reduce",
    "all_reduce_": "all_reduce",
    "all_reduce_coalesced": "all_reduce",
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "all_to_all_single": "all_to_all",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all",
    "broadcast": "broadcast",
    "broadcast_": "broadcast",
    "send": "send",
    "recv_": "recv",
}


class CollectiveCounter(TorchDispatchMode):
    """Context manager that counts collectives.

    Args:
        axis_of_group: mesh axis by process-group name, from `Mesh.group_names`.
    """

    def __init__(self, axis_of_group: dict[str, str]) -> None:
        super().__init__()
        self.axis_of_group = axis_of_group
        self.counts: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        namespace, name = namespace_and_name(func)
        if "c10d" in namespace and name in _NAMES:
            axis = self.axis_of_group.get(_group_name(args, kwargs or {}), "other")
            count = self.counts[axis, _NAMES[name]]
            count[0] += 1
            count[1] += max(map(_bytes, [*args, result]))
        return result

    def table(self) -> dict[str, dict[str, dict[str, int]]]:
        """Return {axis: {collective: {"count": n, "bytes": n}}}."""
        axes: dict[str, dict[str, dict[str, int]]] = {}
        for (axis, name), (count, size) in sorted(self.counts.items()):
            axes.setdefault(axis, {})[name] = {"count": count, "bytes": size}
        return axes


def namespace_and_name(func: Any) -> tuple[str, str]:
    """Split an operator's name: aten::add.Tensor -> aten, add."""
    namespace, _, name = func.name().partition("::")
    return namespace, name.partition(".")[0]


def _group_name(args: tuple, kwargs: dict) -> str:
    for value in [*args, *kwargs.values()]:
        if isinstance(value, torch.ScriptObject):
            try:
                return dist.ProcessGroup.unbox(value).group_name
            except (RuntimeError, TypeError):  # a ReduceOp is a script object too
                continue
    strings = [value for value in [*args, *kwargs.values()] if isinstance(value, str)]
    return strings[-1] if strings else ""


def _bytes(values: Any) -> int:
    tensors = [leaf for leaf in leaves(values) if isinstance(leaf, torch.Tensor)]
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
