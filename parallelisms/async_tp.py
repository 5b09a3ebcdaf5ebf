"""Asynchronous tensor parallelism: matrix products that overlap their own communication.

Under sequence parallelism a layer all-gathers before its colwise products and reduce-scatters after
its rowwise ones. Operators over symmetric memory do each pair at once: the product of one part runs
while the next part travels over NVLink.

Compiled blocks keep torch's styles, and inductor puts the fused operators in place of the pairs
that it recognises. Which ones it does depends on the exact form of the graph (with one sequence a
micro-batch it misses the gathers), so every compiled graph is searched and the operators are
counted: asked for and absent is an error.

Without compile the same operators are called from the placements' rows:

    gather_linear    forward   all-gather + products, fused; one gather for all colwise siblings
                     backward  reduce-scatter of grad_x, under the products of the weight gradients
    linear_scatter   forward   product + reduce-scatter, fused
                     backward  all-gather + product, fused; the gathered gradient makes grad_w too

On the CPU, where there is no symmetric memory, these two functions run unfused. float8 layers call
operators of their own, compiled or not (`float8/fused.py`); here they are counted.

Private names used, tested with torch 2.11 and 2.13: torch.ops.symm_mem.fused_all_gather_matmul and
fused_matmul_reduce_scatter, enable_symm_mem_for_group, torch.ops._c10d_functional, and of inductor
_micro_pipeline_tp and CustomGraphPass with the option post_grad_custom_post_pass.

Shapes: B sequences, T tokens, D width, N features of the rank, tp ranks.
Source: Wang et al., overlap by decomposition, ASPLOS 2023; torch.distributed._symmetric_memory.
"""

import functools
import operator
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.distributed._symmetric_memory import enable_symm_mem_for_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from dtron.errors import ConfigError
from dtron.parallelisms.placement import Row, prepare_input

_c10d = torch.ops._c10d_functional
_COUNTED = {
    "symm_mem": (
        "fused_all_gather_matmul",
        "fused_matmul_reduce_scatter",
        "fused_all_gather_scaled_matmul",
        "fused_scaled_matmul_reduce_scatter",
    ),
    "_c10d_functional": ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce"),
}


def gather_linear(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], tp: int, group: str
) -> list[Tensor]:
    """Products of a gathered sequence with the rank's rows of several weights.

    Args:
        x: (B, T / tp, D), the rank's part of the sequence.
        weights: (N, D) each, the rank's rows, in x's dtype.
        biases: (N,) each, or None.
        tp: ranks of the group.
        group: its name.
    Returns:
        (B, T, N) each.
    """
    outs = _GatherLinear.apply(x, tp, group, *weights)
    assert isinstance(outs, tuple)
    return [y if b is None else y + b for y, b in zip(outs, biases, strict=True)]


def linear_scatter(x: Tensor, weight: Tensor, tp: int, group: str) -> Tensor:
    """(B, T, N) times the rank's columns (D, N) of a weight, summed over the ranks of a group and
    split along the sequence: (B, T / tp, D)."""
    out = _LinearScatter.apply(x, weight, tp, group)
    assert isinstance(out, Tensor)
    return out


class _GatherLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: int, group: str, *weights: Tensor) -> tuple[Tensor, ...]:
        gathered, outs = _all_gather_matmul(x, [w.t() for w in weights], tp, group)
        ctx.save_for_backward(gathered, *weights)
        ctx.tp, ctx.group = tp, group
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        gathered, *weights = ctx.saved_tensors
        rows = [grad.flatten(0, 1) for grad in grads]
        grad_x = rows[0] @ weights[0]
        for grad, weight in zip(rows[1:], weights[1:], strict=True):
            grad_x = torch.addmm(grad_x, grad, weight)
        travelling = _start_reduce_scatter(grad_x.view(gathered.shape), ctx.tp, ctx.group)
        grad_weights = [grad.t() @ gathered.flatten(0, 1) for grad in rows]
        return _c10d.wait_tensor(travelling), None, None, *grad_weights


class _LinearScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, tp: int, group: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.tp, ctx.group = tp, group
        if x.is_cuda:
            return torch.ops.symm_mem.fused_matmul_reduce_scatter(x, weight.t(), "sum", 1, group)
        return _c10d.wait_tensor(_start_reduce_scatter(x @ weight.t(), tp, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        gathered, (grad_x,) = _all_gather_matmul(grad.contiguous(), [weight], ctx.tp, ctx.group)
        return grad_x, gathered.flatten(0, 1).t() @ x.flatten(0, 1), None, None


def _all_gather_matmul(
    x: Tensor, factors: Sequence[Tensor], tp: int, group: str
) -> tuple[Tensor, list[Tensor]]:
    """Gather (B, T / tp, D) along the sequence and multiply with each (D, N)."""
    if x.is_cuda:
        return torch.ops.symm_mem.fused_all_gather_matmul(x, list(factors), 1, group)
    parts = _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), tp, group))
    gathered = parts.unflatten(0, (tp, -1)).transpose(0, 1).flatten(1, 2)
    return gathered, [gathered @ factor for factor in factors]


def _start_reduce_scatter(x: Tensor, tp: int, group: str) -> Tensor:
    """Begin to sum (B, T, D) over the group; what arrives is the rank's (B, T / tp, D)."""
    parts = x.unflatten(1, (tp, -1)).transpose(0, 1).flatten(0, 1)
    return _c10d.reduce_scatter_tensor(parts.contiguous(), "sum", tp, group)


def fuse(
    modules: Mapping[str, nn.Module], rows: Mapping[str, Sequence[Any]], mesh: DeviceMesh
) -> set[tuple[str, Any]]:
    """Put the fused functions in place of the styles of all rows that they can serve.

    Args:
        modules: by FQN.
        rows: rows of `parallelisms.placement` by FQN.
    Returns:
        (FQN, row) of what is done: gathers for colwise linears, and rowwise linears that scatter.
    """
    done: set[tuple[str, Any]] = set()
    colwise = {
        (name, row)
        for name in rows.keys() & modules.keys()
        for row in rows[name]
        if isinstance(row, Row) and row.kind == "colwise" and row.output == Shard(-1)
    }
    for name in rows.keys() & modules.keys():
        for row in rows[name]:
            if not isinstance(row, Row):
                continue
            scatters = row.kind == "rowwise" and row.output == Shard(1)
            if scatters and _is_plain(linear := modules[name]):
                fuse_scatter(linear, mesh)
                done.add((name, row))
            if row == prepare_input(Shard(1), Replicate()):
                served = sorted(
                    ((child, how) for child, how in colwise if child.rpartition(".")[0] == name),
                    key=operator.itemgetter(0),
                )
                if not all(_is_plain(modules[child]) for child, _ in served):
                    continue
                fuse_gather(modules[name], [modules[child] for child, _ in served], mesh)  # type: ignore[misc]
                done |= {(name, row), *served}
    for name, row in colwise - done:
        if row.inputs == Shard(1) and _is_plain(linear := modules[name]):
            fuse_gathered_linear(linear, mesh)
            done.add((name, row))
    return done


def _is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether it multiplies as nn.Linear does: float8 layers have functions of their own."""
    return type(module).forward is nn.Linear.forward


def fuse_gather(parent: nn.Module, linears: Sequence[nn.Linear], mesh: DeviceMesh) -> None:
    """Make colwise linears of a module share one fused gather of the module's first argument.

    The module's forward must use that argument as the input of these linears only: it is handed a
    list of their outputs, from which each takes its own.
    """
    for linear in linears:
        _distribute(linear, mesh, Shard(0), Shard(0))

    def multiply(_module: nn.Module, args: tuple) -> tuple:
        return (_gathered(args[0], linears, mesh), *args[1:])

    parent.register_forward_pre_hook(multiply)
    for i, linear in enumerate(linears):
        linear.forward = functools.partial(_take, i)  # type: ignore[method-assign]


def _take(i: int, outputs: Sequence[Tensor]) -> Tensor:
    return outputs[i]


def fuse_gathered_linear(linear: nn.Linear, mesh: DeviceMesh) -> None:
    """Make one colwise linear gather the sequence itself, as the output head does."""
    _distribute(linear, mesh, Shard(0), Shard(0))
    linear.forward = functools.partial(_gathered_one, linear, mesh)  # type: ignore[method-assign]


def fuse_scatter(linear: nn.Linear, mesh: DeviceMesh) -> None:
    """Make a rowwise linear scatter its sum along the sequence."""
    _distribute(linear, mesh, Shard(1), Replicate())
    linear.forward = functools.partial(_scattered, linear, mesh)  # type: ignore[method-assign]


def _gathered(x: Tensor, linears: Sequence[nn.Linear], mesh: DeviceMesh) -> list[Tensor]:
    weights = [_local(linear.weight) for linear in linears]
    biases = [None if linear.bias is None else _local(linear.bias) for linear in linears]
    return gather_linear(x, weights, biases, mesh.size(), mesh.get_group().group_name)


def _gathered_one(linear: nn.Linear, mesh: DeviceMesh, x: Tensor) -> Tensor:
    return _gathered(x, [linear], mesh)[0]


def _scattered(linear: nn.Linear, mesh: DeviceMesh, x: Tensor) -> Tensor:
    out = linear_scatter(x, _local(linear.weight), mesh.size(), mesh.get_group().group_name)
    if linear.bias is None:
        return out
    assert isinstance(linear.bias, DTensor)  # each rank adds it to its tokens alone
    return out + linear.bias.to_local(grad_placements=[Partial()])


def _local(parameter: Tensor) -> Tensor:
    assert isinstance(parameter, DTensor), "the linear's parameters are distributed"
    return parameter.to_local()


def _distribute(linear: nn.Linear, mesh: DeviceMesh, weight: Placement, bias: Placement) -> None:
    for name, placement in (("weight", weight), ("bias", bias)):
        parameter = getattr(linear, name)
        if parameter is not None:
            split = distribute_tensor(parameter, mesh, [placement], src_data_rank=None)
            setattr(linear, name, nn.Parameter(split, requires_grad=parameter.requires_grad))


class FusedOps(CustomGraphPass):
    """Counts fused operators and collectives left over in every graph that inductor compiles."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()

    def __call__(self, graph: torch.fx.Graph) -> None:
        """Called by inductor with each graph."""
        for node in graph.nodes:
            namespace, *name = str(node.target).split(".")
            if name and name[0] in _COUNTED.get(namespace, ()):
                self.counts[name[0]] += 1

    def uuid(self) -> Any | None:
        """None: a graph from the cache would not be counted, so none is taken."""
        return None

    def enable(self, group: dist.ProcessGroup) -> Mapping[str, Any]:
        """Let inductor fuse collectives of this group; returns the options for torch.compile."""
        with warnings.catch_warnings():
            # Said to be needless, but without it inductor of torch 2.11 fuses nothing, in silence.
            warnings.simplefilter("ignore", FutureWarning)
            enable_symm_mem_for_group(group.group_name)
        return {"_micro_pipeline_tp": True, "post_grad_custom_post_pass": self}

    def check(self) -> None:
        """Raises ConfigError if a compiled graph should have fused operators and none has."""
        if not any(self.counts[name] for name in _COUNTED["symm_mem"]):
            raise ConfigError(
                "parallel.async_tp = true, but the compiled graphs hold no fused operator "
                f"({self or 'no collectives'}); set it to false"
            )

    def __str__(self) -> str:
        return ", ".join(f"{n} {name}" for name, n in sorted(self.counts.items()))
