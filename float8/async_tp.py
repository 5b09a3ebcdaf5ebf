"""Asynchronous tensor parallelism of float8 layers: matmuls fused with their collectives.

Before a matmul, its float8 operand is all-gathered, with a scale that all ranks know. After a
matmul, its result is reduce-scattered in the dtype of computation.

    colwise   forward   all-gather of the input + matmuls of all siblings, fused
              backward  one layer: matmul of grad_input + reduce-scatter, fused; several layers:
                        sum of their matmuls; the sum's reduce-scatter overlaps grad_weight
    rowwise   forward   matmul + reduce-scatter, fused
              backward  all-gather of the output's gradient + grad_input, fused

grad_weight multiplies the gathered operands, immediately or deferred by a pipeline schedule to an
action W, which has no cast and no collective. If matmuls are emulated, the same functions run
unfused.

This file calls the fused operators itself; it does not use inductor's pass. For flattened matmuls,
the pass of torch 2.11 and 2.13 combines the flat matrix with the sequence's dim, and so splits
sequences instead of tokens.

Undocumented operators, tested with torch 2.11 and 2.13: fused_all_gather_scaled_matmul and
fused_scaled_matmul_reduce_scatter of torch.ops.symm_mem.

Only recipes with per-tensor scales are supported: other recipes cast tensors again for grad_weight,
with other scales than the gathered ones. Shapes and sources: `parallelisms/tensor/async_tp.py`.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dtron.float8.casting import Scaled, quantize, quantize_both, quantize_weight, turn_weight
from dtron.float8.linear import Float8Linear, MatmulSettings, amax_of, scale_at
from dtron.float8.products import product
from dtron.float8.scales import scales_together
from dtron.float8.weight_gradient import Float8Matmul, Operands
from dtron.parallelisms.functional_collectives import all_gather, wait_tensor
from dtron.parallelisms.pipeline.weight_gradients import DeferredMatmul, queue_weight_gradient
from dtron.parallelisms.tensor.async_tp import AsyncLinear, Ranks, local, start_reduce_scatter

_DIM = 0
_ARGUMENTS = 6
"""Number of arguments per layer, see `Float8Linear.matmul_arguments`. The arguments of several
layers are grouped by kind: first all weights, then all float8 data, and so on."""


def all_gather_scaled_matmul(
    left: Scaled,
    rights: Sequence[Scaled],
    dtype: torch.dtype,
    emulate: bool,
    fast_accumulation: bool,
    ranks: Ranks,
) -> tuple[Scaled, list[Tensor]]:
    """All-gather the rows of `left` over tp, and compute left right^T for each of `rights`.

    Shapes: M tokens, S summed features, N output features of a layer.

    Args:
        left: (M / tp, S), with the scale of the gathered operand.
        rights: (N, S) each.
        dtype: dtype of the result.
        emulate: whether to multiply the dequantised operands in float32 or float64.
        fast_accumulation: whether the kernel may accumulate in less than float32.
    Returns:
        The gathered operand (M, S), and the result of each matmul (M, N).
    """
    data = left.data.contiguous()
    if _fuses(data, emulate):
        n = len(rights)
        gathered, outs = torch.ops.symm_mem.fused_all_gather_scaled_matmul(
            data,
            [right.data.contiguous().t() for right in rights],
            1.0 / left.scale,
            [1.0 / right.scale for right in rights],
            _DIM,
            ranks.group,
            [None] * n,
            [None] * n,
            [dtype] * n,
            [fast_accumulation] * n,
        )
        return left._replace(data=gathered), outs
    # gloo does not support float8
    sent = all_gather(data.view(torch.uint8), ranks.size, ranks.group)
    left = left._replace(data=wait_tensor(sent).view(data.dtype))
    return left, [product(left, right, dtype, emulate, fast_accumulation) for right in rights]


def scaled_matmul_reduce_scatter(
    left: Scaled,
    right: Scaled,
    dtype: torch.dtype,
    emulate: bool,
    fast_accumulation: bool,
    ranks: Ranks,
) -> Tensor:
    """Compute left right^T, and reduce-scatter the rows of the result over tp.

    Shapes: M tokens, S summed features, P output features.

    Args:
        left: (M, S), S sharded over tp.
        right: (P, S), S sharded over tp.
        dtype: dtype of the result.
        emulate: whether to multiply the dequantised operands in float32 or float64.
        fast_accumulation: whether the kernel may accumulate in less than float32.
    Returns:
        (M / tp, P).
    """
    data = left.data.contiguous()
    if _fuses(data, emulate):
        return torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
            data,
            right.data.contiguous().t(),
            1.0 / left.scale,
            1.0 / right.scale,
            "sum",
            _DIM,
            _DIM,
            ranks.group,
            [data.shape[0], right.data.shape[0]],
            out_dtype=dtype,
            use_fast_accum=fast_accumulation,
        )
    partial = product(left, right, dtype, emulate, fast_accumulation)
    return wait_tensor(start_reduce_scatter(partial, ranks))


def _fuses(data: Tensor, emulate: bool) -> bool:
    return data.is_cuda and not emulate


@torch.compiler.allow_in_graph  # as in linear.py
class _GatherMatmul(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, settings: MatmulSettings, ranks: Ranks, *layers: Any
    ) -> tuple[Tensor, ...]:
        """Gather x (M / tp, D) over tp and multiply it by each layer's weight (N, D).

        Return (M, N) per layer: M tokens, D width, N output features. `layers`: `matmul_arguments`
        of the layers, grouped by kind.
        """
        weights, data, scales, leaves, delayed, numbers = _equal_parts(layers, _ARGUMENTS)
        matmul, emulate = settings.recipe.output, settings.emulate
        x8 = quantize(x, matmul.left, settings.input, scale_at(delayed[0], 0))
        weights8 = _quantize_weights(weights, data, scales, delayed, settings)
        x8, outs = all_gather_scaled_matmul(
            x8, weights8, x.dtype, emulate, matmul.fast_accumulation, ranks
        )
        ctx.save_for_backward(
            x8.data,
            x8.scale,
            None if leaves[0] is None else amax_of(x),
            *(w if d is None else d for w, d in zip(weights, data, strict=True)),
            *(weight8.scale for weight8 in weights8),
            *delayed,
            *numbers,
        )
        ctx.settings, ctx.ranks, ctx.dtype = settings, ranks, x.dtype
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, x_scale, x_amax, *others = ctx.saved_tensors
        weights, weight_scales, delayed, numbers = _equal_parts(others, 4)
        settings, ranks, n = ctx.settings, ctx.ranks, len(grads)
        to_input, to_weight = settings.recipe.grad_input, settings.recipe.grad_weight
        options = (ctx.dtype, settings.emulate, to_input.fast_accumulation)
        grad_scales = [scale_at(scales, 2) for scales in delayed]
        if any(scale is None for scale in grad_scales):
            grad_scales = scales_together(grads, to_input.left, settings.grad)
        grads8, grads8_t = zip(
            *(
                quantize_both(grad, to_input.left, scale=scale)
                for grad, scale in zip(grads, grad_scales, strict=True)
            ),
            strict=True,
        )
        grad_x = pending = None
        if ctx.needs_input_grad[0]:
            weights8_t = [
                turn_weight(weight, scale, to_input.right, grad)
                for weight, scale, grad in zip(weights, weight_scales, grads, strict=True)
            ]
            if n == 1:
                grad_x = scaled_matmul_reduce_scatter(grads8[0], weights8_t[0], *options, ranks)
            else:
                parts = [product(*pair, *options) for pair in zip(grads8, weights8_t, strict=True)]
                pending = start_reduce_scatter(sum(parts[1:], parts[0]), ranks)
        grad_weights: list[Tensor | None] = [None] * n
        if any(weights_need_grad := ctx.needs_input_grad[3 : 3 + n]):
            x8_t = Scaled(x, x_scale, to_weight.right).turned(grads[0])
            options = (ctx.dtype, settings.emulate, to_weight.fast_accumulation)
            grad_weights = [
                product(grad8_t, x8_t, *options) if needed else None
                for grad8_t, needed in zip(grads8_t, weights_need_grad, strict=True)
            ]
        amaxes: list[Tensor | None] = [None] * n
        if x_amax is not None:
            amaxes = [torch.cat([x_amax, amax_of(grad)]) for grad in grads]
        if pending is not None:
            grad_x = wait_tensor(pending)
        for grad8_t, number in zip(grads8_t, numbers, strict=True):
            if number is not None:
                assert grad_x is not None
                queue_weight_gradient(grad_x, [grad8_t.data, x, grad8_t.scale, x_scale], number)
        return grad_x, None, None, *grad_weights, *[None] * 2 * n, *amaxes, *[None] * 2 * n


@torch.compiler.allow_in_graph
class _MatmulScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, settings: MatmulSettings, ranks: Ranks, *layer: Any) -> Tensor:
        """Multiply x (M, N) by the layer's weight (D, N) and reduce-scatter the rows: (M / tp, D).

        M tokens, N input features, D width; scattered over tp. `layer`: its `matmul_arguments`.
        """
        weight, data, scale, leaf, delayed, number = layer
        matmul, emulate = settings.recipe.output, settings.emulate
        x8 = quantize(x, matmul.left, settings.input, scale_at(delayed, 0))
        (weight8,) = _quantize_weights([weight], [data], [scale], [delayed], settings)
        x_amax = None if leaf is None else amax_of(x)
        saved_weight = weight if data is None else data
        ctx.save_for_backward(
            x8.data, x8.scale, x_amax, saved_weight, weight8.scale, delayed, number
        )
        ctx.settings, ctx.ranks, ctx.dtype = settings, ranks, x.dtype
        fast = matmul.fast_accumulation
        return scaled_matmul_reduce_scatter(x8, weight8, x.dtype, emulate, fast, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, x_scale, x_amax, weight, weight_scale, delayed, number = ctx.saved_tensors
        settings, recipe = ctx.settings, ctx.settings.recipe
        to_input, to_weight = recipe.grad_input, recipe.grad_weight
        grad8 = quantize(grad, to_input.left, settings.grad, scale_at(delayed, 2))
        weight8_t = turn_weight(weight, weight_scale, to_input.right, grad)
        options = (ctx.dtype, settings.emulate, to_input.fast_accumulation)
        grad8, (grad_x,) = all_gather_scaled_matmul(grad8, [weight8_t], *options, ctx.ranks)
        grad_weight = None
        if number is not None:
            queue_weight_gradient(grad_x, [grad8.data, x, grad8.scale, x_scale], number)
        if ctx.needs_input_grad[3]:
            operands = Operands(grad8.data, x, (grad8.scale, x_scale))
            grad_weight = operands.multiply(to_weight, ctx.dtype, settings.emulate, grad)
        amax = None if x_amax is None else torch.cat([x_amax, amax_of(grad)])
        return grad_x, None, None, grad_weight, None, None, amax, None, None


def _equal_parts(values: Sequence[Any], n: int) -> list[Sequence[Any]]:
    """Split values into n slices of equal length."""
    length = len(values) // n
    return [values[i * length : (i + 1) * length] for i in range(n)]


def _quantize_weights(
    weights: Sequence[Tensor],
    data: Sequence[Tensor | None],
    scales: Sequence[Tensor | None],
    delayed: Sequence[Tensor | None],
    settings: MatmulSettings,
) -> list[Scaled]:
    """Cast weights to float8; one reduction computes all scales that are not known yet."""
    cast, known = settings.recipe.output.right, [scale_at(each, 1) for each in delayed]
    missing = [i for i, scale in enumerate(known) if scale is None and data[i] is None]
    if missing:
        found = scales_together([weights[i] for i in missing], cast, settings.weight)
        for i, scale in zip(missing, found, strict=True):
            known[i] = scale
    return [
        quantize_weight(weight, weight8, scale, cast, known=known_scale)
        for weight, weight8, scale, known_scale in zip(weights, data, scales, known, strict=True)
    ]


class AsyncFloat8Linear(AsyncLinear, Float8Linear):
    """An AsyncLinear with float8 matmuls. Without fusion it acts as a Float8Linear."""

    def gather_matmul(self, x: Tensor, siblings: Sequence["AsyncFloat8Linear"]) -> list[Tensor]:
        """All-gather x in float8 and multiply it by the siblings' weights; see AsyncLinear."""
        settings, weights = self._settings_of_shards(), [local(each.weight) for each in siblings]
        calls = [
            each.matmul_arguments(x, weight) for each, weight in zip(siblings, weights, strict=True)
        ]
        arguments = [value for kind in zip(*calls, strict=True) for value in kind]
        outs = _GatherMatmul.apply(x, settings, self.ranks, *arguments)
        assert isinstance(outs, tuple)
        for each, weight, out in zip(siblings, weights, outs, strict=True):
            each.run_probe(x, weight, out, settings)
        return list(outs)

    def matmul_scatter(self, x: Tensor) -> Tensor:
        """Multiply x by the weight in float8 and reduce-scatter the result; see AsyncLinear."""
        settings, weight = self._settings_of_shards(), local(self.weight)
        arguments = self.matmul_arguments(x, weight)
        out = _MatmulScatter.apply(x, settings, self.ranks, *arguments)
        assert isinstance(out, Tensor)
        self.run_probe(x, weight, out, settings)
        return out

    def deferred_matmul(self, operands: Sequence[Tensor], dtype: torch.dtype) -> DeferredMatmul:
        """Return the deferred weight gradient of queued operands; see `queue_weight_gradient`."""
        left, right, *scales = operands
        queued = Operands(left, right, tuple(scales), (self.role == "scatter", True))
        return Float8Matmul(queued, self.recipe.grad_weight, dtype, self.emulate)

    def _settings_of_shards(self) -> MatmulSettings:
        """Return settings for casts before an all-gather.

        Input and gradient share scales over tp and cp, the weight over tp, since these ranks hold
        their shards.
        """
        return self._settings(self.groups.both, self.groups.tp, self.groups.both)
