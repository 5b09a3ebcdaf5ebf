"""float8 products of tensor parallelism, fused with their communication (asynchronous tp).

Under sequence parallelism what travels before a product is its operand: float8 numbers, with the
scale that all ranks know. What travels after it is its result, in the dtype of computation.

    colwise   forward   all-gather of the input + products of all siblings, fused
              backward  grad_input: of one layer product + reduce-scatter, fused; of several the sum
                        of their products, reduce-scattered under the products of grad_weight
    rowwise   forward   product + reduce-scatter, fused
              backward  all-gather of the output's gradient + grad_input, fused

grad_weight multiplies what was gathered already, at once or deferred by a schedule: W has no cast
and no collective. On GPUs with float8 the fused operators of symmetric memory overlap both; where
products are emulated the same functions run unfused.

They are called by name, not left to inductor's pass: of a product that was flattened it hands over
the flat matrix with the sequence's dim, and the operator of torch 2.11 and 2.13 then cuts whole
sequences where tokens are meant. Here rows are tokens, then sequences (T x B), so that what a rank
holds is one range of rows, gathered and scattered along dim 0 without a copy on either side.

Private names used, tested with torch 2.11 and 2.13: torch.ops.symm_mem's
fused_all_gather_scaled_matmul and fused_scaled_matmul_reduce_scatter.

Shapes: M = T x B rows, D width, N features of the rank, tp ranks. Recipes with one scale a tensor:
others cast gathered tensors again for grad_weight, by scales that float8 numbers cannot serve.

Source: torch.distributed._symmetric_memory; Wang et al., overlap by decomposition, ASPLOS 2023.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Partial, Shard

from dtron.errors import PlacementError
from dtron.float8.casting import (
    Scaled,
    quantize,
    quantize_both,
    quantize_weight,
    scales_together,
    turn_weight,
)
from dtron.float8.linear import (
    Float8Linear,
    MatmulSettings,
    ahead,
    gathered,
    largest,
    one_of,
)
from dtron.float8.products import product
from dtron.float8.weight_gradient import Float8Matmul, Operands
from dtron.parallelisms.functional_collectives import all_gather, wait_tensor
from dtron.parallelisms.pipeline.weight_gradients import DeferredMatmul, queue_weight_gradient
from dtron.parallelisms.placement import Style, change_argument
from dtron.parallelisms.tensor.async_tp import (
    Ranks,
    from_rows,
    rows_of,
    scatter_rows,
    split_parameters,
)

_ROWS = 0


def gather_products(
    mine: Scaled,
    rights: Sequence[Scaled],
    dtype: torch.dtype,
    settings: MatmulSettings,
    fast: bool,
    ranks: Ranks,
) -> tuple[Scaled, list[Tensor]]:
    """Gather an operand's rows and multiply them.

    Args:
        mine: (M / tp, S), with the scale of the whole.
        rights: (N, S) each.
        dtype: of the results.
        fast: as `product`'s `fast_accumulation`.
    Returns:
        The whole operand (M, S), and its products (M, N).
    """
    data = mine.data.contiguous()
    if _fuses(data, settings):
        n = len(rights)
        whole, outs = torch.ops.symm_mem.fused_all_gather_scaled_matmul(
            data,
            [right.data.contiguous().t() for right in rights],
            1.0 / mine.scale,
            [1.0 / right.scale for right in rights],
            _ROWS,
            ranks.group,
            [None] * n,
            [None] * n,
            [dtype] * n,
            [fast] * n,
        )
        return mine._replace(data=whole), outs
    # gloo moves no float8
    bytes_ = all_gather(data.view(torch.uint8), ranks.size, ranks.group)
    found = mine._replace(data=wait_tensor(bytes_).view(data.dtype))
    return found, [product(found, right, dtype, settings.emulate, fast) for right in rights]


def product_scatter(
    left: Scaled,
    right: Scaled,
    dtype: torch.dtype,
    settings: MatmulSettings,
    fast: bool,
    ranks: Ranks,
) -> Tensor:
    """Multiply, sum over the ranks and keep the rank's rows.

    Args:
        left: (M, S), the rank's part of the sum.
        right: (P, S), likewise.
        dtype: of the result.
        fast: as `product`'s `fast_accumulation`.
    Returns:
        (M / tp, P).
    """
    data = left.data.contiguous()
    if _fuses(data, settings):
        return torch.ops.symm_mem.fused_scaled_matmul_reduce_scatter(
            data,
            right.data.contiguous().t(),
            1.0 / left.scale,
            1.0 / right.scale,
            "sum",
            _ROWS,
            _ROWS,
            ranks.group,
            [data.shape[0], right.data.shape[0]],
            out_dtype=dtype,
            use_fast_accum=fast,
        )
    return wait_tensor(scatter_rows(product(left, right, dtype, settings.emulate, fast), ranks))


def _fuses(data: Tensor, settings: MatmulSettings) -> bool:
    return data.is_cuda and not settings.emulate


_OF_A_LAYER = 6
"""Arguments of a layer: weight, its data and scale where it comes in float8, leaf and scales of
`Delayed`, number of the `Site` that defers its weight gradient."""


@torch.compiler.allow_in_graph  # as in linear.py
class _GatherProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, settings: MatmulSettings, ranks: Ranks, *rest: Any
    ) -> tuple[Tensor, ...]:
        """(M / tp, D), and of each layer the arguments above, its weight (N, D) -> (M, N) each."""
        layers = [rest[i : i + _OF_A_LAYER] for i in range(0, len(rest), _OF_A_LAYER)]
        casts, known = settings.recipe.output, [scales for *_, scales, _ in layers]
        mine = quantize(x, casts.left, settings.input, one_of(known[0], 0))
        weights = _weights(layers, settings)
        whole, outs = gather_products(
            mine, weights, x.dtype, settings, casts.fast_accumulation, ranks
        )
        seen = None if layers[0][3] is None else largest(x)
        numbers = [number for *_, number in layers]
        held = [w if data is None else data for w, data, *_ in layers]
        scales = [w8.scale for w8 in weights]
        ctx.save_for_backward(whole.data, whole.scale, seen, *held, *scales, *known, *numbers)
        ctx.settings, ctx.ranks, ctx.dtype = settings, ranks, x.dtype
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, x_scale, seen, *others = ctx.saved_tensors
        n, settings, ranks = len(grads), ctx.settings, ctx.ranks
        held, scales, known, numbers = (others[i : i + n] for i in range(0, 4 * n, n))
        to_input, to_weight = settings.recipe.grad_input, settings.recipe.grad_weight
        cast = to_input.left
        of_grads = [one_of(k, 2) for k in known]
        if any(scale is None for scale in of_grads):
            of_grads = scales_together(grads, cast, settings.grad)
        both = [
            quantize_both(grad, cast, scale=scale)
            for grad, scale in zip(grads, of_grads, strict=True)
        ]
        grad_x = travelling = None
        if ctx.needs_input_grad[0]:
            turned = [
                turn_weight(w, scale, to_input.right, grad)
                for w, scale, grad in zip(held, scales, grads, strict=True)
            ]
            fast = to_input.fast_accumulation
            if n == 1:
                grad_x = product_scatter(both[0][0], turned[0], ctx.dtype, settings, fast, ranks)
            else:
                parts = [
                    product(grad8, w8, ctx.dtype, settings.emulate, fast)
                    for (grad8, _), w8 in zip(both, turned, strict=True)
                ]
                travelling = scatter_rows(sum(parts[1:], parts[0]), ranks)
        found: list[Any] = []
        at_once = ctx.needs_input_grad[3::_OF_A_LAYER]
        x8 = Scaled(x, x_scale, to_weight.right).turned(grads[0]) if any(at_once) else None
        for i, (_, across) in enumerate(both):
            grad_weight = None
            if x8 is not None and at_once[i]:
                fast = to_weight.fast_accumulation
                grad_weight = product(across, x8, ctx.dtype, settings.emulate, fast)
            of_leaf = None if seen is None else torch.cat([seen, largest(grads[i])])
            found += [grad_weight, None, None, of_leaf, None, None]
        if travelling is not None:
            grad_x = wait_tensor(travelling)
        for (_, across), number in zip(both, numbers, strict=True):
            if number is not None:
                assert grad_x is not None
                queue_weight_gradient(grad_x, [across.data, x, across.scale, x_scale], number)
        return grad_x, None, None, *found


@torch.compiler.allow_in_graph
class _ProductScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, settings: MatmulSettings, ranks: Ranks, *layer: Any) -> Tensor:
        """(M, N), and of the layer the arguments above, its weight (D, N) -> (M / tp, D)."""
        weight, data, _, leaf, scales, number = layer
        casts = settings.recipe.output
        x8 = quantize(x, casts.left, settings.input, one_of(scales, 0))
        (weight8,) = _weights([layer], settings)
        seen = None if leaf is None else largest(x)
        held = weight if data is None else data
        ctx.save_for_backward(x8.data, x8.scale, held, weight8.scale, seen, scales, number)
        ctx.settings, ctx.ranks, ctx.dtype = settings, ranks, x.dtype
        return product_scatter(x8, weight8, x.dtype, settings, casts.fast_accumulation, ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, x_scale, held, scale, seen, scales, number = ctx.saved_tensors
        settings, to_input, to_weight = (
            ctx.settings,
            ctx.settings.recipe.grad_input,
            ctx.settings.recipe.grad_weight,
        )
        mine = quantize(grad, to_input.left, settings.grad, one_of(scales, 2))
        weight8 = turn_weight(held, scale, to_input.right, grad)
        fast = to_input.fast_accumulation
        whole, (grad_x,) = gather_products(mine, [weight8], ctx.dtype, settings, fast, ctx.ranks)
        grad_weight = None
        if number is not None:
            queue_weight_gradient(grad_x, [whole.data, x, whole.scale, x_scale], number)
        if ctx.needs_input_grad[3]:
            x8 = Scaled(x, x_scale, to_weight.right).turned(grad)
            across, fast = whole.turned(grad), to_weight.fast_accumulation
            grad_weight = product(across, x8, ctx.dtype, settings.emulate, fast)
        found = None if seen is None else torch.cat([seen, largest(grad)])
        return grad_x, None, None, grad_weight, None, None, found, None, None


def _weights(layers: Sequence[Sequence[Any]], settings: MatmulSettings) -> list[Scaled]:
    """Weights in float8; those that have no scale yet find it by one reduction."""
    cast, known = settings.recipe.output.right, [one_of(scales, 1) for *_, scales, _ in layers]
    bare = [i for i, (_, data, *_) in enumerate(layers) if data is None and known[i] is None]
    if bare:
        found = scales_together([layers[i][0] for i in bare], cast, settings.weight)
        for i, scale in zip(bare, found, strict=True):
            known[i] = scale
    return [
        quantize_weight(weight, data, scale, cast, known=one)
        for (weight, data, scale, *_), one in zip(layers, known, strict=True)
    ]


class _FusedLinear(Float8Linear):
    """A layer whose weight gradient, if it is deferred, is queued by an operator of its own."""

    transposed: tuple[bool, bool]
    """See `Operands`."""

    def deferred_matmul(self, operands: Sequence[Tensor], dtype: torch.dtype) -> DeferredMatmul:
        """See `queue_weight_gradient`."""
        left, right, *scales = operands
        queued = Operands(left, right, tuple(scales), self.transposed)
        return Float8Matmul(queued, self.recipe.grad_weight, dtype, self.emulate)


class GatheredLinear(_FusedLinear):
    """A layer split by rows whose output was made with its siblings', by `GatherProducts`."""

    transposed = (False, True)
    place = 0
    """Among the siblings."""

    def forward(self, input: Sequence[Tensor]) -> Tensor:  # type: ignore[override]
        """Outputs of all siblings -> (B, T, N), its own."""
        return input[self.place]


class ScatteringLinear(_FusedLinear):
    """A layer split by columns that scatters its sum along the sequence."""

    transposed = (True, True)

    def _split(self, x: Tensor, weight: DTensor) -> Tensor:
        """(B, T, N), split by columns -> (B, T, D), split along the sequence."""
        mesh = weight.device_mesh
        if not isinstance(x, DTensor) or x.placements != (Shard(2),):
            raise PlacementError("a float8 layer that scatters takes (B, T, N), split by columns")
        ranks, settings = Ranks.of(mesh), self.settings_over_ranks()
        local, part = x.to_local(), weight.to_local()
        rows = rows_of(local)
        out = _ProductScatter.apply(rows, settings, ranks, *_arguments(self, rows, part))
        assert isinstance(out, Tensor)
        self.show(rows, part, out, settings)
        out = from_rows(out, local.shape[0])
        if isinstance(self.bias, DTensor):  # each rank adds it to its tokens alone
            out = out + self.bias.to_local(grad_placements=[Partial()])
        return DTensor.from_local(out, mesh, [Shard(1)], run_check=False)


class GatherProducts(Style):
    """In place of a `prepare_input` row: gathers a module's first argument in float8, multiplied as
    it arrives; the module is handed the list of products, from which each layer takes its own.

    The module must use that argument as the input of these layers only.

    Args:
        children: names of the layers, relative to the module; all of them `GatheredLinear`.
    """

    covers_parameters = False

    def __init__(self, children: Sequence[str]) -> None:
        self.children = tuple(children)

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """See Style."""
        ranks = Ranks.of(mesh)
        for i, name in enumerate(self.children):
            layer = module.get_submodule(name)
            assert isinstance(layer, GatheredLinear), f"{name} is a {type(layer).__name__}"
            layer.place = i
        names = self.children

        def multiply(module: nn.Module, x: Tensor) -> list[Tensor]:
            layers = [module.get_submodule(name) for name in names]
            return _products(x, layers, ranks)  # type: ignore[arg-type]

        change_argument(module, 0, multiply)


class SplitRows(Style):
    """In place of a `colwise` row: splits a `GatheredLinear` by rows, and nothing else."""

    def apply(self, module: nn.Module, mesh: DeviceMesh) -> None:
        """See Style."""
        split_parameters(module, mesh, Shard(0), Shard(0))


def _products(x: Tensor, layers: Sequence[GatheredLinear], ranks: Ranks) -> list[Tensor]:
    """(B, T / tp, D) -> (B, T, N) of each layer."""
    rows, settings = rows_of(x), layers[0].settings_over_ranks()
    weights = [layer.weight.to_local() for layer in layers]  # type: ignore[operator]
    pairs = list(zip(layers, weights, strict=True))
    given = [part for layer, weight in pairs for part in _arguments(layer, rows, weight)]
    outs = _GatherProducts.apply(rows, settings, ranks, *given)
    assert isinstance(outs, tuple)
    done = []
    for (layer, weight), out in zip(pairs, outs, strict=True):
        layer.show(rows, weight, out, settings)
        out = from_rows(out, x.shape[0])
        done.append(out if layer.bias is None else out + layer.bias.to_local())  # type: ignore[attr-defined]
    return done


def _arguments(layer: Float8Linear, x: Tensor, weight: Tensor) -> tuple[Any, ...]:
    own, number = layer.weight_of_call(x, weight)
    return own, *gathered(weight), *ahead(layer), number
