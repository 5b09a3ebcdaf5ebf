"""Experts on sorted rows, tokens to their experts and back, capacity."""

from typing import Any

import pytest
import torch
from torch import Tensor

from dtron.kernels.grouped import grouped_matmul, looped_matmul
from dtron.models.moe import (
    Experts,
    MoE,
    capacity,
    within_capacity,
)
from tests.models.build import small_config

LOADS = {
    "some each": [5, 3, 1, 2, 6, 2, 4, 1],
    "zero tokens": [0, 9, 0, 0, 8, 0, 7, 0],
    "all to the first": [24, 0, 0, 0, 0, 0, 0, 0],
    "all to the last": [0, 0, 0, 0, 0, 0, 0, 24],
    "none at all": [0] * 8,
}


def filled(module: torch.nn.Module, scale: float = 0.1) -> Any:
    generator = torch.Generator().manual_seed(0)
    for parameter in module.parameters():
        parameter.data = scale * torch.randn(parameter.shape, generator=generator)
    return module


def offsets_of(loads: list[int]) -> Tensor:
    return torch.tensor(loads).cumsum(0).int()


def one_by_one(experts: Experts, x: Tensor, loads: list[int]) -> Tensor:
    """Every expert as a feed-forward layer of its own, rows after the last one zero."""
    out, first = torch.zeros_like(x), 0
    for expert, count in enumerate(loads):
        rows = slice(first, first + count)

        def product(name: str, h: Tensor, expert: int = expert) -> Tensor:
            bias = getattr(experts, f"{name}_bias")
            y = h @ getattr(experts, name)[expert].T
            return y if bias is None else y + bias[expert]

        up = product("up", x[rows])
        if experts.activation.gated:
            h = experts.activation(product("gate", x[rows]), up)
        else:
            h = experts.activation.function(up)
        out[rows] = product("down", h)
        first += count
    return out


def gradients_of(module: torch.nn.Module, x: Tensor, out: Tensor) -> list[Tensor]:
    target = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out.dtype)
    wanted = [x, *module.parameters()]
    return list(torch.autograd.grad((out * target).sum(), wanted))


@pytest.mark.parametrize("tail", [0, 8])
@pytest.mark.parametrize("loads", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize(
    "override",
    [{}, {"bias": True, "activation": "clamped_swiglu"}, {"activation": "relu2"}],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_experts_equal_layers_of_their_own(override, loads, tail, dtype):
    experts = filled(Experts(small_config("mixtral", **override))).to(dtype)
    n_rows = sum(loads) + tail
    if n_rows == 0:
        return
    x = torch.randn(n_rows, 64, dtype=dtype, requires_grad=True)
    out = experts(x, offsets_of(loads), tail=tail > 0)
    wanted = one_by_one(experts, x, loads)
    torch.testing.assert_close(out, wanted, rtol=1e-5, atol=1e-6)
    assert not out[sum(loads) :].any()
    found, expected = gradients_of(experts, x, out), gradients_of(experts, x, wanted)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    assert not found[0][sum(loads) :].any()


def test_rows_of_garbage_do_no_harm():
    """Not even if the tail of the input is not a number."""
    experts = filled(Experts(small_config("gpt_oss", activation="swiglu")))
    x = torch.randn(32, 64)
    x[24:] = torch.nan
    x.requires_grad_()
    out = experts(x, offsets_of(LOADS["some each"]))
    assert not out[24:].any()
    assert all(g.isfinite().all() for g in gradients_of(experts, x, out))


@pytest.mark.parametrize("loads", LOADS.values(), ids=LOADS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_grouped_equals_looped(loads, dtype):
    n_rows = max(sum(loads), 1)
    x = torch.randn(n_rows, 16, dtype=dtype, requires_grad=True)
    weight = torch.randn(8, 24, 16, dtype=dtype, requires_grad=True)
    results = []
    for product in (grouped_matmul, looped_matmul):
        out = product(x, weight, offsets_of(loads))[: sum(loads)]
        gradients = torch.autograd.grad(out.square().sum(), (x, weight))
        results.append([out, gradients[0][: sum(loads)], gradients[1]])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for one, other in zip(*results, strict=True):
        assert (one.float() - other.float()).norm() <= tolerance * other.float().norm()


def test_shapes_that_grouped_mm_refuses_are_looped():
    x, weight = torch.randn(24, 15), torch.randn(8, 7, 15)
    out = grouped_matmul(x, weight, offsets_of(LOADS["some each"]))
    assert torch.equal(out, looped_matmul(x, weight, offsets_of(LOADS["some each"])))


def by_hand(moe: MoE, x: Tensor) -> Tensor:
    """Token by token, choice by choice."""
    weights, chosen, *_ = moe.router(x)
    out = torch.zeros_like(x)
    for row in range(x.shape[0]):
        for token in range(x.shape[1]):
            for weight, expert in zip(weights[row, token], chosen[row, token], strict=True):
                loads = [int(e == expert) for e in range(8)]
                result = one_by_one(moe.experts, x[row, token].unsqueeze(0), loads)
                out[row, token] += weight * result[0]
    if moe.shared is not None:
        shared = moe.shared(x)
        out = out + (shared if moe.shared_gate is None else shared * moe.shared_gate(x).sigmoid())
    return out


@pytest.mark.parametrize(
    ("name", "override"),
    [
        ("mixtral", {}),
        ("qwen3_moe", {"experts_per_token": 8}),
        ("deepseek_v3", {"n_shared_experts": 2}),
        ("qwen3_moe", {"n_shared_experts": 1, "shared_gate": True}),
        ("gpt_oss", {}),
    ],
)
def test_mixture_is_the_weighted_sum(name, override):
    config = small_config(name, **override, balance="none", balance_coefficient=0.0)
    moe = filled(MoE(config), 0.3)
    x = torch.randn(2, 5, 64, requires_grad=True)
    out, wanted = moe(x)[0], by_hand(moe, x)
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    for one, other in zip(gradients_of(moe, x, out), gradients_of(moe, x, wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)


def test_mixture_in_bfloat16():
    moe = filled(MoE(small_config("deepseek_v3")), 0.3)
    x = torch.randn(2, 16, 64)
    exact = moe(x)[0]
    out = moe.bfloat16()(x.bfloat16())[0]
    assert out.dtype == torch.bfloat16
    near = (out.float() - exact).norm(dim=-1) < 0.05 * exact.norm(dim=-1)
    assert near.float().mean() > 0.8  # a token near a tie may take other experts


def test_capacity():
    assert capacity(64, 8, 1.0) == 8
    assert capacity(64, 8, 1.25) == 10
    assert capacity(10, 8, 1.0) == 2
    chosen = torch.tensor([[0, 1], [0, 2], [3, 0], [0, 1], [1, 3]])
    wanted = torch.tensor([[0, 1], [0, 2], [3, 4], [4, 1], [4, 3]])
    assert torch.equal(within_capacity(chosen, 4, 2), wanted)
    assert torch.equal(within_capacity(chosen, 4, 4), chosen)
    assert (within_capacity(chosen, 4, 0) == 4).all()


def dropped_by_hand(moe: MoE, x: Tensor, most: int) -> Tensor:
    weights, chosen, *_ = moe.router(x)
    weights, chosen, flat = (t.flatten(0, 1) for t in (weights, chosen, x))
    out, taken = torch.zeros_like(flat), [0] * 8
    for token in range(len(flat)):
        for weight, expert in zip(weights[token], chosen[token].tolist(), strict=True):
            taken[expert] += 1
            if taken[expert] <= most:
                loads = [int(e == expert) for e in range(8)]
                out[token] += weight * one_by_one(moe.experts, flat[token].unsqueeze(0), loads)[0]
    return out.view_as(x)


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("factor", [0.5, 1.0, 8.0])
def test_what_is_over_capacity_is_dropped(factor, pad):
    settings = {"capacity_factor": factor, "capacity_pad": pad}
    config = small_config("mixtral", **settings, balance="none", balance_coefficient=0.0)
    moe = filled(MoE(config), 0.3)
    x = torch.randn(2, 12, 64, requires_grad=True)
    most = capacity(48, 8, factor)
    out, counts, _ = moe(x)
    wanted = dropped_by_hand(moe, x, most)
    assert counts.sum() == 48, "loads are those that the router asked for"
    torch.testing.assert_close(out, wanted, rtol=1e-4, atol=1e-5)
    for one, other in zip(gradients_of(moe, x, out), gradients_of(moe, x, wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)
    if factor == 8.0:
        torch.testing.assert_close(out, by_hand(moe, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("factor", "pad"), [(0.0, False), (1.0, False), (1.0, True)])
def test_padding_takes_no_experts_and_no_room(factor, pad):
    """What real tokens get is what they get without padding, gradients of all weights too."""
    settings = {"capacity_factor": factor, "capacity_pad": pad}
    config = small_config("mixtral", **settings, balance="none", balance_coefficient=0.0)
    moe, n = filled(MoE(config), 0.3), 5
    x = torch.randn(1, 12, 64, requires_grad=True)
    real = torch.arange(12).expand(1, -1) < n
    out, counts, _ = moe(x, real=real)
    wanted, alone, _ = moe(x[:, :n])
    assert torch.equal(counts, alone)
    assert not out[:, n:].any()
    torch.testing.assert_close(out[:, :n], wanted)
    for one, other in zip(gradients_of(moe, x, out), gradients_of(moe, x, wanted), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
