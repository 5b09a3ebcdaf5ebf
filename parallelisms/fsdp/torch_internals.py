"""All uses of FSDP2's internals, that is, of `fully_shard` beyond its public methods.

    forward_hooks_on        gather and free an FSDP unit in another module's forward
    gradient_sums           the sums over micro-batches, for matmuls that add to them
    accumulate_gradients    add gradients that autograd did not write to the sum over micro-batches
    reduce_gradients        run the reduction of a backward's end separately, in a pipeline schedule
    part_of_backward        run a backward in several calls of autograd; `end_backward` ends it
    accumulate_on           the CUDA stream on which autograd adds gradients of parameters
    before_reductions       a call before FSDP takes the gradients of a unit
    bypass_reduction        skip the reduction for parameters that are not sharded
    sharded_tensor          the tensor on which FSDP looks up all-gather hooks (float8)
    gathered_buffers        the memory of gathered parameters, for tracing

torch 2.11 and 2.13 keep the sum over micro-batches in a separate attribute, in the dtype of
reduction; in torch 2.15 the unsharded parameter's `.grad` is that sum, in the dtype of its
`grad_dtype`. `_sums_are_separate` distinguishes the two.

Private names used, tested with torch 2.11, 2.13 and 2.15: `_fsdp_param_group`, `_is_root`,
`_training_state` and `_root_post_backward_final_callback` of FSDP's state, and
`Tensor._post_accumulate_grad_hooks`. Without an underscore but undocumented: reduce_dtype,
param_dtype, fsdp_params, post_backward and reduce_grads of a parameter group; sharded_param,
unsharded_param, unsharded_grad_data, unsharded_grad_dtype, orig_dtype, to_sharded_dtensor and
all_gather_outputs of its parameters, and before torch 2.15 unsharded_accumulated_grad,
unsharded_accumulated_grad_data, accumulate_unsharded_grad_if_needed and
to_accumulated_grad_if_needed.

Source: torch.distributed.fsdp._fully_shard.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor


def _state(unit: FSDPModule) -> Any:
    return fully_shard.state(unit)  # type: ignore[attr-defined]


def parameter_groups(module: nn.Module) -> list[Any]:
    """Return the FSDP parameter groups of all FSDP units in a module, in the order of modules."""
    units = [unit for unit in module.modules() if isinstance(unit, FSDPModule)]
    groups = [_state(unit)._fsdp_param_group for unit in units]
    return list(dict.fromkeys(group for group in groups if group is not None))


@contextmanager
def forward_hooks_on(block: nn.Module, module: nn.Module) -> Iterator[None]:
    """Context manager: inside it, `fully_shard(module)` registers its forward hooks on `block`.

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
    """Add gradients in `.grad` to FSDP's sums over micro-batches, in the dtype of reduction.

    Call it after each W, the action that computes deferred weight gradients: otherwise these would
    be summed in the compute dtype. A plain backward without reduction does the same at its end.
    Parameters outside of FSDP units keep their `.grad`. A second call has no effect.
    """
    for group in parameter_groups(module):
        for parameter in group.fsdp_params:
            if _is_unsharded(parameter) and parameter.sharded_param.requires_grad:
                _accumulate(parameter)


class GradientSum:
    """FSDP's sum of a parameter's gradients over micro-batches, to which a matmul can add.

    FSDP reduces the sum, and then removes it, at the end of a backward with gradient sync. It also
    adds gradients that autograd leaves in `.grad`.
    """

    def __init__(self, parameter: Any, group: Any) -> None:
        self._parameter, self._group = parameter, group

    @property
    def is_open(self) -> bool:
        """Whether to add to the sum; else this backward reduces `.grad`, and there is no sum.

        A reduction needs one dtype for all gradients of a unit. Without earlier micro-batches, the
        gradients that autograd writes are in the dtype of computation.
        """
        if not self._group.reduce_grads:
            return True
        return self._is_separate and self._parameter.unsharded_accumulated_grad is not None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the sum, which is that of the reduction."""
        found = self._parameter
        if _sums_are_separate(found):
            return found.reduce_dtype or found.param_dtype or found.orig_dtype
        return found.unsharded_grad_dtype

    def get(self) -> Tensor | None:
        """Return the sum, with the placements over tp that autograd left; None: no sum yet."""
        _accumulate(self._parameter)  # a gradient of another use of the weight may be in `.grad`
        if self._is_separate:
            return self._parameter.unsharded_accumulated_grad
        return self._parameter.unsharded_param.grad

    def set(self, total: Tensor) -> None:
        """Make a tensor, with the placements of the unsharded weight, the sum."""
        if self._is_separate:
            self._parameter.unsharded_accumulated_grad = total
        else:
            self._parameter.unsharded_param.grad = total

    @property
    def _is_separate(self) -> bool:
        # Without a dtype of reduction that differs, FSDP leaves the sum to `.grad` in any torch.
        separate = _sums_are_separate(self._parameter)
        return separate and self._parameter.reduce_dtype is not None


def gradient_sums(module: nn.Module) -> dict[Tensor, GradientSum]:
    """Return {parameter: the sum of its gradients} of all FSDP units in a module."""
    return {
        parameter.sharded_param: GradientSum(parameter, group)
        for group in parameter_groups(module)
        for parameter in group.fsdp_params
    }


def _is_unsharded(parameter: Any) -> bool:
    """Whether the parameter has been gathered at least once."""
    return hasattr(parameter, "unsharded_param")


def _sums_are_separate(parameter: Any) -> bool:
    """Whether FSDP keeps sums over micro-batches in a separate attribute: torch before 2.15."""
    return hasattr(type(parameter), "unsharded_accumulated_grad_data")


def _accumulate(parameter: Any) -> None:
    if _sums_are_separate(parameter):
        parameter.accumulate_unsharded_grad_if_needed()
        parameter.to_accumulated_grad_if_needed()
        return
    unsharded, dtype = parameter.unsharded_param, parameter.unsharded_grad_dtype
    grad = unsharded.grad
    if grad is not None and grad.dtype != dtype:
        unsharded.grad_dtype = None  # allows both dtypes until `.grad` is replaced
        unsharded.grad = grad.to(dtype)
    unsharded.grad_dtype = dtype


def reduce_gradients(module: nn.Module, last: bool) -> None:
    """Reduce the accumulated gradients, as the end of a backward with gradient sync does.

    Earlier backwards must have run with `set_requires_gradient_sync(False)` and
    `set_is_last_backward(False)`.

    With replicas, each reduction includes the all-reduce over dp_replicate, so one reduction per
    step is cheaper. (FSDP could defer the all-reduce to the last reduction. But it would then add
    packed buffers, whose shapes differ if only the first reduction has gradients of norms.)

    Args:
        module: the root FSDP unit, after its first forward.
        last: whether this is the step's last micro-batch, after which parameters are freed.
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


def fsdp_units(root: nn.Module) -> list[FSDPModule]:
    """Return the FSDP units in a module, one module of each; the root unit is the first."""
    units = [unit for unit in root.modules() if isinstance(unit, FSDPModule)]
    return list({_state(unit): unit for unit in units}.values())


@contextmanager
def part_of_backward(units: Sequence[FSDPModule]) -> Iterator[None]:
    """Context manager: an autograd call inside it is a part of a backward.

    FSDP would otherwise take the end of each call for the end of the backward, and would not
    register its hooks in a forward that runs between two parts. Call `end_backward` after the last.

    Args:
        units: result of `fsdp_units`.
    """
    states = [(state, state._training_state) for state in map(_state, units)]
    for state, _ in states:
        # FSDP calls it at the end of a backward; at its first hook it stores which.
        state._root_post_backward_final_callback = _do_nothing
    try:
        yield
    finally:
        for state, before in states:
            del state._root_post_backward_final_callback
            state._training_state = before


def _do_nothing() -> None:
    pass


def end_backward(root: FSDPModule) -> None:
    """Do what FSDP does at the end of a backward; see `part_of_backward`."""
    _state(root)._root_post_backward_final_callback()


def accumulate_on(root: nn.Module, stream: torch.cuda.Stream) -> list[Any] | None:
    """Make autograd add gradients of gathered parameters on `stream`, and FSDP wait for them.

    Autograd adds a gradient on the stream that was current when the parameter was first used, as
    long as any graph uses it. With micro-batches on two streams that is the stream of either, which
    would wait for the other. FSDP reads gradients on the current stream without a wait.

    Args:
        root: the root FSDP unit, between two steps.
    Returns:
        Autograd nodes to keep as long as gradients are added on this stream; None if a parameter
        has not been gathered yet, which the first forward does.
    """
    groups = parameter_groups(root)
    trained = [p for g in groups for p in g.fsdp_params if p.sharded_param.requires_grad]
    if not all(map(_is_unsharded, trained)):
        return None
    before_reductions(root, lambda: torch.cuda.current_stream().wait_stream(stream))
    with torch.cuda.stream(stream):
        return [torch.autograd.graph.get_gradient_edge(p.unsharded_param).node for p in trained]


def before_reductions(root: nn.Module, call: Callable[[], None]) -> None:
    """Make FSDP call `call` at the end of each unit's backward, before it takes the gradients.

    The backward of the unit's modules is complete by then: FSDP waits for the gradient of their
    inputs.
    """
    for group in parameter_groups(root):
        group.post_backward = functools.partial(_call_before, call, group.post_backward)


def _call_before(call: Callable[[], None], post_backward: Callable[[], None], *_: Any) -> None:
    call()
    post_backward()


def bypass_reduction(unit: FSDPModule) -> None:
    """Make an FSDP unit set `.grad` without a reduction, for parameters that are not sharded.

    Their gradients are already the sums. FSDP would pack them into one buffer and copy this buffer
    to a second one, allocated on a separate stream. Packing takes host time proportional to the
    bytes (8 ms for 277M gradients, in chunk_cat), and one stream cannot reuse the memory of
    another. Without packing, each gradient costs one cast kernel.

    FSDP's hooks and factors of reductions (`set_all_reduce_hook`, `set_gradient_divide_factor`)
    have no effect on such units.
    """
    group = _state(unit)._fsdp_param_group
    if group is not None:
        group.post_backward = functools.partial(_post_backward, group, group.post_backward)


def _post_backward(group: Any, post_backward: Callable[[], None], *_: Any) -> None:
    """Call FSDP's `post_backward` without its reduction, then set `.grad`.

    `post_backward` then only adds to the sum over micro-batches and frees parameters.
    """
    if not all(map(_is_unsharded, group.fsdp_params)):
        return  # the FSDP unit has had no forward yet
    reduces, group.reduce_grads = group.reduce_grads, False
    try:
        post_backward()
    finally:  # also after an error, such as out of memory, after which the caller may continue
        group.reduce_grads = reduces
    if reduces:
        for parameter in group.fsdp_params:
            _set_sharded_grad(parameter)


@torch.no_grad()
def _set_sharded_grad(parameter: Any) -> None:
    """Add the gradient of the unsharded parameter to the `.grad` of the sharded parameter."""
    grad = _take_gradient(parameter)
    if grad is None:
        return
    sharded = parameter.sharded_param
    local = grad.to(parameter.orig_dtype).contiguous()
    if sharded.grad is not None:
        sharded.grad.to_local().add_(local)
    else:
        sharded.grad = parameter.to_sharded_dtensor(local)
    for hook in (getattr(sharded, "_post_accumulate_grad_hooks", None) or {}).values():
        hook(sharded)  # as FSDP does


def _take_gradient(parameter: Any) -> Tensor | None:
    """Remove the accumulated gradient of the unsharded parameter; return it as a plain tensor."""
    if _sums_are_separate(parameter) and parameter.unsharded_accumulated_grad is not None:
        grad = parameter.unsharded_accumulated_grad_data
        parameter.unsharded_accumulated_grad = None
        return grad
    if parameter.unsharded_param.grad is None:
        return None
    grad = parameter.unsharded_grad_data
    parameter.unsharded_param.grad = None
    return grad


def sharded_tensor(parameter: DTensor) -> Tensor:
    """Return a DTensor's local tensor, the object on which FSDP looks up `fsdp_pre_all_gather`.

    For a parameter, `DTensor.to_local` returns another object since torch 2.15.
    """
    (name, *_mesh), _ = parameter.__tensor_flatten__()  # since torch 2.13 also the mesh
    return getattr(parameter, name)


def gathered_buffers(groups: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the flat tensors that hold the gathered parameters of FSDP groups.

    The storage of a freed tensor has size zero.
    """
    for group in groups:
        for parameter in group.fsdp_params:
            yield from parameter.all_gather_outputs
