"""A gated feed-forward layer as one function: the numbers of its three layers."""

import copy
import itertools

import pytest
import torch
from torch import Tensor, nn

from dtron.float8 import RECIPES, convert
from dtron.float8.convert import fuse
from dtron.float8.gated import Float8GatedUnit

NAMES = ("gate", "up", "down")


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(32, 64, bias=False)
        self.up = nn.Linear(32, 64, bias=False)
        self.down = nn.Linear(64, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def pair(recipe: str = "tensorwise") -> tuple[nn.Module, nn.Module]:
    """The same layer, apart and fused."""
    torch.manual_seed(0)
    apart = nn.ModuleDict({"ffn": FeedForward().double()})
    fused = copy.deepcopy(apart)
    for model in (apart, fused):
        convert(model, [f"ffn.{name}" for name in NAMES], RECIPES[recipe], emulate=True)
    fuse(fused, ["ffn"])
    return apart["ffn"], fused["ffn"]  # type: ignore[return-value]


def results(layer: nn.Module, needed: tuple[bool, ...], compiled: bool) -> list[Tensor | None]:
    """Output, and gradients of the input and of the weights that need one."""
    x = torch.randn(2, 24, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x.requires_grad_(needed[0])
    for name, need in zip(NAMES, needed[1:], strict=True):
        layer.get_submodule(name).weight.requires_grad_(need)  # type: ignore[union-attr]
    backend = "aot_eager_decomp_partition"
    run = torch.compile(layer, backend=backend, fullgraph=True) if compiled else layer
    out = run(x)
    grad = torch.linspace(-1, 1, 32, dtype=torch.float64).expand(2, 24, 32)  # not contiguous
    out.backward(grad)
    return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]


@pytest.mark.parametrize("compiled", [False, True])
def test_gives_what_three_layers_give(compiled: bool) -> None:
    subsets = [(True,) * 4] if compiled else list(itertools.product((False, True), repeat=4))[1:]
    for needed in subsets:
        apart, fused = pair()
        assert isinstance(fused, Float8GatedUnit)
        wanted, found = results(apart, needed, compiled), results(fused, needed, compiled)
        for x, y in zip(found, wanted, strict=True):
            assert (x is None) == (y is None)
            if x is not None and y is not None:  # a flip of one operand in float8 is 1e-2
                torch.testing.assert_close(x, y, rtol=1e-12, atol=1e-14)


def test_other_layers_stay_apart() -> None:
    for layer in (pair("rowwise")[1], FeedForward()):
        assert not isinstance(layer, Float8GatedUnit)
        assert not Float8GatedUnit.fits(layer)


def test_names_of_parameters_stay() -> None:
    apart, fused = pair()
    assert [n for n, _ in fused.named_parameters()] == [n for n, _ in apart.named_parameters()]
