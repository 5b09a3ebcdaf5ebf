"""Lion's Triton kernel against the formula, which tests/training/test_optim.py tests."""

import pytest
import torch
from torch import Tensor

from dtron.kernels.lion import BLOCK, Rates, _reference, _triton
from tests.kernels.interpreter import numbers_of

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
        for x, y in zip(ours, theirs, strict=True):
            size = y.float().norm().clamp(min=1e-30)
            differences.append(float((x.float() - y.float()).norm() / size))
    return max(differences)


LIMITS = {torch.float32: 1e-6, torch.bfloat16: 2**-7}
"""A last bit; Triton's interpreter stores bfloat16 rounded towards zero."""
CASES = [(dtype, scale) for dtype in (torch.float32, torch.bfloat16) for scale in (0.5, torch.nan)]


def test_kernel_equals_formula_in_the_interpreter() -> None:
    found = numbers_of("tests.kernels.test_lion")
    for deviation, (moments, _) in zip(found, CASES, strict=True):
        assert deviation <= LIMITS[moments]


@pytest.mark.gpu
@pytest.mark.parametrize(("moments", "scale"), CASES)
def test_kernel_equals_formula_on_a_gpu(moments: torch.dtype, scale: float) -> None:
    assert largest_difference("cuda", moments, scale) <= LIMITS[moments]


if __name__ == "__main__":
    print(*(largest_difference("cpu", *case) for case in CASES))
