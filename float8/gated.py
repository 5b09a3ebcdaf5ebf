"""A gated feed-forward layer in float8 as one function: down(silu(gate(x)) * up(x)).

One cast of x serves gate and up. h = silu(gate) up and the gradients of gate and up are stored only
in float8: the kernels of `dtron/kernels/float8.py` compute and cast them from results of matmuls.
With ' for gradients:

    forward    x8 -> gate, up -> (amax, cast) -> h8 -> output
    backward   grad8 -> h' -> (amax, cast) -> gate8', up8', h8 -> gradients of x and of weights

Saved for the backward: x8, gate and up. The values are those of three separate layers, except that
h and the gradients of gate and up are not rounded to the dtype of computation before their casts.
With a `probe` the three layers run separately.

Shapes: N tokens, D width, F hidden width. Only for recipes with per-tensor scales.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dtron.float8.casting import Scaled, quantize, quantize_both, quantize_weight, turn_weight
from dtron.float8.linear import Float8Linear, amax_of, scale_at
from dtron.float8.products import product
from dtron.float8.scales import scale_of, shared
from dtron.float8.weight_gradient import Deferred, Operands, input_gradient
from dtron.kernels.float8 import (
    gated_amax,
    gated_backward_amax,
    gated_backward_cast,
    gated_cast,
)


class Float8GatedUnit(nn.Module):
    """Replacement of a module that computes down(silu(gate(x)) * up(x)).

    Args:
        gate, up: layers D -> F.
        down: layer F -> D. All three are unsharded, without biases, of one recipe with per-tensor
            scales.
    """

    def __init__(self, gate: Float8Linear, up: Float8Linear, down: Float8Linear) -> None:
        super().__init__()
        self.gate, self.up, self.down = gate, up, down

    @staticmethod
    def fits(module: nn.Module) -> bool:
        """Whether a module has the three float8 layers of a gated feed-forward, without biases."""
        layers = [getattr(module, name, None) for name in ("gate", "up", "down")]
        return all(
            isinstance(x, Float8Linear) and x.bias is None and x.recipe.shares_scales
            for x in layers
        )

    def forward(self, x: Tensor) -> Tensor:
        """Compute down(silu(gate(x)) * up(x)): (..., D) -> (..., D)."""
        layers = (self.gate, self.up, self.down)
        assert not any(isinstance(layer.weight, DTensor) for layer in layers), "tp is unsupported"
        if any(layer.probe is not None for layer in layers):
            return self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))
        rows = x.reshape(-1, x.shape[-1])
        calls = [layer.matmul_arguments(rows, layer.weight) for layer in layers]
        arguments = [value for kind in zip(*calls, strict=True) for value in kind]
        settings = (self.gate.recipe, self.gate.emulate, self.gate.groups.cp)
        out = _Gated.apply(rows, *arguments, settings)
        assert isinstance(out, Tensor)
        return out.view(x.shape)


@torch.compiler.allow_in_graph  # as in linear.py
class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *rest: Any) -> Tensor:
        """Compute the layer for x (N, D): (N, D).

        `rest`: `Float8Linear.matmul_arguments` of gate, up and down, grouped by kind, and settings.
        """
        *arguments, settings = rest
        recipe, emulate, groups = settings
        casts, fast = recipe.output, recipe.output.fast_accumulation
        high, data, scales, leaves, known, numbers = (arguments[i : i + 3] for i in range(0, 18, 3))
        leaf = leaves[0]
        weights = [
            quantize_weight(w, w8, scale, casts.right, known=scale_at(delayed, 1))
            for w, w8, scale, delayed in zip(high, data, scales, known, strict=True)
        ]
        x8 = quantize(x, casts.left, groups, scale_at(known[0], 0))
        gate, up = (product(x8, w8, x.dtype, emulate, fast) for w8 in weights[:2])
        scale, seen = scale_at(known[2], 0), None
        if scale is None or leaf is not None:
            amax = gated_amax(gate, up)
            seen = None if leaf is None else torch.cat([amax_of(x), amax.float().view(1)])
            scale = scale_of(shared(amax, groups), casts.left) if scale is None else scale
        h8 = Scaled(gated_cast(gate, up, scale, casts.left.dtype), scale, casts.left)
        held = [w if w8 is None else w8 for w, w8 in zip(high, data, strict=True)]
        others = (*known, *held, *(w8.scale for w8 in weights), *numbers)
        ctx.save_for_backward(x8.data, x8.scale, gate, up, scale, seen, *others)
        ctx.settings, ctx.dtype = settings, x.dtype
        return product(h8, weights[2], x.dtype, emulate, fast)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, x_scale, gate, up, scale, seen, *others = ctx.saved_tensors
        recipe, emulate, groups = ctx.settings
        known, held, scales, numbers = (others[i : i + 3] for i in (0, 3, 6, 9))

        def to_input(left: Scaled, i: int, deferred: Sequence[Deferred] = ()) -> Tensor:
            right = turn_weight(held[i], scales[i], recipe.grad_input.right, grad)
            return input_gradient(left, right, ctx.dtype, recipe, emulate, deferred)

        cast, of_x = recipe.grad_input.left, recipe.grad_weight.right
        grad8, grad8_turned = quantize_both(grad, cast, groups, scale_at(known[2], 2))
        of_h = to_input(grad8, 2)
        amax = gated_backward_amax(gate, up, of_h)
        if known[0] is None or known[1] is None:
            of_both = scale_of(shared(amax, groups), cast)
        else:
            of_both = torch.stack([known[0][2], known[1][2]])
        types = (cast.dtype, of_x.dtype)
        of_gate, of_up, h_turned = gated_backward_cast(gate, up, of_h, of_both, scale, *types)
        gate_scale, up_scale = of_both.view(2, 1, 1)
        gate8, up8 = Scaled(of_gate, gate_scale, cast), Scaled(of_up, up_scale, cast)
        x8, turns = Scaled(x, x_scale, of_x), True
        needed = ctx.needs_input_grad[1:4]
        if needed[0] or needed[1]:  # transpose x once for gate and up
            x8, turns = x8.turned(grad), False
        operands = (
            Operands.of(gate8, x8, (True, turns)),
            Operands.of(up8, x8, (True, turns)),
            Operands.of(grad8_turned, Scaled(h_turned, scale, of_x), (False, False)),
        )
        deferred = [
            [(number, each)] if number is not None else []
            for number, each in zip(numbers, operands, strict=True)
        ]
        of_input = None
        if ctx.needs_input_grad[0]:
            # The operands of down's gradient are not complete before this.
            of_input = to_input(gate8, 0, deferred[0] + deferred[2]) + to_input(up8, 1, deferred[1])
        of_weights = tuple(
            each.multiply(recipe.grad_weight, ctx.dtype, emulate, grad) if due else None
            for each, due in zip(operands, needed, strict=True)
        )
        found: tuple[Tensor | None, ...] = (None, None, None)
        if seen is not None:
            seen_x, seen_h = seen.float().split(1)
            pairs = ((seen_x, amax[:1]), (seen_x, amax[1:]), (seen_h, amax_of(grad)))
            found = tuple(torch.cat([forward, back.float()]) for forward, back in pairs)
        return of_input, *of_weights, *[None] * 6, *found, *[None] * 7
