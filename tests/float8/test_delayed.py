"""Scales of earlier steps: what counts in them, and when."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.float8 import RECIPES, Float8Linear, ScaleGroups
from dtron.float8.delayed import DelayedScales
from dtron.float8.recipes import E4M3, E5M2
from dtron.float8.scales import magnitude, scale_of
from dtron.setup.rules import resolve
from tests.float8.test_gated import NAMES, pair

E4, E5 = torch.finfo(E4M3).max, torch.finfo(E5M2).max


def made(length: int = 2) -> tuple[Float8Linear, DelayedScales]:
    torch.manual_seed(0)
    linear = nn.Linear(32, 16, bias=False)
    layer = Float8Linear.of(linear, RECIPES["tensorwise"], True, ScaleGroups())
    scales = DelayedScales({"layer": layer}, length, None)
    scales.update()
    return layer, scales


def a_backward(layer: nn.Module, of_x: float, of_grad: float, recompute: bool = False) -> Tensor:
    """With these largest values of input and gradient."""
    x, grad = torch.linspace(-of_x, of_x, 64).view(2, 32), torch.full((2, 16), of_grad)
    x.requires_grad_()
    out = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
    out.backward(grad)
    return out.detach()


def known(layer: Float8Linear) -> list[float]:
    assert layer.delayed is not None
    assert layer.delayed.scales is not None
    return layer.delayed.scales.tolist()


@pytest.mark.parametrize("recompute", [False, True])
def test_scales_are_those_of_the_largest_values_of_the_last_steps(recompute: bool) -> None:
    layer, scales = made(length=2)
    assert layer.delayed is not None
    assert layer.delayed.scales is None  # there was no step
    seen = []
    for of_x, of_grad in ((4.0, 1e-3), (1.0, 1e-5), (2.0, 1e-4)):
        a_backward(layer, of_x, of_grad, recompute)
        a_backward(layer, of_x / 2, of_grad / 2, recompute)  # another micro-batch, of less
        with torch.no_grad():
            layer(torch.full((2, 32), 1e6))  # an evaluation
        layer.weight.data.mul_(2)
        scales.update()
        seen.append(known(layer))
    weight = layer.weight.abs().max().item()
    wanted = [
        (E4 / 4, 4 * E4 / weight, E5 / 1e-3),
        (E4 / 4, 2 * E4 / weight, E5 / 1e-3),
        (E4 / 2, E4 / weight, E5 / 1e-4),  # the first step is forgotten, weights are the last ones
    ]
    for mine, other in zip(seen, wanted, strict=True):
        assert mine == pytest.approx(other, rel=1e-6)
    assert len(scales.histories[0]) == 2


def test_the_first_step_is_dynamic_and_later_ones_saturate() -> None:
    layer, scales = made()
    plain = Float8Linear.of(layer, RECIPES["tensorwise"], True, ScaleGroups())
    assert torch.equal(a_backward(layer, 1.0, 1.0), a_backward(plain, 1.0, 1.0))
    scales.update()
    assert torch.equal(a_backward(layer, 1.0, 1.0), a_backward(plain, 1.0, 1.0))
    assert not torch.equal(a_backward(layer, 8.0, 1.0), a_backward(plain, 8.0, 1.0))


@pytest.mark.parametrize("bad", [math.nan, math.inf, 0.0])
def test_a_bad_step_is_not_remembered(bad: float) -> None:
    layer, scales = made()
    a_backward(layer, 2.0, 1e-3)
    scales.update()
    before = scales.histories.clone()
    a_backward(layer, 2.0, bad)
    scales.update()
    assert torch.equal(scales.histories[:, :, 1], before[:, :, 1])
    assert known(layer)[2] == pytest.approx(E5 / 1e-3, rel=1e-6)
    a_backward(layer, 1.0, 1e-4)  # nor does it spoil the next one
    scales.update()
    assert scales.histories[0, 0].tolist() == pytest.approx([1.0, 1e-4])


def test_float64_weights_have_the_scales_of_current_scaling() -> None:
    """As a rank with current scales has them, not of weights rounded to float32 before."""
    layer, _ = made()
    scales = DelayedScales({"layer": layer.double()}, 2, None)
    scales.histories.fill_(1.0)
    for number in range(1, 50):
        layer.weight.data.fill_(number / 49)
        scales.update()
        current = scale_of(magnitude(layer.weight.data), layer.recipe.output.right)
        assert known(layer)[1] == current.item()


def test_a_step_that_is_not_taken_is_not_remembered() -> None:
    layer, scales = made()
    a_backward(layer, 2.0, 1e-3)
    scales.update(torch.tensor(True))
    before = scales.histories.clone()
    a_backward(layer, 9.0, 1e3)
    scales.update(torch.tensor(False))
    assert torch.equal(scales.histories, before)


@pytest.mark.parametrize("first", [math.nan, 0.0])
def test_small_gradients_after_a_first_step_without_any(first: float) -> None:
    """In E5M2 with a scale of 1 they would be zero, layer after layer."""
    torch.manual_seed(0)
    layers = [
        Float8Linear.of(nn.Linear(16, 16, bias=False), RECIPES["tensorwise"], True, ScaleGroups())
        for _ in range(3)
    ]
    scales = DelayedScales({str(i): layer for i, layer in enumerate(layers)}, 4, None)
    scales.update()
    model, x = nn.Sequential(*layers), torch.randn(4, 16)
    for size in (first, 1e-6, 1e-6):
        model.zero_grad()
        model(x).backward(torch.full((4, 16), size))
        scales.update()
    assert all(layer.weight.grad.norm() > 0 for layer in layers)  # type: ignore[union-attr]
    assert all(layer.delayed.scales is not None for layer in layers)  # type: ignore[union-attr]


def test_one_function_remembers_what_three_layers_do() -> None:
    histories = []
    for ffn in pair():
        layers = {name: ffn.get_submodule(name) for name in NAMES}
        scales = DelayedScales(layers, 3, None)  # type: ignore[arg-type]
        outputs = []
        for step in range(3):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(2, 24, 32, dtype=torch.float64, generator=generator, requires_grad=True)
            out = ffn(x)
            (out.sin().sum() * (1 + step)).backward()
            scales.update()
            outputs += [out.detach(), x.grad]
        histories.append((scales.histories, *scales.scales, *outputs))
    for apart, fused in zip(*histories, strict=True):
        assert torch.equal(apart, fused)


def test_error_is_that_of_scales_by_the_values_themselves() -> None:
    """Of values of one distribution: within 1 dB."""
    layer, scales = made(length=16)
    plain = Float8Linear.of(layer, RECIPES["tensorwise"], True, ScaleGroups())
    noise: list[Tensor] = []
    for _ in range(5):
        x = torch.randn(64, 32)
        exact = nn.functional.linear(x, layer.weight)
        found = [each(x) for each in (layer, plain)]
        noise.append(torch.stack([(y - exact).norm() / exact.norm() for y in found]).detach())
        found[0].backward(torch.randn(64, 16))
        scales.update()
    ours, others = torch.stack(noise[1:]).square().mean(0).log10().mul(-10).tolist()
    assert ours != others
    assert abs(ours - others) < 1.0
    assert ours > 26


@pytest.mark.parametrize(
    ("float8", "parallel", "why"),
    [
        ({"recipe": "rowwise"}, {}, 'use "tensorwise"'),
        ({"recipe": "tensorwise", "gather_inputs": True}, {"tp": 2}, "use one of the two"),
    ],
)
def test_what_cannot_be_delayed_is_refused(
    float8: dict[str, Any], parallel: dict[str, Any], why: str
) -> None:
    config = RunConfig.model_validate(
        {"parallel": parallel, "float8": {"scaling": "delayed", **float8}}
    )
    with pytest.raises(ConfigError, match=f"delayed.*{why}"):
        resolve(config, 2)


def test_history_without_delayed_scales_is_refused() -> None:
    config = RunConfig.model_validate({"float8": {"recipe": "tensorwise", "amax_history": 4}})
    with pytest.raises(
        ConfigError, match=r"amax_history = 4 has no effect without float8\.scaling"
    ):
        resolve(config, 1)
