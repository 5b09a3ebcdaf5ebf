"""Deferred weight gradients equal a plain backward, in every layout they are meant for."""

import copy
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F

from dtron.config import Recompute
from dtron.kernels.grouped import grouped_matmul
from dtron.models.moe import Experts
from dtron.parallelisms.fsdp.torch_internals import accumulate_gradients, reduce_gradients
from dtron.parallelisms.pipeline import weight_gradients
from dtron.parallelisms.pipeline.split_backward import COMPILE_OPTIONS, defer
from dtron.parallelisms.pipeline.weight_gradients import WeightGradients
from dtron.parallelisms.recompute import recompute
from tests.harness import run_ranks
from tests.models.build import small_config

DIM, BLOCKS, BATCH, TOKENS = 16, 3, 2, 8
TOLERANCE = {"float32": 1e-6, "float64": 1e-12}


class Block(nn.Module):
    """Two gated layers, so that a compiled graph has buffers to reuse."""

    def __init__(self, bias: bool):
        super().__init__()
        self.norm = nn.RMSNorm(DIM)
        self.gate = nn.Linear(DIM, DIM, bias=bias)
        self.up = nn.Linear(DIM, DIM, bias=bias)
        self.down = nn.Linear(DIM, DIM, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(2):  # each weight is used twice
            h = self.norm(x)
            x = x + self.down(F.silu(self.gate(h)) * self.up(h))
        return x


class Stage(nn.Module):
    def __init__(self, bias: bool):
        super().__init__()
        self.scale = nn.Embedding(1, DIM)  # in the root unit, and not deferred
        self.blocks = nn.ModuleList(Block(bias) for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.scale(torch.zeros(1, dtype=torch.int64, device=x.device))
        for block in self.blocks:
            x = block(x)
        return x + 0


@dataclass(frozen=True)
class Case:
    """A layout of ranks (replicas, shards, tp) and what the blocks do."""

    replicas: int = 1
    shards: int = 1
    tp: int = 1
    keep: bool = False
    each: bool = False
    sequence: bool = False
    mode: str = "none"
    backend: str = "eager"
    dtype: str = "float32"
    compute: str = ""
    bias: bool = True
    collect: bool = True
    micro_batches: int = 2
    device: str = "cpu"

    @property
    def world(self) -> int:
        return self.replicas * self.shards * self.tp

    def __str__(self) -> str:
        changed = [f"{k}={v}" for k, v in vars(self).items() if v != getattr(Case, k)]
        return "-".join(changed) or "plain"


def build(case: Case) -> Stage:
    torch.manual_seed(0)
    stage = Stage(case.bias).to(getattr(torch, case.dtype))
    nn.init.ones_(stage.scale.weight)
    return stage.to(case.device)


def micro_batches(case: Case, replica: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and output gradients, different for every data-parallel rank."""
    generator = torch.Generator().manual_seed(replica)
    shape = (2 * case.micro_batches, BATCH, TOKENS, DIM)
    both = torch.randn(shape, generator=generator, dtype=torch.float64)
    pairs = both.to(case.device, getattr(torch, case.compute or case.dtype)).chunk(2)
    return list(zip(*pairs, strict=True))


def named_gradients(stage: nn.Module) -> dict[str, Tensor]:
    found = {}
    for name, parameter in stage.named_parameters():
        grad = parameter.grad
        assert grad is not None, name
        found[name] = (grad.full_tensor() if isinstance(grad, DTensor) else grad).cpu()
    return found


def stack_gradients(inputs: list[Tensor]) -> Tensor:
    return torch.stack([x.grad for x in inputs if x.grad is not None]).cpu()


def reference(case: Case) -> dict[str, Tensor]:
    """Gradients of parameters and of rank 0's inputs by plain backwards in one process."""
    stage, inputs = build(case), []
    for replica in range(case.replicas * case.shards):
        for x, grad in micro_batches(case, replica):
            x.requires_grad_()
            stage(x).backward(grad)
            inputs += [x]
    return named_gradients(stage) | {"inputs": stack_gradients(inputs[: case.micro_batches])}


def split_over_tp(block: Block, mesh, sequence: bool) -> None:
    outside = Shard(1) if sequence else None
    styles = {
        "gate": ColwiseParallel(input_layouts=outside),
        "up": ColwiseParallel(input_layouts=outside),
        "down": RowwiseParallel(output_layouts=outside),
    }
    if sequence:
        styles["norm"] = SequenceParallel(use_local_output=True)
    parallelize_module(block, mesh, styles)


def shard_over_data(stage: Stage, mesh, case: Case) -> None:
    compute = getattr(torch, case.compute) if case.compute else None
    wide = torch.float32 if case.compute else None
    policy = MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=wide)
    for unit in (*stage.blocks, stage):
        fully_shard(unit, mesh=mesh, reshard_after_forward=not case.keep, mp_policy=policy)
    for unit in stage.modules():
        if isinstance(unit, FSDPModule):
            unit.set_force_sum_reduction_for_comms(True)
            unit.set_gradient_divide_factor(1.0)


def parallelise(stage: Stage, case: Case) -> tuple[WeightGradients, int, int]:
    """All passes, and this rank's place: (replica x shard, tp)."""
    gradients = defer([stage], compiled=case.backend != "eager")
    recompute(enumerate(stage.blocks), Recompute(mode=case.mode))  # type: ignore[arg-type]
    blocks: list[Block] = list(stage.blocks)  # type: ignore[arg-type]
    for block in blocks if case.backend != "eager" else ():
        options = {"options": COMPILE_OPTIONS} if case.backend == "inductor" else {}
        block.compile(backend=case.backend, fullgraph=True, dynamic=False, **options)
    if case.world == 1:
        return gradients, 0, 0
    mesh = init_device_mesh(
        "cpu", (case.replicas, case.shards, case.tp), mesh_dim_names=("replica", "shard", "tp")
    )
    if case.tp > 1:
        for block in blocks:
            split_over_tp(block, mesh["tp"], case.sequence)
    if case.replicas * case.shards > 1:
        axes = ("replica", "shard") if case.replicas > 1 else ("shard",)
        shard_over_data(stage, mesh[axes], case)
    replica = mesh.get_local_rank("replica") * case.shards + mesh.get_local_rank("shard")
    return gradients, replica, mesh.get_local_rank("tp")


def step(stage: Stage, gradients: WeightGradients, outputs, grads, case: Case) -> None:
    """I0 I1 ... W0 W1 ... after all forwards."""
    sharded = isinstance(stage, FSDPModule)
    if sharded:
        stage.set_requires_gradient_sync(False)
        stage.set_is_last_backward(False)
        stage.set_reshard_after_backward(not case.keep)
    for key, (output, grad) in enumerate(zip(outputs, grads, strict=True)):
        with gradients.collect(key):
            output.backward(grad)
        assert gradients.pending(key) == 6 * BLOCKS
    if not sharded:
        for name, parameter in stage.named_parameters():
            linear = name.endswith(("gate.weight", "up.weight", "down.weight"))
            assert (parameter.grad is None) == linear, name
    for key in range(case.micro_batches):
        gradients.run(key)
        assert gradients.pending(key) == 0
        accumulate_gradients(stage)
        last = key == case.micro_batches - 1
        if sharded and (last or case.each):
            reduce_gradients(stage, last)


def plain_step(stage: Stage, outputs, grads) -> None:
    for i, (output, grad) in enumerate(zip(outputs, grads, strict=True)):
        if isinstance(stage, FSDPModule):
            stage.set_requires_gradient_sync(i == len(outputs) - 1)
            stage.set_is_last_backward(i == len(outputs) - 1)
        output.backward(grad)


def deferred_gradients(case: Case) -> dict[str, Tensor]:
    """Two steps; the gradients of the second."""
    stage = build(case)
    gradients, replica, tp_rank = parallelise(stage, case)
    pairs = micro_batches(case, replica)
    part = slice(tp_rank * TOKENS // case.tp, (tp_rank + 1) * TOKENS // case.tp)
    if case.sequence:
        pairs = [(x[:, part].contiguous(), grad[:, part].contiguous()) for x, grad in pairs]
    inputs = [x.requires_grad_() for x, _ in pairs]
    grads = [grad for _, grad in pairs]
    for _ in range(2):
        stage.zero_grad()
        for x in inputs:
            x.grad = None
        outputs = [stage(x) for x in inputs]
        if case.collect:
            step(stage, gradients, outputs, grads, case)
        else:
            plain_step(stage, outputs, grads)
    return named_gradients(stage) | {"inputs": stack_gradients(inputs)}


def assert_equal(got: dict[str, Tensor], want: dict[str, Tensor], case: Case) -> None:
    for name, expected in want.items():
        if name == "inputs" and case.sequence:
            expected = expected[:, :, : TOKENS // case.tp]
        if name == "scale.weight" and case.sequence:
            continue  # plain, outside of the blocks: each rank has its tokens' part
        error = (got[name] - expected).norm() / expected.norm()
        assert error < TOLERANCE[case.dtype], f"{name}: {error:.1e}"


ONE_RANK = [
    *[
        Case(mode=m, backend=b)
        for m in ("none", "full", "selective")
        for b in ("eager", "aot_eager")
    ],
    Case(dtype="float64"),
    Case(bias=False, backend="aot_eager", dtype="float64"),
    Case(collect=False, backend="aot_eager"),
]
RANKS = [
    Case(shards=2),
    Case(shards=2, keep=True, backend="aot_eager"),
    Case(shards=2, each=True, dtype="float64", micro_batches=3),
    Case(shards=2, mode="full", backend="aot_eager"),
    Case(shards=2, mode="selective"),
    Case(shards=2, collect=False),
    Case(replicas=2, shards=2, each=True, keep=True),
    Case(replicas=2, shards=2, micro_batches=3),
    Case(tp=2),
    Case(tp=2, collect=False),
    Case(tp=2, backend="aot_eager", dtype="float64"),
    Case(tp=2, mode="full", backend="aot_eager"),
    Case(tp=2, mode="selective", sequence=True),
    Case(tp=2, sequence=True, backend="aot_eager"),
    Case(shards=2, tp=2),
    Case(
        shards=2, tp=2, keep=True, each=True, sequence=True, mode="selective", backend="aot_eager"
    ),
]


@pytest.mark.parametrize("case", ONE_RANK, ids=str)
def test_gradients_equal_a_plain_backward(case):
    torch._dynamo.reset()
    assert_equal(deferred_gradients(case), reference(case), case)


@pytest.mark.parametrize("case", RANKS, ids=str)
def test_gradients_equal_a_plain_backward_on_ranks(case):
    got = run_ranks(case.world, deferred_gradients, case)[0]
    assert_equal(got, reference(case), case)


def test_micro_batches_are_summed_in_the_dtype_of_reduction():
    case = Case(shards=2, compute="bfloat16", micro_batches=16)
    got = run_ranks(2, deferred_gradients, case)[0]
    want = run_ranks(2, deferred_gradients, replace(case, collect=False))[0]
    for name in want:
        assert got[name].dtype == want[name].dtype
        assert (got[name] - want[name]).norm() / want[name].norm() < 1e-4, name


@pytest.mark.parametrize("mode", ["none", "selective"])
def test_inductor_keeps_what_is_queued(mode):
    case = Case(mode=mode, backend="inductor", bias=False)
    torch._dynamo.reset()
    assert_equal(deferred_gradients(case), reference(case), case)


@pytest.mark.gpu
def test_inductor_keeps_what_is_queued_on_a_gpu():
    case = Case(backend="inductor", device="cuda")
    torch._dynamo.reset()
    assert_equal(deferred_gradients(case), reference(case), case)


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiling_what_was_not_deferred_for_it_is_refused(backend):
    torch._dynamo.reset()
    stage = build(Case())
    defer([stage])
    stage.blocks[0].compile(backend=backend, fullgraph=True, dynamic=False)
    x = torch.randn(BATCH, TOKENS, DIM)
    with pytest.raises(Exception, match="COMPILE_OPTIONS"):
        stage(x).sum().backward()


def test_blocks_share_one_graph():
    torch._dynamo.reset()
    with torch._dynamo.config.patch(error_on_recompile=True):
        deferred_gradients(Case(backend="aot_eager"))


class Twice(nn.Module):
    """Two equal calls: their gradients are equal, and so are all arguments of the operator."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) + self.linear(x)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_equal_calls_both_count(backend):
    torch._dynamo.reset()
    module, x = Twice(), torch.randn(3, DIM, requires_grad=True)
    plain = copy.deepcopy(module)
    plain(x).sum().backward()
    gradients = defer([module], compiled=backend != "eager")
    if backend != "eager":
        module.compile(backend=backend, fullgraph=True)
    with gradients.collect("only"):
        module(x).sum().backward()
    assert gradients.pending("only") == 2
    gradients.run("only")
    got, want = named_gradients(module), named_gradients(plain)
    assert torch.equal(got["linear.weight"], want["linear.weight"])


class Expert(nn.Module):
    """A layer of experts between two that are none's; the second expert gets no row, and the last
    rows are none's."""

    def __init__(self, dtype: torch.dtype):
        super().__init__()
        self.before = nn.Linear(DIM, DIM, dtype=dtype)
        self.experts = Experts(small_config("mixtral", dim=DIM, n_experts=4)).to(dtype)
        for matrix in self.experts.parameters():
            nn.init.normal_(matrix, std=0.2)
        self.offsets = torch.tensor([3, 3, 9, 12], dtype=torch.int32)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(self.before(x), self.offsets)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("backend", ["", "aot_eager", "inductor"])
def test_experts_gradients_equal_a_plain_backward(backend, dtype):
    torch._dynamo.reset()
    torch.manual_seed(0)
    module = Expert(dtype)
    micro_batches = torch.randn(2, 14, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    plain = copy.deepcopy(module)
    for x in micro_batches:
        plain(x.clone().requires_grad_()).sum().backward()
    gradients = defer([module], compiled=bool(backend))
    call = module
    if backend:
        options = COMPILE_OPTIONS if backend == "inductor" else None
        call = torch.compile(module, backend=backend, fullgraph=True, options=options)
    for i, x in enumerate(micro_batches):
        with gradients.collect(i):
            call(x.clone().requires_grad_()).sum().backward()
    matrices = [module.experts.get_parameter(name) for name in ("gate", "up", "down")]
    assert all(matrix.grad is None for matrix in matrices)  # all of it is left for W
    for i in range(2):
        assert gradients.pending(i) == 4
        gradients.run(i)
    got, want = named_gradients(module), named_gradients(plain)
    tolerance = {torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    for name, gradient in want.items():
        torch.testing.assert_close(got[name], gradient, rtol=tolerance, atol=tolerance, msg=name)
    assert not got["experts.up"][1].any()
    assert got["experts.up"][0].any()


def test_experts_in_float8_are_left_alone():
    module = Expert(torch.float32)
    module.experts.multiply = lambda x, weight, offsets: grouped_matmul(x, weight, offsets)
    gradients = defer([module])
    with gradients.collect(0):
        module(torch.randn(14, DIM, requires_grad=True)).sum().backward()
    assert gradients.pending(0) == 1
    assert module.experts.gate.grad is not None


def test_an_input_without_gradient_is_not_deferred():
    module, x = nn.Linear(DIM, DIM), torch.randn(3, DIM)
    gradients = defer([module])
    with gradients.collect(0):
        module(x).sum().backward()
    assert gradients.pending(0) == 0
    assert module.weight.grad is not None


def test_each_pair_is_freed_when_used(monkeypatch):
    stage = nn.Sequential(*[nn.Linear(DIM, DIM, bias=False) for _ in range(3)])
    storages = []
    for linear in stage:
        linear.register_forward_pre_hook(
            lambda _m, args: storages.append(StorageWeakRef(args[0].untyped_storage()))
        )
    gradients = defer([stage])
    with gradients.collect(0):
        stage(torch.randn(2, DIM, requires_grad=True) * 2).sum().backward()
    alive = []
    compute = weight_gradients._add_weight_gradient

    def watch(*item) -> None:
        alive.append(sum(not storage.expired() for storage in storages))
        compute(*item)

    monkeypatch.setattr(weight_gradients, "_add_weight_gradient", watch)
    gradients.run(0)
    assert alive == [3, 2, 1]
    assert all(storage.expired() for storage in storages)


def test_misuse_is_refused():
    module = nn.Linear(DIM, DIM)
    gradients = defer([module])
    with pytest.raises(ValueError, match="already been replaced"):
        defer([module])
    with pytest.raises(RuntimeError, match="no weight gradients of micro-batch 3"):
        gradients.run(3)
    with gradients.collect(0), pytest.raises(RuntimeError, match="already"), gradients.collect(1):
        pass
    with pytest.raises(RuntimeError, match="already"), gradients.collect(0):
        pass
    with pytest.raises(KeyError), gradients.collect(1):
        raise KeyError
    assert gradients.pending(1) == 0
