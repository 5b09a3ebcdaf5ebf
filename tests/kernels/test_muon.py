"""Muon's Triton kernels against the formulas, which tests/training/test_optim.py tests."""

import pytest
import torch
from torch import Tensor

from dtron.kernels.muon import BLOCK, _momentum, _move, _triton_momentum, _triton_move
from tests.kernels.interpreter import numbers_of


def tensors(shape: tuple[int, ...], moments: torch.dtype, device: str) -> list[Tensor]:
    """Parameter, gradient, momentum and u."""
    generator = torch.Generator().manual_seed(0)
    p, g, m, u = (torch.randn(shape, generator=generator).to(device) for _ in range(4))
    return [p, g, m.to(moments), u.bfloat16()]


def largest_difference(device: str, moments: torch.dtype, scale: float) -> float:
    """Over all tensors after both kernels and formulas, relative to their sizes."""
    factor, differences = torch.tensor(scale, device=device), []
    for shape in ((1,), (3, 5), (BLOCK,), (2, BLOCK + 7)):
        runs = []
        for momentum, move in ((_triton_momentum, _triton_move), (_momentum, _move)):
            p, g, m, u = tensors(shape, moments, device)
            momentum(g, m, u, factor, 0.95)
            move(p, u, factor, 0.99, 0.01)
            runs.append((p, m, u.nan_to_num(0)))
        for x, y in zip(*runs, strict=True):
            size = y.float().norm().clamp(min=1e-30)
            differences.append(float((x.float() - y.float()).norm() / size))
    return max(differences)


LIMIT = 2**-7
"""A last bit of u; Triton's interpreter stores bfloat16 rounded towards zero."""
CASES = [(dtype, scale) for dtype in (torch.float32, torch.bfloat16) for scale in (0.5, torch.nan)]


def test_kernels_equal_formulas_in_the_interpreter() -> None:
    assert max(numbers_of("tests.kernels.test_muon")) <= LIMIT


@pytest.mark.gpu
@pytest.mark.parametrize(("moments", "scale"), CASES)
def test_kernels_equal_formulas_on_a_gpu(moments: torch.dtype, scale: float) -> None:
    assert largest_difference("cuda", moments, scale) <= LIMIT


if __name__ == "__main__":
    print(*(largest_difference("cpu", *case) for case in CASES))
