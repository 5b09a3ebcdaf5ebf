"""Every recipe: its numbers beside torchao's, its error, its scales, and which layers it takes."""

import dataclasses

import pytest
import torch
from torch import Tensor, nn

from dtron.errors import ConfigError
from dtron.float8 import RECIPES, Float8Linear, ScaleGroups, convert, layer_names
from dtron.float8.casting import dequantize, quantize
from dtron.float8.convert import Choice
from dtron.float8.recipes import E4M3, E5M2, Cast
from dtron.kernels.float8 import SMALLEST

TORCHAO = ("tensorwise", "rowwise", "rowwise_with_gw_hp")


def gradients(layer: nn.Module, linear: nn.Linear, x: Tensor, grad: Tensor) -> list[Tensor]:
    """Output, and gradients of input, weight and bias."""
    linear.zero_grad()
    x = x.clone().requires_grad_()
    out = layer(x)
    out.backward(grad)
    assert linear.bias.grad is not None
    assert linear.weight.grad is not None
    assert x.grad is not None
    return [out.detach(), x.grad, linear.weight.grad.clone(), linear.bias.grad.clone()]


def example(dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, Tensor, Tensor]:
    """A layer, its input and the gradient of its output; neither sizes nor tiles are alike."""
    torch.manual_seed(3)
    linear = nn.Linear(160, 144).to(dtype)
    return linear, torch.randn(2, 48, 160).to(dtype), torch.randn(2, 48, 144).to(dtype) * 1e-4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", TORCHAO)
def test_gives_the_bits_of_torchao(name: str, dtype: torch.dtype) -> None:
    float8 = pytest.importorskip("torchao.float8")
    from torchao.float8.float8_linear import Float8Linear as Theirs

    linear, x, grad = example(dtype)
    config = float8.Float8LinearConfig.from_recipe_name(name)
    theirs = Theirs.from_float(linear, dataclasses.replace(config, emulate=True))
    ours = Float8Linear.of(linear, RECIPES[name], True, ScaleGroups())
    for mine, wanted in zip(
        gradients(ours, linear, x, grad), gradients(theirs, linear, x, grad), strict=True
    ):
        assert torch.equal(mine, wanted)


# dB of output, input's and weight's gradient: E4M3 keeps 3 bits behind the point, E5M2 two.
BOUNDS = dict.fromkeys(RECIPES, (26.0, 26.0, 26.0)) | {"tensorwise": (26.0, 22.0, 22.0)}


@pytest.mark.parametrize("name", RECIPES)
def test_error_of_a_layer_is_that_of_its_dtypes(name: str) -> None:
    linear, x, grad = example()
    layer = Float8Linear.of(linear, RECIPES[name], True, ScaleGroups())
    exact = gradients(linear, linear, x, grad)
    found = gradients(layer, linear, x, grad)
    for mine, wanted, bound in zip(found, exact, BOUNDS[name], strict=False):
        error = (mine - wanted).norm() / wanted.norm()
        assert bound < -20 * error.log10() or error == 0
        assert error > 0 or RECIPES[name].grad_weight is None  # it did round
    assert torch.equal(found[3], exact[3])


@pytest.mark.parametrize("name", RECIPES)
def test_an_outlier_spoils_no_more_than_its_tile(name: str) -> None:
    """A value a million times larger: what shares its scale becomes zero, all else stays."""
    cast = RECIPES[name].output.left
    x = torch.ones(128, 256)
    x[5, 7] = 1e6
    seen = dequantize(quantize(x, cast), x.dtype)
    rows, columns = cast.tile[0] or 128, cast.tile[1] or 256
    kept = torch.ones_like(x, dtype=torch.bool)
    kept[5 // rows * rows :, 7 // columns * columns :][:rows, :columns] = False
    assert (seen[kept] - 1).abs().max() < 1e-6 if kept.any() else cast.whole
    assert seen[~kept].count_nonzero() == 1


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
@pytest.mark.parametrize("tile", [(0, 0), (1, 0), (1, 32), (128, 128)], ids=str)
@pytest.mark.parametrize("power_of_two", [False, True])
def test_scales_reach_the_largest_number(
    dtype: torch.dtype, tile: tuple[int, int], power_of_two: bool
) -> None:
    """Nothing saturates, and what is largest is in the upper half of the dtype's range."""
    torch.manual_seed(0)
    cast = Cast(dtype, tile, power_of_two)
    x = torch.randn(130, 70) * torch.logspace(-9, 9, 130)[:, None]
    done = quantize(x, cast)
    largest = torch.finfo(dtype).max
    top = done.data.float().abs().amax()
    assert (largest / 2 if power_of_two else largest) <= top <= largest
    if power_of_two:
        assert torch.equal(done.scale.log2(), done.scale.log2().round())
    assert (dequantize(done, x.dtype) - x).norm() / x.norm() < (0.04 if dtype is E4M3 else 0.08)


@pytest.mark.parametrize("name", RECIPES)
def test_zeros_and_tiny_gradients_stay_finite(name: str) -> None:
    cast = RECIPES[name].output.left
    assert not dequantize(quantize(torch.zeros(16, 32), cast), torch.float32).any()
    tiny = torch.full((16, 32), 2.0**-70)  # of a loss over many tokens
    assert dequantize(quantize(tiny, cast), torch.float32).allclose(tiny, rtol=1e-6, atol=0.0)
    assert quantize(torch.full((16, 32), SMALLEST / 8), cast).scale.isfinite().all()


@pytest.mark.parametrize("name", RECIPES)
def test_gradients_that_are_not_finite_are_seen(name: str) -> None:
    """They must reach the norm, which skips the step."""
    linear, x, grad = example()
    grad[0, 3, 5] = torch.inf
    layer = Float8Linear.of(linear, RECIPES[name], True, ScaleGroups())
    assert not gradients(layer, linear, x, grad)[2].isfinite().all()


def model() -> nn.Module:
    blocks = {
        str(i): nn.ModuleDict({"up": nn.Linear(32, 64), "odd": nn.Linear(32, 40)}) for i in range(4)
    }
    return nn.ModuleDict({"blocks": nn.ModuleDict(blocks), "head": nn.Linear(32, 48)})


def test_layers_are_chosen_by_pattern_block_and_size() -> None:
    every = tuple(f"blocks.{i}.up" for i in range(4))
    assert layer_names(model(), Choice("blocks.*")) == every
    assert layer_names(model(), Choice("blocks.*", skip_first=1, skip_last=2)) == every[1:2]
    assert layer_names(model(), Choice("blocks.*", skip=("blocks.[01].*",))) == every[2:]
    assert layer_names(model(), Choice("blocks.*", ("blocks.3.up",), output="head")) == (
        every[3],
        "head",
    )


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        (Choice("blocks.*", ("blocks.*.down",)), "matches no linear layer; use names such as"),
        (Choice("blocks.*", skip=("up",)), "float8.skip: pattern 'up' matches no linear layer"),
        (Choice("blocks.*", ("blocks.*.odd",)), "blocks.0.odd is 40 x 32, and float8 needs"),
        (Choice("blocks.*", skip=("blocks.*.*",)), "float8.filter leaves no layer"),
        (Choice("blocks.*", skip_first=2, skip_last=2), "skip all 4 blocks of the model"),
    ],
)
def test_choices_that_match_nothing_are_refused(choice: Choice, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        layer_names(model(), choice)
    assert message in str(error.value)


def test_conversion_keeps_parameters_and_names() -> None:
    whole = model()
    before = {name: id(p) for name, p in whole.named_parameters()}
    names = layer_names(whole, Choice("blocks.*"))
    convert(whole, names, RECIPES["rowwise"], emulate=True)
    assert {name: id(p) for name, p in whole.named_parameters()} == before
    assert all(isinstance(whole.get_submodule(name), Float8Linear) for name in names)
    assert type(whole.get_submodule("head")) is nn.Linear
