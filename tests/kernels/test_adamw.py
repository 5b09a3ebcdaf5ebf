"""AdamW with moments of any dtype: against torch's, and the Triton kernel against the formula."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from dtron.kernels.adamw import BLOCK, Rates, _corrections, _reference, _triton, adamw_
from tests.kernels.interpreter import LIMITS, UPDATES, numbers_of, relative_difference

RATES = Rates(lr=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
SLOW = replace(RATES, beta2=0.999)
SIZES = [(1,), (3, 5), (BLOCK,), (2, BLOCK + 7)]


def tensors(shape: tuple[int, ...], moments: torch.dtype, device: str = "cpu") -> list[Tensor]:
    """Parameter, gradient and moments, as after some steps."""
    generator = torch.Generator().manual_seed(0)
    p, g, m, v = (torch.randn(shape, generator=generator) for _ in range(4))
    return [p.to(device), g.to(device), *(x.to(device, moments) for x in (m, v.square()))]


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_float32_moments_give_torchs_adamw(factor: float) -> None:
    ours = [tensors(shape, torch.float32) for shape in SIZES]
    theirs = [tensors(shape, torch.float32)[0].requires_grad_() for shape in SIZES]
    other = torch.optim.AdamW(theirs, 0.01, (0.9, 0.95), 1e-8, 0.1)
    for parameter, (_, _, m, v) in zip(theirs, ours, strict=True):
        state = {"step": torch.zeros(()), "exp_avg": m.clone(), "exp_avg_sq": v.clone()}
        other.state[parameter] = state
    steps = torch.zeros(len(SIZES))
    for _ in range(3):
        columns = [list(column) for column in zip(*ours, strict=True)]
        adamw_(*columns, steps, torch.tensor(factor), RATES)  # type: ignore[misc]
        for parameter, (_, g, _, _) in zip(theirs, ours, strict=True):
            parameter.grad = factor * g
        other.step()
    torch.testing.assert_close([p for p, *_ in ours], [p.detach() for p in theirs])
    assert steps.tolist() == [3, 3, 3, 3]


def test_narrow_moments_are_rounded_once() -> None:
    """The parameter is updated with the moments as they are before rounding."""
    wide, narrow = (tensors((2, 64), dtype) for dtype in (torch.float32, torch.bfloat16))
    wide[2:] = [x.float() for x in narrow[2:]]
    for p, g, m, v in (wide, narrow):
        adamw_([p], [g], [m], [v], torch.zeros(1), torch.ones(()), RATES)
    assert torch.equal(wide[0], narrow[0])
    for x, y in zip(wide[2:], narrow[2:], strict=True):
        assert torch.equal(x.bfloat16(), y)


def largest_difference(device: str, moments: torch.dtype, scale: float) -> float:
    """Over all tensors after one step of kernel and formula, relative to their sizes; from moments
    as after some steps, and from zeros, which a slow rate's 1 - beta2 replaces."""
    differences = []
    for shape, (rates, kept) in itertools.product(SIZES, ((RATES, 1), (SLOW, 0))):
        factor = torch.tensor(scale, device=device)
        table = _corrections(torch.tensor([5.0], device=device), factor, rates)[0]
        runs = []
        for update in (_triton, _reference):
            p, g, m, v = tensors(shape, moments, device)
            m, v = m * kept, v * kept
            update(p, g, m, v, table, rates)
            runs.append((p, m, v))
        differences.append(relative_difference(*runs))
    return max(differences)


def test_kernel_equals_formula_in_the_interpreter() -> None:
    found = numbers_of("tests.kernels.test_adamw")
    for deviation, (moments, _) in zip(found, UPDATES, strict=True):
        assert deviation <= LIMITS[moments]


@pytest.mark.gpu
@pytest.mark.parametrize(("moments", "scale"), UPDATES)
def test_kernel_equals_formula_on_a_gpu(moments: torch.dtype, scale: float) -> None:
    assert largest_difference("cuda", moments, scale) <= LIMITS[moments]


if __name__ == "__main__":
    print(*(largest_difference("cpu", *case) for case in UPDATES))
