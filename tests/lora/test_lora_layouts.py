"""LoRA: layouts equal one process, which trains the adapters alone."""

from typing import Any

import pytest
import torch
from torch import nn

from dtron.config import Lora, Parallel, Recompute
from dtron.parallelisms.fsdp.sharding import shard
from dtron.parallelisms.mesh import Mesh
from tests.harness import run_ranks
from tests.parallelisms.parity import EAGER, Batches, Case, float8, selected

LORA = Lora(rank=4, alpha=8.0)
SOME = Lora(rank=8, modules=("blocks.*.attn.w[qv]", "blocks.1.ffn"), rank_stabilized=True)
ADAM: dict[str, Any] = {"optimizer": "adamw"}
FOUR: dict[str, Any] = {"override": {"n_layers": 4}}
ADAMW = {"lora": LORA, **ADAM}
DORA = Lora(rank=4, alpha=8.0, dora=True)
DENSE = DORA.model_copy(update={"modules": ("blocks.*.attn", "blocks.*.ffn.shared")})
DEEP = {"lora": LORA, "override": {"n_layers": 4}}
CASES = [
    Case("llama", 2, Parallel(tp=2), recompute=Recompute(mode="selective"), **ADAMW),
    Case("qwen3", 2, Parallel(tp=2, sequence_parallel=False), compile=EAGER, lora=LORA),
    Case("qwen3", 2, Parallel(cp=2, zero=1), recompute=Recompute(mode="full"), **ADAMW),
    Case("gpt", 2, Parallel(pp=2, schedule="ZBVZeroBubble"), compile=EAGER, **DEEP),
    Case("mixtral", 2, Parallel(ep=2), **ADAMW),
    Case("gpt_oss", 2, Parallel(etp=2), **ADAMW),
    float8("tensorwise", 2, Parallel(zero=2), lora=LORA),
    float8("tensorwise", 2, Parallel(), float8={"all_gather": True}, lora=SOME, loss_chunks=2),
    Case("llama", 4, Parallel(dp_replicate=2), lora=LORA, optimizer="muon", dtype="float64"),
    Case("deepseek_v3", 4, Parallel(tp=2, pp=2, schedule="ZBVZeroBubble"), lora=LORA),
    float8("rowwise", 4, Parallel(tp=2, pp=2), override={"n_layers": 4}, lora=LORA),
    # DoRA; gpt has biases
    Case("gpt", 2, Parallel(tp=2), recompute=Recompute(mode="selective"), lora=DORA, **ADAM),
    Case("gpt", 2, Parallel(tp=2, sequence_parallel=False), compile=EAGER, lora=DORA),
    Case("qwen3", 2, Parallel(cp=2, zero=3), recompute=Recompute(mode="full"), lora=DORA),
    Case("llama", 4, Parallel(tp=2, pp=2, schedule="ZBVZeroBubble"), lora=DORA, **FOUR),
    Case("deepseek_v3", 4, Parallel(tp=2, dp_replicate=2), lora=DENSE, dtype="float64"),
    float8("tensorwise", 4, Parallel(tp=2, zero=2), lora=DORA),
    # async tensor parallelism
    Case("gpt", 2, Parallel(tp=2, async_tp=True), compile=EAGER, lora=DORA, **ADAM),
    Case("deepseek_v3", 2, Parallel(tp=2, async_tp=True), lora=LORA),
    float8("tensorwise", 2, Parallel(tp=2, async_tp=True), lora=DORA),
]


@pytest.fixture(scope="module")
def batches(request: pytest.FixtureRequest) -> Batches:
    return Batches(selected(request))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_layouts_equal_one_process(case: Case, batches: Batches) -> None:
    wrong = batches.outcome(case).wrong(case)
    assert not wrong, "; ".join(wrong)


def _addresses() -> None:
    """Record where the forward reads each weight, and compare with where it is stored."""
    mesh = Mesh(device_type="cpu")
    layers: list[Any] = [nn.Linear(4, 4, bias=False) for _ in range(2)]
    layers[0].bfloat16().requires_grad_(False)
    model = nn.Sequential(*layers)
    stored = [layer.weight.data_ptr() for layer in layers]
    shard(model, mesh, [[layer] for layer in layers], Parallel(), torch.bfloat16)
    read: list[int] = []
    for layer in layers:
        layer.register_forward_hook(lambda layer, *_: read.append(layer.weight.data_ptr()))
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    assert read[0] == stored[0]
    assert read[1] != stored[1]  # a trained weight is cast
    assert layers[1].weight.grad is not None


def test_one_rank_does_not_copy_frozen_weights() -> None:
    run_ranks(1, _addresses)
