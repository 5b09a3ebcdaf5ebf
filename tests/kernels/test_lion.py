"""Lion's Triton kernel against the formula, which tests/training/test_optim.py tests."""

import pytest
import torch
from torch import Tensor

from dtron.kernels.lion import BLOCK, Rates, _reference, _triton
from tests.kernels.interpreter import LIMITS, UPDATES, numbers_of, relative_difference

RATES = Rates(lr=0.01, beta1=0.9, beta2=0.99, weight_decay=0.1)


def tensors(shape: tuple[int, ...], moments: torch.dtype, device: str) -> list[Tensor]:
    """Parameter, gradient and momentum; the first elements have an update of sign 0."""
    generator = torch.Generator().manual_seed(0)
    p, g, m = (torch.randn(shape, generator=generator) for _ in range(3))
    g.view(-1)[0] = m.view(-1)[0] = 0
    return [p.to(device), g.to(device), m.to(device, moments)]


def largest_difference(device: str, moments: torch.dtype, scale: float) -> float:
    """Over all tensors after one step of kernel and formula, relative to their sizes."""
    factor, differences = torch.tensor(scale, device=device), []
    for shape in ((1,), (3, 5), (BLOCK,), (2, BLOCK + 7)):
        ours, theirs = tensors(shape, moments, device), tensors(shape, moments, device)
        _triton(*ours, factor, RATES)  # type: ignore[call-arg]
        _reference(*theirs, factor, RATES)  # type: ignore[call-arg]
        differences.append(relative_difference(ours, theirs))
    return max(differences)


def test_kernel_equals_formula_in_the_interpreter() -> None:
    found = numbers_of("tests.kernels.test_lion")
    for deviation, (moments, _) in zip(found, UPDATES, strict=True):
        assert deviation <= LIMITS[moments]


@pytest.mark.gpu
@pytest.mark.parametrize(("moments", "scale"), UPDATES)
def test_kernel_equals_formula_on_a_gpu(moments: torch.dtype, scale: float) -> None:
    assert largest_difference("cuda", moments, scale) <= LIMITS[moments]


if __name__ == "__main__":
    print(*(largest_difference("cpu", *case) for case in UPDATES))
