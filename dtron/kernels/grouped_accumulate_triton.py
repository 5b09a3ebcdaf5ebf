"""The Triton kernel of `dtron/kernels/grouped_accumulate.py`."""

# pyright: reportMissingImports=false
from collections.abc import Callable, Mapping
from typing import Any

import triton
import triton.language as tl

# (TILE_M, TILE_K, warps, stages). TILE_N is the same in all, and so is the order of each sum.
_TILES = ((128, 256, 8, 3), (256, 128, 8, 3), (128, 128, 4, 3), (128, 128, 8, 4))
_CONFIGS = [
    triton.Config({"TILE_M": m, "TILE_K": k, "TILE_N": 64}, num_warps=warps, num_stages=stages)
    for m, k, warps, stages in _TILES
]


def grid(experts: int, m: int, k: int) -> Callable[[Mapping[str, Any]], tuple[int, int]]:
    """Return the launch grid by tile sizes: tiles of an expert's matrix (m, k), experts."""
    return lambda tile: (triton.cdiv(m, tile["TILE_M"]) * triton.cdiv(k, tile["TILE_K"]), experts)


@triton.jit
def grouped_gemm_tile(
    total, grad, x, offsets, M, K, ADD: tl.constexpr,  # noqa: N803
    TILE_M: tl.constexpr, TILE_K: tl.constexpr, TILE_N: tl.constexpr,  # noqa: N803
):  # fmt: skip
    """Compute one tile of an expert's matrix (M, K), and write it or add it to `total`."""
    expert, tile, tiles = tl.program_id(1), tl.program_id(0), tl.cdiv(M, TILE_M)
    row = tl.load(offsets + expert - 1, mask=expert > 0, other=0)
    end = tl.load(offsets + expert)
    m = (tile % tiles) * TILE_M + tl.arange(0, TILE_M)
    k = (tile // tiles) * TILE_K + tl.arange(0, TILE_K)
    n = row + tl.arange(0, TILE_N).to(tl.int64)
    grads = grad + n[:, None] * M + m[None, :]
    inputs = x + n[:, None] * K + k[None, :]
    result = tl.zeros((TILE_M, TILE_K), dtype=tl.float32)
    for start in range(row, end, TILE_N):
        # Masked in both: rows of no expert may be NaN.
        inside = (start + tl.arange(0, TILE_N) < end)[:, None]
        g = tl.load(grads, mask=inside & (m < M)[None, :], other=0.0)
        h = tl.load(inputs, mask=inside & (k < K)[None, :], other=0.0)
        result = tl.dot(tl.trans(g), h, result)
        grads += TILE_N * M
        inputs += TILE_N * K
    at = total + expert.to(tl.int64) * M * K + m[:, None].to(tl.int64) * K + k[None, :]
    inside = (m < M)[:, None] & (k < K)[None, :]
    if ADD:
        result += tl.load(at, mask=inside)
    tl.store(at, result, mask=inside)


# Tiles are timed in the first call, which then restores the sum.
_tuned = triton.autotune(configs=_CONFIGS, key=["M", "K"], restore_value=["total"])
kernel = _tuned(grouped_gemm_tile)
