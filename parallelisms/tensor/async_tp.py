"""Asynchronous tensor parallelism: matmuls fused with the collective before or after them.

Under sequence parallelism a layer all-gathers before its colwise matmuls and reduce-scatters after
its rowwise matmuls. Operators on symmetric memory fuse matmul and collective: the matmul of one
chunk runs while the next chunk is sent over NVLink.

    colwise   forward   all-gather of the input + matmuls of all siblings, fused
              backward  one matmul for grad_x of all siblings; its reduce-scatter overlaps with the
                        one matmul for their grad_weight
    rowwise   forward   matmul + reduce-scatter, fused
              backward  all-gather of the output's gradient + grad_x, fused; grad_weight uses the
                        gathered gradient

Siblings are linears that share an input. If weight gradients are deferred, no matmul is left to
overlap with the reduce-scatter of grad_x, so the matmul for grad_x is fused with it. The deferred
matmul uses the tensors that the backward has gathered; it needs no collective. The output head is
not fused, since its loss may be chunked.

`fuse` selects linears by their placement rules, compiled or not. (Inductor's async-TP pass does not
fuse linears with a bias, siblings in the backward, or gathers of a single sequence.) float8 layers
have their own matmuls (`float8/async_tp.py`). On CPUs, without symmetric memory, the same functions
run unfused.

Activations are flattened to (T x B, D), tokens first, so that a rank's shard is one range of rows:
gathered and scattered along dim 0 without copies.

Undocumented operators, tested with torch 2.11, 2.13 and 2.15: fused_all_gather_matmul and
fused_matmul_reduce_scatter of torch.ops.symm_mem.

Shapes: B sequences, T tokens, M = T x B rows, D width, N features of the rank, tp ranks.
Source: Wang et al., overlap by decomposition, ASPLOS 2023; torch's symmetric memory.
"""

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

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
from dtron.parallelisms.placement import (
    LOW_RANK,
    Row,
    change_argument,
    colwise,
    prepare_input,
    rowwise,
)

_DIM = 0


@dataclass(frozen=True)
class Ranks:
    """Size and process group of the tp axis, as arguments of collectives."""

    size: int
    group: str
    """The process group's name."""


def gather_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    ranks: Ranks,
    numbers: Sequence[Tensor | None] = (),
) -> list[Tensor]:
    """All-gather x and multiply it by several colwise weights.

    Args:
        x: (M / tp, D), the rank's shard.
        weights: (N, D) each, the rank's shards, in x's dtype.
        numbers: for each weight, the number of the `Site` that defers its gradient; None: the
            backward computes the gradient.
    Returns:
        (M, N) each.
    """
    outs = _GatherLinear.apply(x, ranks, *weights, *(numbers or [None] * len(weights)))
    assert isinstance(outs, tuple)
    return list(outs)


def linear_scatter(x: Tensor, weight: Tensor, ranks: Ranks, number: Tensor | None = None) -> Tensor:
    """Multiply x (M, N) by a rowwise weight (D, N) and reduce-scatter: (M / tp, D).

    Args:
        number: number of the `Site` that defers the gradient of `weight`; None: not deferred.
    """
    out = _LinearScatter.apply(x, weight, ranks, number)
    assert isinstance(out, Tensor)
    return out


# Without allow_in_graph torch 2.11 cannot trace these functions; 2.13 can.
@torch.compiler.allow_in_graph
class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Ranks, *rest: Any) -> tuple[Tensor, ...]:
        """Compute `gather_linear`; `rest` has the weights, then their numbers."""
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
        x_needs_grad, _, *weights_need_grad = ctx.needs_input_grad
        grad_weights: list[Tensor | None] = [None] * n
        grad, grad_x, pending = _cat(grads, 1), None, None
        deferred = [pair for pair in zip(grads, numbers, strict=True) if pair[1] is not None]
        if deferred:
            grad_x = _matmul_reduce_scatter(grad, _cat(weights, 0), ctx.ranks)
            for grad_out, number in deferred:
                queue_weight_gradient(grad_x, [grad_out, gathered], number)
        elif x_needs_grad:
            pending = start_reduce_scatter(grad @ _cat(weights, 0), ctx.ranks)
        if needed := [i for i in range(n) if weights_need_grad[i]]:
            # One matmul for all siblings whose gradient is neither deferred nor frozen.
            selected = grad if len(needed) == n else _cat([grads[i] for i in needed], 1)
            computed = (selected.t() @ gathered).split([weights[i].shape[0] for i in needed])
            for i, grad_weight in zip(needed, computed, strict=True):
                grad_weights[i] = grad_weight
        if pending is not None:
            grad_x = wait_tensor(pending)
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


def _cat(tensors: Sequence[Tensor], dim: int) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors), dim)


def _all_gather_matmul(
    x: Tensor, factors: Sequence[Tensor], ranks: Ranks
) -> tuple[Tensor, list[Tensor]]:
    """All-gather x (M / tp, D) and multiply by each factor (D, N): (M, D) and (M, N) each."""
    if _fuses(x):
        return torch.ops.symm_mem.fused_all_gather_matmul(
            x.contiguous(), list(factors), _DIM, ranks.group
        )
    gathered = wait_tensor(all_gather(x, ranks.size, ranks.group))
    return gathered, [gathered @ factor for factor in factors]


def _matmul_reduce_scatter(x: Tensor, factor: Tensor, ranks: Ranks) -> Tensor:
    """Multiply x (M, N) by factor (N, D) and reduce-scatter: (M / tp, D)."""
    if _fuses(x):
        return torch.ops.symm_mem.fused_matmul_reduce_scatter(
            x.contiguous(), factor, "sum", _DIM, ranks.group
        )
    return wait_tensor(start_reduce_scatter(x @ factor, ranks))


def _fuses(x: Tensor) -> bool:
    return x.is_cuda


def start_reduce_scatter(x: Tensor, ranks: Ranks) -> Tensor:
    """Start a reduce-scatter: (M, D) -> (M / tp, D)."""
    return reduce_scatter(x, ranks.size, ranks.group)


def flatten_tokens(x: Tensor) -> Tensor:
    """Flatten tokens with the sequence dim first: (B, T, D) -> (T x B, D)."""
    return x.transpose(0, 1).reshape(-1, x.shape[2])


def unflatten_tokens(x: Tensor, batch: int) -> Tensor:
    """Undo `flatten_tokens`: (T x B, D) -> (B, T, D)."""
    return x.view(-1, batch, x.shape[1]).transpose(0, 1)


Role = Literal["gather", "sibling", "scatter"]


class Gathered(NamedTuple):
    """Input of linears that share a fused all-gather."""

    shard: Tensor
    """(B, T / tp, D), the rank's tokens."""
    outs: list[Tensor]
    """The result of each linear, (B, T, N)."""


class AsyncLinear(DeferringLinear):
    """A linear whose matmul is fused with a collective, alone or together with its siblings.

    Subclasses replace the matmuls and keep the communication.
    """

    role: Role | None = None
    """`gather`: all-gathers its input. `sibling`: takes its output from those that the parent
    computes. `scatter`: reduce-scatters its output. None: not fused. Set by `fuse`."""
    ranks: Ranks
    index = 0
    """Position among the siblings."""

    def forward(self, input: Any) -> Tensor:
        """Compute the linear and the collective of its role.

        `gather`: (B, T / tp, D) -> (B, T, N). `sibling`: `Gathered` -> (B, T, N). `scatter`:
        (B, T, N) -> (B, T / tp, D).
        """
        if self.role == "sibling":
            return input.outs[self.index]
        if self.role == "gather":
            return gather_siblings(input, [self])[0]
        if self.role == "scatter":
            out = unflatten_tokens(self.matmul_scatter(flatten_tokens(input)), input.shape[0])
            # Each rank adds the bias to its own tokens only.
            return out if self.bias is None else out + local(self.bias, Partial())
        return super().forward(input)

    def gather_matmul(self, x: Tensor, siblings: Sequence[Any]) -> list[Tensor]:
        """All-gather x (M / tp, D) and multiply: (M, N) of each sibling, without biases."""
        calls = [each.weight_of_call(x, local(each.weight)) for each in siblings]
        weights, numbers = zip(*calls, strict=True)
        return gather_linear(x, weights, self.ranks, numbers)

    def matmul_scatter(self, x: Tensor) -> Tensor:
        """Multiply x (M, N) and reduce-scatter: (M / tp, D), without the bias."""
        weight, number = self.weight_of_call(x, local(self.weight))
        return linear_scatter(x, weight, self.ranks, number)

    def deferred_matmul(self, operands: Sequence[Tensor], dtype: torch.dtype) -> DeferredMatmul:
        """Return the matmul for operands (grad, x) that `queue_weight_gradient` has queued."""
        return LinearMatmul(*operands)


def gather_siblings(x: Tensor, siblings: Sequence[AsyncLinear]) -> list[Tensor]:
    """Compute all siblings with one all-gather: (B, T / tp, D) -> (B, T, N) of each sibling."""
    outs = siblings[0].gather_matmul(flatten_tokens(x), siblings)
    return [
        unflatten_tokens(out if each.bias is None else out + local(each.bias), x.shape[0])
        for out, each in zip(outs, siblings, strict=True)
    ]


def communicate(narrow: Tensor, linear: Any) -> Tensor:
    """Communicate the product of a linear's input and low-rank factor as its role says.

    It is `rank` features wide, so that it is sent by an own collective, after the fused one.
    `scatter`: partial sums (B, T, rank) -> (B, T / tp, rank); other roles: (B, T / tp, rank) ->
    (B, T, rank), whose gradient on each rank is a partial sum.
    """
    mesh, tokens = linear.weight.device_mesh, Shard(1)
    if linear.role == "scatter":
        partial = DTensor.from_local(narrow, mesh, [Partial()], run_check=False)
        return partial.redistribute(placements=[tokens]).to_local()
    shard = DTensor.from_local(narrow, mesh, [tokens], run_check=False)
    return shard.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def local(parameter: Tensor, gradient: Placement | None = None) -> Tensor:
    """Return the local shard of a distributed parameter.

    Args:
        gradient: placement of its gradient; None: the parameter's placement.
    """
    assert isinstance(parameter, DTensor), "the linear's parameters are distributed"
    return parameter.to_local(grad_placements=None if gradient is None else [gradient])


def check_rows(modules: Mapping[str, nn.Module], rows: Mapping[str, Sequence[Any]]) -> None:
    """Check that `fuse` would fuse at least one linear of a model; arguments: those of `fuse`.

    Raises:
        PlacementError: no linear would be fused, although all placement rules are `Row`s.
    """
    every = [row for of_module in rows.values() for row in of_module]
    if not any(_fusable(modules, rows)) and all(isinstance(row, Row) for row in every):
        raise PlacementError(
            "parallel.async_tp = true, but no row gathers or scatters a sequence; use "
            "prepare_input(Shard(1)) before colwise() rows, or rowwise(output=Shard(1)) of an "
            "nn.Linear, or parallel.async_tp = false"
        )


def fuse(
    modules: Mapping[str, nn.Module], rows: Mapping[str, Sequence[Any]], mesh: DeviceMesh
) -> set[tuple[str, Any]]:
    """Split linears and fuse them with the collectives of their placement rules, in place.

    Args:
        modules: modules by FQN.
        rows: placement rules by FQN. Those that no fused function supports are skipped.
    Returns:
        (FQN, placement rule) of the rules that were applied.
    """
    done: set[tuple[str, Any]] = set()
    for name, row, siblings in list(_fusable(modules, rows)):
        if row.kind == "prepare_input":
            for i, (fqn, _) in enumerate(siblings):
                _convert(modules[fqn], "sibling", mesh, i)
            _gather_argument(modules[name], tuple(fqn.rpartition(".")[2] for fqn, _ in siblings))
        else:
            _convert(modules[name], "gather" if row.kind == "colwise" else "scatter", mesh)
        done |= {(name, row), *siblings}
    return done


def _fusable(
    modules: Mapping[str, nn.Module], rows: Mapping[str, Sequence[Any]]
) -> Iterator[tuple[str, Row, list[tuple[str, Row]]]]:
    """Yield (FQN, rule, (FQN, rule) of each sibling if the rule is a `prepare_input`).

    A colwise linear that gathers its own input is fused only if its parent also has a linear that
    scatters, as in latent attention. So an output head is not fused.
    """
    named = [
        (name, row)
        for name in rows
        if name in modules
        for row in rows[name]
        if isinstance(row, Row)
    ]
    # Other subclasses of nn.Linear would lose their own forward.
    fusable = {
        name
        for name, _ in named
        if type(modules[name]) is nn.Linear or isinstance(modules[name], AsyncLinear)
    }
    colwises = [(n, row) for n, row in named if row.kind == "colwise" and row.output == Shard(-1)]
    scatter, gather = rowwise(output=Shard(1)), colwise(inputs=Shard(1))
    scattering = {
        _parent(name)
        for name, row in named
        if row == scatter and isinstance(modules[name], nn.Linear)
    }
    for name, row in named:
        gathers = row == gather and _parent(name) in scattering
        if name in fusable and (row == scatter or gathers):
            yield name, row, []
        elif row == prepare_input(Shard(1), Replicate()):
            siblings = [pair for pair in colwises if _parent(pair[0]) == name]
            if siblings and all(child in fusable for child, _ in siblings):
                yield name, row, sorted(siblings, key=operator.itemgetter(0))


def _parent(fqn: str) -> str:
    return fqn.rpartition(".")[0]


def _convert(linear: nn.Module, role: Role, mesh: DeviceMesh, index: int = 0) -> None:
    """Split a linear's parameters and make the linear an AsyncLinear, in place."""
    distribute_adapter(linear, mesh, "rowwise" if role == "scatter" else "colwise")
    if role == "scatter":
        distribute_parameters(linear, mesh, Shard(1), Replicate())
    else:
        distribute_parameters(linear, mesh, Shard(0), Shard(0))
    if not isinstance(linear, AsyncLinear):
        # torch.compile would compile a function set as `forward` again for each block.
        linear.__class__ = AsyncLinear
    assert isinstance(linear, AsyncLinear)
    linear.role, linear.index = role, index
    linear.ranks = Ranks(mesh.size(), mesh.get_group().group_name)


def _gather_argument(parent: nn.Module, names: tuple[str, ...]) -> None:
    """Replace a module's first argument by the outputs of its linears `names`, a `Gathered`.

    The module may use the argument only as the input of these linears.
    """

    def gather(module: nn.Module, x: Tensor) -> Gathered:
        # By name, not by object, so that blocks share a compiled graph.
        linears: Any = [module.get_submodule(name) for name in names]
        return Gathered(x, gather_siblings(x, linears))

    change_argument(parent, 0, gather)


def distribute_parameters(
    module: nn.Module, mesh: DeviceMesh, weight: Placement, bias: Placement
) -> None:
    """Distribute a module's own parameters: a bias gets the placement `bias`, others `weight`.

    Parameters that are distributed already are left alone. Ranks have equal or no initial weights:
    each keeps its shard, without communication.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        if isinstance(parameter, DTensor):
            continue
        placement = bias if name == "bias" else weight
        shard = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
        setattr(module, name, nn.Parameter(shard, requires_grad=parameter.requires_grad))


def distribute_adapter(module: nn.Module, mesh: DeviceMesh, kind: str) -> None:
    """Distribute the parameters of a module's adapter by `LOW_RANK[kind]`, if it has one.

    What distributes the module's other parameters then leaves them alone.
    """
    for name, dim in LOW_RANK.get(kind, {}).items():
        if (parameter := getattr(module, name, None)) is not None:
            placement = Replicate() if dim is None else Shard(dim)
            shard = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
            setattr(module, name, nn.Parameter(shard, parameter.requires_grad))
