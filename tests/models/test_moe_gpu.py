"""Experts on a GPU: grouped products equal looped ones, and the host waits for nothing."""

from typing import Any

import pytest
import torch

from dtron.kernels.grouped import grouped_matmul, looped_matmul
from dtron.models.moe import MoE
from tests.models.build import initialized, small_config, tokens, varied

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LOADS = {
    "some each": [500, 3, 100, 77, 6, 211, 4, 123],
    "zero tokens": [0, 900, 0, 0, 8, 0, 116, 0],
    "all to one": [0, 0, 1024, 0, 0, 0, 0, 0],
}


@pytest.mark.parametrize("loads", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_grouped_equals_looped(loads: list[int], dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x = torch.randn(1024 + 64, 256, dtype=dtype, device="cuda", requires_grad=True)
    weight = torch.randn(8, 384, 256, dtype=dtype, device="cuda", requires_grad=True)
    offsets = torch.tensor(loads, device="cuda").cumsum(0).int()
    results = []
    for product in (grouped_matmul, looped_matmul):
        out = product(x, weight, offsets)[:1024]
        gradients = torch.autograd.grad(out.square().sum(), (x, weight))
        results.append([out, gradients[0][:1024], gradients[1]])
    for one, other in zip(*results, strict=True):
        assert (one.float() - other.float()).norm() <= 1e-2 * other.float().norm()


SETTINGS = [
    ("mixtral", {}),
    ("deepseek_v3", {"capacity_factor": 1.0, "z_loss": 0.1}),
    ("deepseek_v3", {"capacity_factor": 1.0, "capacity_pad": True}),
    ("gpt_oss", {}),
    ("qwen3_moe", {"router": "sinkhorn", "renormalize": False}),
]


@pytest.mark.parametrize(("name", "override"), SETTINGS, ids=str)
def test_nothing_waits_for_the_device(name: str, override: dict[str, Any]) -> None:
    moe = MoE(small_config(name, **override)).to("cuda", torch.bfloat16)
    for parameter in moe.parameters():
        parameter.data.normal_(0, 0.1)
    x = torch.randn(2, 128, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    moe(x)[0].sum().backward()  # what waits once, at the start, is over
    torch.cuda.set_sync_debug_mode("error")
    try:
        out, counts, losses = moe(x)
        (out * out).sum().backward()
        moe.router.record(counts, losses)
        moe.router.update_bias(counts)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert x.grad is not None
    assert x.grad.isfinite().all()


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "deepseek_v3"])
def test_gpu_equals_cpu(name: str) -> None:
    model = varied(initialized(name, small_config(name, force_balance=True)))
    wanted = model(tokens())
    found = model.to("cuda")(tokens().cuda())
    assert (found.cpu() - wanted).norm() < 1e-3 * wanted.norm()
