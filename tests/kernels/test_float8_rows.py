"""Rows in float8 for a wire: the formula element by element, and the Triton kernels against it."""

import pytest
import torch
from torch import Tensor

from dtron.kernels.float8_rows import (
    _packed_on_gpu,
    _unpacked_on_gpu,
    packed,
    scales_at,
    unpacked,
    wire_bytes,
)
from dtron.kernels.peer_gather import LOST, NONE, PROGRAMS, packed_rows_of_peers, rows_of_pointers
from tests.kernels.interpreter import numbers_of

CASES = [
    # rows, width, dtype
    (3, 128, torch.bfloat16),
    (5, 200, torch.float32),
    (7, 5, torch.float32),
    (4, 16 * 128 + 24, torch.bfloat16),
    (0, 64, torch.float32),
]
ON_GPU = [*CASES, (3000, 2048, torch.bfloat16), (500, 7168, torch.bfloat16)]
RANKS, OFFSET = 3, 64


def drawn(case: tuple) -> Tensor:
    """Rows of very different sizes, some elements of which are zero."""
    n, width, dtype = case
    generator = torch.Generator().manual_seed(0)
    sizes = 2.0 ** torch.randint(-40, 40, (n, 1), generator=generator)
    rows = torch.randn(n, width, generator=generator) * sizes
    rows[:, ::7] = 0
    return rows.to(dtype)


def numbers_and_scales(wire: Tensor, width: int) -> tuple[Tensor, Tensor]:
    first, tiles = scales_at(width), -(-width // 128)
    scales = wire[:, first : first + 4 * tiles].contiguous().view(torch.float32)
    return wire[:, :width].contiguous().view(torch.float8_e4m3fn), scales


@pytest.mark.parametrize(
    ("width", "n_bytes"), [(1, 16), (12, 16), (13, 32), (128, 144), (200, 208), (7168, 7392)]
)
def test_bytes_of_a_row(width: int, n_bytes: int) -> None:
    """Numbers, up to 3 bytes, 4 bytes a tile, and what is missing to a multiple of 16."""
    assert wire_bytes(width) == n_bytes
    assert packed(torch.ones(2, width)).shape == (2, n_bytes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_formula(dtype: torch.dtype) -> None:
    """Tile by tile: the largest is 448 scales, no other is off by more than half a step of its 3
    bits behind the point, or of the smallest normal number."""
    rows = drawn((9, 200, torch.float32)).to(dtype)
    wire = packed(rows)
    found, (numbers, scales) = unpacked(wire, 200, dtype), numbers_and_scales(wire, 200)
    assert found.dtype == dtype
    for i, row in enumerate(rows.double()):
        for j, tile in enumerate(row.split(128)):
            scale, part = scales[i, j].double(), slice(128 * j, 128 * j + len(tile))
            torch.testing.assert_close(scale, tile.abs().max() / 448, rtol=1e-7, atol=0)
            assert numbers[i, part].float().abs().max() == 448
            step = 2.0 ** (tile / scale).abs().clamp(min=2.0**-6).log2().floor() / 8
            off = (numbers[i, part].double() * scale - tile).abs()
            assert bool((off <= step / 2 * scale * (1 + 1e-6)).all())
            exact = (numbers[i, part].double() * scale).to(dtype)
            assert torch.equal(found[i, part], exact)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_cast_again_rounds_nothing(dtype: torch.dtype) -> None:
    rows = unpacked(packed(drawn((20, 300, dtype))), 300, dtype)
    again = unpacked(packed(rows), 300, dtype)
    assert torch.equal(again, rows)


def edges(dtype: torch.dtype) -> Tensor:
    """Rows of two tiles: zeros, next to nothing, an infinity, a NaN, the largest numbers."""
    rows = torch.ones(5, 200, dtype=dtype)
    rows[0] = 0
    rows[1, :128] = torch.finfo(dtype).tiny
    rows[2, 130] = -torch.inf
    rows[3, 1] = torch.nan
    rows[4] = torch.finfo(dtype).max
    return rows


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_zeros_stay_and_what_is_not_finite_too(dtype: torch.dtype) -> None:
    zeros, tiny, infinite, nan, largest = unpacked(packed(edges(dtype)), 200, dtype)
    assert not zeros.any()
    assert not tiny[:128].any()
    assert torch.equal(tiny[128:], torch.ones_like(tiny[128:]))
    assert infinite[128:].isnan().all()
    assert infinite[:128].isfinite().all()
    assert nan[:128].isnan().all()
    assert nan[128:].isfinite().all()
    torch.testing.assert_close(largest.double() / torch.finfo(dtype).max, torch.ones(200).double())


def pulled(case: tuple) -> tuple[list[Tensor], Tensor]:
    """Rows of three ranks as they lie in memory, and slots of which some are of no row."""
    n, width, dtype = case
    peers = [packed(drawn((n + 1, width, dtype)) * (p + 1)) for p in range(RANKS)]
    generator = torch.Generator().manual_seed(0)
    slots = torch.randint(RANKS * (n + 1), (2 * n + PROGRAMS,), generator=generator)
    slots[::5], slots[3::7] = NONE, LOST
    return peers, slots


@pytest.mark.parametrize("case", CASES, ids=str)
def test_pulled_rows(case: tuple) -> None:
    """Row by row."""
    (_, width, dtype), (peers, slots) = case, pulled(case)
    rows = torch.cat([unpacked(part, width, dtype) for part in peers])
    found = packed_rows_of_peers(peers, slots, width, dtype)
    assert found.dtype == dtype
    for slot, row in zip(slots.tolist(), found, strict=True):
        if slot == LOST:
            assert row.isnan().all()
        else:
            assert torch.equal(row, torch.zeros_like(row) if slot == NONE else rows[slot])


def apart(found: Tensor, wanted: Tensor) -> list[float]:
    """The share of what differs, and the largest difference over the wanted; infinite where only
    one of them is NaN."""
    found, wanted = found.cpu().double(), wanted.double()
    if not found.numel():
        return [0.0, 0.0]
    if not torch.equal(found.isnan(), wanted.isnan()):
        return [1.0, torch.inf]
    gap = (found - wanted).abs().nan_to_num() / wanted.abs().nan_to_num().clamp(min=1e-30)
    return [float((gap > 0).double().mean()), float(gap.max())]


def differences(rows: Tensor, device: str) -> list[float]:
    """Of the kernels from the formula: of scales, numbers, rows cast back, and rows pulled."""
    (n, width), dtype, wire = rows.shape, rows.dtype, packed(rows)
    out = torch.empty_like(wire, device=device)
    sent = numbers_and_scales(_packed_on_gpu(rows.to(device), out), width)
    back = _unpacked_on_gpu(wire.to(device), torch.empty_like(rows, device=device))
    peers, slots = pulled((n, width, dtype))
    memory = [torch.cat([p.new_zeros(OFFSET), p.flatten()]).to(device) for p in peers]
    pointers = torch.tensor([part.data_ptr() for part in memory], device=device)
    came = torch.full((len(slots), width), -1.0, dtype=dtype, device=device)
    rows_of_pointers(pointers, OFFSET, n + 1, slots.to(device), came, float8=True)
    numbers, scales = numbers_and_scales(wire, width)
    return [
        *apart(sent[1], scales),
        *apart(sent[0].float(), numbers.float()),
        *apart(back, unpacked(wire, width, dtype)),
        *apart(came, packed_rows_of_peers(peers, slots, width, dtype)),
    ]


def test_kernels_equal_formulas_in_the_interpreter() -> None:
    """It rounds to E4M3 otherwise than GPUs do (`test_float8_kernels.py`), and stores bfloat16
    rounded towards zero; scales, and what float32 rows are cast back to, have every bit."""
    found = torch.tensor(numbers_of("tests.kernels.test_float8_rows")).view(len(CASES), 4, 2)
    for (_, _, dtype), (scales, numbers, *others) in zip(CASES, found.tolist(), strict=True):
        assert scales == [0.0, 0.0]
        assert numbers[0] <= 0.07
        assert numbers[1] <= 0.5
        last_bit = 2**-7 if dtype == torch.bfloat16 else 0.0
        assert all(gap <= last_bit for _, gap in others)


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU, ids=str)
def test_kernels_equal_formulas_on_a_gpu(case: tuple) -> None:
    """Every bit."""
    assert differences(drawn(case), "cuda") == [0.0] * 8


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_kernels_keep_what_is_not_finite_on_a_gpu(dtype: torch.dtype) -> None:
    """And zeros, and the largest numbers."""
    assert differences(edges(dtype), "cuda") == [0.0] * 8


if __name__ == "__main__":
    print(*(figure for case in CASES for figure in differences(drawn(case), "cpu")))
