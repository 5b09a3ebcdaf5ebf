"""Gradients of what one rank has alone are those that FSDP's own reduction gives."""

import copy
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from dtron.config import Parallel
from dtron.parallelisms.fsdp import sharding as fsdp
from dtron.parallelisms.fsdp.torch_internals import (
    _post_backward,
    accumulate_gradients,
    bypass_reduction,
    reduce_gradients,
)
from tests.harness import run_ranks
from tests.parallelisms.parity import Case, parallel_run

DIM = 16


class Turned(nn.Module):
    """Its weight's gradient is made transposed; the spare part is never run."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(DIM, 2 * DIM))
        self.bias = nn.Parameter(torch.randn(DIM))
        self.spare = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.weight).chunk(2, -1)[0] + self.bias


class Calls(TorchDispatchMode):
    """Names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def local(parameter: nn.Parameter) -> Tensor:
    assert isinstance(parameter.grad, DTensor)
    return parameter.grad.to_local()


def trained(model: Any, alone: bool, dtype: torch.dtype, sums: torch.dtype) -> list[Tensor]:
    """Gradients of two steps, of three micro-batches and one, of which each step's last reduces."""
    mesh = init_device_mesh("cpu", (1,))
    units = [*model.children(), model]
    precision = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=sums)
    for module in units:
        unit = fully_shard(module, mesh=mesh, mp_policy=precision)
        if alone:
            bypass_reduction(unit)
    generator, found = torch.Generator().manual_seed(1), []
    for micro_batches in (3, 1):
        for i in range(micro_batches):
            model.set_requires_gradient_sync(i + 1 == micro_batches)
            model(torch.randn(4, DIM, generator=generator)).float().square().sum().backward()
            held = [p.grad is not None for p in model.parameters()]
            assert any(held) == (i + 1 == micro_batches)
        found += [local(p).clone() for p in model.parameters() if p.grad is not None]
        assert all(grad.is_contiguous() for grad in found)
        model.zero_grad()
    return found


def both_ways(dtype: torch.dtype, sums: torch.dtype) -> tuple[list[Tensor], list[Tensor], list]:
    torch.manual_seed(0)
    model = nn.Sequential(Turned(), Turned())
    plain = trained(copy.deepcopy(model), False, dtype, sums)
    with Calls() as calls:
        own = trained(model, True, dtype, sums)
    return own, plain, calls.names


@pytest.mark.parametrize(
    ("dtype", "sums"),
    [
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
    ],
    ids=str,
)
def test_gradients_are_those_of_fsdp(dtype, sums):
    ((own, plain, names),) = run_ranks(1, both_ways, dtype, sums)
    assert len(own) == len(plain) == 2 * 4
    for one, other in zip(own, plain, strict=True):
        assert one.dtype == torch.float32
        assert torch.equal(one, other)
    assert not [name for name in names if "chunk_cat" in name]


def of_tensor_parallel() -> tuple[int, list[str]]:
    """Units that keep their gradients, and which tensors of a step are not those of FSDP's sums."""
    case = Case("gpt", 2, Parallel(tp=2, reduce="micro_batch"), dtype="bfloat16")
    with mock.patch.object(fsdp, "bypass_reduction", wraps=bypass_reduction) as kept:
        own = parallel_run(case)
    with mock.patch.object(fsdp, "bypass_reduction", fsdp._sum_gradients):
        plain = parallel_run(case)
    kinds = ("gradients", "parameters")
    assert [own[kind].keys() for kind in kinds] == [plain[kind].keys() for kind in kinds]
    wrong = [
        f"{kind} {name}"
        for kind in kinds
        for name, one in own[kind].items()
        if not torch.equal(one, plain[kind][name])
    ]
    return kept.call_count, wrong


def test_gradients_of_tensor_parallel_ranks_are_those_of_fsdp():
    for units, wrong in run_ranks(2, of_tensor_parallel, seconds=120):
        assert units > 0
        assert not wrong


def hooked(alone: bool) -> list[Tensor]:
    """What a hook on a parameter that FSDP shards sees of a backward."""
    model, seen = Turned(), []
    unit = fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    if alone:
        bypass_reduction(unit)
    model.bias.register_post_accumulate_grad_hook(lambda parameter: seen.append(local(parameter)))
    model(torch.ones(4, DIM)).sum().backward()
    return seen


@pytest.mark.parametrize("alone", [False, True])
def test_hooks_of_parameters_run(alone):
    ((seen,),) = run_ranks(1, hooked, alone)
    assert torch.equal(seen, torch.full((DIM,), 4.0))


def test_an_error_leaves_reductions_on():
    def fail() -> None:
        raise torch.OutOfMemoryError

    group = SimpleNamespace(fsdp_params=[], reduce_grads=True)
    with pytest.raises(torch.OutOfMemoryError):
        _post_backward(group, fail)
    assert group.reduce_grads


def summed_over_calls() -> tuple[Tensor, Tensor]:
    """Of a pipeline stage, whose reductions are called for: two a step add up."""
    model = Turned()
    wanted = torch.zeros_like(model.bias)
    unit = fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    bypass_reduction(unit)
    for last in (False, True):
        unit.set_requires_gradient_sync(False)
        unit.set_is_last_backward(False)
        model(torch.ones(4, DIM)).sum().backward()
        accumulate_gradients(model)
        wanted += 4
        reduce_gradients(model, last=last)
    return local(model.bias), wanted


def test_reductions_of_a_step_add_up():
    ((found, wanted),) = run_ranks(1, summed_over_calls)
    assert torch.equal(found, wanted)
