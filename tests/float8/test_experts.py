"""Experts in float8: the error of their dtype, what kernels are asked, and what is refused."""

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from dtron.config import RunConfig
from dtron.errors import ConfigError
from dtron.float8 import experts
from dtron.float8.casting import Scaled
from dtron.float8.experts import Float8Grouped, multiply_grouped
from dtron.float8.products import why_emulated
from dtron.float8.recipes import E4M3, EXPERTS
from dtron.kernels.grouped import grouped_gradient, looped_matmul
from dtron.setup.rules import resolve

LOADS = [(5, 0, 11, 4), (0, 0, 0, 20), (0, 0, 0, 0)]


def results(product: Any, loads: tuple[int, ...], dtype: torch.dtype, device: str = "cpu", k=32):
    """Output, and gradients of rows and weights; after the last expert's rows come others."""
    generator = torch.Generator().manual_seed(1)
    offsets = torch.tensor(loads, device=device).cumsum(0).int()
    x, weight, grad = (
        torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).to(device)
        for shape in ((sum(loads) + 3, k), (len(loads), 48, k), (sum(loads) + 3, 48))
    )
    x.requires_grad_()
    weight.requires_grad_()
    out = product(x, weight, offsets)
    out.backward(grad)
    assert x.grad is not None
    return [out.detach()[: sum(loads)], x.grad[: sum(loads)], weight.grad]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("loads", LOADS, ids=str)
def test_error_of_experts_is_that_of_three_bits(loads: tuple[int, ...], dtype: torch.dtype) -> None:
    wanted = results(looped_matmul, loads, dtype)
    found = results(Float8Grouped(True), loads, dtype)
    for mine, other in zip(found[:2], wanted[:2], strict=True):
        assert mine.dtype == dtype
        error = (mine - other).double().norm() / other.double().norm().clamp(min=1e-9)
        assert not sum(loads) or 26 < -20 * error.log10() < 40
    assert found[2].allclose(wanted[2], rtol=1e-2)  # not rounded to float8


def test_a_row_is_rounded_by_itself() -> None:
    """Wherever it is, and whatever is beside it, as large as may be."""
    x, weight = torch.randn(6, 32), torch.randn(2, 16, 32)
    product = Float8Grouped(True)
    alone = product(x[2:4], weight, torch.tensor([1, 2]).int())
    x[0] *= 1e6
    among = product(x, weight, torch.tensor([3, 6]).int())
    assert torch.equal(alone, among[2:4])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_gradient_of_weights_is_that_of_the_product(dtype: torch.dtype) -> None:
    """By grouped_mm, and where it is not to be had."""
    offsets = torch.tensor([5, 5, 16]).int()
    x, grad = torch.randn(18, 32).to(dtype), torch.randn(18, 48).to(dtype)
    weight = torch.zeros(3, 48, 32, dtype=dtype, requires_grad=True)
    looped_matmul(x, weight, offsets).backward(grad)
    assert weight.grad is not None
    found = grouped_gradient(grad, x, offsets)
    assert found.allclose(weight.grad, rtol=2e-2, atol=2e-2 if dtype == torch.bfloat16 else 1e-5)


def test_kernels_get_what_torch_demands(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes, strides and scales of a GPU's calls, which torch's first form of this operator checks
    without one; both forms call one kernel."""

    def first_form(a, b, *, scale_a, scale_b, offs, output_dtype, use_fast_accum, **_recipes):
        settings = {"out_dtype": output_dtype, "use_fast_accum": use_fast_accum}
        return torch._scaled_grouped_mm(a, b, scale_a, scale_b, offs, **settings)

    monkeypatch.setattr(torch.nn.functional, "scaled_grouped_mm", first_form)
    monkeypatch.setattr(torch.ops.dtron, "float8_grouped_product", experts.multiply)
    casts = EXPERTS.output

    def operand(rows: int, columns: int) -> Scaled:
        data = torch.empty(rows, columns, dtype=E4M3, device="cuda")
        return Scaled(data, torch.empty(rows, 1, device="cuda"), casts.left)

    with FakeTensorMode():
        offsets = torch.empty(4, dtype=torch.int32, device="cuda")
        out = multiply_grouped(operand(40, 64), operand(4 * 48, 64), offsets, torch.bfloat16, True)
        assert (out.shape, out.dtype) == ((40, 48), torch.bfloat16)
        x = torch.empty(40, 64, dtype=torch.bfloat16, device="cuda")
        assert grouped_gradient(out, x, offsets).shape == (4, 48, 64)
        odd = operand(40, 40), operand(4 * 48, 40)
        with pytest.raises(RuntimeError, match="multiple of 16 bytes"):
            multiply_grouped(*odd, offsets, torch.bfloat16, True)


@pytest.mark.gpu
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("loads", [(130, 0, 257, 61), (0, 0, 0, 96)], ids=str)
def test_kernels_give_what_emulation_gives(loads: tuple[int, ...], compiled: bool) -> None:
    if why_emulated(EXPERTS, torch.device("cuda"), torch.bfloat16):
        pytest.skip("grouped products of float8 are Hopper's")
    product: Any = Float8Grouped(False)
    run = torch.compile(product, dynamic=False) if compiled else product
    found = results(run, loads, torch.bfloat16, "cuda", k=128)
    wanted = results(Float8Grouped(True), loads, torch.bfloat16, "cuda", k=128)
    for mine, other in zip(found, wanted, strict=True):
        assert (mine - other).float().norm() <= 2**-7 * other.float().norm()


@pytest.mark.parametrize(
    ("model", "override", "parallel", "why"),
    [
        ("llama", {}, {}, "has no effect without model"),
        ("mixtral", {"expert_dim": 32}, {"etp": 4}, "multiples of 16"),
    ],
)
def test_experts_that_cannot_be_float8_are_refused(
    model: str, override: dict[str, int], parallel: dict[str, int], why: str
) -> None:
    given = {
        "model": {"name": model, "size": "debug", "override": override},
        "parallel": parallel,
        "float8": {"recipe": "rowwise", "experts": True},
    }
    with pytest.raises(ConfigError, match=f"float8.experts.*{why}"):
        resolve(RunConfig.model_validate(given), 4)
