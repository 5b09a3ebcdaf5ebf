"""Asynchronous tensor parallelism: matrix products that overlap their own communication.

Under sequence parallelism a layer all-gathers before its colwise products and reduce-scatters after
its rowwise ones. Operators over symmetric memory do each pair at once: the product of one part runs
while the next part travels over NVLink.

    colwise   forward   all-gather of the input + products of all siblings, fused
              backward  one product for grad_x of all siblings, reduce-scattered under the one for
                        their grad_weight
    rowwise   forward   product + reduce-scatter, fused
              backward  all-gather of the output's gradient + grad_x, fused; what was gathered makes
                        grad_weight too

A schedule may defer weight gradients: then nothing is left to overlap the first reduce-scatter
with, and grad_x of the siblings and its reduce-scatter are fused instead. What W multiplies has
been gathered by I: W has no collective.

An output head gathers as ever. The fused functions are called by the placements' rows, compiled or
not. inductor's own pass, which looks for such
pairs in a graph, leaves out those with biases, sums of siblings' gradients, and the gathers of a
single sequence. Here rows are tokens, then sequences (T x B), so that what a rank holds is one
range of rows, gathered and scattered along dim 0 without a copy on either side.

On the CPU, where there is no symmetric memory, the same functions run unfused. float8 layers have
functions of their own (`float8/async_tp.py`).

Operators without documentation, tested with torch 2.11, 2.13 and 2.15: fused_all_gather_matmul and
fused_matmul_reduce_scatter of torch.ops.symm_mem.

Shapes: B sequences, T tokens, M = T x B rows, D width, N features of the rank, tp ranks.
Source: Wang et al., overlap by decomposition, ASPLOS 2023; torch's symmetric memory.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from dtron.errors import PlacementError
from dtron.parallelisms.functional_collectives import all_gather, reduce_scatter, wait_tensor
from dtron.parallelisms.pipeline.weight_gradients import (
    DeferredMatmul,
    DeferringLinear,
    LinearMatmul,
    queue_weight_gradient,
)
from dtron.parallelisms.placement import Row, change_argument, colwise, prepare_input, rowwise

_ROWS = 0


@dataclass(frozen=True)
class Ranks:
    """The ranks of tp."""

    size: int
    group: str
    """The process group's name."""

    @classmethod
    def of(cls, mesh: DeviceMesh) -> "Ranks":
        """Those of a mesh of one axis."""
        return cls(mesh.size(), mesh.get_group().group_name)


def gather_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    ranks: Ranks,
    numbers: Sequence[Tensor | None] = (),
) -> list[Tensor]:
    """Products of gathered rows with the rank's rows of several weights.

    Args:
        x: (M / tp, D), the rank's part.
        weights: (N, D) each, the rank's rows, in x's dtype.
        numbers: of each weight, the number of the `Site` that defers its gradient; None: it is
            computed in the backward.
    Returns:
        (M, N) each.
    """
    outs = _GatherLinear.apply(x, ranks, *weights, *(numbers or [None] * len(weights)))
    assert isinstance(outs, tuple)
    return list(outs)


def linear_scatter(x: Tensor, weight: Tensor, ranks: Ranks, number: Tensor | None = None) -> Tensor:
    """(M, N) times the rank's columns (D, N) of a weight, summed over the ranks: (M / tp, D), of
    which each rank keeps its own rows. `number` as above."""
    out = _LinearScatter.apply(x, weight, ranks, number)
    assert isinstance(out, Tensor)
    return out


# Compiled code takes both as they are: torch 2.11 traces fewer functions than 2.13.
@torch.compiler.allow_in_graph
class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, *rest: Any) -> tuple[Tensor, ...]:
        """Weights, then their numbers."""
        weights, numbers = rest[: len(rest) // 2], rest[len(rest) // 2 :]
        gathered, outs = _all_gather_matmul(x, [w.t() for w in weights], ranks)
        ctx.save_for_backward(gathered, *weights, *numbers)
        ctx.ranks = ranks
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        gathered, *others = ctx.saved_tensors
        n = len(grads)
        weights, numbers = others[:n], others[n:]
        of_x, _, *of_weights = ctx.needs_input_grad
        grad_weights: list[Tensor | None] = [None] * n
        grad, grad_x, scattered = _joined(grads, 1), None, None
        deferred = [pair for pair in zip(grads, numbers, strict=True) if pair[1] is not None]
        if deferred:
            grad_x = _matmul_reduce_scatter(grad, _joined(weights, 0), ctx.ranks)
            for of_output, number in deferred:
                queue_weight_gradient(grad_x, [of_output, gathered], number)
        elif of_x:
            scattered = scatter_rows(grad @ _joined(weights, 0), ctx.ranks)
        if at_once := [i for i in range(n) if of_weights[i]]:
            # Siblings in one matmul, unless a part of them is deferred or frozen.
            left = grad if len(at_once) == n else _joined([grads[i] for i in at_once], 1)
            found = (left.t() @ gathered).split([weights[i].shape[0] for i in at_once])
            for i, grad_weight in zip(at_once, found, strict=True):
                grad_weights[i] = grad_weight
        if scattered is not None:
            grad_x = wait_tensor(scattered)
        return grad_x, None, *grad_weights, *[None] * n


@torch.compiler.allow_in_graph
class _LinearScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, ranks: Ranks, number: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight, number)
        ctx.ranks = ranks
        return _matmul_reduce_scatter(x, weight.t(), ranks)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, weight, number = ctx.saved_tensors
        gathered, (grad_x,) = _all_gather_matmul(grad, [weight], ctx.ranks)
        if number is not None:
            queue_weight_gradient(grad_x, [gathered, x], number)
        grad_weight = gathered.t() @ x if ctx.needs_input_grad[1] else None
        return grad_x, grad_weight, None, None


def _joined(parts: tuple[Tensor, ...] | list[Tensor], dim: int) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)


def _all_gather_matmul(
    x: Tensor, factors: Sequence[Tensor], ranks: Ranks
) -> tuple[Tensor, list[Tensor]]:
    """Gather (M / tp, D) and multiply with each (D, N)."""
    if _fuses(x):
        return torch.ops.symm_mem.fused_all_gather_matmul(
            x.contiguous(), list(factors), _ROWS, ranks.group
        )
    gathered = wait_tensor(all_gather(x, ranks.size, ranks.group))
    return gathered, [gathered @ factor for factor in factors]


def _matmul_reduce_scatter(x: Tensor, factor: Tensor, ranks: Ranks) -> Tensor:
    """Multiply (M, N) with (N, D), sum over the ranks and keep the rank's rows (M / tp, D)."""
    if _fuses(x):
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(
            x.contiguous(), factor, "sum", _ROWS, ranks.group
        )
    return wait_tensor(scatter_rows(x @ factor, ranks))


def _fuses(x: Tensor) -> bool:
    return x.is_cuda


def scatter_rows(x: Tensor, ranks: Ranks) -> Tensor:
    """Begin to sum (M, D) over the ranks; what arrives is the rank's (M / tp, D)."""
    return reduce_scatter(x, ranks.size, ranks.group)


def rows_of(x: Tensor) -> Tensor:
    """(B, T, D) -> (T x B, D)."""
    return x.transpose(0, 1).reshape(-1, x.shape[2])


def from_rows(rows: Tensor, batch: int) -> Tensor:
    """(T x B, D) -> (B, T, D)."""
    return rows.view(-1, batch, rows.shape[1]).transpose(0, 1)


def check_rows(modules: Mapping[str, nn.Module], rows: Mapping[str, Sequence[Any]]) -> None:
    """Raises PlacementError where nothing of a whole model is fused, here or by rows that are not
    of `parallelisms.placement`; arguments as for `fuse`."""
    every = [row for of_module in rows.values() for row in of_module]
    if not any(_fusable(modules, rows)) and all(isinstance(row, Row) for row in every):
        raise PlacementError(
            "parallel.async_tp = true, but no row gathers or scatters a sequence: it fuses "
            "prepare_input() before colwise() rows, and rowwise(output=Shard(1)) of an nn.Linear; "
            "set it to false"
        )


def fuse(
    modules: Mapping[str, nn.Module], rows: Mapping[str, Sequence[Any]], mesh: DeviceMesh
) -> set[tuple[str, Any]]:
    """Put the fused functions in place of the styles of all rows that they can serve.

    Args:
        modules: by FQN.
        rows: rows of `parallelisms.placement` by FQN.
    Returns:
        (FQN, row) of what is done: gathers for colwise linears, colwise linears that gather, and
        rowwise linears that scatter.
    """
    done: set[tuple[str, Any]] = set()
    for name, row, served in list(_fusable(modules, rows)):
        module = modules[name]
        if row.kind == "colwise":
            assert isinstance(module, nn.Linear)
            fuse_own_gather(module, mesh)
        elif served:
            fuse_gather(module, [child.rpartition(".")[2] for child, _ in served], mesh)
        else:
            assert isinstance(module, nn.Linear)
            fuse_scatter(module, mesh)
        done |= {(name, row), *served}
    return done


def _fusable(
    modules: Mapping[str, nn.Module], rows: Mapping[str, Sequence[Any]]
) -> Iterator[tuple[str, Row, list[tuple[str, Row]]]]:
    """(FQN, row, the colwise linears whose input it gathers; none of a linear's own row).

    A colwise linear that gathers for itself is fused if a sibling scatters, as in latent
    attention. An output head has no such sibling: its loss may multiply in chunks.
    """
    held = [
        (name, row)
        for name in rows
        if name in modules
        for row in rows[name]
        if isinstance(row, Row)
    ]
    split = [(n, row) for n, row in held if row.kind == "colwise" and row.output == Shard(-1)]
    plain = {name for name, _ in held if _is_plain(modules[name])}
    scatter, gather = rowwise(output=Shard(1)), colwise(inputs=Shard(1))
    linear = {name for name, _ in held if isinstance(modules[name], nn.Linear)}
    inner = {_parent(name) for name, row in held if row == scatter and name in linear}
    for name, row in held:
        if name in plain and (row == scatter or (row == gather and _parent(name) in inner)):
            yield name, row, []
        elif row == prepare_input(Shard(1), Replicate()):
            served = [(child, how) for child, how in split if _parent(child) == name]
            if served and all(child in plain for child, _ in served):
                yield name, row, sorted(served, key=operator.itemgetter(0))


def _parent(fqn: str) -> str:
    return fqn.rpartition(".")[0]


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """float8 layers have functions of their own; other subclasses would lose what they add."""
    return type(module) is nn.Linear


class _FusedLinear(DeferringLinear):
    def deferred_matmul(self, operands: Sequence[Tensor], dtype: torch.dtype) -> DeferredMatmul:
        """See `queue_weight_gradient`."""
        return LinearMatmul(*operands)


class GatheredLinear(_FusedLinear):
    """A linear split by rows whose product was made with its siblings'."""

    place: int
    """Among the siblings."""

    def forward(self, input: Sequence[Tensor]) -> Tensor:  # type: ignore[override]
        """Products of all siblings -> (B, T, N), its own."""
        return input[self.place]


class GatheringLinear(_FusedLinear):
    """A linear split by rows that gathers a sequence for itself alone."""

    ranks: Ranks

    def forward(self, input: Tensor) -> Tensor:
        """(B, T / tp, D) -> (B, T, N)."""
        return _gathered(input, [self], self.ranks)[0]


class ScatteringLinear(_FusedLinear):
    """A linear split by columns that scatters its sum along the sequence."""

    ranks: Ranks

    def forward(self, input: Tensor) -> Tensor:
        """(B, T, N) -> (B, T / tp, D)."""
        (weight, number), bias = self.weight_of_call(input, _local(self.weight)), self.bias
        out = linear_scatter(rows_of(input), weight, self.ranks, number)
        out = from_rows(out, input.shape[0])
        if bias is None:
            return out
        assert isinstance(bias, DTensor)  # each rank adds it to its tokens alone
        return out + bias.to_local(grad_placements=[Partial()])


# Linears change their class, as under FSDP: functions in place of `forward` would be compiled anew
# for each block.


def fuse_gather(parent: nn.Module, children: Sequence[str], mesh: DeviceMesh) -> None:
    """Make colwise linears of a module share one fused gather of the module's first argument.

    The module's forward must use that argument as the input of these linears only: it is handed a
    list of their outputs, from which each takes its own.

    Args:
        children: attributes of the module.
    """
    ranks, names = Ranks.of(mesh), tuple(children)
    for i, name in enumerate(names):
        linear = parent.get_submodule(name)
        split_parameters(linear, mesh, Shard(0), Shard(0))
        linear.__class__ = GatheredLinear
        linear.place = i  # type: ignore[assignment]

    # By name, not by object, again so that blocks share what is compiled.
    def multiply(module: nn.Module, x: Tensor) -> list[Tensor]:
        linears = [module.get_submodule(name) for name in names]
        return _gathered(x, linears, ranks)  # type: ignore[arg-type]

    change_argument(parent, 0, multiply)


def fuse_own_gather(linear: nn.Linear, mesh: DeviceMesh) -> None:
    """Make a colwise linear gather its input, of which it is the only reader."""
    split_parameters(linear, mesh, Shard(0), Shard(0))
    linear.__class__ = GatheringLinear
    linear.ranks = Ranks.of(mesh)  # type: ignore[assignment]


def fuse_scatter(linear: nn.Linear, mesh: DeviceMesh) -> None:
    """Make a rowwise linear scatter its sum along the sequence."""
    split_parameters(linear, mesh, Shard(1), Replicate())
    linear.__class__ = ScatteringLinear
    linear.ranks = Ranks.of(mesh)  # type: ignore[assignment]


def _gathered(x: Tensor, linears: Sequence[_FusedLinear], ranks: Ranks) -> list[Tensor]:
    """(B, T / tp, D) -> (B, T, N) of each."""
    calls = [linear.weight_of_call(x, _local(linear.weight)) for linear in linears]
    weights, numbers = zip(*calls, strict=True)
    outs = gather_linear(rows_of(x), weights, ranks, numbers)
    return [
        from_rows(out if linear.bias is None else out + _local(linear.bias), x.shape[0])
        for out, linear in zip(outs, linears, strict=True)
    ]


def _local(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor), "the linear's parameters are distributed"
    return parameter.to_local()


def split_parameters(
    linear: nn.Module, mesh: DeviceMesh, weight: Placement, bias: Placement
) -> None:
    """Distribute a linear's weight and bias, and nothing else."""
    for name, placement in (("weight", weight), ("bias", bias)):
        parameter = getattr(linear, name)
        if parameter is not None:
            split = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
            setattr(linear, name, nn.Parameter(split, requires_grad=parameter.requires_grad))
