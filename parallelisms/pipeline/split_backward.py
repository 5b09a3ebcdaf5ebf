"""Weight gradients apart from the backward: the W of zero-bubble schedules.

The backward B of a linear y = x w^T is two products. The gradient of the input is due at once, as
the stage before waits for it; the gradient of the weight can be computed whenever there is time:

    B = I + W      I: grad_x = grad_y w        W: grad_w = grad_y^T x

`defer` makes each nn.Linear, and each matrix of experts, hand (grad_y, x) to a queue in I;
`WeightGradients.run` is W. All else (norms, biases, embeddings) is done in I. The forward is
F.linear or a grouped product as before, so that recomputation finds its products; block and graph
are the same with deferral and without it.

    gradients = defer([stage])               # before FSDP; DTensor weights are fine
    with gradients.collect(micro_batch):     # I
        torch.autograd.backward(output, output_gradient)
    gradients.run(micro_batch)               # W, any time later
    accumulate_gradients(stage)              # FSDP: into the sum over micro-batches
    reduce_gradients(stage, last=True)       # FSDP: what a backward with reduction does at its end

The last two are of `torch_internals.py`. torch's own split (torch.distributed.pipelining) walks the
autograd graph, in which a compiled block is one node that cannot be split.

To compile: `defer([stage], compiled=True)`, then, under inductor, `options=COMPILE_OPTIONS`.

From I to W the queue holds the inputs and output gradients of all these, also of blocks that
recompute. Gradients reach `.grad` directly, not through autograd: torch.autograd.grad and hooks on
these weights do not see them.

Source: Zero Bubble Pipeline Parallelism, arXiv:2401.10241.
"""

import itertools
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Replicate, Shard
from torch.nn import functional as F

from dtron.kernels.grouped import grouped_gradient, grouped_matmul

COMPILE_OPTIONS: dict[str, Any] = {"allow_buffer_reuse": False, "inplace_buffers": False}
"""Options of torch.compile that blocks with deferred weight gradients need under inductor.

Inductor writes new values into a buffer after its last use in the graph, also into activations
saved by the forward, and knows nothing of the queue that still holds it. With these two it
allocates anew; what nobody holds goes back to the allocator, so that the peak grows by no more than
a few activations of one block.
"""


@dataclass(frozen=True)
class _Item:
    weight: Tensor
    """The parameter whose `.grad` is added to: under FSDP the unsharded one."""
    grad: Tensor
    """(tokens, out)"""
    x: Tensor
    """(tokens, in)"""
    offsets: Tensor | None = None
    """Of experts, int32 (E,): where the rows of each end. The weight is (E, out, in)."""


class WeightGradients:
    """Weight gradients of one stage that are still to be computed, by micro-batch.

    Outside of `collect` weight gradients are added at once, as by a plain backward.
    """

    def __init__(self, compiled: bool = False) -> None:
        self.compiled = compiled
        self._queues: dict[Hashable, deque[_Item]] = {}
        self._collecting: deque[_Item] | None = None

    @contextmanager
    def collect(self, key: Hashable) -> Iterator[None]:
        """Queue the weight gradients of the backward that runs inside.

        Args:
            key: the micro-batch; several may be in flight.
        Raises:
            RuntimeError: another backward of the stage is being collected, or this key's weight
                gradients have not been run yet.
        """
        if self._collecting is not None or key in self._queues:
            raise RuntimeError(f"weight gradients of micro-batch {key} are already being collected")
        self._collecting = deque()
        try:
            yield
            self._queues[key] = self._collecting
        finally:
            self._collecting = None

    def run(self, key: Hashable) -> None:
        """Add the weight gradients of a collected backward to `.grad`, first queued first.

        Each pair (grad_y, x) is freed as soon as it is used.

        Raises:
            RuntimeError: no backward was collected under this key, or it has been run.
        """
        if key not in self._queues:
            raise RuntimeError(f"no weight gradients of micro-batch {key} are queued")
        queue = self._queues.pop(key)
        while queue:
            _add_weight_gradient(queue.popleft())

    def pending(self, key: Hashable) -> int:
        """How many weight gradients of a micro-batch are still to be computed."""
        return len(self._queues.get(key, ()))

    def take(self, item: _Item) -> None:
        """Queue an item if a backward is being collected, else compute it now."""
        if self._collecting is None:
            _add_weight_gradient(item)
        else:
            self._collecting.append(item)


def defer(modules: Iterable[nn.Module], compiled: bool = False) -> WeightGradients:
    """Make the nn.Linear layers and experts under these modules queue their weight gradients, in
    place.

    Parameters keep their names: only the `forward` of linears and the `product` of experts are
    replaced. Subclasses of nn.Linear and experts whose `multiply` is not `grouped_matmul`, which
    compute something else (float8), are left alone.

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
        if type(module) is nn.Linear:
            _replace(module, "forward", _LinearLayer(module, gradients).forward)
        elif getattr(module, "multiply", None) is grouped_matmul and hasattr(module, "product"):
            _replace(module, "product", _ExpertLayer(module, gradients).product)
    return gradients


def _replace(module: nn.Module, name: str, call: Callable[..., Tensor]) -> None:
    if name in vars(module):
        raise ValueError(f"the {name} of {type(module).__name__} has already been replaced")
    setattr(module, name, call)


class _Site:
    """A weight and the queues of its stage."""

    def __init__(self, module: nn.Module, name: str, gradients: WeightGradients) -> None:
        self.module, self.name = module, name
        self.gradients = gradients
        number = next(_NUMBERS)
        # A tensor, since a Python number would be a constant of the graph: blocks share one graph.
        # On the CPU, where it can be read without waiting for a device.
        self.number = torch.tensor(number, dtype=torch.int64, device="cpu")
        _SITES[number] = self

    def take(self, grad: Tensor, x: Tensor, offsets: Tensor | None = None) -> None:
        # Inside a unit's backward the module holds the parameter that the forward used: FSDP puts
        # the unsharded one there.
        self.gradients.take(_Item(getattr(self.module, self.name), grad, x, offsets))


class _LinearLayer:
    """One linear."""

    def __init__(self, module: nn.Linear, gradients: WeightGradients) -> None:
        self.module, self.site = module, _Site(module, "weight", gradients)

    def forward(self, input: Tensor) -> Tensor:
        """nn.Linear.forward."""
        weight, bias = self.module.weight, self.module.bias
        if not _puts_off(input, weight, self.site):
            return F.linear(input, weight, bias)
        if isinstance(weight, DTensor):
            return _split_linear(input, weight, bias, self.site.number)
        return _linear(input, weight.detach(), bias, self.site.number)


class _ExpertLayer:
    """The matrices of a layer's experts."""

    def __init__(self, module: Any, gradients: WeightGradients) -> None:
        matrices = [name for name, p in module.named_parameters(recurse=False) if p.dim() == 3]
        self.module = module
        self.sites = {name: _Site(module, name, gradients) for name in matrices}

    def product(self, name: str, x: Tensor, offsets: Tensor) -> Tensor:
        """Of experts: by this rank's part, as `own` gives it."""
        weight = self.module.own(name)
        if not _puts_off(x, weight, self.sites[name]):
            return grouped_matmul(x, weight, offsets)
        return _Grouped.apply(x, weight.detach(), offsets, self.sites[name].number)  # type: ignore[return-value]


def _puts_off(x: Tensor, weight: Tensor, site: _Site) -> bool:
    """An input that needs no gradient has no I: its weight gradient is all of B."""
    if not (torch.is_grad_enabled() and x.requires_grad and weight.requires_grad):
        return False
    if torch.compiler.is_compiling() and not site.gradients.compiled:
        raise RuntimeError(
            "inductor would overwrite what deferred weight gradients still need; call "
            "defer(..., compiled=True) and compile with "
            "options=dtron.parallelisms.pipeline.split_backward.COMPILE_OPTIONS"
        )
    return True


# An operator takes tensors and numbers, no objects, hence a table of the process. It changes only
# when layers are made or freed; what a backward changes is in the WeightGradients of its stage. So
# it does not matter that autograd runs the backward of CUDA tensors on threads of its own, where
# thread-local and context variables of the caller are not seen.
_NUMBERS = itertools.count()
_SITES: WeakValueDictionary[int, _Site] = WeakValueDictionary()


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
        grad_x = linear_input_gradient(grad, x, weight, number, _call(grad))
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.has_bias else None
        return grad_x, None, grad_bias, None


class _Grouped(torch.autograd.Function):
    """`grouped_matmul` whose backward leaves the weight gradient to `grouped_input_gradient`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, offsets: Tensor, number: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, offsets, number)
        return grouped_matmul(x, weight, offsets)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, offsets, number = ctx.saved_tensors
        grad_x = grouped_input_gradient(grad, x, weight, offsets, number, _call(grad))
        return grad_x, None, None, None


def _call(grad: Tensor) -> Tensor:
    """Empty. Two calls with equal arguments would be merged into one in a compiled graph, as if the
    operator were a pure function; results of torch.empty are never taken for equal."""
    return torch.empty(0, device=grad.device)


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
    _SITES[int(number)].take(rows, x_rows)
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
    _SITES[int(number)].take(grad, x, offsets)
    return grouped_matmul(grad, weight.transpose(-2, -1), offsets)


grouped_input_gradient = torch.library.custom_op(
    "dtron::grouped_input_gradient", run_grouped_input_gradient, mutates_args=()
)


@grouped_input_gradient.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, offsets: Tensor, number: Tensor, call: Tensor
) -> Tensor:
    return x.new_empty(x.shape)


@torch.no_grad()
def _add_weight_gradient(item: _Item) -> None:
    """weight.grad += grad^T x, of each expert by its own rows."""
    weight, grad, x, offsets = item.weight, item.grad, item.x, item.offsets
    due = _placed_as(weight)
    if offsets is None and due is not None and due.dtype == grad.dtype:
        due.addmm_(grad.t(), x)
        return
    found = grad.t() @ x if offsets is None else grouped_gradient(grad, x, offsets)
    if due is None:
        weight.grad = _like(weight, found.to(weight.grad_dtype or found.dtype))
    else:
        due.add_(found)


def _placed_as(weight: Tensor) -> Tensor | None:
    """The local part of a weight's gradient so far, in the weight's own layout. That of an
    embedding that shares the weight is a part of a sum over tp, as autograd leaves it."""
    grad = weight.grad
    if isinstance(grad, DTensor) and isinstance(weight, DTensor):
        if grad.placements != weight.placements:
            weight.grad = grad = grad.redistribute(placements=weight.placements)
        return grad.to_local()
    return grad


def _like(weight: Tensor, local: Tensor) -> Tensor:
    if not isinstance(weight, DTensor):
        return local
    return DTensor.from_local(local, weight.device_mesh, weight.placements, run_check=False)
