"""Sums of what ranks have sent: the Triton kernel against float64."""

import pytest
import torch

from dtron.kernels.sums import BLOCK, _triton, sum_of_parts_
from tests.kernels.interpreter import numbers_of

SHAPES = [(1, 5), (2, BLOCK), (3, 2 * BLOCK + 7), (8, 16 * 9)]
"""Parts, elements."""


def largest_difference(parts: int, n: int, dtype: torch.dtype, device: str) -> float:
    """From the sum in float64, relative to the largest sum of magnitudes."""
    sent = torch.randn(parts, n, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    out = torch.full((n,), torch.nan, device=device)
    _triton(out, sent)
    wide = sent.double()
    return float((out - wide.sum(0)).abs().max() / wide.abs().sum(0).max())


DTYPES = (torch.bfloat16, torch.float32)


def test_kernel_sums_in_float32_in_the_interpreter() -> None:
    found = numbers_of("tests.kernels.test_sums")
    assert len(found) == len(SHAPES) * len(DTYPES)
    assert max(found) <= 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernel_sums_in_float32_on_a_gpu(shape: tuple[int, int], dtype: torch.dtype) -> None:
    assert largest_difference(*shape, dtype, "cuda") <= 1e-6


@pytest.mark.gpu
def test_elements_beyond_32_bits_are_read() -> None:
    sent = torch.ones(2, 2**30 + 16, dtype=torch.bfloat16, device="cuda")
    out = torch.empty(sent.shape[1], device="cuda")
    sum_of_parts_(out, sent)
    assert bool((out == 2).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_are_in_the_dtype_of_the_result(dtype: torch.dtype) -> None:
    sent = torch.tensor([[1.0], [2.0**-9], [2.0**-9]]).bfloat16()
    out = torch.empty(1, dtype=dtype)
    sum_of_parts_(out, sent)
    assert float(out) == 1 + 2.0**-8


if __name__ == "__main__":
    print(*(largest_difference(*shape, dtype, "cpu") for shape in SHAPES for dtype in DTYPES))
