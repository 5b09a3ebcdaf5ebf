"""Muon's Triton kernels against the formulas, which tests/training/test_optim.py tests."""

import pytest
import torch
from torch import Tensor

from dtron.kernels.muon import BLOCK, _momentum, _move, _triton_momentum, _triton_move
from tests.kernels.interpreter import LIMITS, UPDATES, numbers_of, relative_difference


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
        differences.append(relative_difference(*runs))
    return max(differences)


def test_kernels_equal_formulas_in_the_interpreter() -> None:
    assert max(numbers_of("tests.kernels.test_muon")) <= LIMITS[torch.bfloat16]


@pytest.mark.gpu
@pytest.mark.parametrize(("moments", "scale"), UPDATES)
def test_kernels_equal_formulas_on_a_gpu(moments: torch.dtype, scale: float) -> None:
    assert largest_difference("cuda", moments, scale) <= LIMITS[torch.bfloat16]


if __name__ == "__main__":
    print(*(largest_difference("cpu", *case) for case in UPDATES))
