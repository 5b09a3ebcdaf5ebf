"""Weight gradients of float8 layers that a split backward defers equal those of a whole one.

The same bodies run by the GPU's kernels: pytest -m gpu tests/float8/test_weight_gradient.py
"""

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from dtron.config import Compile, Parallel
from dtron.float8 import RECIPES, convert
from dtron.float8.convert import fuse
from dtron.float8.delayed import DelayedScales
from dtron.float8.experts import Float8Grouped
from dtron.float8.linear import Float8Linear
from dtron.float8.products import why_emulated
from dtron.float8.recipes import EXPERTS
from dtron.float8.weight_gradient import Operands
from dtron.models.moe import Experts
from dtron.parallelisms.pipeline.split_backward import COMPILE_OPTIONS, defer
from dtron.parallelisms.pipeline.weight_gradients import WeightGradients
from tests.gpu_ranks import run_on_gpus
from tests.harness import run_ranks
from tests.models.build import small_config
from tests.parallelisms.parity import Case, float8, parallel_run

TOKENS, DIM, HIDDEN = 128, 128, 256
N_LINEARS = 5


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, HIDDEN, bias=False)
        self.up = nn.Linear(DIM, HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


class Block(nn.Module):
    """Two layers on one input, with and without a bias, and a gated unit; `twice` calls a layer
    again with the same input, whose backwards are equal."""

    def __init__(self, twice: bool) -> None:
        super().__init__()
        self.twice = twice
        self.norm = nn.RMSNorm(DIM)
        self.wq = nn.Linear(DIM, DIM)
        self.wk = nn.Linear(DIM, DIM, bias=False)
        self.ffn = FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        x = x + self.wq(h) + torch.tanh(self.wk(h))
        x = x + self.wk(h) + self.wk(h) if self.twice else x
        return x + self.ffn(self.norm(x))


def block(recipe: str, device: str, dtype: torch.dtype, twice: bool = False) -> Block:
    """In float8, by kernels where the device has them."""
    torch.manual_seed(0)
    made = Block(twice).to(device, dtype)
    emulate = bool(why_emulated(RECIPES[recipe], torch.device(device), dtype))
    names = [name for name, module in made.named_modules() if isinstance(module, nn.Linear)]
    convert(made, names, RECIPES[recipe], emulate)
    fuse(made, ["ffn"])
    return made


def micro_batches(device: str, dtype: torch.dtype) -> list[tuple[Tensor, Tensor]]:
    """Inputs and gradients of outputs, of different magnitudes, so that scales differ."""
    generator = torch.Generator().manual_seed(1)
    drawn = torch.randn(3, 2, 2, TOKENS // 2, DIM, generator=generator, dtype=torch.float64)
    drawn *= torch.tensor([1.0, 40.0, 0.1]).view(3, 1, 1, 1, 1)
    return [(x.requires_grad_(), grad) for x, grad in drawn.to(device, dtype)]


def run(module: nn.Module, backend: str, gradients: WeightGradients | None) -> dict[str, Any]:
    """All forwards, then I of all, then W of all; without queues whole backwards."""
    torch._dynamo.reset()
    first = next(module.parameters())
    pairs = micro_batches(str(first.device), first.dtype)
    call: Any = module
    if backend:
        options = COMPILE_OPTIONS if backend == "inductor" else None
        call = torch.compile(module, backend=backend, fullgraph=True, options=options)
    outs = [call(x) for x, _ in pairs]
    for i, (out, (_, grad)) in enumerate(zip(outs, pairs, strict=True)):
        if gradients is None:
            out.backward(grad)
            continue
        with gradients.collect(i):
            out.backward(grad)
    for i in range(len(pairs)) if gradients is not None else ():
        assert gradients is not None
        assert gradients.pending(i)
        gradients.run(i)
    found: dict[str, Any] = {name: p.grad for name, p in module.named_parameters()}
    return found | {f"input {i}": x.grad for i, (x, _) in enumerate(pairs)}


def compare(
    recipe: str, backend: str, device: str, dtype: torch.dtype, twice: bool = False
) -> None:
    """Bit by bit where nothing is compiled: then the same kernels get the same numbers. Of a layer
    that is called twice autograd sums the gradients of one backward before it adds them. What is
    compiled in float64 is compared with a block that is not. Compiled in bfloat16 each graph rounds
    elsewhere, and float8 numbers differ: errors are at most twice those of the whole backward, both
    against one in float64."""
    plain, split = (block(recipe, device, dtype, twice) for _ in range(2))
    wanted = run(plain, "" if dtype == torch.float64 else backend, None)
    found = run(split, backend, defer([split], compiled=bool(backend)))
    assert found.keys() == wanted.keys()
    limits = dict.fromkeys(wanted, 1e-12 if backend or twice else 0.0)
    if backend and dtype != torch.float64:
        exact = run(block(recipe, device, torch.float64, twice), "", None)
        limits = {name: 2 * _error(wanted[name], exact[name]) for name in wanted}
        wanted = exact
    for name, other in wanted.items():
        assert backend or found[name].dtype == other.dtype, name
        error = _error(found[name], other)
        assert error <= limits[name], (name, error)


def _error(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("backend", ["", "aot_eager_decomp_partition"])
def test_split_backwards_equal_whole_ones(recipe: str, backend: str) -> None:
    compare(recipe, backend, "cpu", torch.float64)


def test_split_backwards_equal_whole_ones_in_bfloat16() -> None:
    compare("tensorwise", "", "cpu", torch.bfloat16)


def test_inductor_keeps_what_is_queued() -> None:
    compare("tensorwise", "inductor", "cpu", torch.float64)


@pytest.mark.parametrize("backend", ["", "aot_eager_decomp_partition"])
def test_equal_calls_both_count(backend: str) -> None:
    compare("tensorwise", backend, "cpu", torch.float64, twice=True)


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("backend", ["", "inductor"])
def test_split_backwards_equal_whole_ones_on_a_gpu(recipe: str, backend: str) -> None:
    compare(recipe, backend, "cuda", torch.bfloat16, twice=bool(backend))


SPLIT = float8("tensorwise", 2, Parallel(pp=2, schedule="ZBVZeroBubble"), steps=1)
WHOLE = replace(SPLIT, parallel=Parallel(pp=2, schedule="1F1B"))
INDUCTOR = Compile(enable=True)


def of_pipeline(case: Case) -> dict[str, Tensor]:
    """Gradients of all stages."""
    ranks: list[Any] = [parallel_run(case)] * dist.get_world_size()
    dist.all_gather_object(ranks, ranks[dist.get_rank()])
    return {name: grad for rank in ranks for name, grad in rank["gradients"].items()}


def pipelines_are_equal(dtype: str, compile: Compile, limit: float) -> None:
    """On one of two ranks: ZBVZeroBubble and 1F1B, on the same device."""
    split, whole = (replace(c, dtype=dtype, compile=compile) for c in (SPLIT, WHOLE))
    found, wanted = of_pipeline(split), of_pipeline(whole)
    assert found.keys() == wanted.keys()
    for name, other in wanted.items():
        error = float((found[name] - other).norm() / other.norm())
        assert error <= limit, (name, error)


def test_pipelines_are_equal() -> None:
    run_ranks(2, pipelines_are_equal, "float64", Compile(), 1e-10, seconds=240)


@pytest.mark.gpu
@pytest.mark.parametrize("compile", [Compile(), INDUCTOR], ids=["eager", "compiled"])
def test_pipelines_are_equal_on_gpus(compile: Compile) -> None:
    run_on_gpus(2, pipelines_are_equal, "bfloat16", compile, 2e-2)


def queued(recipe: str) -> list[Operands]:
    """Of one micro-batch, in bfloat16."""
    module = block(recipe, "cpu", torch.bfloat16)
    gradients = defer([module])
    ((x, grad), *_) = micro_batches("cpu", torch.bfloat16)
    with gradients.collect(0):
        module(x).backward(grad)
    assert gradients.pending(0) == N_LINEARS
    return [matmul.operands for _, matmul, _ in gradients._queues[0]]  # type: ignore[attr-defined]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_queue_holds_what_was_cast(recipe: str) -> None:
    for each in queued(recipe):
        size = 1 if RECIPES[recipe].grad_weight else 2
        assert {each.left.element_size(), each.right.element_size()} == {size}
        assert len(each.scales) == (2 if size == 1 else 0)


def test_frozen_weights_and_inputs_without_gradient_are_not_deferred() -> None:
    module = block("tensorwise", "cpu", torch.float64)
    gate, down = (module.get_submodule(f"ffn.{name}") for name in ("gate", "down"))
    gate.weight.requires_grad_(False)  # type: ignore[union-attr, operator]
    gradients = defer([module])
    ((x, grad), *_) = micro_batches("cpu", torch.float64)
    with gradients.collect(0):
        module(x).backward(grad)
    assert gradients.pending(0) == N_LINEARS - 1
    gradients.run(0)
    assert gate.weight.grad is None
    module.zero_grad()
    with gradients.collect(1):
        down(torch.randn(TOKENS, HIDDEN, dtype=torch.float64)).sum().backward()
    assert gradients.pending(1) == 0
    assert down.weight.grad is not None


def test_delayed_scales_see_magnitudes_in_i() -> None:
    found = []
    for split in (False, True):
        module = block("tensorwise", "cpu", torch.float64)
        layers = {n: m for n, m in module.named_modules() if isinstance(m, Float8Linear)}
        scales = DelayedScales(layers, 2, None)
        scales.update()
        gradients = defer([module]) if split else None
        for i, (x, grad) in enumerate(micro_batches("cpu", torch.float64)):
            if gradients is None:
                module(x).backward(grad)
                continue
            with gradients.collect(i):
                module(x).backward(grad)
        found.append(scales.seen.clone())
        assert scales.seen.any()  # before any W
    assert found[0].all()
    assert torch.equal(*found)


def experts_are_equal(backend: str, device: str, dtype: torch.dtype) -> None:
    """Float8 experts behind a linear layer; the second expert gets no row."""
    offsets = torch.tensor([30, 30, 90, 120], dtype=torch.int32, device=device)
    torch.manual_seed(0)
    experts = Experts(small_config("mixtral", dim=DIM, n_experts=4, expert_dim=64))
    for matrix in experts.parameters():
        nn.init.normal_(matrix, std=0.2)
    experts.multiply = Float8Grouped(bool(why_emulated(EXPERTS, torch.device(device), dtype)))
    experts.to(device, dtype)

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = copy.deepcopy(experts)

        def forward(self, x: Tensor) -> Tensor:
            return self.experts(x.flatten(0, 1), offsets).view(x.shape)

    plain, split = Layer(), Layer()
    wanted = run(plain, "" if dtype == torch.float64 else backend, None)
    found = run(split, backend, defer([split], compiled=bool(backend)))
    for name, other in wanted.items():
        error = (found[name] - other).double().norm() / other.double().norm()
        assert error <= (1e-12 if dtype == torch.float64 else 1e-2), (name, float(error))


@pytest.mark.parametrize("backend", ["", "aot_eager_decomp_partition"])
def test_experts_are_equal(backend: str) -> None:
    experts_are_equal(backend, "cpu", torch.float64)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["", "inductor"])
def test_experts_are_equal_on_a_gpu(backend: str) -> None:
    experts_are_equal(backend, "cuda", torch.bfloat16)


def test_deferring_twice_is_refused() -> None:
    module = block("tensorwise", "cpu", torch.float32)
    defer([module])
    with pytest.raises(ValueError, match="already been deferred"):
        defer([module])


def test_compiling_what_was_not_deferred_for_it_is_refused() -> None:
    torch._dynamo.reset()
    module = block("tensorwise", "cpu", torch.float32)
    defer([module])
    ((x, _), *_) = micro_batches("cpu", torch.float32)
    with pytest.raises(Exception, match="COMPILE_OPTIONS"):
        torch.compile(module, backend="aot_eager", fullgraph=True)(x)
