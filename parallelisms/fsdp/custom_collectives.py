"""Custom collectives for FSDP, instead of NCCL's all-gather and reduce-scatter.

Reduce-scatter as an all-to-all: gradients are sent in their own dtype and summed in float32.

    rank 0   g00 g01 g02 g03              g00 g10 g20 g30   -> sum of shard 0
    rank 1   g10 g11 g12 g13     --->     g01 g11 g21 g31   -> sum of shard 1
    ...                        bfloat16                        float32

A reduce-scatter sums in the dtype that it sends, so that float32 sums of bfloat16 gradients take
twice the bytes. Here each rank sends every shard's gradients in bfloat16 and sums the received
ones: the same sums from half of the bytes.

It needs gradients that are not sums of micro-batches yet, which in bfloat16 would lose digits.
Those of norms, which torch passes in float32 since 2.15, are rounded before they are sent.

Either may go by copy engines (`peer_memory.py`).
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.parallelisms.expert.peer_memory import CopyEngine


class CopiedAllGather:
    """All-gather by copy engines, for `FSDPModule.set_custom_all_gather`."""

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Memory for all parts, from torch's allocator."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Gather (n,) of each rank into (ranks * n,) on the current stream, for which FSDP
        waits."""
        self._engine.all_gather(output_tensor, input_tensor)


class AllToAllSum:
    """Reduce-scatter by all-to-all, for `FSDPModule.set_custom_reduce_scatter`; one for each
    module.

    Args:
        dtype: of the gradients, which is sent.
        engine: copy engine; None: use the group's all-to-all.
    """

    def __init__(self, dtype: torch.dtype, engine: CopyEngine | None = None) -> None:
        self.dtype = dtype
        self._engine = engine
        self._sends = False

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Allocate FSDP's buffers: in turn the send buffer and the sum, both in the dtype of
        sums."""
        self._sends = not self._sends
        if self._sends and self._engine is not None:
            return self._engine.staging(math.prod(map(int, size)), self.dtype)
        return torch.empty(size, dtype=self.dtype if self._sends else dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Sum over ranks.

        Args:
            output_tensor: (n,), this rank's shard of the sums.
            input_tensor: (ranks * n,), gradients of every rank's shard.
            op: a sum, as set in `sharding.py`.
        """
        assert op == dist.ReduceOp.SUM
        assert not async_op, "FSDP's stream waits"
        received = torch.empty_like(input_tensor)
        if self._engine is None:
            dist.all_to_all_single(received, input_tensor, group=group)
        else:
            self._engine.all_to_all(received, input_tensor)
        parts = received.view(group.size(), -1)
        torch.sum(parts, dim=0, dtype=output_tensor.dtype, out=output_tensor)
