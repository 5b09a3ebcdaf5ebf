"""How FSDP's units are gathered and reduced where NCCL's all-gather and reduce-scatter do not.

Reduce-scatter as an all-to-all: gradients travel as they are and are summed in float32.

    rank 0   g00 g01 g02 g03              g00 g10 g20 g30   -> sum of shard 0
    rank 1   g10 g11 g12 g13     --->     g01 g11 g21 g31   -> sum of shard 1
    ...                        bfloat16                        float32

A reduce-scatter sums in the dtype that it sends, so that float32 sums of bfloat16 gradients take
twice the bytes. Here each rank sends every shard's gradients as they are and adds up what it gets:
the same sums from half of the bytes.

It needs gradients that are not sums of micro-batches yet, which in bfloat16 would lose digits.

Either may go by copy engines (`peer_memory.py`).

What one rank has alone, `keep_alone`: its gradients are the sums. FSDP would pack them into one
buffer and copy that to another, made on a stream of its own. Packing takes the host time by bytes
(torch._chunk_cat tells the device where each few KiB go: 8 ms for 277M gradients), and what one
stream has allocated another cannot use. Handed over as they are, cast to the dtype of sums, they
cost one kernel each.

Private names used, tested with torch 2.11 and 2.13: FSDP's AllGather and ReduceScatter (of
_fully_shard._fsdp_api), FSDPModule._get_fsdp_state, of its result
_fsdp_param_group (2.11) or _fsdp_param_groups (2.13), of a group post_backward, reduce_grads and
fsdp_params, and of these _unsharded_param, unsharded_accumulated_grad, _get_grad_inner_tensor,
sharded_param, orig_dtype and to_sharded_dtensor; Tensor._post_accumulate_grad_hooks.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

from dtron.parallelisms.peer_memory import CopyEngine


class CopiedAllGather(AllGather):
    """For `FSDPModule.set_custom_all_gather`: the gather as copies."""

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
        """(n,) of each rank into (ranks * n,), on the current stream, for which FSDP waits."""
        self._engine.all_gather(output_tensor, input_tensor)


class AllToAllSum(ReduceScatter):
    """For `FSDPModule.set_custom_reduce_scatter`; one for each module.

    Args:
        dtype: of the gradients, which is sent.
        engine: copies them; None: the group's own all-to-all does.
    """

    def __init__(self, dtype: torch.dtype, engine: CopyEngine | None = None) -> None:
        self.dtype = dtype
        self._engine = engine
        self._sends = False

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """FSDP asks in turn for what is sent and for the sum, both in the dtype of sums."""
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
            op: of sums only, as `fsdp` sets it.
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


def groups_of(unit: FSDPModule) -> list[Any]:
    """FSDP's parameter groups of one unit."""
    state: Any = unit._get_fsdp_state()
    several = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if several is None else several
    return [group for group in groups if group is not None]


def keep_alone(unit: FSDPModule) -> None:
    """Hand a unit's gradients over where FSDP would reduce them, of a unit that no rank shares.

    FSDP's hooks and factors of reductions (`set_all_reduce_hook`, `set_gradient_divide_factor`) do
    nothing there.
    """
    for group in groups_of(unit):
        group.post_backward = functools.partial(_post_backward, group, group.post_backward)


def _post_backward(group: Any, post_backward: Callable[[], None], *_: Any) -> None:
    """FSDP's, which adds up micro-batches, frees parameters and, told so, does not reduce."""
    if not all(hasattr(parameter, "_unsharded_param") for parameter in group.fsdp_params):
        return  # of a unit that has not been run yet
    due, group.reduce_grads = group.reduce_grads, False
    try:
        post_backward()
    finally:  # who goes on after an error, such as too little memory, still gets gradients
        group.reduce_grads = due
    if due:
        for parameter in group.fsdp_params:
            _hand_over(parameter)


def _hand_over(parameter: Any) -> None:
    """A gradient, of the step's micro-batches so far, to where the optimizer looks for it."""
    whole, found = parameter._unsharded_param, parameter.unsharded_accumulated_grad
    if found is None:
        found, whole.grad = whole.grad, None
    parameter.unsharded_accumulated_grad = None
    if found is None:
        return
    own = parameter.sharded_param
    local = parameter._get_grad_inner_tensor(found).to(parameter.orig_dtype).contiguous()
    if own.grad is not None:
        own.grad._local_tensor += local
    else:
        own.grad = parameter.to_sharded_dtensor(local)
    for hook in (getattr(own, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(own)  # as FSDP does
