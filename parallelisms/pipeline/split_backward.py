"""Weight gradients apart from the backward: the W of zero-bubble schedules.

The backward B of a linear y = x w^T is two products. The gradient of the input is due at once, as
the stage before waits for it; the gradient of the weight can be computed whenever there is time:

    B = I + W      I: grad_x = grad_y w        W: grad_w = grad_y^T x

`defer` makes each nn.Linear, and each matrix of experts, hand (grad_y, x) to a queue in I;
`WeightGradients.run` is W. All else (norms, biases, embeddings) is done in I. The forward is
F.linear or a grouped product as before, so that recomputation finds its products; block and graph
are the same with deferral and without it. Layers with matmuls of their own (float8) queue what W
computes theirs from: `DefersWeightGradient`, `DeferredMultiply`.

    gradients = defer([stage])               # before FSDP; DTensor weights are fine
    with gradients.collect(micro_batch):     # I
        torch.autograd.backward(output, output_gradient)
    gradients.run(micro_batch)               # W, any time later
    accumulate_gradients(stage)              # FSDP: into the sum over micro-batches
    reduce_gradients(stage, last=True)       # FSDP: what a backward with reduction does at its end

The last two are in `fsdp/torch_internals.py`. torch's own split (torch.distributed.pipelining)
walks the autograd graph, in which a compiled block is one node that cannot be split.

To compile: `defer([stage], compiled=True)`, then, under inductor, `options=COMPILE_OPTIONS`.

From I to W the queue holds the inputs and output gradients of all these, also of blocks that
recompute. Gradients reach `.grad` directly, not through autograd: torch.autograd.grad and hooks on
these weights do not see them.

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
    GroupedMatmul,
    LinearMatmul,
    Site,
    WeightGradients,
    call_of,
    site_of,
)

COMPILE_OPTIONS: dict[str, Any] = {"allow_buffer_reuse": False, "inplace_buffers": False}
"""Options of torch.compile that blocks with deferred weight gradients need under inductor.

Inductor writes new values into a buffer after its last use in the graph, also into activations
saved by the forward, and knows nothing of the queue that still holds it. With these two it
allocates anew; what nobody holds goes back to the allocator, so that the peak grows by no more than
a few activations of one block.
"""


@runtime_checkable
class DefersWeightGradient(Protocol):
    """A module that queues the weight gradient of its own matmul."""

    def defer_weight_gradient(self, gradients: WeightGradients) -> None:
        """Queue it from now on. Raises ValueError the second time."""


@runtime_checkable
class DeferredMultiply(Protocol):
    """The `multiply` of experts whose weight gradient can be queued."""

    def deferred(self, x: Tensor, weight: Tensor, offsets: Tensor, number: Tensor) -> Tensor:
        """As `_deferred_grouped_matmul`."""
        ...


def defer(modules: Iterable[nn.Module], compiled: bool = False) -> WeightGradients:
    """Make the nn.Linear layers and experts under these modules queue their weight gradients, in
    place.

    Parameters keep their names: only the `forward` of linears and the `product` of experts are
    replaced; modules with `defer_weight_gradient` do it themselves. Other subclasses of nn.Linear,
    and experts with another `multiply`, are left alone.

    Args:
        compiled: whether torch.compile may trace these modules. They refuse it otherwise, since
            graphs of inductor without COMPILE_OPTIONS would give wrong gradients.
    Returns:
        The queues, for one pipeline stage.
    Raises:
        ValueError: a forward or a product has been replaced before, as by a second `defer`.
    """
    gradients = WeightGradients(compiled)
    for module in {m: None for root in modules for m in root.modules()}:
        multiply = getattr(module, "multiply", None) if hasattr(module, "product") else None
        if type(module) is nn.Linear:
            _replace(module, "forward", _LinearLayer(module, gradients).forward)
        elif isinstance(module, DefersWeightGradient):
            module.defer_weight_gradient(gradients)
        elif multiply is grouped_matmul:
            experts = _ExpertLayer(module, gradients, _deferred_grouped_matmul)
            _replace(module, "product", experts.product)
        elif isinstance(multiply, DeferredMultiply):
            experts = _ExpertLayer(module, gradients, multiply.deferred)
            _replace(module, "product", experts.product)
    return gradients


def _replace(module: nn.Module, name: str, call: Callable[..., Tensor]) -> None:
    if name in vars(module):
        raise ValueError(f"the {name} of {type(module).__name__} has already been replaced")
    setattr(module, name, call)


class _LinearLayer:
    """One linear."""

    def __init__(self, module: nn.Linear, gradients: WeightGradients) -> None:
        self.module, self.site = module, Site(module, "weight", gradients)

    def forward(self, input: Tensor) -> Tensor:
        """nn.Linear.forward."""
        weight, bias = self.module.weight, self.module.bias
        if not self.site.defers(input, weight):
            return F.linear(input, weight, bias)
        if isinstance(weight, DTensor):
            return _split_linear(input, weight, bias, self.site.number)
        return _linear(input, weight.detach(), bias, self.site.number)


class _ExpertLayer:
    """The matrices of a layer's experts."""

    def __init__(
        self, module: Any, gradients: WeightGradients, deferred: Callable[..., Tensor]
    ) -> None:
        matrices = [name for name, p in module.named_parameters(recurse=False) if p.dim() == 3]
        self.module, self.deferred = module, deferred
        self.sites = {name: Site(module, name, gradients) for name in matrices}

    def product(self, name: str, x: Tensor, offsets: Tensor) -> Tensor:
        """Of experts: by this rank's part, as `own` gives it."""
        weight, site = self.module.own(name), self.sites[name]
        if not site.defers(x, weight):
            return self.module.multiply(x, weight, offsets)
        return self.deferred(x, weight.detach(), offsets, site.number)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor) -> Tensor:
    return _Linear.apply(x, weight, bias, number)  # type: ignore[return-value]


def _split_linear(x: Tensor, weight: DTensor, bias: Any, number: Tensor) -> Tensor:
    """A linear whose weight is split over one mesh axis, by its rows or columns, on local tensors.

    Other layouts are left to DTensor and are not deferred.
    """
    if not isinstance(x, DTensor):
        return F.linear(x, weight, bias)
    mesh, last = weight.device_mesh, Shard(x.dim() - 1)
    # Detached: its gradient does not go through autograd, where None would become zeros.
    local = weight.detach().to_local()  # type: ignore[attr-defined]
    layout = (*x.placements, *weight.placements)
    if layout == (Replicate(), Shard(0)):
        bias = None if bias is None else bias.to_local()
        out = _linear(x.to_local(grad_placements=[Partial()]), local, bias, number)
        return DTensor.from_local(out, mesh, [last], run_check=False)
    if layout == (last, Shard(1)):
        out = _linear(x.to_local(), local, None, number)
        out = DTensor.from_local(out, mesh, [Partial()], run_check=False)
        # Added to parts of a sum, a whole bias goes to one of them: it counts once.
        return out if bias is None else out + bias
    return F.linear(x, weight, bias)


class _Linear(torch.autograd.Function):
    """F.linear whose backward leaves the weight gradient to `linear_input_gradient`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, number: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, number)
        ctx.has_bias = bias is not None
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, number = ctx.saved_tensors
        grad_x = linear_input_gradient(grad, x, weight, number, call_of(grad))
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.has_bias else None
        return grad_x, None, grad_bias, None


def _deferred_grouped_matmul(x: Tensor, weight: Tensor, offsets: Tensor, number: Tensor) -> Tensor:
    """`grouped_matmul` of a detached weight, whose gradient goes to the queue of a site."""
    return _Grouped.apply(x, weight, offsets, number)  # type: ignore[return-value]


class _Grouped(torch.autograd.Function):
    """`grouped_matmul` whose backward leaves the weight gradient to `grouped_input_gradient`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor, number: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offsets, number)
        return grouped_matmul(x, weight, offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, offsets, number = ctx.saved_tensors
        grad_x = grouped_input_gradient(grad, x, weight, offsets, number, call_of(grad))
        return grad_x, None, None, None


def run_linear_input_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, number: Tensor, call: Tensor
) -> Tensor:
    """Gradient of a linear's input; hands (grad, x) to the queue of the linear's stage.

    That side effect is not in the schema. It is safe from removal as the result is always needed:
    only inputs that need a gradient come here.

    Args:
        grad: (..., out), gradient of the output.
        x: (..., in), the input.
        weight: (out, in), all in one dtype and on one device.
        number: int64 scalar on the CPU: which weight.
        call: empty; tells two calls with equal arguments apart.
    Returns:
        (..., in), contiguous.
    """
    rows, x_rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    site_of(number).take(LinearMatmul(rows, x_rows))
    return (rows @ weight).view(x.shape)


linear_input_gradient = torch.library.custom_op(
    "dtron::linear_input_gradient", run_linear_input_gradient, mutates_args=()
)


@linear_input_gradient.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, number: Tensor, call: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def run_grouped_input_gradient(
    grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, number: Tensor, call: Tensor
) -> Tensor:
    """Gradient of the rows of `grouped_matmul`, likewise.

    Args:
        grad: (N, M), gradient of the product.
        x: (N, K), sorted by expert.
        weight: (E, M, K), all in one dtype and on one device.
        offsets: int32 (E,), where each expert's rows end.
        number, call: as above.
    Returns:
        (N, K); rows after the last expert's are anything.
    """
    grad = grad.contiguous()
    site_of(number).take(GroupedMatmul(grad, x, offsets))
    return grouped_matmul(grad, weight.transpose(-2, -1), offsets)


grouped_input_gradient = torch.library.custom_op(
    "dtron::grouped_input_gradient", run_grouped_input_gradient, mutates_args=()
)


@grouped_input_gradient.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, number: Tensor, call: Tensor
) -> Tensor:
    return x.new_empty(x.shape)
