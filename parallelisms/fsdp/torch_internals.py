"""FSDP2's internals: what dtron needs of `fully_shard` beyond its public methods, in one file.

    forward_hooks_on        a unit that is gathered and freed with another module's forward
    accumulate_gradients    gradients that autograd did not write, into the sum over micro-batches
    reduce_gradients        the reduction at the end of a backward, called by a pipeline schedule
    bypass_reduction        gradients of parameters that no other rank shares, without a reduction
    sharded_tensor          the object that a float8 all-gather attaches its hooks to
    gathered_buffers        the memory of gathered parameters, for tracing

torch 2.11 and 2.13 keep the sum over micro-batches in an attribute of FSDP's own, in the dtype of
reduction; in torch 2.15 the unsharded parameter's `.grad` is that sum, and its `grad_dtype` says in
which dtype. `_sums_are_separate` distinguishes the two.

Private names used, tested with torch 2.11, 2.13 and 2.15: `_fsdp_param_group`, `_is_root` and
`_root_post_backward_final_callback` of FSDP's state, and `Tensor._post_accumulate_grad_hooks`.
Without an underscore but undocumented: fsdp_params, post_backward and
reduce_grads of a parameter group; sharded_param, unsharded_param, unsharded_grad_data,
unsharded_grad_dtype, orig_dtype, to_sharded_dtensor and all_gather_outputs of its parameters, and
before torch 2.15 unsharded_accumulated_grad, unsharded_accumulated_grad_data,
accumulate_unsharded_grad_if_needed and to_accumulated_grad_if_needed.

Source: torch.distributed.fsdp._fully_shard.
"""

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor


def _state(unit: FSDPModule) -> Any:
    return fully_shard.state(unit)  # type: ignore[attr-defined]


def parameter_groups(module: nn.Module) -> list[Any]:
    """FSDP's parameter groups of all units under a module, in the modules' order, each once."""
    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    groups = [_state(unit)._fsdp_param_group for unit in units]
    return list(dict.fromkeys(group for group in groups if group is not None))


@contextmanager
def forward_hooks_on(block: nn.Module, module: nn.Module) -> Iterator[None]:
    """Inside, `fully_shard(module)` registers its forward hooks on `block` instead.

    `module` is then gathered before the block's forward and freed after it, like the block itself.
    """
    names = ("register_forward_pre_hook", "register_forward_hook")
    for name in names:
        setattr(module, name, getattr(block, name))
    try:
        yield
    finally:
        for name in names:
            delattr(module, name)


def accumulate_gradients(module: nn.Module) -> None:
    """Move gradients in `.grad` into FSDP's sums over micro-batches, in the dtype of reduction.

    A backward without reduction does this at its end. Deferred weight gradients are added after
    that and would otherwise add up in the dtype of computation: call it after each of them.
    Parameters that no FSDP unit holds keep their `.grad`. Calling it twice does no harm.
    """
    for group in parameter_groups(module):
        for parameter in group.fsdp_params:
            if _is_unsharded(parameter):
                _accumulate(parameter)


def _is_unsharded(parameter: Any) -> bool:
    """Whether it has been gathered at least once."""
    return hasattr(parameter, "unsharded_param")


def _sums_are_separate(parameter: Any) -> bool:
    """Before torch 2.15."""
    return hasattr(type(parameter), "unsharded_accumulated_grad_data")


def _accumulate(parameter: Any) -> None:
    if _sums_are_separate(parameter):
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()
        return
    whole, dtype = parameter.unsharded_param, parameter.unsharded_grad_dtype
    grad = whole.grad
    if grad is not None and grad.dtype != dtype:
        whole.grad_dtype = None  # either dtype, until both are changed
        whole.grad = grad.to(dtype)
    whole.grad_dtype = dtype


def reduce_gradients(module: nn.Module, last: bool) -> None:
    """Reduce the gradients accumulated so far, as the end of a backward does that synchronizes.

    The backwards before have to be without it: `set_requires_gradient_sync(False)` and
    `set_is_last_backward(False)`.

    Under replication each reduction includes the all-reduce. FSDP can defer that to the last one,
    but it adds up packed buffers, which do not fit each other if one reduction has gradients of
    norms and weights and the next of weights alone: with replicas, once per step is cheaper.

    Args:
        module: the root unit, after its first forward.
        last: no micro-batch follows in this step, so parameters are freed.
    Raises:
        ValueError: the module is not the root of its FSDP units.
    """
    if not isinstance(module, FSDPModule) or not _state(module)._is_root:
        raise ValueError("reduce_gradients needs the root FSDP unit, after its first forward")
    accumulate_gradients(module)  # all gradients in one dtype, which the reduction requires
    module.set_is_last_backward(last)
    module.set_requires_gradient_sync(True)
    if last:
        module.set_reshard_after_backward(True)
    for group in reversed(parameter_groups(module)):
        group.post_backward()
    _state(module)._root_post_backward_final_callback()


def bypass_reduction(unit: FSDPModule) -> None:
    """Hand a unit's gradients to the optimizer without FSDP's reduction.

    For parameters that no other rank shares: their gradients are the sums already. FSDP would pack
    them into one buffer and copy that to another, made on a stream of its own. Packing takes the
    host time by bytes (its chunk_cat tells the device where each few KiB go: 8 ms for 277M
    gradients), and what one stream has allocated another cannot use. Handed over as they are, cast
    to the parameter's dtype, they cost one kernel each.

    FSDP's hooks and factors of reductions (`set_all_reduce_hook`, `set_gradient_divide_factor`) do
    nothing there.
    """
    group = _state(unit)._fsdp_param_group
    if group is not None:
        group.post_backward = functools.partial(_post_backward, group, group.post_backward)


def _post_backward(group: Any, post_backward: Callable[[], None], *_: Any) -> None:
    """FSDP's, which accumulates micro-batches and frees parameters, without its reduction."""
    if not all(map(_is_unsharded, group.fsdp_params)):
        return  # of a unit that has not been run yet
    due, group.reduce_grads = group.reduce_grads, False
    try:
        post_backward()
    finally:  # a caller that continues after an error, such as out of memory, gets gradients again
        group.reduce_grads = due
    if due:
        for parameter in group.fsdp_params:
            _hand_over(parameter)


@torch.no_grad()
def _hand_over(parameter: Any) -> None:
    """Move the gradient of the step's micro-batches so far to the sharded parameter's `.grad`."""
    found = _take_gradient(parameter)
    if found is None:
        return
    own = parameter.sharded_param
    local = found.to(parameter.orig_dtype).contiguous()
    if own.grad is not None:
        own.grad.to_local().add_(local)
    else:
        own.grad = parameter.to_sharded_dtensor(local)
    for hook in (getattr(own, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(own)  # as FSDP does


def _take_gradient(parameter: Any) -> Tensor | None:
    """The accumulated gradient of the gathered parameter, a plain tensor, which FSDP forgets."""
    if _sums_are_separate(parameter) and parameter.unsharded_accumulated_grad is not None:
        found = parameter.unsharded_accumulated_grad_data
        parameter.unsharded_accumulated_grad = None
        return found
    if parameter.unsharded_param.grad is None:
        return None
    found = parameter.unsharded_grad_data
    parameter.unsharded_param.grad = None
    return found


def sharded_tensor(parameter: DTensor) -> Tensor:
    """A DTensor's local tensor itself, of which FSDP looks for `fsdp_pre_all_gather`.

    `DTensor.to_local` gives another object for a parameter since torch 2.15.
    """
    (name, *_mesh), _ = parameter.__tensor_flatten__()  # since torch 2.13 also the mesh
    return getattr(parameter, name)


def gathered_buffers(groups: Iterable[Any]) -> Iterator[Tensor]:
    """The flat tensors that the gathered parameters of these groups are views of.

    Freed ones have a storage of size zero.
    """
    for group in groups:
        for parameter in group.fsdp_params:
            yield from parameter.all_gather_outputs
