"""Custom collectives for FSDP, instead of NCCL's all-gather and reduce-scatter.

Reduce-scatter by all-to-all: gradients are sent in the compute dtype and summed in float32.

    rank 0   g00 g01 g02 g03              g00 g10 g20 g30   -> sum of shard 0
    rank 1   g10 g11 g12 g13     --->     g01 g11 g21 g31   -> sum of shard 1
    ...                        bfloat16                        float32

NCCL's reduce-scatter sums in the dtype that it sends, so float32 sums need twice the bytes of
bfloat16. Here each rank sends the gradients of each shard in bfloat16 to the shard's owner, which
sums them in float32: the same sums with half of the bytes.

Use it only if gradients are reduced in each micro-batch: sums over micro-batches would lose
precision in bfloat16. Gradients of norms, which FSDP passes in float32 since torch 2.15, are
rounded to bfloat16 before they are sent.

All-gather and all-to-all can run on copy engines (`peer_memory.py`).
"""

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from dtron.kernels.sums import sum_of_parts_
from dtron.parallelisms.expert.peer_memory import CopyEngine


class CopiedAllGather:
    """All-gather on copy engines, for `FSDPModule.set_custom_all_gather`."""

    def __init__(self, engine: CopyEngine) -> None:
        self._engine = engine

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Allocate the output, with torch's allocator."""
        return torch.empty(size, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        async_op: bool = False,
    ) -> None:
        """Gather (n,) of each rank into (ranks * n,) on the current stream; FSDP waits for it."""
        self._engine.all_gather(output_tensor, input_tensor)


class AllToAllSum:
    """Reduce-scatter by all-to-all, for `FSDPModule.set_custom_reduce_scatter`; one per FSDP unit.

    Args:
        dtype: dtype in which gradients are sent.
        engine: copy engine; None: use the process group's all-to-all.
    """

    def __init__(self, dtype: torch.dtype, engine: CopyEngine | None = None) -> None:
        self.dtype = dtype
        self._engine = engine
        self._allocates_input = False

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Allocate the collective's input, or its output: FSDP calls this first for the input.

        In both calls, `dtype` is the dtype of the output. The input gets `self.dtype` instead.
        """
        self._allocates_input = not self._allocates_input
        if self._allocates_input and self._engine is not None:
            return self._engine.staging(math.prod(map(int, size)), self.dtype)
        return torch.empty(
            size, dtype=self.dtype if self._allocates_input else dtype, device=device
        )

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: object,
        async_op: bool = False,
    ) -> None:
        """Sum gradients over ranks.

        Args:
            output_tensor: (n,), this rank's shard of the sums.
            input_tensor: (ranks * n,), local gradients of every rank's shard.
            op: must be a sum, as `sharding.py` sets it.
        """
        assert op == dist.ReduceOp.SUM
        assert not async_op, "FSDP's stream waits"
        received = torch.empty_like(input_tensor)
        if self._engine is None:
            dist.all_to_all_single(received, input_tensor, group=group)
        else:
            self._engine.all_to_all(received, input_tensor)
        sum_of_parts_(output_tensor, received.view(group.size(), -1))
