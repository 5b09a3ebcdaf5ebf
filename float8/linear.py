"""Linear layer with the float8 matmuls of a recipe; its weight keeps its dtype.

    output       x8 w8^T       grad_input   g8 w8       grad_weight   g8^T x8

Shapes: input x (N tokens, K input features), gradient g (N, O output features), weight w (O, K).

Under tp the layer takes local tensors, split as `parallelisms/tensor/tensor_parallel.py` does;
`scales.py` defines which ranks share a scale.

Saved for the backward: the float8 input if the same cast serves grad_weight, else the input itself;
and the weight, which FSDP gathers again for the backward. No cast copy of the weight is saved.
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
from dtron.float8.casting import Scaled, quantize, quantize_both, quantize_weight, turn_weight
from dtron.float8.products import product
from dtron.float8.recipes import Cast, Recipe
from dtron.float8.scales import ScaleGroups, magnitude
from dtron.float8.weight_gradient import Operands, input_gradient
from dtron.parallelisms.pipeline.weight_gradients import DeferringLinear

Probe = Callable[[str, Tensor, Cast, tuple[str, ...], Tensor | None], None]
"""(operand: "input", "weight" or "grad"; its values (M, S); its cast in its first matmul; process
groups that share its scale; its scale, if already known) -> None."""


@dataclass
class Delayed:
    """Delayed scales of one layer, and the leaf that reports magnitudes for the next scales."""

    leaf: Tensor
    """float32 (2,), whose values are not used. Its gradient reports the amax of the input and of
    the output's gradient once per backward, even with recomputation. If one forward calls the layer
    twice, the gradient is the sum of both calls' amaxes, which is at least their maximum."""
    scales: Tensor | None = None
    """float32 (3,): scales of input, weight and gradient; None: each call computes its scales."""


@dataclass(frozen=True)
class MatmulSettings:
    """Settings of one call of a layer.

    These are the layer's recipe, and for each operand the process groups whose ranks share the
    scale.
    """

    recipe: Recipe
    emulate: bool
    input: tuple[str, ...]
    weight: tuple[str, ...]
    grad: tuple[str, ...]


class Float8Linear(DeferringLinear):
    """nn.Linear with the matmuls of a float8 recipe.

    Args:
        emulate: whether to multiply the dequantised operands in high precision.
        groups: process groups whose ranks share scales.
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
        """Placement of the input's gradient if the weight is split by rows; Replicate() if the
        function that gathered the input reduces the gradient."""

    @classmethod
    def of(
        cls, linear: nn.Linear, recipe: Recipe, emulate: bool, groups: ScaleGroups
    ) -> "Float8Linear":
        """Return a float8 layer that has the parameters of `linear`."""
        with torch.device("meta"):
            made = cls(linear.in_features, linear.out_features, False, recipe, emulate, groups)
        made.weight, made.bias = linear.weight, linear.bias
        return made

    def forward(self, input: Tensor) -> Tensor:
        """Multiply by the weight (O, K) in float8: (..., K) -> (..., O), in the input's dtype."""
        if isinstance(self.weight, DTensor):
            return self._split(input, self.weight)
        shared = self.token_groups()
        out = self._multiply(input, self.weight, self._settings(shared, (), shared))
        return out if self.bias is None else out + self.bias

    def token_groups(self) -> tuple[str, ...]:
        """Return the groups over cp, whose ranks have other tokens of the micro-batch.

        tp does not split the weight.
        """
        return self.groups.cp

    @property
    def adds_in_matmul(self) -> bool:
        """Whether the recipe computes the weight gradient in high precision."""
        return self.recipe.grad_weight is None

    def extra_repr(self) -> str:
        """Return sizes and recipe."""
        return f"{super().extra_repr()}, recipe={self.recipe.name}, emulate={self.emulate}"

    def _split(self, x: Tensor, weight: DTensor) -> Tensor:
        """Multiply by a weight that is sharded over tp by rows or columns."""
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
            # DTensor adds a replicated bias to one of the partial sums.
            return out if bias is None else out + bias
        raise PlacementError(
            f"float8 does not support an input and weight split as {layout}; use colwise() or "
            "rowwise(), or leave the layer out of float8.filter"
        )

    def _settings(
        self, input: tuple[str, ...], weight: tuple[str, ...], grad: tuple[str, ...]
    ) -> MatmulSettings:
        return MatmulSettings(self.recipe, self.emulate, input, weight, grad)

    def _multiply(self, x: Tensor, weight: Tensor, settings: MatmulSettings) -> Tensor:
        """Multiply x (..., K) by the local weight (O, K): (..., O)."""
        rows = x.reshape(-1, x.shape[-1])
        out = _Linear.apply(rows, *self.matmul_arguments(rows, weight), settings)
        assert isinstance(out, Tensor)
        self.run_probe(rows, weight, out, settings)
        return out.view(*x.shape[:-1], -1)

    def matmul_arguments(self, x: Tensor, weight: Tensor) -> tuple[Tensor | None, ...]:
        """Return the arguments of an autograd function that multiplies x by the layer's weight.

        Returns:
            (weight; its float8 data and scale, if FSDP gathered it in float8; leaf and scales of
            `Delayed`, if scales are delayed; number of the `Site` that defers the weight's
            gradient); values that do not apply are None.
        """
        local_weight, number = self.weight_of_call(x, weight)
        leaf = None if self.delayed is None else self.delayed.leaf
        return local_weight, *gathered_float8(weight), leaf, self._delayed_scales(), number

    def run_probe(self, x: Tensor, weight: Tensor, out: Tensor, settings: MatmulSettings) -> None:
        """Call the probe, if one is set, with the operands that a call casts.

        Args:
            x: (M tokens, K input features).
            weight: (O, K), the rank's shard.
            out: the call's result, whose gradient is cast.
        """
        if self.probe is None:
            return
        recipe, scales = settings.recipe, self._delayed_scales()
        self.probe("input", x.detach(), recipe.output.left, settings.input, scale_at(scales, 0))
        if gathered_float8(weight)[0] is None:
            cast, scale = recipe.output.right, scale_at(scales, 1)
            self.probe("weight", weight.detach(), cast, settings.weight, scale)
        if out.requires_grad:
            out.register_hook(functools.partial(self._probe_grad, settings))

    def _probe_grad(self, settings: MatmulSettings, grad: Tensor) -> None:
        if self.probe is not None:
            cast, scale = settings.recipe.grad_input.left, scale_at(self._delayed_scales(), 2)
            self.probe("grad", grad.detach(), cast, settings.grad, scale)

    def _delayed_scales(self) -> Tensor | None:
        return None if self.delayed is None else self.delayed.scales


class TokenwiseLinear(Float8Linear):
    """Float8Linear with a weight replicated over tp; each rank multiplies its own tokens.

    Layers that share an input, as in latent attention, each cast it. In a compiled block the casts
    and their all-reduces are common subexpressions, which AOTAutograd computes once.
    """

    def token_groups(self) -> tuple[str, ...]:
        """Return the groups over cp and tp, whose ranks have other tokens of the micro-batch."""
        return self.groups.both


def gathered_float8(weight: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Return data and scale of a weight gathered in float8 (all_gather.py); else (None, None)."""
    return getattr(weight, "_data", None), getattr(weight, "_scale", None)


def scale_at(scales: Tensor | None, i: int) -> Tensor | None:
    """Return scale i of `Delayed.scales`, (1, 1); None without delayed scales."""
    return None if scales is None else scales[i].view(1, 1)


def amax_of(x: Tensor) -> Tensor:
    """Return the largest magnitude of x, float32 (1,)."""
    return magnitude(x).float().view(1)


# Without allow_in_graph dynamo of torch 2.11 returns zero gradients, without an error, for a
# function whose result consists of casts only. 2.13 does not need it.
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
        """Multiply x (N, K) by weight (O, K): (N, O).

        The arguments after x are those of `Float8Linear.matmul_arguments`.
        """
        recipe = settings.recipe
        matmul, grad_weight = recipe.output, recipe.grad_weight
        x8 = quantize(x, matmul.left, settings.input, scale_at(scales, 0))
        weight_scale = scale_at(scales, 1)
        weight8 = quantize_weight(weight, data, scale, matmul.right, settings.weight, weight_scale)
        x_amax = None if leaf is None else amax_of(x)
        reused = grad_weight is not None and grad_weight.right == matmul.left and matmul.left.turns
        saved_x = (x8.data, x8.scale) if reused else (x, None)
        if number is None and not ctx.needs_input_grad[1]:  # a frozen weight
            saved_x = (None, None)
        saved_weight = weight if data is None else data
        ctx.save_for_backward(*saved_x, saved_weight, weight8.scale, x_amax, scales, number)
        ctx.settings, ctx.dtype = settings, x.dtype
        return product(x8, weight8, x.dtype, settings.emulate, matmul.fast_accumulation)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, x_scale, weight, weight_scale, x_amax, scales, number = ctx.saved_tensors
        settings, recipe, emulate = ctx.settings, ctx.settings.recipe, ctx.settings.emulate
        to_input, to_weight = recipe.grad_input, recipe.grad_weight
        grad_scale = scale_at(scales, 2)
        grad_x = grad_weight = grad8_t = None

        def weight_operands() -> Operands:
            if to_weight is None:
                return Operands(grad, x)
            left = grad8_t or quantize(grad.t(), to_weight.left, settings.grad, grad_scale)
            if x_scale is not None:
                return Operands.of(left, Scaled(x, x_scale, to_weight.right), (False, True))
            right = quantize(x.t(), to_weight.right, settings.input)
            return Operands.of(left, right, (False, False))

        if ctx.needs_input_grad[0]:
            both = ctx.needs_input_grad[1] or number is not None
            if both and to_weight == to_input and to_input.left.whole:
                grad8, grad8_t = quantize_both(grad, to_input.left, settings.grad, grad_scale)
            else:
                grad8 = quantize(grad, to_input.left, settings.grad, grad_scale)
            if recipe.casts_weight_once:
                weight8 = turn_weight(weight, weight_scale, to_input.right, grad)
            else:
                weight8 = quantize(weight.t(), to_input.right, settings.weight)
            deferred = [] if number is None else [(number, weight_operands())]
            grad_x = input_gradient(grad8, weight8, ctx.dtype, recipe, emulate, deferred)
        if ctx.needs_input_grad[1]:
            grad_weight = weight_operands().multiply(to_weight, ctx.dtype, emulate, grad)
        amax = None if x_amax is None else torch.cat([x_amax, amax_of(grad)])
        return grad_x, grad_weight, None, None, amax, None, None, None
