"""Rows of the tables of norms and activations, and the rotary table, against their formulas."""

import math

import pytest
import torch
from torch import Tensor

from dtron.models.layers import ACTIVATIONS, NORMS, FeedForward, LayerNorm
from dtron.models.rope import apply_rope, rope_frequencies, rope_table
from tests.models.build import small_config

CPU = torch.device("cpu")


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def standard(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, unbiased=False) + 1e-5).sqrt()


@pytest.mark.parametrize("zero_centered", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("name", "formula"), [("rmsnorm", rms), ("layernorm", standard)])
def test_norm(name, formula, dtype, zero_centered):
    torch.manual_seed(0)
    x = (torch.randn(3, 5, 32) * 4 + 1).to(dtype)
    norm = NORMS[name](32, 1e-5, zero_centered).to(dtype)
    torch.nn.init.normal_(norm.weight, 0.0 if zero_centered else 1.0, 0.1)
    expected = formula(x.double()) * (norm.weight.double() + zero_centered)
    if isinstance(norm, LayerNorm):
        torch.nn.init.normal_(norm.bias)
        expected = expected + norm.bias.double()
    out = norm(x)
    assert out.dtype == dtype
    tolerance = {torch.bfloat16: 2e-2, torch.float32: 1e-5, torch.float64: 1e-12}[dtype]
    torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


def test_zero_centered_gamma_keeps_small_weights_in_bfloat16():
    norm = NORMS["rmsnorm"](8, 1e-5, True).bfloat16()
    norm.weight.data.fill_(1e-3)  # 1 + 1e-3 is 1 in bfloat16
    x = torch.full((1, 8), 3.0, dtype=torch.bfloat16)
    exact = torch.nn.functional.rms_norm(x.float(), (8,), 1 + norm.weight.float(), 1e-5)
    torch.testing.assert_close(norm(x), exact.bfloat16(), rtol=0, atol=0)


def gelu_tanh(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


FORMULAS = {
    "swiglu": lambda gate, up: gate * torch.sigmoid(gate) * up,
    "geglu": lambda gate, up: gelu_tanh(gate) * up,
    "gelu": lambda gate, up: gelu_tanh(up),
    "gelu_exact": lambda gate, up: up * (1 + (up / 2**0.5).erf()) / 2,
    "relu": lambda gate, up: up.clamp(min=0),
    "relu2": lambda gate, up: up.clamp(min=0) ** 2,
    "clamped_swiglu": lambda gate, up: (
        (up.clamp(-7, 7) + 1) * gate.clamp(max=7) / (1 + (-1.702 * gate.clamp(max=7)).exp())
    ),
}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("name", list(ACTIVATIONS))
def test_feed_forward(name, bias):
    torch.manual_seed(0)
    layer = FeedForward(small_config("llama", activation=name, bias=bias)).double()
    names = {child for child, _ in layer.named_children()}
    assert names == ({"gate", "up", "down"} if ACTIVATIONS[name].gated else {"up", "down"})
    assert (layer.down.bias is not None) == bias
    x = 20 * torch.randn(2, 3, 64, dtype=torch.float64)  # the clamps act
    gate = layer.gate(x) if ACTIVATIONS[name].gated else None
    expected = layer.down(FORMULAS[name](gate, layer.up(x)))
    torch.testing.assert_close(layer(x), expected)


def test_rope_turns_pairs_of_halves_by_their_angle():
    config = small_config("llama", rope_theta=100.0)
    positions = torch.tensor([[0, 1, 7]])
    table = rope_table(config, positions)
    assert table.dtype == torch.float32
    assert table.shape == (1, 3, 16)
    x = torch.randn(2, 3, 4, 16)
    out = apply_rope(x, table)
    torch.testing.assert_close(out[:, 0], x[:, 0])
    for i in range(8):
        turn = torch.polar(torch.tensor(1.0), torch.tensor(7 * 100.0 ** (-i / 8)))
        pair = torch.complex(x[:, 2, :, i], x[:, 2, :, i + 8]) * turn
        torch.testing.assert_close(torch.complex(out[:, 2, :, i], out[:, 2, :, i + 8]), pair)


def test_rope_depends_on_distance_only():
    config = small_config("llama")
    q, k = torch.randn(1, 6, 1, 16), torch.randn(1, 6, 1, 16)

    def scores(start: int) -> Tensor:
        table = rope_table(config, torch.arange(start, start + 6).unsqueeze(0))
        return torch.einsum("bthk,bshk->bts", apply_rope(q, table), apply_rope(k, table))

    torch.testing.assert_close(scores(0), scores(50), rtol=1e-4, atol=1e-4)


def test_rope_is_computed_in_float32_and_returned_in_the_dtype_of_the_heads():
    config = small_config("llama")
    table = rope_table(config, torch.arange(1000, 1008).unsqueeze(0))
    x = torch.randn(1, 8, 2, 16, dtype=torch.bfloat16)
    out = apply_rope(x, table)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, apply_rope(x.float(), table).bfloat16(), rtol=0, atol=0)
    assert apply_rope(x.double(), table).dtype == torch.float64
    with pytest.raises(AssertionError, match="was cast to another dtype"):
        apply_rope(x, table.bfloat16())


def test_rope_scaling_keeps_high_and_divides_low_frequencies():
    plain = rope_frequencies(small_config("llama", head_dim=128), CPU)
    scaled = rope_frequencies(
        small_config("llama", head_dim=128, rope_scaling_factor=8.0, rope_original_context=8192),
        CPU,
    )
    wavelength = 2 * math.pi / plain
    ratio = plain / scaled
    torch.testing.assert_close(ratio[wavelength < 8192 / 4], ratio[wavelength < 8192 / 4] * 0 + 1)
    torch.testing.assert_close(ratio[wavelength > 8192], ratio[wavelength > 8192] * 0 + 8)
    between = ratio[(wavelength > 8192 / 4) & (wavelength < 8192)]
    assert len(between)
    assert ((between > 1) & (between < 8)).all()
