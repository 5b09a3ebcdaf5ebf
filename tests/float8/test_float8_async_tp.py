"""float8 matmuls fused with collectives: arguments and results of torch's operators.

Without GPUs torch's own operators run here too (tests/operators.py).
"""

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed import _symmetric_memory as symmetric
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.functional import ScalingType

from dtron.float8 import RECIPES, Float8Linear, ScaleGroups, convert
from dtron.float8 import async_tp as fused
from dtron.float8.async_tp import (
    AsyncFloat8Linear,
    all_gather_scaled_matmul,
    scaled_matmul_reduce_scatter,
)
from dtron.float8.casting import Scaled
from dtron.float8.recipes import E4M3, E5M2
from dtron.parallelisms.placement import Shard, colwise, prepare_input, rowwise
from dtron.parallelisms.tensor.async_tp import Ranks
from dtron.parallelisms.tensor.tensor_parallel import apply_tensor_parallel, plan
from tests import operators
from tests.gpu_ranks import run_on_gpus
from tests.harness import run_ranks

B, T, D, N = 3, 32, 48, 64
TENSORWISE = RECIPES["tensorwise"]
GATHER, SCATTER = "fused_all_gather_scaled_matmul", "fused_scaled_matmul_reduce_scatter"
CLOSE = 2**-7


def cpu_multiplies_float8() -> bool:
    """torch 2.11 has no kernel of scaled_mm for CPUs."""
    one, scale = torch.ones(16, 16).to(E4M3), torch.ones(1)
    whole = ScalingType.TensorWise
    try:
        torch.nn.functional.scaled_mm(
            one, one.t(), scale, whole, scale, whole, output_dtype=torch.bfloat16
        )
    except NotImplementedError:
        return False
    return True


on_cpus = pytest.mark.skipif(not cpu_multiplies_float8(), reason="scaled_mm does not run on CPUs")


def install_operators() -> list[str]:
    """Let the operators run on this rank's CPU, with what cuBLASLt demands of a product; the list
    tells what is called."""
    called: list[str] = []

    def demand(a: Tensor, b: Tensor, *scales: Tensor) -> None:
        assert (a.stride(), b.stride()) == ((a.shape[1], 1), (1, b.shape[0]))
        assert a.shape[1] % 16 == b.shape[1] % 16 == 0
        assert not a.dtype == b.dtype == E5M2
        assert all(scale.dtype == torch.float32 and scale.numel() == 1 for scale in scales)

    def gather(a: Tensor, bs: list[Tensor], a_scale: Tensor, b_scales: Any, *rest: Any) -> Any:
        called.append(GATHER)
        for b, scale in zip(bs, b_scales, strict=True):
            demand(a, b, a_scale, scale)
        return symmetric._fused_all_gather_scaled_matmul(a, bs, a_scale, b_scales, *rest)

    def scatter(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *rest: Any) -> Tensor:
        called.append(SCATTER)
        demand(a, b, a_scale, b_scale)
        return symmetric._fused_scaled_matmul_reduce_scatter(a, b, a_scale, b_scale, *rest)

    operators.install({GATHER: gather, SCATTER: scatter})
    return called


class Block(nn.Module):
    """Layers that read one input, two of them where there are siblings, and one after them."""

    def __init__(self, siblings: bool) -> None:
        super().__init__()
        self.inner = Inner(siblings)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Inner(nn.Module):
    """What a block adds."""

    def __init__(self, siblings: bool) -> None:
        super().__init__()
        self.q = nn.Linear(D, N)
        self.k = nn.Linear(D, 2 * N, bias=False) if siblings else None
        self.o = nn.Linear(N, D)

    def forward(self, x: Tensor) -> Tensor:
        h = self.q(x).sin()
        return self.o(h if self.k is None else h * self.k(x).unflatten(-1, (2, -1)).sum(-2))


def build(siblings: bool, dtype: torch.dtype, emulate: bool, blocks: int = 1) -> nn.Module:
    """Split over all ranks, on one of them."""
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(*(Block(siblings) for _ in range(blocks)))
    device = "cuda" if torch.cuda.is_available() and not emulate else "cpu"
    model.to(device, dtype)
    mesh = init_device_mesh(device, (dist.get_world_size(),))
    tp = (mesh.get_group().group_name,)
    read = ["q", "k"] if siblings else ["q"]
    kinds: dict[str, type[Float8Linear]] = {}
    rows: dict[str, Any] = {}
    for i in range(blocks):
        rows |= {f"{i}.inner": prepare_input(Shard(1)), f"{i}.inner.o": rowwise(output=Shard(1))}
        rows |= {f"{i}.inner.{name}": colwise() for name in read}
        kinds |= {f"{i}.inner.{name}": AsyncFloat8Linear for name in (*read, "o")}
    convert(model, list(kinds), TENSORWISE, emulate, ScaleGroups(tp, (), tp), kinds)
    apply_tensor_parallel(model, mesh, plan(model, rows, mesh.size()), "step", overlap=True)
    return model


def results(model: nn.Module) -> dict[str, Tensor]:
    """Output, and the gradients of input and weights, of one rank."""
    some = next(model.parameters()).to_local()  # type: ignore[attr-defined]
    ranks, rank = dist.get_world_size(), dist.get_rank()
    generator = torch.Generator().manual_seed(1)
    x, grad = torch.randn(2, B, T, D, generator=generator).to(some).chunk(ranks, 2)[rank]
    x = x.clone().requires_grad_()
    out = model(x)
    out.backward(grad * 1e-3)
    found = {"output": out.detach(), "input": x.grad}
    for name, parameter in model.named_parameters():
        found[name] = parameter.grad.to_local()  # type: ignore[union-attr]
    return {name: tensor.cpu() for name, tensor in found.items()}  # type: ignore[union-attr]


def compare(siblings: bool) -> tuple[list[str], dict[str, float]]:
    """On one rank: operators called, and how far their results are from those of emulation."""
    called = install_operators()
    wanted = results(build(siblings, torch.bfloat16, emulate=True))
    assert not called
    fused._fuses = lambda _data, emulate: not emulate  # type: ignore[assignment]
    found = results(build(siblings, torch.bfloat16, emulate=False))
    return called, distances(found, wanted)


def distances(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> dict[str, float]:
    """||x - wanted|| / ||wanted|| by name."""
    assert found.keys() == wanted.keys()
    assert all(found[name].dtype == tensor.dtype for name, tensor in wanted.items())
    return {
        name: ((found[name] - tensor).float().norm() / tensor.float().norm()).item()
        for name, tensor in wanted.items()
    }


@on_cpus
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("siblings", [True, False])
def test_operators_give_what_emulation_gives(siblings: bool, ranks: int) -> None:
    """Of several sequences, whose tokens are cut, not they."""
    for called, errors in run_ranks(ranks, compare, siblings):
        backward = [GATHER] if siblings else [GATHER, SCATTER]
        assert called == [GATHER, SCATTER, *backward]
        assert max(errors.values()) <= CLOSE, errors


def compile_blocks(blocks: int) -> tuple[dict[str, int], int, dict[str, float]]:
    """On one rank: operators in the graphs that inductor compiles, how many graphs, and how far the
    results are from those without compile; in float32, as inductor rounds less to bfloat16 between
    operators than eager ones do."""
    install_operators()
    fused._fuses = lambda _data, emulate: not emulate  # type: ignore[assignment]
    wanted = results(build(True, torch.float32, False, blocks))
    model, counted = build(True, torch.float32, False, blocks), operators.CountedOperators()
    options = {"post_grad_custom_post_pass": counted}
    for block in model:  # type: ignore[attr-defined]
        block.compile(fullgraph=True, dynamic=False, options=options)
    errors = distances(results(model), wanted)
    return dict(counted.counts), counters["stats"]["unique_graphs"], errors


@pytest.mark.matrix  # as in tests/parallelisms/tensor/test_async_tp.py
@on_cpus
def test_compiled_blocks_share_one_graph_with_the_operators() -> None:
    for counts, graphs, errors in run_ranks(2, compile_blocks, 3, seconds=240):
        # Of the gradients of siblings the sum is scattered. Scales: of an input, of siblings'
        # weights, of their gradients at once.
        assert counts.pop("all_reduce") == 2 * 3
        assert counts == {GATHER: 2, SCATTER: 1, "reduce_scatter_tensor": 1}
        assert graphs == 1
        assert max(errors.values()) <= 2 * CLOSE, errors


def test_calls_obey_the_rules_of_torch() -> None:
    """Shapes and strides of a GPU's call, which torch checks without one."""
    dist.init_process_group("fake", rank=0, world_size=2, store=dist.HashStore())
    try:
        ranks = Ranks(2, dist.group.WORLD.group_name)  # type: ignore[union-attr]
        of_x, of_weight = TENSORWISE.output.left, TENSORWISE.output.right
        with FakeTensorMode():
            one = torch.ones(1, 1, device="cuda")
            x = Scaled(torch.empty(32, D, dtype=E4M3, device="cuda"), one, of_x)
            weights = [
                Scaled(torch.empty(n, D, dtype=E4M3, device="cuda"), one, of_weight)
                for n in (N, 2 * N)
            ]
            options = (torch.bfloat16, False, True, ranks)
            whole, outs = all_gather_scaled_matmul(x, weights, *options)
            assert (whole.data.shape, whole.data.dtype) == ((64, D), E4M3)
            assert [out.shape for out in outs] == [(64, N), (64, 2 * N)]
            out = scaled_matmul_reduce_scatter(whole, weights[0], *options)
            assert (out.shape, out.dtype) == ((32, N), torch.bfloat16)
    finally:
        dist.destroy_process_group()


@pytest.mark.gpu
def test_operators_give_what_unfused_products_give() -> None:
    run_on_gpus(2, on_gpus)


def on_gpus() -> None:
    """On one of two ranks."""
    for siblings in (True, False):
        found = results(build(siblings, torch.bfloat16, emulate=False))
        with mock.patch.object(fused, "_fuses", return_value=False):
            wanted = results(build(siblings, torch.bfloat16, emulate=False))
        errors = distances(found, wanted)
        assert max(errors.values()) <= CLOSE, errors
