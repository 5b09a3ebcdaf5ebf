"""Products fused with tensor parallelism's communication: operators called, graphs, GPUs."""

import copy
import itertools
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _symmetric_memory as symmetric
from torch.distributed.device_mesh import init_device_mesh

from dtron.errors import ConfigError, PlacementError
from dtron.parallelisms.pipeline.split_backward import COMPILE_OPTIONS, defer
from dtron.parallelisms.pipeline.weight_gradients import WeightGradients
from dtron.parallelisms.placement import (
    Replicate,
    Shard,
    colwise,
    prepare_input,
    replicate,
    rowwise,
)
from dtron.parallelisms.tensor import async_tp
from dtron.parallelisms.tensor.async_tp import Ranks, check_rows, gather_linear, linear_scatter
from dtron.parallelisms.tensor.tensor_parallel import apply_tensor_parallel, plan
from tests import operators
from tests.gpu_ranks import run_on_gpus
from tests.harness import run_ranks

B, T, D, N = 3, 32, 48, 64
GATHER, SCATTER = "fused_all_gather_matmul", "fused_matmul_reduce_scatter"


class Inner(nn.Module):
    """Two layers that read one input, and one after them."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(D, N)
        self.k = nn.Linear(D, 2 * N, bias=False)
        self.o = nn.Linear(N, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.o(self.q(x).sin() * self.k(x).unflatten(-1, (-1, 2)).sum(-1))


class Block(nn.Module):
    """What `Inner` adds."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def whole(blocks: int, dtype: torch.dtype, device: str) -> nn.Module:
    """The model of one process."""
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(blocks))).to(device, dtype)


class ByKeyword(Block):
    """Hands its input on as Hugging Face's layers do."""

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x=x)


def split(model: nn.Module) -> nn.Module:
    """Over all ranks, on one of them."""
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    rows: dict[str, Any] = {}
    for i in range(len(model)):  # type: ignore[arg-type]
        rows[f"{i}.inner"] = prepare_input(Shard(1), Replicate())
        rows |= {f"{i}.inner.{name}": colwise() for name in ("q", "k")}
        rows[f"{i}.inner.o"] = rowwise(output=Shard(1))
    apply_tensor_parallel(model, mesh, plan(model, rows, mesh.size()), "step", overlap=True)
    return model


def results(
    model: nn.Module, x: Tensor, grad: Tensor, queue: WeightGradients | None = None
) -> dict[str, Tensor]:
    """Output and gradients, whole, by name; weight gradients by a queue, if there is one."""
    x = x.clone().requires_grad_()
    out = model(x)
    with queue.collect(0) if queue else nullcontext():
        out.backward(grad)
    if queue:
        assert queue.pending(0) == 3 * len(model)  # type: ignore[arg-type]
        queue.run(0)
    assert x.grad is not None
    return {"output": out.detach(), "input": x.grad} | {
        name: p.grad for name, p in model.named_parameters()
    }  # type: ignore[return-value]


def errors_of(
    model: nn.Module, reference: nn.Module, queue: WeightGradients | None = None
) -> dict[str, float]:
    """||found - wanted|| / ||wanted|| on one rank, of a split model against one process's."""
    ranks, rank = dist.get_world_size(), dist.get_rank()
    some = next(reference.parameters())
    x, grad = torch.randn(2, B, T, D, generator=torch.Generator().manual_seed(1)).to(some)
    wanted = results(reference, x, grad)
    mine = x.chunk(ranks, 1)[rank].contiguous()
    found = results(model, mine, grad.chunk(ranks, 1)[rank], queue)
    for name in ("output", "input"):
        wanted[name] = wanted[name].chunk(ranks, 1)[rank]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        mine = parameter.grad.full_tensor()  # type: ignore[attr-defined]
        found[name] = mine
    assert found.keys() == wanted.keys()
    return {
        name: ((found[name] - tensor).float().norm() / tensor.float().norm()).item()
        for name, tensor in wanted.items()
    }


def called_on_ranks(deferred: bool) -> tuple[list[str], dict[str, float]]:
    """On one rank: operators called, and how far the results are from one process's."""
    called: list[str] = []

    def gather(a: Tensor, bs: list[Tensor], *rest: Any) -> Any:
        called.append(GATHER)
        assert a.is_contiguous()
        return symmetric._fused_all_gather_matmul(a, bs, *rest)

    def scatter(a: Tensor, b: Tensor, *rest: Any) -> Tensor:
        called.append(SCATTER)
        assert a.is_contiguous()
        return symmetric._fused_matmul_reduce_scatter(a, b, *rest)

    operators.install({GATHER: gather, SCATTER: scatter})
    async_tp._fuses = lambda _x: True  # type: ignore[assignment]
    reference = whole(1, torch.float64, "cpu")
    model = split(copy.deepcopy(reference))
    return called, errors_of(model, reference, defer([model]) if deferred else None)


@pytest.mark.parametrize(("ranks", "deferred"), [(2, False), (4, False), (2, True)])
def test_operators_give_what_one_process_gives(ranks: int, deferred: bool) -> None:
    """Of several sequences, whose tokens are cut, not they."""
    for called, errors in run_ranks(ranks, called_on_ranks, deferred):
        assert called == [GATHER, SCATTER, GATHER, *([SCATTER] if deferred else [])]
        assert max(errors.values()) <= 1e-12, errors


def called_by_keyword() -> dict[str, float]:
    reference = whole(1, torch.float64, "cpu")
    reference[0].__class__ = ByKeyword  # type: ignore[index]
    return errors_of(split(copy.deepcopy(reference)), reference)


def test_a_module_called_by_keyword() -> None:
    for errors in run_ranks(2, called_by_keyword):
        assert max(errors.values()) <= 1e-12, errors


def compile_blocks(blocks: int, deferred: bool) -> tuple[dict[str, int], int, dict[str, float]]:
    """On one rank: communication in the graphs that inductor compiles, how many graphs, errors."""
    operators.install(
        {
            GATHER: symmetric._fused_all_gather_matmul,
            SCATTER: symmetric._fused_matmul_reduce_scatter,
        }
    )
    async_tp._fuses = lambda _x: True  # type: ignore[assignment]
    reference = whole(blocks, torch.float32, "cpu")
    model, counted = split(copy.deepcopy(reference)), operators.CountedOperators()
    queue = defer([model], compiled=True) if deferred else None
    options: dict[str, Any] = {"post_grad_custom_post_pass": counted}
    options |= COMPILE_OPTIONS if deferred else {}
    for block in model:  # type: ignore[attr-defined]
        block.compile(fullgraph=True, dynamic=False, options=options)
    errors = errors_of(model, reference, queue)
    return dict(counted.counts), counters["stats"]["unique_graphs"], errors


@pytest.mark.parametrize("deferred", [False, True])
def test_compiled_blocks_share_one_graph_with_the_operators(deferred: bool) -> None:
    for counts, graphs, errors in run_ranks(2, compile_blocks, 3, deferred, seconds=240):
        # The siblings' grad_x is scattered under their weights' gradients, if these are not later.
        alone = {SCATTER: 2} if deferred else {SCATTER: 1, "reduce_scatter_tensor": 1}
        assert counts == {GATHER: 2, **alone}
        assert graphs == 1
        assert max(errors.values()) <= 1e-5, errors


def test_calls_obey_the_rules_of_torch() -> None:
    """Shapes of a GPU's call, which torch checks without one."""
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    try:
        ranks = Ranks(2, dist.group.WORLD.group_name)  # type: ignore[union-attr]
        with FakeTensorMode():
            x = torch.empty(32, D, device="cuda")
            weights = [torch.empty(n, D, device="cuda") for n in (N, 2 * N)]
            outs = gather_linear(x, weights, ranks)
            assert [out.shape for out in outs] == [(64, N), (64, 2 * N)]
            down = torch.empty(D, N, device="cuda")
            out = linear_scatter(outs[0], down, ranks)
            assert out.shape == (32, D)
    finally:
        dist.destroy_process_group()


def test_asked_for_and_absent_is_an_error() -> None:
    """Embeddings scatter, and linears that gather alone do, without being fused."""
    model = nn.Sequential(nn.Embedding(D, D), nn.Linear(D, D), nn.Linear(D, D))
    for rows in (
        {"*": replicate()},
        {"0": replicate(), "1": colwise(), "2": rowwise()},
        {"0": rowwise(output=Shard(1)), "1": colwise(inputs=Shard(1)), "2": rowwise()},
    ):
        with pytest.raises(PlacementError, match="no row gathers or scatters a sequence"):
            check_rows(dict(model.named_modules()), plan(model, rows, 2).rows)


def on_hosts() -> None:
    import socket

    socket.gethostname = lambda: f"host{dist.get_rank() % 2}"
    with pytest.raises(ConfigError, match=r"async_tp: ranks .*several hosts \(host0, host1\).*tp"):
        split(whole(1, torch.float64, "cpu"))


def test_ranks_of_several_hosts_are_refused() -> None:
    run_ranks(2, on_hosts)


def frozen_weights() -> tuple[bool, dict[str, float]]:
    """On one rank: whether no frozen weight has a gradient, and the input's error."""
    reference = whole(1, torch.float64, "cpu")
    reference[0].inner.requires_grad_(False)  # type: ignore[union-attr]
    model = split(copy.deepcopy(reference))
    x, grad = torch.randn(
        2, B, T, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1)
    )
    rank = dist.get_rank()
    wanted = results(reference, x, grad)["input"].chunk(2, 1)[rank]
    found = results(model, x.chunk(2, 1)[rank].contiguous(), grad.chunk(2, 1)[rank])["input"]
    error = ((found - wanted).norm() / wanted.norm()).item()
    return all(p.grad is None for p in model.parameters()), {"input": error}


def test_frozen_weights_cost_no_product() -> None:
    for bare, errors in run_ranks(2, frozen_weights):
        assert bare
        assert errors["input"] <= 1e-12


@pytest.mark.gpu
def test_operators_on_gpus() -> None:
    run_on_gpus(2, on_gpus)


def on_gpus() -> None:
    """On one of two ranks."""
    reference = whole(2, torch.float32, "cuda")
    for compiled, deferred in itertools.product((False, True), repeat=2):
        model = split(copy.deepcopy(reference))
        queue = defer([model], compiled) if deferred else None
        options = COMPILE_OPTIONS if deferred else {}
        for block in model if compiled else ():  # type: ignore[attr-defined]
            block.compile(fullgraph=True, dynamic=False, options=options)
        errors = errors_of(model, copy.deepcopy(reference), queue)
        assert max(errors.values()) <= 1e-5, errors
