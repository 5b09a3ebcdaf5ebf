"""Rows of several ranks: the formula, and the Triton kernel against it."""

import pytest
import torch
from torch import Tensor

from dtron.kernels.float8_rows import TILE
from dtron.kernels.peer_gather import (
    BLOCK,
    LOST,
    NONE,
    PROGRAMS,
    ROWS,
    WARPS,
    rows_of_peers,
    rows_of_pointers,
)
from tests.kernels.interpreter import accesses_of, numbers_of

CASES = [
    # ranks, rows of each, width, rows of the result, summed over, dtype
    (3, 5, 8, 0, 1, torch.float32),
    (2, 7, 16, 11, 1, torch.float32),
    (4, 6, BLOCK + 24, PROGRAMS + 3, 2, torch.float32),
    (4, 3, 5, 2 * PROGRAMS, 4, torch.float64),
    (2, 40, 3, (ROWS + 1) * PROGRAMS, 1, torch.float32),
    (3, 1, 9, 3, 1, torch.int32),
]
ON_GPU = [*CASES, (4, 300, 2048, 1000, 1, torch.bfloat16), (4, 300, 2048, 1000, 2, torch.bfloat16)]
OFFSET = 32
"""Bytes before the rows of a rank."""


def drawn(case: tuple) -> tuple[list[Tensor], Tensor]:
    """Rows by rank, and slots of which some are of no row."""
    n_ranks, n_rows, width, n, parts, dtype = case
    generator = torch.Generator().manual_seed(0)
    peers = [
        torch.randint(-(2**20), 2**20, (n_rows, width), generator=generator).to(dtype)
        for _ in range(n_ranks)
    ]
    rank = torch.randint(n_ranks // parts, (n,), generator=generator) * parts
    slots = rank * n_rows + torch.randint(n_rows, (n,), generator=generator)
    slots[::5] = NONE
    if dtype.is_floating_point:
        slots[3::7] = LOST
    return peers, slots


@pytest.mark.parametrize("case", CASES, ids=str)
def test_formula(case: tuple) -> None:
    """Row by row."""
    peers, slots = drawn(case)
    parts = case[4]
    found = rows_of_peers(peers, slots, parts)
    assert (found.shape, found.dtype) == ((len(slots), case[2]), case[5])
    for slot, row in zip(slots.tolist(), found, strict=True):
        if slot == NONE:
            assert not row.any()
        elif slot == LOST:
            assert row.isnan().all()
        else:
            rank, place = divmod(slot, len(peers[0]))
            wanted = torch.stack([peers[rank + j][place] for j in range(parts)]).sum(0)
            assert torch.equal(row, wanted.to(row.dtype))


def differences(case: tuple, device: str) -> list[float]:
    """Of the kernel from the formula; infinite where only one of them is NaN."""
    peers, slots = drawn(case)
    memory = [torch.cat([x.new_zeros(OFFSET // x.element_size()), x.flatten()]) for x in peers]
    memory = [part.to(device) for part in memory]
    pointers = torch.tensor([part.data_ptr() for part in memory], device=device)
    wanted = rows_of_peers(peers, slots, case[4])
    out = torch.full(wanted.shape, -1, dtype=wanted.dtype, device=device)
    rows_of_pointers(pointers, OFFSET, case[1], slots.to(device), out, case[4])
    found = out.cpu()
    if not found.numel():
        return [0.0]
    apart = (found.isnan() != wanted.isnan()).any()
    return [torch.inf if apart else float((found - wanted).nan_to_num().abs().max())]


def test_kernel_equals_formula_in_the_interpreter() -> None:
    """Every bit: numbers are integers, and so are their sums."""
    assert numbers_of("tests.kernels.test_peer_gather") == [0.0] * len(CASES)


@pytest.mark.parametrize(("dtype", "parts"), [("bf16", 1), ("bf16", 2), ("fp32", 1), ("i32", 1)])
def test_rows_move_16_bytes_at_a_time(dtype: str, parts: int) -> None:
    """What else the kernel reads, slots and addresses, has 8 bytes."""
    module = pytest.importorskip("dtron.kernels.peer_gather_triton")
    found = accesses_of(
        module.pulled_kernel,
        {"pointers": "*i64", "slots": "*i64", "out": f"*{dtype}"},
        {"PARTS": parts, "WIDE": False, "ROWS": ROWS, "BLOCK": BLOCK},
        {"n", "n_rows", "each"},
        WARPS,
    )
    assert set(found) == {"ld.global.b64", "ld.global.v4.b32", "st.global.v4.b32"}
    assert found["ld.global.v4.b32"] == parts * found["st.global.v4.b32"]


def test_rows_in_float8_move_as_widely() -> None:
    """Besides slots and addresses there are scales, of 4 bytes."""
    module = pytest.importorskip("dtron.kernels.peer_gather_triton")
    found = accesses_of(
        module.pulled_packed_kernel,
        {"pointers": "*i64", "slots": "*i64", "out": "*bf16"},
        {"ROWS": ROWS, "TILE": TILE, "BLOCKS": BLOCK // TILE},
        {"n", "n_rows", "each"},
        WARPS,
    )
    assert found["st.global.v4.b32"]
    assert not [name for name in found if name.endswith((".b8", ".b16"))]


@pytest.mark.gpu
@pytest.mark.parametrize("case", ON_GPU, ids=str)
def test_kernel_equals_formula_on_a_gpu(case: tuple) -> None:
    assert differences(case, "cuda") == [0.0]


if __name__ == "__main__":
    print(*(figure for case in CASES for figure in differences(case, "cpu")))
