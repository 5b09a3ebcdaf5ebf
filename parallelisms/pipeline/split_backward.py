"""Split the backward into I and W for zero-bubble schedules: defer weight gradients.

The backward B of a linear y = x w^T is two matmuls. The previous stage waits for the gradient of
the input; the gradient of the weight can be computed later:

    B = I + W      I: grad_x = grad_y w        W: grad_w = grad_y^T x

`defer` makes each nn.Linear, and each matrix of experts, put (grad_y, x) into a queue in I;
`WeightGradients.run` is W. All other gradients (norms, biases, embeddings) are computed in I. The
forward is still F.linear or a grouped matmul, so that selective recomputation recognizes it. Layers
with custom matmuls (float8) queue their own operands: `DefersWeightGradient`, `DeferredMultiply`.

    gradients = defer([stage])               # before FSDP; DTensor weights are fine
    with gradients.collect(micro_batch):     # I
        torch.autograd.backward(output, output_gradient)
    gradients.run(micro_batch)               # W, any time later
    accumulate_gradients(stage)              # FSDP: add to the sum over micro-batches
    reduce_gradients(stage, last=True)       # FSDP: reduce, as at the end of a backward

`accumulate_gradients` and `reduce_gradients` are in `fsdp/torch_internals.py`.
torch.distributed.pipelining splits the backward by traversing the autograd graph; it cannot split a
compiled block, which is a single node there.

To compile: `defer([stage], compiled=True)`, then, with inductor, `options=COMPILE_OPTIONS`.

From I to W the queue keeps the inputs and output gradients of all these layers alive, also in
blocks that recompute. W adds weight gradients to `.grad` itself, without autograd: hooks on these
weights do not run, and torch.autograd.grad does not return their gradients.

Source: Zero Bubble Pipeline Parallelism, arXiv:2401.10241.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard
from torch.nn import functional as F

from dtron.kernels.grouped import grouped_matmul
from dtron.parallelisms.pipeline.weight_gradients import (
    DeferringLinear,
    GroupedMatmul,
    LinearMatmul,
    Site,
    WeightGradients,
    call_of,
    site_of,
)

COMPILE_OPTIONS: dict[str, Any] = {"allow_buffer_reuse": False, "inplace_buffers": False}
"""Options of torch.compile that inductor needs for blocks with deferred weight gradients.

By default inductor reuses a buffer, also a saved activation, after its last use in the graph, and
would overwrite tensors in the queue. With these options it allocates new buffers; peak memory grows
by at most a few activations of one block.
"""


@runtime_checkable
class DefersWeightGradient(Protocol):
    """A module that queues the weight gradient of its custom matmul."""

    def defer_weight_gradient(self, gradients: WeightGradients) -> None:
        """Queue the weight gradient in all later backwards. Raises ValueError: called twice."""


@runtime_checkable
class DeferredMultiply(Protocol):
    """A grouped matmul (the `multiply` of experts) that can queue its weight gradient."""

    def deferred(self, x: Tensor, weight: Tensor, offsets: Tensor, number: Tensor) -> Tensor:
        """Compute `grouped_matmul`; the backward queues the weight gradient at a site.

        Args:
            weight: detached.
            number: number of the weight's `Site`.
        """
        ...


def defer(modules: Iterable[nn.Module], compiled: bool = False) -> WeightGradients:
    """Make nn.Linear layers and experts in these modules queue their weight gradients, in place.

    Only the `forward` of linears and the `product` of experts are replaced, so parameters keep
    their FQNs. For modules with `defer_weight_gradient`, that method is called instead. Other
    subclasses of nn.Linear, and experts with another `multiply`, are unchanged.

    Args:
        compiled: whether torch.compile may trace these modules. If not, tracing raises an error,
            since inductor without COMPILE_OPTIONS would give wrong gradients.
    Returns:
        The queues of one pipeline stage.
    Raises:
        ValueError: a `forward` or `product` has already been replaced, for example by `defer`.
    """
    gradients = WeightGradients(compiled)
    for module in {m: None for root in modules for m in root.modules()}:
        multiply = getattr(module, "multiply", None) if hasattr(module, "product") else None
        if type(module) is nn.Linear:
            _replace(module, "forward", _DeferringLinearForward(module, gradients).forward)
        elif isinstance(module, DefersWeightGradient):
            module.defer_weight_gradient(gradients)
        elif multiply is grouped_matmul:
            experts = _DeferringExperts(module, gradients, _deferred_grouped_matmul)
            _replace(module, "product", experts.product)
        elif isinstance(multiply, DeferredMultiply):
            experts = _DeferringExperts(module, gradients, multiply.deferred)
            _replace(module, "product", experts.product)
    return gradients


def accumulate_in_matmuls(stage: nn.Module, compiled: bool = False) -> WeightGradients:
    """Make layers compute their weight gradients outside of autograd, immediately, in place.

    After `WeightGradients.add_to_sums` their matmuls add to FSDP's sums over micro-batches. This
    concerns nn.Linear, experts, and float8 layers whose recipe keeps the weight gradient in high
    precision. Layers that `defer` has replaced, and layers whose weight gradient overlaps with
    communication or is a float8 matmul, whose kernels cannot add to a sum, are unchanged.

    Args:
        compiled: whether torch.compile may trace the stage; no COMPILE_OPTIONS are needed.
    """
    gradients = WeightGradients(compiled)
    for module in stage.modules():
        if type(module) is nn.Linear and "forward" not in vars(module):
            module.forward = _DeferringLinearForward(module, gradients).forward
        elif isinstance(module, DeferringLinear) and module.adds_in_matmul and not module.site:
            module.defer_weight_gradient(gradients)
        elif getattr(module, "multiply", None) is grouped_matmul and "product" not in vars(module):
            experts = _DeferringExperts(module, gradients, _deferred_grouped_matmul)
            module.product = experts.product  # type: ignore[assignment]
    return gradients


def _replace(module: nn.Module, name: str, call: Callable[..., Tensor]) -> None:
    if name in vars(module):
        raise ValueError(f"the {name} of {type(module).__name__} has already been replaced")
    setattr(module, name, call)


class _DeferringLinearForward:
    """Forward of an nn.Linear with a deferred weight gradient."""

    def __init__(self, module: nn.Linear, gradients: WeightGradients) -> None:
        self.module, self.site = module, Site(module, "weight", gradients)

    def forward(self, input: Tensor) -> Tensor:
        """Compute nn.Linear.forward; its backward queues the weight gradient."""
        weight, bias = self.module.weight, self.module.bias
        if not self.site.defers(input, weight):
            return F.linear(input, weight, bias)
        if isinstance(weight, DTensor):
            return _split_linear(input, weight, bias, self.site.number)
        return _linear(input, weight.detach(), bias, self.site.number)


class _DeferringExperts:
    """Grouped matmuls of a layer's experts, with deferred weight gradients."""

    def __init__(
        self, module: Any, gradients: WeightGradients, deferred: Callable[..., Tensor]
    ) -> None:
        matrices = [name for name, p in module.named_parameters(recurse=False) if p.dim() == 3]
        self.module, self.deferred = module, deferred
        self.sites = {name: Site(module, name, gradients) for name in matrices}

    def product(self, name: str, x: Tensor, offsets: Tensor) -> Tensor:
        """Multiply tokens by this rank's shard of the experts' matrix `name`.

        The backward queues the weight gradient. x: (N, K), sorted by expert; result: (N, M).
        """
        weight, site = self.module.own(name), self.sites[name]
        if not site.defers(x, weight):
            return self.module.multiply(x, weight, offsets)
        return self.deferred(x, weight.detach(), offsets, site.number)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor) -> Tensor:
    return _Linear.apply(x, weight, bias, number)  # type: ignore[return-value]


def _split_linear(x: Tensor, weight: DTensor, bias: Any, number: Tensor) -> Tensor:
    """Apply a linear, whose weight is sharded by rows or columns over a 1-D mesh, to local tensors.

    With other placements, F.linear runs on DTensors and the weight gradient is not deferred.
    """
    if not isinstance(x, DTensor):
        return F.linear(x, weight, bias)
    mesh, last = weight.device_mesh, Shard(x.dim() - 1)
    # Detached: the weight's gradient bypasses autograd, which would replace None by zeros.
    local = weight.detach().to_local()  # type: ignore[attr-defined]
    layout = (*x.placements, *weight.placements)
    if layout == (Replicate(), Shard(0)):
        bias = None if bias is None else bias.to_local()
        out = _linear(x.to_local(grad_placements=[Partial()]), local, bias, number)
        return DTensor.from_local(out, mesh, [last], run_check=False)
    if layout == (last, Shard(1)):
        out = _linear(x.to_local(), local, None, number)
        out = DTensor.from_local(out, mesh, [Partial()], run_check=False)
        # DTensor adds a replicated bias to one rank's partial sum, so that it counts once.
        return out if bias is None else out + bias
    return F.linear(x, weight, bias)


class _Linear(torch.autograd.Function):
    """F.linear whose backward queues the weight gradient, by `linear_input_gradient`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, number)
        ctx.has_bias = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, number = ctx.saved_tensors
        grad_x = torch.ops.dtron.linear_input_gradient(grad, x, weight, number, call_of(grad))
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.has_bias else None
        return grad_x, None, grad_bias, None


def _deferred_grouped_matmul(x: Tensor, weight: Tensor, offsets: Tensor, number: Tensor) -> Tensor:
    """Apply `grouped_matmul` to a detached weight; the backward queues the weight gradient.

    Args:
        number: number of the weight's `Site`.
    """
    return _Grouped.apply(x, weight, offsets, number)  # type: ignore[return-value]


class _Grouped(torch.autograd.Function):
    """`grouped_matmul` whose backward queues the weight gradient, by `grouped_input_gradient`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor, number: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offsets, number)
        return grouped_matmul(x, weight, offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, offsets, number = ctx.saved_tensors
        operands = (grad, x, weight, offsets, number, call_of(grad))
        grad_x = torch.ops.dtron.grouped_input_gradient(*operands)
        return grad_x, None, None, None


def run_linear_input_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, number: Tensor, call: Tensor
) -> Tensor:
    """Compute the gradient of a linear's input, and queue (grad, x) for the weight gradient.

    The operator's schema does not declare this side effect. The compiler never removes the call,
    since its result is always needed: the operator is used only if x requires a gradient.

    Args:
        grad: (..., out), gradient of the output.
        x: (..., in), the input.
        weight: (out, in); all in one dtype and on one device.
        number: int64 scalar on the CPU, key of the weight's `Site`.
        call: (0,), from `call_of`; keeps the compiler from merging equal calls.
    Returns:
        (..., in), contiguous.
    """
    rows, x_rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    site_of(number).take(LinearMatmul(rows, x_rows))
    return (rows @ weight).view(x.shape)


# Not custom_op, whose calls cost the host 80 microseconds more, as much as both matmuls.
torch.library.define(
    "dtron::linear_input_gradient",
    "(Tensor grad, Tensor x, Tensor weight, Tensor number, Tensor call) -> Tensor",
    tags=torch.Tag.needs_exact_strides,
)
torch.library.impl("dtron::linear_input_gradient", "default", run_linear_input_gradient)


@torch.library.register_fake("dtron::linear_input_gradient")
def _(grad: Tensor, x: Tensor, weight: Tensor, number: Tensor, call: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def run_grouped_input_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, number: Tensor, call: Tensor
) -> Tensor:
    """Compute the gradient of `grouped_matmul`'s x, and queue the operands of the weight gradient.

    Args:
        grad: (N, M), gradient of the result.
        x: (N, K), sorted by expert.
        weight: (E, M, K); all in one dtype and on one device.
        offsets: int32 (E,), end of each expert's tokens.
        number: int64 scalar on the CPU, key of the weight's `Site`.
        call: (0,), from `call_of`; keeps the compiler from merging equal calls.
    Returns:
        (N, K); rows after the last expert's rows are undefined.
    """
    grad = grad.contiguous()
    site_of(number).take(GroupedMatmul(grad, x, offsets))
    return grouped_matmul(grad, weight.transpose(-2, -1), offsets)


torch.library.define(
    "dtron::grouped_input_gradient",
    "(Tensor grad, Tensor x, Tensor weight, Tensor offsets, Tensor number, Tensor call) -> Tensor",
    tags=torch.Tag.needs_exact_strides,
)
torch.library.impl("dtron::grouped_input_gradient", "default", run_grouped_input_gradient)


@torch.library.register_fake("dtron::grouped_input_gradient")
def _(
    grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, number: Tensor, call: Tensor
) -> Tensor:
    return x.new_empty(x.shape)
