"""Rows by expert and weighted sums: the formulas, and the Triton kernels against them."""

import pytest
import torch
from torch import Tensor

from dtron.kernels import permute
from dtron.kernels.permute import repeated, summed
from tests.kernels.interpreter import numbers_of

SHAPES = [(0, 2, 8, 0), (5, 1, 16, 3), (7, 3, 40, 32), (9, 2, permute.BLOCK + 9, 16)]
"""Tokens, slots of each, width, rows; some rows are zero and some slots have none."""
NAMES = ("gathered", "gathered by weight", "added", "added by weight", "dots")


def drawn(shape: tuple[int, int, int, int]) -> tuple[Tensor, Tensor]:
    """Slots by row and rows by slot."""
    n, k, _, n_rows = shape
    generator = torch.Generator().manual_seed(0)
    number = min(n * k, n_rows) * 3 // 4
    slots, rows = torch.full((n_rows,), -1), torch.full((n * k,), -1)
    held = torch.randperm(n_rows, generator=generator)[:number]
    taken = torch.randperm(n * k, generator=generator)[:number]
    slots[held], rows[taken] = taken, held
    return slots, rows


@pytest.mark.parametrize("shape", SHAPES[1:], ids=str)
def test_formulas_are_those_of_a_matrix(shape: tuple[int, int, int, int]) -> None:
    """Row r of the matrix has a 1 at its token, or the weight of its slot."""
    n, k, width, n_rows = shape
    slots, rows = drawn(shape)
    x = torch.randn(n, width, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(n, k, dtype=torch.float64, requires_grad=True)
    places = torch.zeros(n_rows, n * k, dtype=torch.float64)
    held = slots >= 0
    places[held.nonzero()[:, 0], slots[held]] = 1
    there = repeated(x, slots, rows, k)
    back = summed(there * there, weights, slots, rows)
    wanted = places @ x.repeat_interleave(k, 0)
    summed_up = torch.einsum("rs,rd,s->sd", places, wanted * wanted, weights.flatten())
    summed_up = summed_up.unflatten(0, (n, k)).sum(1)
    torch.testing.assert_close(back, summed_up)
    grad = torch.randn_like(back)
    ours = torch.autograd.grad(back, (x, weights), grad)
    theirs = torch.autograd.grad(summed_up, (x, weights), grad)
    torch.testing.assert_close(ours, theirs)


def differences(shape: tuple[int, int, int, int], device: str) -> list[float]:
    """Of each kernel from its formula, relative to the largest value."""
    n, k, width, n_rows = shape
    generator = torch.Generator().manual_seed(1)
    x, y, grad = (torch.randn(m, width, generator=generator).to(device) for m in (n, n_rows, n))
    weights = torch.rand(n, k, generator=generator).to(device)
    slots, rows = (t.to(device) for t in drawn(shape))
    by_slot, wide = rows.view(n, k), torch.float32
    calls = {
        "gathered": (x, slots, None, k, wide),
        "gathered by weight": (x, slots, weights, k, wide),
        "added": (y, by_slot, None, wide),
        "added by weight": (y, by_slot, weights, wide),
        "dots": (grad, y, by_slot),
    }
    found = []
    for name in NAMES:
        function, given = name.split()[0], calls[name]
        result = getattr(permute, f"_{function}_on_gpu")(*given).cpu()
        wanted = getattr(permute, function)(
            *[t.cpu() if isinstance(t, Tensor) else t for t in given]
        )
        assert (result.shape, result.dtype) == (wanted.shape, wanted.dtype)
        size = wanted.abs().max().clamp(min=1e-30) if wanted.numel() else 1.0
        found.append(float((result - wanted).abs().max() / size) if wanted.numel() else 0.0)
    return found


def test_kernels_equal_formulas_in_the_interpreter() -> None:
    found = numbers_of("tests.kernels.test_permute")
    assert len(found) == len(SHAPES) * len(NAMES)
    assert max(found) <= 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [*SHAPES, (4096, 6, 2048, 4096 * 6 + 64)], ids=str)
def test_kernels_equal_formulas_on_a_gpu(shape: tuple[int, int, int, int]) -> None:
    assert max(differences(shape, "cuda")) <= 1e-6


@pytest.mark.gpu
def test_narrow_rows_are_summed_in_float32() -> None:
    """Forward and gradients of bfloat16 rows, beside the formulas in float64."""
    shape = (257, 4, 96, 1040)
    slots, rows = (t.cuda() for t in drawn(shape))
    x = torch.randn(257, 96, device="cuda").bfloat16().requires_grad_()
    weights = torch.rand(257, 4, device="cuda", requires_grad=True)
    out = summed(repeated(x, slots, rows, 4), weights, slots, rows)
    wide = [t.detach().double().requires_grad_() for t in (x, weights)]
    exact = summed(repeated(wide[0], slots, rows, 4), wide[1], slots, rows)
    torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-5)
    grad = torch.randn_like(out)
    found = torch.autograd.grad(out, (x, weights), grad)
    wanted = torch.autograd.grad(exact, wide, grad.double())
    for one, other, tolerance in zip(found, wanted, (2e-2, 1e-5), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


if __name__ == "__main__":
    print(*(figure for shape in SHAPES for figure in differences(shape, "cpu")))
