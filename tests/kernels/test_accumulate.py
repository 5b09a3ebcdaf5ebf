"""A matmul that writes or adds its result to a wider tensor, against float64."""

import pytest
import torch

from dtron.kernels.accumulate import multiply_into

DTYPES = [
    (torch.bfloat16, torch.float32, 1e-6),
    (torch.float16, torch.float32, 1e-6),
    (torch.bfloat16, torch.bfloat16, 1e-2),
    (torch.float32, torch.float32, 1e-6),
]
"""Dtype of the operands and of the sum, and the largest error relative to the sum's norm."""


def errors(narrow: torch.dtype, wide: torch.dtype, device: str) -> list[float]:
    """Of a product that is added, then of one that is written."""
    torch.manual_seed(0)
    grad, x = (torch.randn(96, n, device=device).to(narrow) for n in (80, 48))
    total = torch.randn(80, 48, device=device).to(wide)
    product, found = grad.double().t() @ x.double(), []
    for wanted, add in ((total.double() + product, True), (product, False)):
        address = total.data_ptr()
        multiply_into(total, grad.t(), x, add)
        assert total.data_ptr() == address
        found.append(float((total.double() - wanted).norm() / wanted.norm()))
    return found


@pytest.mark.parametrize(("narrow", "wide", "most"), DTYPES)
def test_a_product_is_added(narrow: torch.dtype, wide: torch.dtype, most: float) -> None:
    assert max(errors(narrow, wide, "cpu")) <= most


@pytest.mark.gpu
@pytest.mark.parametrize(("narrow", "wide", "most"), DTYPES)
def test_a_product_is_added_on_a_gpu(narrow: torch.dtype, wide: torch.dtype, most: float) -> None:
    """Without a temporary: nothing is allocated."""
    assert max(errors(narrow, wide, "cuda")) <= most
    grad, total = torch.ones(64, 64, device="cuda").to(narrow), torch.zeros(64, 64, device="cuda")
    multiply_into(total.to(wide), grad, grad, add=True)  # cuBLAS allocates its workspace
    total = total.to(wide)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    multiply_into(total, grad, grad, add=True)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before
