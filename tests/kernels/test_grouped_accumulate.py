"""Weight gradients of experts that are added to a sum, against float64."""

from typing import Any, cast

import pytest
import torch
from torch import Tensor

from dtron.kernels.grouped_accumulate import grouped_multiply_into
from tests.kernels.interpreter import numbers_of

LOADS = ((5, 0, 70, 64), (0, 0, 3, 0))
"""Rows of each expert; 9 rows of none follow, which are NaN."""
DTYPES = [
    (torch.bfloat16, torch.float32, 1e-6),
    (torch.bfloat16, torch.bfloat16, 1e-2),
    (torch.float32, torch.float32, 1e-6),
]
"""Dtype of the operands and of the sum, and the largest error relative to the sum's norm."""


def drawn(
    loads: tuple[int, ...], narrow: torch.dtype, wide: torch.dtype, device: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A sum, gradients of outputs, inputs, and the ends of rows."""
    generator = torch.Generator().manual_seed(0)
    ends = torch.tensor(loads).cumsum(0).int()
    sizes = (len(loads), 40, 24), (sum(loads) + 9, 40), (sum(loads) + 9, 24)
    total, grad, x = (torch.randn(size, generator=generator) for size in sizes)
    grad[ends[-1] :] = x[ends[-1] :] = torch.nan
    return total.to(device, wide), grad.to(device, narrow), x.to(device, narrow), ends.to(device)


def errors(narrow: torch.dtype, wide: torch.dtype, device: str, tiles: bool = False) -> list[float]:
    """Of gradients that are added, then of gradients that are written.

    Args:
        tiles: run the Triton kernel, with tiles smaller than a matrix.
    """
    found = []
    for loads in LOADS:
        total, grad, x, ends = drawn(loads, narrow, wide, device)
        rows = zip(grad.double().split([*loads, 9]), x.double().split([*loads, 9]), strict=True)
        product = torch.stack([g.t() @ h for g, h in rows][:-1])
        for wanted, add in ((total.double() + product, True), (product, False)):
            address = total.data_ptr()
            if tiles:
                run_tiles(total, grad, x, ends, add)
            else:
                grouped_multiply_into(total, grad, x, ends, add)
            assert total.data_ptr() == address
            found.append(float((total.double() - wanted).norm() / wanted.norm()))
    return found


def run_tiles(total: Tensor, grad: Tensor, x: Tensor, ends: Tensor, add: bool) -> None:
    from dtron.kernels.grouped_accumulate_triton import grid, grouped_gemm_tile

    experts, *sizes = total.shape
    tile = {"TILE_M": 32, "TILE_K": 16, "TILE_N": 16}
    kernel = cast(Any, grouped_gemm_tile)
    kernel[grid(experts, *sizes)(tile)](total, grad, x, ends, *sizes, ADD=add, **tile)


@pytest.mark.parametrize(("narrow", "wide", "most"), DTYPES)
def test_gradients_are_added(narrow: torch.dtype, wide: torch.dtype, most: float) -> None:
    assert max(errors(narrow, wide, "cpu")) <= most


def test_kernel_adds_in_the_interpreter() -> None:
    found = numbers_of("tests.kernels.test_grouped_accumulate")
    assert len(found) == 2 * len(LOADS)
    assert max(found) <= 1e-6


@pytest.mark.gpu
@pytest.mark.parametrize(("narrow", "wide", "most"), DTYPES)
def test_gradients_are_added_on_a_gpu(narrow: torch.dtype, wide: torch.dtype, most: float) -> None:
    """Also where tiles were timed before: each of those calls adds."""
    assert max(errors(narrow, wide, "cuda")) <= most


@pytest.mark.gpu
def test_nothing_is_allocated_on_a_gpu() -> None:
    """The second call; the first one times tiles, with a copy of the sum."""
    operands = drawn((128, 128), torch.bfloat16, torch.float32, "cuda")
    grouped_multiply_into(*operands, add=True)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    grouped_multiply_into(*operands, add=True)
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


if __name__ == "__main__":
    print(*errors(torch.float32, torch.float32, "cpu", tiles=True))
