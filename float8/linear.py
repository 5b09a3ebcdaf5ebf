"""A linear layer whose products are float8 by a recipe; its weight stays what it was.

    output       x8 w8^T       grad_input   g8 w8       grad_weight   g8^T x8

Under tp it works on local tensors, as `parallelisms/tensor/tensor_parallel.py` splits them. Whoever
holds a part of an operand that has one scale shares it (`whole` tiles of tensorwise): then every
layout of ranks computes what one process computes.

    weight is split       input            weight      grad
    not                   cp               -           cp
    not, own tokens       cp and tp        -           cp and tp
    by rows (colwise)     cp               tp          cp and tp
    by columns (rowwise)  cp and tp        tp          cp

Data-parallel ranks share nothing: a scale belongs to a micro-batch, and its rank holds all of it.
With delayed scales (delayed.py) nobody shares anything here: they are known before the step.

Kept for the backward: the float8 input where the recipe's cast serves both products, else the input
as it came; the weight, which FSDP gathers again, never a cast copy of it.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from dtron.errors import PlacementError
from dtron.float8.casting import (
    Scaled,
    magnitude,
    quantize,
    quantize_both,
    quantize_weight,
    turn_weight,
)
from dtron.float8.products import product
from dtron.float8.recipes import Cast, Recipe
from dtron.float8.weight_gradient import Operands, input_gradient
from dtron.parallelisms.pipeline.weight_gradients import DeferringLinear

Probe = Callable[[str, Tensor, Cast, tuple[str, ...], Tensor | None], None]
"""(operand: input, weight or grad; (M, S), the cast of its first product, who shares its scale, the
scale where it is known before) -> None."""


@dataclass(frozen=True)
class ScaleGroups:
    """Names of process groups whose ranks hold parts of one tensor; empty where they are none."""

    tp: tuple[str, ...] = ()
    cp: tuple[str, ...] = ()
    both: tuple[str, ...] = ()


@dataclass
class Delayed:
    """Scales of one layer that are known before its operands."""

    leaf: Tensor
    """float32 (2,), not used itself; its gradient is the largest magnitude of the input and of the
    output's gradient, so that each backward tells them once, however often the forward runs. Of a
    layer that one forward calls twice it would be their sum: too large, never too small."""
    scales: Tensor | None = None
    """float32 (3,), of input, weight and gradient; None: those of their values, which the ranks
    share."""

    def of(self, i: int) -> Tensor | None:
        """One of the scales, (1, 1)."""
        return one_of(self.scales, i)


@dataclass(frozen=True)
class MatmulSettings:
    """Of one call of a layer: its recipe, and who shares the scale of each operand."""

    recipe: Recipe
    emulate: bool
    input: tuple[str, ...]
    weight: tuple[str, ...]
    grad: tuple[str, ...]


class Float8Linear(DeferringLinear):
    """nn.Linear by a float8 recipe.

    Args:
        emulate: multiply in float32 what the float8 numbers stand for.
        groups: who shares scales.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        recipe: Recipe,
        emulate: bool,
        groups: ScaleGroups = ScaleGroups(),
    ) -> None:
        super().__init__(in_features, out_features, bias)
        self.recipe, self.emulate, self.groups = recipe, emulate, groups
        self.probe: Probe | None = None
        self.delayed: Delayed | None = None
        self.input_gradient: Placement = Partial()
        """Placement of the input's gradient where the weight is split by rows: a part of a sum; or
        Replicate() where what gathered the input sums it up itself."""

    @classmethod
    def of(
        cls, linear: nn.Linear, recipe: Recipe, emulate: bool, groups: ScaleGroups
    ) -> "Float8Linear":
        """The same layer in float8, with the linear's own parameters."""
        with torch.device("meta"):
            made = cls(linear.in_features, linear.out_features, False, recipe, emulate, groups)
        made.weight, made.bias = linear.weight, linear.bias
        return made

    def forward(self, input: Tensor) -> Tensor:
        """(..., K) -> (..., O), in the input's dtype."""
        if isinstance(self.weight, DTensor):
            return self._split(input, self.weight)
        shared = self.token_groups()
        out = self._multiply(input, self.weight, self._settings(shared, (), shared))
        return out if self.bias is None else out + self.bias

    def token_groups(self) -> tuple[str, ...]:
        """Groups whose ranks have other tokens of the micro-batch, if the weight is not split."""
        return self.groups.cp

    def extra_repr(self) -> str:
        """The recipe beside the sizes."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}, emulate={self.emulate}"

    def _split(self, x: Tensor, weight: DTensor) -> Tensor:
        """A weight split over tp, by its rows or columns, on local tensors."""
        layout = (*getattr(x, "placements", ()), *weight.placements)
        mesh, last, groups = weight.device_mesh, Shard(x.dim() - 1), self.groups
        bias: Any = self.bias
        if isinstance(x, DTensor) and layout == (Replicate(), Shard(0)):
            settings = self._settings(groups.cp, groups.tp, groups.both)
            local = x.to_local(grad_placements=[self.input_gradient])
            out = self._multiply(local, weight.to_local(), settings)
            out = out if bias is None else out + bias.to_local()
            return DTensor.from_local(out, mesh, [last], run_check=False)
        if isinstance(x, DTensor) and layout == (last, Shard(1)):
            settings = self._settings(groups.both, groups.tp, groups.cp)
            out = self._multiply(x.to_local(), weight.to_local(), settings)
            out = DTensor.from_local(out, mesh, [Partial()], run_check=False)
            # Added to parts of a sum, a whole bias goes to one of them: it counts once.
            return out if bias is None else out + bias
        raise PlacementError(
            f"a float8 layer whose input and weight are split as {layout}; use colwise() or "
            "rowwise(), or leave the layer out of float8.filter"
        )

    def settings_over_ranks(self) -> MatmulSettings:
        """Settings where each rank casts its shard of what is sent: shards of the input and of the
        gradient are on the ranks of tp and cp, of the weight on those of tp."""
        return self._settings(self.groups.both, self.groups.tp, self.groups.both)

    def _settings(
        self, input: tuple[str, ...], weight: tuple[str, ...], grad: tuple[str, ...]
    ) -> MatmulSettings:
        return MatmulSettings(self.recipe, self.emulate, input, weight, grad)

    def _multiply(self, x: Tensor, weight: Tensor, settings: MatmulSettings) -> Tensor:
        """(..., K) times the local weight (O, K), as it is or gathered in float8."""
        rows = x.reshape(-1, x.shape[-1])
        own, number = self.weight_of_call(rows, weight)
        out = _Linear.apply(rows, own, *gathered(weight), *ahead(self), number, settings)
        assert isinstance(out, Tensor)
        self.show(rows, weight, out, settings)
        return out.view(*x.shape[:-1], -1)

    def show(self, x: Tensor, weight: Tensor, out: Tensor, settings: MatmulSettings) -> None:
        """Tell the probe, where there is one, of a call's operands; a weight that came in float8
        was cast elsewhere.

        Args:
            x: (M, K), as it is cast.
            weight: (O, K), the rank's part.
            out: what the call gave, whose gradient is cast.
        """
        if self.probe is None:
            return
        of_x, of_weight = self._known(0), self._known(1)
        self.probe("input", x.detach(), settings.recipe.output.left, settings.input, of_x)
        if gathered(weight)[0] is None:
            cast = settings.recipe.output.right
            self.probe("weight", weight.detach(), cast, settings.weight, of_weight)
        if out.requires_grad:
            out.register_hook(functools.partial(self._show_grad, settings))

    def _show_grad(self, settings: MatmulSettings, grad: Tensor) -> None:
        if self.probe is not None:
            cast = settings.recipe.grad_input.left
            self.probe("grad", grad.detach(), cast, settings.grad, self._known(2))

    def _known(self, i: int) -> Tensor | None:
        return None if self.delayed is None else self.delayed.of(i)


class TokenwiseLinear(Float8Linear):
    """A layer whose weight is whole on each tp rank, which multiplies its own tokens."""

    def token_groups(self) -> tuple[str, ...]:
        """See `Float8Linear.token_groups`."""
        return self.groups.both


def gathered(weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Data and scale of a weight that was gathered in float8 (all_gather.py); else None."""
    return getattr(weight, "_data", None), getattr(weight, "_scale", None)


def ahead(layer: Float8Linear) -> tuple[Tensor | None, Tensor | None]:
    """Leaf and scales of a layer whose scales are delayed; else None."""
    delayed = layer.delayed
    return (None, None) if delayed is None else (delayed.leaf, delayed.scales)


def one_of(scales: Tensor | None, i: int) -> Tensor | None:
    """(1, 1), of the scales of `Delayed`; None where there are none."""
    return None if scales is None else scales[i].view(1, 1)


def largest(x: Tensor) -> Tensor:
    """The largest magnitude, float32 (1,)."""
    return magnitude(x).float().view(1)


# Without it dynamo of torch 2.11 gives gradients of zero, without a word, for a function whose
# result is made of casts alone. 2.13 does not need it.
@torch.compiler.allow_in_graph
class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        data: Tensor | None,
        scale: Tensor | None,
        leaf: Tensor | None,
        scales: Tensor | None,
        number: Tensor | None,
        settings: MatmulSettings,
    ) -> Tensor:
        """(N, K), (O, K) -> (N, O); `data` and `scale` are a weight that is float8 already, `leaf`
        and `scales` those of `Delayed`, `number` of the site that defers the weight's gradient."""
        recipe = settings.recipe
        of_x, of_weight = recipe.output.left, recipe.output.right
        x8 = quantize(x, of_x, settings.input, one_of(scales, 0))
        known = one_of(scales, 1)
        weight8 = quantize_weight(weight, data, scale, of_weight, settings.weight, known)
        seen = None if leaf is None else largest(x)
        keeps = recipe.grad_weight is not None and recipe.grad_weight.right == of_x and of_x.turns
        kept = (x8.data, x8.scale) if keeps else (x, None)
        held = weight if data is None else data
        ctx.save_for_backward(*kept, held, weight8.scale, seen, scales, number)
        ctx.settings, ctx.dtype = settings, x.dtype
        return product(x8, weight8, x.dtype, settings.emulate, recipe.output.fast_accumulation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, x_scale, weight, weight_scale, seen, scales, number = ctx.saved_tensors
        recipe, settings = ctx.settings.recipe, ctx.settings
        to_input, to_weight = recipe.grad_input, recipe.grad_weight
        grad_x = grad_weight = turned = None
        known = one_of(scales, 2)
        found = None if seen is None else torch.cat([seen, largest(grad)])
        if ctx.needs_input_grad[0]:
            due = ctx.needs_input_grad[1] or number is not None
            if due and to_weight == to_input and to_input.left.whole:
                grad8, turned = quantize_both(grad, to_input.left, settings.grad, known)
            else:
                grad8 = quantize(grad, to_input.left, settings.grad, known)
            if to_input.right == recipe.output.right and to_input.right.turns:
                weight8 = turn_weight(weight, weight_scale, to_input.right, grad)
            else:
                weight8 = quantize(weight.t(), to_input.right, settings.weight)
            deferred = []
            if number is not None:
                operands = _operands(grad, turned, x, x_scale, settings, known)
                deferred = [(number, operands)]
            emulate = settings.emulate
            grad_x = input_gradient(grad8, weight8, ctx.dtype, recipe, emulate, deferred)
        if ctx.needs_input_grad[1]:
            operands = _operands(grad, turned, x, x_scale, settings, known)
            grad_weight = operands.multiply(to_weight, ctx.dtype, settings.emulate, grad)
        return grad_x, grad_weight, None, None, found, None, None, None


def _operands(
    grad: Tensor,
    turned: Scaled | None,
    x: Tensor,
    x_scale: Tensor | None,
    settings: MatmulSettings,
    known: Tensor | None,
) -> Operands:
    """Of the weight's gradient.

    Args:
        grad: (N, O).
        turned: (O, N), if it has been cast already.
        x: (N, K), in float8 if it has a scale.
        known: the scale of the gradient, if it is known.
    """
    casts = settings.recipe.grad_weight
    if casts is None:
        return Operands(grad, x)
    left = turned or quantize(grad.t(), casts.left, settings.grad, known)
    if x_scale is None:
        return Operands.of(left, quantize(x.t(), casts.right, settings.input), (False, False))
    return Operands.of(left, Scaled(x, x_scale, casts.right), (False, True))
